"""The figures of README.md are those of the zoo and of the kept results, and none is made up."""

from benchmarks import readme


def test_the_page_has_what_was_measured() -> None:
    text = readme.PAGE.read_text(encoding="utf-8")
    assert readme.with_figures(text) == text, "python -m benchmarks.readme"


def test_every_part_stands_in_the_page_once() -> None:
    text = readme.PAGE.read_text(encoding="utf-8")
    for name in readme.PARTS:
        assert text.count(f"<!-- figures: {name} -->\n") == 1


def test_a_figure_that_is_changed_by_hand_is_written_again() -> None:
    text = readme.PAGE.read_text(encoding="utf-8")
    assert "99.9 %" in text
    assert readme.with_figures(text.replace("99.9 %", "100.0 %")) == text
