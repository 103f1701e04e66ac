"""The callbacks for training frameworks, with stand-ins for the frameworks: tests/frameworks has the real ones."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import pytest

FRAMEWORKS = {
    "accelerate": ("accelerate", "CommwatchLogger"),
    "lightning": ("lightning.pytorch", "CommwatchCallback"),
    "transformers": ("transformers", "CommwatchCallback"),
}
NAMES = "Accelerator Callback LightningModule Trainer TrainerCallback TrainerControl TrainerState TrainingArguments"


@pytest.mark.parametrize("name", FRAMEWORKS)
@pytest.mark.parametrize("every", [0, -5])
def test_wrong_interval(monkeypatch: pytest.MonkeyPatch, name: str, every: int) -> None:
    """A number of steps below 1 is refused when the callback is made, not within the training."""
    framework, made = FRAMEWORKS[name]
    parts = framework.split(".")
    for depth in range(1, len(parts) + 1):
        stand_in = ModuleType(".".join(parts[:depth]))
        for each in NAMES.split():
            setattr(stand_in, each, type(each, (), {}))
        monkeypatch.setitem(sys.modules, stand_in.__name__, stand_in)
    monkeypatch.delitem(sys.modules, f"commwatch.integrations.{name}", raising=False)
    callback = getattr(importlib.import_module(f"commwatch.integrations.{name}"), made)
    del sys.modules[f"commwatch.integrations.{name}"]  # it has the stand-ins
    given = () if name == "lightning" else (None,)
    with pytest.raises(ValueError, match=f"^every_n_steps is {every}; it must be 1 or more$"):
        callback(*given, every_n_steps=every)
