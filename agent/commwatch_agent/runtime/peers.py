"""The agents of other nodes: which of them answer, and their answers to one question, in bounded time."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from functools import cache, partial
from http import HTTPStatus
from socket import gethostname
from urllib.error import HTTPError
from urllib.parse import parse_qs, quote, urlsplit

from commwatch.api.client import Keys, decoded, fetch, reason
from commwatch.wire.addresses import BadAddress
from commwatch.wire.concurrency import at_once
from commwatch_agent.config import Config
from commwatch_agent.job.merging import Heard
from commwatch_agent.model.runs import Run
from commwatch_agent.runtime.agents import addresses

log = logging.getLogger("commwatch")
#: Seconds that all agents together have for an answer.
MOST_S = 2.0
#: Seconds for which answers to the same question are kept, so that many clients cost the other agents no more than one.
_FRESH_S = 1.0
#: Most bytes of one answer, and of all answers to one question; most agents asked at the same time.
_MOST_OF_ONE, _MOST_BYTES, _AT_ONCE = 16 << 20, 64 << 20, 128
#: Most JSON values of an agent's description of itself.
_MOST_VALUES = 1000
#: Most agents of a job that one of them asks regularly, to conclude for all.
MOST_AGENTS = 128
#: Most addresses that jobs report, of all jobs together; and most addresses that have never answered that are asked in one tick.
MOST_REPORTED, _MOST_TRIED = 256, 32
#: Most addresses that are new: at once, and more with each tick. So no job can search a network by reporting ever new addresses.
_MOST_NEW, _NEW_EACH_TICK = 1024, 1
#: Seconds until an address that has never answered is asked again: at first, doubled each time, and at most.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 5.0, 600.0
#: Addresses whose pauses are remembered although no job reports them any more.
_MOST_REMEMBERED = 4096

ANSWERS, SILENT, SELF = "answers", "silent", "this agent"


@dataclass(frozen=True)
class PeerView:
    """The agent of another node, as this agent sees it."""

    url: str
    #: ``answers``, ``silent``, or ``this agent``: an address of the agent itself, or a second address of another.
    state: str
    #: Why it is silent; empty otherwise.
    reason: str = ""
    #: Host name and version that it last reported; ``None``: it has never answered.
    host: str | None = None
    version: str | None = None


class _Tries:
    """When to ask addresses that jobs have reported and that have never answered."""

    def __init__(self) -> None:
        #: By address: when to ask it again, and the pause after that. The latest to be tried is the last.
        self._due_s: dict[str, tuple[float, float]] = {}
        self._new = _MOST_NEW

    def due(self, urls: Iterable[str], now_s: float) -> list[str]:
        """Return those of the addresses to ask now, the longest due first; note that they are asked."""
        self._new = min(_MOST_NEW, self._new + _NEW_EACH_TICK)
        known = [(self._due_s[url][0], url) for url in urls if url in self._due_s]
        due = [url for at_s, url in sorted(known) if at_s <= now_s][:_MOST_TRIED]
        fresh = [url for url in urls if url not in self._due_s][: min(self._new, _MOST_TRIED - len(due))]
        self._new -= len(fresh)
        for url in (*due, *fresh):
            _, pause_s = self._due_s.pop(url, (0.0, _FIRST_PAUSE_S))
            self._due_s[url] = now_s + pause_s, min(2 * pause_s, _LONGEST_PAUSE_S)
        while len(self._due_s) > _MOST_REMEMBERED:
            del self._due_s[next(iter(self._due_s))]
        return due + fresh


class Peers:
    """The agents that the setting ``peers`` names, and those that ranks of running jobs have found.

    Args:
        config: the agent's settings.
        own_id: as in ``About.id``, by which the agent recognises its own address.
        of_jobs: returns the addresses that ranks have found; only the first ``MOST_REPORTED`` are asked.
        run_of: returns the run of a job on this node, if there is one: a question about the job is one about this run.
        now_s: clock of the pauses between two requests to an address that has never answered.
    """

    def __init__(
        self,
        config: Config,
        own_id: str,
        of_jobs: Callable[[], Iterable[str]] = tuple,
        now_s: Callable[[], float] = time.monotonic,
        *,
        run_of: Callable[[str], Run | None] = lambda job: None,
    ) -> None:
        self._own_id, self._of_jobs, self._lock, self._now_s = own_id, of_jobs, threading.Lock(), now_s
        self._run_of = run_of
        self._tries = _Tries()
        #: Number of addresses that jobs report beyond ``MOST_REPORTED``.
        self.left = 0
        self._known: dict[str, PeerView] = {}
        #: Addresses with a request whose time is over; until it ends, so that requests do not pile up, there is no other.
        self._overdue: set[str] = set()
        #: By address: its names of the runs that have ranks there, by the id of the run.
        self._runs: dict[str, dict[str, str]] = {}
        #: By address: host name and id of the agents that answer.
        self._whose: dict[str, tuple[str, str]] = {}
        #: By question: the time until which the answers are fresh, and the answers.
        self._recent: dict[tuple[str, ...], tuple[float, Future[Heard]]] = {}
        #: What was wrong with names in the settings when they were looked up, and the addresses of each from when it was not.
        self._trouble: frozenset[str] = frozenset()
        self._found: dict[str, list[str]] = {}
        self._named: frozenset[str] = frozenset()
        self.change(config)

    def change(self, config: Config) -> None:
        """Use these settings from now on."""
        self._names, self._secure = config.peers, config.expects_tls
        self._keys = Keys(None, config.token_file, config.ca_file, config.client_cert)

    def views(self) -> list[PeerView]:
        """Return all addresses with their state."""
        with self._lock:
            return list(self._known.values())

    def names(self) -> dict[str, list[str]]:
        """Return the names that other agents give to the runs that have ranks there, by the id of the run."""
        with self._lock:
            found: dict[str, list[str]] = {}
            for of_one in self._runs.values():
                for run, name in of_one.items():
                    found.setdefault(run, []).append(name)
            return found

    def leads(self, common: str) -> bool:
        """Return whether, of the agents that answer and have ranks of a run, this one concludes for all: the first by host name.

        If they are more than ``MOST_AGENTS``, each is on its own: Prometheus concludes for all of them.

        Args:
            common: what all nodes know the run by; empty: not known, so this agent does.
        """
        with self._lock:
            others = [self._whose[url] for url, runs in self._runs.items() if common in runs]
        return len(others) > MOST_AGENTS or all((gethostname(), self._own_id) < other for other in others)

    def tick(self) -> None:
        """Look up the addresses, ask each agent who it is, and forget old answers."""
        self._forget()
        trouble = self._look_up()
        reported = [url for url in dict.fromkeys(self._of_jobs()) if url not in self._named]
        left = max(0, len(reported) - MOST_REPORTED)
        if left and not self.left:
            log.warning("peers: jobs report more than %d agents of other nodes; %d are not asked", MOST_REPORTED, left)
        self.left = left
        urls = sorted({*self._named, *reported[:MOST_REPORTED]})
        for each in sorted(trouble.difference(self._trouble)):
            log.error("peers: %s", each)
        self._trouble = trouble
        with self._lock:
            self._known = {url: self._known.get(url) or PeerView(url, SILENT, "not asked yet") for url in urls}
            never = [url for url in urls if url not in self._named and self._known[url].host is None]
        urls = sorted({*urls}.difference(never).union(self._tries.due(never, self._now_s())))
        about, silent = self._gather(urls, lambda url: [self._fetch(url, "about")])
        ids, runs = {self._own_id}, dict[str, dict[str, str]]()
        whose: dict[str, tuple[str, str]] = {}
        # Those that the settings name first: an address that a rank has reported cannot hide one of them behind its id.
        for url in sorted(urls, key=lambda url: url not in self._named):
            view = self._known[url]
            if url in silent:
                self._set(url, replace(view, state=SILENT, reason=silent[url]))
                continue
            try:
                answer = decoded(about[url][0], _MOST_VALUES)
                host, version, its_id = (str(answer[name]) for name in ("host", "version", "id"))
                its_runs = {str(run): str(name) for run, name in answer.get("runs", {}).items()}
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                self._set(url, replace(view, state=SILENT, reason=reason(error)))
                continue
            self._set(url, PeerView(url, SELF if its_id in ids else ANSWERS, "", host, version))
            if its_id not in ids:
                runs[url], whose[url] = its_runs, (host, its_id)
            ids.add(its_id)
        with self._lock:
            self._runs, self._whose = runs, whose

    def _look_up(self) -> frozenset[str]:
        """Look up each name in the settings; return what is wrong. Such a name keeps the addresses that it had, and does not hide the others."""
        trouble, found = set(), dict[str, list[str]]()
        for name in self._names:
            try:
                found[name] = addresses([name], self._secure)
            except BadAddress as error:
                trouble.add(str(error))
                found[name] = self._found.get(name, [])
        self._found, self._named = found, frozenset(url for urls in found.values() for url in urls)
        return frozenset(trouble)

    def ask(self, *paths: str, within_s: float = MOST_S) -> Heard:
        """Return the answers of all agents to GETs of ``paths`` under ``/api/v1``, after ``within_s`` at the latest.

        An agent that refuses one of them with 404 does not have the job, or not this run of it.
        """
        self._forget()
        paths = self._about_run(paths)
        with self._lock:
            _, found = self._recent.get(paths, (0.0, None))
            first = found is None
            if found is None:
                found = Future()
                self._recent[paths] = time.monotonic() + within_s + _FRESH_S, found
        if first:
            try:
                found.set_result(self._asked(paths, within_s))
            except BaseException as error:
                found.set_exception(error)
                raise
            finally:
                with self._lock:
                    self._recent[paths] = time.monotonic() + _FRESH_S, found
        return found.result()

    def _about_run(self, paths: Iterable[str]) -> tuple[str, ...]:
        """Return the paths of a question, each with the run of the job that is in it."""
        run_of = cache(self._run_of)
        found = []
        for path in paths:
            run = next(map(run_of, parse_qs(urlsplit(path).query).get("job", ())), None)
            found.append(path if run is None else f"{path}&run={quote(run.common, safe='')}")
        return tuple(found)

    def _forget(self) -> None:
        now = time.monotonic()
        with self._lock:
            self._recent = {key: kept for key, kept in self._recent.items() if kept[0] > now}

    def _asked(self, paths: tuple[str, ...], within_s: float) -> Heard:
        with self._lock:
            known = dict(self._known)
        good = [url for url, view in known.items() if view.state == ANSWERS]
        answers, failed = self._gather(good, lambda url: self._of_job(url, paths, within_s), within_s)
        silent = failed | {url: view.reason for url, view in known.items() if view.state == SILENT}
        return Heard({url: each for url, each in answers.items() if each}, silent)

    def _of_job(self, url: str, paths: Sequence[str], within_s: float) -> list[bytes]:
        """Return an agent's answers; none if it does not have the job."""
        try:
            return [self._fetch(url, path, within_s) for path in paths]
        except HTTPError as error:
            if error.code == HTTPStatus.NOT_FOUND:
                error.close()
                return []
            raise

    def _fetch(self, url: str, path: str, within_s: float = MOST_S) -> bytes:
        """Return an agent's answer. A job could report any address, so the token goes only to agents that are named or certified."""
        certified = url.startswith("https:") and self._keys.ca_file is not None
        keys = self._keys if url in self._named or certified else replace(self._keys, token_file=None)
        return fetch(url, path, keys, timeout_s=within_s, most_bytes=_MOST_OF_ONE)

    def _gather(
        self, urls: Sequence[str], question: Callable[[str], list[bytes]], within_s: float = MOST_S
    ) -> tuple[dict[str, list[bytes]], dict[str, str]]:
        """Return the answers and the reasons for missing ones, by URL."""

        with self._lock:
            overdue = self._overdue & set(urls)
        targets = [url for url in urls if url not in overdue]
        futures = dict(zip(targets, at_once(question, targets, _AT_ONCE), strict=True))
        wait(futures.values(), within_s)
        for url, future in futures.items():
            if not future.done():
                with self._lock:
                    self._overdue.add(url)
                future.add_done_callback(partial(self._ended, url))
        answers: dict[str, list[bytes]] = {}
        silent = dict.fromkeys(overdue, "an earlier request is still without an answer")
        room = _MOST_BYTES
        for url, future in futures.items():
            why = _reason(future, within_s)
            if why is None:
                room -= sum(map(len, future.result()))
                why = (
                    f"the answers are longer than {_MOST_BYTES >> 20} MiB together; request less" if room < 0 else None
                )
            if why is None:
                answers[url] = future.result()
            else:
                silent[url] = why
        return answers, silent

    def _ended(self, url: str, _: Future[list[bytes]]) -> None:
        with self._lock:
            self._overdue.discard(url)

    def _set(self, url: str, view: PeerView) -> None:
        with self._lock:
            if url in self._known:
                self._known[url] = view


def _reason(future: Future[list[bytes]], within_s: float) -> str | None:
    """Return why there is no answer; ``None``: there is one."""
    if not future.done():
        return f"no answer within {within_s:g} s"
    error = future.exception()
    if error is None:
        return None
    if isinstance(error, (OSError, ValueError)):
        return reason(error)
    raise error
