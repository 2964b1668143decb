"""The process: how it starts, what it says, how it ends."""

import json
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest

from serve.__main__ import main
from serve.bundle import Bundle
from serve.catalog import Catalog, open_catalog
from serve.runtime.protocol import Device
from serve.server import bind, listen
from tests.fixtures.tiny_bundles import build_classify, build_generate
from tests.fixtures.tiny_families import build_tag
from tests.fixtures.tiny_folders import (
    classify_bundle,
    generate_bundle,
    image_bundle,
    points_bundle,
)
from tests.server_process import ServerProcess, run_to_end, server_process
from tests.sse import parse_events

FOLDERS = [classify_bundle().folder, generate_bundle().folder]


def test_it_starts_within_seconds_and_says_what_to_try() -> None:
    began_s = time.monotonic()
    with server_process(FOLDERS, cold=True) as server:
        assert time.monotonic() - began_s < 10
        assert "tiny-classify  classify  steps 1, 2, 4" in server.banner
        assert "tiny-generate  generate  steps 1, 2, 4" in server.banner
        (curl,) = (line for line in server.banner.splitlines() if "curl" in line)
        command = shlex.split(curl)
        found = subprocess.run([*command, "-s"], capture_output=True, timeout=20, check=True)
        assert json.loads(found.stdout)["results"][0]["budget"]["steps"] == 1


@pytest.mark.parametrize("bundle", [image_bundle(), points_bundle()], ids=["image", "points"])
def test_what_to_try_fits_models_that_take_no_text(bundle: Bundle) -> None:
    with server_process([bundle.folder]) as server:
        (curl,) = (line for line in server.banner.splitlines() if "curl" in line)
        command = [*shlex.split(curl), "-s", "--fail"]
        found = subprocess.run(command, capture_output=True, timeout=20, check=True)
        assert json.loads(found.stdout)["results"][0]["budget"]["steps"] == 1


@pytest.mark.parametrize(
    ("words", "shown"), [(False, r"[1-6]{8}\n"), (True, r"(\['\w+', '\w+'\]\n){3}")]
)
def test_what_to_try_of_a_tagger_shows_what_can_be_read(
    tmp_path: Path, words: bool, shown: str
) -> None:
    build_tag(tmp_path / "tags", words=words)
    with server_process([tmp_path / "tags"]) as server:
        (line,) = (line for line in server.banner.splitlines() if "curl" in line)
        found = subprocess.run(line, shell=True, capture_output=True, timeout=20, check=True)
        assert re.fullmatch(shown, found.stdout.decode()), found.stdout


def test_without_a_bundle_it_serves_the_zoo(tmp_path: Path) -> None:
    build_classify(tmp_path / "b", name="second")
    build_classify(tmp_path / "a", name="first")
    with (
        server_process([], environment={"STEPDIAL_ZOO": str(tmp_path)}) as server,
        httpx.Client(base_url=server.url) as client,
    ):
        models = [model["id"] for model in client.get("/v1/models").json()["data"]]
        assert models == ["first", "second"]
        answer = client.post("/v1/classify", json={"input": "x"}).json()
        assert answer["model"] == "first"
        response = client.post("/v1/generate", json={"prompt": "x"})
        assert response.status_code == 404
        assert "no model that can generate" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("arguments", "environment", "says"),
    [
        (["nowhere"], {}, "nowhere"),
        ([], {"STEPDIAL_ZOO": "nowhere"}, "nowhere: holds no bundles"),
        ([FOLDERS[0], FOLDERS[0]], {}, "is named tiny-classify, like"),
        ([FOLDERS[0]], {"STEPDIAL_PROT": "1"}, "did you mean STEPDIAL_PORT?"),
        ([FOLDERS[0], "--port", "x"], {}, "--port is 'x'"),
        ([FOLDERS[0], "--host", "256.0.0.1"], {}, "choose another with --host and --port"),
    ],
)
def test_what_cannot_be_served_is_said_in_one_line(
    arguments: list[str | Path],
    environment: dict[str, str],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, text in environment.items():
        monkeypatch.setenv(name, text)
    monkeypatch.setenv("STEPDIAL_PORT", "0")
    assert main(list(map(str, arguments))) == 2
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert out == "" and line.startswith("stepdial serve: ") and says in line


def test_the_process_ends_with_that_line_and_status() -> None:
    command = [sys.executable, "-m", "serve", "nowhere", "--port", "0"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == "stepdial serve: nowhere: is no folder; name the folder of a bundle\n"


@pytest.mark.parametrize("name", ["weights.bin", "manifest.json", "latency.json"])
def test_a_broken_bundle_is_refused_naming_the_file(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = build_generate(tmp_path / "bundle").folder
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(bytes([content[0] ^ 1]) + content[1:])
    assert main([str(folder), "--port", "0"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("stepdial serve: ") and name in line


def test_a_port_in_use_is_said_before_anything_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        ended = run_to_end([FOLDERS[0], "--port", str(port)])
    assert ended.returncode == 2
    assert f"port {port}" in ended.stderr and len(ended.stderr.splitlines()) == 1


def test_a_port_that_another_server_takes_meanwhile_is_said_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with bind("127.0.0.1", 0) as other:
        port = other.getsockname()[1]

        def load_slowly(folders: Sequence[Path], threads: int | None, device: Device) -> Catalog:
            listen(other)
            return open_catalog(folders, threads, device)

        monkeypatch.setattr("serve.command.open_catalog", load_slowly)
        # As the process does it: afterwards these would change the tests that follow.
        monkeypatch.setattr("serve.command._set_up", lambda: None)
        monkeypatch.setattr("serve.logs.set_up", lambda *settings: None)
        assert main([str(FOLDERS[0]), "--port", str(port)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"stepdial serve: cannot listen on 127.0.0.1 port {port} (")


def test_it_listens_on_other_addresses() -> None:
    with server_process(FOLDERS[:1], "--host", "::1") as server:
        assert server.url.startswith("http://[::1]:")
        assert httpx.get(f"{server.url}/health/ready").status_code == 200


def test_the_access_log() -> None:
    with server_process(FOLDERS[:1], "--access-log") as server:
        httpx.get(f"{server.url}/health/ready", headers={"x-request-id": "seen"})
        server.terminate()
        assert server.wait() == 0
        log = server.rest_of_output()
    assert re.search(r"stepdial\.access: GET /health/ready 200 \d+\.\d ms seen\n", log)


def test_no_path_forges_a_line_of_the_access_log() -> None:
    with server_process(FOLDERS[:1], "--access-log") as server:
        httpx.get(f"{server.url}/x%0a2026-01-01%20INFO%20forged%1b[2J")
        server.terminate()
        assert server.wait() == 0
        log = server.rest_of_output()
    (line,) = (line for line in log.splitlines() if "forged" in line)
    assert "GET /x%0a2026-01-01%20INFO%20forged%1b" in line and "\x1b" not in line


def stream_body(max_tokens: int) -> dict[str, object]:
    return {"prompt": "To be", "max_tokens": max_tokens, "stream": True, "steps": 4}


def probe(server: ServerProcess, path: str) -> int:
    return httpx.get(f"{server.url}{path}").status_code


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_running_streams_finish(number: signal.Signals) -> None:
    with server_process(FOLDERS) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        with client.stream("POST", "/v1/generate", json=stream_body(1500)) as response:
            lines = response.iter_text()
            text = next(lines)
            server.process.send_signal(number)
            sent_s = time.monotonic()
            while probe(server, "/health/ready") == 200:
                pass
            assert time.monotonic() - sent_s < 0.5
            assert probe(server, "/health/live") == 200
            refused = httpx.post(f"{server.url}/v1/classify", json={"input": "x"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
            assert refused.headers["retry-after"]
            text += "".join(lines)
        *tokens, (last, done) = parse_events(text)
        assert last == "done" and len(tokens) == 1500
        assert done["finish_reason"] == "length"
        assert server.wait() == 0


def test_an_idle_server_ends_at_once_though_clients_stay_connected() -> None:
    with server_process(FOLDERS[:1]) as server, httpx.Client(base_url=server.url) as client:
        assert client.get("/health/ready").status_code == 200
        began_s = time.monotonic()
        server.terminate()
        assert server.wait() == 0
        assert time.monotonic() - began_s < 3


def test_a_second_signal_does_not_wait() -> None:
    with server_process(FOLDERS, "--max-tokens", "1000000") as server:
        body = stream_body(1_000_000)
        with httpx.stream("POST", f"{server.url}/v1/generate", json=body, timeout=30) as response:
            next(response.iter_raw())
            began_s = time.monotonic()
            server.terminate()
            while probe(server, "/health/ready") == 200:
                pass
            server.terminate()
            server.wait()
            assert time.monotonic() - began_s < 10


def test_a_client_that_never_reads_does_not_hold_up_the_end() -> None:
    flags = ("--drain-s", "0.3", "--max-tokens", "1000000")
    with server_process(FOLDERS, *flags) as server:
        content = json.dumps(stream_body(1_000_000) | {"logprobs": 5}).encode()
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            head = (
                f"POST /v1/generate HTTP/1.1\r\nhost: t\r\ncontent-length: {len(content)}\r\n\r\n"
            )
            connection.sendall(head.encode() + content)
            time.sleep(1.5)
            began_s = time.monotonic()
            server.terminate()
            assert server.wait() == 0
            assert time.monotonic() - began_s < 8
