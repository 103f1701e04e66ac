"""Which recorded steps of the ranks are the same ones."""

from __future__ import annotations

from collections import deque
from contextlib import ExitStack
from pathlib import Path

from commwatch.wire import events as ev
from commwatch_agent.model.cells import GroupInfo
from commwatch_agent.model.views import TraceOperation
from commwatch_agent.report.chrome_trace import TraceStep
from commwatch_agent.report.recorded_steps import MOST_STEPS, known_steps, model_of
from commwatch_agent.report.timeline_export import NodeTrace
from commwatch_agent.whatif.model import LAUNCHES
from commwatch_agent.whatif.replay import replay
from tests.helpers import MS, Trainer, Watch, group_entry, identity, mark, operation

STEPS, STEP_NS = 20, 100 * MS


def records(rank: int) -> list[tuple[int, ...]]:
    """Steps that end together, the last one after 60 ms; the last mark but one of rank 1 is 40 ms late, and its last one has not come yet."""
    found = [mark(0, 0)]
    for step in range(STEPS):
        end_ns = (step + 1) * STEP_NS - (40 * MS if step == STEPS - 1 else 0)
        found.append(operation(start_ns=end_ns - 20 * MS, end_ns=end_ns - MS, seq=step))
        late_ns = 40 * MS if rank and step == STEPS - 2 else 0
        if not rank or step < STEPS - 1:
            found.append(mark(step + 1, end_ns + late_ns))
    return found


def test_a_step_is_used_once(tmp_path: Path) -> None:
    """While a job runs, the step of a rank whose mark was late is taken neither for two steps of another rank nor for its next one."""
    with ExitStack() as stack:
        watch = Watch(tmp_path)
        for rank in (0, 1):
            trainer = stack.enter_context(Trainer(tmp_path / "rings" / f"{rank}.ring", identity(rank=rank)))
            trainer.call("name", [(group_entry(),)])
            trainer.write(records(rank))
        watch.tick(STEPS * STEP_NS)
        (job,) = watch.agent.jobs()
        model = known_steps(watch.path, job, None)
        assert model is not None
        replay(model)
        assert {len(steps) for steps in model.programs.values()} == {STEPS - 2}


def of_node(rank: int, kept: int, each: int) -> NodeTrace:
    """A node with one rank, and its latest ``kept`` operations, ``each`` in a step."""
    group = GroupInfo("dp", "dp", "0", "dp", (0, 1), 2, aligned=True)
    operations = [
        TraceOperation(rank, "all_reduce", group, seq, -1, 0, 1 << 20, "float32", at, at, at + MS, 0, ev.BY_FUTURE)
        for seq, at in ((seq, (1 + seq // each) * STEP_NS + seq % each * 10 * MS) for seq in range(STEPS * each))
    ][::-1]
    steps = [TraceStep(rank, n, (1 + n) * STEP_NS, (2 + n) * STEP_NS, None, None, None, False) for n in range(STEPS)]
    cut = kept < len(operations)
    complete_ns = operations[kept - 1].end_ns if cut else 0
    ends = {("dp", one.seq): one.end_ns for one in operations}
    known = [step for step in steps if step.end_ns >= complete_ns]
    return NodeTrace(
        {rank: f"host {rank}"}, 0, STEP_NS, (1 + STEPS) * STEP_NS + 1, ends, operations[:kept], known, deque(), [], [],
        complete_ns=complete_ns,
    )  # fmt: skip


def test_step_that_is_cut() -> None:
    """A step of which a node has sent only the latest operations is not replayed, however many operations were asked for."""
    each, kept = 8, 100
    model = model_of([of_node(0, STEPS * each, each), of_node(1, kept, each)], 2, 1000)
    launches = [sum(do.kind in LAUNCHES for do in program) for steps in model.programs.values() for program in steps]
    assert launches == [each] * 2 * (kept // each)


def test_steps_that_one_rank_lacks() -> None:
    """Steps that are long on one of the ranks are left out for all, and those before them that take their places have their operations."""
    steps = 3 * MOST_STEPS
    group = GroupInfo("dp", "dp", "0", "dp", (0, 1), 2, aligned=True)
    begins = [(1 + n) * STEP_NS for n in range(steps)]
    operations = [
        TraceOperation(rank, "all_reduce", group, n, -1, 0, 1 << 20, "float32", at, at, at + MS, 0, ev.BY_FUTURE)
        for n, at in enumerate(begins)
        for rank in (0, 1)
    ][::-1]
    known = [
        TraceStep(rank, n, at, at + STEP_NS, None, None, None, n % 5 == rank)
        for rank in (0, 1)
        for n, at in enumerate(begins)
    ]
    node = NodeTrace(
        {0: "host", 1: "host"}, 0, STEP_NS, begins[-1] + STEP_NS + 1, {}, operations, known, deque(), [], []
    )
    programs = model_of([node], 2).programs
    launches = [[sum(do.kind in LAUNCHES for do in program) for program in of_rank] for of_rank in programs.values()]
    assert launches == [[1] * MOST_STEPS] * 2


def test_ends_of_different_steps(tmp_path: Path) -> None:
    """Two steps whose ends late marks have brought together are no step of all ranks: what the ranks launch in a step is the same."""
    with ExitStack() as stack:
        watch = Watch(tmp_path)
        for rank in (0, 1):
            trainer = stack.enter_context(Trainer(tmp_path / "rings" / f"{rank}.ring", identity(rank=rank)))
            trainer.call("name", [(group_entry(),)])
            written = [mark(0, 0)]
            for step in range(STEPS):
                end_ns = (step + 1) * STEP_NS
                written.append(operation(start_ns=end_ns - 10 * MS, end_ns=end_ns - MS, seq=step))
                late_ns = 80 * MS if not rank and step >= STEPS - 2 else 20 * MS if step == STEPS - 1 else 0
                written.append(mark(step + 1, end_ns + late_ns))
            trainer.write(written)
        watch.tick(STEPS * STEP_NS)
        (job,) = watch.agent.jobs()
        model = known_steps(watch.path, job, None)
        assert model is not None
        launched = [
            [[do.op for do in program if do.kind in LAUNCHES] for program in steps] for steps in model.programs.values()
        ]
        assert launched[0] == launched[1]
        assert launched[0][-1] == [STEPS - 3]
