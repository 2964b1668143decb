"""Runs made of bundles of the zoo, so that they can be exported otherwise without training again.

    python -m benchmarks.zoo_runs --data NAME=PATH [NAME=PATH ...] --out RUNS

The graph of one step count in float32 holds all weights: those of matrix products transposed and
without a name, in the order in which they are used, positions as a slice, all others under the end
of their name. The model that gets them must answer as the bundle does. It can do models of
text and images, of Euler's method and without any conditions on time.
"""

import argparse
import dataclasses
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from torch import Tensor

from benchmarks.lab import ZOO
from serve.bundle import Bundle, ImageInput, read_bundle
from serve.runtime import open_model
from train.checkpoint import Reached, read_tokenizer, save_checkpoint, start_run
from train.data import open_dataset
from train.model import Stepped, build_model, count_parameters
from train.recipe import recipe_from

_USED = ("attention.qkv", "attention.out", "feedforward.up", "feedforward.down")
_POSITIONS = "embed.positions.weight"
_NEAR = 1e-3  # of a logit


def main(arguments: Sequence[str]) -> int:
    made = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    made.add_argument("--data", nargs="+", required=True, metavar="NAME=PATH")
    made.add_argument("--out", type=Path, required=True, metavar="RUNS")
    parsed = made.parse_args(arguments)
    for name, path in (pair.split("=", 1) for pair in parsed.data):
        make_run(read_bundle(ZOO / name), path, parsed.out / name)
        print(f"made: {parsed.out / name}")
    return 0


def make_run(bundle: Bundle, data: str, folder: Path) -> None:
    """The run that such a bundle could have been exported of."""
    facts: Mapping[str, Any] = bundle.manifest.provenance
    recipe = recipe_from(facts["recipe"], str(bundle.folder))
    recipe = dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, path=data))
    words = read_tokenizer(bundle.folder) if bundle.manifest.tokenizer else None
    dataset = open_dataset(recipe, words)
    model = build_model(recipe.model, dataset.sizes).eval()
    _fill(model, bundle)
    _check(model, bundle)
    kept = {
        "labels": dataset.labels,
        "sizes": dataclasses.asdict(dataset.sizes),
        "parameters": count_parameters(model),
        "data_sha256": dataset.digest,
        "otify": None,
        "own_model": False,
    }
    start_run(folder, recipe, dataset.tokenizer, kept)
    optimiser = torch.optim.SGD(model.parameters())  # it has nothing to keep
    save_checkpoint(folder, model, optimiser, Reached(int(facts["iteration"])))


def _fill(model: Stepped, bundle: Bundle) -> None:
    rung = bundle.manifest.rungs[0]
    graph = onnx.load(bundle.folder / rung.graph).graph
    # Newer exports name what attention is wrapped in while it is exported.
    found = {
        one.name.replace(".attention.attention.", ".attention."): numpy_helper.to_array(one)
        for one in graph.initializer
    }
    used = [node.input[1] for node in graph.node if node.op_type == "MatMul"]
    products = [found[name] for name in used if re.search(r"\.val_\d+$", name)]
    slices = [found[name] for name in found if re.search(r"\.slice_\d+$", name)]
    filled: dict[str, Tensor] = {}
    unnamed = []
    for name, weight in model.state_dict().items():
        end = "." + name.removeprefix("velocity.").removeprefix("head.")
        named = [one for at, one in found.items() if at.endswith(end) and one.shape == weight.shape]
        if named:
            filled[name] = torch.from_numpy(named[0].copy())
        elif name == _POSITIONS and [one.shape for one in slices] == [weight.shape]:
            filled[name] = torch.from_numpy(slices[0].copy())
        else:
            unnamed.append(name)
    unplaced = [name for name in unnamed if not name.endswith(".weight")]
    if unplaced:  # the exporter keeps weights that are alike only once
        raise SystemExit(f"{bundle.manifest.name}: its graph does not name {', '.join(unplaced)}")
    for name, product in zip(sorted(unnamed, key=_place), products, strict=True):
        filled[name] = torch.from_numpy(product.T.copy())
    model.load_state_dict(filled)


def _place(name: str) -> tuple[int, int]:
    """When a product is used; the embedding comes first, the head last."""
    if name.startswith("embed."):
        return (-1, 0)
    found = re.fullmatch(r"velocity\.blocks\.(\d+)\.(.+)\.weight", name)
    return (sys.maxsize, 0) if found is None else (int(found[1]), _USED.index(found[2]))


def _check(model: Stepped, bundle: Bundle) -> None:
    manifest = bundle.manifest
    rows = _any_rows(bundle)
    opened = open_model(bundle)
    for rung in manifest.rungs:
        with torch.no_grad():
            logits = model(torch.from_numpy(rows), steps=rung.steps).logits.numpy()
        off = float(np.abs(logits - opened.unrolled(rung.steps).forward(rows)).max())
        if not off < _NEAR:
            raise SystemExit(f"{manifest.name}: off by {off:.3g} at {rung.steps} steps")


def _any_rows(bundle: Bundle) -> np.ndarray[tuple[int, ...], np.dtype[Any]]:
    """Four rows of nonsense: tokens or pixels."""
    manifest, chance = bundle.manifest, np.random.default_rng(0)
    if isinstance(manifest.input, ImageInput):
        size = (4, manifest.input.channels, manifest.input.height, manifest.input.width)
        return chance.standard_normal(size).astype(np.float32)
    most = manifest.text_tokenizer.vocab_size
    return chance.integers(1, most, (4, manifest.text_input.max_tokens))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
