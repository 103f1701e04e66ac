"""The alerts of a job and the verdicts behind them, from the evidence on disk: as marks of a timeline, and those on corrupt data for the report."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from commwatch.wire import crossing
from commwatch_agent.analysis.corruption import PastCorruption
from commwatch_agent.core.runs import Stored
from commwatch_agent.report.chrome_trace import TraceMark

_MOST_BYTES = 64 << 20
_T = TypeVar("_T")


def marks_of(evidence: Path, run: Stored) -> Iterator[TraceMark]:
    """Yield the alerts about a run when they began to fire, and the ranks that their verdicts name; times are Unix time.

    Bundles that cannot be read are left out.

    Args:
        evidence: the directory of the bundles.
    """
    return _of_bundles(evidence, run, _marks)


def corruption_of(evidence: Path, run: Stored) -> list[PastCorruption]:
    """Return the verdicts on corrupt data of a run, each once, the earliest first; arguments and damaged bundles as in ``marks_of``."""
    found = sorted(_of_bundles(evidence, run, _corruption), key=lambda each: each.fired_at)
    return list({each.says: each for each in reversed(found)}.values())[::-1]


def _of_bundles(evidence: Path, run: Stored, read: Callable[[dict[str, Any]], Iterator[_T]]) -> Iterator[_T]:
    with suppress(OSError), crossing.folder(evidence) as where:
        for name in where.names("*.json")[1]:
            with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
                found = json.loads(where.read(name, _MOST_BYTES, crossing.ANYBODY)[0])
                if found["alert"]["labels"].get("job_id") == run.name and run.from_s <= _fired_at(found) < run.until_s:
                    yield from read(found)


def _fired_at(bundle: dict[str, Any]) -> float:
    return float(bundle["alert"]["fired_at"] or bundle["taken_at"])


def _corruption(bundle: dict[str, Any]) -> Iterator[PastCorruption]:
    for verdict in bundle.get("verdicts", ()):
        if verdict["kind"] == "corruption":
            yield PastCorruption(_fired_at(bundle), str(verdict["says"]))


def _marks(bundle: dict[str, Any]) -> Iterator[TraceMark]:
    alert, at_ns = bundle["alert"], int(float(bundle["taken_at"]) * 1e9)
    fired_ns = int(_fired_at(bundle) * 1e9)
    yield TraceMark(fired_ns, f"alert {alert['name']}", None, {"summary": alert["annotations"].get("summary", "")})
    for verdict in bundle.get("verdicts", ()):
        for rank in verdict["ranks"]:
            yield TraceMark(at_ns, f"verdict {verdict['kind']}", int(rank), {"says": verdict["says"]})
