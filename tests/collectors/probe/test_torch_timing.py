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


@pytest.mark.parametrize(
    ("number", "version"), [(23007, "(2, 30, 7)"), (22803, "(2, 28, 3)"), (2804, "(2, 8, 4)"), (None, "None")]
)
def test_loaded_nccl(tmp_path: Path, number: int | None, version: str) -> None:
    """The version of NCCL is that of the library in the process, which may be newer than the one with which torch was built."""
    env = clean_env(COMMWATCH="0")
    if number is not None:
        library = tmp_path / "libnccl.so.2"
        (tmp_path / "nccl.c").write_text(f"int ncclGetVersion(int* version) {{ return *version = {number}, 0; }}\n")
        compiler = ["gcc", "-shared", "-fPIC", "-Wl,-soname,libnccl.so.2", str(tmp_path / "nccl.c"), "-o", str(library)]
        subprocess.run(compiler, check=True, timeout=60)
        env["LD_PRELOAD"] = str(library)
    script = "from commwatch.probe.torch_timing import loaded_nccl; print(loaded_nccl())"
    done = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.strip() == version, done.stderr
