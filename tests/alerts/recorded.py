"""Recorded series, given to a real Prometheus and to the agent's evaluator alike; and what both make of them."""

from __future__ import annotations

import json
import math
import re
import struct
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from commwatch_alerts.evaluator import Evaluator
from commwatch_alerts.model import FIRING, PENDING, Record, Rule
from commwatch_alerts.promql import EvaluationError, Expression, Moment
from commwatch_alerts.series import NAME, Labels, Samples, Vector, labels_of
from tests.prometheus import Prometheus

#: A series as PromQL writes it to its samples, one an interval; ``None``: it is not there.
Recorded = Mapping[str, Sequence[float | None]]
INTERVAL_S = 15.0
#: Unix time of the first sample.
BEGIN_S = 1_700_000_000.0
#: The bits that Prometheus takes for the end of a series.
STALE = struct.unpack("<d", struct.pack("<Q", 0x7FF0000000000002))[0]
ACCEPTS = ("--web.enable-remote-write-receiver",)


def parsed(series: str) -> Labels:
    """Labels from ``name{a="b"}``."""
    name, _, rest = series.partition("{")
    return labels_of({NAME: name, **dict(re.findall(r'([a-zA-Z_]\w*)="([^"]*)"', rest))})


def rounds(recorded: Recorded, interval_s: float = INTERVAL_S) -> Iterator[tuple[float, dict[Labels, float]]]:
    """What is there at each time, in seconds from the first."""
    series = {parsed(name): values for name, values in recorded.items()}
    for step in range(max(map(len, series.values()))):
        there = {labels: values[step] for labels, values in series.items() if step < len(values)}
        yield step * interval_s, {labels: value for labels, value in there.items() if value is not None}


# -- Prometheus -------------------------------------------------------------------------------


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def _field(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def push(prometheus: Prometheus, series: Mapping[Labels, Sequence[tuple[int, float]]]) -> None:
    """Samples, by time in ms, into a Prometheus by remote write: every bit of them, marks of the end included."""
    request = b""
    for labels, samples in series.items():
        content = b"".join(_field(1, _field(1, name.encode()) + _field(2, value.encode())) for name, value in labels)
        for at_ms, value in samples:
            content += _field(2, b"\x09" + struct.pack("<d", value) + b"\x10" + _varint(at_ms))
        request += _field(1, content)
    # Snappy's block format: one literal.
    body = _varint(len(request)) + b"\xfc" + struct.pack("<I", len(request) - 1) + request
    headers = {"Content-Type": "application/x-protobuf", "Content-Encoding": "snappy"}
    url = f"{prometheus.url}/api/v1/write"
    with urllib.request.urlopen(
        urllib.request.Request(url, body, {**headers, "X-Prometheus-Remote-Write-Version": "0.1.0"})
    ):
        pass


def with_ends(values: Sequence[float | None], interval_s: float = INTERVAL_S) -> list[tuple[int, float]]:
    """Samples as a scrape leaves them: where a series is gone, a mark."""
    found, there = [], False
    for step, value in enumerate(values):
        at_ms = round((BEGIN_S + step * interval_s) * 1000)
        if value is not None:
            found.append((at_ms, value))
        elif there:
            found.append((at_ms, STALE))
        there = value is not None
    return found


def asked(prometheus: Prometheus, expression: str, at_s: float) -> Vector | None:
    """The result of Prometheus, at a time in seconds from the first sample; ``None``: it refuses."""
    query = urllib.parse.urlencode({"query": expression, "time": f"{BEGIN_S + at_s:.3f}"})
    try:
        data = prometheus.get(f"query?{query}")
    except urllib.error.HTTPError as error:
        said = json.loads(error.read())
        assert said["errorType"] == "execution", said
        return None
    if data["resultType"] == "scalar":
        return {(): float(data["result"][1])}
    return {labels_of(one["metric"]): float(one["value"][1]) for one in data["result"]}


# -- the agent --------------------------------------------------------------------------------


def evaluated(expression: Expression, samples: Samples, at_s: float) -> Vector | None:
    """The result of the agent; ``None``: it refuses."""
    try:
        return expression.evaluate(Moment(samples, BEGIN_S + at_s, BEGIN_S + at_s))
    except EvaluationError:
        return None


def same(ours: Vector | None, theirs: Vector | None) -> bool:
    """Whether two results have the same elements, and their values are equal to the ninth place."""
    if ours is None or theirs is None:
        return ours is theirs
    return ours.keys() == theirs.keys() and all(
        math.isclose(value, theirs[labels], rel_tol=1e-9, abs_tol=1e-300)
        or (math.isnan(value) and math.isnan(theirs[labels]))
        for labels, value in ours.items()
    )


# -- both, on alerts --------------------------------------------------------------------------


def _notation(values: Sequence[float | None]) -> str:
    out, there = [], False
    for value in values:
        out.append("_" if value is None and not there else "stale" if value is None else _number(value))
        there = value is not None
    return " ".join(out)


def _number(value: float) -> str:
    if math.isfinite(value):
        return repr(value)
    return "NaN" if math.isnan(value) else "Inf" if value > 0 else "-Inf"


def _group(rules: Sequence[Rule], records: Sequence[Record]) -> list[dict[str, object]]:
    recording: list[dict[str, object]] = [{"record": one.name, "expr": one.expr} for one in records]
    return recording + [
        {
            "alert": rule.name,
            "expr": rule.expr,
            "for": f"{round(rule.for_s * 1000)}ms",
            "keep_firing_for": f"{round(rule.keep_firing_for_s * 1000)}ms",
            "labels": {"severity": rule.severity},
        }
        for rule in rules
    ]


def agree(
    directory: Path,
    rules: Sequence[Rule],
    records: Sequence[Record],
    recorded: Recorded,
    interval_s: float = INTERVAL_S,
    theirs: Sequence[Rule] | None = None,
) -> Counter[str]:
    """Compare the agent with Prometheus: both must have the same pending and firing alerts at each evaluation.

    Rules with ``prometheus_only`` are left out. No sum may equal a threshold to the last bit, because Prometheus adds series in the
    order of their creation, which promtool changes.

    Args:
        theirs: the rules for Prometheus, if they are to be others.

    Returns:
        How often each alert was firing, by its name; a test should know.
    """
    rules = [rule for rule in rules if not rule.prometheus_only]
    records = [record for record in records if not record.prometheus_only]
    evaluator = Evaluator(rules, records, lambda template, labels, value, also: "")
    samples, checks, fired = Samples(evaluator.needs), [], Counter[str]()
    for at_s, there in rounds(recorded, interval_s):
        samples.add(at_s, there)
        alerts = [one for one in evaluator.evaluate(at_s, at_s, samples) if one.state in (PENDING, FIRING)]
        assert not evaluator.failing
        fired.update(alert.name for alert in alerts if alert.state == FIRING)
        labels = [labels_of({**alert.labels, "alertstate": alert.state}) for alert in alerts]
        expected = [
            {"labels": "ALERTS{" + ",".join(f"{n}={json.dumps(v)}" for n, v in pairs) + "}", "value": 1}
            for pairs in labels
        ]
        checks.append({"expr": "ALERTS", "eval_time": f"{round(at_s * 1000)}ms", "exp_samples": expected})
    interval = f"{round(interval_s * 1000)}ms"
    (directory / "rules.yaml").write_text(
        json.dumps({"groups": [{"name": "all", "rules": _group(rules if theirs is None else theirs, records)}]})
    )
    test = {
        "interval": interval,
        "input_series": [{"series": name, "values": _notation(values)} for name, values in recorded.items()],
        "promql_expr_test": checks,
    }
    whole = {"rule_files": [str(directory / "rules.yaml")], "evaluation_interval": interval, "tests": [test]}
    (directory / "test.yaml").write_text(json.dumps(whole))
    command = ["promtool", "test", "rules", str(directory / "test.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return fired
