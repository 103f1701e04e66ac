"""PyTorch Lightning; the argument is the strategy, or ``gan`` for two optimizers that take turns with the strategy ddp."""

import os
import sys
from typing import Any

import lightning
import torch
from common import FEATURES, STEPS, batches, made, show, tell
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = made()

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        show(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 0.01)

    def train_dataloader(self) -> Any:
        return DataLoader(batches(self.global_rank), batch_size=None)

    def on_train_end(self) -> None:
        tell(self.trainer.global_step)


class Sharded(Regression):
    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for layer in self.net:
            if list(layer.parameters()):
                fully_shard(layer, mesh=mesh)
        fully_shard(self.net, mesh=mesh)


class Adversarial(Regression):
    """A GAN: two discriminator steps for each step of the generator."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.critic = nn.Linear(FEATURES, 1)
        self.net = nn.Linear(FEATURES, FEATURES)
        self.cycles = 0

    def training_step(self, batch: Any, index: int) -> None:
        x, _ = batch
        generator, critic = self.optimizers()
        for _ in range(2):
            critic.zero_grad()
            loss = (self.critic(self.net(x).detach()) - self.critic(x)).mean()
            self.manual_backward(loss)
            critic.step()
        generator.zero_grad()
        loss = -self.critic(self.net(x)).mean()
        self.manual_backward(loss)
        generator.step()
        show(loss.detach())
        self.cycles += 1

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(self.net.parameters(), 0.01), torch.optim.Adam(self.critic.parameters(), 0.01)], []

    def on_train_end(self) -> None:
        assert self.trainer.global_step == 3 * self.cycles  # Lightning counts the calls of all optimizers
        tell(self.cycles)


def main() -> None:
    kind = sys.argv[1]
    module, strategy = Regression(), kind
    if kind == "gan":
        module, strategy = Adversarial(), "ddp_find_unused_parameters_true"
    elif kind == "fsdp2":
        module, strategy = Sharded(), ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=1,
        limit_train_batches=STEPS,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module)
    if trainer.global_rank == 0:
        os.write(1, f"fitted {trainer.global_step}\n".encode())


if __name__ == "__main__":
    main()
