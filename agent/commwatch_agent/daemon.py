"""The agent: builds its parts, starts and stops them. One agent per run directory."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import secrets
import socket
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from prometheus_client import CollectorRegistry

from commwatch import __version__
from commwatch.wire.announcement import FILE, announce
from commwatch.wire.errors import CommwatchError
from commwatch.wire.identity import PEER_ADDRESS
from commwatch_agent.analysis.live_ranks import ranks
from commwatch_agent.analysis.queries import QueryService
from commwatch_agent.config import Config
from commwatch_agent.history.chunks import Damaged
from commwatch_agent.history.examination import Examination
from commwatch_agent.history.history import History
from commwatch_agent.history.opening import StoreError
from commwatch_agent.history.store import Writer, begin
from commwatch_agent.incidents.incident import Incident
from commwatch_agent.ingest.intake import Intake, room_for_rings
from commwatch_agent.ingest.jobs import JobTable
from commwatch_agent.ingest.rings.process_ends import ProcessEnds
from commwatch_agent.model.runs import renamed
from commwatch_agent.model.views import RankView
from commwatch_agent.notify.alert_rules import plan_of
from commwatch_agent.notify.bundles import Bundles, Sources
from commwatch_agent.notify.delivery_setup import address_of, delivery_of, readings, url_of, warn_of_unusable
from commwatch_agent.notify.incident_watch import IncidentWatch, Plan
from commwatch_agent.notify.look import NodeLook, RankLook
from commwatch_agent.otlp.opening import pushes
from commwatch_agent.prometheus.exporter import Exporter
from commwatch_agent.questions.services import Services
from commwatch_agent.questions.whole_jobs import WholeJobs, culprits_elsewhere
from commwatch_agent.questions.worker import Worker
from commwatch_agent.reference.references import References, directory
from commwatch_agent.runtime.agent_log import about, set_up
from commwatch_agent.runtime.ending import Ending
from commwatch_agent.runtime.memory import share_one_heap
from commwatch_agent.runtime.peers import Peers
from commwatch_agent.runtime.periodic import OVER, PeriodicThread, known
from commwatch_agent.runtime.reload import Change, change
from commwatch_agent.runtime.run_lock import CannotStart, check_folders, lock_directory, place_of_alerts, raised_limit
from commwatch_agent.runtime.sd_notify import ALIVE, READY, RELOADING, STOPPING, notify
from commwatch_agent.runtime.sighup import SighupListener
from commwatch_agent.sources.culprits import Culprits
from commwatch_agent.sources.nccl import logs_of, remove_old
from commwatch_agent.sources.profiles import Profiles, kept_in
from commwatch_agent.sources.regular_profiles import RegularProfiles
from commwatch_agent.sources.watchers import GPUS_S, Watchers
from commwatch_agent.text.units import counted
from commwatch_agent.web.application import application
from commwatch_agent.web.listener import Server, listen, reachable_at
from commwatch_alerts.model import Alert
from commwatch_alerts.receivers.opening import receivers
from commwatch_collectors.registry import Reading

log = logging.getLogger("commwatch")
#: Seconds between two removals of data that is past its retention.
_TIDY_S = 60.0
#: Least seconds between two looks for the first ring.
_DISCOVERY_S = 1.0
#: Looks at the rings for each time that their records are read.
_LOOKS = 2
#: Most time of the history's retention between two passes over the rings.
_SLICES_S = 0.02
#: Time without a sign of life from the intake, in addition to two of its pauses, after which the agent is not healthy.
_STUCK_NS = 10_000_000_000
#: Time between two signs of life to the supervisor.
_ALIVE_NS = 1_000_000_000
#: Seconds in all that threads get to finish when the agent ends.
_END_S = 10.0
#: Seconds between two looks at what is wrong.
_INCIDENTS_S = 1.0
#: Seconds between two checks whether an alert or an incident needs evidence; seconds for the last notifications when the agent ends.
_EVIDENCE_S, _FAREWELL_S = 0.25, 3.0
#: Seconds between two checks for SIGHUP, and whether a thread has ended the agent.
_SIGNALS_S = 0.25
#: Seconds between two checks whether the worker process is idle.
_IDLE_S = 10.0
#: Seconds between two checks which agents of other nodes answer.
_PEERS_S = 5.0
#: Seconds between two pieces of the history that are checked for damage.
_EXAMINE_S = 0.2
#: Seconds between two checks for files of profiled ranks.
_PROFILES_S = 0.25


class Daemon:
    """A running agent.

    Args:
        config: its settings.
        plan: the alerts that it raises by itself; by default those of the settings.
        reread: reads the settings again at SIGHUP; raises ``ConfigError``.
        hangup: hears SIGHUP, also during the start. ``None``: it has its default effect.

    Raises:
        ConfigError: a setting is wrong, or names a folder, token or certificate that cannot be used.
        CannotStart: it is no fault of a setting: the run directory or the port is taken, the history cannot be opened, the token cannot be
            written.
    """

    def __init__(
        self,
        config: Config,
        plan: Plan | None = None,
        reread: Callable[[], Config] | None = None,
        hangup: SighupListener | None = None,
    ) -> None:
        self.config = config
        self._given_plan, self._reread, self._hangup = plan, reread, hangup
        self._lock_fd = lock_directory(config)
        self._damaged = Damaged()
        self._store = _history_of(config, self._damaged)
        self._lock = lock = threading.RLock()
        handover = threading.RLock()
        self._aggregate = aggregate = JobTable(int(config.keep_ended * 1e9))
        most_rings = room_for_rings(raised_limit())
        self._ends = ProcessEnds()
        self._intake = Intake(
            config.rings,
            aggregate,
            self._store,
            lock,
            handover=handover,
            most_rings=most_rings,
            looks=_LOOKS,
            renames=self._new_names,
            alive=self._alive,
            ends=self._ends,
            concluded=lambda since_ns: self._incidents.has_concluded(self._watchers.nccl.read_since(since_ns / 1e9)),
        )
        self._stop, self._jobs = threading.Event(), threading.Event()
        # The pause is the one that is under way: another interval takes effect only after it.
        self._last_alive_ns, self._notified_ns, self._pause_s = time.monotonic_ns(), 0, config.interval
        self._trouble: str | None = None
        self._failed = False
        self._socket = listen(config)
        self.port: int = self._socket.getsockname()[1]
        self.url = url_of(config, self.port)
        self._reachable = reachable_at(config, self._socket)
        self._watchers = watchers = Watchers(
            config, aggregate, lock, self._stop, self._jobs, incidents=self._known_incidents
        )
        self._references = References(directory(config.state), config.links)
        queries = QueryService(
            config.history,
            aggregate,
            lock,
            time.monotonic_ns,
            references=self._references,
            gpu_at=watchers.gpus.place,
            handover=handover,
            damaged=self._damaged,
        )
        self._ranks = RankLook(queries, partial(watchers.ras.verdicts, None), config.job_info)
        self._exporter = self._exporter_of(config)
        self._registry = CollectorRegistry()
        self._registry.register(self._exporter)
        self._profiles = Profiles(config.dir, kept_in(config.state), queries)
        self._regular = RegularProfiles(config.profile_every, self._profiles, queries)
        self._address = address_of(config, self.port)
        kept, self._alerts_lock_fd = place_of_alerts(config)
        self._delivery = delivery_of(kept, self._address)
        self._evidence = Bundles(kept.evidence, self._address, self._sources(queries).sections)
        self._incidents = self._watch_of(config)
        self._worker = Worker(queries, self._references, self._damaged)
        self._id, self._queries = secrets.token_hex(8), queries
        self._peers = Peers(config, self._id, self._peers_of_jobs, run_of=queries.run)
        self._culprits = self._watch_of_culprits()
        services = self._services(queries)
        self._push = pushes(config, self.port, self._registry.collect, self._incidents.incidents, self._stop)
        self._look.whole = whole = WholeJobs(services)
        services.look_elsewhere, services.pushes = whole.soon, self._push.views if self._push is not None else dict
        app = application(services, self._registry)
        self._server = Server(app, config, self._socket.getsockname()[0])
        self._profiling = PeriodicThread("profiles", self._profile, _PROFILES_S, self._stop, jobs=self._jobs)
        self._beside = [
            *watchers.threads,
            *self._own_threads(),
            PeriodicThread("jobs", whole.tick, _INCIDENTS_S, self._stop, jobs=self._jobs),
            self._profiling,
        ]
        self._threads = [
            threading.Thread(target=self._serve, name="web", daemon=True),
            threading.Thread(target=self._work, name="intake", daemon=True),
            *(each.thread for each in self._beside),
        ]
        #: Those that the end of the agent does not wait for: a driver or a receiver may hang.
        self._unawaited = [watchers.gpu_thread, *(self._push.threads if self._push is not None else ())]

    def _exporter_of(self, config: Config) -> Exporter:
        return Exporter(
            self._aggregate,
            self._lock,
            time.monotonic_ns,
            self._readings,
            references=self._references,
            gpu_of=self._watchers.gpus.label,
            labels=config.labels,
            owner_of=self._ranks.owner,
            node=config.node_name if "node" in config.job_info else "",
        )

    def _readings(self) -> list[tuple[str, list[Reading] | None]]:
        """Return the readings for ``/metrics`` that are not about jobs, by collector; ``None``: it failed."""
        damaged = None if self._store.trouble else [Reading("history_damaged_chunks_total", (), len(self._damaged))]
        return known(
            [
                *self._watchers.readings(),
                ("alerts", readings(self._delivery)),
                ("history", damaged),
                *self._regular.readings(),
            ],
            (*self._beside, *self._unawaited),
        )

    def _services(self, queries: QueryService) -> Services:
        return Services(
            queries=queries,
            worker=self._worker,
            logs=self._watchers.nccl,
            profiles=self._profiles,
            gpus=self._watchers.gpus,
            inspector=self._watchers.inspector,
            ras=self._watchers.ras,
            host=self._watchers.host,
            incidents=self._incidents,
            ranks=self._ranks,
            culprits=self._culprits,
            evidence=self._evidence,
            peers=self._peers,
            id=self._id,
            healthy=self._healthy,
            ready=self._ready,
            ending=self._stop.is_set,
        )

    def _sources(self, queries: QueryService) -> Sources:
        return Sources(queries, self._known_incidents, self._watchers.nccl, self._watchers.gpus, self._watchers.host)

    def _watch_of_culprits(self) -> Culprits:
        watch, elsewhere = self._incidents, partial(culprits_elsewhere, self._peers)
        return Culprits(watch.incidents, self._live_ranks, watch.add_evidence, elsewhere)

    def _own_threads(self) -> list[PeriodicThread]:
        """Return the periodic threads that are neither watchers nor profiles."""
        examination = Examination(self.config.history, self._damaged)
        return [
            PeriodicThread("incidents", self._incidents.tick, _INCIDENTS_S, self._stop, jobs=self._jobs),
            PeriodicThread("process ends", self._ends.tick, 0.0, self._stop, self._ends.close),
            PeriodicThread(
                "examination", lambda: OVER if examination.tick() else None, _EXAMINE_S, self._stop, examination.close
            ),
            PeriodicThread("evidence", self._evidence.tick, _EVIDENCE_S, self._stop, jobs=self._jobs),
            PeriodicThread("culprits", self._culprits.tick, _EVIDENCE_S, self._stop, jobs=self._jobs),
            PeriodicThread("housekeeping", self._tidy, _TIDY_S, self._stop),
            PeriodicThread("peers", self._peers.tick, _PEERS_S, self._stop),
            PeriodicThread("answers", self._worker.tick, _IDLE_S, self._stop, self._worker.close),
        ]

    def run(self) -> bool:
        """Serve until SIGTERM, SIGINT or ``stop``, then drain the rings; return False if intake or web server failed."""
        share_one_heap()
        # Nearly all objects live long: garbage collection at the default thresholds costs a tenth of the intake's time.
        gc.collect()
        gc.freeze()
        gc.set_threshold(20_000, 50, 50)
        ending = Ending()
        for thread in (*self._threads, *(each.thread for each in self._unawaited)):
            thread.start()
        announce(
            self.config.dir,
            self._lock_fd,
            {
                "pid": os.getpid(),
                "url": self.url,
                "version": __version__,
                "history": str(self.config.history),
                PEER_ADDRESS: self._reachable,
            },
        )
        log.info(
            "commwatch %s at %s: watching %s, history in %s", __version__, self.url, self.config.dir, self.config.history,
            **about("started", url=self.url, dir=str(self.config.dir), history=str(self.config.history)),
        )  # fmt: skip
        notify(READY, os.environ)
        while not self._stop.is_set():
            if why := ending.requested(_SIGNALS_S):
                log.info("stopping: %s", why, **about("stopping", signal=why))
                self._stop.set()
            elif self._hangup is None or not self._hangup.heard():
                continue
            elif self._hangup.terminal_is_gone:
                log.info("stopping: the terminal was closed", **about("stopping"))
                self._stop.set()
            else:
                self._reload()
        self._jobs.set()  # threads that wait for a job end
        notify(STOPPING, os.environ)
        self._server.should_exit = True
        end_s = time.monotonic() + _END_S
        for thread in self._threads:
            thread.join(max(0.0, end_s - time.monotonic()))
        self._delivery.close(_FAREWELL_S)
        if self._push is not None:
            self._push.close()
        self._watchers.gpu_thread.thread.join(GPUS_S)  # a GPU driver that hangs does not delay the end
        if not self._profiling.thread.is_alive():
            with contextlib.suppress(OSError, StoreError, sqlite3.Error):
                self._profiles.close()
        self._store.close()
        (self.config.dir / FILE).unlink(missing_ok=True)
        read, lost = self._intake.read, self._intake.lost
        log.info(
            "stopped: %s read, %d lost",
            counted(read, "record"),
            lost,
            **about("stopped", records=read, records_lost=lost),
        )
        os.close(self._alerts_lock_fd)
        os.close(self._lock_fd)
        return not self._failed

    def _known_incidents(self) -> list[Incident]:
        """Return the incidents in memory."""
        return self._incidents.incidents()

    def _new_names(self) -> dict[str, str]:
        """Return new names of runs by the old ones, where other nodes call them otherwise."""
        there = self._peers.names()
        if not there:
            return {}
        with self._lock:
            taken = set(self._aggregate.jobs)
        return renamed(self._queries.live_runs(), taken, there)

    def _peers_of_jobs(self) -> list[str]:
        """Return the addresses of agents that the ranks of running jobs have reported; none if this agent has none for them."""
        if self._reachable is None:
            return []
        with self._lock:
            return self._aggregate.peers()

    def _live_ranks(self, job: str) -> list[RankView]:
        with self._queries.live(job) as (jobs, now_ns):
            return ranks(jobs, now_ns)

    def has_rings(self) -> bool:
        """Return whether trainers run, or records of theirs are not in the history; any thread may call this."""
        return self._intake.has_rings()

    def stop(self) -> None:
        """Make ``run`` end; any thread may call this."""
        self._stop.set()

    def _reload(self) -> None:
        """Read the settings again and apply those that need no restart; if one is wrong, apply none."""
        assert self._reread is not None
        notify(f"{RELOADING}\nMONOTONIC_USEC={time.monotonic_ns() // 1000}", os.environ)
        try:
            changed, apply = self._changed(self._reread())
        except CommwatchError as error:
            log.error("settings not changed: %s", error, **about("not_reloaded"))
        else:
            for each in apply:
                each()
            self.config = changed.config
            level = logging.WARNING if changed.left else logging.INFO
            log.log(level, "settings read again: %s", changed.says, **about("reloaded"))
        notify(READY, os.environ)

    def _changed(self, wanted: Config) -> tuple[Change, list[Callable[[], object]]]:
        """Return what the settings ``wanted`` change, and functions that apply it.

        Raises:
            ConfigError: a threshold or a kind is wrong.
            CannotStart: the token cannot be written.
            BadToken, BadCertificate: token, certificate, or a file of requests to other agents cannot be used.
        """
        config = change(self.config, wanted).config
        plan = self._plan(config)
        new_receivers = receivers(config.receivers, self._address)

        def apply() -> None:
            set_up(config)
            self._references.links = config.links
            self._ranks.named = config.job_info
            self._exporter.relabel(config.labels, config.node_name if "node" in config.job_info else "")
            self._delivery.change(new_receivers, _FAREWELL_S)
            warn_of_unusable(config.receivers)
            self._peers.change(config)
            self._incidents.change(plan)

        access, renewed = self._server.prepared(config)
        found = change(self.config, wanted, certificate_differs=renewed)
        return found, [access, apply]

    def _plan(self, config: Config) -> Plan:
        instance = f"{socket.gethostname()}:{self.port}"
        return self._given_plan or plan_of(config, instance, self._address, self._deliver)

    def _watch_of(self, config: Config) -> IncidentWatch:
        """Return what concludes, with the incidents of this agent in the history."""
        plan = self._plan(config)
        self._look = NodeLook(self._ranks, self._registry.collect, plan.instance, self._watchers.nccl.errors)
        agent = str(config.dir.resolve())
        with History(config.history, self._damaged) as history:
            kept = history.incidents(agent=agent)
        incidents = IncidentWatch(plan, self._look, agent, kept)
        self._delivery.resume(*incidents.alerts())
        self._registry.register(incidents)
        return incidents

    def _serve(self) -> None:
        """Run the web server, in its thread."""
        try:
            self._server.run(sockets=[self._socket])
        finally:
            if not self._stop.is_set():  # an agent without its web server is of no use
                self._failed = True
                self._stop.set()

    def _work(self) -> None:
        """Run the intake, in its thread: find and drain rings; once a minute apply the history's retention, in slices between."""
        try:
            tidied: float | None = None
            slices: Iterator[None] | None = None
            while not self._stop.is_set():
                self._tick()
                sample = self._watchers.sample(time.monotonic(), time.time_ns())
                if sample is not None:
                    self._store.node_sample(sample)
                if slices is None and (tidied is None or time.monotonic() - tidied > _TIDY_S):
                    tidied, keep_ns = time.monotonic(), int(self.config.keep_days * 86400e9)
                    limits = self.config.raw_bytes, self.config.summary_bytes
                    slices = self._store.tidy(self._store.arrived_ns, *limits, keep_ns)
                if slices is not None and _are_over(slices, _SLICES_S):
                    slices = None
                self._pause_s = self.config.interval if self._jobs.is_set() else max(self.config.interval, _DISCOVERY_S)
                self._stop.wait(self._pause_s)
            for _ in range(_LOOKS):
                self._tick()
        except BaseException:
            # An agent that answers without its intake would be worse than one that its supervisor restarts.
            self._failed = True
            self._stop.set()
            raise

    def _tidy(self) -> None:
        """Remove logs and profiles that are past their retention."""
        # The clock of arrivals does not follow a wall clock that is set ahead while the agent runs.
        oldest = min(time.time(), self._store.arrived_ns / 1e9) - self.config.keep_days * 86400
        remove_old(logs_of(self.config.state), oldest, self._watchers.nccl.used())
        with contextlib.suppress(OSError):
            self._profiles.tidy(oldest)

    def _deliver(self, alerts: Sequence[Alert]) -> None:
        """Send alerts that fire or have ended, with the address of their evidence."""
        self._evidence.want(alerts)
        self._delivery.send(self._evidence.linked(alerts))

    def _profile(self) -> None:
        """Process the files of profiled ranks; request the regular profiles."""
        try:
            self._profiles.tick()
            self._regular.tick()
        except (OSError, StoreError, sqlite3.Error) as error:
            log.warning("profiles: %s", error)

    def _tick(self) -> None:
        incidents = self._incidents.unstored()
        for _, row in incidents:
            self._store.incident(row)
        try:
            self._intake.tick(time.monotonic_ns(), time.time_ns())
        except OSError as error:
            self._say(f"cannot read {self.config.rings}: {error}")
        else:
            self._say(
                f"history is not being written: {self._store.trouble}" if self._store.trouble else self._intake.waiting
            )
        if self._store.trouble is None:
            self._incidents.stored(incidents)
        if self._aggregate.jobs or self._stop.is_set():
            self._jobs.set()
        else:
            self._jobs.clear()
        self._alive()

    def _alive(self) -> None:
        """Record that the intake makes progress; notify the supervisor once a second."""
        now = time.monotonic_ns()
        self._last_alive_ns = now
        if now - self._notified_ns > _ALIVE_NS:
            self._notified_ns = now
            notify(ALIVE, os.environ)

    def _say(self, trouble: str | None) -> None:
        if trouble and not self._trouble:
            log.error("%s", trouble)
        if self._trouble and not trouble:
            log.info("working again after: %s", self._trouble)
        self._trouble = trouble

    def _healthy(self) -> str | None:
        age = time.monotonic_ns() - self._last_alive_ns
        stuck = age > _STUCK_NS + 2e9 * self._pause_s
        return f"the intake has been stuck for {age / 1e9:.0f} s" if stuck else None

    def _ready(self) -> str | None:
        return self._healthy() or self._trouble


def _history_of(config: Config, damaged: Damaged) -> Writer:
    """Return the writer of the history; raise ``ConfigError`` if this user cannot write to its folder, else ``CannotStart``."""
    try:
        return begin(config.history, damaged)
    except StoreError as error:
        check_folders(config, ("state",))
        raise CannotStart(str(error)) from None


def _are_over(slices: Iterator[None], most_s: float) -> bool:
    """Run slices until ``most_s`` are over, at least one; return whether that was the last."""
    end = time.monotonic() + most_s
    return all(time.monotonic() < end for _ in slices)
