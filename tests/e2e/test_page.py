"""The playground page, driven in a real Chromium against the real server process.

It deliberately looks through the page alone: what the server answers has tests of its own.
"""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page, Route, ViewportSize, expect

from tests.e2e.browser import (
    Complaints,
    Served,
    audit,
    opened,
    pick,
    playground,
    served,
    started_browser,
)
from tests.tiny_bundles import build_classify, build_generate

pytestmark = pytest.mark.browser

DEEP_STEPS = 48
# What follows from a new size is drawn in the frame after it.
DRAWN = "() => new Promise(drawn => requestAnimationFrame(() => requestAnimationFrame(drawn)))"


@pytest.fixture(scope="module")
def browser(chromium: Path) -> Iterator[Browser]:
    with started_browser(chromium) as running:
        yield running


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("bundles")
    build_generate(folder / "writer", name="writer")
    build_classify(folder / "critic", name="critic")
    build_generate(folder / "slow", name="slow", steps=(1, DEEP_STEPS), max_tokens=2048)
    build_classify(folder / "unmeasured", name="unmeasured", latency=False)
    names = ("writer", "critic", "slow", "unmeasured")
    with served([folder / name for name in names]) as running:
        yield running


@pytest.fixture
def page(browser: Browser, server: Served) -> Iterator[Page]:
    with playground(browser, server.url) as ready:
        yield ready


def rows(page: Page) -> list[str]:
    return page.locator("#history tbody tr td:first-child").all_inner_texts()


def timing(page: Page, name: str) -> str:
    # The whole name: "Tokens" must not find "Tokens/s".
    term = page.locator("dt").get_by_text(name, exact=True)
    return page.locator("#timing div").filter(has=term).locator("dd").inner_text()


def ladder(server: Served, model: str) -> list[int]:
    answer = httpx.get(f"{server.url}v1/models/{model}/ladder").json()
    return [rung["steps"] for rung in answer["rungs"]]


def viewport(width: int) -> ViewportSize:
    return {"width": width, "height": 800}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("model", ["writer", "critic"])
def test_looks_and_access(browser: Browser, server: Served, model: str, scheme: str) -> None:
    widths = (360, 860, 1280)
    looks: dict[str, Any] = {"viewport": viewport(widths[0]), "color_scheme": scheme}
    with opened(browser, server.url, **looks) as (page, complaints):
        pick(page, model)
        page.get_by_role("button", name="Compare all steps").click()
        expect(page.locator("#history tbody tr")).to_have_count(len(ladder(server, model)))
        page.locator("summary").click()
        for width in widths:
            page.set_viewport_size(viewport(width))
            page.evaluate(DRAWN)
            faults = audit(page)
            measured = faults.pop("measured")
            assert int(measured[0].split()[0]) > 40 and int(measured[1].split()[0]) > 12
            assert faults == {"contrast": [], "name": [], "overflow": []}, width
        assert complaints == Complaints(server.url)


def test_the_audit_can_fail(page: Page) -> None:
    page.evaluate("""() => {
        const text = document.createElement("p");
        text.textContent = "faint";
        text.style.color = "#aaa";
        const wide = document.createElement("input");
        wide.style.width = "3000px";
        document.querySelector("main").append(text, wide);
    }""")
    faults = audit(page)
    assert [len(faults[kind]) for kind in ("contrast", "name", "overflow")] == [1, 1, 1]


def test_content_policy_holds_scripts_to_the_server(page: Page, server: Served) -> None:
    policy = httpx.get(server.url).headers["content-security-policy"]
    assert "default-src 'self'" in policy and "unsafe" not in policy


def test_generation_streams_at_the_step_count_of_the_dial(page: Page) -> None:
    pick(page, "writer")
    page.get_by_role("textbox", name="Prompt", exact=True).fill("To be")
    page.get_by_role("spinbutton", name="Tokens").fill("17")
    dial = page.get_by_role("slider", name="Number of steps")
    dial.press("Home")
    expect(page.locator("#count")).to_have_text("1")
    dial.press("ArrowRight")
    expect(page.locator("#count")).to_have_text("2")
    spoken = re.compile(r"^2 steps, medium effort, loss 1\.900, \d+\.?\d* ms$")
    expect(dial).to_have_attribute("aria-valuetext", spoken)
    page.get_by_role("button", name="Generate").click()
    expect(page.locator("#timing")).to_contain_text("Ended by")
    assert page.locator("#text").inner_text().startswith("To be")
    assert len(page.locator("#text").text_content() or "") > len("To be")
    assert (timing(page, "Steps"), timing(page, "Ended by")) == ("2", "length")
    assert timing(page, "Tokens/s") != "–" and timing(page, "First token").endswith("ms")
    assert rows(page) == ["2"]
    expect(page.locator("#status")).to_contain_text("17 tokens in")
    expect(page.locator("#answer")).to_have_attribute("aria-busy", "false")


def test_stop_ends_the_stream_and_keeps_its_text(page: Page) -> None:
    pick(page, "slow")
    page.get_by_role("spinbutton", name="Tokens").fill("2000")
    page.get_by_role("button", name="Generate").click()
    expect(page.locator("#timing")).to_contain_text("First token")
    expect(page.locator("#answer")).to_have_attribute("aria-busy", "true")
    page.get_by_role("button", name="Stop").click()
    expect(page.locator("#status")).to_have_text("Stopped.")
    expect(page.locator("#answer")).to_have_attribute("aria-busy", "false")
    expect(page.get_by_role("button", name="Stop")).to_be_hidden()
    assert page.locator("#text").inner_text() != ""
    assert 0 < int(timing(page, "Tokens")) < 2000
    assert rows(page) == []


def test_turning_the_dial_classifies_again(page: Page, server: Served) -> None:
    pick(page, "critic")
    page.get_by_role("textbox", name="Text", exact=True).fill("a wonderful evening")
    page.get_by_role("button", name="Classify").click()
    expect(page.locator("#scores li")).to_have_count(2)
    full = ladder(server, "critic")[-1]
    assert timing(page, "Steps") == str(full)
    page.get_by_role("slider", name="Number of steps").press("Home")
    expect(page.locator("#history tbody tr")).to_have_count(2)
    assert timing(page, "Steps") == "1"
    assert rows(page) == ["1", str(full)]
    expect(page.locator("#scores li.best")).to_have_count(1)
    shares = page.locator("#scores b").all_inner_texts()
    assert sum(float(share.removesuffix(" %")) for share in shares) == pytest.approx(100, abs=0.11)
    expect(page.locator("#frontier path.live")).to_have_count(2)


def test_the_dial_drags_to_the_nearest_rung(page: Page) -> None:
    pick(page, "writer")
    box = page.get_by_role("slider", name="Number of steps").bounding_box()
    assert box is not None
    middle = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + box["width"] - 22, middle)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.55 * box["width"], middle, steps=4)
    expect(page.locator("#count")).to_have_text("2")
    page.mouse.move(box["x"] + 4, middle, steps=4)
    page.mouse.up()
    expect(page.locator("#count")).to_have_text("1")


def test_a_point_of_the_frontier_selects_its_rung(page: Page) -> None:
    pick(page, "writer")
    points = page.locator("#frontier .rung")
    expect(points).to_have_count(3)
    points.nth(1).locator(".hit").click()
    expect(page.locator("#count")).to_have_text("2")
    expect(points.nth(1)).to_have_attribute("aria-pressed", "true")
    points.nth(0).press("Enter")
    expect(page.locator("#count")).to_have_text("1")
    expect(points.nth(0)).to_be_focused()


def test_comparing_sends_the_text_at_every_rung(page: Page, server: Served) -> None:
    pick(page, "critic")
    page.get_by_role("button", name="Compare all steps").click()
    steps = ladder(server, "critic")
    expect(page.locator("#history tbody tr")).to_have_count(len(steps))
    assert rows(page) == [str(count) for count in reversed(steps)]
    page.get_by_role("button", name="Clear").click()
    assert rows(page) == []


def test_a_refused_request_is_told_in_plain_words(browser: Browser, server: Served) -> None:
    # A page of its own: Chromium reports every refused request in the console.
    with opened(browser, server.url) as (page, _):
        pick(page, "writer")
        page.get_by_role("textbox", name="Prompt", exact=True).fill("ab€")
        page.get_by_role("button", name="Generate").click()
        failure = page.locator("#failure")
        expect(failure).to_contain_text("This request cannot be met")
        expect(failure).to_contain_text("€")
        expect(failure).to_contain_text("HTTP 422")
        expect(page.locator("#banner")).to_be_hidden()
        page.get_by_role("textbox", name="Prompt", exact=True).fill("ab")
        page.get_by_role("button", name="Generate").click()
        expect(page.locator("#timing")).to_contain_text("Ended by")
        expect(failure).to_be_hidden()


def test_the_curl_command_is_the_request(page: Page, server: Served) -> None:
    pick(page, "critic")
    text = "it's \"fine\", isn't it?\n$HOME `no` \\"
    page.get_by_role("textbox", name="Text", exact=True).fill(text)
    page.locator("summary").click()
    command = shlex.split(page.locator("#curl").inner_text().replace("\\\n", " "))
    url, (header, value), body = command[1], command[3].split(": "), command[5]
    answer = httpx.post(url, headers={header: value}, content=body)
    assert command[0] == "curl" and url == f"{server.url}v1/classify"
    assert answer.status_code == 200, answer.text
    assert answer.json()["results"][0]["budget"]["steps"] == ladder(server, "critic")[-1]


def test_a_ladder_without_latency_is_drawn_by_work(page: Page) -> None:
    pick(page, "unmeasured")
    expect(page.locator("#frontier-title")).to_have_text("Quality against work")
    expect(page.locator("#frontier .rung")).to_have_count(3)
    page.get_by_role("button", name="Classify").click()
    expect(page.locator("#history tbody tr")).to_have_count(1)


def test_examples_fill_the_text(page: Page) -> None:
    pick(page, "critic")
    second = page.locator("#examples button").nth(1)
    second.click()
    expect(page.locator("#input")).to_have_value(second.get_attribute("title") or "")
    expect(page.locator("#scores li")).to_have_count(2)


def test_a_fault_of_the_page_is_shown(browser: Browser, server: Served) -> None:
    with opened(browser, server.url) as (page, _):
        expect(page.locator("#playground")).to_be_visible()
        page.evaluate("() => { setTimeout(() => { throw new Error('a planted fault'); }); }")
        expect(page.locator("#banner")).to_contain_text("a planted fault")
        page.get_by_role("button", name="Dismiss").click()
        expect(page.locator("#banner")).to_be_hidden()


def test_a_server_without_models_says_how_to_start_one(browser: Browser, server: Served) -> None:
    def none(route: Route) -> None:
        route.fulfill(json={"object": "list", "data": []})

    with opened(browser, server.url) as (page, _):
        page.route("**/v1/models", none)
        page.reload()
        expect(page.locator("#notice")).to_contain_text("stepdial serve BUNDLE")
        page.unroute("**/v1/models")
        page.get_by_role("button", name="Try again").click()
        expect(page.locator("#playground")).to_be_visible()


def test_a_server_that_is_gone_is_named(browser: Browser, tmp_path: Path) -> None:
    build_classify(tmp_path / "critic", name="critic")
    with (
        served([tmp_path / "critic"]) as running,
        opened(browser, running.url) as (page, _),
    ):
        expect(page.locator("#playground")).to_be_visible()
        running.stop()
        page.get_by_role("button", name="Classify").click()
        expect(page.locator("#failure")).to_contain_text("The server does not answer")
        expect(page.locator("#banner")).to_be_hidden()
