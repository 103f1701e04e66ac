"""Pages in a real Chromium: their requests, their errors, and whether people can use them.

A test takes the fixture ``chromium`` and visits an address::

    def test_page(chromium: Chromium) -> None:
        with chromium.visit(agent.url + "/", width=400, dark=True) as visit:
            expect(visit.page.get_by_role("heading", name="commwatch")).to_be_visible()
            visit.assert_readable()
            visit.picture("live-400-dark")

``visit.page`` is Playwright's: wait with its ``expect`` and ``wait_for_function``, never for an idle network, which a page with
a stream of events never has. The page continues to run between calls of Playwright, which reports the requests of that time with the
next call. When the block ends without an exception, the page must have had no error (of a script, on its console, a refused
request), and must have sent requests only to its own origin. Other hosts do not resolve, so no request reaches them.
A test excludes errors that it provokes by a pattern: ``visit(url, forgiven="ERR_CONNECTION_REFUSED")``.

Each visit has its own profile. If the variable SCREENSHOTS names a folder, pictures are saved there. The browser is Debian's headless
Chromium: it needs no download of Playwright's own, and takes half the CPU time of the full browser.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from tests.helpers import PATIENCE_S, needs

expect.set_options(timeout=60_000)
#: Further names of 127.0.0.1: what another site may be called, and one that leads here after it has led elsewhere.
NAMES = EVIL, REBOUND = "evil.example", "rebound.example"
_FAULTS = Path(__file__).with_suffix(".js").read_text(encoding="utf-8")
#: Roles, as Chromium calls them, of what is used, and of what is shown instead of text: each must have a name.
_NAMED = {
    "button", "checkbox", "combobox", "DisclosureTriangle", "gridcell", "link", "listbox", "menuitem", "option", "radio",
    "searchbox", "slider", "spinbutton", "switch", "tab", "textbox", "treeitem",
    "Canvas", "dialog", "graphics-document", "image", "img", "meter", "progressbar", "SvgRoot",
}  # fmt: skip


class Visit:
    """A page that was opened, with all that it did since."""

    def __init__(self, context: BrowserContext, url: str, pictures: Path | None, forgiven: str) -> None:
        self.page: Page = context.new_page()
        #: Width in pixels, and with dark or light, for names of pictures.
        self.width, self.window = 0, ""
        #: Addresses of all requests, and errors of the page, in their order.
        self.requests: list[str] = []
        self.errors: list[str] = []
        self._home = url if url.startswith("file:") else "/".join(url.split("/")[:3]) + "/"
        self._pictures, self._forgiven = pictures, forgiven
        context.on("request", lambda request: self.requests.append(request.url))
        context.on("weberror", lambda raised: self.errors.append(str(raised.error)))
        context.on("console", lambda said: self._note(said.type, f"{said.text} ({said.location['url']})"))
        self.page.on("websocket", lambda socket: self.requests.append(socket.url))

    def _note(self, kind: str, text: str) -> None:
        if kind == "error":
            self.errors.append(text)

    def resize(self, width: int, dark: bool) -> None:
        """Give the window another width, and dark or light colours; the page continues to run."""
        height = self.page.viewport_size["height"] if self.page.viewport_size else 900
        self.page.set_viewport_size({"width": width, "height": height})
        self.page.emulate_media(color_scheme="dark" if dark else "light")
        self.width, self.window = width, f"{width}-{'dark' if dark else 'light'}"

    def picture(self, name: str) -> None:
        """Keep what the whole page looks like, if pictures are wanted: to draw one takes up to a second of a core."""
        if self._pictures:
            self.page.screenshot(path=self._pictures / f"{name}.png", full_page=True, animations="disabled")

    def faults(self) -> list[str]:
        """What keeps somebody from reading or using the page as it is now, a sentence each.

        Names and headings are Chromium's own, from the tree that screen readers get. Measured in the page: contrast of text at
        least 4.5, letters at least 10 pixels high, nothing wider than the window, no text of a drawing over another or cut off,
        tables with headers, ids that are there once.
        """
        found: list[str] = self.page.evaluate(_FAULTS)
        return [*self._unnamed(), *found]

    def assert_readable(self) -> None:
        """No ``faults``."""
        faults = self.faults()
        assert faults == [], f"the page has faults: {faults}"

    def assert_clean(self) -> None:
        """Assert that there was no error so far except forgiven ones, and no request to another origin; requests of pages from disk do not count."""
        self.page.wait_for_load_state("load")  # images, too, whose errors come late on a busy machine
        self.page.evaluate("() => new Promise(drawn => requestAnimationFrame(() => setTimeout(drawn)))")
        errors = [error for error in self.errors if not (self._forgiven and re.search(self._forgiven, error))]
        assert errors == [], f"the page had errors: {errors}"
        away = [url for url in self.requests if not url.startswith((self._home, "data:", "blob:"))]
        assert away == [], f"the page asked somebody else: {away}"

    def _unnamed(self) -> list[str]:
        session = self.page.context.new_cdp_session(self.page)
        nodes = [node for node in session.send("Accessibility.getFullAXTree")["nodes"] if not node["ignored"]]
        faults, level = [], 0
        for node in nodes:
            role, properties = (
                _value(node, "role"),
                {each["name"]: each["value"] for each in node.get("properties", [])},
            )
            if not _value(node, "name") and (role in _NAMED or "focusable" in properties):
                about = {"backendNodeId": node["backendDOMNodeId"]}
                element = session.send("DOM.describeNode", about)["node"]
                faults.append(f"{role} without a name: {element['nodeName'].lower()} {element.get('attributes', [])}")
            if role == "heading":
                before, level = level, properties["level"]["value"]
                if level > before + 1:
                    faults.append(f"heading of level {level} after level {before}: {_value(node, 'name')}")
        session.detach()
        return faults


def _value(node: dict[str, Any], key: str) -> str:
    return str(node.get(key, {}).get("value", ""))


class Chromium:
    """A browser that runs; ``pictures``: the folder for them, ``None``: none are made."""

    def __init__(self, browser: Browser, pictures: Path | None) -> None:
        self._browser, self._pictures = browser, pictures

    @contextmanager
    def visit(
        self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False, forgiven: str = ""
    ) -> Iterator[Visit]:
        """Open an address in a window of this size in pixels; see above.

        Args:
            forgiven: a pattern, searched for in errors, of those that the test provokes.
        """
        context = self._browser.new_context(
            viewport={"width": width, "height": height},
            color_scheme="dark" if dark else "light",
            reduced_motion="reduce",
            service_workers="block",
        )
        context.set_default_timeout(PATIENCE_S * 1000)
        visit = Visit(context, url, self._pictures, forgiven)
        try:
            visit.page.goto(url, wait_until="domcontentloaded")
            yield visit
            visit.assert_clean()
        finally:
            print(json.dumps({"visited": url, "errors": visit.errors, "requests": len(visit.requests)}))
            context.close()


@contextmanager
def launched() -> Iterator[Browser]:
    """Chromium without a window, that knows no other host than 127.0.0.1, by ``NAMES`` as well; skips the test where there is none.

    It does not ask before a page reaches a local address, as not all browsers do.
    """
    program = shutil.which("chromium-headless-shell")
    needs(program, "chromium-headless-shell")
    rules = [*(f"MAP {name} 127.0.0.1" for name in NAMES), "MAP * ~NOTFOUND", "EXCLUDE 127.0.0.1"]
    arguments = [
        "--no-proxy-server",
        "--disable-features=LocalNetworkAccessChecks",
        f"--host-resolver-rules={', '.join(rules)}",
    ]
    arguments += ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, headless=True, args=arguments)
        try:
            yield browser
        finally:
            browser.close()
