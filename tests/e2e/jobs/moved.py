"""A trainer that changes its directory before its first collective, as Hydra does, and again before its second world. Argument: where it starts."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # makes the backend known
from common import say
from torch.testing._internal.distributed.fake_pg import FakeStore

import commwatch
from commwatch.probe import torch_collectives


def main() -> None:
    os.chdir(sys.argv[1])
    commwatch.install()
    for size in (2, 4):
        Path("outputs").mkdir()
        os.chdir("outputs")
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
        dist.all_reduce(torch.ones(4))
        probe = torch_collectives._probe
        assert probe is not None
        assert probe.ring is not None
        say([str(probe.ring.path.parent), str(Path(probe._profiles._request).parent)])
        dist.destroy_process_group()
    Path("lost").mkdir()
    os.chdir("lost")
    Path("../lost").resolve().rmdir()
    commwatch.uninstall()
    say(commwatch.install())


if __name__ == "__main__":
    main()
