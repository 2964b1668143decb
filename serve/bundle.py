"""The bundle, the contract between export and serve: one place to import it from.

Knows the folder and its JSON, as docs/bundle.md specifies them; neither graphs nor runtimes.
"""

from serve.bundle_calibration import Calibration, Level
from serve.bundle_fields import BundleError
from serve.bundle_input import ImageInput, InputSpec, PointsInput, TextInput, Truncation
from serve.bundle_latency import Latency, LatencyEntry, Machine
from serve.bundle_manifest import (
    LATENCY_FILE,
    MANIFEST_FILE,
    SCHEMA_VERSION,
    Manifest,
    Precision,
)
from serve.bundle_read import Bundle, read_bundle
from serve.bundle_rung import (
    EFFORTS,
    EVALUATIONS_PER_STEP,
    METHODS,
    AgainstFp32,
    Effort,
    Method,
    Metric,
    Quality,
    Rung,
    Verified,
)
from serve.bundle_seal import open_staging, seal_bundle, write_latency
from serve.bundle_spec import MIXED_GROUPS, FileEntry, Shape, StepFiles, TokenizerSpec
from serve.bundle_task import Cache, Depth, Task

__all__ = [
    "EFFORTS",
    "EVALUATIONS_PER_STEP",
    "LATENCY_FILE",
    "MANIFEST_FILE",
    "METHODS",
    "MIXED_GROUPS",
    "SCHEMA_VERSION",
    "AgainstFp32",
    "Bundle",
    "BundleError",
    "Cache",
    "Calibration",
    "Depth",
    "Effort",
    "FileEntry",
    "ImageInput",
    "InputSpec",
    "Latency",
    "LatencyEntry",
    "Level",
    "Machine",
    "Manifest",
    "Method",
    "Metric",
    "PointsInput",
    "Precision",
    "Quality",
    "Rung",
    "Shape",
    "StepFiles",
    "Task",
    "TextInput",
    "TokenizerSpec",
    "Truncation",
    "Verified",
    "open_staging",
    "read_bundle",
    "seal_bundle",
    "write_latency",
]
