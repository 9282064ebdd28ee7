"""The whole model: token ids to logits, and what is read from them."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from scantling.errors import ScantlingInputError
from scantling.parts.dims import ONE, Dim, elements
from scantling.parts.heads import AnyHead, Head
from scantling.parts.leaf import Embedding, Linear
from scantling.parts.part import Child, Part, Step, Workload
from scantling.parts.saved import Value, flowing, settled
from scantling.parts.stack import Stack


@dataclass(frozen=True)
class Transformer(Part):
    """A decoder, an encoder, or both: ids (B, T) -> what the head makes of the stream.

    With both, the decoder reads the encoder's output of a source (B, S) through cross-attention, and the head reads
    the decoder.

    Attributes:
        embed: the token table, of source and target where there are both.
        target_embed: the target's own table, or None.
        widen: from the table's width to d_model, or None where they are equal.
        scale: factor on the embeddings, or None.
        scale_rounded: the factor is rounded to the embeddings' dtype before it multiplies.
    """

    embed: Embedding
    head: AnyHead
    encoder: Stack | None = None
    decoder: Stack | None = None
    target_embed: Embedding | None = None
    widen: Linear | None = None
    scale: float | None = None
    scale_rounded: bool = False
    role = "embedding"

    def children(self) -> Mapping[str, Child]:
        named: dict[str, Child | None] = {
            "embed": self.embed,
            "target_embed": self.target_embed,
            "widen": self.widen,
            **self.stacks,
            "head": self.head,
        }
        return {name: part for name, part in named.items() if part is not None}

    @property
    def stacks(self) -> dict[str, Stack]:
        """The stacks that there are, in the order of execution."""
        both = {"encoder": self.encoder, "decoder": self.decoder}
        return {name: stack for name, stack in both.items() if stack is not None}

    @property
    def two_stacks(self) -> bool:
        """Whether there is a source besides the ids."""
        return len(self.stacks) == 2

    @property
    def d_model(self) -> int:
        """Width of the residual stream."""
        return self.head.d_model

    @property
    def table(self) -> Embedding:
        """The table of what the head scores."""
        return self.target_embed or self.embed

    def steps(self, w: Workload) -> Iterator[Step]:
        if self.decoder is None and w.past:
            raise ScantlingInputError(f"past is {w.past}: an encoder reads both ways and keeps no cache")
        return iter(settled(self._steps(w), w)) if w.training else self._steps(w)

    def _steps(self, w: Workload) -> Iterator[Step]:
        if self.two_stacks and w.past == 0:
            source = replace(w, tokens=w.sources, source=None, last_only=False, of_source=True)
            x = yield from self._embed_steps(source, "embed", "source_")
            read = yield from self.steps_of("encoder", source.on(x))
            w = replace(w, beside=Value("the encoder's output", read.numel, read.dtype, "memory"))
        again = self.two_stacks and self.target_embed is None and w.past == 0
        ids = Value("ids", elements(w.rows), "int64")
        rows = self._embed_steps(w.on(ids), "target_embed" if self.target_embed else "embed")
        x = yield from flowing((replace(step, params=0) if again else step for step in rows), None)
        x = yield from self.steps_of(list(self.stacks)[-1], w.on(x))
        inner = replace(w, lead=(w.B, ONE)) if w.last_only else w
        logits = yield from self.steps_of("head", inner.on(x))
        yield from self.head.outcome_steps(replace(w.on(logits), beside=ids))

    def _embed_steps(self, w: Workload, table: str, prefix: str = "") -> Generator[Step, None, Value]:
        held = self.target_embed if table == "target_embed" and self.target_embed else self.embed
        d, padded = Dim("d_model", self.d_model), isinstance(self.head, Head) and self.head.vocab_size != held.rows
        width = d if held.d_model == self.d_model else Dim("d_embed", held.d_model)
        note, sizes = "Text cut into pieces of the vocabulary.", {"d": width}
        ids = w.read(elements(w.rows), "int64")
        yield Step(f":{prefix}ids", "text to token ids", w.rows, formula="text -> ids", note=note, dtype="int64")
        sizes["rows"] = Dim("V_rows" if padded else "V", held.rows)
        x = yield from self.steps_of(table, w.on(ids), note="One row of the table per token.", sizes=sizes)
        if self.widen:
            note, wider = "From the table's width to the stream's.", {"d_in": width, "d_out": d}
            x = yield from self.steps_of("widen", w.on(x), "widen", note, wider)
        if self.scale is not None:
            note, formula = "Brings the vectors to the size the blocks expect.", f"{self.scale:g} x"
            axes = (*w.rows, width if self.widen is None else d)
            x = Value("scaled embeddings", elements(axes), x.dtype)
            saved = w.keep(Value("the factor", 1, x.dtype)) if self.scale_rounded else ()
            op = "scale embeddings"
            yield Step(f":{prefix}scaled", op, axes, formula=formula, note=note, dtype=x.dtype, saved=saved, out=x)
        return x

    def forward(self, net: Any, ids: Any, ctx: Any = None, source: Any = None) -> Any:
        """ids (B, T), of the target where there is a source (B, S): logits, or what the head gives."""
        if ctx is None:
            from scantling.tensor.context import Context

            ctx = Context.of(ids, training=net.training)
        if source is not None:
            inner = ctx.of_source(source)
            ctx.read(net.encoder(self._embedded(net, source, inner, "source_"), inner))
        x = self._embedded(net, ids, ctx)
        x = (net.decoder if self.decoder else net.encoder)(x, ctx)
        table = (net.target_embed if self.target_embed else net.embed).weight
        return net.head(ctx.wanted(x), table, ctx)

    def _embedded(self, net: Any, ids: Any, ctx: Any, prefix: str = "") -> Any:
        own = self.target_embed is not None and not prefix
        x = (net.target_embed if own else net.embed)(ctx.mark(net, f"{prefix}ids", ids))
        if self.widen:
            x = net.widen(x)
        if self.scale is not None:
            scale = x.new_full((), self.scale) if self.scale_rounded else self.scale
            x = ctx.mark(net, f"{prefix}scaled", x * scale)
        return x

    def outcome(self, net: Any, ids: Any, logits: Any, ctx: Any) -> tuple[Any, Any]:
        """Probabilities, None in training; and the loss (), None where there is no target."""
        return self.head.outcome(net, ids, logits, ctx)
