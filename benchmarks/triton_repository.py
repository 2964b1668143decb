"""Whether a stock Triton server gives the answers of our own classifiers from the same bundles.

    python -m benchmarks.triton_repository [--tritonserver FILE] [--bundles FOLDER ...]

Writes a model repository, starts `tritonserver` on 127.0.0.1 with it, asks it over HTTP, and
compares. Needs a tritonserver with the onnxruntime and Python backends (its image has them; add
`pip install tokenizers`). Without one it ends with status 3.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.lab import ZOO, Cell, Provenance, Table, bundles_in
from benchmarks.server import free_ports
from export.triton import graph_input, rung_name, text_name, write_repository
from serve.bundle import Bundle, TextInput, read_bundle
from serve.engine.classify import softmax
from serve.inputs.text import TextCodec
from serve.runtime import open_model
from serve.runtime.protocol import FloatArray, largest_row

ABSENT = 3
WRONG = 1
TOLERANCE = 1e-4  # of a score; both run float32, perhaps in other orders of sums
_READY_S = 120.0
_TEXTS = ("A wonderful film, and a moving one.", "Dull, and far too long. " * 40, "stocks fell")


def main(argv: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else list(argv)
    parsed = _parser().parse_args(arguments)
    found = shutil.which(parsed.tritonserver)
    if found is None:
        print(
            f"there is no {parsed.tritonserver} here: run this in Triton's image "
            "(nvcr.io/nvidia/tritonserver), or name the file with --tritonserver",
            file=sys.stderr,
        )
        return ABSENT
    bundles = [read_bundle(folder) for folder in parsed.bundles or bundles_in(ZOO)]
    bundles = [bundle for bundle in bundles if bundle.manifest.task == "classify"]
    provenance = Provenance.now("triton_repository", arguments)
    with tempfile.TemporaryDirectory() as folder:
        repository = Path(folder) / "repository"
        repository.mkdir()
        for bundle in bundles:
            _merge(bundle, Path(folder) / bundle.manifest.name, repository)
        with _served(found, repository, parsed.backends) as url:
            rows = [row for bundle in bundles for row in _compare(bundle, url)]
    columns = ("model", "steps", "rows", "largest difference of a score", "the same")
    table = Table("Triton against our own classifier", columns, rows)
    print(provenance.result("triton_repository", "Triton", __doc__ or "", [table], []).text)
    return 0 if all(row[-1] == "yes" for row in rows) else WRONG


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tritonserver", default="tritonserver", help="the program (on the PATH)")
    parser.add_argument(
        "--backends", type=Path, metavar="FOLDER", help="its backends, if not where it looks"
    )
    parser.add_argument("--bundles", nargs="+", type=Path, metavar="FOLDER")
    return parser


def _merge(bundle: Bundle, alone: Path, repository: Path) -> None:
    """One repository of several bundles: their models lie side by side."""
    write_repository(bundle, alone, lambda said: None)
    for model in alone.iterdir():
        model.rename(repository / model.name)


@contextmanager
def _served(program: str, repository: Path, backends: Path | None) -> Iterator[str]:
    (port,) = free_ports(1)
    command = [program, f"--model-repository={repository}", "--http-address=127.0.0.1"]
    command += [f"--http-port={port}", "--allow-grpc=false", "--allow-metrics=false"]
    command += [f"--backend-directory={backends}"] if backends else []
    with tempfile.TemporaryFile() as log, subprocess.Popen(command, stdout=log, stderr=log) as run:
        try:
            url = f"http://127.0.0.1:{port}/v2"
            if not _ready(url, run):
                log.seek(0)
                raise SystemExit(f"tritonserver was not ready:\n{log.read().decode()[-8000:]}")
            yield url
        finally:
            run.terminate()


def _ready(url: str, run: subprocess.Popen[bytes]) -> bool:
    end = time.monotonic() + _READY_S
    while time.monotonic() < end and run.poll() is None:
        with suppress(httpx.TransportError):
            if httpx.get(f"{url}/health/ready", timeout=5).status_code == 200:
                return True
        time.sleep(0.2)
    return False


def _compare(bundle: Bundle, url: str) -> Iterator[list[Cell]]:
    """A row a rung: how far the server's scores are from ours."""
    manifest, model = bundle.manifest, open_model(bundle)
    for rung in manifest.rungs:
        if isinstance(manifest.input, TextInput):
            codec = TextCodec(bundle)
            encoded = [codec.encode_input(text, truncate=True).tokens for text in _TEXTS]
            logits = [model.classifier(rung.steps).run(np.array([one]))[0] for one in encoded]
            name = text_name(manifest, rung)
            got, labels = _ask(url, name, "text", "BYTES", [[text] for text in _TEXTS])
        else:
            name = rung_name(manifest, rung)
            shape = (3, *largest_row(manifest).shape)
            taken = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
            logits = list(model.classifier(rung.steps).run(taken))
            got, labels = _ask(url, name, graph_input(manifest)[0], "FP32", taken.tolist())
        wanted = np.stack([softmax(row) for row in logits])  # (B, C)
        ours = [(manifest.labels or ())[index] for index in wanted.argmax(1)]
        error = float(np.abs(got - wanted).max())
        same = labels == ours and error <= TOLERANCE
        yield [name, rung.steps, len(wanted), f"{error:.1e}", "yes" if same else "NO"]


def _ask(
    url: str, model: str, name: str, kind: str, rows: list[Any]
) -> tuple[FloatArray, list[str]]:
    """The scores (B, C) of some rows, and the label of the best of each."""
    shape = list(np.array(rows, dtype=object if kind == "BYTES" else np.float32).shape)
    taken = {"name": name, "datatype": kind, "shape": shape, "data": rows}
    scores = _post(f"{url}/models/{model}/infer", {"inputs": [taken]}, "scores")
    best = {"name": "scores", "parameters": {"classification": 1}}
    labels = _post(f"{url}/models/{model}/infer", {"inputs": [taken], "outputs": [best]}, "scores")
    made: FloatArray = np.array(scores["data"], dtype=np.float32).reshape(scores["shape"])
    return made, [one.split(":", 2)[2] for one in labels["data"]]


def _post(url: str, body: dict[str, Any], output: str) -> dict[str, Any]:
    answer = httpx.post(url, json=body, timeout=60).raise_for_status().json()
    found: dict[str, Any] = next(one for one in answer["outputs"] if one["name"] == output)
    return found


if __name__ == "__main__":
    sys.exit(main())
