"""A bundle used from Python or the command line, with the server's engine but without HTTP.

with load("zoo/topics") as model:
    model.classify(["Stocks fell on Monday."], steps=2)
"""

import math
import queue
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np

from serve.api.body import BudgetFields, GenerateRequest, TokenLabel, validated
from serve.api.submission import (
    classification_job,
    drawn_seed,
    filled,
    generation_job,
    generation_request,
    token_labels,
)
from serve.budget import decide
from serve.bundle import Effort
from serve.catalog import Catalog, Served, open_catalog
from serve.engine.engine import Engine, StallLimits
from serve.engine.job import (
    ClassifiedEvent,
    Deliver,
    Event,
    FailedEvent,
    GeneratedEvent,
    Job,
    LaneKey,
    Limits,
    Scores,
    Tags,
    TokenEvent,
)
from serve.errors import InvalidField
from serve.inputs.rows import Input, InputRow, check_kinds, read_items, row_length
from serve.metrics import Metrics
from serve.runtime.protocol import CPU, FloatArray

ROWS_AT_ONCE = 64  # per job
MAX_TOKENS = 128
_HALF_A_PAIR = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Label:
    """The label of one input."""

    label: str
    score: float
    scores: dict[str, float]  # of every label
    steps: int
    truncated: bool


@dataclass(frozen=True, slots=True)
class Tagged:
    """The labels of one text."""

    tokens: list[TokenLabel]  # of each character or word, with its place
    text: str | None  # the text filled in, of a model that labels characters
    steps: int
    truncated: bool


class LocalModel:
    """One open, warm bundle. Close it, or use it in a `with` statement."""

    def __init__(self, folder: Path | str, threads: int | None = None) -> None:
        self._catalog: Catalog = open_catalog([Path(folder)], threads, CPU)
        self._served: Served = next(iter(self._catalog))
        # Nobody waits at a port: a call may take as long as a busy machine makes it.
        patience = StallLimits(stall_s=math.inf, stall_unknown_s=math.inf)
        self._engine = Engine(self._catalog, Limits(), Metrics(), patience=patience)
        self._engine.start()
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the engine and release the model."""
        self._closed = True
        self._engine.stop()
        self._served.model.close()

    @property
    def name(self) -> str:
        return self._served.name

    @property
    def task(self) -> str:
        return self._served.manifest.task

    @property
    def fills(self) -> bool:
        """Whether labels take the place of the characters of a text."""
        return self._served.manifest.fills

    @property
    def steps(self) -> tuple[int, ...]:
        """The step counts of the model."""
        return self._served.manifest.steps

    @property
    def labels(self) -> tuple[str, ...]:
        return self._served.manifest.labels or ()

    def classify(
        self,
        inputs: Sequence[Any],
        *,
        steps: int | None = None,
        effort: Effort | None = None,
        truncate: bool = True,
    ) -> list[Label]:
        """The label of each text, image or cloud of points, in order."""
        self._check_task("classify")
        labels = []
        for found, taken, row in self._found(inputs, steps, effort, truncate):
            assert not isinstance(found, Tags)
            labels.append(self._label(found, taken, row))
        return labels

    def tag(
        self,
        inputs: Sequence[str],
        *,
        steps: int | None = None,
        effort: Effort | None = None,
        truncate: bool = True,
    ) -> list[Tagged]:
        """A label for each character or word of each text, in order."""
        self._check_task("tag")
        manifest, tagged = self._served.manifest, []
        for found, taken, row in self._found(inputs, steps, effort, truncate):
            assert isinstance(found, Tags)
            text = filled(found, row, manifest) if manifest.fills else None
            tokens = token_labels(found, row, manifest)
            tagged.append(Tagged(tokens, text, taken, row.truncated))
        return tagged

    def embed(
        self,
        texts: Sequence[str],
        *,
        steps: int | None = None,
        effort: Effort | None = None,
        truncate: bool = True,
    ) -> FloatArray:
        """A vector of length 1 for each text (N, D), as `/v1/embeddings` gives them."""
        from serve.api.openai import embedder, unit_vectors

        self._check_open()
        embedder(self._catalog, self.name)
        found = self._found(texts, steps, effort, truncate, embeds=True)
        if not found:
            return np.zeros((0, self._served.manifest.embedding or 0), np.float32)
        return unit_vectors([one for one, _, _ in found])

    def _found(
        self,
        inputs: Sequence[Any],
        steps: int | None,
        effort: Effort | None,
        truncate: bool,
        embeds: bool = False,
    ) -> list[tuple[Scores | Tags, int, InputRow]]:
        """What the model finds in each input, the steps that it took, and the input as read."""
        manifest = self._served.manifest
        asked = validated(BudgetFields, {"steps": _plain(steps), "effort": effort})
        decision = decide(asked.budget_request, manifest)
        if isinstance(inputs, str):  # whose items are its characters
            raise InvalidField("inputs must be a list: for one text, [text]", param="inputs")
        plain = (one.tolist() if hasattr(one, "tolist") else one for one in inputs)  # arrays
        items = tuple(
            Input(manifest.input.kind, value, f"inputs[{i}]") for i, value in enumerate(plain)
        )
        for item in items:
            if manifest.input.kind == "text" and not isinstance(item.value, str):
                raise InvalidField(
                    f"{item.param} must be a text, not {type(item.value).__name__}",
                    param=item.param,
                )
            if isinstance(item.value, str) and _HALF_A_PAIR.search(item.value):
                raise InvalidField(
                    f"{item.param} has half a character (a lone surrogate): repair it",
                    param=item.param,
                )
        check_kinds(items, manifest)
        # One by one: the limit of pixels is that of a request to a server.
        rows = [read_items((one,), manifest, self._served.text, truncate)[0] for one in items]
        order = sorted(range(len(rows)), key=lambda i: row_length(rows[i].row, manifest))
        lane = LaneKey(self._served.key, "classify", decision.steps, embeds=embeds)
        found: dict[int, tuple[Scores | Tags, int, InputRow]] = {}
        for start in range(0, len(order), ROWS_AT_ONCE):
            at = order[start : start + ROWS_AT_ONCE]
            event = self._run(partial(classification_job, [rows[i] for i in at], manifest, lane))
            assert isinstance(event, ClassifiedEvent)
            for i, labelled, taken_steps in zip(at, event.rows, event.steps, strict=True):
                found[i] = labelled.found, taken_steps, rows[i]
        return [found[i] for i in range(len(rows))]

    def generate(
        self,
        prompt: str,
        *,
        max_tokens: int = MAX_TOKENS,
        steps: int | None = None,
        effort: Effort | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float = 1.0,
        seed: int | None = None,
        stop: str | Sequence[str] | None = None,
    ) -> str:
        """The continuation of a prompt, or the translation of a text."""
        self._check_task("generate", "translate")
        max_tokens = _plain(max_tokens)
        asked = validated(
            GenerateRequest,
            {
                "prompt": prompt,
                "max_tokens": max_tokens,
                "steps": _plain(steps),
                "effort": effort,
                "temperature": _plain(temperature),
                "top_k": _plain(top_k),
                "top_p": _plain(top_p),
                "seed": drawn_seed() if seed is None else _plain(seed),
                "stop": stop if stop is None or isinstance(stop, str) else list(stop),
            },
        )
        decision = decide(asked.budget_request, self._served.manifest)
        tokens = self._served.codec.encode_prompt(prompt)
        request = generation_request(
            asked, self._served, tokens, max_tokens=max_tokens, seed=asked.seed or 0
        )
        event = self._run(partial(generation_job, request, self._served, decision.steps))
        assert isinstance(event, GeneratedEvent)
        return event.text

    def _label(self, scores: Sequence[float], steps: int, row: InputRow) -> Label:
        best = max(range(len(scores)), key=scores.__getitem__)
        every = dict(zip(self.labels, scores, strict=True))
        return Label(self.labels[best], scores[best], every, steps, row.truncated)

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError(f"{self.name} is closed: load it again")

    def _check_task(self, *tasks: str) -> None:
        self._check_open()
        if self.task not in tasks:
            raise ValueError(f"{self.name} is for the task {self.task}, not {' or '.join(tasks)}")

    def _run(self, job: Callable[[Deliver], Job]) -> Event:
        """The result of a job; raises the error if it fails."""
        box: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._engine.submit(job(box.put))
        while isinstance(event := box.get(), TokenEvent):
            pass
        if isinstance(event, FailedEvent):
            raise event.error
        return event


def _plain(number: Any) -> Any:
    """Python's number for one of NumPy."""
    return number.item() if isinstance(number, np.generic) else number
