"""The API reference at /docs in a real Chromium: how it looks, its search, and its forms."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from tests.e2e.browser import Complaints, Served, audit, opened, served
from tests.fixtures.tiny_folders import classify_bundle

pytestmark = pytest.mark.browser

WIDTHS = (360, 768, 1280, 1920)
OPEN_ALL = "() => document.querySelectorAll('details').forEach(one => { one.open = true; })"
# Names and short words that are broken over two lines: their columns were made too narrow.
BROKEN = """() => [...document.querySelectorAll("td, th, summary, aside a, h3")].flatMap(node => {
    if (!node.checkVisibility()) return [];
    const walker = document.createTreeWalker(node, NodeFilter.SHOW_TEXT);
    const found = [];
    while (walker.nextNode()) {
        for (const word of walker.currentNode.data.matchAll(/[A-Za-z_]{2,16}/g)) {
            const range = document.createRange();
            range.setStart(walker.currentNode, word.index);
            range.setEnd(walker.currentNode, word.index + word[0].length);
            const tops = [...range.getClientRects()].map(box => Math.round(box.top));
            if (new Set(tops).size > 1) found.push(word[0]);
        }
    }
    return found;
})"""


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served([classify_bundle().folder]) as running:
        yield running


@contextmanager
def reference(browser: Browser, server: Served, **context: Any) -> Iterator[Page]:
    with opened(browser, server.url, **context) as (page, complaints):
        page.goto(f"{server.url}docs")
        yield page
        assert complaints == Complaints(server.url)


@pytest.fixture
def page(browser: Browser, server: Served) -> Iterator[Page]:
    with reference(browser, server) as ready:
        yield ready


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.long
def test_the_reference_looks_right_at_every_width(
    browser: Browser, server: Served, scheme: str
) -> None:
    with reference(browser, server, color_scheme=scheme) as page:
        page.evaluate(OPEN_ALL)
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": 900})
            faults = audit(page)
            faults.pop("measured")
            assert faults == {"contrast": [], "name": [], "overflow": []}, width
            assert page.evaluate(BROKEN) == [], width


def test_the_measure_of_broken_words_can_fail(page: Page) -> None:
    page.evaluate("""() => {
        const cell = document.querySelector("td");
        cell.style.cssText = "display: block; width: 2ch; white-space: normal";
        cell.style.overflowWrap = "anywhere";
        cell.textContent = "required";
    }""")
    assert page.evaluate(BROKEN) == ["required"]


@pytest.mark.long
def test_contents_lead_to_every_route_and_shape(page: Page, server: Served) -> None:
    document = page.request.get(f"{server.url}openapi.json").json()
    routes = sum(len(methods) for methods in document["paths"].values())
    shapes = document["components"]["schemas"]
    links = page.locator("aside li a")
    expect(links).to_have_count(routes + len(shapes))
    for link in links.all():
        target = str(link.get_attribute("href")).removeprefix("#")
        assert page.locator(f"[id='{target}']").count() == 1, target
    page.locator("aside summary", has_text="Shapes").click()
    links.filter(has_text="ClassifyResponse").click()
    expect(page.locator("#ClassifyResponse")).to_have_attribute("open", "")
    expect(page.locator("#ClassifyResponse p").first).to_be_visible()
    expect(page.locator("#PointsItem")).to_contain_text("(≥ -1e30, ≤ 1e30)")


def test_the_search_leaves_what_has_every_word(page: Page) -> None:
    search = page.get_by_role("searchbox", name="Search")
    search.fill("deadline_ms prompt")
    expect(page.locator("#found")).to_contain_text("routes and shapes have")
    shown = page.locator(".entry:visible")
    assert 0 < shown.count() < page.locator(".entry").count()
    expect(page.locator("#post-v1-generate")).to_be_visible()
    expect(page.locator("#get-metrics")).to_be_hidden()
    search.fill("")
    expect(page.locator("#get-metrics")).to_be_visible()


def test_a_route_can_be_tried(page: Page) -> None:
    entry = page.locator("#post-v1-classify")
    entry.locator("summary", has_text="Try it").click()
    entry.get_by_role("textbox", name="Body").fill(json.dumps({"input": "a good film", "steps": 2}))
    entry.get_by_role("button", name="Send").click()
    expect(entry.locator("form [role=status]")).to_contain_text("HTTP 200")
    answer = json.loads(entry.locator("form pre").inner_text())
    assert answer["results"][0]["budget"]["steps"] == 2
    ladder = page.locator("#get-v1-models-name-ladder")
    ladder.locator("summary", has_text="Try it").click()
    ladder.get_by_role("textbox", name="name").fill(answer["model"])
    ladder.get_by_role("button", name="Send").click()
    expect(ladder.locator("form pre")).to_contain_text('"rungs"')


def test_an_answer_that_comes_late_does_not_replace_a_newer_one(page: Page) -> None:
    held: list[Route] = []

    def answer(route: Route) -> None:
        if held:
            route.fulfill(json="newer")
        held.append(route)

    page.route("**/v1/classify", answer)
    entry = page.locator("#post-v1-classify")
    entry.locator("summary", has_text="Try it").click()
    for _ in range(2):
        entry.get_by_role("button", name="Send").click()
    expect(entry.locator("form pre")).to_have_text('"newer"')
    with page.expect_response("**/v1/classify"):
        held[0].fulfill(json="older")
    page.wait_for_timeout(200)
    expect(entry.locator("form pre")).to_have_text('"newer"')


def test_an_example_can_be_chosen(page: Page) -> None:
    entry = page.locator("#post-v1-classify")
    entry.locator("summary", has_text="Try it").click()
    entry.get_by_role("combobox", name="Begin with").select_option(label="Example 2")
    body = entry.get_by_role("textbox", name="Body").input_value()
    assert json.loads(body)["trace"] is True
