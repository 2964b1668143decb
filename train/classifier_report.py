"""What `stepdial train` says of a classifier: a baseline first, the report at the end.

The baseline is a bag of words, fitted to the same rows and scored on the same held-out rows. It
shows whether a model is worth more than that.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

from train.checkpoint import load_run
from train.data import open_dataset
from train.data.batch import Batch
from train.data.tables import Rows, divide, read_table
from train.recipe import Recipe
from train.schedule import ladder_of
from train.tally import macro_f1, wilson

MOST_ROWS = 2000  # held-out rows that are answered at each step count
ROWS_AT_ONCE = 32
MOST_SHOWN = 12  # classes of a confusion matrix

Confusion = tuple[tuple[int, ...], ...]  # rows by true class and by answer


@dataclass(frozen=True, slots=True)
class Scores:
    accuracy: float
    macro_f1: float  # mean F1 of the classes


@dataclass(frozen=True, slots=True)
class ClassifierReport:
    labels: tuple[str, ...]
    confusions: dict[int, Confusion]  # by steps, the most last
    chance: float  # share of the most frequent class
    baseline: Scores | None  # of the bag of words; None if it was not measured

    @property
    def confusion(self) -> Confusion:
        """At full steps."""
        return self.confusions[max(self.confusions)]

    @property
    def rows(self) -> int:
        return sum(map(sum, self.confusion))


def report_run(
    folder: Path, baseline: Scores | None = None, most_rows: int = MOST_ROWS
) -> ClassifierReport | None:
    """The report of a run; None if it does not give every row one of some classes."""
    model, recipe, tokenizer, _ = load_run(folder)
    dataset = open_dataset(recipe, tokenizer)
    if dataset.labels is None or next(iter(dataset.held_out(1))).targets.dim() != 1:
        return None
    batches = _some(list(dataset.held_out(ROWS_AT_ONCE)), most_rows)
    counts = [1] if model.discrete else ladder_of(recipe)
    targets = [int(one) for batch in batches for one in batch.targets]
    shown = ", ".join(map(str, counts))
    print(f"measuring {len(targets):,} held-out rows, step counts {shown}", flush=True)
    classes = range(len(dataset.labels))
    confusions: dict[int, Confusion] = {}
    with torch.no_grad():
        for steps in counts:
            found = [
                model(*batch.inputs, steps=steps, method=recipe.steps.method).logits.argmax(-1)
                for batch in batches
            ]
            answers = [int(one) for part in found for one in part]
            confusions[steps] = _confusion(targets, answers, classes)
    chance = max(Counter(targets).values()) / len(targets)
    return ClassifierReport(dataset.labels, confusions, chance, baseline)


def _confusion(
    targets: Iterable[object], answers: Iterable[object], classes: Sequence[object]
) -> Confusion:
    pairs = Counter(zip(targets, answers, strict=True))
    return tuple(tuple(pairs[true, said] for said in classes) for true in classes)


def scores_of(confusion: Confusion) -> Scores:
    classes = range(len(confusion))
    right = sum(confusion[one][one] for one in classes)
    pairs = {(true, said): confusion[true][said] for true in classes for said in classes}
    return Scores(right / sum(pairs.values()), macro_f1(pairs))


def _some(batches: list[Batch], rows: int) -> list[Batch]:
    """About so many rows, of batches all over: they come in order of length."""
    wanted = max(1, min(len(batches), rows // ROWS_AT_ONCE))
    return [batches[i * len(batches) // wanted] for i in range(wanted)]


class Baseline:
    """The scores of the bag of words, once they are measured."""

    scores: Scores | None = None

    def say(self, recipe: Recipe) -> None:
        """Measure it on the data of a recipe, and print it or why there is none."""
        if recipe.data.kind != "table":
            return
        train, test = _rows_of(recipe)
        if find_spec("sklearn") is None:
            why = "that needs scikit-learn (pip install scikit-learn)"
        else:
            self.scores = bag_of_words(train, test)
            one = len({label for _, label in train}) == 1
            why = "all rows to train on have one label" if one else "no word is in two texts"
        if self.scores is None:
            said = f"There is no bag of words to compare with: {why}."
        else:
            counts = Counter(label for _, label in test)
            chance = max(counts.values()) / len(test)
            accuracy = self.scores.accuracy
            if at_chance(round(accuracy * len(test)), len(test), chance):
                better = "too few rows to tell it from always giving the same answer"
            elif accuracy < 1:
                better = "the model should do better"
            else:
                better = "the model is not needed"
            said = (
                "A bag of words (TF-IDF and logistic regression) labels "
                f"{100 * accuracy:.1f} % of the {len(test):,} held-out rows right: {better}."
            )
        print(said, flush=True)
        texts = {text for text, _ in train}
        known = sum(text in texts for text, _ in test)
        if known:
            print(
                f"WARNING: {known:,} of the {len(test):,} held-out rows have a text that is also "
                "trained on, so expect less on new texts: remove rows that repeat others",
                flush=True,
            )
        unmeasured = sorted({label for _, label in train} - {label for _, label in test})
        if unmeasured:
            print(
                f"WARNING: no held-out row has the label {', '.join(unmeasured)}: how well it is "
                "learnt is not measured; give more rows of it, or set data.held_out higher",
                flush=True,
            )


def bag_of_words(train: Rows, test: Rows) -> Scores | None:
    """TF-IDF with logistic regression; None of one class, or of no common word."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    for pattern in (r"(?u)\b\w\w+\b", r"(?u)\b\w+\b"):  # words of one letter where none is longer
        words = TfidfVectorizer(
            ngram_range=(1, 2),
            sublinear_tf=True,
            min_df=2,
            max_features=200_000,
            token_pattern=pattern,
        )
        model = make_pipeline(words, LogisticRegression(C=10.0, max_iter=200))
        try:
            model.fit([text for text, _ in train], [label for _, label in train])
        except ValueError:
            continue
        targets = [label for _, label in test]
        answers = [str(one) for one in model.predict([text for text, _ in test])]
        return scores_of(_confusion(targets, answers, sorted({*targets, *answers})))
    return None


def _rows_of(recipe: Recipe) -> tuple[Rows, Rows]:
    """The texts that are trained on, and those that quality is reported on."""
    data = recipe.data
    rows = read_table(data, data.train or "train.csv")
    used, held = divide(len(rows), data.held_out, recipe.run.seed)
    test = read_table(data, data.test) if data.test else [rows[i] for i in held]
    return [rows[i] for i in used], test


def print_report(report: ClassifierReport) -> None:
    rows = report.rows
    print(f"\n{'steps':>13}  accuracy  95 % interval     macro F1   ({rows:,} held-out rows)")
    scores = {steps: scores_of(confusion) for steps, confusion in report.confusions.items()}
    for steps, one in scores.items():
        low, high = wilson(round(one.accuracy * rows), rows)
        interval = f"{low:.4f} to {high:.4f}"
        print(f"{steps:>13}  {one.accuracy:8.4f}  {interval}  {one.macro_f1:8.4f}")
    most, bag = max(one.accuracy for one in scores.values()), report.baseline
    if bag is not None:
        print(
            f" bag of words  {bag.accuracy:8.4f}  {'':16}  {bag.macro_f1:8.4f}   "
            "TF-IDF and logistic regression, of all rows"
        )
    print(f"always the same {report.chance:6.4f}  the most frequent class")
    if at_chance(round(most * rows), rows, report.chance):
        print("WARNING: this is not shown to be better than always answering the same class")
    elif bag is not None and most < bag.accuracy:
        print("WARNING: a bag of words is more accurate, and far cheaper: see docs/own-data.md")
    print()
    for line in confusion_lines(report):
        print(line)


def at_chance(hits: int, rows: int, chance: float) -> bool:
    """Whether so many right answers may come of the most frequent class alone."""
    return wilson(hits, rows)[0] <= chance


def confusion_lines(report: ClassifierReport) -> list[str]:
    """A line a class: precision, recall, F1, rows; and for few classes what they are taken for."""
    matrix, labels = report.confusion, report.labels
    width = min(24, max(5, *map(len, labels)))
    few = len(labels) <= MOST_SHOWN
    columns = [max(5, len(str(max(map(max, matrix)))))] * len(labels) if few else []
    head = f"{'class':<{width}}  precision  recall      F1    rows"
    if few:
        head += "  taken for: " + " ".join(
            f"{label[:size]:>{size}}" for label, size in zip(labels, columns, strict=True)
        )
    lines = [head]
    for i, label in enumerate(labels):
        right, rows = matrix[i][i], sum(matrix[i])
        said = sum(row[i] for row in matrix)
        precision, recall = _share(right, said), _share(right, rows)
        f1 = _share(2 * right, rows + said)
        line = f"{label[:width]:<{width}}  {precision:>9}  {recall:>6}  {f1:>6}  {rows:>6}"
        if few:
            counts = zip(matrix[i], columns, strict=True)
            line += " " * 13 + " ".join(f"{count:>{size}}" for count, size in counts)
        lines.append(line)
    return lines


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.4f}" if whole else "-"
