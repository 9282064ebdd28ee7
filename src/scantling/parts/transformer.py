"""The whole model: token ids to logits, and what is read from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from scantling.parts.leaf import Embedding, Linear
from scantling.parts.part import Child, Part, Shape, Step, Workload
from scantling.parts.stack import Stack


@dataclass(frozen=True)
class Head(Part):
    """Logits from the stream: (B, T, d) -> (B, T, V).

    Attributes:
        width: of the vectors that the matrix reads; a projection narrows the stream to it where it is not d_model.
        rows: of the matrix; at least `vocab_size`, more where the vocabulary is padded.
        tied: the matrix is the embedding's, so the head owns none (Press and Wolf, arXiv:1608.05859).
        bias: a shift per token.
        scale: factor on the stream before the matrix (T5), or None.
        softcap: c in c * tanh(logits / c), or None.
    """

    d_model: int
    width: int
    rows: int
    vocab_size: int
    tied: bool
    bias: bool = False
    scale: float | None = None
    softcap: float | None = None
    role = "head"

    @property
    def initial(self) -> Mapping[str, float]:
        return {"bias": 0.0}

    def children(self) -> Mapping[str, Part]:
        named: dict[str, Part] = {} if self.width == self.d_model else {"narrow": Linear(self.d_model, self.width)}
        return named if self.tied else named | {"matrix": Linear(self.width, self.rows, self.bias)}

    def weights(self) -> Mapping[str, Shape]:
        return {"bias": (self.rows,)} if self.tied and self.bias else {}

    def steps(self, w: Workload) -> Iterator[Step]:
        shape, note = (*w.rows, self.rows), "A score for every token of the vocabulary."
        if self.width != self.d_model:
            yield from self.steps_of("narrow", w, "narrow", "Back to the width of the token table.")
        if self.scale:
            formula = f"{self.scale:g} x"
            yield Step(":scaled", "scale", (*w.rows, self.width), formula=formula, note="Keeps the logits in bounds.")
        if self.tied:
            flops = next(Linear(self.width, self.rows).steps(w)).flops
            params, formula = (self.rows, "x E^T + b") if self.bias else (0, "x E^T")
            yield Step(":product", "LM head (tied)", shape, params, flops, flops, formula=formula, note=note)
        else:
            yield from self.steps_of("matrix", w, "LM head", note)
        if self.softcap:
            formula = f"{self.softcap:g} tanh(x / {self.softcap:g})"
            yield Step(":capped", "soft cap", shape, formula=formula, note="Keeps the logits in bounds.")
        if self.rows != self.vocab_size:
            cut = (*w.rows, self.vocab_size)
            yield Step(":cut", "cut the padding", cut, formula="x[:V]", note="Padded rows are no tokens.")

    def forward(self, net: Any, x: Any, table: Any, ctx: Any) -> Any:
        if self.width != self.d_model:
            x = net.narrow(x)
        if self.scale:
            x = ctx.mark(net, "scaled", x * self.scale)
        if self.tied:
            logits = x @ table.T
            logits = ctx.mark(net, "product", logits + net.bias if self.bias else logits)
        else:
            logits = net.matrix(x)
        if self.softcap:
            logits = ctx.mark(net, "capped", (logits / self.softcap).tanh() * self.softcap)
        if self.rows != self.vocab_size:
            logits = ctx.mark(net, "cut", logits[..., : self.vocab_size])
        return logits


@dataclass(frozen=True)
class Transformer(Part):
    """A decoder: ids (B, T) -> logits (B, T, V).

    Attributes:
        widen: from the table's width to d_model, or None where they are equal.
        scale: factor on the embeddings, or None.
        scale_rounded: the factor is rounded to the embeddings' dtype before it multiplies.
    """

    embed: Embedding
    decoder: Stack
    head: Head
    widen: Linear | None = None
    scale: float | None = None
    scale_rounded: bool = False
    role = "embedding"

    def children(self) -> Mapping[str, Child]:
        named: dict[str, Child] = {"embed": self.embed}
        if self.widen:
            named["widen"] = self.widen
        return named | {"decoder": self.decoder, "head": self.head}

    @property
    def d_model(self) -> int:
        """Width of the residual stream."""
        return self.head.d_model

    def steps(self, w: Workload) -> Iterator[Step]:
        note = "Text cut into pieces of the vocabulary."
        yield Step(":ids", "text to token ids", w.rows, formula="text -> ids", note=note, dtype="int64")
        yield from self.steps_of("embed", w, note="One row of the table per token.")
        if self.widen:
            yield from self.steps_of("widen", w, "widen", "From the table's width to the stream's.")
        if self.scale is not None:
            note = "Brings the vectors to the size the blocks expect."
            yield Step(":scaled", "scale embeddings", (*w.rows, self.d_model), formula=f"{self.scale:g} x", note=note)
        yield from self.steps_of("decoder", w)
        yield from self.steps_of("head", replace(w, lead=(w.batch, 1)) if w.last_only else w)
        yield from self._outcome_steps(w)

    def _outcome_steps(self, w: Workload) -> Iterator[Step]:
        if not w.training:
            note = "The distribution of the next token, from the last position."
            shape = (w.batch, self.head.vocab_size)
            yield Step(":probabilities", "softmax", shape, formula="softmax(logits[-1])", note=note, dtype="float32")
        if w.tokens > 1 and not w.last_only:
            note = "Each position against the token that follows it; mean, in nats."
            yield Step(":loss", "cross-entropy", (), formula="-log p(next token)", note=note, dtype="float32")

    def forward(self, net: Any, ids: Any, ctx: Any = None) -> Any:
        if ctx is None:
            from scantling.tensor.context import Context

            ctx = Context.of(ids, training=net.training)
        x = net.embed(ctx.mark(net, "ids", ids))
        if self.widen:
            x = net.widen(x)
        if self.scale is not None:
            x = ctx.mark(net, "scaled", x * (x.new_full((), self.scale) if self.scale_rounded else self.scale))
        x = net.decoder(x, ctx)
        return net.head(x[:, -1:] if ctx.last_only else x, net.embed.weight, ctx)

    def outcome(self, net: Any, ids: Any, logits: Any, ctx: Any) -> tuple[Any, Any]:
        """Next-token probabilities (B, V) or None in training, and the loss () or None where T is 1."""
        probabilities = None if ctx.training else ctx.mark(net, "probabilities", logits[:, -1].float().softmax(-1))
        loss = ctx.mark(net, "loss", ctx.cross_entropy(logits[:, :-1], ids[:, 1:])) if ids.shape[1] > 1 else None
        return probabilities, loss
