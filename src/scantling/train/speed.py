"""What an update should cost, and what the device could do: FLOPs predicted, a dense peak, memory in use."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from scantling.cards.training import Training
from scantling.data import Batch
from scantling.numbers import training as training_account
from scantling.numbers.flops import flops
from scantling.numbers.hardware import arithmetic, devices
from scantling.numbers.peak import training_peak
from scantling.parts.part import Shape, Workload
from scantling.parts.transformer import Transformer
from scantling.train.forward import Inputs

CONVENTION = (
    "FLOPs of matrix products, forward and twice that backward, attention over the full square, padding included, "
    "nothing for recomputation (arXiv:2204.02311, appendix B)"
)
MFU_CONVENTION = (
    "FLOPs of matrix products, forward and twice that backward, of real tokens only, attention over the full square of "
    "each document by itself, nothing for recomputation (arXiv:2204.02311, appendix B)"
)
_TRIES = 4


@dataclass(frozen=True)
class Peak:
    """A dense peak.

    Attributes:
        flops: per second.
        source: the row of the table, or what was measured.
    """

    flops: float
    source: str


def peak(device: torch.device, dtype: torch.dtype) -> Peak:
    """The dense peak of a device in a dtype: the table's for a GPU that it knows, else a product that is measured."""
    name = str(dtype).removeprefix("torch.")
    if device.type == "cuda":
        known = _tabled(torch.cuda.get_device_name(device), arithmetic(name))
        if known is not None:
            return known
    n = 4096 if device.type == "cuda" else 1024
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    best = min(_seconds(a, b) for _ in range(_TRIES))
    return Peak(2 * n**3 / best, f"measured: the best of {_TRIES} products of {n} x {n} in {name}")


def _tabled(model: str, kind: str) -> Peak | None:
    words = model.lower().replace("-", " ").split()
    for row in devices().values():
        if row.name.split("-")[0] in words and kind in row.dense_tflops:
            return Peak(row.peak(kind), f"table: {row.name}, dense {kind}")
    return None


def _seconds(a: torch.Tensor, b: torch.Tensor) -> float:
    _wait(a.device)
    began = time.perf_counter()
    a @ b
    _wait(a.device)
    return time.perf_counter() - began


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def training_flops(parts: Transformer, batch: Inputs) -> int:
    """Predicted FLOPs of a micro-batch, forward and backward, by `CONVENTION`."""
    rows, tokens = batch.ids.shape
    source = None if batch.source is None else batch.source.shape[1]
    return flops(parts, Workload(rows, tokens, source=source, training=True)).training


def document_sizes(batch: Batch) -> Counter[tuple[int, int | None]]:
    """How often each size of a document, or of a piece of one, comes in a batch: its tokens, and those of its source.

    Documents of concatenated rows see each other, so each such row is one. What is empty is left out.
    """
    if batch.decoder_mask is not None:
        sides = zip(batch.decoder_mask.sum(1).tolist(), batch.attention_mask.sum(1).tolist(), strict=True)
        return Counter((target, source) for target, source in sides if target and source)
    rows = np.repeat(np.arange(len(batch.ids)), batch.ids.shape[1])[batch.attention_mask.ravel()]
    numbers = batch.document_ids[batch.attention_mask]
    # Documents of a row are numbered from 0, so that no two of them in the batch have the same key.
    _, sizes = np.unique(rows * (batch.document_ids.max() + 1) + numbers, return_counts=True)
    return Counter((int(size), None) for size in sizes)


class DocumentFlops:
    """FLOPs of updates by `MFU_CONVENTION`; each size of a document is reckoned once."""

    def __init__(self, parts: Transformer) -> None:
        self._parts = parts
        self._of_one: dict[tuple[int, int | None], int] = {}

    def of(self, batch: Batch) -> int:
        """Forward and backward over the documents of a batch."""
        return sum(self._one(*size) * count for size, count in document_sizes(batch).items())

    def _one(self, tokens: int, source: int | None) -> int:
        if (tokens, source) not in self._of_one:
            w = Workload(1, tokens, source=source, training=True)
            self._of_one[tokens, source] = flops(self._parts, w).training
        return self._of_one[tokens, source]


def counted_flops(run: Callable[[], None]) -> int:
    """What torch's own counter sees of `run`, with the attention kernel whose products it can count.

    The counter does not know products that are added in place, which is told here.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    def added(_: Shape, a: Shape, b: Shape, **__: Any) -> int:
        return 2 * a[0] * a[1] * b[1]

    known = {torch.ops.aten.addmm_: added}
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False, custom_mapping=known) as counter:
        run()
    return int(counter.get_total_flops())


MEMORY_CONVENTION = (
    "the highest of an update, states included; measured as the growth of the process, with what torch loads at the "
    "first update (on a GPU of torch's allocations), and the net"
)


def predicted_memory(parts: Transformer, training: Training, tokens: int) -> int | None:
    """The highest that a step over a full micro-batch stands, by the account of `numbers`; None with adapters."""
    if training.lora is not None:
        return None
    recipe = training_account.Recipe(
        training.precision,
        training.optimizer.kind,
        "chunked",
        micro_batches=training.accumulation,
    )
    w = Workload(training.batch, tokens, training=True, recompute=training.recompute)
    lines = training_account.training_memory(parts, w, recipe)
    return max(training_peak(parts, w, recipe, lines).values())


def forget_peak(device: torch.device) -> None:
    """Let the highest mark of memory begin anew, where the system allows it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")
    except OSError:
        return


def memory_bytes(device: torch.device) -> int | None:
    """The most memory that was in use: of a GPU what torch allocated, else what the process held; None if unknown."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return _status("VmHWM")


def memory_now(device: torch.device) -> int | None:
    """The memory in use now, by the same measure."""
    return int(torch.cuda.memory_allocated(device)) if device.type == "cuda" else _status("VmRSS")


def _status(line: str) -> int | None:
    try:
        with open("/proc/self/status", encoding="ascii") as lines:
            found = next((text for text in lines if text.startswith(line + ":")), None)
    except OSError:
        return None
    return None if found is None else int(found.split()[1]) * 1024
