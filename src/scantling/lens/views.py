"""The views of `scantling lens` that read one text and change nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from scantling.errors import ScantlingInputError
from scantling.lens.attribution import attribute, vocabulary_head
from scantling.lens.distribution import next_tokens
from scantling.lens.induction import head_scores
from scantling.lens.logit_lens import Reading, logit_lens
from scantling.lens.reading import Prompt, word
from scantling.lens.residual import decompose, wide
from scantling.lens.sections import WIDE, Bars, Heat, Section

if TYPE_CHECKING:
    from scantling.model import Model


def answers(prompt: Prompt, token: int | None, against: int | None, position: int) -> tuple[int, int]:
    """The token that is looked at and the one it is compared with: as named, else the likeliest and the next one.

    Raises:
        ScantlingInputError: both are the same, or the head gives no logits of a vocabulary.
    """
    vocabulary_head(prompt.lm)
    order = prompt.logits()[position].topk(3).indices.tolist()
    first = order[0] if token is None else token
    second = next(i for i in order if i != first) if against is None else against
    if first == second:
        raise ScantlingInputError(f"{word(prompt.lm, first)!r} is compared with itself: its difference is always 0")
    return first, second


def next_view(prompt: Prompt, temperatures: Sequence[float], top: int) -> Section:
    """The distribution at the position, under each temperature."""
    at = prompt.position
    found = next_tokens(prompt.lm, prompt.ids, prompt.given, temperatures=temperatures, position=at, top=top)
    ids = [int(i) for i in found.ids]
    words = [word(prompt.lm, i) for i in ids]
    shares = found.probabilities.tolist()
    rows = [(repr(text), i, *column) for text, i, *column in zip(words, ids, *shares, strict=True)]
    names = [f"T={temperature:g}" for temperature in temperatures]
    data = []
    for temperature, entropy, share in zip(temperatures, found.entropies, shares, strict=True):
        tokens = [{"token": text, "id": i, "probability": p} for text, i, p in zip(words, ids, share, strict=True)]
        data.append({"temperature": temperature, "entropy": float(entropy), "tokens": tokens})
    labels = [repr(text) for text in words]
    entropies = ", ".join(f"{n} {float(e):.3f}" for n, e in zip(names, found.entropies, strict=True))
    encoder = prompt.lm.card.family == "encoder"
    return Section(
        "next",
        f"what stands at token {at}" if encoder else f"what comes after token {at}, {prompt.words[at]!r}",
        ("token", "id", *names),
        rows,
        data,
        {"next.probabilities": found.probabilities, "next.ids": found.ids},
        [(f"probability, {name}", Bars(labels, share, "")) for name, share in zip(names, shares, strict=True)],
        [f"entropy in nats: {entropies}"],
    )


def lens_view(prompt: Prompt, tuned: dict[str, Tensor] | None, token: int, top: int) -> Section:
    """What the head would say after each layer, at the position."""
    at, lm = prompt.position, prompt.lm
    readings = logit_lens(lm, prompt.ids, prompt.given, positions=[at], tuned=tuned, top=max(top, 1), targets=[token])
    rows, data = [], []
    for reading in readings:
        words = [word(lm, int(i)) for i in reading.top[0]]
        first = float(reading.probabilities[0, 0])
        rows.append(
            (
                _layer(reading.point),
                repr(words[0]),
                first,
                ", ".join(map(repr, words[1:4])),
                float(reading.target[0]),
                int(reading.ranks[0]),
                float(reading.divergence[0]),
            )
        )
        data.append(_reading(reading, words))
    name = repr(word(lm, token))
    chart = Bars([row[0] for row in rows], [row[4] for row in rows], "")
    return Section(
        "logit-lens",
        f"{'tuned' if tuned else 'logit'} lens at token {at}",
        ("after", "likeliest", "probability", "then", f"p({name})", "its rank", "KL to the answer"),
        rows,
        data,
        {"logit-lens.top": torch.cat([r.top for r in readings])},
        [(f"probability of {name} after each layer", chart)],
    )


def lens_grid_view(prompt: Prompt, tuned: dict[str, Tensor] | None) -> Section:
    """The likeliest token after each layer at every token of the text."""
    lm, words = prompt.lm, prompt.words
    readings = logit_lens(lm, prompt.ids, prompt.given, tuned=tuned, top=1)
    texts = [[word(lm, int(i)) for i in reading.top[:, 0]] for reading in readings]
    shares = torch.stack([reading.probabilities[:, 0] for reading in readings])
    first = max(0, len(words) - WIDE)
    names = [_layer(reading.point) for reading in readings]
    rows = [(name, *(repr(text) for text in row[first:])) for name, row in zip(names, texts, strict=True)]
    data = [
        {
            "point": reading.point,
            "top": [
                {"token": text, "id": int(i), "probability": float(p)}
                for text, i, p in zip(row, reading.top[:, 0], reading.probabilities[:, 0], strict=True)
            ],
        }
        for reading, row in zip(readings, texts, strict=True)
    ]
    chart = Heat(shares, names, words, ("after", "token"), texts=texts)
    shown = f"the last {WIDE} of {len(words)} tokens are shown" if first else "the likeliest token in each place"
    return Section(
        "logit-lens",
        f"{'tuned' if tuned else 'logit'} lens at every token",
        ("after", *(f"{i} {text!r}" for i, text in enumerate(words) if i >= first)),
        rows,
        data,
        {"logit-lens.top": torch.stack([r.top[:, 0] for r in readings]), "logit-lens.probabilities": shares},
        [("the likeliest token after each layer, the darker the surer", chart)],
        [shown],
    )


def _layer(point: str) -> str:
    return "embeddings" if point.endswith(":in") else f"layer {point.rpartition('.')[2]}"


def _reading(reading: Reading, words: Sequence[str]) -> dict[str, object]:
    top = [
        {"token": text, "id": int(i), "probability": float(p)}
        for text, i, p in zip(words, reading.top[0], reading.probabilities[0], strict=True)
    ]
    numbers = {name: float(getattr(reading, name)[0]) for name in ("target", "entropy", "divergence")}
    return {"point": reading.point, "top": top, **numbers, "rank": int(reading.ranks[0])}


def attribution_view(prompt: Prompt, token: int, against: int, top: int) -> Section:
    """What each head and MLP adds to a logit, and to its difference from another."""
    at, lm = prompt.position, prompt.lm
    found = attribute(lm, prompt.ids, [token, against], prompt.given, position=at)
    logit, difference = found.values[:, 0], found.values[:, 0] - found.values[:, 1]
    order = difference.abs().argsort(descending=True)[:top].tolist()
    a, b = (repr(word(lm, i)) for i in (token, against))
    rows = [(found.terms[i].name, float(logit[i]), float(difference[i])) for i in order]
    rest = len(found.terms) - len(order)
    if rest:
        left = (float(logit.sum() - logit[order].sum()), float(difference.sum() - difference[order].sum()))
        rows.append((f"the other {rest}", *left))
    rows.append(("sum", float(logit.sum()), float(difference.sum())))
    data = [
        {**asdict(term), "logit": float(x), "difference": float(y)}
        for term, x, y in zip(found.terms, logit, difference, strict=True)
    ]
    notes = [f"the sums differ from the model's logits by {found.error:.1e} at most"]
    if found.softcap is not None:
        notes.append(f"sums are of the logits before the head's cap of {found.softcap:g}")
    strongest = Bars([row[0] for row in rows[: len(order)]], [row[2] for row in rows[: len(order)]], "logits")
    return Section(
        "attribution",
        f"what adds to the logit of {a}, and to its lead over {b}, at token {at}",
        ("written by", f"logit of {a}", f"minus {b}"),
        rows,
        {"token": token, "against": against, "terms": data, "error": found.error, "softcap": found.softcap},
        {"attribution.values": found.values},
        [
            (f"lead of {a} over {b}: strongest terms", strongest),
            (f"lead of {a} over {b} by head and MLP", _by_layer(data)),
        ],
        notes,
    )


def _by_layer(terms: Sequence[Mapping[str, Any]]) -> Heat:
    """Heads and the MLP of each layer, side by side."""
    placed = [t for t in terms if t["layer"] is not None and (t["head"] is not None or t["kind"] == "mlp")]
    placed = [t for t in placed if t["kind"] != "cross"]
    layers = 1 + max((t["layer"] for t in placed), default=0)
    heads = 1 + max((t["head"] for t in placed if t["head"] is not None), default=-1)
    values = torch.zeros(layers, heads + 1)
    for t in placed:
        values[t["layer"], heads if t["head"] is None else t["head"]] += t["difference"]
    columns = [*map(str, range(heads)), "MLP"]
    return Heat(values, [str(i) for i in range(layers)], columns, ("layer", "head"), signed=True)


def residual_view(prompt: Prompt) -> Section:
    """The stream in front of the head, as the sum of what wrote it."""
    found = decompose(prompt.lm, prompt.ids, prompt.given, stack=prompt.stack, positions=[prompt.position])
    values, stream = found.values[:, 0, 0], wide(found.stream[0, 0])
    sizes, shares = values.norm(dim=-1), values @ stream / stream.square().sum()
    names = [term.name for term in found.terms]
    rows = [(name, float(size), float(share)) for name, size, share in zip(names, sizes, shares, strict=True)]
    where = "after the final norm" if found.normed else "on top of the stack"
    return Section(
        "residual",
        f"the stream at token {prompt.position} {where}, by what wrote it",
        ("written by", "length", "share of the stream"),
        [*rows, ("sum", float(stream.norm()), float(shares.sum()))],
        {"terms": [{"name": n, "length": s, "share": x} for n, s, x in rows], "error": found.error},
        {"residual.terms": values, "residual.stream": stream},
        [("share of the stream", Bars(names, shares.tolist(), ""))],
        [f"the terms differ from the stream by {found.error:.1e} of its largest number at most"],
    )


def induction_view(lm: Model, length: int, rows: int, seed: int, top: int) -> Section:
    """Induction and previous-token scores of every head, on repeated random tokens."""
    scores = head_scores(lm, length=length, rows=rows, seed=seed)
    best = sorted(scores, key=lambda s: -s.induction)[:top]
    before = sorted(scores, key=lambda s: -s.previous)[:top]
    table = [
        (f"{a.layer}.{a.head}", a.induction, f"{b.layer}.{b.head}", b.previous)
        for a, b in zip(best, before, strict=True)
    ]
    layers, heads = 1 + max(s.layer for s in scores), 1 + max(s.head for s in scores)
    charts = []
    for name in ("induction", "previous"):
        values = torch.zeros(layers, heads)
        for s in scores:
            values[s.layer, s.head] = getattr(s, name)
        labels = [str(i) for i in range(layers)], [str(i) for i in range(heads)]
        charts.append((f"{name} score by head", Heat(values, *labels, ("layer", "head"))))
    return Section(
        "induction",
        f"heads on {rows} x {length} random tokens, repeated once (seed {seed})",
        ("layer.head", "induction", "layer.head ", "previous token"),
        table,
        [asdict(s) for s in scores],
        {},
        charts,
        ["scores are mean attention weights, from 0 to 1"],
    )
