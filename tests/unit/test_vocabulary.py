"""A vocabulary cut to what texts use: the same pieces for them, the same answers, fewer rows."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from export.run import ExportRequest, export_run
from stepdial import main
from tests.pretrained_folders import texts, write_folder, write_table
from train.checkpoint import load_run
from train.pretrained import Decoder, Original, converted, read_original
from train.vocabulary import pruned

KINDS = ("bert", "roberta", "albert", "gpt2", "llama")
USED = [text for text, _ in texts(4, seed=5)]


def both(folder: Path, family: str) -> tuple[Original, Original]:
    write_folder(folder, family)
    original = read_original(folder)
    return original, pruned(original, USED)


@pytest.mark.parametrize("family", KINDS)
def test_the_texts_have_the_same_pieces_and_answers(family: str, tmp_path: Path) -> None:
    original, small = both(tmp_path, family)
    assert small.sizes.vocabulary == small.tokenizer.get_vocab_size()
    assert small.sizes.vocabulary < original.sizes.vocabulary
    torch.manual_seed(0)
    model = converted(original, 2).eval()
    torch.manual_seed(0)
    cut = converted(small, 2).eval()
    for text in USED:
        before, after = original.tokenizer.encode(text), small.tokenizer.encode(text)
        assert before.tokens == after.tokens
        with torch.no_grad():
            expected = model(torch.tensor([before.ids])).logits
            found = cut(torch.tensor([after.ids])).logits
        if isinstance(original.sizes, Decoder):
            expected = expected[..., [original.tokenizer.token_to_id(p) for p in _pieces(small)]]
        torch.testing.assert_close(found, expected)


def _pieces(original: Original) -> list[str]:
    return [
        piece
        for number in range(original.sizes.vocabulary)
        if (piece := original.tokenizer.id_to_token(number)) is not None
    ]


@pytest.mark.parametrize("family", KINDS)
def test_other_texts_are_read_in_smaller_pieces(family: str, tmp_path: Path) -> None:
    original, small = both(tmp_path, family)
    text = "the lovely story was cruel and cold"
    before, after = original.tokenizer.encode(text).ids, small.tokenizer.encode(text).ids
    # The tiny Unigram of ALBERT has letters for these words already.
    assert len(after) > len(before) or (family == "albert" and len(after) == len(before))
    unknown = [
        [one.tokenizer.id_to_token(number) for number in ids].count("[UNK]")
        for one, ids in ((original, before), (small, after))
    ]
    assert unknown[0] == unknown[1]
    if family in ("gpt2", "llama"):
        assert small.tokenizer.decode(after) == text


def test_padding_and_ends_keep_their_meaning(tmp_path: Path) -> None:
    for family in KINDS:
        original, small = both(tmp_path / family, family)
        for name in ("pad_id", "eos_id"):
            old, new = (getattr(one.sizes, name, None) for one in (original, small))
            known = [
                None if at is None else one.tokenizer.id_to_token(at)
                for one, at in ((original, old), (small, new))
            ]
            assert known[0] == known[1], (family, name)


def test_pieces_of_what_is_merged_of_later_ones_stay(tmp_path: Path) -> None:
    """As where pieces were added to a vocabulary: what is merged first stands last."""
    write_folder(tmp_path, "gpt2")
    original = read_original(tmp_path)
    content = json.loads(original.tokenizer.to_str())
    letters = {letter: number for number, letter in enumerate("abcd", 1)}
    content["model"] |= {
        "vocab": {"<|endoftext|>": 0} | letters | {"abcd": 5, "abc": 6, "ab": 7},
        "merges": [["abc", "d"], ["ab", "c"], ["a", "b"]],
    }
    tokenizer = Tokenizer.from_str(json.dumps(content))
    found = pruned(dataclasses.replace(original, tokenizer=tokenizer), ["abcd"]).tokenizer
    assert found.encode("abcd").tokens == tokenizer.encode("abcd").tokens == ["abcd"]


@pytest.mark.long
def test_the_flag_makes_a_smaller_bundle(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_folder(tmp_path / "bert", "bert")
    table = write_table(tmp_path / "table.csv", 24)
    few = ("optim.batch=8", "optim.precision=fp32", "run.threads=1")
    command = ["convert", str(tmp_path / "bert"), "--data", str(table), "--text", "body"]
    command += ["--label", "topic", "--max-tokens", "12", "--epochs", "1", "--teacher-epochs", "1"]
    command += [part for one in few for part in ("--set", one)]
    assert main([*command, "--prune-vocabulary", "--out", str(tmp_path / "run")]) == 0
    assert "pieces of the vocabulary" in capsys.readouterr().out
    run, original = load_run(tmp_path / "run"), read_original(tmp_path / "bert")
    assert run.tokenizer is not None
    size = run.tokenizer.get_vocab_size()
    assert size < original.tokenizer.get_vocab_size()
    asked = ExportRequest(tmp_path / "bundle", (1, 2), samples=4, latency=False)
    bundle = export_run(tmp_path / "run", asked, say=lambda _: None)
    assert bundle.manifest.text_tokenizer.vocab_size == size
    assert f"to {size:,} pieces" in (tmp_path / "bundle/README.md").read_text()
