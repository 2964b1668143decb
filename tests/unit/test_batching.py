"""The benchmark of many clients compares the same rows, and its clients count right."""

from pathlib import Path

import pytest

from benchmarks import batching
from benchmarks.lab import Result
from tests.tiny_bundles import build_classify


def test_clients_get_a_share_of_ideal_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        batching, "build", lambda _, folder: build_classify(folder / "x", name="built")
    )
    bundle = build_classify(tmp_path / "b", name="tiny")
    arguments = ["--quick", "--results", str(tmp_path), "--bundles", str(bundle.folder)]
    assert batching.main(arguments) == 0
    result = Result.read(tmp_path / "batching.json")
    stub, built, tiny = result.tables[0].rows
    assert (built[0], tiny[0]) == ("built", "tiny")
    assert stub[1] == 16 / (5 + 16 * 0.5) * 1000
    for _, ideal, found, share, p50_ms, p99_ms, errors in (stub, built, tiny):
        assert isinstance(ideal, float) and isinstance(found, float) and errors == 0
        assert isinstance(p50_ms, float) and isinstance(p99_ms, float)
        assert share == found / ideal < 1.05 and 0 < p50_ms <= p99_ms
    # 32 clients wait for two batches of 16 at least, each of 13 ms.
    assert isinstance(stub[4], float) and stub[4] > 20
