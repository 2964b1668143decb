"""The commands `stepdial train`, `recipes`, `convert`, `retrofit` and `evaluate`."""

import argparse
import json
import os
import shlex
import shutil
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from stepdial import Options
from train.interrupt import Diverged, SolverError, in_words, reader_gone
from train.recipe import (
    Accelerator,
    Columns,
    RecipeError,
    about_recipe,
    grouped_recipes,
    load_recipe,
    needs_data,
)

if TYPE_CHECKING:
    from train.classifier_report import Scores
    from train.convert import Conversion

MOST_STEPS = 1000  # of one answer


def main(argv: list[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    try:
        status = _COMMANDS[arguments.command](arguments)
        if sys.stdout is not None:  # closed, as by `>&-`
            sys.stdout.flush()
        return status
    except BrokenPipeError:
        return reader_gone()
    except (ValueError, OSError, Diverged, SolverError) as error:
        print(f"stepdial {arguments.command}: {in_words(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> Options:
    parser = Options(prog="stepdial", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser(
        "train", help="train a recipe", description="Train a recipe into a run folder."
    )
    make.add_argument("recipe", help="a name that `stepdial recipes` lists, or a .toml file")
    make.add_argument("--data", default="", metavar="PATH", help="the file or folder of the data")
    add_columns(make)
    _add_class_weights(make)
    make.add_argument(
        "--from",
        dest="pretrained",
        metavar="MODEL",
        help="begin with a pretrained encoder: as `stepdial convert MODEL --recipe RECIPE` does",
    )
    _add_epochs(make, "with --from: ")
    make.add_argument(
        "--teacher", type=Path, metavar="RUN", help="also learn from the answers of this run"
    )
    make.add_argument("--out", type=Path, metavar="RUN", help="run folder (default runs/RECIPE)")
    _add_overrides(make)
    commands.add_parser(
        "recipes",
        help="list the recipes that `train` knows",
        description="List the recipes that `stepdial train` knows, with what each trains.",
    )
    _add_convert(
        commands.add_parser(
            "convert",
            help="make a dial of a pretrained model",
            description="Fine-tune a pretrained encoder on a table of texts and labels, or a "
            "pretrained decoder on a text. Then train a few of its layers to do the work of all in "
            "several steps, with the fine-tuned original as the teacher. The same command "
            "resumes.",
        )
    )
    again = commands.add_parser(
        "retrofit",
        help="turn a fixed-step run into an any-step one",
        description="Fine-tune a run so that any number of steps works. Its own answers at full "
        "steps, frozen, are the teacher of the shorter ones. The same command resumes.",
    )
    again.add_argument("run", type=Path, metavar="RUN")
    again.add_argument(
        "--out", type=Path, metavar="RUN2", help="the new run folder (default RUN-any)"
    )
    again.add_argument(
        "--iterations",
        type=float,
        default=0.25,
        metavar="SHARE",
        help="share of the iterations of RUN's recipe (default 0.25)",
    )
    again.add_argument("--data", default="", metavar="PATH", help="where the data is now")
    _add_overrides(again)
    look = commands.add_parser(
        "evaluate",
        help="quality of a run at each step count",
        description="Print and plot the quality at each step count, on the held-out split.",
        epilog="A bundle has options of its own: `stepdial evaluate BUNDLE --help`.",
    )
    look.add_argument("run", type=Path, metavar="RUN")
    look.add_argument("--steps", help="step counts (default 1, 2, 4, ... and the full one)")
    look.add_argument(
        "--method", help="integration methods, or `all` (default: the one it was trained with)"
    )
    look.add_argument(
        "--data",
        default="",
        metavar="PATH",
        help="where the data is now; or a table to measure instead, whole",
    )
    add_columns(look)
    look.add_argument(
        "--plot",
        type=Path,
        help="picture to write (default RUN/quality.png, of another table quality-elsewhere.png)",
    )
    look.add_argument(
        "--json", type=Path, metavar="FILE", help="also write all figures to this file"
    )
    look.add_argument(
        "--bleu",
        type=int,
        nargs="?",
        const=0,
        metavar="SENTENCES",
        help="also translate and print BLEU: of all test sentences, or of the first so many (slow)",
    )
    look.add_argument(
        "--beams", type=int, default=1, metavar="N", help="beam width of --bleu (default 1: greedy)"
    )
    look.add_argument(
        "--length-penalty",
        type=float,
        default=1.0,
        metavar="ALPHA",
        help="with --beams: scores are divided by length to this power (default 1)",
    )
    look.add_argument(
        "--texts",
        type=int,
        nargs="?",
        const=200,
        metavar="WINDOWS",
        help="decoders: also score what follows the first half of so many held-out windows, by "
        "perplexity, BLEU and ROUGE (default 200; slow)",
    )
    look.add_argument(
        "--forced",
        action="store_true",
        help="with --texts: name each token after the true ones before it, in place of writing on",
    )
    look.add_argument(
        "--bertscore",
        type=Path,
        metavar="FOLDER",
        help="with --texts: also BERTScore, by the model of the `transformers` library in a folder",
    )
    return parser


def _add_convert(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a folder with config.json, model.safetensors and tokenizer.json (encoders: BERT, "
        "MiniLM, RoBERTa, DistilBERT, ALBERT; decoders: GPT-2, Llama, SmolLM, Mistral, Qwen2, "
        "Pythia), or a name of the Hub",
    )
    parser.add_argument(
        "--data",
        default="",
        metavar="PATH",
        help="the table, of a decoder the text, or a recipe's folder",
    )
    add_columns(parser)
    _add_class_weights(parser)
    parser.add_argument("--out", type=Path, required=True, metavar="RUN", help="run folder")
    parser.add_argument(
        "--recipe",
        default="",
        help="whose data settings and card are used (default: classifier; of a decoder text)",
    )
    parser.add_argument("--blocks", default="2", help="layers to keep, or `all` (default 2)")
    parser.add_argument(
        "--layers",
        help="which layers, e.g. 0,5 (default: as far apart as can be); with --rank those of each "
        "step in turn, e.g. 0,1,2,3,4,5",
    )
    parser.add_argument(
        "--rank",
        type=int,
        default=0,
        metavar="R",
        help="give each step after the first corrections of this rank to its weights, which begin "
        "as the layers at its depth (default 0: all steps have the same weights)",
    )
    parser.add_argument(
        "--steps", default="1,2,3", help="step counts to train (default 1,2,3); 1: a plain stack"
    )
    parser.add_argument(
        "--teacher", type=Path, metavar="RUN", help="learn from this run, not from a new one"
    )
    parser.add_argument(
        "--max-tokens", type=int, default=0, metavar="N", help="longest text, in tokens"
    )
    parser.add_argument(
        "--prune-vocabulary",
        action="store_true",
        help="keep only the pieces of the vocabulary that the training texts use, for a smaller "
        "bundle; other words are read in smaller pieces",
    )
    _add_epochs(parser)
    _add_overrides(parser)


def _add_epochs(parser: argparse.ArgumentParser, when: str = "") -> None:
    parser.add_argument(
        "--epochs", type=float, metavar="N", help=f"{when}of the layers that are kept (default 6)"
    )
    parser.add_argument(
        "--teacher-epochs", type=float, metavar="N", help=f"{when}of all layers before (default 3)"
    )


def add_columns(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--text",
        action="append",
        metavar="COLUMN",
        help="column of a table that holds texts (repeatable)",
    )
    parser.add_argument("--label", metavar="COLUMN", help="column of a table that holds labels")


def _add_class_weights(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--class-weights",
        choices=("equal", "balanced"),
        help="balanced: every class of a table has the same weight, however few rows it has",
    )


def _add_overrides(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a setting of the recipe, e.g. --set optim.lr=0.001 (repeatable)",
    )
    parser.add_argument(
        "--device",
        choices=get_args(Accelerator),
        help="the same as --set run.accelerator=DEVICE (default: a GPU where torch sees one)",
    )


def _overrides(arguments: argparse.Namespace) -> list[str]:
    device = [] if arguments.device is None else [f"run.accelerator={arguments.device}"]
    return [*arguments.overrides, *device]


def _train(arguments: argparse.Namespace) -> int:
    overrides = [*_columns(arguments), *_overrides(arguments)]
    if arguments.pretrained:
        return _train_from(arguments, overrides)
    if (arguments.epochs, arguments.teacher_epochs) != (None, None):
        raise RecipeError(
            "--epochs and --teacher-epochs are for --from; a recipe has --set optim.iterations, "
            "and for tables optim.epochs"
        )
    if arguments.teacher:
        overrides.append(f"teacher.run={_quoted(str(arguments.teacher))}")
    recipe = load_recipe(arguments.recipe, overrides, arguments.data)
    if recipe.data.kind not in ("table", "tags") and (arguments.text or arguments.label):
        raise RecipeError(
            f"--text and --label name columns of a table, and {recipe.name} reads none: leave them "
            "out, or train the recipe classifier"
        )
    folder = arguments.out or Path("runs") / recipe.name

    from train.classifier_report import Baseline
    from train.loop import train  # with torch, which takes seconds: after all is read

    baseline = Baseline()
    train(recipe, folder, begin=baseline.say)
    if os.environ.get("RANK", "0") == "0":  # torchrun starts several of these
        target = Path("bundles") / folder.name
        _report(folder, baseline.scores)
        print(f"trained: {folder}\nnext: {command('export', folder, '--out', target)}")
    return 0


def _recipes(arguments: argparse.Namespace) -> int:
    for title, names in grouped_recipes().items():
        column = max(map(len, names)) + 5
        behind = " " * (column + 1)
        width = max(column + 40, shutil.get_terminal_size().columns - 1)
        print(f"{title}\n")
        for name in names:
            mark = "*" if needs_data(name) else " "
            line = f"  {name} {mark}".ljust(len(behind)) + about_recipe(name)
            print(textwrap.fill(line, width, subsequent_indent=behind, break_on_hyphens=False))
        print()
    print("* needs --data PATH; without it, `stepdial train` says which files that is.")
    print("Train one: stepdial train RECIPE --out RUN. Change it: --set optim.iterations=200.")
    return 0


def _convert(arguments: argparse.Namespace) -> int:
    from train.convert import Conversion

    steps = tuple(parse_steps(arguments.steps))
    request = Conversion(
        blocks=0 if arguments.blocks == "all" else _whole("--blocks", arguments.blocks),
        layers=tuple(
            _whole("--layers", part) for part in (arguments.layers or "").split(",") if part
        ),
        steps=steps,
        rank=arguments.rank,
        recipe=arguments.recipe,
        teacher=arguments.teacher,
        max_tokens=arguments.max_tokens,
        prune=arguments.prune_vocabulary,
        overrides=(*_columns(arguments), *_overrides(arguments)),
    )
    _run_conversion(arguments.model, arguments.out, _epochs(arguments, request), arguments.data)
    return 0


def _columns(arguments: argparse.Namespace) -> list[str]:
    """What flags say of a table, as overrides."""
    found = []
    if arguments.text:
        found.append(f"data.text={_quoted(arguments.text)}")
    if arguments.label:
        found.append(f"data.label={_quoted(arguments.label)}")
    if arguments.class_weights:
        found.append(f"optim.class_weights={_quoted(arguments.class_weights)}")
    return found


def _quoted(value: str | list[str]) -> str:
    """As TOML writes it: without the pairs of escapes that JSON has for rarer characters."""
    return json.dumps(value, ensure_ascii=False)


def _epochs(arguments: argparse.Namespace, request: "Conversion") -> "Conversion":
    """The request with the epochs that are given."""
    from dataclasses import replace

    for flag in ("epochs", "teacher_epochs"):
        count = getattr(arguments, flag)
        if count is not None and not count > 0:
            raise RecipeError(f"--{flag.replace('_', '-')} {count:g}: must be more than 0")
    return replace(
        request,
        epochs=arguments.epochs or request.epochs,
        teacher_epochs=arguments.teacher_epochs or request.teacher_epochs,
    )


def _whole(flag: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise RecipeError(f"{flag} {text!r}: write a whole number") from None


def _train_from(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from train.convert import Conversion

    folder = arguments.out or Path("runs") / Path(arguments.recipe).stem
    request = Conversion(
        recipe=arguments.recipe,
        teacher=arguments.teacher,
        overrides=tuple(overrides),
    )
    _run_conversion(arguments.pretrained, folder, _epochs(arguments, request), arguments.data)
    return 0


def _run_conversion(model: str, folder: Path, request: "Conversion", data: str) -> None:
    from train.classifier_report import Baseline
    from train.convert import convert

    baseline = Baseline()
    convert(model, folder, request, data, begin=baseline.say)
    _report(folder, baseline.scores)
    counts = ",".join(map(str, request.steps))
    target = Path("bundles") / folder.name
    export = command(
        "export", folder, "--steps", counts, "--precision", "int8", "--out", target
    )  # in float32 the table of embeddings alone is most of it
    print(f"converted: {folder}\nnext: {command('evaluate', folder, '--steps', counts)}")
    print(f"      {export}")


def _report(folder: Path, baseline: "Scores | None") -> None:
    from train.classifier_report import print_report, report_run

    report = report_run(folder, baseline)
    if report is not None:
        print_report(report)


def _retrofit(arguments: argparse.Namespace) -> int:
    from train.retrofit import retrofit

    run = arguments.run
    folder = arguments.out or run.with_name(f"{run.name}-any")
    recipe = retrofit(
        run, folder, arguments.iterations, _overrides(arguments), arguments.data, quiet=False
    )
    counts = ",".join(map(str, sorted({*recipe.steps.short, recipe.steps.full})))
    print(f"retrofitted: {folder}\nnext: {command('evaluate', folder, '--steps', counts)}")
    return 0


def _evaluate(arguments: argparse.Namespace) -> int:
    from train.evaluate import HELD_OUT, evaluate_run, methods_named
    from train.evaluation_report import (
        check_file,
        check_plot,
        plot_quality,
        print_report,
        write_json,
    )

    if arguments.plot:
        check_plot(arguments.plot)
    if arguments.json:
        check_file(arguments.json)
    alpha = arguments.length_penalty
    if alpha != 1 and arguments.beams == 1:
        raise RecipeError(f"--length-penalty {alpha:g} is for several --beams: add them too")
    if alpha < 0:
        raise RecipeError("--length-penalty must not be negative")
    if arguments.bleu is not None:
        from train.text_quality import check_bleu

        check_bleu(arguments.run, arguments.beams, arguments.bleu)
    elif arguments.beams != 1:
        raise RecipeError(f"--beams {arguments.beams} is for --bleu: add that too")
    if arguments.texts is not None:
        from train.text_quality import check_texts

        check_texts(arguments.run, arguments.texts, arguments.bertscore)
    elif arguments.forced or arguments.bertscore:
        raise RecipeError("--forced and --bertscore are for --texts: add that too")
    methods = None if arguments.method is None else methods_named(arguments.method)
    steps = None if arguments.steps is None else parse_steps(arguments.steps)
    columns = Columns(tuple(arguments.text or ()), arguments.label or "")
    report = evaluate_run(arguments.run, steps, methods, arguments.data, columns=columns)
    if report.discrete and (steps not in (None, [1]) or methods not in (None, ["euler"])):
        print("this model has a fixed depth: it has one answer, at 1 step\n")
    print_report(report)
    if arguments.json:  # first: what took hours must not be lost for a picture
        write_json(report, arguments.json)
    name = "quality.png" if report.measured == HELD_OUT else "quality-elsewhere.png"
    path, status = arguments.plot or arguments.run / name, 0
    try:
        plot_quality(report, path)
        print(f"plot: {path}")
    except OSError as error:
        if arguments.plot:
            raise
        # Nobody named it, and the run may be somebody else's: the rest is measured all the same.
        print(f"no plot: {in_words(error)}; name another file with --plot", file=sys.stderr)
        status = 2
    shown = sorted({row.steps for row in report.rows if row.steps is not None})
    if arguments.texts is not None:
        from train.text_quality import print_texts

        windows, forced, bert = arguments.texts, arguments.forced, arguments.bertscore
        print_texts(arguments.run, shown, methods, windows, arguments.data, forced, bert)
    if arguments.bleu is not None:
        from train.text_quality import print_bleu

        beams, samples = arguments.beams, arguments.bleu
        print_bleu(arguments.run, shown, methods, beams, samples, arguments.data, alpha)
    return status


def command(*words: object) -> str:
    """A line of `stepdial` to copy into a shell."""
    return shlex.join(map(str, ("stepdial", *words)))


def parse_steps(text: str) -> list[int]:
    """`1,2,4,8` as ascending counts."""
    try:
        steps = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise RecipeError(f"--steps {text!r}: write counts like 1,2,4,8") from None
    if steps[0] < 1 or steps[-1] > MOST_STEPS:
        raise RecipeError(f"--steps {text!r}: counts are from 1 to {MOST_STEPS}")
    return steps


_COMMANDS = {
    "train": _train,
    "recipes": _recipes,
    "convert": _convert,
    "retrofit": _retrofit,
    "evaluate": _evaluate,
}


if __name__ == "__main__":
    sys.exit(main())
