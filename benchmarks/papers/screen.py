"""Trains the variants of a screen one after the other, and keeps how good each is.

    python -m benchmarks.papers.screen mnist --data FOLDER
    python -m benchmarks.papers.screen characters --data FILE --only fixed-8 grow-0.5 --seeds 0 1

Every variant costs the same number of velocity evaluations. The same command goes on where an
earlier one was stopped: what is finished is skipped. Several may run at once on different variants.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.lab import command_line
from benchmarks.papers.measure import measured
from benchmarks.papers.measured import Measured
from benchmarks.papers.screens import SCREENED, Screen, Variant, planned, read_screens
from train.evaluate import evaluate_run
from train.interrupt import Diverged
from train.loop import train
from train.ode import METHODS

STEPS = [1, 2, 4, 8]


def main(arguments: Sequence[str]) -> int:
    screens = read_screens()
    parser = _parser(list(screens))
    parsed = parser.parse_args(arguments)
    screen = screens[parsed.screen]
    names = [variant.name for variant in screen.variants]
    unknown = sorted(set(parsed.only or []) - set(names))
    if unknown:
        parser.error(f"--only {' '.join(unknown)}: the variants are {', '.join(names)}")
    chosen = [one for one in screen.variants if one.name in (parsed.only or names)]
    try:
        for seed in parsed.seeds:
            for variant in chosen:
                one = run(screen, variant, seed, parsed.data, parsed.out, parsed.results)
                print(_sentence(one), flush=True)
    except (ValueError, OSError) as error:
        print(f"screen: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def run(
    screen: Screen, variant: Variant, seed: int, data: str, out: Path, results: Path
) -> Measured:
    """Train, evaluate and keep one variant, unless that was done before."""
    recipe = planned(screen, variant, seed, data)
    name = f"{recipe.name}-{seed}"
    kept = results / f"{name}.json"
    expected = recipe.to_json()
    expected["data"]["path"] = ""
    if kept.is_file() and (before := Measured.read(kept)).recipe == expected:
        return before
    try:
        train(recipe, out / name)
    except Diverged as error:
        print(f"{name}: {error}", file=sys.stderr)  # its last good checkpoint is evaluated
    report = evaluate_run(out / name, STEPS, list(METHODS), data, screen.rows)
    again = [screen.name, *(["--data", data] if data else [])]
    again += ["--only", variant.name, "--seeds", str(seed)]
    command = command_line("benchmarks.papers.screen", again)
    one = measured(out / name, recipe.name, report, command)
    one.write(results)
    return one


def _sentence(one: Measured) -> str:
    points = [point for count in STEPS if (point := one.at(count)) is not None]
    shown = " / ".join(f"{point.value:.4f}" for point in points)
    jump = one.jumps[one.trained_method]["1"]
    return (
        f"{one.name}: {points[0].metric} {shown} at {' / '.join(map(str, STEPS))} steps, "
        f"jump after 1 agrees {100 * jump:.1f} %, {one.evaluations} evaluations, {one.cpu_s} CPU s"
    )


def _parser(names: list[str]) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    made.add_argument("screen", choices=names)
    made.add_argument("--data", default="", metavar="PATH", help="the file or folder of the data")
    made.add_argument("--only", nargs="+", metavar="NAME", help="variants (default: all)")
    made.add_argument("--seeds", nargs="+", type=int, default=[0], metavar="SEED")
    made.add_argument("--out", type=Path, default=Path("runs/screen"), help="folder of run folders")
    made.add_argument("--results", type=Path, default=SCREENED, help="where to keep figures")
    return made


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
