"""`stepdial loadtest`: checks the server and the mix, then runs Locust in a process of its own.

A process of its own, because Locust patches sockets and threads of whatever imports it.
"""

import argparse
import importlib.util
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from loadtest.mix import SYNTAX, MixError, resolve_mix
from loadtest.plan import DEFAULT_MAX_TOKENS, DEFAULT_TIMEOUT_S, DEFAULT_URL
from loadtest.target import TargetError, read_offers

_LOCUSTFILE = Path(__file__).with_name("locustfile.py")
_MOST_AT_ONCE = 100  # a second: Locust warns that it cannot start more in time
_DURATION = re.compile(r"([0-9]+h)?([0-9]+m)?([0-9]+s)?")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a load test; 0 when every answer was right, 1 when one was not, 2 when it cannot run."""
    options = _parser().parse_args(argv)
    if importlib.util.find_spec("locust") is None:
        print("stepdial loadtest needs Locust: pip install -e '.[loadtest]'", file=sys.stderr)
        return 1
    try:
        weights = resolve_mix(options.mix or None, read_offers(options.url))
    except (TargetError, MixError) as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{options.url}: users {options.users}, duration {options.duration}")
    print("Sending: " + ", ".join(map(str, weights)), flush=True)
    return _run(_locust_command(options))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="stepdial loadtest",
        description="Send a mix of step counts to a running server and report per step count.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--url", type=_url, default=DEFAULT_URL, help="the server (%(default)s)")
    add(
        "--users",
        type=_positive,
        default=8,
        metavar="N",
        help="callers at the same time (%(default)s)",
    )
    add("--spawn-rate", type=_rate, metavar="N", help="callers started a second (all at once)")
    add("--duration", type=_duration, default="30s", help="such as 30s, 2m, 1h30m (%(default)s)")
    add("--mix", default="", help=f"{SYNTAX}; * for every rung (every rung of every model equally)")
    add(
        "--max-tokens",
        type=_positive,
        metavar="N",
        default=DEFAULT_MAX_TOKENS,
        help="length of a generated text (%(default)s)",
    )
    add(
        "--timeout",
        type=_rate,
        metavar="SECONDS",
        default=DEFAULT_TIMEOUT_S,
        help="seconds of silence before a request counts as failed (%(default)s)",
    )
    add(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="folder for report.json, report.md and report.html",
    )
    add("--web", action="store_true", help="steer the test from a page instead; report at /steps")
    add(
        "--web-port",
        type=_positive,
        default=8089,
        metavar="PORT",
        help="port of that page (%(default)s)",
    )
    return parser


def _locust_command(options: argparse.Namespace) -> list[str]:
    command = [sys.executable, "-m", "locust", "-f", str(_LOCUSTFILE)]
    values = {
        "--host": options.url,
        "--users": options.users,
        "--spawn-rate": options.spawn_rate or min(options.users, _MOST_AT_ONCE),
        "--run-time": options.duration,
        "--mix": options.mix,
        "--max-tokens": options.max_tokens,
        "--answer-timeout": options.timeout,
        # Longer than a silent answer is waited for, so that silence is reported as such.
        "--stop-timeout": math.ceil(options.timeout) + 1,
        "--out": options.out or "",
    }
    for flag, value in values.items():
        command.append(f"{flag}={value}")
    if options.web:
        return [*command, "--web-host=127.0.0.1", f"--web-port={options.web_port}"]
    # Naming a file for Locust's own statistics also keeps it from printing them.
    quiet = ["--only-summary", "--loglevel=WARNING", f"--json-file={os.devnull}"]
    return [*command, "--headless", *quiet]


def _run(command: list[str]) -> int:
    with subprocess.Popen(command, stdin=subprocess.DEVNULL) as process:
        signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:
                # The terminal has interrupted Locust as well, which is finishing its report.
                continue


def _url(text: str) -> str:
    if not re.match(r"https?://[^/]", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no address; write http://host:port")
    return text.rstrip("/")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return value


def _duration(text: str) -> str:
    text = f"{text}s" if text.isdecimal() else text
    if _DURATION.fullmatch(text) is None or not re.search("[1-9]", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no duration; write 30s, 2m or 1h30m")
    return text


if __name__ == "__main__":
    sys.exit(main())
