"""``commwatch profile``: torch.profiler in a running job for a few steps, compared with the probe's records."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.parse
from dataclasses import dataclass
from typing import Any

from commwatch.api.client import NO_KEYS, Keys, detail, get, post
from commwatch.wire.errors import CommwatchError, UsageError
from commwatch_agent.text import terminal_text
from commwatch_agent.text.plain_table import CELLS, columns
from commwatch_agent.text.units import percent, seconds
from commwatch_collectors.spans import ranks as named

#: Seconds added to the time limit for the steps, for writing and reading the traces.
_MORE_S = 90.0
_POLL_S = 0.3
_HEAD = ("rank", "marks", "step", "comm", "exposed", "| recorded: comm", "exposed")


class CannotProfile(CommwatchError):
    """No profile can be taken; the message gives the reason."""


@dataclass(frozen=True)
class Target:
    """A job, and an agent that watches ranks of it."""

    url: str
    job: str
    ranks: list[int]


def places(urls: list[str], job: str | None, ranks: list[int] | None, keys: Keys = NO_KEYS) -> list[Target]:
    """Return the agents that watch the job, each with the ranks to profile.

    Args:
        job: ``None``: the one that runs.
        ranks: ``None``: all running ranks.

    Raises:
        CannotProfile: the job does not run, or an agent does not answer.
        UsageError: no such job or rank, or several jobs run and ``job`` is ``None``.
    """
    running: dict[str, list[str]] = {}
    known: set[str] = set()
    for url in urls:
        for each in _request(keys, url, "jobs"):
            known.add(each["job_id"])
            if each["state"] == "running":
                running.setdefault(each["job_id"], []).append(url)
    if job is None and len(running) > 1:
        raise UsageError(f"several jobs are running; name one of {', '.join(sorted(running))}")
    if job is not None and known and job not in known:
        raise UsageError(f"job '{job}' is not running here; running: {', '.join(sorted(running)) or 'none'}")
    job = next(iter(running), "") if job is None else job
    if job not in running:
        raise CannotProfile(
            f"job '{job}' is not running" if job else "no job is running here; start one with commwatch run"
        )
    found = []
    for url in running[job]:
        views = _request(keys, url, f"ranks?job={urllib.parse.quote(job, safe='')}")
        here = {view["rank"] for view in views if view["state"] == "running"}
        chosen = here if ranks is None else here & set(ranks)
        if chosen:
            found.append(Target(url, job, sorted(chosen)))
    missing = set(ranks or ()) - {rank for place in found for rank in place.ranks}
    if missing:
        raise UsageError(f"{named(missing)} of job '{job}' {'are' if len(missing) > 1 else 'is'} not running here")
    return found


def take(where: list[Target], steps: int, timeout_s: float, keys: Keys = NO_KEYS) -> list[dict[str, Any]]:
    """Request profiles, wait until they are finished, and return the agents' answers.

    Raises:
        CannotProfile: an agent refuses, stops answering, or takes too long.
    """
    started = [
        (
            place.url,
            _request(
                keys,
                place.url,
                "profiles",
                {"job": place.job, "steps": steps, "ranks": place.ranks, "timeout_s": timeout_s},
            ),
        )
        for place in where
    ]
    until = time.monotonic() + timeout_s + _MORE_S
    answers = []
    for url, profile in started:
        while profile["state"] in ("waiting", "running"):
            if time.monotonic() > until:
                raise CannotProfile(
                    f"profile {profile['id']} is still in progress: {url}/api/v1/profiles/{profile['id']}"
                )
            time.sleep(_POLL_S)
            profile = _request(keys, url, f"profiles/{profile['id']}")  # noqa: PLW2901 - its next state
        answers.append(profile)
    return answers


def _request(keys: Keys, url: str, path: str, body: Any = None) -> Any:
    try:
        return get(url, path, keys) if body is None else post(url, path, body, keys)
    except urllib.error.HTTPError as error:
        why = (
            detail(error) or f"{error.url}: {error.code} {error.reason}; does the agent have this version of commwatch?"
        )
        raise CannotProfile(why) from None
    except OSError as error:
        raise CannotProfile(f"{url} does not answer: {getattr(error, 'reason', error)}") from None
    except ValueError as error:
        raise CannotProfile(f"{url} does not answer as an agent of this version: {error}") from None


def failed(profiles: list[dict[str, Any]]) -> bool:
    """Return whether any rank has no result."""
    return any(rank["state"] != "done" for profile in profiles for rank in profile["ranks"])


def text(profiles: list[dict[str, Any]], cells: int = CELLS) -> str:
    """Return the profiles as text for people."""
    ranks = sorted((rank for profile in profiles for rank in profile["ranks"]), key=lambda rank: rank["rank"])
    done = [rank for rank in ranks if rank["state"] == "done"]
    lines = [f"job {profiles[0]['job_id']}, by torch.profiler, beside what the probe recorded of the same steps"]
    if done:
        lines += ["", *columns(_HEAD, [_cells(rank) for rank in done], 0, cells, keys=1)]
    for rank in done:
        for group in rank["groups"]:
            comm, exposed = (
                percent(group[name] / (rank["end_at"] - rank["begin_at"])) for name in ("comm_s", "exposed_s")
            )
            lines.append(f"rank {rank['rank']}, {group['group']}: comm {comm}, exposed {exposed}")
    traces = [rank["trace"] for rank in ranks if rank["trace"]]
    if traces:
        lines += ["", "open in https://ui.perfetto.dev:", *(f"  {trace}" for trace in traces)]
    lines += [f"rank {rank['rank']}: no profile: {rank['error']}" for rank in ranks if rank["error"]]
    return terminal_text.lines(lines)


def _cells(rank: dict[str, Any]) -> tuple[str, ...]:
    shares = [
        percent(None if figures is None else figures[name])
        for figures in (rank["profile"], rank["continuous"])
        for name in ("comm_share", "exposed_share")
    ]
    marks = f"{rank['from_seq']} to {rank['until_seq']}"
    return (str(rank["rank"]), marks, seconds(rank["step_s"]), *shares)


def as_json(profiles: list[dict[str, Any]]) -> str:
    """Return the profiles as JSON text for programs."""
    return json.dumps({"profiles": profiles}, indent=2)
