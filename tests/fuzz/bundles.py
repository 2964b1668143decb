"""Folders that claim to be bundles: a manifest, sealed or not, a latency table, and files.

The first byte says which file the rest is, and whether its seal is made right, so that what stands
behind that check is reached. A bundle that is read survives being written and read again; any other
is a BundleError.
"""

import atexit
import json
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from serve.bundle import LATENCY_FILE, MANIFEST_FILE, BundleError, Latency, Manifest, read_bundle
from serve.bundle.folder import SEAL, seal_of
from serve.bundle.part import parse_json
from tests.fixtures.tiny_folders import classify_bundle

MOST_BYTES = 1 << 16


@cache
def _folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="stepdial-fuzz-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    shutil.copytree(classify_bundle().folder, folder, dirs_exist_ok=True)
    return folder


@cache
def _manifest() -> bytes:
    return (classify_bundle().folder / MANIFEST_FILE).read_bytes()


def one(data: bytes) -> None:
    """Read such a folder; AssertionError, or whatever else is thrown, where a rule is broken."""
    if not data or len(data) > MOST_BYTES:
        return
    way, content = data[0] % 4, data[1:]
    manifest, latency = _manifest(), None
    if way == 0:
        manifest = content
    elif way == 1:
        manifest = _sealed(content)
    elif way == 2:
        latency = content
    else:  # one member of a sound manifest is another
        name, _, text = content.partition(b"=")
        manifest = _sealed(_with_member(name, text))
    (_folder() / MANIFEST_FILE).write_bytes(manifest)
    table = _folder() / LATENCY_FILE
    table.unlink(missing_ok=True)
    if latency is not None:
        table.write_bytes(latency)
    try:
        bundle = read_bundle(_folder(), verify=False)
    except BundleError as error:
        assert str(error) and len(str(error)) < 4096, "a message that is too long to read"
        return
    again: Any = json.loads(json.dumps(bundle.manifest.to_json()))
    assert Manifest.from_json(again) == bundle.manifest
    if bundle.latency is not None:
        assert Latency.from_json(json.loads(json.dumps(bundle.latency.to_json()))) == bundle.latency


def _sealed(content: bytes) -> bytes:
    """The same manifest with the seal that it should have, if it is JSON at all."""
    try:
        value = parse_json(content)
        if not isinstance(value, dict):
            return content
        members = {key: item for key, item in value.items() if key != SEAL}
        return json.dumps({**members, SEAL: seal_of(members)}).encode()
    except (BundleError, RecursionError, UnicodeEncodeError, ValueError):
        return content


def _with_member(name: bytes, text: bytes) -> bytes:
    """The tiny bundle's manifest with a member, `rungs.0.nfe` say, replaced by this JSON."""
    value = json.loads(_manifest())
    try:
        inner, path = value, name.decode().split(".")
        for part in path[:-1]:
            inner = inner[int(part)] if isinstance(inner, list) else inner[part]
        last: Any = int(path[-1]) if isinstance(inner, list) else path[-1]
        inner[last] = parse_json(text)
        return json.dumps(value).encode()
    except (BundleError, LookupError, TypeError, ValueError, RecursionError):
        return text
