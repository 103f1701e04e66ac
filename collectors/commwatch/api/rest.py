"""A client of an agent's REST API."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from commwatch.api.client import Keys, get, local_agents, reason
from commwatch.api.figures import figures_of
from commwatch.api.rows import Rows
from commwatch.wire.addresses import url_of
from commwatch.wire.errors import CommwatchError
from commwatch.wire.identity import run_dir

#: States of incidents that are or were open; and most of them that figures count.
OPENED, _MOST_INCIDENTS = ("open", "ended"), 1000


class AgentError(CommwatchError):
    """There is no agent, or it does not answer or refuses; the text names it and the reason."""


class Client:
    """Queries one agent, and through it the agents of a job's other nodes.

    Where a method has ``job``, the answer covers all nodes of the job; without ``job`` it covers this agent's node. Times are as in the REST
    API (docs/api.md): Unix seconds, ISO 8601, or an age such as ``15m``.

    Args:
        address: ``host``, ``host:port`` or a URL; default: the agent of the run directory (``COMMWATCH_DIR``).
        token_file, ca_file, client_cert: credentials; default: the variables ``COMMWATCH_TOKEN_FILE``, ``COMMWATCH_CA_FILE`` and
            ``COMMWATCH_CLIENT_CERT``, and the token that a local agent has written for its user.
        timeout_s: for each wait for data.

    Raises:
        AgentError: without an address, if no agent watches the run directory. All methods raise it if the agent does not answer.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        token_file: str | Path | None = None,
        ca_file: str | Path | None = None,
        client_cert: str | Path | None = None,
        timeout_s: float = 10.0,
    ) -> None:
        self._keys = _keys(os.environ, token_file, ca_file, client_cert)
        self._timeout_s = timeout_s
        self.url = _local(os.environ) if address is None else url_of(address, self._keys.ca_file is not None)

    def __repr__(self) -> str:
        return f"Client({self.url!r})"

    def get(self, path: str, **parameters: object) -> Any:
        """Return the answer to a GET of ``path`` under ``/api/v1``, as decoded JSON.

        Args:
            parameters: of the query; those that are ``None`` are left out, and lists are repeated.
        """
        given = {name: _text(value) for name, value in parameters.items() if value is not None}
        question = f"{path}?{urlencode(given, doseq=True)}" if given else path
        try:
            return get(self.url, question, self._keys, self._timeout_s)
        except (OSError, ValueError) as error:
            raise AgentError(f"{self.url}: {reason(error)}") from None

    def rows(self, path: str, **parameters: object) -> Rows:
        """Return the rows of the answer to a GET of ``path``, as ``get`` requests it."""
        answer, nodes = self.get(path, **parameters), None
        if isinstance(answer, dict) and "nodes" in answer and "data" in answer:
            answer, nodes = answer["data"], answer["nodes"]
        if isinstance(answer, dict):
            answer = next((answer[name] for name in ("rows", "operations", "active") if name in answer), [answer])
        return Rows(answer, nodes)

    def jobs(self, *, figures: bool = False, limit: int | None = None) -> Rows:
        """Return the jobs of the node, newest first; ``figures``: with duration, steps and shares."""
        return self.rows("jobs", figures=figures or None, limit=limit)

    def summary(
        self,
        job: str | None = None,
        *,
        by: str = "group,op",
        since: str | None = None,
        until: str | None = None,
        **same: object,
    ) -> Rows:
        """Return sums over operations: counts, bytes, percentiles, bandwidths, waits.

        Args:
            by: dimensions, comma-separated: ``job_id``, ``rank``, ``group``, ``group_id``, ``op``, ``size``.
            same: filters: ``rank``, ``group``, ``op``, ``size``.
        """
        return self.rows("summary", **_of(job), by=by, since=since, until=until, **same)

    def steps(
        self,
        job: str | None = None,
        *,
        rank: int | None = None,
        since: str | None = None,
        until: str | None = None,
        limit: int = 100,
    ) -> Rows:
        """Return training steps, newest first."""
        return self.rows("steps", **_of(job), rank=rank, since=since, until=until, limit=limit)

    def operations(self, job: str | None = None, *, limit: int = 100, **filters: object) -> Rows:
        """Return single operations of this agent's node, newest first; filters as in ``/api/v1/ops``."""
        return self.rows("ops", job=job, limit=limit, **filters)

    def ranks(self, job: str | None = None) -> Rows:
        """Return the ranks: state, operations in flight, failures."""
        return self.rows("ranks", **_of(job))

    def groups(self, job: str | None = None) -> Rows:
        """Return the process groups."""
        return self.rows("groups", **_of(job))

    def incidents(
        self,
        job: str | None = None,
        *,
        state: str | Sequence[str] | None = None,
        kind: str | None = None,
        severity: str | None = None,
        limit: int = 100,
    ) -> Rows:
        """Return what is wrong and what was, open incidents first; filters as in ``/api/v1/incidents``."""
        return self.rows("incidents", **_of(job), state=state, kind=kind, severity=severity, limit=limit)

    def verdicts(self, job: str | None = None) -> Rows:
        """Return the current problems: hangs, stalls, ranks that disagree, stragglers."""
        return self.rows("verdicts", **_of(job))

    def advice(self, job: str | None = None) -> Rows:
        """Return what to try in a job (default: the latest), with the expected gain."""
        return self.rows("advice", **_of(job))

    def alerts(self, job: str | None = None) -> Rows:
        """Return the pending and firing alerts, oldest first."""
        return self.rows("alerts", **_of(job))

    def moment(self, job: str | None = None) -> dict[str, Any]:
        """Return what the live page shows of a job (default: the latest) at this moment."""
        found: dict[str, Any] = self.get("moment", job=job)
        return found

    def metrics(self, job: str | None = None) -> dict[str, float]:
        """Return flat figures of a job (default: the latest), as ``commwatch.metrics`` does."""
        moment = self.moment(job)
        if moment["job"] is None:
            return {}
        try:
            incidents = self.incidents(moment["job"]["job_id"], state=OPENED, limit=_MOST_INCIDENTS)
        except AgentError:  # the history cannot be read, or does not have the job yet
            return figures_of(moment)
        return figures_of(moment, incidents)


def _of(job: str | None) -> dict[str, object]:
    return {} if job is None else {"job": job, "scope": "job"}


def _text(value: object) -> str | list[str]:
    if isinstance(value, list | tuple):
        return [str(each) for each in value]
    return str(value).lower() if isinstance(value, bool) else str(value)


def _keys(env: Mapping[str, str], *given: str | Path | None) -> Keys:
    names = ("COMMWATCH_TOKEN_FILE", "COMMWATCH_CA_FILE", "COMMWATCH_CLIENT_CERT")
    files = [one or env.get(name) for one, name in zip(given, names, strict=True)]
    return Keys(run_dir(env), *(None if file is None else Path(file) for file in files))


def _local(env: Mapping[str, str]) -> str:
    """Return the URL of the agent that watches the run directory; raise ``AgentError`` if there is none."""
    directory = run_dir(env)
    found = local_agents(directory)
    if not found:
        raise AgentError(f"no agent watches {directory}; start one with commwatch agent, or give an address")
    return found[0]
