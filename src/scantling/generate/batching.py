"""Continuous batching: requests join and leave at any step, over a paged cache of a fixed size.

A step is at most so many tokens of prompts, and one token for every request that is past its prompt; so a long prompt
delays the others by a piece and not by itself. Requests begin in the order in which they came. Where the cache is full,
the one that began last gives its blocks back and is read again later.

The prompt of an encoder-decoder is a source. It is read both ways, so it cannot be cut: one that is longer than a piece
goes through whole and delays the others by its own length; short ones go through together. What is kept of a source has
blocks of its own until its request is over, so that none is encoded twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from scantling.errors import ScantlingInputError
from scantling.generate.limits import Limits
from scantling.generate.packed_pages import PackedPages
from scantling.generate.pages import Pages
from scantling.generate.request import Handle, Request, ids_of, sources_of
from scantling.generate.room import check_writes
from scantling.generate.session import follows_length, positioned, renewals
from scantling.tensor.context import Context
from scantling.tensor.paged import PagedCache
from scantling.tensor.pages import for_pass

if TYPE_CHECKING:
    from scantling.generate.compiled import Paged
    from scantling.model import Model


__all__ = ["Engine", "Limits", "in_order"]


class Engine:
    """Decodes requests together. One thread steps it; `submit` and `Handle.cancel` take effect at the next step.

    Attributes:
        waiting, prefilling, decoding: requests by where they stand.
        blocks, sources: of the cache, those of texts, and of an encoder-decoder those of its sources.
        preempted: how often a request gave its blocks back.
        shared: positions that were not computed because another request had them.
    """

    def __init__(self, model: Model, limits: Limits | None = None) -> None:
        """
        Raises:
            ScantlingInputError: no model that writes text, or no limits.
        """
        if not hasattr(model, "card") or not hasattr(model, "parts"):
            raise ScantlingInputError(f"{model!r} is no model; give what scantling.load returns")
        if limits is not None and not isinstance(limits, Limits):
            raise ScantlingInputError(f"limits is {limits!r}; a scantling.generate.Limits is needed")
        check_writes(model)
        self.model, self.limits = model, limits or Limits()
        self.waiting: deque[Handle] = deque()
        self.prefilling: deque[Handle] = deque()
        self.decoding: list[Handle] = []
        self.preempted = self.shared = self._submitted = 0
        self._scaled = [part.position for part in positioned(model) if getattr(part.position, "scaling", None)]
        self._renewals = renewals(model)
        by_length = follows_length(model) or bool(self._renewals)
        # Keys that another length, a prefix or another batch would make otherwise belong to one request only.
        self._whole = by_length or model.reads_prefix
        # The compiled pass computes every token alone, whatever else is in a batch.
        self._apart = self.limits.invariant and model.packed is None
        self._pages = Pages(model, self.limits, shares=not (self._whole or self._apart))
        self.blocks, self.sources, self.cache = self._pages.texts, self._pages.sources, self._pages.cache
        self._reserves = follows_length(model) or self._apart
        self._by_length = by_length
        # Alone it is always one row that computes; else a last one is joined by itself, and shares the rows' step.
        self._alone = self._apart or self.limits.rows == 1
        self._step: Paged | None = None
        if model.compiled is not None and isinstance(self.cache, PagedCache):
            self._step = model.compiled.paged(model, self.cache, self.limits.block, 1 if self._alone else 2)

    @property
    def busy(self) -> bool:
        """Whether any request is not finished."""
        return bool(self.waiting or self.prefilling or self.decoding)

    def submit(self, request: Request) -> Handle:
        """Take a request.

        Raises:
            ScantlingInputError: the prompt is empty or fills the context, a setting is out of range, or the cache could
                not hold it even alone.
        """
        if not isinstance(request, Request):
            raise ScantlingInputError(f"{request!r} is no request; give a scantling.generate.Request")
        return self._queue(Handle(self.model, request))

    def _queue(self, handle: Handle) -> Handle:
        self._submitted += 1
        handle.number = self._submitted
        self._pages.check(handle)
        self.waiting.append(handle)
        return handle

    def step(self) -> list[Handle]:
        """One step; the requests that it finished."""
        with torch.inference_mode():
            done = self._let_go()
            self._admit()
            done += self._prefill()
            return done + self._decode()

    def run(self) -> None:
        """Step until every request is finished."""
        while self.busy:
            self.step()

    def _let_go(self) -> list[Handle]:
        gone = [handle for queue in (self.waiting, self.prefilling, self.decoding) for handle in queue]
        gone = [handle for handle in gone if handle.cancelled]
        for handle in gone:
            self._end(handle, "cancelled")
        return gone

    def _end(self, handle: Handle, reason: str = "") -> Handle:
        for queue in (self.waiting, self.prefilling, self.decoding):
            if handle in queue:
                queue.remove(handle)
        handle.end(reason, self._pages.nbytes_of(handle))
        self._pages.release(handle)
        return handle

    def _admit(self) -> None:
        while self.waiting and len(self.prefilling) + len(self.decoding) < self.limits.rows:
            handle = self.waiting[0]
            least = handle.most if self._reserves else len(handle.whole)
            # One block stays free for each that decodes, so that nobody is let in only to be sent away.
            if not self._pages.admit(handle, least, spare=0 if self._reserves else len(self.decoding)):
                return
            self.waiting.popleft()
            self.shared += handle.past
            self.prefilling.append(handle)

    def _prefill(self) -> list[Handle]:
        """Prompts in turn, until `chunk` tokens went through; one that is not at its end goes to the back."""
        left, done, device = self.limits.chunk, list[Handle](), self.model.device
        while self.prefilling and left > 0:
            group, new = self._next(left)
            ids = torch.tensor([one.whole[one.past : one.past + new] for one in group], device=device)
            sources = sources_of(group, device)
            left -= ids.numel() if sources is None else sources.numel()
            try:
                read = self._pass(group, ids, sources)
            except BaseException:
                # Out of memory, or interrupted: nothing of the pass counts, and the requests are still there.
                self.prefilling.extendleft(reversed(group))
                raise
            for handle, logits in zip(group, read[:, None], strict=True):
                if handle.past < len(handle.whole):
                    self.prefilling.append(handle)
                    continue
                self.decoding.append(handle)
                done += self._drawn(handle, logits)
        return done

    def _next(self, left: int) -> tuple[list[Handle], int]:
        """Who is read now, and how many tokens of each: one of a piece, or some whose sources go through together."""
        first = self.prefilling.popleft()
        new = len(first.whole) - first.past
        if not first.unread:
            # Where roundings may not depend on the others, each piece has its own full length.
            return [first], new if self._whole else min(new, self.limits.chunk if self._apart else left)
        group, longest = [first], len(first.source)
        while not (self._by_length or self._apart) and self.prefilling and self.prefilling[0].unread:
            longest = max(longest, len(self.prefilling[0].source))
            if (len(group) + 1) * longest > left:
                break
            group.append(self.prefilling.popleft())
        return group, new

    def _decode(self) -> list[Handle]:
        done = list[Handle]()
        for group in self._groups(self._with_room()):
            logits = self._pass(group, ids_of(group, self.model.device))
            for handle, own in zip(group, logits[:, None], strict=True):
                done += self._drawn(handle, own)
        return done

    def _drawn(self, handle: Handle, logits: Tensor) -> list[Handle]:
        """A request that has its next token now, by logits (1, V); in the list if that was the last."""
        handle.draw(logits)
        return [self._end(handle)] if handle.finished else []

    def _with_room(self) -> list[Handle]:
        """The requests that decode now, each with a block for its next position; the last to come make room."""
        rows: list[Handle] = []
        for handle in list(self.decoding):
            if handle not in self.decoding:
                continue
            if handle.past in self._renewals:
                # LongRoPE: past this length its keys are void.
                self._again(handle)
                continue
            while not self._pages.hold(handle, handle.past + 1):
                self._again(max((*self.decoding, *self.prefilling), key=lambda other: other.number))
                if handle not in self.decoding:
                    break
            else:
                rows.append(handle)
        return [handle for handle in rows if handle in self.decoding]

    def _again(self, handle: Handle) -> None:
        """Take the blocks of a request's text; it is the next to be read, with what it has written."""
        self.preempted += 1
        (self.decoding if handle in self.decoding else self.prefilling).remove(handle)
        self._pages.forget(handle)
        self.waiting.appendleft(handle)

    def _groups(self, rows: Sequence[Handle]) -> list[list[Handle]]:
        """Rows that may be turned by the same angles, or each alone where nothing may depend on the others."""
        if self._apart:
            return [[handle] for handle in rows]
        groups: dict[Any, list[Handle]] = {}
        for handle in rows:
            key = tuple(p.frequencies(handle.past + 1) for p in self._scaled) if self._by_length else ()
            groups.setdefault(key, []).append(handle)
        return list(groups.values())

    def _pass(self, handles: Sequence[Handle], ids: Tensor, sources: Tensor | None = None) -> Tensor:
        """Bring ids (B, T) behind what each request has in the cache: logits (B, V) of the last position.

        Args:
            sources: (B, S), where they are still to be encoded.
        """
        if isinstance(self.cache, PackedPages):
            tables, pasts = [handle.table for handle in handles], [handle.past for handle in handles]
            logits = self.cache.read(tables, pasts, ids)
        else:
            logits = self._through_net(handles, ids, sources)
        for handle in handles:
            self._pages.filled(handle, ids.shape[1])
        return logits

    def _through_net(self, handles: Sequence[Handle], ids: Tensor, sources: Tensor | None) -> Tensor:
        pasts, new = [handle.past for handle in handles], ids.shape[1]
        if self._step is not None and new == 1 and not any(max(pasts) >= length for length in self._renewals):
            return self._stepped(self._step, handles, ids[:, 0])
        positions = torch.tensor(pasts, device=ids.device)[:, None] + torch.arange(new, device=ids.device)
        prefixes = None
        if self.model.reads_prefix:
            prefixes = torch.tensor([len(handle.begins) for handle in handles], device=ids.device)
        rows = self._pages.rows(handles)
        ctx = Context.of(ids, positions=positions, cache=rows, last_only=True, prefix_lengths=prefixes)
        with for_pass(ids.device, ids.numel() + (0 if sources is None else sources.numel())):
            logits: Tensor = self.model.net(ids, ctx, sources)[:, -1]
        return logits

    def _stepped(self, step: Paged, handles: Sequence[Handle], ids: Tensor) -> Tensor:
        """One token of each through the compiled step."""
        twice = not self._alone and len(handles) == 1
        rows, ids = (list(handles) * 2, ids.repeat(2)) if twice else (list(handles), ids)
        width = max(2, *(len(handle.table) for handle in rows))
        tables = [[*handle.table, *[0] * (width - len(handle.table))] for handle in rows]
        pasts = torch.tensor([handle.past for handle in rows], device=ids.device)
        return step(ids, pasts, torch.tensor(tables, device=ids.device))[: len(handles)]


def in_order(model: Model, requests: Sequence[Request], rows: int = 16) -> Iterator[Handle]:
    """Every request in the order given, each as soon as it and those before it are finished; `rows` at once at most.

    Raises:
        ScantlingError: what `Engine.submit` refuses, before anything is decoded; or what one of them failed with.
    """
    asked = [Handle(model, request) for request in requests]
    engine = Engine(model, Limits.for_all([(one.most, len(one.source)) for one in asked], rows))
    for handle in [engine._queue(one) for one in asked]:
        while not handle.finished:
            engine.step()
        if handle.error is not None:
            raise handle.error
        yield handle
