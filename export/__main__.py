"""The commands on bundles: `export`, `inspect`, `calibrate`, and `evaluate` of a bundle.

Bundles are imported where they are read, so that --help is quick.
"""

import argparse
import importlib.util
import json
import signal
import sys
from pathlib import Path
from typing import Any

from export.targets import add_arguments, check_target, write_target
from stepdial import Options
from train.interrupt import in_words, reader_gone


def main(argv: list[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    # A supervisor's SIGTERM, or the end of the terminal, ends an export as Ctrl-C does: with
    # nothing left behind.
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as by `nohup`
            signal.signal(number, signal.default_int_handler)
    try:
        status = int(arguments.run_command(arguments))
        if sys.stdout is not None:  # closed, as by `>&-`
            sys.stdout.flush()
        return status
    except BrokenPipeError:
        return reader_gone()
    except (ValueError, OSError) as error:
        print(f"stepdial {arguments.command}: {in_words(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> Options:
    parser = Options(prog="stepdial", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    export = commands.add_parser(
        "export",
        help="turn a run into a bundle",
        description="Make a bundle of a run: a graph for each step count, compared with the "
        "trained model, then measured for quality and latency.",
    )
    export.set_defaults(run_command=_export)
    export.add_argument(
        "run",
        type=Path,
        metavar="RUN",
        help="a run; with --target, or --precision fp16 or bf16, also a bundle",
    )
    export.add_argument("--out", type=Path, metavar="FOLDER", help="default bundles/NAME")
    add_arguments(export)
    export.add_argument(
        "--steps",
        help="step counts that can be requested (default: 1, 2, 4, ... up to that of training)",
    )
    export.add_argument("--method", help="integration method (default: as trained)")
    export.add_argument("--name", help="name of the model (default: the run's folder)")
    export.add_argument("--data", default="", metavar="PATH", help="where the data is now")
    export.add_argument(
        "--samples", type=int, help="calibrate on about this many held-out rows (default: all)"
    )
    export.add_argument(
        "--precision",
        default="fp32",
        help="of the weights: fp32 (default), fp16, bf16, or int8",
    )
    export.add_argument(
        "--cache",
        choices=("fp32", "fp16", "int8"),
        help="KV cache of a generator: fp32, fp16 in half or int8 in a quarter of the memory "
        "(default: fp16 with --precision fp16 or bf16, else fp32)",
    )
    export.add_argument(
        "--no-calibrate",
        action="store_true",
        help="for trials: quality is that of two held-out rows, so it and the default step count "
        "mean nothing; no latency, no thresholds for early answers",
    )
    export.add_argument("--card", type=Path, metavar="JSON", help="facts for the model card")
    _add_plain(export)
    export.add_argument(
        "--chat-template",
        type=Path,
        metavar="FILE",
        help="Jinja template that turns chat messages into a prompt, for a generator",
    )
    inspect = commands.add_parser(
        "inspect",
        help="print a bundle's step counts, or compare two bundles",
        description="Print the quality and latency of a bundle at each step count, and draw them; "
        "with a second bundle, compare the two.",
    )
    inspect.set_defaults(run_command=_inspect)
    inspect.add_argument("bundle", type=Path, metavar="BUNDLE")
    inspect.add_argument("other", type=Path, nargs="?", metavar="BUNDLE", help="to compare with")
    _add_plain(inspect)
    inspect.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="draw quality against latency there, as .png, .svg or .pdf",
    )
    from train.__main__ import add_columns

    evaluate = commands.add_parser(
        "evaluate",
        help="quality of a bundle at each step count",
        description="Measure the quality of a bundle at each step count, in the serving runtime.",
    )
    evaluate.set_defaults(run_command=_evaluate)
    evaluate.add_argument("bundle", type=Path, metavar="BUNDLE")
    evaluate.add_argument("--steps", help="step counts to measure (default: all)")
    evaluate.add_argument(
        "--data",
        default="",
        metavar="PATH",
        help="where the data is; or another table to measure, whole",
    )
    add_columns(evaluate)
    evaluate.add_argument(
        "--samples", type=int, help="use about this many held-out rows (default: all)"
    )
    calibrate = commands.add_parser(
        "calibrate",
        help="measure a bundle's latency here",
        description="Measure the latency of every step count on this machine, into latency.json.",
    )
    calibrate.set_defaults(run_command=_calibrate)
    calibrate.add_argument("bundle", type=Path, metavar="BUNDLE")
    calibrate.add_argument("--threads", type=int, help="threads per call (default: all cores)")
    return parser


def say(line: str) -> None:
    """Print what is done now, also where output is a file or a pipe."""
    print(f"{line}\n", end="", flush=True)  # in one write: threads say things too


def _add_plain(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--plain",
        type=Path,
        nargs="+",
        default=[],
        metavar="BUNDLE",
        help="plain models of the same data: say at which step counts this one is as good",
    )


def _export(arguments: argparse.Namespace) -> int:
    from serve.bundle import MANIFEST_FILE, read_bundle

    if not (arguments.run / MANIFEST_FILE).is_file():
        return _export_run(arguments)
    if arguments.target != "onnx":
        write_target(read_bundle(arguments.run), arguments)
        return 0
    if arguments.precision in ("fp16", "bf16"):
        return _export_bundle(arguments)
    raise ValueError(
        f"{arguments.run} is a bundle already: name the run that it was made of, or make "
        "something else of it with --target, or with --precision fp16 or bf16"
    )


def _export_bundle(arguments: argparse.Namespace) -> int:
    """A 16-bit bundle of a float32 one."""
    from export.half_bundle import halve_bundle
    from export.inspect import describe
    from export.latency import calibrate_latency
    from export.quality import dataset_of, held_out_batches
    from serve.bundle import read_bundle
    from train.__main__ import command

    for flag in ("steps", "method", "name", "cache", "card", "chat_template"):
        if getattr(arguments, flag) is not None:
            raise ValueError(
                f"--{flag.replace('_', '-')} needs the run that {arguments.run} was made of: a "
                "bundle only gets another precision"
            )
    if arguments.plain:
        raise ValueError("--plain needs the run that a bundle is made of: its card has it then")
    bundle = read_bundle(arguments.run)
    dataset = dataset_of(bundle, arguments.data)
    samples = 1 if arguments.no_calibrate else _rows(arguments.samples)
    target = arguments.out or Path("bundles") / f"{bundle.manifest.name}-{arguments.precision}"
    made = halve_bundle(
        bundle,
        target,
        arguments.precision,
        lambda: held_out_batches(dataset, bundle.manifest, samples),
        say,
    )
    if not arguments.no_calibrate:
        calibrate_latency(made.folder, say=say)
    print(describe(read_bundle(made.folder)))
    print(f"bundle: {target}\nnext: {command('serve', target)}")
    return 0


def _rows(samples: int | None) -> int | None:
    """So many held-out rows, if any can be that many."""
    if samples is not None and samples < 1:
        raise ValueError(f"--samples {samples}: use at least 1, or leave it out for all rows")
    return samples


def _export_run(arguments: argparse.Namespace) -> int:
    from export.inspect import describe
    from export.int8 import check_precision
    from export.run import ExportRequest, export_run
    from serve.bundle import check_name, read_bundle
    from train.__main__ import command, parse_steps

    if arguments.name is not None:
        check_name(arguments.name)
    check_target(arguments)
    steps = () if arguments.steps is None else tuple(parse_steps(arguments.steps))
    for file in (arguments.card, arguments.chat_template):
        if file is not None and not file.is_file():
            raise ValueError(f"there is no file {file}")
    card = _read_card(arguments.card) if arguments.card else {}
    folder = arguments.run if arguments.run.name not in ("", "..") else arguments.run.resolve()
    default = Path("bundles") / (arguments.name or folder.name)
    # Of another target, --out is where that goes; the bundle it is made of stays beside the others.
    target = default if arguments.target != "onnx" else arguments.out or default
    request = ExportRequest(
        target,
        steps,
        arguments.method,
        arguments.name or name_of(arguments.run),
        check_precision(arguments.precision),
        arguments.cache,
        samples=1 if arguments.no_calibrate else _rows(arguments.samples),
        latency=not arguments.no_calibrate,
        card=card,
        chat_template=arguments.chat_template,
        plain=tuple(read_bundle(folder).manifest for folder in arguments.plain),
    )
    bundle = export_run(arguments.run, request, arguments.data, say)
    print(describe(bundle))
    if arguments.target == "onnx":
        print(f"bundle: {target}\nnext: {command('serve', target)}")
    else:
        print(f"bundle: {target}")
        write_target(bundle, arguments)
    return 0


def name_of(run: Path) -> str | None:
    """The name of a bundle of a run: its folder's, where a model can be called that."""
    from serve.bundle import BundleError, check_name

    name = run.absolute().name.lower()
    try:
        check_name(name)
    except BundleError:
        return None  # it has the recipe's then
    return name


def _read_card(path: Path) -> dict[str, Any]:
    try:
        card = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(card, dict):
        raise ValueError(f"{path}: a card is an object of facts")
    return card


def _inspect(arguments: argparse.Namespace) -> int:
    from export.inspect import check_plain, compared, describe, draw, not_comparable
    from serve.bundle import read_bundle
    from train.evaluation_report import check_plot

    if arguments.plot is not None:
        check_plot(arguments.plot)
    bundles = [read_bundle(arguments.bundle)]
    if arguments.other is None:
        plain = [read_bundle(folder).manifest for folder in arguments.plain]
        check_plain(bundles[0].manifest, plain)
        print(describe(bundles[0], plain))
    elif arguments.plain:
        raise ValueError("--plain goes with one bundle: leave out the second")
    else:
        bundles.append(read_bundle(arguments.other))
        print(compared(*bundles))
    if arguments.plot is None:
        return 0
    problem = not_comparable(*(one.manifest for one in bundles)) if len(bundles) > 1 else None
    if problem is not None:
        raise ValueError(f"--plot {arguments.plot}: {problem}: inspect them one at a time")
    if importlib.util.find_spec("matplotlib") is None:  # as where there is only what serves
        raise ValueError(f"--plot {arguments.plot}: needs matplotlib: pip install matplotlib")
    draw(bundles, [arguments.plot])
    print(f"plot: {arguments.plot}")
    return 0


def _evaluate(arguments: argparse.Namespace) -> int:
    from export.quality import measure_bundle, print_beside_manifest
    from serve.bundle import read_bundle
    from train.__main__ import parse_steps
    from train.recipe import Columns

    bundle = read_bundle(arguments.bundle)
    steps = None if arguments.steps is None else parse_steps(arguments.steps)
    columns = Columns(tuple(arguments.text or ()), arguments.label or "")
    rows = measure_bundle(bundle, steps, arguments.data, _rows(arguments.samples), columns)
    print_beside_manifest(bundle, rows)
    return 0


def _calibrate(arguments: argparse.Namespace) -> int:
    from export.inspect import describe
    from export.latency import calibrate_latency
    from serve.bundle import read_bundle

    calibrate_latency(arguments.bundle, arguments.threads, say)
    print(describe(read_bundle(arguments.bundle)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
