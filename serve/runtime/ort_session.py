"""An onnxruntime session for one graph of a bundle, and the check that it is the graph it must be.

Knows session options and the names of a graph's inputs and outputs; not what is run when.
"""

import os
from functools import cache
from pathlib import Path

import onnxruntime as ort

from serve.bundle import Bundle, BundleError, check_file
from serve.runtime.interface import Interface
from serve.runtime.interruptible import InterruptibleSession, shared_options
from serve.runtime.ort_weights import Weights
from serve.runtime.place import Place
from serve.runtime.providers import check_providers, providers_for

_CPU = Place()
# That threads look for more to do before they sleep: from product to product and call to call, but
# no longer, since they take the cores from the threads of every other session meanwhile.
_SPIN_US = 200
_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def usable_cores() -> int:
    """Cores that this process may use: its affinity, less what a container's quota takes away."""
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
    place: Place = _CPU,
    run_options: ort.RunOptions | None = None,
    weights: Weights | None = None,
    spin: bool = False,
) -> InterruptibleSession:
    """The session of one graph; BundleError when it is not what the manifest promises.

    With `spin` threads wait awake for a moment, as suits calls that come one upon the other.
    Without weights in memory onnxruntime reads the file, as for a device with memory of its own.
    """
    path = bundle.folder / file
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    options.log_severity_level = 3
    # Without a limit, idle threads of a dozen sessions burn the cores that a running one needs.
    options.add_session_config_entry("session.intra_op.allow_spinning", str(int(spin)))
    options.add_session_config_entry("session.intra_op.spin_duration_us", str(_SPIN_US))
    options.add_session_config_entry("session.inter_op.allow_spinning", "0")
    # One arena for all: a session's own would keep that session's largest batch for ever.
    _register_arena()
    options.add_session_config_entry("session.use_env_allocators", "1")
    if weights is not None:
        weights.lend(options)
    try:
        providers = providers_for(place.device, bundle, interface)
        session = ort.InferenceSession(path, options, providers=providers)
    except Exception as error:  # onnxruntime has no base class of its own
        raise failure(f"cannot be opened by onnxruntime {ort.__version__}", error, path) from error
    # Only now: another bundle may have taken this place since the files were checked.
    for name in (file,) if weights is not None else (file, bundle.manifest.weights):
        check_file(bundle.folder / name, bundle.manifest.files[name], verify=True)
    check_providers(session.get_providers(), place, str(path))
    check_interface(path, interface, session)
    return InterruptibleSession(session, run_options or shared_options(), weights)


@cache
def _register_arena() -> None:
    """The working memory that all sessions of the process take turns with."""
    place = ort.OrtMemoryInfo(
        "Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT
    )
    ort.create_and_register_allocator(place, ort.OrtArenaCfg({"arena_extend_strategy": 0}))


def check_interface(path: Path, interface: Interface, session: ort.InferenceSession) -> None:
    """The graph's inputs and outputs are those of its task, with the sizes of the manifest."""
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
    """A size that the graph leaves open fits anything; one that must be open has to be open."""
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
    """What a file is refused with, and what is to be done: it need not be the file's fault."""
    lines = str(error).strip().splitlines()
    # The rest is onnxruntime's own call stack.
    first = lines[0] if lines else type(error).__name__
    remedy = "export the bundle again"
    if isinstance(error, MemoryError) or "alloc" in first:
        remedy = "there is not enough memory: give the server more, or let it serve less"
    return BundleError(f"{problem} ({first}); {remedy}", file=str(path))
