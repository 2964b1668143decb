"""Writes the files of docs/ that the code knows: `python -m docs.generate`."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from annotated_types import Ge, Gt, Le, Lt
from prometheus_client.metrics_core import Metric
from pydantic import TypeAdapter
from pydantic.fields import FieldInfo

from serve.api.page import (
    fields_of,
    grouped,
    heading,
    need_in_words,
    shapes_of,
    shared_errors,
    split_answers,
    type_in_words,
)
from serve.app import create_app
from serve.bundle import SCHEMA_VERSION, Latency, Manifest
from serve.bundle.folder import SEAL
from serve.bundle.part import SHA256
from serve.catalog import Catalog
from serve.engine.engine import Engine
from serve.metrics import ROWS, SECONDS, Metrics
from serve.settings import (
    OTHER_VARIABLES,
    Settings,
    default_in_words,
    flag,
    meaning,
    variable,
)

# The page of the documentation that lists every metric.


_METRICS_HEAD = f"""# Metrics

<!-- Written by `python -m docs.generate` from serve/metrics.py. -->

`GET /metrics` answers in the format of Prometheus. Every name begins with `stepdial_`; times are in
seconds, memory is in bytes. With API keys it needs a key as well ([security.md](security.md)). One
process serves, so one scrape of each replica is the whole truth. Alert rules and a Grafana board
are in [deploy/](../deploy), and [deploying.md](deploying.md) says how to start them.

Histograms of seconds have buckets from {SECONDS[0] * 1000:g} ms to {SECONDS[-1]:g} s, so that a
quantile is as good as the bucket it falls in; histograms of rows from {ROWS[0]} to {ROWS[-1]}.

## Labels

Labels take few values: what is served, never what a client sends.

| label | values |
|---|---|
"""
_METRIC_LABELS = {
    "`model`": "a served model; empty where a request ended before one was found",
    "`route`": "the path as [api.md](api.md) writes it, such as `/v1/models/{name}`; `none` of "
    "files of the page, where there is no such path, and of requests that are refused before their "
    "route is looked up (`unauthorized`, `cross_origin`, `rate_limited`, `concurrency_limited`, "
    "`draining`, `too_many_connections`)",
    "`code`": "the HTTP status; of a stream that failed, that of its error; 499 where the client "
    "left before its answer was complete",
    "`steps`": "the step count that was chosen; of `stepdial_request_seconds` the fewest that an "
    "input took; empty where no model answered",
    "`kind`": "the work of a call: `classify`, `prefill` (reads a prompt), `decode` (writes a "
    "token), `search` (beams of a translation), `recheck`",
    "`reason`": "of a decision, `budget.reason` in [budgets.md](budgets.md#what-the-answer-says); "
    "of an error, its code in [errors.md](errors.md)",
    "`max_disagreement`": "a calibrated level, as `stepdial inspect` lists them",
    "`task`, `method`, `precision`, `full_steps`": "facts of a bundle ([bundle.md](bundle.md))",
}


@dataclass(frozen=True, slots=True)
class Use:
    """What an operator asks of a metric, and how: `query` is PromQL."""

    unit: str
    question: str
    query: str


_REQUESTS = {
    "stepdial_requests_total": Use(
        "requests",
        "the share of answers that are errors of the server",
        'sum(rate(stepdial_requests_total{code=~"5..",route=~"/v1/.*|/v2/.*/infer",'
        'route!~"/v1/models.*"}[5m])) / sum(rate(stepdial_requests_total{'
        'route=~"/v1/.*|/v2/.*/infer",route!~"/v1/models.*"}[5m]))',
    ),
    "stepdial_request_seconds": Use(
        "seconds",
        "the time within which 99 % of the requests at each step count are answered, refused ones "
        "left out",
        "histogram_quantile(0.99, sum by (le, model, steps) "
        "(rate(stepdial_request_seconds_bucket[5m])))",
    ),
    "stepdial_refused_seconds": Use(
        "seconds",
        "how soon clients that are refused hear of it, by status",
        "histogram_quantile(0.99, sum by (le, code) (rate(stepdial_refused_seconds_bucket[5m])))",
    ),
    "stepdial_queue_seconds": Use(
        "seconds",
        "the mean wait for a place",
        "sum(rate(stepdial_queue_seconds_sum[5m])) / sum(rate(stepdial_queue_seconds_count[5m]))",
    ),
    "stepdial_queue_depth": Use(
        "requests", "how full the queue was, at most", "max_over_time(stepdial_queue_depth[5m])"
    ),
    "stepdial_in_flight": Use(
        "requests", "replicas that do nothing", "count(stepdial_in_flight == 0)"
    ),
    "stepdial_cancelled_total": Use(
        "requests",
        "clients that leave, a second",
        "rate(stepdial_cancelled_total[5m])",
    ),
    "stepdial_rejected_total": Use(
        "requests",
        "errors a second by their code",
        "sum by (reason) (rate(stepdial_rejected_total[5m]))",
    ),
}
_BUDGETS = {
    "stepdial_budget_decisions_total": Use(
        "requests",
        "what decides the steps of each model",
        "sum by (model, reason) (rate(stepdial_budget_decisions_total[5m]))",
    ),
    "stepdial_degraded_total": Use(
        "requests",
        "the share that got fewer steps because of load: add a replica if it stays up",
        "sum(rate(stepdial_degraded_total[5m])) / sum(rate(stepdial_budget_decisions_total[5m]))",
    ),
    "stepdial_deadlines_total": Use(
        "requests",
        "requests with a deadline that were taken in, a second",
        "sum by (model) (rate(stepdial_deadlines_total[5m]))",
    ),
    "stepdial_lapsed_total": Use(
        "requests",
        "the share of deadlines that were missed after all",
        "sum(rate(stepdial_lapsed_total[5m])) / sum(rate(stepdial_deadlines_total[5m]))",
    ),
    "stepdial_rechecked_total": Use(
        "answers",
        "how many answers the next line rests on",
        "increase(stepdial_rechecked_total[1d])",
    ),
    "stepdial_disagreed_total": Use(
        "answers",
        "the share of early answers that all steps would have answered otherwise",
        "sum by (model, max_disagreement) (increase(stepdial_disagreed_total[1d])) / "
        "sum by (model, max_disagreement) (increase(stepdial_rechecked_total[1d]))",
    ),
    "stepdial_promised_disagreement": Use(
        "share",
        "promises that are not kept",
        "sum by (model, max_disagreement) (increase(stepdial_disagreed_total[1d])) / "
        "sum by (model, max_disagreement) (increase(stepdial_rechecked_total[1d])) > "
        "max by (model, max_disagreement) (stepdial_promised_disagreement)",
    ),
}
_WORK = {
    "stepdial_time_to_first_token_seconds": Use(
        "seconds",
        "the time within which 95 % of the answers begin",
        "histogram_quantile(0.95, sum by (le, model) "
        "(rate(stepdial_time_to_first_token_seconds_bucket[5m])))",
    ),
    "stepdial_inter_token_seconds": Use(
        "seconds",
        "the median time between two tokens at each step count",
        "histogram_quantile(0.5, sum by (le, model, steps) "
        "(rate(stepdial_inter_token_seconds_bucket[5m])))",
    ),
    "stepdial_tokens_total": Use(
        "tokens", "tokens a second", "sum by (model) (rate(stepdial_tokens_total[5m]))"
    ),
    "stepdial_batch_rows": Use(
        "rows",
        "the mean number of rows that share a call",
        "sum by (model, kind) (rate(stepdial_batch_rows_sum[5m])) / "
        "sum by (model, kind) (rate(stepdial_batch_rows_count[5m]))",
    ),
    "stepdial_steps_total": Use(
        "steps", "steps a second", "sum by (model, kind) (rate(stepdial_steps_total[5m]))"
    ),
    "stepdial_velocity_evaluations_total": Use(
        "evaluations",
        "what the models cost: evaluations of each a second",
        "sum by (model) (rate(stepdial_velocity_evaluations_total[5m]))",
    ),
    "stepdial_speculative_drafted_total": Use(
        "tokens",
        "drafts a second of rows that run ahead",
        "sum by (model) (rate(stepdial_speculative_drafted_total[5m]))",
    ),
    "stepdial_speculative_accepted_total": Use(
        "tokens",
        "the share of drafts that were right",
        "sum by (model) (rate(stepdial_speculative_accepted_total[5m])) / "
        "sum by (model) (rate(stepdial_speculative_drafted_total[5m]))",
    ),
    "stepdial_cache_bytes": Use(
        "bytes",
        "how full the memory of generations is",
        "stepdial_cache_bytes / stepdial_cache_limit_bytes",
    ),
    "stepdial_cache_limit_bytes": Use(
        "bytes",
        "memory that generations still may take",
        "stepdial_cache_limit_bytes - stepdial_cache_bytes",
    ),
}
_FAILURES = {
    "stepdial_runtime_failures_total": Use(
        "calls",
        "a model fails",
        "sum by (model) (increase(stepdial_runtime_failures_total[5m])) > 0",
    ),
    "stepdial_model_ready": Use(
        "1 or 0",
        "replicas on which a model does not answer",
        "count by (model) (stepdial_model_ready == 0)",
    ),
    "stepdial_late_calls_total": Use(
        "calls",
        "a model hangs",
        "sum by (model) (increase(stepdial_late_calls_total[5m])) > 0",
    ),
    "stepdial_terminated_calls_total": Use(
        "calls",
        "late calls that finished by themselves after all, or ended the process",
        "increase(stepdial_late_calls_total[1h]) - increase(stepdial_terminated_calls_total[1h])",
    ),
}
_PROCESS = {
    "stepdial_model_info": Use(
        "always 1",
        "replicas that serve each model",
        "sum by (model, precision) (stepdial_model_info)",
    ),
    "stepdial_connections_evicted_total": Use(
        "connections",
        "there are more connections than there may be",
        "increase(stepdial_connections_evicted_total[5m]) > 0",
    ),
    "stepdial_log_lines_dropped_total": Use(
        "lines",
        "log lines are dropped because nothing reads them in time",
        "increase(stepdial_log_lines_dropped_total[5m]) > 0",
    ),
    "stepdial_process_virtual_memory_bytes": Use(
        "bytes", "address space taken", "stepdial_process_virtual_memory_bytes"
    ),
    "stepdial_process_resident_memory_bytes": Use(
        "bytes",
        "memory that grows, in bytes a second over a day",
        "deriv(stepdial_process_resident_memory_bytes[1d])",
    ),
    "stepdial_process_start_time_seconds": Use(
        "seconds since 1970",
        "how long the process has run",
        "time() - stepdial_process_start_time_seconds",
    ),
    "stepdial_process_cpu_seconds_total": Use(
        "seconds", "cores in use", "rate(stepdial_process_cpu_seconds_total[5m])"
    ),
    "stepdial_process_open_fds": Use(
        "files",
        "connections and files, of those allowed",
        "stepdial_process_open_fds / stepdial_process_max_fds",
    ),
    "stepdial_process_max_fds": Use("files", "the limit", "stepdial_process_max_fds"),
}
SECTIONS = {
    "Requests": _REQUESTS,
    "Budgets and promises": _BUDGETS,
    "Work": _WORK,
    "Failures": _FAILURES,
    "The process and its models": _PROCESS,
}


class _Idle:
    """An engine whose gauges are shown."""

    queued = running = cache_bytes = 0
    readiness: Mapping[str, bool] = {}  # nobody writes to it


def instruments() -> dict[str, tuple[Metric, tuple[str, ...]]]:
    """Every metric by the name that Prometheus stores, with its labels."""
    metrics = Metrics()
    metrics.watch(_Idle(), 0)
    labels = {}
    # The library keeps the labels of an instrument to itself until there is a sample.
    for collector, names in metrics.registry._collector_to_names.items():
        labels.update(dict.fromkeys(names, getattr(collector, "_labelnames", ())))
    return {_stored(family): (family, labels[family.name]) for family in metrics.registry.collect()}


def _stored(family: Metric) -> str:
    return f"{family.name}_total" if family.type == "counter" else family.name


def metrics_page() -> str:
    """The page as Markdown; a KeyError names a metric that no section has."""
    known = instruments()
    labels = [f"| {name} | {values} |" for name, values in _METRIC_LABELS.items()]
    parts = [_METRICS_HEAD + "\n".join(labels)]
    for title, uses in SECTIONS.items():
        rows = [_metric_row(name, use, *known.pop(name)) for name, use in uses.items()]
        asked = [f"* {use.question}: `{use.query}`" for use in uses.values()]
        head = ["| metric | type | unit | labels | what it counts |", "|---|---|---|---|---|"]
        parts.append("\n".join([f"## {title}", "", *head, *rows, "", "To know", "", *asked]))
    if known:
        raise KeyError(f"no section of the page of metrics has {', '.join(known)}")
    return "\n\n".join(parts) + "\n"


def _metric_row(name: str, use: Use, family: Metric, labels: tuple[str, ...]) -> str:
    listed = ", ".join(f"`{label}`" for label in labels)
    return f"| `{name}` | {family.type} | {use.unit} | {listed} | {family.documentation} |"


# The page of the documentation that lists every route and shape.


_API_HEAD = """# API reference

<!-- Written by `python -m docs.generate` from the server's OpenAPI document. -->

Every route, every field with its limits, every status that it gives itself. A running server has
the same at `/docs` for people and at `/openapi.json` for programs. What steps and deadlines mean is
in [budgets.md](budgets.md); OpenAI's routes and the Open Inference Protocol are in
[clients.md](clients.md), keys and limits in [security.md](security.md), each error code in
[errors.md](errors.md).
"""
ApiDocument = dict[str, Any]


def api_document() -> ApiDocument:
    """What a server of no models says of itself; the models change nothing of it."""
    settings = Settings()
    engine = Engine(Catalog(()), settings.limits, Metrics())
    return create_app(settings, engine).openapi()


def api_page(api: ApiDocument) -> str:
    """The page as Markdown."""
    shapes = sorted(api["components"]["schemas"].items(), key=lambda item: item[0].lower())
    parts = [_API_HEAD, *_routes(api), _errors(shared_errors(api)), "## Shapes\n"]
    parts += [_shape(name, shape) for name, shape in shapes]
    return "\n".join(parts)


def _routes(api: ApiDocument) -> Iterator[str]:
    shared = shared_errors(api)
    for tag, routes in grouped(api).items():
        yield f"## {heading(tag)}\n"
        for method, path, operation in routes:
            yield _route(path, method, operation, shared)


def _errors(shared: Mapping[str, Sequence[str]]) -> str:
    rows = [[status, " Or: ".join(meanings)] for status, meanings in shared.items()]
    return f"## Errors of many routes\n\n{_table(('status', 'when'), rows)}\n"


def _route(path: str, method: str, operation: ApiDocument, shared: dict[str, list[str]]) -> str:
    lines = [f"### {method} {path}", "", f"{operation['summary']}.", ""]
    content = operation.get("requestBody", {}).get("content", {})
    if content:
        lines += [f"Body: {shapes_of(content)}.", ""]
    parameters = [
        [
            f"`{each['name']}`",
            each["in"],
            type_in_words(each["schema"]),
            need_in_words(each["schema"], bool(each["required"])),
            each.get("description", ""),
        ]
        for each in operation.get("parameters", ())
    ]
    if parameters:
        lines += [_table(("parameter", "in", "type", "", ""), parameters), ""]
    own, others = split_answers(operation, shared)
    answers = [
        [status, answer["description"], shapes_of(answer.get("content", {}))]
        for status, answer in own
    ]
    lines += [_table(("status", "when", "body"), answers), ""]
    if others:
        found = {shapes_of(operation["responses"][one].get("content", {})) for one in others}
        said = " or ".join(sorted(found - {""}))
        body = f" in a body of {said}" if said else ""
        lines += [f"Also {', '.join(others)}{body}: [what they mean](#errors-of-many-routes).", ""]
    return "\n".join(lines)


def _shape(name: str, shape: ApiDocument) -> str:
    rows = [
        [f"`{name}`", type_in_words(field), need, field.get("description", "")]
        for name, field, need in fields_of(shape)
    ]
    lines = [f"### {name}", ""]
    if shape.get("description"):
        lines += [" ".join(shape["description"].split()), ""]
    if rows:
        lines += [_table(("field", "type", "", ""), rows), ""]
    elif not shape.get("properties"):
        lines += [f"Type: {type_in_words(shape)}.", ""]
    return "\n".join(lines)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    marks = ["---"] * len(head)
    return "\n".join(f"| {' | '.join(map(_cell, row))} |" for row in (head, marks, *rows))


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


# The page of the documentation that lists every setting.


_SETTINGS_HEAD = """# Settings

<!-- Written by `python -m docs.generate` from serve/settings.py. -->

Every setting of `stepdial serve` is a flag, an environment variable and a key of a settings file.
A flag overrides the environment, which overrides the file, which overrides the default.
`stepdial serve --help` lists the same. With an unknown name or an impossible value the server does
not start.

```toml
# stepdial.toml, for `stepdial serve --config stepdial.toml`, or STEPDIAL_CONFIG=stepdial.toml
port = 9000
queue_limit = 128
access_log = true
cors_origins = ["https://app.example.org"]
```

Relative paths start from the folder in which the server was started. A switch has two flags:
`--degrade` and `--no-degrade`.

| setting | flag and variable | default | may be | what it sets |
|---|---|---|---|---|
"""
_MIDDLE = """
The environment may also hold:

| variable | what it holds |
|---|---|
"""
_SIGNS = ((Ge, "ge", "≥"), (Gt, "gt", ">"), (Le, "le", "≤"), (Lt, "lt", "<"))


def settings_page() -> str:
    """The page as Markdown."""
    rows = [_setting_row(name, field) for name, field in Settings.model_fields.items()]
    others = [f"| `{name}` | {about} |" for name, about in OTHER_VARIABLES.items()]
    return _SETTINGS_HEAD + "\n".join(rows) + "\n" + _MIDDLE + "\n".join(others) + "\n"


def _setting_row(name: str, field: FieldInfo) -> str:
    about = meaning(field).replace("|", "\\|")
    names = f"`{flag(name)}`<br>`{variable(name)}`"
    return f"| `{name}` | {names} | {_default(name, field)} | {_allowed(field)} | {about} |"


def _default(name: str, field: FieldInfo) -> str:
    if name == "zoo":
        return "the zoo that comes with Stepdial"
    default = default_in_words(field)
    return default if field.annotation is bool or not default else f"`{default}`"


def _allowed(field: FieldInfo) -> str:
    if field.annotation is bool:
        return "on, off"
    limits = [
        f"{sign} {getattr(limit, key):,}"
        for kind, key, sign in _SIGNS
        for limit in field.metadata
        if isinstance(limit, kind)
    ]
    if limits:
        return ", ".join(limits)
    words = [word for word in get_args(field.annotation) if isinstance(word, str)]
    return ", ".join(f"`{word}`" for word in words)


# The JSON schema of the two JSON files of a bundle.


def bundle_schema() -> str:
    """The schema as JSON. The seal is of the file, so no class has it."""
    kinds: list[tuple[str, TypeAdapter[Any]]] = [
        ("manifest", TypeAdapter(Manifest)),
        ("latency", TypeAdapter(Latency)),
    ]
    found, document = TypeAdapter.json_schemas([(name, "validation", kind) for name, kind in kinds])
    manifest = document["$defs"]["Manifest"]
    manifest["properties"][SEAL] = {"type": "string", "pattern": SHA256}
    manifest["required"].append(SEAL)
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"Bundle format, version {SCHEMA_VERSION}",
        "description": "manifest.json and latency.json of a bundle, as bundle.md specifies them; "
        "what a schema cannot say (order, uniqueness across step counts, arithmetic, names of "
        "files that must be listed, the seal) stands only there. Written by `python -m "
        "docs.generate` from serve/bundle/manifest.py.",
        "oneOf": [found[name, "validation"] for name, _ in kinds],
        **document,
    }
    return json.dumps(schema, indent=1, ensure_ascii=False) + "\n"


DOCS = Path(__file__).parent


def main() -> None:
    """Write every generated file."""
    pages = {
        "bundle.schema.json": bundle_schema(),
        "api.md": api_page(api_document()),
        "metrics.md": metrics_page(),
        "settings.md": settings_page(),
    }
    for name, text in pages.items():
        (DOCS / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
