"""What probes and browsers send besides the API itself: HEAD, and pages of other addresses."""

from collections.abc import Iterator

import httpx
import pytest

from tests.fixtures.tiny_folders import classify_bundle
from tests.server_process import ServerProcess, server_process

BODY = b'{"input": "a good film"}'


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with server_process([classify_bundle().folder]) as running:
        yield running


@pytest.mark.parametrize(
    "path",
    ["/health/live", "/health/ready", "/metrics", "/docs", "/v1/models", "/openapi.json", "/"],
)
def test_head_is_answered_as_get_without_a_body(client: httpx.Client, path: str) -> None:
    got, head = client.get(path), client.head(path)
    assert head.status_code == got.status_code == 200
    assert head.content == b"" and int(head.headers["content-length"]) > 0
    assert head.headers["content-type"] == got.headers["content-type"]
    assert client.get("/health/live").status_code == 200, "the connection is still in step"


def test_head_where_there_is_no_get(client: httpx.Client) -> None:
    assert client.head("/v1/classify").status_code == 405
    assert client.head("/v1/nothing").status_code == 404


@pytest.mark.parametrize("kind", ["text/plain", "application/json"])
def test_a_page_of_another_address_is_refused(client: httpx.Client, kind: str) -> None:
    headers = {"origin": "http://evil.example", "content-type": kind}
    response = client.post("/v1/classify", content=BODY, headers=headers)
    assert response.status_code == 403
    assert response.headers["x-request-id"]
    error = response.json()["error"]
    assert error["code"] == "cross_origin" and error["origin"] == "http://evil.example"
    assert "use that page, or call from a program" in error["message"]


def test_the_own_page_and_programs_are_answered(
    server: ServerProcess, client: httpx.Client
) -> None:
    for headers in ({}, {"origin": server.url}, {"origin": server.url, "sec-fetch-site": "none"}):
        response = client.post("/v1/classify", content=BODY, headers=headers)
        assert response.status_code == 200, response.text
