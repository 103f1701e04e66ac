"""What must fire, and what must not: one table, for every alert of the list at its threshold and at the edge of its ``for``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

#: Seconds between samples, and between evaluations.
EVERY_S = 15
#: Samples of a series unless it says otherwise: 22 minutes.
MANY = 88
#: Thresholds that these cases need set: what is off by default.
THRESHOLDS = {"bus_bandwidth_floor": 1e9}
Series = dict[str, str]


class Case(NamedTuple):
    """Series, and what follows from them for the alerts of one name."""

    alert: str
    #: What this is about.
    why: str
    #: In promtool's notation, a sample each 15 s.
    series: Series
    #: What fires; nothing where it must not.
    severities: tuple[str, ...] = ()
    #: When it first does, in seconds: the evaluation before it does not.
    at_s: int = 0
    labels: Mapping[str, str] = {}
    value: float = 0.0
    also: Mapping[str, float] = {}
    #: When it no longer does, in seconds, if it ends.
    ends_s: int | None = None
    #: How long to look where nothing is to fire, in seconds.
    until_s: int = MANY * EVERY_S


def series(name: str, values: str, **labels: str) -> Series:
    """One series, as scraped from a node."""
    inside = {"instance": "a:9477", "job": "commwatch", **labels}
    return {f"{name}{{{','.join(f'{key}={_quoted(value)}' for key, value in inside.items())}}}": values}


def _quoted(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def gauge(name: str, value: float, **labels: str) -> Series:
    """A gauge that stands still."""
    return series(f"commwatch_{name}", f"{value}x{MANY}", **labels)


def counter(name: str, each: float, **labels: str) -> Series:
    """A counter that grows by ``each`` from sample to sample."""
    return series(f"commwatch_{name}", f"0+{each}x{MANY}", **labels)


def jump(name: str, by: int, **labels: str) -> Series:
    """A counter that stands still, but for one jump after ten minutes."""
    return series(f"commwatch_{name}", f"7x39 {7 + by}x{MANY}", **labels)


def later(there: Series) -> Series:
    """The same, from ten minutes on: what gates a condition, so that windows are full by then."""
    return {name: f"_x40 {values}" for name, values in there.items()}


def until_the_end(there: Series) -> Series:
    """The same, to the time when others end."""
    return {name: values.replace(f"x{MANY}", f"x{MANY - 41}") for name, values in there.items()}


WARNING, CRITICAL, INFO, BOTH = ("warning",), ("critical",), ("info",), ("warning", "critical")
JOB, RANK = {"job_id": "j"}, {"job_id": "j", "rank": "0"}
NODE = {"instance": "a:9477"}
OP = {"job_id": "j", "group": "dp", "op": "all_reduce"}


def share(value: float, exposed: float | None = None) -> Series:
    """Two ranks that have this communication share between them."""
    both = gauge("comm_share_ratio", value + 0.1, **RANK)
    both |= gauge("comm_share_ratio", value - 0.1, job_id="j", rank="1")
    return both if exposed is None else both | gauge("exposed_comm_share_ratio", exposed, **RANK)


def rank_info(**more: str) -> Series:
    """A rank that lives."""
    about = {**RANK, "gpu": "0", "local_rank": "0", "hook": "native"}
    return gauge("rank_info", 1, **{**about, **more})


def _shares() -> list[Case]:
    found = []

    # One of two ranks waits in two groups; a third one lived before the job was restarted with two.
    def waits(share: float) -> Series:
        of_two = counter("collective_wait_seconds_total", share * EVERY_S, group="dp", **RANK)
        of_two |= counter("collective_wait_seconds_total", share * EVERY_S, group="tp", **RANK)
        of_two |= counter("collective_wait_seconds_total", 0, group="dp", job_id="j", rank="1")
        of_two |= gauge("collective_wait_seconds_total", 70, group="dp", job_id="j", rank="2")
        return of_two | rank_info() | rank_info(rank="1")

    late = gauge("straggler_wait_ratio", 0.4, **RANK, group="dp", group_id="d")
    late |= gauge("straggler_wait_ratio", 0.2, job_id="j", rank="1", group="dp", group_id="d")
    for alert, limit, for_s, loud in (
        ("CommShareHigh", 0.3, 300, WARNING),
        ("CommShareCritical", 0.5, 600, CRITICAL),
    ):
        over = limit + 0.001
        known, quiet = {"exposed": 0.1}, {"exposed": 0.0999}
        found += [
            Case(alert, "exposed as much as is told", share(over, 0.1), loud, for_s, JOB, over, known),
            Case(alert, "exposed share not known", share(over), loud, for_s, JOB, over),
            Case(
                alert,
                "exposed, and ranks come late",
                share(over, 0.15) | waits(0.14),
                loud,
                for_s,
                JOB,
                over,
                {"exposed": 0.15, "waiting": 0.14},
            ),
            Case(
                alert,
                "mostly waiting for ranks that are late in turn",
                until_the_end(later(share(over, 0.2))) | waits(0.26),
                INFO,
                600 + for_s,
                JOB,
                over,
                {"exposed": 0.2, "waiting": 0.26},
            ),
            Case(alert, "hidden behind compute", share(over, 0.0999), INFO, for_s, JOB, over, quiet),
            Case(
                alert,
                "mostly waiting for a rank",
                share(over, 0.2) | late,
                INFO,
                for_s,
                JOB,
                over,
                {"exposed": 0.2, "waiting": 0.4 / 2},
            ),
            Case(
                alert,
                "waiting for a rank, but not mostly",
                share(0.81, 0.2) | late,
                loud,
                for_s,
                JOB,
                0.81,
                {"exposed": 0.2, "waiting": 0.4 / 2},
            ),
            # Compute waits for two minutes, and then does not for two, and so on: neither condition holds for long enough.
            Case(
                alert,
                "hidden every other time",
                share(over) | series("commwatch_exposed_comm_share_ratio", f"{'0.05x7 0.2x7 ' * 6}", **RANK),
                INFO,
                for_s,
                JOB,
                over,
                {"exposed": 0.05 if for_s % 240 < 120 else 0.2},
            ),
            Case(
                alert,
                "has not been hidden for five minutes",  # the last time 390 s after the start, and the share is high from 600 s on
                later(share(over)) | series("commwatch_exposed_comm_share_ratio", f"0.05x26 0.2x{MANY}", **RANK),
                loud,
                390 + 300 + EVERY_S + for_s,
                JOB,
                over,
                {"exposed": 0.2},
            ),
            Case(
                alert,
                "waiting for a rank every other time",
                share(over, 0.2)
                | series("commwatch_straggler_wait_ratio", f"{'0.4x7 0x7 ' * 6}", **RANK, group="dp", group_id="d"),
                INFO,
                for_s,
                JOB,
                over,
                {"exposed": 0.2, **({"waiting": 0.4 / 2} if for_s % 240 < 120 else {})},
            ),
            Case(alert, "at the threshold, exposed", share(limit, 0.2)),
            Case(alert, "at the threshold, hidden", share(limit, 0.05)),
            Case(
                alert,
                "for one evaluation less than it takes",
                series("commwatch_comm_share_ratio", f"0.9x{for_s // EVERY_S - 1} 0.1x{MANY}", **RANK),
            ),
        ]
    exposed = gauge("exposed_comm_share_ratio", 0.201, **RANK)
    return [
        *found,
        Case("ExposedCommHigh", "above", exposed | share(0.5), WARNING, 600, JOB, 0.201, {"share": 0.5}),
        Case("ExposedCommHigh", "share not known", exposed, WARNING, 600, JOB, 0.201),
        Case("ExposedCommHigh", "at the threshold", gauge("exposed_comm_share_ratio", 0.2, **RANK)),
    ]


def nic(per_second: float, **more: str) -> Series:
    """A device of 1,000 bytes per second, and what it moves."""
    about = {"device": "eth0", **more}
    return {
        **counter("network_bytes_total", per_second * EVERY_S, direction="transmit", **about),
        **counter("network_bytes_total", 1, direction="receive", **about),
        **gauge("network_speed_bytes_per_second", 1000, **about),
    }


def _links() -> list[Case]:
    device = {**NODE, "device": "eth0"}
    job = gauge("job_info", 1, job_id="j", world_size="16", restart="0")
    alone = gauge("job_info", 1, job_id="j", world_size="1", restart="0")
    # Another job on the node that has ranks elsewhere, and hardly communicates.
    wide = gauge("job_info", 1, job_id="w", world_size="16", restart="0") | rank_info(job_id="w")
    wide |= gauge("comm_share_ratio", 0.05, job_id="w", rank="0")
    busy = later(share(0.301))
    idle, under = nic(99) | busy | rank_info() | job, "LinkUnderused"
    speed = {"speed": 1000.0}
    return [
        Case("LinkSaturated", "above", nic(910) | later(rank_info()), WARNING, 900, device, 0.91, speed),
        Case("LinkSaturated", "below", nic(899) | rank_info()),
        Case("LinkSaturated", "no rank on the node", nic(1000)),
        Case(under, "idle links, busy job", idle, INFO, 1200, NODE, 0.099),
        Case(under, "at the threshold", nic(100) | busy | rank_info() | job),
        Case(under, "all ranks on this node", nic(99) | busy | rank_info() | alone),
        Case(under, "communication is no bottleneck", nic(99) | share(0.3) | rank_info() | job),
        Case(under, "the busy job is another one", nic(99) | busy | rank_info() | alone | wide),
    ]


def _operations() -> list[Case]:
    matters = counter("collective_seconds_total", 0.9, rank="0", **OP)  # 6% of the time
    seldom = counter("collective_seconds_total", 0.75, rank="0", **OP)  # 5%
    found = []
    for alert, reference, other in (
        ("EfficiencyLow", "bench", "own_best"),
        ("EfficiencyDropped", "own_best", "bench"),
    ):
        labels = {**NODE, "job": "commwatch", **OP, "reference": reference}

        def at(value: float, reference: str = reference) -> Series:
            return later(gauge("collective_efficiency_ratio", value, **OP, reference=reference))

        found += [
            Case(alert, "below", matters | at(0.49), WARNING, 1200, labels, 0.49, {"share": 0.06}),
            Case(alert, "at the threshold", matters | at(0.5)),
            Case(alert, "another reference", matters | at(0.1, other)),
            Case(alert, "the operation takes 5% of the time", seldom | at(0.1)),
        ]
    low, dropped = "BusBandwidthLow", "BusBandwidthDropped"

    def moved(each: float) -> Series:
        return later(counter("collective_bus_bytes_total", each, rank="0", **OP))

    def falls(first: int, to: float) -> Series:
        before, after = int(9e8), int(9e8 * to)
        moves = f"0+{before}x{first} {before * first + after}+{after}x{MANY}"
        seconds = f"0+0.9x{first + MANY}"
        return series("commwatch_collective_bus_bytes_total", moves, rank="0", **OP) | series(
            "commwatch_collective_seconds_total", seconds, rank="0", **OP
        )

    # 320 samples at 1 GB/s, then a window's fall to 0.4, in which the 17th sample is the first below half the mean.
    mean = 1 - (0.6 * sum(range(1, 21)) / 20 + 0.6 * 37) / 377
    fallen = (320 + 17) * EVERY_S + 600
    return [
        *found,
        Case(low, "below the floor", matters | moved(8.1e8), WARNING, 1215, OP, 9e8),
        Case(low, "at the floor", matters | moved(9e8)),
        Case(low, "the operation takes 5% of the time", seldom | moved(1e8)),
        Case(dropped, "below", falls(320, 0.4), WARNING, fallen, OP, 0.4 / mean, {"now": 4e8}),
        Case(dropped, "above half", falls(320, 0.6), until_s=(320 + MANY) * EVERY_S),
        Case(dropped, "less than an hour of history", falls(120, 0.4), until_s=(120 + MANY) * EVERY_S),
    ]


def verdict(kind: str, seconds: float) -> Series:
    """A verdict on rank 0."""
    return gauge("verdict_seconds", seconds, **RANK, group="dp", group_id="d", kind=kind)


def pair(first_ms: float, second_ms: float, agents: str = "ab") -> Series:
    """Two ranks of a job, by how much of its steps of 100 ms each communicates."""
    found: Series = {}
    for rank, (comm_ms, agent) in enumerate(zip((first_ms, second_ms), agents, strict=True)):
        about = {"instance": agent, "job_id": "j", "rank": str(rank)}
        found |= counter("periods_total", 150, **about)
        found |= counter("period_seconds_total", 15, **about)
        found |= counter("period_comm_seconds_total", 0.15 * comm_ms, **about)
        found |= counter("period_comm_square_seconds_total", 150 * (comm_ms / 1e3) ** 2, **about)
        found |= later(gauge("rank_info", 1, **about))
        found |= gauge("job_info", 1, instance=agent, job_id="j", world_size="2")
    return found


def inside(*seconds: float, agents: str = "ab", size: int = 2) -> Series:
    """Ranks of a group that have been inside an operation for so long."""
    found: Series = {}
    for rank, (age, agent) in enumerate(zip(seconds, agents, strict=False)):
        about = {"instance": agent, "job_id": "j", "rank": str(rank), "group": "dp", "group_id": "d"}
        found |= gauge("collective_in_flight_seconds", age, **about)
        found |= gauge("group_info", 1, **about, group_size=str(size))
    return found


def _verdicts() -> list[Case]:
    late = later(gauge("straggler_wait_ratio", 0.06, **RANK, group="dp", group_id="d"))
    cheap = gauge("straggler_wait_ratio", 0.05, **RANK, group="dp", group_id="d")
    culprit, across = {**RANK, "group": "dp"}, {"job_id": "j", "rank": "1"}
    nobody = gauge("verdict_seconds", 31, job_id="j", rank="", group="dp", group_id="d", kind="hang")
    group, stuck, stalled = {"job_id": "j", "group": "dp", "group_id": "d"}, "CollectiveStuck", "CollectiveStalled"
    straggler, apart = "StragglerRank", "StragglerAcrossNodes"
    slow, other = (
        gauge("incident_open", 1, job_id="j", kind=kind, severity="warning", rank="") for kind in ("slow_link", "hang")
    )
    waits = 61.0
    return [
        Case(straggler, "late", late, WARNING, 720, culprit, 0.06),
        Case(straggler, "at the threshold", cheap),
        Case(straggler, "another verdict", verdict("stalled", 30)),
        # One scrape later than after its ``for``: two shares are compared.
        Case(apart, "late", pair(60, 10), WARNING, 735, across, 0.5),
        Case(apart, "as late as the other", pair(60, 60)),
        Case("SlowLink", "open", slow, WARNING, 60, JOB, 1),
        Case("SlowLink", "another incident", other),
        Case("CollectiveHang", "above", verdict("hang", 31), CRITICAL, 30, culprit, 31),
        Case("CollectiveHang", "nobody to blame", nobody, CRITICAL, 30, {"job_id": "j", "group": "dp"}, 31),
        Case("CollectiveHang", "at the threshold", verdict("hang", 10)),
        Case("CollectiveHang", "stalled only", verdict("stalled", 3000)),
        Case(stuck, "all inside", inside(181, 3000), CRITICAL, 0, group, 181),
        Case(stuck, "one at the threshold", inside(180, 3000)),
        Case(stuck, "one not in sight", inside(181, size=2)),
        Case(stuck, "one agent sees all", inside(181, 3000, agents="aa")),
        Case(stalled, "above", verdict("stalled", waits), WARNING, 0, culprit, waits),
        Case(stalled, "until somebody is woken", verdict("stalled", 601), BOTH, 0, culprit, 601),
        Case(stalled, "at that threshold", verdict("stalled", 600), WARNING, 0, culprit, 600),
        Case(stalled, "at the threshold", verdict("stalled", 60)),
        Case("RankMissing", "above", verdict("init_incomplete", waits), WARNING, 0, culprit, waits),
        Case("RankMissing", "at the threshold", verdict("init_incomplete", 60)),
        Case("CollectiveDesync", "there", verdict("desync", 2), CRITICAL, 0, culprit, 2),
        Case("CollectiveDesync", "another verdict", verdict("hang", 2)),
        Case("DataCorruption", "there", verdict("corruption", 2), CRITICAL, 0, culprit, 2),
        Case("DataCorruption", "another verdict", verdict("desync", 2)),
    ]


def _ranks_and_logs() -> list[Case]:
    other = {"job_id": "j", "rank": "1"}
    lives, lost = gauge("rank_up", 1, **other), gauge("rank_up", 0, **RANK)
    soon = series("commwatch_rank_up", f"0 1x{MANY}", **RANK)
    all_lost = lost | gauge("rank_up", 0, **other)
    on_node = {**NODE, **JOB}

    def world(size: int) -> Series:
        return gauge("job_info", 1, job_id="j", world_size=str(size), restart="0")

    def finding(name: str, severity: str) -> Series:
        return gauge("nccl_finding", 1, job_id="j", finding=name, severity=severity)

    def port(kind: str) -> Series:
        about = {"device": "mlx5_0:1", "netdev": "", "pci": "", "numa_node": "0", "link": ""}
        return gauge("network_info", 1, kind=kind, **about)

    sockets, error = finding("socket_transport", "warning"), {**JOB, "finding": "timeout"}
    return [
        Case("RankLost", "one of two", lost | lives | world(2), WARNING, 15, RANK, 0),
        Case("RankLost", "all", all_lost | world(2), INFO, 60, JOB, 0, {"ranks": 2}),
        Case("RankLost", "all of a node, others elsewhere", lost | world(2), WARNING, 15, RANK, 0),
        Case("RankLost", "none", lives),
        Case("RankLost", "started again within 10 s", soon | lives),
        Case("NcclErrors", "an error", finding("timeout", "error"), WARNING, 0, error, 1),
        Case("NcclErrors", "a warning", finding("slow_init", "warning")),
        Case("SocketTransport", "beside InfiniBand", sockets | port("infiniband"), WARNING, 60, on_node, 1),
        Case("SocketTransport", "nothing else there", sockets | port("ethernet"), INFO, 60, on_node, 1),
        Case("SocketTransport", "another finding", finding("gdr_off", "warning") | port("infiniband")),
        Case("GpuDirectOff", "there", finding("gdr_off", "warning"), WARNING, 60, on_node, 1),
        Case("GpuDirectOff", "another finding", sockets),
    ]


def _gpus() -> list[Case]:
    card = {**NODE, "gpu": "0"}
    low, throttled = "GpuUtilizationLow", "GpuThrottled"

    def used(value: float) -> Series:
        return gauge("gpu_utilization_ratio", value, gpu="0") | rank_info()

    def held(value: float, reason: str = "hardware") -> Series:
        return gauge("gpu_throttled", value, gpu="0", reason=reason)

    def xid(number: str) -> Series:
        return gauge("gpu_xid_errors_total", 1, gpu="0", xid=number)

    starved, corrected = used(0.49) | share(0.301), gauge("gpu_ecc_errors_total", 5, gpu="0", type="corrected")
    reason, which = {**card, "reason": "hardware"}, {**card, "xid": "79"}
    return [
        Case(low, "starved", starved, WARNING, 600, JOB, 0.49, {"share": 0.301}),
        Case(low, "at the threshold", used(0.5) | share(0.301)),
        Case(low, "communication is no bottleneck", used(0.1) | share(0.3)),
        Case(throttled, "held back", held(1), WARNING, 300, reason, 1),
        Case(throttled, "at the threshold", held(0.5)),
        Case(throttled, "at its power limit", held(1, "power_cap")),
        Case("GpuXid", "off the bus", xid("79"), WARNING, 0, which, 1),
        Case("GpuXid", "an error of the program", xid("13")),
        Case("GpuLost", "lost", gauge("gpu_up", 0, gpu="0"), WARNING, 60, card, 0),
        Case("GpuLost", "there", gauge("gpu_up", 1, gpu="0")),
        Case(
            "GpuEccErrors",
            "uncorrected",
            gauge("gpu_ecc_errors_total", 1, gpu="0", type="uncorrected"),
            WARNING,
            0,
            card,
            1,
        ),
        Case("GpuEccErrors", "none", gauge("gpu_ecc_errors_total", 0, gpu="0", type="uncorrected") | corrected),
    ]


def _devices() -> list[Case]:
    device, port = {**NODE, "device": "eth0"}, {**NODE, "device": "mlx5_0:1"}
    about = {"device": "eth0", "netdev": "", "pci": "", "numa_node": "0", "link": ""}
    real = gauge("network_info", 1, **about, kind="ethernet")
    virtual = gauge("network_info", 1, **about, kind="virtual")

    def errors(number: int) -> Series:
        return jump("network_errors_total", number, device="eth0", direction="receive")

    def event(number: int, name: str) -> Series:
        return jump("infiniband_events_total", number, device="mlx5_0:1", event=name)

    def losses(number: int) -> Series:
        return jump("network_link_downs_total", number, device="eth0")

    return [
        Case("NetworkErrors", "above", errors(11) | real, WARNING, 660, device, 11),
        Case("NetworkErrors", "at the threshold", errors(10) | real),
        Case("NetworkErrors", "a virtual device", errors(11) | virtual),
        Case("InfinibandErrors", "above", event(11, "symbol_error"), WARNING, 660, port, 11),
        Case("InfinibandErrors", "at the threshold", event(10, "symbol_error")),
        Case("InfinibandErrors", "congestion", event(1000, "np_cnp_sent")),
        Case("LinkLost", "once", losses(1) | real, WARNING, 600, device, 1),
        Case("LinkLost", "never", losses(0) | real),
        Case("LinkLost", "the driver counts from 0 again", losses(-7) | real),
        Case("LinkLost", "a virtual device", losses(1) | virtual),
    ]


def _monitor() -> list[Case]:
    def records(read: int, dropped: int) -> Series:
        return counter("events_total", read, job_id="j") | counter("events_dropped_total", dropped, job_id="j")

    def recorded(part: float, rank: str) -> Series:
        return gauge("probe_recorded_ratio", part, job_id="j", rank=rank)

    def ends(agent: str, rank: str, **labels: str) -> Series:
        about = {"job_id": "j", "gpu": "0", "local_rank": "0", "hook": "native", **labels}
        return series("commwatch_rank_info", "1x39 stale", instance=agent, rank=rank, **about)

    per_job = ends("a:9477", "0", job="commwatch-per-job")
    ranks, gone = ends("a:9477", "0") | ends("a:9477", "1"), {**NODE, "job": "commwatch", "job_id": "j"}
    down, away = series("up", f"1x39 0x{MANY}"), series("up", "1x39 stale")
    elsewhere = rank_info(instance="b:9477", rank="2") | series("up", f"1x{MANY}", instance="b:9477")
    moved = rank_info(instance="b:9477", rank="0") | rank_info(instance="b:9477", rank="1") | elsewhere
    no_card = {**NODE, "collector": "gpu"}
    never = f"0x{MANY}"
    answers = series("commwatch_build_info", f"1x{MANY}", job="watch", instance="b:9477", version="1")
    return [
        Case("RecordsDropped", "above", records(989, 11), WARNING, 135, JOB, 0.011),
        Case("RecordsDropped", "at the threshold", records(990, 10)),
        Case("RecordsDropped", "an idle job", records(0, 0)),
        Case("ProbeSheds", "on one of two ranks", recorded(1, "0") | recorded(0.0625, "1"), WARNING, 300, JOB, 0.0625),
        Case("ProbeSheds", "all is recorded", recorded(1, "0") | recorded(1, "1")),
        Case("CollectorDown", "down", gauge("collector_up", 0, collector="gpu"), WARNING, 300, no_card, 0),
        Case("CollectorDown", "up", gauge("collector_up", 1, collector="gpu")),
        Case("AgentGone", "does not answer", ranks | down, WARNING, 900, gone, 2),
        Case("AgentGone", "no target any more", ranks | away | elsewhere, WARNING, 900, gone, 2),
        Case("AgentGone", "the job has ended, its targets are gone", ranks | away),
        Case("AgentGone", "the job has ended, the agent answers", ranks | series("up", f"1x{MANY}")),
        Case("AgentGone", "its ranks moved to another agent", ranks | down | moved),
        Case("AgentGone", "its ranks moved to another agent, no target any more", ranks | away | moved),
        Case("AgentGone", "no rank ran there", down),
        Case("AgentGone", "runs only with a job", per_job | series("up", f"1x39 0x{MANY}", job="commwatch-per-job")),
        Case("AgentDown", "never started", series("up", never), WARNING, 900, {**NODE, "job": "commwatch"}, 0),
        Case(
            "AgentDown",
            "a sidecar",
            series("up", never, job="ml/commwatch"),
            WARNING,
            900,
            {**NODE, "job": "ml/commwatch"},
            0,
        ),
        Case(
            "AgentDown",
            "job of another name",
            series("up", never, job="watch") | answers,
            WARNING,
            900,
            {**NODE, "job": "watch"},
            0,
        ),
        Case("AgentDown", "answers from then on", series("up", f"0x59 1x{MANY}")),
        Case("AgentDown", "no target any more", series("up", "0x59 stale")),
        Case(
            "AgentDown", "not an agent", series("up", never, job="node") | series("up", f"1x{MANY}", instance="b:9477")
        ),
        Case("AgentDown", "runs only with a job", series("up", never, job="commwatch-per-job")),
    ]


CASES = [*_shares(), *_links(), *_operations(), *_verdicts(), *_ranks_and_logs(), *_gpus(), *_devices(), *_monitor()]
