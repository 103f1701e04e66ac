"""Access rules: decide from method, path and headers whether a request may pass; a refusal gives the reason. Pure."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from urllib.parse import urlsplit

#: For a supervisor: these reveal only whether the agent works, and accept any ``Host``.
HEALTH = frozenset({"/healthz", "/readyz"})
METRICS = "/metrics"
LOGIN = "/login"
#: Under TLS the prefix ``__Host-`` makes browsers insist on ``Secure``.
COOKIE, SECURE_COOKIE = "commwatch", "__Host-commwatch"
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
_READING = ("GET", "HEAD", "OPTIONS")


@dataclass(frozen=True)
class Rules:
    """What an agent requires of a request."""

    #: Names and addresses by which it may be called, lower case; one with a leading dot matches all names that end so.
    hosts: frozenset[str] = _LOOPBACK
    #: It listens on all addresses, so any address is accepted as its name.
    any_address: bool = False
    #: Reading requires the token, except for ``/metrics`` and health.
    require_token: bool = False
    #: Reading ``/metrics`` requires the token.
    require_token_for_metrics: bool = False


@dataclass(frozen=True)
class Refusal:
    """Why a request is refused; ``detail`` names what would be right."""

    status: HTTPStatus
    detail: str


def decide(method: str, path: str, headers: Mapping[str, str], rules: Rules, token: str | None) -> Refusal | None:
    """Return why a request is refused; ``None``: it may pass.

    Args:
        headers: by name in lower case.
        token: the current token; ``None``: it cannot be read, and no token is accepted.
    """
    if path in HEALTH:
        return None
    host = headers.get("host", "")
    if not host_allowed(host, rules):
        return Refusal(
            HTTPStatus.MISDIRECTED_REQUEST,
            f"host={host or 'none'}: not a name of this agent; the setting allowed_hosts lists further ones",
        )
    if path != METRICS and (page := _other_page(method, headers)):
        return Refusal(HTTPStatus.FORBIDDEN, f"{page}: requests from pages of other origins are refused")
    if (method, path) == ("POST", LOGIN) or not wants_token(method, path, rules):
        return None
    return None if _shows(method, headers, token) else _unauthorized(headers, token)


def wants_token(method: str, path: str, rules: Rules) -> bool:
    """Return True if the request needs the token."""
    if path in HEALTH:
        return False
    if method not in _READING:
        return True
    return rules.require_token_for_metrics if path == METRICS else rules.require_token


def host_allowed(host: str, rules: Rules) -> bool:
    """Return True if ``host``, the value of a ``Host`` header, is a name of this agent (against DNS rebinding).

    The port is ignored, because it differs through a tunnel.
    """
    name = _name_of(host)
    if name in rules.hosts or any(each.startswith(".") and name.endswith(each) for each in rules.hosts):
        return bool(name)
    return rules.any_address and _is_address(name)


def is_token(shown: str, token: str | None) -> bool:
    """Return True if ``shown`` is the token; compare in constant time."""
    return token is not None and hmac.compare_digest(shown.encode(), token.encode())


def session(token: str) -> str:
    """Return the cookie value for a browser that has shown the token; it is invalid once the token changes."""
    return hmac.new(token.encode(), b"commwatch session", hashlib.sha256).hexdigest()


def safe_redirect(path: str) -> str:
    """Return ``path`` if it is a path of this agent, else ``/``; never another host for a browser, and never the login.

    >>> safe_redirect("/api/v1/jobs?a=b"), safe_redirect("//evil.example"), safe_redirect("/login")
    ('/api/v1/jobs?a=b', '/', '/')
    """
    # Browsers read \ as / and drop tabs and line ends.
    return path if re.fullmatch(r"/(?!/)[!-\[\]-~]*", path) and path.partition("?")[0] != LOGIN else "/"


def beyond_loopback(address: str) -> bool:
    """Return True if other machines can reach a listening address."""
    return not ipaddress.ip_address(address.partition("%")[0]).is_loopback


def is_wildcard(address: str) -> bool:
    """Return True for an address that means all addresses of a machine (``0.0.0.0``, ``::``)."""
    return ipaddress.ip_address(address.partition("%")[0]).is_unspecified


def rules_of(
    address: str, names: tuple[str, ...], allowed: tuple[str, ...], require_token: bool, for_metrics: bool
) -> Rules:
    """Return the rules of an agent that listens on ``address``.

    Args:
        names: host names of its machine, and the configured listening address.
        allowed: further names, from the settings.
    """
    hosts = _LOOPBACK | {_name_of(f"[{each}]" if ":" in each else each) for each in (address, *names, *allowed)}
    return Rules(frozenset(hosts), is_wildcard(address), require_token, for_metrics)


def _name_of(host: str) -> str:
    """Return the name or address in a ``Host`` header, without its port; empty if it is invalid."""
    try:
        return (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _other_page(method: str, headers: Mapping[str, str]) -> str | None:
    """Return the header which shows that a page of another origin sends the request; ``None``: there is none.

    A link on another page (an alert, a dashboard) may be followed, because that page cannot read the answer.
    """
    origin = headers.get("origin")
    if origin is not None and origin.partition("://")[2].lower() != headers.get("host", "").lower():
        return f"origin={origin}"
    site = headers.get("sec-fetch-site", "none")
    link = method in _READING and (headers.get("sec-fetch-mode"), headers.get("sec-fetch-dest")) == (
        "navigate",
        "document",
    )
    return None if site in ("same-origin", "none") or link else f"sec-fetch-site={site}"


def _shows(method: str, headers: Mapping[str, str], token: str | None) -> bool:
    kind, _, shown = headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer" and is_token(shown.strip(), token):
        return True
    # Browsers send a cookie to every port of its host, and with requests the user did not start: it permits reading only.
    if token is None or method not in _READING:
        return False
    pairs = (part.strip().partition("=") for part in headers.get("cookie", "").split(";"))
    return any(
        name in (COOKIE, SECURE_COOKIE) and hmac.compare_digest(value.encode(), session(token).encode())
        for name, _, value in pairs
    )


def _unauthorized(headers: Mapping[str, str], token: str | None) -> Refusal:
    if token is None:
        detail = "the agent cannot read its token, so it accepts none; see its log"
    elif "authorization" in headers:
        detail = "authorization: not the token of this agent"
    else:
        detail = "authorization: none; send Authorization: Bearer TOKEN, with the token from the agent's token file"
    return Refusal(HTTPStatus.UNAUTHORIZED, detail)
