"""What a decoder writes, scored: exact where it repeats its data, reproducible where it draws."""

import json
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.fixtures.tiny_runs import tiny_label_run, tiny_text_recipe
from train import text_quality
from train.__main__ import main
from train.checkpoint import Run, load_run
from train.data import open_dataset
from train.data.batch import Batch
from train.data.text import TextDataset
from train.loop import train
from train.model import OTTransformer, build_model
from train.text_quality import (
    Sampling,
    bert_score,
    bleu_score,
    check_texts,
    continue_ids,
    print_texts,
    rouge_scores,
    text_metrics,
)


class Memory(nn.Module):
    """Says what came last in a text that it has learned by heart."""

    def __init__(self, ids: Tensor, vocabulary: int, window: int) -> None:
        super().__init__()
        self.window, self.vocabulary = window, vocabulary
        self.next: dict[tuple[int, ...], int] = {}
        known = ids.tolist()
        for length in range(1, window + 1):
            for start in range(len(known) - length):
                self.next.setdefault(tuple(known[start : start + length]), known[start + length])

    def forward(self, tokens: Tensor) -> Tensor:
        rows = [
            [self.next.get(tuple(row[: place + 1]), 0) for place in range(len(row))]
            for row in tokens.tolist()
        ]
        return 50 * nn.functional.one_hot(torch.tensor(rows), self.vocabulary).float()  # (B, N, V)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Run, TextDataset]]:
    recipe = tiny_text_recipe(tmp_path_factory.mktemp("corpus"))
    dataset = open_dataset(recipe)
    assert isinstance(dataset, TextDataset)
    torch.manual_seed(0)
    yield (
        Run(build_model(recipe.model, dataset.sizes).eval(), recipe, dataset.tokenizer, {}),
        dataset,
    )


def test_a_model_that_knows_its_text_has_the_best_scores(made: tuple[Run, TextDataset]) -> None:
    run, dataset = made
    memory = Memory(torch.from_numpy(dataset.held_ids[:240]), dataset.sizes.vocabulary, window=24)
    model = OTTransformer(memory, nn.Identity(), nn.Identity(), depth="discrete")
    knowing = run._replace(model=model)
    for forced in (False, True):
        found = text_metrics(knowing, dataset, 1, samples=5, sampling=Sampling(1), forced=forced)
        assert found.samples == 5
        # Of a whole window the first tokens follow on too little to be known.
        assert min(found.bleu, *found.rouge.values()) > (80 if forced else 99)
    assert found.bertscore is None and found.left_out is not None and "left out" in found.left_out


def test_fresh_weights_score_low_and_the_same_twice(made: tuple[Run, TextDataset]) -> None:
    run, dataset = made
    first, again = (
        text_metrics(run, dataset, 2, samples=4, sampling=Sampling(seed=7)) for _ in range(2)
    )
    assert first == again
    assert first.samples == 4 and first.bleu < 20 and first.rouge["rougeL"] < 50
    assert 0.5 * dataset.sizes.vocabulary < first.perplexity < 2 * dataset.sizes.vocabulary
    assert "version" in first.bleu_signature


def test_perplexity_is_a_mean_over_windows_and_forced_texts_are_whole(
    made: tuple[Run, TextDataset], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, dataset = made
    scored: list[tuple[list[str], list[str]]] = []

    def score(answers: list[str], references: list[str]) -> tuple[float, str]:
        scored.append((answers, references))
        return 0.0, ""

    monkeypatch.setattr(text_quality, "bleu_score", score)
    found = text_metrics(run, dataset, 2, samples=3, forced=True)
    batch = next(iter(dataset.held_out(3)))
    assert run.tokenizer is not None
    with torch.no_grad():
        logits = run.model(*batch.inputs, steps=2, method="euler").logits
    each = [
        nn.functional.cross_entropy(*row).exp() for row in zip(logits, batch.targets, strict=True)
    ]
    assert found.perplexity == pytest.approx(sum(map(float, each)) / 3, rel=1e-5)
    ((answers, references),) = scored
    assert answers == run.tokenizer.decode_batch(logits.argmax(-1).tolist())
    assert references == run.tokenizer.decode_batch(batch.targets.tolist())


def test_texts_go_on_from_their_prompts(made: tuple[Run, TextDataset]) -> None:
    run, _ = made
    assert run.tokenizer is not None

    def go_on(prompt: str, length: int, sampling: Sampling) -> list[int]:
        assert run.tokenizer is not None
        ids = torch.tensor([run.tokenizer.encode(prompt).ids])
        (new,) = continue_ids(run.model, ids, length, 2, "euler", sampling)
        return list(new.tolist())

    likeliest = Sampling(temperature=0)
    long = "the quick brown fox jumps over the lazy dog"
    assert go_on(long, 5, likeliest) == go_on(long[-24:], 5, likeliest)  # what a window holds
    assert len(go_on("the quick brown fox jumps over the lazy dog", 12, likeliest)) == 12
    assert go_on("pack", 13, likeliest)[:12] == go_on("pack", 12, likeliest)
    assert len({tuple(go_on("a", 20, Sampling(seed=seed))) for seed in range(3)}) == 3


def test_answers_and_references_are_not_taken_for_each_other() -> None:
    short, long = ["the cat sat on"], ["the cat sat on the mat by the door"]
    assert bleu_score(short, long)[0] == pytest.approx(100 * math.exp(1 - 9 / 4))  # too short
    assert bleu_score(long, short)[0] == pytest.approx(29.85, abs=0.01)
    one, other = rouge_scores(short, long), rouge_scores(long, short)
    assert rouge_scores(["two cats sat"], ["two cat sits"])["rouge1"] == pytest.approx(200 / 3)
    assert one == other and one["rouge1"] == pytest.approx(100 * 8 / 13)  # F: 4 of 4 and 4 of 9


def test_scores_are_those_of_the_packages(tmp_path: Path) -> None:
    score, signature = bleu_score(["the cat sat on the mat"], ["the cat sat on the rug"])
    assert score == pytest.approx(75.98, abs=0.01)
    assert signature.startswith("nrefs:1")
    found, why = bert_score(["a"], ["a"], tmp_path)
    assert found is None and why is not None and "not on this machine" in why


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    train(tiny_text_recipe(folder, "optim.iterations=2"), folder / "run", quiet=True)
    return folder / "run"


def test_the_command_prints_the_scores_of_each_step_count(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["evaluate", str(trained), "--steps", "1,4", "--texts", "6"]
    assert main(asked) == 0
    written, forced = capsys.readouterr().out, ""
    assert main([*asked, "--forced"]) == 0
    forced = capsys.readouterr().out
    run = load_run(trained)
    dataset = open_dataset(run.recipe, run.tokenizer)
    for out, way in ((written, False), (forced, True)):
        lines = out.partition("held-out windows")[2].splitlines()
        assert lines[1].split() == ["steps", "perplexity", "bleu", "rouge1", "rouge2", "rougeL"]
        for line, count in zip(lines[2:4], (1, 4), strict=True):
            found = text_metrics(run, dataset, count, 6, forced=way)
            figures = [found.perplexity, found.bleu, *found.rouge.values()]
            assert line.split() == [str(count), *(f"{figure:.2f}" for figure in figures)]
        assert lines[4].startswith("6 windows, BLEU nrefs:1|") and "BERTScore was left" in lines[5]
    assert "second halves of held-out windows, written on from the prompt" in written
    assert "euler, held-out windows, each token named after the true ones" in forced


def test_texts_are_written_with_the_method_that_is_named_and_never_hold_padding(
    made: tuple[Run, TextDataset],
    trained: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run, dataset = made
    asked: list[tuple[int, str]] = []
    forward = OTTransformer.forward

    def watched(self: OTTransformer, *inputs: Tensor, **settings: Any) -> Any:
        asked.append((settings["steps"], settings["method"]))
        output = forward(self, *inputs, **settings)
        return output._replace(logits=output.logits.index_fill(-1, torch.tensor([0]), 1e9))

    monkeypatch.setattr(OTTransformer, "forward", watched)
    found = text_metrics(run, dataset, 3, 2, "heun", Sampling(temperature=0))
    assert set(asked) == {(3, "heun")} and found.samples == 2
    ids = continue_ids(run.model, torch.ones(1, 4).long(), 3, 1, "euler", Sampling(), 0)
    assert bool((ids != 0).all())
    asked.clear()
    print_texts(trained, [2], ["heun"], 1)
    assert set(asked) == {(2, "heun")} and "heun, second halves" in capsys.readouterr().out


def test_the_command_refuses_before_the_work(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for options, why in (
        (["--texts", "0"], "at least 1 window"),
        (["--forced"], "are for --texts: add that too"),
        (["--texts", "--bertscore", str(tmp_path)], "not on this machine: .* has no config.json"),
    ):
        assert main(["evaluate", str(trained), *options]) == 2
        said = capsys.readouterr()
        assert re.search(why, said.err) and not said.out
    labels = tiny_label_run(tmp_path, "optim.iterations=2")
    assert main(["evaluate", str(labels), "--texts"]) == 2
    assert "is for decoders" in capsys.readouterr().err


def test_bertscore_is_that_of_the_package_with_the_model_of_the_folder(
    trained: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = {"model_type": "roberta", "num_hidden_layers": 12}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    monkeypatch.setattr("train.text_quality.find_spec", {"bert_score": None}.get)
    with pytest.raises(ValueError, match="needs sacrebleu"):
        check_texts(trained, 5, None)
    monkeypatch.setattr("train.text_quality.find_spec", lambda name: name != "bert_score")
    assert main(["evaluate", str(trained), "--texts", "--bertscore", str(tmp_path)]) == 2
    assert "pip install bert-score" in capsys.readouterr().err

    run = load_run(trained)
    batch = next(iter(open_dataset(run.recipe, run.tokenizer).held_out(3)))
    assert run.tokenizer is not None
    halves = run.tokenizer.decode_batch(batch.inputs[0][:, 12:].tolist())

    class Scorer:
        def __init__(self, model_type: str, num_layers: int) -> None:
            assert (model_type, num_layers) == (str(tmp_path), 10)

        def score(self, answers: list[str], references: list[str]) -> tuple[Tensor, ...]:
            assert len(answers) == 3 and references == halves  # which decides what precision is
            return torch.full((3,), 0.25), torch.full((3,), 0.5), torch.tensor([0.1, 0.2, 0.3])

    package = ModuleType("bert_score")
    package.BERTScorer = Scorer  # type: ignore[attr-defined]  # a module of one class
    monkeypatch.setitem(sys.modules, "bert_score", package)
    monkeypatch.setattr("train.text_quality.find_spec", lambda name: True)
    asked = ["evaluate", str(trained), "--steps", "1", "--texts", "3"]
    assert main([*asked, "--bertscore", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.partition("second halves of held-out windows")[2].splitlines()
    assert lines[1].split()[-3:] == ["bert-p", "bert-r", "bert-f1"]
    assert lines[2].split()[-3:] == ["25.00", "50.00", "20.00"]


@pytest.mark.parametrize(
    ("config", "layer"),
    [
        ({"model_type": "bert", "num_hidden_layers": 12}, 9),
        ({"model_type": "bert", "num_hidden_layers": 24}, 18),
        ({"model_type": "distilbert", "n_layers": 6}, 5),
        ({"model_type": "roberta", "num_hidden_layers": 6}, 5),
        ({"model_type": "roberta", "num_hidden_layers": 24}, 17),
        ({"model_type": "bert", "num_hidden_layers": 6}, 4),  # in no list: 17/24 of its layers
        ({"model_type": "bert", "num_hidden_layers": 1}, 1),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else None,
)
def test_bertscore_reads_the_layer_that_the_package_reads(
    config: dict[str, str | int], layer: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    read: list[int] = []

    class Scorer:
        def __init__(self, model_type: str, num_layers: int) -> None:
            read.append(num_layers)

        def score(self, answers: list[str], references: list[str]) -> tuple[Tensor, ...]:
            return (torch.ones(1),) * 3

    package = ModuleType("bert_score")
    package.BERTScorer = Scorer  # type: ignore[attr-defined]  # a module of one class
    monkeypatch.setitem(sys.modules, "bert_score", package)
    monkeypatch.setattr("train.text_quality.find_spec", lambda name: True)
    assert bert_score(["a"], ["a"], tmp_path) == ((100.0, 100.0, 100.0), None)
    assert read == [layer]


def test_only_decoders_are_scored(made: tuple[Run, TextDataset]) -> None:
    run, dataset = made

    class Labelled:
        tokenizer = dataset.tokenizer
        labels = ("a", "b")
        sizes, digest = dataset.sizes, ""

        def batch(self, iteration: int, size: int, seed: int) -> Batch:
            return dataset.batch(iteration, size, seed)

        def held_out(self, size: int) -> Iterator[Batch]:
            return dataset.held_out(size)

        validation = held_out

    with pytest.raises(TypeError, match="only a decoder"):
        text_metrics(run, Labelled(), 1)
