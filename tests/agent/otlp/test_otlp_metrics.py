"""Metrics as OTLP: every series of ``/metrics`` with its value, and since when it counts."""

from __future__ import annotations

from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from commwatch_agent.otlp.metrics import Starts, request
from commwatch_agent.otlp.resource import attributes_of
from commwatch_agent.prometheus.metrics import METRICS
from tests.agent.prometheus.test_metrics import READINGS, page, recorded
from tests.agent.prometheus.test_metrics import exporter as exported
from tests.agent.prometheus.test_metrics import samples as on_page
from tests.helpers import EPOCH_NS
from tests.otlp import labels, samples, starts

AGENT = attributes_of({}, "node1", "node1:9477")


def test_same_as_the_page(tmp_path: Path) -> None:
    """A request has every series of the page with the same name, labels and value, and no other."""
    aggregate = recorded(tmp_path)
    made = request(exported(aggregate, READINGS).collect(), AGENT, Starts(EPOCH_NS), EPOCH_NS)
    expected = on_page(page(aggregate, READINGS))
    assert len(expected) > 100
    assert samples(made) == expected
    kinds = {
        metric.name: metric.WhichOneof("data")
        for of_job in made.resource_metrics
        for metric in of_job.scope_metrics[0].metrics
    }
    types = {"sum": "counter", "gauge": "gauge", "histogram": "histogram"}
    specs = {spec.name: spec for spec in METRICS.values()}
    assert {name: types[str(kind)] for name, kind in kinds.items()} == {name: specs[name].kind for name in kinds}
    assert set(types) == set(kinds.values())


def test_resources(tmp_path: Path) -> None:
    """Each job is a resource with its job_id, the rest of the agent is one without; all have the attributes of the agent."""
    made = request(exported(recorded(tmp_path)).collect(), AGENT, Starts(EPOCH_NS), EPOCH_NS)
    found = [labels(of_job.resource.attributes) for of_job in made.resource_metrics]
    jobs = [resource.pop("job_id", None) for resource in found]
    assert sorted(map(str, jobs)) == ["None", "eval", "train"]
    assert all(resource == AGENT for resource in found)
    assert AGENT["service.name"] == "commwatch"
    assert (AGENT["host.name"], AGENT["service.instance.id"]) == ("node1", "node1:9477")


def test_attributes_of_a_pod() -> None:
    """Pod, namespace and node come from the usual variables of the downward API; OTEL_RESOURCE_ATTRIBUTES adds to all, and overrides."""
    pod = {"POD_NAME": "train-0", "POD_NAMESPACE": "ml", "NODE_NAME": "gpu7", "POD_UID": ""}
    given = {"OTEL_RESOURCE_ATTRIBUTES": "service.name=mine, team=a%2Cb,,broken,=x"}
    found = attributes_of({**pod, **given}, "h", "h:1")
    assert {key: value for key, value in found.items() if key.startswith("k8s.")} == {
        "k8s.pod.name": "train-0",
        "k8s.namespace.name": "ml",
        "k8s.node.name": "gpu7",
    }
    assert (found["service.name"], found["team"]) == ("mine", "a,b")
    assert "" not in found


class _Counter(Collector):
    """Counters by name, set by hand."""

    def __init__(self, **values: float) -> None:
        self.values = values

    def collect(self) -> list[Metric]:
        return [CounterMetricFamily(f"commwatch_{name}_total", "", value) for name, value in self.values.items()]


def started(counter: _Counter, since: Starts, at_ns: int) -> dict[str, int]:
    """Since when the counters count, by name, in a round at ``at_ns``."""
    registry = CollectorRegistry()
    registry.register(counter)
    return {name: start_ns for (name, _), start_ns in starts(request(registry.collect(), AGENT, since, at_ns)).items()}


def test_starts() -> None:
    """A counter of the agent counts from the last round without it, and after a fall from the round before the fall."""
    steps, counter, since = "commwatch_steps_total", _Counter(steps=3), Starts(100)
    assert started(counter, since, 200) == {steps: 100}
    counter.values["long_steps"] = 1
    assert started(counter, since, 300) == {steps: 100, "commwatch_long_steps_total": 200}
    counter.values.update(steps=2)
    assert started(counter, since, 400) == {steps: 300, "commwatch_long_steps_total": 200}


def test_gone_and_back() -> None:
    """A counter that is absent for some rounds counts from its start on, from the round before its return if it fell, or was forgotten."""
    steps, counter, since = "commwatch_steps_total", _Counter(steps=3), Starts(100)

    def returned(value: float, at_ns: int, rounds: int = 1) -> int:
        counter.values.clear()
        for _ in range(rounds):
            started(counter, since, at_ns - 50)
        counter.values["steps"] = value
        return started(counter, since, at_ns)[steps]

    assert started(counter, since, 200) == {steps: 100}
    assert returned(9, 400) == 100
    assert returned(8, 600) == 550
    assert returned(10, 900, rounds=240) == 850


def test_withheld() -> None:
    """Communication time in steps that was withheld at first counts from the start of its rank's steps on, as its value does."""

    def seen(at_ns: int, *names: str) -> dict[str, int]:
        families = [CounterMetricFamily(f"commwatch_{name}", "", labels=labels) for name in names]
        for family in families:
            family.add_metric(["job", "0", "probe"][: len(labels)], 5)
        return {name: start for (name, _), start in starts(request(families, AGENT, since, at_ns)).items()}

    labels, since = ["job_id", "rank"], Starts(100)
    assert seen(200, "steps_total") == {"commwatch_steps_total": 100}
    assert seen(300, "steps_total", "step_comm_seconds_total")["commwatch_step_comm_seconds_total"] == 100
    labels = ["job_id", "rank", "source"]
    assert seen(400, "step_exposed_comm_seconds_total") == {"commwatch_step_exposed_comm_seconds_total": 100}


def test_unknown_start() -> None:
    """A counter of the kernel or a driver, whose beginning is unknown, counts from its first observation on."""
    sent, counter, since = "commwatch_network_bytes_total", _Counter(network_bytes=3e9), Starts(100)
    assert started(counter, since, 200) == {sent: 200}
    assert started(counter, since, 300) == {sent: 200}
    counter.values["network_bytes"] = 5
    assert started(counter, since, 400) == {sent: 300}
