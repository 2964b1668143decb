"""The real server when memory, files or the disk of its output run out, and when clocks jump."""

import os
import re
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from serve.bundle import Shape
from tests.faults.raw_http import GOOD, head
from tests.fixtures.tiny_bundles import build_generate
from tests.fixtures.tiny_folders import classify_bundle, generate_bundle
from tests.server_process import ServerProcess, free_port, server_process
from tests.waiting import wait_until

KEY = "an-admin-key-of-some-length"
BEARER = {"authorization": f"Bearer {KEY}"}
FAKETIME = next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"), None)
CLASSIFY = head(len(GOOD)) + GOOD
WIDE = Shape(layers=4, heads=8, head_width=32, width=64, parameters=1)
LARGE = Shape(layers=1, heads=1, head_width=64, width=2048, parameters=1)
GAUGES = ("stepdial_queue_depth", "stepdial_in_flight", "stepdial_cache_bytes")


def gauges(client: httpx.Client) -> list[float]:
    text = client.get("/metrics").text
    return [float(re.findall(rf"^{name} (\S+)$", text, re.MULTILINE)[0]) for name in GAUGES]


def leave_memory(server: ServerProcess, size: int) -> None:
    """Let it have only so much more than it has."""
    limit = server.memory_kib("VmSize") * 1024 + size
    resource.prlimit(server.process.pid, resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))


def wait_until_ready(client: httpx.Client) -> None:
    wait_until(lambda: client.get("/health/ready").status_code == 200)


def asked(client: httpx.Client, prompt: str, tokens: int) -> httpx.Response:
    body = {"prompt": prompt, "max_tokens": tokens, "steps": 4, "temperature": 0, "model": "wide"}
    return client.post("/v1/generate", json=body)


@pytest.mark.long
def test_a_server_short_of_memory_refuses_loads_and_requests_and_recovers(tmp_path: Path) -> None:
    wide = build_generate(tmp_path / "wide", name="wide", max_tokens=2048, shape=WIDE).folder
    large = build_generate(tmp_path / "large", name="large", max_tokens=64, shape=LARGE).folder
    flags = ("--threads", "1", "--cache-mb", "4096", "--admin-folders", str(tmp_path))
    own = {"STEPDIAL_ADMIN_KEY": KEY}
    with (
        server_process([wide], *flags, environment=own, cold=True) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        sound = asked(client, "To be", 10).raise_for_status().json()["text"]
        leave_memory(server, 16 << 20)
        refused = client.post("/admin/models", json={"bundle": str(large)}, headers=BEARER)
        assert refused.status_code == 422
        assert "there is not enough memory" in refused.json()["error"]["message"]
        leave_memory(server, 4 << 20)
        with ThreadPoolExecutor(12) as pool:
            long = list(pool.map(lambda _: asked(client, "To be or not " * 150, 32), range(12)))
        assert {one.status_code for one in long} <= {200, 429, 503}
        failed = [one.json()["error"]["code"] for one in long if one.status_code == 503]
        assert failed and set(failed) <= {"model_failure", "not_ready", "out_of_memory"}
        assert asked(client, "To be", 10).raise_for_status().json()["text"] == sound
        no_limit = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        resource.prlimit(server.process.pid, resource.RLIMIT_AS, no_limit)
        wait_until_ready(client)
        assert asked(client, "To be or not " * 60, 8).status_code == 200
        loaded = client.post("/admin/models", json={"bundle": str(large)}, headers=BEARER)
        assert loaded.status_code == 200
        assert gauges(client) == [0.0, 0.0, 0.0]


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    with server_process([classify_bundle().folder]) as running:
        yield running


def cpu_s(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def answer(connection: socket.socket) -> bytes:
    """The first line of what comes; nothing from a connection that was cut."""
    try:
        connection.sendall(CLASSIFY)
        return connection.recv(1000).partition(b"\r\n")[0]
    except ConnectionError:
        return b""


def test_without_files_open_connections_are_answered_and_new_ones_again(
    server: ServerProcess,
) -> None:
    process = server.process.pid
    with httpx.Client(base_url=server.url, timeout=20) as client:
        client.get("/health/live")
        before = len(os.listdir(f"/proc/{process}/fd"))
        _, hard = resource.prlimit(process, resource.RLIMIT_NOFILE)
        resource.prlimit(process, resource.RLIMIT_NOFILE, (before + 10, hard))
        many = [socket.create_connection(("127.0.0.1", server.port), 5) for _ in range(40)]
        spent_s, began_s = cpu_s(process), time.monotonic()
        time.sleep(1)
        assert cpu_s(process) - spent_s < 0.3 * (time.monotonic() - began_s), "it spins"
        assert client.post("/v1/classify", json={"input": "x"}).status_code == 200
        answers = [answer(one) for one in many]
        assert answers.count(b"HTTP/1.1 200 OK") >= 5
        assert set(answers) == {b"HTTP/1.1 200 OK", b""}
        for one in many:
            one.close()
        wait_until(
            lambda: len(os.listdir(f"/proc/{process}/fd")) <= before, "files are left open", 5
        )
        again = httpx.post(f"{server.url}/v1/classify", json={"input": "x"}, timeout=10)
        assert again.status_code == 200
        assert gauges(client) == [0.0, 0.0, 0.0]


def test_clients_beyond_the_files_that_there_are_are_told_so() -> None:
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (160, 160)); "
        "from serve.__main__ import main; sys.exit(main())"
    )
    command = [sys.executable, "-c", code, str(classify_bundle().folder), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None
        said = ""
        while "Ctrl-C" not in said:
            said += process.stdout.readline().decode()
        assert "may open 160 files, too few for 1000 connections" in said
        port = int(re.findall(r"http://127.0.0.1:(\d+) ", said)[0])
        try:
            many = [socket.create_connection(("127.0.0.1", port), 5) for _ in range(80)]
            for one in many:  # or they would make room for the others
                one.sendall(CLASSIFY[:-1])
            time.sleep(0.5)
            many += [socket.create_connection(("127.0.0.1", port), 5) for _ in range(30)]
            for one in many[80:]:
                one.sendall(CLASSIFY)
            refused = [one.recv(1000).partition(b"\r\n")[0] for one in many[80:]]
            assert refused == [b"HTTP/1.1 503 Service Unavailable"] * 30
            for one in many[:80]:
                one.sendall(CLASSIFY[-1:])
                assert one.recv(1000).startswith(b"HTTP/1.1 200 OK")
            for one in many:
                one.close()
        finally:
            process.terminate()
        assert process.wait(20) == 0


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_output_that_nobody_takes_stops_nothing(log_format: str) -> None:
    """A full disk under standard output and error, from the first line on."""
    port = free_port()
    flags = ["--port", str(port), "--access-log", "--log-format", log_format]
    folders = [str(classify_bundle().folder), "--admin-folders", str(generate_bundle().folder)]
    with (
        Path("/dev/full").open("w") as full,
        subprocess.Popen(
            [sys.executable, "-m", "serve", *folders, *flags],
            stdout=full,
            stderr=full,
            env=os.environ | {"STEPDIAL_ADMIN_KEY": KEY},
        ) as process,
    ):
        transport = httpx.HTTPTransport(retries=12)
        url = f"http://127.0.0.1:{port}"
        with httpx.Client(base_url=url, transport=transport, timeout=30) as client:
            wait_until_ready(client)
            assert client.post("/v1/classify", json={"input": "x"}).status_code == 200
            body = {"bundle": str(generate_bundle().folder)}
            assert client.post("/admin/models", json=body, headers=BEARER).status_code == 200
            assert len(client.get("/v1/models").json()["data"]) == 2
        process.terminate()
        assert process.wait(20) == 0


@pytest.mark.skipif(
    FAKETIME is None, reason="LEFT OUT: no libfaketime (Debian: apt-get install faketime)"
)
def test_clocks_that_jump_end_no_request(tmp_path: Path) -> None:
    """Hours forth and back between and within requests with deadlines; time itself goes on."""
    offset = tmp_path / "offset"
    offset.write_text("+0\n")
    environment = {
        "LD_PRELOAD": str(FAKETIME),
        "FAKETIME_TIMESTAMP_FILE": str(offset),
        "FAKETIME_NO_CACHE": "1",
        "DONT_FAKE_MONOTONIC": "1",
    }
    folders = [classify_bundle().folder, generate_bundle().folder]
    stream = {"prompt": "a", "max_tokens": 40, "stream": True, "deadline_ms": 30_000}
    with (
        server_process(folders, "--threads", "1", environment=environment, cold=True) as server,
        httpx.Client(base_url=server.url, timeout=30) as client,
    ):
        created = []
        for jump in ("+30d", "-30d", "+10y"):
            with client.stream("POST", "/v1/generate", json=stream) as response:
                pieces = response.iter_text()
                text = next(pieces)
                offset.write_text(f"{jump}\n")
                text += "".join(pieces)
            assert text.count("event: done") == 1 and "event: error" not in text
            body = {"input": "x", "deadline_ms": 5000}
            answered = client.post("/v1/classify", json=body)
            assert answered.status_code == 200
            assert answered.json()["timing"]["total_ms"] < 5000
            assert client.get("/health/ready").status_code == 200
            completed = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
            created.append(completed.json()["created"])
        assert max(created) - min(created) > 10 * 365 * 86400, "the clock did not jump"
        assert gauges(client) == [0.0, 0.0, 0.0]
