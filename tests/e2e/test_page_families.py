"""The playground page with models of images, points and translation, in a real Chromium."""

import base64
import io
import json
import re
from collections.abc import Iterator

import pytest
from PIL import Image
from playwright.sync_api import Browser, Page, expect

from tests.e2e.browser import (
    Complaints,
    Served,
    opened,
    pick,
    served,
    sound,
)
from tests.fixtures.tiny_folders import (
    generate_bundle,
    image_bundle,
    points_bundle,
    translate_bundle,
)

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    bundles = (generate_bundle(), image_bundle(), points_bundle(), translate_bundle())
    with served([bundle.folder for bundle in bundles]) as running:
        yield running


@pytest.mark.long
def test_a_drawing_is_labelled(page: Page) -> None:
    pick(page, "tiny-image")
    expect(page.locator("#input")).to_be_hidden()
    canvas = page.locator("#canvas")
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    assert box is not None and box["height"] > box["width"]  # 6 x 5
    code = page.locator("#code").inner_text()
    canvas.click(button="right")  # opens a menu, and draws nothing
    assert page.locator("#code").inner_text() == code
    page.mouse.move(box["x"] + 20, box["y"] + 20)
    page.mouse.down()
    page.mouse.move(box["x"] + 100, box["y"] + 100, steps=4)
    page.mouse.up()
    scores = page.locator(".scores").first
    expect(scores.locator("li")).to_have_count(4)
    drawn = scores.inner_text()
    page.get_by_role("button", name="Clear the picture").click()
    page.get_by_role("button", name="Classify").click()
    expect(scores).not_to_have_text(drawn)
    assert sound(page)


def picture(colour: str) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (300, 200), colour).save(stream, "PNG")
    return stream.getvalue()


def test_a_file_is_labelled(page: Page) -> None:
    pick(page, "tiny-image")
    file = {"name": "white.png", "mimeType": "image/png", "buffer": picture("white")}
    page.get_by_label("Image file").set_input_files(file)  # type: ignore[arg-type]  # a plain dict stands for its TypedDict
    scores = page.locator(".scores").first
    expect(scores.locator("li")).to_have_count(4)
    assert "data:image/png;base64," in page.locator("#code").inner_text()
    white = scores.inner_text()
    page.get_by_role("button", name="Invert").click()
    expect(scores).not_to_have_text(white)


@pytest.mark.parametrize("way", ["drop", "paste"])
def test_a_picture_that_is_dropped_or_pasted_is_labelled(page: Page, way: str) -> None:
    pick(page, "tiny-image")
    page.evaluate(
        """([base64, way]) => {
            const bytes = Uint8Array.from(atob(base64), letter => letter.charCodeAt(0));
            const transfer = new DataTransfer();
            transfer.items.add(new File([bytes], "blue.png", { type: "image/png" }));
            const given = { bubbles: true, cancelable: true };
            const event = way === "drop"
                ? new DragEvent("drop", { ...given, dataTransfer: transfer })
                : new ClipboardEvent("paste", { ...given, clipboardData: transfer });
            document.getElementById("canvas").dispatchEvent(event);
        }""",
        [base64.b64encode(picture("blue")).decode(), way],
    )
    expect(page.locator(".scores").first.locator("li")).to_have_count(4)
    expect(page.locator("#picture-help")).not_to_have_class(re.compile("bad"))


def test_what_is_no_picture_is_said_to_be_none(page: Page) -> None:
    pick(page, "tiny-image")
    file = {"name": "text.png", "mimeType": "image/png", "buffer": b"text"}
    page.get_by_label("Image file").set_input_files(file)  # type: ignore[arg-type]  # as above
    expect(page.locator("#picture-help")).to_contain_text("no image that the browser can read")
    expect(page.locator("#status")).to_contain_text("no image that the browser can read")


def test_a_picture_takes_the_place_of_another_and_of_its_fault(page: Page) -> None:
    pick(page, "tiny-image")
    chooser, canvas = page.get_by_label("Image file"), page.locator("#canvas")
    scores = page.locator(".scores").first

    def choose(content: bytes) -> None:
        file = {"name": "one.png", "mimeType": "image/png", "buffer": content}
        chooser.set_input_files(file)  # type: ignore[arg-type]  # as above

    choose(picture("white"))
    expect(scores.locator("li")).to_have_count(4)
    stream = io.BytesIO()
    Image.new("RGBA", (30, 20), (0, 0, 0, 0)).save(stream, "PNG")
    choose(stream.getvalue())  # transparent: on black, not on the white one
    page.wait_for_function(
        "canvas => canvas.getContext('2d').getImageData(0, 0, 1, 1).data[0] === 0",
        arg=canvas.element_handle(),
    )
    # One that takes long to read, and is chosen away meanwhile.
    page.evaluate("""() => {
        const read = window.createImageBitmap;
        window.createImageBitmap = async blob => {
            window.createImageBitmap = read;
            await new Promise(later => { window.later = later; });
            return read(blob);
        };
    }""")
    choose(picture("white"))
    choose(b"text")
    expect(page.locator("#picture-help")).to_contain_text("no image")
    page.evaluate("() => window.later()")
    page.wait_for_timeout(200)
    expect(page.locator("#picture-help")).to_contain_text("no image")
    page.get_by_role("button", name="Invert").click()
    expect(page.locator("#picture-help")).not_to_contain_text("no image")
    page.get_by_role("button", name="Clear the picture").click()
    expect(scores.locator("li")).to_have_count(0)  # no answer without a picture
    choose(picture("white"))
    expect(scores.locator("li")).to_have_count(4)
    pick(page, "tiny-generate")
    pick(page, "tiny-image")
    expect(scores.locator("li")).to_have_count(4)  # it is still there


def test_points_are_labelled_and_mistakes_explained(browser: Browser, server: Served) -> None:
    with opened(browser, server.url) as (page, complaints):
        pick(page, "tiny-points")
        page.locator("#input").fill(json.dumps([[0, 0, 1], [1, 0, 0], [0, 1, 0]]))
        page.get_by_role("button", name="Classify").click()
        expect(page.locator(".scores").first.locator("li")).to_have_count(4)
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
    expect(page.locator(".timing").first).to_contain_text("stop")
    page.get_by_label("Beams").fill("4")
    page.get_by_role("button", name="Every step count").click()
    expect(page.locator("#history tbody tr")).to_have_count(3)
    expect(page.locator("#code")).to_contain_text("num_beams")
    assert page.locator(".text").first.inner_text().startswith("Zwei Hunde\n")
    # The text of beams comes in one piece, which is not one token.
    written = page.locator(".timing dt").get_by_text("Tokens", exact=True).locator("+ dd")
    count = written.inner_text()
    assert int(count) > 1
    expect(page.locator("#status")).to_contain_text(f"{count} tokens in")
    page.get_by_role("radio", name="Side by side").check(force=True)
    page.get_by_role("button", name="Translate").click()
    told = page.locator("#status")
    expect(told).to_contain_text(re.compile("^(The texts differ|Both texts are the same)"))
    page.get_by_role("radio", name="Deadline").check(force=True)
    page.get_by_role("slider", name="Deadline").press("End")
    limit = translate_bundle().manifest.target_max_tokens
    assert limit is not None and limit < 128  # what a text has at most where nothing is said
    expect(page.locator("#trade")).to_contain_text(f"would have {limit} tokens ready")
    pick(page, "tiny-generate")
    expect(page.get_by_label("Beams")).to_be_hidden()
    expect(page.locator("#temperature")).to_have_value("0.8")
    assert sound(page)
