"""Train a small transformer with FSDP2 (fully_shard), two micro-batches a step.

torchrun --nproc-per-node 2 examples/train_fsdp.py --steps 20
"""

import argparse

import torch
import torch.distributed as dist
from common import Transformer, next_token_loss, start
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

MICRO_BATCHES = 2


def main() -> None:
    """Train for a number of steps on made-up text."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=4)
    arguments = parser.parse_args()

    device = start()
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("dp",))
    model = Transformer().to(device)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    text = torch.Generator().manual_seed(dist.get_rank())
    for step in range(1, arguments.steps + 1):
        for _ in range(MICRO_BATCHES):
            tokens = torch.randint(0, 32, (arguments.batch, 65), generator=text).to(device)
            loss = next_token_loss(model(tokens[:, :-1]), tokens) / MICRO_BATCHES
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step % 10 == 0:
            print(f"step {step}: loss {loss.item() * MICRO_BATCHES:.3f}", flush=True)
    dist.barrier()
    del model, optimizer
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
