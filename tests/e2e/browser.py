"""A real server process and a real Chromium, for the tests of the page.

It knows where the page is served, how to turn to a model, what the browser complained about, and
which rules of looks and access a page can be measured against; deliberately not what it answers.
"""

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, expect, sync_playwright

CHROMIUM_ARGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
START_LIMIT_S = 60.0
STOP_LIMIT_S = 20.0
REPOSITORY = Path(__file__).resolve().parents[2]
AUDIT = Path(__file__).with_name("page_audit.js").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Served:
    """A server process that answered ready."""

    url: str
    process: subprocess.Popen[bytes]

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@dataclass
class Complaints:
    """What a page did that a good page does not do."""

    origin: str
    console: list[str] = field(default_factory=list)
    external: list[str] = field(default_factory=list)

    def heard(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.console.append(message.text)

    def requested(self, request: Request) -> None:
        if not request.url.startswith(self.origin):
            self.external.append(request.url)


@contextmanager
def served(
    bundles: Sequence[Path], environment: Mapping[str, str] | None = None
) -> Iterator[Served]:
    """`python -m serve` on a free port, ready to answer; where it is not, its log says why."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "serve", *map(str, bundles), "--port", str(port)]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            stdout=log,
            stderr=log,
            env=os.environ | (environment or {}),
        )
        server = Served(f"http://127.0.0.1:{port}/", process)
        try:
            if not _becomes_ready(server):
                log.seek(0)
                raise RuntimeError(f"the server did not start:\n{log.read().decode()}")
            yield server
        finally:
            server.stop()


def _becomes_ready(server: Served) -> bool:
    give_up_s = time.monotonic() + START_LIMIT_S
    while time.monotonic() < give_up_s and server.process.poll() is None:
        try:
            if httpx.get(f"{server.url}health/ready").status_code == 200:
                return True
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    return False


@contextmanager
def started_browser(executable: Path) -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=CHROMIUM_ARGS)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def opened(browser: Browser, url: str, **context: Any) -> Iterator[tuple[Page, Complaints]]:
    """The page in a browser profile of its own; `context` is what Playwright's new_page takes."""
    complaints = Complaints(url.partition("#")[0])
    page = browser.new_page(**{"viewport": {"width": 1280, "height": 800}} | context)
    try:
        page.set_default_timeout(20_000)
        page.on("console", complaints.heard)
        page.on("pageerror", lambda error: complaints.console.append(str(error)))
        page.on("request", complaints.requested)
        page.goto(url)
        yield page, complaints
    finally:
        page.unroute_all(behavior="wait")  # what is being answered would fail without the page
        page.close()


def audit(page: Page) -> dict[str, list[str]]:
    """Faults by kind: `contrast` below 4.5, controls with no `name`, `overflow` to the side."""
    faults: dict[str, list[str]] = page.evaluate(AUDIT)
    return faults


def sound(page: Page) -> bool:
    """Whether the page has no fault of looks or access."""
    faults = audit(page)
    faults.pop("measured")
    return faults == {"contrast": [], "name": [], "overflow": []}


@contextmanager
def playground(browser: Browser, url: str) -> Iterator[Page]:
    """The page, ready, which must not have complained by the end."""
    with opened(browser, url) as (ready, complaints):
        expect(ready.locator("#playground")).to_be_visible()
        yield ready
        assert complaints == Complaints(url.partition("#")[0])


def pick(page: Page, model: str) -> None:
    """Turn to a model of the server."""
    page.get_by_role("radio", name=model, exact=True).check(force=True)
    expect(page.locator("#about-server")).to_contain_text(model)
