"""What the zoo's models are measured against: a bag of words, and the discrete transformer.

    python -m benchmarks.baselines --data DATA --runs RUNS

DATA holds `imdb/`, `ag_news/`, `mnist/` and `tinyshakespeare/`; RUNS holds the runs that
benchmarks/make_zoo.sh trained, each model NAME beside NAME-discrete: the same blocks and
parameters, but an ordinary transformer. A converted model has its teacher inside its own run: all
layers of the original, fine-tuned.
"""

import argparse
import gzip
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lab import BASELINES, Provenance
from train import classifier_report
from train.checkpoint import MODEL, TEACHER_RUN, load_run
from train.data.tables import Rows, read_table
from train.evaluate import evaluate_run
from train.metrics import METRICS, read_metrics
from train.recipe import load_recipe
from train.tally import wilson

FOLDERS = {
    "digits": "mnist",
    "sentiment": "imdb",
    "topics": "ag_news",
    "shakespeare": "tinyshakespeare/input.txt",
}


def bag_of_words(train: Rows, test: Rows) -> dict[str, Any]:
    """Words and pairs of words, as `stepdial train` fits them beside a classifier."""
    started = time.process_time()
    scores = classifier_report.bag_of_words(train, test)
    assert scores is not None
    seconds = time.process_time() - started
    return _figures(round(scores.accuracy * len(test)), len(test), seconds)


def pixels(folder: Path) -> dict[str, Any]:
    """Logistic regression on the pixels of an image: what a bag of words is to a text."""
    from sklearn.linear_model import LogisticRegression

    images, labels = _idx(folder, "train")
    started = time.process_time()
    model = LogisticRegression(C=0.01, max_iter=100)
    model.fit(images, labels)
    seconds = time.process_time() - started
    images, labels = _idx(folder, "t10k")
    hits = int((model.predict(images) == labels).sum())
    return _figures(hits, len(labels), seconds)


def _figures(hits: int, rows: int, seconds: float) -> dict[str, Any]:
    """Those of a logistic regression that got so many rows right."""
    low, high = wilson(hits, rows)
    return {
        "metric": "accuracy",
        "value": hits / rows,
        "low": low,
        "high": high,
        "samples": rows,
        "cpu_s": round(seconds, 1),
    }


def _idx(folder: Path, part: str) -> tuple[np.ndarray, np.ndarray]:
    """Images in rows of numbers from 0 to 1, and their labels."""
    with gzip.open(folder / f"{part}-images-idx3-ubyte.gz") as file:
        images = np.frombuffer(file.read()[16:], np.uint8)
    with gzip.open(folder / f"{part}-labels-idx1-ubyte.gz") as file:
        labels = np.frombuffer(file.read()[8:], np.uint8)
    return images.reshape(len(labels), -1) / 255, labels


def discrete_quality(run: Path, data: Path) -> dict[str, Any]:
    """Quality of a discrete run on its one depth, in torch."""
    quality = evaluate_run(run, [1], data=str(data)).rows[0].quality
    keys = ("metric", "value", "low", "high", "samples")
    return {key: getattr(quality, key) for key in keys}


def training_cost(run: Path) -> dict[str, Any]:
    """Size, iterations, velocity evaluations and CPU seconds of a training run, from its log."""
    last = _last(run)
    return {
        "parameters": load_run(run).facts["parameters"],
        "iterations": last["iteration"],
        "cpu_s": last["cpu_s"],
        "evaluations": last["evaluations"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--runs", type=Path)
    parser.add_argument("--only", choices=FOLDERS, help="one model; the others stay as they are")
    arguments = parser.parse_args()
    results: dict[str, Any] = {}
    if BASELINES.is_file():
        results = json.loads(BASELINES.read_text(encoding="utf-8"))
    provenance = asdict(Provenance.now("baselines", sys.argv[1:]))
    names = [arguments.only] if arguments.only else list(FOLDERS)
    place = results.setdefault(arguments.only, {}) if arguments.only else results
    place["provenance"] = provenance
    if "digits" in names:
        found = pixels(arguments.data / FOLDERS["digits"])
        results.setdefault("digits", {})["bag_of_words"] = found
    for name in [one for one in ("sentiment", "topics") if one in names]:
        data = load_recipe(name, data=str(arguments.data / FOLDERS[name])).data
        found = bag_of_words(read_table(data, data.train), read_table(data, data.test))
        results.setdefault(name, {})["bag_of_words"] = found
        print(f"{name}: bag of words {100 * found['value']:.2f} % ({found['cpu_s']} s)")
    for name in names if arguments.runs else ():
        folder = FOLDERS[name]
        found = results.setdefault(name, {})
        if _ended(arguments.runs / name):
            found["any_step"] = training_cost(arguments.runs / name)
            print(f"{name}, any step: {found['any_step']}")
        teacher = arguments.runs / name / TEACHER_RUN
        if _ended(teacher):
            quality = discrete_quality(teacher, arguments.data / folder)
            found["original"] = quality | training_cost(teacher)
            print(f"{name}, all layers of the original: {found['original']}")
        run = arguments.runs / f"{name}-discrete"
        if _ended(run):
            found["discrete"] = discrete_quality(run, arguments.data / folder) | training_cost(run)
            print(f"{name}, discrete: {found['discrete']}")
    BASELINES.parent.mkdir(exist_ok=True)
    BASELINES.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def _ended(run: Path) -> bool:
    """Whether a run is there and reached its last iteration; what it kept may be an earlier one."""
    if not (run / MODEL).is_file():
        return False
    return bool(_last(run)["iteration"] == load_run(run).recipe.optim.iterations)


def _last(run: Path) -> dict[str, Any]:
    """What the log of a run ends with."""
    records = read_metrics(run / METRICS)
    return [record for record in records if "cpu_s" in record][-1]


if __name__ == "__main__":
    main()
