"""Which requests come from a page of another address."""

import pytest

from serve.middleware import check_origin


def refused(**headers: str) -> bool:
    pairs = [(name.replace("_", "-").encode(), text.encode()) for name, text in headers.items()]
    return check_origin({"type": "http", "headers": pairs}) is not None


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "127.0.0.1:8000"},
        {"host": "127.0.0.1:8000", "origin": "http://127.0.0.1:8000"},
        {"host": "Example.org", "origin": "https://example.org"},
        {"host": "example.org:443", "origin": "https://example.org"},
        {"host": "[::1]:8000", "origin": "http://[::1]:8000"},
        {"host": "inner:80", "x_forwarded_host": "example.org", "origin": "https://example.org"},
        {"host": "inner", "origin": "https://example.org", "sec_fetch_site": "same-origin"},
    ],
)
def test_programs_and_the_own_page_are_welcome(headers: dict[str, str]) -> None:
    assert not refused(**headers)


@pytest.mark.parametrize(
    "origin",
    [
        "http://evil.example",
        "http://127.0.0.1:8001",
        "http://127.0.0.1",
        "http://localhost:8000",
        "http://127.0.0.1:8000.evil.example",
        "null",
        "",
        "http://[",
        "\xff",
    ],
)
def test_pages_of_other_addresses_are_not(origin: str) -> None:
    assert refused(host="127.0.0.1:8000", origin=origin)
    assert refused(host="127.0.0.1:8000", origin=origin, sec_fetch_site="cross-site")


def test_nothing_matches_a_missing_host() -> None:
    assert refused(origin="null") and refused(origin="http://x")
