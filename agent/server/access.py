"""Who may ask what of an agent: from the request's line and headers to yes, or a refusal in words. Pure."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from urllib.parse import urlsplit

#: For a supervisor: they say nothing but whether the agent works, and are asked under any name.
HEALTH = frozenset({"/healthz", "/readyz"})
METRICS = "/metrics"
LOGIN = "/login"
#: Under TLS the name makes browsers insist on ``Secure``.
COOKIE, SECURE_COOKIE = "commwatch", "__Host-commwatch"
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
_READING = ("GET", "HEAD", "OPTIONS")


@dataclass(frozen=True)
class Rules:
    """What an agent asks of its callers."""

    #: Names and addresses by which it may be called, in lower case; one that begins with a dot stands for all names that end so.
    hosts: frozenset[str] = _LOOPBACK
    #: It listens on all addresses, so it may be called by any.
    any_address: bool = False
    #: Reading asks for the token, too, but for ``/metrics`` and health.
    require_token: bool = False
    #: So does ``/metrics``.
    require_token_for_metrics: bool = False


@dataclass(frozen=True)
class Refusal:
    """Why not; ``detail`` says what would be right."""

    status: HTTPStatus
    detail: str


def decide(method: str, path: str, headers: Mapping[str, str], rules: Rules, token: str | None) -> Refusal | None:
    """``None`` where the request may go on.

    Args:
        headers: by name in lower case.
        token: the one that is right now; ``None`` where it cannot be read, and then it opens nothing.
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
        return Refusal(HTTPStatus.FORBIDDEN, f"{page}: pages of other origins may not ask this agent")
    if (method, path) == ("POST", LOGIN) or not wants_token(method, path, rules):
        return None
    return None if _shows(method, headers, token) else _unauthorized(headers, token)


def wants_token(method: str, path: str, rules: Rules) -> bool:
    """True where the token has to be shown."""
    if path in HEALTH:
        return False
    if method not in _READING:
        return True
    return rules.require_token_for_metrics if path == METRICS else rules.require_token


def host_allowed(host: str, rules: Rules) -> bool:
    """True if ``host``, a header of that name, is one of the agent's own: a name that somebody else made lead here is not.

    The port does not matter: through a tunnel it is another.
    """
    name = _name_of(host)
    if name in rules.hosts or any(each.startswith(".") and name.endswith(each) for each in rules.hosts):
        return bool(name)
    return rules.any_address and _is_address(name)


def is_token(shown: str, token: str | None) -> bool:
    """Compared in constant time."""
    return token is not None and hmac.compare_digest(shown.encode(), token.encode())


def session(token: str) -> str:
    """What a browser that has shown the token keeps instead of it; worth nothing once there is another token."""
    return hmac.new(token.encode(), b"commwatch session", hashlib.sha256).hexdigest()


def safe_redirect(asked: str) -> str:
    """Where a login leads: to what was asked for, if that is a path of this agent; nothing that a browser takes for another host.

    >>> safe_redirect("/api/v1/jobs?a=b"), safe_redirect("//evil.example"), safe_redirect("/login")
    ('/api/v1/jobs?a=b', '/', '/')
    """
    # Browsers take \ for /, and leave out tabs and line ends.
    return asked if re.fullmatch(r"/(?!/)[!-\[\]-~]*", asked) and asked.partition("?")[0] != LOGIN else "/"


def beyond_loopback(address: str) -> bool:
    """True if others than this machine can reach a listening address."""
    return not ipaddress.ip_address(address.partition("%")[0]).is_loopback


def is_wildcard(address: str) -> bool:
    """True for the address that stands for all of a machine's."""
    return ipaddress.ip_address(address.partition("%")[0]).is_unspecified


def rules_of(
    address: str, names: tuple[str, ...], allowed: tuple[str, ...], require_token: bool, for_metrics: bool
) -> Rules:
    """The rules of an agent that listens on ``address``.

    Args:
        names: what its machine is called, and what it was told to listen on.
        allowed: further names, of the settings.
    """
    hosts = _LOOPBACK | {_name_of(f"[{each}]" if ":" in each else each) for each in (address, *names, *allowed)}
    return Rules(frozenset(hosts), is_wildcard(address), require_token, for_metrics)


def _name_of(host: str) -> str:
    """The name or address in a ``Host`` header, without its port; empty where it is none."""
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
    """The header by which a browser tells that a page of another origin asks; ``None`` where none does.

    A link that somebody follows from elsewhere (an alert, a dashboard) is no such thing: that page sees nothing of the answer.
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
    # A cookie goes to every port of its host, and with requests that nobody typed: it opens nothing but reading.
    if token is None or method not in _READING:
        return False
    pairs = (part.strip().partition("=") for part in headers.get("cookie", "").split(";"))
    return any(
        name in (COOKIE, SECURE_COOKIE) and hmac.compare_digest(value.encode(), session(token).encode())
        for name, _, value in pairs
    )


def _unauthorized(headers: Mapping[str, str], token: str | None) -> Refusal:
    if token is None:
        detail = "the agent cannot read its token, and so knows no right one; its log says more"
    elif "authorization" in headers:
        detail = "authorization: not the token of this agent"
    else:
        detail = "authorization: none; send Authorization: Bearer TOKEN, with what stands in the agent's token file"
    return Refusal(HTTPStatus.UNAUTHORIZED, detail)
