"""The views of `scantling lens` that change something and show what became of the answer."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from scantling.errors import ScantlingInputError
from scantling.lens.edits import BY_HEAD, ablate, add, means
from scantling.lens.hooks import Edit, capture, edited
from scantling.lens.metric import Metric
from scantling.lens.patching import Grid, Noise, patch_grid
from scantling.lens.points import chosen, layer_number, stack_of
from scantling.lens.reading import Prompt, word
from scantling.lens.sections import WIDE, Bars, Heat, Section
from scantling.lens.steer import Direction, steering

if TYPE_CHECKING:
    from scantling.model import Model


def patch_view(
    prompt: Prompt,
    corrupted: Any,
    metric: Metric,
    kind: str,
    step: Callable[[str], None] = lambda _: None,
) -> Section:
    """How much of the answer each layer and position brings back into a corrupted pass."""
    grid = patch_grid(prompt.lm, prompt.ids, corrupted, metric, kind, given=prompt.given, stack=prompt.stack, step=step)
    restored = grid.restored
    heads = kind == "heads"
    labels = [str(i) for i in grid.positions] if heads else [repr(prompt.words[i]) for i in grid.positions]
    layers = [str(i) for i in range(len(restored))]
    columns: Sequence[str] = ("layer", *labels)
    rows: list[tuple[Any, ...]] = [(i, *(round(x, 3) + 0.0 for x in row)) for i, row in enumerate(restored.tolist())]
    notes = _patch_notes(prompt, grid)
    if len(labels) > WIDE:
        columns = ("layer", "head" if heads else "token", "restored")
        best = restored.flatten().argsort(descending=True)[:20].tolist()
        rows = [(i // len(labels), labels[i % len(labels)], float(restored.flatten()[i])) for i in best]
        notes = [*notes, f"the 20 strongest of {restored.numel()} places are shown"]
    what = {"stream": "the stream after each layer", "heads": "each head, at all tokens"}.get(
        kind, f"what {kind} writes"
    )
    data = {
        "kind": kind,
        "metric": metric.name,
        "clean": grid.clean,
        "corrupted": grid.corrupted,
        "positions": list(grid.positions),
        "values": grid.values.tolist(),
        "restored": restored.tolist(),
    }
    title = f"patching {what}: share of the {metric.name} restored"
    chart = Heat(restored, layers, labels, ("layer", "head" if heads else "token"), signed=True)
    arrays = {"patch.values": grid.values, "patch.restored": restored}
    return Section("patch", title, columns, rows, data, arrays, [("share restored", chart)], notes)


def _patch_notes(prompt: Prompt, grid: Grid) -> list[str]:
    metric, lm = grid.metric, prompt.lm
    other = "" if metric.against is None else f" against {word(lm, metric.against)!r}"
    return [
        f"{metric.name} of {word(lm, metric.token)!r}{other}: {grid.clean:.4g} clean, {grid.corrupted:.4g} corrupted; "
        "0 is nothing restored, 1 all of it"
    ]


def noise_on(text: str, times: float, draws: int, seed: int) -> Noise:
    """Noise at the tokens that ``0-2,5`` names.

    Raises:
        ScantlingInputError: no such list of positions.
    """
    found: list[int] = []
    for piece in text.split(","):
        first, _, last = piece.strip().partition("-")
        if not first.isdigit() or (last and not last.isdigit()):
            raise ScantlingInputError(f"--noise {text!r}: positions are needed, as in 0-2,5")
        found += range(int(first), int(last or first) + 1)
    return Noise(sorted(set(found)), times, draws, seed)


def edits_of(lm: Model, wanted: Sequence[str], prompt: Prompt, mean: bool) -> list[Edit]:
    """Ablations by name: ``18.6`` is head 6 of layer 18, ``18.mlp`` a sublayer; else a capture point.

    ``18.mlp:hidden[5,7]`` are neurons, and ``[...]`` behind a point of heads are heads.

    Raises:
        ScantlingInputError: no such layer, head, sublayer or point.
    """
    made = []
    for name in wanted:
        point, picked = _target(lm, name)
        value = means(lm, [point], prompt.ids, prompt.given)[point] if mean else 0.0
        axis = "heads" if point.rpartition(":")[2] in BY_HEAD else "neurons"
        made.append(ablate(point, **{axis: picked}, value=value))
    return made


def _target(lm: Model, name: str) -> tuple[str, list[int] | None]:
    """The point that a name means, and which of its heads or neurons."""
    if (listed := re.fullmatch(r"(.+)\[(\d+(?:,\d+)*)\]", name)) is not None:
        point, _ = _target(lm, listed[1])
        return point, [int(i) for i in listed[2].split(",")]
    layer, _, what = name.partition(".")
    if not layer.lstrip("-").isdigit():
        (point,) = chosen(lm.parts, [name])
        return point, None
    number, (where, _) = layer_number(lm, int(layer)), stack_of(lm)
    if not what.isdigit():
        (point,) = chosen(lm.parts, [f"{where}.blocks.{number}.{what}" if what else f"{where}.blocks.{number}"])
        return point, None
    (point,) = chosen(lm.parts, [f"{where}.blocks.{number}.attn:mixed"])
    return point, [int(what)]


def ablate_view(prompt: Prompt, wanted: Sequence[str], metric: Metric, mean: bool, top: int) -> Section:
    """The answer without some heads, sublayers, or whatever passes a point."""
    edits = edits_of(prompt.lm, wanted, prompt, mean)
    how = "their mean over this text" if mean else "0"
    title = f"with {', '.join(wanted)} set to {how}"
    return _before_and_after("ablate", title, prompt, edits, metric, top)


def steer_view(
    prompt: Prompt, direction: Direction, strength: float, metric: Metric, top: int, new_tokens: int
) -> Section:
    """The answer with a direction added; and the text that is written with it and without."""
    edits = [add(direction.point, direction.vector, strength)]
    title = f"with {strength:g} x a direction of length {float(direction.vector.norm()):.4g} at {direction.point}"
    section = _before_and_after("steer", title, prompt, edits, metric, top)
    if not new_tokens or prompt.lm.card.family == "encoder":
        return section
    lm, start = prompt.lm, 1 if prompt.lm.parts.two_stacks else prompt.ids.shape[1]
    texts = [lm.generate(prompt.ids, new_tokens)[0, start:].tolist()]
    with steering(lm, direction, strength):
        texts.append(lm.generate(prompt.ids, new_tokens)[0, start:].tolist())
    said = ["".join(word(lm, i) for i in ids) for ids in texts]
    notes = [*section.notes, f"without: {said[0]!r}", f"with:    {said[1]!r}"]
    data = {**section.data, "texts": said, "point": direction.point, "strength": strength}
    arrays = {direction.point: direction.vector}
    return Section("steer", title, section.columns, section.rows, data, arrays, section.charts, notes)


def _before_and_after(
    name: str, title: str, prompt: Prompt, edits: Sequence[Edit], metric: Metric, top: int
) -> Section:
    lm, at = prompt.lm, prompt.position
    plain = prompt.logits()
    with edited(lm, *edits):
        changed = capture(lm, prompt.ids, [], prompt.given).out[0]
    before, after = plain[at].softmax(-1), changed[at].softmax(-1)
    shown = list(dict.fromkeys([*before.topk(top).indices.tolist(), *after.topk(top).indices.tolist()]))
    order = sorted(shown, key=lambda i: -float(after[i]))
    rows = [(repr(word(lm, i)), i, float(before[i]), float(after[i])) for i in order]
    numbers = [float(metric(logits[None])[0]) for logits in (plain, changed)]
    other = "" if metric.against is None else f" against {word(lm, metric.against)!r}"
    what = f"{metric.name} of {word(lm, metric.token)!r}{other}"
    divergence = float((before * (before.log() - after.log())).nansum())
    data = {
        "metric": what,
        "before": numbers[0],
        "after": numbers[1],
        "divergence": divergence,
        "tokens": [
            {"token": word(lm, i), "id": i, "before": float(before[i]), "after": float(after[i])} for i in order
        ],
    }
    labels = [repr(word(lm, i)) for i in order]
    charts = [
        ("probability before", Bars(labels, [row[2] for row in rows], "")),
        ("probability after", Bars(labels, [row[3] for row in rows], "")),
    ]
    notes = [f"{what}: {numbers[0]:.4g} before, {numbers[1]:.4g} after; KL(before || after) {divergence:.4g} nats"]
    arrays = {f"{name}.logits": torch.stack((plain[at], changed[at]))}
    return Section(name, title, ("token", "id", "before", "after"), rows, data, arrays, charts, notes)
