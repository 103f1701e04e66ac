"""How operations on GPUs are timed: decided once, from the setting and what is safe; each with its reason."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from commwatch.probe.torch_timing import Timing, choose
from tests.helpers import clean_env

ONE_QUEUE = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}


def asked(mode: str, **more: str) -> dict[str, str]:
    """The environment that asks for it."""
    return {"COMMWATCH_TIMING": mode, **more}


@pytest.mark.parametrize(
    ("env", "mode", "because"),
    [
        ({}, "events", "COMMWATCH_TIMING=auto"),
        (asked("auto", **ONE_QUEUE), "poll", "COMMWATCH_TIMING=auto, but with"),
        (asked("events"), "events", "COMMWATCH_TIMING=events"),
        (asked("events", CUDA_DEVICE_MAX_CONNECTIONS="8"), "events", "COMMWATCH_TIMING=events"),
        (asked("events", **ONE_QUEUE), "poll", "COMMWATCH_TIMING=events, but with"),
        (asked("poll", **ONE_QUEUE), "poll", "COMMWATCH_TIMING=poll"),
        (asked("off"), "off", "COMMWATCH_TIMING=off"),
        (asked("sometimes"), "off", "COMMWATCH_TIMING=sometimes: needs one of auto, off, poll, events"),
    ],
)
def test_choice(env: dict[str, str], mode: str, because: str) -> None:
    """By default, operations are timed by events. Where timing events would slow the job, they are polled, even if events are set."""
    timing = choose(env, runtime=True)
    assert timing.mode == mode
    assert because in timing.reason


@pytest.mark.parametrize(("mode", "chosen"), [("auto", "off"), ("events", "events"), ("poll", "poll")])
def test_rocm(mode: str, chosen: str) -> None:
    """On ROCm, where timing has not been tested, operations are timed only on request."""
    assert choose(asked(mode), runtime=True, rocm=True).mode == chosen


@pytest.mark.parametrize("mode", ["auto", "events", "poll"])
def test_without_cuda(mode: str) -> None:
    """A torch without CUDA times nothing on devices, whatever the setting."""
    assert choose(asked(mode), runtime=False) == Timing("off", "this torch has no CUDA runtime")


def test_codes() -> None:
    """The numbers are those of native/device.h."""
    assert [Timing(mode, "").code for mode in ("off", "poll", "events")] == [0, 1, 2]


#: Prints the version for each library that is named, in a process that has loaded it; without a name, in one that has not.
ASKS = """
import ctypes, os, sys
from commwatch.probe.torch_timing import loaded_nccl
for library in sys.argv[1:]:
    if os.fork() == 0:
        if library:
            ctypes.CDLL(library)
        print(loaded_nccl(), flush=True)
        os._exit(0)
    os.wait()
"""


def nccl(folder: Path, number: int) -> str:
    """A library that says it is this version of NCCL."""
    library, source = folder / f"{number}" / "libnccl.so.2", folder / "nccl.c"
    library.parent.mkdir()
    source.write_text(f"int ncclGetVersion(int* version) {{ return *version = {number}, 0; }}\n")
    compiler = ["gcc", "-shared", "-fPIC", "-Wl,-soname,libnccl.so.2", str(source), "-o", str(library)]
    subprocess.run(compiler, check=True, timeout=60)
    return str(library)


def asked_for_nccl(*libraries: str, **env: str) -> list[str]:
    """What ``ASKS`` prints."""
    command = [sys.executable, "-c", ASKS, *libraries]
    done = subprocess.run(
        command, env=clean_env(COMMWATCH="0", **env), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_loaded_nccl(tmp_path: Path) -> None:
    """The version of NCCL is that of the library in the process."""
    libraries = [nccl(tmp_path, number) for number in (23007, 22803, 2804)]
    assert asked_for_nccl("", *libraries) == ["None", "(2, 30, 7)", "(2, 28, 3)", "(2, 8, 4)"]


def test_preloaded_nccl(tmp_path: Path) -> None:
    """That library may be newer than the one with which torch was built: it may have been preloaded."""
    assert asked_for_nccl("", LD_PRELOAD=nccl(tmp_path, 23007)) == ["(2, 30, 7)"]
