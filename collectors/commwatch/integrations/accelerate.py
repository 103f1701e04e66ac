"""commwatch's figures in the trackers of Hugging Face's ``Accelerator``."""

from __future__ import annotations

from accelerate import Accelerator

import commwatch
from commwatch.integrations import checked


class CommwatchLogger:
    """Logs ``commwatch.metrics()`` with ``accelerator.log`` every ``every_n_steps`` steps.

    Example: ``log = CommwatchLogger(accelerator)`` after ``accelerator.init_trackers(...)``, and ``log.step(step)`` in the training loop.
    """

    def __init__(self, accelerator: Accelerator, every_n_steps: int = 50) -> None:
        self._accelerator, self._every = accelerator, checked(every_n_steps)
        if accelerator.is_main_process:
            commwatch.metrics()

    def step(self, step: int) -> None:
        """Log the figures if it is time; ``step`` is the number of the training step."""
        if self._accelerator.is_main_process and step % self._every == 0 and (figures := commwatch.metrics()):
            self._accelerator.log(figures, step=step)
