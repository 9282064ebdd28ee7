"""Continuous batching: requests join and leave at any step, over a paged cache of a fixed size.

A step is at most so many tokens of prompts, and one token for every request that is past its prompt; so a long prompt
delays the others by a piece and not by itself. Requests begin in the order in which they came. Where the cache is full,
the one that began last gives its blocks back and is read again later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from scantling.errors import ScantlingInputError
from scantling.generate.packed_pages import PackedPages
from scantling.generate.request import Handle, Request, ids_of
from scantling.generate.room import check_writes
from scantling.generate.session import follows_length, positioned, renewals
from scantling.parts.part import Workload
from scantling.tensor.context import Context
from scantling.tensor.paged import Blocks, PagedCache, PagedRows

if TYPE_CHECKING:
    from scantling.generate.compiled import Paged
    from scantling.model import Model


@dataclass(frozen=True)
class Limits:
    """How much an engine takes on.

    Attributes:
        rows: requests that are in the cache at once.
        positions: positions that the cache holds, of all of them together.
        block: positions of a block; a beginning is shared in whole blocks.
        chunk: tokens of prompts that go through in one step, and more only where a prompt cannot be cut.
        numbers: ``plain`` or ``int8``; see `tensor.store`.
        invariant: every request computes alone, so that not even a rounding depends on what else is in the batch. It
            costs what batching gains: weights are read once per request and token. The compiled pass always does so.
    """

    rows: int = 16
    positions: int = 16384
    block: int = 16
    chunk: int = 256
    numbers: str = "plain"
    invariant: bool = False

    def __post_init__(self) -> None:
        for name in ("rows", "positions", "block", "chunk"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ScantlingInputError(f"{name} is {value!r}; a whole number of at least 1 is needed")
        if self.positions < self.block:
            raise ScantlingInputError(f"a cache of {self.positions} positions has no block of {self.block}")


class Engine:
    """Decodes requests together. One thread steps it; `submit` and `Handle.cancel` take effect at the next step.

    Attributes:
        waiting, prefilling, decoding: requests by where they stand.
        preempted: how often a request gave its blocks back.
        shared: positions that were not computed because another request had them.
    """

    def __init__(self, model: Model, limits: Limits | None = None) -> None:
        check_writes(model)
        if model.parts.two_stacks:
            raise ScantlingInputError(
                f"{model.card.name} is an encoder-decoder; the engine batches decoders, which read one text"
            )
        self.model, self.limits = model, limits or Limits()
        size = self.limits.block
        self.blocks = Blocks(self.limits.positions // size, size)
        self.cache: PagedCache | PackedPages
        if model.packed is not None:
            self.cache = PackedPages(model, model.packed, self.limits)
        else:
            shapes = model.parts.named_state(Workload(tokens=size))
            self.cache = PagedCache(shapes, self.blocks.count, model.dtype, model.device, self.limits.numbers)
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
        self._shares = not (self._whole or self._apart)
        self._reserves = follows_length(model) or self._apart
        self._by_length = by_length
        # Alone it is always one row that computes; else a last one is joined by itself, and shares the rows' step.
        self._alone = self._apart or self.limits.rows == 1
        self._step: Paged | None = None
        if model.compiled is not None and isinstance(self.cache, PagedCache):
            self._step = model.compiled.paged(model, self.cache, size, 1 if self._alone else 2)

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
        self._submitted += 1
        handle = Handle(self.model, request, self._submitted)
        needed = self._blocks_of(len(handle.prompt) + handle.limit)
        if needed > self.blocks.count:
            raise ScantlingInputError(
                f"a prompt of {len(handle.prompt)} tokens and {handle.limit} new ones need {needed} blocks of "
                f"{self.blocks.size} positions and the cache has {self.blocks.count}: allow fewer new tokens, or give "
                "the cache more positions"
            )
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

    def _blocks_of(self, positions: int) -> int:
        return -(-positions // self.blocks.size)

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
        each = self.cache.nbytes // self.blocks.count
        handle.end(reason, len(handle.table) * each)
        self._free(handle)
        return handle

    def _free(self, handle: Handle) -> None:
        self.blocks.give_back(handle.table)
        handle.table, handle.past, handle.chain = [], 0, 0

    def _admit(self) -> None:
        while self.waiting and len(self.prefilling) + len(self.decoding) < self.limits.rows:
            handle = self.waiting[0]
            whole = handle.whole
            table, chain = self.blocks.begin(whole) if self._shares else ([], 0)
            least = len(handle.prompt) + handle.limit if self._reserves else len(whole)
            # One block stays free for each that decodes, so that nobody is let in only to be sent away.
            spare = 0 if self._reserves else len(self.decoding)
            if self._blocks_of(least) - len(table) + spare > self.blocks.free:
                self.blocks.give_back(table)
                return
            self.waiting.popleft()
            handle.table, handle.chain = table, chain
            handle.past = len(table) * self.blocks.size
            self.shared += handle.past
            self._hold(handle, least)
            self.prefilling.append(handle)

    def _hold(self, handle: Handle, positions: int) -> bool:
        """Blocks for so many positions of a request; whether there were enough."""
        while len(handle.table) < self._blocks_of(positions):
            if not self.blocks.free:
                return False
            handle.table.append(self.blocks.take())
        return True

    def _prefill(self) -> list[Handle]:
        """Prompts in turn, until `chunk` tokens went through; one that is not at its end goes to the back."""
        left, done = self.limits.chunk, list[Handle]()
        while self.prefilling and left > 0:
            handle = self.prefilling.popleft()
            whole = handle.whole
            new = len(whole) - handle.past
            new = new if self._whole else min(new, self._piece(left))
            left -= new
            piece = torch.tensor([whole[handle.past : handle.past + new]], device=self.model.device)
            logits = self._pass([handle], piece)
            if handle.past < len(whole):
                self.prefilling.append(handle)
                continue
            self.decoding.append(handle)
            handle.draw(logits)
            if handle.finished:
                done.append(self._end(handle))
        return done

    def _piece(self, left: int) -> int:
        """Tokens of a piece; where roundings may not depend on the others, each piece has its own full length."""
        return self.limits.chunk if self._apart else left

    def _decode(self) -> list[Handle]:
        rows = self._with_room()
        done = []
        for group in self._groups(rows):
            logits = self._pass(group, ids_of(group, self.model.device))
            for i, handle in enumerate(group):
                handle.draw(logits[i : i + 1])
                if handle.finished:
                    done.append(self._end(handle))
        return done

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
            while not self._hold(handle, handle.past + 1):
                self._again(max((*self.decoding, *self.prefilling), key=lambda other: other.number))
                if handle not in self.decoding:
                    break
            else:
                rows.append(handle)
        return [handle for handle in rows if handle in self.decoding]

    def _again(self, handle: Handle) -> None:
        """Take a request's blocks; it is the next to be read, with what it has written."""
        self.preempted += 1
        (self.decoding if handle in self.decoding else self.prefilling).remove(handle)
        self._free(handle)
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

    def _pass(self, handles: Sequence[Handle], ids: Tensor) -> Tensor:
        """Bring ids (B, T) behind what each request has in the cache: logits (B, V) of the last position."""
        pasts, tables = [handle.past for handle in handles], [handle.table for handle in handles]
        if isinstance(self.cache, PackedPages):
            logits = self.cache.read(tables, pasts, ids)
        else:
            logits = self._through_net(handles, self.cache.rows(tables, pasts, self.blocks.size), ids)
        for handle in handles:
            self._filled(handle, ids.shape[1])
        return logits

    def _through_net(self, handles: Sequence[Handle], rows: PagedRows, ids: Tensor) -> Tensor:
        pasts, new = [handle.past for handle in handles], ids.shape[1]
        if self._step is not None and new == 1 and not any(max(pasts) >= length for length in self._renewals):
            return self._stepped(self._step, handles, ids[:, 0])
        positions = torch.tensor(pasts, device=ids.device)[:, None] + torch.arange(new, device=ids.device)
        prefixes = None
        if self.model.reads_prefix:
            prefixes = torch.tensor([len(handle.prompt) for handle in handles], device=ids.device)
        ctx = Context.of(ids, positions=positions, cache=rows, last_only=True, prefix_lengths=prefixes)
        logits: Tensor = self.model.net(ids, ctx, None)[:, -1]
        return logits

    def _stepped(self, step: Paged, handles: Sequence[Handle], ids: Tensor) -> Tensor:
        """One token of each through the compiled step."""
        twice = not self._alone and len(handles) == 1
        rows, ids = (list(handles) * 2, ids.repeat(2)) if twice else (list(handles), ids)
        width = max(2, *(len(handle.table) for handle in rows))
        tables = [[*handle.table, *[0] * (width - len(handle.table))] for handle in rows]
        pasts = torch.tensor([handle.past for handle in rows], device=ids.device)
        return step(ids, pasts, torch.tensor(tables, device=ids.device))[: len(handles)]

    def _filled(self, handle: Handle, new: int) -> None:
        size, whole = self.blocks.size, handle.whole
        if self._shares:
            for i in range(handle.past // size, (handle.past + new) // size):
                handle.chain = self.blocks.publish(handle.table[i], handle.chain, whole[i * size : (i + 1) * size])
        handle.past += new


def generate_all(model: Model, requests: Sequence[Request], rows: int = 16) -> list[Handle]:
    """Every request, in the order given, at most `rows` of them decoded together.

    Raises:
        ScantlingError: what `Engine.submit` refuses, or what one of them failed with.
    """
    needs = sorted(len(one.prompt) + one.limit for one in (Handle(model, request) for request in requests))
    block = Limits().block
    engine = Engine(model, Limits(rows=rows, positions=sum(-(-need // block) * block for need in needs[-rows:])))
    handles = [engine.submit(request) for request in requests]
    engine.run()
    for handle in handles:
        if handle.error is not None:
            raise handle.error
    return handles
