"""Pretrained encoders: golden outputs and token ids, and what cannot be read."""

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, normalizers

from tests.pretrained_folders import FAMILIES, texts, tokenizer_for, transformers, write_folder
from tests.pretrained_folders import original as transformers_model
from train.convert import find_original
from train.pretrained import (
    Original,
    PretrainedError,
    _licence,
    _own_order,
    _read_tokenizer,
    apart,
    converted,
    converted_from,
    kind_of,
    read_original,
    special_ends,
)

KINDS = {
    "bert": "wordpiece",
    "roberta": "bpe",
    "distilbert": "wordpiece",
    "albert": "unigram",
}


def batch_of(folder: Path, pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    rows = [tokenizer(text).input_ids for text, _ in texts(6)]
    longest = max(map(len, rows))
    tokens = torch.tensor([row + [pad_id] * (longest - len(row)) for row in rows])
    return tokens, tokens.ne(pad_id)


def check_states(original: Original, theirs: Any, folder: Path) -> None:
    """All layers of an original give the states of the model of transformers."""
    ours = converted(original, classes=2).eval()
    tokens, present = batch_of(folder, original.encoder.pad_id)
    assert not present.all()
    with torch.no_grad():
        expected = theirs(input_ids=tokens, attention_mask=present.long()).last_hidden_state
        start = ours.embed(tokens)
        found = ours.velocity(start.state, *start.context)
    assert float(expected[present].std()) > 0.3
    torch.testing.assert_close(found[present], expected[present], rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_at_the_original_depth_states_are_those_of_transformers(
    family: str, tmp_path: Path
) -> None:
    model = write_folder(tmp_path, family)
    original = read_original(tmp_path)
    check_states(original, model, tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_classifier_that_is_fine_tuned_already_answers_as_it_did(
    family: str, tmp_path: Path
) -> None:
    labels = {0: "sad", 1: "glad", 2: "neither"}
    model = write_folder(tmp_path, family, "ForSequenceClassification", id2label=labels)
    original = read_original(tmp_path)
    assert original.labels == ("sad", "glad", "neither")
    ours = converted(original, classes=3).eval()
    tokens, present = batch_of(tmp_path, original.encoder.pad_id)
    with torch.no_grad():
        expected = model(input_ids=tokens, attention_mask=present.long()).logits
        found = ours(tokens).logits
    assert float(expected.std()) > 0.05
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-5)


def test_a_readout_is_taken_in_the_order_of_the_labels_of_the_data(tmp_path: Path) -> None:
    labels = {0: "Positive", 1: "negative", 2: "neither"}
    write_folder(tmp_path, "bert", "ForSequenceClassification", id2label=labels)
    original, (tokens, _) = read_original(tmp_path), batch_of(tmp_path, 0)

    def logits(*asked: str) -> torch.Tensor:
        model = converted(original, len(asked), labels=asked).eval()
        with torch.no_grad():
            found: torch.Tensor = model(tokens).logits
        return found

    own = logits("positive", "negative", "neither")
    assert torch.equal(logits("negative", "neither", "positive"), own[:, [1, 2, 0]])
    assert torch.equal(logits("0", "1", "2"), own)
    renamed = dataclasses.replace(original, labels=("LABEL_0", "LABEL_1", "LABEL_2"))
    numbered = converted(renamed, 3, labels=("a", "b", "c")).eval()
    with torch.no_grad():
        assert torch.equal(numbered(tokens).logits, own)
    other = converted(original, 3, labels=("sport", "trade", "art"))
    assert not other.origin["encoder"]["dense"]  # a new readout for other classes


@pytest.mark.parametrize(
    ("problem", "kept"),
    [
        ("single_label_classification", True),
        ("multi_label_classification", False),
        ("regression", False),
    ],
)
def test_a_readout_of_other_answers_than_one_label_is_not_begun_with(
    problem: str, kept: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    labels = {0: "sad", 1: "glad", 2: "neither"}
    write_folder(
        tmp_path, "bert", "ForSequenceClassification", id2label=labels, problem_type=problem
    )
    model = converted(read_original(tmp_path), 3, labels=tuple(labels.values()))
    assert bool(model.origin["encoder"]["dense"]) is kept
    assert model.origin["encoder"]["pool"] == "first"  # what was fine-tuned, in any case
    assert ("its readout is left out" in caplog.text) is not kept


def test_numbered_classes_are_met_by_their_number() -> None:
    """The labels of data are sorted as words: "10" comes before "2"."""
    data = tuple(sorted(map(str, range(12))))
    numbers = [int(label) for label in data]
    named = tuple(f"class {number}" for number in range(12))
    for own in (tuple(f"LABEL_{number}" for number in range(12)), named):
        assert _own_order(own, 12, data) == numbers
    assert _own_order(data, 12, data) == list(range(12))
    assert _own_order(data, 12, named) == [data.index(str(number)) for number in range(12)]
    assert _own_order(named, 12, tuple("abcdefghijkl")) is None


@pytest.mark.parametrize(
    ("noted", "pool", "said"),
    [
        ({}, "mean", ""),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "first", ""),
        ({"pooling_mode": "cls", "include_prompt": True}, "first", ""),
        ({"pooling_mode": ["mean"]}, "mean", ""),
        ({"pooling_mode": "max"}, "mean", "pooling by max is not supported: the mean"),
        (
            {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True},
            "mean",
            "pooling by cls and mean is not supported",
        ),
    ],
)
def test_pooling_is_read_as_any_release_of_sentence_transformers_notes_it(
    noted: dict[str, Any], pool: str, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_folder(tmp_path, "bert")
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling/config.json").write_text(json.dumps(noted))
    assert read_original(tmp_path).encoder.pool == pool
    assert said in caplog.text if said else not caplog.text


def write_modules(folder: Path, *modules: tuple[str, str]) -> None:
    """As sentence-transformers lists what it applies one after another."""
    noted = [
        {"path": path, "type": f"sentence_transformers.models.{kind}"} for kind, path in modules
    ]
    (folder / "modules.json").write_text(json.dumps(noted))


def test_modules_that_are_left_out_are_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_folder(tmp_path, "bert")
    (tmp_path / "2_Pooling").mkdir()
    (tmp_path / "2_Pooling/config.json").write_text('{"pooling_mode_cls_token": true}')
    usual = [("Transformer", ""), ("Pooling", "2_Pooling"), ("Normalize", "3_Normalize")]
    write_modules(tmp_path, *usual)
    assert read_original(tmp_path).encoder.pool == "first" and not caplog.text
    write_modules(tmp_path, *usual, ("Dense", "4_Dense"))
    assert read_original(tmp_path).encoder.pool == "first"
    assert "4_Dense (Dense) is not supported and left out" in caplog.text
    (tmp_path / "2_Pooling/config.json").unlink()
    with pytest.raises(PretrainedError, match=r"2_Pooling has no config\.json"):
        read_original(tmp_path)
    (tmp_path / "modules.json").write_text("{}x")
    with pytest.raises(PretrainedError, match=r"modules\.json: must be a list of modules"):
        read_original(tmp_path)


@pytest.mark.parametrize(("default", "said"), [("query", True), (None, False), ("empty", False)])
def test_a_default_prompt_that_texts_do_not_get_is_said(
    default: str | None, said: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_folder(tmp_path, "bert")
    noted = {"prompts": {"query": "query: ", "empty": ""}, "default_prompt_name": default}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(noted))
    read_original(tmp_path)
    assert ("without the default prompt 'query: '" in caplog.text) is said


@pytest.mark.parametrize("lowers", [True, False])
def test_texts_are_in_small_letters_where_sentence_transformers_makes_them_so(
    lowers: bool, tmp_path: Path
) -> None:
    write_folder(tmp_path, "roberta")  # whose tokenizer knows both
    (tmp_path / "sentence_roberta_config.json").write_text(json.dumps({"do_lower_case": lowers}))
    small, large = (_read_tokenizer(tmp_path).encode(text).ids for text in ("a film", "A FILM"))
    assert (small == large) is lowers


@pytest.mark.parametrize(
    "said",
    [
        {"do_lower_case": False},
        {"do_lower_case": True, "strip_accents": False},
        {"do_lower_case": True, "strip_accents": None, "tokenize_chinese_chars": False},
    ],
)
def test_of_two_files_of_a_tokenizer_the_config_counts(
    said: dict[str, Any], tmp_path: Path
) -> None:
    write_folder(tmp_path, "bert")
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    words = content["model"]["vocab"]
    for word in ("cafe", "\u4e2d\u6587"):  # without accents, and without gaps
        words[word] = len(words)
    content["normalizer"] = json.loads(normalizers.BertNormalizer().__getstate__())
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    path = tmp_path / "tokenizer_config.json"
    noted = json.loads(path.read_text()) | {"tokenizer_class": "BertTokenizer"}
    path.write_text(json.dumps(noted | said))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = _read_tokenizer(tmp_path)
    alone = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    differ = 0
    for text in ("A Film", "un caf\u00e9", "\u4e2d\u6587"):
        assert ours.encode(text).ids == theirs(text).input_ids
        differ += ours.encode(text).ids != alone.encode(text).ids
    assert differ


@pytest.mark.parametrize("family", ["roberta", "gpt2"])
def test_whether_a_text_begins_with_a_space_is_what_the_config_says(
    family: str, tmp_path: Path
) -> None:
    write_folder(tmp_path, family)
    path = tmp_path / "tokenizer_config.json"
    kind = {"roberta": "RobertaTokenizer", "gpt2": "GPT2Tokenizer"}[family]
    said = json.loads(path.read_text()) | {"tokenizer_class": kind}
    found = []
    for spaced in (True, False):
        path.write_text(json.dumps(said | {"add_prefix_space": spaced}))
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
        found.append(read_original(tmp_path).tokenizer.encode("the film").ids)
        assert found[-1] == theirs("the film").input_ids
    assert found[0] != found[1]


@pytest.mark.parametrize(
    ("family", "dropped", "changed"),
    [("roberta", "pad_token_id", {}), ("distilbert", "layer_norm_eps", {"layer_norm_eps": 0.1})],
)
def test_settings_count_as_they_do_in_transformers(
    family: str, dropped: str, changed: dict[str, Any], tmp_path: Path
) -> None:
    model = write_folder(tmp_path, family)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config.pop(dropped, None)
    path.write_text(json.dumps(config | changed))
    check_states(read_original(tmp_path), model, tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
def test_all_layers_with_their_number_as_steps_of_one_layer_each(
    family: str, tmp_path: Path
) -> None:
    # Every layer the same: then the dial of one layer, at as many steps, is the original.
    model = write_folder(tmp_path, family)
    original = read_original(tmp_path)
    tokens, present = batch_of(tmp_path, original.encoder.pad_id)
    dial = converted(original, 2, layers=(0,), gain=float(original.encoder.layers)).eval()
    stack = converted(original, 2, layers=(0, 0, 0, 0)).eval()
    with torch.no_grad():
        end = dial(tokens, steps=original.encoder.layers).trajectories[-1].end
        start = stack.embed(tokens)
        repeated = stack.velocity(start.state, *start.context)
        torch.testing.assert_close(end[present], repeated[present], rtol=1e-4, atol=1e-4)
        if family == "albert":  # shared by its layers from the beginning
            expected = model(input_ids=tokens, attention_mask=present.long()).last_hidden_state
            torch.testing.assert_close(end[present], expected[present], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_its_own_tokenizer_gives_the_same_ids(family: str, tmp_path: Path) -> None:
    write_folder(tmp_path, family)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    # What some models keep in the file must not reach batches of ours.
    spoilt = json.loads((tmp_path / "tokenizer.json").read_text())
    spoilt["truncation"] = {
        "max_length": 8,
        "strategy": "LongestFirst",
        "stride": 0,
        "direction": "Right",
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(spoilt))
    original = read_original(tmp_path)
    assert kind_of(original.tokenizer) == KINDS[family]
    assert special_ends(original.tokenizer) == (1, 1)
    for text in [text for text, _ in texts(20)] + ["Ünknown — wörds 😀", " ", "it's  spaced"]:
        assert original.tokenizer.encode(text).ids == theirs(text).input_ids


def test_a_run_makes_its_model_again(tmp_path: Path) -> None:
    write_folder(tmp_path, "bert")
    model = converted(read_original(tmp_path), 3, 20, (0, 3), 2.0).eval()
    again = converted_from(json.loads(json.dumps(model.origin))).eval()
    again.load_state_dict(model.state_dict())
    tokens, _ = batch_of(tmp_path, 0)
    assert torch.equal(again(tokens, steps=2).logits, model(tokens, steps=2).logits)
    assert not model.embed.tokens.weight.requires_grad  # type: ignore[union-attr]


def test_a_run_from_before_the_exact_gelu_was_renamed_is_read(tmp_path: Path) -> None:
    write_folder(tmp_path / "bert", "bert")
    origin = converted(read_original(tmp_path / "bert"), 3).origin
    old = origin | {"encoder": origin["encoder"] | {"activation": "erf-gelu"}}
    block: Any = converted_from(old).velocity.blocks
    assert block[0].feedforward.activation == origin["encoder"]["activation"] == "gelu-exact"


def test_dropout_leaves_the_shares_of_attention_alone(tmp_path: Path) -> None:
    write_folder(tmp_path, "bert")
    model = converted(read_original(tmp_path), 3, 20, dropout=0.5).train()
    tokens, _ = batch_of(tmp_path, 0)
    assert not torch.equal(model(tokens, steps=1).logits, model(tokens, steps=1).logits)
    velocity: Any = model.velocity
    attention = velocity.blocks[0].attention
    x = torch.randn(1, 4, model.origin["encoder"]["width"])
    assert torch.equal(attention(x), attention(x))


def test_layers_as_far_apart_as_can_be() -> None:
    assert [apart(n, 6) for n in (1, 2, 3, 6)] == [(0,), (0, 5), (0, 2, 5), (0, 1, 2, 3, 4, 5)]
    with pytest.raises(PretrainedError, match="the model has 6 layers"):
        apart(7, 6)


def change(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def spoil_index(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text('{"weight_map": ["model.safetensors"]}')


def spoil_vocabulary(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<entity>"])
    tokenizer.save(str(folder / "tokenizer.json"))


def spoil_ids(folder: Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    words = content["model"]["vocab"]
    words[max(words, key=words.__getitem__)] += 5  # a hole in the ids
    (folder / "tokenizer.json").write_text(json.dumps(content))


def spoil_added(folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    added = {"7": {"content": "<entity>", "special": True}}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"added_tokens_decoder": added}))


def spoil_precision(folder: Path) -> None:
    path = folder / "model.safetensors"
    save_file({name: w.to(torch.int8) for name, w in load_file(path).items()}, path)


SPOILT: dict[str, tuple[Callable[[Path], object], str]] = {
    "family": (lambda folder: change(folder, model_type="t5"), "model_type is 't5'"),
    "weights": (
        lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
        "safe_serialization",
    ),
    "bytes": (
        lambda folder: (folder / "model.safetensors").write_bytes(b"not weights"),
        "is damaged or missing",
    ),
    "tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "has no tokenizer.json"),
    "activation": (
        lambda folder: change(folder, hidden_act="silu"),
        "hidden_act = 'silu' is not supported",
    ),
    "config": (lambda folder: (folder / "config.json").write_text("{"), "not valid JSON"),
    "index": (spoil_index, "weight_map must name the file of each weight"),
    "ids": (spoil_ids, "whose ids do not fit"),
    "vocabulary": (
        spoil_vocabulary,
        r"tokens, whose ids do not fit the \d+ rows of the embedding",
    ),
    "added": (spoil_added, r"token 7 is '<entity>', and tokenizer\.json has no such token"),
    "precision": (spoil_precision, r"weight is torch\.int8, without its scales"),
}


@pytest.mark.parametrize("case", SPOILT)
def test_what_cannot_be_read_is_said(case: str, tmp_path: Path) -> None:
    spoil, said = SPOILT[case]
    write_folder(tmp_path, "bert")
    spoil(tmp_path)
    with pytest.raises(PretrainedError, match=said):
        read_original(tmp_path)


@pytest.mark.parametrize(
    ("family", "key"), [("distilbert", "activation"), ("gpt2", "activation_function")]
)
def test_a_setting_that_is_refused_has_its_name_in_that_family(
    family: str, key: str, tmp_path: Path
) -> None:
    write_folder(tmp_path, family)
    change(tmp_path, **{key: "swish"})
    with pytest.raises(PretrainedError, match=rf"config\.json: {key} = 'swish' is not supported"):
        read_original(tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
def test_one_that_labels_tokens_is_read_without_its_classifier(family: str, tmp_path: Path) -> None:
    model = write_folder(tmp_path, family, "ForTokenClassification", id2label={0: "no", 1: "yes"})
    original = read_original(tmp_path)
    assert original.labels is None and original.encoder.pool == "mean"
    check_states(original, model.base_model, tmp_path)


@pytest.mark.parametrize(("family", "pooler"), [("bert", "pooler.dense"), ("albert", "pooler")])
def test_one_that_labels_tokens_may_have_a_layer_that_it_does_not_read(
    family: str, pooler: str, tmp_path: Path
) -> None:
    """So did earlier releases write it."""
    write_folder(tmp_path, family, "ForTokenClassification", id2label={0: "no", 1: "yes"})
    path = tmp_path / "model.safetensors"
    unread = {"weight": torch.randn(16, 16), "bias": torch.randn(16)}
    unread = {f"{family}.{pooler}.{part}": w for part, w in unread.items()}
    save_file(load_file(path) | unread, path, {"format": "pt"})
    original = read_original(tmp_path)
    assert (original.labels, original.encoder.pool, original.encoder.dense) == (None, "mean", "")


def test_padding_is_what_the_tokenizer_says(tmp_path: Path) -> None:
    # As multilingual MiniLM: a BERT of which config.json says 0, and whose texts begin with 0.
    tokenizer = tokenizer_for("roberta")
    model = transformers_model("bert", vocab_size=len(tokenizer), pad_token_id=0)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    original = read_original(tmp_path)
    assert original.encoder.pad_id == tokenizer.pad_token_id == 1
    assert original.tokenizer.encode("a film").ids[0] == 0
    check_states(original, model, tmp_path)


def test_positions_counted_without_another_token_than_padding_are_refused(tmp_path: Path) -> None:
    write_folder(tmp_path, "roberta", pad_token_id=0)  # <s>: to transformers it has no position
    with pytest.raises(PretrainedError, match="pad_token_id = 0, and the tokenizer pads with 1: a"):
        read_original(tmp_path)


def test_padding_that_every_text_has_is_refused(tmp_path: Path) -> None:
    tokenizer = tokenizer_for("roberta")
    model = transformers_model("bert", vocab_size=len(tokenizer), pad_token_id=0)
    model.save_pretrained(tmp_path)
    tokenizer.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))  # and nothing that names it
    with pytest.raises(PretrainedError, match=r"padding would be token 0, which stands in every"):
        read_original(tmp_path)


def test_a_run_from_before_a_step_of_albert_was_repeated_goes_on(tmp_path: Path) -> None:
    write_folder(tmp_path / "bert", "bert")
    write_folder(tmp_path / "albert", "albert")
    for family in ("bert", "albert"):
        whole = converted(read_original(tmp_path / family), classes=2)
        assert "times" not in whole.origin  # as it was noted before
    dial = converted(read_original(tmp_path / "albert"), classes=2, layers=(0, 3), gain=2.0)
    earlier = {key: value for key, value in dial.origin.items() if key != "times"}
    again: Any = converted_from(earlier).velocity
    assert again.times == 1


def test_albert_maps_its_embedding_even_to_the_same_width(tmp_path: Path) -> None:
    model = write_folder(tmp_path, "albert", embedding_size=16)
    original = read_original(tmp_path)
    assert original.encoder.embedding_width == original.encoder.width
    check_states(original, model, tmp_path)


def test_a_step_of_albert_is_its_one_layer_as_often_as_others_keep_layers(tmp_path: Path) -> None:
    write_folder(tmp_path, "albert")
    original = read_original(tmp_path)
    whole = converted(original, classes=2).eval()
    dial = converted(original, classes=2, layers=(0, 3), gain=2.0).eval()
    assert sum(p.numel() for p in dial.parameters()) < 1.1 * sum(
        p.numel() for p in whole.parameters()
    )
    tokens, _ = batch_of(tmp_path, original.encoder.pad_id)
    dial.head.load_state_dict(whole.head.state_dict())
    with torch.no_grad():
        found = dial(tokens, steps=2).logits  # twice two of its four layers
        torch.testing.assert_close(found, whole(tokens).logits, rtol=1e-5, atol=2e-5)


def test_a_decoder_pads_with_what_its_texts_do_not_begin_with(tmp_path: Path) -> None:
    write_folder(tmp_path, "llama")
    original = read_original(tmp_path)
    begun = original.tokenizer.encode("the film").ids
    assert original.sizes.pad_id not in begun and original.sizes.pad_id == 0


@pytest.mark.parametrize("noted", [{"pad_token_id": 1}, {"eos_token_id": None}])
def test_a_decoder_pads_so_whatever_its_config_says(noted: dict[str, Any], tmp_path: Path) -> None:
    write_folder(tmp_path, "llama")
    change(tmp_path, **noted)
    if "eos_token_id" in noted:  # and the first special token is the one that texts begin with
        path = tmp_path / "tokenizer.json"
        path.write_text(path.read_text().replace('"special": true', '"special": false', 1))
    original = read_original(tmp_path)
    begun = original.tokenizer.encode("the film").ids
    assert begun[0] == 1 and original.sizes.pad_id not in begun


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_weights_of_other_sizes_than_the_config_says_are_refused(
    family: str, tmp_path: Path
) -> None:
    write_folder(tmp_path, family)
    change(tmp_path, **{"intermediate_size": 8} if family == "bert" else {"n_inner": 8})
    with pytest.raises(PretrainedError, match=r"do not have the sizes that its config\.json says"):
        converted(read_original(tmp_path), 2)


@pytest.mark.parametrize("name", ["embeddings.token_type_embeddings.weight", "pooler.dense.bias"])
def test_a_weight_that_is_missing_is_named_if_it_is_needed(name: str, tmp_path: Path) -> None:
    model, path = write_folder(tmp_path, "bert"), tmp_path / "model.safetensors"
    save_file({one: w for one, w in load_file(path).items() if one != name}, path)
    if name.startswith("pooler"):
        check_states(read_original(tmp_path), model, tmp_path)
        return
    with pytest.raises(PretrainedError, match=f"have no {name}"):
        converted(read_original(tmp_path), 2)


@pytest.mark.parametrize("lines", [100, 200_000])
def test_the_licence_is_found_at_once_or_not(lines: int, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("---\n" + "\n" * lines)
    began_s = time.process_time()
    assert _licence(tmp_path) == ""
    assert time.process_time() - began_s < 0.5
    (tmp_path / "README.md").write_text("--- \nlanguage: en\nlicense: apache-2.0\n---\n# A model\n")
    assert _licence(tmp_path) == "apache-2.0"


def test_a_tokenizer_that_panics_is_named(tmp_path: Path) -> None:
    write_folder(tmp_path, "bert")
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text())
    content["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    path.write_text(json.dumps(content))
    with pytest.raises(PretrainedError, match=r"tokenizer\.json cannot be read"):
        read_original(tmp_path)


def test_a_name_of_the_hub_without_a_network_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(PretrainedError, match="cannot be fetched from the Hub"):
        find_original("stepdial-tests/no-such-model")
    with pytest.raises(PretrainedError, match="is no folder"):
        find_original(str(tmp_path / "nothing"))
