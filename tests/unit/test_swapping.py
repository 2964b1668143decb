"""Models that take each other's place in an engine: who answers, and what is left behind."""

import gc
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from serve.bundle import Bundle, read_bundle
from serve.catalog import Served
from serve.engine.backlog import GenerationSize
from serve.engine.classify import Classification
from serve.engine.engine import Engine, Watchdog
from serve.engine.job import Job, LaneKey, Limits
from serve.engine.loaded import new_cost
from serve.errors import ModelGone, UnknownModel
from serve.loading import measure_first_calls
from serve.metrics import Metrics
from tests.engine_bench import Bench, Caller, classified, generated, running
from tests.fake_model import FakeClassifier, FakeDecoder, FakeModel, FakeTranslator, Mood
from tests.fixtures.tiny_folders import classify_bundle, generate_bundle, translate_bundle
from tests.waiting import wait_until

ZOO = Path(__file__).parents[2] / "zoo"
BUNDLES = (classify_bundle, generate_bundle, translate_bundle)


def another(bundle: Bundle, edition: int, **mood: Any) -> tuple[Served, FakeModel]:
    model = FakeModel(bundle, Mood(**mood))
    return Served.open(bundle, model, edition), model


def test_those_that_run_finish_where_they_began_and_new_ones_go_to_the_new_model() -> None:
    with running() as bench:
        old = bench.catalog.find("tiny-generate").model
        assert isinstance(old, FakeModel)
        bench.mood.gate.clear()
        before = [bench.generate("abc", 30, steps=steps)[1] for steps in (2, 4)]
        wait_until(lambda: bench.engine.running > 0)
        served, model = another(generate_bundle(), 1)
        bench.engine.serve(served)
        after = bench.generate("xyz", 3)[1]
        bench.mood.gate.set()
        assert generated(after).completion_tokens == 3
        assert [generated(caller).completion_tokens for caller in before] == [30, 30]
        assert {kind for kind, _, _ in model.mood.calls} == {"prefill", "decode"}
        assert len(model.mood.calls) == 3  # of the one that came later, and of no other
        wait_until(lambda: old.closed)
        assert not model.closed and bench.engine.leaving == ()
        assert bench.idle()


def test_a_model_stays_while_a_request_is_with_it_that_has_not_asked_yet() -> None:
    with running() as bench:
        old = bench.catalog.find("tiny-classify")
        old.users += 1
        bench.engine.serve(another(classify_bundle(), 1)[0])
        time.sleep(0.3)
        assert bench.engine.leaving == (old,)
        caller = Caller()
        bench.engine.submit(_job(old, caller))
        classified(caller)
        old.users -= 1
        wait_until(lambda: not bench.engine.leaving)
        with pytest.raises(ModelGone, match="tiny-classify was replaced meanwhile"):
            bench.engine.submit(_job(old, Caller()))


def test_a_model_that_is_taken_away_answers_what_it_has_and_then_nothing() -> None:
    with running() as bench:
        bench.mood.gate.clear()
        caller = bench.generate("abc", 5)[1]
        bench.engine.dismiss(bench.catalog.find("tiny-generate"))
        with pytest.raises(UnknownModel, match="tiny-classify, tiny-translate"):
            bench.catalog.find("tiny-generate")
        labels = {"model": "tiny-generate", "task": "generate", "method": "euler"}
        labels |= {"precision": "fp32", "full_steps": "4"}
        info = bench.metrics.registry.get_sample_value("stepdial_model_info", labels)
        assert info is None
        bench.mood.gate.set()
        assert generated(caller).text == "defgh"
        wait_until(lambda: not bench.engine.leaving)
        for name in ("tiny-classify", "tiny-translate"):
            bench.engine.dismiss(bench.catalog.find(name))
        with pytest.raises(UnknownModel, match=r"is served; there are: none$"):
            bench.catalog.find("tiny-generate")
        with pytest.raises(UnknownModel, match=r"is served; there are: none$"):
            bench.catalog.pick(None, ("classify", "tag"))


def test_a_model_that_was_taken_away_or_replaced_before_is_not_taken_away_again() -> None:
    bench = Bench(Mood(), Limits())
    old, served = bench.catalog.find("tiny-classify"), another(classify_bundle(), 1)[0]
    bench.engine.serve(served)
    bench.engine.dismiss(old)
    leaving = list(bench.engine.leaving)
    assert bench.catalog.find("tiny-classify") is served and leaving == [old]
    assert bench.engine.step() is None and list(bench.engine.leaving) == []
    bench.engine.dismiss(old)
    for _ in range(2):
        bench.engine.dismiss(served)
    assert list(bench.engine.leaving) == [served]
    assert bench.engine.step() is None and bench.engine.leaving == ()


def test_what_a_model_promises_is_shown_as_long_as_it_is_served() -> None:
    topics, metrics = read_bundle(ZOO / "topics").manifest, Metrics()
    assert topics.calibration is not None
    name = "stepdial_promised_disagreement"

    def promised() -> list[float]:
        found = next(one for one in metrics.registry.collect() if one.name == name)
        return sorted(sample.value for sample in found.samples)

    for _ in range(2):  # the second takes the place of the first
        metrics.serve(topics)
        assert promised() == [level.max_disagreement for level in topics.calibration.levels]
    metrics.hide(topics.name)
    assert promised() == []


def test_one_that_fails_is_no_reason_to_send_no_requests_once_it_is_replaced() -> None:
    with running() as bench:

        def fail(kind: str, tokens: Any) -> None:
            raise RuntimeError("out of luck")

        bench.mood.fail = fail
        assert bench.classify(5)[1].error().code == "model_failure"
        assert list(bench.engine.failing) == ["tiny-classify"]
        bench.engine.serve(another(classify_bundle(), 1)[0])
        assert list(bench.engine.failing) == []
        classified(bench.classify(5)[1])


def test_a_model_that_failed_is_not_tried_again_once_it_is_closed() -> None:
    bench = Bench(Mood(), Limits())
    old = bench.catalog.find("tiny-classify")
    lane = LaneKey(old.key, "classify", 2)
    error = RuntimeError("out of luck")
    assert not bench.engine._models[old.key].fail(lane, (), error)
    bench.engine._models[old.key].check.due_s = 0.0
    bench.engine.dismiss(old)
    assert bench.engine.step() is None
    model = old.model
    assert isinstance(model, FakeModel)
    wait_until(lambda: model.closed)
    assert bench.mood.calls == []


def test_a_model_is_closed_where_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    bench = Bench(Mood(), Limits())
    old = bench.catalog.find("tiny-classify").model
    bench.engine.dismiss(bench.catalog.find("tiny-classify"))
    monkeypatch.setattr(threading.Thread, "start", start)
    assert bench.engine.step() is None
    assert isinstance(old, FakeModel) and old.closed


def test_fifty_swaps_leave_nothing_behind() -> None:
    with running() as bench:
        editions = count(1)
        closed: list[FakeModel] = []
        for _ in range(3):
            closed += _swap_and_use(bench, next(editions))
        before = held(bench.engine)
        for _ in range(50):
            closed += _swap_and_use(bench, next(editions))
        assert held(bench.engine) == before
        assert len(closed) == 159 and all(model.closed for model in closed)


@pytest.fixture
def hasty() -> Iterator[None]:
    """Threads take turns every microsecond: what two of them must not do at once, they do."""
    usual_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual_s)


@pytest.mark.usefixtures("hasty")
def test_models_come_and_go_under_load_while_others_are_measured() -> None:
    stop, editions = threading.Event(), count(1)
    raised: list[BaseException] = []
    with running() as bench:

        def measure() -> None:
            """What a loader does with models that are not served yet."""
            try:
                while not stop.is_set():
                    loaded = [another(bundle(), next(editions))[0] for bundle in BUNDLES[:2]]
                    for served in loaded:
                        measure_first_calls(served, bench.engine.cost(served))
            except BaseException as error:
                raised.append(error)

        loader = threading.Thread(target=measure)
        loader.start()
        try:
            end_s = time.monotonic() + 4
            while time.monotonic() < end_s and not bench.engine.dead and not raised:
                for bundle in BUNDLES:
                    bench.engine.serve(another(bundle(), next(editions))[0])
                work = [bench.classify(5, 7), bench.generate("abc", 3, steps=4)]
                with bench.engine._lock:
                    bench.engine._common.lower_caution()  # as after a refusal
                bench.engine.answer.observe(0.001)
                for _, caller in work:
                    caller.last()
        finally:
            stop.set()
            loader.join()
        assert not raised
        assert not bench.engine.dead
        wait_until(lambda: not bench.engine.leaving)


def _job(served: Served, caller: Caller) -> Job:
    return Job(LaneKey(served.key, "classify", 2), Classification([[1] * 5], caller.deliver), (5,))


def _swap_and_use(bench: Bench, edition: int) -> list[FakeModel]:
    """Every model is replaced while it is used; returns those that went."""
    before = [bench.catalog.find(bundle().manifest.name).model for bundle in BUNDLES]
    work = [bench.classify(5, 7), bench.generate("abc", 3, steps=2), bench.search("abc", 3)]
    gates: list[Event] = []
    for bundle in BUNDLES:
        served, model = another(bundle(), edition, most_batches=4)
        cost = new_cost(served)
        measure_first_calls(served, cost)
        gates.append(model.mood.gate)
        gates[-1].clear()  # until all its rungs have work, so that they share calls in any case
        bench.engine.serve(served, cost)
        bench.engine.steps_for(
            LaneKey(served.key, "generate", 4), (1, 2, 4), GenerationSize(3, 3), None
        )
    work += [bench.generate("abc", 20, steps=steps) for steps in (1, 2, 4)]
    work += [bench.classify(5), bench.search("abc", 3)]
    for gate in gates:
        gate.set()
    work.append(bench.generate("abc", 300, steps=4))
    bench.engine.cancel(work[-1][0])
    for _, caller in work[:-1]:
        caller.last()
    assert bench.idle()
    wait_until(lambda: not bench.engine.leaving)
    wait_until(lambda: all(model.closed for model in before if isinstance(model, FakeModel)))
    return [model for model in before if isinstance(model, FakeModel)]


def test_what_a_model_that_left_had_opened_is_free_at_once() -> None:
    """Sessions hold tens of megabytes, and the collector of cycles may come much later."""
    gc.collect()
    gc.disable()
    try:
        with running() as bench:
            opened = (FakeClassifier, FakeDecoder, FakeTranslator)

            def held_of_the_first() -> int:
                found = [one for one in gc.get_objects() if type(one) in opened]
                return sum(one._mood is bench.mood for one in found)

            for work in (bench.classify(5), bench.generate("abc", 3), bench.search("abc", 3)):
                work[1].last()
            assert held_of_the_first() >= 3
            for number, make in enumerate(BUNDLES):
                bench.engine.serve(another(make(), 1 + number)[0])
            wait_until(lambda: not bench.engine.leaving)
            wait_until(lambda: held_of_the_first() == 0)
    finally:
        gc.enable()


def held(engine: Engine) -> int:
    """How many objects of ours, and containers, can be reached from an engine."""
    seen: dict[int, object] = {}
    waiting: list[object] = [engine]
    while waiting:
        one = waiting.pop()
        ours = type(one).__module__.partition(".")[0] in ("serve", "prometheus_client")
        # The watchdog remembers the call that it saw last, whichever that was.
        if id(one) in seen or isinstance(one, (type, Watchdog)):
            continue
        if ours or isinstance(one, (dict, list, tuple, set, deque)):
            seen[id(one)] = one
            waiting += gc.get_referents(one)
    return len(seen)
