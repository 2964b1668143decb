"""From the command line of `stepdial serve` to a running server."""

import gc
import json
import logging
import os
import shlex
import socket
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from shutil import which

from serve import logs
from serve.app import create_app
from serve.bundle import BundleError, ImageInput, PointsInput
from serve.catalog import Catalog, Served, find_bundles, open_catalog
from serve.engine.engine import Engine
from serve.keys import NewKey
from serve.loading import Loading, measure_first_calls
from serve.metrics import Metrics
from serve.server import (
    AddressError,
    Server,
    answer_first,
    bind,
    keep_memory_low,
    leave,
    listen,
    url_of,
)
from serve.settings import CommandLine, Settings, SettingsError, read_config

# The text printed at start: the models, the address, and a request to try.


def serving(
    catalog: Catalog, url: str, health_url: str | None = None, needs_key: bool = False
) -> str:
    """The text printed at start."""
    models = list(catalog)
    lines = ["", "Stepdial serves" if models else "Stepdial serves no model"]
    width = max((len(served.name) for served in models), default=0)
    for served in models:
        steps = ", ".join(map(str, served.manifest.steps))
        lines.append(f"  {served.name:<{width}}  {served.manifest.task:<8}  steps {steps}")
    lines += [f"on {url} (API: {url}/docs)"]
    if health_url is not None:
        lines += [f"health probes and metrics also on {health_url}"]
    lines += [""]
    if models:
        shown = min(models, key=lambda served: served.manifest.input.kind != "text")
        lines += [f"Open {url}/ in a browser, or try in a second terminal:"]
        if sys.prefix != sys.base_prefix and which("stepdial") is None:
            activate = os.path.relpath(Path(sys.prefix, "bin", "activate"))
            lines += [f"  . {shlex.quote(activate)}    # makes stepdial a command there"]
        lines += [f"  {_try(shown, url, needs_key)}", ""]
    return "\n".join([*lines, "Press Ctrl-C to stop.", ""])


# A tagger's answer is long JSON. Of it is shown the filled-in text, or each word with its label.
_FILLED = '[one["text"] for one in json.load(sys.stdin)["results"]]'
_LABELLED = '[[one["text"], one["label"]] for one in json.load(sys.stdin)["results"][0]["tokens"]]'


def _try(served: Served, url: str, needs_key: bool) -> str:
    """A command that sends an example request and shows the answer; KEY is the reader's own."""
    path, example = _example(served)
    key = "-H 'Authorization: Bearer KEY' " if needs_key else ""
    sent = f"{key}{url}{path} -d {shlex.quote(json.dumps(example))}"
    if served.manifest.task != "tag" or not served.manifest.card.get("examples"):
        return f"curl {sent}"
    read = _FILLED if served.manifest.fills else _LABELLED
    shown = f'import json, sys; print(*{read}, sep="\\n")'
    return f"curl -s {sent} | python3 -c {shlex.quote(shown)}"


def _example(served: Served) -> tuple[str, dict[str, object]]:
    """An example request for this model."""
    given = served.manifest.card.get("examples")
    text = given[0] if isinstance(given, list) and given else "Hello"
    steps = served.manifest.steps[0]
    if served.manifest.task == "tag":
        return "/v1/classify", {"model": served.name, "input": text}
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


_UNUSABLE = 2
_INTERRUPTED = 130
_HEALTH_FLAGS = "--health-host and --health-port"
_SWITCH_S = 0.0005
_log = logging.getLogger("stepdial")


def command(line: CommandLine, listening: Callable[[], None]) -> int:
    """Serve until a signal comes; returns the exit status of the process.

    `listening` is called when there is a server to take signals.
    """
    keep_memory_low()
    log_format: logs.LogFormat = "text"
    try:
        if line.new_key is not None:
            _show_new_key(line.new_key)
            return 0
        config = read_config(line.config) if line.config else None
        settings = Settings.read(line.flags, config=config)
        log_format = settings.log_format
        logs.set_up(log_format, settings.log_level, settings.access_log)  # loading warns
        # Bound first, so that a port in use is noticed before models are loaded.
        with ExitStack() as bound:
            listeners = [bound.enter_context(bind(settings.host, settings.port))]
            if settings.health_port is not None:
                host = settings.health_host or settings.host
                health = bind(host, settings.health_port, _HEALTH_FLAGS)
                listeners.append(bound.enter_context(health))
            folders = line.bundles or find_bundles(settings.zoo)
            catalog = open_catalog(folders, settings.threads, settings.runs_on)
            zoo = None if line.bundles else settings.zoo
            _serve(settings, catalog, listeners, zoo, listening)
    except (SettingsError, BundleError, AddressError) as error:
        logs.flush()  # this line is the last one
        print(logs.line(log_format, f"stepdial serve: {error}", "CRITICAL"), file=sys.stderr)
        return _UNUSABLE
    except KeyboardInterrupt:  # while models were loading; later a signal drains
        return _INTERRUPTED
    return 0


def _serve(
    settings: Settings,
    catalog: Catalog,
    listeners: list[socket.socket],
    zoo: Path | None,
    listening: Callable[[], None],
) -> None:
    """Run the server. SIGHUP reads `zoo` again; the second listener, if any, is for probes."""
    _set_up()
    metrics = Metrics()
    logs.tell_dropped(metrics.log_lines_dropped.inc)
    engine = Engine(
        catalog,
        settings.limits,
        metrics,
        patience=settings.patience,
        leave=leave,
        recheck_share=settings.recheck_share,
    )
    for served in catalog:
        measure_first_calls(served, engine.cost(served))
    url, *others = map(url_of, listeners)
    health_url = others[0] if others else None

    def changed() -> None:
        answer_first(settings.engine_nice)  # loading started threads
        models = [served.name for served in catalog]
        banner = serving(catalog, url, health_url, app.state.keys.in_use)
        where = {"url": url} | ({"health_url": health_url} if health_url else {})
        logs.write_stdout(logs.line(settings.log_format, banner, **where, models=models))

    def begin(url: str) -> None:
        changed()
        listening()

    loading = Loading(engine, settings, zoo, changed)
    app = create_app(settings, engine, loading)

    async def reload() -> None:
        for keys in (app.state.keys, app.state.admin_keys):
            try:
                keys.read_again()
            except SettingsError as error:
                _log.error("the API keys were not changed: %s", error)
        await loading.reload()

    for listener, flags in zip(listeners, ("--host and --port", _HEALTH_FLAGS), strict=False):
        listen(listener, flags)
    Server(settings, app, engine, begin, reload, leave).run(listeners)


def _show_new_key(name: str) -> None:
    """Print the key to the terminal, and its entry for the keys file to standard output."""
    key = NewKey.draw(name)
    print(
        f"API key for {name}, shown only once: {key.secret}\nAdd the following to the file that "
        "--api-keys-file names:",
        file=sys.stderr,
    )
    print(key.block)


def _set_up() -> None:
    # The engine's thread and the event loop share the interpreter: with short turns neither waits
    # the default of 5 ms for the other.
    sys.setswitchinterval(_SWITCH_S)
    # What is loaded now stays, so the garbage collector need not look at it again.
    gc.collect()
    gc.freeze()
