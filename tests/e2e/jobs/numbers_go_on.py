"""Two ranks whose group ``data`` has made nearly 2**32 collectives, as far as the hook knows. Arguments: what they do with it, the library of
``first_number.cpp`` for the native hook.

``all``: six collectives. ``counted``: the same once they are only counted, in two parts that are written one after the other. ``hang``: rank 1 does
not come to the one with number 0.
"""

import ctypes
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from common import begin, end

from commwatch.probe import torch_collectives
from commwatch.wire.modes import COUNTERS
from commwatch.wire.ring import MODE
from commwatch.wire.ring_reader import RingReader

FIRST = (1 << 32) - 3


def begin_late(probe: Any) -> None:
    """Let the numbers of groups that are made from now on begin at ``FIRST``."""
    if probe.hook == "native":
        library, describe = ctypes.CDLL(sys.argv[2]), probe._library.describe_group
        library.first_number.argtypes = [ctypes.c_void_p, ctypes.c_uint32]

        def described(handle: int, *about: Any) -> None:
            describe(handle, *about)
            library.first_number(handle, FIRST)

        probe._library.describe_group = described
    else:
        from commwatch.probe.torch_groups import numbers_from

        add = probe.groups.add

        def added(pg: Any) -> Any:
            group, entry = add(pg)
            group.seqs[None] = numbers_from(FIRST)
            return group, entry

        probe.groups.add = added


def until_only_counted(probe: Any) -> None:
    """Communicate until the probe of every rank only counts."""
    mode = torch.zeros(1)
    while mode.item() < COUNTERS:
        mode.fill_(RingReader(probe.ring.path).counter(MODE))
        dist.all_reduce(mode, op=dist.ReduceOp.MIN)
        time.sleep(0.01)


def main() -> None:
    rank, _ = begin()
    dist.barrier()
    probe, does = torch_collectives._probe, sys.argv[1]
    if does == "counted":
        until_only_counted(probe)
    begin_late(probe)
    data = dist.new_group([0, 1], group_desc="data")
    for number in range(6):
        if number == 2 and does == "counted":
            time.sleep(3)  # they are written every second
        if number == 3 and does == "hang" and rank == 1:
            time.sleep(600)
        dist.all_reduce(torch.ones(1000), group=data)
    end()


if __name__ == "__main__":
    main()
