"""The models that are served, found by name or by task.

Knows bundles and how to open them; deliberately neither requests nor the engine.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from serve.bundle import (
    Bundle,
    BundleError,
    LatencyEntry,
    Manifest,
    Task,
    check_file,
    read_bundle,
)
from serve.bundle.manifest import model_key
from serve.errors import UnknownModel, WrongTask
from serve.inputs.chat import ChatTemplate
from serve.inputs.text import TextCodec
from serve.runtime import Model, Place, open_model

InputKind = Literal["text", "image", "points"]

_ENDPOINTS: dict[Task, str] = {
    "classify": "/v1/classify",
    "tag": "/v1/classify",
    "generate": "/v1/generate",
    "translate": "/v1/generate",
}
WRITING: tuple[Task, ...] = ("generate", "translate")
_CPU = Place()


@dataclass(slots=True)
class ModelUsers:
    """How many requests are with a model. Counted on the event loop alone, read from anywhere."""

    count: int = 0


@dataclass(frozen=True, slots=True)
class Served:
    """One model, ready to answer. Whoever has asked one stays with it when another replaces it."""

    bundle: Bundle
    model: Model
    text: TextCodec | None  # None where the model reads no text
    edition: int = 0  # no two models of one name have the same
    loaded_at_s: float = field(default_factory=time.time)
    users: ModelUsers = field(default_factory=ModelUsers, compare=False)
    chat: ChatTemplate | None = None  # of a generator
    # Looked at several times for every request, hence no properties.
    manifest: Manifest = field(init=False, repr=False)
    name: str = field(init=False)
    key: str = field(init=False)  # what the engine calls it

    def __post_init__(self) -> None:
        manifest = self.bundle.manifest
        object.__setattr__(self, "manifest", manifest)
        object.__setattr__(self, "name", manifest.name)
        object.__setattr__(self, "key", model_key(manifest.name, self.edition))

    @classmethod
    def open(cls, bundle: Bundle, model: Model, edition: int = 0) -> "Served":
        """A model with the tokenizer of its bundle, if it has one."""
        text = None if bundle.manifest.tokenizer is None else TextCodec(bundle)
        chat = ChatTemplate.of(bundle) if bundle.manifest.task == "generate" else None
        _check_texts(bundle)
        return cls(bundle, model, text, edition, chat=chat)

    @property
    def codec(self) -> TextCodec:
        """The tokenizer of a model that is known to read text."""
        assert self.text is not None, f"{self.name} reads no text"
        return self.text

    def measured(self, steps: int) -> LatencyEntry | None:
        """The measured time of one call at these steps: one row, the greatest length there is."""
        if self.bundle.latency is None:
            return None
        kind = "classify" if self.manifest.labelled else "decode"
        entries = [
            entry
            for entry in self.bundle.latency.entries
            if entry.steps == steps and entry.kind == kind
        ]
        return min(entries, key=_size, default=None)


def _check_texts(bundle: Bundle) -> None:
    """Refuse a tokenizer or template that has changed since the bundle was verified."""
    tokenizer = bundle.manifest.tokenizer
    if tokenizer is not None:
        for name in filter(None, (tokenizer.file, tokenizer.chat_template)):
            check_file(bundle.folder / name, bundle.manifest.files[name], verify=True)


class Catalog:
    """All models that are served, in the order in which they were named.

    A change replaces the whole mapping: whoever reads sees all of it or nothing.
    """

    def __init__(self, served: Iterable[Served]) -> None:
        self._served: Mapping[str, Served] = {one.name: one for one in served}

    def __iter__(self) -> Iterator[Served]:
        return iter(self._served.values())

    def get(self, name: str) -> Served | None:
        """The model of that name, if there is one."""
        return self._served.get(name)

    def put(self, served: Served) -> None:
        """Serve this model, in the place of another of its name if there is one."""
        self._served = {**self._served, served.name: served}

    def remove(self, name: str) -> None:
        """Serve no model of that name any more."""
        self._served = {key: one for key, one in self._served.items() if key != name}

    def find(self, name: str) -> Served:
        """The model of that name."""
        found = self.get(name)
        if found is not None:
            return found
        names = [served.name for served in self]
        raise UnknownModel(
            f"no model named {name!r} is served; there are: {', '.join(names)}",
            param="model",
            models=names,
        )

    def pick(
        self, name: str | None, tasks: tuple[Task, ...], kind: InputKind | None = None
    ) -> Served:
        """The model of that name; if none is named, the first that has the first of these tasks.

        Among several, one that takes this kind of input is preferred.
        """
        if name is not None:
            found = self.find(name)
            own = found.manifest.task
            if own not in tasks:
                raise WrongTask(
                    f"{name} does not {tasks[0]}: send it to {_ENDPOINTS[own]}",
                    param="model",
                    endpoint=_ENDPOINTS[own],
                )
            return found
        able = [one for task in tasks for one in self if one.manifest.task == task]
        for one in able:
            if kind is None or one.manifest.input.kind == kind:
                return one
        if able:
            return able[0]
        names = [served.name for served in self]
        raise UnknownModel(
            f"no model that can {tasks[0]} is served; there are: {', '.join(names)}",
            param="model",
            models=names,
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


def open_catalog(folders: Sequence[Path], threads: int | None, place: Place = _CPU) -> Catalog:
    """Read, open and warm up these bundles; BundleError naming the file that is wrong."""
    bundles = [read_servable(folder, place) for folder in folders]
    seen: dict[str, Bundle] = {}
    for bundle in bundles:
        name = bundle.manifest.name
        if name in seen:
            raise BundleError(
                f"is named {name}, like {seen[name].folder}: serve one of them",
                file=str(bundle.folder),
            )
        seen[name] = bundle
    return Catalog([open_served(bundle, threads, place) for bundle in bundles])


def read_servable(folder: Path, place: Place, verify: bool = True) -> Bundle:
    """The bundle as it is served there; without `verify` nothing but its sizes is checked."""
    bundle = read_bundle(folder, verify)
    if place.runs_single_steps:
        return bundle
    # No row can stop between steps that do not run one by one.
    return replace(bundle, manifest=replace(bundle.manifest, calibration=None))


def open_served(bundle: Bundle, threads: int | None, place: Place, edition: int = 0) -> Served:
    """Open a bundle, and run each rung once."""
    served = Served.open(bundle, open_model(bundle, threads, place), edition)
    try:
        served.model.warm_up()
    except BaseException:
        served.model.close()
        raise
    return served


def _size(entry: LatencyEntry) -> tuple[int, int]:
    return entry.batch, -entry.length
