"""A callback for Hugging Face's ``Trainer`` that logs commwatch's figures where the trainer reports."""

from __future__ import annotations

from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

import commwatch
from commwatch.integrations import checked


class CommwatchCallback(TrainerCallback):
    """Logs ``commwatch.metrics()`` every ``every_n_steps`` steps on global rank 0, to all that ``report_to`` names.

    Example: ``trainer.add_callback(CommwatchCallback(trainer))``. It needs the trainer because a callback has no access to the loggers.
    """

    def __init__(self, trainer: Trainer, every_n_steps: int = 50) -> None:
        self._trainer, self._every = trainer, checked(every_n_steps)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Begin to follow the agent, so that the first figures are known early."""
        if state.is_world_process_zero:
            commwatch.metrics()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Log the figures."""
        if state.is_world_process_zero and state.global_step % self._every == 0 and (figures := commwatch.metrics()):
            self._trainer.log(figures)
