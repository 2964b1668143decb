"""What may happen to a bundle on a disk: bits flip, files end early, are mixed up, are edited.

Each kind of damage is a function of a folder, a source of chance, and other bundles; it says what
it did. `reseal` makes size, hash and seal fit again, as a tool with a fault or an attacker would.
"""

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from serve.bundle import LATENCY_FILE, MANIFEST_FILE
from serve.bundle.folder import SEAL, seal_of

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
