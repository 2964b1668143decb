"""The bundle, the contract between export and serve: one place to import it from.

Knows the folder and its JSON, as docs/bundle.md specifies them; neither graphs nor runtimes.
"""

from serve.bundle.calibration import Calibration, Level
from serve.bundle.fields import BundleError
from serve.bundle.inputs import ImageInput, InputSpec, PointsInput, TextInput, Truncation
from serve.bundle.latency import Latency, LatencyEntry, Machine
from serve.bundle.manifest import (
    LATENCY_FILE,
    MANIFEST_FILE,
    MAX_RUNGS,
    SCHEMA_VERSION,
    Manifest,
    Precision,
    check_name,
)
from serve.bundle.reading import Bundle, check_file, read_bundle, read_checked
from serve.bundle.rung import (
    EFFORTS,
    EVALUATIONS_PER_STEP,
    METHODS,
    AgainstFp32,
    Effort,
    Method,
    Metric,
    Quality,
    Range,
    Rung,
    Verified,
    steps_in_words,
)
from serve.bundle.seal import seal_bundle, write_latency
from serve.bundle.spec import FileEntry, Shape, StepFiles, TokenizerSpec
from serve.bundle.staging import open_staging
from serve.bundle.task import LABELLING, Cache, Depth, Dial, Task

__all__ = [
    "EFFORTS",
    "EVALUATIONS_PER_STEP",
    "LABELLING",
    "LATENCY_FILE",
    "MANIFEST_FILE",
    "MAX_RUNGS",
    "METHODS",
    "SCHEMA_VERSION",
    "AgainstFp32",
    "Bundle",
    "BundleError",
    "Cache",
    "Calibration",
    "Depth",
    "Dial",
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
    "Range",
    "Rung",
    "Shape",
    "StepFiles",
    "Task",
    "TextInput",
    "TokenizerSpec",
    "Truncation",
    "Verified",
    "check_file",
    "check_name",
    "open_staging",
    "read_bundle",
    "read_checked",
    "seal_bundle",
    "steps_in_words",
    "write_latency",
]
