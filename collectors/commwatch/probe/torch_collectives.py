"""The probe: sees every collective of this process in PyTorch's dispatcher, and records it in the ring.

Each operator of the ``c10d`` namespace gets a kernel at ``BackendSelect``, which every caller passes once: plain
calls, DDP's reducer, FSDP, DTensor, compiled graphs. There are two such hooks with the same records: the native one
(``native/``, ``torch_native.py``) where it has been built, the Python one (``torch_python.py``) everywhere else.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch

from commwatch.probe.native import library
from commwatch.probe.torch_groups import Groups
from commwatch.probe.torch_native import NativeProbe
from commwatch.probe.torch_probe import Probe
from commwatch.probe.torch_python import PythonProbe
from commwatch.wire import standard_error
from commwatch.wire.handlers import raised_by_handler

_probe: Probe | None = None
#: The argument of ``install``; ``None``: ``os.environ``.
_given: Mapping[str, str] | None = None
#: This process has been forked since the probe was installed, and has made no process group.
_inherited = False


def _forked() -> None:
    """Stop the probe in a forked child, such as a DataLoader worker. A child that makes a process group is a rank."""
    global _inherited
    if _probe is not None:
        _probe.abandon()
        _inherited = True


os.register_at_fork(after_in_child=_forked)


def _making(groups: Groups, default: tuple[int, int] | None) -> Groups:
    """A process group is about to be made: replace the probe in a forked child, or if rank or size of the world will differ
    from the ring's header, which cannot change.

    Args:
        groups: of the probe that was called.
        default: rank and size of the world, if it is the default group.

    Returns the groups that count the new one.
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
            probe = before.successor(env)
            probe.remark, probe.home = before.remark, before.home
            if not forked:  # the other ranks may continue their counts
                probe.groups.count_on(groups)
                probe.outside.count_on(before.outside)
            if _put_in(probe):
                return probe.groups
    except Exception as error:
        if raised_by_handler(error):
            raise
        before.say(f"not recording this process: {type(error).__name__}: {error}", "fork")
    return groups


def _starting(probe: Probe, rank: int, size: int) -> Probe:
    """``init_process_group`` is called with a probe: return the one that records it, which may replace that one as in ``_making``."""
    if _probe is probe:
        _making(probe.groups, (rank, size))
    return probe if _probe is None else _probe


def _make(env: Mapping[str, str]) -> Probe | None:
    """Make the probe with the hook of ``COMMWATCH_HOOK``, by default native if built; ``None`` if it is missing."""
    hook = env.get("COMMWATCH_HOOK", "auto")
    if hook == "python":
        return PythonProbe(env)
    try:
        return NativeProbe(env, library.load(env))
    except library.NotAvailable as missing:
        if missing.__context__ is not None and raised_by_handler(missing.__context__):
            raise missing.__context__ from None
        if hook == "native":  # the user does not accept the cost of the other
            if env.get("RANK", "0") == "0":
                standard_error.say(f"commwatch: probe not loaded: no native hook: {missing}")
            return None
        probe = PythonProbe(env)
        probe.remark = f"using the Python hook, the native one costs less: {missing}"
        return probe


def _put_in(probe: Probe) -> bool:
    """Install this probe in the process; return False if its hooks cannot be installed."""
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
    probe.on_start = partial(_starting, probe)
    _probe = probe
    return True


def install(env: Mapping[str, str] | None = None) -> bool:
    """Install the probe in this process; return True if it is installed afterwards. A second call changes nothing."""
    global _given
    # Launchers that start ranks from Python set ``os.environ`` after ``import torch``: it is read when the ring is made.
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
    """Remove the probe from this process; its records stay."""
    global _probe, _inherited
    if _probe is not None:
        _probe.uninstall()
        _probe, _inherited = None, False


def step() -> None:
    """Mark the end of a training step. After the first call, optimizers no longer mark steps."""
    if _probe is not None:
        _probe.mark_now()


def ring_file() -> Path | None:
    """Return the path of this process's ring; ``None`` while nothing is recorded."""
    return _probe.ring.path if _probe is not None and _probe.ring is not None else None


def place() -> tuple[str, int] | None:
    """Return job and rank of this process; ``None`` while nothing is recorded."""
    return _probe.place if _probe is not None and _probe.ring is not None else None
