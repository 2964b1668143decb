"""Kill -9 at random moments: servers under load, exports, trainings; what is lost or half made.

Each kind is killed as often as is asked for, and goes on alone afterwards. It deliberately measures
no speed.
"""

import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from benchmarks.killed_export import kill_exports
from benchmarks.killed_server import kill_servers
from benchmarks.killed_training import kill_trainings
from benchmarks.killing import COMMAND_EVERY, Found
from benchmarks.options import Options, options, parser, run
from benchmarks.result import Cell, Provenance, Result, Table, Target

NAME = "kills"
KILLS, QUICK_KILLS = 100, 3
KINDS = ("server", "export", "training")


def main(arguments: Sequence[str]) -> int:
    made = parser(__doc__.partition("\n")[0])
    made.add_argument("--kills", type=int, default=None, help=f"of each kind (default: {KILLS})")
    made.add_argument("--seed", type=int, default=0, help="of all chance (default: 0)")
    made.add_argument("--only", choices=KINDS, help="kill this kind alone")
    parsed = made.parse_args(arguments)
    kills = parsed.kills or (QUICK_KILLS if parsed.quick else KILLS)
    kinds = (parsed.only,) if parsed.only else KINDS
    name = f"{NAME}_{parsed.only}" if parsed.only else NAME
    made_of = partial(measure, options(parsed), kinds, kills, parsed.seed, name)
    return run(NAME, arguments, parsed, made_of)


def measure(
    chosen: Options,
    kinds: Sequence[str],
    kills: int,
    seed: int,
    name: str,
    provenance: Provenance,
) -> Result:
    torch.set_num_threads(1)  # threads would not be there in the forks
    found = []
    with tempfile.TemporaryDirectory() as kept:
        for kind in kinds:
            folder = Path(kept) / kind
            folder.mkdir()
            found.append(_killed(kind, chosen, folder, kills, seed))
            for problem in found[-1].problems[:5]:
                print(problem, file=sys.stderr, flush=True)
    rows: list[Sequence[Cell]] = []
    for one in found:
        rows.append([one.name, "kills", one.kills])
        rows += [["", what, count] for what, count in one.seen.items()]
        rows.append(["", "seconds", one.seconds])
    return provenance.result(
        name,
        f"Killed at random moments: {', '.join(kinds)}",
        "`kill -9`, at a moment drawn evenly over all that each does. Servers are asked by six "
        "clients, a third of them swap a model meanwhile, and start again on the same port. A "
        f"training writes a checkpoint after each iteration. One export or training in "
        f"{COMMAND_EVERY} is the whole command; the others are forks that begin when the modules "
        "are loaded and, of exports, the model is traced.",
        [Table("", ("killed", "what came of it", "times"), rows)],
        [
            target
            for one in found
            for target in (
                Target(f"kills of a {one.name}", one.kills, ">=", kills),
                Target(f"lost, wrong, half or left behind by a {one.name}", _count(one), "==", 0),
            )
        ],
    )


def _killed(kind: str, chosen: Options, folder: Path, kills: int, seed: int) -> Found:
    if kind == "export":
        return kill_exports(folder, kills, seed)
    if kind == "training":
        return kill_trainings(folder, kills, seed)
    models = [chosen.read("classify")[0], chosen.read("generate")[0]]
    return kill_servers(models, folder, kills, seed)


def _count(found: Found) -> int:
    return len(found.problems)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
