"""Reads from the history what is compared of a job: its steps, operations and settings."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

import numpy as np

from commwatch.wire.numbers import in_order
from commwatch_agent.analysis.live_ranks import gpu_timing
from commwatch_agent.compare.bootstrap import BLOCKS, Floats, Ints, Samples, Shift, Sums, blocks_of, shift, warm_up
from commwatch_agent.compare.kinds import Kind, KindSamples, Operations
from commwatch_agent.history.history import History, StoredStep
from commwatch_agent.history.operations import Names
from commwatch_agent.history.rows import RingRow, latest_run
from commwatch_agent.incidents.incident import Incident
from commwatch_agent.model.nccl_views import Topology
from commwatch_agent.model.views import ITERATIONS, JobView
from commwatch_agent.text.units import size
from commwatch_collectors.spans import spans

#: Most records of operations, and most steps, that are read of a job: its latest.
MOST_RECORDS, MOST_STEPS = 1_000_000, 100_000
#: A comparison needs so many steps without warm-up and long ones, so that each block has some.
LEAST_STEPS = 4 * BLOCKS
#: Sizes of the operations of one group that are listed.
_MOST_SIZES = 6


@dataclass(frozen=True)
class Run:
    """What is compared of a job: its latest run, without warm-up and long steps."""

    job: JobView
    #: Steps that are compared, and those that were left out.
    steps: int
    warm_up: int
    long: int
    #: Step durations of all ranks in seconds; and their sum / number.
    durations: Samples
    mean: Sums
    #: Communication, exposed communication and waiting for late ranks / time of the steps; without those that are not known.
    shares: Mapping[str, Sums]
    kinds: Mapping[Kind, KindSamples]
    #: What may explain a difference, by name.
    settings: Mapping[str, str]
    incidents: Sequence[Incident] = ()
    #: Kinds that it has only in what was left out, and how many operations of them.
    left_out: Mapping[Kind, int] = field(default_factory=dict)
    #: Share of the time (0 to 1) that main threads waited for a CPU core in their last half minute, the mean of the ranks; ``None``: not known.
    core_wait: float | None = None
    #: Where its speed changed, ``at`` as the number of that step; ``None``: nowhere, or not known.
    shift: Shift | None = None

    @property
    def per_step(self) -> tuple[float, float]:
        """Operations of a rank in a step, and their bytes; 0: there are no steps."""
        ranks = max((found.ranks for found in self.kinds.values()), default=0)
        times = (ranks * self.steps) or inf
        every = [size * count for found in self.kinds.values() for size, count in found.sizes.items() if size > 0]
        return sum(found.count for found in self.kinds.values()) / times, sum(every) / times

    @property
    def enough(self) -> bool:
        """Whether there are enough steps for intervals."""
        return self.steps >= LEAST_STEPS


class _Steps(NamedTuple):
    """The steps of a run, as those of all ranks with one number together, in order."""

    usual: list[list[StoredStep]]
    warm_up: int
    long: list[list[StoredStep]]
    shift: Shift | None


def read(path: Path, job: JobView, topology: Topology | None, incidents: Sequence[Incident] = ()) -> Run:
    """Read the latest run of a job from the history at ``path``; ``topology``: from NCCL's logs; ``incidents``: those of the run."""
    with History(path) as history:
        rings = latest_run(history.rings(job.job_id))
        names = Names(history.groups(list(rings)), history.names("op", list(rings)))
        operations, since_ns = _operations(history, rings)
        steps = _steps(history.steps(since_ns, 1 << 62, list(rings), MOST_STEPS))
        if job.step_source == ITERATIONS and len(steps.usual) < LEAST_STEPS:  # equal times cover more of the job
            steps = _steps([])
        waited = [float(share) for share in history.names("core_wait", list(rings)).values()]
        dtypes = set(history.names("dtype", list(rings)).values())
    edges, block = _edges(steps.usual, operations)
    inside = operations.within(edges, _intervals(steps.long))
    kinds, waits = inside.kinds(names), None if operations.counted else inside.waits(names)
    times = _Times(
        np.array([number for number, together in zip(block, steps.usual, strict=True) for _ in together], np.int64),
        *_columns([step for together in steps.usual for step in together]),
    )
    settings = _settings(rings.values(), names, dtypes, topology)
    return Run(
        job,
        len(steps.usual),
        steps.warm_up,
        len(steps.long),
        Samples(times.duration, times.block),
        Sums(times.total(times.duration), np.bincount(times.block, minlength=BLOCKS).astype(float)),
        times.shares(waits),
        kinds,
        settings | (_sizes(kinds, len(steps.usual)) if steps.usual else {}),
        incidents,
        {kind: number for kind, number in operations.all().counts(names).items() if kind not in kinds},
        fmean(waited) if waited else None,
        steps.shift,
    )


def _operations(history: History, rings: Mapping[int, RingRow]) -> tuple[Operations, int]:
    """Return the latest operations, and the Unix time in ns from which on all are among them."""
    operations = Operations()
    for chunk in history.chunks_in_pieces(0, 1 << 62, list(rings)):
        operations.add(chunk.ring, rings[chunk.ring].wall_offset_ns, chunk.records)
        if operations.records >= MOST_RECORDS:
            return operations, chunk.until_ns
    return operations, operations.first_ns


def _steps(steps: Iterable[StoredStep]) -> _Steps:
    by_number: dict[int, list[StoredStep]] = {}
    for step in steps:
        by_number.setdefault(step.seq, []).append(step)
    ordered = [by_number[number] for number in in_order(by_number)]
    long = [together for together in ordered if any(step.long for step in together)]
    usual = [together for together in ordered if not any(step.long for step in together)]
    durations = np.array([median(step.end_ns - step.start_ns for step in together) / 1e9 for together in usual], float)
    cut = warm_up(durations)
    kept, found = usual[cut:], shift(durations[cut:])
    return _Steps(kept, cut, long, found and replace(found, at=kept[found.at][0].seq))


def _intervals(steps: list[list[StoredStep]]) -> Ints:
    """Return begin and end of steps, by begin: [steps, 2]."""
    found = [(min(step.start_ns for step in each), max(step.end_ns for step in each)) for each in steps]
    return np.array(sorted(found), np.int64).reshape(-1, 2)


def _edges(usual: list[list[StoredStep]], operations: Operations) -> tuple[Ints, Ints]:
    """Return the edges of the blocks (see ``Operations.within``), and the block of each step."""
    if not usual:
        lasts = operations.last_ns - operations.first_ns
        return operations.first_ns + np.arange(BLOCKS + 1) * (lasts + BLOCKS) // BLOCKS, np.zeros(0, np.int64)
    block, spans_of = blocks_of(len(usual)), _intervals(usual)
    first = np.minimum(np.searchsorted(block, np.arange(BLOCKS)), len(usual) - 1)
    return np.append(spans_of[first, 0], spans_of[:, 1].max()), block


class _Times(NamedTuple):
    """The steps of all ranks as arrays: block, and times in seconds, NaN where not known."""

    block: Ints
    duration: Floats
    comm: Floats
    exposed: Floats

    def total(self, part: Floats) -> Floats:
        """Return a sum by block."""
        return np.asarray(np.bincount(self.block, part, BLOCKS), float)

    def shares(self, waits: Floats | None) -> dict[str, Sums]:
        """Return the shares that are known, by name.

        Args:
            waits: seconds of waiting for late ranks by block.
        """
        found = {}
        for name, part in (("comm_share", self.comm), ("exposed_share", self.exposed)):
            known = ~np.isnan(part)
            # As `StepSums.shares`.
            if known.any() and 10 * (len(known) - known.sum()) <= len(known):
                found[name] = Sums(self.total(np.where(known, part, 0)), self.total(np.where(known, self.duration, 0)))
        if waits is not None and len(self.duration):
            found["wait_share"] = Sums(waits, self.total(self.duration))
        return found


def _columns(steps: list[StoredStep]) -> Iterable[Floats]:
    def column(values: Iterable[float | None]) -> Floats:
        return np.array([np.nan if value is None else value / 1e9 for value in values], float)

    yield column(step.end_ns - step.start_ns for step in steps)
    yield column(step.comm_ns for step in steps)
    yield column(step.exposed_ns for step in steps)


def _settings(rings: Collection[RingRow], names: Names, dtypes: set[str], topology: Topology | None) -> dict[str, str]:
    """Return the settings that the history keeps of a run, and the environment that NCCL has logged."""
    said = [ring.identity for ring in rings]
    groups = {
        f"{info.label} of {info.size}{f' ({info.backend})' if info.backend else ''}" for info in names.groups.values()
    }
    found = {
        "world size": {str(ring.world_size) for ring in rings},
        "ranks on this node": {spans(ring.rank for ring in rings)},
        "host": {str(each.get("host", "")) for each in said},
        "PyTorch": {str(each.get("torch", "")) for each in said},
        "NCCL": {str(each["nccl"]) for each in said if "nccl" in each} or set(topology.versions if topology else ()),
        "hook": {str(each.get("hook", "")) for each in said},
        "GPU timing": {gpu_timing(each)[0] for each in said},
        "COMMWATCH_BUDGET": {str(each.get("budget", "")) for each in said},
        "process groups": groups,
        "data types": dtypes,
    }
    texts = {name: ", ".join(sorted(values - {""})) for name, values in found.items()}
    env = {} if topology is None else topology.env
    texts |= {name: value if isinstance(value, str) else ", ".join(value) for name, value in sorted(env.items())}
    return {name: text for name, text in texts.items() if text}


def _sizes(kinds: Mapping[Kind, KindSamples], steps: int) -> dict[str, str]:
    """Return the sizes of the operations that each rank has in each step: of the buckets, with DDP. By group and op."""
    per_step: dict[str, dict[int, int]] = {}
    for kind, found in kinds.items():
        for exact, count in found.sizes.items():
            if kind.size is not None and (times := round(count / (steps * found.ranks))):
                per_step.setdefault(f"{kind.op} in {kind.group}, each step", {})[exact] = times
    return {name: _listed(sizes) for name, sizes in sorted(per_step.items())}


def _listed(sizes: Mapping[int, int]) -> str:
    largest = sorted(sizes, reverse=True)
    texts = [f"{sizes[each]} × {size(each)}" for each in largest[:_MOST_SIZES]]
    more = sum(sizes[each] for each in largest[_MOST_SIZES:])
    return ", ".join([*texts, *([f"{more} smaller"] if more else [])])
