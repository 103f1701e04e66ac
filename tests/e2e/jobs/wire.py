"""Collectives of one size among all ranks, each in a group of its own; says what the host's device sent meanwhile, by op."""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from common import begin, end, say

NUMBERS, TIMES = 1_200_000, 3
_COUNTER = Path("/sys/class/net") / os.environ["GLOO_SOCKET_IFNAME"] / "statistics" / "tx_bytes"


def main() -> None:
    _, size = begin()
    whole, part = torch.ones(NUMBERS), torch.ones(NUMBERS // size)
    sent = {}
    for op in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"):
        group = dist.new_group(list(range(size)), group_desc=op)
        # Before the barrier: after it, another rank on this host may already send.
        before = int(_COUNTER.read_text())
        dist.barrier()
        for _ in range(TIMES):
            do(op, group, whole, part)
        dist.barrier()
        sent[op] = int(_COUNTER.read_text()) - before
    say(sent)
    end()


def do(op: str, group: "dist.ProcessGroup", whole: torch.Tensor, part: torch.Tensor) -> None:
    if op == "all_reduce":
        dist.all_reduce(whole, group=group)
    elif op == "all_gather":
        dist.all_gather_into_tensor(whole, part, group=group)
    elif op == "reduce_scatter":
        dist.reduce_scatter_tensor(part, whole, group=group)
    elif op == "all_to_all":
        dist.all_to_all_single(torch.empty_like(whole), whole, group=group)
    elif dist.get_rank() == 0:
        for peer in range(1, dist.get_world_size()):
            dist.send(whole, peer, group=group)
    else:
        dist.recv(whole, 0, group=group)


if __name__ == "__main__":
    main()
