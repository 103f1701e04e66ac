"""Fails in its first life, trains in the second; for an elastic launcher."""

import os
import sys

import torch
import torch.distributed as dist
from common import begin, end


def main() -> None:
    begin()
    for _ in range(5):
        dist.all_reduce(torch.ones(4))
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        sys.exit(3)
    end()


if __name__ == "__main__":
    main()
