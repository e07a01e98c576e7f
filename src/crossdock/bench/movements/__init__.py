"""Measuring the movements of backends side by side: what `crossdock bench` runs on every rank.

workloads     what is moved: named sizes, and how tokens choose experts
problems      the tensors of a workload on every rank
traffic       which bytes have to move, and the floor below which no time can lie
ceilings      how fast this machine's links and memories are; link: the probe of the link between GPUs
contenders    which backend, with which rows: opened, and its operations ready to be called
expected      what must come out, in plain torch; checking: whether it did
clock         how a time is taken
cells         one contender in one workload, on one rank
figures       what was measured, put together from all ranks
"""

from __future__ import annotations
