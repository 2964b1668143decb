"""What browsers are told, which of their pages may call, and that no log ever holds a key."""

import signal
from collections.abc import Iterator

import httpx
import pytest

from serve.keys import NewKey
from tests.faults.raw_http import exchange
from tests.fixtures.tiny_folders import classify_bundle, generate_bundle
from tests.server_process import ServerProcess, server_process

FRIEND = "https://app.example.org"
STRANGER = "https://evil.example.org"
CLASSIFY = {"input": "x"}
STREAM = {"prompt": "To be", "max_tokens": 3, "stream": True}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    folders = [classify_bundle().folder, generate_bundle().folder]
    flags = ("--cors-origins", f"{FRIEND},http://localhost:3000", "--max-body-bytes", "2048")
    with server_process(folders, *flags) as running:
        yield running


def test_every_kind_of_answer_has_the_security_headers(client: httpx.Client) -> None:
    etag = client.get("/static/app.js").headers["etag"]
    answers = {
        "page": client.get("/"),
        "script": client.get("/static/app.js"),
        "reference": client.get("/docs"),
        "document": client.get("/openapi.json"),
        "head": client.head("/"),
        "metrics": client.get("/metrics"),
        "probe": client.get("/health/live"),
        "models": client.get("/v1/models"),
        "classify": client.post("/v1/classify", json=CLASSIFY),
        "stream": client.post("/v1/generate", json=STREAM),
        "openai": client.post("/v1/completions", json=STREAM | {"model": "tiny-generate"}),
        "not json": client.post("/v1/classify", content=b"{"),
        "unknown": client.get("/nowhere"),
        "method": client.delete("/v1/classify"),
        "large": client.post("/v1/classify", content=b"x" * 4096),
        "origin": client.post("/v1/classify", json=CLASSIFY, headers={"origin": STRANGER}),
        "preflight": client.options("/v1/classify", headers=asking(FRIEND)),
        "unchanged": client.get("/static/app.js", headers={"if-none-match": etag}),
    }
    statuses = {name: answer.status_code for name, answer in answers.items()}
    assert statuses["unchanged"] == 304 and statuses["origin"] == 403 and statuses["large"] == 413
    for name, answer in answers.items():
        headers = answer.headers
        assert headers["x-content-type-options"] == "nosniff", name
        assert headers["referrer-policy"] == "no-referrer", name
        assert headers["x-frame-options"] == "DENY", name
        assert headers["cross-origin-opener-policy"] == "same-origin", name
        assert headers["cross-origin-resource-policy"] == "same-origin", name
        assert "geolocation=()" in headers["permissions-policy"], name
        policy = headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; ") and "unsafe" not in policy, name
        assert "*" not in policy and "http" not in policy, name
        assert "server" not in headers and "x-powered-by" not in headers, name
        assert len(headers.get_list("content-security-policy")) == 1, name


def test_bytes_that_are_no_request_get_them_too(server: ServerProcess) -> None:
    received = exchange(server, b"GET\r\n\r\n").lower()
    assert received.startswith(b"http/1.1 400 bad request\r\n")
    assert b"\r\ncontent-security-policy: default-src 'none'; " in received
    assert b"\r\nx-content-type-options: nosniff\r\n" in received
    assert b"\r\nserver:" not in received


def asking(origin: str) -> dict[str, str]:
    return {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }


@pytest.mark.parametrize("origin", [FRIEND, "http://localhost:3000"])
def test_pages_of_the_settings_may_call(client: httpx.Client, origin: str) -> None:
    preflight = client.options("/v1/generate", headers=asking(origin))
    assert (preflight.status_code, preflight.content) == (204, b"")
    assert preflight.headers["access-control-allow-origin"] == origin
    assert "POST" in preflight.headers["access-control-allow-methods"]
    assert "authorization" in preflight.headers["access-control-allow-headers"]
    for answer in (
        client.post("/v1/generate", json=STREAM, headers={"origin": origin}),
        client.post("/v1/generate", json={}, headers={"origin": origin}),
        client.get("/v1/models", headers={"origin": origin, "sec-fetch-site": "cross-site"}),
    ):
        assert answer.status_code in (200, 422)
        assert answer.headers["access-control-allow-origin"] == origin
        assert answer.headers["vary"] == "origin"
        assert "x-request-id" in answer.headers["access-control-expose-headers"]
        assert "access-control-allow-credentials" not in answer.headers


@pytest.mark.parametrize(
    "origin", [STRANGER, "null", FRIEND + ":444", FRIEND + ".evil.org", "HTTPS://APP.EXAMPLE.ORG"]
)
def test_other_pages_may_not(client: httpx.Client, origin: str) -> None:
    for answer in (
        client.options("/v1/generate", headers=asking(origin)),
        client.post("/v1/generate", json=STREAM, headers={"origin": origin}),
    ):
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "cross_origin")
        assert "access-control-allow-origin" not in answer.headers
        assert answer.headers["vary"] == "origin"  # no cache may give this to a friend


def test_without_the_setting_no_page_is_told_anything() -> None:
    with server_process([classify_bundle().folder]) as running, httpx.Client() as client:
        for origin in (FRIEND, running.url):
            answers = [
                client.options(f"{running.url}/v1/classify", headers=asking(origin)),
                client.post(
                    f"{running.url}/v1/classify", json=CLASSIFY, headers={"origin": origin}
                ),
            ]
            assert [one.status_code for one in answers] == (
                [403, 403] if origin == FRIEND else [405, 200]
            )
            told = {name for one in answers for name in one.headers if "access-control" in name}
            assert not told


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_no_log_holds_a_key(log_format: str) -> None:
    secret, admin, wrong = (NewKey.draw(name).secret for name in ("right", "admin", "wrong"))
    environment = {"STEPDIAL_API_KEYS": secret, "STEPDIAL_ADMIN_KEY": admin}
    flags = ("--access-log", "--log-level", "debug", "--log-format", log_format)
    folders = [classify_bundle().folder, generate_bundle().folder]
    with server_process(folders, *flags, environment=environment) as running:
        with httpx.Client(base_url=running.url, timeout=30) as client:
            for key in (secret, wrong, admin):
                ways = (
                    {"headers": {"authorization": f"Bearer {key}"}},
                    {"headers": {"x-api-key": key}},
                    {"auth": ("anyone", key)},
                    {"params": {"api_key": key}},
                    {"headers": {"x-request-id": "x" * 200, "authorization": key}},
                )
                for way in ways:
                    client.post("/v1/classify", json=CLASSIFY, **way)
                    client.post("/v1/generate", json=STREAM, **way)
                    client.post("/v1/completions", content=b"{", **way)
                    client.get("/admin/models", **way)
                    client.get("/docs", **way)
            allowed = {"authorization": f"Bearer {secret}"}
            metrics = client.get("/metrics", headers=allowed).text
        exchange(
            running, b"GET / HTTP/1.1\r\nauthorization: Bearer " + wrong.encode() + b"\x00\r\n"
        )
        running.process.send_signal(signal.SIGTERM)
        running.wait()
        written = running.banner + running.rest_of_output() + metrics
    assert "/v1/classify" in written and "401" in written
    for key in (secret, admin, wrong):
        assert key not in written and key.removeprefix("sd-") not in written
