"""A pretrained model whose vocabulary has only the pieces that some texts use.

Those texts become the same pieces as before. Pieces of one character, bytes, special tokens, and
what merges go through stay too, so that every other text can still be read, in smaller pieces.
"""

import dataclasses
import json
from collections.abc import Iterable
from typing import Any

from tokenizers import Tokenizer

from train.data.text import ids_of, plain
from train.pretrained import Decoder, Original, tables_of

_PREFIX = "##"  # WordPiece: inside a word


def pruned(original: Original, texts: Iterable[str]) -> Original:
    """The model with fewer rows in its tables, and its tokenizer with other ids."""
    tokenizer = Tokenizer.from_str(original.tokenizer.to_str())
    used: set[int] = set()
    for ids in ids_of(plain(tokenizer), texts):
        used.update(ids.tolist())
    content = json.loads(original.tokenizer.to_str())
    kept = sorted(_kept(content, used))
    places = {old: new for new, old in enumerate(kept)}
    weights = dict(original.weights)
    for name in tables_of(original):
        weights[name] = weights[name][kept]
    sizes = original.sizes
    pad_id = places[sizes.pad_id]
    if isinstance(sizes, Decoder):
        eos_id = None if sizes.eos_id is None else places[sizes.eos_id]
        sizes = dataclasses.replace(sizes, vocabulary=len(kept), pad_id=pad_id, eos_id=eos_id)
    else:
        sizes = dataclasses.replace(sizes, vocabulary=len(kept), pad_id=pad_id)
    renumbered = Tokenizer.from_str(json.dumps(_renumbered(content, places)))
    return dataclasses.replace(original, sizes=sizes, weights=weights, tokenizer=renumbered)


def _kept(content: dict[str, Any], used: set[int]) -> set[int]:
    """The ids that stay: of what texts use, of special tokens, and of what every text needs."""
    model = content["model"]
    numbers = _numbers(model)
    kept = used | {added["id"] for added in content["added_tokens"]}
    kept |= {numbers[piece] for piece in numbers if len(piece.removeprefix(_PREFIX)) == 1}
    kept |= {numbers[piece] for piece in numbers if piece.startswith("<0x") and len(piece) == 6}
    for unknown in (model.get("unk_token"), model.get("unk_id")):
        if unknown is not None:
            kept.add(numbers[unknown] if isinstance(unknown, str) else unknown)
    if model["type"] == "BPE":
        # Backwards, since what a piece is merged of mostly stands before it; until all are there.
        merges, before = _merges(model)[::-1], 0
        while before < len(kept):
            before = len(kept)
            for one, other in merges:
                if numbers[one + other] in kept:
                    kept |= {numbers[one], numbers[other]}
    return kept


def _numbers(model: dict[str, Any]) -> dict[str, int]:
    if model["type"] == "Unigram":
        return {piece: number for number, (piece, _) in enumerate(model["vocab"])}
    found: dict[str, int] = model["vocab"]
    return found


def _merges(model: dict[str, Any]) -> list[tuple[str, str]]:
    pairs = (one.split(" ") if isinstance(one, str) else one for one in model["merges"])
    return [(one, other) for one, other in pairs]


def _renumbered(content: dict[str, Any], places: dict[int, int]) -> dict[str, Any]:
    """A tokenizer.json with these pieces only, at their new ids."""
    model = dict(content["model"])
    if model["type"] == "Unigram":
        pieces = model["vocab"]
        model["vocab"] = [pieces[old] for old in places if old < len(pieces)]
        if model.get("unk_id") is not None:
            model["unk_id"] = places[model["unk_id"]]
    else:
        vocab = model["vocab"]
        model["vocab"] = {p: places[old] for p, old in vocab.items() if old in places}
    if model["type"] == "BPE":
        known = model["vocab"]
        model["merges"] = [
            [one, other]
            for one, other in _merges(model)
            if one in known and other in known and one + other in known
        ]
    added = [token | {"id": places[token["id"]]} for token in content["added_tokens"]]
    processor = _processor(content.get("post_processor"), places)
    return content | {"model": model, "added_tokens": added, "post_processor": processor}


def _processor(value: Any, places: dict[int, int]) -> Any:
    """What puts special tokens around a text, with their new ids."""
    if not isinstance(value, dict):
        return value
    made = dict(value)
    for name in ("sep", "cls"):
        if name in made:
            token, number = made[name]
            made[name] = [token, places[number]]
    if made.get("type") == "TemplateProcessing":
        made["special_tokens"] = {
            name: token | {"ids": [places[number] for number in token["ids"]]}
            for name, token in made["special_tokens"].items()
        }
    if "processors" in made:
        made["processors"] = [_processor(one, places) for one in made["processors"]]
    return made
