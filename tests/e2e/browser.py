"""A real server process and a real Chromium, for the tests of the page.

It knows where the page is served, how to turn to a model, what the browser complained about, and
which rules of looks and access a page can be measured against; deliberately not what it answers.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, ConsoleMessage, Page, Request, expect, sync_playwright

from tests.server_process import server_process

CHROMIUM_ARGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
AUDIT = Path(__file__).with_name("page_audit.js").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Served:
    """A server, by the address of its page."""

    url: str


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
    """The server of these bundles, ready to answer."""
    with server_process(bundles, environment=environment) as server:
        yield Served(f"{server.url}/")


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
    """Faults by kind: low `contrast`, controls with no `name`, `overflow` to the side."""
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
