"""The fault matrix: small real jobs with one fault each, and what must be concluded of them."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Scenario:
    """A job with a fault."""

    shape: str
    fault: str
    #: The ranks at fault.
    ranks: tuple[int, ...]
    #: Verdicts that are right; empty: none is.
    kinds: frozenset[str] = frozenset()
    size: int = 4
    #: The verdict must be there so many seconds after the fault.
    within_s: float = 20.0
    #: More arguments of the job.
    options: tuple[str, ...] = field(default=())
    #: Words of why it is late, that the last verdict must have.
    why: str = ""
    #: It ends so many seconds after it began; ``None``: it lasts.
    lasts_s: float | None = None
    #: The rate to which the link between two hosts is held, such as ``200mbit``; empty: it is not.
    link: str = ""
    #: What is checked for corrupt data (``COMMWATCH_CHECKSUMS``); empty: nothing.
    checks: str = ""
    #: Ranks that are named, where it cannot be known which of them are at fault; empty: those at fault.
    suspects: tuple[int, ...] = ()
    #: For so many seconds it is watched, from the fault on, or from its begin if it has none.
    watched_s: float = 30.0
    #: It is one of the jobs with long waits, of which an incident of severity ``info`` may be remembered.
    rhythm: bool = False

    @property
    def named(self) -> frozenset[int]:
        """The ranks that a verdict must name."""
        return frozenset(self.suspects or self.ranks)

    @property
    def hangs(self) -> bool:
        """It is judged by what is in flight, not by what has ended."""
        return bool(self.kinds) and self.kinds not in (LATE, CORRUPT)

    @property
    def has_views(self) -> bool:
        """It has a recording of what was in flight."""
        return self.hangs or self.rhythm

    @property
    def has_records(self) -> bool:
        """It has a recording of what has ended."""
        return not self.hangs and not self.checks

    @property
    def views_s(self) -> float:
        """Seconds between two recorded views."""
        return 2.0 if self.rhythm else 0.0

    @property
    def alone(self) -> bool:
        """No other job may run beside it: its ranks compute, and would starve, or it slows the link of all."""
        return "--busy" in self.options or bool(self.link)

    @property
    def name(self) -> str:
        """How the table calls it."""
        ranks = ",".join(map(str, self.ranks))
        link = ("link", self.link) if self.link else ()
        checks = ("checks", self.checks) if self.checks else ()
        return " ".join((f"{self.shape}x{self.size}", self.fault, ranks, *self.options, *link, *checks))


LATE, CORRUPT = frozenset({"straggler"}), frozenset({"corruption"})
#: A rank that hangs and lives is stalled at first.
_HANGS = frozenset({"hang", "stalled"})
_QUARREL = frozenset({"desync"})

#: Why a rank is late that sleeps, that computes longer, and whose core others want or whose quota is too small.
_SLEEPS, _COMPUTES, _STARVES, _THROTTLED = (
    "neither ran nor was ready to run",
    "computes longer",
    "for a core",
    "CPU quota",
)

STRAGGLERS = [
    *(Scenario(shape, "late", (2,), LATE, why=_SLEEPS) for shape in ("plain", "ddp1", "ddp4", "ddp8", "fsdp", "grid")),
    *(Scenario(shape, "late", (1,), LATE, size=2) for shape in ("plain", "ddp4", "fsdp")),
    *(Scenario(shape, "late", (0,), LATE, size=3) for shape in ("ddp8", "fsdp")),
    *(Scenario(shape, "late_now_and_then", (3,), LATE) for shape in ("ddp4", "fsdp")),
    Scenario("ddp4", "late_in_four", (3,), LATE),
    *(Scenario("pipe", fault, (stage,), LATE) for fault in ("late", "slow") for stage in (0, 1, 3)),
    Scenario("pipe", "slow", (1,), LATE, size=2),
    *(Scenario(shape, "slow", (2,), LATE) for shape in ("plain", "overlap")),
    *(Scenario("loader", "late", (rank,), LATE) for rank in (0, 2)),
    Scenario("unmarked", "late", (1,), LATE, why=_SLEEPS),
    Scenario("ddp4", "slow", (1,), LATE, size=2, options=("--busy",), why=_COMPUTES),
    *(Scenario(shape, "starved", (1,), LATE, size=2, options=("--busy",), why=_STARVES) for shape in ("ddp4", "fsdp")),
    Scenario("ddp4", "throttled", (1,), LATE, size=2, options=("--busy",), why=_THROTTLED),
    *(Scenario(shape, "very_late", (1,), LATE) for shape in ("plain", "ddp4", "grid")),
    *(Scenario(shape, "late", (1, 3), LATE) for shape in ("ddp1", "ddp8")),
    Scenario("ddp4", "late", (2,), LATE, options=("--after", "0")),
    Scenario("ddp4", "late", (2,), LATE, options=("--work", "0.3", "--after", "12")),
    *(Scenario(shape, "late", (1,), LATE) for shape in ("accumulated", "experts")),
    Scenario("shards", "late", (0,), LATE),
    *(Scenario("mesh", fault, (rank,), LATE) for fault, rank in (("late", 3), ("slow", 0), ("slow", 2))),
    Scenario("fsdp", "late", (1, 3), LATE),
    Scenario("ddp4", "slower_and_slower", (2,), LATE),
    Scenario("ddp4", "late_in_four_by_far", (2,), LATE, options=("--work", "0.13")),
    *(Scenario(shape, "late", (2,), LATE, options=("--lasts", "14"), lasts_s=14) for shape in ("ddp4", "fsdp")),
    *(Scenario(shape, "late", (2,), LATE, options=("--work", "0.13")) for shape in ("delayed", "outer", "prefetched")),
    Scenario("heartbeat", "late", (1,), LATE, size=3),
    Scenario("heartbeat_pipe", "slow", (1,), LATE, size=3),
    Scenario("joined", "late", (0,), LATE, size=3, options=("--where", "input")),
]
HANGS = [
    *(Scenario(shape, "stop", (1,), _HANGS, within_s=12) for shape in ("plain", "ddp4", "grid")),
    *(Scenario(shape, "die", (2,), _HANGS, within_s=12) for shape in ("plain", "ddp4", "fsdp")),
    *(Scenario(shape, "hold_gil", (1,), _HANGS, within_s=12) for shape in ("plain", "fsdp")),
    *(Scenario(shape, "asleep", (0,), _HANGS, within_s=12) for shape in ("plain", "ddp8", "grid")),
    Scenario("plain", "spin", (3,), _HANGS, within_s=12),
    *(Scenario(shape, "stop_inside", (1,), _HANGS, within_s=12) for shape in ("plain", "ddp4", "experts")),
    *(Scenario(shape, "die_inside", (2,), _HANGS, within_s=12) for shape in ("plain", "mesh")),
    *(Scenario("ddp4", fault, (2,), _HANGS, within_s=12) for fault in ("leave", "fail")),
    # By the number of the step: by the time, one of the two may already wait in the collective that the other does not join.
    Scenario("plain", "asleep", (1, 3), _HANGS, within_s=12, options=("--at", "200")),
    *(Scenario("pipe", fault, (rank,), _HANGS, within_s=12) for fault, rank in (("stop", 1), ("asleep", 2))),
    *(Scenario("mesh", fault, (2,), _HANGS, within_s=12) for fault in ("stop", "die")),
    Scenario("pipe", "die", (2,), _HANGS, within_s=12),
    Scenario("experts", "asleep", (3,), _HANGS, within_s=12),
    Scenario("plain", "other_operation", (1,), _QUARREL, within_s=12),
    Scenario("plain", "other_size", (1,), _QUARREL, within_s=12),
    Scenario("plain", "other_size_and_fail", (1,), _QUARREL, within_s=12),
    Scenario("pipe", "receive_from_the_next", (1,), _QUARREL, within_s=12, suspects=(1, 2)),
    *(Scenario(shape, "destroy", (1,), _HANGS, within_s=12) for shape in ("plain", "ddp4")),
    Scenario("heartbeat", "stop", (1,), _HANGS, within_s=12, size=3),
    # Others meet in what a rank without inputs does, and the other way round.
    Scenario("joined", "stop", (0,), _HANGS, within_s=12, size=2, options=("--where", "input", "--after", "5")),
    Scenario("joined", "asleep", (1,), _HANGS, within_s=12, size=3, options=("--where", "input", "--after", "5")),
    Scenario("joined", "asleep", (2,), _HANGS, within_s=12, size=3, options=("--where", "no_input", "--after", "5")),
]
HEALTHY = [
    *(
        Scenario(shape, "nothing", (0,))
        for shape in ("plain", "ddp1", "ddp8", "overlap", "fsdp", "grid", "pipe", "loader", "unmarked")
    ),
    *(Scenario(shape, "nothing", (0,), options=("--busy",)) for shape in ("ddp4", "overlap", "pipe")),
    *(Scenario(shape, "uneven", (0, 1, 2, 3)) for shape in ("fsdp", "grid", "pipe", "unmarked")),
    *(Scenario(shape, "checkpoint", (0,)) for shape in ("ddp4", "fsdp")),
    *(Scenario(shape, "in_turn", (0, 1, 2, 3)) for shape in ("ddp4", "grid")),
    Scenario("ddp4", "all_slow", (0, 1, 2, 3)),
    *(Scenario("ddp4", "uneven", tuple(range(size)), size=size) for size in (2, 3, 4)),
    Scenario("ddp4", "evaluation", (0, 1, 2, 3)),
    Scenario("ddp4", "compiles", (0,), options=("--after", "0")),
    Scenario("ddp1", "nothing", (0,), options=("--work", "0.001")),
    Scenario("ddp1", "nothing", (0,), options=("--work", "1.0")),
    *(Scenario(shape, "nothing", (0,)) for shape in ("accumulated", "experts", "shards", "mesh")),
    *(Scenario(shape, "uneven", (0, 1, 2, 3)) for shape in ("experts", "mesh")),
    *(Scenario(shape, "restart", (0, 1, 2, 3)) for shape in ("ddp4", "mesh")),
    # What is awaited a step later makes others wait only if it is not there by then.
    *(Scenario(shape, "late_once", (2,), options=("--work", "0.13")) for shape in ("delayed", "outer")),
    Scenario("delayed", "in_turn", (0, 1, 2, 3), options=("--work", "0.13")),
    *(
        Scenario(shape, "late_once", (1,), size=2, options=("--work", "0.13", "--busy"))
        for shape in ("delayed", "prefetched")
    ),
    *(
        Scenario(f"heartbeat{kind}", "nothing", (0,), size=size)
        for kind, size in (("", 2), ("_barrier", 3), ("_pipe", 3))
    ),
    *(Scenario("joined", "nothing", (0,), size=size) for size in (2, 3)),
    *(Scenario("ddp4", "by_chance", tuple(range(size)), size=size) for size in (2, 3)),
    *(Scenario(shape, "nothing", (0,), size=size) for shape, size in (("saved", 2), ("parameters", 3), ("checked", 2))),
]
SCENARIOS = [*STRAGGLERS, *HANGS, *HEALTHY]


def _healthy(shape: str, *options: str, watched_s: float, size: int = 4, fault: str = "nothing") -> Scenario:
    """A job with long waits, watched from its first step on."""
    at_fault = (0,) if fault == "nothing" else tuple(range(size))
    work = () if options else ("--work", "0")
    return Scenario(
        *(shape, fault, at_fault),
        size=size,
        options=("--after", "0", *work, *options),
        watched_s=watched_s,
        rhythm=True,
    )


def _faulty(
    shape: str,
    fault: str,
    *at_fault: int,
    options: str = "",
    kinds: frozenset[str] = _HANGS,
    within_s: float = 12.0,
    size: int = 4,
    suspects: tuple[int, ...] = (),
) -> Scenario:
    """One with a fault, watched for a while after the verdict must be there."""
    words, watched_s = tuple(options.split()), within_s + 18
    return Scenario(
        shape, fault, at_fault, kinds, size, within_s, words, suspects=suspects, watched_s=watched_s, rhythm=True
    )


#: Two pauses after some steps; and one before the first step or in the middle.
_TWICE = ("--work", "0.1", "--pause-at", "50,110", "--pause")
_BEFORE, _AGAIN = (("--work", "0.1", "--pause-at", at, "--pause") for at in ("0", "60"))
_SERVING, _BARRIER = "--work 0 --where serving --at 3", "--work 0.1 --where barrier"
_SAVES = "--pause-at 50 --pause saves"
#: A rank that does not come to where the others wait outside of collectives, or not at all.
_NEVER_CAME = frozenset({"init_incomplete"})
#: Jobs whose long waits are healthy.
CALM = [
    *(_healthy(f"server_{kind}", watched_s=100, size=3) for kind in ("broadcast", "scatter", "objects", "queue", "sends", "burst")),
    *(_healthy(f"server_{kind}", watched_s=100) for kind in ("all_gather", "gather", "grid", "pipe")),
    *(_healthy(f"rl_{kind}", watched_s=110) for kind in ("broadcast", "gather", "objects", "barrier", "child", "fsdp", "fsdp_broadcast")),
    _healthy("rl_gather", "--work", "0", "--busy", watched_s=110),
    *(_healthy(shape, *_TWICE, "saves", watched_s=80) for shape in ("ddp4", "fsdp", "grid", "pipe", "unmarked")),
    *(_healthy(shape, *_TWICE, "evaluates", watched_s=80) for shape in ("ddp4", "fsdp", "grid", "pipe", "unmarked")),
    *(_healthy(shape, *_TWICE, does, watched_s=80) for shape, does in (("ddp4", "uploads"), ("fsdp", "compresses"))),
    *(_healthy(shape, *_BEFORE, "compiles", watched_s=70) for shape in ("ddp4", "fsdp", "grid")),
    _healthy("fsdp", *_BEFORE, "compiles", "--busy", watched_s=80, size=2),
    *(_healthy(shape, *_AGAIN, "compiles_again", watched_s=60) for shape in ("ddp4", "fsdp", "grid")),
    *(_healthy(shape, fault="very_uneven", watched_s=110) for shape in ("ddp1", "fsdp", "unmarked")),
    *(Scenario(shape, "restart_apart", (0, 1, 2, 3), watched_s=50, rhythm=True) for shape in ("ddp4", "unmarked")),
]  # fmt: skip
#: Ranks that disagree on a root or sizes, or do not meet.
DISAGREE = [
    *(_faulty(f"root_{op}", "other_root", 1, kinds=_QUARREL) for op in ("broadcast", "reduce", "gather", "scatter")),
    *(_faulty(f"root_{op}", "other_root", 1, 3, options="--at 200", kinds=_QUARREL, suspects=(0, 1, 2, 3)) for op in ("broadcast", "gather")),
    _faulty("splits", "other_splits", 1, kinds=_QUARREL),
    *(_faulty("plain", fault, 1, options="--where init --after 0", kinds=_NEVER_CAME, within_s=60) for fault in ("asleep", "stop")),
    _faulty("fsdp", "asleep", 0, options="--where init --after 0", kinds=_NEVER_CAME, within_s=60),
    *(_faulty("new_group", fault, 2, options="--where new_group --after 0", kinds=_NEVER_CAME | _HANGS, within_s=60) for fault in ("asleep", "stop")),
    _faulty("new_group", "skip", 3, options="--where new_group --after 0", kinds=_NEVER_CAME | _HANGS | _QUARREL, within_s=60),
    *(_faulty("store", fault, 1, options="--where meeting --at 149", kinds=_NEVER_CAME | _HANGS, within_s=60) for fault in ("asleep", "stop")),
    *(_faulty("monitored", fault, 1, options="--where meeting --at 299") for fault in ("asleep", "stop")),
]  # fmt: skip
#: Ranks that are late now and then, or later and later.
LATER = [
    *(_faulty(shape, "late_in_eight", 2, options="--work 0.3", kinds=LATE, within_s=45) for shape in ("ddp4", "fsdp", "grid", "unmarked")),
    *(_faulty(shape, "slower_each_second", 1, options="--work 0.1", kinds=LATE, within_s=40) for shape in ("ddp4", "fsdp", "pipe")),
]  # fmt: skip
#: Ranks that hang in jobs that wait long.
INSIDE = [
    *(_faulty("server_broadcast", fault, 2, options=_SERVING, size=3) for fault in ("stop", "die", "asleep")),
    *(_faulty("server_objects", fault, 1, options=_SERVING, size=3) for fault in ("stop", "asleep")),
    *(_faulty("server_pipe", fault, 2, options="--work 0 --where serving --at 2") for fault in ("die", "asleep")),
    *(_faulty("server_grid", fault, 3, options="--work 0 --where serving --at 2") for fault in ("stop", "asleep")),
    _faulty("server_broadcast", "asleep", 0, options=_SERVING, size=3),
    # It can be known once the next request is there, 8 s later.
    _faulty("server_broadcast", "asleep", 1, options="--work 0 --where idle --at 4", size=3, within_s=20),
    *(_faulty("rl_gather", fault, 3, options="--work 0 --where rollout --at 1") for fault in ("die", "stop")),
    *(_faulty("rl_broadcast", fault, 2, options="--work 0 --where rollout --at 1") for fault in ("die", "stop")),
    *(_faulty(shape, "asleep", 1, options="--work 0 --where training --at 1") for shape in ("rl_gather", "rl_fsdp")),
    *(_faulty(shape, "asleep", 2, options=f"--work 0.1 --at 110 {_SAVES}") for shape in ("ddp4", "fsdp", "pipe")),
    # Rank 0 works for 20 s before it is there. Others get a minute in a place that is new, or three times the longest wait at one that is not.
    _faulty("grid", "stop", 2, options=f"{_BARRIER} --after 0 {_SAVES}", within_s=34),
    _faulty("ddp4", "asleep", 2, options=f"{_BARRIER} --after 0 {_SAVES}", within_s=65),
    _faulty("fsdp", "asleep", 2, options=f"{_BARRIER} --at 110 --pause saves --pause-at 50,110", within_s=65),
    _faulty("ddp4", "asleep", 0, options=f"{_BARRIER} --at 110 --pause evaluates --pause-at 50,110", within_s=45),
]  # fmt: skip
RHYTHM = [*CALM, *DISAGREE, *LATER, *INSIDE]
#: Jobs that are checked for corrupt data: with wrong bits, and healthy. They have no recordings.
CHECKED = [
    *(Scenario(f"ddp{layers}", "flip", (2,), CORRUPT, checks="replicas") for layers in (1, 4, 8)),
    Scenario("ddp4", "flip", (0,), CORRUPT, size=3, checks="all"),
    *(Scenario("ddp4", "flip", ranks, CORRUPT, size=5, checks="replicas") for ranks in ((4,), (1, 3))),
    *(Scenario(shape, "flip_received", (1,), CORRUPT, checks="collectives") for shape in ("plain", "loader", "fsdp", "shards")),
    *(Scenario("ddp4", "flip_received", (rank,), CORRUPT, size=3, checks="all") for rank in (0, 2)),
    Scenario("experts", "flip_received", (1,), CORRUPT, checks="collectives"),
    Scenario("experts", "flip_received", (0,), CORRUPT, size=2, checks="all"),
    *(
        Scenario(shape, "nothing", (0,), checks="all")
        for shape in ("plain", "ddp4", "overlap", "accumulated", "fsdp", "shards", "grid", "mesh", "experts", "pipe", "loader")
    ),
    *(Scenario("ddp4", fault, (0, 1, 2, 3), checks="all") for fault in ("uneven", "restart")),
]  # fmt: skip
#: Over two hosts only.
SLOW_LINKS = [
    *(Scenario(shape, "late", (2,), LATE, link="200mbit") for shape in ("plain", "ddp4", "fsdp")),
    *(Scenario(shape, "nothing", (0,), link="200mbit") for shape in ("plain", "ddp8", "fsdp", "grid", "mesh")),
]
#: All that runs beside one agent, by their names in documents.
LISTS = {"matrix": SCENARIOS, "checked": CHECKED, "rhythm": RHYTHM}
