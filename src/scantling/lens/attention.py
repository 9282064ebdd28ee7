"""Attention maps: which key each query reads, per layer and head."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from scantling.lens.hooks import ALL_REAL, Edit, capture
from scantling.lens.points import layer_number, places
from scantling.passes import Given

if TYPE_CHECKING:
    from scantling.model import Model


def attention_maps(
    lm: Model,
    ids: Any,
    layers: Iterable[int] | None = None,
    given: Given = ALL_REAL,
    *,
    stack: str | None = None,
    cross: bool = False,
    edits: Iterable[Edit] = (),
) -> dict[str, Tensor]:
    """The weights of each layer's attention, (B, H, T, S) by the path of the attention.

    They are those of the pass with its default kernel: of the asked layers they are computed again from the same
    queries, keys, mask, bias, cap and sinks. Rows add up to 1, less the share of a sink; dropout is not in them.

    Args:
        layers: numbers of layers, negative ones from the top; None for all.
        stack: ``encoder`` or ``decoder``; by default the one that the head reads.
        cross: of the attention to the source instead.

    Raises:
        ScantlingInputError: no such layer or stack, or input that does not fit the model.
    """
    wanted = None if layers is None else {layer_number(lm, layer, stack) for layer in layers}
    found = [p for p in places(lm, stack, ("cross" if cross else "attn",)) if wanted is None or p.layer in wanted]
    seen = capture(lm, ids, [f"{place.path}:weights" for place in found], given, edits)
    return {place.path: seen[f"{place.path}:weights"] for place in found}
