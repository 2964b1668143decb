"""What the zoo's models are measured against: a bag of words, and the discrete transformer.

    python benchmarks/baselines.py --data DATA --runs RUNS

DATA holds `imdb/` and `ag_news/`; RUNS holds the runs that benchmarks/make_zoo.sh trained, each
model NAME beside NAME-discrete: the same blocks and parameters, but an ordinary transformer.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

from train.checkpoint import METRICS, load_run
from train.config import load_recipe
from train.evaluate import evaluate_run
from train.quality import Quality, wilson
from train.tables import Rows, read_table

FOLDERS = {"sentiment": "imdb", "topics": "ag_news", "shakespeare": "tinyshakespeare/input.txt"}
RESULT = Path(__file__).parent / "results" / "baselines.json"


def bag_of_words(train: Rows, test: Rows) -> dict[str, Any]:
    """Logistic regression on the words of a text, present or not."""
    from sklearn.feature_extraction.text import CountVectorizer
    from sklearn.linear_model import LogisticRegression

    started = time.process_time()
    vectorizer = CountVectorizer(binary=True, min_df=2)
    words = vectorizer.fit_transform([text for text, _ in train])
    model = LogisticRegression(C=0.1, max_iter=200)
    model.fit(words, [label for _, label in train])
    seconds = time.process_time() - started
    answers = model.predict(vectorizer.transform([text for text, _ in test]))
    hits = sum(a == label for a, (_, label) in zip(answers, test, strict=True))
    low, high = wilson(hits, len(test))
    return {
        "metric": "accuracy",
        "value": hits / len(test),
        "low": low,
        "high": high,
        "samples": len(test),
        "parameters": int(model.coef_.size + model.intercept_.size),
        "cpu_s": round(seconds, 1),
    }


def quality_of(run: Path, data: Path) -> dict[str, Any]:
    """Quality of a run at every rung, its size, and what its training cost."""
    recipe, facts = load_run(run)[1], load_run(run)[3]
    rows = evaluate_run(run, [1, 2, 4, 8], recipe.steps.method, str(data))
    return {
        "parameters": facts["parameters"],
        "iterations": facts["iteration"],
        "rungs": {steps: _shown(quality) for steps, quality in rows.items()},
        **_cost(run),
    }


def _cost(run: Path) -> dict[str, Any]:
    """CPU seconds and velocity evaluations of a training run, from its log."""
    last: dict[str, Any] = {}
    for line in (run / METRICS).read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if "cpu_s" in record:
            last = record
    return {"cpu_s": last.get("cpu_s"), "evaluations": last.get("evaluations")}


def _shown(quality: Quality) -> dict[str, Any]:
    return {
        "metric": quality.metric,
        "value": quality.value,
        "low": quality.low,
        "high": quality.high,
        "samples": quality.samples,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--runs", type=Path)
    arguments = parser.parse_args()
    results: dict[str, Any] = {}
    if RESULT.is_file():
        results = json.loads(RESULT.read_text(encoding="utf-8"))
    for name in ("sentiment", "topics"):
        data = load_recipe(name, data=str(arguments.data / FOLDERS[name])).data
        found = bag_of_words(read_table(data, data.train), read_table(data, data.test))
        results.setdefault(name, {})["bag_of_words"] = found
        print(f"{name}: bag of words {100 * found['value']:.2f} % ({found['cpu_s']} s)")
    for name, folder in FOLDERS.items() if arguments.runs else ():
        for kind, run in (("any_step", name), ("discrete", f"{name}-discrete")):
            if (arguments.runs / run / "model.safetensors").is_file():
                found = quality_of(arguments.runs / run, arguments.data / folder)
                results.setdefault(name, {})[kind] = found
                shown = {m: round(q["value"], 4) for m, q in found["rungs"].items()}
                print(f"{name}, {kind}: {shown}, {found['cpu_s']} CPU s")
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
