"""Ranks that say they compute on a GPU each: ``torch.cuda`` is made up, for there may be none here.

Until the second step CUDA has not begun; whoever asks it before makes the job fail.
"""

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from common import begin, end

rank, _ = begin()
begun = False


def properties(index: int) -> Any:
    """Of the device that this rank computes on."""
    assert begun, "CUDA was begun with"
    return SimpleNamespace(uuid=f"5a0e1f2c-3b4d-4e6f-8a9b-00000000000{7 - index}")


made_up: dict[str, Any] = {
    "_is_compiled": lambda: True,
    "is_initialized": lambda: begun,
    "current_device": lambda: 0,
    "device_count": lambda: 8,
    "memory_allocated": lambda index: 512 * (index == rank),
    "get_device_properties": properties,
}
before = {name: getattr(torch.cuda, name) for name in made_up}
parameter = torch.nn.Parameter(torch.ones(4))
optimizer = torch.optim.SGD([parameter], lr=0.1)
for name, function in made_up.items():
    setattr(torch.cuda, name, function)
for step in range(4):
    begun = step >= 2
    gradient = torch.ones(4)
    dist.all_reduce(gradient)
    parameter.grad = gradient
    optimizer.step()
for name, function in before.items():
    setattr(torch.cuda, name, function)
end()
