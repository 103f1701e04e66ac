"""The process that answers questions to the history: the same answers as the agent's own, bounded, and never in the intake's way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from commwatch_agent.analysis.host_rates import answer
from commwatch_agent.history.chunks import Damaged
from commwatch_agent.incidents.answers import IncidentFilter, details_of
from commwatch_agent.incidents.incident import Incident
from commwatch_agent.model.api_views import Summary
from commwatch_agent.questions import incidents, jobs, operations, reports, trace_files, whatif, worker, worker_process
from commwatch_agent.questions.answer import ApiError, Scoped, text_of
from commwatch_agent.questions.operations import Wanted, summary
from commwatch_agent.questions.reports import NodeFacts
from commwatch_agent.questions.worker import Worker, WorkerFault
from commwatch_agent.reference.references import References
from commwatch_agent.report.chrome_trace import TraceMark
from commwatch_agent.report.job_figures import figures_parts, job_figures
from commwatch_agent.report.timeline_export import Window
from commwatch_agent.report.timeline_parts import Page
from commwatch_agent.runtime import agent_log
from commwatch_agent.whatif.questions import Question
from commwatch_collectors.node import process
from tests.helpers import EPOCH_NS, MS, PATIENCE_S, Watch, end_rank, group_entry, mark, operation, wait_for, write_ring

ALWAYS: dict[str, Any] = {"from_ns": 0, "until_ns": 1 << 62}
SUMMARY: dict[str, Any] = {**ALWAYS, "job": None, "by": ["rank", "op"], "same": {}}


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[Watch]:
    """An agent that has read two ranks' records: those of the first 10 s are stored, the others only in memory."""
    watch = Watch(tmp_path)
    writers = []
    for rank in range(2):
        records = [mark(0, 1)]
        for n in range(40):
            begin = n * 500 * MS
            records.append(operation(start_ns=begin + rank * MS, end_ns=begin + 10 * MS, seq=n, size=1 << 20))
            records.append(mark(n + 1, begin + 400 * MS, exposed_ns=MS))
        writers.append(write_ring(watch.rings, records, [group_entry(group_id="world")], rank=rank))
    watch.tick(20_000 * MS)
    yield watch
    for writer in writers:
        end_rank(writer)


@pytest.fixture
def asked(watch: Watch) -> Iterator[Worker]:
    """Who answers for it."""
    made = Worker(watch.agent, References(watch.path.parent / "references"), watch.damaged)
    yield made
    made.close()


INCIDENT = Incident("one", "hang", "warning", "open", "job", "key", ("g", "1"), 0.0, 0.0, 0.0)
OPERATIONS = Wanted(**ALWAYS, job="job", limit=30)
MARK = TraceMark(EPOCH_NS + MS, "verdict hang", 0, {"says": "it hangs"})
OWN = NodeFacts(answer(None, None), {}, None, [])
#: Each function that answers for one node, with arguments.
QUESTIONS: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    (incidents.incidents, {"job": "job", "wanted": IncidentFilter(), "own": [], "limit": 5}),
    (incidents.incident, {"incident_id": "one", "own": details_of(INCIDENT)}),
    (operations.summary, SUMMARY),
    (operations.operations, {"wanted": OPERATIONS}),
    (operations.operations_csv, {"wanted": replace(OPERATIONS, same={"rank": 1})}),
    (operations.collective, {"group_id": "world", "seq": 3}),
    (operations.cells, {**ALWAYS, "job": "job"}),
    (operations.efficiency, {**ALWAYS, "job": "job"}),
    (jobs.slots, {**ALWAYS, "job": "job"}),
    (jobs.bars, {**ALWAYS, "job": "job"}),
    (jobs.steps, {**ALWAYS, "job": "job", "rank": None, "limit": 50}),
    (job_figures, {"most": 5}),
    (figures_parts, {"most": 5, "durations": 100}),
    (reports.advice, {"job": "job", "own": OWN, "last_s": None, "asked": None}),
    (trace_files.timeline, {"job": "job", "window": Window(None), "most": 50, "marks": [MARK]}),
    (trace_files.timeline_part, {"job": "job", "page": Page(None, None, None, 50), "marks": []}),
    (whatif.whatif, {"job": "job", "last_s": None, "question": Question(link="2x")}),
]


def test_same_answers(watch: Watch, asked: Worker) -> None:
    """Each question gets the same answer as in the agent itself, including what is only in memory."""
    for question, arguments in QUESTIONS:
        expected = question(watch.agent, **arguments)
        assert asked.ask(question, **arguments) == expected, question
        text = asked.text(question, **arguments)
        assert text == text_of(expected), question
        if text.media_type == "application/json":
            data = expected.data if isinstance(expected, Scoped) else expected
            assert json.loads(text.body) == json.loads(TypeAdapter(type(data)).dump_json(data)), question
    rows = asked.ask(summary, **SUMMARY).data.rows
    assert sum(row.count for row in rows) == 80


def test_links(asked: Worker) -> None:
    """Expected times follow the settings at the time of the question."""
    before = asked.ask(summary, **SUMMARY).data.rows
    asked._references.links = {"*": "nvlink4"}
    after = asked.ask(summary, **SUMMARY).data.rows
    assert {row.reference for row in before} != {row.reference for row in after} == {"catalogue"}


def test_no_web_server(asked: Worker) -> None:
    """The process holds no web server, so that it is a third of the agent's size; and it makes way for others."""
    asked.ask(summary, **SUMMARY)
    pid = _pid(asked)
    maps = Path(f"/proc/{pid}/maps").read_text()
    assert "pydantic" not in maps
    assert "sqlite" in maps
    lower = min(19, os.getpriority(os.PRIO_PROCESS, 0) + worker_process.NICE)  # there is no lower one than 19
    assert os.getpriority(os.PRIO_PROCESS, pid) == lower
    assert f"{worker_process.MOST_BYTES}" in Path(f"/proc/{pid}/limits").read_text()
    code = f"import sys, {worker_process.__name__}; print({{'http.server', 'prometheus_client'}} & {{*sys.modules}})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_problems(asked: Worker) -> None:
    """A wrong question gets the same error as in the agent itself, and the process continues."""
    with pytest.raises(ApiError, match="no job 'another'") as caught:
        asked.text(summary, **{**SUMMARY, "job": "another"})
    assert caught.value.status == HTTPStatus.NOT_FOUND
    pid = _pid(asked)
    assert asked.text(summary, **SUMMARY)
    assert _pid(asked) == pid


def test_history_gone(watch: Watch, asked: Worker) -> None:
    """A history that cannot be read is reported as such."""
    watch.path.rename(watch.path.with_suffix(".moved"))
    with pytest.raises(ApiError, match=r"the history cannot be read: .*no history here") as caught:
        asked.text(summary, **SUMMARY)
    assert caught.value.status == HTTPStatus.SERVICE_UNAVAILABLE


def test_takes_too_long(watch: Watch) -> None:
    """An answer that takes too long is given up with a word on what to do, and the next question gets its answer."""
    asked = Worker(watch.agent, References(Path("none")), Damaged())
    asked.ask(summary, **SUMMARY)
    asked._most_s = 1.0
    os.kill(_pid(asked), signal.SIGSTOP)
    with pytest.raises(ApiError, match="took longer than 1 s; request less") as caught:
        asked.ask(summary, **SUMMARY)
    assert caught.value.status == HTTPStatus.SERVICE_UNAVAILABLE
    asked._most_s = worker.MOST_S
    assert asked.ask(summary, **SUMMARY).data.rows
    asked.close()
    with pytest.raises(ApiError, match="shutting down"):
        asked.ask(summary, **SUMMARY)


def test_killed(asked: Worker) -> None:
    """Where the process was killed, as for want of memory, another answers."""
    asked.ask(summary, **SUMMARY)
    first = _pid(asked)
    os.kill(first, signal.SIGKILL)
    # Not a look at its state: a zombie some of whose threads have not ended is none that a wait returns.
    os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
    assert asked.ask(summary, **SUMMARY).data.rows
    assert _pid(asked) != first


def test_unexpected_error(asked: Worker) -> None:
    """An unexpected error ends neither the process nor its other answers, and reaches the caller in one line with its place."""
    asked.ask(summary, **SUMMARY)
    pid = _pid(asked)
    with pytest.raises(WorkerFault, match=r"^TypeError: summary.* missing .* at answered \(worker_process.py:\d+\)"):
        asked.ask(summary)  # type: ignore[call-arg]
    assert asked.ask(summary, **SUMMARY).data.rows
    assert _pid(asked) == pid


def test_too_much_memory(watch: Watch) -> None:
    """An answer that does not fit into memory is refused, and the next question gets its answer."""

    class Connection:
        """Asks two questions, of which the first takes what no machine has."""

        def __init__(self) -> None:
            self.said: list[Any] = []
            begin = worker_process.Begin(watch.path, Path("none"), *agent_log.in_use())
            self._asked = [
                begin,
                worker_process.Question(lambda _: bytes(1 << 60), (), {}, {}, as_text=True),
                worker_process.Question(lambda _: [1], (), {}, {}, as_text=True),
            ]

        def recv(self) -> Any:
            if not self._asked:
                raise EOFError
            return self._asked.pop(0)

        def send(self, said: Any) -> None:
            self.said.append(said)

    connection = Connection()
    worker_process.serve(connection)  # type: ignore[arg-type]
    wrong, right = connection.said
    assert (wrong.status, f"{worker_process.MOST_BYTES >> 20} MiB" in wrong.detail) == (
        HTTPStatus.SERVICE_UNAVAILABLE,
        True,
    )
    assert right.answer.body == b"[1]"


def test_intake_does_not_wait(watch: Watch, asked: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that stops while the agent holds its totals unchanged for it is killed, and the intake continues."""
    monkeypatch.setattr(worker, "_FREEZE_S", 0.2)
    asked.ask(summary, **SUMMARY)
    pid, live_cells = _pid(asked), watch.agent.live_cells

    def stopped(*arguments: Any) -> Any:
        os.kill(pid, signal.SIGSTOP)
        return live_cells(*arguments)

    monkeypatch.setattr(watch.agent, "live_cells", stopped)
    with pytest.raises(ApiError, match="has ended; try again"):
        asked.ask(summary, **SUMMARY)
    watch.tick(21_000 * MS)
    monkeypatch.undo()
    assert asked.ask(summary, **SUMMARY).data.rows


def test_idle(asked: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process without questions for a while ends, and leaves no zombie; it is started again at the next question."""
    asked.ask(summary, **SUMMARY)
    pid = _pid(asked)
    asked.tick()
    assert _pid(asked) == pid
    monkeypatch.setattr(worker, "_IDLE_S", 0.0)
    asked.tick()
    assert process.state(pid) is None
    assert asked.ask(summary, **SUMMARY).data.rows


def test_ends_with_the_agent(asked: Worker) -> None:
    """When the agent is gone, so is the process."""
    asked.ask(summary, **SUMMARY)
    pid = _pid(asked)
    assert asked._connection is not None
    asked._connection.close()
    wait_for(lambda: process.state(pid) in (None, "zombie"), "its end")


def test_closed_in_an_answer(asked: Worker) -> None:
    """An agent that ends does not wait for an answer."""
    asked.ask(summary, **SUMMARY)
    os.kill(_pid(asked), signal.SIGSTOP)
    refused: list[ApiError] = []

    def ask() -> None:
        try:
            asked.ask(summary, **SUMMARY)
        except ApiError as problem:
            refused.append(problem)

    thread = threading.Thread(target=ask)
    thread.start()
    wait_for(asked._lock.locked, "the question")
    asked.close()
    thread.join(PATIENCE_S)
    assert len(refused) == 1


def test_closed_as_a_question_begins(asked: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that ends the process just as a question comes to it starts no other."""
    asked.ask(summary, **SUMMARY)
    process = asked._process
    assert process is not None
    poll = process.poll

    def killed_by_close() -> int | None:
        asked._closed = True
        if poll() is None:
            os.kill(process.pid, signal.SIGKILL)
        wait_for(lambda: poll() is not None, "the end of the process")
        return poll()

    monkeypatch.setattr(process, "poll", killed_by_close)
    with pytest.raises(ApiError, match="shutting down"):
        asked.ask(summary, **SUMMARY)
    assert asked._process is None


def test_closed_as_the_process_starts(asked: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that ends while the process for a question starts does not wait for its answer."""
    closing, start = threading.Thread(target=asked.close), subprocess.Popen

    def starting(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        closing.start()
        wait_for(lambda: asked._closed, "the end of the agent")
        started = start(*arguments, **options)
        os.kill(started.pid, signal.SIGSTOP)
        return started

    monkeypatch.setattr(subprocess, "Popen", starting)
    with pytest.raises(ApiError, match="shutting down"):
        asked.ask(summary, **SUMMARY)
    closing.join(PATIENCE_S)
    assert not closing.is_alive()


def test_damaged_chunk(watch: Watch, asked: Worker, caplog: pytest.LogCaptureFixture) -> None:
    """A damaged chunk that the process finds is counted and logged by the agent, once."""
    watch.store._db.execute("UPDATE chunk SET data = x'00'")
    for _ in range(2):
        assert asked.ask(operations.operations, wanted=Wanted(**ALWAYS, job=None)).operations == []
    assert len(watch.damaged) == len([one for one in caplog.records if "is damaged" in one.getMessage()]) > 0


def test_not_finite() -> None:
    """What is no finite number is null, as JSON has none, wherever it is in an answer."""
    rows = Summary(None, float("inf"), ["op"], [])
    assert text_of([rows, {"a": (float("nan"), 1.5, None, "ä\ud800")}]).body == (
        b'[{"since":null,"until":null,"by":["op"],"rows":[]},{"a":[null,1.5,null,"\\u00e4\\ud800"]}]'
    )


def _pid(asked: Worker) -> int:
    assert asked._process is not None
    return asked._process.pid
