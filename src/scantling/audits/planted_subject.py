"""The small Transformer as a subject, with every ability there is."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from scantling.audits.planted import Shape, Store, Tiny
from scantling.audits.protocol import Abilities, Cached, Change, Facts, Feed, Loss, Maps, Run, Subject


def planted(*faults: str, name: str = "", dtype: str = "float32", **shape: Any) -> Subject:
    """A small Transformer with these faults; further arguments are those of `Shape`."""
    drawn = Shape(faults=frozenset(faults), **shape)
    net = Tiny(drawn).to(getattr(torch, dtype)).eval()
    return subject_of(net, name or ", ".join(faults) or "sound", dtype)


def subject_of(net: Tiny, name: str, dtype: str = "float32") -> Subject:
    """The abilities of a small Transformer."""
    shape = net.shape
    decodes = shape.family != "encoder"
    kernels: dict[str, Run] = {"plain": net, "fast": lambda feed: net(feed, kernel="fast")}
    facts = Facts(
        vocab_size=shape.vocab_size,
        family=shape.family,
        position=shape.position,
        windows=(shape.window,) * shape.n_layers,
        context=shape.context if shape.position == "learned" else None,
        trained_length=shape.trained_length,
        tied=shape.tied,
        routed=shape.experts > 0,
        dropout=shape.dropout > 0,
        dtype=dtype,
    )
    can = Abilities(
        takes=frozenset({"mask", "positions"}),
        module=net,
        blocks=tuple(net.blocks),
        kernels=kernels,
        maps={"plain": recorded(net)},
        modes={"in training": in_training(net)},
        packed={"document ids": net},
        cached={"its cache": cached(net)} if decodes else {},
        cast=lambda wanted: subject_of(copy.deepcopy(net).to(getattr(torch, wanted)), name, wanted),
        loss=own_loss(net),
        packed_loss=None if shape.family == "encoder-decoder" else own_loss(net),
        counts_items=True,
        taught=shifted if shape.family == "encoder-decoder" else None,
        reload=reloaded(net, name, dtype),
        tables=lambda: (net.embed.weight, net.head.weight),
    )
    return Subject(name, net, facts, can)


def recorded(net: Tiny) -> Maps:
    """The maps of a pass."""

    def maps(feed: Feed) -> list[Tensor]:
        net.maps = []
        try:
            net(feed)
            return net.maps
        finally:
            net.maps = None

    return maps


def in_training(net: Tiny) -> Run:
    """A pass in training mode, under one seed."""

    def run(feed: Feed) -> Tensor:
        net.train()
        try:
            with torch.random.fork_rng():
                torch.manual_seed(5)
                out: Tensor = net(feed)
                return out
        finally:
            net.eval()

    return run


def cached(net: Tiny, how: Callable[[Tensor], Tensor] | None = None) -> Cached:
    """Pieces over one cache, which keeps what `how` makes of keys and values."""

    def run(feed: Feed, pieces: Sequence[int]) -> Tensor:
        store, outs, start = Store(how=how), [], 0
        for tokens in pieces:
            cut = slice(start, start + tokens)
            part = replace(
                feed,
                ids=feed.ids[:, cut],
                mask=None if feed.mask is None else feed.mask[:, cut],
                positions=None if feed.positions is None else feed.positions[:, cut],
            )
            outs.append(net(part, store))
            start += tokens
        return torch.cat(outs, 1)

    return run


def shifted(labels: Tensor) -> Tensor:
    """What a decoder reads to be judged on labels: token 0, then all but the last."""
    return torch.cat([torch.zeros_like(labels[:, :1]), labels[:, :-1].clamp(min=0)], 1)


def own_loss(net: Tiny, shift: int | None = None, crosses: bool = False) -> Loss:
    """Cross-entropy of position t with the label `shift` later; by default one later in a decoder alone.

    Args:
        crosses: the last token of a document is judged on the first of the next.
    """
    apart = int(net.shape.family == "decoder") if shift is None else shift

    def loss(feed: Feed, labels: Tensor, items: int | None = None) -> Tensor:
        if feed.source is not None:
            feed = replace(feed, ids=shifted(labels))
        logits = net(feed)
        wanted = torch.full_like(labels, -100)
        if apart >= 0:
            wanted[:, : labels.shape[1] - apart] = labels[:, apart:]
        else:
            wanted[:, -apart:] = labels[:, :apart]
        if feed.documents is not None and apart == 1 and not crosses:
            wanted = wanted.masked_fill(feed.documents != feed.documents.roll(-1, 1), -100)
        total = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum")
        scored = (wanted != -100).sum() if items is None else items
        return total / scored

    return loss


def reloaded(net: Tiny, name: str, dtype: str) -> Callable[[Change], Subject]:
    """Through a file of safetensors, whole or refused."""

    def again(change: Change) -> Subject:
        import tempfile

        from safetensors.torch import load_file, save_file

        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.safetensors"
            state = net.state_dict()
            if net.shape.tied:
                del state["head.weight"]
            save_file({key: value.clone() for key, value in state.items()}, path)
            change(Path(folder))
            state = load_file(path)
        new = Tiny(replace(net.shape, seed=net.shape.seed + 1)).to(getattr(torch, dtype)).eval()
        if net.shape.tied:
            state["head.weight"] = state["embed.weight"]
        new.load_state_dict(state, strict=True)
        return subject_of(new, name, dtype)

    return again
