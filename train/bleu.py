"""Corpus BLEU of a trained translator on the test split of its data.

The texts that come out are compared as they are by sacrebleu, with its default tokenizer: its
signature says how, so that figures can be compared with others'.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from train.checkpoint import Run, load_run, read_facts
from train.data import open_dataset
from train.ode import method_named
from train.pairs import PairDataset
from train.recipe_file import data_at
from train.search import Hypothesis, Target, Translates, beam, greedy
from train.translator import Translator

ROWS = 128  # hypotheses in one batch


@dataclass(frozen=True, slots=True)
class Bleu:
    score: float  # 0 to 100
    signature: str
    samples: int  # sentences


def bleu_of(
    run: Run,
    dataset: PairDataset,
    steps: int,
    method: str,
    beams: int = 1,
    samples: int = 0,
    alpha: float = 1.0,
) -> Bleu:
    """BLEU of the first `samples` sentences of the test split, 0 for all of them."""
    try:
        from sacrebleu.metrics.bleu import BLEU
    except ImportError:
        raise ValueError("BLEU needs sacrebleu: pip install sacrebleu") from None
    pairs = dataset.references[: samples or None]
    answers = translate(run, dataset, [source for source, _ in pairs], steps, method, beams, alpha)
    metric = BLEU()
    score = metric.corpus_score(answers, [[reference for _, reference in pairs]]).score
    return Bleu(score, str(metric.get_signature()), len(pairs))


def translate(
    run: Run,
    dataset: PairDataset,
    sources: list[str],
    steps: int,
    method: str,
    beams: int = 1,
    alpha: float = 1.0,
) -> list[str]:
    """The answer to each source; of a source longer than the window, its beginning is read."""
    model, window = run.model, run.recipe.model.window
    if not isinstance(model, Translator):
        raise ValueError(f"BLEU is for translators: {run.recipe.name} is none")
    target = Target(dataset.begin, dataset.end, run.recipe.model.target_window)
    ids = [e.ids[:window] for e in dataset.tokenizer.encode_batch(sources)]
    order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
    size = max(1, ROWS // beams)
    answers: dict[int, str] = {}
    for start in range(0, len(order), size):
        part = order[start : start + size]
        rows = [torch.tensor(ids[i]) for i in part]
        source = pad_sequence(rows, batch_first=True, padding_value=target.pad)  # (B, S)
        found = _search(model, source, target, steps, method, beams, alpha)
        for i, hypothesis in zip(part, found, strict=True):
            answers[i] = dataset.tokenizer.decode(list(hypothesis.tokens)).strip()
    return [answers[i] for i in range(len(sources))]


def _search(
    model: Translates,
    source: Tensor,
    target: Target,
    steps: int,
    method: str,
    beams: int,
    alpha: float,
) -> list[Hypothesis]:
    if beams == 1:
        return greedy(model, source, target, steps, method, alpha)
    return beam(model, source, target, beams, steps, method, alpha)


def open_translator(folder: Path, data: str = "") -> tuple[Run, PairDataset]:
    """A run of a translator, and its data, which may be somewhere else now."""
    run = load_run(folder)
    recipe = run.recipe
    if recipe.data.kind != "pairs":
        raise ValueError(f"BLEU is for translators: {folder} is none")
    dataset = open_dataset(data_at(recipe, data), run.tokenizer)
    assert isinstance(dataset, PairDataset)
    return run, dataset


def check_bleu(folder: Path, beams: int, samples: int) -> None:
    """Before the work, not after it: whether that can be translated."""
    if beams < 1 or samples < 0:
        raise ValueError("--beams must be at least 1, and the sentences of --bleu not below 0")
    if read_facts(folder)["recipe"].get("data", {}).get("kind") != "pairs":
        raise ValueError(f"BLEU is for translators: {folder} is none")


def print_bleu(
    folder: Path,
    steps: list[int],
    methods: list[str] | None,
    beams: int,
    samples: int,
    data: str = "",
    alpha: float = 1.0,
) -> None:
    """The table of `stepdial evaluate RUN --bleu`."""
    run, dataset = open_translator(folder, data)
    search = "greedy" if beams == 1 else f"beams {beams}, length penalty {alpha:g}"
    counts = [1] if run.model.discrete else steps
    for method in methods or [run.recipe.steps.method]:
        print(f"{run.recipe.name}, {method}, {search}, test sentences")
        print(f"{'steps':>5} {'nfe':>5} {'bleu':>6}")
        for count in counts:
            found = bleu_of(run, dataset, count, method, beams, samples, alpha)
            nfe = 2 if run.model.discrete else 2 * count * method_named(method).evaluations
            print(f"{count:>5} {nfe:>5} {found.score:>6.2f}")
        print(f"{found.samples} sentences, {found.signature}\n")
