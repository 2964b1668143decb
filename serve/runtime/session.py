"""Sessions of onnxruntime: options, providers, weights, graph interfaces and bound buffers.

A session is opened only on a graph with the expected inputs and outputs.
"""

import ctypes
import hashlib
import importlib.util
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Self, final

import numpy as np
import onnxruntime as ort

from serve.bundle import (
    EVALUATIONS_PER_STEP,
    MANIFEST_FILE,
    Bundle,
    BundleError,
    ImageInput,
    Manifest,
    PointsInput,
    TextInput,
    TokenizerSpec,
    check_file,
    read_checked,
)
from serve.bundle.part import Part, between, part, several
from serve.runtime.cache import in_buckets
from serve.runtime.device import HOST, Memory, cuda_provider, memory_for
from serve.runtime.protocol import CPU, Device, DeviceName, FloatArray, IntArray, RowArray
from stepdial import install_command

# By name: the ONNX type and the shape. A word in a shape stands for any size, None for any shape,
# an empty type for any type.
Nodes = dict[str, tuple[str, tuple[int | str, ...] | None]]


@dataclass(frozen=True, slots=True)
class Interface:
    """The inputs and outputs of a graph, required and allowed."""

    inputs: Nodes
    outputs: Nodes
    more_inputs: Nodes = field(default_factory=dict)
    more_outputs: Nodes = field(default_factory=dict)


_INT64, _INT32 = "tensor(int64)", "tensor(int32)"
_FLOAT = "tensor(float)"
_CACHED = {"kv": _FLOAT, "kv_fp16": "tensor(float16)", "kv_int8": "tensor(int8)"}
_TOKENS: Nodes = {"tokens": (_INT64, ("batch", "length"))}
_KEEP: Nodes = {"keep": (_INT64, ("kept",))}
_A_ROW: Nodes = {"h": (_FLOAT, ("batch",))}
_TIME: Nodes = {"t": (_FLOAT, ("batch",))}
_LENGTHS: Nodes = {"seqlens": (_INT32, ("batch",)), "total": (_INT32, ())}
_CONTEXTS: Nodes = {f"context_{index}": ("", None) for index in range(8)}


def graph_interface(manifest: Manifest) -> Interface:
    """For the graph of any rung: the whole depth, without caches."""
    if manifest.labelled:
        return Interface(_taken(manifest), _classes(manifest) | _embedding(manifest))
    if manifest.task == "translate":
        inputs = _TOKENS | _source() | _memory(manifest) | _KEEP
        return Interface(inputs, _vocabulary(manifest))
    return Interface(_TOKENS | _KEEP, _vocabulary(manifest))


def encoder_interface(manifest: Manifest) -> Interface:
    """For the encoder of a translator's rung."""
    return Interface(_source(), _memory(manifest))


def embed_interface(manifest: Manifest) -> Interface:
    """For the graph before the first step."""
    if manifest.keeps_caches:
        past: Nodes = {"past": (_INT32, ("batch",))}
        return Interface(_TOKENS | past, _state("x", manifest) | _LENGTHS)
    taken = _taken(manifest) if manifest.labelled else _TOKENS
    return Interface(taken, _state("x", manifest), more_outputs=_CONTEXTS)


def step_interface(manifest: Manifest) -> Interface:
    """For one step of the method."""
    inputs, outputs = _state("x", manifest), _state("y", manifest)
    if manifest.depth != "fixed":
        inputs |= _A_ROW
    if manifest.method == "ab2":
        inputs |= _state("previous", manifest) | {"history": (_FLOAT, ("batch",))}
        outputs |= _state("v", manifest)
    if not manifest.keeps_caches:
        return Interface(inputs, outputs, more_inputs=_TIME | _CONTEXTS)
    shape = manifest.shape
    cache = (_CACHED[manifest.cache], ("batch", shape.heads, "capacity", shape.head_width))
    names = cache_names(EVALUATIONS_PER_STEP[manifest.method], shape.layers)
    return Interface(
        inputs | _LENGTHS | dict.fromkeys(names, cache),
        outputs | {f"{name}_out": cache for name in names},
        more_inputs=_TIME,
    )


def head_interface(manifest: Manifest) -> Interface:
    """For the graph that reads the answer from the last state."""
    if manifest.labelled:
        outputs = _classes(manifest) | _embedding(manifest)
        return Interface(_state("x", manifest), outputs, more_inputs=_CONTEXTS)
    inputs, more = _state("x", manifest) | _KEEP, {} if manifest.keeps_caches else _CONTEXTS
    return Interface(inputs, _vocabulary(manifest), more_inputs=more)


def cache_names(stages: int, layers: int) -> list[str]:
    """The cache inputs of a decoder's step; the outputs have the suffix _out."""
    return [
        f"{part}_{stage}_{layer}"
        for stage in range(stages)
        for layer in range(layers)
        for part in ("k", "v")
    ]


def _taken(manifest: Manifest) -> Nodes:
    match manifest.input:
        case ImageInput(channels=channels, height=height, width=width):
            return {"pixels": (_FLOAT, ("batch", channels, height, width))}
        case PointsInput(dimensions=dimensions):
            return {"points": (_FLOAT, ("batch", "count", dimensions))}
        case _:
            return _TOKENS


def _state(name: str, manifest: Manifest) -> Nodes:
    """A state: as many positions as the input for text, any shape for other inputs."""
    if manifest.keeps_caches:
        return {name: (_FLOAT, ("batch", "length", manifest.shape.state_width))}
    return {name: (_FLOAT, None)}


def _classes(manifest: Manifest) -> Nodes:
    """The scores of every label, for a row or for each of its positions."""
    place = ("batch", "length") if manifest.task == "tag" else ("batch",)
    return {"logits": (_FLOAT, (*place, len(manifest.labels or ())))}


def _embedding(manifest: Manifest) -> Nodes:
    """The pooled state that a classifier of texts reads its answer from, if it gives that."""
    if manifest.embedding is None:
        return {}
    return {"embedding": (_FLOAT, ("batch", manifest.embedding))}


def _vocabulary(manifest: Manifest) -> Nodes:
    return {"logits": (_FLOAT, ("batch", "kept", manifest.text_tokenizer.vocab_size))}


def _source() -> Nodes:
    return {"source": (_INT64, ("batch", "source_length"))}


def _memory(manifest: Manifest) -> Nodes:
    return {"memory": (_FLOAT, ("batch", "source_length", manifest.shape.width))}


DEFAULT_ROWS = 64
Dims = tuple[int, ...]
_Sizes = Annotated[tuple[Annotated[int, between(1, 1 << 31)], ...], several(8)]


@part
class ShapeRange(Part):
    """The smallest, usual and largest shape of an input, for TensorRT's profiles."""

    min: _Sizes
    opt: _Sizes
    max: _Sizes

    def holds(self, shape: Dims) -> bool:
        return len(shape) == len(self.min) and all(
            low <= size <= high for low, size, high in zip(self.min, shape, self.max, strict=True)
        )


Profile = Mapping[str, ShapeRange]


def one_profile(inputs: Nodes, manifest: Manifest, rows: int = DEFAULT_ROWS) -> Profile:
    """Any batch up to `rows`, tuned for half of that."""
    return _profile(inputs, manifest, (1, max(1, rows // 2), rows))


def profiles(inputs: Nodes, manifest: Manifest, rows: int = DEFAULT_ROWS) -> list[Profile]:
    """A single row, which does not wait for others; and batches of up to `rows`."""
    single = _profile(inputs, manifest, (1, 1, 1))
    return [single] if rows == 1 else [single, one_profile(inputs, manifest, rows)]


def _profile(inputs: Nodes, manifest: Manifest, batch: tuple[int, int, int]) -> Profile:
    sizes = _sizes(manifest) | {"batch": batch}
    # An engine of one step mostly takes one token a row, whose past is as long as it may be.
    if "seqlens" in inputs:
        sizes["length"] = (1, 1, sizes["length"][2])
    ranges = {}
    for name, (_, shape) in inputs.items():
        assert shape is not None, f"{name} has no shape"
        sides = [sizes[side] if isinstance(side, str) else (side,) * 3 for side in shape]
        low, usual, high = (tuple(side[index] for side in sides) for index in range(3))
        ranges[name] = ShapeRange(low, usual, high)
    return ranges


def _sizes(manifest: Manifest) -> dict[str, tuple[int, int, int]]:
    """What each word of an interface stands for."""
    match manifest.input:
        case ImageInput():
            return {}
        case PointsInput(max_points=most):
            return {"count": _up_to(most)}
        case text:
            written = manifest.target_max_tokens or text.max_tokens
            return {
                "length": _up_to(written),
                "source_length": _up_to(text.max_tokens),
                # Two even for a single prefix; all positions only where a decoder is verified.
                "kept": (1, 2, max(2, written)),
                "capacity": _up_to(in_buckets(text.max_tokens)),
            }


def _up_to(most: int) -> tuple[int, int, int]:
    return 1, max(1, most // 2), most


# onnxruntime only logs it when a provider cannot be created, and uses the CPU. Here that is an
# error that says what is missing.


Provider = tuple[str, dict[str, str]]

INSTALL = f"{install_command('gpu')} in an environment without onnxruntime, which excludes it"
_CPU: Provider = ("CPUExecutionProvider", {})
_NAMES = {"cuda": "CUDAExecutionProvider", "tensorrt": "TensorrtExecutionProvider"}
_DRIVER = "libcuda.so.1"
_log = logging.getLogger("stepdial.runtime")


def providers_for(device: Device, bundle: Bundle, interface: Interface) -> list[Provider]:
    """The providers for a session, the wanted one first, without those not installed."""
    if device.name == "cpu":
        return [_CPU]
    _load_libraries(device.name)
    # TF32 keeps 11 bits of a number: all that weights of 16 bits have, but not of 32.
    tf32 = bundle.manifest.precision in ("fp16", "bf16")
    wanted: list[Provider] = [cuda_provider(device, tf32), _CPU]
    if device.name == "tensorrt":
        profile = one_profile(interface.inputs, bundle.manifest)
        options = _tensorrt_options(cache_folder(bundle), profile)
        wanted.insert(0, (_NAMES["tensorrt"], {"device_id": str(device.number)} | options))
    available = ort.get_available_providers()
    return [provider for provider in wanted if provider[0] in available]


def check_providers(got: Sequence[str], device: Device, file: str) -> None:
    """BundleError unless a session got the provider of its device."""
    if device.name == "cpu" or _NAMES[device.name] in got:
        return
    problem = f"cannot run on {device.name}, only on {', '.join(got)}: {missing(device.name)}"
    if not device.allow_cpu_fallback:
        raise BundleError(
            f"{problem}; or serve with --device cpu, or with --allow-cpu-fallback", file=file
        )
    _log.warning("%s %s", file, problem)


def missing(device: DeviceName) -> str:
    """What must be installed for this device, as far as can be values."""
    if _NAMES.get(device) not in ort.get_available_providers():
        return f"this onnxruntime ({ort.__version__}) is for the CPU only: {INSTALL}"
    if not _loads(_DRIVER):
        return (
            f"there is no NVIDIA driver ({_DRIVER} cannot be loaded): install it, or start the "
            "container with --gpus all"
        )
    if device == "tensorrt" and importlib.util.find_spec("tensorrt") is None:
        return f"the package tensorrt is not installed: {INSTALL}"
    return (
        "onnxruntime could not start it, and its log above says why; python -c 'import "
        "onnxruntime; onnxruntime.print_debug_info()' lists the CUDA libraries that it finds"
    )


def cache_folder(bundle: Bundle) -> Path:
    """Where engines of onnxruntime's TensorRT provider are kept: outside the sealed bundle."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    name = f"{bundle.manifest.name}-{bundle_sha256(bundle)[:16]}"
    return Path(root) / "stepdial" / "tensorrt" / name


def bundle_sha256(bundle: Bundle) -> str:
    """One hash for a whole sealed bundle."""
    return hashlib.sha256((bundle.folder / MANIFEST_FILE).read_bytes()).hexdigest()


def _tensorrt_options(folder: Path, profile: Profile) -> dict[str, str]:
    """Engines are kept where that is possible, and built once for all shapes."""
    options = {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:  # such as of a user without a home, in a container
        _log.warning("engines of TensorRT are built anew at every start (%s)", error)
    else:
        options = {
            "trt_engine_cache_enable": "True",
            "trt_engine_cache_path": str(folder),
            "trt_timing_cache_enable": "True",
            "trt_timing_cache_path": str(folder),
        }
    for side in ("min", "opt", "max"):
        shapes = {name: getattr(bounds, side) for name, bounds in profile.items()}
        options[f"trt_profile_{side}_shapes"] = ",".join(
            f"{name}:{'x'.join(map(str, shape))}" for name, shape in shapes.items()
        )
    return options


def _load_libraries(device: DeviceName) -> None:
    """Load the CUDA and TensorRT libraries that were installed as Python packages, if any."""
    if hasattr(ort, "preload_dlls"):
        ort.preload_dlls()
    if device == "tensorrt" and importlib.util.find_spec("tensorrt") is not None:
        importlib.import_module("tensorrt")


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def shared_options() -> ort.RunOptions:
    """Options for all sessions of a model."""
    options = ort.RunOptions()
    # No CUDA graph is captured, which is the default; but unless it is said, every run looks for
    # one and throws internally, which takes a third as long as one step of a small model.
    options.add_run_config_entry("gpu_graph_id", "-1")
    return options


@final
class InterruptibleSession:
    """A session whose runs can be ended from another thread.

    All sessions of a model share their run options, so one switch ends whatever runs.
    """

    def __init__(
        self, session: ort.InferenceSession, options: ort.RunOptions, lent: object = None
    ) -> None:
        """`lent` is memory that the session uses; it lives as long as the session."""
        self._lent = lent
        self.get_inputs = session.get_inputs
        self.get_outputs = session.get_outputs
        self.get_providers = session.get_providers
        self.get_session_options = session.get_session_options
        self.io_binding = session.io_binding
        self.run = partial(session.run, run_options=options)
        self.run_with_iobinding = partial(session.run_with_iobinding, run_options=options)


_IN_PLACE = "session.use_external_initializer_file_buffers_directly"


@final
@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of a bundle in memory, read and checked once, for several sessions.

    By itself onnxruntime would map the file: writing to it would change the answers of a running
    server, and truncating it would crash the server. With `in_place` sessions use this memory
    without a copy. That saves memory for several sessions with the same weights, but most weights
    are repacked by onnxruntime and then held twice, so a single set of sessions copies.
    """

    file: str
    content: bytes
    in_place: bool

    @classmethod
    def read(cls, bundle: Bundle, in_place: bool) -> Self:
        """BundleError unless the file is the one that was sealed."""
        file = bundle.manifest.weights
        content = read_checked(bundle.folder / file, bundle.manifest.files[file])
        return cls(file, content, in_place)

    def lend(self, options: ort.SessionOptions) -> None:
        """Have a session take its weights from here."""
        options.add_session_config_entry(_IN_PLACE, str(int(self.in_place)))
        options.add_external_initializers_from_files_in_memory(
            [self.file], [self.content], [len(self.content)]
        )


# How long threads stay awake for more work: through a call and to the next, but no longer, since
# they take cores from other sessions meanwhile.
_SPIN_US = 200
_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def usable_cores() -> int:
    """Cores that this process may use: its affinity, within a container's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    try:
        quota, period = _CPU_QUOTA.read_text(encoding="ascii").split()
        if quota != "max":
            return max(1, min(cores or 1, round(int(quota) / int(period))))
    except (OSError, ValueError):
        pass
    return max(1, cores or 1)


def open_session(
    bundle: Bundle,
    file: str,
    interface: Interface,
    threads: int,
    device: Device = CPU,
    run_options: ort.RunOptions | None = None,
    weights: Weights | None = None,
    spin: bool = False,
) -> InterruptibleSession:
    """A session for one graph; BundleError if it is not what the manifest says.

    With `spin` threads stay awake for a moment, for calls that follow each other closely. Without
    weights in memory onnxruntime reads the file, as for devices with their own memory.
    """
    path = bundle.folder / file
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    options.log_severity_level = 3
    # Without a limit, idle threads of a dozen sessions take the cores of the running one.
    options.add_session_config_entry("session.intra_op.allow_spinning", str(int(spin)))
    options.add_session_config_entry("session.intra_op.spin_duration_us", str(_SPIN_US))
    options.add_session_config_entry("session.inter_op.allow_spinning", "0")
    # One arena for all: each session's own would keep its largest batch for ever.
    _register_arena()
    options.add_session_config_entry("session.use_env_allocators", "1")
    if weights is not None:
        weights.lend(options)
    try:
        providers = providers_for(device, bundle, interface)
        session = ort.InferenceSession(path, options, providers=providers)
    except Exception as error:  # onnxruntime has no base class of its own
        raise failure(f"cannot be opened by onnxruntime {ort.__version__}", error, path) from error
    # Only now: another bundle may have replaced this one since the files were checked.
    for name in (file,) if weights is not None else (file, bundle.manifest.weights):
        check_file(bundle.folder / name, bundle.manifest.files[name], verify=True)
    check_providers(session.get_providers(), device, str(path))
    check_interface(path, interface, session)
    return InterruptibleSession(session, run_options or shared_options(), weights)


@cache
def _register_arena() -> None:
    """Working memory shared by all sessions of the process."""
    place = ort.OrtMemoryInfo(
        "Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT
    )
    ort.create_and_register_allocator(place, ort.OrtArenaCfg({"arena_extend_strategy": 0}))


def check_interface(path: Path, interface: Interface, session: ort.InferenceSession) -> None:
    """Check a graph's inputs and outputs against its task and the manifest's sizes."""
    for side, nodes, wanted, more in (
        ("input", session.get_inputs(), interface.inputs, interface.more_inputs),
        ("output", session.get_outputs(), interface.outputs, interface.more_outputs),
    ):
        found = {node.name: (node.type, tuple(node.shape)) for node in nodes}
        for name in wanted:
            if name not in found:
                raise _mismatch(path, f"has no {side} {name}")
        for name, (found_kind, found_shape) in found.items():
            if name not in wanted and name not in more:
                raise _mismatch(path, f"has the unknown {side} {name}")
            kind, shape = wanted.get(name) or more[name]
            if found_kind != (kind or found_kind) or not _fits(found_shape, shape):
                raise _mismatch(
                    path,
                    f"has the {side} {name} as {found_kind} {list(found_shape)} instead of "
                    f"{kind} {list(shape or ())}",
                )


def _fits(found: tuple[int | str | None, ...], wanted: tuple[int | str, ...] | None) -> bool:
    """A size left open fits any; one that must be open has to be open."""
    return wanted is None or (
        len(found) == len(wanted)
        and all(
            not isinstance(have, int) or have == want
            for have, want in zip(found, wanted, strict=True)
        )
    )


def _mismatch(path: Path, problem: str) -> BundleError:
    return BundleError(f"{problem}; export the bundle again", file=str(path))


def failure(problem: str, error: Exception, path: Path) -> BundleError:
    """The error for a file that cannot be opened, and what to do."""
    lines = str(error).strip().splitlines()
    # The rest is onnxruntime's own call stack.
    first = lines[0] if lines else type(error).__name__
    remedy = "export the bundle again"
    if isinstance(error, MemoryError) or "alloc" in first:
        remedy = "there is not enough memory: give the server more, or let it serve less"
    return BundleError(f"{problem} ({first}); {remedy}", file=str(path))


_SMALL_END_BYTES = 1 << 20
HISTORY = 0.5  # of ab2: the weight of the step before


@final
@dataclass(eq=False)
class StepSessions:
    """The sessions of one step: embed, step, head. Every rung runs on them."""

    manifest: Manifest
    embed: InterruptibleSession
    step: InterruptibleSession
    single: InterruptibleSession  # the step of one token, which may be faster on fewer threads
    head: InterruptibleSession
    memory: Memory = HOST  # where states and caches are

    def __post_init__(self) -> None:
        manifest = self.manifest
        taken, read = ({node.name for node in one.get_inputs()} for one in (self.step, self.head))
        given = [node.name for node in self.embed.get_outputs() if node.name != "x"]
        # Outputs of the embedding that the step takes besides the state, and that the head takes.
        self.contexts = [name for name in given if name in taken]
        self.head_contexts = [name for name in given if name in read]
        self.history = manifest.method == "ab2"  # whether the step takes the last velocity
        self.stages = EVALUATIONS_PER_STEP[manifest.method]  # evaluations a step
        self.grid_steps = manifest.grid_steps
        # Whether a shorter answer ends with a step of its own.
        self.endings = manifest.step is not None and manifest.step.endings
        self._timed, self._sized = "t" in taken, "h" in taken  # a pass of fixed depth takes none

    def step_of(self, tokens: int) -> InterruptibleSession:
        """The session for a step of this many tokens."""
        return self.single if tokens == 1 else self.step

    def ends_apart(self, step: int) -> bool:
        """Whether an answer that ends with this step has another one in its place."""
        return self.endings and self.grid_steps is not None and step + 1 < self.grid_steps

    def times(
        self, step: int, steps: int, rows: int, ending: bool = False
    ) -> dict[str, FloatArray]:
        """The time and size inputs of a rung's step, for each row; of its ending, if it has one."""
        values: dict[str, float] = {}
        if ending:
            step = -1 - step
        crossing = self.grid_steps or steps  # steps that cross [0, T]
        if self._sized:
            values["h"] = self.manifest.T / crossing
        if self._timed:
            values["t"] = self.manifest.T * step / crossing
        if self.history:
            values["history"] = HISTORY if step else 0.0
        return {name: np.full(rows, value, dtype=np.float32) for name, value in values.items()}


def open_steps(
    bundle: Bundle,
    threads: int,
    run_options: ort.RunOptions | None = None,
    weights: Weights | None = None,
    spin: bool = False,
    device: Device = CPU,
) -> StepSessions:
    """The sessions of a bundle with graphs of one step; `spin` as in `open_session`."""
    manifest = bundle.manifest
    files = manifest.step
    assert files is not None, f"{manifest.name} has no graphs of one step"
    if device.name == "cpu":
        weights = weights or Weights.read(bundle, in_place=False)
    else:  # TensorRT has no attention with caches, which CUDA has
        device = replace(device, name="cuda")

    def opened(file: str, interface: Interface, threads: int, spins: bool) -> InterruptibleSession:
        return open_session(bundle, file, interface, threads, device, run_options, weights, spins)

    # Between two tokens other sessions' threads would slow the step.
    ends = 1 if _small_ends(manifest) else threads
    embed = opened(files.embed, embed_interface(manifest), ends, False)
    step = opened(files.step, step_interface(manifest), threads, spin)
    head = opened(files.head, head_interface(manifest), ends, False)
    given = {node.name: node.type for node in embed.get_outputs()}
    for file, session in ((files.step, step), (files.head, head)):
        for node in session.get_inputs():
            if node.name.startswith("context_") and given.get(node.name) != node.type:
                raise BundleError(
                    f"takes {node.name} as {node.type}, which {files.embed} does not give; export "
                    "the bundle again",
                    file=str(bundle.folder / file),
                )
    memory = memory_for(device, step.get_providers())
    return StepSessions(manifest, embed, step, step, head, memory)


def _small_ends(manifest: Manifest) -> bool:
    """Whether embedding and head take less time than waking a thread."""
    if not manifest.keeps_caches:
        return False
    tokens = manifest.text_tokenizer.vocab_size
    return tokens * manifest.shape.width * np.dtype(np.float32).itemsize <= _SMALL_END_BYTES


# What a graph may be given.


def check_tokens(tokens: RowArray, dimensions: int, vocab_size: int) -> IntArray:
    """The tokens, contiguous; ValueError if there are none or one is outside the vocabulary."""
    if tokens.ndim != dimensions or tokens.dtype != np.int64 or tokens.size == 0:
        raise ValueError(
            f"tokens must be a non-empty int64 array of {dimensions} dimensions, not "
            f"{tokens.dtype} {tokens.shape}"
        )
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"token {low if low < 0 else high} is outside the vocabulary of {vocab_size}"
        )
    return np.ascontiguousarray(tokens, dtype=np.int64)


def check_rows(rows: RowArray, manifest: Manifest) -> RowArray:
    """The rows, contiguous; ValueError if the manifest does not allow them."""
    match manifest.input:
        case ImageInput(channels=channels, height=height, width=width):
            return _check_floats(rows, (channels, height, width))
        case PointsInput(max_points=max_points, dimensions=dimensions):
            rows = _check_floats(rows, (rows.shape[1] if rows.ndim > 1 else 0, dimensions))
            if rows.shape[1] > max_points:
                raise ValueError(f"{rows.shape[1]} points are more than {max_points}")
            return rows
        case TextInput(max_tokens=max_tokens):
            assert manifest.tokenizer is not None
            return _check_texts(rows, manifest.tokenizer, max_tokens)


def _check_texts(rows: RowArray, tokenizer: TokenizerSpec, max_tokens: int) -> IntArray:
    tokens = check_tokens(rows, 2, tokenizer.vocab_size)  # (B, N)
    if tokens.shape[1] > max_tokens:
        raise ValueError(
            f"{tokens.shape[1]} tokens a row are more than max_tokens ({max_tokens}); "
            "truncate first"
        )
    if (tokens[:, 0] == tokenizer.pad_id).any():
        raise ValueError("a row begins with padding; each has a real token, pads to its right")
    return tokens


def _check_floats(rows: RowArray, shape: tuple[int, ...]) -> FloatArray:
    """Rows (B, *shape) of finite numbers, contiguous."""
    if rows.dtype != np.float32 or rows.shape[1:] != shape or rows.size == 0:
        raise ValueError(
            f"rows must be a non-empty float32 array of shape (batch, "
            f"{', '.join(map(str, shape))}), not {rows.dtype} {rows.shape}"
        )
    floats: FloatArray = np.ascontiguousarray(rows, dtype=np.float32)
    if not np.isfinite(floats).all():
        raise ValueError("rows hold a number that is not finite")
    return floats
