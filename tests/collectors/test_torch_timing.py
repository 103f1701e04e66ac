"""How operations on GPUs are to be timed: decided once, by what is asked for and what is safe; each with its reason."""

from __future__ import annotations

import pytest

from commwatch.collectors.torch_timing import Timing, choose

ONE_QUEUE = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}


def asked(mode: str, **more: str) -> dict[str, str]:
    """The environment that asks for it."""
    return {"COMMWATCH_TIMING": mode, **more}


@pytest.mark.parametrize(
    ("env", "hook", "mode", "because"),
    [
        ({}, "native", "events", "timing events are safe here"),
        ({}, "python", "events", "timing events are safe here"),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "8"}, "native", "events", "CUDA_DEVICE_MAX_CONNECTIONS is not 1"),
        (ONE_QUEUE, "native", "poll", "would serialise"),
        (ONE_QUEUE, "python", "off", "commwatch native build"),
        (asked("auto", **ONE_QUEUE), "native", "poll", "would serialise"),
        (asked("events"), "native", "events", "COMMWATCH_TIMING=events"),
        (asked("events", **ONE_QUEUE), "native", "poll", "COMMWATCH_TIMING=events, but with"),
        (asked("poll"), "python", "poll", "COMMWATCH_TIMING=poll"),
        (asked("off"), "native", "off", "COMMWATCH_TIMING=off"),
        (asked("sometimes"), "native", "events", "COMMWATCH_TIMING=sometimes is none of auto, off, poll, events"),
    ],
)
def test_choice(env: dict[str, str], hook: str, mode: str, because: str) -> None:
    """Events where they are safe, polling where they are not, and never what is not safe, even if asked for."""
    timing = choose(env, hook, runtime=True, is_rocm=False)
    assert timing.mode == mode
    assert because in timing.reason


@pytest.mark.parametrize("mode", ["auto", "events", "poll"])
def test_without_cuda(mode: str) -> None:
    """A torch without CUDA times nothing on devices, whatever is asked for."""
    assert choose(asked(mode), "native", runtime=False, is_rocm=False) == Timing(
        "off", "this torch has no CUDA runtime"
    )


def test_rocm() -> None:
    """Where timing events have not been tried they are not taken by default."""
    assert choose({}, "native", runtime=True, is_rocm=True).mode == "poll"
    assert choose(asked("events"), "native", runtime=True, is_rocm=True).mode == "events"


def test_codes() -> None:
    """The numbers are those of native/device.h."""
    assert [Timing(mode, "").code for mode in ("off", "poll", "events")] == [0, 1, 2]
