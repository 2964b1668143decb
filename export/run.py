"""From a run to a bundle: trace, stitch, verify, calibrate, seal. A failed check ends it."""

import dataclasses
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

from export.attention import CACHED_HEADS
from export.draft import TOKENIZER, draft_manifest, model_card
from export.early import REFUSED, Jumps, certify
from export.graph import Ladder, stitch, write_graphs
from export.half import OWN_WEIGHTS, half_of
from export.inspect import check_plain, flat_in_words, plain_in_words
from export.int8 import NOTHING_LARGE, NOTHING_UNSEEN, Layers, unseen_rows
from export.int8_cache import CachePrecision, Scales, measured_scales
from export.latency import calibrate_latency
from export.pieces import load_exporter
from export.quality import (
    Measured,
    choose_default,
    compare,
    held_out_batches,
    measure_rung,
    named_rungs,
    on_the_way,
    one_way,
    range_of,
)
from export.trace import Traced, trace
from export.verify import Answers, samples_of, torch_threads, verify_mix, verify_rung
from serve.bundle import (
    LABELLING,
    MAX_RUNGS,
    AgainstFp32,
    Bundle,
    Cache,
    Calibration,
    Manifest,
    Precision,
    Range,
    Rung,
    Task,
    Verified,
    open_staging,
    read_bundle,
    seal_bundle,
    steps_in_words,
)
from serve.bundle.folder import file_entry, link_or_copy
from serve.runtime import OpenedModel, open_model
from serve.runtime.classifier import present_positions
from serve.runtime.protocol import RowArray
from serve.runtime.session import usable_cores
from train.checkpoint import load_run
from train.corrections import CorrectedVelocity, check_steps
from train.data import check_same_meaning, open_dataset
from train.data.batch import Batch, Dataset
from train.loop import warn_of_unfinished
from train.model import Stepped
from train.ode import method_named
from train.pretrained import ConvertedTransformer
from train.recipe import Recipe, data_at
from train.schedule import ladder_of

# A trial bundle in a temporary folder, opened as a server would: every rung verified and measured.


AT_ONCE = 2  # rungs: each holds the weights of a graph of its own
CALIBRATION_ROWS = 64
CALIBRATION_SOURCE = "rows of the training split that the model was not trained on"


@dataclasses.dataclass(frozen=True, slots=True)
class Origin:
    """What is exported: a model, and the recipe and data that it was trained with."""

    model: Stepped
    recipe: Recipe
    dataset: Dataset
    iteration: int = 0
    same_data: bool = True  # to the last row, so that what it holds out was not learnt


@dataclasses.dataclass(frozen=True, slots=True)
class Tried:
    """What the trial found."""

    rungs: tuple[Rung, ...]
    default_steps: int
    range: Range | None
    calibration: Calibration | None


@dataclasses.dataclass(frozen=True, slots=True)
class Trial:
    """What the staged graphs are tried with."""

    draft: Manifest
    origin: Origin
    answers: Answers
    samples: int | None
    say: Callable[[str], None]
    _given_up: Event = dataclasses.field(default_factory=Event, init=False)

    def opened(self, staging: Path, target: Path) -> AbstractContextManager[OpenedModel]:
        """The staged graphs as a bundle of their own, gone afterwards."""
        return sealed_trial(self.draft, staging, target, self._threads)

    @contextmanager
    def opened_fp32(
        self, staging: Path, target: Path, traced: Traced, ladder: Ladder
    ) -> Iterator[OpenedModel]:
        """The same model in float32, to compare with."""
        rungs = tuple(dataclasses.replace(rung, against_fp32=None) for rung in self.draft.rungs)
        draft = dataclasses.replace(self.draft, precision="fp32", cache=traced.cache, rungs=rungs)
        with open_staging(target) as folder:
            spec = draft.tokenizer
            for file in () if spec is None else (spec.file, spec.chat_template):
                if file is not None:
                    link_or_copy(staging / file, folder / file)
            write_graphs(folder, traced, ladder, "fp32")
            with sealed_trial(draft, folder, target, self._threads) as model:
                yield model

    def run(self, opened: OpenedModel, reference: OpenedModel | None = None) -> Tried:
        """Every rung, verified and measured; the reference too, if there is one."""
        for one in (opened, reference):
            if one is not None:
                _open_shared(one)
        with torch_threads(self._threads), ThreadPoolExecutor(AT_ONCE) as pool:
            try:
                mixing = pool.submit(self._mix, opened)
                tried = self._tried(pool, opened, reference)
                mixing.result()
            except BaseException:
                self._given_up.set()  # other rungs, and Ctrl-C, wait for one batch only
                raise
            finally:
                pool.shutdown(cancel_futures=True)
        measured = {rung.steps: found for rung, found in tried}
        return Tried(
            named_rungs(tuple(rung for rung, _ in tried), measured),
            choose_default(measured),
            range_of(measured),
            self._certified(opened),
        )

    def _tried(
        self, pool: ThreadPoolExecutor, opened: OpenedModel, reference: OpenedModel | None
    ) -> list[tuple[Rung, Measured]]:
        """Every rung, verified before it is measured."""
        rungs, measuring = self.draft.rungs, "measuring quality on held-out rows"
        if not one_way(self.draft):
            self.say(f"{measuring}; a line for each step count")
            attempt = partial(self._attempt, opened, reference)
            return list(pool.map(attempt, reversed(rungs)))[::-1]
        verified = list(pool.map(partial(self._verified, opened, reference), rungs))
        self.say(f"{measuring}, every step count in one pass")
        found = on_the_way(
            open_model(opened.bundle),
            self.draft.steps,
            self._batches(),
            None if reference is None else open_model(reference.bundle),
        )
        return [
            self._with_quality(
                rung, checked, one.measured(), None if reference is None else one.against()
            )
            for rung, checked, one in zip(rungs, verified, found.values(), strict=True)
        ]

    def _attempt(
        self, opened: OpenedModel, reference: OpenedModel | None, rung: Rung
    ) -> tuple[Rung, Measured]:
        verified = self._verified(opened, reference, rung)
        against = None
        if reference is None:
            measured = measure_rung(opened, rung.steps, self._batches())
        else:
            measured, against = compare(opened, reference, rung.steps, self._batches())
        return self._with_quality(rung, verified, measured, against)

    def _verified(self, opened: OpenedModel, reference: OpenedModel | None, rung: Rung) -> Verified:
        expected = self.answers.at(rung.steps)
        if reference is not None:
            verify_rung(reference, rung, expected)
        return verify_rung(opened, rung, expected)

    def _with_quality(
        self, rung: Rung, verified: Verified, measured: Measured, against: AgainstFp32 | None
    ) -> tuple[Rung, Measured]:
        tried = dataclasses.replace(
            rung, verified=verified, quality=measured.quality, against_fp32=against
        )
        _report(tried, verified, self.say)
        return tried, measured

    def _mix(self, opened: OpenedModel) -> None:
        """With sessions of its own, since rungs are tried meanwhile."""
        if self.draft.task == "generate":
            tokens = max((edge[0] for edge in self.answers.samples), key=len).numpy()
            verify_mix(open_model(opened.bundle, self._threads), tokens)

    @property
    def _threads(self) -> int:
        return threads_each(len(self.draft.rungs))

    def _batches(self) -> Iterator[Batch]:
        for batch in held_out_batches(self.origin.dataset, self.draft, self.samples):
            if self._given_up.is_set():
                raise CancelledError
            yield batch

    def _certified(self, opened: OpenedModel) -> Calibration | None:
        draft = self.draft
        if not draft.labelled or draft.step is None:
            return None
        if draft.method != "euler" or draft.full_steps == 1:
            return None
        if self.samples is not None:
            self.say(
                f"{REFUSED}: to measure it takes all held-out rows; leave out --samples and "
                "--no-calibrate"
            )
            return None
        if not self.origin.same_data:
            self.say(
                f"{REFUSED}: rows of this data may have been learnt; export with the data of the "
                "training"
            )
            return None
        self.say("measuring how early answers can be given (for max_disagreement)")
        classifier = open_model(opened.bundle).step_classifier(self.draft.full_steps)

        def jumps() -> Iterator[Jumps]:
            for batch in self.origin.dataset.validation(CALIBRATION_ROWS):
                rows = batch.inputs[0].contiguous().numpy()
                yield Jumps(classifier.jumps(rows), present_positions(rows, draft))

        return certify(jumps(), CALIBRATION_SOURCE, self.say, draft.step.endings)


def threads_each(rungs: int) -> int:
    """Of each of the rungs that are tried at once."""
    return max(1, usable_cores() // min(AT_ONCE, rungs))


@contextmanager
def sealed_trial(
    draft: Manifest, staging: Path, target: Path, threads: int | None = None
) -> Iterator[OpenedModel]:
    """The staged graphs, sealed and opened, beside the target; gone afterwards."""
    with open_staging(target.with_name(f"{target.name}.trial")) as trial:
        for path in staging.iterdir():
            link_or_copy(path, trial / path.name)
        folder = trial.with_name(f"{trial.name}-sealed")
        try:
            yield open_model(seal_bundle(trial, draft, folder), threads)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _open_shared(opened: OpenedModel) -> None:
    """What all rungs run with, before several of them ask for it at once."""
    manifest = opened.bundle.manifest
    if manifest.task == "generate":
        opened.decoder(manifest.full_steps)
    elif manifest.task == "translate":
        opened.translator(manifest.full_steps)
    elif manifest.step is not None:
        opened.step_classifier(manifest.full_steps)
    else:
        opened.classifier(manifest.full_steps)


def _report(rung: Rung, verified: Verified, say: Callable[[str], None]) -> None:
    q, against = rung.quality, rung.against_fp32
    beside = (
        "" if against is None else f", {100 * against.top1_agreement:.2f} % answers as in float32"
    )
    whole = "" if q.exact is None else f", {100 * q.exact:.2f} % of rows right as a whole"
    say(
        f"{steps_in_words(rung.steps):>9}: verified within {verified.max_abs_error:.1e} "
        f"(tolerance {verified.tolerance:.1e}), {q.metric} {q.value:.4f} "
        f"[{q.low:.4f}, {q.high:.4f}] on {q.samples}{whole}{beside}"
    )


CARD = "README.md"
_CACHES: dict[CachePrecision, Cache] = {"fp32": "kv", "fp16": "kv_fp16", "int8": "kv_int8"}
CHAT_TEMPLATE = "chat_template.jinja"
Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True, slots=True)
class ExportRequest:
    """What a bundle shall be."""

    target: Path
    steps: tuple[int, ...] = ()  # (): 1, 2, 4, ... and the full count of its training
    method: str | None = None  # None: as trained
    name: str | None = None
    precision: Precision = "fp32"
    cache: CachePrecision | None = None  # of a generator; None: as the precision wants it
    samples: int | None = None  # held-out rows to measure quality on; None: all of them
    latency: bool = True  # measure it here, when the bundle is sealed
    card: dict[str, Any] = dataclasses.field(default_factory=dict)
    chat_template: Path | None = None  # of a generator: how messages become a prompt
    plain: tuple[Manifest, ...] = ()  # plain models of the same data, for the card


def export_run(
    run: Path,
    request: ExportRequest,
    data: str = "",
    say: Say = print,
    model: Stepped | None = None,
) -> Bundle:
    """Export a run, whose data is now at `data` if that is given; the sealed bundle.

    With a model, of a run that trained one's own, that one with the weights of the run.
    """
    say(f"reading {run} and its data")
    model, recipe, tokenizer, facts = load_run(run, model)
    recipe = data_at(recipe, data)
    _ladder(model, recipe, request)
    check_target(request.target)
    dataset = open_dataset(recipe, tokenizer)
    check_same_meaning(dataset, recipe, facts)
    same = facts.get("data_sha256") in (None, dataset.digest)
    if same:
        warn_of_unfinished(run, recipe, dataset)
    else:
        say(
            "not the data it was trained on: training may have seen the rows held out here, so "
            "the measured quality may be too good"
        )
    return export_model(Origin(model, recipe, dataset, facts["iteration"], same), request, say)


def export_model(origin: Origin, request: ExportRequest, say: Say = print) -> Bundle:
    """Export a model; the sealed bundle. Raises before anything appears at the target."""
    model, recipe, dataset = origin.model.eval(), origin.recipe, origin.dataset
    ladder = _ladder(model, recipe, request)
    if model.discrete and (
        request.steps not in ((), (1,)) or request.method not in (None, "euler")
    ):
        say("the weights of this model differ by depth, so its bundle has one step count, 1")
    check_target(request.target)
    samples = samples_of(dataset, recipe.model.window, recipe.model.target_window)
    with open_staging(request.target) as staging:
        answers = Answers(model, samples.edges(), ladder.method)
        threads = threads_each(len(ladder.steps))
        # Not while the model is traced: then torch changes how every module is called.
        with torch_threads(threads), answers.ahead(ladder.steps):
            load_exporter()
        say(f"tracing {recipe.name} into ONNX graphs")
        traced = trace(
            model, samples.draw(2, 3), samples.draw(3, 5), labelled=dataset.labels is not None
        )
        if traced.task == "generate" and traced.caches is None:
            say(
                "  no KV cache: every token computes the whole text before it again. For a cache "
                f"{CACHED_HEADS}"
            )
        # Rounded activations are too coarse for the outliers of pretrained models.
        floats = isinstance(model, ConvertedTransformer)
        unseen = None if floats else _unseen(request.precision, traced.task, dataset)
        cache = _cache(request, traced, recipe.name)
        scales = _scales(origin, traced, ladder) if cache == "kv_int8" else None
        card = {"title": recipe.title, **recipe.card, **request.card}
        if (doubt := _doubt(request.precision, traced, ladder, unseen)) is not None:
            print(f"{recipe.name}: {doubt}", file=sys.stderr)
            card["precision"] = doubt
        draft = draft_manifest(
            request.name or recipe.name,
            recipe,
            model,
            traced,
            dataset,
            ladder.steps,
            ladder.method,
            request.precision,
            card,
            origin.iteration,
            cache=cache,
            digest=dataset.digest if origin.same_data else None,
        )
        if request.chat_template is not None:
            draft = _with_chat_template(draft, request.chat_template, staging)
        if dataset.tokenizer is not None:
            (staging / TOKENIZER).write_text(dataset.tokenizer.to_str(), encoding="utf-8")
            entry = {TOKENIZER: file_entry(staging / TOKENIZER)}
            check_plain(dataclasses.replace(draft, files=entry), request.plain)
        else:
            check_plain(draft, request.plain)
        with torch_threads(threads), answers.ahead(ladder.steps):
            write_graphs(
                staging, traced, ladder, request.precision, unseen or (), scales, floats, cache
            )
        say("checking each graph against the trained model")
        trial = Trial(draft, origin, answers, request.samples, say)
        with trial.opened(staging, request.target) as opened:
            if not draft.rounds:
                tried = trial.run(opened)
            else:
                with trial.opened_fp32(staging, request.target, traced, ladder) as reference:
                    tried = trial.run(opened, reference)
        manifest = dataclasses.replace(
            draft,
            rungs=tried.rungs,
            default_steps=tried.default_steps,
            range=tried.range,
            calibration=tried.calibration,
        )
        manifest = _with_plain(manifest, request.plain)
        (staging / CARD).write_text(model_card(manifest), encoding="utf-8")
        bundle = seal_bundle(staging, manifest, request.target)
    if (flat := flat_in_words(manifest)) is not None:
        say(f"{flat} To serve it alone, export again with --steps {manifest.default_steps}.")
    if not request.latency:
        return bundle
    calibrate_latency(bundle.folder, say=say)
    return read_bundle(bundle.folder)


def _unseen(precision: Precision, task: Task, dataset: Dataset) -> list[RowArray] | None:
    """Rows to measure layers on, if their bytes need that."""
    return list(unseen_rows(dataset)) if precision == "int8" and task in LABELLING else None


def _doubt(
    precision: Precision, traced: Traced, ladder: Ladder, unseen: list[RowArray] | None
) -> str | None:
    """Why 8-bit weights are not what was hoped for, if they are not."""
    if precision != "int8":
        return None
    if not Layers(stitch(traced.graph, ladder.method, ladder.steps[0]).graph).some:
        return NOTHING_LARGE
    return NOTHING_UNSEEN if unseen == [] else None


def _cache(request: ExportRequest, traced: Traced, name: str) -> Cache:
    """How keys and values are kept, if they are: in 16 bits with 16-bit weights, if not told."""
    asked = request.cache or ("fp32" if half_of(request.precision) is None else "fp16")
    if traced.caches is not None:
        return _CACHES[asked]
    if request.cache in (None, "fp32"):
        return "none"
    raise ValueError(
        f"{name} keeps no keys and values between tokens, so there is nothing for --cache "
        f"{request.cache} to make smaller: leave it out. For a cache {CACHED_HEADS}"
    )


def _scales(origin: Origin, traced: Traced, ladder: Ladder) -> Scales:
    """Those of 8-bit caches."""
    assert traced.caches is not None
    return measured_scales(
        origin.model, origin.dataset, ladder.steps, ladder.method, traced.caches.pairs
    )


def _with_plain(manifest: Manifest, plain: Sequence[Manifest]) -> Manifest:
    """With what the card says of plain models that were measured on the same data."""
    if not plain:
        return manifest
    told = [str(manifest.card["baselines"])] if manifest.card.get("baselines") else []
    told += [f"{line[0].upper()}{line[1:]}." for line in plain_in_words(manifest, plain)]
    return dataclasses.replace(manifest, card={**manifest.card, "baselines": " ".join(told)})


def _with_chat_template(draft: Manifest, template: Path, staging: Path) -> Manifest:
    """The manifest with this file, which lies in the staging folder then."""
    if draft.tokenizer is None or draft.task != "generate":
        raise ValueError(
            f"{draft.name} does not generate text, so it takes no chat template: leave it out"
        )
    tokenizer = dataclasses.replace(draft.tokenizer, chat_template=CHAT_TEMPLATE)
    manifest = dataclasses.replace(draft, tokenizer=tokenizer)
    shutil.copyfile(template, staging / CHAT_TEMPLATE)
    return manifest


def _ladder(model: Stepped, recipe: Recipe, request: ExportRequest) -> Ladder:
    method = request.method or recipe.steps.method
    method_named(method)
    if model.discrete:
        return Ladder((1,), "euler")
    check_steps(model, recipe.steps, method)
    half = half_of(request.precision)
    if half is not None and isinstance(getattr(model, "velocity", None), CorrectedVelocity):
        raise ValueError(OWN_WEIGHTS.format(recipe.name, half))
    if len(request.steps) > MAX_RUNGS:
        raise ValueError(f"--steps has {len(request.steps)} counts: a bundle takes {MAX_RUNGS}")
    return Ladder(request.steps or tuple(ladder_of(recipe)), method)


def check_target(target: Path) -> None:
    """Before the work, not after it: whether a bundle can be sealed there."""
    above = next((one for one in target.parents if one.exists()), target.parent)
    if above.exists() and not above.is_dir():
        raise ValueError(f"{above} is a file, so no folder can be made in it: choose another --out")
    if not target.exists() or (target / "manifest.json").is_file():
        return
    if not target.is_dir() or any(target.iterdir()):
        raise ValueError(
            f"{target} exists and is no bundle, so it is not replaced: remove it or choose another "
            "--out"
        )
