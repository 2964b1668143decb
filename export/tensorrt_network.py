"""One graph to one serialized TensorRT engine: the only place that calls TensorRT's builder.

Knows the builder; neither bundles nor where the engine goes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from serve.bundle import BundleError
from serve.runtime.trt_shapes import Profile


@dataclass(frozen=True, slots=True)
class GraphSource:
    """A graph as bytes, and the file beside which its weights lie."""

    data: bytes
    path: str


def build_plan(
    library: ModuleType,
    source: GraphSource,
    profiles: Sequence[Profile],
    timings: bytes,
    allow_tf32: bool,
) -> tuple[bytes, bytes]:
    """The engine, and the timings that make the next build quicker."""
    logger = library.Logger(library.Logger.WARNING)
    builder = library.Builder(logger)
    flags = 1 << int(library.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    network = builder.create_network(flags)
    _parse(library, network, logger, source)
    config = builder.create_builder_config()
    if allow_tf32:
        config.set_flag(library.BuilderFlag.TF32)
    else:
        config.clear_flag(library.BuilderFlag.TF32)
    # Attention asks whether a score is no number, which must not be optimised away.
    config.set_flag(library.BuilderFlag.STRICT_NANS)
    for profile in profiles:
        _add_profile(builder, network, config, profile)
    _set_timings(config, timings)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise BundleError(
            "TensorRT could not build an engine of it; its log above says why", file=source.path
        )
    return bytes(plan), bytes(config.get_timing_cache().serialize())


def _parse(library: ModuleType, network: Any, logger: Any, source: GraphSource) -> None:
    parser = library.OnnxParser(network, logger)
    if parser.parse(source.data, path=source.path):
        return
    problems = [str(parser.get_error(index)) for index in range(parser.num_errors)]
    raise BundleError(
        f"cannot be read by the parser of TensorRT {library.__version__}: {'; '.join(problems)}",
        file=source.path,
    )


def _add_profile(builder: Any, network: Any, config: Any, profile: Profile) -> None:
    names = {network.get_input(index).name for index in range(network.num_inputs)}
    if names != set(profile):
        raise BundleError(
            f"has the inputs {', '.join(sorted(names))} instead of {', '.join(sorted(profile))}; "
            "export the bundle again"
        )
    made = builder.create_optimization_profile()
    for name, bounds in profile.items():
        made.set_shape(name, bounds.min, bounds.opt, bounds.max)
    if config.add_optimization_profile(made) < 0:
        raise BundleError("TensorRT refused an optimization profile; its log above says why")


def _set_timings(config: Any, timings: bytes) -> None:
    """Start from timings kept before, unless they are of another GPU or version."""
    cache = config.create_timing_cache(timings)
    if cache is None or not config.set_timing_cache(cache, ignore_mismatch=False):
        config.set_timing_cache(config.create_timing_cache(b""), ignore_mismatch=False)
