"""Who may ask what: every combination of caller and rules, without a server."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import pytest

from commwatch_agent.web.access import COOKIE, SECURE_COOKIE, Rules, decide, host_allowed, rules_of, session

TOKEN = "right-right-right-right"
HERE = {"host": "127.0.0.1:9477"}
BEARER: dict[str, Any] = {"authorization": f"Bearer {TOKEN}"}
OPEN = Rules()
CLOSED = Rules(require_token=True)
SHUT = Rules(require_token=True, require_token_for_metrics=True)


def status(method: str, path: str, rules: Rules = OPEN, token: str | None = TOKEN, **headers: str) -> int:
    """200, or the status of the refusal."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    refusal = decide(method, path, {**HERE, **named}, rules, token)
    return HTTPStatus.OK if refusal is None else refusal.status


# -- the token ------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "ANYTHING"])
@pytest.mark.parametrize("path", ["/api/v1/profiles", "/metrics", "/", "/nothing", "//login", "/login/"])
def test_what_does_something_shows_the_token(method: str, path: str) -> None:
    """All requests but reading require the token, whatever the rules and the path are."""
    for rules in (OPEN, CLOSED):
        assert status(method, path, rules) == HTTPStatus.UNAUTHORIZED
        assert status(method, path, rules, **BEARER) == HTTPStatus.OK


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/docs",
        "/runbook",
        "/incidents/0123456789abcdef",
        "/openapi.json",
        "/api/v1/jobs",
        "/static/page.js",
        "/no",
    ],
)
def test_reading(path: str) -> None:
    """Reading requires the token if the rules demand it."""
    assert status("GET", path) == HTTPStatus.OK
    assert status("GET", path, CLOSED) == HTTPStatus.UNAUTHORIZED
    assert status("GET", path, CLOSED, **BEARER) == HTTPStatus.OK


def test_monitoring_stays_open() -> None:
    """Health needs no token, so that supervisors can query it; metrics, which Prometheus reads, need a token only if the rules demand it."""
    for path in ("/healthz", "/readyz"):
        assert status("GET", path, SHUT) == HTTPStatus.OK
    assert (status("GET", "/metrics", CLOSED), status("GET", "/metrics", SHUT)) == (200, 401)
    assert status("GET", "/metrics", SHUT, **BEARER) == HTTPStatus.OK


@pytest.mark.parametrize(
    "shown",
    ["", TOKEN, f"Bearer {TOKEN[:-1]}", f"Bearer {TOKEN}x", f"Basic {TOKEN}", "Bearer", "Bearer ",
        f"Bearer x, Bearer {TOKEN}", "Bearer \xff", f"Bearer {session(TOKEN)}"],
)  # fmt: skip
def test_wrong_tokens(shown: str) -> None:
    """Nothing but the whole token opens."""
    assert status("GET", "/", CLOSED, authorization=shown) == HTTPStatus.UNAUTHORIZED


def test_no_token_opens_nothing() -> None:
    """Where the agent cannot read its token, none is right: an empty one neither, nor a cookie made of nothing."""
    for headers in ({}, {"authorization": "Bearer "}, BEARER, {"cookie": f"{COOKIE}={session('')}"}):
        assert status("GET", "/", CLOSED, None, **headers) == HTTPStatus.UNAUTHORIZED
        assert status("POST", "/api/v1/profiles", OPEN, None, **headers) == HTTPStatus.UNAUTHORIZED


@pytest.mark.parametrize("name", [COOKIE, SECURE_COOKIE])
def test_cookie(name: str) -> None:
    """A browser's cookie opens reading, and nothing else; it is not the token, and dies with it."""
    cookie = {"cookie": f"other=1; {name}={session(TOKEN)}"}
    assert status("GET", "/api/v1/stream", CLOSED, **cookie) == HTTPStatus.OK
    assert status("POST", "/api/v1/profiles", CLOSED, **cookie) == HTTPStatus.UNAUTHORIZED
    assert status("GET", "/", CLOSED, "another-another-another", **cookie) == HTTPStatus.UNAUTHORIZED
    assert status("GET", "/", CLOSED, cookie=f"{name}={TOKEN}") == HTTPStatus.UNAUTHORIZED
    assert TOKEN not in session(TOKEN)


# -- the name it is called by ---------------------------------------------------------------------

LOCAL = rules_of(
    "127.0.0.1", ("127.0.0.1", "Node1.Cluster.example", "Node1"), ("metrics.example", ".svc"), False, False
)
ALL = rules_of("0.0.0.0", ("0.0.0.0", "node1"), (), False, False)


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "127.0.0.1:1", "localhost:8080", "LOCALHOST", "localhost.", "[::1]:9477", "node1", "node1.cluster.example:9477", "metrics.example",
        "a.b.svc"],
)  # fmt: skip
def test_own_names(host: str) -> None:
    """The agent answers to its address, its machine's names, and those of the settings, at any port, for there are tunnels."""
    assert host_allowed(host, LOCAL)


@pytest.mark.parametrize(
    "host",
    ["", "evil.example", "127.0.0.1.evil.example", "node1.evil.example", "localhost.evil.example", "10.0.0.7", "svc", "notsvc",
        "[", "[::1", "127.0.0.1@evil.example", "evil.example#@127.0.0.1", "127.0.0.1, evil.example", "2130706433"],
)  # fmt: skip
def test_names_that_lead_here(host: str) -> None:
    """A foreign name that resolves to this address is refused, and so is an invalid name."""
    assert not host_allowed(host, LOCAL)
    refused = decide("GET", "/api/v1/jobs", {"host": host}, LOCAL, None)
    assert refused is not None
    assert refused.status == HTTPStatus.MISDIRECTED_REQUEST


def test_any_address() -> None:
    """An agent on all addresses answers to each of them, for an address cannot be made to lead elsewhere, but to no more names."""
    assert all(host_allowed(host, ALL) for host in ("10.0.0.7:9477", "[fd00::7]:9477", "node1:9477", "0.0.0.0"))
    assert not any(host_allowed(host, ALL) for host in ("evil.example", "10.0.0.7.evil.example"))


def test_health_under_any_name() -> None:
    """A supervisor's probe may call the agent as it likes."""
    assert decide("GET", "/healthz", {"host": "some-pod"}, LOCAL, None) is None


# -- pages of other origins -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "https://127.0.0.1", "http://127.0.0.1:8000", "http://localhost:9477", "null", ""]
)
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
def test_other_origin(origin: str, method: str) -> None:
    """A request that a page of another origin makes is refused, even with the token; another port is another origin."""
    for path in ("/api/v1/jobs", "/", "/login"):
        assert status(method, path, origin=origin, **BEARER) == HTTPStatus.FORBIDDEN


def test_own_origin() -> None:
    """The agent's own pages may ask it, through a tunnel, too."""
    assert status("GET", "/api/v1/jobs", origin="http://127.0.0.1:9477", sec_fetch_site="same-origin") == HTTPStatus.OK
    tunnel: dict[str, Any] = {"host": "localhost:8080", "origin": "http://localhost:8080"}
    assert status("POST", "/api/v1/profiles", **tunnel, **BEARER) == HTTPStatus.OK


def test_other_site() -> None:
    """What a browser says comes from elsewhere is refused, but for metrics and health, and a link that a person followed."""
    for site in ("cross-site", "same-site"):
        assert status("GET", "/api/v1/jobs", sec_fetch_site=site, sec_fetch_mode="no-cors") == HTTPStatus.FORBIDDEN
        assert status("GET", "/", sec_fetch_site=site, sec_fetch_mode="navigate", sec_fetch_dest="iframe") == 403
        assert (
            status("GET", "/runbook", sec_fetch_site=site, sec_fetch_mode="navigate", sec_fetch_dest="document") == 200
        )
        form: dict[str, Any] = {"sec_fetch_site": site, "sec_fetch_mode": "navigate", "sec_fetch_dest": "document"}
        assert status("POST", "/login", **form) == HTTPStatus.FORBIDDEN
        assert (status("GET", "/metrics", sec_fetch_site=site), status("GET", "/healthz", sec_fetch_site=site)) == (
            200,
            200,
        )
