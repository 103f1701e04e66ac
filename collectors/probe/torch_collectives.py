"""The probe: sees every collective of this process where PyTorch dispatches it, and writes it to the ring.

Each operator of the ``c10d`` namespace gets a kernel at ``BackendSelect``, the one door all callers pass once: plain
calls, DDP's reducer, FSDP, DTensor, compiled graphs. There are two such hooks with the same records: the native one
(``native/``, ``torch_native.py``) where it has been built, the Python one (``torch_python.py``) everywhere else.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch

from commwatch.collectors.probe.native import library
from commwatch.collectors.probe.torch_groups import Groups
from commwatch.collectors.probe.torch_native import NativeProbe
from commwatch.collectors.probe.torch_probe import Probe
from commwatch.collectors.probe.torch_python import PythonProbe
from commwatch.collectors.wire.handlers import raised_by_handler

_probe: Probe | None = None
#: As ``install`` was given it; ``None``: whatever ``os.environ`` holds.
_given: Mapping[str, str] | None = None
#: This process has been forked since the probe was installed, and has made no process group.
_inherited = False


def _forked() -> None:
    """In a forked child the probe rests: a DataLoader worker has none. A child that makes a process group is a rank."""
    global _inherited
    if _probe is not None:
        _probe.abandon()
        _inherited = True


os.register_at_fork(after_in_child=_forked)


def _making(groups: Groups, default: tuple[int, int] | None) -> Groups:
    """A process group is about to be made: a new probe takes over in a forked child, and where the rank or the size of the
    world will no longer be what the ring says, for what stands in a ring's header stays.

    Args:
        groups: of the probe that sees it.
        default: rank and size of the world, where it is the default group.

    Returns the groups that count it.
    """
    global _probe, _inherited
    before = _probe
    if before is None or before.groups is not groups:
        return groups
    if not _inherited and (default is None or before.writes_as(*default)):
        return groups
    forked, _probe, _inherited = _inherited, None, False
    try:
        before.uninstall()
        env = os.environ if _given is None else _given
        if env.get("COMMWATCH_DISABLE") != "1":
            probe = before.heir(env)
            probe.remark = before.remark
            if not forked:  # the other ranks may go on counting where they are
                probe.groups.count_on(groups)
            if _put_in(probe):
                return probe.groups
    except Exception as error:
        if raised_by_handler(error):
            raise
        before.say(f"not recording this process: {type(error).__name__}: {error}", "fork")
    return groups


def _make(env: Mapping[str, str]) -> Probe | None:
    """The probe with the hook that ``COMMWATCH_HOOK`` asks for; by default the native one where it has been built."""
    asked = env.get("COMMWATCH_HOOK", "auto")
    if asked == "python":
        return PythonProbe(env)
    try:
        return NativeProbe(env, library.load(env))
    except library.NotAvailable as missing:
        if missing.__context__ is not None and raised_by_handler(missing.__context__):
            raise missing.__context__ from None
        if asked == "native":  # whoever asks for it does not want to pay for the other
            if env.get("RANK", "0") == "0":
                print(f"commwatch: probe not loaded: no native hook: {missing}", file=sys.stderr, flush=True)
            return None
        probe = PythonProbe(env)
        probe.remark = f"using the Python hook, the native one costs less: {missing}"
        return probe


def _put_in(probe: Probe) -> bool:
    """Make this the probe of the process; False where its hooks cannot be put in."""
    global _probe
    try:
        probe.install()
    except BaseException as error:  # a torch we do not know
        probe.uninstall()
        if raised_by_handler(error):
            raise
        probe.say(f"cannot hook this torch ({torch.__version__}): {type(error).__name__}: {error}")
        return False
    probe.groups.on_making = partial(_making, probe.groups)
    _probe = probe
    return True


def install(env: Mapping[str, str] | None = None) -> bool:
    """Switch the probe on in this process; True if it is on afterwards. A second call changes nothing."""
    global _given
    # Launchers that start ranks from Python name them in ``os.environ`` after ``import torch``: it is read when the ring is made.
    given, env = env, os.environ if env is None else env
    if env.get("COMMWATCH_DISABLE") == "1":
        return False
    if _probe is None:
        probe = _make(env)
        if probe is None or not _put_in(probe):
            return False
        _given = given
    return True


def uninstall() -> None:
    """Take the probe out of this process; what it recorded stays."""
    global _probe, _inherited
    if _probe is not None:
        _probe.uninstall()
        _probe, _inherited = None, False


def step() -> None:
    """Say that a training step ends here. Once called, optimizers no longer mark steps."""
    if _probe is not None:
        _probe.mark_now()


def ring_file() -> Path | None:
    """Where this process records, or ``None`` while it does not."""
    return _probe.ring.path if _probe is not None and _probe.ring is not None else None
