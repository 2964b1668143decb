"""Writes the pages of docs/ that the code knows: `python -m docs.generate`."""

from pathlib import Path

from serve import api_page, metrics_page, settings_page

DOCS = Path(__file__).parent


def main() -> None:
    """Write every generated page."""
    pages = {
        "api.md": api_page.render(api_page.document()),
        "metrics.md": metrics_page.render(),
        "settings.md": settings_page.render(),
    }
    for name, text in pages.items():
        (DOCS / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
