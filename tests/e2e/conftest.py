"""A browser, and the page of the server that a module starts as its fixture `server`."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from tests.e2e.browser import Served, playground, started_browser


@pytest.fixture(scope="module")
def browser(chromium: Path) -> Iterator[Browser]:
    with started_browser(chromium) as running:
        yield running


@pytest.fixture
def page(browser: Browser, server: Served) -> Iterator[Page]:
    with playground(browser, server.url) as ready:
        yield ready
