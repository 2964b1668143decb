"""What the server says it serves: the models, where, and a request to try.

Knows manifests; deliberately not where it is said.
"""

import json
import shlex

from serve.bundle import ImageInput, PointsInput
from serve.catalog import Catalog, Served


def serving(catalog: Catalog, url: str, health_url: str | None = None) -> str:
    """All of it, for people."""
    models = list(catalog)
    lines = ["", "Stepdial serves" if models else "Stepdial serves no model"]
    width = max((len(served.name) for served in models), default=0)
    for served in models:
        steps = ", ".join(map(str, served.manifest.steps))
        lines.append(f"  {served.name:<{width}}  {served.manifest.task:<8}  steps {steps}")
    lines += [f"on {url} (API: {url}/docs)"]
    if health_url is not None:
        lines += [f"probes and metrics also on {health_url}"]
    lines += [""]
    if models:
        shown = min(models, key=lambda served: served.manifest.input.kind != "text")
        path, example = _example(shown)
        lines += ["Try:", f"  curl {url}{path} -d {shlex.quote(json.dumps(example))}", ""]
    return "\n".join([*lines, "Ctrl-C ends it.", ""])


def _example(served: Served) -> tuple[str, dict[str, object]]:
    """A request that this model answers."""
    given = served.manifest.card.get("examples")
    text = given[0] if isinstance(given, list) and given else "Hello"
    steps = served.manifest.steps[0]
    if served.manifest.labelled:
        taken: object = text
        match served.manifest.input:
            case ImageInput():
                taken = {"image": [[0, 255], [255, 0]]}
            case PointsInput(dimensions=dimensions):
                taken = {"points": [[0.0] * dimensions, [1.0] * dimensions]}
        return "/v1/classify", {"model": served.name, "input": taken, "steps": steps}
    return "/v1/generate", {
        "model": served.name,
        "prompt": text,
        "max_tokens": 64,
        "steps": steps,
    }
