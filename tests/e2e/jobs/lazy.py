"""A backend in C++ whose works only know that they are over when asked. Arguments: its library, what to do."""

import ctypes
import os
import sys
import time

import torch
import torch.distributed as dist
from common import say

import commwatch
from commwatch.probe.torch_collectives import ring_file


def main() -> None:
    torch.set_num_threads(1)
    lazy = ctypes.CDLL(sys.argv[1])
    dist.init_process_group("gloo", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
    group = dist.new_group([0])
    lazy.lazy_use(group.group_name.encode())
    works = [dist.all_reduce(torch.ones(n + 1), group=group, async_op=True) for n in range(4)]
    if sys.argv[2] == "leave":
        os.write(1, b"job done\n")
        sys.exit(3)
    completed = [work.is_completed() for work in works if work is not None]
    lazy.lazy_complete(3, 1)
    ring = ring_file()
    while ring is not None and int.from_bytes(ring.read_bytes()[64:72], "little") < 3:  # its cursor
        time.sleep(0.01)
    raised = []
    for work in works[:3]:
        assert work is not None
        try:
            work.wait()
        except RuntimeError as error:
            raised.append(str(error))
    del work, works[:3]
    while lazy.lazy_alive() > 1:
        time.sleep(0.01)
    commwatch.uninstall()
    works.clear()
    while lazy.lazy_alive():
        time.sleep(0.01)
    say([completed, raised])
    dist.destroy_process_group()
    os.write(1, b"job done\n")


if __name__ == "__main__":
    main()
