"""Running ahead: no token depends on it."""

import numpy as np
import pytest

from serve.catalog import Catalog, Served
from serve.engine.engine import Engine
from serve.engine.generate import LeadTuner, leads_of
from serve.engine.job import GeneratedEvent, Job, LaneKey, Limits
from serve.engine.writing import Generation, GenerationRequest, Sampling
from serve.metrics import Metrics
from serve.runtime import open_model
from serve.runtime.mixing import OrtSpeculation
from serve.runtime.protocol import MOST_AHEAD, StepOutput
from tests.engine_bench import Caller
from tests.fixtures.tiny_bundles import build_generate


@pytest.mark.parametrize(
    ("steps", "leads"),
    [(1, (0,)), (2, (0, 1)), (3, (0, 1)), (8, (0, 1, 2)), (10, (0, 2, 3)), (16, (0, 2, 4))],
)
def test_the_positions_of_a_lead_fit_into_a_call(steps: int, leads: tuple[int, ...]) -> None:
    assert leads_of(steps) == leads
    assert all(steps / lead <= MOST_AHEAD for lead in leads if lead)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_token_depends_on_the_lead(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    temperature: float,
) -> None:
    bundle = build_generate(tmp_path_factory.mktemp("bundles") / "g", steps=(1, 8))
    served = Served.open(bundle, open_model(bundle, threads=1))
    texts, drafted = set(), []
    for lead in (0, 1, 2, 4):
        with monkeypatch.context() as patch:
            patch.setattr(LeadTuner, "lead", lead)
            metrics = Metrics()
            engine = Engine(Catalog([served]), Limits(), metrics)
            engine.start()
            answers = []
            for seed in range(3):
                answers.append(caller := Caller())
                wish = GenerationRequest(
                    [5, 6, 7 + seed],
                    200,
                    bundle.manifest.text_input.max_tokens,
                    Sampling(temperature=temperature, seed=seed),
                )
                job: Job = Job(
                    LaneKey(served.name, "generate", 8),
                    Generation(wish, served.codec, caller.deliver),
                    (3,),
                    160,
                )
                engine.submit(job)
                caller.last()
            engine.stop()
            ends = [caller.last() for caller in answers]
            assert all(isinstance(end, GeneratedEvent) for end in ends)
            texts.add(tuple(end.text for end in ends if isinstance(end, GeneratedEvent)))
            sample = metrics.registry.get_sample_value
            counted = [
                sample(f"stepdial_speculative_{what}_total", {"model": served.name})
                for what in ("drafted", "accepted")
            ]
            drafted.append(counted)
    assert len(texts) == 1
    assert drafted[0] == [0, 0]
    for counted in drafted[1:]:
        assert counted[0] is not None and counted[1] is not None
        assert 0 < counted[1] <= counted[0] and np.isfinite(counted[0])


def test_what_is_drafted_in_vain_counts_as_work(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = build_generate(tmp_path_factory.mktemp("bundles") / "g", steps=(1, 8))
    served = Served.open(bundle, open_model(bundle, threads=1))
    monkeypatch.setattr(LeadTuner, "lead", 2)
    taken, advance = [], OrtSpeculation.advance

    def watched(self: OrtSpeculation) -> StepOutput:
        taken.append(len(self.tokens))
        return advance(self)

    monkeypatch.setattr(OrtSpeculation, "advance", watched)
    monkeypatch.setattr(Generation, "drafts", lambda *_, ahead: [5])  # seldom right
    metrics, caller, tokens = Metrics(), Caller(), 60
    engine = Engine(Catalog([served]), Limits(), metrics)
    engine.start()
    wish = GenerationRequest([5, 6, 7], tokens, 80, Sampling(temperature=1.0, seed=1))
    lane = LaneKey(served.name, "generate", 8)
    engine.submit(Job(lane, Generation(wish, served.codec, caller.deliver), (3,), 63))
    caller.last()
    engine.stop()
    labels = {"model": served.name, "kind": "decode"}
    for name in ("steps", "velocity_evaluations"):
        counted = metrics.registry.get_sample_value(f"stepdial_{name}_total", labels)
        assert counted == sum(taken) > 8 * (tokens - 1)
