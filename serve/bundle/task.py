"""The rules that follow from a manifest's task and depth.

Knows which parts each task must have and must not; the parts check themselves.
"""

from typing import TYPE_CHECKING, Literal

from serve.bundle.fields import BundleError, check_integer, check_text
from serve.bundle.inputs import MAX_TOKENS, TextInput
from serve.bundle.rung import MAX_STEPS, steps_in_words

if TYPE_CHECKING:
    from serve.bundle.manifest import Manifest

Task = Literal["generate", "classify", "translate", "tag"]
Depth = Literal["ode", "fixed", "chain"]
Cache = Literal["kv", "kv_int8", "none"]  # of floats, of bytes, or no caches
# How M steps relate: each M crosses [0, T] in steps of T / M, or all go along one grid and stop.
Dial = Literal["resolution", "time"]

TASKS = ("generate", "classify", "translate", "tag")
LABELLING: tuple[Task, ...] = ("classify", "tag")  # a label a row, or a label a position
DEPTHS = ("ode", "fixed", "chain")
CACHES = ("kv", "kv_int8", "none")
DIALS = ("resolution", "time")
MAX_LABELS = 100_000


def check_task(manifest: "Manifest") -> None:
    """What the task asks of labels, input, tokenizer, cache and graphs."""
    task, spec = manifest.task, manifest.input
    if task in LABELLING:
        _check_labels(task, manifest.labels)
        if task == "tag" and not isinstance(spec, TextInput):
            raise BundleError("must be text for the task tag", field="input.kind")
    else:
        if manifest.labels is not None:
            raise BundleError(f"must be null for the task {task}", field="labels")
        if not isinstance(spec, TextInput):
            raise BundleError(f"must be text for the task {task}", field="input.kind")
        if spec.truncation is not None:
            raise BundleError(f"must be null for the task {task}", field="input.truncation")
    if manifest.keeps_caches and task != "generate":
        raise BundleError(f"must be none for the task {task}", field="cache")
    _check_tokenizer(manifest)
    _check_translation(manifest)
    _check_step(manifest)
    if manifest.shape.state is not None and not manifest.keeps_caches:
        raise BundleError("must be null for the cache none", field="shape.state")
    if manifest.range is not None and len(manifest.rungs) == 1:
        raise BundleError("must be null for one rung", field="range")
    for index, rung in enumerate(manifest.rungs):
        if (rung.against_fp32 is None) == manifest.rounds:
            raise BundleError(
                f"must be {'an object' if manifest.rounds else 'null'} for the precision "
                f"{manifest.precision} and the cache {manifest.cache}",
                field=f"rungs[{index}].against_fp32",
            )


def check_depth(manifest: "Manifest") -> None:
    """What the depth asks of the ladder, and the evaluations that each rung must spend."""
    depth = manifest.depth
    if depth == "fixed":
        if manifest.method != "euler":
            raise BundleError(
                f"must be euler for the depth fixed, not {manifest.method}", field="method"
            )
        if manifest.steps != (1,):
            raise BundleError(
                "must be one rung of 1 step for the depth fixed: the weights differ by depth",
                field="rungs",
            )
    if depth == "chain" and manifest.keeps_caches:
        raise BundleError("must be none for the depth chain", field="cache")
    stacks = 2 if manifest.task == "translate" else 1
    for index, rung in enumerate(manifest.rungs):
        spent = stacks * rung.spent
        if depth == "chain":
            right = rung.nfe % rung.spent == 0
            wanted = f"a multiple of {rung.spent}"
        else:
            right, wanted = rung.nfe == spent, str(spent)
        if not right:
            raise BundleError(
                f"is {rung.nfe}, but must be {wanted} for {steps_in_words(rung.steps)} of "
                f"{rung.method}; export the bundle again",
                field=f"rungs[{index}].nfe",
            )


def check_dial(manifest: "Manifest") -> None:
    """What the dial asks: a dial of time says its grid, and its methods stop at any step."""
    if manifest.dial == "resolution":
        if manifest.grid_steps is not None:
            raise BundleError("must be null for the dial resolution", field="grid_steps")
        return
    check_integer("grid_steps", manifest.grid_steps, 1, MAX_STEPS)
    if manifest.depth != "ode":
        raise BundleError(
            f"must be resolution for the depth {manifest.depth}: there is no one clock to stop",
            field="dial",
        )


def _check_step(manifest: "Manifest") -> None:
    """One velocity that is integrated has graphs of one step; so has whatever keeps caches."""
    integrated = manifest.depth == "ode" and manifest.task != "translate"
    wanted = integrated or manifest.keeps_caches
    if wanted != (manifest.step is not None):
        raise BundleError(
            f"must be {'an object' if wanted else 'null'} for the task {manifest.task}, the depth "
            f"{manifest.depth} and the cache {manifest.cache}",
            field="step",
        )
    stops = manifest.task in LABELLING and wanted and manifest.method == "euler"
    if manifest.calibration is not None and not stops:
        raise BundleError(
            f"must be null for the task {manifest.task}, the depth {manifest.depth} and the method "
            f"{manifest.method}",
            field="calibration",
        )


def _check_labels(task: Task, labels: tuple[str, ...] | None) -> None:
    if labels is None:
        raise BundleError(f"must be a list for the task {task}, not null", field="labels")
    if not 2 <= len(labels) <= MAX_LABELS:
        raise BundleError(
            f"has {len(labels)} labels; a classifier has from 2 to {MAX_LABELS}", field="labels"
        )
    seen: set[str] = set()
    for index, label in enumerate(labels):
        check_text(f"labels[{index}]", label, 1000)
        if label in seen:
            raise BundleError(
                f"repeats {label!r}; every class has a label of its own", field=f"labels[{index}]"
            )
        seen.add(label)


def _check_tokenizer(manifest: "Manifest") -> None:
    kind, tokenizer = manifest.input.kind, manifest.tokenizer
    if kind != "text":
        if tokenizer is not None:
            raise BundleError(f"must be null for the input {kind}", field="tokenizer")
        return
    if tokenizer is None:
        raise BundleError("must be an object for the input text, not null", field="tokenizer")
    if tokenizer.chat_template is not None and manifest.task != "generate":
        raise BundleError(
            f"must be null for the task {manifest.task}", field="tokenizer.chat_template"
        )
    for field, token in (("bos_id", tokenizer.bos_id), ("eos_id", tokenizer.eos_id)):
        if manifest.task == "translate" and token is None:
            raise BundleError(
                "must be an integer for the task translate, not null", field=f"tokenizer.{field}"
            )
        if manifest.task != "translate" and token is not None:
            raise BundleError(
                f"must be null for the task {manifest.task}", field=f"tokenizer.{field}"
            )


def _check_translation(manifest: "Manifest") -> None:
    translates = manifest.task == "translate"
    if translates:
        check_integer("target_max_tokens", manifest.target_max_tokens, 2, MAX_TOKENS)
    elif manifest.target_max_tokens is not None:
        raise BundleError(f"must be null for the task {manifest.task}", field="target_max_tokens")
    for index, rung in enumerate(manifest.rungs):
        if translates and rung.encoder is None:
            raise BundleError(
                "must be a file name for the task translate, not null",
                field=f"rungs[{index}].encoder",
            )
        if not translates and rung.encoder is not None:
            raise BundleError(
                f"must be null for the task {manifest.task}", field=f"rungs[{index}].encoder"
            )
        if manifest.task != "tag" and rung.quality.exact is not None:
            raise BundleError(
                f"must be null for the task {manifest.task}",
                field=f"rungs[{index}].quality.exact",
            )
        if not translates and rung.quality.metric == "bleu":
            raise BundleError(
                f"is bleu, which measures translations, not the task {manifest.task}",
                field=f"rungs[{index}].quality.metric",
            )
