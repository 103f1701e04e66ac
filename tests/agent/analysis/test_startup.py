"""Operations before the first step of a rank: they are counted, but are no part of what is concluded about its steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from commwatch_agent.analysis.advice import advice_on
from commwatch_agent.analysis.advice_input import count, facts
from commwatch_agent.report.charts import figures, gather
from tests.helpers import MS, Trainer, Watch, group_entry, identity, mark, operation

S = 1000 * MS
STEPS, STEP_NS = 30, 200 * MS
#: When the steps begin, after a startup in which rank 1 waits for rank 0 in an all_gather.
BEGIN_NS = 4 * S


def records(rank: int) -> list[tuple[int, ...]]:
    """A startup in which rank 1 waits 2.6 s, and then steps in which rank 0 waits half of the time for rank 1."""
    waited_ns = 2600 * MS if rank else 1 * MS
    found = [operation("all_gather", start_ns=BEGIN_NS - waited_ns - MS, end_ns=BEGIN_NS - MS, seq=0)]
    found.append(mark(0, BEGIN_NS))
    for step in range(STEPS):
        end_ns = BEGIN_NS + (step + 1) * STEP_NS
        took_ns = 10 * MS if rank else 110 * MS
        found.append(operation(start_ns=end_ns - took_ns, end_ns=end_ns - MS, seq=step + 1))
        found.append(mark(step + 1, end_ns))
    return found


def conclusions(watch: Watch) -> tuple[dict[int, float], list[str], set[str]]:
    """Share of the steps that each rank waited, titles of the advice, and ops of which the facts are."""
    (job,) = watch.agent.jobs()
    known = facts(watch.agent, job, count(watch.agent, "job"), [])
    assert known is not None
    waits = {rank: round(share, 3) for rank, share in known.waits.items()}
    return waits, [each.title for each in advice_on(known)], {kind.op for kind in known.kinds}


@pytest.mark.parametrize("parts", [1, 2, 7], ids=["at_once", "twice", "often"])
def test_no_conclusion_from_the_startup(tmp_path: Path, parts: int) -> None:
    """A rank that waited long before its first step is still named as late, whether its records come at once or in parts."""
    with (
        Trainer(tmp_path / "rings/a.ring", identity(rank=0)) as one,
        Trainer(tmp_path / "rings/b.ring", identity(rank=1)) as two,
    ):
        watch = Watch(tmp_path)
        for trainer in (one, two):
            trainer.call("name", [(group_entry(),)])
        both = [records(rank) for rank in (0, 1)]
        length = -(-len(both[0]) // parts)
        for begin in range(0, len(both[0]), length):
            for trainer, of_rank in zip((one, two), both, strict=True):
                trainer.write(of_rank[begin : begin + length])
            watch.tick(BEGIN_NS + STEPS * STEP_NS)
        late = "rank 1 is late and the others wait for it"
        assert conclusions(watch) == ({0: 0.5, 1: 0.0}, [late], {"all_reduce"})
        # All operations are in the sums, and the startup's waits in those of the rank.
        assert {key: (row.count, row.wait_s) for key, row in watch.rows("op", "rank").items()} == {
            ("all_gather", 0): (1, 0.0), ("all_gather", 1): (1, pytest.approx(2.599)),
            ("all_reduce", 0): (STEPS, pytest.approx(STEPS * 0.1)), ("all_reduce", 1): (STEPS, 0.0),
        }  # fmt: skip
        says = "Waiting for late ranks in steps, by rank and group: rank 1 waited least, 0 s in all, so the others wait for it."
        assert says in figures(gather(watch.agent, "job"), [1])
        watch.store.close()
        # The same from the history, of an agent that has seen nothing of it.
        again = Watch(tmp_path)
        again.tick(BEGIN_NS + STEPS * STEP_NS)
        assert conclusions(again) == ({0: 0.5, 1: 0.0}, [late], {"all_reduce"})


def test_agent_that_starts_among_steps(tmp_path: Path) -> None:
    """An agent that starts while a rank makes steps does not take them for its startup."""
    with Trainer(tmp_path / "rings/a.ring", identity(rank=0, world_size=1)) as trainer:
        trainer.call("name", [(group_entry(ranks=(0,)),)])
        own = records(0)
        trainer.write(own[:20])
        Watch(tmp_path).tick(BEGIN_NS + 10 * STEP_NS)
        trainer.write(own[20:])
        watch = Watch(tmp_path)
        watch.tick(BEGIN_NS + STEPS * STEP_NS)
        in_steps = count(watch.agent, "job").in_steps.operations
        assert [(row.by["op"], row.count) for row in in_steps] == [("all_reduce", STEPS)]
