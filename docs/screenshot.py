"""Takes the picture of the page, docs/playground.png: `python -m docs.screenshot`.

A server of the zoo on a free port of this machine, and Chromium. Take it while nothing else
runs: the plot shows what this server measures.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "playground.png"
_MODEL = "logic"
_WIDTH, _HEIGHT = 1280, 1120


def main() -> int:
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium")
    if chromium is None:
        print("no Chromium was found: apt-get install chromium, or name it in CHROMIUM")
        return 1
    command = [sys.executable, "-m", "serve", "--zoo", str(ROOT / "zoo"), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as server:
        try:
            assert server.stdout is not None
            said = (re.search(r"http://\S+", line) for line in server.stdout)
            url = next(found.group() for found in said if found)
            take(url, chromium)
        finally:
            server.terminate()
    print(f"written: {PICTURE.relative_to(ROOT)}")
    return 0


def take(url: str, chromium: str) -> None:
    """The page after every step count of the model has answered its example."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium)
        page = browser.new_page(
            viewport={"width": _WIDTH, "height": _HEIGHT}, reduced_motion="reduce"
        )
        page.goto(f"{url}/#model={_MODEL}")
        for _ in range(2):  # the first request of a connection takes longer: not those are shown
            if (clear := page.get_by_role("button", name="Clear")).is_visible():
                clear.click()
            page.get_by_role("button", name="Every step count").click()
            page.locator(".cells li").first.wait_for()
            page.wait_for_timeout(3000)
        page.screenshot(path=PICTURE)
        browser.close()


if __name__ == "__main__":
    sys.exit(main())
