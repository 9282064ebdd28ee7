"""The ways in which a model of ours decodes: sessions, blocks of a cache that rows share, the compiled pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from scantling.audits.protocol import Cached, Feed, Narrow
from scantling.generate.keeping import Keeping
from scantling.generate.packed import pack, why_not
from scantling.generate.session import Session, Source
from scantling.parts.part import Workload
from scantling.tensor.context import Context
from scantling.tensor.paged import PagedCache
from scantling.tensor.store import Plain, Store

if TYPE_CHECKING:
    from scantling.model import Model

SIZE = 4
"""Positions of a block: few, so that short rows have several."""
EIGHT = 8.0

Sessions = Callable[[int, int, Source | None], Any]
"""A session for so many rows of so many positions, and a source."""


def ways(lm: Model, rings: bool) -> dict[str, Cached]:
    """Everything that decodes as `generate` and the engine do, by name.

    Args:
        rings: a layer has a window, so that rings differ from a whole cache.
    """
    if lm.reads_prefix:
        # A session takes the first piece for the prefix, which no plain pass has.
        return {}
    found = {"a session": _session(_kept(lm, Keeping()))}
    if rings:
        found["a session with rings"] = _session(_kept(lm, Keeping("ring")))
    if not lm.parts.two_stacks:
        found["blocks"] = _paged(lm)
    if lm.dtype == torch.float32 and why_not(lm) is None:
        found["the compiled pass"] = _session(_compiled(lm))
    return found


def narrow(lm: Model) -> dict[str, Narrow]:
    """Caches in 8 bits, each beside blocks whose vectors are moved at random by as much as 8 bits round them."""
    if lm.reads_prefix or lm.parts.two_stacks or lm.card.family == "encoder":
        return {}
    moved = _paged(lm, made=lambda shape: _Moved(shape, lm.dtype, lm.device))
    return {
        "a session in 8 bits": Narrow(_session(_kept(lm, Keeping("full", "int8"))), moved, EIGHT),
        "blocks in 8 bits": Narrow(_paged(lm, "int8"), moved, EIGHT),
    }


def _kept(lm: Model, keeping: Keeping) -> Sessions:
    return lambda rows, positions, source: Session(lm, rows, positions, source=source, keeping=keeping)


def _compiled(lm: Model) -> Sessions:
    """Sessions of the compiled pass over the weights as they are now: they are packed again when one has changed."""
    held: dict[tuple[int, ...], Any] = {}

    def session(rows: int, positions: int, _: Source | None) -> Any:
        now = tuple(p._version for p in lm.net.parameters())
        if now not in held:
            held.clear()
            held[now] = pack(lm, "f32", "exact")
        return held[now].session(lm, rows, positions)

    return session


def _session(make: Sessions) -> Cached:
    """Every logit; behind padding the last one of each piece."""

    def run(feed: Feed, pieces: Sequence[int]) -> Tensor:
        source = None
        if feed.source is not None:
            source = Source(feed.source, None if feed.source_mask is None else feed.source_mask.bool())
        session = make(len(feed.ids), sum(pieces), source)
        outs, start = [], 0
        for tokens in pieces:
            ids = feed.ids[:, start : start + tokens]
            if feed.mask is None:
                outs.append(session.score(ids))
            elif start:
                outs.append(session.score(ids)[:, -1:])
            else:
                outs.append(session.prefill(ids, feed.mask[:, :tokens])[:, None])
            start += tokens
        return torch.cat(outs, 1)

    return run


def _paged(lm: Model, numbers: str = "plain", made: Callable[[tuple[int, ...]], Store] | None = None) -> Cached:
    """Every logit over a cache in blocks, those of the rows between each other; behind padding, which the engine never
    reads, the last one of each piece, each row's beginning by itself and the rest together."""

    def run(feed: Feed, pieces: Sequence[int]) -> Tensor:
        batch, total = len(feed.ids), sum(pieces)
        count = -(-total // SIZE)
        cache = PagedCache(lm.parts.named_state(Workload(tokens=SIZE)), batch * count, lm.dtype, lm.device, numbers)
        if made is not None:
            cache.stores = {path: made(tuple(kept.shape)) for path, kept in cache.stores.items()}
        tables = [[row + batch * block for block in range(count)] for row in range(batch)]
        pasts, outs, start = [0] * batch, list[Tensor](), 0

        def piece(rows: list[int], ids: Tensor) -> Tensor:
            view = cache.rows([tables[row] for row in rows], [pasts[row] for row in rows], SIZE)
            places = torch.tensor([pasts[row] for row in rows], device=ids.device)[:, None]
            context = Context.of(ids, positions=places + torch.arange(ids.shape[1], device=ids.device), cache=view)
            out: Tensor = lm.net(ids, context, None)
            for row in rows:
                pasts[row] += ids.shape[1]
            return out

        for tokens in pieces:
            ids = feed.ids[:, start : start + tokens]
            real = None if feed.mask is None else feed.mask[:, start : start + tokens].bool()
            if real is None:
                outs.append(piece([*range(batch)], ids))
            elif bool(real.all()):
                outs.append(piece([*range(batch)], ids)[:, -1:])
            else:
                outs.append(torch.cat([piece([row], ids[row, real[row]][None])[:, -1:] for row in range(batch)]))
            start += tokens
        return torch.cat(outs, 1)

    return run


class _Moved(Plain):
    """Values that are moved at random by up to half a step of 8 bits when they are kept."""

    draw = torch.Generator().manual_seed(11)

    def put(self, index: Any, new: Tensor) -> None:
        step = new.abs().amax(-1, keepdim=True) / (2 ** (EIGHT - 1) - 1)
        errors = torch.rand(new.shape, generator=self.draw).to(new) - 0.5
        super().put(index, new + errors * step)
