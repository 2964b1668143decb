"""What the playground page lets its reader take away: requests as code, and links; and API keys."""

import contextlib
import io
import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page, Route, expect

from tests.e2e.browser import Served, audit, opened, pick, playground, served
from tests.fixtures.tiny_folders import (
    classify_bundle,
    generate_bundle,
    image_bundle,
    translate_bundle,
)

pytestmark = pytest.mark.browser

KEY = "sd-a-key-that-is-long-enough-for-a-test"
TEXT = "it's \"fine\", isn't it?\n$HOME `no` \\"


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    bundles = (classify_bundle(), generate_bundle(), image_bundle(), translate_bundle())
    with served([bundle.folder for bundle in bundles]) as running:
        yield running


def code(page: Page, language: str) -> str:
    page.get_by_role("tab", name=language).click()
    return page.get_by_role("tabpanel").inner_text()


def printed(program: str) -> str:
    """What a program in Python prints."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        exec(compile(program, "snippet", "exec"), {})
    return output.getvalue()


def logged(page: Page, program: str) -> list[object]:
    """What a program in JavaScript logs first."""
    with page.expect_console_message() as message:
        page.evaluate(f"async () => {{ {program} }}")
    return [argument.json_value() for argument in message.value.args]


@pytest.mark.long
def test_examples_fill_the_text(page: Page) -> None:
    pick(page, "tiny-classify")
    second = page.locator("#examples button").nth(1)
    second.click()
    expect(page.locator("#input")).to_have_value(second.get_attribute("title") or "")
    expect(page.locator(".pane").first.locator(".scores li")).to_have_count(2)


def test_the_curl_command_is_the_request(page: Page, server: Served) -> None:
    pick(page, "tiny-classify")
    page.get_by_role("textbox", name="Text", exact=True).fill(TEXT)
    command = shlex.split(code(page, "curl").replace("\\\n", " "))
    url, (header, value), body = command[1], command[3].split(": "), command[5]
    answer = httpx.post(url, headers={header: value}, content=body)
    assert command[0] == "curl" and url == f"{server.url}v1/classify"
    assert answer.status_code == 200, answer.text
    assert answer.json()["results"][0]["budget"] | {"expected": 0} == {
        "steps": 4, "method": "euler", "nfe": 4, "reason": "exact", "full_steps": 4, "expected": 0,
    }  # fmt: skip


def test_the_curl_command_takes_a_text_longer_than_an_argument(page: Page) -> None:
    pick(page, "tiny-classify")
    page.get_by_role("textbox", name="Text", exact=True).fill("it's \u00fc " * 14_000)
    command = code(page, "curl")
    shell = subprocess.run(
        ["bash"], input=command, capture_output=True, text=True, timeout=20, check=True
    )
    assert json.loads(shell.stdout)["results"][0]["truncated"] is True


def test_every_language_gets_the_text_of_the_page(page: Page) -> None:
    pick(page, "tiny-generate")
    page.get_by_role("textbox", name="Prompt", exact=True).fill("it's (a film),\nisn't it?")
    page.get_by_role("spinbutton", name="Tokens").fill("24")
    page.get_by_role("spinbutton", name="Seed").fill("7")
    page.get_by_role("slider", name="Number of steps").press("Home")
    page.get_by_role("button", name="Generate").click()
    expect(page.locator(".timing").first).to_contain_text("Ended by")
    tokens = page.locator(".token").all_text_contents()
    python = code(page, "Python")
    assert "from openai import OpenAI" in python and 'extra_body={"steps": 1}' in python
    text, _, budget = printed(python).rpartition("\n {")
    assert text == "".join(tokens) and "'reason': 'exact'" in budget
    javascript = logged(page, code(page, "JavaScript"))
    assert javascript[0] == "".join(tokens)
    shell = subprocess.run(
        ["bash", "-c", code(page, "curl")], capture_output=True, text=True, timeout=20, check=True
    )
    assert shell.stdout.count("data: ") == 25 and "event: done" in shell.stdout


def test_python_gets_as_many_tokens_as_the_page_where_none_are_said(page: Page) -> None:
    pick(page, "tiny-generate")
    expect(page.get_by_role("spinbutton", name="Tokens")).to_have_value("")
    python = code(page, "Python")
    page.get_by_role("button", name="Generate").click()
    expect(page.locator(".timing").first).to_contain_text("Ended by")
    written = page.locator(".token").count()
    assert "OpenAI" in python and f"max_tokens={written}," in python


def test_python_without_openai_where_it_has_no_such_request(page: Page) -> None:
    pick(page, "tiny-translate")
    page.get_by_label("Beams").fill("2")
    python = code(page, "Python")
    assert "import httpx" in python and '"num_beams": 2' in python
    assert printed(python).strip() != ""
    pick(page, "tiny-classify")
    assert "'label':" in printed(code(page, "Python"))
    javascript = logged(page, code(page, "JavaScript"))
    assert isinstance(javascript[0], dict) and javascript[0]["budget"]["steps"] == 4


def opened_again(browser: Browser, page: Page) -> contextlib.AbstractContextManager[Page]:
    """A new page at the link that the page copies."""
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.get_by_role("button", name="Copy a link").click()
    expect(page.locator("#copy-link")).to_have_text("Copied")
    return playground(browser, page.evaluate("() => navigator.clipboard.readText()"))


def test_a_link_restores_the_whole_state(browser: Browser, page: Page) -> None:
    pick(page, "tiny-generate")
    page.get_by_role("radio", name="Side by side").check(force=True)
    page.get_by_label("Steps of the second answer").select_option("2")
    page.get_by_role("spinbutton", name="Tokens").fill("12")
    page.get_by_role("spinbutton", name="Temperature").fill("0.5")
    page.get_by_role("button", name="Generate").click()
    expect(page.locator("#status")).to_contain_text("tokens")
    drawn = page.locator(".pane").first.locator("dd").nth(4).inner_text()
    page.get_by_role("textbox", name="Prompt", exact=True).fill("a, b & c = d\n#e + 'f'")
    page.get_by_role("radio", name="Deadline").check(force=True)
    page.get_by_role("slider", name="Deadline").press("End")
    request = code(page, "curl")
    with opened_again(browser, page) as other:
        expect(other.get_by_role("radio", name="tiny-generate")).to_be_checked()
        expect(other.get_by_role("radio", name="Side by side")).to_be_checked()
        expect(other.get_by_role("radio", name="Deadline")).to_be_checked()
        expect(other.get_by_label("Steps of the second answer")).to_have_value("2")
        expect(other.locator("#seed")).to_have_value(drawn)  # so that the text comes again
        seeded = request.replace(',"stream"', f',"seed":{drawn},"stream"')
        assert code(other, "curl") == seeded
        # A link that is put into the address bar of a page that is open.
        other.goto(other.url.split("#")[0] + "#model=tiny-classify&by=steps&steps=2&text=again")
        expect(other.locator("#input")).to_have_value("again")
        expect(other.locator("#count")).to_have_text("2")
        expect(other.get_by_role("radio", name="One answer")).to_be_checked()


def test_a_link_that_cannot_be_copied_stays_to_be_taken(page: Page) -> None:
    pick(page, "tiny-classify")
    page.evaluate("() => { navigator.clipboard.writeText = async () => { throw new Error(); }; }")
    page.get_by_role("radio", name="Deadline").check(force=True)
    expect(page.locator("#history tbody tr")).to_have_count(1)
    page.get_by_role("button", name="Copy a link").click()
    note = page.locator("#code-note")
    expect(note).to_have_text(re.compile(r"/#model=tiny-classify&by=deadline"))
    assert page.evaluate("() => String(getSelection())") == note.inner_text()
    with page.expect_response("**/ladder"):  # the page reads it by itself, and draws again
        pass
    page.wait_for_timeout(200)
    expect(note).to_have_text(re.compile(r"/#model=tiny-classify&by=deadline"))


def test_a_link_keeps_what_was_left_empty(browser: Browser, page: Page) -> None:
    pick(page, "tiny-generate")
    for name in ("Tokens", "Temperature"):
        page.get_by_role("spinbutton", name=name).fill("")
    page.get_by_role("textbox", name="Prompt", exact=True).fill("")
    with opened_again(browser, page) as other:
        for name in ("Tokens", "Temperature"):
            expect(other.get_by_role("spinbutton", name=name)).to_have_value("")
        expect(other.get_by_role("textbox", name="Prompt", exact=True)).to_have_value("")
        other.get_by_role("spinbutton", name="Seed").fill("5")
        expect(other).to_have_url(re.compile("seed=5"))
        other.goto(page.evaluate("() => navigator.clipboard.readText()"))
        expect(other.get_by_role("spinbutton", name="Seed")).to_have_value("")


def test_a_link_holds_a_drawing(browser: Browser, page: Page) -> None:
    pick(page, "tiny-image")
    page.locator("#canvas").click(position={"x": 60, "y": 70})
    expect(page.locator(".scores").first.locator("li")).to_have_count(4)
    shares = page.locator(".scores").first.inner_text()
    with opened_again(browser, page) as other:
        expect(other.locator(".scores").first).to_have_text(shares, use_inner_text=True)


def test_a_link_for_another_server_opens_what_there_is(browser: Browser, server: Served) -> None:
    with playground(browser, f"{server.url}#model=absent&steps=3&by=steps") as page:
        expect(page.get_by_role("alert")).to_contain_text("The link is for absent, which this")
        expect(page.locator("#count")).to_have_text("4")


def with_key(route: Route) -> None:
    route.continue_(headers=route.request.headers | {"authorization": f"Bearer {KEY}"})


@pytest.mark.long
def test_a_key_is_asked_for_kept_for_the_tab_and_forgotten(browser: Browser) -> None:
    folders = [generate_bundle().folder]
    with (
        # It writes less than is usual, which the page does not know.
        served(folders, {"STEPDIAL_API_KEYS": KEY, "STEPDIAL_MAX_TOKENS": "50"}) as locked,
        # As behind a proxy that gives the page to all, but not the interface.
        opened(browser, "about:blank") as (page, complaints),
    ):
        complaints.origin = locked.url
        page.route(lambda url: "/v1/" not in url, with_key)
        page.goto(locked.url)
        dialog = page.get_by_role("dialog", name="This server wants an API key")
        field = page.get_by_label("API key", exact=True)
        expect(field).to_be_focused()
        assert field.get_attribute("type") == "password"
        faults = audit(page)
        assert (faults["contrast"], faults["name"], faults["overflow"]) == ([], [], [])
        field.fill("sd-k\u2011ey")  # as mail programs write it
        field.press("Enter")
        expect(dialog.get_by_role("status")).to_contain_text("No key has such a character")
        expect(field).to_have_accessible_description(re.compile("No key has such a character"))
        field.fill("not-the-key-of-this-server")
        field.press("Enter")
        expect(dialog).to_contain_text("does not know the API key")
        field.fill(KEY)
        page.get_by_role("button", name="Use this key").click()
        expect(page.locator("#playground")).to_be_visible()
        expect(dialog).to_be_hidden()
        page.get_by_role("button", name="Generate").click()
        expect(page.locator(".timing").first).to_contain_text("Ended by")
        expect(page.locator(".token")).to_have_count(50)
        shown = code(page, "curl") + page.url + page.evaluate("() => JSON.stringify(localStorage)")
        assert "$API_KEY" in shown and KEY not in shown
        page.reload()
        expect(page.locator("#playground")).to_be_visible()
        page.get_by_role("button", name="Forget the API key").click()
        with page.expect_response("**/ladder") as answer:  # read by itself: nobody is asked
            page.get_by_role("radio", name="Deadline").check(force=True)
        assert answer.value.status == 401
        page.wait_for_timeout(200)
        expect(dialog).to_be_hidden()
        page.reload()
        expect(dialog).to_be_visible()
        page.keyboard.press("Escape")
        expect(page.locator("#notice")).to_contain_text("The server wants an API key")
        page.goto(f"{locked.url}docs")
        page.get_by_label("API key").fill("sd-k\u2011ey")
        page.get_by_label("API key").press("Tab")
        page.goto(locked.url)
        expect(dialog).to_be_visible()  # no request can carry that key: there is none
        assert complaints.external == []


def test_a_key_in_the_address_is_used_and_not_shown(browser: Browser) -> None:
    with served([classify_bundle().folder], {"STEPDIAL_API_KEYS": KEY}) as locked:
        address = locked.url.replace("://", f"://any:{KEY}@")
        with opened(browser, address) as (page, _):  # a bare page is refused before the key
            page.get_by_role("button", name="Classify").click()
            expect(page.locator(".scores li")).to_have_count(2)
            page.context.grant_permissions(["clipboard-read", "clipboard-write"])
            page.get_by_role("button", name="Copy a link").click()
            expect(page.locator("#copy-link")).to_have_text("Copied")
            link = page.evaluate("() => navigator.clipboard.readText()")
            shown = [code(page, language) for language in ("curl", "Python", "JavaScript")]
            assert f"{locked.url}#model=" in link and f"{locked.url}v1/classify" in shown[0]
            assert KEY not in link + "".join(shown)
            page.goto(f"{address}docs")
            entry = page.locator("#get-v1-models")
            entry.locator("summary", has_text="Try it").click()
            entry.get_by_role("button", name="Send").click()
            expect(entry.locator("[role=status]")).to_contain_text("HTTP 200")


def test_the_reference_fits_a_narrow_screen(browser: Browser, server: Served) -> None:
    page = browser.new_page(viewport={"width": 360, "height": 800})
    page.goto(f"{server.url}docs")
    expect(page.locator("main h2").first).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    page.close()


def test_an_overload_can_be_tried(browser: Browser, server: Served) -> None:
    sent: list[dict[str, Any]] = []
    with opened(browser, server.url) as (page, _):  # a refusal is a line in the console
        expect(page.locator("#playground")).to_be_visible()
        pick(page, "tiny-classify")
        page.on("request", lambda request: sent.append(json.loads(request.post_data or "{}")))

        def typed(route: Route) -> None:
            page.locator("#input").fill("something else")
            route.continue_()

        page.route("**/v1/classify", typed)
        page.get_by_role("button", name="Try it").click()
        expect(page.locator("#burst-status")).to_contain_text("with the deadline", timeout=30_000)
        rows = page.locator("#burst-table tbody tr")
        expect(rows).to_have_count(2)
        expect(rows.first).to_contain_text("All 4 steps")
        expect(rows.last).to_contain_text("The server chooses")
    bodies = [body for body in sent if "input" in body]
    assert [body.get("steps") for body in bodies] == [4] * 6 + [None] * 6
    (deadline_ms,) = {body["deadline_ms"] for body in bodies[6:]}
    assert deadline_ms > 0
    assert len({tuple(body["input"]) for body in bodies}) == 1
