"""Who makes the others wait: loops of ranks that compute and meet, faults in them, and that even, uneven and odd loops name no rank."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commwatch_agent.analysis.straggler_search import late_in_steps, stragglers_in, waiting_least
from commwatch_agent.ingest.stragglers import BIN_NS, COSTS, LEAST_NS, MOST_BINS, Late, LateWindow
from tests.helpers import MS, examples, seeds

S = 1000 * MS
#: What a collective takes.
MEETS_MS = 2.0
Delay = Callable[[int, int, random.Random], float]


def nothing(rank: int, step: int, chance: random.Random) -> float:
    return 0.0


def late(*ranks: int, by_ms: float = 60.0, every: int = 1) -> Delay:
    """Ranks that are late in one of ``every`` steps."""
    return lambda rank, step, chance: by_ms if rank in ranks and step % every == 0 else 0.0


class Loop:
    """Ranks that compute for a while, and meet in a collective at the end of each step.

    Args:
        delay: what a rank takes longer, in ms, by rank and step.
        noise_ms: standard deviation of what each takes.
        buckets: collectives of a step; what comes after the first is noise.
    """

    def __init__(
        self,
        size: int = 4,
        work_ms: float = 30.0,
        delay: Delay = nothing,
        noise_ms: float = 5.0,
        buckets: int = 1,
        seed: int = 0,
    ) -> None:
        self.size, self.work_ms, self.delay, self.noise_ms, self.buckets = size, work_ms, delay, noise_ms, buckets
        self.window = LateWindow()
        self.now_ns = 0
        self.steps: list[int] = []
        self._chance = random.Random(seed)

    def run(self, seconds: float, delay: Delay | None = None) -> None:
        """Go on for so long, with another delay."""
        delay, until = delay or self.delay, self.now_ns + seconds * S
        while self.now_ns < until:
            own = [self.work_ms + delay(rank, len(self.steps), self._chance) for rank in range(self.size)]
            for bucket in range(self.buckets):
                took = [each * (bucket == 0) + abs(self._chance.gauss(0, self.noise_ms / self.buckets)) for each in own]
                usual = sorted(took)[(self.size - 1) // 2]
                self.now_ns += int((max(took) + MEETS_MS) * MS)
                self.window.add(
                    self.now_ns - 1, {rank: int(max(0, each - usual) * MS) for rank, each in enumerate(took)}
                )
            self.steps.append(self.now_ns)

    def named(self, marked: bool = True) -> list[Late]:
        """The stragglers now."""
        return stragglers_in(self.window, self.now_ns, self.steps if marked else ())

    def in_iterations(self) -> list[Late]:
        """The stragglers if the steps are iterations, and nothing marks steps."""
        return stragglers_in(self.window, self.now_ns, stepping=False, turns=self.steps)


class Averages(Loop):
    """Ranks that meet in one of twenty steps only, as with local SGD; what they take longer adds up until then."""

    def run(self, seconds: float, delay: Delay | None = None) -> None:
        delay, until = delay or self.delay, self.now_ns + seconds * S
        while self.now_ns < until:
            behind = [0.0] * self.size
            began_ns = self.now_ns
            for step in range(20):
                behind = [each + delay(rank, step, self._chance) for rank, each in enumerate(behind)]
                behind = [each + abs(self._chance.gauss(0, self.noise_ms)) for each in behind]
                self.steps.append(began_ns + int((step + 1) * self.work_ms * MS))
            usual = sorted(behind)[(self.size - 1) // 2]
            self.now_ns = self.steps[-1] + int((max(behind) + MEETS_MS) * MS)
            self.steps[-1] = self.now_ns
            self.window.add(self.now_ns - 1, {rank: int(max(0, each - usual) * MS) for rank, each in enumerate(behind)})

    def named(self, marked: bool = True) -> list[Late]:
        met = sorted(self.window.numbers)
        return stragglers_in(self.window, self.now_ns, self.steps if marked else (), met=met)


def ranks(found: Sequence[Late]) -> list[int]:
    return [each.rank for each in found]


def test_ranks_wait_at_most_all_of_the_time() -> None:
    """What a straggler costs is at most all of the time, also where more is recorded than can be."""
    loop = Loop(delay=late(2), buckets=1)
    loop.run(20)
    for step in loop.steps:
        loop.window.add(step - 1, {2: 10 * S})
    assert [each.cost_share for each in loop.named()] == [1.0]
    waited_s = {0: [2.0] * 20, 1: [0.1] * 20, 2: [2.0] * 20}
    assert late_in_steps(waited_s, [1.0] * 20, messages=False) == {1: 1.0}


@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize(
    ("size", "work_ms", "delay", "buckets"),
    [
        (4, 30.0, late(2), 1),
        (4, 30.0, late(2), 8),
        (2, 30.0, late(1), 1),
        (3, 30.0, late(0), 4),
        (4, 30.0, late(1, 3), 1),
        (4, 30.0, late(3, by_ms=120, every=2), 1),
        (4, 30.0, late(3, by_ms=240, every=4), 1),
        (4, 30.0, late(1, by_ms=1500), 4),
        (4, 1000.0, late(1, by_ms=600), 1),
        (64, 30.0, late(40), 1),
    ],
    ids=[
        "late",
        "buckets",
        "two ranks",
        "three",
        "two at fault",
        "every other step",
        "one in four",
        "very late",
        "long steps",
        "many",
    ],
)
def test_straggler(size: int, work_ms: float, delay: Delay, buckets: int, marked: bool) -> None:
    """After 12 s of its fault the culprit is named, and from then on always; before it, and once it is well again, no rank is."""
    culprits = [rank for rank in range(size) if any(delay(rank, step, random.Random()) for step in range(4))]
    loop = Loop(size, work_ms, buckets=buckets)
    loop.run(12)
    assert loop.named(marked) == []
    loop.run(13, delay)
    for _ in range(20):
        assert ranks(loop.named(marked)) == culprits
        loop.run(0.5, delay)
    loop.run(32)
    assert loop.named(marked) == []


@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize("seed", seeds(5))
@pytest.mark.parametrize(
    ("size", "work_ms", "delay"),
    [
        (4, 30.0, nothing),
        (2, 30.0, lambda rank, step, chance: 120 * chance.random()),
        (4, 30.0, lambda rank, step, chance: 120 * chance.random()),
        (3, 1000.0, lambda rank, step, chance: 2000 * chance.random()),
        (4, 30.0, lambda rank, step, chance: 60.0 * (step % 4 == rank)),
        (4, 30.0, late(0, by_ms=1000, every=60)),
        (4, 200.0, late(0, by_ms=1000, every=20)),
        (4, 200.0, late(1, by_ms=0.05 * 200 - 8)),
        (3, 30.0, late(0, 1)),
        (3, 30.0, lambda rank, step, chance: 60.0 * ((step * 7919 >> 3) % 2 == rank)),
    ],
    ids=[
        "even",
        "uneven pair",
        "uneven",
        "uneven long",
        "in turn",
        "checkpoint",
        "checkpoints",
        "hardly",
        "all but one",
        "two of three in irregular turn",
    ],
)
def test_no_straggler(size: int, work_ms: float, delay: Delay, seed: int, marked: bool) -> None:
    """Chance, turns, checkpoints, small change and a rank that is early name no rank, at no time of 40 s."""
    loop = Loop(size, work_ms, delay, seed=seed)
    for _ in range(40):
        loop.run(1)
        assert loop.named(marked) == []


def test_no_straggler_by_steps() -> None:
    """A rank is no straggler that waits for another more than a third as long as that one waits for it."""
    loop = Loop(work_ms=100, delay=lambda rank, step, chance: (150.0, 55.0, 0.0, 0.0)[rank] * (step % 2 == rank % 2))
    for _ in range(40):
        loop.run(1)
        assert loop.named() == []


@pytest.mark.parametrize("seed", seeds(3))
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("work_ms", "by_ms", "every"),
    [(60, 400, 8), (100, 400, 8), (300, 400, 8), (420, 400, 8), (520, 400, 8), (100, 150, 6), (40, 300, 10)],
)
def test_late_rarely_but_regularly(size: int, work_ms: float, by_ms: float, every: int, seed: int) -> None:
    """A rank that is late in few steps, again and again, is named within 30 s by what it costs, and then always."""
    loop, delay = Loop(size, work_ms, seed=seed), late(1, by_ms=by_ms, every=every)
    loop.run(12)
    assert loop.named() == []
    loop.run(30, delay)
    for _ in range(20):
        assert ranks(loop.named()) == [1]
        loop.run(0.5, delay)
    loop.run(35)
    assert loop.named() == []


@pytest.mark.parametrize("seed", seeds(3))
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("work_ms", "by_ms", "every", "within_s"),
    [(130, 600, 2, 16), (130, 1200, 3, 16), (130, 1200, 4, 20), (130, 2500, 2, 33), (130, 2500, 4, 33)],
)
def test_late_in_some_steps_by_far(
    size: int, work_ms: float, by_ms: float, every: int, within_s: float, seed: int
) -> None:
    """A rank that is late in one of two to four steps, by far more than a step takes, is named as soon as it has been late six times, and then always."""
    loop, delay = Loop(size, work_ms, seed=seed), late(1, by_ms=by_ms, every=every)
    loop.run(12)
    assert loop.named() == []
    loop.run(within_s, delay)
    for _ in range(20):
        assert ranks(loop.named()) == [1]
        loop.run(0.5, delay)


@pytest.mark.parametrize("seed", seeds(3))
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("work_ms", [300, 420])
def test_late_rarely_in_iterations(size: int, work_ms: float, seed: int) -> None:
    """Where no step is marked, a rank that is late in few iterations, again and again, is named, but for the first rank: it may wait for requests."""
    for culprit in (0, 1):
        loop = Loop(size, work_ms, seed=seed)
        loop.run(12)
        assert loop.in_iterations() == []
        loop.run(30, late(culprit, by_ms=400, every=8))
        assert [(found.rank, found.steps) for found in loop.in_iterations()] == [(1, None)] * culprit


@pytest.mark.parametrize("seed", seeds(3))
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("work_ms", [35, 100, 300])
@pytest.mark.parametrize(
    "delay",
    [
        late(1, by_ms=400, every=16),
        late(1, by_ms=1000, every=20),
        late(1, by_ms=1000, every=60),
        late(1, by_ms=22_000, every=40),
        lambda rank, step, chance: 400.0 * (chance.random() < 1 / 16),
        lambda rank, step, chance: 400.0 * (step % 8 == rank),
        lambda rank, step, chance: min(3000.0, 20 * chance.paretovariate(1.2)),
    ],
    ids=["often", "checkpoints", "checkpoint", "long checkpoint", "by chance", "in turn", "heavy tail"],
)
def test_late_too_rarely(size: int, work_ms: float, delay: Delay, seed: int) -> None:
    """What one rank does in fewer than one of twelve steps, and what happens to each rank now and then, names no rank."""
    loop = Loop(size, work_ms, delay, seed=seed)
    for _ in range(60):
        loop.run(1)
        assert loop.named() == []
        # Of shorter ones several are in one period of time.
        assert work_ms < 300 or loop.in_iterations() == []


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("work_ms", [30, 100, 300, 1000])
def test_ever_later(work_ms: float, seed: int) -> None:
    """A rank that takes 1 % longer each second is named within 10 s after that has cost 5 %, and then always."""
    loop = Loop(work_ms=work_ms, seed=seed, noise_ms=work_ms / 50)
    loop.run(12)
    since_ns = loop.now_ns

    def delay(rank: int, step: int, chance: random.Random) -> float:
        return work_ms * (loop.now_ns - since_ns) / S / 100 * (rank == 2)

    loop.run(15.5, delay)
    for _ in range(20):
        assert ranks(loop.named()) == [2]
        loop.run(0.5, delay)


def test_one_rank() -> None:
    """A rank that is compared with no other one is not late: its peers have no steps yet, or have left."""
    loop = Loop(2, 30.0)
    loop.run(30, late(1))
    for rank in range(2):
        assert stragglers_in(loop.window, loop.now_ns, loop.steps, ranks={rank}) == []
        assert stragglers_in(loop.window, loop.now_ns, stepping=False, turns=loop.steps, ranks={rank}) == []


def test_cost() -> None:
    """A straggler's cost is what the others waited for it: 60 ms of each step of 92 ms."""
    loop = Loop(delay=late(2), noise_ms=0.1)
    loop.run(30)
    (found,) = loop.named()
    assert found.steps is not None
    assert found.cost_ns / found.steps == pytest.approx(60 * MS, rel=0.01)
    assert found.window_ns == pytest.approx(10 * S, abs=2 * BIN_NS)
    assert found.cost_ns / found.window_ns == pytest.approx(60 / 92, rel=0.02)
    (unmarked,) = loop.named(marked=False)
    assert unmarked.steps is None
    assert unmarked.cost_ns / unmarked.window_ns == pytest.approx(60 / 92, rel=0.02)


@pytest.mark.parametrize(("by_ms", "every"), [(400.0, 8), (300.0, 10)])
def test_late_in_few_steps(by_ms: float, every: int) -> None:
    """A rank that is late in one of some steps has the number of these, by which its lateness is that of such a step; one that is late in each has none."""
    loop = Loop(2, 60.0, late(1, by_ms=by_ms, every=every), noise_ms=2)
    loop.run(30)
    (found,) = loop.named()
    assert found.steps is not None
    assert found.late_steps is not None
    assert found.steps / found.late_steps == pytest.approx(every, rel=0.2)
    assert found.cost_ns / found.late_steps == pytest.approx(by_ms * MS, rel=0.1)
    loop = Loop(2, 30.0, late(1))
    loop.run(30)
    assert [each.late_steps for each in loop.named()] == [None]


@pytest.mark.parametrize("before_s", [0.0, 6.0])
@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize("size", [2, 4])
def test_late_for_a_while(before_s: float, marked: bool, size: int) -> None:
    """A rank that was late for 12 s has the length and the cost of these, however long the window is that still names it."""
    loop = Loop(size)
    loop.run(before_s)
    began_ns = loop.now_ns
    loop.run(12, late(1))
    ended_ns = loop.now_ns
    seen = 0
    while found := loop.named(marked=marked):
        loop.run(1)
        (straggler,) = found
        until_ns = loop.now_ns - straggler.ago_ns
        seen += 1
    assert seen > 3
    assert until_ns == pytest.approx(ended_ns, abs=1.5 * S)
    assert until_ns - straggler.window_ns >= began_ns - 0.5 * S
    assert straggler.cost_share == pytest.approx(60 / 92, abs=0.1)


@pytest.mark.parametrize(("by_ms", "every"), [(8.0, 60), (8.0, 40), (14.0, 50)])
def test_costs_nothing_beside_pauses(by_ms: float, every: int) -> None:
    """A straggler that waits itself for the pauses of another rank, longer than that for it, is not named with a cost of nothing."""
    loop = Loop(2, 30.0, late(1, by_ms=by_ms), noise_ms=0.1)
    loop.run(12)
    assert ranks(loop.named()) == [1]
    costs = []
    for _ in range(16):
        loop.run(0.6, lambda rank, step, _: by_ms if rank == 1 else 2500.0 if step % every == every - 1 else 0.0)
        costs += [each.cost_ns / each.window_ns for each in loop.named()]
    assert min(costs) >= COSTS / 2
    assert loop.named() == []


def test_steady() -> None:
    """A straggler whose delays scatter stays named while it costs as much, and no longer than some seconds after it does not."""
    loop = Loop(2, work_ms=250, delay=lambda rank, step, chance: 700 * rank * chance.random() ** 2)
    loop.run(12)
    named = list[list[int]]()
    while len(named) < 60:
        loop.run(0.5)
        named.append(ranks(loop.named()))
    first = named.index([1])
    assert named[first:].count([1]) >= 0.9 * len(named[first:])
    loop.run(10, nothing)
    assert loop.named() == []


def test_start() -> None:
    """A job is not judged before it has run for 5 s: at its start a rank may be last a hundred times."""
    loop = Loop(delay=late(2), noise_ms=0.1)
    loop.run(LEAST_NS / S - 0.3)
    assert loop.named() == []
    loop.run(1)
    assert ranks(loop.named()) == [2]
    assert ranks(stragglers_in(loop.window, loop.now_ns, loop.steps[:20], least_ns=0)) == [2]


def test_still() -> None:
    """A straggler stays one in a pause, as for an evaluation, but not where nothing has moved for 30 s."""
    loop = Loop(delay=late(2))
    loop.run(20)
    assert ranks(stragglers_in(loop.window, loop.now_ns + 29 * S, loop.steps)) == [2]
    assert stragglers_in(loop.window, loop.now_ns + 31 * S, loop.steps) == []


def test_end_of_the_far_future() -> None:
    """An end that some trainer dated into the far future hides no straggler."""
    loop = Loop(delay=late(2))
    loop.run(20)
    loop.window.add(1 << 61, dict.fromkeys(range(4), 0))
    assert ranks(loop.named()) == [2]


def test_what_is_kept_is_bounded() -> None:
    """One minute is kept, however long the job runs and whichever clock the ends use."""
    window = LateWindow()
    for n in range(5 * MOST_BINS):
        window.add((n * 7919 % 4000) * BIN_NS, {0: 0, 1: MS})
    assert len(window._numbers) == MOST_BINS


numbers = st.integers(0, 12) | st.just((1 << 62) // BIN_NS)
some_late = st.dictionaries(st.integers(0, 4), st.just(0) | st.integers(0, 1 << 62), max_size=5)


@examples(150)
@given(st.lists(st.tuples(numbers, some_late), max_size=30), numbers)
def test_window(added: list[tuple[int, dict[int, int]]], now: int) -> None:
    """The window has the sums of each rank by bin, in order, of the latest bins to come; ranks may come later, and bins again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("commwatch_agent.ingest.stragglers.MOST_BINS", 5)
        window, plain = LateWindow(), dict[int, dict[int, int]]()
        for number, late_ns in added:
            window.add(number * BIN_NS, late_ns)
            of_bin = plain.setdefault(number, {})
            if len(plain) > 5:
                del plain[next(iter(plain))]
            for rank, each in late_ns.items():
                of_bin[rank] = min(of_bin.get(rank, 0) + each, (1 << 63) - 1)
        found = window.until(now * BIN_NS)
    most = max((sum(each.get(rank, 0) for each in plain.values()) for rank in range(5)), default=0)
    if not plain or most < COSTS * (len(plain) * BIN_NS):  # in this order, or the last digit differs
        assert found is None
        return
    assert found is not None
    bins = sorted(number for number in plain if number <= now)
    assert (found.ranks, found.numbers.tolist()) == (sorted(window.ranks), bins)
    assert found.late_ns.tolist() == [[plain[number].get(rank, 0) for number in bins] for rank in found.ranks]


def stages(waited_ms: Sequence[float], noise_ms: float = 3.0) -> list[Late]:
    """Who is named of the stages of a pipeline that wait so long in each step of 100 ms, for 20 s."""
    chance = random.Random(0)
    waited_ns: dict[int, dict[int, int]] = {rank: {} for rank in range(len(waited_ms))}
    for step in range(200):
        for rank, each in enumerate(waited_ms):
            waited_ns[rank][step] = int(max(0.0, each + chance.gauss(0, noise_ms)) * MS)
    return waiting_least(waited_ns, 20 * S, [(n + 1) * BIN_NS - 1 for n in range(200)])


@pytest.mark.parametrize("slow", range(4))
def test_slow_stage(slow: int) -> None:
    """Of the stages of a pipeline the slow one waits least, and costs what the others wait more than it."""
    (found,) = stages([10 if rank == slow else 60 for rank in range(4)])
    assert found.rank == slow
    assert found.cost_ns / found.window_ns == pytest.approx(0.5, rel=0.05)


def test_late_first_stage() -> None:
    """A stage that is late is named although it waits for the messages to come back from the others, too."""
    (found,) = stages([28, 60, 59, 62], noise_ms=8)
    assert found.rank == 0


@pytest.mark.parametrize(
    "waited_ms",
    [[30] * 4, [27, 35, 35, 42], [30, 45, 44, 50], [1, 2, 1, 3], [10, 10, 60], [20, 60]],
    ids=["even", "not quite", "uneven", "hardly", "all but one", "pair"],
)
def test_no_slow_stage(waited_ms: list[float]) -> None:
    """Stages that are not quite even, that hardly wait, or of which most do not wait name no rank; but a pair one of which waits a lot more does."""
    found = stages(waited_ms)
    assert (found == []) == (waited_ms != [20, 60])
    assert COSTS == 0.05


# -- recorded steps


def recorded(*parts: tuple[int, Delay], size: int = 4, work_ms: float = 30.0, seed: int = 0) -> dict[int, float]:
    """Who is late in steps of a job, each with a meeting of all ranks at its end, by what the ranks waited in them."""
    chance = random.Random(seed)
    took: list[list[float]] = []
    for steps, delay in parts:
        for step in range(steps):
            own = [work_ms + delay(rank, step, chance) + abs(chance.gauss(0, 5)) for rank in range(size)]
            took.append([each / 1e3 for each in own])
    waited_s = {rank: [max(own) - own[rank] for own in took] for rank in range(size)}
    return late_in_steps(waited_s, [max(own) for own in took], messages=False)


@pytest.mark.parametrize("steps", [20, 60, 2000])
@pytest.mark.parametrize(
    ("size", "delay"),
    [
        (4, late(2)),
        (2, late(1, by_ms=40)),
        (3, late(0)),
        (4, late(1, 3)),
        (4, late(3, by_ms=120, every=2)),
        (64, late(40)),
    ],
)
def test_late_in_recorded_steps(size: int, delay: Delay, steps: int) -> None:
    """The ranks that the search while a job runs names are named by its recorded steps, also by a few, and no others."""
    culprits = [rank for rank in range(size) if delay(rank, 0, random.Random())]
    if steps < 60 and any(not delay(rank, 1, random.Random()) for rank in culprits):
        culprits = []  # what is late in ten steps only may be chance
    assert sorted(recorded((steps, delay), size=size)) == culprits


@pytest.mark.parametrize("steps", [4, 20, 60, 2000])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "delay",
    [
        nothing,
        lambda rank, step, chance: 120 * chance.random(),
        lambda rank, step, chance: 60.0 * (step % 4 == rank),
        late(0, by_ms=1000, every=60),
        late(0, by_ms=150, every=6),
        lambda rank, step, chance: (150.0, 55.0, 0.0, 0.0)[rank] * (step % 2 == rank % 2),
    ],
    ids=["even", "uneven", "in turn", "checkpoint", "one in six", "a third"],
)
def test_none_late_in_recorded_steps(delay: Delay, seed: int, steps: int) -> None:
    """What is no straggler while the job runs is none in its recorded steps, and too few steps show nothing."""
    assert recorded((steps, delay), seed=seed) == {}


def test_late_for_a_part_of_the_recorded_steps() -> None:
    """A rank that is late for some of the time is named with what it costs of all of the time, if that is as much as a straggler costs."""
    third = recorded((2000, nothing), (1000, late(2)))
    assert list(third) == [2]
    assert third[2] == pytest.approx(58 / (3 * 36 + 56), abs=0.03)
    assert recorded((20_000, nothing), (500, late(2))) == {}
    assert list(recorded((1000, late(2)), (1000, nothing), (1000, late(0)))) == [0, 2]


def test_late_where_all_wait_for_messages() -> None:
    """Where ranks wait for messages, as stages of a pipeline always do, the late one waits less than two thirds as long as the others."""
    took_s = [0.1] * 40
    for least_s, named in ((0.03, [1]), (0.05, [])):
        waited_s = {rank: [least_s if rank == 1 else 0.06] * 40 for rank in range(3)}
        assert list(late_in_steps(waited_s, took_s, messages=True)) == named


@pytest.mark.parametrize("seed", seeds(5))
def test_ranks_that_meet_in_few_steps(seed: int) -> None:
    """With local SGD, a rank that is late in each step is named by the steps in which all meet; none is where all take as long, or in turn."""
    loop = Averages(delay=late(3, by_ms=15), seed=seed)
    loop.run(4)
    assert loop.named() == []
    loop.run(16)
    (who,) = loop.named()
    assert who.rank == 3
    assert who.steps is not None
    assert who.cost_ns / who.steps == pytest.approx(15 * MS, rel=0.2)
    for delay in (nothing, in_turn):
        healthy = Averages(delay=delay, seed=seed)
        healthy.run(30)
        assert healthy.named() == []


def in_turn(rank: int, step: int, chance: random.Random) -> float:
    return 60.0 if chance.randrange(4) == rank else 0.0


def test_steps_without_meetings_of_other_groups() -> None:
    """A group in which ranks seldom meet is judged by all steps if they meet in other groups: a rank that saves in one of twenty is not late."""
    loop = Averages(delay=late(0, by_ms=15), seed=1)
    loop.run(20)
    met = range(loop.now_ns // BIN_NS + 1)
    assert stragglers_in(loop.window, loop.now_ns, loop.steps, met=met) == []


def at_times(*ranks: int, by_ms: float = 300.0, share: float = 0.15) -> Delay:
    """Some ranks are late now and then, one at a time, as by chance."""
    return lambda rank, step, chance: by_ms if rank in ranks and chance.random() < share / len(ranks) else 0.0


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("seed", seeds(3))
def test_late_at_irregular_distances(size: int, seed: int) -> None:
    """A rank that is late by far at random times is named once it has been often enough as the only one; ranks that are late in turn are not."""
    alone, checkpoint = at_times(1), late(0, by_ms=400, every=20)
    for delay in (alone, lambda *step: alone(*step) + checkpoint(*step)):
        loop = Loop(size, work_ms=60, delay=delay, seed=seed)
        named: set[int] = set()
        for _ in range(40):
            loop.run(1)
            named.update(ranks(loop.named()))
        assert named == {1}
    healthy = Loop(size, work_ms=60, delay=at_times(*range(size)), seed=seed)
    for _ in range(60):
        healthy.run(1)
        assert healthy.named() == []
