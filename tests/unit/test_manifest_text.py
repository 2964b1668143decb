"""A manifest file whose text is no manifest at all is refused, whatever it holds."""

from pathlib import Path

import pytest

from serve.bundle import MANIFEST_FILE, BundleError, Manifest, read_bundle


@pytest.mark.parametrize("value", [None, [], "manifest", 3, True])
def test_a_manifest_that_is_no_object_is_refused(value: object) -> None:
    with pytest.raises(BundleError, match="must be an object"):
        Manifest.from_json(value)


MALFORMED_TEXTS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is not valid JSON"),
    "cut off": (b'{"schema_version": 1,', "is not valid JSON"),
    "no UTF-8": (b'{"name": "\xff\xfe"}', "is not valid JSON"),
    "NaN": (b'{"T": NaN}', "holds NaN"),
    "infinity": (b'{"T": -Infinity}', "holds -Infinity"),
    "overflow": (b'{"T": 1e999}', "holds the number 1e999"),
    "repeated key": (b'{"name": "a", "name": "b"}', "repeats the key 'name'"),
    "deeply nested": (b"[" * 200_000, "is not valid JSON"),
    "endless integer": (b'{"T": ' + b"9" * 5000 + b"}", "is not valid JSON"),
    "enormous": (b" " * (5 << 20), "is larger than"),
}


@pytest.mark.parametrize("case", MALFORMED_TEXTS)
def test_malformed_manifest_text_is_refused_with_the_file_named(case: str, tmp_path: Path) -> None:
    text, message = MALFORMED_TEXTS[case]
    (tmp_path / MANIFEST_FILE).write_bytes(text)
    with pytest.raises(BundleError) as refusal:
        read_bundle(tmp_path)
    assert str(refusal.value).startswith(f"{tmp_path / MANIFEST_FILE}: {message}")
