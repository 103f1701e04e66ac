"""The GPUs of this node: read in a thread of their own, joined with the ranks that run on them.

No caller waits for a driver: answers hold the latest reading, and nothing once that is old.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from commwatch_agent.config_checks import GPUS_OFF, GPUS_REQUIRED
from commwatch_agent.ingest.jobs import Job
from commwatch_agent.ingest.rank_totals import RankTotals
from commwatch_agent.model.node_counters import GPU_BUSY, NodeCounter
from commwatch_agent.reference.hardware import link_of
from commwatch_agent.reference.links import of_device
from commwatch_agent.reference.references import BadReference, save_link
from commwatch_collectors.node.gpu import (
    ALARMING,
    Driver,
    DriverTrouble,
    Gpu,
    GpuPlace,
    MigInstance,
    NoGpus,
    Snapshot,
    Source,
    Xid,
    find,
    instance_at,
    readings,
)
from commwatch_collectors.node.gpu_amd import AmdSource
from commwatch_collectors.node.gpu_nvidia import NvidiaSource
from commwatch_collectors.node.gpu_xids import meaning
from commwatch_collectors.node.infiniband import Infiniband
from commwatch_collectors.registry import Reading

log = logging.getLogger("commwatch")
COLLECTOR = "gpu"
#: Seconds after which a reading is not shown any more.
_OLD_S = 10.0
#: Seconds between two tries to open the library: at first, and at most.
_FIRST_RETRY_S, _MOST_RETRY_S = 1.0, 60.0
#: Seconds between two reopenings of the library while a card is lost: without one, a card that comes back is not found.
_RENEW_S = 60.0
_MOST_XIDS = 256


@dataclass(frozen=True)
class GpuState:
    """Whether GPUs are being read."""

    #: ``up``; ``down``: GPUs that were or should be there cannot be read; ``none``: there are no GPUs; ``off``: by settings.
    state: str
    #: Reason why the state is not ``up``.
    says: str | None
    driver: Driver | None


@dataclass(frozen=True)
class XidView:
    """An Xid that was seen."""

    #: Unix time.
    at: float
    xid: int
    #: Its meaning, and what to do.
    title: str
    do: str


@dataclass(frozen=True)
class RankOnGpu:
    """A rank that runs on a GPU, and its share of communication."""

    job_id: str
    rank: int
    #: Communication over step time, 0 to 1, of the steps of the last 60 s; ``None``: not known.
    comm_share: float | None
    exposed_comm_share: float | None
    #: The MIG instance that it runs on; ``None``: the whole GPU.
    mig: MigInstance | None


@dataclass(frozen=True)
class GpuView:
    """A GPU with its latest reading, its Xids, and the ranks on it."""

    gpu: Gpu
    #: The latest, newest first.
    xids: list[XidView]
    ranks: list[RankOnGpu]


@dataclass(frozen=True)
class StrangeRank:
    """A rank on a GPU that the agent cannot see."""

    job_id: str
    rank: int
    uuid: str
    bus_id: str


@dataclass(frozen=True)
class GpuViews:
    """All GPUs of the node."""

    state: str
    says: str | None
    driver: Driver | None
    #: Unix time of the latest reading.
    read_at: float | None
    gpus: list[GpuView]
    elsewhere: list[StrangeRank]


def vendors() -> tuple[Source, ...]:
    """Return the libraries of all vendors."""
    return NvidiaSource(), AmdSource()


def opened(sources: Iterable[Source]) -> tuple[Source, Driver]:
    """Open the first library that finds GPUs; return it and its driver.

    Raises:
        NoGpus: there are none.
        DriverTrouble: there should be some, but a driver cannot be used.
    """
    absent, broken = [], None
    for source in sources:
        try:
            return source, source.open()
        except NoGpus as error:
            absent.append(str(error))
        except DriverTrouble as error:
            broken = str(error)
    raise NoGpus("; ".join(absent)) if broken is None else DriverTrouble(broken)


class Gpus:
    """Reads the GPUs of the node. One thread calls ``tick`` and ``close``; any thread may call the other methods.

    Args:
        wanted: the setting ``gpus``.
        sources: vendors' libraries; the first that finds GPUs is read.
        clock: monotonic seconds.
        wall: Unix time.
        seen: called once with the GPUs, when they have been read for the first time.
    """

    def __init__(
        self,
        wanted: str = "auto",
        sources: Sequence[Source] | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        seen: Callable[[Sequence[Gpu]], None] = lambda gpus: None,
    ) -> None:
        self._seen = seen
        self._wanted, self._clock, self._wall = wanted, clock, wall
        self._sources: Sequence[Source] = vendors() if sources is None else sources
        self._lock = threading.Lock()
        self._open: Source | None = None
        self._opened_at = self._try_at = 0.0
        self._retry_s = _FIRST_RETRY_S
        self._driver: Driver | None = None
        self._says = "not checked yet"
        #: GPUs have been read once, are required, or have a driver: their absence is a fault.
        self._expected = wanted == GPUS_REQUIRED
        self._down = False
        self._snapshot: Snapshot | None = None
        self._read_at = self._read_wall = 0.0
        #: GPUs as last seen, however long ago: which rank runs on which does not change when a driver fails.
        self._known: tuple[Gpu, ...] = ()
        self._counts: Counter[Xid] = Counter()
        self._recent: deque[tuple[float, Xid]] = deque(maxlen=_MOST_XIDS)

    # -- the thread ---------------------------------------------------------------------------

    def tick(self) -> None:
        """Read all GPUs; where no library is open, try to open one from time to time."""
        if self._wanted == GPUS_OFF:
            return
        now = self._clock()
        if self._open is not None and now - self._opened_at > _RENEW_S and any(gpu.lost for gpu in self._known):
            self.close()
            self._try_at = now
        if self._open is None and now >= self._try_at:
            self._find()
        if self._open is not None:
            try:
                snapshot = self._open.read()
            except DriverTrouble as error:
                self.close()
                self._fail(str(error))
            else:
                self._take(snapshot)

    def close(self) -> None:
        """Close the library."""
        if self._open is not None:
            self._open.close()
            self._open = None

    def _find(self) -> None:
        """Open the first library that finds GPUs."""
        try:
            source, driver = opened(self._sources)
        except NoGpus as error:
            self._fail(str(error))
        except DriverTrouble as error:
            self._expected = True
            self._fail(str(error))
        else:
            self._open, self._opened_at = source, self._clock()
            with self._lock:
                self._driver = driver

    def _fail(self, says: str) -> None:
        self._try_at = self._clock() + self._retry_s
        self._retry_s = min(2 * self._retry_s, _MOST_RETRY_S)
        with self._lock:
            self._snapshot, self._says = None, says
        if self._expected and not self._down:
            self._down = True
            log.warning("collector %s is down: %s", COLLECTOR, says)

    def _take(self, snapshot: Snapshot) -> None:
        wall = self._wall()
        first = not self._known
        with self._lock:
            self._snapshot, self._known, self._says = snapshot, snapshot.gpus, ""
            self._read_at, self._read_wall = self._clock(), wall
            self._counts.update(snapshot.xids)
            self._recent.extend((wall, xid) for xid in snapshot.xids)
        self._retry_s, self._expected = _FIRST_RETRY_S, True
        if first and self._driver is not None:
            log.info("%d GPUs, %s driver %s", len(snapshot.gpus), self._driver.vendor, self._driver.version)
            self._seen(snapshot.gpus)
        elif self._down:
            log.info("collector %s works again", COLLECTOR)
        self._down = False

    # -- answers ------------------------------------------------------------------------------

    def state(self) -> GpuState:
        """Whether GPUs are being read."""
        with self._lock:
            return self._state()

    def _state(self) -> GpuState:
        if self._wanted == GPUS_OFF:
            return GpuState("off", "switched off by the setting gpus", None)
        age = self._clock() - self._read_at
        if self._snapshot is not None and age <= _OLD_S:
            return GpuState("up", None, self._driver)
        if self._snapshot is not None:
            return GpuState("down", f"the driver has not answered for {age:.0f} s", self._driver)
        return GpuState("down" if self._expected else "none", self._says, self._driver if self._known else None)

    def readings(self) -> list[tuple[str, list[Reading] | None]]:
        """Return readings for ``/metrics``; an empty list on a machine without GPUs."""
        with self._lock:
            state = self._state()
            if state.state in ("none", "off"):
                return []
            if state.state == "down" or self._snapshot is None or self._driver is None:
                return [(COLLECTOR, None)]
            return [(COLLECTOR, list(readings(self._driver, self._snapshot.gpus, self._counts)))]

    def place(self, where: GpuPlace | None) -> Gpu | None:
        """Return the GPU that a rank runs on; ``None``: not known, or not visible to this agent."""
        with self._lock:
            return None if where is None else find(where, self._known)

    def held_back(self, where: GpuPlace | None) -> list[str]:
        """Return the reasons in ``ALARMING`` for which a GPU throttles its clock; empty: none, or not known."""
        with self._lock:
            if where is None or self._snapshot is None or self._state().state != "up":
                return []
            gpu = find(where, self._snapshot.gpus)
        return [] if gpu is None else [reason for reason in ALARMING if gpu.measured.throttled.get(reason)]

    def busy(self, where: GpuPlace) -> float | None:
        """Return the share of time (0 to 1) in which a whole GPU runs kernels, by the latest reading; ``None``: not known."""
        with self._lock:
            if self._snapshot is None or self._state().state != "up" or where.mig:
                return None
            gpu = find(where, self._snapshot.gpus)
        return None if gpu is None else gpu.measured.utilization

    def label(self, where: GpuPlace | None) -> str:
        """Return the label ``gpu`` of ``/metrics``: the index of the GPU that a rank runs on; empty where not known."""
        gpu = self.place(where)
        return "" if gpu is None else str(gpu.card.index)

    def counters(self) -> list[NodeCounter]:
        """Return how busy each GPU is, by the latest reading; empty if it is old or there is none."""
        with self._lock:
            gpus = self._snapshot.gpus if self._snapshot is not None and self._state().state == "up" else ()
        return [
            NodeCounter(GPU_BUSY, str(gpu.card.index), gpu.measured.utilization)
            for gpu in gpus
            if gpu.measured.utilization is not None
        ]

    def view(self, jobs: Iterable[Job], now_ns: int) -> GpuViews:
        """Return the GPUs with the live ranks on them.

        Args:
            jobs: whose ranks are included; the caller holds the lock that guards them.
            now_ns: the monotonic clock.
        """
        ranks = [
            (job.id, totals)
            for job in jobs
            for totals in job.rank_totals.values()
            if totals.alive and totals.gpu is not None
        ]
        with self._lock:
            state, read_at = self._state(), self._read_wall or None
            gpus = self._snapshot.gpus if self._snapshot is not None and state.state == "up" else ()
            known, recent = self._known, list(self._recent)
        placed = [(job, totals, find(totals.gpu, known)) for job, totals in ranks if totals.gpu is not None]
        elsewhere = [
            StrangeRank(job, totals.rank, totals.gpu.uuid, totals.gpu.bus_id)
            for job, totals, gpu in placed
            if gpu is None and totals.gpu is not None
        ]
        views = [
            GpuView(
                gpu,
                [_xid(at, xid) for at, xid in reversed(recent) if xid.uuid == gpu.card.uuid],
                [
                    _rank_on(job, totals, gpu, now_ns)
                    for job, totals, on in placed
                    if on is not None and on.card.index == gpu.card.index
                ],
            )
            for gpu in gpus
        ]
        return GpuViews(state.state, state.says, state.driver, read_at, views, elsewhere)


def note_link(where: Path, host: str, gpus: Sequence[Gpu], sys: Path = Path("/sys")) -> None:
    """Write the rated links of a host's GPUs to the directory of references ``where``, as ``save_link``; those of parts of a GPU are not known."""
    names = [gpu.card.name if gpu.measured.nvlink_bytes and not gpu.card.mig else "" for gpu in gpus]
    try:
        ports = [of_device(port.kind, port.speed) for port in Infiniband(sys).nics() if port.up]
        save_link(where, host, link_of(names, ports))
    except BadReference as error:
        log.warning("%s", error)


def _xid(at: float, xid: Xid) -> XidView:
    explained = meaning(xid.number)
    return XidView(at, xid.number, explained.title, explained.do)


def _rank_on(job: str, totals: RankTotals, gpu: Gpu, now_ns: int) -> RankOnGpu:
    shares = totals.steps.totals.shares(now_ns)
    comm, exposed = (None, None) if shares is None else shares
    return RankOnGpu(job, totals.rank, comm, exposed, None if totals.gpu is None else instance_at(totals.gpu, gpu))
