"""Ray Train with two workers."""

import os
from pathlib import Path

import ray
import torch
from common import batches, made, show, tell
from ray import train
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model
from torch import nn


def loop() -> None:
    torch.set_num_threads(1)
    net, steps = prepare_model(made()), 0
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    for x, y in batches(train.get_context().get_world_rank()):
        loss = nn.functional.mse_loss(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        steps += 1
        show(loss)
    tell(steps)


def main() -> None:
    passed = {name: value for name, value in os.environ.items() if name.startswith(("COMMWATCH", "WITNESS", "TORCH_"))}
    environment = {"env_vars": {**passed, "PYTHONPATH": str(Path(__file__).parent)}}
    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False, runtime_env=environment)
    where = RunConfig(storage_path=os.environ["WITNESS_DIR"])
    TorchTrainer(
        loop, torch_config=TorchConfig(backend="gloo"), scaling_config=ScalingConfig(num_workers=2), run_config=where
    ).fit()
    ray.shutdown()


if __name__ == "__main__":
    main()
