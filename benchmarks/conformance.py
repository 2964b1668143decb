"""How the server keeps to its own OpenAPI document, by schemathesis: the log of a long run.

A real process serves tiny models of every kind, made for the tests. Its document is run as it is,
with positive and negative data; narrowed to what these models can do, so that valid requests must
be answered; and with keys. Besides what schemathesis finds, the server's own metrics say which
statuses it answered with. It deliberately measures no time.
"""

import json
import re
import sys
import tempfile
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.narrowed import narrowed
from benchmarks.options import parser, run
from benchmarks.result import Cell, Provenance, Result, Table, Target
from benchmarks.schema_run import Description, Report, accepted_of, failures_of, run_schemathesis
from benchmarks.server import Server, running_server
from serve.bundle import Bundle, Calibration, Level
from serve.keys import NewKey
from tests.tiny_bundles import build_classify, build_generate
from tests.tiny_families import build_image, build_points, build_translate

NAME = "conformance"
EXAMPLES, QUICK_EXAMPLES = 1000, 3
MAX_TOKENS = 64  # of an answer, so that no request takes long
WORKERS = "2"

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
    made.add_argument(
        "--examples", type=int, default=None, help=f"for each operation (default: {EXAMPLES})"
    )
    parsed = made.parse_args(arguments)
    if parsed.bundles:
        made.error("--bundles: this serves models of every kind, which are made for it")
    examples = parsed.examples or (QUICK_EXAMPLES if parsed.quick else EXAMPLES)
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
    url = f"http://{server.host}:{server.port}"
    report = run_schemathesis(document, url, config, examples, "--workers", WORKERS, *flags)
    counts: Counter[str] = Counter()
    for status, count in _COUNTED.findall(_read(server, "/metrics", key)):
        counts[status] += int(float(count))
    return Outcome(title, report, counts)


def document_of(server: Server, key: str | None = None) -> Description:
    """The document that a server gives."""
    found: Description = json.loads(_read(server, "/openapi.json", key))
    return found


def _read(server: Server, path: str, key: str | None) -> str:
    asked = urllib.request.Request(f"http://{server.host}:{server.port}{path}")
    if key is not None:
        asked.add_header("x-api-key", key)
    with urllib.request.urlopen(asked, timeout=30) as answer:
        text: str = answer.read().decode()
    return text


def _rates(outcome: Outcome) -> dict[str, list[Mapping[str, int]]]:
    rates = outcome.report["valid_rates"]
    return {operation: list(rates[operation].values()) for operation in sorted(rates)}


def _valid(rates: Sequence[Mapping[str, int]]) -> list[Cell]:
    return [sum(phase[what] for phase in rates) for what in ("accepted", "unreachable", "rejected")]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
