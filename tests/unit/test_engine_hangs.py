"""The engine when a call hangs or a model throws: who is told, and when it takes requests again."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from serve.bundle import Bundle
from serve.catalog import Served
from serve.engine.engine import StallLimits
from serve.engine.job import LaneKey, Limits, TokenEvent
from serve.engine.loaded import Call, Common, EngineModel, new_cost
from serve.errors import Stalled
from serve.metrics import Metrics
from serve.runtime import open_model
from tests.engine_bench import Bench, Caller, classified, generated
from tests.fake_model import Mood
from tests.fixtures.tiny_folders import (
    classify_bundle,
    generate_bundle,
    image_bundle,
    points_bundle,
    prefix_bundle,
    translate_bundle,
)
from tests.waiting import wait_until

QUICK = StallLimits(stall_s=0.2, stall_unknown_s=0.2, stall_exit_s=0.3)


@contextmanager
def watched(
    patience: StallLimits = QUICK, leave: Callable[[], None] = lambda: None
) -> Iterator[Bench]:
    bench = Bench(Mood(), Limits(), patience, leave)
    bench.engine.start()
    try:
        yield bench
    finally:
        bench.mood.gate.set()
        bench.engine.stop()


def refuses(bench: Bench) -> bool:
    try:
        bench.engine.check_open()
    except Stalled:
        return True
    return False


def count(bench: Bench, name: str) -> float:
    labels = {"model": "tiny-classify"}
    return bench.metrics.registry.get_sample_value(f"stepdial_{name}_calls_total", labels) or 0


def test_a_call_that_hangs_is_ended_and_the_engine_goes_on() -> None:
    with watched() as bench:
        bench.mood.obeys = True
        bench.mood.gate.clear()
        caller = bench.classify(5)[1]
        assert caller.error().status == 503
        wait_until(lambda: not refuses(bench))
        assert count(bench, "late") == count(bench, "terminated") == 1
        assert "tiny-classify" in bench.engine.failing
        assert classified(bench.classify(5)[1])
        assert not bench.engine.failing
        assert bench.idle()


def test_while_a_call_hangs_none_is_taken_and_its_own_end_is_well() -> None:
    with watched(StallLimits(0.2, 0.2, 60)) as bench:
        bench.mood.gate.clear()
        caller = bench.classify(5)[1]
        wait_until(lambda: refuses(bench))
        with pytest.raises(Stalled, match="has taken") as raised:
            bench.classify(5)
        assert raised.value.headers() == {"retry-after": "60"}
        bench.mood.gate.set()
        assert classified(caller)
        assert classified(bench.classify(5)[1])
        assert (count(bench, "late"), count(bench, "terminated")) == (1, 0)
        assert not bench.engine.failing and not bench.mood.interrupted.is_set()


def test_a_call_that_never_ends_ends_the_process_and_everybody_is_told() -> None:
    left = threading.Event()
    with watched(StallLimits(1, 1, 0.3), leave=left.set) as bench:

        def hang_after_three(called: str, tokens: Any) -> None:
            if len(bench.mood.calls) == 3:
                bench.mood.gate.clear()

        bench.mood.fail = hang_after_three
        stream = bench.generate("a", 100, stream=True)[1]
        wait_until(lambda: len(stream.events) > 2)
        callers = [stream, bench.classify(5)[1], bench.generate("b", 5)[1]]
        assert {caller.error().code for caller in callers} == {"model_failure"}
        assert all(isinstance(event, TokenEvent) for event in stream.events[:-1])
        assert left.is_set() and refuses(bench)
        assert (bench.engine.queued, bench.engine.running) == (0, 0)


def test_opening_a_graph_is_not_hanging() -> None:
    with watched(StallLimits(0.2, 60, 0.2)) as bench:
        assert classified(bench.classify(5)[1])
        bench.mood.opening = True
        bench.mood.gate.clear()
        caller = bench.classify(5)[1]
        time.sleep(0.8)
        assert not refuses(bench)
        bench.mood.gate.set()
        assert classified(caller)


@pytest.mark.parametrize("kind", ["classify", "generate", "search"])
def test_a_model_that_throws_is_tried_again_until_it_works(kind: str) -> None:
    def fail(called: str, tokens: Any) -> None:
        raise RuntimeError("out of luck")

    with watched() as bench:
        bench.mood.fail = fail
        ask: dict[str, Callable[[], tuple[object, Caller]]] = {
            "classify": lambda: bench.classify(5),
            "generate": lambda: bench.generate("a", 5),
            "search": lambda: bench.search("a", 5),
        }
        assert ask[kind]()[1].error().code == "model_failure"
        (name,) = bench.engine.failing
        calls = len(bench.mood.calls)
        wait_until(lambda: len(bench.mood.calls) > calls)
        assert bench.engine.failing == (name,)
        bench.mood.fail = lambda called, tokens: None
        wait_until(lambda: bench.engine.failing == ())


@pytest.mark.parametrize(
    ("opened", "lane"),
    [
        (classify_bundle, LaneKey("tiny-classify", "classify", 2)),
        (classify_bundle, LaneKey("tiny-classify", "classify", 4, threshold=0.5)),
        (image_bundle, LaneKey("tiny-image", "classify", 2)),
        (points_bundle, LaneKey("tiny-points", "classify", 2)),
        (generate_bundle, LaneKey("tiny-generate", "generate", 2)),
        (prefix_bundle, LaneKey("tiny-prefix", "generate", 1)),
        (translate_bundle, LaneKey("tiny-translate", "generate", 2)),
        (translate_bundle, LaneKey("tiny-translate", "search", 2)),
    ],
)
def test_what_is_tried_runs_on_every_kind_of_model(
    opened: Callable[[], Bundle], lane: LaneKey
) -> None:
    bundle = opened()
    served = Served.open(bundle, open_model(bundle))
    model = EngineModel(served, new_cost(served), Common(Limits(), Metrics(), time.monotonic))
    check = Call(model.check, lane, None, ())
    model.check.run(check)
    model.runtime.interrupt()
    with pytest.raises(Exception, match="terminate"):
        model.check.run(check)
    model.runtime.resume()
    model.check.run(check)


def test_another_model_does_not_make_up_for_one_that_throws() -> None:
    def fail(called: str, tokens: Any) -> None:
        if called == "classify":
            raise RuntimeError("out of luck")

    with watched() as bench:
        bench.mood.fail = fail
        assert bench.classify(5)[1].error().code == "model_failure"
        assert generated(bench.generate("a", 5)[1]).text == "bcdef"
        assert "tiny-classify" in bench.engine.failing
