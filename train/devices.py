"""Where training runs: one CPU or GPU, or several processes that torchrun started.

Lightning Fabric finds the processes, the device and the precision. Here a batch is shared among
the processes, and their gradients are averaged, so that the result is that of one process.

Gradients are averaged once per iteration, after all passes. A gradient takes many evaluations of
the velocity, so overlapping the exchange with the backward pass would gain nothing.
"""

import logging
import os
import platform
from contextlib import AbstractContextManager
from typing import Literal

import torch
from torch import Tensor, nn

from train.data.batch import IGNORED, Batch
from train.recipe import Accelerator

Precision = Literal["fp32", "bf16"]
LARGE_PRIME = 1_000_000_007
_log = logging.getLogger("stepdial")


def _has_bf16(on_gpu: bool) -> bool:
    """Whether bf16 is computed, not emulated: that takes three to ten times as long as fp32."""
    has = on_gpu or (
        torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        if platform.machine() in ("x86_64", "AMD64")  # there mkldnn emulates it with any AVX-512
        else torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )
    if not has:
        _log.warning("training in fp32: this CPU has no bf16 arithmetic, which the recipe asks for")
    return has


class Devices:
    """The device of this process, and its place among all of them."""

    def __init__(self, accelerator: Accelerator = "auto", precision: Precision = "fp32") -> None:
        # Here, not above: it brings torch's compiler, seconds that only a training need spend.
        from lightning_fabric import Fabric

        # It would say which precision it uses, in the midst of our own lines.
        logging.getLogger("lightning_fabric").setLevel(logging.WARNING)

        found = torch.cuda.is_available()
        if accelerator == "cuda" and not found:
            raise ValueError(
                "torch sees no CUDA device: choose cpu or auto (run.accelerator, --device)"
            )
        on_gpu = found and accelerator != "cpu"
        processes = int(os.environ.get("WORLD_SIZE", "1"))
        here = int(os.environ.get("LOCAL_WORLD_SIZE", str(processes)))
        self._fabric = Fabric(
            accelerator="cuda" if on_gpu else "cpu",
            strategy="ddp" if processes > 1 else "auto",
            devices=here,
            num_nodes=processes // here,
            precision="bf16-mixed" if precision == "bf16" and _has_bf16(on_gpu) else "32-true",
        )
        self._fabric.launch()
        self.device = self._fabric.device
        self.rank, self.processes = self._fabric.global_rank, self._fabric.world_size

    @property
    def main(self) -> bool:
        """Whether this process is the one that writes."""
        return self.rank == 0

    def seed(self, seed: int) -> None:
        """Seed what is random inside a model: differently in each process."""
        torch.manual_seed(seed + LARGE_PRIME * self.rank)

    def autocast(self) -> AbstractContextManager[object]:
        """The precision of the forward pass."""
        return self._fabric.autocast()

    def parts(self, accumulate: int, size: int) -> range:
        """The parts of an iteration that this process computes: whole ones where they divide."""
        if accumulate % self.processes == 0:
            return range(self.rank, accumulate, self.processes)
        if size % self.processes:
            raise ValueError(
                f"{self.processes} processes cannot share batches of {size} rows: make optim.batch "
                "or optim.accumulate a multiple of their number"
            )
        return range(accumulate)

    def share(self, batch: Batch, accumulate: int) -> Batch:
        """The rows of a part that this process computes, on its device."""
        if accumulate % self.processes == 0:
            return self.place(batch)
        if batch.rows % self.processes:
            raise ValueError(
                f"{self.processes} processes cannot share a batch of {batch.rows} rows: there is "
                "too little data for so many"
            )
        mine = slice(self.rank, None, self.processes)
        inputs = tuple(one[mine] for one in batch.inputs)
        taught = None if batch.taught is None else batch.taught[mine]
        return self.place(Batch(inputs, batch.targets[mine], taught))

    def per_share(self, batches: list[Batch]) -> list[float]:
        """What to divide the mean loss of each batch of this process by.

        The mean over processes of their sums is then the mean over all targets of the iteration.
        """
        counts = [int((batch.targets != IGNORED).sum()) for batch in batches]
        mean = self.mean(float(sum(counts)))
        return [mean / max(count, 1) for count in counts]

    def place(self, batch: Batch) -> Batch:
        """A batch on the device of this process."""
        if self.device.type == "cpu":
            return batch
        inputs = tuple(one.to(self.device, non_blocking=True) for one in batch.inputs)
        taught = batch.taught
        if taught is not None:
            taught = taught.to(self.device, non_blocking=True)
        return Batch(inputs, batch.targets.to(self.device, non_blocking=True), taught)

    def average_gradients(self, model: nn.Module) -> None:
        """Make the gradients of all processes their mean, in one exchange."""
        if self.processes == 1:
            return
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        flat = self._mean(torch.cat([one.reshape(-1) for one in gradients]))
        parts = flat.split([one.numel() for one in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))

    def mean(self, value: float) -> float:
        """The mean of a number over all processes."""
        if self.processes == 1:
            return value
        return float(self._mean(torch.tensor(value, dtype=torch.float64, device=self.device)))

    def any(self, asked: bool) -> bool:
        """Whether it is so in any process."""
        return self.mean(float(asked)) > 0

    def wait(self) -> None:
        """Until all processes are here."""
        self._fabric.barrier()

    def _mean(self, value: Tensor) -> Tensor:
        reduced = self._fabric.all_reduce(value, reduce_op="mean")
        assert isinstance(reduced, Tensor)
        return reduced


def move_state(optimiser: torch.optim.Optimizer) -> None:
    """Put the moments of an optimiser where its parameters are."""
    for parameter, moments in optimiser.state.items():
        for key, value in moments.items():
            moments[key] = value.to(parameter.device)
