"""The agent's PromQL beside a real Prometheus: the same samples, the same expressions, the same results."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commwatch_alerts.promql import EvaluationError, Expression, Moment, UnsupportedExpression
from commwatch_alerts.promql_functions import RANGE_FUNCTIONS
from commwatch_alerts.series import MOST_SERIES, NAME, Labels, Samples, labels_of
from tests.alerts.recorded import ACCEPTS, BEGIN_S, STALE, asked, evaluated, parsed, push, rounds, same, with_ends
from tests.helpers import examples
from tests.prometheus import Prometheus, prometheus

FIXTURE = Path(__file__).parents[1] / "fixtures" / "promql.txt"
NAN, INF = math.nan, math.inf
STEPS = 61


def counter(*, begin: float = 0.0, by: float, resets: tuple[int, ...] = ()) -> list[float | None]:
    """A counter that begins again at some steps."""
    values: list[float | None] = []
    value = begin
    for step in range(STEPS):
        value = by / 3 if step in resets else value + by
        values.append(value)
    return values


def holes(values: list[float | None], *gone: range) -> list[float | None]:
    """The same, not there for a while."""
    return [None if any(step in part for part in gone) else value for step, value in enumerate(values)]


WAVE = [10 * math.sin(step / 5) for step in range(STEPS)]
RECORDED: dict[str, list[float | None]] = {
    'ops{job="a",rank="0",group="dp"}': counter(begin=100, by=7.5),
    'ops{job="a",rank="1",group="dp"}': counter(by=7.25, resets=(13, 40)),
    'ops{job="a",rank="2",group="tp"}': holes(counter(by=3), range(10, 14), range(30, 52)),
    'ops{job="b",rank="0",group="dp"}': holes(counter(by=0.125), range(20), range(45, STEPS)),
    'ops{job="b",rank="1",group="tp"}': counter(begin=1e9, by=0),
    'seconds{job="a",rank="0",group="dp"}': counter(by=1.5),
    'seconds{job="a",rank="1",group="dp"}': counter(by=0.0),
    'seconds{job="a",rank="2",group="tp"}': counter(by=2.5, resets=(20,)),
    'share{job="a",rank="0"}': [0.1 + value / 100 for value in WAVE],
    'share{job="a",rank="1"}': [0.4 if step % 7 else None for step in range(STEPS)],
    'share{job="a",rank="2"}': [NAN if step % 5 == 0 else 0.3 for step in range(STEPS)],
    'share{job="b",rank="0"}': [INF if step % 9 == 4 else -0.5 for step in range(STEPS)],
    'share{job="b",rank="1"}': [-INF if step == 20 else -value for step, value in enumerate(WAVE)],
    'wave{job="a"}': [*WAVE],
    'level{job="a",rank="0",size="2"}': [float(step // 10) for step in range(STEPS)],
    'level{job="a",rank="1",size="2"}': [2.5] * STEPS,
    'level{job="b",rank="0",size="1"}': [2.0] * STEPS,
    'odd{text="a.b"}': [1.0] * STEPS,
    'odd{text="axb"}': [2.0] * STEPS,
    'odd{text="",more="x"}': [3.0] * STEPS,
    'rank_info{job="a",rank="0",gpu="0",hook="native"}': [1.0] * STEPS,
    'rank_info{job="a",rank="1",gpu="1",hook="native"}': [1.0] * STEPS,
    'rank_info{job="b",rank="0",gpu="0",hook="python"}': [1.0] * STEPS,
    'group_info{job="a",group="dp",group_size="2"}': [1.0] * STEPS,
    'group_info{job="a",group="tp",group_size="3"}': [1.0] * STEPS,
    'took_bucket{job="a",le="0.1"}': counter(by=3),
    'took_bucket{job="a",le="1.0"}': counter(by=5),
    'took_bucket{job="a",le="+Inf"}': counter(by=6),
    'took_sum{job="a"}': counter(by=2.2),
    'took_count{job="a"}': counter(by=6),
    'ended{job="a"}': holes([5.0] * STEPS, range(30, STEPS)),
    'huge{job="a"}': [1e308] * STEPS,
    'huge{job="b"}': [1e308] * STEPS,
    'tiny{job="a"}': [1e-7] * STEPS,
    'tiny{job="b"}': [123456789.125] * STEPS,
}
EXPRESSIONS = [
    *(line for line in FIXTURE.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")),
    *(
        f"{name}({metric}[{span}])"
        for name in RANGE_FUNCTIONS
        for metric in ("ops", "share")
        for span in ("1m", "5m", "14s")
    ),
    *(f"{name}({metric}[2m])" for name in RANGE_FUNCTIONS for metric in ("level", "huge", "ended", "wave")),
    *(
        f"{op} {how} (share)"
        for op in ("sum", "min", "max", "avg", "count", "group")
        for how in (
            "",
            "by (job)",
            "by ()",
            "without (rank)",
            "without ()",
            "by (nothing)",
            "by (__name__)",
            "by (job, rank)",
        )
    ),
    *(
        f"quantile {how} ({q}, share)"
        for how in ("", "by (job)", "without (rank)")
        for q in ("0", "0.5", "1", "0.3", "-1", "2", "NaN")
    ),
    *(
        f"{op} {how} ({k}, ops)"
        for op in ("topk", "bottomk")
        for how in ("", "by (job)", "without (rank, group)")
        for k in ("1", "2", "2.9", "0", "-1")
    ),
    *(
        f"{left} {op} {right}"
        for op in ("+", "-", "*", "/", "%", "^")
        for left, right in (("share", "2"), ("0.3", "share"), ("wave", "0"), ("0", "wave"))
    ),
    *(
        f"{left} {op} {right}"
        for op in (">", "<", ">=", "<=", "==", "!=")
        for left, right in (("share", "0.3"), ("0.3", "share"))
    ),
    *(
        f"{left} {op} bool {right}"
        for op in (">", "<", ">=", "<=", "==", "!=")
        for left, right in (("share", "0.3"), ("0.3", "share"), ("1", "2"))
    ),
]
#: Between and at samples, before the first, within and beyond the time that the last one stands for.
TIMES_S = (
    -1.0,
    0.0,
    14.999,
    15.0,
    61.2,
    150.0,
    307.123,
    450.0,
    457.5,
    600.0,
    720.25,
    899.999,
    900.0,
    1199.0,
    1200.0,
    1201.0,
)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A Prometheus that has recorded all of it."""
    with prometheus(tmp_path_factory.mktemp("prometheus"), [], flags=ACCEPTS) as running:
        push(running, {parsed(name): with_ends(values) for name, values in RECORDED.items()})
        yield running


def test_agreement(real: Prometheus) -> None:
    """Every function, operator and modifier gives what Prometheus gives, at every time: through NaN, resets, gaps and ends."""
    expressions = [Expression(text) for text in EXPRESSIONS]
    samples = Samples([need for expression in expressions for need in expression.needs])
    differences, elements = [], 0
    times = list(TIMES_S)
    recorded = list(rounds(RECORDED))
    for at_s, there in [*recorded, (INF, {})]:
        while times and times[0] < at_s:
            now = times.pop(0)
            for expression in expressions:
                ours, theirs = evaluated(expression, samples, now), asked(real, expression.text, now)
                elements += len(theirs or ())
                if not same(ours, theirs):
                    differences.append(f"{expression.text} at {now}: {ours} is not {theirs}")
        if there:
            samples.add(BEGIN_S + at_s, there)
    assert not differences, "\n".join([f"{len(differences)}", *differences[:40]])
    assert elements > 10_000


CASES = count()
#: Milliseconds since the sample before, and the value: ``None`` where the series is gone.
POINTS = st.lists(
    st.tuples(
        st.integers(1, 60_000),
        st.one_of(
            st.none(),
            st.integers(0, 1000).map(float),
            st.floats(allow_subnormal=False, width=32),
            st.sampled_from([0.0, 0.0, 5.0, NAN, INF, -INF]),
        ),
    ),
    min_size=1,
    max_size=25,
)


@examples(150)
@given(points=POINTS, span_s=st.integers(1, 600), later_ms=st.integers(0, 400_000))
def test_any_series(real: Prometheus, points: list[tuple[int, float | None]], span_s: int, later_ms: int) -> None:
    """Whatever a series is, at whatever times it was looked at: every function of ranges, and its last sample, agree."""
    case = str(next(CASES))
    labels: Labels = labels_of({NAME: "any", "case": case})
    texts = [f'any{{case="{case}"}}', *(f'{name}(any{{case="{case}"}}[{span_s}s])' for name in RANGE_FUNCTIONS)]
    expressions = [Expression(text) for text in texts]
    samples = Samples([need for expression in expressions for need in expression.needs])
    pushed, at_ms, there = [], 0, False
    for after_ms, value in points:
        at_ms += after_ms
        samples.add(BEGIN_S + at_ms / 1000, {} if value is None else {labels: value})
        if value is not None or there:
            pushed.append((round(BEGIN_S * 1000) + at_ms, STALE if value is None else value))
        there = value is not None
    if pushed:
        push(real, {labels: pushed})
    now = (at_ms + later_ms) / 1000
    for expression in expressions:
        ours, theirs = evaluated(expression, samples, now), asked(real, expression.text, now)
        assert same(ours, theirs), f"{expression.text}: {ours} is not {theirs}"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("ops offset 5m", "offset"),
        ("ops @ 5", "@"),
        ("rate(ops[5m] offset 1m)", "offset"),
        ("max_over_time(rate(ops[5m])[10m:1m])", "subquery"),
        ("ops[5m]", "a range outside of a function"),
        ("histogram_quantile(0.9, ops)", "histogram_quantile"),
        ("irate(ops[5m])", "irate"),
        ("label_replace(ops, 'a', 'b', 'c', 'd')", "label_replace"),
        ("stddev(ops)", "stddev"),
        ("ops atan2 ops", "atan2"),
        ('ops{job="a" or job="b"}', "or between matchers"),
        ('ops{job=~"[[:alpha:]]"}', "by name"),
        (r'ops{job=~"\\pL"}', "regular expression"),
        ('count_values("a-b", ops)', "a-b"),
        ("ops +", "not PromQL"),
        ("nosuch(ops)", "not PromQL"),
        ("1 > 2", "BOOL"),
        ('"text"', "StringLiteral"),
    ],
)
def test_refused_by_name(text: str, named: str) -> None:
    """What is not supported is refused when it is read, and the message names it."""
    with pytest.raises(UnsupportedExpression, match=named):
        Expression(text)


def test_many_to_many_names_the_labels() -> None:
    """Elements with several partners are an error that says which."""
    expression = Expression("ops * on (job) ops")
    samples = Samples(expression.needs)
    samples.add(0, {labels_of({NAME: "ops", "job": "a", "rank": rank}): 1.0 for rank in "01"})
    with pytest.raises(EvaluationError, match=r'many-to-many.*rank="0".*rank="1".*\{job="a"\}'):
        expression.evaluate(Moment(samples, 0, 0))


def test_two_clocks() -> None:
    """Ranges go by the clock of the samples, and only ``time()`` by the wall clock."""
    both = Expression("rate(ops[1m]) * 0 + time()")
    samples = Samples(both.needs)
    for at_s in (1000, 1015, 1030):
        samples.add(at_s, {labels_of({NAME: "ops"}): float(at_s)})
    assert both.evaluate(Moment(samples, 1030, 5.0)) == {(): 5.0}


def kept(samples: Samples, name: str) -> list[float]:
    """The values that are still there."""
    window = Expression(f"count_over_time({name}[10w])")
    return list(window.evaluate(Moment(samples, 1e6, 0)).values())


def test_samples_are_bounded() -> None:
    """Only what expressions read is kept, as long as they need it; series that are no more are forgotten, and too many refused."""
    needs = [need for text in ("increase(ops[2m])", "level") for need in Expression(text).needs]
    samples = Samples(needs)
    assert [samples.wants(name) for name in ("ops", "level", "other")] == [True, True, False]
    for at_s in range(0, 1000, 15):
        samples.add(at_s, {labels_of({NAME: name}): float(at_s) for name in ("ops", "level", "other")})
    assert [kept(samples, name) for name in ("ops", "level", "other")] == [[9.0], [1.0], []]
    samples.add(1005, {})
    samples.add(1500, {labels_of({NAME: "ops", "n": str(n)}): 1.0 for n in range(MOST_SERIES + 7)})
    assert samples.refused == 7
    assert len(kept(samples, "ops")) == MOST_SERIES
    assert kept(samples, "level") == []
    with pytest.raises(ValueError, match="come after"):
        samples.add(1499, {})


@pytest.mark.parametrize("value", [3.0, 1e-7, 123456789.125, 1e22, -0.0, NAN, INF])
def test_values_as_labels(real: Prometheus, value: float) -> None:
    """A value becomes a label as Prometheus writes it."""
    expression = Expression(f'count_values("v", vector({value!r}))')
    assert same(evaluated(expression, Samples(()), 0), asked(real, expression.text, 0))
