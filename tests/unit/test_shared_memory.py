"""Memory that can be seen in two places: one memory, given back when it is dropped."""

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from serve.runtime import cache
from serve.runtime.cache import PAGE_BYTES, MemoryRange, SharedMemory, can_map_shared, map_adjacent


@pytest.fixture(autouse=True)
def _nothing_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    assert can_map_shared(), "these tests are of Linux"
    monkeypatch.setattr(cache, "_spare_mappings", [])
    monkeypatch.setattr(cache, "MOST_SPARE", 0)


def blocks(file: int) -> int:
    return os.fstat(file).st_blocks


def test_it_takes_no_memory_until_it_is_written() -> None:
    some = SharedMemory(64 * PAGE_BYTES, 64 * PAGE_BYTES)
    assert blocks(some.file) == 0
    some.bytes[5] = 7
    assert 0 < blocks(some.file) * 512 <= 16 * PAGE_BYTES
    assert some.bytes.sum() == 7


def test_parts_lie_side_by_side_and_are_the_same_bytes() -> None:
    one, two = SharedMemory(4 * PAGE_BYTES, 4 * PAGE_BYTES), SharedMemory(2 * PAGE_BYTES, 0)
    one.bytes[:] = np.repeat(np.arange(4, dtype=np.uint8), PAGE_BYTES)
    two.bytes[:] = 9
    parts = [
        MemoryRange(one, 3 * PAGE_BYTES, PAGE_BYTES),
        MemoryRange(two, 0, 2 * PAGE_BYTES),
        MemoryRange(one, PAGE_BYTES, PAGE_BYTES),
    ]
    seen = map_adjacent(parts)
    assert seen[::PAGE_BYTES].tolist() == [3, 9, 9, 1]
    seen[0], seen[2 * PAGE_BYTES] = 50, 60
    assert one.bytes[3 * PAGE_BYTES] == 50 and two.bytes[PAGE_BYTES] == 60
    one.bytes[PAGE_BYTES] = 70
    assert seen[3 * PAGE_BYTES] == 70
    again = map_adjacent(parts)
    assert np.array_equal(again, seen)


def test_what_is_freed_is_zeros_again() -> None:
    some = SharedMemory(8 * PAGE_BYTES, 8 * PAGE_BYTES)
    some.bytes[:] = 1
    whole = blocks(some.file)
    some.free(2 * PAGE_BYTES, 4 * PAGE_BYTES)
    assert blocks(some.file) == whole / 2
    assert some.bytes[::PAGE_BYTES].tolist() == [1, 1, 0, 0, 0, 0, 1, 1]


def test_a_view_keeps_no_memory_of_what_is_dropped_but_an_array_does() -> None:
    some = SharedMemory(4 * PAGE_BYTES, 4 * PAGE_BYTES)
    some.bytes[:] = 1
    file = os.dup(some.file)
    try:
        seen = map_adjacent([MemoryRange(some, 0, 4 * PAGE_BYTES)])
        array = some.bytes.view(np.float32)[:10]
        del some
        assert blocks(file) > 0 and array.tobytes() == b"\1" * 40
        del array
        assert blocks(file) == 0
        assert not seen.any()  # nobody looks there, but it would not end the process
    finally:
        os.close(file)


def test_places_and_files_are_given_back() -> None:
    def held() -> tuple[int, int]:
        with open("/proc/self/maps", encoding="ascii") as lines:
            mapped = sum("stepdial-caches" in line for line in lines)
        return mapped, len(os.listdir("/proc/self/fd"))

    before = held()
    for _ in range(50):
        some = SharedMemory(4 * PAGE_BYTES, 4 * PAGE_BYTES)
        some.bytes[:] = 1
        seen = map_adjacent(
            [MemoryRange(some, PAGE_BYTES, PAGE_BYTES), MemoryRange(some, 0, PAGE_BYTES)]
        )
        assert held() > before
        del some, seen
    assert held() == before


def test_too_much_memory_is_a_memory_error_that_leaves_no_file() -> None:
    files = len(os.listdir("/proc/self/fd"))
    with pytest.raises(MemoryError, match="bytes for caches"):
        SharedMemory(1 << 62, 0)
    assert len(os.listdir("/proc/self/fd")) == files


@pytest.mark.parametrize("why", ["none", "strict"])
def test_without_files_that_have_no_name_it_is_plain_memory(
    monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    def none(*_: object) -> int:
        raise OSError(38, "Function not implemented")

    can_map_shared.cache_clear()
    try:
        if why == "none":
            monkeypatch.setattr(os, "memfd_create", none)
        else:
            monkeypatch.setattr(Path, "read_text", lambda *_: "2\n")
        assert not can_map_shared()
        some = SharedMemory(2 * PAGE_BYTES, 2 * PAGE_BYTES)
        some.bytes[0] = 1
        some.free(0, PAGE_BYTES)
        with pytest.raises(AssertionError, match="one place only"):
            map_adjacent([MemoryRange(some, 0, PAGE_BYTES)])
    finally:
        can_map_shared.cache_clear()


def test_what_is_dropped_is_kept_for_the_next_of_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "MOST_SPARE", 40 * PAGE_BYTES)
    first, other = SharedMemory(32 * PAGE_BYTES, 0), SharedMemory(16 * PAGE_BYTES, 0)
    first.bytes[:] = other.bytes[:] = 1
    files = first.file, other.file
    del first
    assert SharedMemory(8 * PAGE_BYTES, 8 * PAGE_BYTES).file not in files
    again = SharedMemory(32 * PAGE_BYTES, 32 * PAGE_BYTES)
    assert again.file == files[0]
    del again
    del other  # both are more than may be kept: the one that was dropped last stays
    assert [one.file for one in cache._spare_mappings] == [files[1]]
    assert sum(one.held for one in cache._spare_mappings) <= cache.MOST_SPARE


def test_nothing_is_taken_again_that_has_more_pages_than_are_paid_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cache, "MOST_SPARE", 1 << 30)
    some = SharedMemory(32 * PAGE_BYTES, 0)
    some.bytes[: 20 * PAGE_BYTES] = 1
    file = some.file
    del some
    less = SharedMemory(32 * PAGE_BYTES, 16 * PAGE_BYTES)
    assert less.file != file and blocks(less.file) == 0
    assert SharedMemory(32 * PAGE_BYTES, 32 * PAGE_BYTES).file == file


def test_few_files_are_kept_however_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "MOST_SPARE", 1 << 30)
    many = [SharedMemory((1 + index) * PAGE_BYTES, PAGE_BYTES) for index in range(40)]
    del many
    assert len(cache._spare_mappings) == 16


def test_threads_that_take_and_drop_at_once_share_no_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cache, "MOST_SPARE", 8 * PAGE_BYTES)

    def work(mark: int) -> None:
        for turn in range(300):
            some = SharedMemory((1 + turn % 5) * PAGE_BYTES, 8 * PAGE_BYTES)
            some.bytes[:] = mark
            time.sleep(0)
            assert (some.bytes == mark).all()

    raised: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", raised.append)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(1, 5)))
    assert not raised


def test_too_much_plain_memory_is_a_memory_error_too() -> None:
    with pytest.raises(MemoryError, match="bytes for caches"):
        cache._plain(1 << 62)


def test_plain_memory_of_which_little_is_written_is_little() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * PAGE_BYTES

    before, kept = resident(), []
    for _ in range(4):
        kept.append(cache._plain(64 << 20))
        kept[-1][:: 8 << 20] = 1
    assert resident() - before < 4 << 20
