"""Steps with low-rank corrections: the model, the command, the graphs."""

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch

from export.graph import stitch, stitch_step
from export.half_bundle import halve_bundle
from export.int8 import quantise
from export.pieces import with_branches
from export.run import ExportRequest, export_run
from export.trace import Traced, trace
from serve.runtime import open_model
from tests.fixtures.tiny_runs import tiny_label_recipe
from tests.pretrained_folders import write_folder, write_table
from train.blocks import BlockVelocity
from train.checkpoint import RunError, load_run
from train.convert import Conversion, convert
from train.corrections import CorrectedVelocity, LowRank, check_steps, moments_of
from train.evaluate import evaluate_run
from train.loop import TrainingLoop, train
from train.model import Stepped
from train.pretrained import (
    ConvertedTransformer,
    Encoder,
    begin_with_layers,
    converted,
    converted_from,
    read_original,
)

TOKENS = torch.tensor([[2, 7, 8, 9, 3], [2, 11, 3, 0, 0]])
ALL_LAYERS = (0, 1, 2, 3)
REQUEST = Conversion(
    steps=(1, 2),
    rank=4,
    max_tokens=12,
    epochs=1,
    teacher_epochs=1,
    overrides=(
        "optim.precision=fp32",
        "optim.lr=0.003",
        "optim.batch=16",
        "run.threads=1",
        "data.held_out=0.2",
        'data.text="body"',
        'data.label="topic"',
    ),
)


def of_bert(
    folder: Path, rank: int, rows: tuple[torch.Tensor, ...] = ()
) -> tuple[ConvertedTransformer, ConvertedTransformer]:
    """Two steps of two layers with corrections, and the four layers that they are of."""
    write_folder(folder, "bert")
    original = read_original(folder)
    torch.manual_seed(0)
    dial = converted(original, 2, 12, ALL_LAYERS, 2.0, steps=2, rank=rank, ending_rank=2).eval()
    dial.dial, dial.full = "time", 2
    stack = converted(original, 2, 12).eval()
    stack.head.load_state_dict(dial.head.state_dict())
    begin_with_layers(dial, stack, rows)
    return dial, stack


def velocity_of(model: Stepped) -> CorrectedVelocity:
    assert isinstance(model, ConvertedTransformer)
    assert isinstance(model.velocity, CorrectedVelocity)
    return model.velocity


def test_with_whole_corrections_the_steps_are_all_layers(tmp_path: Path) -> None:
    dial, stack = of_bert(tmp_path, rank=16)
    with torch.no_grad():
        full, expected = dial(TOKENS, steps=2, exits=(1,)), stack(TOKENS).logits
    torch.testing.assert_close(full.logits, expected, atol=1e-5, rtol=0)
    first = converted(read_original(tmp_path), 2, 12, (0, 1)).eval()
    first.head.load_state_dict(dial.head.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(full.early[0], first(TOKENS).logits, atol=1e-5, rtol=0)


def test_a_higher_rank_begins_nearer_to_the_layers(tmp_path: Path) -> None:
    distances = []
    for rank in (1, 4, 12):
        dial, stack = of_bert(tmp_path, rank)
        velocity, blocks = velocity_of(dial), stack.velocity
        assert isinstance(blocks, BlockVelocity)
        wanted = dict(blocks.blocks[3].named_parameters())
        weights = velocity.weights_at(1, 1)
        far = 0.0
        for name, (weight, (correction,)) in weights.items():
            with torch.no_grad():
                difference = weight + correction.value() - wanted[name]
            far += float(difference.square().sum())
            if weight.dim() == 1:  # biases and norms are taken as they are
                torch.testing.assert_close(
                    difference, torch.zeros_like(difference), atol=1e-6, rtol=0
                )
        distances.append(far)
    assert distances[0] > distances[1] > distances[2] > 0


def test_corrections_are_nearest_for_the_rows_that_were_seen(tmp_path: Path) -> None:
    far = []
    for rows in ((), (TOKENS,)):
        dial, stack = of_bert(tmp_path, 8, rows)
        with torch.no_grad():
            far.append(float((dial(TOKENS, steps=2).logits - stack(TOKENS).logits).abs().max()))
    assert far[1] < far[0] / 10


def test_both_sides_of_a_correction_begin_at_one_size(tmp_path: Path) -> None:
    """An optimiser that changes all numbers alike would break what begins lopsided."""
    many = tuple(TOKENS.repeat(50, 1) for _ in range(4))
    sizes = []
    for rows in ((TOKENS,), many):
        velocity = velocity_of(of_bert(tmp_path, 4, rows)[0])
        for name, parameter in velocity.corrections.named_parameters():
            if name.endswith(".up"):
                up, down = parameter[0], velocity.corrections.get_parameter(name[:-2] + "down")[0]
                torch.testing.assert_close(up.norm(dim=1), down.norm(dim=1))
                sizes.append(float(up.norm().detach()))
    assert sizes[: len(sizes) // 2] == pytest.approx(sizes[len(sizes) // 2 :], rel=1e-3)


def test_directions_without_size_can_be_learnt() -> None:
    low = LowRank(6, 5, steps=1, rank=3)
    wanted = torch.outer(torch.arange(6.0), torch.ones(5))
    with torch.no_grad():
        low.begin_with(0, wanted, None)
    torch.testing.assert_close(low(0), wanted, atol=1e-4, rtol=0)
    assert (low.down[0].norm(dim=1) > 0).all()


def test_padding_is_not_seen(tmp_path: Path) -> None:
    _, stack = of_bert(tmp_path, 2)
    assert isinstance(stack.velocity, BlockVelocity)
    padded, bare = (
        moments_of(stack.velocity.blocks, stack, [rows], 0) for rows in (TOKENS[1:], TOKENS[1:, :3])
    )
    for one, other in zip(padded, bare, strict=True):
        assert one.keys() == other.keys() and len(one) == 4
        for name, moment in one.items():
            torch.testing.assert_close(moment, other[name])


def test_a_shorter_answer_ends_with_a_step_of_its_own(tmp_path: Path) -> None:
    dial, _ = of_bert(tmp_path, 3)
    velocity = velocity_of(dial)

    def answers() -> list[torch.Tensor]:
        with torch.no_grad():
            both, alone = dial(TOKENS, steps=2, exits=(1,)), dial(TOKENS, steps=1)
        torch.testing.assert_close(both.early[0], alone.logits)
        assert (both.evaluations, alone.evaluations) == (3, 1)
        return [alone.logits, both.logits]

    before = answers()
    with torch.no_grad():
        for weight in velocity.endings.parameters():
            weight.normal_(0.0, 0.1)
    after = answers()
    assert not torch.equal(before[0], after[0])
    torch.testing.assert_close(before[1], after[1], rtol=0, atol=0)


def test_an_ending_learns_with_the_rest_held(tmp_path: Path) -> None:
    dial, _ = of_bert(tmp_path, 3)
    found = dial(TOKENS, steps=2, exits=(1,))
    found.early[0].sum().backward()
    learning = {name for name, weight in dial.named_parameters() if weight.grad is not None}
    learning = {name for name in learning if not name.startswith("head.")}  # which all answers have
    assert learning and all(name.startswith("velocity.endings.") for name in learning)
    dial.zero_grad()
    dial(TOKENS, steps=2).logits.sum().backward()
    assert all(w.grad is None or not w.grad.any() for w in velocity_of(dial).endings.parameters())
    assert velocity_of(dial).blocks[0].get_parameter("feedforward.up.weight").grad is not None


def test_a_step_alone_is_what_the_model_takes_there(tmp_path: Path) -> None:
    velocity = velocity_of(of_bert(tmp_path, 3)[0])
    x = torch.randn(2, 5, velocity.gain.shape[0])
    mask = TOKENS != 0
    with torch.no_grad():
        for weight in velocity.endings.parameters():
            weight.normal_(0.0, 0.1)
        end = velocity.last(x, 0.0, 0.5, mask)
        assert end is not None and velocity.last(x, 0.5, 0.5, mask) is None
        torch.testing.assert_close(end, velocity.at(-1)(x, mask))
    assert velocity.every() == [-1, 0, 1]
    # -1: step 0 as an ending, at the time -(0 + h). 2: beyond the steps there are.
    for step, t in ((-1, -0.5), (0, 0.0), (1, 0.5), (2, 1.0)):
        with torch.no_grad():
            torch.testing.assert_close(velocity.at(step)(x, mask), velocity(x, mask, t, 0.5))
    assert not torch.equal(velocity(x, mask, 0.0, 0.5), velocity(x, mask, 0.5, 0.5))
    torch.testing.assert_close(velocity(x, mask, 1.0, 0.5), velocity(x, mask, 0.5, 0.5))


def test_a_correction_of_nothing_can_be_learnt() -> None:
    low = LowRank(6, 5, steps=1, rank=2)
    with torch.no_grad():
        low.begin_with(0, torch.zeros(6, 5), None)
    assert not low(0).any()
    (low(0) - torch.ones(6, 5)).square().sum().backward()
    assert low.up.grad is not None and low.up.grad.any()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corrected")
    write_folder(folder / "bert", "bert")
    table = write_table(folder / "table.csv")
    convert(str(folder / "bert"), folder / "run", REQUEST, str(table), quiet=True)
    return folder / "run"


@pytest.mark.long
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_bundles_give_the_answers_of_the_run(
    precision: Any, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("export.int8.LEAST_ELEMENTS", 256)
    monkeypatch.setattr("export.int8.LEAST_MERGED", 64)
    model = load_run(run).model
    assert model.dial == "time" and velocity_of(model).steps == 2
    with torch.no_grad():
        found = model(TOKENS, steps=2, exits=(1,))
    expected = torch.stack([*found.early, found.logits]).numpy()
    assert np.abs(expected[0] - expected[1]).max() > 1e-3
    asked = ExportRequest(
        tmp_path / "bundle", (1, 2), samples=8, latency=False, precision=precision
    )
    bundle = export_run(run, asked, say=lambda _: None)
    card = (tmp_path / "bundle" / "README.md").read_text(encoding="utf-8")
    assert "each further one has a correction of its own" in card and "one set" not in card
    near = 1e-4 if precision == "fp32" else 0.1
    opened = open_model(bundle, 1)
    np.testing.assert_allclose(opened.step_classifier(2).jumps(TOKENS.numpy()), expected, atol=near)
    for steps in (1, 2):
        answer = opened.classifier(steps).run(TOKENS.numpy())
        np.testing.assert_allclose(answer, expected[steps - 1], atol=near)


def test_early_answers_are_those_of_endings(run: Path, tmp_path: Path) -> None:
    asked = ExportRequest(tmp_path / "bundle", (1, 2), samples=8, latency=False)
    opened = open_model(export_run(run, asked, say=lambda _: None), 1)
    rows = TOKENS.numpy().repeat(3, axis=0)
    rows[:, 1] = [7, 8, 9, 11, 12, 13]
    classifier = opened.step_classifier(2)
    readouts = classifier.jumps(rows)  # (M, B, C)
    top = np.sort(readouts[0], axis=-1)
    margins = top[:, -1] - top[:, -2]
    threshold = float(np.sort(margins)[2:4].mean())
    found = classifier.early(rows, threshold)
    assert sorted(found.steps) == [1, 1, 1, 2, 2, 2]
    # What goes on takes its first step twice: once to be read, once to go on from.
    assert (found.evaluations == 2 * found.steps - 1).all()
    expected = np.where((margins >= threshold)[:, None], *readouts)
    np.testing.assert_allclose(found.logits, expected, atol=1e-5)
    np.testing.assert_allclose(classifier.traced(rows, threshold).logits, expected, atol=1e-5)
    np.testing.assert_allclose(opened.step_classifier(1).run(rows), readouts[0], atol=1e-5)


def test_each_shorter_answer_of_three_steps_has_its_own_ending(tmp_path: Path) -> None:
    write_folder(tmp_path / "bert", "bert")
    original = read_original(tmp_path / "bert")
    torch.manual_seed(0)
    model = converted(original, 2, 12, (0, 1, 2), 3.0, steps=3, rank=4, ending_rank=2).eval()
    model.dial, model.full = "time", 3
    velocity = velocity_of(model)
    with torch.no_grad():
        for weight in (*velocity.corrections.parameters(), *velocity.endings.parameters()):
            weight.normal_(0.0, 0.1)
        found = model(TOKENS, steps=3, exits=(1, 2))
        expected = [*found.early, found.logits]
        for steps in (1, 2, 3):
            torch.testing.assert_close(model(TOKENS, steps=steps).logits, expected[steps - 1])
    parts = trace(model, (TOKENS[:1],), (torch.ones(3, 7, dtype=torch.int64),), labelled=True)
    assert parts.step is not None and parts.graph.endings == 2
    for steps in (1, 2, 3):
        session = opened(stitch(parts.graph, "euler", steps))
        (answer, _) = session.run(None, {"tokens": TOKENS.numpy()})
        np.testing.assert_allclose(answer, expected[steps - 1], atol=1e-5)
    embed, step, head = map(opened, stitch_step(parts.graph, parts.step, "euler"))
    x, *context = embed.run(None, {"tokens": TOKENS.numpy()})
    beside = dict(zip([one.name for one in embed.get_outputs()][1:], context, strict=True))
    taken = [one.name for one in step.get_inputs()]
    size = np.full(2, 1 / 3, np.float32)
    for count in range(3):
        given = {"x": x, "h": size} | {k: v for k, v in beside.items() if k in taken}
        (x,) = step.run(["y"], given | {"t": count * size})
        (end,) = step.run(["y"], given | {"t": -(count + 1) * size}) if count < 2 else (x,)
        seen = {one.name: beside.get(one.name, end) for one in head.get_inputs()}
        np.testing.assert_allclose(head.run(["logits"], seen)[0], expected[count], atol=1e-5)


def opened(graph: onnx.ModelProto) -> ort.InferenceSession:
    return ort.InferenceSession(graph.SerializeToString(), providers=["CPUExecutionProvider"])


@pytest.fixture(scope="module")
def traced() -> Traced:
    """Of a model so wide that the exporter adds up no weights itself."""
    encoder = Encoder(
        family="bert",
        vocabulary=200,
        width=192,
        heads=4,
        hidden=768,
        layers=2,
        positions=64,
        first_position=0,
        embedding_width=192,
        eps=1e-12,
        activation="gelu-exact",
        pad_id=0,
        pool="mean",
        dense="",
    )
    origin = {"encoder": dataclasses.asdict(encoder), "classes": 2, "window": 32, "layers": [0, 1]}
    torch.manual_seed(0)
    ranks = {"steps": 2, "rank": 64, "ending_rank": 48}
    model = converted_from(origin | {"gain": 2.0, "dropout": 0.0} | ranks).eval()
    velocity = velocity_of(model)
    with torch.no_grad():
        for weight in (*velocity.corrections.parameters(), *velocity.endings.parameters()):
            weight.normal_(0.0, 0.02)
    model.dial, model.full = "time", 2
    return trace(model, (TOKENS[:1],), (torch.ones(3, 7, dtype=torch.int64),), labelled=True)


def test_matrices_are_bytes_and_there_once(traced: Traced) -> None:
    assert traced.step is not None
    step = stitch_step(traced.graph, traced.step, "euler").step
    graphs = [step, *(stitch(traced.graph, "euler", steps) for steps in (1, 2))]
    matrices: list[set[bytes]] = []
    for graph, plain in zip(graphs, (False, True, True), strict=True):
        quantise(graph, plain, floats=True)
        onnx.checker.check_model(graph)
        mine = [one for one in graph.graph.initializer if one.name.startswith("velocity")]
        large = [one for one in mine if math.prod(one.dims) >= 4096]
        assert {one.data_type for one in large} == {onnx.TensorProto.UINT8}
        matrices.append({one.raw_data for one in large})
    # A block has 4 matrices; a correction 2 for each, and so has the ending of one step. The rungs
    # bring none of their own: one step is the ending alone, two are all but it.
    assert len(matrices[0]) == 4 + 8 + 8 and len(matrices[1]) == len(matrices[2]) == 4 + 8
    assert len(matrices[1] & matrices[2]) == 4 and matrices[1] | matrices[2] == matrices[0]
    block = 192 * (3 * 192 + 192 + 768 + 768)
    corrections = (64 + 48) * (4 * 192 + 2 * 192 + 2 * (192 + 768))
    assert sum(map(len, matrices[0])) == block + corrections


def test_choices_stand_beside_each_other_and_make_no_weights(traced: Traced) -> None:
    assert traced.step is not None
    step = stitch_step(traced.graph, traced.step, "euler").step
    quantise(step, plain=False, floats=True)
    choices = [node for node in step.graph.node if node.op_type == "If"]
    # One inside another would be slower; and what makes weights is outside, where it is done once.
    everywhere = [node for node in with_branches(step.graph.node) if node.op_type == "If"]
    assert len(choices) == len(everywhere) == 3
    outside = {name for node in step.graph.node for name in node.output}
    products = [node for node in with_branches(choices) if node.op_type == "MatMul"]
    assert len(products) == 12 and all(node.input[1] in outside for node in products)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"steps": (1,)}, "--rank is of steps after the first"),
        ({"rank": -1}, "--rank -1: from 1 to below the width of bert, 16"),
        ({"rank": 16}, "--rank 16: from 1 to below the width of bert, 16"),
        ({"steps": (1, 2, 3)}, "--blocks 2 at each of 3 steps are 6 layers, and bert has 4"),
        ({"layers": (0, 1, 2)}, "3 cannot be shared out among 2 steps"),
        ({"layers": (0, 1, 2, 9)}, "has the layers 0 to 3"),
        (
            {"overrides": (*REQUEST.overrides, "steps.dial=resolution", "steps.exits=[]")},
            "--rank needs",
        ),
        ({"overrides": (*REQUEST.overrides, "steps.method=heun")}, "--rank needs"),
        ({"overrides": (*REQUEST.overrides, "steps.full=3")}, "--rank needs"),
    ],
)
def test_what_cannot_have_corrections_is_refused_before_training(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    write_folder(tmp_path / "bert", "bert")
    table = write_table(tmp_path / "table.csv")
    request = dataclasses.replace(REQUEST, **changes)
    with pytest.raises(ValueError, match=said):
        convert(str(tmp_path / "bert"), tmp_path / "run", request, str(table), quiet=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("family", "said"), [("albert", "an ALBERT"), ("llama", "a decoder")])
def test_models_whose_steps_are_all_the_same_have_none(
    family: str, said: str, tmp_path: Path
) -> None:
    write_folder(tmp_path / family, family)
    table = write_table(tmp_path / "table.csv")
    with pytest.raises(ValueError, match=said):
        convert(str(tmp_path / family), tmp_path / "run", REQUEST, str(table), quiet=True)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"method": "heun"}, "heun evaluates between steps"),
        ({"precision": "fp16"}, "use --precision int8 or fp32"),
    ],
)
def test_what_cannot_be_exported_is_refused(
    changes: dict[str, Any], said: str, run: Path, tmp_path: Path
) -> None:
    asked = dataclasses.replace(ExportRequest(tmp_path / "bundle", latency=False), **changes)
    with pytest.raises(ValueError, match=said):
        export_run(run, asked, say=lambda _: None)
    assert not (tmp_path / "bundle").exists()


def test_a_bundle_is_not_halved(run: Path, tmp_path: Path) -> None:
    asked = ExportRequest(tmp_path / "bundle", latency=False, samples=4)
    bundle = export_run(run, asked, say=lambda _: None)
    with pytest.raises(ValueError, match="use --precision int8 or fp32, on the run"):
        halve_bundle(bundle, tmp_path / "half", "fp16", Iterator)


def test_methods_and_step_counts_that_do_not_fit_are_refused(run: Path) -> None:
    table = str(run.parent / "table.csv")
    with pytest.raises(ValueError, match="heun evaluates between steps"):
        evaluate_run(run, methods=["euler", "heun"], data=table)
    assert [row.steps for row in evaluate_run(run, [1, 2], data=table).rows] == [1, 2]
    model, recipe = load_run(run).model, load_run(run).recipe
    longer = dataclasses.replace(recipe.steps, full=3)
    with pytest.raises(ValueError, match=r"steps\.full 2"):
        check_steps(model, longer, "euler")
    check_steps(model, recipe.steps, "euler")


def test_more_steps_than_there_are_repeat_the_last(run: Path, tmp_path: Path) -> None:
    asked = ExportRequest(tmp_path / "bundle", (1, 4), latency=False, samples=4)
    opened = open_model(export_run(run, asked, say=lambda _: None), 1)
    with torch.no_grad():
        expected = load_run(run).model(TOKENS, steps=4).logits.numpy()
    np.testing.assert_allclose(opened.classifier(4).run(TOKENS.numpy()), expected, atol=1e-4)
    in_steps = opened.step_classifier(4).jumps(TOKENS.numpy())[-1]
    np.testing.assert_allclose(in_steps, expected, atol=1e-4)


@pytest.mark.long
def test_at_the_end_only_endings_learn(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = ("run.keep=last", "run.patience=0", "run.evaluate_every=1", "optim.endings=3")
    request = dataclasses.replace(
        REQUEST, teacher=run / "teacher", overrides=(*REQUEST.overrides, *overrides)
    )
    iterate = TrainingLoop.iterate
    seen: dict[int, dict[str, torch.Tensor]] = {}
    rates: list[float] = []
    models: list[Stepped] = []
    learning: set[str] = set()

    def noting(loop: TrainingLoop, iteration: int) -> dict[str, Any]:
        weights = loop.model.state_dict()
        seen[iteration] = {name: weight.clone() for name, weight in weights.items()}
        record = iterate(loop, iteration)
        rates.append(record["lr"])
        models.append(loop.model)
        if iteration == 0:
            named = loop.model.named_parameters()
            learning.update(name for name, weight in named if weight.requires_grad)
        return record

    monkeypatch.setattr(TrainingLoop, "iterate", noting)
    convert(
        str(run.parent / "bert"), tmp_path / "run", request, str(run.parent / "table.csv"), True
    )
    kept = load_run(tmp_path / "run")
    first = kept.recipe.optim.iterations - 3
    after = kept.model.state_dict()
    moved = {name for name, weight in after.items() if not torch.equal(weight, seen[first][name])}
    assert moved and all(name.startswith("velocity.endings.") for name in moved)
    before = {n for n, weight in seen[first].items() if not torch.equal(weight, seen[0][n])}
    assert any(not name.startswith("velocity.endings.") for name in before)
    assert rates[first] > rates[first - 1]  # begins anew
    assert {n for n, weight in models[-1].named_parameters() if weight.requires_grad} == learning


@pytest.mark.long
def test_a_conversion_killed_while_endings_learn_goes_on_to_the_same_weights(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = ("run.evaluate_every=1", "run.checkpoint_every=100", "optim.endings=3")
    request = dataclasses.replace(
        REQUEST, teacher=run / "teacher", overrides=(*REQUEST.overrides, *overrides)
    )
    iterate, killed_at = TrainingLoop.iterate, -1

    def killed(loop: TrainingLoop, iteration: int) -> dict[str, Any]:
        if iteration == killed_at:
            raise RuntimeError("killed")
        # Of an evaluation in the last stage: better than any before it.
        if iteration >= loop.recipe.optim.iterations - 3:
            monkeypatch.setattr(loop, "watch", lambda: {"validation": {"accuracy@1": 1.0}})
        return iterate(loop, iteration)

    monkeypatch.setattr(TrainingLoop, "iterate", killed)
    runs = []
    for name, killed_at in (("whole", -1), ("cut", load_run(run).recipe.optim.iterations - 1)):
        again = (str(run.parent / "bert"), tmp_path / name, request, str(run.parent / "table.csv"))
        if killed_at >= 0:
            with pytest.raises(RuntimeError, match="killed"):
                convert(*again, quiet=True)
            killed_at = -1
        convert(*again, quiet=True)
        kept = load_run(tmp_path / name)
        assert kept.facts["iteration"] == kept.recipe.optim.iterations  # as its endings ended
        runs.append(kept.model.state_dict())
    assert all(torch.equal(weight, runs[1][name]) for name, weight in runs[0].items())


def test_endings_are_of_conversions_only(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"optim\.endings is for models of"):
        train(tiny_label_recipe("optim.endings=2"), tmp_path, quiet=True)


@pytest.mark.long
def test_a_killed_conversion_goes_on_to_the_same_weights(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = dataclasses.replace(
        REQUEST,
        teacher=run / "teacher",
        overrides=(*REQUEST.overrides, "run.checkpoint_every=2"),
    )
    again = (str(run.parent / "bert"), tmp_path / "cut", request, str(run.parent / "table.csv"))
    iterate, count = TrainingLoop.iterate, 0

    def killed(loop: TrainingLoop, iteration: int) -> dict[str, Any]:
        nonlocal count
        count += 1
        if count == 4:
            raise RuntimeError("killed")
        return iterate(loop, iteration)

    monkeypatch.setattr(TrainingLoop, "iterate", killed)
    with pytest.raises(RuntimeError, match="killed"):
        convert(*again, quiet=True)
    convert(*again, quiet=True)
    one, other = (load_run(at).model.state_dict() for at in (run, tmp_path / "cut"))
    assert one.keys() == other.keys()
    assert all(torch.equal(weight, other[name]) for name, weight in one.items())
    with pytest.raises(ValueError, match="another conversion"):
        convert(*again[:2], dataclasses.replace(request, rank=5), again[3], quiet=True)


@pytest.mark.long
def test_a_teacher_gives_the_layers_that_it_has(run: Path, tmp_path: Path) -> None:
    """Of a teacher with corrections those of the first step, the others from the original."""
    folder, table = str(run.parent / "bert"), str(run.parent / "table.csv")
    still = dataclasses.replace(
        REQUEST, teacher=run, epochs=0.01, overrides=(*REQUEST.overrides, "optim.lr=1e-30")
    )
    convert(folder, tmp_path / "again", still, table, quiet=True)
    teacher, again = (velocity_of(load_run(at).model) for at in (run, tmp_path / "again"))
    for one, other in zip(teacher.blocks.parameters(), again.blocks.parameters(), strict=True):
        torch.testing.assert_close(one, other)
    original = read_original(Path(folder)).weights["encoder.layer.3.attention.output.dense.bias"]
    bias, (correction,) = again.weights_at(1, 1)["attention.out.bias"]
    torch.testing.assert_close(bias + correction.value(), original)
