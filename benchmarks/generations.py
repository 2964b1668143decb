"""Generations for an engine in this process, without HTTP."""

from collections.abc import Callable, Sequence

from serve.catalog import Served
from serve.engine.job import Event, Job, LaneKey
from serve.engine.writing import Generation, GenerationRequest, Sampling


def generation(
    served: Served,
    steps: int,
    prompt: Sequence[int],
    tokens: int,
    sampling: Sampling,
    deliver: Callable[[Event], None],
    stream: bool = False,
) -> Job:
    """A job that writes so many tokens behind the prompt, or as many as the window holds."""
    window = served.manifest.text_input.max_tokens
    request = GenerationRequest(list(prompt), tokens, window, sampling, stream=stream)
    return Job(
        LaneKey(served.name, "generate", steps),
        Generation(request, served.codec, deliver),
        (len(prompt),),
        min(len(prompt) + tokens, window),
    )
