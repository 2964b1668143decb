"""The models in the engine: those that are served, and those that leave when their last guest does.

A model that has been replaced or taken away gets no new requests; it stays until nothing of it is
left, and then every part of the engine forgets it. Used with the engine's lock held. Knows neither
calls nor how models are opened.
"""

import logging
import threading
from collections.abc import Sequence
from typing import Protocol

from serve.catalog import Catalog, Served
from serve.engine.admission import too_large
from serve.engine.runner import Runner
from serve.engine.work import Work
from serve.errors import ModelGone
from serve.metrics import Metrics
from serve.scheduler.job import Job
from serve.scheduler.scheduler import Scheduler

_log = logging.getLogger("stepdial")


class Forgetful(Protocol):
    """A part that keeps something of each model."""

    def drop_model(self, model: str) -> None:
        """Forget a model that is gone, by its key."""
        ...


class Residents:
    """Changes the catalog, and clears up behind it."""

    def __init__(
        self,
        catalog: Catalog,
        runner: Runner,
        scheduler: Scheduler[Work],
        metrics: Metrics,
        others: Sequence[Forgetful],
    ) -> None:
        self._catalog = catalog
        self._runner = runner
        self._scheduler = scheduler
        self._metrics = metrics
        self._forgetful: Sequence[Forgetful] = (runner, metrics, *others)
        self._leaving: list[Served] = []
        self._gone: list[Served] = []
        for served in catalog:
            metrics.serve(served.key, served.manifest)

    @property
    def leaving(self) -> tuple[Served, ...]:
        """Models that are served no more, and still have guests."""
        return tuple(self._leaving)

    def check(self, jobs: Sequence[Job[Work]]) -> None:
        """ModelGone unless all are for models that are here; Unprocessable if one is too large."""
        for job in jobs:
            lane = job.lane
            if not self._runner.has_model(lane.model):
                raise ModelGone(f"{lane.name} was replaced meanwhile: send the request again")
            if lane.kind != "classify" and not self._scheduler.fits(lane, job.positions):
                raise too_large(job, self._runner.cache_bytes_for(lane, 1, job.positions))

    def enter(self, served: Served) -> None:
        """From now on requests go to this model, not to another of its name."""
        replaced = self._catalog.get(served.name)
        self._runner.add_model(served.key, served.model)
        self._metrics.serve(served.key, served.manifest)
        self._catalog.put(served)
        if replaced is not None:
            self._leave(replaced)

    def dismiss(self, served: Served) -> None:
        """No request goes to this model any more."""
        self._catalog.remove(served.name)
        self._metrics.hide(served.name)
        self._leave(served)

    def release(self) -> bool:
        """Forget those that have no guests any more, and are to be closed; whether there are any.

        On the engine's thread, between two calls.
        """
        for served in self._leaving[:]:
            if served.guests.count == 0 and self._scheduler.close(served.key):
                self._leaving.remove(served)
                self._gone.append(served)
                for part in self._forgetful:
                    part.drop_model(served.key)
        return bool(self._gone)

    def close_gone(self) -> None:
        """Free the memory of those, which takes a while: aside, so that others are answered."""
        if self._gone:
            gone, self._gone = self._gone, []
            threading.Thread(target=_close, args=(gone,), name="closing", daemon=True).start()

    def _leave(self, served: Served) -> None:
        self._leaving.append(served)


def _close(gone: Sequence[Served]) -> None:
    for served in gone:
        served.model.close()
        _log.info("%s, edition %d, has left", served.name, served.edition)
