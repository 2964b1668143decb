"""A pretrained encoder becomes a bundle that answers: distilling, resuming, exporting."""

import dataclasses
import errno
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from export.run import ExportRequest, export_run
from serve import load
from serve.inputs.text import TextCodec
from serve.runtime import open_model
from stepdial import main
from tests.pretrained_folders import FAMILIES, transformers, write_corpus, write_folder, write_table
from train import distil
from train.checkpoint import (
    BEST,
    MODEL,
    STATE,
    TAUGHT,
    RunError,
    check_resumable,
    check_same_teacher,
    load_run,
    read_facts,
)
from train.convert import Conversion, convert
from train.data import open_dataset
from train.loop import Best
from train.metrics import read_metrics
from train.model import Stepped
from train.pretrained import converted, read_original
from train.recipe import Recipe, load_recipe

pytestmark = pytest.mark.long
ROOT = Path(__file__).parents[2]
SMALL = (
    "optim.precision=fp32",
    "optim.lr=0.003",
    "run.threads=1",
    "run.checkpoint_every=4",
    "optim.batch=16",
    "data.held_out=0.2",
)
REQUEST = Conversion(
    max_tokens=12,
    epochs=2,
    teacher_epochs=2,
    overrides=(*SMALL, 'data.text="body"', 'data.label="topic"'),
)


def made(tmp_path: Path, family: str = "bert", **changes: Any) -> tuple[Path, Path, Conversion]:
    """A pretrained folder, a table, and what to make of them."""
    folder, table = tmp_path / family, write_table(tmp_path / "table.csv")
    write_folder(folder, family)
    return folder, table, dataclasses.replace(REQUEST, **changes)


@pytest.fixture(scope="module")
def converted_bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with BERT, its table, and the run that the request makes of it."""
    return convert_all(tmp_path_factory.mktemp("bert"), "bert")


def convert_all(tmp_path: Path, family: str) -> Path:
    folder, table, request = made(tmp_path, family)
    convert(str(folder), tmp_path / "run", request, str(table), quiet=True)
    return tmp_path


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_converts_exports_verifies_and_answers(
    family: str, converted_bert: Path, tmp_path: Path
) -> None:
    made_in = converted_bert if family == "bert" else convert_all(tmp_path, family)
    bundle = export_run(
        made_in / "run",
        ExportRequest(tmp_path / "bundle", (1, 2, 3), samples=16, latency=False),
        say=lambda _: None,
    )
    manifest = bundle.manifest
    assert manifest.labels == ("bad", "good")
    assert f"Layers of {family}" in (tmp_path / "bundle/README.md").read_text()
    assert str(made_in) not in (tmp_path / "bundle/manifest.json").read_text()
    codec = TextCodec(bundle)
    tokenizer = transformers.AutoTokenizer.from_pretrained(made_in / family)
    # A text that is too long is cut as the original cuts it, its last special token kept.
    for text in ("the film was lovely", "a very long story " * 9, "Ünknown wörds"):
        expected = tokenizer(text, truncation=True, max_length=12).input_ids
        encoded = codec.encode_input(text, truncate=True)
        assert encoded.tokens == expected
    model, run = open_model(bundle, 1), load_run(made_in / "run")
    rows = [
        codec.encode_input(t, True).tokens for t in ("the film was lovely", "an awful scene, it's")
    ]
    longest = max(map(len, rows))
    tokens = np.array(
        [row + [manifest.text_tokenizer.pad_id] * (longest - len(row)) for row in rows]
    )
    for steps in (1, 2, 3):
        with torch.no_grad():
            expected = run.model(torch.from_numpy(tokens), steps=steps).logits.numpy()
        np.testing.assert_allclose(model.classifier(steps).run(tokens), expected, atol=1e-4)


def minilm_request(rank: int, teacher: Path | None = None) -> Conversion:
    few = ("run.threads=1", "optim.batch=16", 'data.text="body"', 'data.label="topic"')
    return Conversion(
        rank=rank, max_tokens=24, epochs=3, teacher=teacher, teacher_epochs=3, overrides=few
    )


@pytest.fixture(scope="module")
def converted_minilm(minilm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a table, and the run that MiniLM becomes with it."""
    folder = tmp_path_factory.mktemp("minilm")
    table = write_table(folder / "table.csv", 120)
    convert(str(minilm), folder / "run", minilm_request(0), str(table), quiet=True)
    return folder


@pytest.mark.minilm
def test_minilm_of_the_hub_is_read_as_transformers_reads_it(minilm: Path) -> None:
    original = read_original(minilm)
    # As BERT's uncased tokenizer reads it: golden ids.
    text = "Stocks fell sharply on Monday, didn't they?"
    golden = [101, 15768, 3062, 9249, 2006, 6928, 1010, 2134, 1005, 1056, 2027, 1029, 102]
    assert original.tokenizer.encode(text).ids == golden
    theirs = transformers.AutoModel.from_pretrained(minilm).eval()
    ours, tokens = converted(original, 2).eval(), torch.tensor([golden])
    with torch.no_grad():
        start = ours.embed(tokens)
        found = ours.velocity(start.state, *start.context)
        expected = theirs(tokens, attention_mask=torch.ones_like(tokens)).last_hidden_state
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.minilm
@pytest.mark.parametrize("rank", [0, 44])
def test_minilm_of_the_hub_becomes_a_small_bundle_that_answers(
    rank: int, minilm: Path, converted_minilm: Path, tmp_path: Path
) -> None:
    run = converted_minilm / "run"
    if rank:
        request, table = minilm_request(rank, run / "teacher"), converted_minilm / "table.csv"
        run = tmp_path / "run"
        convert(str(minilm), run, request, str(table), quiet=True)
    asked = ExportRequest(
        tmp_path / "bundle", (1, 2, 3), precision="int8", samples=12, latency=False
    )
    bundle = export_run(run, asked, say=lambda _: None)
    assert sum(entry.bytes for entry in bundle.manifest.files.values()) < 20e6
    with load(tmp_path / "bundle", threads=1) as model:
        labels = model.classify(["the film was lovely", "an awful scene"], steps=3)
    assert [one.label for one in labels] == ["good", "bad"]


@pytest.mark.minilm
def test_embeddings_of_all_of_minilm_are_those_of_transformers(
    minilm: Path, tmp_path: Path
) -> None:
    table = write_table(tmp_path / "table.csv", 24)
    still = ("optim.lr=1e-30", "run.threads=1", "optim.batch=4", "optim.precision=fp32")
    columns = ('data.text="body"', 'data.label="topic"')
    request = Conversion(
        blocks=0, steps=(1,), max_tokens=16, epochs=0.2, overrides=(*still, *columns)
    )
    convert(str(minilm), tmp_path / "run", request, str(table), quiet=True)
    asked = ExportRequest(tmp_path / "bundle", (1,), samples=4, latency=False)
    bundle = export_run(tmp_path / "run", asked, say=lambda _: None)
    assert bundle.manifest.embedding == 384
    theirs = transformers.AutoModel.from_pretrained(minilm).eval()
    ids = TextCodec(bundle).encode_input("Stocks fell sharply on Monday.", truncate=True).tokens
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).last_hidden_state.mean(1).numpy()
    found = open_model(bundle, 1).classifier(1).embed(np.array([ids]))
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_a_killed_conversion_goes_on_to_the_same_weights(
    converted_bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from train.loop import TrainingLoop

    cut, table = tmp_path / "cut", str(converted_bert / "table.csv")
    again = (str(converted_bert / "bert"), cut, REQUEST, table, True)
    iterate, count = TrainingLoop.iterate, 0

    def killed(loop: TrainingLoop, iteration: int) -> dict[str, Any]:
        nonlocal count
        count += 1
        if count in (7, 14):  # once in the teacher, once in the dial
            raise RuntimeError("killed")
        return iterate(loop, iteration)

    monkeypatch.setattr(TrainingLoop, "iterate", killed)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="killed"):
            convert(*again)
    assert count == 14
    convert(*again)
    for run in (Path(), Path("teacher")):
        one, other = (load_run(at / run).model.state_dict() for at in (converted_bert / "run", cut))
        assert one.keys() == other.keys()
        for name, weight in one.items():
            assert torch.equal(weight, other[name]), name


def test_the_dial_of_time_is_that_of_the_loaded_run_and_of_the_bundle(tmp_path: Path) -> None:
    folder, table, request = made(tmp_path)
    dial = ("steps.dial=time", "steps.exits=[1,2]", "steps.schedule=fixed")
    request = dataclasses.replace(request, overrides=(*request.overrides, *dial))
    convert(str(folder), tmp_path / "run", request, str(table), quiet=True)
    model = load_run(tmp_path / "run").model
    tokens = torch.tensor([[2, 7, 8, 9, 3]])
    with torch.no_grad():
        on_the_way = model(tokens, steps=3, exits=(1, 2))
        for steps, logits in zip((1, 2, 3), (*on_the_way.early, on_the_way.logits), strict=True):
            assert torch.equal(model(tokens, steps=steps).logits, logits)
    asked = ExportRequest(tmp_path / "bundle", (1, 2, 3), samples=4, latency=False)
    bundle = export_run(tmp_path / "run", asked, say=lambda _: None)
    assert (bundle.manifest.dial, bundle.manifest.grid_steps) == ("time", 3)
    found = open_model(bundle, 1).step_classifier(3).jumps(tokens.numpy())
    expected = torch.stack([*on_the_way.early, on_the_way.logits]).numpy()
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_a_decoder_goes_on_and_begins_with_the_layers_of_its_teacher(tmp_path: Path) -> None:
    from train.convert import _start_from_teacher

    write_folder(tmp_path / "llama", "llama")
    corpus = write_corpus(tmp_path / "corpus.txt", 300)
    request = Conversion(max_tokens=16, epochs=0.2, teacher_epochs=0.2, overrides=SMALL[:4])
    command = (str(tmp_path / "llama"), tmp_path / "run", request, str(corpus), True)
    convert(*command)
    convert(*command)  # the end again
    teacher = load_run(tmp_path / "run/teacher").model
    dial = converted(read_original(tmp_path / "llama"), 0, 16, (0, 3), 2.0)
    _start_from_teacher(dial, tmp_path / "run/teacher", (0, 3))
    blocks: Any = dial.velocity
    others: Any = teacher.velocity
    for mine, theirs in (
        (blocks.blocks[0], others.blocks[0]),
        (blocks.blocks[1], others.blocks[3]),
    ):
        for name, weight in mine.state_dict().items():
            assert torch.equal(weight, theirs.state_dict()[name]), name


def test_a_decoder_with_rotary_positions_gets_caches_of_16_bits(tmp_path: Path) -> None:
    write_folder(tmp_path / "llama", "llama")
    corpus = write_corpus(tmp_path / "corpus.txt", 300)
    request = Conversion(max_tokens=16, epochs=0.2, teacher_epochs=0.2, overrides=SMALL[:4])
    convert(str(tmp_path / "llama"), tmp_path / "run", request, str(corpus), quiet=True)
    asked = ExportRequest(tmp_path / "b", (1,), precision="fp16", samples=2, latency=False)
    manifest = export_run(tmp_path / "run", asked, say=lambda _: None).manifest  # verified there
    assert (manifest.precision, manifest.cache) == ("fp16", "kv_fp16")


def test_a_teacher_with_another_tokenizer_is_refused(tmp_path: Path) -> None:
    folder, table, request = made(tmp_path)
    whole = dataclasses.replace(request, blocks=0, steps=(1,), epochs=0.2)
    convert(str(folder), tmp_path / "whole", whole, str(table), quiet=True)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    known, special = content["model"]["vocab"], {one["content"] for one in content["added_tokens"]}
    words = [word for word in known if word not in special]
    turned = dict(zip(words, reversed([known[word] for word in words]), strict=True))
    content["model"]["vocab"] = {word: known[word] for word in special} | turned
    path.write_text(json.dumps(content))
    taught = dataclasses.replace(request, teacher=tmp_path / "whole")
    with pytest.raises(RunError, match="another tokenizer"):
        convert(str(folder), tmp_path / "run", taught, str(table), quiet=True)
    write_folder(folder, "bert")
    with pytest.raises(RunError, match="another tokenizer"):  # of fewer pieces
        pruned = dataclasses.replace(taught, prune=True, overrides=request.overrides)
        convert(str(folder), tmp_path / "run2", pruned, str(table), quiet=True)


def test_batches_that_are_gathered_count_as_one_in_an_epoch(tmp_path: Path) -> None:
    folder, table, request = made(tmp_path, blocks=0, steps=(1,), epochs=4)
    gathered = dataclasses.replace(request, overrides=(*request.overrides, "optim.accumulate=4"))
    once = convert(str(folder), tmp_path / "once", request, str(table), quiet=True)
    four = convert(str(folder), tmp_path / "four", gathered, str(table), quiet=True)
    assert once.optim.iterations == 32 and four.optim.iterations == 8


def test_students_that_ask_at_once_get_the_same_answers(converted_bert: Path) -> None:
    teacher = converted_bert / "run/teacher"
    before = load_file(teacher / TAUGHT)["logits"]
    (teacher / TAUGHT).unlink()
    code = (
        "import os, sys, time, torch; from pathlib import Path; torch.set_num_threads(1)\n"
        "os.fsync = lambda _: time.sleep(0.5)\n"  # a slow disk
        "from train import distil; from train.checkpoint import load_run\n"
        "from train.data import open_dataset\n"
        "run = load_run(Path(sys.argv[1])); data = open_dataset(run.recipe, run.tokenizer)\n"
        "print('ready', flush=True); input()\n"
        "distil.kept_logits(Path(sys.argv[1]), data, True)"
    )
    command = [sys.executable, "-c", code, str(teacher)]
    students = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)
        for _ in range(2)
    ]
    for student in students:
        assert student.stdout is not None and student.stdout.readline() == b"ready\n"
    for student in students:
        assert student.stdin is not None
        student.stdin.write(b"\n")
        student.stdin.flush()
    for student in students:
        student.communicate(timeout=60)
        assert student.returncode == 0
    torch.testing.assert_close(load_file(teacher / TAUGHT)["logits"], before, rtol=1e-4, atol=1e-4)


def _kept(converted: Path) -> tuple[Path, Any, torch.Tensor]:
    """The teacher of a converted run, its rows, and the answers to them that it keeps."""
    teacher = converted / "run/teacher"
    run = load_run(teacher)
    dataset: Any = open_dataset(run.recipe, run.tokenizer)
    return teacher, dataset, distil.kept_logits(teacher, dataset, True)


def test_kept_answers_are_read_where_nothing_may_be_written(
    converted_bert: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    teacher, dataset, kept = _kept(converted_bert)
    monkeypatch.setattr("train.distil.fcntl", None)  # no lock
    assert torch.equal(distil.kept_logits(teacher, dataset, True), kept)


def test_a_teacher_that_only_others_may_write_is_asked_all_the_same(
    converted_bert: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    teacher, dataset, kept = _kept(converted_bert)
    opened = Path.open

    def forbidden(path: Path, mode: str = "r", **others: Any) -> Any:
        if mode != "r" and path.parent == teacher:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(path, mode, **others)

    monkeypatch.setattr(Path, "open", forbidden)
    monkeypatch.setattr(distil, "_read_kept", lambda *_: None)  # nobody has asked before
    torch.testing.assert_close(distil.kept_logits(teacher, dataset, True), kept)


def test_the_teachers_answers_are_kept_and_every_batch_brings_those_of_its_rows(
    converted_bert: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    teacher = converted_bert / "run/teacher"
    assert (teacher / TAUGHT).is_file()
    run = load_run(converted_bert / "run")
    dataset: Any = open_dataset(run.recipe, run.tokenizer)
    original = load_run(teacher).model
    monkeypatch.setattr(distil, "Teacher", None)  # its answers are there
    dataset.teach(distil.kept_logits(teacher, dataset, True))
    for i in range(3):
        batch = dataset.batch(i, 16, 0)
        with torch.no_grad():
            expected = original(*batch.inputs).logits
        torch.testing.assert_close(batch.taught, expected, rtol=1e-4, atol=1e-4)


def test_states_along_the_way_and_a_shallow_stack_are_learnt_from_the_teacher(
    converted_bert: Path, tmp_path: Path
) -> None:
    folder, table = str(converted_bert / "bert"), str(converted_bert / "table.csv")
    teacher = converted_bert / "run/teacher"
    overrides = (*REQUEST.overrides, "teacher.states=1.0")
    dial = dataclasses.replace(REQUEST, overrides=overrides, teacher=teacher)
    convert(folder, tmp_path / "dial", dial, table, quiet=True)
    stack = dataclasses.replace(dial, steps=(1,))
    convert(folder, tmp_path / "stack", stack, table, quiet=True)
    assert load_run(tmp_path / "stack").model.discrete
    without = dataclasses.replace(stack, teacher=None)
    with pytest.raises(RunError, match=r"pass --teacher .*run/teacher to go on"):
        convert(folder, tmp_path / "stack", without, table, quiet=True)
    assert not (tmp_path / "stack/teacher").exists()

    def apart(run: Path) -> float:
        """How far the states of a run are from the teacher's."""
        model, recipe, tokenizer, _ = load_run(run)
        batch = next(iter(open_dataset(recipe, tokenizer).validation(16)))
        with torch.no_grad(), distil.Waypoints(model) as points:
            output = model(*batch.inputs, steps=2, observe=points)
        _, aim = distil.Teacher(teacher)(*batch.inputs)
        mine = points.path(output)
        assert set(mine) & set(aim) == set(mine)  # 1/2 and 1
        assert len(mine) == 2 and len(aim) == 4
        return float(distil.distance(mine, aim, output.trajectories[-1].present))

    assert apart(tmp_path / "dial") < 0.8 * apart(converted_bert / "run")


def test_a_teacher_of_other_rows_or_classes_is_refused(tmp_path: Path) -> None:
    folder, table, request = made(tmp_path)
    convert(
        str(folder),
        tmp_path / "whole",
        dataclasses.replace(request, blocks=0, steps=(1,)),
        str(table),
        quiet=True,
    )
    taught = dataclasses.replace(request, teacher=tmp_path / "whole")
    with pytest.raises(RunError, match="other rows"):
        convert(
            str(folder),
            tmp_path / "run",
            dataclasses.replace(taught, max_tokens=9),
            str(table),
            quiet=True,
        )
    lines = table.read_text().splitlines()
    table.write_text("\n".join([lines[0], *(re.sub(r"good$", "fine", line) for line in lines[1:])]))
    with pytest.raises(RunError, match="has the classes"):
        convert(str(folder), tmp_path / "run2", taught, str(table), quiet=True)
    table.write_text("\n".join(lines))
    weights = tmp_path / "whole" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(RunError, match=r"model\.safetensors is damaged"):
        convert(str(folder), tmp_path / "run3", taught, str(table), quiet=True)
    weights.unlink()
    with pytest.raises(RunError, match=r"model\.safetensors does not exist"):
        convert(str(folder), tmp_path / "run4", taught, str(table), quiet=True)


def test_a_run_with_a_teacher_does_not_go_on_without(converted_bert: Path) -> None:
    taught = load_run(converted_bert / "run").recipe
    alone = dataclasses.replace(taught, teacher=dataclasses.replace(taught.teacher, run=""))
    with pytest.raises(RunError, match=r"differs in teacher\.run"):
        check_resumable(converted_bert / "run", alone)
    moved = dataclasses.replace(taught, teacher=dataclasses.replace(taught.teacher, run="moved"))
    assert check_resumable(converted_bert / "run", moved) is not None
    shutil.copytree(converted_bert / "run/teacher", converted_bert / "moved")
    check_same_teacher(converted_bert / "run", converted_bert / "moved")
    with pytest.raises(RunError, match="learnt from another teacher than"):
        check_same_teacher(converted_bert / "run", converted_bert / "run")


@pytest.mark.parametrize(
    ("steps", "schedule", "watched"), [((2, 4), "any", [1, 2, 4]), ((4,), "fixed", [1, 4])]
)
def test_only_the_counts_that_were_asked_for_are_trained_and_choose_the_weights(
    steps: tuple[int, ...],
    schedule: str,
    watched: list[int],
    converted_bert: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    request = dataclasses.replace(
        REQUEST, steps=steps, teacher=converted_bert / "run/teacher", epochs=1
    )
    chosen: list[dict[str, float]] = []
    note = Best.note

    def noting(best: Best, iteration: int, validation: dict[str, float], model: Stepped) -> None:
        chosen.append(validation)
        note(best, iteration, validation, model)

    monkeypatch.setattr(Best, "note", noting)
    table = str(converted_bert / "table.csv")
    recipe = convert(str(converted_bert / "bert"), tmp_path / "run", request, table, quiet=True)
    assert (recipe.steps.schedule, recipe.steps.full) == (schedule, 4)
    assert recipe.steps.short == steps[:-1] or schedule == "fixed"
    log = read_metrics(tmp_path / "run/metrics.jsonl")
    assert list(log[-1]["validation"]) == [f"accuracy@{count}" for count in watched]
    trained = [count for count in (watched[1], 4) if count in steps]
    assert set(chosen[-1]) == {f"accuracy@{count}" for count in trained}


def test_a_process_that_keeps_nothing_goes_on_from_the_same_weights(
    converted_bert: Path, tmp_path: Path
) -> None:
    main, other = (load_run(converted_bert / "run") for _ in range(2))
    keeping, reading = (Best(tmp_path, main.recipe.run) for _ in range(2))
    with torch.no_grad():
        for weight in main.model.parameters():
            weight.add_(1.0)
    keeping.note(7, {"accuracy@1": 0.5}, main.model)
    reading.load(other.model)
    assert (reading.value, reading.iteration) == (0.5, 7)
    states = main.model.state_dict()
    assert all(torch.equal(states[name], w) for name, w in other.model.state_dict().items())


def test_the_best_weights_are_kept_and_training_ends_early(tmp_path: Path) -> None:
    folder, table, request = made(tmp_path)
    long = dataclasses.replace(
        request,
        blocks=0,
        steps=(1,),
        epochs=40,
        overrides=(*request.overrides, "run.evaluate_every=4", "run.patience=3", "optim.lr=0.01"),
    )
    recipe = convert(str(folder), tmp_path / "run", long, str(table), quiet=True)
    log = [r for r in read_metrics(tmp_path / "run/metrics.jsonl") if "validation" in r]
    assert log[-1]["iteration"] < recipe.optim.iterations
    best = max(log, key=lambda record: record["validation"]["accuracy@1"])
    assert load_run(tmp_path / "run").facts["iteration"] == best["iteration"]
    assert log[-1]["iteration"] - best["iteration"] == 3 * 4
    before = (tmp_path / "run" / MODEL).read_bytes()

    def stopped(_: Recipe) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):  # the same command, ended while a bag of words is fitted
        convert(str(folder), tmp_path / "run", long, str(table), quiet=True, begin=stopped)
    assert (tmp_path / "run" / MODEL).read_bytes() == before
    assert (tmp_path / "run" / BEST).is_file() and (tmp_path / "run" / STATE).is_file()
    convert(str(folder), tmp_path / "run", long, str(table), quiet=True)  # the end again
    assert (tmp_path / "run" / MODEL).read_bytes() == before


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, table, _ = made(tmp_path)
    flags = [part for one in SMALL for part in ("--set", one)]
    words = ["convert", str(folder), "--data", str(table), "--text", "body", "--label", "topic"]
    words += ["--max-tokens", "12", "--epochs", "1", "--teacher-epochs", "1", *flags]
    assert main([*words, "--out", str(tmp_path / "run"), "--layers", "0,2"]) == 0
    assert "stepdial export" in capsys.readouterr().out
    facts = read_facts(tmp_path / "run")
    assert facts["pretrained"]["layers"] == [0, 2]
    assert main([*words, "--out", str(tmp_path / "run"), "--layers", "0,3"]) == 2
    assert "another conversion" in capsys.readouterr().err
    assert main(["convert", "org/name", "--data", str(table), "--out", str(tmp_path / "no")]) == 2
    assert "cannot be fetched from the Hub" in capsys.readouterr().err
    assert main(["convert", "minilm-v2", "--data", str(table), "--out", str(tmp_path / "no")]) == 2
    assert "most names there have an owner" in capsys.readouterr().err
    assert main([*words, "--out", str(tmp_path / "few"), "--layers", "0,9"]) == 2
    assert "has the layers 0 to 3" in capsys.readouterr().err
    assert main([*words, "--out", str(tmp_path / "none"), "--epochs", "0"]) == 2
    assert "must be more than 0" in capsys.readouterr().err
    assert main(["train", "classifier", "--data", str(table), "--epochs", "2"]) == 2
    assert "are for --from" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"layers": (0, 77)}, "has the layers 0 to 3"),
        ({"overrides": (*REQUEST.overrides, "model.width=7")}, "model.width must be a multiple"),
        ({"overrides": (*REQUEST.overrides, "model.layers=4")}, "model.layers: a conversion has"),
    ],
)
def test_what_is_wrong_is_said_before_the_teacher_is_trained(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    folder, table, request = made(tmp_path, **changes)
    with pytest.raises(ValueError, match=said):
        convert(str(folder), tmp_path / "run", request, str(table), quiet=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("overrides", [REQUEST.overrides, ()])
def test_a_decoder_is_not_given_a_table(overrides: tuple[str, ...], tmp_path: Path) -> None:
    folder, table, request = made(tmp_path, "gpt2", overrides=overrides)
    with pytest.raises(ValueError, match=r"gpt2 is a decoder, .* or convert an encoder"):
        convert(str(folder), tmp_path / "run", request, str(table), quiet=True)


def test_a_tokenizer_of_a_pretrained_model_is_not_learnt(tmp_path: Path) -> None:
    table = write_table(tmp_path / "table.csv")
    overrides = ["data.tokenizer=wordpiece", "data.text=body", "data.label=topic"]
    recipe = load_recipe("classifier", overrides, str(table))
    with pytest.raises(ValueError, match="stepdial convert"):
        open_dataset(recipe)
