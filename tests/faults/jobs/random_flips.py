"""Data-parallel trainings one after another, in each of which one random bit flips on one rank, in a weight, a gradient or a state of the optimizer.

Arguments: how many trainings, and a seed. Rank 0 prints what has flipped, and what became of it: the ranks compare the bytes of their weights after each
step. Then the job goes on until it is killed. The ranks meet in the file ``STORE`` of the environment.
"""

import hashlib
import json
import os
import random
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

#: Steps after the one with the flip.
AFTER = 3
WIDTH = 24
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Training:
    """A model and its optimizer, chosen by the random numbers that all ranks share.

    Args:
        number: of the training; the parameters have it in their names.
    """

    def __init__(self, number: int, chosen: random.Random) -> None:
        torch.manual_seed(chosen.randrange(1 << 30))
        self.dtype = chosen.choice([torch.float32, torch.float32, torch.float64, torch.bfloat16])
        hidden = chosen.choice([7, 32, 65])
        layers = [nn.Linear(WIDTH, hidden), nn.LayerNorm(hidden), nn.ReLU(), nn.Linear(hidden, 5)]
        made = nn.ModuleDict({f"t{number}": nn.Sequential(*layers)}).to(self.dtype)
        self.model = DistributedDataParallel(Only(made))
        self.optimizer: torch.optim.Optimizer
        if chosen.random() < 0.5:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        else:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)

    def backward(self) -> None:
        """Gradients of this rank's own data."""
        self.model(torch.randn(8, WIDTH, dtype=self.dtype)).square().mean().backward()

    def step(self) -> None:
        """A step on them."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def target(self, what: str, name: str) -> torch.Tensor:
        """The tensor in which a bit flips."""
        parameter = dict(self.model.named_parameters())[name]
        if what == "gradient":
            assert parameter.grad is not None
            return parameter.grad
        if what == "state":
            state = self.optimizer.state[parameter]
            found: torch.Tensor = state["exp_avg"] if "exp_avg" in state else state["momentum_buffer"]
            return found
        return parameter.detach()

    def digests(self) -> dict[str, str]:
        """Of the bytes of each weight."""
        named = self.model.named_parameters()
        return {
            name: hashlib.sha256(bytes(each.detach().reshape(-1).view(torch.uint8).numpy())).hexdigest()
            for name, each in named
        }


class Only(nn.Module):
    """A dictionary of one module that can be called."""

    def __init__(self, modules: nn.ModuleDict) -> None:
        super().__init__()
        self.all = modules

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """Call it."""
        (only,) = self.all.values()
        found: torch.Tensor = only(given)
        return found


def flip(tensor: torch.Tensor, chosen: random.Random) -> tuple[int, int]:
    """Flip a random bit of a random element; return both."""
    size = tensor.element_size()
    element, bit = chosen.randrange(tensor.numel()), chosen.randrange(8 * size)
    mask = 1 << bit if bit < 8 * size - 1 else -1 << bit
    tensor.reshape(-1).view(INTEGERS[size])[element] ^= mask
    return element, bit


def trained(number: int, chosen: random.Random) -> dict[str, Any]:
    """Train, and flip a bit on one rank; return what has flipped and since which step which weights differ."""
    training = Training(number, chosen)
    names = [name for name, _ in training.model.named_parameters()]
    what, name, at = (
        chosen.choice(["weight", "weight", "gradient", "state"]),
        chosen.choice(names),
        chosen.randrange(2, 7),
    )
    rank = chosen.randrange(dist.get_world_size())
    found: dict[str, Any] = {"number": number, "what": what, "rank": rank, "name": name, "at": at, "step": None}
    torch.manual_seed(1000 * number + dist.get_rank())
    shared = chosen.randrange(1 << 30)
    for step in range(1, at + AFTER + 1):
        training.backward()
        if step == at + 1:
            tensor = training.target(what, name)
            element, bit = flip(tensor if dist.get_rank() == rank else tensor.clone(), random.Random(shared))
            found |= {"dtype": str(tensor.dtype), "element": element, "bit": bit}
        training.step()
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, training.digests())
        differ = [name for name in everyone[0] if len({digests[name] for digests in everyone}) > 1]
        if differ and found["step"] is None:
            found |= {"step": step, "names": differ}
    return found | {"steps": at + AFTER}


def main() -> None:
    count, seed = int(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{os.environ['STORE']}", rank=rank, world_size=size)
    chosen = random.Random(seed)
    for number in range(count):
        found = trained(number, chosen)
        if rank == 0:
            print(json.dumps(found), flush=True)
    while True:
        dist.barrier()
        time.sleep(0.2)


if __name__ == "__main__":
    main()
