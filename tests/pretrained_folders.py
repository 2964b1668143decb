"""Pretrained models in the Hub's format for tests: tiny, of random weights, of every family.

`transformers` writes them, and says what each should answer.
"""

import csv
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

transformers = pytest.importorskip("transformers", reason="the extra otify is not installed")

FAMILIES = ("bert", "roberta", "distilbert", "albert")
DECODERS = ("gpt2", "llama", "mistral", "qwen2", "gpt_neox")
SIZES = {"vocab_size": 120, "max_position_embeddings": 80}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": (
        "Bert",
        {
            "hidden_size": 16,
            "num_hidden_layers": 4,
            "num_attention_heads": 2,
            "intermediate_size": 24,
        },
    ),
    "roberta": (
        "Roberta",
        {
            "hidden_size": 16,
            "num_hidden_layers": 4,
            "num_attention_heads": 2,
            "intermediate_size": 24,
            "type_vocab_size": 1,
            "pad_token_id": 1,
            "layer_norm_eps": 1e-5,
        },
    ),
    "distilbert": ("DistilBert", {"dim": 16, "n_layers": 4, "n_heads": 2, "hidden_dim": 24}),
    "albert": (
        "Albert",
        {
            "embedding_size": 8,
            "hidden_size": 16,
            "num_hidden_layers": 4,
            "num_attention_heads": 2,
            "intermediate_size": 24,
        },
    ),
}
_OF_LLAMA = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
}
CONFIGS |= {
    "gpt2": ("GPT2", {"n_embd": 32, "n_layer": 4, "n_head": 2}),
    "llama": (
        "Llama",
        _OF_LLAMA | {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    ),
    "mistral": ("Mistral", _OF_LLAMA | {"num_key_value_heads": 1, "sliding_window": None}),
    "qwen2": ("Qwen2", _OF_LLAMA | {"tie_word_embeddings": True}),
    "gpt_neox": (  # a quarter of the channels of each head is rotated
        "GPTNeoX",
        {
            "hidden_size": 128,
            "num_hidden_layers": 4,
            "num_attention_heads": 2,
            "intermediate_size": 48,
        },
    ),
}
GOOD = ("bright", "warm", "lovely", "great", "kind")
BAD = ("dull", "cold", "awful", "poor", "cruel")
FILLER = ("the", "film", "story", "was", "and", "very", "a", "scene", "music", "long", "it's")


def texts(rows: int = 160, seed: int = 0) -> list[tuple[str, str]]:
    """Texts and labels: one word of each says which."""
    draw = random.Random(seed)
    made = []
    for i in range(rows):
        words = draw.choices(FILLER, k=draw.randint(3, 14))
        words.insert(draw.randrange(len(words) + 1), draw.choice((GOOD, BAD)[i % 2]))
        made.append((" ".join(words), ("good", "bad")[i % 2]))
    return made


def write_table(path: Path, rows: int = 160) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["body", "topic"])
        writer.writerows(texts(rows))
    return path


def write_corpus(path: Path, rows: int = 500) -> Path:
    path.write_text("\n".join(text for text, _ in texts(rows)), encoding="utf-8")
    return path


def tokenizer_for(family: str) -> Any:
    """The kind of tokenizer that the family has, learnt from the texts."""
    corpus = [text for text, _ in texts()]
    if family == "gpt2":  # one special token alone, and nothing around a text
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer: Any = trainers.BpeTrainer(
            vocab_size=SIZES["vocab_size"], special_tokens=["<|endoftext|>"], show_progress=False
        )
        tokenizer.train_from_iterator(corpus, trainer)
        end = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
        return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **end)
    if family in DECODERS:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        names = ["<unk>", "<s>", "</s>"]
        trainer = trainers.BpeTrainer(
            vocab_size=SIZES["vocab_size"], special_tokens=names, show_progress=False
        )
        tokenizer.train_from_iterator(corpus, trainer)
        if family == "llama":
            tokenizer.post_processor = processors.TemplateProcessing(
                single="<s> $A", special_tokens=[("<s>", 1)]
            )
        special = dict(zip(("unk_token", "bos_token", "eos_token"), names, strict=True))
        return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    if family == "roberta":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        names = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
        trainer = trainers.BpeTrainer(
            vocab_size=SIZES["vocab_size"], special_tokens=names, show_progress=False
        )
        tokenizer.train_from_iterator(corpus, trainer)
        tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
        special = dict(zip(("bos", "pad", "eos", "unk", "mask"), names, strict=True))
        special |= {"cls": "<s>", "sep": "</s>"}
    else:
        names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
        if family == "albert":
            tokenizer = Tokenizer(models.Unigram())
            tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
            trainer = trainers.UnigramTrainer(
                vocab_size=SIZES["vocab_size"],
                special_tokens=names,
                unk_token="[UNK]",
                show_progress=False,
            )
        else:
            tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
            tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
            trainer = trainers.WordPieceTrainer(
                vocab_size=SIZES["vocab_size"], special_tokens=names, show_progress=False
            )
        tokenizer.normalizer = normalizers.Lowercase()
        tokenizer.train_from_iterator(corpus, trainer)
        ends = [("[CLS]", 2), ("[SEP]", 3)]
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ends
        )
        special = dict(zip(("pad", "unk", "cls", "sep", "mask"), names, strict=True))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **{f"{name}_token": token for name, token in special.items()}
    )


def original(family: str, kind: str = "Model", **changes: Any) -> Any:
    """A model of transformers whose weights are large enough to matter."""
    name, sizes = CONFIGS[family]
    torch.manual_seed(3)
    config = getattr(transformers, f"{name}Config")(**(SIZES | sizes | changes))
    model = getattr(transformers, f"{name}{kind}")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


def write_folder(folder: Path, family: str, kind: str = "Model", **changes: Any) -> Any:
    """A model and its tokenizer as the Hub has them; the model.

    That of a decoder has a few more rows than there are tokens, as some have.
    """
    tokenizer = tokenizer_for(family)
    rows = len(tokenizer)
    if family in DECODERS:
        kind = {"gpt2": "LMHeadModel"}.get(family, "ForCausalLM") if kind == "Model" else kind
        ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
        rows, changes = rows + 7, ends | changes
    model = original(family, kind, vocab_size=rows, **changes)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model
