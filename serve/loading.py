"""Loads, swaps and unloads models while the server runs.

Reading, hashing, opening and warming up run on another thread. Only the swap itself runs on the
event loop, between two requests.
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import median
from typing import NamedTuple

from serve.bundle import Bundle, BundleError, Manifest, read_bundle
from serve.catalog import Served, find_bundles, open_served
from serve.engine.cost import Cost, CostKey
from serve.engine.engine import Engine
from serve.engine.loaded import new_cost
from serve.errors import BrokenBundle, Draining, FolderForbidden, InvalidField, is_panic
from serve.inputs.rows import row_length
from serve.parts import rows_for
from serve.runtime.protocol import largest_row, largest_tokens
from serve.settings import Settings

# Before the first request, a few calls of each rung are timed. Latencies measured elsewhere give
# the shape of the cost, these calls its scale. The scale is shared by all rungs of a model in calls
# of as many rows: a rung that looked slow by chance would never be chosen, and so never be
# corrected. If rows run in parts, a call in one part and one in several are timed.


_TIMES = 3
_PROMPT_TOKENS = 16
_MOST_ROWS = 16  # per timed call


class TimedCall(NamedTuple):
    """A call to time."""

    cost_key: CostKey
    length: int
    seconds: float
    rows: int = 1


def measure_first_calls(served: Served, cost: Cost) -> None:
    """Time the first calls of a model, which must be warm."""
    if served.bundle.latency is not None:
        cost.learn(served.bundle.latency)
    timed: dict[int, list[TimedCall]] = {}
    for one in _timed(served):
        timed.setdefault(one.rows, []).append(one)
    for alike in timed.values():
        _rescale(alike, cost)


def _rescale(timed: Sequence[TimedCall], cost: Cost) -> None:
    known = {one: cost.call_s(one.cost_key, one.rows, one.length) for one in timed}
    ratios = [one.seconds / before_s for one, before_s in known.items() if before_s]
    for one, before_s in known.items():
        seconds = before_s * median(ratios) if before_s else one.seconds
        cost.rescale(one.cost_key, one.rows, one.length, seconds)


def _timed(served: Served) -> Iterator[TimedCall]:
    for steps in served.manifest.steps:
        if served.manifest.labelled:
            yield _timed_classifier(served, steps, 1)
            if (most := served.model.most_parts) > 1:
                yield _timed_classifier(served, steps, min(_MOST_ROWS, rows_for(most)))
        else:
            yield from _timed_batches(served, steps)


def _timed_classifier(served: Served, steps: int, rows: int) -> TimedCall:
    row = largest_row(served.manifest)
    batch = row[None].repeat(rows, axis=0)
    classifier = served.model.classifier(steps)
    seconds = _least_s(lambda: classifier.run(batch))
    length = row_length(row, served.manifest)
    return TimedCall(CostKey("classify", steps), length, seconds, rows)


def _timed_batches(served: Served, steps: int) -> Iterator[TimedCall]:
    tokens = largest_tokens(served.manifest)[:_PROMPT_TOKENS]
    if len(tokens) < 2:
        return
    model, translates = served.model, served.manifest.task == "translate"
    batches = model.translator(steps) if translates else model.decoder(steps)
    seconds = _least_s(lambda: batches.open_batch().add(tokens[:-1]))
    yield TimedCall(CostKey("prefill", steps), len(tokens) - 1, seconds)
    batch = batches.open_batch()
    batch.add(tokens[:-1])
    begun_s = time.perf_counter()
    batch.step(tokens[-1:])
    seconds = time.perf_counter() - begun_s
    yield TimedCall(CostKey("decode", steps), batch.lengths[0], seconds)


def _least_s(call: Callable[[], object]) -> float:
    """The shortest time of several calls: disturbances only make a call longer."""
    times = []
    for _ in range(_TIMES):
        begun_s = time.perf_counter()
        call()
        times.append(time.perf_counter() - begun_s)
    return min(times)


_log = logging.getLogger("stepdial")


@dataclass(frozen=True, slots=True)
class ModelChange:
    """A model that was loaded, and the one that it replaced."""

    loaded: Served
    replaced: Served | None
    seconds: float


class Loading:
    """Changes the served models, one change at a time. Used on the event loop."""

    def __init__(
        self,
        engine: Engine,
        settings: Settings,
        zoo: Path | None = None,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        """`zoo` is searched for new bundles; `changed` is called after each change."""
        self._engine = engine
        self._threads = settings.threads
        self._device = settings.runs_on
        self._zoo = zoo
        self._changed = changed
        self._editions = count(1)
        self._turn = asyncio.Lock()
        # The manifest last read from each folder that is checked again, None of one that has
        # vanished. Folders are named as they were given: links may lead elsewhere later.
        self._manifests: dict[Path, Manifest | None] = {
            served.bundle.folder.absolute(): served.manifest for served in engine.catalog
        }
        self._allowed = settings.admin_folders or (*self._manifests, settings.zoo)

    def allowed(self, folder: str) -> Path:
        """The folder with this path; FolderForbidden unless models may be loaded from it."""
        try:
            path = Path(os.path.abspath(folder))
            real = path.resolve()
        except (OSError, RuntimeError, ValueError):  # too long, a loop of links, or not a path
            raise InvalidField("bundle must be the path of a folder", param="bundle") from None
        allowed = [one.resolve() for one in self._allowed]
        if not any(real.is_relative_to(one) for one in allowed):
            listed = ", ".join(map(str, allowed))
            raise FolderForbidden(
                f"bundle must lie in one of {listed}: put it there, or start the server with other "
                "--admin-folders",
                param="bundle",
            )
        return path

    async def load(self, folder: Path) -> ModelChange:
        """Serve the bundle in this folder, replacing a model of the same name.

        BrokenBundle if it cannot be served; nothing changes then.
        """
        async with self._turn:
            try:
                return await self._load(folder)
            except BundleError as error:
                _log.error("bundle not loaded, nothing was changed: %s", error)
                raise BrokenBundle(f"{error}; nothing was changed", param="bundle") from None

    async def unload(self, name: str) -> Served:
        """Stop serving this model; UnknownModel if there is none."""
        async with self._turn:
            served = self._engine.catalog.find(name)
            self._engine.dismiss(served)
            self._changed()
            return served

    async def reload(self) -> None:
        """Load the given folders that have changed, and new bundles of the zoo."""
        async with self._turn:
            for folder in await asyncio.to_thread(self._folders):
                try:
                    await self._renew(folder)
                except (BundleError, Draining) as error:
                    _log.error("bundle not loaded, the models served before stay: %s", error)
                except Exception:  # the other folders are renewed all the same
                    _log.exception("bundle not loaded from %s: this is our bug", folder)

    def _folders(self) -> list[Path]:
        folders = list(self._manifests)
        if self._zoo is not None:
            try:
                found = [folder.absolute() for folder in find_bundles(self._zoo)]
            except BundleError as error:
                _log.warning("%s", error)
                found = []
            folders += [folder for folder in found if folder not in self._manifests]
        return folders

    async def _renew(self, folder: Path) -> None:
        if not folder.is_dir():
            if self._manifests.get(folder) is not None:
                _log.warning("%s has vanished; the model loaded from it stays", folder)
            self._manifests[folder] = None  # so that what comes there later is new
            return
        bundle = await asyncio.to_thread(read_bundle, folder, verify=False)
        known = self._manifests.get(folder)
        if bundle.manifest == known:
            return
        if known is None or bundle.manifest.name != known.name:
            self._check_new(bundle)
        self._manifests[folder] = (await self._load(folder)).loaded.manifest

    def _check_new(self, bundle: Bundle) -> None:
        """Refuse a folder that now has the name of a model from another one that still exists."""
        served = self._engine.catalog.get(bundle.manifest.name)
        if served is None or served.bundle.folder.absolute() == bundle.folder:
            return
        if served.bundle.folder.is_dir():
            raise BundleError(
                f"is named {served.name}, like {served.bundle.folder}: remove one of them",
                file=str(bundle.folder),
            )

    async def _load(self, folder: Path) -> ModelChange:
        begun_s = time.perf_counter()
        served, cost = await asyncio.to_thread(self._open, folder, next(self._editions))
        replaced = self._engine.catalog.get(served.name)
        self._engine.serve(served, cost)
        if folder in self._manifests or (self._zoo and folder.parent == self._zoo.absolute()):
            self._manifests[folder] = served.manifest
        seconds = time.perf_counter() - begun_s
        _log.info("loaded %s from %s in %.2f s", served.name, folder, seconds)
        self._changed()
        return ModelChange(served, replaced, seconds)

    def _open(self, folder: Path, edition: int) -> tuple[Served, Cost]:
        """A warm model, and the cost of its calls, of which the first were timed."""
        self._check_open()
        bundle = read_bundle(folder)
        self._check_open()
        try:
            served = open_served(bundle, self._threads, self._device, edition)
            return served, self._measure(served)
        except (BundleError, Draining):
            raise
        except MemoryError as error:
            problem = "there is not enough memory: give the server more, or serve fewer models"
            raise BundleError(problem, file=str(folder)) from error
        except BaseException as error:  # onnxruntime has no base class of its own
            if not isinstance(error, Exception) and not is_panic(error):
                raise
            _log.error("the model in %s cannot be run", folder, exc_info=error)
            problem = f"cannot be run ({type(error).__name__}: {error})"
            raise BundleError(problem, file=str(folder)) from error

    def _measure(self, served: Served) -> Cost:
        cost = new_cost(served)
        try:
            self._check_open()
            measure_first_calls(served, cost)
        except BaseException:
            served.model.close()
            raise
        return cost

    def _check_open(self) -> None:
        if self._engine.draining:
            raise Draining("the server is shutting down: nothing is loaded any more")
