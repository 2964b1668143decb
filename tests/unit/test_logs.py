"""How lines of the log look, and which requests the engine's own are about."""

import json
import logging
import os
import select
import sys
import time

import numpy as np
import pytest

from serve.logs import JsonLines, LineWriter, TextLines, line, tell_dropped
from tests.engine_bench import running


def record(message: str, *arguments: object, **extra: object) -> logging.LogRecord:
    return logging.getLogger("stepdial").makeRecord(
        "stepdial", logging.WARNING, __file__, 1, message, arguments, None, extra=extra
    )


def test_a_record_is_one_object_on_one_line() -> None:
    written = JsonLines().format(record("two\nlines of %s", "text", fields={"steps": 4}))
    assert "\n" not in written
    entry = json.loads(written)
    assert entry.pop("time").endswith("Z")
    assert entry == {
        "level": "warning",
        "logger": "stepdial",
        "message": "two\nlines of text",
        "steps": 4,
    }


def test_what_others_send_is_no_line_of_its_own() -> None:
    forged = record("no folder %s", "x\n2026-01-01 INFO stepdial: all is well \x1b[31m\x85\u2028")
    written = TextLines("%(levelname)s %(message)s").format(forged)
    assert written == (
        "WARNING no folder x\\x0a2026-01-01 INFO stepdial: all is well \\x1b[31m\\x85\\x2028"
    )
    try:
        raise ValueError("why")
    except ValueError:
        forged.exc_info = sys.exc_info()
    lines = TextLines("%(message)s").format(forged).splitlines()
    assert lines[1] == "Traceback (most recent call last):" and lines[-1] == "ValueError: why"


def test_an_exception_and_values_that_json_has_not_stay_on_the_line() -> None:
    try:
        raise ValueError("out of luck")
    except ValueError:
        made = record("it failed", fields={"path": np.float32(1), "error": ValueError("x")})
        made.exc_info = sys.exc_info()
    entry = json.loads(JsonLines().format(made))
    assert "ValueError: out of luck" in entry["exception"] and entry["error"] == "x"


def test_what_is_said_has_the_form_of_the_log() -> None:
    assert line("text", "\nhello\n", url="x") == "\nhello\n"
    entry = json.loads(line("json", "\nhello\n", url="x"))
    assert (entry["message"], entry["url"]) == ("hello", "x")


def test_a_call_that_throws_names_the_requests_in_it(caplog: pytest.LogCaptureFixture) -> None:
    def fail(kind: str, tokens: object) -> None:
        raise RuntimeError("out of luck")

    with running() as bench:
        bench.mood.gate.clear()
        first, caller = bench.classify(5)
        first.request_id = "first"
        bench.mood.fail = fail
        bench.mood.gate.set()
        assert caller.error().code == "model_failure"
    (logged,) = (one for one in caplog.records if "failed" in one.getMessage())
    assert logged.getMessage() == ("tiny-classify failed at 2 steps in request first: out of luck")
    assert json.loads(JsonLines().format(logged))["requests"] == ["first"]


def test_lines_that_nobody_takes_are_dropped_and_counted_and_the_others_kept() -> None:
    reading, writing = os.pipe()
    lost: list[int] = []
    tell_dropped(lost.append)
    outlet = LineWriter(writing, lambda error: None)
    outlet.open()
    began_s = time.monotonic()
    for number in range(1000):  # more than the pipe takes
        outlet.put(f"{number:09} " + "x" * 89)
    while select.select([], [writing], [], 0)[1]:  # until the writer waits
        time.sleep(0.001)
    for number in range(1000, 30_000):
        outlet.put(f"{number:09} " + "x" * 89)
    outlet.flush(0.1)
    assert time.monotonic() - began_s < 5, "it waits for the reader"
    assert sum(lost) > 10_000
    taken = b""
    while taken.count(b"\n") < 30_000 - sum(lost):
        taken += os.read(reading, 2**20)
    numbers = [int(line[:9]) for line in taken.splitlines()]
    assert numbers == list(range(len(numbers)))
    outlet.put("again")
    assert os.read(reading, 100) == b"again\n"
    outlet.flush(5)
    os.close(reading)
    failed = len(lost)
    outlet.put("to nobody")  # a closed pipe
    outlet.flush(5)
    assert lost[failed:] == [1]
    os.close(writing)
    tell_dropped(lambda lines: None)


def test_a_line_with_any_text_is_written() -> None:
    reading, writing = os.pipe()
    outlet = LineWriter(writing, lambda error: None)
    outlet.open()
    outlet.put("lone \ud800 half")
    assert os.read(reading, 100) == b"lone \\ud800 half\n"
    os.close(reading)
    os.close(writing)
