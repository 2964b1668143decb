"""Steps with low-rank corrections: the model, the command, the graphs."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from export.pieces import with_branches
from export.run import ExportRequest, export_run
from serve.runtime import open_model
from tests.pretrained_folders import write_folder, write_table
from train.blocks import BlockVelocity
from train.checkpoint import load_run
from train.convert import Conversion, convert
from train.corrections import CorrectedVelocity, LowRank
from train.pretrained import ConvertedTransformer, begin_with_layers, converted, read_original

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

STRETCHED = ("steps.dial=resolution", "steps.exits=[]")


def of_bert(
    folder: Path, rank: int, rows: tuple[torch.Tensor, ...] = ()
) -> tuple[ConvertedTransformer, ConvertedTransformer]:
    """Two steps of two layers with corrections, and the four layers that they are of."""
    write_folder(folder, "bert")
    original = read_original(folder)
    torch.manual_seed(0)
    dial = converted(original, 2, 12, ALL_LAYERS, 2.0, steps=2, rank=rank).eval()
    dial.dial, dial.full = "time", 2
    stack = converted(original, 2, 12).eval()
    stack.head.load_state_dict(dial.head.state_dict())
    begin_with_layers(dial, stack, ALL_LAYERS, rows)
    return dial, stack


def velocity_of(model: ConvertedTransformer) -> CorrectedVelocity:
    assert isinstance(model.velocity, CorrectedVelocity)
    return model.velocity


def test_with_whole_corrections_the_steps_are_all_layers(tmp_path: Path) -> None:
    dial, stack = of_bert(tmp_path, rank=10_000)
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
        for name, (weight, correction) in weights.items():
            with torch.no_grad():
                difference = weight + correction(0) - wanted[name]
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


def test_a_step_alone_is_what_the_model_takes_there(tmp_path: Path) -> None:
    velocity = velocity_of(of_bert(tmp_path, 3)[0])
    x = torch.randn(2, 5, velocity.gain.shape[0])
    mask = TOKENS != 0
    for step, t in ((0, 0.0), (1, 0.5), (2, 1.0)):  # the last: beyond the steps there are
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
    assert model.dial == "time" and isinstance(model.velocity, CorrectedVelocity)
    with torch.no_grad():
        found = model(TOKENS, steps=2, exits=(1,))
    expected = torch.stack([*found.early, found.logits]).numpy()
    assert np.abs(expected[0] - expected[1]).max() > 1e-3
    asked = ExportRequest(
        tmp_path / "bundle", (1, 2), samples=8, latency=False, precision=precision
    )
    bundle = export_run(run, asked, say=lambda _: None)
    near = 1e-4 if precision == "fp32" else 0.1
    opened = open_model(bundle, 1)
    np.testing.assert_allclose(opened.step_classifier(2).jumps(TOKENS.numpy()), expected, atol=near)
    for steps in (1, 2):
        answer = opened.classifier(steps).run(TOKENS.numpy())
        np.testing.assert_allclose(answer, expected[steps - 1], atol=near)


def test_the_matrices_of_a_bundle_are_there_once(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {}
    monkeypatch.setattr("export.int8.LEAST_ELEMENTS", 256)
    monkeypatch.setattr("export.int8.LEAST_MERGED", 64)
    for steps in ((1,), (1, 2)):
        asked = ExportRequest(
            tmp_path / "bundle", steps, samples=8, latency=False, precision="int8"
        )
        sizes[steps] = export_run(run, asked, say=lambda _: None).weights_path.stat().st_size
    assert sizes[1, 2] < sizes[1,] * 1.01
    step = onnx.load(tmp_path / "bundle" / "step.onnx", load_external_data=False).graph
    inside = list(with_branches(step.node))
    choices = [node for node in step.node if node.op_type == "If"]
    # One inside another would be slower; and what makes weights is outside, where it is done once.
    assert len(choices) == len([node for node in inside if node.op_type == "If"]) == 2
    outside = {name for node in step.node for name in node.output}
    outside |= {tensor.name for tensor in step.initializer}
    products = [
        node for one in choices for node in with_branches([one]) if node.op_type == "MatMul"
    ]
    assert len(products) == 16 and all(node.input[1] in outside for node in products)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"steps": (1,)}, "--rank is of steps after the first"),
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
    [({"method": "heun"}, "no --method"), ({"precision": "fp16"}, "use --precision int8 or fp32")],
)
def test_what_cannot_be_exported_is_refused(
    changes: dict[str, Any], said: str, run: Path, tmp_path: Path
) -> None:
    asked = dataclasses.replace(ExportRequest(tmp_path / "bundle", latency=False), **changes)
    with pytest.raises(ValueError, match=said):
        export_run(run, asked, say=lambda _: None)
    assert not (tmp_path / "bundle").exists()
