"""The commands on bundles: `export`, `inspect`, `calibrate`, and `evaluate` of a bundle."""

import argparse
import json
import signal
import sys
from pathlib import Path
from typing import Any

from serve.bundle import read_bundle


def main(argv: list[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    # A supervisor's SIGTERM ends an export as Ctrl-C does: with nothing left behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return int(arguments.run_command(arguments))
    except (ValueError, OSError) as error:
        print(f"stepdial {arguments.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="stepdial", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    export = commands.add_parser(
        "export",
        help="turn a run into a bundle",
        description="Stitch, verify, calibrate and pack every rung of a run into a bundle.",
    )
    export.set_defaults(run_command=_export)
    export.add_argument("run", type=Path, metavar="RUN")
    export.add_argument("--out", type=Path, metavar="BUNDLE", help="default bundles/NAME")
    export.add_argument(
        "--steps", help="the rungs (default: 1, 2, 4, ... and the full count of the training)"
    )
    export.add_argument("--method", help="integration method (default: as trained)")
    export.add_argument("--name", help="name of the model (default: the recipe's)")
    export.add_argument("--data", default="", metavar="PATH", help="where the data is now")
    export.add_argument(
        "--samples", type=int, help="calibrate on about this many held-out rows (default: all)"
    )
    export.add_argument("--card", type=Path, metavar="JSON", help="facts for the model card")
    inspect = commands.add_parser(
        "inspect",
        help="print a bundle's ladder",
        description="Print the ladder of bundles and draw their quality-latency frontier.",
    )
    inspect.set_defaults(run_command=_inspect)
    inspect.add_argument("bundles", type=Path, nargs="+", metavar="BUNDLE")
    inspect.add_argument(
        "--plot", type=Path, help="where to draw the frontier (default: NAME-frontier.png)"
    )
    evaluate = commands.add_parser(
        "evaluate",
        help="quality of a bundle at each rung",
        description="Measure the quality of a bundle's rungs in the serving runtime.",
    )
    evaluate.set_defaults(run_command=_evaluate)
    evaluate.add_argument("bundle", type=Path, metavar="BUNDLE")
    evaluate.add_argument("--steps", help="rungs to measure (default: all)")
    evaluate.add_argument("--data", default="", metavar="PATH", help="where the data is")
    evaluate.add_argument(
        "--samples", type=int, help="use about this many held-out rows (default: all)"
    )
    calibrate = commands.add_parser(
        "calibrate",
        help="measure a bundle's latency here",
        description="Measure the latency of every rung on this machine into latency.json.",
    )
    calibrate.set_defaults(run_command=_calibrate)
    calibrate.add_argument("bundle", type=Path, metavar="BUNDLE")
    calibrate.add_argument("--threads", type=int, help="threads a call (default: all cores)")
    return parser


def _export(arguments: argparse.Namespace) -> int:
    from export.frontier import describe
    from export.pack import ExportRequest, export_run
    from train.__main__ import parse_steps

    steps = tuple(parse_steps(arguments.steps)) if arguments.steps else ()
    card = _read_card(arguments.card) if arguments.card else {}
    target = arguments.out or Path("bundles") / (arguments.name or arguments.run.name)
    request = ExportRequest(
        target, steps, arguments.method, arguments.name, arguments.samples, card
    )
    print(describe(export_run(arguments.run, request, arguments.data)))
    print(f"bundle: {target}\nnext: stepdial serve {target}")
    return 0


def _read_card(path: Path) -> dict[str, Any]:
    try:
        card = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(card, dict):
        raise ValueError(f"{path}: a card is an object of facts")
    return card


def _inspect(arguments: argparse.Namespace) -> int:
    from export.frontier import describe, draw
    from train.evaluation_report import check_plot

    bundles = [read_bundle(folder) for folder in arguments.bundles]
    print("\n\n".join(describe(bundle) for bundle in bundles))
    if len({bundle.manifest.rungs[0].quality.metric for bundle in bundles}) > 1:
        print("no plot: these bundles have different metrics; draw them one at a time")
        return 0
    path = arguments.plot or Path("-".join(b.manifest.name for b in bundles) + "-frontier.png")
    check_plot(path)
    draw(bundles, path)
    print(f"plot: {path}")
    return 0


def _evaluate(arguments: argparse.Namespace) -> int:
    from export.evaluate import evaluate_bundle, print_beside_manifest
    from train.__main__ import parse_steps

    bundle = read_bundle(arguments.bundle)
    steps = parse_steps(arguments.steps) if arguments.steps else None
    rows = evaluate_bundle(bundle, steps, arguments.data, arguments.samples)
    print_beside_manifest(bundle, rows)
    return 0


def _calibrate(arguments: argparse.Namespace) -> int:
    from export.frontier import describe
    from export.pack import calibrate_latency

    calibrate_latency(arguments.bundle, arguments.threads)
    print(describe(read_bundle(arguments.bundle)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
