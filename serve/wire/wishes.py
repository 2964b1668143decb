"""From a generate request to what is to be written, for the task of the model that answers it.

Knows requests and manifests; deliberately neither the engine nor how tokens are chosen.
"""

from serve.catalog import Served
from serve.engine.generation import Wish
from serve.engine.sampling import Sampling
from serve.errors import InvalidField
from serve.wire.schemas import GenerateRequest


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


def wish_of(asked: GenerateRequest, served: Served, prompt: list[int], seed: int) -> Wish:
    """What to write; the drawn seed stands in for a missing one."""
    manifest = served.manifest
    limit = manifest.target_max_tokens
    temperature = asked.temperature
    if temperature is None:
        temperature = 0.0 if manifest.task == "translate" else 1.0
    return Wish(
        prompt=prompt,
        max_tokens=asked.max_tokens if limit is None else min(asked.max_tokens, limit),
        window=manifest.text_input.max_tokens if limit is None else limit,
        sampling=Sampling(
            temperature=temperature,
            top_k=asked.top_k,
            top_p=asked.top_p,
            seed=seed if asked.seed is None else asked.seed,
        ),
        stops=asked.stops,
        logprobs=asked.logprobs,
        stream=asked.stream,
        num_beams=asked.num_beams or 1,
    )


def positions_held(wish: Wish, served: Served) -> int:
    """The positions that a generation holds in memory at most; of a translation, the source."""
    if served.manifest.task == "translate":
        return len(wish.prompt)
    return min(len(wish.prompt) + wish.max_tokens, wish.window)
