"""What is audited: a callable from ids to logits, what it says of itself, and what else it can do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

from scantling.errors import ScantlingInputError

Family: TypeAlias = Literal["decoder", "encoder", "encoder-decoder"]
Position: TypeAlias = Literal["none", "learned", "sinusoidal", "rope", "alibi", "relative"]

ABSOLUTE = ("learned", "sinusoidal")


@dataclass(frozen=True)
class Feed:
    """What one pass reads.

    Attributes:
        ids: (B, T); of an encoder-decoder the target's.
        mask: (B, T), 1 at real tokens and 0 at padding; None where all are real. Of an encoder-decoder the target's.
        positions: (B, T), or None for those that the subject takes by itself.
        documents: (B, T), which document each token of a packed row belongs to.
        source: (B, S) of an encoder-decoder.
        source_mask: (B, S).
    """

    ids: Tensor
    mask: Tensor | None = None
    positions: Tensor | None = None
    documents: Tensor | None = None
    source: Tensor | None = None
    source_mask: Tensor | None = None

    @property
    def tokens(self) -> int:
        """T."""
        return self.ids.shape[1]


Run: TypeAlias = Callable[[Feed], Tensor]
"""A pass: (B, T, V) logits; of a head that gives one answer per row, (B, 1, n)."""

Cached: TypeAlias = Callable[[Feed, Sequence[int]], Tensor]
"""The same through a cache, in pieces of these lengths: (B, T, V), or (B, pieces, V) where only each last logit is
given."""

Loss: TypeAlias = Callable[[Feed, Tensor, int | None], Tensor]
"""The subject's own loss () of labels (B, T) that are not shifted, -100 where nothing is scored. With a count, the sum
over what is scored divided by it, as a step of several micro-batches needs it."""

Maps: TypeAlias = Callable[[Feed], Sequence[Tensor]]
"""Attention maps of a pass (B, H, T, T), of each layer of the stack that takes the feed's ids what it reads there."""

Change: TypeAlias = Callable[[Path], None]


@dataclass(frozen=True)
class Facts:
    """What a subject says of itself. None means that it does not say.

    Attributes:
        position: how order enters.
        windows: per layer, how many keys back a query reads, its own included; None for all; an encoder reads as
            far ahead.
        sparse: layers read chosen positions only (chunks, strides).
        context: longest row.
        trained_length: longest row that it was trained on.
        switch: rows longer than this get other positions (dynamic NTK, LongRoPE), by design.
        tied: the head's matrix is the embedding table.
        routed: tokens are sent to experts, whose choice is a step function of the activations.
        sinks: a share of each row of attention goes to no token.
        dropout: whether training drops anything.
        pad_id: what padding is filled with.
        start_id: what an encoder-decoder's target begins with.
        first_position: the number of the first position, where positions are given.
        per_token: an answer per token; False where the head gives one per row.
        dtype: of the weights.
    """

    vocab_size: int
    family: Family = "decoder"
    position: Position | None = None
    windows: tuple[int | None, ...] | None = None
    sparse: bool = False
    context: int | None = None
    trained_length: int | None = None
    switch: int | None = None
    tied: bool | None = None
    routed: bool = False
    sinks: bool = False
    dropout: bool | None = None
    pad_id: int | None = None
    start_id: int | None = None
    first_position: int = 0
    per_token: bool = True
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.vocab_size < 4:
            raise ScantlingInputError(f"vocab_size is {self.vocab_size}; an audit needs at least 4 different tokens")


@dataclass(frozen=True)
class Narrow:
    """A cache that keeps vectors in few bits.

    Attributes:
        run: decoding over it.
        moved: decoding over a cache whose vectors are moved at random by as much as those bits round them.
    """

    run: Cached
    moved: Cached
    bits: float


@dataclass(frozen=True)
class Abilities:
    """What a subject can do besides ids -> logits. What is absent makes probes answer "could not run", never "clean".

    Attributes:
        takes: of a feed: ``mask``, ``positions``.
        module: its torch module, where there is one.
        blocks: its layers, in order: modules that take the stream (B, T, d) first and give it back.
        kernels: the same function by other code; the first is the default.
        maps: ways to ask for attention maps.
        modes: the same function in other circumstances (in training, with attention maps asked for).
        packed: ways to run rows of several documents.
        cached: ways to decode over a cache.
        stepped: the same, of ways that take a prompt in one piece and then single tokens.
        kept: caches in fewer bits.
        cast: the same weights in another dtype.
        loss: its own.
        packed_loss: the same of rows with documents.
        counts_items: whether its loss heeds the count.
        taught: of an encoder-decoder, what the decoder reads to be scored on labels (B, T).
        reload: save, change the folder, load again.
        rebuild: the same structure with other weights, from its config alone.
        quantised: the same weights in fewer bits: name -> the subject, and the bits per weight.
        tables: the embedding's and the head's matrix.
        sample: (1, T) ids of real text.
        collate: rows of ids of unequal length -> padded ids, labels; the second argument ends each row.
        reference: another implementation of the same model.
    """

    takes: frozenset[str] = frozenset()
    module: nn.Module | None = None
    blocks: tuple[nn.Module, ...] = ()
    kernels: Mapping[str, Run] = field(default_factory=dict)
    maps: Mapping[str, Maps] = field(default_factory=dict)
    modes: Mapping[str, Run] = field(default_factory=dict)
    packed: Mapping[str, Run] = field(default_factory=dict)
    cached: Mapping[str, Cached] = field(default_factory=dict)
    stepped: Mapping[str, Cached] = field(default_factory=dict)
    kept: Mapping[str, Narrow] = field(default_factory=dict)
    cast: Callable[[str], Subject] | None = None
    loss: Loss | None = None
    packed_loss: Loss | None = None
    counts_items: bool = False
    taught: Callable[[Tensor], Tensor] | None = None
    reload: Callable[[Change], Subject] | None = None
    rebuild: Callable[[], Subject] | None = None
    quantised: Mapping[str, tuple[Callable[[], Subject], float]] = field(default_factory=dict)
    tables: Callable[[], tuple[Tensor, Tensor]] | None = None
    sample: Tensor | None = None
    collate: Callable[[Sequence[Sequence[int]], int], tuple[Tensor, Tensor]] | None = None
    reference: Callable[[], Subject] | None = None

    @property
    def decoded(self) -> Mapping[str, Cached]:
        """Every way that takes a prompt and then single tokens."""
        return {**self.cached, **self.stepped}


@dataclass(frozen=True, eq=False)
class Subject:
    """A model under audit.

    Attributes:
        run: the plain pass.
    """

    name: str
    run: Run
    facts: Facts
    can: Abilities = Abilities()

    def without(self, **facts: object) -> Subject:
        """The same with other facts."""
        return replace(self, facts=replace(self.facts, **facts))  # type: ignore[arg-type]

    @property
    def device(self) -> torch.device:
        """Where its weights are."""
        weight = None if self.can.module is None else next(iter(self.can.module.parameters()), None)
        return torch.device("cpu") if weight is None else weight.device
