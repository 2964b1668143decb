"""A client, or a browser and the page, of the server that a module starts as its `server`."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, Page

from tests.e2e.browser import Served, playground, started_browser
from tests.server_process import ServerProcess


@pytest.fixture(scope="module")
def raw(server: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=30) as connected:
        yield connected


@pytest.fixture(scope="module")
def client(raw: httpx.Client) -> httpx.Client:
    """The same, where a module has no client of its own."""
    return raw


@pytest.fixture(scope="module")
def browser(chromium: Path) -> Iterator[Browser]:
    with started_browser(chromium) as running:
        yield running


@pytest.fixture
def page(browser: Browser, server: Served) -> Iterator[Page]:
    with playground(browser, server.url) as ready:
        yield ready
