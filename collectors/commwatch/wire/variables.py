"""Valid values of the probe's variables, for the trainer and for ``commwatch config check``. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from commwatch.wire.ring import MARGIN

#: Words for ``COMMWATCH``, in any case.
_YES, _NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
#: Hooks that can be asked for, and ways to time operations on GPUs.
HOOKS = ("auto", "native", "python")
TIMINGS = ("auto", "off", "poll", "events")
#: Whether NCCL loads our profiler plugin; whether the files are followed that the job's output goes to.
ON, OFF = PLUGIN = JOB_OUTPUT = ("on", "off")
#: What checksums are made of.
CHECKSUMS = ("off", "replicas", "collectives", "all")
#: Values with which replicas are checked, and with which collectives are.
CHECK_REPLICAS, CHECK_COLLECTIVES = ("replicas", "all"), ("collectives", "all")
#: Steps between two checks of replicas, or one in how many collectives is checked; and the share of the time that either may take.
CHECKSUM_EVERY, CHECKSUM_BUDGET = 100, 0.001
_MOST_STEPS = 1_000_000
#: A reader keeps ``MARGIN`` records of distance from the writer on both sides; the largest ring has 64 GB.
_LEAST_SLOTS, _MOST_SLOTS = 2 * MARGIN, 999_999_999


def part(text: str) -> float | None:
    """Parse a share, 0 to 1; ``None`` if the text is not one."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if 0 <= number <= 1 else None


def share(text: str, default: float) -> float:
    """Parse a share, 0 to 1; the default if the text is not one."""
    number = part(text)
    return default if number is None else number


def steps(text: str) -> int | None:
    """Parse a number of steps between two checks; ``None`` if it is invalid."""
    number = int(text) if text.isdecimal() and len(text) <= len(str(_MOST_STEPS)) else 0
    return number if 1 <= number <= _MOST_STEPS else None


def checksum_every(env: Mapping[str, str]) -> int:
    """Return how many steps lie between two checks of replicas, and one in how many collectives is checked."""
    return steps(env.get("COMMWATCH_CHECKSUM_EVERY", "")) or CHECKSUM_EVERY


def checksum_budget(env: Mapping[str, str]) -> float:
    """Return the share of the time that checks may take, 0 to 1; 0: no limit."""
    return share(env.get("COMMWATCH_CHECKSUM_BUDGET", ""), CHECKSUM_BUDGET)


def asks_for_probe(text: str) -> bool:
    """Return whether this value of ``COMMWATCH`` switches the probe on; an invalid one does not."""
    return text.lower() in _YES


def slots(text: str) -> int | None:
    """Parse the number of records of a ring; ``None`` if it is invalid."""
    number = int(text) if text.isdecimal() and len(text) <= len(str(_MOST_SLOTS)) else 0
    return number if number >= _LEAST_SLOTS else None


#: By variable: the check of its text, and the rule in words.
_MAY_BE: dict[str, tuple[Callable[[str], bool], str]] = {
    "COMMWATCH": (lambda text: text.lower() in (*_YES, *_NO), f"one of {', '.join((*_YES, *_NO))}"),
    "COMMWATCH_BUDGET": (lambda text: part(text) is not None, "a number from 0 to 1"),
    "COMMWATCH_CHECKSUMS": (CHECKSUMS.__contains__, f"one of {', '.join(CHECKSUMS)}"),
    "COMMWATCH_CHECKSUM_BUDGET": (lambda text: part(text) is not None, "a number from 0 to 1"),
    "COMMWATCH_CHECKSUM_EVERY": (lambda text: steps(text) is not None, f"a whole number from 1 to {_MOST_STEPS}"),
    "COMMWATCH_DISABLE": (("0", "1").__contains__, "1 or 0"),
    "COMMWATCH_HOOK": (HOOKS.__contains__, f"one of {', '.join(HOOKS)}"),
    "COMMWATCH_JOB_OUTPUT": (JOB_OUTPUT.__contains__, f"one of {', '.join(JOB_OUTPUT)}"),
    "COMMWATCH_NCCL_PLUGIN": (PLUGIN.__contains__, f"one of {', '.join(PLUGIN)}"),
    "COMMWATCH_SLOTS": (lambda text: slots(text) is not None, f"a whole number from {_LEAST_SLOTS} to {_MOST_SLOTS}"),
    "COMMWATCH_TIMING": (TIMINGS.__contains__, f"one of {', '.join(TIMINGS)}"),
}


def wrong(env: Mapping[str, str]) -> list[str]:
    """Return a line for each variable with an invalid value, with the valid values; an empty one counts as not set.

    >>> wrong({"COMMWATCH_HOOK": "nope", "COMMWATCH_SLOTS": ""})
    ["COMMWATCH_HOOK: needs one of auto, native, python, not 'nope'"]
    """
    checks = ((name, env.get(name, ""), *check) for name, check in _MAY_BE.items())
    return [f"{name}: needs {needs}, not {text!r}" for name, text, right, needs in checks if text and not right(text)]
