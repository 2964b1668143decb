"""The command `stepdial serve`, also `python -m serve`: from the command line to a running server.

Knows how the parts are put together; what they do is theirs.
"""

import gc
import json
import logging
import shlex
import socket
import sys
from collections.abc import Sequence

from serve.app import create_app
from serve.bundle import BundleError, ImageInput, PointsInput
from serve.catalog import Catalog, Served, find_bundles, open_catalog
from serve.engine.engine import Engine
from serve.engine.first_calls import measure_first_calls
from serve.flags import parse
from serve.malloc import keep_memory_low
from serve.metrics import Metrics
from serve.server import AddressError, Server, bind, leave, listen
from serve.settings import Settings, SettingsError

_UNUSABLE = 2
_INTERRUPTED = 130
_SWITCH_S = 0.0005


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until a signal comes; returns the exit status of the process."""
    line = parse(sys.argv[1:] if argv is None else argv)
    keep_memory_low()
    try:
        settings = Settings.read(line.flags)
        # First, so that a port in use is known before anything is loaded.
        with bind(settings.host, settings.port) as listener:
            folders = line.bundles or find_bundles(settings.zoo)
            catalog = open_catalog(folders, settings.threads, settings.place)
            _serve(settings, catalog, listener)
    except (SettingsError, BundleError, AddressError) as error:
        print(f"stepdial serve: {error}", file=sys.stderr)
        return _UNUSABLE
    except KeyboardInterrupt:  # while the bundles were loading; later a signal drains
        return _INTERRUPTED
    return 0


def _serve(settings: Settings, catalog: Catalog, listener: socket.socket) -> None:
    _set_up(settings)
    engine = Engine(
        catalog,
        settings.limits,
        Metrics(),
        patience=settings.patience,
        leave=leave,
        recheck_share=settings.recheck_share,
    )
    measure_first_calls(catalog, engine.latency)
    app = create_app(settings, engine)

    def listening(url: str) -> None:
        print(_banner(catalog, url), flush=True)

    listen(listener)
    Server(settings, app, engine, listening).run([listener])


def _set_up(settings: Settings) -> None:
    logging.basicConfig(
        level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    if settings.access_log:
        logging.getLogger("stepdial.access").setLevel(logging.INFO)
    # The engine's thread and the event loop take turns at the interpreter: short turns keep
    # either from waiting 5 ms, the default, for the other.
    sys.setswitchinterval(_SWITCH_S)
    # What is loaded now stays; looking through it again and again would only cause pauses.
    gc.collect()
    gc.freeze()


def _banner(catalog: Catalog, url: str) -> str:
    lines = ["", "Stepdial serves"]
    width = max(len(served.name) for served in catalog)
    for served in catalog:
        steps = ", ".join(map(str, served.manifest.steps))
        lines.append(f"  {served.name:<{width}}  {served.manifest.task:<8}  steps {steps}")
    shown = min(catalog, key=lambda served: served.manifest.input.kind != "text")
    path, example = _example(shown)
    lines += [
        f"on {url} (API: {url}/docs)",
        "",
        "Try:",
        f"  curl {url}{path} -d {shlex.quote(json.dumps(example))}",
        "",
        "Ctrl-C ends it.",
        "",
    ]
    return "\n".join(lines)


def _example(served: Served) -> tuple[str, dict[str, object]]:
    """A request that this model answers."""
    given = served.manifest.card.get("examples")
    text = given[0] if isinstance(given, list) and given else "Hello"
    steps = served.manifest.steps[0]
    if served.manifest.task == "classify":
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


if __name__ == "__main__":
    sys.exit(main())
