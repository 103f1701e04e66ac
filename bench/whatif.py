"""Predicts real jobs from other ones: records a job, asks ``commwatch whatif`` about a change, runs the changed job, and compares.

Gloo jobs in network namespaces with shaped links (as root); prints a Markdown table. Arguments: words; only the rows that have all of them are run.

    .venv/bin/python -m bench.whatif
"""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import NamedTuple

from commwatch_agent.report.recorded_steps import model_of
from commwatch_agent.report.timeline_export import Window, own_trace
from commwatch_agent.whatif.answers import study
from commwatch_agent.whatif.model import Model
from commwatch_agent.whatif.questions import Question, changes_of
from commwatch_agent.whatif.replay import replay
from tests import prefork
from tests.agent.whatif.scenes import large
from tests.e2e.hosts import joined_hosts
from tests.e2e.torchjob import digest
from tests.faults.run import Place, ranks
from tests.helpers import PATIENCE_S

JOB = Path(__file__).with_name("whatif_job.py")
#: A gain or loss of this share must have the right sign.
_CLEAR = 0.05


class Run(NamedTuple):
    """A job: rate of its links, number of ranks, and arguments."""

    link: str = "400mbit"
    ranks: int = 2
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class Row:
    """A change: what is recorded, what is asked, and what is run to compare."""

    what: str
    before: Run
    question: Question
    after: Run
    #: Other runs that show how the job scales.
    others: tuple[Run, ...] = ()


DDP = Run()
LATE, FSDP = DDP._replace(arguments=("--late", "0.15")), DDP._replace(arguments=("--units", "4"))
SMALL, LARGE = (DDP._replace(arguments=("--buckets", size)) for size in ("1", "25"))
SLOW, FAST = (DDP._replace(link=rate) for rate in ("200mbit", "800mbit"))
#: Slow enough that four ranks do not share the two cores of the machine more than the link.
SLOWEST = DDP._replace(link="100mbit")
HALF = SLOW._replace(arguments=("--half",))
ACCUMULATED = DDP._replace(arguments=("--accumulate", "4"))
ROWS = (
    Row("link 200 to 400 Mbit/s", SLOW, Question(link="2x"), DDP),
    Row("link 200 to 800 Mbit/s", SLOW, Question(link="4x"), FAST),
    Row("link 400 to 800 Mbit/s", DDP, Question(link="2x"), FAST),
    Row("link 800 to 200 Mbit/s", FAST, Question(link="0.25x"), SLOW),
    Row("a straggler removed", LATE, Question(no_late=True), DDP),
    Row("a straggler removed, link 400 to 800 Mbit/s", LATE, Question(no_late=True, link="2x"), FAST),
    Row("buckets 4 to 1 MiB", DDP, Question(buckets="1MiB"), SMALL),
    Row("buckets 4 to 25 MiB", DDP, Question(buckets="25MiB"), LARGE),
    Row("buckets 1 to 4 MiB", SMALL, Question(buckets="4MiB"), DDP),
    Row("buckets 1 to 25 MiB", SMALL, Question(buckets="25MiB"), LARGE),
    Row("buckets 25 to 1 MiB", LARGE, Question(buckets="1MiB"), SMALL),
    Row("fp16 hook, 200 Mbit/s", SLOW, Question(compress="fp16"), HALF),
    Row("accumulation 1 to 4", DDP, Question(accumulate=4), ACCUMULATED),
    Row("2 to 3 ranks, 100 Mbit/s", SLOWEST, Question(ranks=3), SLOWEST._replace(ranks=3)),
    Row("2 to 4 ranks, 100 Mbit/s", SLOWEST, Question(ranks=4), SLOWEST._replace(ranks=4)),
    Row("3 to 4 ranks, 100 Mbit/s", SLOWEST._replace(ranks=3), Question(ranks=4), SLOWEST._replace(ranks=4)),
    Row(
        "2 and 3 to 4 ranks, 100 Mbit/s",
        SLOWEST,
        Question(ranks=4),
        SLOWEST._replace(ranks=4),
        (SLOWEST._replace(ranks=3),),
    ),
    Row("2 to 4 ranks, 400 Mbit/s", DDP, Question(ranks=4), DDP._replace(ranks=4)),
    Row("DDP to FSDP2", DDP, Question(shard=True), FSDP),
    Row("FSDP2 to DDP", FSDP, Question(replicate=True), DDP),
)


@cache
def recorded(run: Run) -> Model:
    """Run a job; return the model of its steps."""
    with joined_hosts(run.ranks) as hosts, tempfile.TemporaryDirectory() as folder:
        for host in hosts:
            host.shape(run.link)
        places = [Place(Path(folder), host.there, host.device) for host in hosts]
        with ranks(prefork.command(JOB, *run.arguments), places, "job") as started:
            for process in started:
                assert process.wait(PATIENCE_S) == 0
        agent, _ = digest(Path(folder))
        with own_trace(agent.path, "job", Window(None), (), alone=True) as node:
            return model_of([node], run.ranks)


def _rows() -> Iterator[tuple[float, float, float]]:
    """Yield for each row the error of the prediction and of the replay, and 1 if the sign of a clear change is wrong, and print it."""
    for row in ROWS:
        if not all(word in row.what for word in sys.argv[1:]):
            continue
        before, after = recorded(row.before), recorded(row.after)
        others = {f"of {run.ranks}": recorded(run) for run in row.others}
        found = study("job", before, changes_of(row.question, {}), others)
        predicted = found.answers[0]
        measured_s = median(after.measured_s)
        error = predicted.predicted.step_s / measured_s - 1
        unchanged = found.replayed_s / found.measured_s - 1
        true, said = 1 - measured_s / after_samples(row) / found.measured_s, predicted.saves_share
        wrong = abs(true) > _CLEAR and true * said <= 0
        cells = (
            row.what, f"{1e3 * found.measured_s:.0f} ms", f"{1e3 * predicted.predicted.step_s:.0f} ms", f"{1e3 * measured_s:.0f} ms",
            f"{100 * error:+.1f}%", f"{100 * said:+.0f}% / {100 * true:+.0f}%", f"{100 * unchanged:+.1f}%",
        )  # fmt: skip
        print(f"| {' | '.join(cells)} |", flush=True)
        yield error, unchanged, float(wrong)


def after_samples(row: Row) -> int:
    """Return the micro-steps of a step after the change."""
    return row.question.accumulate or 1


def _large() -> bool:
    """Print what the replay of a step of 1,024 ranks costs, in this process; return whether that is within the budget."""
    job = large(1024, 200)
    began_s = time.process_time()
    replay(job)
    took_s, most_bytes = time.process_time() - began_s, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    print(f"1,024 ranks with 200 operations each: {took_s:.1f} s of CPU time, {most_bytes / 1e6:.0f} MB\n", flush=True)
    return took_s < 10 and most_bytes < 1e9


def main() -> int:
    """Print the table; return the exit code, 1 if predictions are worse, or a replay costs more, than they should."""
    within = _large()
    print(
        "| change | recorded step | predicted | measured | error | gain predicted / measured | replay of the recorded step |"
    )
    print("|---|---|---|---|---|---|---|", flush=True)
    errors, replays, wrong = zip(*_rows(), strict=True)
    sizes = sorted(map(abs, errors))
    print(
        f"\nmedian error {100 * median(sizes):.1f}%, worst {100 * sizes[-1]:.1f}%, wrong signs: {sum(wrong):.0f}; ",
        end="",
    )
    print(f"replay without changes: worst {100 * max(map(abs, replays)):.1f}%")
    return int(
        not within or median(sizes) > 0.10 or sizes[-1] > 0.25 or sum(wrong) > 0 or max(map(abs, replays)) > 0.03
    )


if __name__ == "__main__":
    sys.exit(main())
