"""The OpenAPI document of a server, narrowed to what the models that it serves can do.

The document of a server says what any model may be asked. Whether one can do it is not in there:
which characters it reads, which steps its ladder has, how many labels there are, which fields mean
the same and exclude each other. Here all this is said, so that whatever is valid must be answered
with 200. Knows manifests and JSON Schema; deliberately neither servers nor how requests are drawn.
"""

import copy
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

from tokenizers import Tokenizer

from benchmarks.schema_run import Description
from serve.bundle import Bundle, ImageInput, PointsInput

Schema = dict[str, Any]
Fields = dict[str, Schema]

MAX_TOKENS = 6  # of an answer, so that a run is quick
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


def _generate(bundle: Bundle) -> Iterable[Schema]:
    needed = {"model": _one(bundle.manifest.name), "prompt": _text(bundle)}
    limit = {"max_tokens": _up_to(MAX_TOKENS)}
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
    limit = {"max_tokens": _up_to(MAX_TOKENS), "user": {"type": "string"}}
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
        yield _object(needed, free | {"max_tokens": _up_to(MAX_TOKENS), "stream": _FLAG})
        yield _object(
            needed | {"logprobs": _one(True), "stream": _one(True)},
            free
            | {
                "max_completion_tokens": _up_to(MAX_TOKENS),
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
        own = _sampling() | {"max_tokens": _up_to(MAX_TOKENS)}
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
