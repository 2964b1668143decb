"""`stepdial loadtest`: checks the server and the options, then runs Locust."""

import argparse
import importlib.util
import math
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from loadtest.launch import locust_command, run
from loadtest.options import above_0, add_shared, complaint, positive, shape_of, terms_of
from loadtest.output import say, unwritable
from loadtest.plan import REFUSALS, Plan
from loadtest.schedule import DEFAULT_URL
from loadtest.search import MeasuringEndedError
from loadtest.target import TargetError, checked_address, left_out, read_key, read_offers
from stepdial import Options, install_command

_ABOUT = (
    "Send a mix of step counts to a running server and report per step count. "
    "`stepdial loadtest compare A B` sets two reports side by side."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a load test; 0 when every answer was right, 1 when one was not, 2 when it cannot run."""
    arguments = [*(sys.argv[1:] if argv is None else argv)]
    parser = build_parser()
    compares = arguments[:1] == ["compare"]
    options = argparse.Namespace() if compares else parser.parse_args(arguments)
    missing = [name for name in ("locust", "matplotlib") if not importlib.util.find_spec(name)]
    if missing:
        needs = " and ".join(missing)
        print(f"stepdial loadtest needs {needs}: {install_command('loadtest')}", file=sys.stderr)
        return 1
    if compares:
        # Draws pictures, which takes a second to load: only those who compare wait for it.
        from loadtest.comparison import main as compare

        return compare(arguments[1:])
    if options.find_capacity and not options.shape and not options.trace:
        options.shape = "poisson"
    options.rate = options.rate or ("10" if options.find_capacity else "")
    if wrong := _complaint(options):
        parser.error(wrong)
    try:
        terms = terms_of(options, options.url)
        key = read_key(terms.api_key_file)
        offers = read_offers(terms.url, key)
        others = left_out(terms.url, offers, key)
        plan = Plan(terms, offers)
    except REFUSALS as error:
        say(str(error), sys.stderr)
        return 2
    if options.find_capacity:
        return _find_capacity(options)
    _announce(options, plan, others)
    del plan  # Locust makes it again, and a long schedule need not be kept twice
    return run(locust_command(options, options.url)).status


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = Options(prog="stepdial loadtest", description=_ABOUT, allow_abbrev=False)
    add = parser.add_argument
    add("--url", type=_url, default=DEFAULT_URL, help="the server (%(default)s)")
    about = "callers of a closed loop (%(default)s)"
    add("--users", type=positive, default=8, metavar="N", help=about)
    about = "callers started per second (default: all, or 100 of more)"
    add("--spawn-rate", type=above_0, metavar="N", help=about)
    add_shared(parser, "--timeout")
    about = "send from N processes of this machine (one)"
    add("--workers", type=positive, metavar="N", help=about)
    about = "find the highest rate that keeps --objective, beginning at --rate (10)"
    add("--find-capacity", action="store_true", help=about)
    about = "stop when the rates that meet and miss are this close, as a share (%(default)s)"
    add("--precision", type=above_0, default=0.05, metavar="SHARE", help=about)
    about = "most tests of --find-capacity (%(default)s)"
    add("--most-points", type=positive, default=16, metavar="N", help=about)
    about = "control the test from a web page instead; its report is at /steps"
    add("--web", action="store_true", help=about)
    about = "port of that web page (%(default)s)"
    add("--web-port", type=positive, default=8089, metavar="PORT", help=about)
    return parser


def _complaint(options: argparse.Namespace) -> str | None:
    if wrong := complaint(options) or (unwritable(Path(options.out)) if options.out else None):
        return wrong
    if options.find_capacity:
        if not options.objective:
            return "--find-capacity needs --objective, such as latency_p99_ms<200"
        if options.web or options.apart or shape_of(options) == "closed":
            return "--find-capacity goes with open shapes, without --web and --apart"
        if options.requests:
            return "--find-capacity measures each rate for --duration, so not with --requests"
        if options.keep_requests or options.out.endswith(".json"):
            return "--find-capacity keeps what it found in --out FOLDER, without --keep-requests"
    closed = shape_of(options) == "closed"
    if options.requests and closed and (options.workers or 1) > options.users:
        return "--requests are shared by --workers, each of which needs one of --users at least"
    if options.max_in_flight and (options.workers or 1) > options.max_in_flight:
        return "--max-in-flight is shared by --workers: it must be as many at least"
    return None


def _announce(options: argparse.Namespace, plan: Plan, others: Sequence[str]) -> None:
    schedule = plan.schedule
    if schedule is None:
        until = f"{options.requests} requests" if options.requests else ""
        if math.isfinite(seconds := plan.terms.duration_s):
            until += f"{', at most ' if until else ''}{seconds:g} s"
        say(f"{options.url}: {options.users} users, {until}")
    else:
        say(f"{options.url}: {len(schedule.shots)} requests in {schedule.length_s:.0f} s")
        say(plan.terms.arrivals)
    say("Sending: " + ", ".join(map(str, plan.weights)))
    if others:
        say(f"Left out, since they take no free text: {', '.join(others)}.")
    if options.web:
        say(f"Start it at http://127.0.0.1:{options.web_port}; its report is at /steps there.")


def _find_capacity(options: argparse.Namespace) -> int:
    # Draws pictures, which takes a second to load: only those who look for a rate wait for it.
    from loadtest.capacity import find_capacity, render_capacity, start_of, write_capacity

    # Between two tests, too, what was found until then is told.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        capacity = find_capacity(options, start_of(options))
    except MeasuringEndedError as error:
        say(f"No rate was measured: {error}.", sys.stderr)
        return 2
    say("\n" + render_capacity(capacity))
    if options.out:
        try:
            write_capacity(capacity, options.objective, Path(options.out))
        except OSError as error:
            say(f"The capacity could not be written to {options.out}: {error}.", sys.stderr)
            return 2
        say(f"Capacity written to {options.out}.")
    return 0 if capacity.met_per_s is not None else 1


def _url(text: str) -> str:
    try:
        return checked_address(text)
    except TargetError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


if __name__ == "__main__":
    sys.exit(main())
