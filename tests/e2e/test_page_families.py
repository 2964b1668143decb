"""The playground page with models of images, points and translation, in a real Chromium."""

import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image
from playwright.sync_api import Browser, Page, expect

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
from tests.tiny_folders import generate_bundle, image_bundle, points_bundle, translate_bundle

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def browser(chromium: Path) -> Iterator[Browser]:
    with started_browser(chromium) as running:
        yield running


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    bundles = (generate_bundle(), image_bundle(), points_bundle(), translate_bundle())
    with served([bundle.folder for bundle in bundles]) as running:
        yield running


@pytest.fixture
def page(browser: Browser, server: Served) -> Iterator[Page]:
    with playground(browser, server.url) as ready:
        yield ready


def sound(page: Page) -> bool:
    faults = audit(page)
    faults.pop("measured")
    return faults == {"contrast": [], "name": [], "overflow": []}


def test_a_drawing_is_labelled(page: Page) -> None:
    pick(page, "tiny-image")
    expect(page.locator("#input")).to_be_hidden()
    canvas = page.locator("#canvas")
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    assert box is not None and box["height"] > box["width"]  # 6 x 5
    page.mouse.move(box["x"] + 20, box["y"] + 20)
    page.mouse.down()
    page.mouse.move(box["x"] + 100, box["y"] + 100, steps=4)
    page.mouse.up()
    expect(page.locator("#scores li")).to_have_count(4)
    drawn = page.locator("#scores").inner_text()
    page.get_by_role("button", name="Clear the picture").click()
    page.get_by_role("button", name="Classify").click()
    expect(page.locator("#scores")).not_to_have_text(drawn)
    assert sound(page)


def test_a_file_is_labelled(page: Page) -> None:
    pick(page, "tiny-image")
    stream = io.BytesIO()
    Image.new("RGB", (300, 200), "white").save(stream, "PNG")
    file = {"name": "white.png", "mimeType": "image/png", "buffer": stream.getvalue()}
    page.get_by_label("Image file").set_input_files(file)  # type: ignore[arg-type]  # a plain dict stands for its TypedDict
    expect(page.locator("#scores li")).to_have_count(4)
    page.locator("summary").click()
    assert "data:image/png;base64," in page.locator("#curl").inner_text()


def test_points_are_labelled_and_mistakes_explained(browser: Browser, server: Served) -> None:
    with opened(browser, server.url) as (page, complaints):
        pick(page, "tiny-points")
        page.locator("#input").fill(json.dumps([[0, 0, 1], [1, 0, 0], [0, 1, 0]]))
        page.get_by_role("button", name="Classify").click()
        expect(page.locator("#scores li")).to_have_count(4)
        assert complaints == Complaints(server.url)
        page.locator("#input").fill("a cube")
        page.get_by_role("button", name="Classify").click()
        expect(page.locator("#failure-text")).to_contain_text("input.points is no list")
        # The browser itself reports a request that was refused.
        assert len(complaints.console) == 1 and "422" in complaints.console[0]


def test_a_text_is_translated_greedily_and_by_beams(page: Page) -> None:
    pick(page, "tiny-translate")
    expect(page.locator("#temperature")).to_have_value("0")
    page.locator("#input").fill("Zwei Hunde")
    page.get_by_role("button", name="Translate").click()
    expect(page.locator("#timing")).to_contain_text("stop")
    page.get_by_label("Beams").fill("4")
    page.get_by_role("button", name="Compare all steps").click()
    expect(page.locator("#history tbody tr")).to_have_count(3)
    expect(page.locator("#curl")).to_contain_text("num_beams")
    assert page.locator("#text").inner_text().startswith("Zwei Hunde\n")
    pick(page, "tiny-generate")
    expect(page.get_by_label("Beams")).to_be_hidden()
    expect(page.locator("#temperature")).to_have_value("0.8")
    assert sound(page)
