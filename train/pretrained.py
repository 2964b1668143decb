"""Pretrained models, read from a folder in the Hub's format, and models made of their layers.

    original = read_original(Path("all-MiniLM-L6-v2"))
    whole = converted(original, classes=4)  # every layer: what is fine-tuned
    dial = converted(original, classes=4, layers=(0, 5), gain=3.0)

A folder has config.json, model.safetensors and tokenizer.json; no code of it is run and
`transformers` is not needed. Encoders: BERT (and MiniLM), RoBERTa, DistilBERT, ALBERT. Decoders:
GPT-2, Llama (and SmolLM), Mistral, Qwen2, GPT-NeoX (Pythia); they go on writing, so they need no
classes.

With a gain the layers F are the velocity of an ODE, x' = g (F(x) - x), g a vector that is learnt.
From a gain of (layers of the original / layers kept), as many steps as that are the layers applied
one after another, without skips; fewer steps go the same way in longer strides.

Dropout is of embeddings and of what is added to a skip, not of attention's shares: on a CPU that
would double the time of an iteration, since torch has no fused attention with dropout there.
"""

import dataclasses
import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer, normalizers
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor, nn

from train.blocks import (
    Activation,
    Attention,
    Block,
    BlockVelocity,
    GatedFeedForward,
    ParallelBlock,
    RootNorm,
)
from train.corrections import CorrectedVelocity, moments_of
from train.model import Embedding, OTTransformer, PooledHead, Positions, TokenHead
from train.ode import Embedded

_log = logging.getLogger("stepdial")
CONFIG, WEIGHTS, INDEX, TOKENIZER = (
    "config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
)
_ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu-exact",
    "gelu_new": "gelu",
    "gelu_fast": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "relu": "relu",
}


class PretrainedError(ValueError):
    """A pretrained model that cannot be read or used, with what to do."""


@dataclass(frozen=True, slots=True)
class Encoder:
    """The sizes of a pretrained encoder."""

    family: str
    vocabulary: int
    width: int
    heads: int
    hidden: int
    layers: int
    positions: int  # tokens that it can read
    first_position: int  # RoBERTa counts from its padding on
    embedding_width: int
    eps: float
    activation: Activation
    pad_id: int
    pool: Literal["mean", "first"]
    dense: Activation | Literal["tanh", ""]  # the classifier's own layer before its last, if any


@dataclass(frozen=True, slots=True)
class Decoder:
    """The sizes and the form of a pretrained decoder."""

    family: str
    vocabulary: int
    width: int
    heads: int
    kv_heads: int
    head_width: int
    hidden: int
    layers: int
    positions: int  # tokens that it was trained on
    eps: float
    activation: Activation
    form: Literal["gpt2", "llama", "neox"]
    rotary: int  # channels of each head; 0: positions are learned vectors
    theta: float
    biases: tuple[bool, bool, bool]  # of queries, keys and values; of what follows; of feed-forward
    tied: bool  # whether the readout is the token embedding
    pad_id: int  # a token that no text becomes
    eos_id: int | None


@dataclass(frozen=True, slots=True)
class _Names:
    """How a family calls its weights; what stands behind the family's own prefix."""

    prefix: str
    layer: str
    q: str
    k: str
    v: str
    out: str
    norm1: str
    up: str
    down: str
    norm2: str
    dense: str  # of a fine-tuned classifier
    classifier: str
    dense_activation: Literal["tanh", "relu"]
    sizes: Mapping[str, str] = dataclasses.field(default_factory=dict)  # other names in config.json


_BERT = _Names(
    "bert.",
    "encoder.layer.{}.",
    "attention.self.query",
    "attention.self.key",
    "attention.self.value",
    "attention.output.dense",
    "attention.output.LayerNorm",
    "intermediate.dense",
    "output.dense",
    "output.LayerNorm",
    "pooler.dense",
    "classifier",
    "tanh",
)
_FAMILIES = {
    "bert": _BERT,
    "roberta": dataclasses.replace(
        _BERT, prefix="roberta.", dense="classifier.dense", classifier="classifier.out_proj"
    ),
    "distilbert": _Names(
        "distilbert.",
        "transformer.layer.{}.",
        "attention.q_lin",
        "attention.k_lin",
        "attention.v_lin",
        "attention.out_lin",
        "sa_layer_norm",
        "ffn.lin1",
        "ffn.lin2",
        "output_layer_norm",
        "pre_classifier",
        "classifier",
        "relu",
        {
            "hidden_size": "dim",
            "num_attention_heads": "n_heads",
            "num_hidden_layers": "n_layers",
            "intermediate_size": "hidden_dim",
            "hidden_act": "activation",
        },
    ),
    "albert": _Names(
        "albert.",
        "encoder.albert_layer_groups.0.albert_layers.0.",
        "attention.query",
        "attention.key",
        "attention.value",
        "attention.dense",
        "attention.LayerNorm",
        "ffn",
        "ffn_output",
        "full_layer_layer_norm",
        "pooler",
        "classifier",
        "tanh",
    ),
}


@dataclass(frozen=True, slots=True)
class Original:
    """A pretrained model as it lies in its folder."""

    name: str
    sizes: Encoder | Decoder
    weights: dict[str, Tensor]  # without the family's prefix
    tokenizer: Tokenizer
    licence: str
    labels: tuple[str, ...] | None  # of a classifier that is fine-tuned already

    def facts(self) -> dict[str, Any]:
        """What a run and a card say of where its weights came from."""
        return {"name": self.name, "licence": self.licence, "family": self.sizes.family}

    @property
    def encoder(self) -> Encoder:
        """The sizes of one that reads a text as a whole."""
        assert isinstance(self.sizes, Encoder), f"{self.name} is a decoder"
        return self.sizes

    @property
    def decodes(self) -> bool:
        """Whether it writes, token by token."""
        return isinstance(self.sizes, Decoder)


def read_original(folder: Path) -> Original:
    """A pretrained model; PretrainedError names the file at fault."""
    if not folder.is_dir():
        raise PretrainedError(
            f"{folder} is no folder: give one that holds {CONFIG}, {WEIGHTS} and {TOKENIZER}, as "
            "models of the Hub have them"
        )
    config = _read_json(folder / CONFIG)
    family = config.get("model_type")
    if family in _DECODERS:
        return _read_decoder(folder, config, family)
    if family not in _FAMILIES:
        raise PretrainedError(
            f"{folder / CONFIG}: model_type is {family!r}; convert takes encoders of the families "
            f"{', '.join(_FAMILIES)}, and decoders of {', '.join(_DECODERS)}"
        )
    names = _FAMILIES[family]
    weights = {
        name.removeprefix(names.prefix).replace(".gamma", ".weight").replace(".beta", ".bias"): w
        for name, w in _read_weights(folder).items()
    }
    tokenizer = _read_tokenizer(folder)
    encoder = _encoder(config, family, weights, _pooling(folder), folder / CONFIG)
    _warn_of_prompt(folder)
    _tokens_of(tokenizer, encoder.vocabulary, folder)
    pad_id = _pad_id(folder, tokenizer, encoder.pad_id)
    if encoder.first_position and pad_id != encoder.pad_id:  # positions are counted without it
        raise PretrainedError(
            f"{folder / CONFIG}: pad_token_id = {encoder.pad_id}, and the tokenizer pads with "
            f"{pad_id}: a {family} counts its positions from padding on, so give one of which both "
            "say the same"
        )
    encoder = dataclasses.replace(encoder, pad_id=pad_id)
    labels, problem = None, config.get("problem_type")
    if encoder.dense and problem not in (None, "single_label_classification"):
        _log.warning(
            "%s: problem_type = %r is not supported: its readout is left out, and a new one learns "
            "to give each text one label",
            *(folder / CONFIG, problem),
        )
    elif encoder.dense:
        numbered = config.get("id2label") or {}
        count = len(weights[f"{names.classifier}.weight"])
        labels = tuple(str(numbered.get(str(i), f"LABEL_{i}")) for i in range(count))
    return Original(folder.absolute().name, encoder, weights, tokenizer, _licence(folder), labels)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise PretrainedError(
            f"{path.parent} has no {path.name}: download the whole model, or save it with "
            "save_pretrained"
        )
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise PretrainedError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise PretrainedError(f"{path}: must be an object")
    return value


def _read_weights(folder: Path) -> dict[str, Tensor]:
    files = [folder / WEIGHTS]
    if not files[0].is_file():
        if not (folder / INDEX).is_file():
            raise PretrainedError(
                f"{folder} has no {WEIGHTS}: weights in another format, such as pytorch_model.bin, "
                "are not read, since they may hold code. Save the model with "
                "save_pretrained(..., safe_serialization=True)"
            )
        shards = _read_json(folder / INDEX).get("weight_map")
        if not isinstance(shards, dict) or not shards:
            raise PretrainedError(f"{folder / INDEX}: weight_map must name the file of each weight")
        files = [folder / Path(name).name for name in sorted(set(shards.values()))]
    weights: dict[str, Tensor] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                weights |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a dict
        except (SafetensorError, OSError) as error:
            raise PretrainedError(f"{file} is damaged or missing ({error})") from None
    packed = next((n for n, w in weights.items() if n.endswith("weight") and w.itemsize == 1), None)
    if packed is not None:
        raise PretrainedError(
            f"{folder}: {packed} is {weights[packed].dtype}, without its scales: convert takes "
            "weights of 16 or 32 bits, so give the model from before it was quantised"
        )
    return {name: w.float() if w.is_floating_point() else w for name, w in weights.items()}


_NORMALIZING = {
    "do_lower_case": "lowercase",
    "strip_accents": "strip_accents",
    "tokenize_chinese_chars": "handle_chinese_chars",
}


def _read_tokenizer(folder: Path) -> Tokenizer:
    """Its own tokenizer without its padding and truncation: batches and windows are ours."""
    path = folder / TOKENIZER
    if not path.is_file():
        raise PretrainedError(
            f"{folder} has no {TOKENIZER}: save its fast tokenizer there, with "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except BaseException as error:  # tokenizers has no narrower one, and it may panic
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise PretrainedError(f"{path} cannot be read: {error}") from None
    tokenizer.no_padding()
    tokenizer.no_truncation()
    _told(tokenizer, folder)
    return tokenizer


def _told(tokenizer: Tokenizer, folder: Path) -> None:
    """What other files say of how a text is read."""
    noted = folder / "tokenizer_config.json"
    said = _read_json(noted) if noted.is_file() else {}  # which counts, if both say something
    normalizer, cut = tokenizer.normalizer, tokenizer.pre_tokenizer
    if isinstance(normalizer, BertNormalizer):
        for key, name in _NORMALIZING.items():
            if key in said and getattr(normalizer, name) != said[key]:
                setattr(normalizer, name, said[key])
        tokenizer.normalizer = normalizer
    if isinstance(cut, ByteLevel) and isinstance(said.get("add_prefix_space"), bool):
        cut.add_prefix_space = said["add_prefix_space"]
        tokenizer.pre_tokenizer = cut
    lowers = any(  # in all that sentence-transformers gives it
        _read_json(path).get("do_lower_case") for path in folder.glob("sentence_*_config.json")
    )
    if lowers and tokenizer.encode("A").ids != tokenizer.encode("a").ids:
        others = [] if tokenizer.normalizer is None else [tokenizer.normalizer]
        tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), *others])


def _pad_id(folder: Path, tokenizer: Tokenizer, noted: int) -> int:
    """What texts are padded with, as the tokenizer says it: the model's config may say otherwise.

    So it is with multilingual MiniLM, a BERT with the tokenizer of XLM-R.
    """
    found = noted
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        path = folder / name
        token = _read_json(path).get("pad_token") if path.is_file() else None
        named = token.get("content") if isinstance(token, dict) else token
        known = tokenizer.token_to_id(named) if isinstance(named, str) else None
        found = found if known is None else known
    if found in tokenizer.encode("a").ids:
        raise PretrainedError(
            f"{folder}: padding would be token {found}, which stands in every text: give the "
            "tokenizer_config.json of the model, whose pad_token says what padding is"
        )
    return found


_POOLING = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


# The last makes vectors of length 1, as /v1/embeddings does of any.
_KEPT_MODULES = ("Transformer", "Pooling", "Dropout", "Normalize")


def _pooling(folder: Path) -> Literal["mean", "first"]:
    """As sentence-transformers notes it beside the model; the mean where nothing is said."""
    modules = _modules(folder)
    for kind, place in modules:
        if kind not in _KEPT_MODULES:
            _log.warning(
                "%s: %s (%s) is not supported and left out: classes are learnt from the pooled "
                "states of the last layer, and embeddings are these",
                *(folder, place.name, kind),
            )
    pooling = next((place for kind, place in modules if kind == "Pooling"), None)
    path = (pooling or folder / "1_Pooling") / CONFIG
    noted = _read_json(path) if pooling or path.is_file() else {}
    modes = noted.get("pooling_mode", [])  # older releases have a flag for each
    modes = {*([modes] if isinstance(modes, str) else modes)}
    modes |= {_POOLING[key] for key, value in noted.items() if value is True and key in _POOLING}
    if modes - {"cls", "mean"} or len(modes) > 1:
        _log.warning(
            "%s: pooling by %s is not supported: the mean is used instead",
            *(path, " and ".join(sorted(modes))),
        )
        return "mean"
    return "first" if modes == {"cls"} else "mean"


def _modules(folder: Path) -> list[tuple[str, Path]]:
    """What sentence-transformers has applied one after another: the kind of each and its folder."""
    path = folder / "modules.json"
    if not path.is_file():
        return []
    try:
        noted = json.loads(path.read_text(encoding="utf-8"))
        return [(each["type"].rpartition(".")[2], folder / each["path"]) for each in noted]
    except (ValueError, TypeError, LookupError, AttributeError):
        raise PretrainedError(
            f"{path}: must be a list of modules, each with its type and path"
        ) from None


def _warn_of_prompt(folder: Path) -> None:
    """Some models are made to read each text behind a prompt, such as "query: "."""
    path = folder / "config_sentence_transformers.json"
    noted = _read_json(path) if path.is_file() else {}
    prompts, name = noted.get("prompts"), noted.get("default_prompt_name")
    prompt = prompts.get(name) if isinstance(prompts, dict) else None
    if prompt:
        _log.warning(
            "%s: texts are read without the default prompt %r: if they shall have it, write it in "
            "front of those in the table and in requests",
            *(path, prompt),
        )


_CARD_CHARACTERS = 1 << 16  # of a model card, that its facts are among


def _licence(folder: Path) -> str:
    """As the model card says it; empty if there is none."""
    path = folder / "README.md"
    card = ""
    if path.is_file():
        with path.open(encoding="utf-8", errors="replace") as file:
            card = file.read(_CARD_CHARACTERS)
    found = re.match(r"---[^\S\n]*\n(.*?)\n---", card, re.DOTALL)
    line = re.search(r"^license:\s*(\S+)", found[1], re.MULTILINE) if found else None
    return line[1] if line else ""


def _encoder(
    config: dict[str, Any],
    family: str,
    weights: dict[str, Tensor],
    pool: Literal["mean", "first"],
    where: Path,
) -> Encoder:
    names = _FAMILIES[family]
    # One that labels tokens has a classifier too, and in some files a layer that it does not read.
    classifies = all(f"{one}.weight" in weights for one in (names.dense, names.classifier))
    made_as = config.get("architectures") or []
    classifies &= not any(one.endswith("ForTokenClassification") for one in made_as)

    def size(name: str) -> Any:
        key = names.sizes.get(name, name)
        if key not in config:
            raise PretrainedError(f"{where} has no {key}")
        return config[key]

    activation = size("hidden_act")
    unusual = {
        "hidden_act": activation not in _ACTIVATIONS,
        "position_embedding_type": config.get("position_embedding_type") not in (None, "absolute"),
        "is_decoder": bool(config.get("is_decoder")),
        "num_hidden_groups": config.get("num_hidden_groups", 1) != 1,
        "inner_group_num": config.get("inner_group_num", 1) != 1,
    }
    for key, is_unusual in unusual.items():
        if is_unusual:
            key = names.sizes.get(key, key)
            raise PretrainedError(f"{where}: {key} = {config.get(key)!r} is not supported")
    tokens, positions = (f"embeddings.{name}_embeddings.weight" for name in ("word", "position"))
    for name in (tokens, positions):
        if name not in weights:
            raise PretrainedError(f"{where.parent / WEIGHTS} has no {name}")
    usual_pad = 1 if family == "roberta" else 0
    pad_id = int(config.get("pad_token_id", usual_pad) or 0)
    first = pad_id + 1 if family == "roberta" else 0
    eps = 1e-12 if family == "distilbert" else config.get("layer_norm_eps", 1e-12)
    return Encoder(
        family=family,
        vocabulary=len(weights[tokens]),
        width=size("hidden_size"),
        heads=size("num_attention_heads"),
        hidden=size("intermediate_size"),
        layers=size("num_hidden_layers"),
        positions=len(weights[positions]) - first,
        first_position=first,
        embedding_width=weights[tokens].shape[1],
        eps=float(eps),
        activation=_ACTIVATIONS[activation],
        pad_id=pad_id,
        pool="first" if classifies else pool,
        dense=names.dense_activation if classifies else "",
    )


# Decoders. Where a key of config.json has another name in a family, `sizes` has that.


_LLAMA_SIZES = {
    "kv_heads": "num_key_value_heads",
    "eps": "rms_norm_eps",
}
_DECODERS: dict[str, tuple[Literal["gpt2", "llama", "neox"], str, dict[str, str]]] = {
    # The form of its blocks, the prefix of its weights, and names in config.json.
    "gpt2": (
        "gpt2",
        "transformer.",
        {
            "hidden_size": "n_embd",
            "num_attention_heads": "n_head",
            "num_hidden_layers": "n_layer",
            "max_position_embeddings": "n_positions",
            "hidden_act": "activation_function",
            "eps": "layer_norm_epsilon",
        },
    ),
    "llama": ("llama", "model.", _LLAMA_SIZES),
    "mistral": ("llama", "model.", _LLAMA_SIZES),
    "qwen2": ("llama", "model.", _LLAMA_SIZES),
    "gpt_neox": ("neox", "gpt_neox.", {"eps": "layer_norm_eps", "theta": "rotary_emb_base"}),
}
_ENDS = {  # token embedding, norm before the readout, readout
    "gpt2": ("wte.weight", "ln_f", "lm_head.weight"),
    "llama": ("embed_tokens.weight", "norm", "lm_head.weight"),
    "neox": ("embed_in.weight", "final_layer_norm", "embed_out.weight"),
}


def tables_of(original: Original) -> list[str]:
    """The weights with a row for each token, by name."""
    if isinstance(original.sizes, Encoder):
        return ["embeddings.word_embeddings.weight"]
    tokens, _, readout = _ENDS[original.sizes.form]
    return [name for name in (tokens, readout) if name in original.weights]


def _read_decoder(folder: Path, config: dict[str, Any], family: str) -> Original:
    made_as = config.get("architectures") or []
    other = next((one for one in made_as if "For" in one and not one.endswith("ForCausalLM")), None)
    if other is not None:  # whose states have been trained for something else than the next token
        raise PretrainedError(
            f"{folder / CONFIG}: architectures has {other}: of decoders convert takes those that "
            "go on with a text; give the language model that this one was made of"
        )
    form, prefix, _ = _DECODERS[family]
    weights = {name.removeprefix(prefix): w for name, w in _read_weights(folder).items()}
    tokenizer = _read_tokenizer(folder)
    sizes = _decoder(config, family, weights, tokenizer, folder)
    tokens, _, readout = _ENDS[form]
    for name in (tokens, readout):
        if name in weights:  # rows behind those of the tokenizer fill up the table
            weights[name] = weights[name][: sizes.vocabulary]
    name, licence = folder.absolute().name, _licence(folder)
    return Original(name, sizes, weights, tokenizer, licence, labels=None)


def _decoder(
    config: dict[str, Any],
    family: str,
    weights: dict[str, Tensor],
    tokenizer: Tokenizer,
    folder: Path,
) -> Decoder:
    form, _, names = _DECODERS[family]
    where = folder / CONFIG

    def size(name: str) -> Any:
        key = names.get(name, name)
        if config.get(key) is None:
            raise PretrainedError(f"{where} has no {key}")
        return config[key]

    # If there are both, transformers takes these.
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    activation = "silu" if form == "llama" else size("hidden_act")
    positions = size("max_position_embeddings")
    # What transformers takes where nothing is said: only Mistral's windows slide.
    window = config.get("sliding_window", 4096 if family == "mistral" else None)
    if family == "qwen2" and not config.get("use_sliding_window"):
        window = None
    usual = {
        "hidden_act": config.get("hidden_act", "silu") == "silu"
        if form == "llama"
        else activation in _ACTIVATIONS,
        "rope_scaling": rope.get("rope_type", rope.get("type", "default")) == "default",
        "sliding_window": window is None or window >= positions,
        "scale_attn_weights": config.get("scale_attn_weights", True),
        "scale_attn_by_inverse_layer_idx": not config.get("scale_attn_by_inverse_layer_idx"),
        "add_cross_attention": not config.get("add_cross_attention"),
        "use_parallel_residual": form != "neox" or config.get("use_parallel_residual", True),
    }
    for key, is_usual in usual.items():
        if not is_usual:
            key = names.get(key, key)
            shown = {"rope_scaling": rope, "sliding_window": window}.get(key, config.get(key))
            raise PretrainedError(f"{where}: {key} = {shown!r} is not supported")
    tokens, _, readout = _ENDS[form]
    for name in (tokens, "wpe.weight") if form == "gpt2" else (tokens,):
        if name not in weights:
            raise PretrainedError(f"{folder / WEIGHTS} has no {name}")
    tied = bool(config.get("tie_word_embeddings", form == "gpt2"))
    # A file with a readout that differs from the embedding has been trained without the tie.
    tied = tied and torch.equal(weights.get(readout, weights[tokens]), weights[tokens])
    if not tied and readout not in weights:
        raise PretrainedError(
            f"{folder / WEIGHTS} has no {readout}, which reads out the next token: save the whole "
            "language model, not its states alone"
        )
    width, heads = size("hidden_size"), size("num_attention_heads")
    head_width = config.get("head_dim") or width // heads
    if head_width * heads != width:
        raise PretrainedError(f"{where}: head_dim = {head_width} is not supported")
    share = rope.get("partial_rotary_factor", config.get("rotary_pct", 0.25))
    if form == "neox" and int(share * head_width) % 2:
        raise PretrainedError(f"{where}: rotary_pct = {share} of {head_width} is an odd number")
    pad_id, eos_id = _special_ids(config, folder, tokenizer)
    biases = {
        "gpt2": (True, True, True),
        "neox": (bool(config.get("attention_bias", True)),) * 2 + (True,),
        "llama": (
            family == "qwen2" or bool(config.get("attention_bias")),
            family != "qwen2" and bool(config.get("attention_bias")),
            bool(config.get("mlp_bias")),
        ),
    }[form]
    return Decoder(
        family=family,
        vocabulary=_tokens_of(tokenizer, len(weights[tokens]), folder),
        width=width,
        heads=heads,
        kv_heads=(config.get("num_key_value_heads") or heads) if form == "llama" else heads,
        head_width=head_width,
        hidden=(config.get("n_inner") or 4 * width)
        if form == "gpt2"
        else size("intermediate_size"),
        layers=size("num_hidden_layers"),
        positions=len(weights["wpe.weight"]) if form == "gpt2" else positions,
        eps=float(size("eps")),
        activation="gelu" if form == "llama" else _ACTIVATIONS[activation],
        form=form,
        rotary={"gpt2": 0, "llama": head_width, "neox": int(share * head_width)}[form],
        theta=float(
            rope.get("rope_theta") or config.get(names.get("theta", "rope_theta")) or 10_000.0
        ),
        biases=(biases[0], biases[1], biases[2]),
        tied=tied,
        pad_id=pad_id,
        eos_id=eos_id,
    )


def _tokens_of(tokenizer: Tokenizer, rows: int, folder: Path) -> int:
    """The tokens of a tokenizer, without the rows that fill up a table."""
    count = tokenizer.get_vocab_size()
    if max(tokenizer.get_vocab().values()) != count - 1 or count > rows:
        raise PretrainedError(
            f"{folder / TOKENIZER} has {count} tokens, whose ids do not fit the {rows} rows of the "
            "embedding: give the tokenizer that the model was trained with"
        )
    path = folder / "tokenizer_config.json"
    added = _read_json(path).get("added_tokens_decoder") if path.is_file() else None
    for number, token in (added or {}).items():
        text = token["content"]
        if int(number) < rows and tokenizer.token_to_id(text) != int(number):
            raise PretrainedError(
                f"{path}: token {number} is {text!r}, and {TOKENIZER} has no such token: save both "
                "again with AutoTokenizer.from_pretrained(...).save_pretrained(...)"
            )
    return count


def _special_ids(
    config: dict[str, Any], folder: Path, tokenizer: Tokenizer
) -> tuple[int, int | None]:
    """A token that no text becomes, to pad with; and the one that ends a text, if another."""
    added = tokenizer.get_added_tokens_decoder()
    special = sorted(number for number, token in added.items() if token.special)
    if not special:
        raise PretrainedError(
            f"{folder / TOKENIZER} has no special token, and one has to stand for padding"
        )
    ends = config.get("eos_token_id")
    if isinstance(ends, list) and ends:
        if len(ends) > 1:
            _log.warning(
                "%s: eos_token_id = %s: an answer ends with the first of these alone",
                *(folder / CONFIG, ends),
            )
        ends = ends[0]
    ends = ends if ends in special else None
    texts_have = tokenizer.encode("a").ids  # Llama begins each with a special token
    free = [one for one in special if one not in texts_have]
    unknown = getattr(tokenizer.model, "unk_token", None)
    never = [one for one in free if added[one].content != unknown]
    noted = [one for one in free if one == config.get("pad_token_id")]
    for token in (*noted, *never, *free, *special):
        if token != ends:
            return token, ends
    return special[0], None  # GPT-2 has one special token alone


class PretrainedEmbedding(nn.Module):
    """Tokens, positions and the first segment, normed; what is not padding is the mask."""

    def __init__(self, encoder: Encoder, window: int, dropout: float = 0.0) -> None:
        super().__init__()
        inner = encoder.embedding_width
        self.pad_id, self.window = encoder.pad_id, window
        self.tokens = nn.Embedding(encoder.vocabulary, inner)
        self.tokens.weight.requires_grad_(False)
        self.positions = Positions(window, inner, "learned")
        self.norm = nn.LayerNorm(inner, eps=encoder.eps)
        self.drop = nn.Dropout(dropout)
        self.project: nn.Module = nn.Identity()
        if encoder.family == "albert" or inner != encoder.width:
            self.project = nn.Linear(inner, encoder.width)

    def forward(self, tokens: Tensor) -> Embedded:
        mask = tokens != self.pad_id  # (B, N)
        x = self.norm(self.tokens(tokens) + self.positions(tokens.shape[1]))
        return Embedded(self.project(self.drop(x)), (mask,), mask)  # (B, N, D)


class GainVelocity(BlockVelocity):
    """x' = g (F(x) - x), F the layers, or one layer several times over."""

    def __init__(
        self, blocks: Iterable[nn.Module], width: int, gain: float, times: int = 1
    ) -> None:
        super().__init__(blocks, width, final_norm=False)
        self.times = times
        self.gain = nn.Parameter(torch.full((width,), gain))

    def forward(self, x: Tensor, *context: Tensor) -> Tensor:
        y = x
        for _ in range(self.times):
            y = super().forward(y, *context)
        out: Tensor = self.gain * (y - x)
        return out


class DenseHead(nn.Module):
    """Class logits as a fine-tuned encoder reads them: the first token through two layers."""

    def __init__(self, width: int, classes: int, activation: str, dropout: float) -> None:
        super().__init__()
        self.dense = nn.Linear(width, width)
        self.activation: nn.Module = nn.Tanh() if activation == "tanh" else nn.ReLU()
        self.drop = nn.Dropout(dropout)
        self.linear = nn.Linear(width, classes)

    def forward(self, x: Tensor, *context: Tensor) -> Tensor:
        return self.read(self.pooled(x))

    def pooled(self, x: Tensor, *context: Tensor) -> Tensor:
        """The first position (B, D): the embedding of the input."""
        return x[:, 0]

    def read(self, pooled: Tensor) -> Tensor:
        """The logits of a pooled state."""
        logits: Tensor = self.linear(self.drop(self.activation(self.dense(pooled))))
        return logits  # (B, classes)


class ConvertedTransformer(OTTransformer):
    """A model of pretrained layers, which remembers of which, so that a run can make it again."""

    origin: dict[str, Any]


def converted(
    original: Original,
    classes: int,
    window: int = 0,
    layers: tuple[int, ...] = (),
    gain: float = 0.0,
    dropout: float = 0.0,
    steps: int = 1,
    rank: int = 0,
    ending_rank: int = 0,
    labels: tuple[str, ...] | None = None,
) -> ConvertedTransformer:
    """A model of an original's layers, all of them by default, with its weights.

    With a gain it is an ODE, otherwise one pass. With a rank the layers are those of all steps, one
    after the other: the first step's are kept, with corrections of that rank for the others; with
    an ending's rank, shorter answers end with a step that is corrected once more. The readout of an
    encoder is the original's if that has one for these labels, whose order it gets, or for so many
    classes if none are given; else it is new. A decoder has its own.
    """
    sizes = original.sizes
    window = window or sizes.positions
    if window > sizes.positions:
        raise PretrainedError(f"{original.name} reads at most {sizes.positions} tokens")
    layers = layers or tuple(range(sizes.layers))
    check_layers(original, layers)
    if isinstance(sizes, Decoder):
        model = converted_from(
            {
                # As JSON has it, so that a run is known again.
                "decoder": dataclasses.asdict(sizes) | {"biases": list(sizes.biases)},
                "window": window,
                "layers": list(layers),
                "gain": gain,
                "dropout": dropout,
                "source": original.facts(),
            }
        )
        with _loading(original):
            _load_decoder(model, original, sizes, layers)
        return model
    encoder = sizes
    order = _own_order(original.labels, classes, labels)
    if order is None:
        encoder = dataclasses.replace(encoder, dense="")
    model = converted_from(
        {
            "encoder": dataclasses.asdict(encoder),
            "classes": classes,
            "window": window,
            "layers": list(layers),
            "gain": gain,
            "dropout": dropout,
            "source": original.facts(),
        }
        # A step of ALBERT is its one layer several times over.
        | ({"times": len(layers)} if gain and encoder.family == "albert" else {})
        | ({"steps": steps, "rank": rank, "ending_rank": ending_rank} if rank else {})
    )
    with _loading(original):
        _load(model, original, layers, order)
    return model


def _own_order(
    own: tuple[str, ...] | None, classes: int, labels: tuple[str, ...] | None
) -> list[int] | None:
    """The rows of an original's readout in the order of these labels; None: it has other classes.

    Classes that one of the two only numbers are in the same order.
    """
    if own is None or len(own) != classes:
        return None
    names, wanted = ([one.casefold() for one in each] for each in (own, labels or own))
    if {*names} == {*wanted} and len({*names}) == classes:
        return [names.index(one) for one in wanted]
    rows, numbers = _numbers(names), _numbers(wanted)
    if rows is None and numbers is None:
        return None
    # By number, since as words "10" comes before "2".
    rows, numbers = rows or list(range(classes)), numbers or list(range(classes))
    return [rows.index(number) for number in numbers]


def _numbers(names: Sequence[str]) -> list[int] | None:
    """The numbers that these classes have for names, if those are all from 0 on."""
    for form in ("{}", "label_{}"):
        numbered = [form.format(number) for number in range(len(names))]
        if {*names} == {*numbered}:
            return [numbered.index(name) for name in names]
    return None


def begin_with_layers(
    model: ConvertedTransformer, whole: ConvertedTransformer, rows: Iterable[Tensor] = ()
) -> None:
    """Give a model with corrections the weights of a stack of its layers, those of all steps.

    Rows (B, N) of tokens are what they should be near for.
    """
    velocity, stack = model.velocity, whole.velocity
    assert isinstance(velocity, CorrectedVelocity) and isinstance(stack, BlockVelocity)
    pad_id = whole.origin["encoder"]["pad_id"]
    layers = list(stack.blocks)
    velocity.begin_with(layers, moments_of(layers, whole, rows, pad_id))


@contextmanager
def _loading(original: Original) -> Iterator[None]:
    try:
        with torch.no_grad():
            yield
    except RuntimeError as error:
        raise PretrainedError(
            f"the weights of {original.name} do not have the sizes that its {CONFIG} says: {error}"
        ) from None


def converted_from(origin: dict[str, Any]) -> ConvertedTransformer:
    """The model of a run again, with fresh weights."""
    if "decoder" in origin:
        return _decoder_from(origin)
    given = origin["encoder"]
    if given["activation"] == "erf-gelu":  # as early runs call it
        given = given | {"activation": "gelu-exact"}
    encoder = Encoder(**given)
    width, dropout, classes = encoder.width, origin["dropout"], origin["classes"]
    steps, rank = origin.get("steps", 1), origin.get("rank", 0)
    kept = origin["layers"][: len(origin["layers"]) // steps]
    # ALBERT has one layer for its whole depth.
    blocks = [_block(encoder, dropout) for _ in (kept[:1] if encoder.family == "albert" else kept)]
    if rank:
        endings = origin.get("ending_rank", 0)
        velocity: nn.Module = CorrectedVelocity(blocks, width, origin["gain"], steps, rank, endings)
    elif origin["gain"]:
        times = origin.get("times", 1)
        velocity = GainVelocity(blocks, width, origin["gain"], times)
    elif encoder.family == "albert":
        velocity = Repeated(blocks, width, len(kept))
    else:
        velocity = BlockVelocity(blocks, width, final_norm=False)
    head: nn.Module
    if encoder.dense:
        head = DenseHead(width, classes, encoder.dense, dropout)
    else:
        head = PooledHead(width, classes, False, encoder.pool, dropout)
        nn.init.normal_(head.linear.weight, std=0.02)
        nn.init.zeros_(head.linear.bias)
    embed = PretrainedEmbedding(encoder, origin["window"], dropout)
    depth: Literal["ode", "discrete"] = "ode" if origin["gain"] else "discrete"
    model = ConvertedTransformer(embed, velocity, head, 1.0, depth)
    model.origin = origin
    return model


def _decoder_from(origin: dict[str, Any]) -> ConvertedTransformer:
    given = origin["decoder"]
    sizes = Decoder(**given | {"biases": tuple(given["biases"])})
    width, window, dropout = sizes.width, origin["window"], origin["dropout"]
    blocks = [_decoder_block(sizes, window, dropout) for _ in origin["layers"]]
    velocity: nn.Module
    if origin["gain"]:
        velocity = GainVelocity(blocks, width, origin["gain"])
    else:
        velocity = BlockVelocity(blocks, width, final_norm=False)
    positions = "none" if sizes.rotary else "learned"
    embed = Embedding(sizes.vocabulary, window, width, None, dropout, positions)
    embed.tokens.weight.requires_grad_(False)
    head = TokenHead(width, sizes.vocabulary, norm=False, bias=False)
    head.norm = _norm(sizes)
    if sizes.tied:
        head.linear.weight = embed.tokens.weight
    depth: Literal["ode", "discrete"] = "ode" if origin["gain"] else "discrete"
    model = ConvertedTransformer(embed, velocity, head, 1.0, depth)
    model.origin = origin
    return model


def _norm(sizes: Decoder) -> nn.Module:
    if sizes.form == "llama":
        return RootNorm(sizes.width, sizes.eps)
    return nn.LayerNorm(sizes.width, eps=sizes.eps)


def _decoder_block(sizes: Decoder, window: int, dropout: float) -> Block:
    width, heads, hidden = sizes.width, sizes.heads, sizes.hidden
    into, out, feeds = sizes.biases
    made = ParallelBlock if sizes.form == "neox" else Block
    block = made(width, heads, hidden, True, "pre", dropout, sizes.activation, feeds)
    block.attention = Attention(
        width,
        heads,
        causal=True,
        bias=into,
        kv_heads=sizes.kv_heads,
        rotary=sizes.rotary,
        theta=sizes.theta,
        window=window,
    )
    block.attention.out = nn.Linear(width, width, bias=out)
    block.norm1, block.norm2 = _norm(sizes), _norm(sizes)
    if sizes.form == "llama":
        block.feedforward = GatedFeedForward(width, hidden, feeds)
    return block


class Repeated(BlockVelocity):
    """One layer applied several times over."""

    def __init__(self, blocks: Iterable[nn.Module], width: int, times: int) -> None:
        super().__init__(blocks, width, final_norm=False)
        self.times = times

    def forward(self, x: Tensor, *context: Tensor) -> Tensor:
        for _ in range(self.times):
            x = super().forward(x, *context)
        return x


def _block(encoder: Encoder, dropout: float) -> Block:
    width = encoder.width
    block = Block(width, encoder.heads, encoder.hidden, False, "post", dropout, encoder.activation)
    block.attention = Attention(width, encoder.heads, causal=False)
    block.norm1, block.norm2 = (nn.LayerNorm(width, eps=encoder.eps) for _ in range(2))
    return block


def _load(
    model: ConvertedTransformer,
    original: Original,
    layers: tuple[int, ...],
    order: list[int] | None,
) -> None:
    encoder, names, take = original.encoder, _FAMILIES[original.encoder.family], _Taking(original)
    embed = model.embed
    assert isinstance(embed, PretrainedEmbedding) and isinstance(model.velocity, BlockVelocity)
    embed.tokens.weight.copy_(take("embeddings.word_embeddings.weight"))
    end = encoder.first_position + embed.window
    positions = take("embeddings.position_embeddings.weight")[encoder.first_position : end]
    if encoder.family != "distilbert":  # which has no segments
        positions = positions + take("embeddings.token_type_embeddings.weight")[0]
    table = next(embed.positions.parameters())
    table.copy_(positions.view_as(table))
    take.into(embed.norm, "embeddings.LayerNorm")
    if isinstance(embed.project, nn.Linear):
        take.into(embed.project, "encoder.embedding_hidden_mapping_in")
    for block, layer in zip(model.velocity.blocks, layers, strict=False):
        assert isinstance(block, Block) and block.feedforward is not None
        at = names.layer.format(layer)
        take.stacked(block.attention.qkv, [at + name for name in (names.q, names.k, names.v)])
        for module, name in (
            (block.attention.out, names.out),
            (block.norm1, names.norm1),
            (block.feedforward.up, names.up),
            (block.feedforward.down, names.down),
            (block.norm2, names.norm2),
        ):
            take.into(module, at + name)
    if order is not None:
        head = model.head
        assert isinstance(head, DenseHead)
        take.into(head.dense, names.dense)
        head.linear.weight.copy_(take(f"{names.classifier}.weight")[order])
        head.linear.bias.copy_(take(f"{names.classifier}.bias")[order])


def _load_decoder(
    model: ConvertedTransformer, original: Original, sizes: Decoder, layers: tuple[int, ...]
) -> None:
    take, (tokens, norm, readout) = _Taking(original), _ENDS[sizes.form]
    embed, head = model.embed, model.head
    assert isinstance(embed, Embedding) and isinstance(head, TokenHead)
    embed.tokens.weight.copy_(take(tokens))
    if embed.positions is not None:
        embed.positions.weight.copy_(take("wpe.weight")[: embed.window])
    take.into(head.norm, norm)
    if not sizes.tied:
        head.linear.weight.copy_(take(readout))
    assert isinstance(model.velocity, BlockVelocity)
    for block, layer in zip(model.velocity.blocks, layers, strict=True):
        assert isinstance(block, Block)
        match sizes.form:
            case "gpt2":
                _load_gpt2(block, take, f"h.{layer}.")
            case "llama":
                _load_llama(block, take, f"layers.{layer}.")
            case "neox":
                _load_neox(block, take, f"layers.{layer}.", sizes)


def _load_gpt2(block: Block, take: "_Taking", at: str) -> None:
    take.into(block.norm1, f"{at}ln_1")
    take.into(block.norm2, f"{at}ln_2")
    assert block.feedforward is not None
    for module, name in (
        (block.attention.qkv, "attn.c_attn"),
        (block.attention.out, "attn.c_proj"),
        (block.feedforward.up, "mlp.c_fc"),
        (block.feedforward.down, "mlp.c_proj"),
    ):
        assert isinstance(module, nn.Linear)
        module.weight.copy_(take(f"{at}{name}.weight").t())  # theirs is transposed
        module.bias.copy_(take(f"{at}{name}.bias"))


def _load_llama(block: Block, take: "_Taking", at: str) -> None:
    take.into(block.norm1, f"{at}input_layernorm")
    take.into(block.norm2, f"{at}post_attention_layernorm")
    assert block.feedforward is not None
    projections = [f"{at}self_attn.{name}_proj" for name in "qkv"]
    gates = [f"{at}mlp.{name}_proj" for name in ("gate", "up")]
    take.stacked(block.attention.qkv, projections)
    take.stacked(block.feedforward.up, gates)
    take.into(block.attention.out, f"{at}self_attn.o_proj")
    take.into(block.feedforward.down, f"{at}mlp.down_proj")


def _load_neox(block: Block, take: "_Taking", at: str, sizes: Decoder) -> None:
    take.into(block.norm1, f"{at}input_layernorm")
    take.into(block.norm2, f"{at}post_attention_layernorm")
    assert block.feedforward is not None
    qkv = block.attention.qkv
    for part, parameter in qkv.named_parameters():
        # Theirs has the query, key and value of the first head, then of the second, and so on.
        theirs = take(f"{at}attention.query_key_value.{part}")
        by_head = theirs.unflatten(0, (sizes.heads, 3, sizes.head_width))
        parameter.copy_(by_head.transpose(0, 1).reshape(theirs.shape))
    take.into(block.attention.out, f"{at}attention.dense")
    take.into(block.feedforward.up, f"{at}mlp.dense_h_to_4h")
    take.into(block.feedforward.down, f"{at}mlp.dense_4h_to_h")


class _Taking:
    """Takes weights by name; says which one a file lacks."""

    def __init__(self, original: Original) -> None:
        self._original = original

    def __call__(self, name: str) -> Tensor:
        found = self._original.weights.get(name)
        if found is None:
            raise PretrainedError(f"the weights of {self._original.name} have no {name}")
        return found

    def into(self, module: nn.Module, name: str) -> None:
        self.stacked(module, [name])

    def stacked(self, module: nn.Module, names: list[str]) -> None:
        """Weights and biases, if the module has them: of several, one below the other."""
        for part, parameter in module.named_parameters():
            parameter.copy_(torch.cat([self(f"{name}.{part}") for name in names]))


def check_layers(original: Original, layers: tuple[int, ...]) -> None:
    last = original.sizes.layers - 1
    if not all(0 <= layer <= last for layer in layers):
        raise PretrainedError(f"{original.name} has the layers 0 to {last}, not {list(layers)}")


def apart(blocks: int, layers: int) -> tuple[int, ...]:
    """So many of the layers, as far apart as can be: the first, the last and some between."""
    if not 1 <= blocks <= layers:
        raise PretrainedError(f"--blocks {blocks}: the model has {layers} layers")
    return spread(blocks, layers)


def spread(places: int, layers: int) -> tuple[int, ...]:
    """The layers at so many places from the first to the last; repeated where there are fewer."""
    return tuple(round(i * (layers - 1) / max(1, places - 1)) for i in range(places))


def special_ends(tokenizer: Tokenizer) -> tuple[int, int]:
    """How many special tokens a text has before and behind it."""
    mask = tokenizer.encode("a").special_tokens_mask
    return mask.index(0), mask[::-1].index(0)


def kind_of(tokenizer: Tokenizer) -> str:
    """What the bundle calls it: wordpiece, bpe or unigram."""
    kinds = {"WordPiece": "wordpiece", "BPE": "bpe", "Unigram": "unigram"}
    name = type(tokenizer.model).__name__
    if name not in kinds:
        raise PretrainedError(f"a {name} tokenizer is not supported; {', '.join(kinds)} are")
    return kinds[name]
