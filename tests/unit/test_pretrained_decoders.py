"""Pretrained decoders: golden logits and token ids, and what cannot be read."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.pretrained_folders import DECODERS, texts, transformers, write_folder
from train.pretrained import (
    Decoder,
    PretrainedError,
    converted,
    converted_from,
    kind_of,
    read_original,
)


def tokens_of(folder: Path, rows: int = 3, length: int = 40) -> torch.Tensor:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(" ".join(text for text, _ in texts(60))).input_ids
    return torch.tensor(ids[: rows * length]).view(rows, length)


def sizes_of(folder: Path) -> Decoder:
    sizes = read_original(folder).sizes
    assert isinstance(sizes, Decoder)
    return sizes


@pytest.mark.parametrize("family", DECODERS)
def test_at_the_original_depth_logits_are_those_of_transformers(
    family: str, tmp_path: Path
) -> None:
    model = write_folder(tmp_path, family)
    original = read_original(tmp_path)
    ours, tokens = converted(original, 0).eval(), tokens_of(tmp_path)
    with torch.no_grad():
        expected = model(input_ids=tokens).logits[..., : original.sizes.vocabulary]
        found = ours(tokens).logits
    assert float(expected.std()) > 0.3
    assert found.shape[-1] == original.tokenizer.get_vocab_size() < model.config.vocab_size
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("family", DECODERS)
def test_one_layer_at_as_many_steps_as_layers_is_that_layer_repeated(
    family: str, tmp_path: Path
) -> None:
    write_folder(tmp_path, family)
    original, tokens = read_original(tmp_path), tokens_of(tmp_path)
    dial = converted(original, 0, layers=(2,), gain=4.0).eval()
    stack = converted(original, 0, layers=(2, 2, 2, 2)).eval()
    with torch.no_grad():
        found, expected = dial(tokens, steps=4).logits, stack(tokens).logits
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        assert (dial(tokens, steps=1).logits - expected).abs().max() > 0.01


@pytest.mark.parametrize("family", DECODERS)
def test_a_run_makes_its_model_again(family: str, tmp_path: Path) -> None:
    write_folder(tmp_path, family)
    model = converted(read_original(tmp_path), 0, 50, (0, 3), 2.0).eval()
    again = converted_from(json.loads(json.dumps(model.origin))).eval()
    again.load_state_dict(model.state_dict())
    tokens = tokens_of(tmp_path)
    assert torch.equal(again(tokens, steps=2).logits, model(tokens, steps=2).logits)
    assert not model.embed.tokens.weight.requires_grad  # type: ignore[union-attr]


@pytest.mark.parametrize("family", DECODERS)
def test_its_own_tokenizer_gives_the_same_ids(family: str, tmp_path: Path) -> None:
    write_folder(tmp_path, family)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    original = read_original(tmp_path)
    assert kind_of(original.tokenizer) == "bpe"
    for text in [text for text, _ in texts(20)] + [" ", "it's  spaced"]:
        assert original.tokenizer.encode(text).ids == theirs(text).input_ids


def test_what_stands_for_padding_is_no_token_of_a_text(tmp_path: Path) -> None:
    # Each text of this Llama begins with 1.
    for family, pad_id, eos_id in (("gpt2", 0, None), ("llama", 0, 2), ("qwen2", 0, 2)):
        write_folder(tmp_path / family, family)
        sizes = sizes_of(tmp_path / family)
        assert (sizes.pad_id, sizes.eos_id) == (pad_id, eos_id), family
        assert sizes.pad_id not in read_original(tmp_path / family).tokenizer.encode("a film").ids


@pytest.mark.parametrize(("ends", "said"), [([2, 1], True), ([2], False), (2, False)])
def test_of_several_tokens_that_end_an_answer_the_first_is_taken_and_said(
    ends: int | list[int], said: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_folder(tmp_path, "qwen2")
    change(tmp_path, eos_token_id=ends)
    assert sizes_of(tmp_path).eos_id == 2
    assert ("eos_token_id = [2, 1]: an answer ends with the first" in caplog.text) is said


def test_heads_biases_and_ties_are_as_the_family_has_them(tmp_path: Path) -> None:
    for family, kv_heads, rotary, biases, tied in (
        ("gpt2", 2, 0, (True, True, True), True),
        ("llama", 2, 16, (False, False, False), False),
        ("mistral", 1, 16, (False, False, False), False),
        ("qwen2", 2, 16, (True, False, False), True),
        ("gpt_neox", 2, 16, (True, True, True), False),
    ):
        write_folder(tmp_path / family, family)
        sizes = sizes_of(tmp_path / family)
        found = (sizes.kv_heads, sizes.rotary, sizes.biases, sizes.tied)
        assert found == (kv_heads, rotary, biases, tied), family


def logits_as_transformers(folder: Path) -> None:
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    original, tokens = read_original(folder), tokens_of(folder)
    with torch.no_grad():
        expected = theirs(input_ids=tokens).logits[..., : original.sizes.vocabulary]
        found = converted(original, 0).eval()(tokens).logits
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-5)


def test_a_readout_that_was_trained_without_its_tie_counts(tmp_path: Path) -> None:
    write_folder(tmp_path, "qwen2")
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    table = weights["model.embed_tokens.weight"]
    save_file(weights | {"lm_head.weight": table.flip(0).clone()}, path, {"format": "pt"})
    assert not sizes_of(tmp_path).tied
    logits_as_transformers(tmp_path)
    save_file(weights | {"lm_head.weight": table.clone()}, path, {"format": "pt"})
    assert sizes_of(tmp_path).tied


def test_the_newer_of_two_notes_of_theta_counts(tmp_path: Path) -> None:
    write_folder(tmp_path, "llama")
    rope = {"rope_theta": 77.0, "rope_type": "default"}
    change(tmp_path, rope_parameters=rope, rope_theta=10_000.0)
    assert sizes_of(tmp_path).theta == 77.0
    logits_as_transformers(tmp_path)


@pytest.mark.parametrize(
    ("rope", "own", "other"),
    [
        ({"rope_theta": 77.0, "partial_rotary_factor": 0.5}, "rotary_pct", 0.25),
        (None, "rotary_emb_base", 77.0),
    ],
)
def test_rotary_positions_of_pythia_are_as_transformers_reads_them(
    rope: dict[str, Any] | None, own: str, other: float, tmp_path: Path
) -> None:
    write_folder(tmp_path, "gpt_neox")
    change(tmp_path, rope_parameters=rope, rope_theta=500.0, **{own: other})
    sizes = sizes_of(tmp_path)
    assert (sizes.theta, sizes.rotary) == (77.0, 32 if rope else 16)
    logits_as_transformers(tmp_path)


def change(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("llama", {"rope_parameters": {"rope_type": "llama3"}}, "rope_scaling = .*llama3"),
        ("llama", {"rope_parameters": None, "rope_scaling": {"type": "linear"}}, "rope_scaling"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling = .*linear"),
        ("llama", {"hidden_act": "relu"}, "hidden_act = 'relu' is not supported"),
        ("llama", {"head_dim": 32}, "head_dim = 32 is not supported"),
        ("llama", {"rms_norm_eps": None}, "has no rms_norm_eps"),
        ("mistral", {"sliding_window": 16}, "sliding_window = 16 is not supported"),
        ("mistral", {"sliding_window": 16, "use_sliding_window": False}, "sliding_window = 16"),
        ("qwen2", {"sliding_window": 16, "use_sliding_window": True}, "sliding_window = 16"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        (
            "gpt_neox",
            {"rope_parameters": None, "rotary_pct": 0.33},
            r"rotary_pct = 0.33 of \d+ is an odd number",
        ),
        ("gpt_neox", {"use_parallel_residual": False}, "use_parallel_residual = False"),
        ("llama", {"model_type": "t5"}, "decoders of gpt2, llama"),
    ],
)
def test_a_form_that_is_not_known_is_refused(
    family: str, changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    write_folder(tmp_path, family)
    change(tmp_path, **changes)
    with pytest.raises(PretrainedError, match=said):
        read_original(tmp_path)


def test_a_window_slides_where_it_does_in_transformers(tmp_path: Path) -> None:
    write_folder(tmp_path / "qwen2", "qwen2")
    change(tmp_path / "qwen2", sliding_window=16)
    without(tmp_path / "qwen2", "use_sliding_window")
    logits_as_transformers(tmp_path / "qwen2")
    write_folder(tmp_path / "mistral", "mistral", max_position_embeddings=5000)
    without(tmp_path / "mistral", "sliding_window")
    with pytest.raises(PretrainedError, match="sliding_window = 4096 is not supported"):
        read_original(tmp_path / "mistral")


def without(folder: Path, key: str) -> None:
    path = folder / "config.json"
    content = json.loads(path.read_text())
    content.pop(key, None)
    path.write_text(json.dumps(content))


def test_a_readout_or_a_row_that_is_missing_is_said(tmp_path: Path) -> None:
    write_folder(tmp_path, "llama")
    weights = load_file(tmp_path / "model.safetensors")
    without = {name: w for name, w in weights.items() if name != "lm_head.weight"}
    save_file(without, tmp_path / "model.safetensors")
    with pytest.raises(PretrainedError, match="save the whole language model"):
        read_original(tmp_path)
    short = weights | {"model.embed_tokens.weight": weights["model.embed_tokens.weight"][:50]}
    save_file({name: w.contiguous() for name, w in short.items()}, tmp_path / "model.safetensors")
    with pytest.raises(PretrainedError, match="do not fit the 50 rows"):
        read_original(tmp_path)


@pytest.mark.parametrize("kind", ["ForSequenceClassification", "ForTokenClassification"])
def test_a_decoder_that_classifies_is_refused(kind: str, tmp_path: Path) -> None:
    write_folder(tmp_path, "qwen2", kind)
    with pytest.raises(PretrainedError, match=rf"architectures has Qwen2{kind}: of decoders"):
        read_original(tmp_path)


def test_more_tokens_than_it_was_trained_on_are_refused(tmp_path: Path) -> None:
    write_folder(tmp_path, "llama")
    with pytest.raises(PretrainedError, match="reads at most 80 tokens"):
        converted(read_original(tmp_path), 0, 81)
