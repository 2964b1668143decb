"""From a training run to a bundle: trace one evaluation, stitch graphs, verify, measure, pack."""

import os

# As serve.runtime has it; some modules here import onnxruntime before that package.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
