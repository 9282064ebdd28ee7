"""A small Transformer that can be built wrong on purpose: what the probes are tested on.

It is written apart from the program's own models, in the plainest way there is, so that a probe that passes here was
not tuned to them. Each fault is a word; `FAULTS` says what it does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scantling.audits.protocol import Family, Feed, Position

if TYPE_CHECKING:
    from scantling.audits.planted_pass import Pass

FAULTS = {
    "mask off by one": "a query reads the key after it",
    "mask reversed": "a query reads the keys after it instead of those before",
    "no mask": "a query reads every key",
    "no mask in the last block": "the same in one block",
    "weak mask": "hidden keys get a score of -9 instead of minus infinity",
    "mask lost beyond 24": "queries from position 24 on read every key",
    "mask lost in training": "training reads every key",
    "mask aligned at the first key": "with a cache, query i of a piece reads the first i + 1 keys of all",
    "piece without a mask": "with a cache, the tokens of a piece read each other both ways",
    "piece alone": "with a cache, a piece longer than one token does not read what is cached",
    "causal": "an encoder reads only backwards",
    "padding read": "the padding mask is not used",
    "padding read on the left": "it is used for padding on the right only",
    "padding read with a cache": "it is not used once something is cached",
    "padding off by one": "the last padding before a token is read",
    "padding spreads": "a row with padding is divided by its number of real tokens over that of all",
    "packing ignored": "documents read each other",
    "packing ignored in the last block": "the same in one block",
    "packing off by one": "the first token of a document reads the last of the one before",
    "packed positions go on": "positions are not restarted with a document",
    "window plus one": "one key more than the window",
    "window minus one": "one key less",
    "no window": "the window is not used",
    "no window in the last block": "the same in one block",
    "window plus one with a cache": "one key more once something is cached",
    "angles start anew with a cache": "each piece is turned as if it began at position 0",
    "angles one late with a cache": "a piece is turned as if it began one position later",
    "first key lost with a cache": "the first key of the cache is not read",
    "last value kept with a cache": "the values of the last position are those of the one before",
    "only queries turned": "keys are not rotated",
    "queries turned faster": "queries are rotated with another base",
    "angle pairs mixed": "angles are laid out for neighbours, halves are rotated",
    "positions ignored": "the position is not used",
    "positions in half the bits": "positions are rounded to bfloat16 before they are used",
    "positions in the weights' dtype": "positions are cast to the dtype of the weights",
    "positions eight apart": "positions are divided by 8 and rounded down",
    "table clamped": "rows longer than the table of positions get its last vector",
    "positions clamped": "positions past the trained length are those of its end",
    "blow-up past the trained length": "activations past the trained length overflow",
    "batch norm": "activations are normalised over the rows of the batch",
    "rows mixed": "heads and rows change places in a reshape",
    "next row added": "a hundredth of the next row is added",
    "capacity": "tokens past a number, counted over the whole batch, skip the MLP",
    "source padding read": "the source's padding mask is not used",
    "source mask shifted": "the source's padding mask is off by one",
    "source padding read in the encoder": "it is used in cross-attention only",
    "dropout always": "dropout acts in evaluation",
    "block kept in training": "a block is not told of evaluation",
    "remembers the longest row": "angles depend on the longest row seen so far",
    "noise": "a random number is added to the stream",
    "scale twice": "scores are divided by the root of the width twice",
    "eps too large": "the norm's epsilon is 0.1",
    "no final norm": "the last norm is left out",
    "bias on the diagonal": "a shift of the own position's score",
    "gelu by tanh": "the activation is approximated",
}
"""What each fault does."""


@dataclass(frozen=True)
class Shape:
    """What the small Transformer is.

    Attributes:
        window: keys that a query reads, its own included.
        trained_length: past which nothing is promised; only some faults read it.
    """

    family: Family = "decoder"
    position: Position = "rope"
    window: int | None = None
    tied: bool = False
    dropout: float = 0.0
    n_layers: int = 2
    d_model: int = 24
    n_heads: int = 2
    vocab_size: int = 41
    context: int = 512
    trained_length: int = 32
    experts: int = 0
    faults: frozenset[str] = frozenset()
    seed: int = 0

    def __post_init__(self) -> None:
        unknown = self.faults - FAULTS.keys()
        if unknown:
            raise ValueError(f"no such fault: {sorted(unknown)}")


@dataclass
class Store:
    """What a decoder keeps between pieces: per block keys and values, and the mask of what is kept.

    Attributes:
        how: what is made of new keys and values before they are kept; None: nothing.
    """

    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)
    mask: Tensor | None = None
    length: int = 0
    how: Callable[[Tensor], Tensor] | None = None


class Block(nn.Module):
    """Norm, attention, (norm, attention to the source,) norm, MLP, each added to the stream."""

    def __init__(self, shape: Shape, index: int, crossed: bool) -> None:
        super().__init__()
        d = shape.d_model
        self.shape, self.index = shape, index
        for name in ("q", "k", "v", "o"):
            self.add_module(name, nn.Linear(d, d, bias=False))
            if crossed:
                self.add_module(f"cross_{name}", nn.Linear(d, d, bias=False))
        width = max(1, shape.experts)
        self.up = nn.ModuleList(nn.Linear(d, 2 * d) for _ in range(width))
        self.down = nn.ModuleList(nn.Linear(2 * d, d) for _ in range(width))
        self.router = nn.Linear(d, width, bias=False) if shape.experts else None
        self.gains = nn.ParameterList(nn.Parameter(torch.ones(d)) for _ in range(3 if crossed else 2))

    def forward(self, x: Tensor, pass_: Pass) -> Tensor:
        """x (B, T, d)."""
        h = norm(x, self.gains[0], self.shape)
        x = x + self._drop(self._attend(h, h, pass_, ""), pass_)
        if pass_.memory is not None:
            x = x + self._drop(self._attend(norm(x, self.gains[2], self.shape), pass_.memory, pass_, "cross_"), pass_)
        return x + self._drop(self._mlp(norm(x, self.gains[1], self.shape)), pass_)

    def _drop(self, x: Tensor, pass_: Pass) -> Tensor:
        faults = self.shape.faults
        acts = pass_.training or "dropout always" in faults
        acts |= "block kept in training" in faults and self.index == 0
        return F.dropout(x, self.shape.dropout, acts) if self.shape.dropout else x

    def _attend(self, x: Tensor, read: Tensor, pass_: Pass, prefix: str) -> Tensor:
        def heads(name: str, given: Tensor) -> Tensor:
            out: Tensor = self.get_submodule(prefix + name)(given)
            return out.view(*out.shape[:2], self.shape.n_heads, -1).transpose(1, 2)

        q, k, v = heads("q", x), heads("k", read), heads("v", read)
        if prefix:
            seen = pass_.seen_source
        else:
            q, k = pass_.turned(q, True), pass_.turned(k, False)
            k, v = pass_.kept(self.index, k, v)
            seen = pass_.seen(self.index)
        mixed = pass_.mix(q, k, v, seen, "" if prefix else self.shape.position)
        if "rows mixed" in self.shape.faults:
            mixed = mixed.transpose(0, 1).reshape(mixed.shape)
        out: Tensor = self.get_submodule(prefix + "o")(mixed.transpose(1, 2).flatten(2))
        return out

    def _mlp(self, h: Tensor) -> Tensor:
        faults = self.shape.faults
        if "batch norm" in faults:
            h = (h - h.mean(0, keepdim=True)) / (h.std(0, keepdim=True, unbiased=False) + 0.1) if len(h) > 1 else h
        if "next row added" in faults:
            h = h + 0.01 * h.roll(1, 0)
        approximate = "tanh" if "gelu by tanh" in faults else "none"
        outs = [down(F.gelu(up(h), approximate=approximate)) for up, down in zip(self.up, self.down, strict=True)]
        out: Tensor = outs[0]
        if self.router is not None:
            best = self.router(h).argmax(-1)
            out = torch.stack(outs, -2).gather(-2, best[..., None, None].expand(*best.shape, 1, h.shape[-1]))[..., 0, :]
        if "capacity" in faults:
            kept = torch.arange(h.shape[0] * h.shape[1], device=h.device).view(h.shape[:2]) < 24
            out = out * kept[..., None]
        return out


def norm(x: Tensor, gain: Tensor, shape: Shape) -> Tensor:
    """Root-mean-square norm."""
    eps = 0.1 if "eps too large" in shape.faults else 1e-5
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * gain


class Tiny(nn.Module):
    """The small Transformer: `forward(feed)` gives logits (B, T, V)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        d, v = shape.d_model, shape.vocab_size
        self.embed = nn.Embedding(v, d)
        self.places = nn.Embedding(shape.context, d) if shape.position == "learned" else None
        crossed = shape.family == "encoder-decoder"
        self.blocks = nn.ModuleList(Block(shape, i, crossed) for i in range(shape.n_layers))
        self.encoder = nn.ModuleList(Block(shape, i, False) for i in range(shape.n_layers if crossed else 0))
        self.final = nn.Parameter(torch.ones(d))
        self.head = nn.Linear(d, v, bias=False)
        draw = torch.Generator().manual_seed(shape.seed)
        with torch.no_grad():
            for name, weight in self.named_parameters():
                if weight.dim() > 1 or name.endswith("bias"):
                    weight.copy_(torch.randn(weight.shape, generator=draw) * 1.3 * weight.shape[-1] ** -0.5)
        if shape.tied:
            self.head.weight = self.embed.weight
        self.longest = 0
        self.maps: list[Tensor] | None = None
        self.draw = torch.Generator().manual_seed(99)

    def forward(self, feed: Feed, store: Store | None = None, kernel: str = "plain") -> Tensor:
        """Logits (B, T, V) of a feed, behind what `store` holds."""
        from scantling.audits.planted_pass import Pass

        memory = seen_source = None
        if feed.source is not None:
            inner = Pass(self, Feed(feed.source, mask=feed.source_mask), None, kernel, encodes=True)
            memory = self._run(self.encoder, self._embedded(feed.source, inner), inner)
            seen_source = inner.source_seen(feed.source_mask)
        pass_ = Pass(self, feed, store, kernel, memory=memory, seen_source=seen_source)
        x = self._run(self.blocks, self._embedded(feed.ids, pass_), pass_)
        pass_.close()
        if "no final norm" not in self.shape.faults:
            x = norm(x, self.final, self.shape)
        out: Tensor = self.head(x)
        return out

    def _embedded(self, ids: Tensor, pass_: Any) -> Tensor:
        x: Tensor = self.embed(ids)
        places = pass_.places()
        if self.places is not None:
            if "table clamped" in self.shape.faults:
                places = places.clamp(max=self.shape.context - 1)
            x = x + self.places(places)
        elif self.shape.position == "sinusoidal":
            angles = pass_.angles(places, self.shape.d_model)
            x = x + torch.stack([angles.sin(), angles.cos()], -1).flatten(-2).to(x.dtype)
        if "noise" in self.shape.faults:
            x = x + 0.01 * torch.randn(x.shape, generator=self.draw).to(x)
        return x

    def _run(self, blocks: Any, x: Tensor, pass_: Any) -> Tensor:
        for block in blocks:
            x = block(x, pass_)
        return pass_.spoilt(x)  # type: ignore[no-any-return]
