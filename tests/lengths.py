"""The order of the modules of tests, from how long each took in the last run.

The lengths of the last run here lie in ``.stamps``; a fresh clone has those of ``tests/lengths.json``, which ``make lengths`` writes.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

TREE = Path(__file__).parents[1]
LAST_RUN, RECORDED = TREE / ".stamps" / "lengths.json", TREE / "tests" / "lengths.json"
#: Of a module that has not run yet, in seconds.
UNKNOWN_S = 10.0


def places(modules: Mapping[str, str], lengths: Mapping[str, float]) -> dict[str, float]:
    """Return the place of each module, from 0 to 1: the longest first, so that no worker waits for one of them at the end.

    Tests with jobs wait much of their time, and tests that start nothing compute all of it. So at each moment all kinds are equally
    far advanced: otherwise the processors of a small machine would be idle at first, and overloaded at the end.

    Args:
        modules: the kind of each.
        lengths: how long each took, in seconds.
    """
    place: dict[str, float] = {}
    for kind in set(modules.values()):
        took_s = {module: lengths.get(module, UNKNOWN_S) for module, its in modules.items() if its == kind}
        before_s, all_s = 0.0, sum(took_s.values())
        for module in sorted(took_s, key=lambda module: (-took_s[module], module)):
            place[module] = before_s / all_s if all_s else 0.0
            before_s += took_s[module]
    return place


def known_lengths() -> dict[str, float]:
    """Return how long modules took in the last run here, and the others in the recorded run."""
    return {**_read(RECORDED), **_read(LAST_RUN)}


def keep(lengths: Mapping[str, float]) -> None:
    """Keep the lengths of the modules that have just run."""
    LAST_RUN.parent.mkdir(exist_ok=True)
    both = {**_read(LAST_RUN), **lengths}
    there = {module: round(took_s, 1) for module, took_s in sorted(both.items()) if (TREE / module).exists()}
    LAST_RUN.write_text(json.dumps(there, indent=0) + "\n", encoding="utf-8")


def _read(path: Path) -> dict[str, float]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


if __name__ == "__main__":
    shutil.copy(LAST_RUN, RECORDED)
