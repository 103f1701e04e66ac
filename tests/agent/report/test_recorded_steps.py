"""Which recorded steps of the ranks are the same ones."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from commwatch.report.recorded_steps import known_steps
from commwatch.whatif.replay import replay
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
    """While a job runs, the step of a rank whose mark was late is not taken for two steps of another rank."""
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
        assert {len(steps) for steps in model.programs.values()} == {STEPS - 1}
