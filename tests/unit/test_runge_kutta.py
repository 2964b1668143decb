"""Runge-Kutta stacks: each scheme against its formula, on linear functions and on blocks."""

import math
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

from tests.traced import check_trace
from train.blocks import Block, BlockVelocity
from train.data.batch import Sizes
from train.families import BlockFunction, RungeKuttaStack, halves
from train.model import CrossBlock, Translator, build_model
from train.recipe import Function as Part
from train.recipe import ModelConfig, Scheme

pytestmark = pytest.mark.long

SCHEMES: tuple[Scheme, ...] = get_args(Scheme)
WIDTH, HEADS, HIDDEN = 8, 2, 16


def functions(blocks: int = 3, causal: bool = False) -> list[BlockFunction]:
    torch.manual_seed(0)
    return [BlockFunction(Block(WIDTH, HEADS, HIDDEN, causal)) for _ in range(blocks)]


def linear(blocks: int) -> tuple[list[nn.Linear], list[Tensor]]:
    """Functions F(y) = A y, and their matrices."""
    torch.manual_seed(1)
    made = [nn.Linear(4, 4, bias=False, dtype=torch.float64) for _ in range(blocks)]
    return made, [f.weight.detach().T for f in made]


def test_a_residual_stack_is_the_stack_of_its_blocks() -> None:
    made = functions()
    x, mask = torch.randn(2, 5, WIDTH), torch.ones(2, 5, dtype=torch.bool)
    blocks = BlockVelocity([f.block for f in made], WIDTH, final_norm=False)
    stack = RungeKuttaStack(made, "residual")
    torch.testing.assert_close(stack(x, mask), blocks(x, mask))


def test_learned_rk2_at_a_half_and_a_half_is_rk2_and_at_one_and_one_gamma1() -> None:
    x = torch.randn(2, 5, WIDTH)
    learned = RungeKuttaStack(functions(), "rk2-learned")
    torch.testing.assert_close(learned(x), RungeKuttaStack(functions(), "rk2-gamma1")(x))
    with torch.no_grad():
        for gammas in learned.weights:
            gammas.fill_(0.5)
    assert torch.equal(learned(x), RungeKuttaStack(functions(), "rk2")(x))
    learned(x).sum().backward()
    assert all(gammas.grad is not None and gammas.grad.all() for gammas in learned.weights)


def test_the_first_learned_weight_of_rk2_is_that_of_the_first_stage() -> None:
    x = torch.randn(2, 5, WIDTH)
    one = functions(1)
    learned = RungeKuttaStack(one, "rk2-learned")
    with torch.no_grad():
        learned.weights[0].copy_(torch.tensor([0.7, 0.2]))
    first = one[0](x)
    torch.testing.assert_close(learned(x), x + 0.7 * first + 0.2 * one[0](x + first))


@pytest.mark.parametrize(("scheme", "order"), [("residual", 1), ("rk2", 2), ("rk4", 4)])
def test_a_step_on_a_linear_function_is_the_taylor_polynomial(scheme: Scheme, order: int) -> None:
    made, (a, b) = linear(2)
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    one, two = (
        sum(torch.linalg.matrix_power(m, n) / math.factorial(n) for n in range(order + 1))
        for m in (a, b)
    )
    torch.testing.assert_close(RungeKuttaStack(made, scheme)(x), x @ one @ two)


def test_schemes_that_look_back_on_linear_functions() -> None:
    made, (a, b, c) = linear(3)
    y0 = torch.randn(2, 3, 4, dtype=torch.float64)

    y1 = y0 + y0 @ a
    y2 = y0 + 2 * y1 @ b
    torch.testing.assert_close(RungeKuttaStack(made, "leapfrog")(y0), y1 + 2 * y2 @ c)

    multistep = RungeKuttaStack(made, "multistep")
    with torch.no_grad():
        multistep.weights[1].fill_(0.7)
        multistep.weights[2].fill_(-0.2)
    y2 = 0.7 * y1 + 0.3 * y0 + y1 @ b
    torch.testing.assert_close(multistep(y0), -0.2 * y2 + 1.2 * y1 + y2 @ c)

    dlcl = RungeKuttaStack(made, "dlcl")
    rows = [[0.5], [2.0, -1.0], [0.1, 0.2, 0.3]]
    with torch.no_grad():
        for weights, row in zip(dlcl.weights, rows, strict=True):
            weights.copy_(torch.tensor(row))
    z1 = y0 + 0.5 * y0 @ a
    z2 = y0 + 2 * y0 @ a - z1 @ b
    z3 = y0 + 0.1 * y0 @ a + 0.2 * z1 @ b + 0.3 * z2 @ c
    torch.testing.assert_close(dlcl(y0), z3)

    poly = RungeKuttaStack(made[:1], "polynet")
    torch.testing.assert_close(poly(y0), y0 + y0 @ a + y0 @ a @ a)


def test_what_is_learned_starts_as_the_residual_stack() -> None:
    x = torch.randn(2, 5, WIDTH)
    residual = RungeKuttaStack(functions(), "residual")(x)
    for scheme in ("multistep", "dlcl"):
        torch.testing.assert_close(RungeKuttaStack(functions(), scheme)(x), residual)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_masks_hide_padding_and_causal_stacks_do_not_see_the_future(scheme: Scheme) -> None:
    x = torch.randn(1, 6, WIDTH)
    mask = torch.tensor([[True] * 4 + [False] * 2])
    stack = RungeKuttaStack(functions(), scheme)
    torch.testing.assert_close(stack(x, mask)[:, :4], stack(x[:, :4]))
    causal = RungeKuttaStack(functions(causal=True), scheme)
    torch.testing.assert_close(causal(x)[:, :4], causal(x[:, :4]))


@pytest.mark.parametrize("which", ["attention", "feedforward", "halves"])
def test_a_scheme_of_halves_leaves_the_other_half_as_it_is(which: Part) -> None:
    """Figure 4: F as attention, as feed-forward, or each of the two on its own."""
    blocks = [f.block for f in functions(2)]
    assert all(isinstance(block, Block) for block in blocks)
    x, mask = torch.randn(2, 5, WIDTH), torch.ones(2, 5, dtype=torch.bool)
    mask[1, 3:] = False
    y = x
    for block in blocks:
        for half in ("attention", "feedforward"):

            def change(z: Tensor, block: Any = block, half: str = half) -> Tensor:
                if half == "attention":
                    return block.drop(block.attention(block.norm1(z), mask))  # type: ignore[no-any-return]  # a tensor
                return block.feedforward(block.norm2(z))  # type: ignore[no-any-return]  # a tensor

            first = change(y)
            second = change(y + first)
            y = y + ((first + second) / 2 if which in (half, "halves") else first)
    stack = halves(blocks, which, "rk2")  # type: ignore[arg-type]  # asserted above
    torch.testing.assert_close(stack(x, mask), y)
    assert not torch.allclose(y, RungeKuttaStack(map(BlockFunction, blocks), "rk2")(x, mask))
    learned = halves(blocks, which, "rk2-learned")  # type: ignore[arg-type]  # asserted above
    assert len(learned.weights) == (4 if which == "halves" else 2)
    learned(x, mask).sum().backward()
    assert all(weights.grad is not None for weights in learned.weights)


def test_a_scheme_that_looks_back_needs_whole_blocks() -> None:
    with pytest.raises(
        ValueError, match="dlcl looks back on what came before: it is of whole blocks"
    ):
        halves([f.block for f in functions(1)], "attention", "dlcl")  # type: ignore[misc]  # blocks


def test_a_decoder_may_stay_residual_where_the_encoder_has_a_scheme() -> None:
    settings: dict[str, Any] = {"block": "runge-kutta", "scheme": "rk4", "depth": "discrete"}
    small: dict[str, Any] = {"width": WIDTH, "heads": HEADS, "hidden": HIDDEN, "layers": 1}
    for inside in (True, False):
        config = ModelConfig("translator", **settings, **small, scheme_in_decoder=inside)
        model = build_model(config, Sizes(vocabulary=20))
        assert isinstance(model, Translator)
        assert model.encoder.scheme == "rk4"
        assert model.decoder.scheme == ("rk4" if inside else "residual")


def test_an_unknown_scheme_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown scheme 'rk3'; choose one of residual, rk2"):
        RungeKuttaStack(functions(), "rk3")  # type: ignore[arg-type]  # the wrong name is the point


class Together(nn.Module):
    """All schemes in one graph, and one stack of blocks: tracing is what takes time."""

    def __init__(self) -> None:
        super().__init__()
        one = nn.Tanh()
        self.schemes = nn.ModuleList(RungeKuttaStack([one, one], scheme) for scheme in SCHEMES)
        self.blocks = RungeKuttaStack([BlockFunction(CrossBlock(WIDTH, HEADS, HIDDEN))], "residual")

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        x = inputs[0]
        return (self.blocks(*inputs), *(stack(x) for stack in self.schemes))


def test_every_scheme_exports() -> None:
    def inputs(B: int, N: int, S: int) -> tuple[Tensor, ...]:
        memory_mask = torch.ones(B, S).bool()
        memory_mask[-1, -2:] = False
        return torch.randn(B, N, WIDTH), torch.randn(B, S, WIDTH), memory_mask

    check_trace(Together(), inputs(2, 3, 4), [[0, 1]] * 3, inputs(3, 7, 5))
