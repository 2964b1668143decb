"""The figures of README.md and docs/budgets.md are those of the zoo and of the kept results."""

from benchmarks import readme

TEXTS = [page.read_text(encoding="utf-8") for page in readme.PAGES]


def test_the_pages_have_what_was_measured() -> None:
    for text in TEXTS:
        assert readme.with_figures(text) == text, "python -m benchmarks.readme"


def test_every_part_stands_in_one_page_once() -> None:
    for name in readme.PARTS:
        assert sum(text.count(f"<!-- figures: {name} -->\n") for text in TEXTS) == 1


def test_a_figure_that_is_changed_by_hand_is_written_again() -> None:
    assert "99.9 %" in TEXTS[0]
    assert readme.with_figures(TEXTS[0].replace("99.9 %", "100.0 %")) == TEXTS[0]
