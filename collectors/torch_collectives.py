"""The probe: sees every collective of this process where PyTorch dispatches it, and writes it to the ring.

Each operator of the ``c10d`` namespace gets a kernel at ``BackendSelect``, the one door all callers pass once: plain
calls, DDP's reducer, FSDP, DTensor, compiled graphs. There are two such hooks with the same records: the native one
(``native/``, ``torch_native.py``) where it has been built, the Python one (``torch_python.py``) everywhere else.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

from commwatch.collectors.native import library
from commwatch.collectors.torch_native import NativeProbe
from commwatch.collectors.torch_probe import Probe
from commwatch.collectors.torch_python import PythonProbe

_probe: Probe | None = None


def _forked() -> None:
    if _probe is not None:
        _probe.abandon()


os.register_at_fork(after_in_child=_forked)


def _make(env: Mapping[str, str]) -> Probe | None:
    """The probe with the hook that ``COMMWATCH_HOOK`` asks for; by default the native one where it has been built."""
    asked = env.get("COMMWATCH_HOOK", "auto")
    if asked == "python":
        return PythonProbe(env)
    try:
        return NativeProbe(env, library.load(env))
    except library.NotAvailable as missing:
        if asked == "native":  # whoever asks for it does not want to pay for the other
            if env.get("RANK", "0") == "0":
                print(f"commwatch: probe not loaded: no native hook: {missing}", file=sys.stderr, flush=True)
            return None
        probe = PythonProbe(env)
        probe.remark = f"using the Python hook, the native one costs less: {missing}"
        return probe


def install(env: Mapping[str, str] | None = None) -> bool:
    """Switch the probe on in this process; True if it is on afterwards. A second call changes nothing."""
    global _probe
    env = dict(os.environ if env is None else env)
    if env.get("COMMWATCH_DISABLE") == "1":
        return False
    if _probe is None:
        probe = _make(env)
        if probe is None:
            return False
        try:
            probe.install()
        except Exception as error:  # a torch we do not know
            probe.uninstall()
            probe.say(f"cannot hook this torch ({torch.__version__}): {type(error).__name__}: {error}")
            return False
        _probe = probe
    return True


def uninstall() -> None:
    """Take the probe out of this process; what it recorded stays."""
    global _probe
    if _probe is not None:
        _probe.uninstall()
        _probe = None


def step() -> None:
    """Say that a training step ends here. Once called, optimizers no longer mark steps."""
    if _probe is not None:
        _probe.mark_now()


def ring_file() -> Path | None:
    """Where this process records, or ``None`` while it does not."""
    return _probe.ring.path if _probe is not None and _probe.ring is not None else None
