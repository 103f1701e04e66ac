"""The agent's evaluator beside Prometheus over the list that we ship: alert by alert the same, pending and firing, at each evaluation."""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from commwatch_agent.alerting.alert_rules import labels_by_series
from commwatch_alerts.catalogue import Catalogue, read, shipped
from commwatch_alerts.evaluator import Evaluator
from commwatch_alerts.model import FIRING
from commwatch_alerts.series import Samples
from tests.alerts.cases import CASES, THRESHOLDS
from tests.alerts.recorded import Recorded, agree, rounds
from tests.helpers import needs

LIST = read(shipped("rules.yaml"), THRESHOLDS)
#: What an agent evaluates itself.
OURS = {rule.name for rule in LIST.alerts if not rule.prometheus_only}
#: How long all is gone at the end, in samples: more than any window and ``keep_firing_for`` together.
AFTER = 84
RECORDED = Path(__file__).parents[1] / "fixtures" / "alerts" / "two_ranks.txt"

Values = list[float | None]


@pytest.fixture(autouse=True)
def _promtool() -> None:
    needs(shutil.which("promtool"), "promtool")


def impatient(rules: Catalogue) -> Catalogue:
    """The same list, but for how long a condition has to hold, and is kept: a tenth of it."""
    alerts = (replace(one, for_s=one.for_s / 10, keep_firing_for_s=one.keep_firing_for_s / 10) for one in rules.alerts)
    return replace(rules, alerts=tuple(alerts))


# -- the cases of the table -------------------------------------------------------------------


def expanded(notation: str) -> Values:
    """The samples that promtool makes of its notation: ``0+2x3`` is 0 2 4 6, ``_x2`` nothing twice."""
    found: Values = []
    for part in notation.split():
        match = re.fullmatch(r"(_|-?[\d.]+(?:e[+-]?\d+)?)(?:\+([\d.]+))?(?:x(\d+))?", part)
        assert match is not None, part
        first, each, times = match.groups()
        if first == "_":
            found += [None] * int(times or 1)
        else:
            found += [float(first) + float(each or 0) * n for n in range(int(times or 0) + 1)]
    return found


def test_notation() -> None:
    """What promtool writes in short is read as it means it."""
    assert expanded("_x2 0+2x3 7x1 5") == [None, None, 0, 2, 4, 6, 7, 7, 5]


def together() -> Recorded:
    """The series of all cases, each on nodes and in jobs of its own, and gone at the end."""
    found: dict[str, Sequence[float | None]] = {}
    for number, case in enumerate(case for case in CASES if case.alert in OURS):
        for name, notation in case.series.items():
            own = re.sub(r'(instance|job_id)="([^"]*)"', rf'\g<1>="\g<2>{number}"', name)
            found[own] = [*expanded(notation), *[None] * AFTER]
    return found


def test_cases(tmp_path: Path) -> None:
    """From series at the edge of a threshold follows the same for both, from the first sample until all is over; every alert fires."""
    assert agree(tmp_path, LIST.alerts, LIST.records, together()).keys() == OURS


# -- a real job -------------------------------------------------------------------------------


def recorded() -> Recorded:
    """What a real agent has served."""
    lines = [line for line in RECORDED.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    return {name: [*expanded(values), *[None] * AFTER] for name, values in (line.split(" ", 1) for line in lines)}


@pytest.mark.parametrize("patience", ["as shipped", "impatient"])
def test_recorded(tmp_path: Path, patience: str) -> None:
    """Of a job that waited for its link, was freed, and then lost a rank, both tell the same at the same moments."""
    rules = LIST if patience == "as shipped" else impatient(LIST)
    assert agree(tmp_path, rules.alerts, rules.records, recorded()).total() > 10


def test_what_was_recorded() -> None:
    """In that recording there is what the test is about: the bottleneck, and the ranks that are lost; nothing else fires."""
    waits = {"CommShareHigh", "CommShareCritical", "ExposedCommHigh", "BusBandwidthLow"}  # which has a floor here
    assert firing(recorded()) == {*waits, "RankLost"}


# -- whatever comes ---------------------------------------------------------------------------

#: What labels may be. Few of each, so that conditions on several metrics meet.
CHOICES = {
    "job_id": ("j", "k"),
    "rank": ("0", "1"),
    "gpu": ("0", "1"),
    "group": ("dp",),
    "group_id": ("d",),
    "group_size": ("2",),
    "op": ("all_reduce", "barrier"),
    "reference": ("bench", "own_best"),
    "device": ("eth0", "mlx5_0:1"),
    "direction": ("transmit", "receive"),
    "reason": ("hardware", "power_cap"),
    "xid": ("13", "79"),
    "type": ("corrected", "uncorrected"),
    "event": ("symbol_error", "other"),
    "finding": ("socket_transport", "gdr_off"),
    "severity": ("error", "warning"),
    "collector": ("gpu", "host"),
    "world_size": ("4",),
}
KINDS = {"commwatch_verdict_seconds": ("straggler", "hang", "stalled", "desync", "corruption")}
#: About what values are, where that is not about one: so that they cross the thresholds. Of counters, a second's growth.
ABOUT = {
    "commwatch_verdict_seconds": 900.0,
    "commwatch_network_speed_bytes_per_second": 1000.0,
    "commwatch_network_bytes_total": 700.0,
    "commwatch_collective_bus_bytes_total": 6e8,
    "commwatch_collective_seconds_total": 0.6,
    "commwatch_straggler_wait_ratio": 0.1,
    "commwatch_network_errors_total": 0.03,
    "commwatch_infiniband_events_total": 0.1,
    "commwatch_network_link_downs_total": 0.002,
    "commwatch_events_total": 100.0,
}
#: Either so or not.
SWITCHES = re.compile(r".*_(info|up|finding|throttled)")
STEPS = 120
#: Compared in every run. The even ones are for the impatient list: only among those of 8 is a link that is underused for long enough.
SEEDS = (0, 8, 1, 3)


def metrics() -> list[str]:
    """All that the rules read, recorded ones excluded."""
    samples = Samples(Evaluator(LIST.alerts, LIST.records, lambda template, labels, value, also: "").needs)
    return [name for name in labels_by_series() if samples.wants(name)]


def values(noise: random.Random, name: str) -> Values:
    """A series as an agent might have it: it comes and goes, wanders or grows, now fast, now slowly; counters begin anew at times."""
    about, total, found = ABOUT.get(name, 1.0), 0.0, Values()
    there, level = noise.random() < 0.8, noise.random()
    for _ in range(STEPS):
        there ^= noise.random() < 0.02
        level = noise.random() if noise.random() < 0.06 else level
        value = about * level * noise.uniform(0.9, 1.1)
        if SWITCHES.fullmatch(name):
            value = float(level > 0.4)
        elif name.endswith("_total"):
            total = value if noise.random() < 0.01 else total + 15 * value
            value = total
        found.append(value if there else None)
    return found


def wandering(seed: int) -> Recorded:
    """Series of all metrics that the rules read."""
    noise, found = random.Random(seed), dict[str, Values]()
    for name in metrics():
        labels = labels_by_series()[name]
        kinds = KINDS.get(name, ("ethernet", "infiniband", "virtual"))
        choices = [CHOICES.get(label, kinds if label == "kind" else ("x",)) for label in labels]
        sets = list(product(*choices))
        for chosen in noise.sample(sets, min(len(sets), 6)):
            inside = ",".join(f'{label}="{value}"' for label, value in zip(labels, chosen, strict=True))
            found[f'{name}{{{inside}{"," if inside else ""}instance="a"}}'] = values(noise, name)
    return found


@pytest.mark.parametrize("seed", [*SEEDS, *(pytest.param(seed, marks=pytest.mark.long) for seed in (2, 4, 5, 6, 7))])
def test_whatever_comes(tmp_path: Path, seed: int) -> None:
    """Series that wander across the thresholds, come and go, and begin anew: both have the same alerts all along."""
    rules = LIST if seed % 2 else impatient(LIST)
    assert agree(tmp_path, rules.alerts, rules.records, wandering(seed)).total() > 100


def test_every_alert_comes() -> None:
    """Among these series are some for every alert of the list that an agent raises, so all are compared."""
    missing = set(OURS)
    for seed in SEEDS:
        missing -= firing(wandering(seed)) if missing else set()
    assert missing == set()


def firing(recorded: Recorded) -> set[str]:
    """Names of the alerts that fire over these series, for an agent with an impatient list."""
    rules = impatient(LIST)
    evaluator = Evaluator(rules.alerts, rules.records, lambda template, labels, value, also: "")
    samples, found = Samples(evaluator.needs), set()
    for at_s, there in rounds(recorded):
        samples.add(at_s, there)
        found |= {one.name for one in evaluator.evaluate(at_s, at_s, samples) if one.state == FIRING}
    return found
