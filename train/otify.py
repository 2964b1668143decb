"""Models of `transformers` as OT-Transformers: their stack of blocks as the velocity of an ODE.

    model = otify(GPT2LMHeadModel(config))
    logits = model(tokens, steps=4).logits

Supported: GPT2Model, GPT2LMHeadModel, GPT2ForSequenceClassification, BertModel,
BertForSequenceClassification, ViTModel, ViTForImageClassification. The weights that the model has
are kept: with depth="discrete" the answers are those of the original, and a model without a head of
its own gives its last hidden state as `logits`. The module given is taken over, not copied.

Not supported: cross-attention, BERT as a decoder, padding on the left, segments (every token is of
the first), and poolers that no class reads (BertModel, ViTModel).
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from stepdial import install_command
from train.blocks import Attention, Block, BlockVelocity
from train.model import Embedding, OTTransformer
from train.ode import Depth, Embedded

FinalNorm = Literal["inside", "outside"]
Parts = tuple[nn.Module, nn.Module, nn.Module]  # embed, velocity, head


def otify(
    module: nn.Module, T: float = 1.0, depth: Depth = "ode", final_norm: FinalNorm = "outside"
) -> "OtifiedTransformer":
    """An OT-Transformer of a transformers model, its last norm in the velocity or in the head."""
    if not T > 0 or depth not in ("ode", "discrete") or final_norm not in ("inside", "outside"):
        raise ValueError(
            f"otify got T={T}, depth={depth!r}, final_norm={final_norm!r}: T must be above 0, "
            'depth "ode" or "discrete", final_norm "inside" or "outside"'
        )
    wrap = _wrappers().get(type(module).__name__)
    if wrap is None or not isinstance(module, _pretrained_model()):
        raise TypeError(
            f"otify cannot wrap {type(module).__name__}; it takes a transformers model of class "
            f"{', '.join(_wrappers())}"
        )
    return _wrapped(module, wrap, T, depth, final_norm)


def _wrapped(
    module: Any, wrap: Callable[[Any, bool], Parts], T: float, depth: Depth, final_norm: FinalNorm
) -> "OtifiedTransformer":
    origin = {
        "class": type(module).__name__,
        "config": module.config.to_dict(),
        "settings": {"T": T, "depth": depth, "final_norm": final_norm},
    }
    module.set_attn_implementation("sdpa")  # the one that takes masks of booleans
    model = OtifiedTransformer(*wrap(module, final_norm == "inside"), T, depth)
    model.origin = origin
    return model


class OtifiedTransformer(OTTransformer):
    """One that remembers what it was made of, so that a run can make it again."""

    origin: dict[str, Any]

    @property
    def blocks(self) -> int:
        return self._size("num_hidden_layers", "n_layer")

    @property
    def heads(self) -> int:
        return self._size("num_attention_heads", "n_head")

    def _size(self, *names: str) -> int:
        config = self.origin["config"]
        return int(next(config[name] for name in names if name in config))


def otified_from(origin: dict[str, Any]) -> OtifiedTransformer:
    """The model of a run again, with fresh weights."""
    _pretrained_model()
    import transformers

    kind = getattr(transformers, origin["class"])
    config = kind.config_class.from_dict(origin["config"])
    return otify(kind(config), **origin["settings"])


def _pretrained_model() -> type[nn.Module]:
    try:
        from transformers import PreTrainedModel
    except ImportError:
        raise ImportError(
            "otify wraps models of transformers, which is not installed: "
            f"{install_command('otify')}"
        ) from None
    return PreTrainedModel


def _wrappers() -> dict[str, Callable[[Any, bool], Parts]]:
    return {
        "GPT2Model": lambda model, inside: _gpt2(model, None, inside),
        "GPT2LMHeadModel": lambda model, inside: _gpt2(model.transformer, model.lm_head, inside),
        "GPT2ForSequenceClassification": lambda model, inside: _gpt2_classifier(model, inside),
        "BertModel": lambda model, inside: _bert(model, nn.Identity(), inside),
        "BertForSequenceClassification": lambda model, inside: _bert(
            model.bert, nn.Sequential(model.bert.pooler, model.dropout, model.classifier), inside
        ),
        "ViTModel": lambda model, inside: _vit(model, None, inside),
        "ViTForImageClassification": lambda model, inside: _vit(
            model.vit, model.classifier, inside
        ),
    }


def _gpt2(model: Any, readout: nn.Linear | None, inside: bool) -> Parts:
    """GPT-2 as modules of ours around its own: what is exported with key and value caches."""
    config = model.config
    if config.add_cross_attention:
        raise ValueError("otify does not support cross-attention (config.add_cross_attention)")
    if not config.scale_attn_weights or config.scale_attn_by_inverse_layer_idx:
        raise ValueError(
            "otify scales attention by the width of a head: set config.scale_attn_weights to true "
            "and config.scale_attn_by_inverse_layer_idx to false"
        )
    width = config.n_embd
    velocity = GPT2Velocity([_gpt2_block(block) for block in model.h], width, final_norm=False)
    embed = Embedding(config.vocab_size, config.n_positions, width, None, config.embd_pdrop)
    assert embed.positions is not None
    embed.tokens, embed.positions.weight = model.wte, model.wpe.weight
    head = _placed(velocity, model.ln_f, inside, readout or nn.Identity())
    return embed, velocity, head


def _gpt2_block(block: Any) -> Block:
    attention = block.attn
    width, heads = attention.embed_dim, attention.num_heads
    made = Block(width, heads, 0, causal=True, dropout=attention.resid_dropout.p)
    made.norm1, made.norm2 = block.ln_1, block.ln_2
    made.attention = Attention(width, heads, causal=True, dropout=attention.attn_dropout.p)
    out = made.attention.out
    assert isinstance(out, nn.Linear)
    for ours, theirs in ((made.attention.qkv, attention.c_attn), (out, attention.c_proj)):
        with torch.no_grad():  # theirs is transposed
            ours.weight.copy_(theirs.weight.t())
            ours.bias.copy_(theirs.bias)
    made.feedforward = block.mlp
    block.mlp.dropout = nn.Identity()  # the block of ours drops out
    return made


class GPT2Velocity(BlockVelocity):
    """Causal blocks: what stands at the right cannot be seen, so a mask of padding says nothing."""

    def forward(self, x: Tensor, *context: Tensor) -> Tensor:
        return super().forward(x)


def _gpt2_classifier(model: Any, inside: bool) -> Parts:
    embed, velocity, head = _gpt2(model.transformer, model.score, inside)
    assert isinstance(embed, Embedding) and isinstance(head, ReadOut)
    embed.pad_id = model.config.pad_token_id
    if embed.pad_id is None:
        raise ValueError("a GPT-2 that classifies needs config.pad_token_id: where do texts end?")
    return embed, velocity, LastTokenHead(head.norm, model.score)


class LastTokenHead(nn.Module):
    """Class logits from the last token that is no padding."""

    def __init__(self, norm: nn.Module, linear: nn.Linear) -> None:
        super().__init__()
        self.norm, self.linear = norm, linear

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        at = torch.arange(x.shape[1], device=x.device) * mask  # (B, N)
        last = at.amax(1)[:, None, None].expand(-1, 1, x.shape[2])  # (B, 1, D)
        logits: Tensor = self.linear(self.norm(x.gather(1, last).squeeze(1)))  # (B, classes)
        return logits


def _bert(model: Any, head: nn.Module, inside: bool) -> Parts:
    config = model.config
    if config.is_decoder or config.add_cross_attention:
        raise ValueError(
            "otify takes BERT as an encoder: set config.is_decoder and add_cross_attention to false"
        )
    if inside:
        raise ValueError('BERT has no last norm of its own: leave final_norm at "outside"')
    embed = BertTokens(model.embeddings, config.pad_token_id)
    return embed, LayerVelocity(model.encoder.layer), ReadOut(nn.Identity(), head)


class BertTokens(nn.Module):
    """BERT's embedding; the mask is what is not padding, or the one given."""

    def __init__(self, embeddings: nn.Module, pad_id: int | None) -> None:
        super().__init__()
        self.embeddings, self.pad_id = embeddings, pad_id

    def forward(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Embedded:
        x = self.embeddings(input_ids=tokens)  # (B, N, D)
        if attention_mask is not None:
            present = attention_mask.bool()  # (B, N)
        elif self.pad_id is not None:
            present = tokens.ne(self.pad_id)
        else:
            return Embedded(x)
        return Embedded(x, (present,), present)


class LayerVelocity(nn.Module):
    """The model's own layers one after another, and its last norm if it belongs here."""

    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers = layers
        self.norm: nn.Module = nn.Identity()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        allowed = None if mask is None else mask[:, None, None, :]  # (B, 1, 1, N)
        for layer in self.layers:
            x = layer(x, allowed)
        out: Tensor = self.norm(x)
        return out


class ReadOut(nn.Module):
    """The last norm if it belongs here, and what the model reads with; no mask is needed."""

    def __init__(self, norm: nn.Module, readout: nn.Module) -> None:
        super().__init__()
        self.norm, self.readout = norm, readout

    def forward(self, x: Tensor, *context: Tensor) -> Tensor:
        out: Tensor = self.readout(self.norm(x))  # (B, classes), or (B, N, D) without a head
        return out


def _placed(velocity: nn.Module, norm: nn.Module, inside: bool, readout: nn.Module) -> ReadOut:
    """The head of a model whose last norm may belong to the velocity instead."""
    if inside:
        velocity.norm = norm
    return ReadOut(nn.Identity() if inside else norm, readout)


def _vit(model: Any, classifier: nn.Module | None, inside: bool) -> Parts:
    velocity = LayerVelocity(model.layers)
    readout = nn.Identity() if classifier is None else FirstToken(classifier)
    return model.embeddings, velocity, _placed(velocity, model.layernorm, inside, readout)


class FirstToken(nn.Module):
    """Reads the state of the first token."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.linear(x[:, 0])  # (B, classes)
        return logits
