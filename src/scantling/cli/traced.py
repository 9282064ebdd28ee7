"""A trace with the model it is of, in words: what the text, the Markdown and the page of `scantling trace` share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from scantling.cards import Card
from scantling.cli import show
from scantling.numbers.trace import AGAIN, BACKWARD, FORWARD, Row, Trace
from scantling.parts.part import Workload
from scantling.units import bytes_text, count_text, flops_text


@dataclass(frozen=True)
class Traced:
    """A trace and what it is of."""

    card: Card
    w: Workload
    found: Trace

    @property
    def title(self) -> str:
        """One line: the model and the pass."""
        again = f", {self.w.recompute} recompute" if self.w.training and self.w.recompute != "none" else ""
        what = "training" if self.w.training else "decoding" if self.w.past else "prefill"
        about = f"{what}, {self.w.kernel} attention{again}, activations in {self.w.dtype}"
        return f"{self.card.name}, {show.sizes(self.card, self.w)}, {about}"


def symbols(row: Row) -> str:
    """``(B, H, T, d_head)``."""
    return f"({', '.join(row.symbols)})"


def legend(found: Trace) -> Iterator[tuple[str, str]]:
    """Each symbol with its size, or its sizes where layers differ."""
    for name, values in found.sizes.items():
        size = " or ".join(f"{value:,}" for value in values)
        yield name, f"{size} = P + T" if name == "S" else size


def totals(traced: Traced) -> list[tuple[str, int, str]]:
    """What the rows add up to: words, number, and the number in short with its unit."""
    found, forward = traced.found, traced.found.cost(FORWARD)
    lines = [("parameters", found.params, count_text(found.params))]
    lines.append(("FLOPs forward, full square", forward.full, flops_text(forward.full)))
    if traced.w.training:
        backward, again = found.cost(BACKWARD).full, found.cost(AGAIN).full
        lines.append(("FLOPs backward", backward, flops_text(backward)))
        if again:
            lines.append(("FLOPs of the forward again", again, flops_text(again)))
        lines.append(("FLOPs of the model's own", forward.full + backward, flops_text(forward.full + backward)))
        lines.append(("bytes kept for the backward", found.saved_bytes, bytes_text(found.saved_bytes)))
    elif found.cache_bytes:
        lines.append(("bytes of KV cache after this pass", found.cache_bytes, bytes_text(found.cache_bytes)))
    return lines


def largest(traced: Traced) -> str:
    """One line about the largest tensor that a row makes."""
    row = traced.found.largest
    name, size = row.largest
    shape = f", {symbols(row)} = {row.shape}" if name == row.op else f", kept by {row.op}"
    return f"{name} of {row.path} ({row.stage}){shape}: {size:,} bytes ({bytes_text(size)})"
