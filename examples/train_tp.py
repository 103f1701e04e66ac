"""Tensor parallelism within a stage and a pipeline-like hand-over between stages, on a 2 x N device mesh.

torchrun --nproc-per-node 4 examples/train_tp.py --steps 20

Each stage is an MLP split over its "tp" ranks. Stage 0 sends its activations to stage 1 with batch_isend_irecv, and gets
their gradients back the same way.
"""

import argparse
from collections.abc import Callable

import torch
import torch.distributed as dist
from common import start
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

WIDTH, BATCH, STAGES = 256, 32, 2


def exchange(kind: Callable[..., dist.Work | None], tensor: torch.Tensor, peer: int) -> None:
    """Send or receive one tensor, as pipeline schedules do."""
    for work in dist.batch_isend_irecv([dist.P2POp(kind, tensor, peer)]):
        work.wait()


def main() -> None:
    """Train for a number of steps on made-up numbers."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()

    device = start()
    per_stage = dist.get_world_size() // STAGES
    mesh = init_device_mesh(device.type, (STAGES, per_stage), mesh_dim_names=("pp", "tp"))
    stage, peer = mesh.get_local_rank("pp"), (dist.get_rank() + per_stage) % dist.get_world_size()
    model = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH)).to(device)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    numbers = torch.Generator().manual_seed(0)
    for step in range(1, arguments.steps + 1):
        given = torch.randn(BATCH, WIDTH, generator=numbers).to(device)
        if stage == 0:
            out = model(given)
            exchange(dist.isend, out.detach(), peer)
            gradient = torch.empty_like(out)
            exchange(dist.irecv, gradient, peer)
            out.backward(gradient)
        else:
            received = torch.empty(BATCH, WIDTH, device=device)
            exchange(dist.irecv, received, peer)
            received.requires_grad_()
            loss = (model(received) - given).pow(2).mean()
            loss.backward()
            assert received.grad is not None
            exchange(dist.isend, received.grad, peer)
        optimizer.step()
        optimizer.zero_grad()
        if stage == 1 and mesh.get_local_rank("tp") == 0 and step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    dist.barrier()
    del model, optimizer
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
