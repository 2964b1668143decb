"""Whether /v2 keeps to the description of the Open Inference Protocol: failures by schemathesis.

    STEPDIAL_OIP_DESCRIPTION=FILE python -m benchmarks.oip_conformance

The description is no part of the project. It is run three times, in all phases, with positive and
negative data and every check: as published; with its two mistakes corrected that no server can
satisfy; and with the tensors that the model takes, so that valid requests must be answered.
"""

import copy
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from benchmarks.conformance import Description, Report, accepted_of, failures_of, run_schemathesis
from benchmarks.lab import (
    NOTHING_TO_MEASURE,
    Cell,
    Options,
    Provenance,
    Result,
    Table,
    Target,
    options,
    parser,
    run,
)
from benchmarks.server import running_server
from serve.bundle import Manifest

NAME = "oip_conformance"
VARIABLE = "STEPDIAL_OIP_DESCRIPTION"
EXAMPLES, QUICK_EXAMPLES = 100, 20
# Of the description as published: names that begin with "$", which no model has, are documented
# to be answered with 200 (and 400, of an inference) only.
UNAVOIDABLE = 3
_ACCEPTS_400 = '[checks.positive_data_acceptance]\nexpected-statuses = ["2xx", "400"]\n'


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to run the description."""

    title: str
    change: Callable[[Description, Manifest], Description]
    config: str  # of schemathesis, in TOML


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one run found."""

    cases: int
    answered: int  # inferences with valid data that were answered with 200
    failures: tuple[str, ...]  # unique: where, and of which check

    @classmethod
    def of(cls, report: Report) -> "Outcome":
        """What a report of schemathesis says."""
        inferences = [one for one in report["valid_rates"] if one.endswith("/infer")]
        answered = accepted_of(report, inferences)
        return cls(report["test_cases"]["generated"], answered, failures_of(report))


def main(arguments: Sequence[str]) -> int:
    parsed = parser(__doc__.partition("\n")[0]).parse_args(arguments)
    path = os.environ.get(VARIABLE)
    if not path:
        print(f"name the description in {VARIABLE}: open_inference_rest.yaml", file=sys.stderr)
        return NOTHING_TO_MEASURE
    examples = QUICK_EXAMPLES if parsed.quick else EXAMPLES
    return run(
        NAME, arguments, parsed, partial(measure, options(parsed), read_description(path), examples)
    )


def measure(
    chosen: Options, description: Description, examples: int, provenance: Provenance
) -> Result:
    bundle = chosen.read("classify")[0]
    with running_server([bundle.folder]) as server:
        outcomes = {
            variant.title: conform(variant, description, bundle.manifest, server.url, examples)
            for variant in VARIANTS
        }
    rows: list[Sequence[Cell]] = [
        [title, one.cases, one.answered, len(one.failures)] for title, one in outcomes.items()
    ]
    failed: list[Sequence[Cell]] = [
        [title, failure] for title, one in outcomes.items() for failure in one.failures
    ]
    tables = [
        Table(
            "Unique failures, as schemathesis counts them.",
            ("description", "cases", "inferences answered", "failures"),
            rows,
        ),
        Table("What failed.", ("description", "failure"), failed),
    ]
    published, corrected, narrowed = (len(one.failures) for one in outcomes.values())
    targets = [
        Target("failures as published", published, "<=", UNAVOIDABLE),
        Target("failures with the mistakes corrected", corrected, "==", 0),
        Target("failures with the tensors of the model", narrowed, "==", 0),
    ]
    return provenance.result(
        NAME,
        "The Open Inference Protocol, by its own description",
        "All phases, positive and negative data, every check. As published, the paths hold "
        "`${MODEL_NAME}`, so that every name begins with a dollar sign, and nothing but 200 is "
        "documented for it (400 too, of an inference), though no such model exists: "
        "`status_code_conformance` fails once an operation unless a server answers for any name. "
        "Corrected: the dollar signs are gone, the name and version are those of a model that is "
        "served, and `positive_data_acceptance` takes the documented 400, since the description "
        "allows tensors of any name and shape, and no body at all. With the tensors of the model: "
        "the same, but the schema names the tensor, and valid requests must be answered with 200.",
        tables,
        targets,
    )


def read_description(path: str) -> Description:
    """The description, as it is in the file."""
    found: Description = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    return found


def conform(
    variant: Variant, description: Description, manifest: Manifest, url: str, examples: int
) -> Outcome:
    """What schemathesis finds at this address."""
    changed = variant.change(copy.deepcopy(description), manifest)
    config = variant.config.format(model=manifest.name)
    return Outcome.of(run_schemathesis(changed, url, config, examples))


def _as_published(description: Description, manifest: Manifest) -> Description:
    return description


def _corrected(description: Description, manifest: Manifest) -> Description:
    paths = description["paths"]
    description["paths"] = {path.replace("${", "{"): paths[path] for path in paths}
    return description


def _narrowed(description: Description, manifest: Manifest) -> Description:
    """The schema of a request with one text for the model, and all that it may say besides."""
    corrected = _corrected(description, manifest)
    for operations in corrected["paths"].values():
        if "post" in operations:  # an inference without a body asks for nothing
            operations["post"]["requestBody"]["required"] = True
    schemas = corrected["components"]["schemas"]
    schemas["request_input"] = _closed(
        name={"type": "string", "enum": ["text"]},
        datatype={"type": "string", "enum": ["BYTES"]},
        shape={"type": "array", "enum": [[1]]},
        data={
            "type": "array",
            "items": {"type": "string", "minLength": 1},
            "minItems": 1,
            "maxItems": 1,
        },
    )
    output = {"type": "string", "enum": ["label", "score", "steps"]}
    steps = {"type": "integer", "enum": list(manifest.steps)}
    schemas["inference_request"] = {
        "type": "object",
        "required": ["inputs"],
        "additionalProperties": False,
        "properties": {
            "id": {"type": "string"},
            "parameters": {
                "type": "object",
                "additionalProperties": False,
                "properties": {"steps": steps, "truncate": {"type": "boolean"}},
            },
            "inputs": {
                "type": "array",
                "items": {"$ref": "#/components/schemas/request_input"},
                "minItems": 1,
                "maxItems": 1,
            },
            "outputs": {"type": "array", "items": _closed(name=output), "maxItems": 1},
        },
    }
    return corrected


def _closed(**properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "required": list(properties),
        "additionalProperties": False,
        "properties": properties,
    }


_NAMED = '[parameters]\n"path.MODEL_NAME" = "{model}"\n"path.MODEL_VERSION" = "1"\n'
VARIANTS = (
    Variant("as published", _as_published, ""),
    Variant("mistakes corrected", _corrected, _NAMED + _ACCEPTS_400),
    Variant("tensors of the model", _narrowed, _NAMED),
)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
