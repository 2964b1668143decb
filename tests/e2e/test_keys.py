"""A server that needs keys: every route is shut but the probes, and each key has its limits."""

import base64
import os
import re
import signal
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx
import openai
import pytest
from fastapi.routing import iter_route_contexts
from playwright.sync_api import expect
from starlette.routing import Mount

from serve.app import create_app
from serve.engine.engine import Engine
from serve.keys import NewKey
from serve.metrics import Metrics
from serve.settings import Settings
from tests.e2e.browser import opened, started_browser
from tests.fake_model import Mood, fake_catalog
from tests.fake_server import fake_server
from tests.faults.raw_http import exchange, head, status
from tests.fixtures.tiny_folders import classify_bundle, generate_bundle
from tests.server_process import ServerProcess, run_to_end, server_process
from tests.waiting import wait_until

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
NAMES = ("whole-key", "slow-key", "rated-key", "lone-key", "token-key", "label-key")
LIMITS = {
    "slow-key": "max_steps = 2",
    "rated-key": "requests_per_s = 0.01\nburst = 2",
    "lone-key": "max_concurrent = 1",
    "token-key": "tokens_per_min = 60",
    "label-key": "tokens_per_min = 100",
}
ADMIN = "sd-the-admin-of-these-tests"
WRONG = "sd-a-key-that-nobody-has-given-out"
OPEN = {"/health", "/health/live", "/health/ready", "/v2/health/live", "/v2/health/ready"}


@pytest.fixture(scope="module")
def keys() -> dict[str, NewKey]:
    return {name: NewKey.draw(name) for name in NAMES}


@pytest.fixture(scope="module")
def keys_file(keys: dict[str, NewKey], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    path.write_text("\n".join(keys[name].block + LIMITS.get(name, "") for name in NAMES))
    return path


@pytest.fixture(scope="module")
def server(keys_file: Path) -> Iterator[ServerProcess]:
    folders = [classify_bundle().folder, generate_bundle().folder]
    environment = {"STEPDIAL_ADMIN_KEY": ADMIN}
    flags = ("--api-keys-file", str(keys_file))
    with server_process(folders, *flags, environment=environment) as running:
        yield running


def bearer(key: NewKey | str) -> dict[str, str]:
    return {"authorization": f"Bearer {key if isinstance(key, str) else key.secret}"}


def basic(key: str) -> dict[str, str]:
    return {"authorization": "Basic " + base64.b64encode(f"anyone:{key}".encode()).decode()}


@pytest.fixture(scope="module")
def routes(keys_file: Path) -> list[tuple[str, tuple[str, ...]]]:
    """An address for each route of the application, documented or not, and some without one."""
    settings = Settings(api_keys_file=keys_file)
    catalog = fake_catalog(Mood(), classify_bundle(), generate_bundle())
    app = create_app(settings, Engine(catalog, settings.limits, Metrics()))
    found = []
    for context in iter_route_contexts(app.routes):
        route = context.original_route
        path = f"{route.path}/app.js" if isinstance(route, Mount) else str(context.path)
        # Those of the administrator have keys of their own, and say so themselves.
        methods = tuple(context.methods or ()) if path.startswith("/admin/") else METHODS
        found.append((re.sub("{[^}]*}", "tiny-generate", path), methods))
    known = {path for path, _ in found}
    assert {"/", "/docs", "/metrics", "/static/app.js", "/openapi.json", *OPEN} <= known
    assert {"/v1/classify", "/v1/generate", "/v1/models", "/admin/models"} <= known
    nowhere = [
        "/nowhere",
        "/v1",
        "/v2/",
        "/health/live/",
        "//health/live",
        "/health/",
        "/Health/live",
        "/administration",
    ]
    return [*found, *((path, METHODS) for path in nowhere)]


@pytest.mark.parametrize(
    "headers",
    [
        {},
        bearer(WRONG),
        basic(WRONG),
        {"x-api-key": WRONG},
        {"authorization": "Bearer"},
        {"authorization": "Basic ?"},
        {"authorization": "x"},
    ],
    ids=("none", "bearer", "basic", "x-api-key", "empty", "broken", "strange"),
)
def test_every_route_but_the_probes_refuses_whoever_has_no_key(
    server: ServerProcess, routes: list[tuple[str, tuple[str, ...]]], headers: dict[str, str]
) -> None:
    open_to_all = []
    with httpx.Client(base_url=server.url, headers=headers) as client:
        for path, methods in routes:
            for method in methods:
                # Not joined by httpx, which would lose the second slash.
                response = client.request(method, f"{server.url}{path}", content=b"{}")
                if response.status_code != 401:
                    open_to_all.append(path)
                elif not path.startswith("/admin/"):
                    assert response.headers["www-authenticate"].startswith('Basic realm="Stepdial"')
                    assert response.headers["x-content-type-options"] == "nosniff"
    assert set(open_to_all) == OPEN


@pytest.mark.parametrize("headers", [{}, bearer(WRONG)], ids=("none", "wrong"))
@pytest.mark.parametrize("mode", ["cors", "same-origin"])
def test_no_browser_asks_a_reader_for_what_a_script_was_refused(
    server: ServerProcess, headers: dict[str, str], mode: str
) -> None:
    refused = httpx.get(f"{server.url}/v1/models", headers=headers | {"sec-fetch-mode": mode})
    assert refused.status_code == 401
    assert refused.headers["www-authenticate"] == 'Bearer realm="Stepdial"'


def test_a_key_opens_every_route(
    server: ServerProcess, routes: list[tuple[str, tuple[str, ...]]], keys: dict[str, NewKey]
) -> None:
    secret = keys["whole-key"].secret
    for headers in (bearer(secret), basic(secret), {"x-api-key": secret}):
        with httpx.Client(headers=headers) as client:
            for path, methods in routes:
                # Not an administrator's: one kind of key is none of the other.
                refused = client.request(methods[0], server.url + path).status_code == 401
                assert refused == path.startswith("/admin/"), path
    assert httpx.get(f"{server.url}/admin/models", headers=bearer(ADMIN)).status_code == 200
    assert httpx.get(f"{server.url}/v1/models", headers=bearer(ADMIN)).status_code == 401


@pytest.mark.parametrize(
    ("path", "shape"),
    [
        ("/v1/classify", {"error": {"code", "message", "param"}}),
        ("/v1/completions", {"error": {"code", "message", "param", "type"}}),
        ("/v1/chat/completions", {"error": {"code", "message", "param", "type"}}),
        ("/v2/models/tiny-classify/infer", {"error": str}),
    ],
)
def test_a_refusal_has_the_shape_of_its_protocol(
    server: ServerProcess, path: str, shape: dict[str, object]
) -> None:
    error = httpx.post(server.url + path, json={}, headers=bearer(WRONG)).json()["error"]
    if shape["error"] is str:
        assert "does not know the API key" in error
        return
    assert (set(error), error["code"]) == (shape["error"], "unauthorized")
    assert error.get("type", "authentication_error") == "authentication_error"


def test_the_documents_say_where_a_key_is_needed(
    server: ServerProcess, keys: dict[str, NewKey]
) -> None:
    document = httpx.get(f"{server.url}/openapi.json", headers=bearer(keys["whole-key"])).json()
    assert set(document["components"]["securitySchemes"]) == {"bearer", "header", "basic"}
    for path, methods in document["paths"].items():
        for operation in methods.values():
            assert ("401" in operation["responses"]) == (path not in OPEN), path
            own = path in OPEN or path.startswith("/admin/")
            assert ("security" in operation) != own, path


def test_the_openai_client(server: ServerProcess, keys: dict[str, NewKey]) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=keys["whole-key"].secret) as client:
        answer = client.completions.create(model="tiny-generate", prompt="To", max_tokens=3)
        assert answer.choices[0].text
    wrong = openai.OpenAI(base_url=f"{server.url}/v1", api_key=WRONG, max_retries=0)
    with wrong as client, pytest.raises(openai.AuthenticationError, match="does not know"):
        client.completions.create(model="tiny-generate", prompt="To", max_tokens=3)


def test_the_body_of_whoever_has_no_key_is_not_read(server: ServerProcess) -> None:
    """The answer comes although the body never does."""
    assert status(exchange(server, head(1000, f"authorization: Bearer {WRONG}"), b"{")) == 401


def test_a_key_has_so_many_steps(server: ServerProcess, keys: dict[str, NewKey]) -> None:
    with httpx.Client(base_url=server.url, headers=bearer(keys["slow-key"])) as client:
        for path, asked in (
            ("/v1/classify", {"input": "x"}),
            ("/v1/generate", {"prompt": "To", "max_tokens": 2}),
            ("/v1/completions", {"model": "tiny-generate", "prompt": "To", "max_tokens": 2}),
        ):
            refused = client.post(path, json=asked | {"steps": 4})
            error = refused.json()["error"]
            assert (refused.status_code, error["code"]) == (403, "steps_forbidden")
            assert (error["param"], error["max_steps"]) == ("steps", 2)
            assert client.post(path, json=asked | {"steps": 2}).status_code == 200
            assert client.post(path, json=asked).status_code == 200
        served = client.post("/v1/generate", json={"prompt": "To", "max_tokens": 2}).json()
        assert served["budget"]["steps"] == 2
        assert (
            client.post("/v1/generate", json={"prompt": "To", "effort": "max"}).status_code == 403
        )


def test_a_key_has_so_many_requests_a_second(
    server: ServerProcess, keys: dict[str, NewKey]
) -> None:
    with httpx.Client(base_url=server.url, headers=bearer(keys["rated-key"])) as client:
        answers = [client.get("/v1/models") for _ in range(3)]
        assert [answer.status_code for answer in answers] == [200, 200, 429]
        refused = answers[-1]
        assert refused.json()["error"]["code"] == "rate_limited"
        assert 90 <= int(refused.headers["retry-after"]) <= 100
        assert client.get("/health/ready").status_code == 200  # probes cost nothing
        page = client.get("/")  # nor does the page, which is many files
        files = re.findall(r'"(static/[a-z.-]+\.(?:js|css))"', page.text)
        assert page.status_code == 200 and len(files) > 2
        assert {client.get(f"/{path}").status_code for path in [*files, "docs"]} == {200}


def test_a_key_has_so_many_tokens_a_minute(server: ServerProcess, keys: dict[str, NewKey]) -> None:
    asked = {"prompt": "To be", "max_tokens": 40, "temperature": 0}
    with httpx.Client(base_url=server.url, headers=bearer(keys["token-key"]), timeout=30) as client:
        forbidden = client.post("/v1/generate", json=asked | {"max_tokens": 60})
        assert forbidden.status_code == 403
        assert forbidden.json()["error"]["code"] == "tokens_forbidden"
        # What the stop string leaves unwritten is there for the next.
        first = client.post("/v1/generate", json=asked | {"max_tokens": 5}).json()["text"]
        stopped = client.post("/v1/generate", json=asked | {"stop": first[:1]})
        assert stopped.json()["usage"]["completion_tokens"] < 5
        unknown = client.post("/v1/generate", json=asked | {"deadline_ms": 0.001})
        assert unknown.status_code in (422, 429, 504)  # refused, so it costs nothing
        assert client.post("/v1/generate", json=asked | {"max_tokens": 30}).status_code == 200
        refused = client.post("/v1/generate", json=asked)
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "tokens_limited"
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert client.get("/v1/models").status_code == 200  # which has none


def test_tokens_that_are_read_count_too(server: ServerProcess, keys: dict[str, NewKey]) -> None:
    text = {"input": "a film that stays with you " * 20}  # 48 tokens are kept
    with httpx.Client(base_url=server.url, headers=bearer(keys["label-key"]), timeout=30) as client:
        statuses = [client.post("/v1/classify", json=text).status_code for _ in range(3)]
        assert statuses == [200, 200, 429]
        assert client.post("/v1/classify", json={"input": [text["input"]] * 3}).status_code == 403


def test_a_key_has_so_many_requests_at_once(server: ServerProcess, keys: dict[str, NewKey]) -> None:
    asked = {"prompt": "To be", "max_tokens": 4000, "stream": True}
    with httpx.Client(base_url=server.url, headers=bearer(keys["lone-key"]), timeout=30) as client:
        with client.stream("POST", "/v1/generate", json=asked) as stream:
            assert stream.status_code == 200
            refused = client.get("/v1/models")
            assert refused.status_code == 429
            assert refused.json()["error"]["code"] == "concurrency_limited"
        wait_until(lambda: client.get("/v1/models").status_code == 200, most_s=5)


def test_an_admin_key_has_so_many_requests_at_once_too(tmp_path: Path) -> None:
    key, path = NewKey.draw("admin"), tmp_path / "admin.toml"
    path.write_text(key.block + "max_concurrent = 1")
    sent = head(100, f"x-api-key: {key.secret}", path="/admin/models") + b"{"  # and no more of it
    with (
        fake_server(admin_keys_file=path) as server,
        httpx.Client(base_url=server.url, headers=bearer(key)) as client,
    ):
        with socket.create_connection(("127.0.0.1", server.port)) as loads:
            loads.sendall(sent)
            wait_until(lambda: client.get("/admin/models").status_code == 429)
            refused = client.get("/admin/models")
            assert refused.json()["error"]["code"] == "concurrency_limited"
        wait_until(lambda: client.get("/admin/models").status_code == 200)


def test_refusals_are_counted_by_reason_without_names(
    server: ServerProcess, keys: dict[str, NewKey]
) -> None:
    httpx.get(f"{server.url}/v1/models")
    metrics = httpx.get(f"{server.url}/metrics", headers=bearer(keys["whole-key"])).text
    assert re.search('stepdial_rejected_total{reason="unauthorized"} [1-9]', metrics)
    assert not any(name in metrics for name in NAMES)


@pytest.mark.browser
def test_a_browser_asks_for_the_key_and_the_page_works(
    server: ServerProcess, keys: dict[str, NewKey], chromium: Path
) -> None:
    known = {"username": "anyone", "password": keys["whole-key"].secret}
    with (
        started_browser(chromium) as browser,
        opened(browser, f"{server.url}/", http_credentials=known) as (page, complaints),
    ):
        expect(page.locator("#playground")).to_be_visible()
        expect(page.get_by_role("tabpanel")).to_contain_text("Bearer $API_KEY")
        assert (complaints.console, complaints.external) == ([], [])


def test_a_command_makes_a_key_for_a_file(tmp_path: Path) -> None:
    made = run_to_end(["--make-key", "carol"])
    assert made.returncode == 0
    (secret,) = re.findall(r"sd-\S+", made.stderr)
    assert secret not in made.stdout and made.stdout.startswith('[[key]]\nname = "carol"\n')
    path = tmp_path / "keys.toml"
    path.write_text(made.stdout)
    with server_process([classify_bundle().folder], "--api-keys-file", str(path)) as running:
        assert httpx.get(f"{running.url}/v1/models").status_code == 401
        assert httpx.get(f"{running.url}/v1/models", headers=bearer(secret)).status_code == 200
        path.write_text(NewKey.draw("dave").block)
        os.kill(running.process.pid, signal.SIGHUP)
        ask = partial(httpx.get, f"{running.url}/v1/models", headers=bearer(secret))
        wait_until(lambda: ask().status_code == 401, "the key still opens", 5)


def test_unusable_keys_end_the_server_at_its_start(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(f'[[key]]\nname = "carol"\nsha256 = "{WRONG}"\n')
    ended = run_to_end([classify_bundle().folder, "--port", "0", "--api-keys-file", path])
    assert ended.returncode == 2
    assert "Traceback" not in ended.stderr and WRONG not in ended.stderr
    assert "stepdial serve: key 1 of" in ended.stderr
