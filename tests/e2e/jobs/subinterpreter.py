"""A process in which there has been a sub-interpreter, as some libraries make one."""

import sys
from importlib import import_module

import torch
import torch.distributed as dist
from common import say
from torch._C._distributed_c10d import HashStore


def main() -> None:
    interpreters = import_module("_interpreters" if sys.version_info >= (3, 13) else "_xxsubinterpreters")
    interpreters.destroy(interpreters.create())
    dist.init_process_group("gloo", rank=0, world_size=1, store=HashStore())
    dist.all_reduce(torch.ones(4))
    dist.destroy_process_group()
    say("done")


if __name__ == "__main__":
    main()
