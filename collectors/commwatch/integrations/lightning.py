"""A callback for Lightning 2.x that logs commwatch's figures with the loggers of the ``Trainer``."""

from __future__ import annotations

from typing import Any

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError:  # installed under its other name
    from pytorch_lightning import Callback, LightningModule, Trainer

import commwatch
from commwatch.integrations import checked


class CommwatchCallback(Callback):
    """Logs ``commwatch.metrics()`` every ``every_n_steps`` training steps, on global rank 0.

    Example: ``Trainer(callbacks=[CommwatchCallback()], logger=WandbLogger())``.
    """

    def __init__(self, every_n_steps: int = 50) -> None:
        self._every, self._latest = checked(every_n_steps), -1

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to follow the agent, so that the first figures are known early."""
        if trainer.is_global_zero:
            commwatch.metrics()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any, **__: Any) -> None:
        """Log the figures."""
        step = trainer.global_step
        if not trainer.is_global_zero or step % self._every or step == self._latest:
            return
        self._latest = step  # with accumulated gradients, a step has several batches
        if figures := commwatch.metrics():
            for logger in trainer.loggers:
                logger.log_metrics(figures, step)
