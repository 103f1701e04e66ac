"""Train a small transformer with DistributedDataParallel. Plain PyTorch, without any commwatch code.

torchrun --nproc-per-node 2 examples/train_ddp.py --steps 50
"""

import argparse

import torch
import torch.distributed as dist
from common import Transformer, next_token_loss, start
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    """Train for a number of steps on made-up text."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch", type=int, default=4)
    arguments = parser.parse_args()

    device = start()
    model = DistributedDataParallel(Transformer().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    text = torch.Generator().manual_seed(dist.get_rank())
    for step in range(1, arguments.steps + 1):
        tokens = torch.randint(0, 32, (arguments.batch, 65), generator=text).to(device)
        loss = next_token_loss(model(tokens[:, :-1]), tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    dist.barrier()
    del model, optimizer
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
