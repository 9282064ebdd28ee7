"""A cache and the positions that go with it, for rows that advance together.

The prompt of an encoder-decoder is its source: it is encoded in the first pass, and what is generated is the target.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from scantling.errors import ScantlingInputError
from scantling.generate.keeping import Keeping
from scantling.generate.room import check_writes, room
from scantling.parts.part import Workload
from scantling.parts.rope import Dynamic
from scantling.tensor.context import Context
from scantling.tensor.pages import for_pass

if TYPE_CHECKING:
    from scantling.generate.compiled_session import CompiledSession
    from scantling.generate.packed_session import PackedSession
    from scantling.model import Model

AnySession: TypeAlias = "Session | PackedSession | CompiledSession"


@dataclass(frozen=True)
class Source:
    """What an encoder-decoder reads.

    Attributes:
        ids: (B, S).
        padding: (B, S) bool, True at real tokens, or None where all are.
    """

    ids: Tensor
    padding: Tensor | None = None


def follows_length(model: Model) -> bool:
    """Whether the angles depend on how long a text is by now (dynamic NTK): keys kept before are of another base."""
    return any(isinstance(getattr(p.position, "scaling", None), Dynamic) for p in positioned(model))


def renewals(model: Model) -> set[int]:
    """Lengths past which a cache is filled anew (LongRoPE)."""
    return {part.position.renewed_past for part in positioned(model)} - {None}


def positioned(model: Model) -> list[Any]:
    """The parts that know positions."""
    return [part for _, part, _ in model.parts.walk() if hasattr(part, "position")]


class Session:
    """A cache and the positions that go with it, for B rows that advance together.

    Attributes:
        cache: holds `capacity` positions of every layer, and all of an encoder-decoder's source.
        source: of an encoder-decoder; it is encoded in the first pass.
        filled: positions in the cache.
    """

    def __init__(
        self,
        model: Model,
        batch: int,
        capacity: int,
        kernel: str = "fused",
        source: Source | None = None,
        keeping: Keeping | None = None,
    ) -> None:
        self.model, self.kernel, self.source = model, kernel, source
        length = None if source is None else source.ids.shape[1]
        self.cache = (keeping or Keeping()).allocate(model, Workload(batch=batch, tokens=capacity, source=length))
        self.filled = 0
        self._padding: Tensor | None = None
        self._lengths: Tensor | None = None
        self._prefixes: Tensor | None = None
        self._capacity = capacity
        self._renewals = renewals(model)
        self._passed: list[tuple[Tensor, Tensor | None]] = []

    def prefill(self, ids: Tensor, attention_mask: Tensor | None = None, chunk: int | None = None) -> Tensor:
        """The prompt, ids (B, T), padded left where `attention_mask` is 0: logits (B, V) of the last position.

        In layers that read a prefix both ways, the first prompt is the prefix.

        Args:
            chunk: tokens of a row that go through at once; None for all.

        Raises:
            ScantlingInputError: padded rows after others, a chunk below 1, or chunks where pieces are not the whole.
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
        if chunk is None or chunk >= ids.shape[1]:
            return self._pass(ids, positions)[:, -1]
        check_chunk(self.model, chunk)
        for i in range(0, ids.shape[1], chunk):
            piece = slice(i, i + chunk)
            logits = self._pass(ids[:, piece], None if positions is None else positions[:, piece])
        return logits[:, -1]

    def step(self, ids: Tensor) -> Tensor:
        """One more token per row, ids (B): logits (B, V)."""
        return self.score(ids[:, None], last_only=True)[:, -1]

    def score(self, ids: Tensor, last_only: bool = False, *, net: Any = None) -> Tensor:
        """More tokens per row, ids (B, T): logits (B, T, V) of every position, or of the last one (B, 1, V).

        Args:
            net: goes through in place of the model's own: one that ends after its first layers. What the others keep of
                these positions is not written, so they are rewound before the model goes on.
        """
        positions = None
        if self._lengths is not None:
            positions = self._lengths + torch.arange(ids.shape[1], device=ids.device)
            self._lengths = self._lengths + ids.shape[1]
        return self._pass(ids, positions, last_only, net)

    def rewind(self, tokens: int) -> None:
        """Forget the last so many positions of every row.

        Raises:
            ScantlingInputError: the cache is a ring that went round.
        """
        self.filled -= tokens
        self.cache.rewind(self.filled)
        if self._lengths is not None:
            self._lengths = self._lengths - tokens
        left = tokens
        while self._passed and left:
            ids, positions = self._passed.pop()
            if ids.shape[1] > left:
                kept = ids.shape[1] - left
                self._passed.append((ids[:, :kept], None if positions is None else positions[:, :kept]))
            left -= min(left, ids.shape[1])

    def select(self, rows: Tensor) -> None:
        """Make row i what row `rows[i]` was; the number of rows may change."""
        self.cache.select(rows)
        self._padding = None if self._padding is None else self._padding[rows]
        self._lengths = None if self._lengths is None else self._lengths[rows]
        self._prefixes = None if self._prefixes is None else self._prefixes[rows]
        self._passed = [(ids[rows], None if at is None else at[rows]) for ids, at in self._passed]
        if self.source is not None:
            padding = self.source.padding
            self.source = Source(self.source.ids[rows], None if padding is None else padding[rows])

    def _pass(self, ids: Tensor, positions: Tensor | None, last_only: bool = True, net: Any = None) -> Tensor:
        new, end = ids.shape[1], self.filled + ids.shape[1]
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
            last_only=last_only,
            prefix_lengths=self._prefixes,
        )
        read = None
        if self.source is not None:
            ctx.source_padding = self.source.padding
            read = None if self.filled else self.source.ids
        with for_pass(ids.device, ids.numel() + (0 if read is None else read.numel())):
            logits: Tensor = (net or self.model.net)(ids, ctx, read)
        self.cache.advance(ids.shape[1])
        self.filled = end
        return logits if last_only else logits[:, -new:]


def check_chunk(model: Model, chunk: int) -> None:
    """Refuse to cut a prompt into chunks.

    Raises:
        ScantlingInputError: a chunk below 1, or a model by which pieces of a prompt are not the prompt.
    """
    if isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1:
        raise ScantlingInputError(f"prefill chunk is {chunk!r}; a whole number of at least 1 is needed")
    name = model.card.name
    if follows_length(model):
        raise ScantlingInputError(
            f"{name}: dynamic NTK turns keys by the length so far, so a prompt in chunks is another prompt; "
            "leave the chunk out"
        )
    if model.reads_prefix:
        raise ScantlingInputError(
            f"{name}: layers read the prompt both ways, so it goes through whole; leave the chunk out"
        )


def start(model: Model, rows: int) -> Tensor:
    """What the targets of an encoder-decoder begin with: (B, 1).

    Raises:
        ScantlingInputError: nobody says with what they begin.
    """
    if model.start_id is None:
        raise ScantlingInputError("the checkpoint does not say with what a target begins (decoder_start_token_id)")
    return model.ids([[model.start_id]] * rows)


def begin(
    model: Model,
    ids: Tensor,
    max_new_tokens: int,
    attention_mask: Tensor | None = None,
    *,
    keeping: Keeping | None = None,
    chunk: int | None = None,
    reads_last: bool = False,
) -> tuple[AnySession, Tensor, int]:
    """A session with prompts (B, T) in it, the logits (B, V) after them, and how many new tokens there is room for.

    Args:
        reads_last: the last new token will be read as well; see `room`.

    Raises:
        ScantlingInputError: the prompt leaves no room in the context, the model writes no text, or a source is to be
            read in chunks.
    """
    check_writes(model)
    limit = room(model, ids.shape[1], max_new_tokens, reads_last)
    if model.parts.two_stacks:
        if chunk is not None:
            raise ScantlingInputError(
                f"{model.card.name} reads its source both ways, so it goes through whole; leave the chunk out"
            )
        padded = attention_mask is not None and not bool(attention_mask.all())
        source = Source(ids, attention_mask if padded else None)
        reader = Session(model, ids.shape[0], limit + int(reads_last), source=source, keeping=keeping)
        return reader, reader.prefill(start(model, ids.shape[0])), limit
    session: AnySession
    if model.packed is not None and keeping is None:
        session = model.packed.session(model, ids.shape[0], ids.shape[1] + limit)
    elif model.compiled is not None and keeping is None:
        session = model.compiled.session(model, ids.shape[0], ids.shape[1] + limit)
    else:
        session = Session(model, ids.shape[0], ids.shape[1] + limit, keeping=keeping)
    return session, session.prefill(ids, attention_mask, chunk), limit
