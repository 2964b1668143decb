"""A bundle used from Python or the command line, with the server's engine but without HTTP.

with load("zoo/topics") as model:
    model.classify(["Stocks fell on Monday."], steps=2)
"""

import queue
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from serve.api.submission import GenerateOptions, drawn_seed, positions_held, wish_in
from serve.budget import BudgetRequest, decide
from serve.bundle import Effort, PointsInput, TextInput
from serve.catalog import Catalog, Served, open_catalog
from serve.engine.classify import Classification
from serve.engine.engine import Engine
from serve.engine.job import ClassifiedEvent, Event, FailedEvent, GeneratedEvent, Job, LaneKey, Tags
from serve.engine.writing import Generation
from serve.inputs.rows import Input, InputRow, Kind, check_kinds, read_items, row_length
from serve.metrics import Metrics
from serve.runtime import Device
from serve.settings import Settings

ROWS_AT_ONCE = 64  # per job
MAX_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Label:
    """The label of one input."""

    label: str
    score: float
    scores: dict[str, float]  # of every label
    steps: int
    truncated: bool


class LocalModel:
    """One open, warm bundle. Close it, or use it in a `with` statement."""

    def __init__(self, folder: Path | str, threads: int | None = None) -> None:
        self._catalog: Catalog = open_catalog([Path(folder)], threads, Device())
        self._served: Served = next(iter(self._catalog))
        self._engine = Engine(self._catalog, Settings.read(environ={}).limits, Metrics())
        self._engine.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the engine and release the model."""
        self._engine.stop()
        self._served.model.close()

    @property
    def name(self) -> str:
        return self._served.name

    @property
    def steps(self) -> tuple[int, ...]:
        """The step counts of the model."""
        return self._served.manifest.steps

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels of a classifier."""
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
        decision = decide(BudgetRequest(steps=steps, effort=effort), self._served.manifest)
        kind = _kind_of(self._served)
        items = tuple(Input(kind, value, f"inputs[{i}]") for i, value in enumerate(inputs))
        check_kinds(items, self._served.manifest)
        rows = read_items(items, self._served.manifest, self._served.text, truncate)
        lengths = [row_length(one.row, self._served.manifest) for one in rows]
        order = sorted(range(len(rows)), key=lengths.__getitem__)
        lane = LaneKey(self._served.key, "classify", decision.steps)
        found: dict[int, Label] = {}
        for start in range(0, len(order), ROWS_AT_ONCE):
            at = order[start : start + ROWS_AT_ONCE]
            with self._event() as (deliver, take):
                work = Classification([rows[i].row for i in at], deliver)
                self._engine.submit(
                    Job(
                        lane=lane,
                        work=work,
                        lengths=tuple(lengths[i] for i in at),
                        may_pad=kind == "text",
                    )
                )
                event = take()
            assert isinstance(event, ClassifiedEvent)
            for i, labelled, taken_steps in zip(at, event.rows, event.steps, strict=True):
                assert not isinstance(labelled.found, Tags)  # checked above
                found[i] = self._label(labelled.found, taken_steps, rows[i])
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
        stop: Sequence[str] = (),
    ) -> str:
        """The continuation of a prompt, or the translation of a text."""
        self._check_task("generate", "translate")
        decision = decide(BudgetRequest(steps=steps, effort=effort), self._served.manifest)
        options = GenerateOptions(
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=drawn_seed() if seed is None else seed,
            stops=tuple(stop),
        )
        wish = wish_in(options, self._served, self._served.codec.encode_prompt(prompt))
        with self._event() as (deliver, take):
            job: Job = Job(
                lane=LaneKey(self._served.key, "generate", decision.steps),
                work=Generation(wish, self._served.codec, deliver),
                lengths=(len(wish.prompt),),
                positions=positions_held(wish, self._served),
                tokens_left=wish.max_tokens,
            )
            self._engine.submit(job)
            event = take()
        assert isinstance(event, GeneratedEvent)
        return event.text

    def _label(self, scores: Sequence[float], steps: int, row: InputRow) -> Label:
        best = max(range(len(scores)), key=scores.__getitem__)
        every = dict(zip(self.labels, scores, strict=True))
        return Label(self.labels[best], scores[best], every, steps, row.truncated)

    def _check_task(self, *tasks: str) -> None:
        task = self._served.manifest.task
        if task not in tasks:
            raise ValueError(f"{self.name} is for the task {task}, not {' or '.join(tasks)}")

    @contextmanager
    def _event(self) -> Iterator[tuple[Any, Any]]:
        """Where the engine delivers the result of a job, and how to wait for it."""
        box: queue.SimpleQueue[Event] = queue.SimpleQueue()

        def deliver(event: Event) -> None:
            if isinstance(event, ClassifiedEvent | GeneratedEvent | FailedEvent):
                box.put(event)

        def take() -> Event:
            event = box.get()
            if isinstance(event, FailedEvent):
                raise event.error
            return event

        yield deliver, take


def load(folder: Path | str, threads: int | None = None) -> LocalModel:
    """Open a bundle to use in this process."""
    return LocalModel(folder, threads)


def _kind_of(served: Served) -> Kind:
    match served.manifest.input:
        case TextInput():
            return "text"
        case PointsInput():
            return "points"
        case _:
            return "image"
