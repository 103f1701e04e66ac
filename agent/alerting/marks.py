"""The alerts of a job and the verdicts behind them, from the evidence on disk, as marks of a timeline."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from commwatch.report.chrome_trace import TraceMark


def marks_of(evidence: Path, job_id: str) -> Iterator[TraceMark]:
    """Yield the alerts about a job when they began to fire, and the ranks that their verdicts name; times are Unix time.

    Bundles that cannot be read are left out.

    Args:
        evidence: the directory of the bundles.
    """
    for path in sorted(evidence.glob("*.json")):
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            if found["alert"]["labels"].get("job_id") == job_id:
                yield from _marks(found)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue


def _marks(bundle: dict[str, Any]) -> Iterator[TraceMark]:
    alert, at_ns = bundle["alert"], int(float(bundle["taken_at"]) * 1e9)
    fired_ns = int(float(alert["fired_at"] or bundle["taken_at"]) * 1e9)
    yield TraceMark(fired_ns, f"alert {alert['name']}", None, {"summary": alert["annotations"].get("summary", "")})
    for verdict in bundle.get("verdicts", ()):
        for rank in verdict["ranks"]:
            yield TraceMark(at_ns, f"verdict {verdict['kind']}", int(rank), {"says": verdict["says"]})
