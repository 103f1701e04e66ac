"""A process in which there has been a sub-interpreter, as some libraries make one."""

import sys

if sys.version_info >= (3, 13):
    import _interpreters as interpreters
else:
    import _xxsubinterpreters as interpreters

import torch
import torch.distributed as dist
from common import say


def main() -> None:
    interpreters.destroy(interpreters.create())
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    dist.all_reduce(torch.ones(4))
    dist.destroy_process_group()
    say("done")


if __name__ == "__main__":
    main()
