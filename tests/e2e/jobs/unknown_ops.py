"""Operators that are not in the table of operations, in two rings of one process."""

from typing import Any

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # makes the backend known
from common import say
from torch.testing._internal.distributed.fake_pg import FakeStore

GROUP = "__torch__.torch.classes.c10d.ProcessGroup process_group"
OPS = "one_", "other_"


def main() -> None:
    library: Any = torch.library.Library("c10d", "FRAGMENT")
    for name in OPS:
        library.define(f"{name}(Tensor tensor, {GROUP}) -> ()")
        library.impl(name, lambda tensor, group: None, "CPU")
    import commwatch

    commwatch.install()
    for size, names in ((2, OPS[:1]), (4, OPS[::-1])):
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
        world: Any = dist.group.WORLD
        for name in names:
            getattr(torch.ops.c10d, name)(torch.ones(4), world.boxed())
        dist.destroy_process_group()
    say("done")


if __name__ == "__main__":
    main()
