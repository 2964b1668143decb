"""Answers and quality at each rung in fewer bits, beside float32, from the manifests of bundles.

    python -m benchmarks.precision --bundles FOLDER ...

Everything was measured when a bundle was exported, on its held-out rows: nothing is computed here,
no graph is opened. `benchmarks/make_zoo.sh` trains the runs of the zoo, to be exported with fewer
bits.
"""

import sys
from collections.abc import Sequence
from functools import partial

from benchmarks.lab import (
    NOTHING_TO_MEASURE,
    ROOT,
    ZOO,
    Cell,
    Provenance,
    Result,
    Table,
    Target,
    bundles_in,
    parser,
    run,
)
from serve.bundle import Bundle, read_bundle

NAME = "precision"
LEAST_AGREEMENT = 0.99
# Of loss in nats, of accuracy a share of the rows, of BLEU points.
MOST_CHANGE = {"loss": 0.002, "accuracy": 0.002, "bleu": 0.2}


def main(arguments: Sequence[str]) -> int:
    parsed = parser(__doc__.partition("\n")[0]).parse_args(arguments)
    bundles = [
        read_bundle(folder)
        for folder in parsed.bundles or [*bundles_in(ZOO), *bundles_in(ROOT / "bundles")]
    ]
    fewer_bits = [bundle for bundle in bundles if bundle.manifest.rounds]
    if not fewer_bits:
        print(
            "there is no bundle of another precision than fp32: make one with "
            "`stepdial export RUN --precision int8` and name it with --bundles FOLDER ...",
            file=sys.stderr,
        )
        return NOTHING_TO_MEASURE
    return run(NAME, arguments, parsed, partial(measure, fewer_bits))


def measure(bundles: Sequence[Bundle], provenance: Provenance) -> Result:
    rows: list[Sequence[Cell]] = []
    targets: list[Target] = []
    for bundle in bundles:
        agreements, changes = _add_rungs(bundle, rows)
        what = f"{bundle.manifest.name}, {bundle.manifest.precision_in_words}"
        metric = bundle.manifest.rungs[0].quality.metric
        most = MOST_CHANGE[metric]
        targets += [
            Target(f"{what}: least top-1 agreement", min(agreements), ">=", LEAST_AGREEMENT),
            Target(f"{what}: largest change of {metric}", max(changes), "<=", most),
        ]
    columns = ("bundle", "steps", "top-1 agreement", "metric", "value", "change", "samples", "")
    return provenance.result(
        NAME,
        "What fewer bits change",
        "Every rung beside the same rung in float32, on the same held-out rows.",
        [Table("As measured at the export, in the runtime that serves.", columns, rows)],
        targets,
    )


def _add_rungs(bundle: Bundle, rows: list[Sequence[Cell]]) -> tuple[list[float], list[float]]:
    """A row for each rung; the agreements and the sizes of the changes."""
    agreements, changes = [], []
    for rung in bundle.manifest.rungs:
        against, quality = rung.against_fp32, rung.quality
        assert against is not None, "the manifest of such a bundle has it for every rung"
        agreements.append(against.top1_agreement)
        changes.append(abs(against.change))
        within = (
            against.top1_agreement >= LEAST_AGREEMENT and changes[-1] <= MOST_CHANGE[quality.metric]
        )
        rows.append(
            [
                f"{bundle.manifest.name}, {bundle.manifest.precision_in_words}",
                rung.steps,
                f"{against.top1_agreement:.2%}",
                quality.metric,
                f"{quality.value:.4f}",
                f"{against.change:+.5f}",
                against.samples,
                "within" if within else "OUTSIDE",
            ]
        )
    return agreements, changes


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
