"""The served models, found by name or by task.

A change replaces the whole mapping, so a reader sees all of it or nothing.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from serve.errors import UnknownModel, WrongInput, WrongTask
from serve.inputs.chat import ChatTemplate
from serve.inputs.text import TextCodec
from serve.runtime import CPU, Device, Model, open_model

InputKind = Literal["text", "image", "points"]

_ENDPOINTS: dict[Task, str] = {
    "classify": "/v1/classify",
    "tag": "/v1/classify",
    "generate": "/v1/generate",
    "translate": "/v1/generate",
}
WRITING: tuple[Task, ...] = ("generate", "translate")


class Served:
    """A loaded model. A request that has picked it keeps it when another replaces it."""

    def __init__(
        self,
        bundle: Bundle,
        model: Model,
        text: TextCodec | None,
        edition: int = 0,
        chat: ChatTemplate | None = None,
    ) -> None:
        self.bundle, self.model = bundle, model
        self.text = text  # None if the model takes no text
        self.edition = edition  # unique among the models of one name
        self.chat = chat  # for generators
        self.loaded_at_s = time.time()
        self.users = 0  # requests that use it; changed only on the event loop
        # Read several times per request, so they are attributes, not properties.
        self.manifest: Manifest = bundle.manifest
        self.name = bundle.manifest.name
        # The engine's name for it. Names have no "@".
        self.key = f"{self.name}@{edition}" if edition else self.name

    @classmethod
    def open(cls, bundle: Bundle, model: Model, edition: int = 0) -> "Served":
        """A model with its tokenizer and chat template, if it has them."""
        text = None if bundle.manifest.tokenizer is None else TextCodec(bundle)
        chat = ChatTemplate.of(bundle) if bundle.manifest.task == "generate" else None
        _check_texts(bundle)
        return cls(bundle, model, text, edition, chat)

    @property
    def codec(self) -> TextCodec:
        """The tokenizer, for a model that takes text."""
        assert self.text is not None, f"{self.name} reads no text"
        return self.text

    def measured(self, steps: int) -> LatencyEntry | None:
        """The measured latency of one call at these steps: one row of the greatest length."""
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
    """Refuse a tokenizer or template that changed after the bundle was verified."""
    tokenizer = bundle.manifest.tokenizer
    if tokenizer is not None:
        for name in filter(None, (tokenizer.file, tokenizer.chat_template)):
            check_file(bundle.folder / name, bundle.manifest.files[name], verify=True)


class Catalog:
    """The served models, in the order in which they were named."""

    def __init__(self, served: Iterable[Served]) -> None:
        self._served: Mapping[str, Served] = {one.name: one for one in served}

    def __iter__(self) -> Iterator[Served]:
        return iter(self._served.values())

    def get(self, name: str) -> Served | None:
        """The model with this name, if there is one."""
        return self._served.get(name)

    def put(self, served: Served) -> None:
        """Serve this model, replacing one of the same name."""
        self._served = {**self._served, served.name: served}

    def remove(self, name: str) -> None:
        """Stop serving the model with this name."""
        self._served = {key: one for key, one in self._served.items() if key != name}

    def find(self, name: str) -> Served:
        """The model with this name; UnknownModel if there is none."""
        found = self.get(name)
        if found is not None:
            return found
        names = [served.name for served in self]
        raise UnknownModel(
            f"no model named {name!r} is served; there are: {', '.join(names) or 'none'}",
            param="model",
            models=names,
        )

    def pick(
        self, name: str | None, tasks: tuple[Task, ...], kind: InputKind | None = None
    ) -> Served:
        """The model with this name; without a name, the first one for the first of these tasks.

        It takes this kind of input; WrongInput if none does.
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
            first = able[0]
            raise WrongInput(
                f"no served model takes {kind}; the first, {first.name}, takes "
                f"{first.manifest.input.kind}",
                param="input",
                input=first.manifest.input.kind,
            )
        names = [served.name for served in self]
        raise UnknownModel(
            f"no model that can {tasks[0]} is served; there are: {', '.join(names) or 'none'}",
            param="model",
            models=names,
        )


def find_bundles(zoo: Path) -> list[Path]:
    """The bundles of a zoo, by name; BundleError if there are none.

    Hidden folders are skipped: an interrupted export leaves one behind.
    """
    found = (path.parent for path in zoo.glob("*/manifest.json"))
    folders = sorted(folder for folder in found if not folder.name.startswith("."))
    if not folders:
        raise BundleError(
            "holds no bundles: name one (stepdial serve BUNDLE) or make one (stepdial export)",
            file=str(zoo),
        )
    return folders


def open_catalog(folders: Sequence[Path], threads: int | None, device: Device = CPU) -> Catalog:
    """Read, open and warm up these bundles; BundleError names the file that is wrong."""
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
    return Catalog([open_served(bundle, threads, device) for bundle in bundles])


def open_served(bundle: Bundle, threads: int | None, device: Device, edition: int = 0) -> Served:
    """Open a bundle and run every rung once."""
    served = Served.open(bundle, open_model(bundle, threads, device), edition)
    try:
        served.model.warm_up()
    except BaseException:
        served.model.close()
        raise
    return served


def _size(entry: LatencyEntry) -> tuple[int, int]:
    return entry.batch, -entry.length
