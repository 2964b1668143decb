"""The training loop: optimise, watch, checkpoint, resume.

Every random choice of an iteration follows from (seed, iteration), so a run killed at any moment
and resumed reaches the weights of an uninterrupted one.
"""

import dataclasses
import itertools
import json
import logging
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from train.checkpoint import (
    MODEL,
    STATE,
    TEACHER,
    Reached,
    RunError,
    average_checkpoints,
    check_begins,
    check_resumable,
    check_same_data,
    check_same_teacher,
    digest_of_weights,
    iteration_of,
    keep_for_average,
    load_best,
    load_checkpoint,
    load_newest,
    load_original,
    lock_run,
    new_model,
    note_places,
    read_best,
    read_facts,
    read_tokenizer,
    save_best,
    save_checkpoint,
    save_weights,
    start_from,
    start_run,
    write_atomically,
)
from train.corrections import check_steps
from train.data import check_same_meaning, open_dataset
from train.data.batch import Batch, Dataset
from train.data.labelled import LabelledDataset
from train.data.tags import TagDataset
from train.devices import Devices, move_state
from train.distil import Teacher, check_teacher, kept_logits
from train.interrupt import Diverged, listen
from train.metrics import METRICS, read_metrics
from train.model import Stepped, count_parameters
from train.objective import Objective
from train.otify import OtifiedTransformer
from train.pretrained import ConvertedTransformer
from train.quality import measure_model
from train.recipe import FEWEST, OptimConfig, Recipe, RunConfig
from train.schedule import progress, shortest_of, steps_of, turn_for

_log = logging.getLogger("stepdial")

# Whether a model that was made elsewhere can be trained as a recipe says, on its data.


def check_fits(model: Stepped, dataset: Dataset, recipe: Recipe) -> None:
    """Refuse a model that was made for data of other sizes, or another depth than is trained."""
    if model.depth != recipe.model.depth:
        raise ValueError(
            f"the model has depth {model.depth!r}, but the recipe trains {recipe.model.depth!r}: "
            f'set model.depth to "{model.depth}"'
        )
    sizes = dataset.sizes
    try:
        with torch.no_grad():
            answers = model(*_longest_row(dataset, recipe.model.window)).logits.shape[-1]
    except (IndexError, RuntimeError, ValueError) as error:
        raise ValueError(f"the model cannot read this data, of {sizes}: {error}") from None
    if answers != (sizes.classes or sizes.vocabulary):
        raise ValueError(f"the model has {answers} answers, but the data is of {sizes}")
    pad = getattr(getattr(model, "embed", None), "pad_id", sizes.pad_id)
    if sizes.vocabulary and sizes.classes and pad != sizes.pad_id:
        raise ValueError(
            f"the data pads with id {sizes.pad_id}, the model with {pad}: set pad_token_id"
        )
    texts = sizes.vocabulary and sizes.classes and not sizes.length
    if texts and _sees_padding(model, dataset, recipe.model.window):
        _log.warning(
            "the answer of this model to a text changes with the padding behind it, so with the "
            "other texts of its batch: let the velocity and the head use the mask of padding, "
            "which train.model.Embedding(..., pad_id=%d) gives them",
            sizes.pad_id,
        )


def _sees_padding(model: Stepped, dataset: Dataset, window: int) -> bool:
    """Whether a text that is shorter than the window is answered otherwise with padding behind."""
    (tokens,) = dataset.batch(0, 1, 0).inputs  # (1, N)
    padding = (0, window - tokens.shape[1])
    learning = model.training
    model.eval()
    with torch.no_grad():
        alone = model(tokens).logits
        padded = model(F.pad(tokens, padding, value=dataset.sizes.pad_id)).logits
    model.train(learning)
    if alone.dim() == 3:  # a label a position
        padded = padded[:, : tokens.shape[1]]
    return not torch.allclose(alone, padded, rtol=1e-3, atol=1e-4)


def _longest_row(dataset: Dataset, window: int) -> tuple[Tensor, ...]:
    """Inputs of one row; a labelled text as long as one may be."""
    inputs = dataset.batch(0, 1, 0).inputs
    if len(inputs) > 1 or inputs[0].dtype != torch.int64:
        return inputs
    (tokens,) = inputs  # (1, N)
    return (tokens.repeat(1, -(-window // tokens.shape[1]))[:, :window],)


# The log of a run: JSON lines and TensorBoard, without the lines that a resumed run repeats.


class MetricsLog:
    """Appends records from an iteration on; what an earlier attempt wrote beyond it is dropped."""

    def __init__(self, folder: Path, first: int) -> None:
        path = folder / METRICS
        kept = [record for record in read_metrics(path) if record["iteration"] <= first]
        lines = "".join(json.dumps(record) + "\n" for record in kept)
        write_atomically(path, lines.encode())
        self.cpu_s = max((record.get("cpu_s", 0.0) for record in kept), default=0.0)
        self._file = path.open("a", encoding="utf-8")
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=first + 1)

    def write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        for key, value in {**record, **record.get("validation", {})}.items():
            if isinstance(value, int | float) and key != "iteration":
                self._writer.add_scalar(key, value, record["iteration"])

    def close(self) -> None:
        self._file.close()
        self._writer.close()


def train(
    recipe: Recipe,
    folder: Path,
    quiet: bool = False,
    origin: Path | None = None,
    model: Stepped | None = None,
    tokenizer: Tokenizer | None = None,
    begin: Callable[[Recipe], None] | None = None,
) -> Stepped:
    """Train a recipe into a run folder, going on from its checkpoint if it holds one.

    With an origin, another run, training starts from its weights and learns from what they answer.
    With a model, of `otify` for example, that one is trained in place of the one described. With a
    tokenizer none is learnt; without one a run that has a teacher has the teacher's. `begin` is
    called once, in the main process, when the data can be read and before anything is trained.
    """
    if recipe.run.threads:
        torch.set_num_threads(recipe.run.threads)
    devices = Devices(recipe.run.accelerator, recipe.optim.precision)
    with lock_run(folder) if devices.main else nullcontext():
        if not devices.main:
            devices.wait()  # the main process makes the run, and the others find it there
        resumed = (folder / STATE).is_file()
        if not resumed:
            check_begins(folder)
        teacher = Path(recipe.teacher.run) if recipe.teacher.run else None
        if resumed:
            tokenizer = check_resumable(folder, recipe)
        elif (trained := origin or (None if tokenizer else teacher)) is not None:
            tokenizer = read_tokenizer(trained)
        dataset = open_dataset(recipe, tokenizer)
        if teacher is not None:
            check_teacher(teacher, dataset, recipe)
        if devices.main and isinstance(dataset, LabelledDataset | TagDataset):
            dataset.warn_of_unseen()
        torch.manual_seed(recipe.run.seed)
        own = model is not None
        if model is None:
            model = new_model(folder if resumed else origin, recipe, dataset.sizes)
        else:
            check_fits(model, dataset, recipe)
        model.to(devices.device)
        model.checkpoint = recipe.steps.checkpoint
        check_steps(model, recipe.steps, recipe.steps.method)
        model.dial, model.full = recipe.steps.dial, recipe.steps.full
        model.backprop = recipe.steps.backprop
        if recipe.steps.solver == "adaptive":
            model.tolerance = recipe.steps.tolerance
        check_endings(model, recipe)
        optimiser = make_optimiser(model, recipe.optim)
        first = Reached()
        if resumed:
            check_same_data(folder, dataset.digest)
            check_same_meaning(dataset, recipe, read_facts(folder))
            check_same_teacher(folder, teacher)
            note_places(folder, recipe)
            first = load_checkpoint(folder, model, optimiser)
            move_state(optimiser)
        else:
            facts = {
                "labels": dataset.labels,
                "sizes": dataclasses.asdict(dataset.sizes),
                "parameters": count_parameters(model),
                "data_sha256": dataset.digest,
                "otify": model.origin if isinstance(model, OtifiedTransformer) else None,
                "pretrained": model.origin if isinstance(model, ConvertedTransformer) else None,
                "own_model": own
                and not isinstance(model, OtifiedTransformer | ConvertedTransformer),
            }
            if teacher is not None:
                facts["teacher_sha256"] = digest_of_weights(teacher)
            if origin is not None:
                check_same_data(origin, dataset.digest)
                facts["origin"], weights = start_from(origin, model)
            start_run(folder, recipe, dataset.tokenizer, facts)
            if origin is not None:  # behind the recipe, without which the folder is no run
                write_atomically(folder / TEACHER, weights)
            save_checkpoint(folder, model, optimiser, first)
        if devices.main:
            devices.wait()
        original = None if origin is None else load_original(folder, recipe, dataset.sizes)
        if original is not None:
            original.to(devices.device)
        if begin is not None and devices.main:
            begin(recipe)
        recipe = ending(recipe, dataset)
        asked = None
        if teacher is not None:
            asked = _asked_teacher(teacher, recipe, dataset, devices, quiet)
        TrainingLoop(
            *(recipe, folder, dataset, model, optimiser, quiet, devices),
            original=original,
            teacher=asked,
        ).run(first)
    return model.eval()


def ending(recipe: Recipe, dataset: Dataset) -> Recipe:
    """The recipe with the iterations that its epochs take on this data, if those are fewer."""
    optim = recipe.optim
    if not optim.epochs or not isinstance(dataset, LabelledDataset):
        return recipe
    passes = math.ceil(optim.epochs * dataset.rows_to_train / (optim.batch * optim.accumulate))
    iterations = min(optim.iterations, max(FEWEST, passes))
    return dataclasses.replace(recipe, optim=dataclasses.replace(optim, iterations=iterations))


def unfinished(folder: Path, recipe: Recipe, dataset: Dataset) -> str:
    """How far a training came that has not ended, in words; "" of one that has."""
    state, weights = folder / STATE, iteration_of(folder / MODEL)
    done = iteration_of(state) if state.is_file() else weights
    wanted = ending(recipe, dataset).optim.iterations
    # At the end the best weights, of an earlier iteration, become the run's own.
    best = recipe.run.keep == "best"
    if done >= wanted or (best and (weights != done or Best(folder, recipe.run).is_over(done))):
        return ""
    return f"{done:,} of {wanted:,} iterations"


def warn_of_unfinished(folder: Path, recipe: Recipe, dataset: Dataset) -> None:
    """Warn if the training of this run has not come to its end."""
    if came := unfinished(folder, recipe, dataset):
        _log.warning(
            "%s has not been trained to its end (%s): the command that trained it goes on",
            folder,
            came,
        )


def _asked_teacher(
    folder: Path, recipe: Recipe, dataset: Dataset, devices: Devices, quiet: bool
) -> Teacher | None:
    """The run that is learnt from; none where its answers are kept and its states not compared."""
    if isinstance(dataset, LabelledDataset) and not recipe.teacher.states:
        with devices.autocast():
            dataset.teach(kept_logits(folder, dataset, quiet))
        return None
    teacher = Teacher(folder)
    teacher.model.to(devices.device)
    return teacher


ENDINGS = "velocity.endings."  # what the names of their parameters begin with
PACE = "pace"  # of a group of parameters: how many times the learning rate it learns at


def check_endings(model: Stepped, recipe: Recipe) -> None:
    """Refuse to train endings of a model that has none."""
    if recipe.optim.endings and not any(n.startswith(ENDINGS) for n, _ in model.named_parameters()):
        raise RunError("optim.endings is for models of `convert --rank`: leave it out")


def make_optimiser(model: Stepped, config: OptimConfig) -> torch.optim.AdamW:
    """AdamW; weight decay on matrices only, and not on embeddings."""
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    endings: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        # Of a prelude, or the first block of a discrete Set Transformer.
        inside = name.startswith(("embed.blocks.", "embed.project.", "embed.block."))
        matrix = parameter.dim() >= 2 and (inside or not name.startswith("embed"))
        ending = name.startswith(ENDINGS)
        (endings if ending else decayed if matrix else plain).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay, PACE: 1.0},
        {"params": plain, "weight_decay": 0.0, PACE: 1.0},
    ]
    if endings:  # they begin at nothing, and change alone
        groups.append({"params": endings, "weight_decay": 0.0, PACE: 10.0})
    return torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, config.beta2), fused=True)


def learning_rate(iteration: int, recipe: Recipe) -> float:
    """Linear warm-up times a cosine down to final_lr * lr, or tenfold drops, over the cost.

    Or times the inverse square root of the iteration, which is 1 where the warm-up ends.
    """
    config = recipe.optim
    iterations = config.iterations - config.endings
    if iteration >= iterations:  # anew, for the endings alone
        iteration, iterations = iteration - iterations, config.endings
    warm = min(1.0, (iteration + 1) / config.warmup) if config.warmup else 1.0
    if config.schedule == "inverse-sqrt":
        first = max(1, config.warmup)
        return warm * config.lr * min(1.0, math.sqrt(first / (iteration + 1)))
    done = progress(iteration, iterations, steps_of(recipe))
    if config.schedule == "drops":
        return warm * config.lr * 0.1 ** sum(done >= drop for drop in config.drops)
    share = 0.5 * (1 + math.cos(math.pi * done))
    return warm * config.lr * (config.final_lr + (1 - config.final_lr) * share)


class Best:
    """The weights of the best evaluation so far: the mean over the counts that are trained.

    They lie in a file of their own with what they are worth, so that a resumed run knows them.
    """

    def __init__(self, folder: Path, config: RunConfig) -> None:
        self.folder, self.config = folder, config
        self.value, self.iteration = read_best(folder)

    def note(self, iteration: int, validation: dict[str, float], model: Stepped) -> None:
        """Keep the weights if they are the best so far."""
        values = [value if "accuracy" in key else -value for key, value in validation.items()]
        value = sum(values) / len(values)
        if value > self.value:
            self.value, self.iteration = value, iteration
            save_best(self.folder, model, value, iteration)

    def is_over(self, iteration: int) -> bool:
        """Whether so many evaluations before this iteration were no better."""
        config = self.config
        waited = iteration // config.evaluate_every - self.iteration // config.evaluate_every
        return bool(config.patience and self.iteration and waited >= config.patience)

    def load(self, model: Stepped) -> None:
        """Go on from them. Only the main process notes them, so others read them here."""
        self.value, self.iteration = read_best(self.folder)
        if self.iteration:
            load_best(self.folder, model)

    def restore(self, model: Stepped) -> None:
        """Make them the run's own."""
        self.load(model)
        if self.iteration:
            save_weights(self.folder, model, self.iteration)


def _class_weights(recipe: Recipe, dataset: Dataset, devices: Devices) -> Tensor | None:
    """One over a class's share of the rows, so that in the mean a row has the weight 1."""
    if recipe.optim.class_weights == "equal":
        return None
    assert isinstance(dataset, LabelledDataset)
    counts = torch.tensor(dataset.class_counts, dtype=torch.float32).clamp(min=1)
    return (counts.sum() / (len(counts) * counts)).to(devices.device)


class TrainingLoop:
    def __init__(
        self,
        recipe: Recipe,
        folder: Path,
        dataset: Dataset,
        model: Stepped,
        optimiser: torch.optim.Optimizer,
        quiet: bool,
        devices: Devices,
        original: Stepped | None = None,
        teacher: Teacher | None = None,
    ) -> None:
        self.recipe, self.folder, self.dataset = recipe, folder, dataset
        self.model, self.optimiser, self.quiet = model, optimiser, quiet
        self.devices = devices
        self.saved = 0
        self.evaluations = 0  # velocity evaluations trained through: the cost of the run
        self.steps = steps_of(recipe)
        self.objective = Objective(
            recipe,
            model,
            devices.autocast,
            original,
            teacher,
            _class_weights(recipe, dataset, devices),
        )

    def run(self, reached: Reached) -> None:
        recipe, optim = self.recipe, self.recipe.optim
        first, self.evaluations = reached
        self.saved = first
        if self.devices.main and first:
            self._keep(first)  # it may have been killed before it did
        self.model.train()
        cpu = time.process_time()
        # Counted by cost, since iterations of one step come first and those of many take longer.
        bar = tqdm(
            initial=self._done(first),
            total=1.0 + 1e-9,  # sums of floats end a little above 1
            desc=self.folder.name,
            bar_format="{desc}: {percentage:3.0f}%|{bar}| {elapsed}, {remaining} left{postfix}",
            disable=self.quiet or not self.devices.main,
            mininterval=1.0,
            smoothing=0.0,
        )
        shown: dict[str, str] = {}
        best = Best(self.folder, recipe.run) if recipe.run.keep == "best" else None
        with self._log(first) as log, closing(bar), listen() as interrupt:
            last_stage, held = optim.iterations - optim.endings, list[nn.Parameter]()
            for iteration in range(first, optim.iterations):
                if iteration >= last_stage and not held:
                    held = self._hold_all_but_endings()
                if iteration == last_stage and best is not None:
                    self.devices.wait()
                    best.load(self.model)
                over = best is not None and self.devices.main and best.is_over(iteration)
                if best is not None and self.devices.any(over) and iteration < last_stage:
                    if optim.endings:
                        continue  # with the endings
                    self._save(iteration)  # the same command must find it over, not train again
                    bar.close()
                    if not self.quiet and self.devices.main:
                        print(f"stopped early: no improvement since iteration {best.iteration}")
                    break
                record = self.iterate(iteration)
                done = iteration + 1
                last = done == optim.iterations
                if log is not None and (done % recipe.run.evaluate_every == 0 or last):
                    record |= self.watch()
                    if best is not None and iteration < last_stage:
                        best.note(done, self._trained(record["validation"]), self.model)
                if log is not None and ("validation" in record or done % 20 == 0):
                    record["cpu_s"] = round(log.cpu_s + time.process_time() - cpu, 1)
                    log.write(record)
                    shown |= _shown(record)  # an evaluation is shown until the next
                    bar.set_postfix(shown, refresh=False)
                bar.update(self._done(done) - bar.n)
                # Behind the log: what a checkpoint goes on from has been logged.
                if done % recipe.run.checkpoint_every == 0 or last:
                    self._save(done)
                if self.devices.any(interrupt.asked) and not last:
                    self._save(done)
                    bar.close()
                    if self.devices.main:
                        print(f"stopped after iteration {done}; run the same command to go on")
                    raise KeyboardInterrupt
        if optim.average:
            if self.devices.main:
                average_checkpoints(self.folder, optim.average)
            self.devices.wait()
            load_newest(self.folder, self.model)
        # Endings are kept as they end: the rate has fallen to nothing by then, and some thousand
        # rows cannot tell them from what they were.
        if best is not None and not optim.endings and self.devices.main:
            best.restore(self.model)
        for parameter in held:
            parameter.requires_grad_(True)

    def _hold_all_but_endings(self) -> list[nn.Parameter]:
        """Let nothing else learn; what did."""
        named = self.model.named_parameters()
        held = [one for name, one in named if one.requires_grad and not name.startswith(ENDINGS)]
        for parameter in held:
            parameter.requires_grad_(False)
        return held

    def _done(self, iteration: int) -> float:
        """The share of the training's cost that is behind when an iteration starts."""
        return progress(iteration, self.recipe.optim.iterations, self.steps)

    def iterate(self, iteration: int) -> dict[str, Any]:
        """One optimiser step; what to log of it."""
        optim, seed = self.recipe.optim, self.recipe.run.seed
        self.devices.seed(seed * 7_368_787 + iteration)  # dropout
        rate = learning_rate(iteration, self.recipe)
        for group in self.optimiser.param_groups:
            group["lr"] = rate * group[PACE]
        turn = turn_for(iteration, optim.iterations, self.steps, seed)
        started, total, cost = time.perf_counter(), 0.0, 0.0
        read = evaluations = 0  # of this process
        parts = self.devices.parts(optim.accumulate, optim.batch)
        batches = [
            self.devices.share(
                self.dataset.batch(iteration * optim.accumulate + part, optim.batch, seed),
                optim.accumulate,
            )
            for part in parts
        ]
        tokens = not batches[0].inputs[-1].is_floating_point()  # or images, or clouds of points
        for batch, whole in zip(batches, self.devices.per_share(batches), strict=True):
            passes = self.objective.passes(self._hide(batch), batch.targets, turn, batch.taught)
            for place, one in enumerate(passes):
                (one.loss / whole).backward()
                total += float(one.loss.detach()) / whole
                if place == 0:
                    cost += float(one.cost) / whole
                evaluations += one.evaluations
            read += batch.inputs[-1].numel() if tokens else len(batch.inputs[-1])
        self.devices.average_gradients(self.model)
        total, cost = self.devices.mean(total), self.devices.mean(cost)
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), optim.clip))
        if not math.isfinite(total) or not math.isfinite(norm):
            raise Diverged(self._diverged(iteration, total, norm))
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        self.evaluations += evaluations * optim.accumulate // len(parts)
        spent_s = time.perf_counter() - started
        speed = "tokens_per_s" if tokens else "rows_per_s"
        return {
            "iteration": iteration + 1,
            "steps": turn.counts[0] if len(turn.counts) == 1 else list(turn.counts),
            "evaluations": self.evaluations,
            "loss": round(total, 5),
            "cost": round(cost, 6),
            "lr": rate,
            "gradient_norm": round(norm, 5),
            speed: round(self.devices.processes * read / spent_s),
        }

    def watch(self) -> dict[str, Any]:
        """Validation quality at one step and at the ends of the dial, on the first few batches."""
        size = self.recipe.optim.batch
        labelled = self.dataset.labels is not None
        shown: dict[str, float] = {}
        adaptive = self.steps.solver == "adaptive"
        counts = {1, shortest_of(self.steps), self.steps.full}
        for count in [self.steps.full] if adaptive else sorted(counts):
            batches = itertools.islice(
                self.dataset.validation(size), self.recipe.run.evaluate_batches
            )
            placed = map(self.devices.place, batches)
            with self.devices.autocast():
                quality = measure_model(self.model, placed, labelled, count, self.steps.method)
            at = "adaptive" if adaptive else count
            shown[f"{quality.metric}@{at}"] = round(quality.value, 5)
        return {"validation": shown}

    def _trained(self, validation: dict[str, float]) -> dict[str, float]:
        """Without the quality at one step, where that is no count to train."""
        shortest = shortest_of(self.steps)
        return {k: v for k, v in validation.items() if not k.endswith("@1") or shortest == 1}

    def _log(self, first: int) -> AbstractContextManager[MetricsLog | None]:
        """Where the main process writes what is measured; the others keep no log."""
        return closing(MetricsLog(self.folder, first)) if self.devices.main else nullcontext()

    def _hide(self, batch: Batch) -> tuple[Tensor, ...]:
        """Drop a share of a text classifier's input tokens, never the first."""
        share = self.recipe.optim.token_dropout
        if not share:
            return batch.inputs
        tokens = batch.inputs[0]
        hidden = torch.rand(tokens.shape, device=tokens.device) < share
        hidden[:, 0] = False
        return (tokens.masked_fill(hidden, self.dataset.sizes.pad_id), *batch.inputs[1:])

    def _save(self, iteration: int) -> None:
        if self.devices.main:
            reached = Reached(iteration, self.evaluations)
            save_checkpoint(self.folder, self.model, self.optimiser, reached)
            self._keep(iteration)
        self.saved = iteration

    def _keep(self, iteration: int) -> None:
        """Keep the weights of a checkpoint for the mean, but not those of an interruption."""
        optim, every = self.recipe.optim, self.recipe.run.checkpoint_every
        if optim.average and (iteration % every == 0 or iteration == optim.iterations):
            keep_for_average(self.folder, iteration, optim.average)

    def _diverged(self, iteration: int, loss: float, norm: float) -> str:
        return (
            f"iteration {iteration}: loss {loss}, gradient norm {norm}. The last good checkpoint "
            f"is {self.folder / STATE}, iteration {self.saved}. Train again, with another --out "
            f"and a lower optim.lr (now {self.recipe.optim.lr}), a larger optim.transport (now "
            f'{self.recipe.optim.transport}), optim.precision "fp32", or model.norm "pre".'
        )


def _shown(record: dict[str, Any]) -> dict[str, str]:
    shown = {"loss": f"{record['loss']:.3f}"}
    for key, unit in (("tokens_per_s", "tok/s"), ("rows_per_s", "rows/s")):
        if key in record:
            shown[unit] = str(record[key])
    return shown | {key: f"{value:.4f}" for key, value in record.get("validation", {}).items()}
