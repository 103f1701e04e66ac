"""Which thread trains, and which operations therefore do not hold up the training: ``native/training.h`` in Python."""

from __future__ import annotations

from threading import get_ident

import torch

#: Number of the backward pass that this thread runs; -1: none.
_backward = torch._C._current_graph_task_id


class TrainingThread:
    """The thread that marks the steps."""

    def __init__(self) -> None:
        #: 0: there was no mark.
        self._thread = 0
        self._communicates = False

    def here(self) -> None:
        """Note that this thread marks a step."""
        self._thread = get_ident()

    def is_elsewhere(self, on_device: bool) -> bool:
        """Note that this thread launches an operation; return whether it is not the one that trains, and runs no backward pass.

        That is not known before the first mark, and where the thread that marks steps launches none, nor any on a device: then another one may do
        so for it.
        """
        if not self._thread:
            return False
        if on_device or get_ident() == self._thread:
            self._communicates = True
            return False
        return self._communicates and _backward() < 0
