"""The models that are served, found by name or by task.

Knows bundles and how to open them; deliberately neither requests nor the engine.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from serve.bundle import Bundle, BundleError, LatencyEntry, Manifest, Task, read_bundle
from serve.errors import UnknownModel, WrongTask
from serve.runtime import Model, open_model
from serve.text import TextCodec

_ENDPOINTS: dict[Task, str] = {"classify": "/v1/classify", "generate": "/v1/generate"}


@dataclass(frozen=True, slots=True)
class Served:
    """One model, ready to answer."""

    bundle: Bundle
    model: Model
    codec: TextCodec

    @property
    def manifest(self) -> Manifest:
        return self.bundle.manifest

    @property
    def name(self) -> str:
        return self.manifest.name

    def measured_ms(self, steps: int) -> float | None:
        """The measured time of one call at these steps: one row, the greatest length there is."""
        if self.bundle.latency is None:
            return None
        kind = "classify" if self.manifest.task == "classify" else "decode"
        entries = [
            entry
            for entry in self.bundle.latency.entries
            if entry.steps == steps and entry.kind == kind
        ]
        if not entries:
            return None
        return min(entries, key=_size).median_ms


class Catalog:
    """All models that are served, in the order in which they were named."""

    def __init__(self, served: Iterable[Served]) -> None:
        self._served = {one.name: one for one in served}

    def __iter__(self) -> Iterator[Served]:
        return iter(self._served.values())

    @property
    def models(self) -> dict[str, Model]:
        return {name: one.model for name, one in self._served.items()}

    def find(self, name: str) -> Served:
        """The model of that name."""
        if name in self._served:
            return self._served[name]
        names = list(self._served)
        raise UnknownModel(
            f"no model named {name!r} is served; there are: {', '.join(names)}",
            param="model",
            models=names,
        )

    def pick(self, name: str | None, task: Task) -> Served:
        """The model of that name, or the first of that task if none is named."""
        if name is not None:
            found = self.find(name)
            if found.manifest.task != task:
                own = found.manifest.task
                raise WrongTask(
                    f"{name} does not {task}: send it to {_ENDPOINTS[own]}",
                    param="model",
                    endpoint=_ENDPOINTS[own],
                )
            return found
        for one in self._served.values():
            if one.manifest.task == task:
                return one
        raise UnknownModel(
            f"no model that can {task} is served; there are: {', '.join(self._served)}",
            param="model",
            models=list(self._served),
        )


def find_bundles(zoo: Path) -> list[Path]:
    """The bundles of a zoo, by name; BundleError if there is none.

    Hidden folders are left out: an export that was cut short leaves such a one.
    """
    found = (path.parent for path in zoo.glob("*/manifest.json"))
    folders = sorted(folder for folder in found if not folder.name.startswith("."))
    if not folders:
        raise BundleError(
            "holds no bundles: name one (stepdial serve BUNDLE) or make one (stepdial export)",
            file=str(zoo),
        )
    return folders


def open_catalog(folders: Sequence[Path], threads: int | None) -> Catalog:
    """Read, open and warm up these bundles; BundleError naming the file that is wrong."""
    bundles = [read_bundle(folder) for folder in folders]
    seen: dict[str, Bundle] = {}
    for bundle in bundles:
        name = bundle.manifest.name
        if name in seen:
            raise BundleError(
                f"is named {name}, like {seen[name].folder}: serve one of them",
                file=str(bundle.folder),
            )
        seen[name] = bundle
    catalog = Catalog(
        Served(bundle, open_model(bundle, threads), TextCodec(bundle)) for bundle in bundles
    )
    for served in catalog:
        served.model.warm_up()
    return catalog


def _size(entry: LatencyEntry) -> tuple[int, int]:
    return entry.batch, -entry.length
