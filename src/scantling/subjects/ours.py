"""A model of ours as the subject of an audit."""

from __future__ import annotations

import copy
import importlib.util
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scantling.audits import Abilities, Facts, Feed, Subject
from scantling.audits.protocol import ABSOLUTE, Cached, Change, Loss, Maps, Position, Run
from scantling.cards import Card
from scantling.cards.rules import position_limit
from scantling.errors import need
from scantling.loading import load
from scantling.model import Model
from scantling.parts.heads import Head
from scantling.parts.part import Workload
from scantling.saving import save
from scantling.subjects import caches
from scantling.tensor.cache import Cache
from scantling.tensor.context import Context
from scantling.train.forward import How, Inputs, forward
from scantling.train.scoring import IGNORED
from scantling.visibility import Visibility

KERNELS = ("fused", "reference")


def ours(lm: Model, name: str | None = None, sample: Tensor | None = None) -> Subject:
    """A loaded model, with everything that it can do.

    Args:
        sample: (1, T) ids of real text, where the weights are trained.
    """
    stack = lm.net.decoder if lm.parts.decoder is not None else lm.net.encoder
    scores = isinstance(lm.parts.head, Head)
    decodes = lm.card.family != "encoder"
    can = Abilities(
        takes=frozenset({"mask", "positions"}),
        module=lm.net,
        blocks=tuple(stack.blocks),  # type: ignore[union-attr, arg-type]
        kernels={kernel: _run(lm, kernel=kernel) for kernel in KERNELS},
        maps={kernel: _maps(lm, kernel) for kernel in KERNELS},
        modes={"in training": _in_training(lm), "while maps are recorded": _run(lm, "reference", recorder=_passed_on)},
        packed={"document_ids": _run(lm)} if _per_token(lm) else {},
        cached={"its cache": _cached(lm), **caches.ways(lm, any(_windows(lm) or ()))} if decodes else {},
        kept=caches.narrow(lm),
        cast=cache(lambda dtype: ours(_cast(lm, dtype), name, sample)),
        loss=_loss(lm) if scores else None,
        counts_items=scores,
        packed_loss=_loss(lm) if scores and not lm.parts.two_stacks else None,
        taught=lm.shifted if lm.parts.two_stacks and lm.start_id is not None else None,
        reload=_reload(lm, name, sample),
        quantised=_quantised(lm, name),
        tables=_tables(lm) if scores else None,
        sample=sample,
    )
    return Subject(name or lm.card.name, _run(lm), facts(lm), can)


def facts(lm: Model) -> Facts:
    """What the card says."""
    card, position = lm.card, lm.card.position
    scaling = getattr(position, "scaling", None)
    trained = getattr(scaling, "trained_length", None)
    stretched = getattr(getattr(scaling, "__struct_config__", None), "tag", None) in ("dynamic", "longrope")
    return Facts(
        vocab_size=card.vocab_size,
        family=card.family,
        position=_position(card),
        windows=_windows(lm),
        sparse=_sparse(lm),
        context=position_limit(card),
        trained_length=trained or card.context,
        switch=trained if stretched else None,
        tied=card.tied if card.head.kind == "lm" else None,
        routed=any(hasattr(part, "router") for _, part, _ in lm.parts.walk()),
        sinks=any(name.endswith(".sinks") for name in lm.parts.named_weights),
        dropout=_drops(card),
        pad_id=getattr(position, "pad_id", None),
        per_token=_per_token(lm),
        dtype=str(lm.dtype).removeprefix("torch."),
    )


def _position(card: Card) -> Position:
    """What kind of positions acts: those of attention do not where there are no layers."""
    kind: Any = card.position.__struct_config__.tag
    return kind if kind in ABSOLUTE or card.n_layers else "none"


def _per_token(lm: Model) -> bool:
    return lm.card.head.kind in ("lm", "tokens", "replaced", "none")


SHOWS = 0.05
"""Probability of dropout from which a pass of some dozen vectors cannot but show it."""


def _drops(card: Card) -> bool:
    inner = max(card.dropout.attention, card.dropout.residual) if card.n_layers else 0.0
    return max(card.dropout.embedding, inner) >= SHOWS


def _seen(lm: Model) -> list[Visibility]:
    """What each layer of the stack that is asked reads."""
    stack = lm.parts.decoder or lm.parts.encoder
    assert stack is not None
    return [next(p.visibility for _, p, _ in block.walk() if hasattr(p, "visibility")) for block in stack.blocks]


def _sparse(lm: Model) -> bool:
    return any(seen.chunk is not None or seen.stride is not None for seen in _seen(lm))


def _windows(lm: Model) -> tuple[int | None, ...] | None:
    """Per layer; None where a layer reads otherwise than all or a window."""
    return None if _sparse(lm) else tuple(seen.window for seen in _seen(lm))


def _context(lm: Model, feed: Feed, kernel: str, **more: Any) -> Context:
    mask = None if feed.mask is None or bool(feed.mask.all()) else feed.mask.bool()
    context = Context.of(
        feed.ids,
        positions=feed.positions if feed.documents is None else None,
        padding=mask,
        kernel_name=kernel,
        documents=feed.documents,
        **more,
    )
    if feed.source is not None and feed.source_mask is not None and not bool(feed.source_mask.all()):
        context.source_padding = feed.source_mask.bool()
    if feed.source is not None and feed.documents is not None:
        context.source_documents = torch.zeros_like(feed.source)
    return context


def _run(lm: Model, kernel: str = "fused", **more: Any) -> Run:
    def run(feed: Feed) -> Tensor:
        return _flat(lm, lm.net(feed.ids, _context(lm, feed, kernel, **more), feed.source))

    return run


def _flat(lm: Model, out: Tensor) -> Tensor:
    """(B, T, n), or (B, 1, n) of a head that gives one answer per row."""
    if out.dim() == 3:
        return out
    return out[..., None] if _per_token(lm) else out[:, None]


def _passed_on(_: str, value: Tensor) -> Tensor:
    return value


def _maps(lm: Model, kernel: str) -> Maps:
    """Of the stack that the head reads; for the fused kernel they are computed again."""
    side, stack = ("decoder", lm.parts.decoder) if lm.parts.decoder is not None else ("encoder", lm.parts.encoder)
    paths = [f"{side}.blocks.{i}.attn" for i in range(len(stack.blocks))] if stack is not None else []

    def maps(feed: Feed) -> list[Tensor]:
        found: dict[str, Tensor] = {}

        def record(path: str, value: Tensor) -> Tensor:
            found[path] = value
            return value

        context = _context(lm, feed, kernel)
        context.observe(record, shown=paths)
        lm.net(feed.ids, context, feed.source)
        return [found[f"{path}:weights"] for path in paths]

    return maps


def _in_training(lm: Model) -> Run:
    plain = _run(lm, training=True)

    def run(feed: Feed) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            return plain(feed)

    return run


def _cached(lm: Model) -> Cached:
    """Every logit of pieces over one cache."""

    def run(feed: Feed, pieces: Sequence[int]) -> Tensor:
        source = None if feed.source is None else feed.source.shape[1]
        shapes = lm.parts.named_state(Workload(batch=len(feed.ids), tokens=sum(pieces), source=source))
        store, outs, start = Cache(shapes, lm.dtype, lm.device), [], 0
        for tokens in pieces:
            cut = slice(start, start + tokens)
            part = replace(
                feed,
                ids=feed.ids[:, cut],
                mask=None if feed.mask is None else feed.mask[:, : start + tokens],
                positions=None if feed.positions is None else feed.positions[:, cut],
            )
            context = _context(lm, part, "fused", cache=store)
            outs.append(lm.net(part.ids, context, None if start else feed.source))
            store.advance(tokens)
            start += tokens
        return torch.cat(outs, 1)

    return run


def _loss(lm: Model) -> Loss:
    """`lm.loss`; with a count of tokens, or where gradients are asked for, what training computes."""

    def loss(feed: Feed, labels: Tensor, items: int | None = None) -> Tensor:
        if items is None and not torch.is_grad_enabled():
            if feed.documents is not None:
                return lm.loss(feed.ids, labels, document_ids=feed.documents)
            read, mask = (feed.ids, feed.mask) if feed.source is None else (feed.source, feed.source_mask)
            return lm.loss(read, labels, mask)
        placed = labels
        if lm.card.family == "decoder":
            placed = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], IGNORED)], 1)
        judged = int((placed != IGNORED).sum())
        read = feed.ids if feed.source is None else lm.shifted(labels)
        batch = Inputs(read, placed, judged, documents=feed.documents, source=feed.source)
        return forward(lm.net, lm.parts, batch, items or judged, How(), training=False).objective

    return loss


def _cast(lm: Model, dtype: str) -> Model:
    return _with(lm, copy.deepcopy(lm.net).to(getattr(torch, dtype)))


def _with(lm: Model, net: torch.nn.Module) -> Model:
    return Model(lm.card, lm.parts, net, lm.tokenizer, start_id=lm.start_id)


BLOCK = 32
"""Values that share a scale in the block formats that are asked."""


def _quantised(lm: Model, name: str | None) -> dict[str, tuple[Callable[[], Subject], float]]:
    """The weights as GGUF's blocks of 8 and 4 bits hold them, where every matrix divides into blocks."""
    matrices = [p for p in lm.net.parameters() if p.dim() >= 2]
    if importlib.util.find_spec("gguf") is None or any(p.shape[-1] % BLOCK for p in matrices):
        return {}
    return {kind: (cache(lambda kind=kind: ours(_in_blocks(lm, kind), name)), bits) for kind, bits in _KINDS.items()}


_KINDS = {"Q8_0": 8.0, "Q4_0": 4.0}


def _in_blocks(lm: Model, kind: str) -> Model:
    quants = need("gguf.quants", "quantise weights")
    types = need("gguf", "quantise weights").GGMLQuantizationType
    twin = copy.deepcopy(lm.net)
    with torch.no_grad():
        for p in twin.parameters():
            if p.dim() >= 2:
                packed = quants.quantize(p.float().cpu().numpy(), types[kind])
                p.copy_(torch.from_numpy(quants.dequantize(packed, types[kind])).to(p))
    return _with(lm, twin)


def _reload(lm: Model, name: str | None, sample: Tensor | None) -> Callable[[Change], Subject]:
    def again(change: Change) -> Subject:
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder) / "model"
            save(lm, place)
            change(place)
            return ours(load(place), name, sample)

    return again


def _tables(lm: Model) -> Callable[[], tuple[Tensor, Tensor]] | None:
    weights = dict(lm.net.named_parameters())
    table = weights["embed.weight" if lm.parts.target_embed is None else "target_embed.weight"]
    head = weights.get("head.matrix.weight", table)
    return None if head.shape != table.shape else lambda: (table, head)
