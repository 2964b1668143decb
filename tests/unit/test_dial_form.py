"""The dial as time and the forms of the loop, each beside a loop written out by hand."""

import itertools
import json
import random
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from train.checkpoint import load_run
from train.data.batch import IGNORED, Sizes
from train.evaluate import evaluate_run
from train.loop import make_optimiser, train
from train.model import OTTransformer, build_model
from train.objective import Objective, exit_weights, penalty, task_loss
from train.ode import integrate
from train.recipe import ModelConfig, Recipe, RecipeError, StepsConfig, load_recipe
from train.schedule import Turn, progress, turn_for

SIZES = Sizes(vocabulary=11, classes=5)
TOKENS = torch.tensor([[1, 4, 2, 9, 3], [7, 5, 6, 0, 0]])  # the second row is padded
FORMS = [
    {"inject": True, "velocity": "residual"},
    {"inject": True},
    {"velocity": "residual"},
    {"inject": True, "velocity": "residual", "prelude": 1, "coda": 2},
    {"prelude": 1},
    {"coda": 1, "final_norm": "inside"},
]


def model_of(
    family: Any = "tagger", dial: Any = "time", full: int = 4, **form: Any
) -> OTTransformer:
    torch.manual_seed(0)
    sizes = {"width": 16, "heads": 2, "hidden": 32, "window": 8, "layers": 2, "T": 4.0}
    config = ModelConfig(family=family, initial="torch", **(sizes | form))
    steps = StepsConfig(dial=dial, full=full)
    model = build_model(config, SIZES if family != "decoder" else Sizes(vocabulary=11), steps)
    assert isinstance(model, OTTransformer)
    return model.eval()


def by_hand(model: Any, form: dict[str, Any], steps: int, h: float) -> Tensor:
    """x <- x + h f(x, x0), from the parts of the model and nothing else of its code."""
    prelude, coda = model.embed, model.head
    embed = prelude.embed if form.get("prelude") or form.get("inject") else prelude
    x, (mask,), _ = embed(TOKENS)
    if form.get("prelude"):
        for block in prelude.blocks:
            x = block(x, mask)
    injected = torch.zeros_like(x)
    if form.get("inject"):
        gain = prelude.norm.weight
        injected = torch.nn.functional.layer_norm(x, (16,), gain) @ prelude.project.weight.T
    looped = form.get("inject") or form.get("velocity") == "residual"
    stack = model.velocity.velocity if looped else model.velocity
    for _ in range(steps):
        y = x + injected
        for block in stack.blocks:
            y = block(y, mask)
        y = stack.norm(y)
        x = x + h * (y - x if form.get("velocity") == "residual" else y)
    head = coda.head if form.get("coda") or form.get("inject") else coda
    if form.get("coda"):
        for block in coda.blocks:
            x = block(x, mask)
    logits: Tensor = head.linear(head.norm(x))
    return logits


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("steps", [1, 3, 6])
def test_each_form_is_the_loop_it_says_it_is(form: dict[str, Any], steps: int) -> None:
    for dial, h in (("time", 1.0), ("resolution", 4.0 / steps)):
        model = model_of(dial=dial, **form)
        output = model(TOKENS, steps=steps)
        assert output.logits.shape == (2, 5, 5)
        torch.testing.assert_close(output.logits, by_hand(model, form, steps, h))
        assert pytest.approx(h * steps) == output.trajectories[0].T


def test_a_residual_step_of_size_one_is_the_block_itself() -> None:
    model: Any = model_of(velocity="residual")
    x, (mask,), _ = model.embed(TOKENS)
    end = integrate(lambda at: model.velocity(at, mask), x, steps=1, T=1.0).state
    torch.testing.assert_close(end, model.velocity.velocity(x, mask))


def test_the_span_of_both_dials() -> None:
    fine, time = model_of(dial="resolution", full=8), model_of(dial="time", full=8)
    assert [fine.span(steps) for steps in (1, 8, 16)] == [(4.0, 4.0), (0.5, 4.0), (0.25, 4.0)]
    assert [time.span(steps) for steps in (1, 8, 16)] == [(0.5, 0.5), (0.5, 4.0), (0.5, 8.0)]


@pytest.mark.parametrize("method", ["euler", "ab2", "midpoint"])
def test_an_exit_is_the_answer_of_a_pass_that_ends_there(method: str) -> None:
    """Of both rungs and all methods: the shorter trajectory is a prefix of the longer one."""
    model = model_of(inject=True, velocity="residual")
    output = model(TOKENS, steps=6, method=method, exits=(1, 2, 4))
    assert len(output.early) == 3
    for count, early in zip((1, 2, 4), output.early, strict=True):
        assert torch.equal(early, model(TOKENS, steps=count, method=method).logits)
    assert torch.equal(output.logits, model(TOKENS, steps=6, method=method).logits)


@pytest.mark.parametrize(
    ("backprop", "exits", "learning"),
    [
        (2, (), [False, False, False, False, True, True]),
        (2, (1,), [True, False, False, False, True, True]),
        (4, (1, 2), [True] * 6),
        (0, (), [True] * 6),
    ],
)
def test_gradients_go_through_the_last_steps_only(
    backprop: int, exits: tuple[int, ...], learning: list[bool]
) -> None:
    """Each evaluation has a weight of its own: its gradient tells whether it was reached."""
    weights = [torch.ones((), requires_grad=True) for _ in range(6)]
    calls = iter(weights)
    start = torch.ones(1, 1, 2, requires_grad=True)
    path = integrate(
        lambda x: next(calls) * x, start, steps=6, T=6.0, exits=exits, backprop=backprop
    )
    (path.state.sum() + sum(state.sum() for state in path.exits)).backward()
    assert [weight.grad is not None for weight in weights] == learning
    # The last step doubles 2^5; the one before it is doubled once more. The cut changes no value.
    assert path.state.tolist() == [[[64.0, 64.0]]]
    last = weights[-1].grad
    assert last is not None and float(last) == 2 * 32
    assert (start.grad is not None) == learning[0]


def test_the_cut_lies_where_it_should() -> None:
    """Gradients of steps k and k + 1 before the end: with a cut between them the latter is none."""
    weight = torch.tensor(1.0, requires_grad=True)
    for backprop, expected in ((1, 8.0), (2, 8.0 + 8.0), (3, 24.0), (0, 24.0 + 8.0)):
        path = integrate(
            lambda x: weight * x, torch.ones(1, 1, 1), steps=4, T=4.0, backprop=backprop
        )
        # Each step that is reached adds 2^3 to the derivative of 2^4.
        (slope,) = torch.autograd.grad(path.state.sum(), weight)
        assert float(slope) == expected


def test_the_cut_is_through_the_evaluation_that_the_next_step_uses_too() -> None:
    weights = [torch.ones((), requires_grad=True) for _ in range(2)]
    calls = iter(weights)
    path = integrate(
        lambda x: next(calls) * x, torch.ones(1, 1, 1), "ab2", 2, T=2.0, exits=(1,), backprop=1
    )
    path.state.sum().backward()
    assert weights[0].grad is None and weights[1].grad is not None


def logic(*overrides: str) -> Recipe:
    small = ["model.width=16", "model.heads=2", "model.hidden=32", "data.rows=60"]
    return load_recipe("logic", [*small, "run.threads=1", *overrides])


def test_one_pass_trains_every_exit_with_its_weight() -> None:
    recipe = logic("steps.exit_weights=[1, 2, 3, 4]", "optim.transport=0.5", "optim.penalty=speed")
    model = model_of(inject=True, velocity="residual", full=8, T=8.0)
    targets = torch.tensor([[0, 1, 2, 3, 4], [4, 3, IGNORED, IGNORED, IGNORED]])
    turn = Turn((8,), exits=(1, 2, 4))
    (one,) = Objective(recipe, model, nullcontext).passes((TOKENS,), targets, turn)
    outputs = {count: model(TOKENS, steps=count) for count in (1, 2, 4, 8)}
    tasks = [task_loss(outputs[count].logits, targets) for count in (1, 2, 4, 8)]
    task = sum(w * each for w, each in zip((0.1, 0.2, 0.3, 0.4), tasks, strict=True))
    torch.testing.assert_close(one.loss, task + 0.5 * outputs[8].cost / 8)
    assert one.evaluations == 8
    torch.testing.assert_close(penalty(outputs[4], "speed"), outputs[4].cost / 4)


def test_earlier_answers_may_learn_from_the_last() -> None:
    model = model_of(inject=True, full=8, T=8.0)
    targets = torch.zeros(2, 5, dtype=torch.int64)
    losses = []
    for distil in (0.0, 1.0):
        objective = Objective(logic(f"steps.distil={distil}"), model, nullcontext)
        turn = Turn((8,), distilling=distil > 0, exits=(1, 2, 4))
        (one,) = objective.passes((TOKENS,), targets, turn)
        losses.append(one.loss.detach())
    assert losses[0] != losses[1]


def test_weights_of_exits() -> None:
    steps = StepsConfig(full=8, exits=(1, 2, 4), full_probability=0.4)
    assert exit_weights(steps, (1, 2, 4, 8)) == pytest.approx([0.2, 0.2, 0.2, 0.4])
    assert exit_weights(steps, (1,)) == [1.0]
    given = StepsConfig(full=8, exits=(1, 2, 4), exit_weights=(4, 2, 2, 8))
    assert exit_weights(given, (1, 2, 4, 8)) == pytest.approx([0.25, 0.125, 0.125, 0.5])
    assert exit_weights(given, (1, 2)) == pytest.approx([2 / 3, 1 / 3])
    assert exit_weights(given, (1, 2, 4, 13)) == pytest.approx([0.25, 0.125, 0.125, 0.5])


def test_stages_raise_the_count_and_the_clock_follows_their_cost() -> None:
    steps = StepsConfig(
        full=8, short=(1, 2, 4), dial="time", exits=(1, 2, 4), schedule="fixed", grow=0.0,
        stages=(0.4, 0.3, 0.2, 0.1),
    )  # fmt: skip
    turns = [turn_for(i, 1000, steps, 0) for i in range(1000)]
    assert [turn.counts[0] for turn in turns] == [1] * 400 + [2] * 300 + [4] * 200 + [8] * 100
    assert turns[0].exits == () and turns[999].exits == (1, 2, 4)
    spent = [turn.counts[0] for turn in turns]
    for at in (1, 400, 550, 950):
        assert progress(at, 1000, steps) == pytest.approx(sum(spent[:at]) / sum(spent))


def test_stages_of_drawn_counts_never_exceed_the_stage() -> None:
    steps = StepsConfig(full=8, short=(1, 2, 4), grow=0.0, stages=(0.25, 0.25, 0.25, 0.25))
    for stage, most in enumerate((1, 2, 4, 8)):
        drawn = {turn_for(stage * 100 + i, 400, steps, 0).counts[0] for i in range(100)}
        assert drawn == {count for count in (1, 2, 4, 8) if count <= most}


def test_counts_of_a_tail_go_beyond_the_full_one() -> None:
    steps = StepsConfig(full=8, dial="time", schedule="tail", exits=(1, 2, 4), grow=0.0)
    drawn = sorted(turn_for(i, 2000, steps, 0).counts[0] for i in range(2000))
    assert drawn[1000] == 8 and drawn[0] >= 1 and 20 <= drawn[-1] <= 32


TIME = "steps.dial=time"


@pytest.mark.parametrize(
    ("name", "overrides", "sentence"),
    [
        ("parity", ["steps.exits=[1]"], 'steps.exits needs steps.dial "time"'),
        ("parity", [TIME, "steps.exits=[2, 1]"], "steps.exits must be ascending"),
        ("parity", [TIME, "steps.exits=[1, 99]"], "steps.exits must be ascending"),
        ("logic", ["steps.exit_weights=[1, 1]"], "steps.exit_weights must be above 0, one for"),
        ("logic", ["steps.stages=[0.5, 0.5]"], "steps.stages must be shares that sum to 1"),
        ("logic", ["steps.stages=[1, 1, 1, 1]"], "steps.stages must be shares that sum to 1"),
        ("logic", ["steps.grow=0.5"], "steps.stages is in place of grow"),
        ("logic", ["steps.jump=0.1"], 'steps.dial "time" needs'),
        ("logic", ["model.depth=discrete"], 'model.velocity "residual", inject'),
        ("parity", ["steps.schedule=tail"], 'steps.schedule "tail" needs steps.dial "time"'),
        ("parity", ["steps.backprop=-1"], "steps.backprop must not be negative"),
        ("parity", ["steps.distil=1"], 'steps.distil needs schedule "sandwich" or steps.exits'),
        ("parity", ["model.family=tagger"], 'model.family must be "encoder" for data.kind'),
        ("multi30k", ["model.inject=true"], "must be off for a translator"),
        ("modelnet", ["model.prelude=1"], "0 for a set"),
        ("logic", ["data.givens=[9]"], "data.givens must be the fewest and the most"),
        ("logic", ["data.givens=[9, 36]"], "data.givens must be the fewest and the most"),
        ("logic", ["model.window=35"], "model.window must be at least 36"),
        ("logic", ["data.side=5"], "data.side must be one of 6, 9"),
        ("logic", ["data.tokenizer=bpe"], 'data.tokenizer must be "chars" for logic'),
        ("listops", ["data.nesting=30"], "data.nesting must be from 0 to a third"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused_in_words(
    name: str, overrides: list[str], sentence: str
) -> None:
    with pytest.raises(RecipeError) as refused:
        load_recipe(name, overrides)
    assert sentence in str(refused.value)


def test_matrices_of_a_prelude_are_decayed_and_embeddings_are_not() -> None:
    model = model_of(inject=True, prelude=1)
    decayed = {id(p) for p in make_optimiser(model, logic().optim).param_groups[0]["params"]}
    names = {name for name, p in model.named_parameters() if id(p) in decayed}
    assert "embed.project.weight" in names and "embed.blocks.0.feedforward.up.weight" in names
    assert not any("tokens" in name or "positions" in name for name in names)


# Of the release before this dial: the sum of squares of the logits, and the transport cost.
OLD = [
    ("decoder", {}, "euler", 4, 86.37402511501372, 2.3212876319885254),
    ("decoder", {}, "ab2", 3, 86.51243535856743, 2.568734884262085),
    ("encoder", {"final_norm": "inside", "conditioned": True}, "euler", 4,
     2.7741619372455304, 0.9999938011169434),
    ("encoder", {"depth": "discrete"}, "euler", 4, 0.30515222507059225, 0.18114902079105377),
    ("image", {}, "midpoint", 2, 0.6631399218835909, 4.624068260192871),
    ("translator", {"T": 2.0}, "euler", 4, 101.56710737265588, 23.21442413330078),
]  # fmt: skip


@pytest.mark.parametrize(("family", "form", "method", "steps", "square", "cost"), OLD)
def test_the_forms_of_the_papers_answer_as_before(
    family: Any, form: dict[str, Any], method: str, steps: int, square: float, cost: float
) -> None:
    sizes = {
        "encoder": Sizes(vocabulary=11, classes=3),
        "image": Sizes(classes=3, channels=1, height=14, width=14),
    }.get(family, Sizes(vocabulary=11))
    torch.manual_seed(3)
    small = {"width": 16, "heads": 2, "hidden": 32, "window": 12, "target_window": 12}
    config = ModelConfig(family=family, initial="torch", **(small | form))
    model = build_model(config, sizes, StepsConfig(full=4)).eval()
    draw = torch.Generator().manual_seed(5)
    tokens = torch.randint(1, 11, (3, 9), generator=draw)
    pixels = torch.randn(3, 1, 14, 14, generator=draw)
    inputs = {"image": (pixels,), "translator": (tokens, tokens)}.get(family, (tokens,))
    with torch.no_grad():
        output = model(*inputs, steps=steps, method=method)
    assert float(output.logits.double().square().sum()) == pytest.approx(square, rel=1e-5)
    assert float(output.cost) == pytest.approx(cost, rel=1e-5)


@pytest.mark.parametrize("family", ["decoder", "encoder", "image"])
def test_other_families_take_the_form_too(family: Any) -> None:
    sizes = Sizes(
        vocabulary=11, classes=0 if family == "decoder" else 3, channels=1, height=14, width=14
    )
    config = ModelConfig(
        family=family, width=16, heads=2, hidden=32, window=8, velocity="residual", inject=True,
        prelude=1, coda=1, T=4.0,
    )  # fmt: skip
    model = build_model(config, sizes, StepsConfig(dial="time", full=4)).eval()
    inputs = torch.randn(2, 1, 14, 14) if family == "image" else TOKENS
    output = model(inputs, steps=4, exits=(2,))
    assert torch.equal(output.early[0], model(inputs, steps=2).logits)
    if family == "decoder":  # no position sees one behind it
        changed = TOKENS.clone()
        changed[:, 3:] = 1
        torch.testing.assert_close(model(changed, steps=4).logits[:, :3], output.logits[:, :3])


TAGS = """
name = "prefixes"
[data]
kind = "tags"
train = "train.jsonl"
text = ["bits"]
label = "odd"
tokenizer = "words"
held_out = 0.2
[model]
family = "tagger"
layers = 1
heads = 4
width = 32
hidden = 64
window = 8
initial = "scaled"
velocity = "residual"
inject = true
T = 4
[steps]
dial = "time"
full = 4
short = [1, 2]
exits = [1, 2]
schedule = "fixed"
grow = 0
stages = [0.3, 0.2, 0.5]
[optim]
iterations = 400
batch = 32
lr = 0.005
warmup = 20
transport = 0.001
[run]
threads = 1
evaluate_every = 400
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of each bit: is the number of ones up to it odd? One round of a small block cannot count."""
    folder, draw, rows = tmp_path_factory.mktemp("dial"), random.Random(0), []
    for _ in range(1000):
        bits = [draw.randint(0, 1) for _ in range(8)]
        odd = [total % 2 for total in itertools.accumulate(bits)]
        rows.append(json.dumps({"bits": bits, "odd": odd}))
    (folder / "train.jsonl").write_text("\n".join(rows))
    (folder / "prefixes.toml").write_text(TAGS)
    recipe = load_recipe(str(folder / "prefixes.toml"), [], str(folder))
    train(recipe, folder / "run", quiet=True)
    return folder / "run"


@pytest.mark.long
def test_a_small_training_shows_range(trained: Path) -> None:
    report = evaluate_run(trained, [1, 2, 4, 8])
    one, two, four, _ = (row.quality for row in report.rows)
    assert one.value < two.value < four.value
    assert four.value - one.value > 0.02
    found = report.ranges["euler"]
    best = max(row.quality.value for row in report.rows)
    assert found.first == 1 < found.best and found.gain.real
    assert found.gain.better == pytest.approx(best - one.value)
    assert one.whole is not None and four.whole is not None and one.whole + 0.1 < four.whole
    assert report.rows[3].displacements[:4] == pytest.approx(report.rows[2].displacements)


def test_a_run_comes_back_with_its_dial(trained: Path) -> None:
    model = load_run(trained).model
    assert (model.dial, model.full, model.T) == ("time", 4, 4.0)
    assert model.span(8) == (1.0, 8.0)
