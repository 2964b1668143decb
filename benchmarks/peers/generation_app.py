"""A GPT-2 of random weights, written with by transformers and by CTranslate2, when told to.

Runs in an environment of its own, as one process on one thread, without a server: reads lines of
JSON that name an engine, the rows and the seconds, and answers each with a line of tokens a second.
"""

import json
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast


@dataclass(frozen=True, slots=True)
class Shape:
    """Of the model, and of what is written."""

    layers: int
    heads: int
    width: int
    window: int
    vocabulary: int
    prompt: int  # tokens
    answer: int  # tokens


Write = Callable[[int], int]  # so many rows at a time; returns the tokens written


def _gpt2(shape: Shape) -> Any:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=shape.vocabulary,
        n_positions=shape.window,
        n_embd=shape.width,
        n_layer=shape.layers,
        n_head=shape.heads,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    return GPT2LMHeadModel(config).eval()


def _prompt(shape: Shape) -> list[int]:
    return [1 + place % (shape.vocabulary - 1) for place in range(shape.prompt)]


def in_transformers(shape: Shape, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Write:
    """Greedily, with caches."""
    model = _gpt2(shape).to(device, dtype)
    prompt = torch.tensor([_prompt(shape)], device=device)  # (1, S)

    @torch.inference_mode()
    def write(rows: int) -> int:
        tokens = prompt.repeat(rows, 1)  # (B, S)
        written = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            do_sample=False,
            min_new_tokens=shape.answer,
            max_new_tokens=shape.answer,
        )  # (B, S + new)
        return int(written.numel() - tokens.numel())

    return write


def in_ctranslate2(shape: Shape, folder: Path, kind: str, device: str = "cpu") -> Write:
    """The same model, converted; in one thread on the CPU. The folder is for its files."""
    import ctranslate2
    from ctranslate2.converters import TransformersConverter

    if not (folder / "converted").is_dir():
        words = {f"t{token}": token for token in range(shape.vocabulary)}
        # The converter wants a tokenizer beside the model; what is decoded is numbers.
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(WordLevel(words, unk_token="t0")),
            unk_token="t0",
            bos_token="t0",
            eos_token="t0",
        )
        _gpt2(shape).save_pretrained(folder / "gpt2")
        tokenizer.save_pretrained(folder / "gpt2")
        TransformersConverter(str(folder / "gpt2")).convert(str(folder / "converted"))
    start = [f"t{token}" for token in _prompt(shape)]
    generator = ctranslate2.Generator(
        str(folder / "converted"),
        device=device,
        compute_type=kind,
        inter_threads=1,
        intra_threads=1,
    )

    def write(rows: int) -> int:
        written = generator.generate_batch(
            [start] * rows,
            max_length=shape.answer,
            min_length=shape.answer,
            include_prompt_in_result=False,
            sampling_topk=1,
        )
        return sum(len(one.sequences_ids[0]) for one in written)

    return write


def main() -> None:
    """Answer lines until there are no more."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    shape = Shape(**json.loads(sys.stdin.readline()))
    with tempfile.TemporaryDirectory() as folder:
        made = {
            "transformers fp32": in_transformers(shape),
            "CTranslate2 fp32": in_ctranslate2(shape, Path(folder), "float32"),
            "CTranslate2 int8": in_ctranslate2(shape, Path(folder), "int8"),
        }
        _say(list(made))
        for line in sys.stdin:
            asked = json.loads(line)
            write = made[asked["way"]]
            write(asked["rows"])  # what is made only once
            tokens, begun_s = 0, time.perf_counter()
            while not tokens or time.perf_counter() - begun_s < asked["seconds"]:
                tokens += write(asked["rows"])
            _say(tokens / (time.perf_counter() - begun_s))


def _say(what: Any) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main()
