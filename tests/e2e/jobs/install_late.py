"""The probe is installed by hand, after the world has been used and before another group is made."""

import os

import torch
import torch.distributed as dist
from common import begin, end

import commwatch


def main() -> None:
    begin()
    dist.all_reduce(torch.ones(2))
    expected = "EXPECT_OFF" not in os.environ
    assert commwatch.install() == expected
    assert commwatch.install() == expected
    dist.all_reduce(torch.ones(2))
    group = dist.new_group([0, 1])
    dist.all_reduce(torch.ones(2), group=group)
    end()
    commwatch.uninstall()


if __name__ == "__main__":
    main()
