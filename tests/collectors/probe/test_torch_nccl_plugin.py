"""Whether NCCL loads our profiler plugin: decided by the setting, NCCL's version and the user's own plugin, each with its reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from commwatch.probe.torch_nccl_plugin import choose, set_variables

PLUGIN = Path("/cache/commwatch/native/torch-2.14.1-1/nccl-1.so")
ON = {"COMMWATCH_NCCL_PLUGIN": "on"}
FINE = (2, 30, 7)


@pytest.mark.parametrize(
    ("env", "version", "plugin", "reason"),
    [
        (ON, None, PLUGIN, "no NCCL plugin: this torch has no NCCL"),
        (ON, FINE, None, "no NCCL plugin: it needs the native hook, and is built with it (commwatch native status)"),
        (ON, (2, 26, 5), PLUGIN, "no NCCL plugin: NCCL 2.26.5 reports no times of kernels; 2.27.0 and later do"),
        (ON, (2, 30, 3), PLUGIN, "no NCCL plugin: NCCL 2.30.3 crashes with a profiler plugin (NVIDIA/nccl #2112)"),
        (ON, (2, 31, 2), PLUGIN, "no NCCL plugin: NCCL 2.31.2 is 4 to 13% slower with a profiler plugin (NVIDIA/nccl #2355)"),
        ({**ON, "NCCL_PROFILER_PLUGIN": "None"}, FINE, PLUGIN, "no NCCL plugin: NCCL_PROFILER_PLUGIN=None"),
    ],
)  # fmt: skip
def test_not_used(env: dict[str, str], version: tuple[int, ...] | None, plugin: Path | None, reason: str) -> None:
    """Where the plugin would do harm or nothing, it is not used, and the reason names the obstacle."""
    choice = choose(env, version, plugin)
    assert (choice.used, choice.asked_for, choice.reason) == (False, True, reason)


@pytest.mark.parametrize("env", [{}, {"COMMWATCH_NCCL_PLUGIN": "off"}, {"COMMWATCH_NCCL_PLUGIN": "yes"}])
def test_off(env: dict[str, str]) -> None:
    """Without the setting, or with one that is not valid, the plugin is not used, and the timing reason does not mention it."""
    choice = choose(env, FINE, PLUGIN)
    assert (choice.used, choice.asked_for) == (False, False)


@pytest.mark.parametrize("version", [(2, 27, 3), (2, 28, 3), (2, 29, 2), FINE, (2, 32, 0)])
def test_used(version: tuple[int, ...]) -> None:
    """From NCCL 2.27 on it is used."""
    assert choose(ON, version, PLUGIN) == (True, "NCCL plugin", True)


def test_chained() -> None:
    """The user's plugin is chained, however often the probe is installed; without one, nothing is."""
    env = {**ON, "NCCL_PROFILER_PLUGIN": "inspector"}
    for _ in range(2):
        set_variables(env, PLUGIN)
        assert (env["NCCL_PROFILER_PLUGIN"], env["COMMWATCH_NCCL_CHAIN"]) == (str(PLUGIN), "inspector")
        assert choose(env, FINE, PLUGIN).reason == "NCCL plugin, chained with inspector"
    alone = dict(ON)
    set_variables(alone, PLUGIN)
    assert "COMMWATCH_NCCL_CHAIN" not in alone


def test_parent_with_another_build() -> None:
    """A plugin of ours that the environment has from a parent is replaced, not chained; the user's stays chained."""
    env = {
        **ON,
        "NCCL_PROFILER_PLUGIN": "/home/user/.cache/commwatch/native/torch-2.9.0-1/nccl-0.so",
        "COMMWATCH_NCCL_CHAIN": "inspector",
    }
    set_variables(env, PLUGIN)
    assert (env["NCCL_PROFILER_PLUGIN"], env["COMMWATCH_NCCL_CHAIN"]) == (str(PLUGIN), "inspector")
