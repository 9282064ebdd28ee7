"""The decode loop: one pass over the prompt, then one position at a time over a preallocated cache.

The prompt of an encoder-decoder is its source: it is encoded in the first pass, and what is generated is the target.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from scantling import inputs
from scantling.cards.rules import position_limit, positions_text
from scantling.errors import ScantlingInputError
from scantling.generate.sample import Sampling, choose
from scantling.generate.stops import StopFilter
from scantling.parts.part import Workload
from scantling.tensor.cache import Cache
from scantling.tensor.context import Context

if TYPE_CHECKING:
    from scantling.model import Model


@dataclass(frozen=True)
class Generation:
    """What was generated and what it took.

    Attributes:
        text: the new text, without the prompt; of an encoder-decoder, the target's.
        ids: the new ids, end-of-text included where it came.
        finish_reason: ``stop`` (end-of-text or a stop string) or ``length`` (the limit, or a full context).
        prefill_seconds: the pass over the prompt and the choice of the first token.
        decode_seconds: everything after the first token.
        cache_bytes: allocated for keys and values.
        limit: new tokens that were allowed, by the caller and by the context.
    """

    text: str
    ids: list[int]
    prompt_tokens: int
    new_tokens: int
    finish_reason: str
    prefill_seconds: float
    decode_seconds: float
    cache_bytes: int
    limit: int


@dataclass(frozen=True)
class Source:
    """What an encoder-decoder reads.

    Attributes:
        ids: (B, S).
        padding: (B, S) bool, True at real tokens, or None where all are.
    """

    ids: Tensor
    padding: Tensor | None = None


class Session:
    """A cache and the positions that go with it, for B rows that advance together.

    Attributes:
        cache: holds `capacity` positions of every layer, and all of an encoder-decoder's source.
        source: of an encoder-decoder; it is encoded in the first pass.
    """

    def __init__(
        self, model: Model, batch: int, capacity: int, kernel: str = "fused", source: Source | None = None
    ) -> None:
        self.model, self.kernel, self.source = model, kernel, source
        length = None if source is None else source.ids.shape[1]
        shapes = model.parts.named_state(Workload(batch=batch, tokens=capacity, source=length))
        self.cache = Cache(shapes, model.dtype, model.device)
        self.filled = 0
        self._padding: Tensor | None = None
        self._lengths: Tensor | None = None
        self._prefixes: Tensor | None = None
        self._capacity = capacity
        positions = [part.position for _, part, _ in model.parts.walk() if hasattr(part, "position")]
        self._renewals = {position.renewed_past for position in positions} - {None}
        self._passed: list[tuple[Tensor, Tensor | None]] = []

    def prefill(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """The prompt, ids (B, T), padded left where `attention_mask` is 0: logits (B, V) of the last position.

        In layers that read a prefix both ways, the first prompt is the prefix.
        """
        positions = None
        padded = attention_mask is not None and not bool(attention_mask.all())
        if self.filled and (padded or self._padding is not None):
            raise ScantlingInputError("padded rows are prefilled in one piece")
        if attention_mask is not None and padded:
            real = attention_mask.bool()
            self._padding = real.new_ones(ids.shape[0], self._capacity)
            self._padding[:, : ids.shape[1]] = real
            positions = (real.long().cumsum(-1) - 1).clamp(min=0)
            self._lengths = real.sum(-1, keepdim=True)
        if not self.filled and self.model.reads_prefix:
            real = torch.ones_like(ids) if attention_mask is None else attention_mask
            self._prefixes = real.long().sum(-1)
        return self._pass(ids, positions)

    def step(self, ids: Tensor) -> Tensor:
        """One more token per row, ids (B): logits (B, V)."""
        positions = None
        if self._lengths is not None:
            positions, self._lengths = self._lengths, self._lengths + 1
        return self._pass(ids[:, None], positions)

    def _pass(self, ids: Tensor, positions: Tensor | None) -> Tensor:
        end = self.filled + ids.shape[1]
        if self._renewals:
            self._passed.append((ids, positions))
        if self.filled and any(self.filled <= length < end for length in self._renewals):
            self.cache.clear()
            ids = torch.cat([ids for ids, _ in self._passed], 1)
            given = [positions for _, positions in self._passed if positions is not None]
            positions = torch.cat(given, 1) if given else None
        padding = None if self._padding is None else self._padding[:, :end]
        ctx = Context.of(
            ids,
            positions=positions,
            padding=padding,
            cache=self.cache,
            kernel_name=self.kernel,
            last_only=True,
            prefix_lengths=self._prefixes,
        )
        read = None
        if self.source is not None:
            ctx.source_padding = self.source.padding
            read = None if self.filled else self.source.ids
        logits: Tensor = self.model.net(ids, ctx, read)[:, -1]
        self.cache.advance(ids.shape[1])
        self.filled = end
        return logits


def room(model: Model, prompt: int, max_new_tokens: int) -> int:
    """New tokens that a prompt of that many tokens may have.

    Of an encoder-decoder, the prompt is a source: the target starts anew, and has a limit where positions do.

    Raises:
        ScantlingInputError: the prompt leaves no room in the context.
    """
    context = model.card.context
    if model.parts.two_stacks:
        limit = position_limit(model.card)
        if limit is None:
            return max_new_tokens
        if prompt > limit:
            raise ScantlingInputError(f"the source has {prompt} tokens and the model has {positions_text(model.card)}")
        # The last token generated is not read again, so it needs no position.
        return min(max_new_tokens, limit)
    if prompt >= context:
        raise ScantlingInputError(
            f"the prompt has {prompt} tokens and the context holds {context}: at most {context - 1} leave room"
        )
    return min(max_new_tokens, context - prompt)


def start(model: Model, rows: int) -> Tensor:
    """What the targets of an encoder-decoder begin with: (B, 1).

    Raises:
        ScantlingInputError: nobody says with what they begin.
    """
    if model.start_id is None:
        raise ScantlingInputError("the checkpoint does not say with what a target begins (decoder_start_token_id)")
    return model.ids([[model.start_id]] * rows)


def tokens(
    model: Model, ids: Tensor, max_new_tokens: int, sampling: Sampling, attention_mask: Tensor | None = None
) -> Iterator[tuple[Tensor, Session]]:
    """New ids (B), one step at a time, with the session they come from; the first comes with the end of the prefill.

    Raises:
        ScantlingInputError: the prompt leaves no room in the context, or the model writes no text.
    """
    if model.card.head.kind != "lm" or model.parts.decoder is None:
        what = f"{model.card.name} is a card of family {model.card.family} with a head of kind {model.card.head.kind}"
        raise ScantlingInputError(f"text is written by a decoder that scores a vocabulary, and {what}")
    limit = room(model, ids.shape[1], max_new_tokens)
    generators = sampling.generators(ids.shape[0])
    known = model.card.vocab_size if model.tokenizer is None else model.tokenizer.vocab_size
    if model.parts.two_stacks:
        padded = attention_mask is not None and not bool(attention_mask.all())
        source = Source(ids, attention_mask if padded else None)
        session = Session(model, ids.shape[0], limit, source=source)
        logits = session.prefill(start(model, ids.shape[0]))
    else:
        session = Session(model, ids.shape[0], ids.shape[1] + limit)
        logits = session.prefill(ids, attention_mask)
    for i in range(limit):
        # Rows of the table past the tokenizer's last id stand for no token.
        new = choose(logits[:, :known], sampling, generators)
        yield new, session
        if i + 1 < limit:
            logits = session.step(new)


def complete(
    model: Model,
    prompt: str,
    max_new_tokens: int,
    sampling: Sampling,
    *,
    stop: Sequence[str] = (),
    ignore_eos: bool = False,
    show: Callable[[str], Any] | None = None,
) -> Generation:
    """Continue one prompt to text.

    Args:
        stop: strings that end the text; they are not part of it.
        show: called with each piece of text as soon as it is certain.

    Raises:
        ScantlingInputError: no tokenizer, an empty prompt, one that fills the context, or a limit below 1.
    """
    tokenizer = model.tokenizer
    if tokenizer is None:
        raise ScantlingInputError(
            "the model has no tokenizer (no tokenizer.json beside its weights): give token ids instead of text"
        )
    if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        raise ScantlingInputError(f"max_new_tokens is {max_new_tokens}; at least 1 is needed")
    encoded = tokenizer.encode(prompt)
    if not encoded or not prompt:
        raise ScantlingInputError("the prompt is empty: at least one token is needed to go on from")
    ids = model.ids(encoded)
    limit = room(model, len(encoded), max_new_tokens)
    eos = frozenset[int]() if ignore_eos else model.eos_ids
    stream, stops = tokenizer.stream(), StopFilter(stop)
    new: list[int] = []
    reason, cache_bytes = "length", 0
    began = first = time.perf_counter()
    with torch.inference_mode():
        for step, session in tokens(model, ids, max_new_tokens, sampling):
            token = int(step)
            if not new:
                first, cache_bytes = time.perf_counter(), session.cache.nbytes
            new.append(token)
            if token in eos:
                reason = "stop"
                break
            piece = stops.push(stream.push(token))
            if piece and show:
                show(piece)
            if stops.hit:
                reason = "stop"
                break
    tail = stops.finish(stream.flush())
    if tail and show:
        show(tail)
    if stops.hit:
        reason = "stop"
    end = time.perf_counter()
    return Generation(stops.text, new, len(encoded), len(new), reason, first - began, end - first, cache_bytes, limit)


def continue_ids(
    model: Model, ids: Tensor, max_new_tokens: int, sampling: Sampling, attention_mask: Any, ignore_eos: bool
) -> Tensor:
    """Whole rows (B, T + new) for prompts (B, T); a row that ended goes on with its last id.

    Of an encoder-decoder the rows are the targets, (B, 1 + new) with what they begin with, and prompts may be padded
    anywhere.
    """
    mask = None if attention_mask is None else inputs.padding(attention_mask, ids)
    two_stacks = model.parts.two_stacks
    if mask is not None and not bool(mask.any(-1).all()):
        raise ScantlingInputError("a row is padding only: at least one real token is needed")
    if mask is not None and not two_stacks and not bool(mask[:, -1].all()):
        raise ScantlingInputError("the last token of a row is padding: rows of a batch are padded on the left")
    if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 0:
        raise ScantlingInputError(f"max_new_tokens is {max_new_tokens}; at least 0 is needed")
    rows = start(model, ids.shape[0]) if two_stacks else ids
    if max_new_tokens == 0:
        return rows
    ends = [] if ignore_eos else sorted(model.eos_ids)
    done = torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)
    columns = [rows]
    with torch.inference_mode():
        for new, _ in tokens(model, ids, max_new_tokens, sampling, mask):
            new = torch.where(done, columns[-1][:, -1], new)
            columns.append(new[:, None])
            if ends:
                done = done | torch.isin(new, torch.tensor(ends, device=ids.device))
                if bool(done.all()):
                    break
    return torch.cat(columns, 1).clone()
