"""The pages of docs/: the written ones are current, every page is listed, every link leads."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from docs import generate

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
INDEX = DOCS / "README.md"
PAGES = sorted(DOCS.glob("*.md"))
FRONT = [
    ROOT / f"{name}.md" for name in ("README", "CHANGELOG", "CONTRIBUTING", "DECISIONS", "SECURITY")
]
HELP = ROOT / "tests" / "contract" / "golden"
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_COMMAND = re.compile(r"\bstepdial ([a-z]+)([^\n`|#;&]*)")
_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
_METRIC = re.compile(r"\bstepdial_\w+")
_BY = re.compile(r"by \(([^)]*)\)")
_SUFFIXES = ("_bucket", "_sum", "_count")


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def anchors(page: Path) -> set[str]:
    """The names that headings of a page have, as GitHub gives them."""
    outside = re.sub(r"^```.*?^```", "", read(page), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", outside, re.MULTILINE)
    words = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {word.strip().replace(" ", "-") for word in words}


def test_the_page_of_metrics_is_what_the_code_writes() -> None:
    assert read(DOCS / "metrics.md") == generate.metrics_page(), generate.__doc__


def test_the_api_reference_is_what_the_code_writes() -> None:
    assert read(DOCS / "api.md") == generate.api_page(generate.api_document()), generate.__doc__


def test_every_query_asks_its_metric_by_labels_that_it_has() -> None:
    known = generate.instruments()
    for uses in generate.SECTIONS.values():
        for name, use in uses.items():
            asked = {_plain(found, set(known)) for found in _METRIC.findall(use.query)}
            assert name in asked, use.query
            assert asked <= known.keys(), use.query
            labels = {label for each in asked for label in known[each][1]} | {"le"}
            for listed in _BY.findall(use.query):
                assert {label.strip() for label in listed.split(",")} <= labels, use.query


def _plain(found: str, known: set[str]) -> str:
    if found in known:
        return found
    ends = [suffix for suffix in _SUFFIXES if found.endswith(suffix)]
    return found.removesuffix(ends[0]) if ends else found


def test_prometheus_can_read_every_query(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    queries = [use.query for uses in generate.SECTIONS.values() for use in uses.values()]
    rules = [{"record": f"asked:{i}", "expr": query} for i, query in enumerate(queries)]
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "asked", "rules": rules}]}))
    done = subprocess.run([promtool, "check", "rules", file], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_index_lists_every_page() -> None:
    listed = [link for link in _LINK.findall(read(INDEX)) if "/" not in link]
    assert sorted(set(listed)) == [page.name for page in PAGES if page != INDEX]
    # The two pages to begin with are named above the list too.
    assert len(listed) - len(set(listed)) == 2


@pytest.mark.parametrize("page", [*PAGES, *FRONT], ids=lambda page: page.name)
def test_every_link_of_the_page_leads_somewhere(page: Path) -> None:
    outside = re.sub(r"^```.*?^```", "", read(page), flags=re.MULTILINE | re.DOTALL)
    for link in _LINK.findall(outside):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name} links to {link}"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{page.name} links to {link}"


@pytest.mark.parametrize("page", [*PAGES, *FRONT], ids=lambda page: page.name)
def test_every_flag_is_one_of_the_command_before_it(page: Path) -> None:
    for command, rest in _COMMAND.findall(read(page).replace("\\\n", " ")):
        asked, file = set(_FLAG.findall(rest)), HELP / f"help-{command}.txt"
        if asked:
            assert file.exists(), f"{page.name}: stepdial {command}"
            assert asked <= {*_FLAG.findall(read(file)), "--help"}, f"stepdial {command}{rest}"


def test_every_claim_about_others_has_its_source() -> None:
    claims, _, sources = read(DOCS / "compared.md").partition("## Sources")
    listed = re.findall(r"^\| (\d+) \|", sources, re.MULTILINE)
    assert listed == [str(number) for number in range(1, len(listed) + 1)]
    assert set(re.findall(r"\[(\d+)\]", claims)) == set(listed)
