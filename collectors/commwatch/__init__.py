"""commwatch: see the communication of distributed training.

The import of this package loads neither torch nor a web framework. ``install``, ``uninstall``, ``step`` and ``watch`` act inside a training
process; without torch they raise ``ImportError``. The functions below them query the agent, and never raise (docs/python.md).
"""

from __future__ import annotations

#: Type checkers know the name; the import of ``typing`` would take most of the time of this one.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from commwatch.api.rest import AgentError, Client
    from commwatch.api.rows import Rows
    from commwatch.api.training import incidents, last_step, metrics, summary, verdicts
    from commwatch.api.watching import watch

__version__ = "0.1.0"

__all__ = [
    "AgentError", "Client", "Rows", "__version__", "incidents", "install", "last_step", "metrics", "step", "summary", "uninstall", "verdicts", "watch",
]  # fmt: skip
#: Loaded when they are first used, because most processes need none of them.
_PLACES = {
    "AgentError": "rest", "Client": "rest", "Rows": "rows", "incidents": "training", "last_step": "training", "metrics": "training", "summary": "training",
    "verdicts": "training", "watch": "watching",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.api.{_PLACES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def install() -> bool:
    """Switch the probe on in this process (``COMMWATCH=1`` does so without a change to the script).

    Call it on all ranks, preferably before the first process group is created. Returns True if the probe is on.
    """
    from commwatch.probe import torch_collectives

    return torch_collectives.install()


def uninstall() -> None:
    """Remove the probe from this process. Its records stay readable."""
    from commwatch.probe import torch_collectives

    torch_collectives.uninstall()


def step() -> None:
    """Mark the end of a training step. From the first call on, optimizers no longer mark steps themselves.

    Does nothing if the probe is not installed, so the call may stay in the script.
    """
    import sys

    probe = sys.modules.get("commwatch.probe.torch_collectives")
    if probe is not None:
        probe.step()
