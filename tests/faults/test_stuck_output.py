"""Pipes for standard output and error that nobody reads: lines are lost and counted, no more."""

import os
import re
import signal
import subprocess
import sys
import time

import httpx
import pytest

from tests.fixtures.tiny_folders import classify_bundle
from tests.server_process import free_port

REQUESTS = 300


@pytest.mark.long
def test_a_pipe_that_nobody_reads_loses_lines_and_nothing_else() -> None:
    port = free_port()
    reading, writing = os.pipe()
    command = [sys.executable, "-m", "serve", str(classify_bundle().folder)]
    command += ["--port", str(port), "--access-log", "--log-level", "info"]
    process = subprocess.Popen(command, stdout=writing, stderr=writing)
    os.close(writing)
    try:
        transport = httpx.HTTPTransport(retries=12)
        url = f"http://127.0.0.1:{port}"
        with httpx.Client(base_url=url, transport=transport, timeout=10) as client:
            end_s = time.monotonic() + 30
            while time.monotonic() < end_s:
                if client.get("/health/ready").status_code == 200:
                    break
            long = "/" + "x" * 15_000
            for _ in range(REQUESTS // 3):  # long lines fill pipe and queue sooner
                assert client.get(long).status_code == 404
            for _ in range(REQUESTS):
                assert client.post("/v1/classify", json={"input": "x"}).status_code == 200
            shown = client.get("/metrics").text
            found = re.search(r"\nstepdial_log_lines_dropped_total (\S+)", shown)
            assert found is not None and float(found[1]) > 100
        process.send_signal(signal.SIGTERM)  # and the pipe is still full
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.wait()
        os.close(reading)
