"""Decoding on a device, through the CPU provider's own OrtValues: the same tokens, nothing copied.

Stand-ins count what ONNX Runtime allocates and what crosses between the device and the host.
"""

import gc
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from serve.bundle import Bundle, Cache
from serve.local import LocalModel
from serve.runtime import open_model
from serve.runtime.cache import CacheLayout
from serve.runtime.decoder import OrtDecodeBatch, OrtDecoder
from serve.runtime.device import (
    HOST,
    DeviceCaches,
    Memory,
    ProviderMemory,
    copy_graph,
    cuda_provider,
    memory_for,
)
from serve.runtime.protocol import Device, FloatArray, IntArray
from serve.runtime.session import open_steps
from tests.fixtures.tiny_bundles import build_generate

STEPS = (1, 2, 4)
MAX_TOKENS = 160
KINDS = pytest.mark.parametrize("cache", ["kv", "kv_fp16"])
CUDA = Device("cuda", allow_cpu_fallback=True)


def provider_memory() -> ProviderMemory:
    return ProviderMemory("cpu", 0, ("CPUExecutionProvider", {}))


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[ProviderMemory]:
    """What models that open on a device use; it stands in for the memory of a GPU."""
    made = provider_memory()
    monkeypatch.setattr(
        "serve.runtime.session.memory_for",
        lambda device, providers: HOST if device.name == "cpu" else made,
    )
    yield made


def bundle_of(folder: Path, cache: Cache) -> Bundle:
    return build_generate(folder / "g", steps=STEPS, max_tokens=MAX_TOKENS, cache=cache)


def decoder_of(bundle: Bundle, steps: int, memory: Memory | None = None) -> OrtDecoder:
    sessions = open_steps(bundle, 1)
    if memory is not None:
        sessions = replace(sessions, memory=memory)
    return OrtDecoder(sessions, bundle.manifest, bundle.manifest.rung(steps))


def written(decoder: OrtDecoder, vocab_size: int) -> list[FloatArray]:
    """The logits of rows that come, go, grow past a bucket and are extended."""
    chance = np.random.default_rng(0)

    def tokens(count: int) -> IntArray:
        return chance.integers(1, vocab_size, count)

    batch, seen = decoder.open_batch(), []
    for length in (5, 70, 12):
        seen.append(batch.add(tokens(length)))
    for _ in range(4):
        seen.append(batch.step(tokens(3)))
    batch.remove(0)  # the last row takes its number
    seen.append(batch.extend(1, tokens(7)))
    for _ in range(3):
        seen.append(batch.step(tokens(2)))
    prefill = batch.read(tokens(30), positions=150)
    while (logits := prefill.advance()) is None:
        pass
    seen.append(logits.copy())
    batch.join(prefill)
    for _ in range(60):  # beyond a bucket of 64 positions
        seen.append(batch.step(tokens(3)))
    while batch.lengths:
        batch.remove(0)
    assert batch.nbytes == 0
    seen.append(batch.add(tokens(3)))
    return seen


@KINDS
@pytest.mark.parametrize("steps", STEPS)
def test_the_device_gives_the_logits_of_the_cpu_bit_for_bit(
    tmp_path: Path, cache: Cache, steps: int
) -> None:
    bundle = bundle_of(tmp_path, cache)
    vocab_size = bundle.manifest.text_tokenizer.vocab_size
    pair = [decoder_of(bundle, steps, one) for one in (None, provider_memory())]
    host, device = (written(one, vocab_size) for one in pair)
    assert len(host) == len(device) > 70
    assert all(np.array_equal(one, other) for one, other in zip(host, device, strict=True))
    rows = np.random.default_rng(1).integers(1, vocab_size, (3, 40))
    assert np.array_equal(pair[0].forward(rows), pair[1].forward(rows))


@KINDS
def test_only_tokens_lengths_and_logits_cross_and_calls_are_those_of_the_cpu(
    tmp_path: Path, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = bundle_of(tmp_path, cache)
    memory, steps, rows, tokens = provider_memory(), 4, 3, 40
    vocab_size = bundle.manifest.text_tokenizer.vocab_size
    crossed = count_crossings(monkeypatch)
    calls = {}
    for name, kept in (("host", None), ("device", memory)):
        decoder = decoder_of(bundle, steps, kept)
        batch = decoder.open_batch()
        for row in range(rows):
            batch.add(np.arange(1, 20 + row))
        batch.step(np.ones(rows, dtype=np.int64))
        crossed.update(read=0, written=0)
        before = memory.read_bytes, memory.written_bytes
        calls[name] = counted_calls(monkeypatch, batch, rows, tokens)
    assert calls["host"] == calls["device"] == tokens * (1 + steps + 1)
    logits, given = rows * vocab_size * 4, rows * 8 + rows * 4
    assert memory.read_bytes - before[0] == crossed["read"] == tokens * logits
    written_again = crossed["written"] - tokens * given
    # A bucket that is passed binds the pass anew: its times and the kept position, once.
    assert 0 <= written_again <= 4 * steps * rows + 8 + given
    assert memory.written_bytes - before[1] == crossed["written"]
    assert batch.nbytes > 50 * crossed["read"] / tokens  # caches are far larger than what crossed


def count_crossings(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The bytes that OrtValues give to and take from the host, as the driver would see them."""
    crossed = {"read": 0, "written": 0}
    numpy, update = ort.OrtValue.numpy, ort.OrtValue.update_inplace

    def read(value: ort.OrtValue) -> Any:
        crossed["read"] += value.tensor_size_in_bytes()
        return numpy(value)

    def write(value: ort.OrtValue, array: Any) -> None:
        crossed["written"] += array.nbytes
        update(value, array)

    monkeypatch.setattr(ort.OrtValue, "numpy", read)
    monkeypatch.setattr(ort.OrtValue, "update_inplace", write)
    return crossed


def counted_calls(
    monkeypatch: pytest.MonkeyPatch, batch: OrtDecodeBatch, rows: int, tokens: int
) -> int:
    """The calls of ONNX Runtime's graphs of one step that these tokens take."""
    calls = 0
    sessions = batch.sessions
    for session in {sessions.embed, sessions.step, sessions.single, sessions.head}:
        run = session.run_with_iobinding

        def counting(*arguments: Any, run: Any = run, **named: Any) -> None:
            nonlocal calls
            calls += 1
            run(*arguments, **named)

        session.run_with_iobinding = counting  # type: ignore[assignment]  # a partial, replaced
    for _ in range(tokens):
        batch.step(np.ones(rows, dtype=np.int64))
    return calls


def test_models_on_a_device_decode_with_caches_of_16_bits_and_take_turns(
    tmp_path: Path, memory: ProviderMemory
) -> None:
    bundle = bundle_of(tmp_path, "kv_fp16")
    model, host = open_model(bundle, 1, CUDA), open_model(bundle, 1)
    assert model.mix() is None and host.mix() is not None
    batches = [one.decoder(2).open_batch() for one in (model, host)]
    assert isinstance(batches[0], OrtDecodeBatch)
    prompt = np.arange(1, 30)
    read = [batch.add(prompt) for batch in batches]
    assert np.array_equal(read[0], read[1])
    for token in range(1, 40):
        logits = [batch.step(np.array([token])) for batch in batches]
        assert np.array_equal(logits[0], logits[1])
    assert memory.read_bytes > 0
    assert batches[0].nbytes <= host.decoder(2).bytes_for(128)


def test_caches_of_32_bits_have_no_kernel_there_and_run_whole_rungs(
    tmp_path: Path, memory: ProviderMemory
) -> None:
    bundle = bundle_of(tmp_path, "kv")
    assert not CUDA.keeps_caches(bundle.manifest) and Device().keeps_caches(bundle.manifest)
    batch = open_model(bundle, 1, CUDA).decoder(2).open_batch()
    assert not isinstance(batch, OrtDecodeBatch)


def test_three_loads_and_unloads_leave_as_many_allocations_as_one(
    tmp_path: Path, memory: ProviderMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    live: weakref.WeakSet[ort.OrtValue] = weakref.WeakSet()
    allocate = ort.OrtValue.ortvalue_from_shape_and_type

    def allocated(*arguments: Any) -> ort.OrtValue:
        value = allocate(*arguments)
        live.add(value)
        return value

    monkeypatch.setattr(ort.OrtValue, "ortvalue_from_shape_and_type", allocated)
    bundle = bundle_of(tmp_path, "kv_fp16")
    left, most = [], []
    for _ in range(3):
        model = open_model(bundle, 1, CUDA)
        model.warm_up()
        batch = model.decoder(4).open_batch()
        batch.add(np.arange(1, 30))
        batch.step(np.array([1]))
        most.append(len(live))
        model.close()
        del model, batch
        gc.collect()
        left.append(len(live))
    assert left == [left[0]] * 3 == [0] * 3
    assert most[0] == most[1] == most[2] > 0


def test_a_device_that_gave_way_to_the_cpu_has_the_memory_of_the_cpu() -> None:
    assert memory_for(CUDA, ["CPUExecutionProvider"]) is memory_for(Device(), [])
    device = replace(CUDA, number=3, memory_mb=512)
    found = memory_for(device, ["CUDAExecutionProvider", "CPUExecutionProvider"])
    assert isinstance(found, ProviderMemory)
    assert (found.kind, found.number) == ("cuda", 3)
    assert cuda_provider(device)[1] == {
        "device_id": "3",
        "use_tf32": "0",
        "gpu_mem_limit": str(512 << 20),
        "arena_extend_strategy": "kSameAsRequested",
    }


@pytest.mark.parametrize("joins", [False, True])
@pytest.mark.parametrize("kind", [np.float32, np.float16])
def test_the_copying_graph_is_what_onnx_reads(kind: type, joins: bool) -> None:
    model = onnx.load_from_string(copy_graph(np.dtype(kind), joins))
    onnx.checker.check_model(model, full_check=True)
    names = ["kept", *(["more"] if joins else []), "rows", "held", "pads"]
    assert [value.name for value in model.graph.input][: len(names)] == names


def test_moved_caches_hold_what_they_held_and_zeros_behind_it() -> None:
    layout = CacheLayout(steps=2, buffers=4, heads=2, head_width=8, max_tokens=200)
    memory = provider_memory()

    def filled(rows: int, positions: int, value: float) -> DeviceCaches:
        caches = memory.caches(layout)
        caches.reserve(0, 0, rows, positions)
        for index, array in enumerate(caches.arrays):
            whole = array.value.numpy()
            whole[index] = value + index
            array.value.update_inplace(whole)
        return caches

    caches = filled(1, 10, 1.0)
    version, capacity = caches.version, caches.capacity
    assert capacity == 64 and not caches.reserve(1, 10, 1, 64)
    assert caches.reserve(1, 10, 1, 65) and caches.capacity == 128
    caches.join([10], filled(1, 10, 5.0), 7, 100)
    assert caches.version > version and caches.rows == 2
    block = caches.arrays[0].value.numpy()  # (buffers, rows, heads, capacity, head_width)
    for index in range(layout.buffers):
        assert (block[index, 0, :, :10] == 1 + index).all() and not block[index, 0, :, 10:].any()
        assert (block[index, 1, :, :7] == 5 + index).all() and not block[index, 1, :, 7:].any()
    caches.leave(0, [10, 7], 20)
    assert (caches.rows, caches.capacity) == (1, 64)
    assert (caches.arrays[2].value.numpy()[2, 0, :, :7] == 7).all()
    assert caches.nbytes == caches.arrays[0].value.tensor_size_in_bytes()
    caches.leave(0, [7], 20)
    assert caches.nbytes == 0 and not caches.arrays


def test_the_engine_writes_the_same_on_a_device_where_rungs_take_turns(
    tmp_path: Path, memory: ProviderMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three at once, of two rungs, one of them cut by its window."""
    folder = bundle_of(tmp_path, "kv_fp16").folder
    asked = [("fox", 4, 90), ("dog", 1, 90), ("lazy", 4, MAX_TOKENS + 40)]

    def written() -> list[str]:
        with LocalModel(folder, threads=1) as model, ThreadPoolExecutor(3) as pool:
            answers = [
                pool.submit(model.generate, text, steps=steps, max_tokens=count, temperature=0.0)
                for text, steps, count in asked
            ]
            return [answer.result(timeout=120) for answer in answers]

    host = written()
    assert memory.read_bytes == 0
    monkeypatch.setattr("serve.local.Device", lambda: CUDA)
    assert written() == host and all(host)
    assert memory.read_bytes > 0
