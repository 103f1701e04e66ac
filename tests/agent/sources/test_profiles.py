"""The agent's side of a profile: what it asks for, takes over, concludes and keeps, with ranks played by hand."""

from __future__ import annotations

import gzip
import io
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest

from commwatch.wire import events as ev
from commwatch.wire import profile_files as files
from commwatch.wire.numbers import NUMBERS
from commwatch_agent.report.timeline_export import Window, own_trace, write
from commwatch_agent.sources.profiles import (
    Profile,
    ProfileError,
    Profiles,
    RankProfile,
    UnknownTarget,
    kept_in,
    traces_of,
)
from tests.agent.web.routes.test_jobs import rings_of
from tests.chrome_trace import parsed
from tests.helpers import (
    EPOCH_NS,
    MS,
    PLANTED,
    RunningAgent,
    Trainer,
    Watch,
    agent,
    commwatch,
    group_entry,
    identity,
    mark,
    operation,
)

JOB = "job"
#: Steps of 100 ms that end at marks 1 to 4; each has 30 ms of communication, 20 ms of it exposed.
STEP, STEPS = 100 * MS, 4
KERNELS = (("ncclDevKernel_AllReduce", 100, 140), ("gemm", 120, 200), ("ncclDevKernel_AllReduce", 250, 270))


def records(exposed_ns: int | None, exposed_by: int, first: int = 0) -> list[tuple[int, ...]]:
    """What the probe recorded."""
    made = [mark(first, STEP, exposed_ns=exposed_ns, exposed_by=exposed_by)]
    for n in range(1, STEPS + 1):
        made.append(operation(start_ns=n * STEP + 10 * MS, end_ns=n * STEP + 40 * MS, seq=n))
        number = (first + n) % NUMBERS
        made.append(mark(number, (n + 1) * STEP, exposed_ns=exposed_ns, exposed_by=exposed_by))
    return made


class Node:
    """An agent without threads, the trainers of two ranks, and a clock that is set by hand."""

    def __init__(
        self, directory: Path, exposed_ns: int | None = 20 * MS, exposed_by: int = ev.BY_NONE, first: int = 0
    ) -> None:
        self._records = records(exposed_ns, exposed_by, first)
        self.run_dir, self.kept = directory / "run", kept_in(directory / "state")
        self.run_dir.mkdir(mode=0o700)
        self.now = 1000.0
        self.watch = Watch(self.run_dir)
        self.trainers = [self._trainer(rank) for rank in (0, 1)]
        self.watch.tick(STEP)
        self.profiles = self.born()

    def _trainer(self, rank: int) -> Trainer:
        path = self.watch.rings / f"{JOB}.r0.{rank}.ring"
        trainer = Trainer(path, identity(JOB, rank))
        trainer.call("name", [(group_entry(),)])
        trainer.write(self._records)
        return trainer

    def born(self) -> Profiles:
        """The agent begins its life, or a new one."""
        return Profiles(self.run_dir, self.kept, self.watch.agent, lambda: self.now)

    def ask(self, **more: Any) -> Profile:
        """Ask for it."""
        return self.profiles.ask(**{"job": JOB, "steps": 2, "ranks": None, "timeout_s": 60.0, **more})

    def standing(self) -> files.Request | None:
        """The request that the trainers find."""
        path = files.request_path(self.run_dir, JOB)
        return files.request_from(path.read_text()) if path.exists() else None

    def left(self, request_id: str, rank: int, what: str) -> Path:
        """A file of a rank."""
        return files.of_rank(files.directory(self.run_dir), request_id, rank, what)

    def claim(self, request_id: str, rank: int, pid: int | None = None) -> None:
        """A rank takes it up."""
        files.write(self.left(request_id, rank, files.CLAIM), files.Claim(pid or self.trainers[rank].process.pid), {})

    def finish(self, request_id: str, rank: int, trace: bytes | None = None, **more: Any) -> None:
        """A rank is done with steps 2 and 3, as the agent counts them."""
        began = EPOCH_NS + 2 * STEP
        result = files.Result(request_id, rank, 2, 1, 3, began, began + 2 * STEP, None)
        if trace is None:
            events = [
                {"ph": "X", "cat": "kernel", "name": name, "ts": start * 1000, "dur": (end - start) * 1000}
                for name, start, end in KERNELS
            ]
            base = EPOCH_NS + STEP
            trace = gzip.compress(json.dumps({"baseTimeNanoseconds": base, "traceEvents": events}).encode())
        self.left(request_id, rank, files.TRACE).write_bytes(trace)
        files.write(self.left(request_id, rank, files.RESULT), replace(result, **more), {})

    def seen(self, request_id: str) -> Profile:
        """A profile as the API shows it now."""
        self.profiles.tick()
        found = self.profiles.get(request_id)
        assert found is not None
        return found

    def close(self) -> None:
        """End the trainers."""
        for trainer in self.trainers:
            trainer.kill()
        self.watch.store.close()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """Two ranks that run."""
    with closing(Node(tmp_path)) as made:
        yield made


@pytest.mark.parametrize(
    ("exposed_ns", "exposed_by", "source"),
    [
        (20 * MS, ev.BY_NONE, "thread_cpu"),
        (20 * MS, ev.BY_EVENTS, "stream_waits"),
        (None, ev.BY_NONE, ""),
    ],
)
def test_source_of_the_records(tmp_path: Path, exposed_ns: int | None, exposed_by: int, source: str) -> None:
    """The records beside a profile name how their exposed time was measured, and nothing if it is not known."""
    with closing(Node(tmp_path, exposed_ns, exposed_by)) as node:
        asked = node.ask(ranks=[0])
        node.finish(asked.id, 0)
        [rank] = node.seen(asked.id).ranks
        assert rank.continuous is not None
        assert rank.continuous.source == source
        assert (rank.continuous.exposed_share is None) == (source == "")


def states(profile: Profile) -> list[str]:
    """Of the profile and its ranks."""
    return [profile.state, *(rank.state for rank in profile.ranks)]


def test_whole_way(node: Node) -> None:
    """From the request to the result: states, figures of trace and records side by side, and what is kept."""
    asked = node.ask()
    request = node.standing()
    places = [f"host:{node.trainers[rank].process.pid}" for rank in (0, 1)]
    assert request == files.Request(asked.id, JOB, 2, [0, 1], 1060.0, JOB, places)
    assert states(node.seen(asked.id)) == ["waiting", "waiting", "waiting"]
    node.claim(asked.id, 0)
    assert states(node.seen(asked.id)) == ["running", "running", "waiting"]
    node.finish(asked.id, 0)
    node.claim(asked.id, 1)
    assert states(node.seen(asked.id)) == ["running", "done", "running"]
    node.finish(asked.id, 1, error="the training itself runs a profiler")
    found = node.seen(asked.id)
    assert states(found) == ["done", "done", "failed"]
    first, second = found.ranks
    assert second == RankProfile(1, "failed", "the training itself runs a profiler")
    assert (first.steps, first.from_seq, first.until_seq) == (2, 1, 3)
    assert first.step_s == pytest.approx(0.1)
    # The trace: of 200 ms NCCL has 100 to 140 and 250 to 270, compute 120 to 200.
    assert first.profile is not None
    assert first.profile.source == "kernels"
    assert (first.profile.comm_s, first.profile.comm_share) == pytest.approx((0.06, 0.3))
    assert (first.profile.exposed_s, first.profile.exposed_share) == pytest.approx((0.04, 0.2))
    # The records of the steps that end at marks 2 and 3.
    assert first.continuous is not None
    assert (first.continuous.comm_s, first.continuous.comm_share) == pytest.approx((0.06, 0.3))
    assert (first.continuous.exposed_s, first.continuous.exposed_share) == pytest.approx((0.04, 0.2))
    assert first.trace == str(node.kept / f"{JOB}-{asked.id}" / "rank0.pt.trace.json.gz")
    assert gzip.decompress(Path(first.trace).read_bytes())
    # A claim outlives the request: no later life of the rank may take it up.
    claims = {node.left(asked.id, rank, files.CLAIM) for rank in (0, 1)}
    assert set(files.directory(node.run_dir).iterdir()) == claims
    assert node.standing() is None
    assert node.born().get(asked.id) == found  # also for an agent after this one
    assert node.profiles.get("0" * 16) is None
    assert node.profiles.get("*") is None


def test_traces_for_a_timeline(node: Node, tmp_path: Path) -> None:
    """The traces of a job that were measured can be put into its timeline; others, and results that cannot be read, are left out."""
    asked = node.ask()
    node.finish(asked.id, 0)
    node.finish(asked.id, 1, error="the training itself runs a profiler")
    node.seen(asked.id)
    folder = node.kept / f"{JOB}-{asked.id}"
    (node.kept / "job-damaged").mkdir()
    (node.kept / "job-damaged" / "profile.json").write_text("{")
    (trace,) = traces_of(node.kept, JOB)
    names = (folder / "rank0.pt.trace.json.gz", folder / "rank0.exposed.json")
    assert trace[:5] == (asked.id, 0, *names, (1, 3))
    assert (trace.begin_ns, trace.end_ns) == pytest.approx((EPOCH_NS + 2 * STEP, EPOCH_NS + 4 * STEP), abs=1000, rel=0)
    assert list(traces_of(node.kept, "other")) == list(traces_of(tmp_path / "none", JOB)) == []
    with own_trace(node.watch.path, JOB, Window(None), (), alone=True, profiles=[trace]) as own:
        out = io.StringIO()
        found = write([own], JOB, Window(None), {}, out)
    (note,) = found.profiles.values()
    assert note["moved_us"] == pytest.approx(0, abs=1)
    # The trace: of 200 ms NCCL has 100 to 140 and 250 to 270, compute 120 to 200.
    read = parsed(out.getvalue().encode())
    begin_ns = EPOCH_NS + 2 * STEP - read.about["Unix time of 0, in ns"]
    exposed = [((each.start_ns - begin_ns) / MS, (each.end_ns - begin_ns) / MS) for each in read.of("exposed")]
    assert exposed == [pytest.approx((0, 20), abs=0.001), pytest.approx((150, 170), abs=0.001)]


def test_refusals(node: Node) -> None:
    """Unknown jobs and ranks, and a second profile of a job, are refused by name; an ended job, too."""
    for more, says in (({"job": "none"}, "no job 'none'"), ({"ranks": [0, 7]}, "rank 7 of job 'job'")):
        with pytest.raises(UnknownTarget, match=says):
            node.ask(**more)
    asked = node.ask(ranks=[1])
    assert [rank.rank for rank in asked.ranks] == [1]
    with pytest.raises(ProfileError, match=f"profile {asked.id} of job 'job' is still in progress"):
        node.ask()
    for trainer in node.trainers:
        trainer.kill()
    node.watch.tick(STEP)
    with pytest.raises(ProfileError, match="is not running"):
        node.ask()


def test_next_one(node: Node) -> None:
    """When one profile is over, the next can be requested."""
    for _ in range(2):
        asked = node.ask(ranks=[0])
        node.finish(asked.id, 0)
        assert node.seen(asked.id).state == "done"


def test_too_late(node: Node) -> None:
    """A rank that reaches no step mark in time, to begin or to stop, is reported as failed, and the request is withdrawn."""
    asked = node.ask()
    node.claim(asked.id, 0)
    node.now += 61
    found = node.seen(asked.id)
    assert [rank.error for rank in found.ranks] == [None, "it reached no step mark in time"]
    assert node.standing() is not None
    node.now += 60
    found = node.seen(asked.id)
    assert found.state == "failed"
    assert found.ranks[0].error == "it reached no step mark in time to stop"
    assert node.standing() is None


def test_rank_that_dies(node: Node) -> None:
    """A rank whose process ends without a result has failed, also where another process has its place."""
    asked = node.ask()
    node.claim(asked.id, 0, pid=55)  # of a life before the one that runs
    node.claim(asked.id, 1)
    found = node.seen(asked.id)
    assert [rank.error for rank in found.ranks] == ["its process ended before the profile did", None]
    node.trainers[1].kill()
    node.watch.tick(STEP)
    assert node.seen(asked.id).state == "failed"


def test_result_of_a_rank_that_ended(node: Node) -> None:
    """What a rank leaves before its end counts."""
    asked = node.ask(ranks=[0])
    node.finish(asked.id, 0)
    node.trainers[0].kill()
    node.watch.tick(STEP)
    assert node.seen(asked.id).state == "done"


@pytest.mark.parametrize(
    ("trace", "says"),
    [
        (b"", "the trace cannot be read"),
        (b"not packed", "the trace cannot be read"),
        (gzip.compress(b'{"traceEvents": []}', mtime=0), "no event of the trace lies within the steps"),
    ],
)
def test_damaged_traces(node: Node, trace: bytes, says: str) -> None:
    """A trace that cannot be read is kept, and is an error; the figures of the records remain."""
    asked = node.ask(ranks=[0])
    node.finish(asked.id, 0, trace)
    (rank,) = node.seen(asked.id).ranks
    assert says in (rank.error or "")
    assert rank.continuous is not None
    assert rank.trace is not None
    assert Path(rank.trace).read_bytes() == trace


def test_damaged_results(node: Node) -> None:
    """A result that cannot be read, or has no steps, is an error of that rank."""
    asked = node.ask()
    node.left(asked.id, 0, files.RESULT).write_text("{}")
    node.finish(asked.id, 1, steps=0)
    found = node.seen(asked.id)
    assert found.state == "failed"
    assert [rank.error is not None for rank in found.ranks] == [True, True]
    assert "its result cannot be read" in (found.ranks[0].error or "")


def test_links_are_not_followed(node: Node, tmp_path: Path) -> None:
    """What a trainer's link or pipe names is not read with the agent's rights, and holds nothing up."""
    (tmp_path / "secret").write_text("secret")
    asked = node.ask()
    for rank in (0, 1):
        node.finish(asked.id, rank)
        trace = node.left(asked.id, rank, files.TRACE)
        trace.unlink()
        trace.symlink_to(tmp_path / "secret") if rank else os.mkfifo(trace)
    found = node.seen(asked.id)
    assert ["the trace cannot be kept" in (rank.error or "") for rank in found.ranks] == [True, True]
    assert [path.name for path in (node.kept / f"{JOB}-{asked.id}").iterdir()] == ["profile.json"]


@pytest.mark.parametrize("what", PLANTED)
def test_planted(what: str, node: Node) -> None:
    """Files that another user has put in the place of a request, a claim, a result and a trace block nothing and are not accepted."""
    asked = node.ask()
    PLANTED[what](files.request_path(node.run_dir, "other"))
    node.profiles = node.born()
    PLANTED[what](node.left(asked.id, 0, files.CLAIM))
    PLANTED[what](node.left(asked.id, 0, files.RESULT))
    node.finish(asked.id, 1)
    node.left(asked.id, 1, files.TRACE).unlink()
    PLANTED[what](node.left(asked.id, 1, files.TRACE))
    assert states(node.seen(asked.id)) == ["running", "waiting", "failed"]
    node.now += 1e6
    found = node.seen(asked.id)
    assert states(found) == ["failed"] * 3
    assert "the trace cannot be kept" in (found.ranks[1].error or "")
    node.profiles.tidy(0)
    assert [path.name for path in (node.kept / f"{JOB}-{asked.id}").iterdir()] == ["profile.json"]


def test_no_steps_recorded(node: Node) -> None:
    """Where the records know no steps, their figures are absent, after a while of waiting for them."""
    asked = node.ask(ranks=[0])
    node.finish(asked.id, 0, from_seq=91, until_seq=93)
    assert node.seen(asked.id).state not in ("done", "failed")
    node.profiles.close()  # no more patience
    found = node.profiles.get(asked.id)
    assert found is not None
    assert found.state == "done"
    assert found.ranks[0].continuous is None


def test_agent_ends(node: Node) -> None:
    """An agent that ends takes what is there, says of the rest why it is not, and takes its request back."""
    asked = node.ask()
    node.finish(asked.id, 0)
    node.profiles.close()
    assert node.standing() is None
    found = node.born().get(asked.id)
    assert found is not None
    assert states(found) == ["done", "done", "failed"]
    assert found.ranks[1].error == "the agent ended"


def test_agent_killed(node: Node) -> None:
    """An agent that starts after one that was killed goes on with its requests; a damaged one is removed."""
    asked = node.ask(ranks=[0])
    damaged = files.request_path(node.run_dir, "other")
    damaged.write_text("{")
    node.profiles = node.born()
    node.finish(asked.id, 0)
    assert node.seen(asked.id).state == "done"
    assert not damaged.exists()


def test_no_room_to_keep(node: Node) -> None:
    """If nothing can be kept, the answer still comes, and the next profile can be requested."""
    node.kept.parent.mkdir()
    node.kept.write_text("no directory")
    asked = node.ask(ranks=[0])
    node.finish(asked.id, 0)
    found = node.seen(asked.id)
    assert found.state == "failed"
    assert "the trace cannot be kept" in (found.ranks[0].error or "")
    node.ask()


def test_tidy(node: Node) -> None:
    """What is old goes: kept profiles by keep_days, what ranks have left after an hour; not what is in progress."""
    asked = node.ask(ranks=[0])
    node.claim(asked.id, 0)
    node.finish(asked.id, 0)
    node.seen(asked.id)
    standing = node.ask()
    node.now = time.time()
    node.profiles.tidy(node.now - 60)
    assert node.profiles.get(asked.id) is not None
    assert node.left(asked.id, 0, files.CLAIM).exists()
    node.now += 2 * files.MOST_SECONDS
    node.profiles.tidy(node.now)
    assert not list(node.kept.iterdir())
    assert list(files.directory(node.run_dir).iterdir()) == [files.request_path(node.run_dir, JOB)]
    assert node.profiles.get(standing.id) is not None


# -- the routes -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningAgent]:
    """An agent without jobs."""
    directory = tmp_path_factory.mktemp("profiles") / "run"
    rings_of(directory)
    with agent(directory) as made:
        yield made


def answer(running: RunningAgent, body: bytes | None, content_type: str | None, path: str = "") -> tuple[int, Any]:
    """Status and problem of a request to the route."""
    headers = {"Authorization": f"Bearer {running.token}"}
    headers |= {} if content_type is None else {"Content-Type": content_type}
    request = urllib.request.Request(f"{running.url}/api/v1/profiles{path}", body, headers)
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=30)
    with caught.value as error:
        return error.code, json.load(error)["detail"]


WANTED = b'{"job": "none", "steps": 3}'


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_only_json(running: RunningAgent, content_type: str) -> None:
    """What a page in a browser can send unasked makes nothing happen: the body must be declared to be JSON."""
    status, detail = answer(running, WANTED, content_type)
    assert status == HTTPStatus.UNSUPPORTED_MEDIA_TYPE
    assert "application/json" in detail


@pytest.mark.parametrize(
    ("body", "status", "named"),
    [
        (WANTED, HTTPStatus.NOT_FOUND, "no job 'none'"),
        (b'{"steps": 3}', HTTPStatus.UNPROCESSABLE_ENTITY, "job"),
        (b'{"job": "none", "steps": 0}', HTTPStatus.UNPROCESSABLE_ENTITY, "steps=0"),
        (b'{"job": "none", "steps": 51}', HTTPStatus.UNPROCESSABLE_ENTITY, "steps=51"),
        (b'{"job": "none", "steps": "3"}', HTTPStatus.UNPROCESSABLE_ENTITY, "steps=3"),
        (b'{"job": "none", "ranks": []}', HTTPStatus.UNPROCESSABLE_ENTITY, "ranks"),
        (b'{"job": "none", "ranks": [-1]}', HTTPStatus.UNPROCESSABLE_ENTITY, "ranks.0=-1"),
        (b'{"job": "none", "timeout_s": 1e9}', HTTPStatus.UNPROCESSABLE_ENTITY, "timeout_s"),
        (b'{"job": "none", "stpes": 3}', HTTPStatus.UNPROCESSABLE_ENTITY, "stpes"),
        (b"{", HTTPStatus.UNPROCESSABLE_ENTITY, ""),
    ],
)
def test_bad_requests(running: RunningAgent, body: bytes, status: HTTPStatus, named: str) -> None:
    """A bad request is one problem that names what is wrong."""
    got, detail = answer(running, body, "application/json; charset=utf-8")
    assert (got, named in detail) == (status, True), detail


def test_misspelt_parameter(running: RunningAgent) -> None:
    """A query parameter is refused on POST as on GET."""
    status, detail = answer(running, WANTED, "application/json", "?job=none")
    assert (status, "job: no such parameter" in detail) == (HTTPStatus.BAD_REQUEST, True)


def test_unknown_profile(running: RunningAgent) -> None:
    """A profile that is not there is a 404 that names it."""
    status, detail = answer(running, None, None, "/0123456789abcdef")
    assert (status, "'0123456789abcdef'" in detail) == (HTTPStatus.NOT_FOUND, True)


# -- the command ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--steps", "0"), "--steps 0: needs 1 to 50"),
        (("--steps", "51"), "--steps 51: needs 1 to 50"),
        (("--ranks", "0,x"), "--ranks 0,x: needs comma-separated"),
        (("--timeout", "0"), "--timeout 0: needs more than 0"),
    ],
)
def test_asked_wrongly(tmp_path: Path, flags: tuple[str, ...], named: str) -> None:
    """What makes no sense is one line that names it, exit code 2."""
    done = commwatch("profile", "--dir", tmp_path, *flags)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert named in done.stderr


def test_nobody_there(tmp_path: Path, running: RunningAgent) -> None:
    """Without an agent, the command prints one line with exit code 2, as other commands do; without a job, exit code 1."""
    for directory, code, says in (
        (tmp_path, 2, f"no agent watches {tmp_path}"),
        (running.directory, 1, "no job is running here"),
    ):
        done = commwatch("profile", "--dir", directory)
        assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (code, "", 1)
        assert says in done.stderr


@pytest.mark.parametrize("first", [NUMBERS - STEPS + 1, NUMBERS - 2, NUMBERS - 1])
def test_numbers_go_on(tmp_path: Path, first: int) -> None:
    """The records beside a profile are those of the same steps where the numbers of marks go on at 0."""
    with closing(Node(tmp_path, first=first)) as node:
        asked = node.ask(ranks=[0])
        node.finish(asked.id, 0, from_seq=(first + 1) % NUMBERS, until_seq=(first + 3) % NUMBERS)
        [rank] = node.seen(asked.id).ranks
        assert rank.continuous is not None
        assert (rank.continuous.comm_s, rank.continuous.comm_share) == pytest.approx((0.06, 0.3))
