"""Training loops in the style of PyTorch's examples and nanoGPT; the argument is the name of one."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from common import STEPS, batches, count_messages, made, show, tell
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Pictures(Dataset[tuple[torch.Tensor, int]]):
    """Random pictures; the index of a picture is its seed."""

    def __init__(self, number: int, shape: tuple[int, ...], classes: int) -> None:
        self.number, self.shape, self.classes = number, shape, classes

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        source = torch.Generator().manual_seed(index)
        return torch.randn(self.shape, generator=source), index % self.classes


def mnist() -> None:
    """Train a convolutional network with data loader workers, an evaluation and a checkpoint after each epoch."""
    dist.init_process_group("gloo")
    rank, data = dist.get_rank(), Pictures(64, (1, 28, 28), 10)
    sampler: DistributedSampler[tuple[torch.Tensor, int]] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler, num_workers=2)
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3, 2), nn.ReLU(), nn.Conv2d(4, 8, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10)
    )
    model, steps = DistributedDataParallel(net), 0
    optimizer = torch.optim.Adadelta(model.parameters(), 1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            steps += 1
            show(loss)
        schedule.step()
        with torch.no_grad():
            right = sum((model(x).argmax(1) == y).sum() for x, y in loader)
        dist.all_reduce(right)
        show(right)
        if rank == 0:
            torch.save(model.state_dict(), Path(os.environ["WITNESS_DIR"]) / "checkpoint.pt")
        dist.barrier()
    tell(steps)
    dist.destroy_process_group()


def imagenet() -> None:
    """Train a network with buffers that DDP broadcasts and a loss that is reduced after each epoch; ``mp.spawn`` starts the ranks."""
    mp.spawn(_imagenet, (os.environ["MASTER_PORT"],), nprocs=2)


def _imagenet(rank: int, port: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    data = Pictures(48, (3, 16, 16), 5)
    sampler: DistributedSampler[tuple[torch.Tensor, int]] = DistributedSampler(data)
    blocks = [nn.Sequential(nn.Conv2d(8, 8, 3, 1, 1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(3)]
    model = DistributedDataParallel(
        nn.Sequential(nn.Conv2d(3, 8, 7, 2), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))
    )
    optimizer, steps = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4), 0
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(data, batch_size=4, sampler=sampler):
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            steps += 1
            show(loss.detach())
        total = torch.tensor([float(loss), 1.0])
        dist.all_reduce(total)
        show(total[0])
    tell(steps)
    dist.destroy_process_group()


def nanogpt() -> None:
    """Train with gradient accumulation (DDP's synchronisation switched off), clipping, two parameter groups and evaluations in between."""
    dist.init_process_group("gloo")
    torch.manual_seed(1337)
    layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
    net = nn.Sequential(
        nn.Embedding(64, 32), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(32, 64)
    )
    decayed = [p for p in net.parameters() if p.dim() > 1]
    plain = [p for p in net.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}], 1e-3
    )
    model, source = DistributedDataParallel(net), torch.Generator().manual_seed(dist.get_rank())

    def loss_of() -> torch.Tensor:
        rows = torch.randint(0, 64, (4, 17), generator=source)
        return nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())

    for step in range(10):
        if step % 4 == 0:
            with torch.no_grad():
                show(sum(loss_of() for _ in range(2)) / 2)
        for micro in range(4):
            model.require_backward_grad_sync = micro == 3
            loss = loss_of() / 4
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        show(loss.detach() * 4)
    tell(10)
    dist.destroy_process_group()


def pipelining() -> None:
    """Train two stages with the schedule 1F1B of ``torch.distributed.pipelining``."""
    dist.init_process_group("gloo")
    count_messages()
    rank, layers = dist.get_rank(), list(made())
    part = nn.Sequential(*(layers[:2] if rank == 0 else layers[2:]))
    optimizer = torch.optim.SGD(part.parameters(), 0.01)
    stage = PipelineStage(part, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)
    for x, y in batches(0, STEPS, size=8):
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=y, losses=losses)
        optimizer.step()
        for loss in losses:
            show(loss.detach())
    tell(STEPS)
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    globals()[sys.argv[1]]()
