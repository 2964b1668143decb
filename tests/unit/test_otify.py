"""Models of transformers as OT-Transformers: their own answers in one pass, an ODE otherwise."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers", reason="the extra otify is not installed")

# Below the line that leaves this file out, since they need the extra too.
from export.inspect import describe  # noqa: E402
from export.run import ExportRequest, export_run  # noqa: E402
from tests.fixtures.tiny_runs import TINY, tiny_text_recipe  # noqa: E402
from train.blocks import Attention  # noqa: E402
from train.checkpoint import RunError, load_run  # noqa: E402
from train.data import open_dataset  # noqa: E402
from train.evaluate import evaluate_run  # noqa: E402
from train.loop import train  # noqa: E402
from train.model import Embedding, OTTransformer, PooledHead  # noqa: E402
from train.otify import otified_from, otify  # noqa: E402
from train.recipe import Recipe, load_recipe  # noqa: E402

GPT2: dict[str, Any] = {
    "vocab_size": 40,
    "n_positions": 16,
    "n_embd": 24,
    "n_layer": 2,
    "n_head": 3,
    "bos_token_id": 1,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "num_labels": 3,
}
BERT: dict[str, Any] = {
    "vocab_size": 40,
    "max_position_embeddings": 16,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 32,
    "num_labels": 3,
}
VIT: dict[str, Any] = {
    "image_size": 8,
    "patch_size": 4,
    "num_channels": 1,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 32,
    "num_labels": 3,
}
CONFIGS = {"GPT2": ("GPT2Config", GPT2), "Bert": ("BertConfig", BERT), "ViT": ("ViTConfig", VIT)}
CLASSES = [
    "GPT2Model",
    "GPT2LMHeadModel",
    "GPT2ForSequenceClassification",
    "BertModel",
    "BertForSequenceClassification",
    "ViTModel",
    "ViTForImageClassification",
]
TEXT = torch.tensor([[5, 9, 3, 7, 2, 8], [4, 6, 11, 0, 0, 0]])


def original(name: str, **changes: Any) -> Any:
    """A fresh model whose weights are large enough to matter."""
    config, settings = next(v for k, v in CONFIGS.items() if name.startswith(k))
    torch.manual_seed(3)
    model = getattr(transformers, name)(getattr(transformers, config)(**(settings | changes)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


def answer(name: str, model: nn.Module) -> tuple[tuple[Tensor, ...], Tensor]:
    """What otify's model is given, and what the original says to it."""
    if name.startswith("ViT"):
        pixels = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(1))
        given, out = (pixels,), model(pixel_values=pixels)
    else:
        present = (TEXT != 0).long()
        given, out = (TEXT,), model(input_ids=TEXT, attention_mask=present)
    return given, out[0]


@pytest.mark.parametrize("final_norm", ["outside", "inside"])
@pytest.mark.parametrize("name", CLASSES)
def test_one_pass_is_the_original(name: str, final_norm: Any) -> None:
    if name.startswith("Bert") and final_norm == "inside":
        with pytest.raises(ValueError, match="no last norm"):
            otify(original(name), final_norm=final_norm)
        return
    model = original(name)
    with torch.no_grad():
        given, expected = answer(name, model)
        found = otify(model, depth="discrete", final_norm=final_norm).eval()(*given).logits
    if name.startswith("GPT2") and found.dim() == 3:  # nobody reads what stands on padding
        found, expected = found[TEXT != 0], expected[TEXT != 0]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", CLASSES)
def test_one_euler_step_is_x_plus_f_and_gradients_reach_every_weight(name: str) -> None:
    model = original(name)
    given, _ = answer(name, model)
    ode = otify(model).eval()
    start = ode.embed(*given)
    state, context = (start.state, start.context) if hasattr(start, "state") else (start, ())
    expected = ode.head(state + ode.velocity(state, *context), *context)
    torch.testing.assert_close(ode(*given, steps=1).logits, expected)
    output = ode(*given, steps=3, method="heun")
    (output.logits.square().mean() + output.cost).backward()
    without = [n for n, p in ode.named_parameters() if p.grad is None]
    assert without == []


def test_padding_changes_no_answer_of_bert() -> None:
    model = otify(original("BertForSequenceClassification")).eval()
    with torch.no_grad():
        padded = model(TEXT, steps=2)
        alone = model(TEXT[1:, :3], steps=2).logits
        told = model(TEXT, (TEXT != 0).long(), steps=2).logits
    torch.testing.assert_close(padded.logits[1:], alone)
    torch.testing.assert_close(padded.logits, told)


def test_gpt2_has_the_attention_that_export_gives_caches_and_keeps_its_own_modules() -> None:
    model = original("GPT2LMHeadModel")
    mlp, table = model.transformer.h[1].mlp, model.transformer.wte
    ode: Any = otify(model)
    assert sum(isinstance(m, Attention) for m in ode.modules()) == 2
    assert any(m is mlp for m in ode.velocity.modules())
    assert ode.embed.tokens is table
    assert ode.head.readout.weight is table.weight


def test_gpt2_drops_out_what_its_configuration_says_once_each() -> None:
    shares = {"embd_pdrop": 0.1, "attn_pdrop": 0.2, "resid_pdrop": 0.3}
    ode: Any = otify(original("GPT2LMHeadModel", **shares))
    block = ode.velocity.blocks[0]
    assert ode.embed.drop.p == 0.1 and block.attention.dropout == 0.2 and block.drop.p == 0.3
    assert isinstance(block.feedforward.dropout, nn.Identity)  # the block drops that out


@pytest.mark.parametrize("depth", ["ode", "discrete"])
def test_a_model_can_be_made_again_from_what_it_remembers(depth: Any) -> None:
    wrapped = original("GPT2ForSequenceClassification")
    made = otify(wrapped, T=2.0, depth=depth, final_norm="inside").eval()
    again = otified_from(made.origin).eval()
    again.load_state_dict(made.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(again(TEXT, steps=2).logits, made(TEXT, steps=2).logits)


def test_what_is_not_supported_is_said() -> None:
    with pytest.raises(TypeError, match=r"GPT2LMHeadModel, .*ViTForImageClassification"):
        otify(nn.Linear(2, 2))
    for settings in ({"T": -1.0}, {"depth": "chain"}, {"final_norm": "none"}):
        with pytest.raises(ValueError, match="T must be above 0, depth"):
            otify(original("BertModel"), **settings)
    with pytest.raises(ValueError, match="cross-attention"):
        otify(original("GPT2Model", add_cross_attention=True))
    for setting in ({"scale_attn_weights": False}, {"scale_attn_by_inverse_layer_idx": True}):
        with pytest.raises(ValueError, match="otify scales attention by the width of a head"):
            otify(original("GPT2Model", **setting))
    with pytest.raises(ValueError, match=r"needs config\.pad_token_id"):
        otify(original("GPT2ForSequenceClassification", pad_token_id=None))
    with pytest.raises(ValueError, match="encoder"):
        otify(original("BertModel", is_decoder=True))


def test_without_transformers_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = original("BertModel")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"\.\[otify\]"):
        otify(model)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    return tiny_text_recipe(
        tmp_path_factory.mktemp("corpus"), "optim.iterations=4", "model.window=16"
    )


def test_gpt2_trains_resumes_loads_and_exports_with_caches(recipe: Recipe, tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = GPT2 | {"vocab_size": open_dataset(recipe).sizes.vocabulary, "n_layer": 1}
    model: Any = otify(transformers.GPT2LMHeadModel(transformers.GPT2Config(**settings)))
    start = model.velocity.blocks[0].attention.qkv.weight.detach().clone()
    train(recipe, run, quiet=True, model=model)
    assert not torch.equal(start, model.velocity.blocks[0].attention.qkv.weight)
    loaded = load_run(run).model
    with torch.no_grad():
        torch.testing.assert_close(loaded(TEXT, steps=2).logits, model(TEXT, steps=2).logits)
    assert train(recipe, run, quiet=True).depth == "ode"  # nothing is left to do
    request = ExportRequest(tmp_path / "bundle", (1, 2), samples=2)
    bundle = export_run(run, request, say=lambda _: None)  # verifies each rung in the runtime
    assert (bundle.manifest.task, bundle.manifest.cache) == ("generate", "kv")


def test_a_bundle_says_the_blocks_of_the_model_not_those_of_the_recipe(tmp_path: Path) -> None:
    recipe = load_recipe("parity", [*TINY, "data.rows=40", "optim.iterations=1"])
    sizes = {"vocab_size": open_dataset(recipe).sizes.vocabulary, "num_labels": 2}
    model = otify(original("BertForSequenceClassification", **sizes, num_hidden_layers=1))
    train(recipe, tmp_path / "run", quiet=True, model=model)
    request = ExportRequest(tmp_path / "bundle", (1,), samples=1, latency=False)
    bundle = export_run(tmp_path / "run", request, say=lambda _: None)
    shape = bundle.manifest.shape
    assert (shape.layers, shape.heads, shape.head_width, shape.width) == (1, 3, 8, 24)
    for text in (describe(bundle), (bundle.folder / "README.md").read_text()):
        assert "1 block of width 24" in text


def test_a_model_of_another_depth_than_is_trained_is_refused(
    recipe: Recipe, tmp_path: Path
) -> None:
    model = otify(original("GPT2LMHeadModel"), depth="discrete")
    with pytest.raises(ValueError, match=r"the recipe trains 'ode': set model\.depth"):
        train(recipe, tmp_path, True, model=model)


def test_a_model_too_short_for_the_longest_row_is_refused_at_the_start(tmp_path: Path) -> None:
    recipe = load_recipe("parity", [*TINY, "data.rows=40", "model.window=32"])
    model = otify(original("BertForSequenceClassification", vocab_size=300, num_labels=2))
    with pytest.raises(ValueError, match="the model cannot read this data"):
        train(recipe, tmp_path, True, model=model)


def test_a_model_of_other_sizes_than_the_data_is_refused(recipe: Recipe, tmp_path: Path) -> None:
    for size, said in ((20, "cannot read"), (40, "40 answers")):
        config = transformers.GPT2Config(**(GPT2 | {"vocab_size": size}))
        with pytest.raises(ValueError, match=said):
            train(recipe, tmp_path, True, model=otify(transformers.GPT2LMHeadModel(config)))


def test_a_model_whose_padding_is_not_that_of_the_data_is_refused(tmp_path: Path) -> None:
    labelled = load_recipe("parity", ["data.rows=40", "data.tokenizer=words", "data.longest=4"])
    for name in ("GPT2ForSequenceClassification", "BertForSequenceClassification"):
        model = otify(original(name, pad_token_id=39, num_labels=2))
        with pytest.raises(ValueError, match="pads with id 0, the model with 39: set pad_token_id"):
            train(labelled, tmp_path, True, model=model)


def test_a_module_of_ones_own_trains_but_is_not_made_again(recipe: Recipe, tmp_path: Path) -> None:
    answers = open_dataset(recipe).sizes.vocabulary
    own = OTTransformer(nn.Embedding(answers, 8), nn.Linear(8, 8), nn.Linear(8, answers))
    train(recipe, tmp_path / "run", quiet=True, model=own)
    with pytest.raises(RunError, match="module of your own"):
        load_run(tmp_path / "run")
    fresh = OTTransformer(nn.Embedding(answers, 8), nn.Linear(8, 8), nn.Linear(8, answers))
    assert len(evaluate_run(tmp_path / "run", [1, 2], model=fresh).rows) == 2
    assert all(map(torch.equal, own.state_dict().values(), fresh.state_dict().values()))
    request = ExportRequest(tmp_path / "bundle", (1, 2), latency=False)
    bundle = export_run(tmp_path / "run", request, say=lambda line: None, model=fresh)
    assert bundle.manifest.steps == (1, 2)


@pytest.mark.parametrize("heeded", [True, False])
def test_a_model_that_sees_padding_is_warned_of(
    heeded: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    labelled = load_recipe("parity", ["data.rows=40", "data.longest=4", "optim.iterations=1"])
    sizes = open_dataset(labelled).sizes
    embed: nn.Module = nn.Embedding(sizes.vocabulary, 8)
    if heeded:
        embed = Embedding(sizes.vocabulary, labelled.model.window, 8, sizes.pad_id)
    head = PooledHead(8, sizes.classes, norm=True, pool="mean", dropout=0.5)
    train(labelled, tmp_path / "run", quiet=True, model=OTTransformer(embed, Halved(), head))
    assert ("changes with the padding" in caplog.text) != heeded


class Halved(nn.Module):
    """A velocity, whatever there is beside the state."""

    def forward(self, x: Tensor, *context: Tensor) -> Tensor:
        return -x / 2
