"""The playground page with models that label each token, in a real Chromium."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Response, expect

from tests.e2e.browser import Complaints, Served, opened, pick, served, sound
from tests.fixtures.tiny_folders import generate_bundle, square_bundle, tag_bundle, words_tag_bundle

pytestmark = pytest.mark.browser
PUZZLE = "12.4..3.5126.3.4"  # a square of four


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    bundles = (generate_bundle(), tag_bundle(), words_tag_bundle(), square_bundle())
    with served([bundle.folder for bundle in bundles]) as running:
        yield running


def traced(response: Response) -> bool:
    return '"trace":true' in (response.request.post_data or "")


@pytest.mark.long
def test_the_answer_forms_step_by_step(page: Page) -> None:
    page.emulate_media(reduced_motion="reduce")
    pick(page, "tiny-tag")
    page.get_by_role("textbox", name="Text").fill(PUZZLE)
    sent: list[dict[str, Any]] = []
    page.on("request", lambda request: sent.append(json.loads(request.post_data or "{}")))
    with page.expect_response(traced) as answered:
        page.get_by_role("button", name="Label").click()
    (result,) = answered.value.json()["results"]
    # The answer that is timed has no trace; the steps are asked for apart, at its step count.
    bodies = [body for body in sent if "input" in body]
    assert [body.get("trace") for body in bodies] == [None, True]
    assert bodies[1]["steps"] == result["budget"]["steps"] == 8
    trace = [readout["labels"] for readout in result["trace"]]
    pane = page.locator(".pane").first
    cells = pane.locator(".cells.puzzle li")
    expect(cells).to_have_count(16)
    assert cells.locator("b").all_inner_texts() == [token["label"] for token in result["tokens"]]
    assert page.locator(".cells .given").count() == sum(
        character != "." for character in PUZZLE if character in result["text"]
    )
    shown = pane.get_by_role("slider", name="First answer: the step that is shown")
    expect(shown).to_have_value("8")
    shown.fill("1")
    assert cells.locator("b").all_inner_texts() == trace[0]
    expect(pane).to_contain_text("After 1 step: what one step reads out.")
    for step in range(2, 9):
        shown.press("ArrowRight")
        assert cells.locator("b").all_inner_texts() == trace[step - 1]
        changed = sum(a != b for a, b in zip(trace[step - 1], trace[step - 2], strict=True))
        expect(pane.locator(".cells .changed")).to_have_count(changed)
        expect(pane).to_contain_text(f"After {step} steps: {changed} of 16 labels changed.")
    assert any(a != b for a, b in zip(trace[1:], trace, strict=False))
    assert sound(page)


@pytest.mark.long
def test_the_steps_are_played_once_for_an_input_and_again_when_asked(page: Page) -> None:
    pick(page, "tiny-tag")
    page.get_by_role("textbox", name="Text").fill(PUZZLE)
    page.get_by_role("button", name="Label").click()
    pane = page.locator(".pane").first
    shown = pane.get_by_role("slider", name="First answer: the step that is shown")
    expect(shown).to_have_value("3")
    expect(shown).to_have_value("8")
    page.get_by_role("button", name="Label").click()
    expect(shown).to_have_value("8")
    pane.get_by_role("button", name="Play the steps").click()
    expect(shown).to_have_value("1")
    expect(shown).to_have_value("8")


def test_a_text_of_a_fixed_length_says_how_long_it_is(page: Page) -> None:
    pick(page, "tiny-tag")
    note = page.locator("#input-note")
    expect(note).to_be_hidden()
    pick(page, "square")
    box = page.get_by_role("textbox", name="Text")
    box.fill(PUZZLE[:15])
    expect(note).to_have_text("Exactly 16 tokens. Now: 15 characters.")
    expect(box).to_have_accessible_description("Exactly 16 tokens. Now: 15 characters.")
    box.press_sequentially(PUZZLE[15])
    expect(note).to_have_text("Exactly 16 tokens. Now: 16 characters.")
    page.get_by_role("button", name="Label").click()
    expect(page.locator(".pane").first.locator(".cells.puzzle li")).to_have_count(16)
    assert sound(page)


def test_words_have_their_labels_and_two_answers_are_compared(page: Page) -> None:
    page.emulate_media(reduced_motion="reduce")
    pick(page, "tiny-tag-words")
    page.get_by_role("textbox", name="Text").fill("a good film is long")
    page.get_by_role("radio", name="Side by side").check(force=True)
    page.get_by_role("button", name="Label").click()
    line = page.locator(".pane").first.locator(".cells.line li")
    expect(line.first).to_contain_text("a")
    labels = set(line.locator("b").all_inner_texts())
    assert labels and labels <= {"other", "person", "place"}
    expect(page.locator("#difference")).to_contain_text("label")
    assert sound(page)


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 768, 1280])
def test_the_grid_looks_right(browser: Browser, server: Served, width: int, theme: str) -> None:
    size = {"width": width, "height": 900}
    motion = {"reduced_motion": "reduce", "color_scheme": theme}
    with opened(browser, server.url, viewport=size, **motion) as (page, complaints):
        expect(page.locator("#playground")).to_be_visible()
        pick(page, "tiny-tag")
        page.get_by_role("textbox", name="Text").fill(PUZZLE)
        page.get_by_role("button", name="Label").click()
        cells = page.locator(".cells.puzzle li")
        expect(cells).to_have_count(16)
        boxes = [cell.bounding_box() for cell in cells.all()]
        assert all(box is not None and abs(box["width"] - box["height"]) < 2 for box in boxes)
        assert len({round(box["y"]) for box in boxes if box is not None}) == 4
        assert sound(page)
        assert complaints == Complaints(server.url)
