"""More connections than there may be: who goes, who stays, and that probes are always answered."""

import re
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import httpx
import pytest

from tests.faults.raw_http import GOOD, error_code, get, head, one_answer, status, until_closed
from tests.fixtures.tiny_folders import classify_bundle
from tests.server_process import ServerProcess, server_process

FOLDERS = [classify_bundle().folder]
WHOLE = head(len(GOOD)) + GOOD
HALF = WHOLE[:-1]


def connect(port: int, source: str = "127.0.0.1") -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), 10, source_address=(source, 0))


def health_url(server: ServerProcess) -> str:
    found = re.search(r"metrics also on (http://\S+)", server.banner)
    assert found is not None
    return found[1]


@contextmanager
def silence(port: int, number: int) -> Iterator[None]:
    """So many connections that say nothing, opened again whenever one is closed."""
    over = threading.Event()
    with ExitStack() as held:
        silent = []
        for _ in range(number):
            silent.append(held.enter_context(connect(port)))
            silent[-1].setblocking(False)

        def renew() -> None:
            while not over.is_set():
                for index, one in enumerate(silent):
                    try:
                        if one.recv(1000):
                            continue
                    except BlockingIOError:
                        continue
                    except OSError:
                        pass
                    one.close()
                    silent[index] = connect(port)
                    silent[index].setblocking(False)
                over.wait(0.25)

        thread = threading.Thread(target=renew)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            for one in silent:
                one.close()


def test_silent_connections_keep_nobody_out() -> None:
    with (
        server_process(FOLDERS, "--max-connections", "200") as server,
        silence(server.port, 300),
    ):
        for _ in range(35):
            for path in ("/health/live", "/health/ready"):
                assert httpx.get(server.url + path, timeout=5).status_code == 200
            body = {"input": "x"}
            assert httpx.post(f"{server.url}/v1/classify", json=body).status_code == 200
        shown = httpx.get(f"{server.url}/metrics").text
        assert re.search(r"stepdial_connections_evicted_total [1-9]", shown)
        assert 'reason="too_many_connections"' not in shown


@pytest.mark.long
def test_those_idle_longest_go_first_and_half_a_head_is_told_why() -> None:
    with (
        server_process(FOLDERS, "--max-connections", "4") as server,
        ExitStack() as held,
    ):
        heads, answered, working, fresh = (
            held.enter_context(connect(server.port)) for _ in range(4)
        )
        heads.sendall(WHOLE[:20])
        answered.sendall(WHOLE)
        assert status(one_answer(answered)) == 200
        working.sendall(HALF)
        server.wait_until_it_has_read()
        held.enter_context(connect(server.port))
        told = until_closed(heads, 5)
        assert (status(told), error_code(told)) == (503, "too_many_connections")
        held.enter_context(connect(server.port))
        assert until_closed(fresh, 5) == b""  # it has been idle for longer than the next
        held.enter_context(connect(server.port))
        assert until_closed(answered, 5) == b""
        working.sendall(WHOLE[-1:])
        assert status(one_answer(working)) == 200


@pytest.mark.long
def test_an_address_has_its_share_and_a_proxy_all() -> None:
    flags = ("--max-connections", "40", "--max-address-connections", "4")
    with (
        server_process(FOLDERS, *flags, "--trusted-proxies", "127.0.0.9,10.0.0.0/8") as server,
        ExitStack() as held,
    ):
        greedy = [held.enter_context(connect(server.port, "127.0.0.2")) for _ in range(4)]
        for one in greedy:
            one.sendall(HALF)
        server.wait_until_it_has_read()
        with connect(server.port, "127.0.0.2") as more:
            more.sendall(WHOLE)
            told = until_closed(more, 5)
            assert (status(told), error_code(told)) == (503, "too_many_connections")
        with connect(server.port, "127.0.0.2") as more:
            more.sendall(get("/health/live"))
            assert status(one_answer(more)) == 200
        for source in ("127.0.0.3", "127.0.0.9"):
            with connect(server.port, source) as other:
                other.sendall(WHOLE)
                assert status(one_answer(other)) == 200
        proxied = [held.enter_context(connect(server.port, "127.0.0.9")) for _ in range(20)]
        for one in proxied:
            one.sendall(HALF)
        for one in (*greedy, *proxied):
            one.sendall(WHOLE[-1:])
            assert status(one_answer(one)) == 200
        # Those that are answered are idle, so there is room for one more of the same address.
        with connect(server.port, "127.0.0.2") as more:
            more.sendall(WHOLE)
            assert status(one_answer(more)) == 200
            assert until_closed(greedy[0], 5) == b""


@pytest.mark.long
def test_the_port_of_probes_has_these_and_no_client_fills_it() -> None:
    flags = ("--max-connections", "10", "--health-port", "0")
    with server_process(FOLDERS, *flags) as server, ExitStack() as held:
        health = health_url(server)
        for _ in range(10):
            held.enter_context(connect(server.port)).sendall(HALF)
        server.wait_until_it_has_read()
        with connect(server.port) as more:  # the other port answers nobody any more
            more.sendall(WHOLE)
            assert status(until_closed(more, 5)) == 503
        with silence(int(health.rpartition(":")[2]), 100):  # nor is it filled itself
            for _ in range(10):
                for path in ("/health", "/health/live", "/health/ready", "/metrics"):
                    assert httpx.get(health + path, timeout=5).status_code == 200
        for path in ("/", "/v1/models", "/docs", "/admin/models"):
            assert httpx.get(health + path).json()["error"]["code"] == "not_found"
        asked = httpx.post(f"{health}/v1/classify", json={"input": "x"})
        assert (asked.status_code, asked.json()["error"]["code"]) == (404, "not_found")
