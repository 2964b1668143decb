"""All attacks at once beside clients that behave: `python -m tests.faults.all_attacks`.

Each attack is a process of its own, from an address of its own. What must hold: the clients lose
nothing, probes at their own port answer within a second at the 99th percentile, memory ends where
it began, and the gauges end at zero. `--attacks` names some of them; the test beside this runs
those that connections have to withstand.
"""

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from pathlib import Path

from tests.faults.raw_http import GOOD, get, head

ROOT = Path(__file__).resolve().parents[2]
MEMORY_KIB = 20 * 1024
PROBE_S = 1.0
_CLIENTS = 4
_WARM_S, _CALM_S = 5.0, 25.0  # at most: the server returns free memory every 10 s
_PROBE_EVERY_S = 0.1
_NICER = 10  # attackers have machines of their own
Attack = Callable[["Target"], None]


@dataclass(frozen=True, slots=True)
class Target:
    """A server, and where the attack comes from."""

    port: int
    source: str

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), 5, (self.source, 0))

    def send(self, *pieces: bytes, repeat: int = 0) -> None:
        """Send, the last piece again and again, and read what comes."""
        try:
            with self.connect() as connection:
                for piece in (*pieces, *pieces[-1:] * repeat):
                    connection.sendall(piece)
                while connection.recv(2**16):
                    pass
        except OSError:
            pass


def trailers(target: Target) -> None:
    many = b"".join(b"a%06x: b\r\n" % number for number in range(5000))
    target.send(
        head(None, "transfer-encoding: chunked", path="/health"), b"0\r\n", many, repeat=800
    )


def endless_trailer(target: Target) -> None:
    first = head(None, "transfer-encoding: chunked")
    target.send(first, b"0\r\nx: ", b"y" * 2**17, repeat=400)


def held(target: Target, sent: bytes, number: int) -> None:
    """So many connections on which this was sent, until the server has closed most of them."""
    open_ones = []
    try:
        for _ in range(number):
            connection = target.connect()
            connection.sendall(sent)
            open_ones.append(connection)
        time.sleep(2)
    except OSError:
        pass
    finally:
        for connection in open_ones:
            connection.close()


def silence(target: Target) -> None:
    held(target, b"", 1200)


def slow_heads(target: Target) -> None:
    held(target, b"GET /health HTTP/1.1\r\nx: ", 1000)


def kept_alive(target: Target) -> None:
    held(target, get("/health"), 1064)


def half_bodies(target: Target) -> None:
    held(target, head(len(GOOD)) + GOOD[:-1], 300)


def garbage(target: Target) -> None:
    for sent in (b"\x16\x03\x01" * 1000, b"\0" * 9000, get("/" + "a" * 40_000), get("/") * 5000):
        target.send(sent)


def codings(target: Target) -> None:
    target.send(head(None, "transfer-encoding: gzip, chunked") + b"1\r\nx\r\n0\r\n\r\n")


def unread(target: Target) -> None:
    held(target, get("/docs") * 20, 50)


def left(target: Target) -> None:
    body = json.dumps({"prompt": "To be", "max_tokens": 2000, "stream": True}).encode()
    held(target, head(len(body), path="/v1/generate") + body, 20)


def posted(target: Target, path: str, body: bytes) -> None:
    target.send(head(len(body), "connection: close", path=path) + body)


def invalid_items(target: Target) -> None:
    body = b'{"inputs":[' + b",".join([b"{}"] * 340_000) + b"]}"
    posted(target, "/v2/models/tiny-classify/infer", body)


def unknown_fields(target: Target) -> None:
    fields = ",".join(f'"a{number}":1' for number in range(80_000))
    posted(target, "/v1/generate", f"{{{fields}}}".encode())


def large_answers(target: Target) -> None:
    asked = {"messages": [{"role": "user", "content": "hi"}], "n": 16, "max_tokens": 2000}
    body = json.dumps(asked | {"logprobs": True, "top_logprobs": 20, "steps": 1}).encode()
    posted(target, "/v1/chat/completions", body)


OF_CONNECTIONS: dict[str, Attack] = {
    "trailers": trailers,
    "endless_trailer": endless_trailer,
    "silence": silence,
    "slow_heads": slow_heads,
    "kept_alive": kept_alive,
    "half_bodies": half_bodies,
    "garbage": garbage,
    "codings": codings,
    "unread": unread,
    "left": left,
}
OF_BODIES: dict[str, Attack] = {
    "invalid_items": invalid_items,
    "unknown_fields": unknown_fields,
    "large_answers": large_answers,
}
ATTACKS = OF_CONNECTIONS | OF_BODIES


@dataclass
class Found:
    """What came of it."""

    answers: int = 0
    put_off: int = 0  # told to come back, which loses nothing
    longest_rest_s: float = 0.0  # that a client was told to wait
    lost: list[str] = field(default_factory=list)
    server_said: str = ""
    probes_s: list[float] = field(default_factory=list)
    failed_probes: list[str] = field(default_factory=list)
    memory_kib: tuple[int, int, int] = (0, 0, 0)  # before, at most, after
    gauges: dict[str, float] = field(default_factory=dict)

    @property
    def probe_p99_s(self) -> float:
        return sorted(self.probes_s)[int(len(self.probes_s) * 0.99)]

    def problems(self) -> list[str]:
        """What does not hold, in words."""
        before, _, after = self.memory_kib
        said = [*self.lost[:5], *self.failed_probes[:5]]
        if self.lost:
            said.append(f"the server said: {self.server_said[-2000:]}")
        if self.probe_p99_s > PROBE_S:
            said.append(f"probes took {self.probe_p99_s:.2f} s at the 99th percentile")
        if after - before > MEMORY_KIB:
            said.append(f"{(after - before) / 1024:.0f} MiB more memory at the end")
        said += [f"{name} is {value}" for name, value in self.gauges.items() if value]
        if not self.answers:
            said.append("no client was answered")
        return said


def run(seconds: float, attacks: Sequence[str]) -> Found:
    """All of these attacks on a server of its own, for so long."""
    # Here, since they take seconds to load, which the attackers need not spend.
    import httpx

    from tests.fixtures.tiny_folders import classify_bundle, generate_bundle
    from tests.server_process import server_process

    found, over = Found(), threading.Event()
    folders = [classify_bundle().folder, generate_bundle().folder]
    flags = ("--health-port", "0", "--trusted-proxies", "127.0.0.1")
    with server_process(folders, *flags, cold=True) as server:
        health = re.findall(r"metrics also on (http://\S+)", server.banner)[0]
        threads = [
            threading.Thread(target=_ask, args=(server.url, found, over, number))
            for number in range(_CLIENTS)
        ]
        threads.append(threading.Thread(target=_probe, args=(health, found, over)))
        for thread in threads:
            thread.start()
        httpx.get(f"{server.url}/docs", timeout=30)  # made once, when it is first asked for
        time.sleep(_WARM_S)
        before = server.memory_kib()
        command = [sys.executable, "-m", "tests.faults.all_attacks", "--port", str(server.port)]
        lasting = ["--seconds", str(seconds)]
        attackers = [
            subprocess.Popen(
                [*command, "--attack", name, "--source", f"127.0.0.{number}", *lasting],
                cwd=ROOT,
                preexec_fn=lambda: os.nice(_NICER),
                stderr=subprocess.PIPE,
            )
            for number, name in enumerate(attacks, 2)
        ]
        time.sleep(seconds)
        for name, attacker in zip(attacks, attackers, strict=True):
            if attacker.poll() is not None:
                said = attacker.communicate()[1].decode()[-500:]
                found.lost.append(f"the attack {name} ended by itself: {said}")
            attacker.kill()
            attacker.communicate()
        calm_s = time.monotonic() + _CALM_S
        while server.memory_kib() - before > MEMORY_KIB and time.monotonic() < calm_s:
            time.sleep(0.1)
        over.set()
        for thread in threads:
            thread.join()
        time.sleep(1)
        found.memory_kib = (before, server.memory_kib("VmHWM"), server.memory_kib())
        shown = httpx.get(f"{health}/metrics", timeout=30).text
        for name in ("stepdial_in_flight", "stepdial_queue_depth", "stepdial_cache_bytes"):
            found.gauges[name] = float(re.findall(rf"\n{name} (\S+)", shown)[0])
    found.server_said = server.rest_of_output()
    return found


def _ask(url: str, found: Found, over: threading.Event, number: int) -> None:
    """A client that behaves: one request after another on its connection."""
    import httpx

    with httpx.Client(base_url=url, timeout=60) as client:
        while not over.is_set():
            try:
                if number % 2:
                    body: dict[str, object] = {"prompt": "To be", "max_tokens": 20, "stream": True}
                    answer = client.post("/v1/generate", json=body)
                    whole = "event: done" in answer.text
                else:
                    answer = client.post("/v1/classify", json={"input": "well"})
                    whole = "results" in answer.text
            except httpx.TransportError as error:
                found.lost.append(f"{type(error).__name__}: {error}")
                continue
            if answer.status_code == 429:
                found.put_off += 1
                rest_s = float(answer.headers["retry-after-ms"]) / 1000
                found.longest_rest_s = max(found.longest_rest_s, rest_s)
                over.wait(rest_s)
            elif answer.status_code == 200 and whole:
                found.answers += 1
            else:
                found.lost.append(f"{answer.status_code}: {answer.text[-300:]}")


def _probe(url: str, found: Found, over: threading.Event) -> None:
    """As a supervisor asks: each time on a connection of its own."""
    port = int(url.rpartition(":")[2])
    while not over.is_set():
        for path in ("/health/live", "/health/ready"):
            began_s = time.monotonic()
            with closing(HTTPConnection("127.0.0.1", port, timeout=10)) as connection:
                try:
                    connection.request("GET", path)
                    status = connection.getresponse().status
                    if status != 200:
                        found.failed_probes.append(f"{path} is {status}")
                except (OSError, HTTPException) as error:
                    found.failed_probes.append(f"{path}: {type(error).__name__}: {error}")
            found.probes_s.append(time.monotonic() - began_s)
        over.wait(_PROBE_EVERY_S)


def main(arguments: Sequence[str]) -> int:
    made = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    made.add_argument("--seconds", type=float, default=600.0)
    made.add_argument("--attacks", nargs="+", choices=ATTACKS, default=list(ATTACKS))
    made.add_argument("--attack", choices=ATTACKS, help=argparse.SUPPRESS)
    made.add_argument("--port", type=int, help=argparse.SUPPRESS)
    made.add_argument("--source", help=argparse.SUPPRESS)
    parsed = made.parse_args(arguments)
    if parsed.attack is not None:
        target = Target(parsed.port, parsed.source)
        end_s = time.monotonic() + parsed.seconds + 60  # unless it is killed
        while time.monotonic() < end_s:
            ATTACKS[parsed.attack](target)
            time.sleep(0.1)
        return 0
    found = run(parsed.seconds, parsed.attacks)
    before, most, after = (size / 1024 for size in found.memory_kib)
    print(
        f"{found.answers} answers, {found.put_off} put off, by {found.longest_rest_s:.0f} s "
        f"at most, {len(found.lost)} lost; "
        f"{len(found.probes_s)} probes, {len(found.failed_probes)} failed, p99 "
        f"{found.probe_p99_s * 1000:.0f} ms, longest {max(found.probes_s) * 1000:.0f} ms; "
        f"memory {before:.0f}, at most {most:.0f}, at the end {after:.0f} MiB"
    )
    for problem in found.problems():
        print(f"does not hold: {problem}")
    return 1 if found.problems() else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
