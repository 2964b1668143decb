"""Speed, memory and faults of seven servers with the same classifier, and of three that write.

    python -m benchmarks.peers.run [--environments FOLDER] [--only NAME ...]

Every server has an environment and a core of its own, the clients have the other cores. All are
started in turn, again and again, and asked the same; the faults come at the last start of each.
"""

import argparse
import random
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.lab import ZOO, Options, Provenance, Result, Table, options, parser, run
from benchmarks.peers import report
from benchmarks.peers.generation import Way, measure_generation
from benchmarks.peers.report import PLAIN, Found
from benchmarks.peers.servers import (
    PEERS,
    STEPDIAL,
    Cores,
    Environments,
    Model,
    NotInstalled,
    NotRunning,
    Peer,
    Question,
    Running,
    default_folder,
    running,
)
from benchmarks.peers.speed import Pace, left, malformed, measure_speed, overloaded, terminated
from benchmarks.texts import text_of, window_of
from serve.bundle import Bundle, read_bundle
from serve.inputs.text import TextCodec
from serve.runtime import open_model

NAME = "peers"
GENERATION = "generation"
DEFAULT_BUNDLE = ZOO / "topics"
TOKENS = (16, 24, 32, 40, 48, 64, 80, 100)
STARTS = 2
_OVERLOAD_S, _QUICK_OVERLOAD_S = 3.0, 0.3


def main(arguments: Sequence[str]) -> int:
    made = parser(__doc__.partition("\n")[0])
    made.add_argument(
        "--environments",
        type=Path,
        metavar="FOLDER",
        default=default_folder(),
        help="where the servers are installed, each in an environment of its own "
        "(default: %(default)s)",
    )
    made.add_argument(
        "--only",
        nargs="+",
        metavar="NAME",
        choices=[*(one.name.lower() for one in PEERS), GENERATION],
        help="measure only these, and keep nothing unless --results says where: %(choices)s",
    )
    made.add_argument(
        "--tokens",
        type=int,
        nargs="+",
        default=TOKENS,
        metavar="N",
        help="lengths of the texts (default: %(default)s); one length leaves nothing to pad",
    )
    made.add_argument(
        "--objective-ms", type=float, default=100.0, help="99 %% of answers within this (100)"
    )
    parsed = made.parse_args(arguments)
    try:
        environments = Environments(parsed.environments)
    except NotInstalled as error:
        made.error(str(error))
    measured = partial(measure, options(parsed), parsed, environments)
    if parsed.only is not None:  # a part is no result: it would take the place of the whole one
        parsed = argparse.Namespace(**{**vars(parsed), "quick": True})
    return run("peers.run", arguments, parsed, measured)


def measure(
    chosen: Options,
    parsed: argparse.Namespace,
    environments: Environments,
    provenance: Provenance,
) -> Result:
    bundle = chosen.read("classify")[0] if parsed.bundles else read_bundle(DEFAULT_BUNDLE)
    steps = bundle.manifest.full_steps
    names = parsed.only or [*(one.name.lower() for one in PEERS), GENERATION]
    model, cores = model_of(bundle, steps, parsed.tokens), Cores.of_machine()
    pythons, founds = _installed(environments, names)
    with cores.of_clients():
        compare(founds, pythons, model, cores, parsed.objective_ms / 1000, chosen.quick)
        tables = _tables(list(founds), parsed.objective_ms, len(bundle.manifest.rungs))
        if GENERATION in names:
            tables.append(_generation(environments, cores, chosen.quick))
    return _result(provenance, bundle, model, cores, founds, tables)


def model_of(bundle: Bundle, steps: int, lengths: Sequence[int] = TOKENS) -> Model:
    """What all serve, and texts of several lengths with the labels that it gives them."""
    codec, classifier = TextCodec(bundle), open_model(bundle, threads=1).classifier(steps)
    labels = bundle.manifest.labels
    assert labels is not None
    questions = []
    for count in sorted({min(count, window_of(bundle.manifest)) for count in lengths}):
        text = text_of(codec, count)
        encoded = codec.encode_input(text, truncate=True).tokens
        logits = classifier.run(np.array([encoded], dtype=np.int64))  # (1, C)
        questions.append(Question(text, labels[int(logits.argmax())], len(encoded)))
    return Model(bundle.folder, steps, questions)


def compare(
    founds: Sequence[Found],
    pythons: Mapping[str, Path],
    model: Model,
    cores: Cores,
    objective_s: float,
    quick: bool,
) -> None:
    """Start all in turn, as often as it takes, and fill in what is found."""
    pace = Pace(objective_s, 0.5, 0.5, 1) if quick else Pace(objective_s, 4.0, 4.0, 5)
    starts, order = 1 if quick else STARTS, list(founds)
    shuffled = random.Random(0)
    for number in range(starts):
        shuffled.shuffle(order)
        for found in order:
            if found.why:
                continue
            print(f"{found.peer.name}, start {number + 1} of {starts}", file=sys.stderr)
            try:
                with running(found.peer, pythons[found.peer.name], model, cores) as one:
                    found.speeds.append(measure_speed(one, pace))
                    found.processes = len(one.tree.members())
                    if number == starts - 1:
                        _break(found, one, objective_s, quick)
            except (NotRunning, OSError) as error:
                found.why = str(error)


def _break(found: Found, one: Running, objective_s: float, quick: bool) -> None:
    """What it does when things go wrong; it is gone afterwards."""
    found.refusal = malformed(one)
    found.departure = left(one)
    per_s = found.middle(lambda it: it.many.per_s)
    seconds = _QUICK_OVERLOAD_S if quick else _OVERLOAD_S
    budgets = {PLAIN: {}, **found.peer.budgets(1000 * objective_s)}
    for asked, more in budgets.items():
        found.overloads[asked] = overloaded(one, per_s, seconds, objective_s, more)
    one.check()
    found.ending = terminated(one)


def _installed(
    environments: Environments, names: Sequence[str]
) -> tuple[dict[str, Path], list[Found]]:
    """The interpreter of each server, and where to write what is found, or why nothing is."""
    pythons, founds = {}, []
    for peer in PEERS:
        if peer.name.lower() not in names:
            continue
        found = Found(peer)
        try:
            pythons[peer.name] = _python(environments, peer)
        except NotInstalled as error:
            found.why = str(error)
        founds.append(found)
    return pythons, founds


def _python(environments: Environments, peer: Peer) -> Path:
    if peer.name == STEPDIAL:
        return Path(sys.executable)
    return environments.python(peer.name, peer.packages, peer.interpreter)


def _tables(founds: Sequence[Found], objective_ms: float, rungs: int) -> list[Table]:
    if not founds:
        return []
    return [
        report.speeds(founds, objective_ms),
        report.faults(founds),
        report.overload(founds, objective_ms),
        report.losses(founds, rungs),
        report.compared(founds),
    ]


def _generation(environments: Environments, cores: Cores, quick: bool) -> Table:
    rates: Mapping[Way, float]
    try:
        rates = measure_generation(environments, cores, quick)
    except NotInstalled as error:
        rates = measure_generation(environments, cores, quick, peers=False)
        table = report.generation(rates)
        return Table(
            f"{table.caption} transformers and CTranslate2 were not measured: {error}",
            table.columns,
            table.rows,
        )
    return report.generation(rates)


def _result(
    provenance: Provenance,
    bundle: Bundle,
    model: Model,
    cores: Cores,
    founds: Sequence[Found],
    tables: Sequence[Table],
) -> Result:
    apart = (
        "Each server has one core to itself, with everything that it starts, and the clients have "
        "the others"
        if cores.apart
        else "This machine has one core, which servers and clients share"
    )
    counted = [question.tokens for question in model.questions]
    shortest, longest = min(counted), max(counted)
    return provenance.result(
        NAME,
        "Other servers, side by side",
        f"The same graph ({bundle.manifest.name} at {model.steps} steps), tokenizer and "
        "onnxruntime behind every server, which is asked for the label of "
        f"{len(model.questions)} texts in turn, of {shortest} to {longest} tokens. The others are "
        "sent the text as Stepdial is, and encode, pad to the longest of the batch, run and take "
        "the best label; Stepdial batches texts of like length. It has the whole bundle and is "
        f"asked for exactly {model.steps} steps. {apart}. One thread a call of the "
        "model. Servers are started in turn, each twice in another order, and answers are checked "
        "at each start.",
        tables,
        report.targets(founds),
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
