"""engines.json: which engines a folder holds, made of which bundle, on which machine.

An engine runs where it was built and nowhere else, so all of this is checked before one is loaded.
Knows the file; neither TensorRT nor CUDA.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Self

from serve.bundle import MANIFEST_FILE, Bundle, BundleError, FileEntry
from serve.bundle.folder import check_file, file_entry
from serve.bundle.manifest import (
    check_choice,
    check_file_name,
    check_integer,
    check_list,
    check_members,
    check_text,
    inside,
    inside_file,
    plain,
    read_json,
)
from serve.runtime.trt_shapes import Dims, Profile, ShapeRange

ENGINES_FILE = "engines.json"
TIMING_FILE = "timing.cache"
SCHEMA_VERSION = 1
PRECISIONS = ("fp32", "fp16", "bf16")
Precision = Literal["fp32", "fp16", "bf16"]

_AGAIN = "build the engines here: stepdial export BUNDLE --target tensorrt"
_WORDS = {
    "gpu": "the GPU",
    "compute_capability": "the compute capability",
    "driver": "the NVIDIA driver",
    "cuda": "CUDA",
    "tensorrt": "TensorRT",
}


@dataclass(frozen=True, slots=True)
class Host:
    """What an engine was built on."""

    gpu: str
    compute_capability: str
    driver: str
    cuda: str
    tensorrt: str

    def __post_init__(self) -> None:
        for field in _WORDS:
            check_text(field, getattr(self, field), 256)

    @classmethod
    def from_json(cls, value: object) -> Self:
        return cls(**check_members(value, tuple(_WORDS)))


@dataclass(frozen=True, slots=True)
class Engine:
    """The engine of one graph of the bundle."""

    graph: str
    file: str
    entry: FileEntry
    profiles: tuple[Profile, ...]

    def __post_init__(self) -> None:
        check_file_name("graph", self.graph)
        check_file_name("file", self.file)

    @classmethod
    def from_json(cls, value: object) -> Self:
        members = dict(check_members(value, ("graph", "file", "entry", "profiles")))
        with inside("entry"):
            members["entry"] = FileEntry.from_json(members["entry"])
        found = check_list("profiles", members["profiles"], 16)
        with inside("profiles"):
            members["profiles"] = tuple(_read_profile(profile) for profile in found)
        return cls(**members)


@dataclass(frozen=True, slots=True)
class EnginesManifest:
    """Everything that engines.json says."""

    name: str
    bundle_sha256: str  # of the bundle's manifest.json, which has that of every other file
    precision: Precision
    host: Host
    engines: tuple[Engine, ...]
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        check_integer("schema_version", self.schema_version, SCHEMA_VERSION, SCHEMA_VERSION)
        check_text("name", self.name)
        check_text("bundle_sha256", self.bundle_sha256, 64)
        check_choice("precision", self.precision, PRECISIONS)

    def engine(self, graph: str) -> Engine:
        """The engine of a graph of the bundle."""
        for engine in self.engines:
            if engine.graph == graph:
                return engine
        raise BundleError(f"has no engine for {graph}; {_AGAIN}", file=ENGINES_FILE)

    def to_json(self) -> dict[str, Any]:
        value: dict[str, Any] = plain(self)
        return {"schema_version": value.pop("schema_version"), **value}

    @classmethod
    def from_json(cls, value: object) -> Self:
        keys = ("schema_version", "name", "bundle_sha256", "precision", "host", "engines")
        members = dict(check_members(value, keys))
        with inside("host"):
            members["host"] = Host.from_json(members["host"])
        engines = []
        for index, engine in enumerate(check_list("engines", members["engines"], 4096)):
            with inside(f"engines[{index}]"):
                engines.append(Engine.from_json(engine))
        members["engines"] = tuple(engines)
        return cls(**members)


def engine_of(graph: str, path: Path, profiles: Sequence[Profile]) -> Engine:
    """The engine of a graph that was just written."""
    return Engine(graph, path.name, file_entry(path), tuple(profiles))


def read_engines(folder: Path, bundle: Bundle, here: Host) -> EnginesManifest:
    """The engines of a bundle, every file whole; BundleError with the reason if not for here."""
    path = folder / ENGINES_FILE
    if not path.is_file():
        raise BundleError(
            f"has no {ENGINES_FILE}, so it holds no engines; {_AGAIN}", file=str(folder)
        )
    value = read_json(path)
    with inside_file(path):
        manifest = EnginesManifest.from_json(value)
        if manifest.bundle_sha256 != bundle_sha256(bundle):
            raise BundleError(
                f"holds engines of another bundle than {bundle.folder}, or of an older export of "
                f"it; {_AGAIN}"
            )
        check_host(manifest.host, here)
    for engine in manifest.engines:
        check_file(folder / engine.file, engine.entry, verify=True)
    return manifest


def check_host(built: Host, here: Host) -> None:
    """BundleError with every difference between where engines were built and where they are."""
    differences = [
        f"{word} is {getattr(here, field)} instead of {getattr(built, field)}"
        for field, word in _WORDS.items()
        if getattr(here, field) != getattr(built, field)
    ]
    if differences:
        raise BundleError(
            f"holds engines that were built elsewhere and run only there: {'; '.join(differences)}"
            f"; {_AGAIN}"
        )


def bundle_sha256(bundle: Bundle) -> str:
    """One number for a whole sealed bundle."""
    return hashlib.sha256((bundle.folder / MANIFEST_FILE).read_bytes()).hexdigest()


def _read_profile(value: object) -> Profile:
    if not isinstance(value, dict):
        raise BundleError("must hold objects")
    ranges = {}
    for name, bounds in value.items():
        members = check_members(bounds, ("min", "opt", "max"))
        ranges[str(name)] = ShapeRange(
            **{side: _read_dims(side, dims) for side, dims in members.items()}
        )
    return MappingProxyType(ranges)


def _read_dims(side: str, value: object) -> Dims:
    dims = check_list(side, value, 8)
    for size in dims:
        check_integer(side, size, 1, 1 << 31)
    return tuple(dims)
