"""1F1B over all ranks as stages, forward and backward of known length: so many micro-batches a step, so many steps."""

import sys
import time

import torch
import torch.distributed as dist
from common import begin, end

import commwatch

FORWARD_S, BACKWARD_S = 0.01, 0.02


def main() -> None:
    batches, steps = int(sys.argv[1]), int(sys.argv[2])
    stage, stages = begin()
    pipe = dist.new_group(list(range(stages)), group_desc="pipeline")
    data = torch.ones(256)
    sent: list[dist.Work] = []

    def receive(peer: int) -> None:
        if 0 <= peer < stages:
            dist.recv(torch.empty(256), peer, group=pipe)

    def send(peer: int) -> None:
        if 0 <= peer < stages:
            work = dist.isend(data, peer, group=pipe)
            assert work is not None
            sent.append(work)

    def forward() -> None:
        receive(stage - 1)
        time.sleep(FORWARD_S)
        send(stage + 1)

    def backward() -> None:
        receive(stage + 1)
        time.sleep(BACKWARD_S)
        send(stage - 1)

    ahead = min(stages - stage - 1, batches)
    for _ in range(steps):
        for _ in range(ahead):
            forward()
        for _ in range(batches - ahead):
            forward()
            backward()
        for _ in range(ahead):
            backward()
        for work in sent:
            work.wait()
        sent.clear()
        commwatch.step()
    end()


if __name__ == "__main__":
    main()
