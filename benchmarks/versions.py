"""Another version of a model: of the same name and ladder, with other weights, so other answers.

Knows the files of a bundle; deliberately nothing of who serves them.
"""

import shutil
from pathlib import Path

import numpy as np

from serve.bundle import LATENCY_FILE, Bundle, open_staging, seal_bundle

_CHANGE = 0.05  # of a weight, as a share of it


def write_version(bundle: Bundle, folder: Path, seed: int) -> Bundle:
    """A copy whose weights, all float32, are changed by chance."""
    names = [*bundle.manifest.files]
    if (bundle.folder / LATENCY_FILE).is_file():
        names.append(LATENCY_FILE)
    with open_staging(folder) as staging:
        for name in names:
            shutil.copyfile(bundle.folder / name, staging / name)
        path = staging / bundle.manifest.weights
        weights = np.fromfile(path, np.float32)
        noise = np.random.default_rng(seed).uniform(-_CHANGE, _CHANGE, weights.size)
        (weights * (1 + noise).astype(np.float32)).tofile(path)
        return seal_bundle(staging, bundle.manifest, folder)
