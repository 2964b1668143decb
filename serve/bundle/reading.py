"""Reading a bundle: its folder, manifest and latency table, with every file checked.

Knows sizes and hashes; never opens a graph: the runtime does.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serve.bundle.fields import BundleError, inside_file, read_json
from serve.bundle.latency import Latency
from serve.bundle.manifest import (
    LATENCY_FILE,
    MANIFEST_FILE,
    SCHEMA_VERSION,
    Manifest,
    check_version,
)
from serve.bundle.spec import FileEntry

SEAL = "seal"
_ALTERED = "is altered: its sha256 is not the manifest's; copy or export the bundle again"
_MEASURE_AGAIN = "measure the latency again, or delete the file, since it is optional"


@dataclass(frozen=True, slots=True)
class Bundle:
    """An exported model: a folder that was found whole."""

    folder: Path
    manifest: Manifest
    latency: Latency | None

    def __post_init__(self) -> None:
        if self.latency is None:
            return
        kinds = ("classify",) if self.manifest.labelled else ("prefill", "decode")
        for index, entry in enumerate(self.latency.entries):
            where = f"entries[{index}]"
            with inside_file(self.folder / LATENCY_FILE):
                if entry.steps not in self.manifest.steps:
                    raise BundleError(
                        f"is {entry.steps}, which is no rung of {self.manifest.name}; "
                        f"{_MEASURE_AGAIN}",
                        field=f"{where}.steps",
                    )
                if entry.kind not in kinds:
                    raise BundleError(
                        f"is {entry.kind}, which {self.manifest.name} never does; {_MEASURE_AGAIN}",
                        field=f"{where}.kind",
                    )

    @property
    def tokenizer_path(self) -> Path:
        return self.folder / self.manifest.text_tokenizer.file

    @property
    def chat_template_path(self) -> Path | None:
        file = self.manifest.text_tokenizer.chat_template
        return None if file is None else self.folder / file

    @property
    def weights_path(self) -> Path:
        return self.folder / self.manifest.weights

    def graph_path(self, steps: int) -> Path:
        return self.folder / self.manifest.rung(steps).graph


def read_bundle(folder: Path, verify: bool = True, latency: bool = True) -> Bundle:
    """The bundle in a folder; refuses a malformed manifest and a missing or truncated file.

    With `verify` every byte is hashed too, which finds any change; without, only sizes are. Without
    `latency` its table is left alone, as by one who is about to measure it again.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise BundleError("is no folder; name the folder of a bundle", file=str(folder))
    if not (folder / MANIFEST_FILE).is_file():
        held = sorted(path.parent.name for path in folder.glob(f"*/{MANIFEST_FILE}"))
        if held:
            raise BundleError(
                f"is no bundle, but holds some ({', '.join(held)}): name one of those",
                file=str(folder),
            )
        raise BundleError(
            f"has no {MANIFEST_FILE}, so it is no bundle; make one with: stepdial export",
            file=str(folder),
        )
    value = read_json(folder / MANIFEST_FILE)
    with inside_file(folder / MANIFEST_FILE):
        manifest = Manifest.from_json(_unsealed(value))
    for name, entry in manifest.files.items():
        check_file(folder / name, entry, verify)
    return Bundle(folder, manifest, _read_latency(folder / LATENCY_FILE) if latency else None)


def seal_of(value: dict[str, Any]) -> str:
    """The sha256 of a manifest's members, whatever their order and spacing."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    # Half a surrogate pair is refused by the rule that names its member, not here.
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _unsealed(value: object) -> object:
    """The manifest without its seal, which must be the right one."""
    if not isinstance(value, dict) or "schema_version" not in value:
        return value  # which the manifest refuses
    check_version(value["schema_version"], SCHEMA_VERSION)
    members = {key: item for key, item in value.items() if key != SEAL}
    if value.get(SEAL) != seal_of(members):
        raise BundleError(
            "is missing or wrong: the manifest was changed after it was written; copy or export "
            "the bundle again",
            field=SEAL,
        )
    return members


def check_file(path: Path, expected: FileEntry, verify: bool) -> None:
    """Refuse a file that is not the one that was sealed."""
    with inside_file(path):
        if path.is_symlink():  # which runtimes refuse, since it may lead out of the bundle
            raise BundleError("is a link; copy the file itself into the bundle")
        if not path.is_file():
            raise BundleError("is missing from the bundle; copy or export the bundle again")
        try:
            size = path.stat().st_size
            if size != expected.bytes:
                raise BundleError(
                    f"has {size} bytes instead of {expected.bytes}: it is "
                    f"{'truncated' if size < expected.bytes else 'altered'}; copy or export the "
                    "bundle again"
                )
            if verify and _sha256(path) != expected.sha256:
                raise BundleError(_ALTERED)
        except OSError as error:
            raise BundleError(f"cannot be read ({error.strerror or error})") from None


def read_checked(path: Path, expected: FileEntry) -> bytes:
    """The bytes of a sealed file: those that were checked, whatever becomes of the file."""
    check_file(path, expected, verify=False)
    with inside_file(path):
        try:
            content = path.read_bytes()
        except OSError as error:
            raise BundleError(f"cannot be read ({error.strerror or error})") from None
        if hashlib.sha256(content).hexdigest() != expected.sha256:
            raise BundleError(_ALTERED)
    return content


def file_entry(path: Path) -> FileEntry:
    """The entry that describes a file as it is now."""
    return FileEntry(sha256=_sha256(path), bytes=path.stat().st_size)


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _read_latency(path: Path) -> Latency | None:
    if not path.exists():
        return None
    if not path.is_file():  # a pipe would be waited for without end
        raise BundleError(f"is no file; {_MEASURE_AGAIN}", file=str(path))
    try:
        value = read_json(path)
        with inside_file(path):
            return Latency.from_json(value)
    except BundleError as error:
        problem = f"{error.problem.partition('; ')[0]}; {_MEASURE_AGAIN}"
        raise BundleError(problem, field=error.field, file=error.file) from None
