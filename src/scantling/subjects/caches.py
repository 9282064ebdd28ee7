"""The ways in which a model of ours decodes: sessions, blocks of a cache that rows share, the compiled pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from scantling.audits.protocol import Cached, Feed, Narrow
from scantling.errors import ScantlingInputError
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
    found["blocks"] = _paged(lm)
    if lm.dtype == torch.float32 and why_not(lm) is None:
        found["the compiled pass"] = _session(_compiled(lm))
    return found


def narrow(lm: Model) -> dict[str, Narrow]:
    """Caches in 8 bits, each beside blocks whose vectors are moved at random by as much as 8 bits round them."""
    if lm.reads_prefix or lm.card.family == "encoder":
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
        batch, read = len(feed.ids), _lengths(feed)
        tables, sources = _between(batch, -(-sum(pieces) // SIZE)), _between(batch, -(-max(read) // SIZE))
        shapes, place = lm.parts.named_state(Workload(tokens=SIZE)), (lm.dtype, lm.device, numbers)
        counts = sum(map(len, tables)), sum(map(len, sources))
        cache = PagedCache(shapes, counts[0], *place, lm.parts.source_slots, counts[1])
        if made is not None:
            cache.stores = {path: made(tuple(kept.shape)) for path, kept in cache.stores.items()}
        pasts, outs, start = [0] * batch, list[Tensor](), 0

        def piece(rows: list[int], ids: Tensor) -> Tensor:
            texts = [tables[row] for row in rows], [pasts[row] for row in rows]
            of_source = [sources[row] for row in rows], [read[row] for row in rows]
            view = cache.rows(*texts, SIZE, *(of_source if max(read) else ()))
            places = torch.tensor(texts[1], device=ids.device)[:, None]
            context = Context.of(ids, positions=places + torch.arange(ids.shape[1], device=ids.device), cache=view)
            source = None if feed.source is None or pasts[rows[0]] else feed.source[rows, : max(of_source[1])]
            out: Tensor = lm.net(ids, context, source)
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


def _between(rows: int, blocks: int) -> list[list[int]]:
    """So many blocks of each row, between those of the others."""
    return [[row + rows * block for block in range(blocks)] for row in range(rows)]


def _lengths(feed: Feed) -> list[int]:
    """Tokens of each row's source; 0 where there is none.

    Raises:
        ScantlingInputError: padding on the left, which the engine never has.
    """
    if feed.source is None:
        return [0] * len(feed.ids)
    if feed.source_mask is None:
        return [feed.source.shape[1]] * len(feed.ids)
    real = feed.source_mask.bool()
    if not bool((real[:, :-1] | ~real[:, 1:]).all()):
        raise ScantlingInputError("sources in blocks are padded on the right")
    found: list[int] = real.sum(-1).tolist()
    return found


class _Moved(Plain):
    """Values that are moved at random by up to half a step of 8 bits when they are kept."""

    draw = torch.Generator().manual_seed(11)

    def put(self, index: Any, new: Tensor) -> None:
        step = new.abs().amax(-1, keepdim=True) / (2 ** (EIGHT - 1) - 1)
        errors = torch.rand(new.shape, generator=self.draw).to(new) - 0.5
        super().put(index, new + errors * step)
