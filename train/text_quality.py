"""Generated text against the reference: perplexity, BLEU, ROUGE and BERTScore.

Held-out windows are cut into a prompt and a reference, and the model continues the prompt on its
own. With `forced` it names each token of a whole window while it reads the true ones before it, as
the code that was released with OT-Transformer does: that scores much higher. Perplexity is a mean
over windows there, and here. BLEU is sacrebleu's here and torchtext's there; ROUGE and BERTScore
are those of rouge-score and bert-score.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from stepdial import install_command
from train.checkpoint import Run, load_run, read_facts
from train.data import open_dataset
from train.data.batch import Batch, Dataset
from train.data.labelled import PairDataset
from train.data.text import PAD
from train.model import Stepped, Translator
from train.ode import method_named
from train.recipe import data_at
from train.search import Target, beam, greedy

ROUGES = ("rouge1", "rouge2", "rougeL")


class BertScore(NamedTuple):
    precision: float
    recall: float
    f1: float


@dataclass(frozen=True, slots=True)
class TextMetrics:
    """Of one model at one number of steps; all scores from 0 to 100."""

    steps: int
    samples: int
    perplexity: float  # per token, the mean over the windows that were sampled
    bleu: float
    bleu_signature: str
    rouge: dict[str, float]  # mean F-measures by name
    bertscore: BertScore | None
    left_out: str | None  # why there is no BERTScore


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is drawn."""

    top_k: int = 40
    temperature: float = 1.0  # 0: always the likeliest
    seed: int = 0


def text_metrics(
    run: Run,
    dataset: Dataset,
    steps: int,
    samples: int = 200,
    method: str | None = None,
    sampling: Sampling | None = None,
    forced: bool = False,
    bert_folder: Path | None = None,
) -> TextMetrics:
    """Scores on the first `samples` held-out windows; half of each is the prompt, unless forced."""
    method = method or run.recipe.steps.method
    tokenizer = dataset.tokenizer
    if tokenizer is None or dataset.labels is not None:
        raise TypeError("only a decoder, whose data is plain text, writes texts to be scored")
    batches = list(_first_rows(dataset, samples, rows=max(1, 8192 // run.recipe.model.window)))
    if not batches:
        raise ValueError("there is no held-out window to score")
    answers: list[str] = []
    references: list[str] = []
    perplexities: list[float] = []
    for place, batch in enumerate(batches):
        tokens, reference = batch.inputs[0], batch.targets
        half = tokens.shape[1] // 2
        found, ids = _read(run.model, batch, steps, method)
        perplexities += found
        if not forced:
            reference = tokens[:, half:]
            chosen = sampling or Sampling()
            ids = continue_ids(
                run.model,
                tokens[:, :half],
                tokens.shape[1] - half,
                steps,
                method,
                Sampling(chosen.top_k, chosen.temperature, chosen.seed + place),
                tokenizer.token_to_id(PAD),
            )
        answers += tokenizer.decode_batch(ids.tolist())
        references += tokenizer.decode_batch(reference.tolist())
    bleu, signature = bleu_score(answers, references)
    bertscore, left_out = bert_score(answers, references, bert_folder)
    return TextMetrics(
        steps,
        len(answers),
        sum(perplexities) / len(perplexities),
        bleu,
        signature,
        rouge_scores(answers, references),
        bertscore,
        left_out,
    )


@torch.no_grad()
def continue_ids(
    model: Stepped,
    prompt: Tensor,
    length: int,
    steps: int,
    method: str,
    sampling: Sampling,
    never: int | None = None,
) -> Tensor:
    """`length` new ids (B, length) after prompts (B, N); the whole prefix is read for each."""
    draw = torch.Generator().manual_seed(sampling.seed)
    window = _window(model)
    ids = prompt
    for _ in range(length):
        logits = model(ids[:, -window:], steps=steps, method=method).logits[:, -1].float()  # (B, V)
        if never is not None:
            logits[:, never] = -math.inf
        ids = torch.cat([ids, _drawn(logits, sampling, draw)], dim=1)
    return ids[:, prompt.shape[1] :]


def _drawn(logits: Tensor, sampling: Sampling, draw: torch.Generator) -> Tensor:
    """One id a row, (B, 1)."""
    if sampling.temperature == 0:
        return logits.argmax(-1, keepdim=True)
    best = logits.topk(min(sampling.top_k, logits.shape[-1]))
    shares = (best.values / sampling.temperature).softmax(-1)
    return best.indices.gather(1, torch.multinomial(shares, 1, generator=draw))


@torch.no_grad()
def _read(model: Stepped, batch: Batch, steps: int, method: str) -> tuple[list[float], Tensor]:
    """The perplexity of each window, and the likeliest next id at every place, (B, N)."""
    logits = model(*batch.inputs, steps=steps, method=method).logits.float()  # (B, N, V)
    losses = F.cross_entropy(logits.transpose(1, 2), batch.targets, reduction="none")  # (B, N)
    return losses.mean(1).exp().tolist(), logits.argmax(-1)


def _window(model: Stepped) -> int:
    window = getattr(getattr(model, "embed", None), "window", None)
    if not isinstance(window, int):
        raise TypeError("only a decoder continues texts")
    return window


def _first_rows(dataset: Dataset, samples: int, rows: int) -> Iterator[Batch]:
    """The first `samples` held-out windows, in batches of at most `rows`."""
    left = samples
    for batch in dataset.held_out(rows):
        yield Batch(tuple(one[:left] for one in batch.inputs), batch.targets[:left])
        left -= batch.rows
        if left <= 0:
            return


def bleu_score(answers: Sequence[str], references: Sequence[str]) -> tuple[float, str]:
    """Corpus BLEU, and the signature that says how it was computed."""
    from sacrebleu.metrics.bleu import BLEU

    metric = BLEU()
    return metric.corpus_score(answers, [references]).score, str(metric.get_signature())


def rouge_scores(answers: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Mean F-measures, from 0 to 100."""
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(list(ROUGES), use_stemmer=True)
    scores = [scorer.score(r, a) for a, r in zip(answers, references, strict=True)]
    return {name: 100 * sum(s[name].fmeasure for s in scores) / len(scores) for name in ROUGES}


# The layer that the reference implementation reads; of other models the same share as of the last.
_BERT_LAYERS = {
    ("bert", 12): 9,
    ("bert", 24): 18,
    ("distilbert", 6): 5,
    ("roberta", 6): 5,
    ("roberta", 12): 10,
    ("roberta", 24): 17,
}


def bert_score(
    answers: Sequence[str], references: Sequence[str], folder: Path | None
) -> tuple[BertScore | None, str | None]:
    """Mean scores with the model in a folder; without one, why there are none."""
    missing = _lacks_bert(folder)
    if folder is None or missing:
        return None, f"BERTScore was left out: {missing}"
    scorer_of: Any = __import__("bert_score").BERTScorer
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    layers = config.get("num_hidden_layers") or config["n_layers"]  # as DistilBERT has it
    usual = max(1, round(layers * 17 / 24))
    layer = _BERT_LAYERS.get((config.get("model_type"), layers), usual)
    scorer = scorer_of(model_type=str(folder), num_layers=layer)
    means = (100 * float(one.mean()) for one in scorer.score(list(answers), list(references)))
    return BertScore(*means), None


def _lacks_bert(folder: Path | None) -> str:
    """What BERTScore lacks here, or nothing."""
    if folder is None:
        return "its model is not on this machine, or no folder was named"
    if not (folder / "config.json").is_file():
        return f"its model is not on this machine: {folder} has no config.json"
    return "" if find_spec("bert_score") else "pip install bert-score"


def check_texts(folder: Path, samples: int, bert_folder: Path | None) -> None:
    """Before the work, not after it: whether that can be scored."""
    if samples < 1:
        raise ValueError("--texts must be at least 1 window")
    recipe = read_facts(folder)["recipe"]
    if recipe["model"]["family"] != "decoder":
        raise ValueError(f"--texts is for decoders, which write texts: {folder} is none")
    for name in ("sacrebleu", "rouge_score"):
        if not find_spec(name):
            raise ValueError(f"--texts needs {name}: {install_command('train')}")
    if bert_folder is not None and (missing := _lacks_bert(bert_folder)):
        raise ValueError(f"--bertscore: {missing}")


def print_texts(
    folder: Path,
    steps: list[int],
    methods: list[str] | None,
    samples: int,
    data: str = "",
    forced: bool = False,
    bert_folder: Path | None = None,
) -> None:
    """The tables of `stepdial evaluate RUN --texts`."""
    run = load_run(folder)
    dataset = open_dataset(data_at(run.recipe, data), run.tokenizer)
    how = (
        "held-out windows, each token named after the true ones"
        if forced
        else "second halves of held-out windows, written on from the prompt"
    )
    berts = ("bert-p", "bert-r", "bert-f1") if bert_folder is not None else ()
    names = ("perplexity", "bleu", *ROUGES, *berts)
    for method in methods or [run.recipe.steps.method]:
        print(f"{run.recipe.name}, {method}, {how}")
        print(f"{'steps':>5}" + "".join(f" {name:>10}" for name in names))
        for count in [1] if run.model.discrete else steps:
            found = text_metrics(
                run, dataset, count, samples, method, forced=forced, bert_folder=bert_folder
            )
            figures = [
                found.perplexity,
                found.bleu,
                *found.rouge.values(),
                *(found.bertscore or ()),
            ]
            print(f"{count:>5}" + "".join(f" {figure:>10.2f}" for figure in figures))
        print(f"{found.samples} windows, BLEU {found.bleu_signature}")
        print(f"{found.left_out}\n" if found.left_out else "")


# Corpus BLEU of a trained translator on the test split of its data. The texts that come out are
# compared as they are by sacrebleu, with its default tokenizer: its signature says how, so that
# figures can be compared with others'.


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
    if not find_spec("sacrebleu"):
        raise ValueError("BLEU needs sacrebleu: pip install sacrebleu")
    pairs = dataset.references[: samples or None]
    answers = translate(run, dataset, [source for source, _ in pairs], steps, method, beams, alpha)
    score, signature = bleu_score(answers, [reference for _, reference in pairs])
    return Bleu(score, signature, len(pairs))


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
        if beams == 1:
            found = greedy(model, source, target, steps, method, alpha)
        else:
            found = beam(model, source, target, beams, steps, method, alpha)
        for i, hypothesis in zip(part, found, strict=True):
            answers[i] = dataset.tokenizer.decode(list(hypothesis.tokens)).strip()
    return [answers[i] for i in range(len(sources))]


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
