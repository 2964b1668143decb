"""Trains a run of the results page again, with another seed or with settings changed, and keeps it.

    python -m benchmarks.papers.again characters-any --data FILE --seeds 1 2 --out runs
    python -m benchmarks.papers.again characters-fixed4 --data FILE --out runs \\
        --name characters-fixed2 --set steps.full=2 --set optim.iterations=3000

What is trained is the recipe that the run was measured with, which its record holds. The same
command goes on where an earlier one was stopped: what is finished is skipped.
"""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.lab import command_line
from benchmarks.papers.measure import measured
from benchmarks.papers.measured import FOLDER, Measured
from train.evaluate import evaluate_run
from train.loop import train
from train.recipe import Recipe, data_at, overridden


def main(arguments: Sequence[str]) -> int:
    parsed = _parser().parse_args(arguments)
    try:
        first = _first(parsed.results, parsed.group)
        for seed in parsed.seeds:
            recipe = _recipe(first, parsed.set, parsed.data, seed)
            named = parsed.name or first.group
            if (parsed.results / f"{named}-{seed}.json").is_file():
                continue
            run = parsed.out / f"{named}-{seed}"
            train(recipe, run)
            counts = sorted({point.steps for point in first.points if point.steps})
            methods = list(dict.fromkeys(point.method for point in first.points))
            report = evaluate_run(run, counts, methods, parsed.data)
            command = command_line("benchmarks.papers.again", arguments)
            one = measured(run, named, report, command)
            print(one.write(parsed.results), flush=True)
    except (ValueError, OSError) as error:
        print(f"again: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def _first(folder: Path, group: str) -> Measured:
    """The record of the first seed that there is."""
    paths = sorted(folder.glob(f"{group}-[0-9]*.json"))
    if not paths:
        known = sorted({path.stem.rpartition("-")[0] for path in folder.glob("*.json")})
        raise ValueError(f"no record of {group!r} in {folder}: there are {', '.join(known)}")
    return Measured.read(paths[0])


def _recipe(first: Measured, changes: list[str], data: str, seed: int) -> Recipe:
    recipe = overridden(dict(first.recipe), changes, f"the recipe of {first.name}")
    run = dataclasses.replace(recipe.run, seed=seed)
    return data_at(dataclasses.replace(recipe, run=run), data)


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    made.add_argument("group", help="a run of the results page, e.g. characters-any")
    made.add_argument("--data", default="", metavar="PATH", help="where the data is")
    made.add_argument("--seeds", type=int, nargs="+", default=[0], metavar="SEED")
    made.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    made.add_argument("--name", help="what the changed run is called")
    made.add_argument("--out", type=Path, default=Path("runs"), help="folder of the runs")
    made.add_argument("--results", type=Path, default=FOLDER, help="where records are kept")
    return made


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
