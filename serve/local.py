"""A bundle used from Python or the command line, with the server's engine but without HTTP.

    with load("zoo/topics") as model:
        model.classify(["Stocks fell on Monday."], steps=2)

Also the commands `stepdial predict` and `stepdial sample`.
"""

import argparse
import csv
import json
import os
import queue
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, cast

from serve.api.submission import GenerateOptions, drawn_seed, positions_held, wish_in
from serve.budget import BudgetRequest, decide
from serve.bundle import EFFORTS, BundleError, Effort, PointsInput, TextInput
from serve.catalog import Catalog, Served, open_catalog
from serve.engine.engine import Engine
from serve.engine.job import ClassifiedEvent, Event, FailedEvent, GeneratedEvent, Job, LaneKey, Tags
from serve.engine.work import Classification, Generation, Work
from serve.errors import ServeError
from serve.inputs.rows import InputRow, check_kinds, read_items, row_length
from serve.inputs.values import Input, Kind
from serve.metrics import Metrics
from serve.runtime import Place
from serve.settings import Settings

ROWS_AT_ONCE = 64  # per job
READ_AT_ONCE = 4096  # rows of a table that are sorted by length together
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
        self._catalog: Catalog = open_catalog([Path(folder)], threads, Place())
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
            job: Job[Work] = Job(
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


def main(argv: list[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    try:
        status = int(arguments.run(arguments))
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (BundleError, ServeError, ValueError, OSError) as error:
        print(f"stepdial {arguments.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="stepdial", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    predict = commands.add_parser(
        "predict",
        help="label the rows of a table",
        description="Label the rows of a table with a bundle, without a server.",
    )
    predict.set_defaults(run=_predict)
    predict.add_argument("bundle", type=Path, metavar="BUNDLE", help="bundle folder")
    predict.add_argument(
        "--input",
        type=Path,
        required=True,
        metavar="FILE",
        help="table to read: .csv, .tsv or .jsonl",
    )
    predict.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="where to write the labelled table (default: standard output)",
    )
    predict.add_argument(
        "--text",
        action="append",
        metavar="COLUMN",
        help="column with the text; repeat it for several (default: the columns used in training)",
    )
    sample = commands.add_parser(
        "sample",
        help="continue a prompt",
        description="Continue a prompt, or translate a text, with a bundle and without a server.",
    )
    sample.set_defaults(run=_sample)
    sample.add_argument("bundle", type=Path, metavar="BUNDLE", help="bundle folder")
    sample.add_argument(
        "--prompt", required=True, metavar="TEXT", help="text to continue or translate"
    )
    sample.add_argument(
        "--max-tokens",
        type=int,
        default=MAX_TOKENS,
        metavar="N",
        help="most tokens to generate (default: %(default)s)",
    )
    sample.add_argument(
        "--temperature",
        type=float,
        metavar="T",
        help="0 always takes the most likely token; "
        "higher is more varied (default: 1, or 0 "
        "to translate)",
    )
    sample.add_argument(
        "--top-k", type=int, metavar="K", help="sample from the K most likely tokens"
    )
    sample.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="sample from the most likely tokens that together have probability P",
    )
    sample.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same text")
    for each in (predict, sample):
        budget = each.add_mutually_exclusive_group()
        budget.add_argument(
            "--steps", type=int, metavar="N", help="step count (default: the bundle's default)"
        )
        budget.add_argument("--effort", choices=EFFORTS, help="step count by name")
        each.add_argument("--threads", type=int, help="threads per model call (default: all cores)")
    return parser


def _predict(arguments: argparse.Namespace) -> int:
    separator = _separator(arguments.input)
    if arguments.output is not None and _separator(arguments.output) != separator:
        raise ValueError(
            f"--output {arguments.output}: end it like --input, {arguments.input.suffix}"
        )
    with (
        load(arguments.bundle, arguments.threads) as model,
        arguments.input.open(encoding="utf-8-sig", newline="") as source,
    ):
        rows = _rows(source, separator, arguments.input)
        first = next(rows, None)
        if first is None:
            raise ValueError(f"{arguments.input} has no rows")
        columns = arguments.text or _trained_on(model)
        missing = [column for column in columns if column not in first]
        if missing:
            raise ValueError(
                f"{arguments.input} has no column {', '.join(missing)}; it has "
                f"{', '.join(first)}: name those of the texts with --text"
            )
        target = sys.stdout if arguments.output is None else _open_output(arguments.output)
        try:
            write = _TableWriter(target, separator)
            waiting = [first]
            for row in rows:
                waiting.append(row)
                if len(waiting) == READ_AT_ONCE:
                    write.all(_labelled(model, waiting, columns, arguments))
                    waiting = []
            if waiting:
                write.all(_labelled(model, waiting, columns, arguments))
        finally:
            if target is not sys.stdout:
                target.close()
    if arguments.output is not None:
        print(f"labelled: {write.count:,} rows, {arguments.output}")
    return 0


def _labelled(
    model: LocalModel, rows: list[dict[str, Any]], columns: list[str], arguments: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    texts = [" ".join(str(row[column]) for column in columns) for row in rows]
    labels = model.classify(texts, steps=arguments.steps, effort=arguments.effort)
    for row, one in zip(rows, labels, strict=True):
        found = {"label": one.label, "score": round(one.score, 6), "steps": one.steps}
        yield row | {f"predicted_{key}": value for key, value in found.items()}


def _sample(arguments: argparse.Namespace) -> int:
    with load(arguments.bundle, arguments.threads) as model:
        print(
            model.generate(
                arguments.prompt,
                max_tokens=arguments.max_tokens,
                steps=arguments.steps,
                effort=cast(Effort | None, arguments.effort),
                temperature=arguments.temperature,
                top_k=arguments.top_k,
                top_p=arguments.top_p,
                seed=arguments.seed,
            )
        )
    return 0


def _trained_on(model: LocalModel) -> list[str]:
    """The text columns used in training, as the bundle records them."""
    recipe = model._served.manifest.provenance.get("recipe")
    try:
        return [str(column) for column in cast(Any, recipe)["data"]["text"]]
    except (TypeError, KeyError):
        return ["text"]


def _separator(path: Path) -> str:
    """The cell separator; "" for JSON lines."""
    separators = {".csv": ",", ".tsv": "\t", ".jsonl": ""}
    if path.suffix.lower() not in separators:
        raise ValueError(f"{path}: expected .csv, .tsv or .jsonl")
    return separators[path.suffix.lower()]


def _rows(source: Any, separator: str, path: Path) -> Iterator[dict[str, Any]]:
    if separator:
        csv.field_size_limit(1 << 24)
        reader = csv.DictReader(source, delimiter=separator, strict=True)
        for number, row in enumerate(reader, 1):
            if None in row or None in row.values():
                raise ValueError(f"{path}, row {number}: not as many cells as the header has")
            yield row
        return
    for number, line in enumerate(source, 1):
        if line.strip():
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError(f"{path}, line {number}: expected one object a line")
            yield row


def _open_output(path: Path) -> Any:
    return path.open("w", encoding="utf-8", newline="")


class _TableWriter:
    """Writes rows in the format of the table that was read."""

    def __init__(self, target: Any, separator: str) -> None:
        self._target, self._separator = target, separator
        self._csv: csv.DictWriter[str] | None = None
        self.count = 0

    def all(self, rows: Iterator[dict[str, Any]]) -> None:
        for row in rows:
            self.count += 1
            if not self._separator:
                self._target.write(json.dumps(row, ensure_ascii=False) + "\n")
                continue
            if self._csv is None:
                self._csv = csv.DictWriter(self._target, list(row), delimiter=self._separator)
                self._csv.writeheader()
            self._csv.writerow(row)
