"""From a generate request to what is to be written, for the task of the model that answers it.

Knows requests and manifests; deliberately neither the engine nor how tokens are chosen.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from serve.catalog import Served
from serve.engine.sampling import Sampling
from serve.engine.work import Wish
from serve.errors import InvalidField
from serve.wire.schemas import GenerateRequest

# A drawn seed fits a JavaScript number, so that every client can send it back as it came.
_DRAWN_BITS = 32


def drawn_seed() -> int:
    """A seed for a request that has none."""
    return secrets.randbits(_DRAWN_BITS)


def check_beams(asked: GenerateRequest, served: Served) -> None:
    """InvalidField where beam search is asked for and there is none, or it does not go together."""
    if asked.num_beams is None:
        return
    if served.manifest.task != "translate":
        raise InvalidField(
            f"num_beams is for translation, but {served.name} continues prompts: leave it out",
            param="num_beams",
        )
    if asked.num_beams == 1:
        return
    if asked.temperature:
        raise InvalidField(
            "temperature must be 0 or left out with num_beams: beam search is not random",
            param="temperature",
        )
    if asked.logprobs is not None:
        raise InvalidField(
            "logprobs are not known of beam search: leave them out, or num_beams", param="logprobs"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Manner:
    """How to write, whatever protocol asked."""

    max_tokens: int
    temperature: float | None = None  # None: 1 to continue a prompt, 0 to translate
    top_k: int | None = None
    top_p: float = 1.0
    seed: int
    stops: Sequence[str] = ()
    logprobs: int | None = None
    stream: bool = False
    num_beams: int = 1


def wish_of(
    asked: GenerateRequest, served: Served, prompt: list[int], seed: int, max_tokens: int
) -> Wish:
    """What to write; the drawn seed stands in for a missing one."""
    manner = Manner(
        max_tokens=max_tokens,
        temperature=asked.temperature,
        top_k=asked.top_k,
        top_p=1.0 if asked.top_p is None else asked.top_p,
        seed=seed if asked.seed is None else asked.seed,
        stops=asked.stops,
        logprobs=asked.logprobs,
        stream=bool(asked.stream),
        num_beams=asked.num_beams or 1,
    )
    return wish_in(manner, served, prompt)


def wish_in(manner: Manner, served: Served, prompt: list[int]) -> Wish:
    """What to write in this manner, for the task of the model."""
    manifest = served.manifest
    limit = manifest.target_max_tokens
    temperature = manner.temperature
    if temperature is None:
        temperature = 0.0 if manifest.task == "translate" else 1.0
    return Wish(
        prompt=prompt,
        max_tokens=manner.max_tokens if limit is None else min(manner.max_tokens, limit),
        window=manifest.text_input.max_tokens if limit is None else limit,
        sampling=Sampling(
            temperature=temperature, top_k=manner.top_k, top_p=manner.top_p, seed=manner.seed
        ),
        stops=manner.stops,
        logprobs=manner.logprobs,
        stream=manner.stream,
        num_beams=manner.num_beams,
    )


def positions_held(wish: Wish, served: Served) -> int:
    """The positions that a generation holds in memory at most; of a translation, the source."""
    if served.manifest.task == "translate":
        return len(wish.prompt)
    return min(len(wish.prompt) + wish.max_tokens, wish.window)
