"""The commands of training: `stepdial train` and `stepdial evaluate`; also `python -m train`."""

import argparse
import sys
from pathlib import Path

from train.checkpoint import load_run
from train.config import RecipeError, load_recipe, recipe_names
from train.loop import Diverged, train


def main(argv: list[str] | None = None) -> int:
    parser = _parser()
    arguments = parser.parse_args(argv)
    try:
        if arguments.command == "train":
            return _train(arguments)
        return _evaluate(arguments)
    except (ValueError, OSError, Diverged) as error:
        print(f"stepdial {arguments.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="stepdial", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser(
        "train", help="train a recipe", description="Train a recipe into a run folder."
    )
    make.add_argument("recipe", help=f"a .toml file, or one of: {', '.join(recipe_names())}")
    make.add_argument("--data", default="", metavar="PATH", help="the corpus file or table folder")
    make.add_argument("--out", type=Path, metavar="RUN", help="run folder (default runs/RECIPE)")
    make.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a setting of the recipe, e.g. --set optim.lr=0.001 (repeatable)",
    )
    look = commands.add_parser(
        "evaluate",
        help="quality of a run at each step count",
        description="Print and plot quality against steps on the held-out split.",
    )
    look.add_argument("run", type=Path, metavar="RUN")
    look.add_argument("--steps", default="1,2,4,8", help="step counts (default 1,2,4,8)")
    look.add_argument("--method", help="integration method (default: the one it was trained with)")
    look.add_argument("--data", default="", metavar="PATH", help="where the data is now")
    look.add_argument("--plot", type=Path, help="PNG to write (default RUN/quality.png)")
    return parser


def _train(arguments: argparse.Namespace) -> int:
    recipe = load_recipe(arguments.recipe, arguments.overrides, arguments.data)
    folder = arguments.out or Path("runs") / recipe.name
    train(recipe, folder)
    print(f"trained: {folder}\nnext: stepdial export {folder} --out bundles/{recipe.name}")
    return 0


def _evaluate(arguments: argparse.Namespace) -> int:
    from train.evaluate import check_plot, evaluate_run, plot_quality, print_quality

    _, recipe, _, _ = load_run(arguments.run)
    path = arguments.plot or arguments.run / "quality.png"
    check_plot(path)
    method = arguments.method or recipe.steps.method
    rows = evaluate_run(arguments.run, parse_steps(arguments.steps), method, arguments.data)
    print_quality(recipe.name, method, rows)
    plot_quality(recipe.name, rows, path)
    print(f"plot: {path}")
    return 0


def parse_steps(text: str) -> list[int]:
    """`1,2,4,8` as ascending counts."""
    try:
        steps = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise RecipeError(f"--steps {text!r}: write counts like 1,2,4,8") from None
    if not steps or steps[0] < 1:
        raise RecipeError(f"--steps {text!r}: counts start at 1")
    return steps


if __name__ == "__main__":
    sys.exit(main())
