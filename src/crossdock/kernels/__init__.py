"""Triton kernels, one movement a file: purpose, kernel, launcher.

A kernel is a plain function. `launch.py` wraps it for the device at hand: compiled on a GPU, in Triton's interpreter
on a CPU, both in one process. Nothing here knows of process groups or of autograd.
"""
