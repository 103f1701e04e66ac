"""A program for test_compiled_steps: it compiles optimizer steps, and prints what the hooks and Dynamo saw, as JSON."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from typing import Any

import torch

from commwatch.probe import torch_steps

STEPS = 3
#: What Dynamo logs of a frame that it compiles.
COMPILES = "torchdynamo start compiling "


class Own(torch.optim.Optimizer):
    """A user's optimizer, which Dynamo can trace as one graph, unlike those of torch."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.sub_(parameter.grad, alpha=group["lr"])


def frames() -> list[str]:
    """Return a list that gets a message of each frame that Dynamo is called for, whether it compiles the frame or skips it."""
    messages: list[str] = []
    handler, log = logging.Handler(), logging.getLogger("torch._dynamo.convert_frame")

    def emit(record: logging.LogRecord) -> None:
        if record.getMessage().startswith(("skipping: ", COMPILES)):
            messages.append(record.getMessage())

    handler.emit = emit  # type: ignore[method-assign]
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    return messages


def main() -> None:
    """Compile and run each case; print its marks, its error, whether Dynamo compiled anything, and which frames of ours it was called for."""
    from torch import _dynamo  # half of torch, which the tests that import this file do not need

    marks: list[int] = []
    hooks = torch_steps.StepHooks(lambda optimizer, began, ended, same_pass: marks.append(optimizer))
    hooks.install()
    seen = frames()
    model = torch.nn.Linear(4, 4)
    own, sgd = Own(model.parameters(), {"lr": 0.1}), torch.optim.SGD(model.parameters(), torch.tensor(0.1))

    def plain() -> None:
        own.step()

    def strict() -> None:
        with _dynamo.error_on_graph_break(True):
            own.step()

    def run(step: Callable[[], Any], **options: Any) -> dict[str, Any]:
        _dynamo.reset()
        marks.clear()
        seen.clear()
        compiled, error = torch.compile(step, **options), ""
        try:
            for _ in range(STEPS):
                model(torch.ones(1, 4)).sum().backward()
                compiled()
        except Exception as raised:
            error = repr(raised)
        compiles = any(message.startswith(COMPILES) for message in seen)
        ours = [message for message in seen if torch_steps.__file__ in message]
        return {"marks": len(marks), "error": error, "compiled": compiles, "ours": ours}

    report = {
        "one graph": run(plain, backend="eager", fullgraph=True),
        "no graph break": run(strict, backend="eager"),
        "own": run(plain, backend="eager"),
        "torch's": run(sgd.step, backend="aot_eager"),
    }
    hooks.uninstall()
    report["uninstalled"] = run(plain, backend="eager", fullgraph=True)
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
