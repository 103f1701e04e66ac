"""Rules on links and operations: are they fast enough? Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from statistics import fmean

from commwatch_agent.incidents.incident import Condition
from commwatch_agent.incidents.metric_conditions import DEVICE, OPERATION, Name, condition
from commwatch_agent.incidents.metric_window import Labels, MetricWindow, Vector, by, only
from commwatch_agent.text.units import percent, rate


def link_saturated(window: MetricWindow, thresholds: Mapping[str, float], now_s: float) -> Iterator[Condition]:
    """Network devices near their speed, on nodes with ranks: other traffic does not concern training."""
    speeds, nodes = _speeds(window), by(window.latest(Name.RANK_INFO), ["instance"], max)
    for labels, used in _utilization(window).items():
        if used > thresholds["link_used"] and only(labels, ["instance"]) in nodes:
            device, speed = dict(labels).get("device", ""), speeds[labels]
            yield condition(
                "link_saturated",
                (device,),
                dict(labels),
                now_s=now_s,
                value=used,
                says=f"network device {device} uses {percent(used)} of its speed, {rate(speed)}",
                numbers={"speed": speed},
                source="host",
                metric=Name.NETWORK_BYTES,
                measured=f"{rate(used * speed)} of {rate(speed)} in the busier direction, over five minutes",
            )


def idle_links(window: MetricWindow, thresholds: Mapping[str, float], now_s: float) -> Iterator[Condition]:
    """Nodes with a job that spans nodes and waits for communication, while all links are nearly idle: bandwidth is not the cause."""
    comm_shares, wide = by(window.latest(Name.COMM_SHARE), ["instance", "job_id"], fmean), _wide_jobs(window)
    waiting = {
        labels: comm for labels, comm in comm_shares.items() if labels in wide and comm > thresholds["comm_share"]
    }
    bound = by(waiting, ["instance"], max)
    for labels, most in by(_utilization(window), ["instance"], max).items():
        if labels in bound and most < thresholds["link_floor"]:
            comm = bound[labels]
            yield condition(
                "comm_bound",
                ("idle_links",),
                dict(labels),
                now_s=now_s,
                value=most,
                variant="idle_links",
                says=f"communication takes {percent(comm)} of the step time of a job that spans nodes, "
                f"but the busiest network device uses {percent(most)} of its speed",
                source="host",
                metric=Name.NETWORK_BYTES,
                measured=f"{percent(most)} in the busier direction of the busiest device, over five minutes",
            )


def bandwidth_low(window: MetricWindow, thresholds: Mapping[str, float], now_s: float) -> Iterator[Condition]:
    """Operations that are slow, and take much time: a barrier of a few microseconds never reaches the bandwidth of a link."""
    parts = by(window.rate(Name.COLLECTIVE_S), OPERATION, max)
    for labels, efficiency in _worst(window.latest(Name.EFFICIENCY)):
        least = thresholds["efficiency_own_best" if _by_own_best(labels) else "efficiency"]
        part = parts.get(only(labels, OPERATION), 0.0)
        if part > thresholds["op_share"] and efficiency < least:
            yield _slow(labels, efficiency, part, now_s)
    yield from _low_bus_bandwidth(window, parts, thresholds, now_s)


def _by_own_best(labels: Labels) -> bool:
    return dict(labels).get("reference") == "own_best"


def _worst(efficiencies: Vector) -> Iterable[tuple[Labels, float]]:
    """Return the lowest efficiency of each operation by a link's reference, and that by its own best."""
    falling = sorted(efficiencies.items(), key=lambda each: -each[1])
    return {(only(labels, OPERATION), _by_own_best(labels)): (labels, value) for labels, value in falling}.values()


def _slow(labels: Labels, efficiency: float, part: float, now_s: float) -> Condition:
    there = dict(labels)
    reference, own_best = there.get("reference", ""), _by_own_best(labels)
    speed = "of its own best speed" if own_best else f"of the speed expected by its reference ({reference})"
    return condition(
        "bandwidth_low",
        (there.get("group", ""), there.get("op", "")),
        there,
        now_s=now_s,
        value=efficiency,
        variant="own_best" if own_best else "reference",
        says=f"{_named(there)} runs at {percent(efficiency)} {speed}, and takes {percent(part)} of the time",
        numbers={"share": part},
        # What it takes longer than expected.
        share=part * max(0.0, 1 - efficiency),
        source="metrics",
        metric=Name.EFFICIENCY,
        measured=f"expected / measured time {percent(efficiency)} over a minute, {percent(part)} of the time over five",
    )


def _low_bus_bandwidth(
    window: MetricWindow, parts: Vector, thresholds: Mapping[str, float], now_s: float
) -> Iterator[Condition]:
    """Operations whose bus bandwidth is below the floor of the settings."""
    names, floor = ("job_id", "group", "op"), thresholds["bus_bandwidth_floor"]
    moved, took = (by(window.increase(name), names, sum) for name in (Name.BUS_BYTES, Name.COLLECTIVE_S))
    for labels, part in by(parts, names, max).items():
        there = dict(labels)
        bandwidth = moved[labels] / took[labels] if labels in moved and took.get(labels) else None
        if bandwidth is not None and bandwidth < floor and part > thresholds["op_share"]:
            yield condition(
                "bandwidth_low",
                (there.get("group", ""), there.get("op", "")),
                there,
                now_s=now_s,
                value=bandwidth,
                variant="bus",
                says=f"{_named(there)} has a bus bandwidth of {rate(bandwidth)}; the floor is {rate(floor)}",
                share=part * (1 - bandwidth / floor),
                source="metrics",
                metric=Name.BUS_BYTES,
                measured=f"{rate(bandwidth)} over five minutes, {percent(part)} of the time",
            )


def _named(there: Mapping[str, str]) -> str:
    return f"{there.get('op', '')} of group {there.get('group', '')}"


def _speeds(window: MetricWindow) -> Vector:
    return by(window.latest(Name.NETWORK_SPEED), DEVICE, max)


def _utilization(window: MetricWindow) -> dict[Labels, float]:
    """Return the share of its speed that each network device uses in the busier direction."""
    moved, speeds = by(window.rate(Name.NETWORK_BYTES), DEVICE, max), _speeds(window)
    return {labels: moved[labels] / speed for labels, speed in speeds.items() if labels in moved and speed > 0}


def _wide_jobs(window: MetricWindow) -> set[Labels]:
    """Return node and name of the jobs that have ranks on other nodes, too."""
    here = by(by(window.latest(Name.RANK_INFO), ["instance", "job_id", "rank"], max), ["instance", "job_id"], len)
    wide = set()
    for labels in window.latest(Name.JOB_INFO):
        job = only(labels, ["instance", "job_id"])
        if dict(labels).get("world_size") != str(int(here.get(job, 0))):
            wide.add(job)
    return wide
