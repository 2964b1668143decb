"""The playground page, driven in a real Chromium against the real server process.

It deliberately looks through the page alone: what the server answers has tests of its own.
"""

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from playwright.sync_api import Page, Request, Route, expect

from serve.bundle import Calibration, Level
from tests.e2e.browser import Served, pick, served
from tests.fixtures.tiny_bundles import build_classify, build_generate

pytestmark = pytest.mark.browser

DEEP_STEPS = 48
# The tiny classifier's answers are ahead by 0.02 to 0.7: the loosest level always jumps.
CALIBRATION = Calibration(
    rows=3000,
    confidence=0.95,
    source="made up",
    levels=(Level(0.01, 0.9, 3.9, 0.0), Level(0.1, 0.0, 1.0, 0.1)),
)
TOKENS = """pane => [...pane.querySelectorAll(".token")].map(token => ({
    text: token.textContent, title: token.title, depth: token.style.getPropertyValue("--depth"),
    differs: token.classList.contains("differs"), parts: token.classList.contains("parts") }))"""
FIRST_STREAMS = """() => {
    const pane = document.querySelector(".pane");
    return pane.classList.contains("streaming") && pane.querySelectorAll(".token").length > 3; }"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("bundles")
    build_generate(folder / "writer", name="writer")
    build_classify(folder / "critic", name="critic")
    build_classify(folder / "sure", name="sure", calibration=CALIBRATION)
    build_generate(folder / "slow", name="slow", steps=(1, DEEP_STEPS), max_tokens=2048)
    build_classify(folder / "unmeasured", name="unmeasured", latency=False)
    names = ("writer", "critic", "sure", "slow", "unmeasured")
    with served([folder / name for name in names]) as running:
        yield running


def rows(page: Page) -> list[str]:
    return page.locator("#history tbody tr td:first-child").all_inner_texts()


def timing(page: Page, name: str, pane: int = 0) -> str:
    # The whole name: "Tokens" must not find "Tokens/s".
    term = page.locator("dt").get_by_text(name, exact=True)
    shown = page.locator(".pane").nth(pane)
    return shown.locator(".timing div").filter(has=term).locator("dd").inner_text()


def tokens(page: Page, pane: int = 0) -> list[dict[str, Any]]:
    shown: list[dict[str, Any]] = page.locator(".pane").nth(pane).evaluate(TOKENS)
    return shown


def legend(page: Page) -> list[str]:
    return [text.replace("\n", "") for text in page.locator("#shades-list li").all_inner_texts()]


def ladder(server: Served, model: str) -> list[int]:
    answer = httpx.get(f"{server.url}v1/models/{model}/ladder").json()
    return [rung["steps"] for rung in answer["rungs"]]


def turn(page: Page, way: str) -> None:
    page.get_by_role("radio", name=way).check(force=True)


@pytest.mark.long
def test_generation_streams_with_each_token_shaded_by_its_steps(page: Page) -> None:
    pick(page, "writer")
    page.get_by_role("textbox", name="Prompt", exact=True).fill("To be")
    page.get_by_role("spinbutton", name="Tokens").fill("17")
    dial = page.get_by_role("slider", name="Number of steps")
    dial.press("Home")
    expect(page.locator("#count")).to_have_text("1")
    dial.press("ArrowRight")
    expect(page.locator("#count")).to_have_text("2")
    spoken = re.compile(r"^2 steps, medium effort, loss 1\.900, \d+\.?\d* m?s$")
    expect(dial).to_have_attribute("aria-valuetext", spoken)
    page.get_by_role("button", name="Generate").click()
    expect(page.locator(".pane").first).to_contain_text("Ended by")
    expect(page.locator(".pane").first).to_contain_text("2 of 4 steps: as asked.")
    assert page.locator(".text").first.inner_text().startswith("To be")
    assert timing(page, "Ended by") == "length" and timing(page, "Tokens") == "17"
    assert timing(page, "Tokens/s") != "–" and timing(page, "First token").endswith("s")
    assert rows(page) == ["2"]
    shown = tokens(page)
    assert len(shown) == 17
    assert {token["depth"] for token in shown} == {"0.683"}  # log 3 / log 5
    assert shown[4]["title"] == "Token 5: 2 steps of 4"
    assert legend(page) == ["1", "2· 17 tokens", "4"]
    expect(page.locator("#status")).to_contain_text("each 2 of 4 steps")
    expect(page.locator("#answers")).to_have_attribute("aria-busy", "false")
    # Only the end is spoken: a region that speaks each token would never be silent.
    assert page.locator("#answers [aria-live], #answers [role=status]").count() == 0


@pytest.mark.parametrize("by", ["Escape", "button"])
def test_two_answers_come_one_after_the_other_and_both_stop(page: Page, by: str) -> None:
    pick(page, "slow")
    turn(page, "Side by side")
    expect(page.get_by_label("Steps of the second answer")).to_have_value("1")
    page.get_by_role("spinbutton", name="Tokens").fill("2000")
    page.get_by_role("button", name="Generate").click()
    page.wait_for_function(FIRST_STREAMS)
    expect(page.locator("#answers")).to_have_attribute("aria-busy", "true")
    if by == "Escape":
        composing = {"key": "Escape", "isComposing": True}  # ends what an input method offers
        page.locator("#input").dispatch_event("keydown", composing)
        page.wait_for_timeout(200)
        expect(page.locator("#status")).to_have_text("Writing.")
        page.keyboard.press("Escape")
    else:
        page.get_by_role("button", name="Stop").click()
    expect(page.locator("#status")).to_have_text("Stopped.")
    expect(page.locator("#answers")).to_have_attribute("aria-busy", "false")
    expect(page.get_by_role("button", name="Stop")).to_be_hidden()
    expect(page.get_by_role("button", name="Generate")).to_be_focused()
    assert 0 < len(tokens(page, 0)) < 2000
    assert tokens(page, 1) == []  # it had not begun
    assert rows(page) == []


def test_differing_tokens_are_marked_and_both_times_shown(page: Page) -> None:
    sent: list[Request] = []
    before: list[str] = []
    page.on("request", lambda request: sent.append(request))

    def watched(route: Route) -> None:
        before.append(page.locator(".pane .timing").first.inner_text())
        route.continue_()

    page.route("**/v1/generate", watched)
    pick(page, "writer")
    turn(page, "Side by side")
    # The tiny weights differ little with the steps: far from sure, and at length, it shows.
    for name, value in (("Tokens", "150"), ("Temperature", "2"), ("Seed", "0")):
        page.get_by_role("spinbutton", name=name).fill(value)
    page.get_by_role("button", name="Generate").click()
    # Two answers in turn, of 150 tokens each.
    expect(page.locator("#status")).to_contain_text("differ", timeout=20_000)
    first, second = tokens(page, 0), tokens(page, 1)
    differing = [a["text"] != b["text"] for a, b in zip(first, second, strict=True)]
    for shown in (first, second):
        assert [token["differs"] for token in shown] == differing
        assert [token["parts"] for token in shown].index(True) == differing.index(True)
    at = differing.index(True)
    assert first[at]["title"].startswith(f"Token {at + 1}: 4 steps of 4; the other answer has ")
    told = page.locator("#difference").inner_text()
    total = [timing(page, "Total", pane) for pane in (0, 1)]
    assert re.search(rf"{re.escape(total[0])} at 4 steps, {re.escape(total[1])} at 1 step", told)
    bodies = [json.loads(request.post_data or "") for request in sent if request.method == "POST"]
    assert [body.pop("steps") for body in bodies] == [4, 1] and bodies[0] == bodies[1]
    assert sorted(rows(page)) == ["1", "4"]
    # Never two at once: the first had ended when the second was sent.
    assert ["Ended by" in shown for shown in before] == [False, True]
    page.get_by_role("radio", name="critic").check(force=True)
    page.get_by_role("button", name="Classify").click()
    expect(page.locator("#difference")).to_contain_text(re.compile("Both say|They disagree"))
    turn(page, "One answer")
    page.get_by_role("textbox", name="Text", exact=True).fill("another text")
    page.get_by_role("button", name="Classify").click()
    expect(page.locator("#history tbody tr")).to_have_count(3)
    turn(page, "Side by side")
    expect(page.locator(".pane").nth(1).locator(".scores li")).to_have_count(0)


def test_turning_the_dial_classifies_again(page: Page, server: Served) -> None:
    pick(page, "critic")
    page.get_by_role("textbox", name="Text", exact=True).fill("a wonderful evening")
    page.get_by_role("button", name="Classify").click()
    pane = page.locator(".pane").first
    expect(pane.locator(".scores li")).to_have_count(2)
    full = ladder(server, "critic")[-1]
    expect(pane).to_contain_text(f"{full} of {full} steps: as asked.")
    page.get_by_role("slider", name="Number of steps").press("Home")
    expect(page.locator("#history tbody tr")).to_have_count(2)
    expect(pane).to_contain_text(f"1 of {full} steps: as asked.")
    assert rows(page) == ["1", str(full)]
    expect(pane.locator(".scores li.best")).to_have_count(1)
    label, share = (pane.locator(f".scores .best {part}").inner_text() for part in ("span", "b"))
    newest = page.locator("#history tbody tr").first.locator("td").last
    expect(newest).to_have_text(f"{label}, {share}")  # a label may be a number too
    shares = pane.locator(".scores b").all_inner_texts()
    assert sum(float(share.removesuffix(" %")) for share in shares) == pytest.approx(100, abs=0.11)


def test_labels_that_are_slow_to_come_can_be_stopped(page: Page) -> None:
    pick(page, "critic")
    held: list[Route] = []
    page.route("**/v1/classify", lambda route: held.append(route))
    page.get_by_role("button", name="Classify").click()
    page.get_by_role("button", name="Stop").click()
    expect(page.locator("#status")).to_have_text("Stopped.")
    expect(page.get_by_role("button", name="Stop")).to_be_hidden()
    expect(page.get_by_role("button", name="Classify")).to_be_focused()
    for route in held:
        route.abort()
    page.unroute("**/v1/classify")
    page.get_by_role("button", name="Classify").click()
    expect(page.locator(".scores li")).to_have_count(2)
    page.wait_for_timeout(700)
    expect(page.get_by_role("button", name="Stop")).to_be_hidden()


def test_agreement_stops_early_and_says_after_how_many_steps(page: Page) -> None:
    pick(page, "critic")
    expect(page.get_by_role("radio", name="Agreement")).to_be_hidden()
    pick(page, "sure")
    turn(page, "Agreement")
    slider = page.get_by_role("slider", name="Answers that may differ from those of all steps")
    slider.press("End")
    expect(slider).to_have_attribute("aria-valuetext", "at most 10 % differ")
    pane = page.locator(".pane").first
    expect(pane).to_contain_text("1 of 4 steps: sure enough to jump to the end; at most 10 %")
    expect(page.locator("#hops .jump")).to_have_count(1)
    expect(page.locator("#code")).to_contain_text('"max_disagreement":0.1')
    slider.press("Home")
    expect(pane).to_contain_text("4 of 4 steps: not sure before the end; at most 1 %")
    expect(page.locator("#hops .jump")).to_have_count(0)


def predictions(route: Route, milliseconds: float, caution: float = 1.0) -> None:
    """The ladder as the server has it, but for what it predicts: so long for each step."""
    answer = route.fetch()
    body = answer.json()
    for rung in body["rungs"]:
        rung["predicted_ms"] = milliseconds * rung["steps"]
    body |= {"caution": caution, "answer_ms": 0.0}
    route.fulfill(response=answer, json=body)


def ask_within_a_deadline(page: Page) -> None:
    """For 100 tokens of a writer whose every step takes a millisecond."""
    pick(page, "critic")
    page.route("**/ladder", lambda route: predictions(route, 1))
    pick(page, "writer")
    page.get_by_role("spinbutton", name="Tokens").fill("100")
    turn(page, "Deadline")


@pytest.mark.long
def test_the_deadline_shows_the_rung_that_the_present_load_allows(page: Page) -> None:
    ask_within_a_deadline(page)
    slider, count = page.get_by_role("slider", name="Deadline"), page.locator("#count")
    marks = page.locator("#deadline-scale button")
    expect(marks).to_have_count(3)
    marks.first.click()  # the latest: 4 steps, 400 ms
    expect(slider).to_have_attribute("aria-valuetext", "410 ms, 4 steps picked")
    expect(count).to_have_text("4")
    slider.press("ArrowLeft")
    slider.press("ArrowLeft")
    expect(slider).to_have_attribute("aria-valuetext", re.compile(r"^3\d0 ms, 2 steps picked$"))
    expect(page.locator("#frontier .late")).to_have_count(1)
    slider.press("Home")
    expect(count).to_have_text("–")
    expect(page.locator("#trade")).to_contain_text("the server would refuse")
    marks.first.click()
    page.unroute("**/ladder")
    page.route("**/ladder", lambda route: predictions(route, 2.5, caution=1.5))
    expect(count).to_have_text("1", timeout=8000)  # by itself: much waits now
    mark = page.locator("#frontier .rung").first
    expect(mark).to_have_attribute("aria-label", re.compile("1 step: .*, 2.50 ms, measured "))


def test_step_counts_of_another_model_do_not_slip_under_the_dial(page: Page) -> None:
    pick(page, "writer")
    count = page.locator("#count")
    expect(count).to_have_text("4")

    def replaced(route: Route) -> None:
        answer = route.fetch()
        body = answer.json()
        body["rungs"][-1]["steps"] = 8
        route.fulfill(response=answer, json=body)

    page.route("**/ladder", replaced)
    with page.expect_response("**/ladder"):
        turn(page, "Deadline")
    page.wait_for_timeout(200)
    turn(page, "Steps")
    expect(count).to_have_text("4")
    expect(page.locator("#scale .on b")).to_have_text("4")


def test_the_first_deadline_lies_on_the_scale_of_what_is_asked(page: Page) -> None:
    pick(page, "critic")
    page.route("**/ladder", lambda route: predictions(route, 1))
    pick(page, "writer")
    slider = page.get_by_role("slider", name="Deadline", include_hidden=True)
    page.get_by_role("spinbutton", name="Tokens").fill("4000")
    page.get_by_role("spinbutton", name="Tokens").fill("5")
    turn(page, "Deadline")
    expect(slider).to_have_value("85")
    told = slider.get_attribute("aria-valuetext")
    page.get_by_role("spinbutton", name="Tokens").fill("4")  # what was seen is kept
    assert told is not None
    expect(slider).to_have_attribute("aria-valuetext", told)


def test_an_answer_within_a_deadline_says_why_it_got_its_steps(page: Page) -> None:
    pick(page, "writer")
    turn(page, "Deadline")
    page.get_by_role("slider", name="Deadline").press("End")
    page.get_by_role("button", name="Generate").click()
    told = re.compile(r"of 4 steps: the most that were predicted to make .* \(reason: deadline\)")
    expect(page.locator(".pane").first).to_contain_text(told)
    expect(page.locator("#trade")).to_contain_text("The last answer took")


def test_the_dial_drags_to_the_nearest_rung(page: Page) -> None:
    pick(page, "writer")
    box = page.get_by_role("slider", name="Number of steps").bounding_box()
    assert box is not None
    middle = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + box["width"] - 20, middle)
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


def test_every_step_count_is_sent_in_turn(page: Page, server: Served) -> None:
    pick(page, "critic")
    page.get_by_role("button", name="Every step count").click()
    steps = ladder(server, "critic")
    expect(page.locator("#history tbody tr")).to_have_count(len(steps))
    assert rows(page) == [str(count) for count in reversed(steps)]
    page.get_by_role("button", name="Clear").click()
    assert rows(page) == []
    expect(page.locator("#history")).to_be_focused()


def test_the_table_keeps_no_more_than_it_shows(page: Page) -> None:
    kept = page.evaluate("""async () => {
        const { createHistory } = await import("/static/history.js");
        const table = createHistory(document.createElement("div"));
        for (let i = 0; i < 100; i += 1) table.add("model", { steps: i });
        return table.size("model");
    }""")
    assert kept == 8


def test_a_ladder_without_latency_is_drawn_by_work(page: Page) -> None:
    pick(page, "unmeasured")
    page.route("**/ladder", lambda route: route.abort())  # its first call makes it known
    expect(page.locator("#frontier .rung")).to_have_count(3)
    titles = re.compile("Quality against (work|latency)")
    expect(page.locator("#frontier-title")).to_have_text(titles)


def test_a_hidden_field_keeps_nothing_from_being_sent(page: Page) -> None:
    pick(page, "writer")
    page.get_by_role("spinbutton", name="Temperature").fill("5")
    pick(page, "critic")
    page.get_by_role("button", name="Classify").click()
    expect(page.locator(".pane .scores li").first).to_be_visible()


@pytest.mark.parametrize("button", ["Generate", "Every step count"])
def test_a_number_that_cannot_be_sent_as_it_stands_is_not_sent(page: Page, button: str) -> None:
    pick(page, "writer")
    sent: list[Request] = []
    page.on("request", lambda request: sent.append(request))
    # A number of JavaScript would be another one; a temperature is at most 2.
    for name, value in (("Seed", "9007199254740993"), ("Temperature", "5")):
        field = page.get_by_role("spinbutton", name=name)
        usual = field.input_value()
        field.fill(value)
        page.get_by_role("button", name=button).click()
        expect(field).to_be_focused()
        field.fill(usual)
    assert [request.url for request in sent if request.method == "POST"] == []


def test_arrows_reach_every_deadline(page: Page) -> None:
    ask_within_a_deadline(page)
    slider = page.get_by_role("slider", name="Deadline")
    for end, arrow, reached in (("Home", "ArrowRight", "100"), ("End", "ArrowLeft", "0")):
        slider.press(end)
        for _ in range(100):
            slider.press(arrow)
        expect(slider).to_have_value(reached)


def test_the_heading_is_of_the_answer_below_it(page: Page) -> None:
    pick(page, "writer")
    page.get_by_role("spinbutton", name="Tokens").fill("5")
    dial = page.get_by_role("slider", name="Number of steps")
    dial.press("Home")
    page.get_by_role("button", name="Generate").click()
    pane = page.locator(".pane").first
    expect(pane).to_contain_text("1 of 4 steps: as asked.")
    dial.press("End")
    expect(pane.locator("h3")).to_have_text("1 step")
    page.get_by_role("button", name="Generate").click()
    expect(pane.locator("h3")).to_have_text("4 steps")
    turn(page, "Side by side")
    page.get_by_role("button", name="Generate").click()
    expect(page.locator("#status")).to_contain_text(re.compile("differ|same"), timeout=20_000)
    assert legend(page) == ["1· 5 tokens", "2", "4· 5 tokens"]
    turn(page, "One answer")
    assert legend(page) == ["1", "2", "4· 5 tokens"]
    turn(page, "Side by side")
    page.get_by_label("Steps of the second answer").select_option("2")
    assert tokens(page, 1) == [] and len(tokens(page, 0)) == 5
    assert legend(page) == ["1", "2", "4· 5 tokens"]


def test_a_model_that_is_left_while_it_writes_can_be_asked_again(page: Page) -> None:
    pick(page, "slow")
    page.get_by_role("spinbutton", name="Tokens").fill("2000")

    def slowly(route: Route) -> None:
        time.sleep(0.3)
        route.continue_()

    page.route("**/critic/ladder", slowly)
    page.get_by_role("radio", name="critic").check(force=True)
    page.keyboard.press("Control+Enter")  # before the other is there
    expect(page.locator("#input-label")).to_have_text("Text")
    expect(page.get_by_role("button", name="Stop")).to_be_hidden()
    pick(page, "writer")
    expect(page.get_by_role("button", name="Generate")).to_have_attribute("aria-disabled", "false")


def test_a_text_that_was_cut_is_said_to_be(page: Page) -> None:
    pick(page, "critic")
    page.get_by_role("textbox", name="Text", exact=True).fill("a fine film " * 200)
    page.get_by_role("button", name="Classify").click()
    pane = page.locator(".pane").first
    expect(pane).to_contain_text("too long for the model: only a part of it was read")
    page.get_by_role("textbox", name="Text", exact=True).fill("a fine film")
    page.get_by_role("button", name="Classify").click()
    expect(pane).not_to_contain_text("too long")


def test_the_skip_link_goes_to_the_input_and_leaves_the_address(page: Page) -> None:
    pick(page, "critic")
    expect(page).to_have_url(re.compile("#model=critic"))
    page.locator(".skip").focus()
    page.keyboard.press("Enter")
    expect(page.locator("#input")).to_be_focused()
    expect(page).to_have_url(re.compile("#model=critic"))
