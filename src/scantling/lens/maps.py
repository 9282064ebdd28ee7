"""The view of `scantling lens` that shows attention maps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from scantling.errors import ScantlingInputError
from scantling.lens.attention import attention_maps
from scantling.lens.points import heads_at, layer_number, places
from scantling.lens.reading import Prompt
from scantling.lens.sections import WIDE, Heat, Section

LARGEST = 20_000_000
"""Weights of the maps that a view makes at once."""


def attention_view(prompt: Prompt, layers: Sequence[int] | None, head: int | None, top: int, cross: bool) -> Section:
    """Which tokens each head reads; of one head, its whole map."""
    check_size(prompt, layers, cross)
    maps = attention_maps(prompt.lm, prompt.ids, layers, prompt.given, stack=prompt.stack, cross=cross)
    if not maps:
        raise ScantlingInputError(f"{prompt.lm.card.name} has no {'cross-' if cross else ''}attention to show")
    for path in maps:
        if head is not None and not 0 <= head < heads_at(prompt.lm, path):
            raise ScantlingInputError(f"head {head}: {path} has heads 0 to {heads_at(prompt.lm, path) - 1}")
    keys = prompt.source_words if cross else prompt.words
    arrays = {f"{path}:weights": weights[0] for path, weights in maps.items()}
    if head is not None and len(maps) == 1:
        return _one_map(prompt, next(iter(arrays)), head, arrays, keys)
    at = prompt.position
    rows = []
    for path, weights in maps.items():
        for number, row in enumerate(weights[0, :, at].float()):
            if head is not None and number != head:
                continue
            ahead = row.clone()
            if not cross and at > 0:
                ahead[0] = -1
            key = int(ahead.argmax())
            rows.append((_path_layer(path), number, repr(keys[key]), key, float(row[key]), float(row[0])))
    rows.sort(key=lambda row: -row[4])
    what = "of the source" if cross else "other than the first"
    note = f"{len(rows)} heads; shown are the {min(top, len(rows))} with the largest weight on one token {what}"
    mean = torch.stack([weights[0].float().mean(0) for weights in maps.values()]).mean(0)
    return Section(
        "cross-attention" if cross else "attention",
        f"what heads read at token {at}, {prompt.words[at]!r}",
        ("layer", "head", "reads", "at", "weight", "on the first"),
        rows[:top],
        arrays,
        arrays,
        [("attention, mean over layers and heads", Heat(mean, prompt.words, keys, ("query", "key")))],
        [note],
    )


def check_size(prompt: Prompt, layers: Sequence[int] | None = None, cross: bool = False) -> None:
    """Refuse maps that are too large to be made all at once.

    Raises:
        ScantlingInputError: they have more than `LARGEST` weights.
    """
    lm, queries = prompt.lm, len(prompt.read)
    wanted = None if layers is None else {layer_number(lm, layer, prompt.stack) for layer in layers}
    found = [
        p for p in places(lm, prompt.stack, ("cross" if cross else "attn",)) if wanted is None or p.layer in wanted
    ]
    count = sum(p.part.n_heads for p in found) * queries * (prompt.ids.shape[1] if cross else queries)
    if count > LARGEST:
        raise ScantlingInputError(
            f"the maps of {len(found)} layers over {queries} tokens have {count:,} weights, more than {LARGEST:,}: "
            "name some layers with --layer"
        )


def _path_layer(path: str) -> int:
    return int(path.split(".")[2])


def _one_map(prompt: Prompt, name: str, head: int, arrays: dict[str, Tensor], keys: Sequence[str]) -> Section:
    weights, words = arrays[name][head].float(), prompt.words
    columns: Sequence[str] = ("query", *(repr(key) for key in keys))
    rows = [(repr(text), *(round(x, 4) for x in row)) for text, row in zip(words, weights.tolist(), strict=True)]
    if len(keys) > WIDE:
        columns = ("query", "reads", "weight", "then", "weight")
        rows = []
        for text, row in zip(words, weights, strict=True):
            best = row.topk(min(2, len(row)))
            pairs = [(repr(keys[int(i)]), float(p)) for p, i in zip(best.values, best.indices, strict=True)]
            rows.append((repr(text), *(cell for pair in pairs for cell in pair)))
    path = name.rpartition(":")[0]
    title = f"attention of {path}, head {head}"
    heat = Heat(weights, words, keys, ("query", "key"))
    kind = "cross-attention" if ".cross" in path else "attention"
    return Section(kind, title, columns, rows, {name: arrays[name]}, arrays, [(title, heat)])
