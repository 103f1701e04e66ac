"""Pages of other origins in a real Chromium: they read nothing of an agent and make it do nothing, logged in or not."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect
from starlette.types import Receive, Scope, Send

from tests.browser import EVIL, REBOUND
from tests.helpers import PATIENCE_S, RunningAgent, agent, wait_for
from tests.live import HandMade
from tests.serving import greeting, serving

#: Settings of agents that do not ask for their token, and that do.
OPEN, CLOSED = "", "require_token = true\n"
#: A job whose name no page may see.
SECRET = "the-secret-job"

#: All that a page can try on an agent at an address, by name; what it learned, as text. ``token`` is what it would have to show.
TRY = """async ([agent, token, job]) => {
  const jobs = agent + "/api/v1/jobs", profiles = agent + "/api/v1/profiles", wanted = JSON.stringify({job});
  const learned = {};
  const tried = async (name, what) => {
    const over = new Promise(resolve => setTimeout(() => resolve("nothing came"), 20000));
    learned[name] = String(await Promise.race([what().catch(error => `refused: ${error.name}`), over]));
  };
  const asked = async (url, about) => {
    const answer = await fetch(url, about);
    return `${answer.type} ${answer.status} ${await answer.text()}`;
  };
  const loaded = (tag, how) => new Promise(resolve => {
    const element = document.createElement(tag);
    element.onload = () => resolve("loaded " + (element.contentDocument?.body?.innerText ?? ""));
    element.onerror = () => resolve("not loaded");
    how(element);
    document.body.append(element);
  });
  const plain = {method: "POST", credentials: "include", body: wanted};
  const shown = {"Content-Type": "application/json", "Authorization": "Bearer " + token};
  await tried("get", () => asked(jobs));
  await tried("get with cookies", () => asked(jobs, {credentials: "include"}));
  await tried("get, opaque", () => asked(jobs, {credentials: "include", mode: "no-cors"}));
  await tried("get with the token", () => asked(jobs, {headers: shown}));
  await tried("metrics", () => asked(agent + "/metrics"));
  await tried("post", () => asked(profiles, plain));
  await tried("post, opaque", () => asked(profiles, {...plain, mode: "no-cors"}));
  await tried("post with the token", () => asked(profiles, {...plain, headers: shown}));
  await tried("login", () => asked(agent + "/login", {...plain, body: new URLSearchParams({token})}));
  await tried("beacon", async () => navigator.sendBeacon(profiles, wanted) && "sent");
  await tried("stream", () => new Promise(resolve => {
    const stream = new EventSource(agent + "/api/v1/stream", {withCredentials: true});
    stream.onopen = () => { stream.close(); resolve("open"); };
    stream.onerror = () => { stream.close(); resolve("refused"); };
  }));
  await tried("script", () => loaded("script", element => { element.src = jobs; }));
  await tried("image", () => loaded("img", element => { element.src = jobs; }));
  await tried("style", () => loaded("link", element => { element.rel = "stylesheet"; element.href = agent + "/"; }));
  await tried("frame", () => loaded("iframe", element => { element.src = agent + "/"; }));
  await tried("form", () => loaded("iframe", element => {
    element.name = "target";
    const form = Object.assign(document.createElement("form"), {method: "post", action: profiles, enctype: "text/plain", target: "target"});
    const field = Object.assign(document.createElement("input"), {name: wanted.slice(0, -1) + ',"x":"', value: '"}'});
    form.append(field);
    document.body.append(form);
    setTimeout(() => form.submit());
  }));
  return learned;
}"""


class Evil(BaseHTTPRequestHandler):
    """A page of another origin."""

    def do_GET(self) -> None:
        """Nothing but a place for scripts."""
        body = b"<!doctype html><title>evil</title><link rel=icon href=data:,><body>"
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Silent."""


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    """A profile of its own."""
    context = browser.new_context()
    context.set_default_timeout(PATIENCE_S * 1000)
    yield context
    context.close()


@pytest.fixture(scope="module")
def evil() -> Iterator[int]:
    """The port of another origin's pages."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Evil) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


@pytest.fixture(scope="module", params=[OPEN, CLOSED], ids=["open", "closed"])
def node(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningAgent]:
    """An agent with a job, that asks for its token or not."""
    place = tmp_path_factory.mktemp("origins")
    (place / "commwatch.toml").write_text(request.param)
    with (
        agent(place / "run", "--config", str(place / "commwatch.toml")) as running,
        HandMade(running.directory, SECRET) as job,
    ):
        job.run(20)
        wait_for(lambda: SECRET in running.get("/metrics"), "the job")
        yield running


def log_in(context: BrowserContext, running: RunningAgent, path: str = "/docs") -> Page:
    """A page of the agent's own, with its cookie where it wants one."""
    page = context.new_page()
    page.goto(running.url + path)
    if page.get_by_role("button", name="Log in").is_visible():
        page.get_by_label("Token").fill(running.token)
        page.get_by_role("button", name="Log in").click()
        page.wait_for_url(running.url + path)
    return page


def attempts(page: Page, at: str, token: str) -> dict[str, str]:
    """What a page learned of an agent at an address, by what it tried."""
    learned: dict[str, str] = page.evaluate(TRY, [at, token, SECRET])
    return learned


def done(running: RunningAgent) -> list[Path]:
    """Requests for a profile that trainers would find."""
    return list(running.directory.rglob("*.request.json"))


def test_own_page(context: BrowserContext, node: RunningAgent) -> None:
    """What the other tests try works from a page of the agent's own: it reads, and with the token it makes the agent do something."""
    learned = attempts(log_in(context, node), node.url, node.token)
    assert SECRET in learned["get with cookies"]
    assert learned["stream"] == "open"
    assert learned["post with the token"].startswith("basic 202")
    (request,) = done(node)
    request.unlink()


@pytest.mark.parametrize(
    ("node", "host"),
    [
        pytest.param(OPEN, "127.0.0.1", id="open-127.0.0.1", marks=pytest.mark.long),
        pytest.param(OPEN, EVIL, id=f"open-{EVIL}", marks=pytest.mark.long),
        pytest.param(CLOSED, "127.0.0.1", id="closed-127.0.0.1"),
        pytest.param(CLOSED, EVIL, id=f"closed-{EVIL}"),
    ],
    indirect=["node"],
)
def test_another_origin(context: BrowserContext, node: RunningAgent, evil: int, host: str) -> None:
    """A page of another port or host learns nothing of an agent that its reader is logged in to, and has it do nothing."""
    log_in(context, node).close()
    page = context.new_page()
    page.goto(f"http://{host}:{evil}/")
    learned = attempts(page, node.url, node.token)
    refused = {name for name, text in learned.items() if text.startswith(("refused", "not loaded"))}
    # Of these a page sees no more than that it has tried.
    assert {name: learned[name] for name in learned if name not in refused} == {
        "beacon": "sent",
        "frame": "loaded ",
        "form": "loaded ",
    }
    assert done(node) == []


@pytest.mark.parametrize("host", ["127.0.0.1", EVIL])
def test_nothing_gets_through(context: BrowserContext, tmp_path: Path, evil: int, host: str) -> None:
    """Nothing of what such a page tries comes further than the gate, but for metrics, which it cannot read."""
    passed: list[tuple[str, str]] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        passed.append((scope["method"], scope["path"]))
        await greeting(scope, receive, send)

    with serving(tmp_path / "run", app) as served:
        at = f"http://127.0.0.1:{served.port}"
        page = context.new_page()
        page.goto(f"{at}/")
        attempts(page, at, served.token)
        assert {("GET", "/api/v1/jobs"), ("GET", "/api/v1/stream"), ("POST", "/api/v1/profiles"), ("GET", "/")} <= set(
            passed
        )
        passed.clear()
        page.goto(f"http://{host}:{evil}/")
        attempts(page, at, served.token)
        assert set(passed) == {("GET", "/metrics")}


def test_window(context: BrowserContext, node: RunningAgent, evil: int) -> None:
    """A page can open the agent in a new window, as a link does, and sees nothing of its content."""
    log_in(context, node).close()
    page = context.new_page()
    page.goto(f"http://{EVIL}:{evil}/")
    with context.expect_page() as opened:
        page.evaluate("url => { window.opened = window.open(url) }", f"{node.url}/docs")
    expect(opened.value.get_by_role("heading", name="commwatch API")).to_be_visible()
    seen = "() => { try { return window.opened.document.body.innerText } catch (error) { return error.name } }"
    assert page.evaluate(seen) == "SecurityError"


def test_rebinding(context: BrowserContext, node: RunningAgent) -> None:
    """A page whose host name now resolves to the agent (DNS rebinding) gets no data, even with the right token."""
    log_in(context, node).close()
    at = f"http://{REBOUND}:{node.url.rpartition(':')[2]}"
    page = context.new_page()
    page.route(f"{at}/evil", lambda route: route.fulfill(body="<!doctype html><body>", content_type="text/html"))
    page.goto(f"{at}/evil")
    learned = attempts(page, at, node.token)
    assert SECRET not in str(learned)
    asked = [
        "get",
        "get with cookies",
        "get, opaque",
        "get with the token",
        "metrics",
        "post",
        "post with the token",
        "login",
    ]
    for name in asked:
        assert learned[name].startswith("basic 421 "), learned
        assert "allowed_hosts" in learned[name]
    assert learned["stream"] == "refused"
    assert done(node) == []


def test_login_on_the_way(context: BrowserContext, node: RunningAgent) -> None:
    """Whoever follows a link to an agent that asks for its token is there after the login."""
    for path, heading in (("/runbook?from=chat", "Runbook"), ("/incidents/0123456789abcdef", "No such incident")):
        context.clear_cookies()
        page = log_in(context, node, path)
        expect(page).to_have_url(f"{node.url}{path}")
        expect(page.get_by_role("heading", name=heading)).to_be_visible()
