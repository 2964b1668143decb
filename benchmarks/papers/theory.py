"""Does the theorem of stable forward propagation show? Small models on both sides of lambda = T L².

    python -m benchmarks.papers.theory

The setting is the theorem's (the second OT-Transformer paper, theorems 1 to 3): f is a stack of
transformer blocks, the read-out is linear in the whole state, its largest singular value is held
at L, the task is cross-entropy, and the cost is lambda / 2 times the integral of |f|². The data are
rows of two points in the plane; a row's class is the sign of their inner product, and a tenth of
all labels, of training and of test, are wrong. What is measured is on test rows, in X(0), whose
distances are those of the rows. Five minutes on one core; stopped, it goes on where it was.
"""

import json
import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.lab import Provenance, Result, Table, Target, parser, run
from train.blocks import Block, BlockVelocity
from train.ode import integrate

NAME = "theory"
FOLDER = Path(__file__).parent  # theory.json, which the results page shows
OUT = Path("runs/theory.jsonl")
RATIOS = (0.0, 0.01, 0.1, 0.3, 1.0, 1.5, 2.0, 3.0, 10.0)  # lambda / (T L²)
SEEDS = (0, 1, 2)
POINTS, PLANE, CLASSES = 2, 2, 2
WIDTH, HIDDEN, LAYERS = 16, 64, 1
T, STEPS, L = 1.0, 5, 1.0
TRAINING_ROWS, BATCH, TEST_ROWS = 512, 128, 1024
WRONG = 0.1
ITERATIONS, RATE = 600, 1e-2
NOISE, RADIUS, PULLS = 0.5, 0.5, 10
PAIRS_OF = 1024  # rows of which all pairs are compared
CONSTANTS = (
    *(POINTS, PLANE, CLASSES, WIDTH, HIDDEN, LAYERS, T, STEPS, L, TRAINING_ROWS, BATCH, TEST_ROWS),
    *(WRONG, RATE, NOISE, RADIUS, PULLS, PAIRS_OF),
)


@dataclass(frozen=True, slots=True)
class Setting:
    """What a run is; the rest is the same for all."""

    ratio: float
    seed: int
    iterations: int = ITERATIONS

    @property
    def transport(self) -> float:
        return self.ratio * T * L**2


@dataclass(frozen=True, slots=True)
class Found:
    """What came of a run; losses in nats, accuracies as shares."""

    training_loss: float
    test_loss: float
    accuracy: float
    cost: float  # the mean over rows of the integral of |f|²
    bent: float  # the share of it that a straight, even path would save
    slope: float  # the largest 2-norm of the Jacobian of the answer, over test rows
    pair: float  # the largest |difference of answers| / |difference of X(0)|, rows of one class
    bound: float  # of both: L / (1 - T L² / lambda), or infinite
    broken: float  # the share of all pairs of rows that break inequality (11)
    shift: float  # W1 of answers over W1 of inputs, when all rows are moved alike
    noisy_loss: float
    noisy_accuracy: float
    pulled_loss: float  # each row moved against its gradient by RADIUS
    pulled_bound: float  # what the theorem allows that loss to be

    @property
    def gap(self) -> float:
        return self.test_loss - self.training_loss


class Toy(nn.Module):
    """Rows of points -> answers, through X(0), the state that the theorem speaks of."""

    embedding: Tensor

    def __init__(self) -> None:
        super().__init__()
        blocks = [Block(WIDTH, 2, HIDDEN, False, norm="none") for _ in range(LAYERS)]
        self.velocity = BlockVelocity(blocks, WIDTH, final_norm=False)
        self.read = nn.utils.parametrizations.orthogonal(
            nn.Linear(POINTS * WIDTH, CLASSES, bias=False)
        )
        # An isometry: distances of X(0) are those of the rows.
        self.register_buffer("embedding", nn.init.orthogonal_(torch.empty(PLANE, WIDTH)))

    def embed(self, rows: Tensor) -> Tensor:
        return rows @ self.embedding  # (B, N, D)

    def end(self, x0: Tensor) -> tuple[Tensor, Tensor]:
        """Where paths end, and the mean over rows of the integral of |f|²."""
        path = integrate(self.velocity, x0, steps=STEPS, T=T)
        return path.state, path.cost * POINTS * WIDTH

    def logits(self, end: Tensor) -> Tensor:
        out: Tensor = L * self.read(end.flatten(1))  # (B, classes)
        return out

    def answer(self, x0: Tensor) -> Tensor:
        return self.logits(self.end(x0)[0]).softmax(-1)


def rows_of(count: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Rows (count, points, plane) and their classes, some of which are wrong."""
    rows = torch.randn(count, POINTS, PLANE, generator=draw)
    agree = rows.prod(1).sum(-1) > 0  # the inner product of the two
    wrong = torch.rand(count, generator=draw) < WRONG
    return rows, (agree ^ wrong).long()


def train_and_measure(setting: Setting) -> Found:
    """One model, from its first weight to its last figure; the seed draws weights and data."""
    torch.manual_seed(setting.seed)
    toy = Toy()
    draw = torch.Generator().manual_seed(setting.seed)
    rows, classes = rows_of(TRAINING_ROWS, draw)
    x0 = toy.embed(rows)
    optimizer = torch.optim.Adam(toy.parameters(), RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, setting.iterations)
    for _ in range(setting.iterations):
        chosen = torch.randint(len(x0), (BATCH,), generator=draw)
        loss = objective(toy, x0[chosen], classes[chosen], setting)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    toy.requires_grad_(False)
    return measured(toy, setting, x0, classes, draw)


def objective(toy: Toy, x0: Tensor, classes: Tensor, setting: Setting) -> Tensor:
    """Cross-entropy and lambda / 2 times the cost."""
    end, cost = toy.end(x0)
    return F.cross_entropy(toy.logits(end), classes) + setting.transport / 2 * cost


def measured(
    toy: Toy, setting: Setting, x0: Tensor, classes: Tensor, draw: torch.Generator
) -> Found:
    rows, test_classes = rows_of(TEST_ROWS, draw)
    test = toy.embed(rows)
    end, cost = toy.end(test)
    straight = (end - test).square().sum((1, 2)).mean() / T
    logits = toy.logits(end)
    answers = logits.softmax(-1)
    noise = NOISE * torch.randn(rows.shape, generator=draw)
    noisy = toy.logits(toy.end(toy.embed(rows + noise))[0])
    bound = bound_of(setting.ratio)
    pair, broken = pairs(test[:PAIRS_OF], answers[:PAIRS_OF], test_classes[:PAIRS_OF], setting)
    test_loss = float(F.cross_entropy(logits, test_classes))
    return Found(
        training_loss=float(F.cross_entropy(toy.logits(toy.end(x0)[0]), classes)),
        test_loss=test_loss,
        accuracy=accuracy(logits, test_classes),
        cost=float(cost),
        bent=float((cost - straight) / cost),
        slope=float(torch.linalg.matrix_norm(jacobians(toy, rows), 2).max()),
        pair=pair,
        bound=bound,
        broken=broken,
        shift=shifted(toy, test, answers),
        noisy_loss=float(F.cross_entropy(noisy, test_classes)),
        noisy_accuracy=accuracy(noisy, test_classes),
        pulled_loss=pulled(toy, rows, test_classes),
        # Cross-entropy changes by at most sqrt(2) for each unit by which logits move.
        pulled_bound=test_loss + RADIUS * math.sqrt(2) * bound,
    )


def bound_of(ratio: float) -> float:
    """The Lipschitz constant that the theorem gives; none where lambda is at most T L²."""
    return L / (1 - 1 / ratio) if ratio > 1 else math.inf


def accuracy(logits: Tensor, classes: Tensor) -> float:
    return float((logits.argmax(-1) == classes).float().mean())


def jacobians(toy: Toy, rows: Tensor) -> Tensor:
    """Of the answers in the points of a row, (B, classes, points x plane)."""
    rows = rows.detach().requires_grad_()
    answers = toy.answer(toy.embed(rows))
    slopes = [
        torch.autograd.grad(answers[:, one].sum(), rows, retain_graph=True)[0].flatten(1)
        for one in range(CLASSES)
    ]
    return torch.stack(slopes, 1)


def pairs(x0: Tensor, answers: Tensor, classes: Tensor, setting: Setting) -> tuple[float, float]:
    """The steepest pair of one class, and the share of all pairs that break inequality (11)."""
    apart_in, apart_out = distances(x0.flatten(1)), distances(answers)
    same = classes[:, None] == classes[None]
    same_pairs = same & (apart_in > 0)
    steepest = float((apart_out / apart_in.clamp_min(1e-12))[same_pairs].max())
    if setting.ratio <= 1:
        return steepest, 0.0
    labels = math.sqrt(2) * ~same
    allowed = (L * apart_in + labels / setting.ratio) / (1 - 1 / setting.ratio)
    two = torch.triu(torch.ones_like(same), diagonal=1)
    return steepest, float((apart_out > allowed + 1e-6)[two].float().mean())


def distances(vectors: Tensor) -> Tensor:
    """Of all pairs, by differences: the faster way through products loses the near ones."""
    return torch.cdist(vectors, vectors, compute_mode="donot_use_mm_for_euclid_dist")


def shifted(toy: Toy, x0: Tensor, answers: Tensor) -> float:
    """The largest W1 of answers over that of inputs, over shifts of all rows by one vector.

    The W1 of a set and its shifted self is the length of the shift. Answers of two classes lie on a
    line, where W1 is the mean distance of the sorted ones.
    """
    draw = torch.Generator().manual_seed(0)
    sorted_answers = answers[:, 0].sort().values
    steepest = 0.0
    for length in (0.1, 0.5, 1.0):
        for _ in range(8):
            way = torch.randn(POINTS, PLANE, generator=draw)
            moved = toy.answer(x0 + toy.embed(length * way / way.norm()))
            apart = math.sqrt(2) * (moved[:, 0].sort().values - sorted_answers).abs().mean()
            steepest = max(steepest, float(apart) / length)
    return steepest


def pulled(toy: Toy, rows: Tensor, classes: Tensor) -> float:
    """The loss when every row may be moved by RADIUS, in some ascents along its gradient."""

    def loss(moved: Tensor) -> Tensor:
        logits = toy.logits(toy.end(toy.embed(moved))[0])
        return F.cross_entropy(logits, classes, reduction="sum")

    moved = rows
    for _ in range(PULLS):
        moved = moved.detach().requires_grad_()
        (way,) = torch.autograd.grad(loss(moved), moved)
        step = RADIUS / 4 * F.normalize(way.flatten(1), dim=1).view_as(way)
        off = (moved.detach() + step - rows).flatten(1)
        off = off * (RADIUS / off.norm(dim=1, keepdim=True).clamp_min(RADIUS))
        moved = rows + off.view_as(rows)
    return float(loss(moved)) / len(rows)


def main(arguments: Sequence[str]) -> int:
    made = parser(__doc__.partition("\n")[0])
    made.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS), metavar="SEED")
    made.add_argument("--ratios", type=float, nargs="+", default=list(RATIOS), metavar="RATIO")
    made.add_argument("--out", type=Path, default=OUT, help="finished runs, to go on from")
    parsed = made.parse_args(arguments)
    if not parsed.quick:
        parsed.results = parsed.results or FOLDER
    torch.set_num_threads(1)

    def measure(provenance: Provenance) -> Result:
        found: dict[float, list[Found]] = {}
        for setting in settings(parsed.ratios, parsed.seeds, 20 if parsed.quick else ITERATIONS):
            one = kept_or_made(setting, parsed.out)
            found.setdefault(setting.ratio, []).append(one)
            print(f"{setting}: test loss {one.test_loss:.3f}", file=sys.stderr, flush=True)
        return result(found, provenance)

    return run(f"papers.{NAME}", arguments, parsed, measure)


def result(found: dict[float, list[Found]], provenance: Provenance) -> Result:
    learned: list[list[str]] = []
    stable: list[list[str]] = []
    for ratio in sorted(found):
        runs = found[ratio]
        name = f"{ratio:g}"
        losses = [shown([getattr(one, key) for one in runs], 3) for key in _LOSSES]
        accuracies = shown([100 * one.accuracy for one in runs], 1)
        bent = shown([100 * one.bent for one in runs], 1)
        cost = shown([one.cost for one in runs], 3)
        learned.append([name, *losses, accuracies, cost, bent])
        slopes = [shown([getattr(one, key) for one in runs], 3) for key in _SLOPES]
        noisy = shown([100 * one.noisy_accuracy for one in runs], 1)
        pulled_to = shown([one.pulled_loss for one in runs], 3)
        allowed = shown([one.pulled_bound for one in runs], 3)
        bound = f"{runs[0].bound:.3g}" if math.isfinite(runs[0].bound) else "none"
        stable.append([name, *slopes, bound, noisy, pulled_to, allowed])
    inside = [one for runs in found.values() for one in runs if math.isfinite(one.bound)]
    over = sum(max(one.slope, one.pair, one.shift) > one.bound for one in inside)
    broken = max((one.broken for one in inside), default=0.0)
    return provenance.result(
        NAME,
        "The theorem of stable forward propagation, on small models",
        f"Blocks: {LAYERS}, of width {WIDTH}, without norms. {STEPS} Euler steps, T = {T:g}, L "
        f"held at {L:g}, {TRAINING_ROWS} training rows, {TEST_ROWS} test rows, {WRONG:.0%} wrong "
        f"labels, {ITERATIONS:,} iterations of Adam on {BATCH} of them; "
        f"{len(next(iter(found.values())))} seeds, "
        "means ± standard deviations. The theorem is of the best velocity there is, which may know "
        "the answer of a row; a trained one may not, and need not obey it.",
        [
            Table(
                "What is learned. Losses in nats; bent: the share of the transport cost that a "
                "straight, even path would save.",
                (
                    *("lambda / T L²", "training loss", "test loss", "test - training"),
                    *("accuracy, %", "transport cost", "bent, %"),
                ),
                learned,
            ),
            Table(
                "How stable it is. Slope: the largest 2-norm of the Jacobian of an answer; pair: "
                "the most that two answers of a class differ for each unit between their rows; "
                "shift: W1 of the answers over W1 of the rows, all moved alike. The bound holds "
                f"for all three. Noise of {NOISE:g} a coordinate; pulled: each row moved by "
                f"{RADIUS:g} up its gradient, and what the theorem allows that loss to be.",
                (
                    *("lambda / T L²", "slope", "pair", "shift", "bound"),
                    *("accuracy with noise, %", "loss, pulled", "allowed"),
                ),
                stable,
            ),
        ],
        [
            Target("models with lambda > T L² that are steeper than the bound", over, "==", 0),
            Target("largest share of pairs there that break inequality (11)", broken, "==", 0),
        ],
    )


_LOSSES = ("training_loss", "test_loss", "gap")
_SLOPES = ("slope", "pair", "shift")


def shown(values: Sequence[float], digits: int) -> str:
    """The mean, and the standard deviation where there is one."""
    if not all(map(math.isfinite, values)):
        return "none"
    if max(values) >= 100:
        digits = 0
    mean = f"{statistics.mean(values):.{digits}f}"
    return mean if len(values) < 2 else f"{mean} ± {statistics.stdev(values):.{digits}f}"


def kept_or_made(setting: Setting, file: Path) -> Found:
    """What came of a run, trained only if it was not finished before with the same constants."""
    known = asdict(setting) | {"constants": list(CONSTANTS)}
    if file.is_file():
        for line in file.read_text(encoding="utf-8").splitlines():
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue  # it was killed while it wrote this one
            if record["setting"] == known:
                return Found(**record["found"])
    one = train_and_measure(setting)
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as lines:
        begun = file.stat().st_size and not file.read_bytes().endswith(b"\n")
        record = json.dumps({"setting": known, "found": asdict(one)})
        lines.write(("\n" if begun else "") + record + "\n")
    return one


def settings(ratios: Sequence[float], seeds: Sequence[int], iterations: int) -> Iterator[Setting]:
    for seed in seeds:
        for ratio in ratios:
            yield Setting(ratio, seed, iterations)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
