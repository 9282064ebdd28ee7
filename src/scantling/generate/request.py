"""A text that an engine is asked for, and where it stands."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from scantling.errors import ScantlingError, ScantlingInputError
from scantling.generate.engine import begun
from scantling.generate.room import check_limit, encoded, known_tokens, needed, room
from scantling.generate.sample import Logprob, choose, logprobs
from scantling.generate.sampling import Sampling
from scantling.generate.settings import Generation, Options
from scantling.generate.writer import Writer
from scantling.tensor.paged import Chain

if TYPE_CHECKING:
    from scantling.model import Model


@dataclass(frozen=True)
class Request:
    """What is wanted.

    Attributes:
        prompt: text, or ids; of an encoder-decoder, the source.
        max_new_tokens: at most so many; the context may allow fewer.
        options: `keeping` and `chunk` are the engine's, and stay None.
    """

    prompt: str | Sequence[int]
    max_new_tokens: int = 64
    sampling: Sampling = field(default_factory=Sampling)
    options: Options = field(default_factory=Options)

    def __post_init__(self) -> None:
        for name, kind in (("sampling", Sampling), ("options", Options)):
            if not isinstance(getattr(self, name), kind):
                raise ScantlingInputError(
                    f"{name} is {getattr(self, name)!r}; a scantling.generate.{kind.__name__} is needed"
                )


class Handle:
    """One request on its way; made by `Engine.submit`.

    Attributes:
        prompt: ids of what was asked.
        source: of an encoder-decoder, the same ids; else empty.
        begins: what the text begins with: the prompt, or what the targets of an encoder-decoder begin with.
        most: positions that the text may come to.
        ids: the new tokens so far.
        error: what went wrong, or None.
        number: its place in the order in which requests came.
        table: the blocks of the cache that its text holds.
        source_table: those that its source holds.
        unread: whether its source is still to be encoded.
        past: positions of its text in the cache.
        root, chain: what its first block, and the next one, are known by.
    """

    def __init__(self, model: Model, request: Request) -> None:
        options = request.options
        if options.keeping is not None or options.chunk is not None:
            raise ScantlingInputError("keeping and chunk are settings of the engine and not of a request")
        if options.drafting is not None:
            raise ScantlingInputError("drafts are for one text at a time, and the engine decodes several")
        if options.contrastive is not None:
            raise ScantlingInputError("contrastive search is for one text at a time, and the engine decodes several")
        if isinstance(request.prompt, str):
            self.prompt = encoded(model, request.prompt, request.max_new_tokens)
        else:
            rows = model.ids(list(request.prompt) if isinstance(request.prompt, Sequence) else request.prompt)
            if len(rows) != 1:
                raise ScantlingInputError(f"a request has one prompt, and {len(rows)} rows of ids are given")
            self.prompt = rows[0].tolist()
            if options.stop and model.tokenizer is None:
                raise ScantlingInputError("stop strings need a tokenizer, and the model has none")
        limit = request.max_new_tokens
        check_limit(limit)
        self.request, self.limit = request, room(model, len(self.prompt), limit)
        (self._history,) = begun(model, model.ids(self.prompt), None, options.shape)
        self.source, self.begins = (
            (self.prompt, [*self._history.prompt]) if model.parts.two_stacks else ([], self.prompt)
        )
        self.most, _ = needed(model, len(self.prompt), limit)
        self._generator = request.sampling.generators(1)
        self._known, self._eos = known_tokens(model), frozenset[int]() if options.ignore_eos else model.eos_ids
        self._writer = None if model.tokenizer is None else Writer(model, options)
        self._logprobs: list[Logprob] = []
        self._reason, self._unread, self._cancelled = "", "", False
        self._submitted = self._first = self._ended = time.perf_counter()
        self._cache_bytes = 0
        self.number = 0
        self.error: ScantlingError | None = None
        self.ids: list[int] = []
        self.table, self.source_table = list[int](), list[int]()
        self.past, self.unread = 0, bool(self.source)
        self.root: Chain = tuple(self.source) or 0
        self.chain = self.root

    @property
    def finished(self) -> bool:
        """Whether nothing more comes."""
        return bool(self._reason)

    @property
    def finish_reason(self) -> str:
        """``stop``, ``length``, ``cancelled``, ``error``; empty while it goes on."""
        return self._reason

    @property
    def text(self) -> str:
        """What is certain of the text; empty where there is no tokenizer."""
        return "" if self._writer is None else self._writer.text

    @property
    def whole(self) -> list[int]:
        """What the text begins with, and its new tokens."""
        return [*self.begins, *self.ids]

    def take(self) -> str:
        """The text that became certain since the last call."""
        found, self._unread = self._unread, ""
        return found

    def cancel(self) -> None:
        """Want no more; the engine lets go of it at its next step."""
        self._cancelled = True

    @property
    def cancelled(self) -> bool:
        """Whether it is to be let go."""
        return self._cancelled and not self.finished

    def draw(self, logits: Tensor) -> None:
        """Choose the next token by logits (1, V)."""
        logits = logits[:, : self._known]
        try:
            token = int(choose(logits, self.request.sampling, self._generator, [self._history]))
            self._history.add(token)
        except ScantlingError as error:
            self.error, self._reason = error, "error"
            return
        top = self.request.options.logprobs
        if top is not None:
            self._logprobs += logprobs(logits, [token], top)
        if not self.ids:
            self._first = time.perf_counter()
        self.ids.append(token)
        self._advance(token)

    def _advance(self, token: int) -> None:
        reason = "stop" if token in self._eos else ""
        if self._writer is not None:
            self._unread += self._writer.push(token)
            reason = reason or self._writer.reason or ""
        constraint = self._history.constraint
        if not reason and constraint is not None and constraint.done:
            reason = "stop"
        if not reason and len(self.ids) == self.limit:
            reason = "length"
        if reason:
            self._reason = reason

    def end(self, reason: str, cache_bytes: int) -> None:
        """Nothing more comes: for `reason`, if there was none yet."""
        self._reason = self._reason or reason
        self._cache_bytes, self._ended = cache_bytes, time.perf_counter()
        if self._writer is not None:
            self._unread += self._writer.finish(self._reason)
            if self._reason == "length" and self._writer.reason == "stop":
                self._reason = "stop"

    def result(self) -> Generation:
        """What came of it.

        Raises:
            ScantlingError: it is not finished, or it failed.
        """
        if self.error is not None:
            raise self.error
        if not self.finished:
            raise ScantlingInputError("the request is not finished: step the engine until it is")
        return Generation(
            self.text,
            self.ids,
            len(self.prompt),
            len(self.ids),
            self._reason,
            self._first - self._submitted,
            self._ended - self._first,
            self._cache_bytes,
            self.limit,
            self._reason == "length" and self.limit < self.request.max_new_tokens,
            tuple(self._logprobs) if self.request.options.logprobs is not None else None,
        )


def ids_of(handles: Sequence[Handle], device: torch.device) -> Tensor:
    """The last token of each, (B, 1)."""
    return torch.tensor([[handle.ids[-1]] for handle in handles], device=device)


def sources_of(handles: Sequence[Handle], device: torch.device) -> Tensor | None:
    """The sources of some requests, which all are still to be encoded, padded on the right: (B, S).

    None where they are not.
    """
    if not handles[0].unread:
        return None
    longest = max(len(handle.source) for handle in handles)
    rows = [[*handle.source, *[0] * (longest - len(handle.source))] for handle in handles]
    return torch.tensor(rows, device=device)
