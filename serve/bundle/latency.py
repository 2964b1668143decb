"""The latency table of a bundle: what each rung cost on one machine.

Knows no model: it is measured, may be measured again anywhere, and is never hashed.
"""

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, Self

from serve.bundle.fields import (
    BundleError,
    check_choice,
    check_integer,
    check_list,
    check_members,
    check_number,
    check_text,
    inside,
    plain,
)
from serve.bundle.inputs import MAX_TOKENS
from serve.bundle.manifest import check_version
from serve.bundle.rung import MAX_STEPS

LATENCY_VERSION = 1
MAX_ENTRIES = 10_000
_MAX_MS = 1e9


@dataclass(frozen=True, slots=True)
class Machine:
    """Where the table was measured."""

    cpu: str
    cores: int
    threads: int
    runtime: str

    def __post_init__(self) -> None:
        check_text("cpu", self.cpu)
        check_integer("cores", self.cores, 1, 1 << 16)
        check_integer("threads", self.threads, 1, 1 << 16)
        check_text("runtime", self.runtime)

    @classmethod
    def from_json(cls, value: object) -> Self:
        return cls(**check_members(value, ("cpu", "cores", "threads", "runtime")))


@dataclass(frozen=True, slots=True)
class LatencyEntry:
    """The time of one runtime call on `batch` rows of `length` (decode: positions before it)."""

    steps: int
    kind: Literal["classify", "prefill", "decode"]
    batch: int
    length: int
    median_ms: float
    p95_ms: float

    def __post_init__(self) -> None:
        check_integer("steps", self.steps, 1, MAX_STEPS)
        check_choice("kind", self.kind, ("classify", "prefill", "decode"))
        check_integer("batch", self.batch, 1, 1 << 20)
        check_integer("length", self.length, 0, MAX_TOKENS)
        check_number("median_ms", self.median_ms, 0.0, _MAX_MS)
        check_number("p95_ms", self.p95_ms, self.median_ms, _MAX_MS)

    @classmethod
    def from_json(cls, value: object) -> Self:
        keys = ("steps", "kind", "batch", "length", "median_ms", "p95_ms")
        return cls(**check_members(value, keys))


@dataclass(frozen=True, slots=True)
class Latency:
    """All measurements of one bundle on one machine."""

    machine: Machine
    measured_at: str
    entries: tuple[LatencyEntry, ...]
    schema_version: int = LATENCY_VERSION

    def __post_init__(self) -> None:
        check_version(self.schema_version, LATENCY_VERSION)
        check_text("measured_at", self.measured_at, 64)
        try:
            datetime.fromisoformat(self.measured_at)
        except ValueError:
            raise BundleError(
                f"is {self.measured_at!r}; write an ISO 8601 time", field="measured_at"
            ) from None
        seen: set[tuple[int, str, int, int]] = set()
        for index, entry in enumerate(self.entries):
            point = (entry.steps, entry.kind, entry.batch, entry.length)
            if point in seen:
                raise BundleError(
                    "repeats the steps, kind, batch and length of an earlier entry; keep one",
                    field=f"entries[{index}]",
                )
            seen.add(point)

    def to_json(self) -> dict[str, Any]:
        """The table as the value of latency.json."""
        value: dict[str, Any] = plain(self)
        return {"schema_version": value.pop("schema_version"), **value}

    @classmethod
    def from_json(cls, value: object) -> Self:
        """The table that a latency.json holds."""
        keys = ("schema_version", "machine", "measured_at", "entries")
        members = dict(check_members(value, keys))
        with inside("machine"):
            members["machine"] = Machine.from_json(members["machine"])
        entries = []
        for index, entry in enumerate(check_list("entries", members["entries"], MAX_ENTRIES)):
            with inside(f"entries[{index}]"):
                entries.append(LatencyEntry.from_json(entry))
        members["entries"] = tuple(entries)
        return cls(**members)
