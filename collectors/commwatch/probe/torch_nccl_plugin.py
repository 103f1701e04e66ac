"""Whether NCCL loads our profiler plugin (``collectors/commwatch/nccl_plugin``) in this process.

The plugin reports when the kernels of each operation ran, by the GPU's clock, what NCCL chose for it, and operations of NCCL's that c10d did
not make. It is off by default: NCCL does more work with any such plugin, and what that costs on a real GPU has not been measured.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import NamedTuple

from commwatch.wire.variables import ON

SETTING, NCCL_VARIABLE, CHAIN = "COMMWATCH_NCCL_PLUGIN", "NCCL_PROFILER_PLUGIN", "COMMWATCH_NCCL_CHAIN"
#: A part of the path of each built plugin.
_OURS = "/commwatch/native/torch-"
#: The first version that reports when kernels ran.
OLDEST = (2, 27, 0)
#: Versions whose faults hit jobs with a profiler plugin; the plugin itself refuses them, too, as a process may have several NCCLs.
FAULTY: dict[tuple[int, ...], str] = {
    (2, 30, 3): "NCCL 2.30.3 crashes with a profiler plugin (NVIDIA/nccl #2112)",
    (2, 31, 2): "NCCL 2.31.2 is 4 to 13% slower with a profiler plugin (NVIDIA/nccl #2355)",
}


class Choice(NamedTuple):
    """Whether the plugin is used."""

    used: bool
    #: For people.
    reason: str
    #: The user has asked for it.
    asked_for: bool = True


def choose(env: Mapping[str, str], version: tuple[int, ...] | None, plugin: Path | None) -> Choice:
    """Decide whether NCCL is to load the plugin.

    Args:
        version: of NCCL; ``None``: this torch has none.
        plugin: the built library; ``None``: there is none, as with the Python hook.
    """
    if env.get(SETTING) != ON:
        return Choice(False, f"{SETTING} is not {ON}", asked_for=False)
    theirs = _theirs(env)
    obstacles: dict[str, bool] = {
        "this torch has no NCCL": version is None,
        "it needs the native hook, and is built with it (commwatch native status)": plugin is None,
        f"NCCL {_text(version)} reports no times of kernels; {_text(OLDEST)} and later do": version is not None
        and version < OLDEST,
        FAULTY.get(version or (), ""): version in FAULTY,
        f"{NCCL_VARIABLE}={theirs}": theirs.lower() == "none",
    }
    for obstacle, is_there in obstacles.items():
        if is_there:
            return Choice(False, f"no NCCL plugin: {obstacle}")
    chained = f", chained with {theirs}" if theirs else ""
    return Choice(True, f"NCCL plugin{chained}")


def set_variables(env: MutableMapping[str, str], plugin: Path) -> None:
    """Let NCCL load the plugin, and the plugin the user's. NCCL reads the environment when it makes its first communicator."""
    if theirs := _theirs(env):
        env[CHAIN] = theirs
    env[NCCL_VARIABLE] = str(plugin)


def _theirs(env: Mapping[str, str]) -> str:
    """Return the user's own plugin, empty if there is none. The environment may have ours from a parent, perhaps of another build."""
    theirs = env.get(NCCL_VARIABLE, "")
    return env.get(CHAIN, "") if _OURS in theirs else theirs


def _text(version: tuple[int, ...] | None) -> str:
    return ".".join(map(str, version or ()))
