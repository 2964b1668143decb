"""Whether damaged bundles are refused: copies are damaged at random and opened as a server does.

    python -m benchmarks.corruption
    python -m benchmarks.corruption --only CASE        # one of them again

After an accident (hashes and seal stay as they were) a bundle is refused with an error that names
the file or the field, or what it answers is bit for bit what it was. Where the hashes were made to
fit again, answers may be any; but nothing crashes, hangs or takes endless memory. Bundles are
opened in another process, which is started again if one of them ends it.
"""

import hashlib
import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self, final

import numpy as np
import onnx
from onnx import helper, numpy_helper

from benchmarks.lab import (
    ROOT,
    ZOO,
    Cell,
    Provenance,
    Result,
    Table,
    Target,
    bundles_in,
    parser,
    run,
)
from serve.bundle import LATENCY_FILE, MANIFEST_FILE
from serve.bundle.folder import SEAL, seal_of

# What may happen to a bundle on a disk: bits flip, files end early, are mixed up, are edited.
# Each kind of damage is a function of a folder, a source of chance, and other bundles; it says
# what it did. `reseal` makes size, hash and seal fit again, as a tool with a fault or an attacker
# would.


Damage = Callable[[Path, random.Random, Sequence[Path]], str]
HUGE = (1 << 31, 1 << 40, 1 << 62, 10**30, 1e300, -(1 << 40))
ODD: Sequence[Any] = (
    None,
    True,
    0,
    -1,
    1,
    0.5,
    "",
    "x",
    [],
    {},
    [[]],
    "\ud800",
    "..",
    "manifest.json",
)
DEEP = 5000


def flip_bits(folder: Path, draw: random.Random, others: Sequence[Path]) -> str:
    """One to eight bits of a file."""
    path = _some_file(folder, draw)
    data = bytearray(path.read_bytes())
    places = [draw.randrange(8 * len(data)) for _ in range(draw.choice((1, 1, 2, 8)))]
    for place in places:
        data[place // 8] ^= 1 << place % 8
    path.write_bytes(data)
    return f"{path.name}: bits {places} flipped"


def truncate(folder: Path, draw: random.Random, others: Sequence[Path]) -> str:
    """The end of a file is lost."""
    path = _some_file(folder, draw)
    kept = draw.choice((0, path.stat().st_size - 1, draw.randrange(path.stat().st_size)))
    os.truncate(path, kept)
    return f"{path.name}: cut to {kept} bytes"


def append(folder: Path, draw: random.Random, others: Sequence[Path]) -> str:
    """Bytes behind the end of a file."""
    path = _some_file(folder, draw)
    more = draw.randbytes(draw.choice((1, 16, 5000)))
    path.write_bytes(path.read_bytes() + more)
    return f"{path.name}: {len(more)} bytes appended"


def blank(folder: Path, draw: random.Random, others: Sequence[Path]) -> str:
    """A block of zeros, as after a crash of the machine."""
    path = _some_file(folder, draw)
    data = bytearray(path.read_bytes())
    start = draw.randrange(len(data))
    end = min(len(data), start + draw.choice((1, 16, 512, 4096)))
    data[start:end] = bytes(end - start)
    path.write_bytes(data)
    return f"{path.name}: zeros from {start} to {end}"


def swap(folder: Path, draw: random.Random, others: Sequence[Path]) -> str:
    """Two files have each other's name."""
    one, two = draw.sample(sorted(folder.iterdir()), 2)
    aside = folder / "aside"
    one.rename(aside)
    two.rename(one)
    aside.rename(two)
    return f"{one.name} and {two.name} swapped"


def mix(folder: Path, draw: random.Random, others: Sequence[Path]) -> str:
    """A file is that of another bundle, under its own name or another one."""
    other = draw.choice(others)
    source, target = _some_file(other, draw), _some_file(folder, draw)
    if draw.random() < 0.7 and (folder / source.name).exists():
        target = folder / source.name
    shutil.copyfile(source, target)
    return f"{target.name}: is {source.name} of {other.name}"


def delete(folder: Path, draw: random.Random, others: Sequence[Path]) -> str:
    """A file is gone."""
    path = _some_file(folder, draw)
    path.unlink()
    return f"{path.name}: deleted"


def replace_node(folder: Path, draw: random.Random, others: Sequence[Path]) -> str:
    """A link, a folder or a pipe stands where a file should."""
    path = _some_file(folder, draw)
    path.unlink()
    kind = draw.choice(("link", "dangling link", "folder", "pipe"))
    if kind == "link":
        path.symlink_to(draw.choice(others) / path.name)
    elif kind == "dangling link":
        path.symlink_to("nowhere")
    elif kind == "folder":
        path.mkdir()
    else:
        os.mkfifo(path)
    return f"{path.name}: a {kind}"


def edit_manifest(folder: Path, draw: random.Random, others: Sequence[Path]) -> str:
    """A value, a key or the structure of manifest.json."""
    return _edit(folder / MANIFEST_FILE, draw)


def edit_latency(folder: Path, draw: random.Random, others: Sequence[Path]) -> str:
    """The same of latency.json."""
    return _edit(folder / LATENCY_FILE, draw)


def edit_tokenizer(folder: Path, draw: random.Random, others: Sequence[Path]) -> str:
    """The same of tokenizer.json, or of the manifest where there is none."""
    path = folder / "tokenizer.json"
    return _edit(path if path.exists() else folder / MANIFEST_FILE, draw)


def reseal(folder: Path) -> None:
    """Let sizes, hashes and the seal be right for what lies there, as far as it can be read."""
    path = folder / MANIFEST_FILE
    try:
        manifest = json.loads(path.read_bytes())
        for name, entry in manifest["files"].items():
            if (folder / name).is_file():
                data = (folder / name).read_bytes()
                entry.update(sha256=hashlib.sha256(data).hexdigest(), bytes=len(data))
        manifest.pop(SEAL, None)
        manifest[SEAL] = seal_of(manifest)
        path.write_text(json.dumps(manifest, indent=2), encoding="utf-8")
    except (ValueError, KeyError, TypeError, AttributeError, OSError, RecursionError):
        return  # no manifest any more: it will be refused as it is


def _some_file(folder: Path, draw: random.Random) -> Path:
    return draw.choice(sorted(path for path in folder.iterdir() if path.stat().st_size))


def _edit(path: Path, draw: random.Random) -> str:
    value = json.loads(path.read_text(encoding="utf-8"))
    holder, key = _some_place(value, draw)
    old = holder[key]
    how = draw.choice(("drop", "rename", "add", "number", "number", "huge", "odd", "other", "text"))
    if how == "drop":
        del holder[key]
    elif how == "rename" and isinstance(holder, dict):
        holder[draw.choice((f"{key}s", key.upper(), "", "schema_version"))] = holder.pop(key)
    elif how == "add" and isinstance(holder, dict):
        holder[draw.choice(("extra", "steps", "threshold", "__class__"))] = draw.choice(ODD)
    elif how == "huge":
        holder[key] = draw.choice(HUGE)
    elif how == "other":
        elsewhere, there = _some_place(value, draw)
        holder[key] = json.loads(json.dumps(elsewhere[there]))
    elif how == "text":
        return _edit_text(path, draw, str(key))
    elif isinstance(old, bool) or not isinstance(old, int | float):
        holder[key] = draw.choice(ODD)
    else:
        nudged = (old + 1, old - 1, old * 2, -old, old / 2, old * 1000, str(old), float(old))
        holder[key] = draw.choice(nudged)
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")
    return f"{path.name}: {how} at {key}, which was {str(old)[:80]}"


def _edit_text(path: Path, draw: random.Random, key: str) -> str:
    """What json.dumps does not write."""
    text = path.read_text(encoding="utf-8")
    kind = draw.choice(("NaN", "Infinity", "1e999", "twice", "deep", "digits", "spaces", "latin"))
    quoted = f"{json.dumps(key)}: "
    if kind == "twice":
        text = text.replace("{", f'{{{quoted}1, {quoted}1, "schema_version": 2, ', 1)
    elif kind == "spaces":
        text = text.replace("\n", "\n  ")
    elif kind == "latin":
        path.write_bytes(text.replace('"', '"\xff', 3).encode("latin-1", "replace"))
        return f"{path.name}: no UTF-8"
    else:
        new = {"deep": "[" * DEEP + "]" * DEEP, "digits": "9" * 6000}.get(kind, kind)
        text = text.replace(quoted, f"{quoted}{new}, {json.dumps(key + '_')}: ", 1)
    path.write_text(text, encoding="utf-8")
    return f"{path.name}: {kind} at {key}"


def _some_place(value: Any, draw: random.Random) -> tuple[Any, Any]:
    """A member of an object or a list, however deep: what holds it, and its key there."""
    holder = value
    while True:
        key = draw.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
        if not isinstance(holder[key], dict | list) or not holder[key] or draw.random() < 0.2:
            return holder, key
        holder = holder[key]


ACCIDENTS: Sequence[Damage] = (
    *(flip_bits, flip_bits, flip_bits, truncate, append, blank, swap, mix, delete, replace_node),
    *(edit_manifest, edit_manifest, edit_manifest, edit_latency, edit_latency),
)


# Edits of a graph that leave it an ONNX file: other attributes, shapes, nodes, constants, places.


NUMBERS = (-(1 << 40), -2, -1, 0, 1, 2, 3, 7, 64, 1 << 16, 1 << 31, 1 << 62)
PLACES = ("../../../etc/passwd", "/etc/passwd", "manifest.json", "nowhere.bin", "", ".")


def edit_graph(folder: Path, draw: random.Random, others: Sequence[Path]) -> str:
    """One to three edits of one graph."""
    path = draw.choice(sorted(folder.glob("*.onnx")))
    model = onnx.load(str(path), load_external_data=False)
    edits = draw.choices(_EDITS, k=draw.choice((1, 1, 2, 3)))
    done = [edit(model, draw) for edit in edits]
    path.write_bytes(model.SerializeToString())
    return f"{path.name}: {', '.join(done)}"


def _attribute(model: onnx.ModelProto, draw: random.Random) -> str:
    nodes = [node for node in model.graph.node if node.attribute]
    if not nodes:
        return "nothing"
    node = draw.choice(nodes)
    attribute = draw.choice(list(node.attribute))
    name = attribute.name
    if draw.random() < 0.2:
        node.attribute.remove(attribute)
        return f"{node.op_type}.{name} removed"
    new = draw.choice(NUMBERS)
    if attribute.type == onnx.AttributeProto.INT:
        attribute.i = new
    elif attribute.type == onnx.AttributeProto.FLOAT:
        attribute.f = float(new)
    elif attribute.type == onnx.AttributeProto.INTS:
        attribute.ints[:] = [draw.choice(NUMBERS) for _ in attribute.ints]
    else:
        node.attribute.remove(attribute)
        node.attribute.append(helper.make_attribute(name, new))
    return f"{node.op_type}.{name} = {new}"


def _constant(model: onnx.ModelProto, draw: random.Random) -> str:
    """Numbers that steer shapes, slices and lookups."""
    inside = [
        tensor
        for tensor in model.graph.initializer
        if tensor.data_location != onnx.TensorProto.EXTERNAL
    ]
    if not inside:
        return "nothing"
    tensor = draw.choice(inside)
    array = numpy_helper.to_array(tensor).copy()
    if array.size:
        with np.errstate(all="ignore"):
            array.reshape(-1)[draw.randrange(array.size)] = np.array(draw.choice(NUMBERS)).astype(
                array.dtype
            )
    tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    return f"{tensor.name} changed"


def _dims(model: onnx.ModelProto, draw: random.Random) -> str:
    tensors = [tensor for tensor in model.graph.initializer if tensor.dims]
    if not tensors:
        return "nothing"
    tensor = draw.choice(tensors)
    at = draw.randrange(len(tensor.dims))
    tensor.dims[at] = draw.choice((*NUMBERS, tensor.dims[at] + 1, tensor.dims[at] * 2))
    return f"{tensor.name} of another shape"


def _external(model: onnx.ModelProto, draw: random.Random) -> str:
    tensors = [tensor for tensor in model.graph.initializer if tensor.external_data]
    if not tensors:
        return "nothing"
    tensor = draw.choice(tensors)
    entry = draw.choice(list(tensor.external_data))
    entry.value = draw.choice(PLACES) if entry.key == "location" else str(draw.choice(NUMBERS))
    return f"{tensor.name}: {entry.key} {entry.value}"


def _type(model: onnx.ModelProto, draw: random.Random) -> str:
    tensor = draw.choice(list(model.graph.initializer))
    tensor.data_type = draw.choice((1, 2, 3, 6, 7, 9, 10, 11, 16, 99))
    return f"{tensor.name} of the type {tensor.data_type}"


def _drop(model: onnx.ModelProto, draw: random.Random) -> str:
    node = draw.choice(list(model.graph.node))
    model.graph.node.remove(node)
    return f"{node.op_type} dropped"


def _operator(model: onnx.ModelProto, draw: random.Random) -> str:
    one, two = (draw.choice(list(model.graph.node)) for _ in range(2))
    was, one.op_type, one.domain = one.op_type, two.op_type, two.domain
    return f"{was} becomes {two.op_type}"


def _wire(model: onnx.ModelProto, draw: random.Random) -> str:
    nodes = [node for node in model.graph.node if node.input]
    node, source = draw.choice(nodes), draw.choice(list(model.graph.node))
    at = draw.randrange(len(node.input))
    known = [value.name for value in (*model.graph.input, *model.graph.initializer)]
    node.input[at] = draw.choice([*source.output, draw.choice(known)])
    return f"{node.op_type} reads {node.input[at]}"


def _port(model: onnx.ModelProto, draw: random.Random) -> str:
    port = draw.choice([*model.graph.input, *model.graph.output])
    sizes = port.type.tensor_type.shape.dim
    if sizes and draw.random() < 0.7:
        size = draw.choice(list(sizes))
        size.ClearField("dim_param")
        size.dim_value = draw.choice(NUMBERS)
    else:
        port.type.tensor_type.elem_type = draw.choice((1, 6, 7, 10, 11))
    return f"{port.name} declared otherwise"


def _version(model: onnx.ModelProto, draw: random.Random) -> str:
    opset = draw.choice(list(model.opset_import))
    opset.version = draw.choice((1, 7, 13, 20, 99, 1 << 40))
    return f"opset {opset.version}"


_EDITS = (
    *(_attribute, _attribute, _constant, _constant, _dims, _external, _type),
    *(_drop, _operator, _wire, _port, _version),
)


NAME = "corruption"
GOLDEN = ROOT / "tests" / "golden"
CASES, QUICK_CASES = 1000, 20
# By a clock on the wall, so it allows for a busy machine.
LIMIT_S = 60.0
# Resealed ones are opened in earnest, which takes seconds with large weights.
SMALL_BYTES = 1 << 20
RESEALED: Sequence[Damage] = (
    *(flip_bits, flip_bits, truncate, swap, mix, edit_tokenizer),
    *(edit_manifest, edit_manifest, edit_manifest, edit_graph, edit_graph, edit_graph),
)
ENDINGS = ("refused", "same answers", "other answers", "fails when asked", "FAILED")


@dataclass(frozen=True, slots=True)
class Case:
    """One damaged bundle, and how it ended."""

    index: int
    bundle: str
    resealed: bool
    kind: str
    done: str
    ending: str
    why: str = ""


@final
class BundleOpener:
    """The process that opens bundles; a new one whenever it died."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self.peak_kib = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def open(self, folder: Path) -> dict[str, Any]:
        """What came of a bundle."""
        process = self._process = self._process or _start()
        assert process.stdin is not None and process.stdout is not None
        with suppress(BrokenPipeError):  # it is dead already, which shows below
            process.stdin.write(json.dumps(str(folder)).encode() + b"\n")
            process.stdin.flush()
        if not select.select([process.stdout], [], [], LIMIT_S)[0]:
            self._end()
            return {"outcome": "died", "message": f"no answer after {LIMIT_S:g} s"}
        line = process.stdout.readline()
        if not line:
            code = process.wait()
            self._end()
            name = signal.Signals(-code).name if code < 0 else f"status {code}"
            return {"outcome": "died", "message": f"ended by {name}"}
        found: dict[str, Any] = json.loads(line)
        self.peak_kib = max(self.peak_kib, found["peak_kib"])
        return found

    def kill(self) -> None:
        """Let it die where it is, as of a bundle."""
        if self._process is not None:
            self._process.kill()

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            with suppress(BrokenPipeError):
                self._process.communicate()
            self._process = None


def _start() -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "benchmarks.bundle_opener"]
    pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
    return subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=nowhere)


def main(arguments: Sequence[str]) -> int:
    made = parser(__doc__.partition("\n")[0])
    made.add_argument("--seed", type=int, default=0, metavar="INT", help="of all chance (0)")
    made.add_argument("--only", type=int, metavar="INT", help="run this case only, and print it")
    parsed = made.parse_args(arguments)
    folders = [path.resolve() for path in parsed.bundles or kept_bundles()]
    if parsed.only is not None:
        print(attempt(folders, parsed.seed, [parsed.only])[0][0])
        return 0
    count = QUICK_CASES if parsed.quick else CASES
    return run(NAME, arguments, parsed, partial(measure, folders, parsed.seed, count))


def kept_bundles() -> list[Path]:
    """The bundles of the zoo and the golden ones."""
    return sorted([*bundles_in(ZOO), *bundles_in(GOLDEN, "*/*")])


def attempt(folders: Sequence[Path], seed: int, indices: Sequence[int]) -> tuple[list[Case], int]:
    """These cases, and the peak memory of a process that opened them, in KiB."""
    with BundleOpener() as opener, tempfile.TemporaryDirectory() as scratch:
        before = {folder: _sound(opener, folder) for folder in folders}
        cases = []
        for index in indices:
            draw = random.Random(f"{seed}/{index}")
            case = _attempt_one(opener, before, index, draw, Path(scratch) / "bundle")
            cases.append(case)
            if case.ending == "FAILED":
                print(f"FAILED --seed {seed} --only {index}: {case}", file=sys.stderr, flush=True)
    return cases, opener.peak_kib


def _sound(opener: BundleOpener, folder: Path) -> str:
    found = opener.open(folder)
    if found["outcome"] != "answered":
        raise SystemExit(f"{folder} cannot be opened before any damage: {found['message']}")
    return str(found["answer"])


def _attempt_one(
    opener: BundleOpener, before: dict[Path, str], index: int, draw: random.Random, copy: Path
) -> Case:
    resealed = draw.random() < 0.5
    folders = [folder for folder in before if not resealed or _bytes(folder) < SMALL_BYTES]
    folder = draw.choice(folders)
    damage = draw.choice(RESEALED if resealed else ACCIDENTS)
    others = [other for other in before if other != folder] or [folder]
    shutil.copytree(folder, copy)
    done = damage(copy, draw, others)
    if resealed:
        reseal(copy)
    found = opener.open(copy)
    if copy.is_symlink():
        copy.unlink()
    shutil.rmtree(copy)
    ending, why = judge(found, before[folder], resealed)
    return Case(index, folder.name, resealed, damage.__name__, done, ending, why)


def judge(found: dict[str, Any], before: str, resealed: bool) -> tuple[str, str]:
    """How a case ended, and what was said."""
    message = str(found.get("message", ""))
    match found["outcome"]:
        case "refused" if found["named"] and (resealed or found["stage"] == "loading"):
            return "refused", message
        case "answered" if found["answer"] == before:
            return "same answers", ""
        case "answered" if resealed:
            return "other answers", ""
        case "raised" if resealed and found["stage"] == "answering":
            return "fails when asked", message
    return "FAILED", message


def measure(folders: Sequence[Path], seed: int, count: int, provenance: Provenance) -> Result:
    cases, peak_kib = attempt(folders, seed, range(count))
    tables = [
        _table("Hashes and seal as they were", [case for case in cases if not case.resealed]),
        _table("Hashes and seal made to fit again", [case for case in cases if case.resealed]),
    ]
    failed = [case for case in cases if case.ending == "FAILED"]
    if failed:
        columns = ("case", "bundle", "damage", "what came of it")
        rows: list[Sequence[Cell]] = [
            [case.index, case.bundle, case.done[:200], case.why[:200]] for case in failed
        ]
        tables.append(Table("Failed", columns, rows))
    accidents = [case for case in cases if not case.resealed]
    harmless = sum(case.ending in ("refused", "same answers") for case in accidents)
    bad = sum(case.resealed for case in failed)
    return provenance.result(
        NAME,
        "Damaged bundles",
        f"{count} copies of {len(folders)} bundles, each damaged once at random (seed {seed}), "
        "then read, opened, warmed up and asked as a server does it. Greatest resident memory of "
        f"the process that opens them: {peak_kib / 1024:.0f} MiB.",
        tables,
        [
            Target(
                "accidents that are refused by name, or change no answer",
                harmless,
                "==",
                len(accidents),
            ),
            Target("resealed ones that crash, hang, or fail without a clear error", bad, "==", 0),
        ],
    )


def _table(caption: str, cases: Sequence[Case]) -> Table:
    rows: list[Sequence[Cell]] = []
    for kind in sorted({case.kind for case in cases}):
        ended = Counter(case.ending for case in cases if case.kind == kind)
        rows.append([kind.replace("_", " "), ended.total(), *(ended[one] for one in ENDINGS)])
    total = Counter(case.ending for case in cases)
    rows.append(["all", len(cases), *(total[one] for one in ENDINGS)])
    return Table(caption, ("damage", "cases", *ENDINGS), rows)


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
