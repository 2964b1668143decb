"""Decoding on a device, through the CPU provider's own OrtValues: the same tokens, nothing copied.

Stand-ins count what ONNX Runtime allocates and what crosses between the device and the host.
"""

import gc
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from export.tensorrt import sample_rows
from serve.bundle import Bundle, Cache, read_bundle
from serve.local import LocalModel
from serve.runtime import open_model
from serve.runtime.cache import CacheLayout
from serve.runtime.classifier import (
    OrtStepClassifier,
    ParallelStepClassifier,
    ahead,
    present_positions,
)
from serve.runtime.decoder import OrtDecodeBatch, OrtDecoder
from serve.runtime.device import (
    HOST,
    DeviceCaches,
    Memory,
    ProviderMemory,
    copy_graph,
    cuda_provider,
    join_graph,
    jump_graph,
    memory_for,
    pick_graph,
)
from serve.runtime.protocol import Device, EarlyAnswers, FloatArray, IntArray, Speculation
from serve.runtime.session import open_steps
from tests.fixtures.tiny_bundles import build_classify, build_generate
from tests.fixtures.tiny_families import build_image, build_points, build_tag

STEPS = (1, 2, 4)
MAX_TOKENS = 160
KINDS = pytest.mark.parametrize("cache", ["kv", "kv_fp16"])
CUDA = Device("cuda", allow_cpu_fallback=True)
ZOO = Path(__file__).parents[2] / "zoo"


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
    """The logits of rows that come, go, and grow past a bucket."""
    chance = np.random.default_rng(0)

    def tokens(count: int) -> IntArray:
        return chance.integers(1, vocab_size, count)

    batch, seen = decoder.open_batch(), []
    for length in (5, 70, 12):
        seen.append(batch.add(tokens(length)))
    for _ in range(4):
        seen.append(batch.step(tokens(3)))
    batch.remove(0)  # the last row takes its number
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
    with counted(monkeypatch, batch) as count:
        for _ in range(tokens):
            batch.step(np.ones(rows, dtype=np.int64))
    return count["calls"]


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch, batch: OrtDecodeBatch) -> Iterator[dict[str, int]]:
    """Counts the calls of a batch's sessions."""
    count = {"calls": 0}
    sessions = batch.sessions
    each = {sessions.embed, sessions.step, sessions.single, sessions.head}
    for session, way in product(each, ("run", "run_with_iobinding")):
        run = getattr(session, way)

        def counting(*arguments: Any, run: Any = run, **named: Any) -> Any:
            count["calls"] += 1
            return run(*arguments, **named)

        monkeypatch.setattr(session, way, counting)
    yield count


def test_models_on_a_device_decode_with_caches_of_16_bits_and_take_turns(
    tmp_path: Path, memory: ProviderMemory
) -> None:
    bundle = bundle_of(tmp_path, "kv_fp16")
    model, host = open_model(bundle, 1, CUDA), open_model(bundle, 1)
    mixes = model.mix(), host.mix()
    assert mixes[0] is not None and mixes[1] is not None
    assert (mixes[0].most_batches, mixes[1].most_batches) == (1, len(STEPS))
    assert mixes[0].can_speculate
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
    names = ["order", "held", "pads"]
    more = [f"more_{name}" for name in names] if joins else []
    wanted = {"kept", "rows", *names, *more} | ({"more"} if joins else set())
    assert {value.name for value in model.graph.input} == wanted


@pytest.mark.parametrize("kind", [np.float32, np.bool_, np.int64])
def test_the_graphs_of_states_are_what_onnx_reads(kind: type) -> None:
    dtype = np.dtype(kind)
    for graph in (pick_graph(dtype, 3), join_graph(dtype, 2), jump_graph(4)):
        onnx.checker.check_model(onnx.load_from_string(graph), full_check=True)


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


@pytest.mark.parametrize("lead", [2, 4])
def test_steps_a_lead_apart_lie_side_by_side(lead: int) -> None:
    layout = CacheLayout(steps=8, buffers=16, heads=2, head_width=8, max_tokens=200)
    caches = provider_memory().caches(layout)
    caches.reserve(0, 0, 1, 10)
    whole = caches.arrays[0].value.numpy()
    for step in range(8):
        for at in range(2):
            whole[at * 8 + step] = 10 * step + at
    caches.arrays[0].value.update_inplace(whole)
    assert not caches.arrange(1, 10) and caches.arrange(lead, 10)
    block = caches.arrays[0].value.numpy()
    start = caches.arrays[0].value.data_ptr()
    a_row = caches.arrays[0].value.tensor_size_in_bytes() // 16
    for step in range(8 - lead):
        for at, found in enumerate(caches.along(step, 2)):
            assert found.shape == (2, 2, 64, 8)
            first = (found.address - start) // a_row
            for place, there in ((first, step), (first + 1, step + lead)):
                assert (block[place, 0, :, :10] == 10 * there + at).all()
    each = [(array.address - start) // a_row for array in caches.arrays]
    assert sorted(each) == list(range(16))
    # A row that joins brings its buffers in another order.
    alone = provider_memory().caches(layout)
    alone.join([], caches, 10, 20)
    assert (alone.lead, alone.rows) == (1, 1)
    assert np.array_equal(alone.arrays[0].value.numpy()[..., :10, :], whole[..., :10, :])


def test_a_row_that_speculates_on_a_device_gets_what_it_gets_on_the_cpu(
    tmp_path: Path, memory: ProviderMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right drafts and wrong ones, past a bucket; only tokens, lengths and logits cross."""
    bundle = build_generate(
        tmp_path / "g", steps=(1, 2, 4, 8), max_tokens=MAX_TOKENS, cache="kv_fp16"
    )
    vocab_size = bundle.manifest.text_tokenizer.vocab_size
    crossed = count_crossings(monkeypatch)
    found: dict[str, list[FloatArray]] = {}
    calls: dict[str, int] = {}
    for name, device in (("host", Device()), ("device", CUDA)):
        model = open_model(bundle, 1, device)
        batch, mix = model.decoder(8).open_batch(), model.mix()
        assert isinstance(batch, OrtDecodeBatch) and mix is not None
        batch.add(np.arange(1, 51))
        crossed.update(read=0, written=0)
        with counted(monkeypatch, batch) as count:
            found[name] = speculated(mix.speculation(batch, 2), tokens=40)
        calls[name] = count["calls"]
        if device is CUDA:
            assert isinstance(batch._caches, DeviceCaches) and batch._caches.lead == 2
            assert 0 < crossed["read"] <= calls[name] * 4 * vocab_size * 4
            assert crossed["read"] % (vocab_size * 4) == 0
            assert crossed["written"] < calls[name] * 200 < batch.nbytes
    assert calls["host"] == calls["device"]
    assert len(found["host"]) == 40
    assert all(
        np.array_equal(one, other)
        for one, other in zip(found["host"], found["device"], strict=True)
    )


def speculated(speculation: Speculation, tokens: int) -> list[FloatArray]:
    """The logits of greedy tokens, with every third draft made wrong."""
    found: list[FloatArray] = []
    token, drafted = 3, 0
    while len(found) < tokens:
        if speculation.tokens[:1] != [token]:
            speculation.keep(0)
            speculation.begin(token)
        while True:
            output = speculation.advance()
            if output.drafts is not None and speculation.tokens and speculation.room:
                drafted += 1
                guess = int(output.drafts[-1].argmax())
                speculation.begin(1 if drafted % 3 == 0 else guess)
            if output.last is not None:
                found.append(output.last)
                token = int(output.last.argmax())
                break
    return found


def test_rungs_go_step_by_step_on_a_device_each_in_its_turn(
    tmp_path: Path, memory: ProviderMemory
) -> None:
    bundle = bundle_of(tmp_path, "kv_fp16")
    models = open_model(bundle, 1, Device()), open_model(bundle, 1, CUDA)
    found: list[list[FloatArray]] = []
    for model in models:
        mix, seen = model.mix(), []
        assert mix is not None
        batches = [model.decoder(steps).open_batch() for steps in (2, 4)]
        for batch in batches:
            assert isinstance(batch, OrtDecodeBatch)
            for row in range(2):
                seen.append(batch.add(np.arange(1, 60 + row)))
        for _ in range(6):
            for batch, steps in zip(batches, (2, 4), strict=True):
                mix.begin([batch], [np.array([5, 6])])
                for _ in range(steps):
                    mix.advance([batch])
                seen += mix.end([batch])
        found.append(seen)
    assert all(np.array_equal(one, other) for one, other in zip(*found, strict=True))
    assert memory.read_bytes > 0


@pytest.mark.parametrize("build", [build_classify, build_image, build_points, build_tag])
def test_classifiers_stop_early_on_a_device_as_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, build: Callable[[Path], Bundle]
) -> None:
    """States stay there: rows go in once, logits come out after each step."""
    bundle = build(tmp_path / "c")
    manifest = bundle.manifest
    sessions, memory = open_steps(bundle, 1), provider_memory()
    steps = manifest.steps[-1]
    host = OrtStepClassifier(sessions, manifest, steps)
    device = OrtStepClassifier(replace(sessions, memory=memory), manifest, steps)
    crossed = count_crossings(monkeypatch)
    for rows in sample_rows(manifest, np.random.default_rng(0)):
        assert np.array_equal(host.run(rows), device.run(rows))
        if manifest.embedding is not None:
            assert np.array_equal(host.embed(rows), device.embed(rows))
        traced = host.traced(rows, None), device.traced(rows, None)
        same(*traced)
        assert traced[0].readouts is not None
        margins = np.sort(ahead(traced[0].readouts, present_positions(rows, manifest)).ravel())
        for threshold in (0.0, float(margins[len(margins) // 2]), 1e9):
            crossed.update(read=0, written=0)
            early = device.early(rows, threshold)
            assert crossed["read"] <= steps * early.logits.nbytes
            assert crossed["written"] <= rows.nbytes + steps * 64 * (len(rows) + 1)
            same(host.early(rows, threshold), early)


def same(one: EarlyAnswers, other: EarlyAnswers) -> None:
    assert np.array_equal(one.logits, other.logits)
    assert np.array_equal(one.evaluations, other.evaluations)
    assert (one.readouts is None) == (other.readouts is None)
    if one.readouts is not None and other.readouts is not None:
        assert np.array_equal(one.readouts, other.readouts)


def test_a_server_on_a_device_keeps_early_answers(tmp_path: Path, memory: ProviderMemory) -> None:
    bundle = read_bundle(ZOO / "digits")
    assert bundle.manifest.calibration is not None
    model = open_model(bundle, 1, CUDA)
    assert model.single_steps
    rows = next(iter(sample_rows(bundle.manifest, np.random.default_rng(1))))
    steps = bundle.manifest.full_steps
    before = memory.read_bytes
    answers = [
        one.step_classifier(steps).early(rows, 1.0) for one in (model, open_model(bundle, 1))
    ]
    assert memory.read_bytes > before
    assert np.array_equal(answers[0].logits, answers[1].logits)
    # Without a limit, whole rungs answer there.
    assert not isinstance(model.classifier(steps), ParallelStepClassifier)


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
    monkeypatch.setattr("serve.local.CPU", CUDA)
    assert written() == host and all(host)
    assert memory.read_bytes > 0
