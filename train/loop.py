"""The training loop: optimise, watch, checkpoint, resume.

Every random choice of an iteration follows from (seed, iteration), so a run killed at any moment
and resumed reaches the weights of an uninterrupted one.
"""

import itertools
import math
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from train.checkpoint import (
    STATE,
    check_resumable,
    check_same_data,
    load_checkpoint,
    lock_run,
    save_checkpoint,
    start_run,
)
from train.config import OptimConfig, Recipe
from train.data import Batch, Dataset, open_dataset, vocabulary_of
from train.interrupt import listen
from train.metrics import MetricsLog
from train.model import OTTransformer, build_model, count_parameters
from train.objective import objective, progress, steps_for
from train.ode import method_named
from train.quality import measure_model


class Diverged(RuntimeError):
    """The loss became NaN or infinite; the message names the last good checkpoint and a remedy."""


def train(recipe: Recipe, folder: Path, quiet: bool = False) -> OTTransformer:
    """Train a recipe into a run folder, going on from its checkpoint if it holds one."""
    if recipe.run.threads:
        torch.set_num_threads(recipe.run.threads)
    with lock_run(folder):
        resumed = (folder / STATE).is_file()
        tokenizer = check_resumable(folder, recipe) if resumed else None
        dataset = open_dataset(recipe, tokenizer)
        torch.manual_seed(recipe.run.seed)
        classes = None if dataset.labels is None else len(dataset.labels)
        model = build_model(recipe.model, vocabulary_of(dataset), classes)
        optimiser = make_optimiser(model, recipe.optim)
        first = 0
        if resumed:
            check_same_data(folder, dataset.digest)
            first = load_checkpoint(folder, model, optimiser)
        else:
            facts = {
                "labels": dataset.labels,
                "parameters": count_parameters(model),
                "data_sha256": dataset.digest,
            }
            start_run(folder, recipe, dataset.tokenizer, facts)
            save_checkpoint(folder, model, optimiser, 0)
        _Loop(recipe, folder, dataset, model, optimiser, quiet).run(first)
    return model.eval()


def make_optimiser(model: OTTransformer, config: OptimConfig) -> torch.optim.AdamW:
    """AdamW; weight decay on matrices only, and not on embeddings."""
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        matrix = parameter.dim() >= 2 and not name.startswith("embed.")
        (decayed if matrix else plain).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, config.beta2), fused=True)


def learning_rate(iteration: int, recipe: Recipe) -> float:
    """Linear warm-up times a cosine down to final_lr * lr over the cost of the run."""
    config = recipe.optim
    warm = min(1.0, (iteration + 1) / config.warmup) if config.warmup else 1.0
    done = progress(iteration, config.iterations, recipe.steps)
    share = 0.5 * (1 + math.cos(math.pi * done))
    return warm * config.lr * (config.final_lr + (1 - config.final_lr) * share)


class _Loop:
    def __init__(
        self,
        recipe: Recipe,
        folder: Path,
        dataset: Dataset,
        model: OTTransformer,
        optimiser: torch.optim.Optimizer,
        quiet: bool,
    ) -> None:
        self.recipe, self.folder, self.dataset = recipe, folder, dataset
        self.model, self.optimiser, self.quiet = model, optimiser, quiet
        self.saved = 0
        self.evaluations = 0  # velocity evaluations trained through: the cost of the run
        self.bf16 = recipe.optim.precision == "bf16"

    def run(self, first: int) -> None:
        recipe, optim = self.recipe, self.recipe.optim
        self.saved = first
        self.evaluations = sum(map(self._spent, range(first)))
        self.model.train()
        cpu = time.process_time()
        bar = tqdm(
            range(first, optim.iterations),
            initial=first,
            total=optim.iterations,
            desc=recipe.name,
            unit="it",
            disable=self.quiet,
            mininterval=1.0,
        )
        log = MetricsLog(self.folder, first)
        with closing(log), closing(bar), listen() as interrupt:
            for iteration in bar:
                record = self.iterate(iteration)
                done = iteration + 1
                last = done == optim.iterations
                if done % recipe.run.checkpoint_every == 0 or last:
                    self._save(done)
                if done % recipe.run.evaluate_every == 0 or last:
                    record |= self.watch()
                    record["cpu_s"] = round(log.cpu_s + time.process_time() - cpu, 1)
                if "validation" in record or done % 20 == 0:
                    log.write(record)
                    bar.set_postfix(_shown(record), refresh=False)
                if interrupt.asked and not last:
                    self._save(done)
                    bar.close()
                    print(f"stopped after {done} iterations; the same command goes on from there")
                    raise KeyboardInterrupt

    def iterate(self, iteration: int) -> dict[str, Any]:
        """One optimiser step; what to log of it."""
        optim, seed = self.recipe.optim, self.recipe.run.seed
        torch.manual_seed(seed * 7_368_787 + iteration)  # dropout
        rate = learning_rate(iteration, self.recipe)
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        steps = self._steps(iteration)
        started, total, cost, tokens = time.perf_counter(), 0.0, 0.0, 0
        for part in range(optim.accumulate):
            batch = self.dataset.batch(iteration * optim.accumulate + part, optim.batch, seed)
            with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
                output = self.model(self._hide(batch), steps, self.recipe.steps.method)
            loss = objective(output, batch.targets, optim.transport, optim.smoothing)
            (loss / optim.accumulate).backward()
            total += float(loss.detach()) / optim.accumulate
            cost += float(output.cost.detach()) / optim.accumulate
            tokens += batch.tokens.numel()
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), optim.clip))
        if not math.isfinite(total) or not math.isfinite(norm):
            raise Diverged(self._diverged(iteration, total, norm))
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        self.evaluations += self._spent(iteration)
        return {
            "iteration": iteration + 1,
            "steps": steps,
            "loss": round(total, 5),
            "cost": round(cost, 6),
            "lr": rate,
            "tokens_per_s": round(tokens / (time.perf_counter() - started)),
        }

    def _steps(self, iteration: int) -> int:
        recipe = self.recipe
        return steps_for(iteration, recipe.optim.iterations, recipe.steps, recipe.run.seed)

    def _spent(self, iteration: int) -> int:
        method = method_named(self.recipe.steps.method)
        return self._steps(iteration) * method.evaluations * self.recipe.optim.accumulate

    def watch(self) -> dict[str, Any]:
        """Validation quality at one step and at the full count, on the first few batches."""
        size = self.recipe.optim.batch
        labelled = self.dataset.labels is not None
        shown: dict[str, float] = {}
        counts = [1] if self.model.discrete else sorted({1, self.recipe.steps.full})
        for steps in counts:
            batches = itertools.islice(
                self.dataset.validation(size), self.recipe.run.evaluate_batches
            )
            with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
                quality = measure_model(
                    self.model, batches, labelled, steps, self.recipe.steps.method
                )
            shown[f"{quality.metric}@{steps}"] = round(quality.value, 5)
        return {"validation": shown, "evaluations": self.evaluations}

    def _hide(self, batch: Batch) -> Tensor:
        """Drop a share of a classifier's input tokens, never the first."""
        share = self.recipe.optim.token_dropout
        if not share:
            return batch.tokens
        hidden = torch.rand(batch.tokens.shape) < share
        hidden[:, 0] = False
        return batch.tokens.masked_fill(hidden, 0)

    def _save(self, iteration: int) -> None:
        save_checkpoint(self.folder, self.model, self.optimiser, iteration)
        self.saved = iteration

    def _diverged(self, iteration: int, loss: float, norm: float) -> str:
        return (
            f"iteration {iteration}: loss {loss}, gradient norm {norm}. The last good checkpoint "
            f"is {self.folder / STATE}, iteration {self.saved}. Train again with a lower optim.lr "
            f"(now {self.recipe.optim.lr}), a larger optim.transport (now "
            f'{self.recipe.optim.transport}), optim.precision "fp32", or model.norm "pre".'
        )


def _shown(record: dict[str, Any]) -> dict[str, str]:
    shown = {"loss": f"{record['loss']:.3f}", "tok/s": str(record["tokens_per_s"])}
    return shown | {key: f"{value:.4f}" for key, value in record.get("validation", {}).items()}
