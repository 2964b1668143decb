"""Bodies that JSON readers have stumbled over, sent to every route that takes one."""

import re
from collections.abc import Iterator

import httpx
import pytest

from tests.faults.raw_http import exchange, head, status
from tests.fixtures.tiny_folders import classify_bundle, generate_bundle
from tests.server_process import ServerProcess, server_process

ADMIN_KEY = "an-admin-key-of-the-tests"
MARKED = [b"\xef\xbb\xbf{}", '{"input": "x"}'.encode("utf-16"), '{"input": "é"}'.encode("latin-1")]
LAST = "connection: close"
NOT_JSON = [
    b"\xff\xfe\x00",
    b'{"input": "\xc3\x28"}',
    b'{"input": "\xed\xa0\x80"}',
    b'{"input": "\x00"}',
    b'{"input": "x"}\x00',
    b'{"input": "x"} {"input": "x"}',
    b'{"input": "\\ud800"}',
    b'{"input": "x"',
    b"{'input': 'x'}",
    b"\xef\xbb\xbf" + b'{"input": "x"}',
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b'{"input": ' + b"[" * 5_000 + b"]" * 5_000 + b"}",
]
STRANGE = [
    b'{"input": "x", "input": "y", "prompt": "x", "prompt": "y"}',
    b'{"input": "\\u0000", "prompt": "\\u0000"}',
    b'{"input": "x", "prompt": "x", "steps": 1e400, "top_k": 1e400, "max_tokens": 1e400}',
    b'{"input": "x", "prompt": "x", "steps": ' + b"9" * 4_000 + b"}",
    b'{"input": "x", "prompt": "x", "steps": ' + b"9" * 60_000 + b"}",
    b'{"input": "x", "prompt": "x", "deadline_ms": -1e-400}',
    b'{"input": "x", "prompt": "x", "seed": 0.' + b"1" * 50_000 + b"}",
    b'{"input": "x", "prompt": "x", "temperature": NaN}',
    b'{"input": "x", "prompt": "x", "temperature": -Infinity}',
    b"{" + b",".join(b'"k%d": 1' % number for number in range(5_000)) + b"}",
    b'{"' + b"k" * 50_000 + b'": 1}',
    b"null",
    b"1",
    b'"x"',
    b"[]",
    b"{}",
    b"   ",
]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    folders = [classify_bundle().folder, generate_bundle().folder]
    with server_process(folders, environment={"STEPDIAL_ADMIN_KEY": ADMIN_KEY}) as running:
        yield running
        assert 'code="500"' not in httpx.get(f"{running.url}/metrics").text


@pytest.fixture(scope="module")
def paths(server: ServerProcess) -> list[str]:
    described = httpx.get(f"{server.url}/openapi.json").json()["paths"]
    taking = [
        path for path, methods in described.items() if "requestBody" in methods.get("post", {})
    ]
    assert len(taking) >= 2
    return [re.sub("{[^}]*}", "tiny-classify", path.replace("{version}", "1")) for path in taking]


def answered(server: ServerProcess, path: str, body: bytes) -> int:
    admin = f"authorization: Bearer {ADMIN_KEY}"
    return status(exchange(server, head(len(body), LAST, admin, path=path) + body))


@pytest.mark.parametrize("body", NOT_JSON, ids=lambda body: repr(body[:20]))
def test_what_is_not_json_is_refused(server: ServerProcess, paths: list[str], body: bytes) -> None:
    assert {answered(server, path, body) for path in paths} <= {400, 422}
    assert answered(server, "/v1/classify", b'{"input": "x"}') == 200


@pytest.mark.parametrize("body", MARKED, ids=["mark", "utf-16", "latin-1"])
def test_what_is_not_utf_8_is_told_to_be_saved_so(server: ServerProcess, body: bytes) -> None:
    answer = httpx.post(f"{server.url}/v1/classify", content=body)
    assert answer.status_code == 400 and "save it as UTF-8 without one" in answer.text


@pytest.mark.parametrize("body", STRANGE, ids=lambda body: repr(body[:50]))
def test_strange_json_gets_no_5xx(server: ServerProcess, paths: list[str], body: bytes) -> None:
    assert {answered(server, path, body) for path in paths} <= {200, 400, 422}
    assert answered(server, "/v1/classify", b'{"input": "x"}') == 200
