"""A job with a late rank whose trackers get commwatch's figures; the argument is the framework, its logs are in the working directory."""

import sys
import time
from pathlib import Path
from typing import Any

import torch
from common import batches, made
from torch import nn
from torch.utils.data import DataLoader

import commwatch

#: Steps, enough for figures that are renewed every 5 s; rank 1 is late by so much in each.
STEPS, EVERY, LATE_S = 500, 10, 0.03
HERE = Path.cwd()


def come_late(rank: int) -> None:
    """Make rank 1 late."""
    time.sleep(LATE_S if rank == 1 else 0.0)


def with_lightning() -> None:
    """TensorBoard, W&B (offline) and MLflow (local files) of one Lightning trainer."""
    import lightning
    from lightning.pytorch.loggers import MLFlowLogger, TensorBoardLogger, WandbLogger

    from commwatch.integrations.lightning import CommwatchCallback

    class Regression(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = made()

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            come_late(self.global_rank)
            x, y = batch
            return nn.functional.mse_loss(self.net(x), y)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.01)

        def train_dataloader(self) -> Any:
            return DataLoader(batches(self.global_rank, STEPS), batch_size=None)

    loggers = [
        TensorBoardLogger(HERE / "tensorboard"),
        WandbLogger(offline=True, save_dir=HERE / "wandb", project="test"),
        MLFlowLogger(tracking_uri=f"file:{HERE / 'mlflow'}"),
    ]
    lightning.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, logger=loggers, callbacks=[CommwatchCallback(EVERY)],
        use_distributed_sampler=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    ).fit(Regression())  # fmt: skip


def with_transformers() -> None:
    """TensorBoard of Hugging Face's trainer."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

    from commwatch.integrations.transformers import CommwatchCallback

    class Late(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            come_late(args.process_index)

    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2))
    row = torch.arange(16)
    arguments = TrainingArguments(
        output_dir=str(HERE / "out"), max_steps=STEPS, per_device_train_batch_size=1, save_strategy="no", use_cpu=True,
        report_to=["tensorboard"], disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=[{"input_ids": row, "labels": row}] * 64, callbacks=[Late()])
    trainer.add_callback(CommwatchCallback(trainer, EVERY))
    trainer.train()


def with_accelerate() -> None:
    """TensorBoard of an accelerator."""
    from accelerate import Accelerator

    from commwatch.integrations.accelerate import CommwatchLogger

    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=HERE / "tensorboard")
    net = made()
    net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), 0.01))
    accelerator.init_trackers("test")
    log = CommwatchLogger(accelerator, EVERY)
    for number, (x, y) in enumerate(batches(accelerator.process_index, STEPS), 1):
        come_late(accelerator.process_index)
        accelerator.backward(nn.functional.mse_loss(net(x), y))
        optimizer.step()
        optimizer.zero_grad()
        log.step(number)
    accelerator.end_training()


if __name__ == "__main__":
    torch.set_num_threads(1)
    with commwatch.watch():
        {"lightning": with_lightning, "transformers": with_transformers, "accelerate": with_accelerate}[sys.argv[1]]()
