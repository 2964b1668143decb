"""`stepdial evaluate BUNDLE`: quality of every rung, again, in the runtime, beside its manifest.

Takes the data set that the bundle was trained for from its provenance; the path must be given.
"""

import dataclasses

from tokenizers import Tokenizer

from export.calibrate import Measured, choose_default, held_out_batches, measure_rung, range_of
from export.words import flat_in_words, range_in_words
from serve.bundle import Bundle, BundleError, ImageInput, Quality
from serve.runtime import open_model
from train.data import check_same_meaning, open_dataset
from train.data.batch import Dataset
from train.recipe import RecipeError, data_at, recipe_from


def evaluate_bundle(
    bundle: Bundle, steps: list[int] | None, data: str, samples: int | None
) -> dict[int, Quality]:
    """Measured quality by steps; only rungs that the bundle has."""
    measured = measure_bundle(bundle, steps, data, samples)
    return {count: one.quality for count, one in measured.items()}


def measure_bundle(
    bundle: Bundle, steps: list[int] | None, data: str, samples: int | None
) -> dict[int, Measured]:
    """The same, row by row."""
    manifest = bundle.manifest
    counts = steps or list(manifest.steps)
    for count in counts:
        manifest.rung(count)
    dataset = dataset_of(bundle, data)
    model = open_model(bundle)
    return {
        count: measure_rung(model, count, held_out_batches(dataset, manifest, samples))
        for count in counts
    }


def dataset_of(bundle: Bundle, data: str) -> Dataset:
    """The data that a bundle's model was trained for, read from there."""
    manifest = bundle.manifest
    try:
        # Provenance is free: what is no recipe is caught below.
        kept = dict(manifest.provenance["recipe"])  # type: ignore[call-overload]  # JSON
        read = {**kept["data"], "path": ""}
        if isinstance(manifest.input, ImageInput):  # else those of the images given are measured
            read |= {"mean": manifest.input.mean, "std": manifest.input.std}
        recipe = recipe_from({**kept, "data": read}, "provenance.recipe")
    except (KeyError, TypeError, RecipeError) as error:
        raise BundleError(
            f"does not say how to read its data ({error}); evaluate the run it was exported from",
            field="provenance",
            file=str(bundle.folder),
        ) from None
    tokenizer = Tokenizer.from_file(str(bundle.tokenizer_path)) if manifest.tokenizer else None
    dataset = open_dataset(data_at(recipe, data), tokenizer)
    labels = None if manifest.labels is None else list(manifest.labels)
    check_same_meaning(dataset, recipe, {"labels": labels})
    return dataset


def print_beside_manifest(bundle: Bundle, rows: dict[int, Measured]) -> None:
    metric = bundle.manifest.rungs[0].quality.metric
    print(f"{bundle.manifest.name}, {bundle.manifest.method}, in the serving runtime")
    print(f"{'steps':>5} {metric:>9}  {'95 % interval':<18} {'samples':>8} {'manifest':>9}")
    for steps, (q, _) in rows.items():
        known = bundle.manifest.rung(steps).quality.value
        interval = f"{q.low:.4f} to {q.high:.4f}"
        whole = "" if q.exact is None else f"  {100 * q.exact:.2f} % of rows right as a whole"
        print(f"{steps:>5} {q.value:>9.4f}  {interval:<18} {q.samples:>8} {known:>9.4f}{whole}")
    ladder = [bundle.manifest.rung(steps) for steps in sorted(rows)]
    measured = dataclasses.replace(
        bundle.manifest,
        rungs=tuple(ladder),
        full_steps=ladder[-1].steps,
        default_steps=choose_default(rows),
        range=range_of(rows),
        calibration=None,
    )
    for said in (range_in_words(measured), flat_in_words(measured)):
        if said is not None:
            print(said)
