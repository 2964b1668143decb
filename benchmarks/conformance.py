"""Whether the server keeps to its own OpenAPI document: failures that schemathesis finds.

    python -m benchmarks.conformance

A real process serves tiny models of every kind, made for the tests. Its document is run as it is,
with positive and negative data; narrowed to what these models can do, so that valid requests must
be answered; and with keys. Besides what schemathesis finds, the server's own metrics say which
statuses it answered with.
"""

import copy
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from tokenizers import Tokenizer

from benchmarks.lab import ROOT, Cell, Provenance, Result, Table, Target, parser, run
from benchmarks.server import Server, running_server
from serve.bundle import Bundle, Calibration, ImageInput, Level, PointsInput
from serve.keys import NewKey
from tests.fixtures.tiny_bundles import build_classify, build_generate
from tests.fixtures.tiny_families import build_image, build_points, build_translate

# One run of schemathesis over an OpenAPI document, as a process of its own.


Description = dict[str, Any]
Report = Mapping[str, Any]

_RUN_S = 3600.0
# Where Hypothesis keeps its tables of characters, which take long to make.
_TABLES = {"HYPOTHESIS_STORAGE_DIRECTORY": str(ROOT / ".hypothesis")}


def run_schemathesis(
    description: Description, url: str, config: str, examples: int, *flags: str
) -> Report:
    """Its report: every check, deterministic; SystemExit if it did not get to the end.

    `config` is TOML; positive and negative data, in all phases, where the flags say nothing else.
    """
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "description.json").write_text(json.dumps(description), encoding="utf-8")
        (Path(folder) / "settings.toml").write_text(config, encoding="utf-8")
        command = [sys.executable, "-m", "schemathesis.cli", "--config-file", "settings.toml"]
        command += ["run", "description.json", "--url", url, "--checks", "all", "--mode", "all"]
        command += ["--max-examples", str(examples), "--generation-deterministic"]
        command += ["--continue-on-failure", "--report", "json", "--report-json-path", "found.json"]
        ended = subprocess.run(
            [*command, *flags],
            cwd=folder,
            env={**os.environ, "PYTHONWARNINGS": "default", **_TABLES},
            capture_output=True,
            text=True,
            timeout=_RUN_S,
            check=False,
        )
        found = Path(folder) / "found.json"
        if not found.is_file():
            raise SystemExit(f"schemathesis did not run:\n{ended.stdout}{ended.stderr}")
        report: Report = json.loads(found.read_text(encoding="utf-8"))
    check_complete(report)
    return report


def check_complete(report: Report) -> None:
    """SystemExit unless all that was to be tried was."""
    if not report["complete"] or report["errors"]:
        raise SystemExit(f"schemathesis did not finish: {report['errors']}")


def failures_of(report: Report) -> tuple[str, ...]:
    """The unique failures: where, and of which check."""
    return tuple(
        f"{operation}: {one['title']}"
        for one in report["failures"]
        for operation in one["operations"]
    )


def accepted_of(report: Report, operations: Sequence[str]) -> int:
    """How many requests with valid data these operations answered with 2xx."""
    return sum(
        phase["accepted"]
        for operation in operations
        for phase in report["valid_rates"].get(operation, {}).values()
    )


# The OpenAPI document of a server, narrowed to what the models that it serves can do. The
# document of a server says what any model may be asked. Whether one can do it is not in there:
# which characters it reads, which steps its ladder has, how many labels there are, which fields
# mean the same and exclude each other. Here all this is said, so that whatever is valid must be
# answered with 200.


Schema = dict[str, Any]
Fields = dict[str, Schema]

NARROWED_TOKENS = 6  # of an answer, so that a run is quick
_CHARACTERS = 8  # of a text: no more tokens than any model reads, whatever they are
_COORDINATE = 1e6
_FAR_MS = {"type": "number", "minimum": 60_000, "maximum": 3_600_000}
_FLAG = {"type": "boolean"}
_SEED = {"type": "integer", "minimum": 0, "maximum": 2**63 - 1}
_WORDS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_INFER = "/v2/models/{name}/infer"
_VERSIONED = "/v2/models/{name}/versions/{version}/infer"


def narrowed(document: Description, bundles: Sequence[Bundle]) -> Description:
    """The same operations, but those of the administration, for these models only."""
    made = copy.deepcopy(document)
    paths = {
        path: methods for path, methods in made["paths"].items() if not path.startswith("/admin/")
    }
    made["paths"] = paths
    labels = [bundle for bundle in bundles if bundle.manifest.task == "classify"]
    writers = [bundle for bundle in bundles if bundle.manifest.task != "classify"]
    chats = [bundle for bundle in writers if bundle.manifest.task == "generate"]
    _take(paths["/v1/classify"], [body for one in labels for body in _classify(one)])
    _take(paths["/v1/generate"], [body for one in writers for body in _generate(one)])
    _take(paths["/v1/completions"], [body for one in writers for body in _completions(one)])
    _take(paths["/v1/chat/completions"], [body for one in chats for body in _chats(one)])
    if pooled := [bundle for bundle in labels if bundle.manifest.embedding is not None]:
        _take(paths["/v1/embeddings"], [body for one in pooled for body in _embeddings(one)])
    else:
        del paths["/v1/embeddings"]
    inference, versioned = paths.pop(_INFER), paths.pop(_VERSIONED)
    for bundle in bundles:
        name = bundle.manifest.name
        for template, operations in ((_INFER, inference), (_VERSIONED, versioned)):
            own = copy.deepcopy(operations)
            own["post"].pop("parameters")
            own["post"]["operationId"] += f"_{name}"
            _take(own, list(_infer(bundle)))
            paths[template.replace("{name}", name).replace("{version}", "1")] = own
    known = {"name": [bundle.manifest.name for bundle in bundles], "version": ["1"]}
    for methods in paths.values():
        for operation in methods.values():
            for parameter in operation.get("parameters", ()):
                if parameter["in"] == "path":
                    parameter["schema"] = {"type": "string", "enum": known[parameter["name"]]}
    return made


def _take(methods: Schema, bodies: list[Schema]) -> None:
    """Let a route take one of these bodies only."""
    content = {"application/json": {"schema": {"anyOf": bodies}}}
    methods["post"]["requestBody"] = {"required": True, "content": content}


def _classify(bundle: Bundle) -> Iterable[Schema]:
    item = _item(bundle)
    several = {"type": "array", "items": item, "minItems": 1, "maxItems": 3}
    labels = len(bundle.manifest.labels or ())
    for budget in _budgets(bundle):
        yield _object(
            {"model": _one(bundle.manifest.name), "input": {"anyOf": [item, several]}},
            {
                "top_k": {"type": "integer", "minimum": 1, "maximum": labels},
                "truncate": _FLAG,
                **budget,
            },
        )


def _embeddings(bundle: Bundle) -> Iterable[Schema]:
    several = {"type": "array", "items": _text(bundle), "minItems": 1, "maxItems": 3}
    needed = {
        "model": _one(bundle.manifest.name),
        "input": {"anyOf": [_text(bundle), several]},
    }
    formats = {"type": "string", "enum": ["float", "base64"]}
    steps = {"type": "integer", "enum": list(bundle.manifest.steps)}
    yield _object(needed, {"encoding_format": formats, "steps": steps})


def _generate(bundle: Bundle) -> Iterable[Schema]:
    needed = {"model": _one(bundle.manifest.name), "prompt": _text(bundle)}
    limit = {"max_tokens": _up_to(NARROWED_TOKENS)}
    for budget in _budgets(bundle):
        free = limit | _sampling() | budget | {"logprobs": _from_0(5)}
        yield _object(needed, free | {"stream": _FLAG})
    if bundle.manifest.task == "translate":
        yield _object(needed | {"num_beams": _up_to(3)}, limit | {"stream": _FLAG})


def _completions(bundle: Bundle) -> Iterable[Schema]:
    text = _text(bundle)
    vocabulary = bundle.manifest.text_tokenizer.vocab_size
    token = {"type": "integer", "minimum": 1, "maximum": vocabulary - 1}
    tokens = {"type": "array", "items": token, "minItems": 1, "maxItems": _CHARACTERS}
    several = {"type": "array", "items": {"anyOf": [text, tokens]}, "minItems": 1, "maxItems": 2}
    needed = {"model": _one(bundle.manifest.name), "prompt": {"anyOf": [text, tokens, several]}}
    limit = {"max_tokens": _up_to(NARROWED_TOKENS), "user": {"type": "string"}}
    for budget in _openai_budgets(bundle):
        free = limit | _sampling() | budget
        yield _object(needed, free | {"n": _up_to(2), "echo": _FLAG, "stream": _FLAG})
        yield _object(
            needed | {"stream": _one(True)},
            free | {"logprobs": _from_0(5), "stream_options": _stream_options()},
        )
    yield _object(needed | {"best_of": _one(2)}, limit | {"n": _up_to(2), "logprobs": _from_0(5)})


def _chats(bundle: Bundle) -> Iterable[Schema]:
    roles = {"type": "string", "enum": ["system", "developer", "user", "assistant"]}
    part = _object({"type": _one("text"), "text": _text(bundle)}, {})
    parts = {"type": "array", "items": part, "minItems": 1, "maxItems": 2}
    message = _object({"role": roles, "content": {"anyOf": [_text(bundle), parts]}}, {})
    messages = {"type": "array", "items": message, "minItems": 1, "maxItems": 2}
    needed = {"model": _one(bundle.manifest.name), "messages": messages}
    for budget in _openai_budgets(bundle):
        free = _sampling() | budget | {"n": _up_to(2), "store": _one(False)}
        yield _object(needed, free | {"max_tokens": _up_to(NARROWED_TOKENS), "stream": _FLAG})
        yield _object(
            needed | {"logprobs": _one(True), "stream": _one(True)},
            free
            | {
                "max_completion_tokens": _up_to(NARROWED_TOKENS),
                "top_logprobs": _from_0(20),
                "stream_options": _stream_options(),
            },
        )


def _infer(bundle: Bundle) -> Iterable[Schema]:
    manifest = bundle.manifest
    match manifest.input:
        case ImageInput(channels=channels, height=height, width=width):
            name, datatype, shape = "image", "UINT8", [1, channels, height, width]
            element = _from_0(255)
        case PointsInput(dimensions=dimensions):
            name, datatype, shape = "points", "FP32", [1, 3, dimensions]
            element = _coordinate()
        case _:
            name, datatype, shape = "text", "BYTES", [2]
            element = _text(bundle)
    data: dict[str, object] = {"type": "array", "items": element}
    data |= {"minItems": math.prod(shape), "maxItems": math.prod(shape)}
    tensor = _object(
        {"name": _one(name), "datatype": _one(datatype), "shape": {"enum": [shape]}, "data": data},
        {},
    )
    outputs = ("label", "score") if manifest.task == "classify" else ("text", "finish_reason")
    wanted = {
        "type": "array",
        "enum": [[{"name": one} for one in names] for names in (outputs, ("steps",), ())],
    }
    needed = {"inputs": {"type": "array", "items": tensor, "minItems": 1, "maxItems": 1}}
    own = {"truncate": _FLAG}
    if manifest.task != "classify":
        own = _sampling() | {"max_tokens": _up_to(NARROWED_TOKENS)}
    for budget in _budgets(bundle):
        parameters = _object({}, own | budget)
        yield _object(
            needed, {"id": {"type": "string"}, "outputs": wanted, "parameters": parameters}
        )


def _budgets(bundle: Bundle) -> list[Fields]:
    """Budget fields that go together."""
    manifest = bundle.manifest
    steps = list(manifest.steps)
    made: list[Fields] = [
        {"steps": {"type": "integer", "enum": steps}},
        {"effort": {"type": "string", "enum": [rung.effort for rung in manifest.rungs]}},
        {
            "min_steps": _up_to(steps[0]),
            "max_steps": {"type": "integer", "minimum": steps[-1], "maximum": 2**31 - 1},
            "deadline_ms": _FAR_MS,
        },
    ]
    if manifest.calibration is not None:
        level = {"type": "number", "minimum": 0.001, "exclusiveMaximum": 1}
        made.append({"max_disagreement": level})
    return made


def _openai_budgets(bundle: Bundle) -> list[Fields]:
    efforts = [rung.effort for rung in bundle.manifest.rungs]
    words = [word for word in _WORDS if _effort_of(word) in efforts]
    return [*_budgets(bundle), {"reasoning_effort": {"type": "string", "enum": words}}]


def _effort_of(word: str) -> str:
    return {"none": "low", "minimal": "low", "xhigh": "max"}.get(word, word)


def _sampling() -> Fields:
    stop = {"type": "string", "minLength": 1, "maxLength": 256}
    return {
        "temperature": {"type": "number", "minimum": 0, "maximum": 2},
        "top_k": {"type": "integer", "minimum": 1},
        "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        "seed": _SEED,
        "stop": {"anyOf": [stop, {"type": "array", "items": stop, "maxItems": 4}]},
    }


def _item(bundle: Bundle) -> Schema:
    """One input of a classifier."""
    match bundle.manifest.input:
        case ImageInput():
            # With a decimal point it would be a number from 0.0 to 1.0.
            pixel = {"enum": [0, 1, 127, 255]}
            row = {"type": "array", "items": pixel, "minItems": 3, "maxItems": 3}
            return _object({"image": {"type": "array", "items": row, "minItems": 1}}, {})
        case PointsInput(max_points=most, dimensions=dimensions):
            point: dict[str, object] = {"type": "array", "items": _coordinate()}
            point |= {"minItems": dimensions, "maxItems": dimensions}
            cloud = {"type": "array", "items": point, "minItems": 1, "maxItems": most}
            return _object({"points": cloud}, {})
        case _:
            return _text(bundle)


def _text(bundle: Bundle) -> Schema:
    """A text that a model can read."""
    spec = bundle.manifest.text_tokenizer
    if spec.kind != "chars":
        return {"type": "string", "minLength": 1, "maxLength": _CHARACTERS}
    vocabulary = Tokenizer.from_file(str(bundle.folder / spec.file)).get_vocab()
    known = "".join(re.escape(token) for token in sorted(vocabulary) if len(token) == 1)
    return {"type": "string", "pattern": f"^[{known}]{{1,{_CHARACTERS}}}$"}


def _stream_options() -> Schema:
    return _object({}, {"include_usage": _FLAG, "include_obfuscation": _FLAG})


def _coordinate() -> Schema:
    return {"type": "number", "minimum": -_COORDINATE, "maximum": _COORDINATE}


def _up_to(most: int) -> Schema:
    return {"type": "integer", "minimum": 1, "maximum": most}


def _from_0(most: int) -> Schema:
    return {"type": "integer", "minimum": 0, "maximum": most}


def _one(value: object) -> Schema:
    return {"enum": [value]}


def _object(needed: Fields, free: Fields) -> Schema:
    """An object with all of these, any of those, and nothing else."""
    return {
        "type": "object",
        "required": list(needed),
        "properties": needed | free,
        "additionalProperties": False,
    }


NAME = "conformance"
EXAMPLES, QUICK_EXAMPLES = 1000, 3
MAX_TOKENS = 64  # of an answer, so that no request takes long
WORKERS = "1"  # several parse Python at once, which CPython 3.11 may throw at (gh-106905)

_CALIBRATION = Calibration(
    rows=3000,
    confidence=0.95,
    source="made up",
    levels=(Level(0.01, None, 4.0, 0.0), Level(0.05, 0.2, 2.0, 0.01), Level(0.1, 0.0, 1.0, 0.1)),
)
_NUL = "[generation]\nallow-x00 = true\n"
# What valid data may be told besides 2xx. 404: no such model. 422, and 400 under /v2: the document
# cannot say what one model can do, nor which budget fields exclude each other; the narrowed one
# does. 403 and 401: no admin key, or not the right one. 429: the queue is full.
AS_IT_IS = (
    "[checks.positive_data_acceptance]\n"
    'expected-statuses = ["2xx", "400", "401", "403", "404", "422", "429"]\n' + _NUL
)
NOTHING_BUT_200 = '[checks.positive_data_acceptance]\nexpected-statuses = ["2xx"]\n' + _NUL
_COUNTED = re.compile(r'^stepdial_requests_total\{.*code="(\d+)".*\} ([0-9.e+]+)$', re.MULTILINE)
_ADMIN = "^/admin/"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one run found."""

    title: str
    report: Report
    statuses: Mapping[str, int]  # of every answer, as the server counted them

    @property
    def row(self) -> list[Cell]:
        errors = sum(count for status, count in self.statuses.items() if status >= "500")
        return [
            self.title,
            self.report["operations"]["tested"],
            self.report["test_cases"]["generated"],
            accepted_of(self.report, tuple(self.report["valid_rates"])),
            errors,
            len(failures_of(self.report)),
        ]


def main(arguments: Sequence[str]) -> int:
    made = parser(__doc__.partition("\n")[0])
    parsed = made.parse_args(arguments)
    if parsed.bundles:
        made.error("--bundles: this serves models of every kind, which are made for it")
    examples = QUICK_EXAMPLES if parsed.quick else EXAMPLES
    return run(NAME, arguments, parsed, partial(measure, examples))


def measure(examples: int, provenance: Provenance) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        outcomes = list(_outcomes(Path(folder), examples))
    failed: list[Sequence[Cell]] = [
        [one.title, failure] for one in outcomes for failure in failures_of(one.report)
    ]
    statuses = sorted({status for one in outcomes for status in one.statuses})
    counted: list[Sequence[Cell]] = [
        [one.title, *(one.statuses.get(status, 0) for status in statuses)] for one in outcomes
    ]
    rejected: list[Sequence[Cell]] = [
        [operation, *_valid(rates)] for operation, rates in _rates(outcomes[0]).items()
    ]
    tables = [
        Table(
            "Runs of schemathesis; failures are unique, as it counts them.",
            ("document", "operations", "cases", "valid and answered", "5xx", "failures"),
            [one.row for one in outcomes],
        ),
        Table("What failed.", ("document", "failure"), failed),
        Table("Answers by status, as the server counted them.", ("document", *statuses), counted),
        Table(
            "Valid requests of the document as it is.",
            ("operation", "answered", "no such model", "refused"),
            rejected,
        ),
    ]
    errors = sum(int(one.row[4] or 0) for one in outcomes)
    targets = [
        Target("examples of each operation that has parameters or a body", examples, ">=", 1000),
        Target("answers of 5xx", errors, "==", 0),
        Target("failures", len(failed), "==", 0),
    ]
    return provenance.result(
        NAME,
        "The server, by its own OpenAPI document",
        "All phases (examples, coverage, fuzzing, stateful) and every check: no 5xx, no status, "
        "content type or shape that is not documented, invalid data refused. NUL characters are "
        "allowed; in headers, where HTTP forbids them, they are left out. As it is: positive and "
        f"negative data, {examples} examples of each operation that has parameters or a body. "
        "What the document cannot say is what one model can do, so valid data may be told 422 (400 "
        "under /v2) or 404 there. Narrowed: the same with the characters, ladders and labels of "
        "the models that are served, and the fields that go together; valid data must be answered "
        "with 200. With keys: the admin routes with their key, and all others with an API key, "
        "without which they must refuse.",
        tables,
        targets,
    )


def _outcomes(folder: Path, examples: int) -> Iterator[Outcome]:
    bundles = tiny_bundles(folder)
    with serving(bundles) as server:
        document = document_of(server)
        yield as_it_is(server, document, examples)
    with serving(bundles) as server:
        yield within_models(server, document, bundles, max(1, examples // 4))
    yield from _with_keys(folder, bundles, max(1, examples // 20))


def tiny_bundles(folder: Path) -> list[Bundle]:
    """Models of every task and input."""
    return [
        build_classify(folder / "tiny-classify", calibration=_CALIBRATION),
        build_generate(folder / "tiny-generate"),
        build_image(folder / "tiny-image"),
        build_points(folder / "tiny-points"),
        build_translate(folder / "tiny-translate"),
    ]


@contextmanager
def serving(bundles: Sequence[Bundle], *flags: str) -> Iterator[Server]:
    """A server of these, as a process of its own."""
    folders = [bundle.folder for bundle in bundles]
    with running_server(folders, "--max-tokens", str(MAX_TOKENS), *flags) as server:
        yield server


def as_it_is(server: Server, document: Description, examples: int, *flags: str) -> Outcome:
    """Positive and negative data of the document that the server gives."""
    return _outcome("as it is", server, document, AS_IT_IS, examples, *flags)


def within_models(
    server: Server, document: Description, bundles: Sequence[Bundle], examples: int, *flags: str
) -> Outcome:
    """Positive data that these models can answer."""
    chosen = narrowed(document, bundles)
    return _outcome(
        "narrowed", server, chosen, NOTHING_BUT_200, examples, "--mode", "positive", *flags
    )


def _with_keys(folder: Path, bundles: Sequence[Bundle], examples: int) -> Iterator[Outcome]:
    keys = {name: NewKey.draw(name) for name in ("api", "admin")}
    flags = []
    for name, drawn in keys.items():
        (folder / f"{name}.toml").write_text(drawn.block, encoding="utf-8")
        flags += [f"--{name}-keys-file", str(folder / f"{name}.toml")]
    with serving(bundles, *flags) as server:
        document = document_of(server, keys["api"].secret)
        config = AS_IT_IS + f'[auth.openapi.header]\napi_key = "{keys["api"].secret}"\n'
        chosen = ("--exclude-path-regex", _ADMIN)
        title, key = "with an API key", keys["api"].secret
        yield _outcome(title, server, document, config, examples, *chosen, key=key)
    with serving(bundles, *flags) as server:
        shown = ("--header", f"authorization: Bearer {keys['admin'].secret}")
        chosen = ("--include-path-regex", _ADMIN)
        title = "with the admin key"
        yield _outcome(title, server, document, AS_IT_IS, examples, *shown, *chosen, key=key)


def _outcome(
    title: str,
    server: Server,
    document: Description,
    config: str,
    examples: int,
    *flags: str,
    key: str | None = None,
) -> Outcome:
    report = run_schemathesis(document, server.url, config, examples, "--workers", WORKERS, *flags)
    counts: Counter[str] = Counter()
    for status, count in _COUNTED.findall(_read(server, "/metrics", key)):
        counts[status] += int(float(count))
    return Outcome(title, report, counts)


def document_of(server: Server, key: str | None = None) -> Description:
    """The document that a server gives."""
    found: Description = json.loads(_read(server, "/openapi.json", key))
    return found


def _read(server: Server, path: str, key: str | None) -> str:
    headers = {} if key is None else {"x-api-key": key}
    return httpx.get(server.url + path, headers=headers, timeout=30).raise_for_status().text


def _rates(outcome: Outcome) -> dict[str, list[Mapping[str, int]]]:
    rates = outcome.report["valid_rates"]
    return {operation: list(rates[operation].values()) for operation in sorted(rates)}


def _valid(rates: Sequence[Mapping[str, int]]) -> list[Cell]:
    return [sum(phase[what] for phase in rates) for what in ("accepted", "unreachable", "rejected")]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
