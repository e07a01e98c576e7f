"""Memory that the ranks of one host see alike: one allocation a rank, mapped by all, with tables of addresses.

It knows nothing of what is moved through it: no kernels, no layouts, no calls.
"""
