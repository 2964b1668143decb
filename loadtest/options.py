"""The options that `stepdial loadtest` and plain `locust` share.

Whether the server has the models and rungs that are named is checked by the plan.
"""

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from loadtest.arrivals import RATE_SYNTAX, SHAPES, THINK_SYNTAX, Rate, parse_think_time
from loadtest.mix import SYNTAX as MIX_SYNTAX
from loadtest.objective import SYNTAX as OBJECTIVE_SYNTAX
from loadtest.objective import ObjectiveError, parse_objective
from loadtest.schedule import (
    DEFAULT_DURATION_S,
    DEFAULT_MAX_TOKENS,
    DEFAULT_TIMEOUT_S,
    DEFAULT_URL,
    Terms,
    parse_duration,
    parse_lengths,
    parse_levels,
)
from loadtest.target import checked_address

# What both commands know, in the words of their flags; `forwarded` hands them on.
_SHARED = (
    *("mix", "max_tokens", "prompt_tokens", "prompts", "labels", "seed", "answer_timeout"),
    *("shape", "rate", "duration", "burstiness", "period", "trace", "speed", "length_scale"),
    *("warm_up", "pause", "drain", "objective", "max_lag_ms", "max_rest", "out", "api_key_file"),
    *("requests", "think_time", "max_in_flight"),
)
_SWITCHES = ("apart", "keep_requests")


def add_shared(parser: argparse.ArgumentParser, timeout_flag: str) -> None:
    """What is sent, when it is sent, what is wanted, and where the report goes."""

    def add(
        flag: str, kind: Callable[[str], object], default: Any, about: str, **more: Any
    ) -> None:
        text = about if "%(default)s" in about else about.replace("%", "%%")
        parser.add_argument(flag, type=kind, default=default, help=text, **more)

    add(
        "--mix", str, "", f"{MIX_SYNTAX}; * for every step count (every one of every model equally)"
    )
    about = "most tokens to generate per request (%(default)s)"
    add("--max-tokens", positive, DEFAULT_MAX_TOKENS, about, metavar="N")
    about = "length of prompts: 64, or 16..200 drawn evenly (example texts)"
    add("--prompt-tokens", checked(parse_lengths), "", about, metavar="N")
    about = 'file of prompts for models that generate: one per line, plain or as {"prompt": "..."}'
    add("--prompts", str, "", about, metavar="FILE")
    about = "file of text<TAB>label lines to classify; their labels give the accuracy"
    add("--labels", str, "", about, metavar="FILE")
    add("--seed", whole, 0, "the same seed sends the same requests at the same times (%(default)s)")
    about = "seconds of silence before a request counts as failed (%(default)s)"
    add(timeout_flag, above_0, DEFAULT_TIMEOUT_S, about, dest="answer_timeout", metavar="SECONDS")
    about = "closed loop, or an open loop of these arrivals (closed; with --rate: poisson)"
    add("--shape", str, "", about, choices=("", *SHAPES), metavar="|".join(SHAPES))
    add("--rate", checked(parse_levels), "", RATE_SYNTAX, metavar="R")
    about = "30s, 2m or 1h30m, for each level of --rate (30s; with --requests until all are sent)"
    add("--duration", checked(parse_duration), None, about)
    about = "end after this many requests at each level of --rate, not counting those of --warm-up"
    add("--requests", positive, None, about, metavar="N")
    about = f"from an answer to the next request of the same caller, {THINK_SYNTAX} (none)"
    add("--think-time", checked(parse_think_time), None, about, metavar="SECONDS")
    about = (
        "most requests of an open loop in flight at a time; others wait to be sent, which counts "
        "as latency (no limit)"
    )
    add("--max-in-flight", positive, None, about, metavar="N")
    about = (
        "variance of the gaps of bursty, where Poisson's is 1; peak to mean of onoff (%(default)s)"
    )
    add("--burstiness", above_0, 4.0, about, metavar="B")
    add("--period", above_0, 10.0, "seconds of onoff (%(default)s)", metavar="SECONDS")
    about = "CSV to replay: time, prompt tokens, generated tokens"
    add("--trace", str, "", about, metavar="FILE")
    add("--speed", above_0, 1.0, "speed of the replay, unless --rate sets it (%(default)s)")
    about = "factor for the lengths of the trace (%(default)s)"
    add("--length-scale", above_0, 1.0, about, metavar="X")
    about = "seconds at the start that are sent but not counted (%(default)s)"
    add("--warm-up", not_below_0, 0.0, about, metavar="SECONDS")
    add("--pause", not_below_0, 2.0, "seconds between levels (%(default)s)", metavar="SECONDS")
    about = "seconds to wait for answers after the last request (default: as --timeout)"
    add("--drain", not_below_0, None, about, metavar="SECONDS")
    parser.add_argument(
        "--apart",
        action="store_true",
        help="test each operation of the mix by itself",
    )
    add("--objective", checked(_check_objective), "", OBJECTIVE_SYNTAX, metavar="LIMITS")
    about = "the sender counts as too slow if 1 %% of its requests leave this late (%(default)s)"
    add("--max-lag-ms", above_0, 10.0, about, metavar="MS")
    about = (
        "longest wait of a refused caller of a closed loop, who follows Retry-After up to this; "
        "0: come back at once (%(default)s)"
    )
    add("--max-rest", not_below_0, 10.0, about, metavar="SECONDS")
    about = "folder for report.json, .md, .html and .png; or FILE.json for the JSON alone"
    add("--out", str, "", about, metavar="FOLDER")
    about = "file with an API key of the server, sent with each request"
    add("--api-key-file", str, "", about, metavar="FILE")
    parser.add_argument(
        "--keep-requests", action="store_true", help="also keep every request, in requests.csv"
    )


def forwarded(options: argparse.Namespace) -> list[str]:
    """The shared options as flags for Locust."""
    values = {name: getattr(options, name) for name in _SHARED}
    flags = [
        f"--{name.replace('_', '-')}={value}" for name, value in values.items() if value is not None
    ]
    switches = [f"--{name.replace('_', '-')}" for name in _SWITCHES if getattr(options, name)]
    return flags + switches


def complaint(options: argparse.Namespace) -> str | None:
    """What does not go together; None if all does."""
    shape = shape_of(options)
    if shape == "closed" and options.rate:
        return "--rate is for an open loop: leave out --shape closed, or set --users instead"
    if shape == "replay" and not options.trace:
        return "--shape replay needs --trace FILE"
    if options.trace and shape != "replay":
        return f"--trace is replayed, so it does not go with --shape {shape}"
    if shape not in ("closed", "replay") and not options.rate:
        return f"--shape {shape} needs --rate, {RATE_SYNTAX}"
    if shape == "replay" and any(rate.begin_per_s != rate.end_per_s for rate in _rates(options)):
        return "a trace cannot be replayed along a ramp: name levels"
    if options.apart and shape == "closed":
        return "--apart is for an open loop: add --rate"
    if shape == "onoff" and options.burstiness < 1:
        return "--burstiness of onoff is peak to mean, so at least 1"
    if shape != "closed" and options.think_time:
        return "--think-time is for a closed loop: an open one sends when a request is due"
    if shape == "closed" and options.max_in_flight:
        return "--max-in-flight is for an open loop: in a closed one --users is that limit"
    if options.requests and any(rate.begin_per_s != rate.end_per_s for rate in _rates(options)):
        return "--requests does not go with a ramp, which --duration ends"
    if options.keep_requests and not options.out:
        return "--keep-requests needs --out FOLDER"
    return None


def shape_of(options: argparse.Namespace) -> str:
    """The shape that was named, or that follows from what else was."""
    implied = "replay" if options.trace else "poisson" if options.rate else "closed"
    return options.shape or implied


def duration_s_of(options: argparse.Namespace) -> float:
    """How long a level lasts at most; without end where only the number of requests ends it."""
    if options.duration is None:
        return math.inf if options.requests else DEFAULT_DURATION_S
    return parse_duration(options.duration)


def terms_of(options: argparse.Namespace, url: str | None) -> Terms:
    """The options as one value."""
    shape = shape_of(options)
    timeout_s = options.answer_timeout
    return Terms(
        url=checked_address(url or DEFAULT_URL),
        mix=options.mix,
        max_tokens=options.max_tokens,
        timeout_s=timeout_s,
        shape=shape,
        rates=_rates(options),
        duration_s=duration_s_of(options),
        requests=options.requests,
        warm_up_s=options.warm_up,
        pause_s=options.pause,
        drain_s=timeout_s if options.drain is None else options.drain,
        apart=options.apart,
        burstiness=options.burstiness,
        period_s=options.period,
        trace=options.trace and str(Path(options.trace).absolute()),
        speed=options.speed,
        length_scale=options.length_scale,
        prompt_tokens=options.prompt_tokens,
        seed=options.seed,
        prompts=options.prompts and str(Path(options.prompts).absolute()),
        labels=options.labels and str(Path(options.labels).absolute()),
        objective=options.objective,
        max_lag_ms=options.max_lag_ms,
        max_rest_s=options.max_rest,
        think_time=options.think_time or "",
        max_in_flight=options.max_in_flight,
        api_key_file=options.api_key_file and str(Path(options.api_key_file).absolute()),
    )


def positive(text: str) -> int:
    """A whole number above 0."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


def whole(text: str) -> int:
    """A whole number, 0 or more."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number")
    return int(text)


def above_0(text: str) -> float:
    """A number above 0."""
    value = _number(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return value


def not_below_0(text: str) -> float:
    """A number, 0 or more."""
    value = _number(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 0")
    return value


def checked(parse: Callable[[str], object]) -> Callable[[str], str]:
    """The text itself, once it was found to mean something."""

    def check(text: str) -> str:
        try:
            parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return text

    return check


def _check_objective(text: str) -> None:
    try:
        parse_objective(text)
    except ObjectiveError as error:
        raise ValueError(str(error)) from None


def _rates(options: argparse.Namespace) -> tuple[Rate, ...]:
    return parse_levels(options.rate)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return -1.0
