"""BLEU of a translator: the answers are those to the sources, in order, whatever the batches."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from sacrebleu.metrics.bleu import BLEU

from tests.unit.test_translator import small
from train import text_quality
from train.__main__ import main
from train.checkpoint import Run
from train.data.labelled import PairDataset
from train.recipe import DataConfig, ModelConfig, Recipe, load_recipe
from train.text_quality import Bleu, bleu_of, check_bleu, print_bleu, translate

WORDS = ["ein", "zwei", "drei", "vier", "viele"]
SHORT = ModelConfig("translator", layers=1, width=16, hidden=32, window=6, target_window=12)


@pytest.fixture(scope="module")
def translator(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, PairDataset]:
    folder = tmp_path_factory.mktemp("pairs")
    lines = [" ".join(WORDS[: 1 + i % 5]) for i in range(40)]
    for split in ("train", "test"):
        (folder / f"{split}.en").write_text("\n".join(lines), encoding="utf-8")
        (folder / f"{split}.de").write_text("\n".join(lines[1:] + lines[:1]), encoding="utf-8")
    data = DataConfig("pairs", path=str(folder), train="train", test="test", vocabulary=280)
    model = ModelConfig("translator", layers=1, width=16, hidden=32, window=40, target_window=12)
    recipe = Recipe("tiny", data, model)
    dataset = PairDataset(data, model.window, model.target_window, None, seed=0)
    network = small(window=40, target_window=12, tied=False, vocabulary=dataset.sizes.vocabulary)
    return Run(network, recipe, dataset.tokenizer, {}), dataset


@pytest.mark.parametrize("beams", [1, 3])
def test_answers_keep_the_order_of_their_sources(
    translator: tuple[Run, PairDataset], beams: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = [source for source, _ in translator[1].references[:7]]
    together = translate(*translator, sources, 2, "euler", beams)
    monkeypatch.setattr(text_quality, "ROWS", 1)
    assert translate(*translator, sources, 2, "euler", beams) == together
    assert len(set(together)) > 1


def test_a_length_penalty_reaches_the_search(
    translator: tuple[Run, PairDataset],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked: list[tuple[str, float]] = []
    for name in ("beam", "greedy"):
        search = getattr(text_quality, name)

        def watched(*given: Any, name: str = name, search: Any = search) -> Any:
            asked.append((name, given[-1]))
            return search(*given)

        monkeypatch.setattr(text_quality, name, watched)
    bleu_of(*translator, 1, "euler", beams=3, samples=2, alpha=0.6)
    bleu_of(*translator, 1, "euler", samples=2)
    assert asked == [("beam", 0.6), ("greedy", 1.0)]
    assert main(["evaluate", "nowhere", "--bleu", "--length-penalty", "0.6"]) == 2
    assert "--length-penalty 0.6 is for several --beams" in capsys.readouterr().err


def test_bleu_is_what_sacrebleu_says_of_the_answers(
    translator: tuple[Run, PairDataset], monkeypatch: pytest.MonkeyPatch
) -> None:
    references = [target for _, target in translator[1].references]
    answers = [references[0], *["viele zwei drei vier"] * 9]
    monkeypatch.setattr(text_quality, "translate", lambda *_: answers)
    found = bleu_of(*translator, 1, "euler", samples=10)
    assert found.samples == 10
    assert found.score == BLEU().corpus_score(answers, [references[:10]]).score
    assert 0 < found.score < 100
    assert "tok:13a" in found.signature


def test_of_a_long_source_the_beginning_is_read(translator: tuple[Run, PairDataset]) -> None:
    run, dataset = translator
    short = run._replace(recipe=dataclasses.replace(run.recipe, model=SHORT))
    sources = ["ein zwei drei vier viele", "viele ein ein ein"]
    cut = [dataset.tokenizer.decode(dataset.tokenizer.encode(one).ids[:6]) for one in sources]
    assert [dataset.tokenizer.encode(one).ids for one in cut] != [
        dataset.tokenizer.encode(one).ids for one in sources
    ]
    read = [translate(short, dataset, some, 2, "euler") for some in (sources, cut)]
    assert read[0] == read[1] and len(set(read[0])) == 2


@pytest.mark.parametrize(("method", "nfe"), [("euler", (2, 6)), ("heun", (4, 12))])
def test_the_table_has_a_line_a_count_with_evaluations_of_both_sides(
    method: str,
    nfe: tuple[int, int],
    translator: tuple[Run, PairDataset],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked: list[tuple[int, str]] = []

    def found(run: Run, data: PairDataset, steps: int, method: str, *_: object) -> Bleu:
        asked.append((steps, method))
        return Bleu(10.0 * steps, "signed", 7)

    monkeypatch.setattr(text_quality, "open_translator", lambda *_: translator)
    monkeypatch.setattr(text_quality, "bleu_of", found)
    print_bleu(Path("run"), [1, 3], [method], 1, 0)
    lines = capsys.readouterr().out.splitlines()
    assert asked == [(1, method), (3, method)]
    assert [line.split() for line in lines[2:4]] == [
        ["1", str(nfe[0]), "10.00"],
        ["3", str(nfe[1]), "30.00"],
    ]
    assert lines[4] == "7 sentences, signed"


def test_a_run_that_does_not_translate_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = {"recipe": load_recipe("parity").to_json(), "sizes": {}}
    (tmp_path / "recipe.json").write_text(json.dumps(facts))
    with pytest.raises(ValueError, match="BLEU is for translators"):
        check_bleu(tmp_path, 1, 0)
    with pytest.raises(ValueError, match="--beams must be at least 1"):
        check_bleu(tmp_path, 0, 0)
    # Before the run is measured: there is none here.
    assert main(["evaluate", str(tmp_path), "--bleu"]) == 2
    assert "BLEU is for translators" in capsys.readouterr().err
    assert main(["evaluate", str(tmp_path), "--beams", "2"]) == 2
    assert "--beams 2 is for --bleu" in capsys.readouterr().err
    assert main(["evaluate", str(tmp_path), "--steps", "1001"]) == 2
    assert "counts are from 1 to 1000" in capsys.readouterr().err
