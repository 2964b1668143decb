"""Steps that differ a little: one set of weights, and a low-rank correction for each further step.

    step 0    W               b
    step k    W + up_k down_k b + own_k

As in "Relaxed Recursive Transformers" (Bae et al., 2024): where the layers of a pretrained model
become one velocity, the corrections begin as the best approximation of what each step's layers
have otherwise. Best is here what changes least of what a layer gives for the inputs that it has
(as in "SVD-LLM", Wang et al., 2024); for the weights alone it takes many times the rank.

An answer of fewer steps ends with a step of its own: that step with a further, smaller correction,
an ending. What an answer is read from and what later steps go on from need not be the same state
then, so an answer after one step takes nothing from that after all. Endings learn with the rest
held as it is (as in "LoRA", Hu et al., 2021).
"""

import copy
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from train.blocks import BlockVelocity
from train.ode import EndsApart
from train.recipe import StepsConfig


class CorrectedVelocity(BlockVelocity, EndsApart):
    """x' = g (F_k(x) - x) at step k of a dial of time: the layers F with the corrections of k.

    Where step k is the last of a shorter answer, it is called -1 - k, and begins at the time
    -(k + 1) h.
    """

    timed = True

    def __init__(
        self,
        blocks: Iterable[nn.Module],
        width: int,
        gain: float,
        steps: int,
        rank: int,
        ending_rank: int = 0,
    ) -> None:
        super().__init__(blocks, width, final_norm=False)
        self.steps, self.ends = steps, ending_rank > 0
        self.gain = nn.Parameter(torch.full((width,), gain))
        self.corrections = self._corrections_of(rank)
        if self.ends:
            self.endings = self._corrections_of(ending_rank)

    def _corrections_of(self, rank: int) -> nn.ModuleList:
        return nn.ModuleList(
            nn.ModuleDict(
                {
                    name.replace(".", "-"): _correction(weight, self.steps - 1, rank)
                    for name, weight in block.named_parameters()
                }
            )
            for block in self.blocks
        )

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        *context, t, h = rest
        return self._moved(x, self.step_at(t, h), context)

    def _moved(self, x: Tensor, step: int, context: Sequence[Any]) -> Tensor:
        y = x
        for index, block in enumerate(self.blocks):
            weights = self._weights(index, step)
            y = functional_call(block, weights, (y, *context)) if weights else block(y, *context)
        gain = self.gain if step >= 0 else self.gain.detach()
        out: Tensor = gain * (y - x)
        return out

    def last(self, x: Tensor, t: float, h: float, *context: Any) -> Tensor | None:
        """The velocity of a step that an answer ends with, if it is not that of any other.

        Gradients come to the ending alone.
        """
        step = self.step_at(t, h)
        if not self.ends or step + 1 >= self.steps:
            return None
        return self._moved(x.detach(), -1 - step, context)

    def step_at(self, t: float, h: float) -> int:
        """The step that begins at t; those beyond the last are like the last."""
        return min(round(t / h), self.steps - 1)

    def begin_with(self, layers: Sequence[nn.Module], moments: "Sequence[Moments]") -> None:
        """Take the weights of these layers, those of each step in turn, as near as can be.

        Moments are of the inputs of each of the layers; where there are none any is as likely.
        """
        blocks = len(self.blocks)
        for index, block in enumerate(self.blocks):
            block.load_state_dict(layers[index].state_dict())
            for name, weight in block.named_parameters():
                correction: Any = self._correction(index, name)
                for step in range(1, self.steps):
                    layer = step * blocks + index
                    seen = moments[layer].get(name)
                    other = layers[layer].get_parameter(name)
                    with torch.no_grad():
                        correction.begin_with(step - 1, other - weight, seen)

    def at(self, step: int) -> nn.Module:
        """The velocity of one step, a function of the state alone."""
        return _AtStep(self, min(step, self.steps - 1))

    def every(self) -> list[int]:
        """All steps, the endings first and the last of those before the others."""
        return list(range(1 - self.steps if self.ends else 0, self.steps))

    def weights_at(self, index: int, step: int) -> dict[str, tuple[Tensor, list["At"]]]:
        """Each weight of a block, and what a step adds to it."""
        among = step if step >= 0 else -1 - step
        return {
            name: (
                weight,
                ([At(self._correction(index, name), among - 1)] if among else [])
                + ([At(self._correction(index, name, ending=True), among)] if step < 0 else []),
            )
            for name, weight in self.blocks[index].named_parameters()
        }

    def _weights(self, index: int, step: int) -> dict[str, Tensor]:
        made: dict[str, Tensor] = {}
        for name, (weight, added) in self.weights_at(index, step).items():
            if not added:
                continue
            *before, last = added
            for each in before:
                weight = weight + each.value()
            made[name] = (weight if step >= 0 else weight.detach()) + last.value()
        return made

    def _correction(self, index: int, name: str, ending: bool = False) -> nn.Module:
        corrections: Any = (self.endings if ending else self.corrections)[index]
        found: nn.Module = corrections[name.replace(".", "-")]
        return found


def check_steps(model: nn.Module, steps: StepsConfig, method: str) -> None:
    """ValueError if a model whose steps have weights of their own would be evaluated between."""
    velocity = getattr(model, "velocity", None)
    if not isinstance(velocity, CorrectedVelocity):
        return
    if method != "euler":
        raise ValueError(
            f"the steps of this model have weights of their own, and {method} evaluates between "
            "steps: the method must be euler"
        )
    if (steps.dial, steps.full) != ("time", velocity.steps):
        raise ValueError(
            "the steps of this model have weights of their own: steps.dial must be time, and "
            f"steps.full {velocity.steps}"
        )


def _correction(weight: Tensor, steps: int, rank: int) -> nn.Module:
    if weight.dim() == 2:
        return LowRank(weight.shape[0], weight.shape[1], steps, rank)
    return Own(weight.shape, steps)


class LowRank(nn.Module):
    """What is added to a matrix (N, K) at each step: of a rank."""

    def __init__(self, N: int, K: int, steps: int, rank: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.zeros(steps, rank, N))
        self.down = nn.Parameter(torch.empty(steps, rank, K).normal_(0.0, K**-0.5))

    def forward(self, step: int) -> Tensor:
        return self.up[step].t() @ self.down[step]

    def begin_with(self, step: int, difference: Tensor, seen: Tensor | None) -> None:
        """The nearest of its rank to a matrix; seen is the mean of x x^T over its inputs x (K)."""
        if not difference.any():
            return  # what is zero on both sides cannot be learnt
        rank, K = self.up.shape[1], difference.shape[1]
        root, inverse = _roots(torch.eye(K) if seen is None else seen)
        left, sizes, right = torch.linalg.svd(difference @ root, full_matrices=False)
        up, down = (left[:, :rank] * sizes[:rank]).t(), right[:rank] @ inverse  # (R, N), (R, K)
        # Both sides of a rank are of one size: an optimiser changes each by as much as the other.
        size, other = (side.norm(dim=1, keepdim=True) for side in (up, down))
        share = (other / size.clamp_min(1e-8 * other.max())).sqrt()
        self.up[step], self.down[step] = up * share, down / share


class Own(nn.Module):
    """What is added to a bias or a norm at each step."""

    def __init__(self, shape: Sequence[int], steps: int) -> None:
        super().__init__()
        # One for each step: what has two dimensions decays in training, as matrices do.
        self.own = nn.ParameterList(torch.zeros(*shape) for _ in range(steps))

    def forward(self, step: int) -> Tensor:
        added: Tensor = self.own[step]
        return added

    def begin_with(self, step: int, difference: Tensor, seen: Tensor | None) -> None:
        self.own[step].copy_(difference)


def _roots(moment: Tensor) -> tuple[Tensor, Tensor]:
    """The square root of a symmetric matrix, and its inverse; directions never seen count a bit."""
    values, vectors = torch.linalg.eigh(moment.double())
    values = values.clamp_min(1e-4 * values.mean())
    root, inverse = (vectors * values**power @ vectors.t() for power in (0.5, -0.5))
    return root.float(), inverse.float()


class At(NamedTuple):
    """A correction at one of its steps."""

    correction: nn.Module
    step: int

    def value(self) -> Tensor:
        """What it adds to a weight."""
        added: Tensor = self.correction(self.step)
        return added


# By the name of a weight in its block: the sum of x x^T over the inputs x that it is given.
Moments = dict[str, Tensor]


def moments_of(
    blocks: Iterable[nn.Module], model: nn.Module, rows: Iterable[Tensor], pad_id: int
) -> list[Moments]:
    """What the linear layers of a model's blocks are given for rows (B, N), without padding."""
    found: list[Moments] = []
    present = torch.empty(0)

    def note(into: Moments, name: str, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen = inputs[0][present].float()  # (positions, K)
        into[name] = into.get(name, 0) + seen.t() @ seen

    with ExitStack() as hooks, torch.no_grad():
        for block in blocks:
            of_block: Moments = {}
            found.append(of_block)
            for name, module in block.named_modules():
                if isinstance(module, nn.Linear):
                    watch = partial(note, of_block, f"{name}.weight")
                    hooks.callback(module.register_forward_pre_hook(watch).remove)
        for tokens in rows:
            present = tokens != pad_id
            model(tokens)
    return found


class _AtStep(nn.Module):
    """x' = g (F_k(x) - x) for one k, as ordinary layers."""

    def __init__(self, velocity: CorrectedVelocity, step: int) -> None:
        super().__init__()
        self.gain = velocity.gain
        self.blocks = nn.ModuleList(
            _corrected(block, velocity.weights_at(index, step))
            for index, block in enumerate(velocity.blocks)
        )

    def forward(self, x: Tensor, *context: Tensor) -> Tensor:
        y = x
        for block in self.blocks:
            y = block(y, *context)
        out: Tensor = self.gain * (y - x)
        return out


class _CorrectedLinear(nn.Module):
    """x (W + up down + ...)^T + b; W is shared with the other steps."""

    def __init__(self, linear: nn.Linear, added: Sequence[At]) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.ups, self.downs = nn.ParameterList(), nn.ParameterList()
        for low, step in added:
            assert isinstance(low, LowRank)
            self.ups.append(nn.Parameter(low.up[step]))
            self.downs.append(nn.Parameter(low.down[step]))

    def forward(self, x: Tensor) -> Tensor:
        weight: Tensor = self.weight
        for up, down in zip(self.ups, self.downs, strict=True):
            weight = weight + up.t() @ down
        return F.linear(x, weight, self.bias)


def _corrected(block: nn.Module, weights: dict[str, tuple[Tensor, list[At]]]) -> nn.Module:
    """A copy of a block as it is at a step; it shares the weights that have no correction."""
    shared = {id(weight): weight for weight, _ in weights.values()}
    made = copy.deepcopy(block, shared)
    for name, (weight, added) in weights.items():
        if not added:
            continue
        path, _, last = name.rpartition(".")
        owner = made.get_submodule(path)
        if isinstance(added[0].correction, LowRank):
            assert isinstance(owner, nn.Linear)
            above, _, own = path.rpartition(".")
            setattr(made.get_submodule(above), own, _CorrectedLinear(owner, added))
        else:
            value = sum((each.value() for each in added), weight)
            setattr(owner, last, nn.Parameter(value))
    return made
