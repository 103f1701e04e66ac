"""The agents of a training job that does not exist: real books, real exporters, real ``/metrics`` and answers of the API, made-up records.

Each node has eight ranks, an ``JobTable`` and an ``Exporter`` of its own, and a port of its own, as an agent has. Megatron's
layout: tensor parallel within a node, pipeline, data and expert parallel across nodes, 13 (group, op) pairs a rank.
Run as a script it goes at the pace of real time: ``python bench/fleet.py NODES`` prints the targets as one JSON list, and
reads orders from its standard input, one a line: ``late RANK``, ``stop RANK``. It ends with its standard input.
"""

from __future__ import annotations

import gc
import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from functools import cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

sys.path.append(str(Path(__file__).parents[1]))

from commwatch.wire import events as ev
from commwatch.wire.identity import boot_id
from commwatch_agent.analysis import live_ranks
from commwatch_agent.analysis.summary import merged
from commwatch_agent.analysis.timeline import bars
from commwatch_agent.ingest.batches import ingest_records
from commwatch_agent.ingest.collective_join import MOST_PENDING
from commwatch_agent.ingest.jobs import Job, JobTable
from commwatch_agent.ingest.rank_totals import RankTotals
from commwatch_agent.job import rank_parts
from commwatch_agent.job.queries import CellView, view_of
from commwatch_agent.model.views import JobView
from commwatch_agent.prometheus.exporter import Exporter
from commwatch_agent.prometheus.metrics import METRICS
from commwatch_agent.questions.node_now import node_now
from commwatch_collectors.node.infiniband import EVENTS
from commwatch_collectors.registry import Reading
from tests.helpers import judged_now

JOB, PER_NODE, STAGES, EXPERTS = "fleet", 8, 4, 8
STEP_NS = 1_000_000_000
#: What an operation takes, and by how much a late rank is late into each operation of its data group: 15% of a step.
USUAL_NS, LATE_NS = 6_000_000, 30_000_000
LABELS = ("default_pg", "tensor", "pipeline", "data", "expert")
#: The operations of a step in their order: group, op, size in bytes.
STEP = (
    *[("tensor", "all_gather", 8 << 20), ("tensor", "all_reduce", 4 << 20), ("tensor", "reduce_scatter", 8 << 20)] * 2,
    *[("expert", "all_to_all", 2 << 20), ("pipeline", "send", 16 << 20), ("pipeline", "recv", 16 << 20)] * 2,
    *[("data", "reduce_scatter", 25 << 20), ("data", "all_gather", 50 << 20)] * 2,
    *[("data", "all_reduce", 4096), ("expert", "all_reduce", 1 << 20), ("default_pg", "all_reduce", 8)],
    *[("default_pg", "broadcast", 1 << 20), ("default_pg", "barrier", 0)],
)
_SLOT_NS = STEP_NS // (len(STEP) + 1)
#: What the labels of a node's devices say; another label says the same of all.
_VALUES = {
    "clock": ("sm", "memory"),
    "direction": ("transmit", "receive"),
    "reason": (
        "clocks_setting", "power_cap", "hardware", "sync_boost", "software_thermal", "hardware_thermal", "power_brake",
    ),
    "gpu": tuple(map(str, range(PER_NODE))),
    "device": (*(f"mlx5_{n}:1" for n in range(PER_NODE)), "eth0"),
    "event": tuple(EVENTS),
    "kind": ("infiniband",),
    "link": ("ib-ndr",),
    "mode": ("user", "system", "idle", "iowait"),
    "resource": ("cpu", "io", "memory"),
}  # fmt: skip
_TYPES = {
    "gpu_nvlink_errors_total": ("crc", "replay", "recovery", "receive"),
    "gpu_ecc_errors_total": ("corrected", "uncorrected"),
}
_NOT_TOLD = {"gpu_pcie_bytes_per_second", "gpu_xid_errors_total"}
_GAUGES = {
    "gpu_utilization_ratio": 0.95,
    "gpu_throttled": 0.0,
    "network_speed_bytes_per_second": 5e10,
    "gpu_up": 1.0,
    "network_up": 1.0,
}
#: A second; what counts errors does not move.
_RATES = {"bytes": 1e10, "packets": 1e6, "cpu": 0.5, "energy": 600.0}


class Layout(NamedTuple):
    """Which ranks belong together; rank = node * 8 + local rank, and the nodes of a stage lie side by side."""

    nodes: int

    @property
    def ranks(self) -> int:
        """Ranks of the job."""
        return self.nodes * PER_NODE

    def members(self, label: str, rank: int) -> range:
        """The ranks of this rank's group of that label."""
        node, local = divmod(rank, PER_NODE)
        per_stage = max(1, self.nodes // STAGES)
        first = node - node % per_stage
        if label == "default_pg":
            return range(self.ranks)
        if label == "tensor":
            return range(node * PER_NODE, (node + 1) * PER_NODE)
        if label == "pipeline":
            return range(node % per_stage * PER_NODE + local, self.ranks, per_stage * PER_NODE)
        if label == "expert":
            begin = node - (node - first) % min(EXPERTS, per_stage)
            return range(begin * PER_NODE + local, (begin + min(EXPERTS, per_stage)) * PER_NODE + local, PER_NODE)
        return range(first * PER_NODE + local, (first + per_stage) * PER_NODE + local, PER_NODE)


@cache
def _jitter_ns() -> list[int]:
    chance = random.Random(1)  # noqa: S311 - made-up data
    return [chance.randrange(USUAL_NS // 4) for _ in range(997)]


class Rank:
    """One rank: where it stands, and what it writes."""

    def __init__(self, layout: Layout, rank: int, book: RankTotals) -> None:
        self.rank, self.book = rank, book
        self._members = [layout.members(label, rank) for label in LABELS]
        self._seq: dict[tuple[int, str], int] = {}
        self.steps = self._written = 0
        book.learn(self._names())

    def _names(self) -> Iterator[dict[str, Any]]:
        for small_id, (label, members) in enumerate(zip(LABELS, self._members, strict=True)):
            about = {"group_id": f"{label}-{members[0]}", "ranks": members, "size": len(members), "aligned": True}
            yield {"group": small_id, "name": str(small_id), "desc": label, "label": label, "backend": "nccl", **about}
        yield {"dtype": 1, "name": "bfloat16"}
        yield {"gpu": {"uuid": f"{self.rank:08x}", "bus_id": "", "index": self.rank % PER_NODE}}

    def step(self, begin_ns: int, late: int | None) -> None:
        """Take part in the step that begins then; all members of a group end an operation together."""
        records, jitter = bytearray(), _jitter_ns()
        for n, (label, op, size) in enumerate(STEP):
            small_id, end = LABELS.index(label), begin_ns + (n + 1) * _SLOT_NS
            took = USUAL_NS + jitter[(self.rank * 31 + self._written) % len(jitter)]
            if label == "data" and late is not None and late != self.rank and late in self._members[small_id]:
                took += LATE_NS
            p2p = op in ev.P2P
            peer = next(rank for rank in self._members[small_id] if rank != self.rank) if p2p else -1
            queue = (small_id, op if p2p else "")
            seq = self._seq[queue] = self._seq.get(queue, -1) + 1
            flags = ev.NO_SIZE if op == "barrier" else 0
            fields = (ev.OP_CODE[op], 1, small_id, peer, 0, size, end - took, seq, took // 2000 if p2p else 0)
            records += self._packed(*fields, end - took, end, flags, ev.BY_POLL, 0)
        end, exposed = begin_ns + STEP_NS, STEP_NS // 10
        mark = (ev.STEP_MARK, 0, 0, 0, 0, exposed, end - 100_000, self.steps, 0, end - 100_000, end, ev.EXPOSED, 0, 0)
        ingest_records(self.book, bytes(records + self._packed(*mark)))
        self.steps += 1

    def _packed(self, *fields: int) -> bytes:
        self._written += 1
        return ev.RECORD.pack(self._written, *fields, self._written)

    def enter(self, label: str, op: str, now_ns: int) -> None:
        """Be inside an operation from now on."""
        small_id = LABELS.index(label)
        fields = (
            ev.OP_CODE[op],
            1,
            small_id,
            -1,
            0,
            4096,
            now_ns,
            self._seq[small_id, ""] + 1,
            0,
            now_ns,
            0,
            ev.BLOCKED,
            0,
            0,
        )
        self.book.in_flight = [ev.Record(0, *fields, 0)]


class Node:
    """One agent: books, exporter, and answers of its API.

    Args:
        began_ns: when the job began, on the monotonic clock.
    """

    def __init__(
        self, layout: Layout, number: int, began_ns: int, now_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._aggregate, self._lock, self._now_ns = JobTable(), threading.RLock(), now_ns
        self._began_ns, self._offset_ns = began_ns, time.time_ns() - time.monotonic_ns()
        self.ranks = [self._rank(layout, number * PER_NODE + local) for local in range(PER_NODE)]
        exporter = Exporter(
            self._aggregate, self._lock, now_ns, self._readings, gpu_of=lambda where: str(where.index) if where else ""
        )
        self.registry = CollectorRegistry()
        self.registry.register(exporter)

    def _rank(self, layout: Layout, rank: int) -> Rank:
        about = {"job": JOB, "restart": 0, "rank": rank, "world_size": layout.ranks, "local_rank": rank % PER_NODE}
        when = {"pid": 1, "boot_id": boot_id(), "wall_offset_ns": self._offset_ns, "started_ns": self._began_ns}
        identity = {**about, **when, "host": f"node{rank // PER_NODE}", "hook": "native"}
        return Rank(layout, rank, self._aggregate.open(f"{JOB}.{rank}", identity))

    def step(self, begin_ns: int, late: int | None) -> None:
        """All its ranks do a step, and the books are kept as the intake keeps them."""
        for rank in self.ranks:
            with self._lock:
                rank.step(begin_ns, late)
                rank.book.take_closed()
                rank.book.steps.take()

    def alive(self) -> None:
        """Its ranks show that they live, but for those whose process is stopped."""
        for rank in self.ranks:
            if rank.book.pid is None:
                rank.book.heartbeat_ns = self._now_ns()

    def hold(self, stopped: int, pid: int) -> None:
        """A rank's process is stopped: its neighbours wait for it, all others for them."""
        here = any(rank.rank == stopped for rank in self.ranks)
        with self._lock:
            for rank in self.ranks:
                if rank.rank == stopped:
                    rank.book.pid = pid
                else:
                    label, op = ("tensor", "all_reduce") if here else ("default_pg", "barrier")
                    rank.enter(label, op, self._now_ns())

    def answer(self, path: str, query: dict[str, list[str]]) -> object:
        """What its API answers; ``KeyError``: nothing is there."""
        with self._lock:
            jobs, now = list(self._aggregate.jobs.values()), self._now_ns()
            most = int(query.get("limit", [str(MOST_PENDING)])[0])
            answers: dict[str, Callable[[], object]] = {
                "about": lambda: {"id": str(id(self)), "host": self.ranks[0].book.identity["host"], "version": "bench"},
                "jobs": lambda: [asdict(self._view(job)) for job in jobs],
                "incidents": list,
                "ranks": lambda: _plain(live_ranks.ranks(jobs, now)),
                "groups": lambda: _plain(live_ranks.groups(jobs)),
                "verdicts": lambda: _plain(judged_now(jobs, now)),
                "parts": lambda: _limited(rank_parts.parts(jobs, now, most)),
                "cells": lambda: {"since": time.time() - 30, "until": time.time(), "cells": _plain(self._cells())},
                "slots": list,
                "now": lambda: asdict(node_now(jobs[0], {}, (), now)),
                "bars": lambda: asdict(bars(live_ranks.of_this_run(jobs[0]), now)),
            }
            return answers[path]()

    def _view(self, job: Job) -> JobView:
        ranks, size = [rank.rank for rank in self.ranks], int(self.ranks[0].book.identity["world_size"])
        return JobView(job.id, "running", size, ranks, 0, time.time() - 30, time.time(), 0, None)

    def _cells(self) -> Iterator[CellView]:
        cells = (
            totals.counted(job.id, key, cell)
            for job in self._aggregate.jobs.values()
            for totals in job.rank_totals.values()
            for _, key, cell in totals.live_cells()
        )
        return map(view_of, merged(cells))

    def _readings(self) -> Iterable[tuple[str, list[Reading] | None]]:
        passed_s = (self._now_ns() - self._began_ns) / 1e9
        for collector, kinds in (("gpu", ("gpu_",)), ("network", ("network_", "infiniband_")), ("host", ("host_",))):
            yield collector, [reading for name in METRICS if name.startswith(kinds) for reading in _of(name, passed_s)]


def _plain(views: Iterable[Any]) -> list[dict[str, Any]]:
    return [asdict(view) for view in views]


def _limited(found: tuple[int, list[Any]]) -> dict[str, object]:
    return {"limit": found[0], "parts": _plain(found[1])}


def _of(name: str, passed_s: float) -> Iterator[Reading]:
    """Readings of one metric: all its devices."""
    if name in _NOT_TOLD:
        return
    spec = METRICS[name]
    rate = next((rate for word, rate in _RATES.items() if word in name), 0.0)
    value = rate * passed_s if spec.kind == "counter" else _GAUGES.get(name, 1e9)
    for labels in product(
        *(_TYPES[name] if label == "type" else _VALUES.get(label, ("none",)) for label in spec.labels)
    ):
        if not (name.startswith("infiniband_") and "eth0" in labels):
            yield Reading(name, labels, value)


def serve(node: Node) -> str:
    """Answer for a node on a free port, until the process ends; returns its address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            asked = urlsplit(self.path)
            if asked.path == "/metrics":
                encode, content_type = choose_encoder(self.headers.get("Accept", ""))
                body = encode(node.registry)
            else:
                path, content_type = asked.path.removeprefix("/api/v1/"), "application/json"
                body = json.dumps(node.answer(path, parse_qs(asked.query))).encode()
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 5}, daemon=True).start()
    return f"127.0.0.1:{server.server_port}"


class _Orders:
    """What standard input says."""

    def __init__(self) -> None:
        self.late: int | None = None
        self.stop: int | None = None
        self.over = threading.Event()

    def read(self) -> None:
        for line in sys.stdin:
            order, rank = line.split()
            setattr(self, order, int(rank))
        self.over.set()


def live(nodes: list[Node], began_ns: int, orders: _Orders) -> None:
    """Go on at the pace of real time: a node's step of a second ago is written when its turn comes within the second."""
    step = 0
    while orders.stop is None:
        for n, node in enumerate(nodes):
            begin = began_ns + step * STEP_NS
            wait_ns = begin + STEP_NS + n * STEP_NS // len(nodes) - time.monotonic_ns()
            if orders.over.wait(max(0, wait_ns) / 1e9):
                return
            node.step(begin, orders.late)
            node.alive()
        step += 1
    with subprocess.Popen(["sleep", "infinity"]) as stopped:
        stopped.send_signal(signal.SIGSTOP)
        for node in nodes:
            node.hold(orders.stop, stopped.pid)
        while not orders.over.wait(1.0):
            for node in nodes:
                node.alive()
        stopped.kill()


def main() -> None:
    """Serve, train, and obey."""
    # One agent has few objects to look through, 128 in one process have millions; nothing here refers to itself.
    gc.disable()
    layout, began = Layout(int(sys.argv[1])), time.monotonic_ns()
    nodes = [Node(layout, number, began) for number in range(layout.nodes)]
    print(json.dumps([serve(node) for node in nodes]), flush=True)
    orders = _Orders()
    threading.Thread(target=orders.read, daemon=True).start()
    live(nodes, began, orders)


if __name__ == "__main__":
    main()
