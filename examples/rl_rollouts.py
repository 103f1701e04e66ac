"""Two trainers learn from what two other ranks try out (REINFORCE). Plain PyTorch, without any commwatch code.

torchrun --nproc-per-node 4 examples/rl_rollouts.py --rounds 5

Ranks 0 and 1 wait for the rollouts of ranks 2 and 3, train on them with DistributedDataParallel in a group of their own, and hand the new
weights to them. The policy writes sequences, and is rewarded for each token that is larger than the one before.
"""

import argparse
import time

import torch
import torch.distributed as dist
from common import start
from torch import nn
from torch.nn.parallel import DistributedDataParallel

TRAINERS, TOKENS, LENGTH, BATCH = 2, 32, 16, 64


def policy() -> nn.Sequential:
    """The distribution of the next token, by the one before."""
    return nn.Sequential(nn.Embedding(TOKENS, 128), nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, TOKENS))


@torch.no_grad()
def rollout(model: nn.Module, device: torch.device, seconds: float) -> torch.Tensor:
    """Sequences that the policy writes: [BATCH, LENGTH]; an environment takes its time for them."""
    tokens = torch.zeros(BATCH, LENGTH, dtype=torch.int64, device=device)
    for at in range(1, LENGTH):
        tokens[:, at] = torch.distributions.Categorical(logits=model(tokens[:, at - 1])).sample()
        time.sleep(seconds / LENGTH)
    return tokens


def loss_of(model: nn.Module, tokens: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Return the loss of REINFORCE, and the mean reward."""
    reward = (tokens[:, 1:] > tokens[:, :-1]).float()
    logits = model(tokens[:, :-1])
    taken = torch.distributions.Categorical(logits=logits).log_prob(tokens[:, 1:])
    return -(taken * (reward - reward.mean())).mean(), reward.mean().item()


def main() -> None:
    """Alternate rollouts and training."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=20, help="of training in each round")
    parser.add_argument("--longest", type=float, default=10.0, help="seconds that rollouts take, at most")
    arguments = parser.parse_args()

    device = start()
    rank, size = dist.get_rank(), dist.get_world_size()
    trainers = dist.new_group(range(TRAINERS), group_desc="trainers")
    model = policy().to(device)
    trained = DistributedDataParallel(model, process_group=trainers) if rank < TRAINERS else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(rank)
    for number in range(1, arguments.rounds + 1):
        made = torch.zeros(BATCH, LENGTH, dtype=torch.int64, device=device)
        if rank >= TRAINERS:
            made = rollout(model, device, (0.6 + 0.4 * torch.rand(()).item()) * arguments.longest)
        parts = [torch.empty_like(made) for _ in range(size)]
        dist.all_gather(parts, made)
        if rank < TRAINERS:
            reward = 0.0
            for _ in range(arguments.steps):
                loss, reward = loss_of(trained, torch.cat(parts[TRAINERS + rank :: TRAINERS]))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            if rank == 0:
                print(f"round {number}: reward {reward:.3f}", flush=True)
        for weights in model.parameters():
            dist.broadcast(weights.data, src=0)
    del trained, optimizer
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
