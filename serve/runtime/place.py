"""Where a bundle is run: the device, and the folder of native engines if there is one.

Knows the words only; the runtimes know what they mean.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Device = Literal["cpu", "cuda", "tensorrt"]


@dataclass(frozen=True, slots=True)
class Place:
    """The CPU, unless something else is said."""

    device: Device = "cpu"
    allow_cpu_fallback: bool = False
    engines: Path | None = None  # native engines, which need no device of onnxruntime

    @property
    def runs_single_steps(self) -> bool:
        """Whether the graphs of one step run there; elsewhere each rung is one whole graph.

        Attention with caches has CUDA kernels for 16-bit floats only, and its caches are float32;
        and a graph of one step would come back to the host between any two steps.
        """
        return self.device == "cpu" and self.engines is None
