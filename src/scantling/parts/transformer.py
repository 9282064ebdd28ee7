"""The whole model: token ids to logits, and what is read from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from scantling.parts.leaf import Embedding, Linear
from scantling.parts.part import Child, Part, Step, Workload
from scantling.parts.stack import Stack


@dataclass(frozen=True)
class Head(Part):
    """Logits from the stream: (B, T, d) -> (B, T, V).

    Attributes:
        rows: of the matrix; at least `vocab_size`, more where the vocabulary is padded.
        tied: the matrix is the embedding's, so the head owns none (Press and Wolf, arXiv:1608.05859).
        softcap: c in c * tanh(logits / c), or None.
    """

    d_model: int
    rows: int
    vocab_size: int
    tied: bool
    softcap: float | None = None
    role = "head"

    def children(self) -> Mapping[str, Part]:
        return {} if self.tied else {"matrix": Linear(self.d_model, self.rows)}

    def steps(self, w: Workload) -> Iterator[Step]:
        shape, note = (*w.rows, self.rows), "A score for every token of the vocabulary."
        product = next(Linear(self.d_model, self.rows).steps(w))
        if self.tied:
            yield Step(":product", "LM head (tied)", shape, 0, product.flops, product.flops, formula="x E^T", note=note)
        else:
            yield from self.steps_of("matrix", w, "LM head", note)
        if self.softcap:
            yield Step(":capped", "soft cap", shape, formula=f"{self.softcap:g} tanh(x / {self.softcap:g})")
        if self.rows != self.vocab_size:
            yield Step(":cut", "cut the padding", (*w.rows, self.vocab_size), note="Padded rows are no tokens.")

    def forward(self, net: Any, x: Any, table: Any, ctx: Any) -> Any:
        logits = ctx.mark(net, "product", x @ table.T) if self.tied else net.matrix(x)
        if self.softcap:
            logits = ctx.mark(net, "capped", (logits / self.softcap).tanh() * self.softcap)
        if self.rows != self.vocab_size:
            logits = ctx.mark(net, "cut", logits[..., : self.vocab_size])
        return logits


@dataclass(frozen=True)
class Transformer(Part):
    """A decoder: ids (B, T) -> logits (B, T, V).

    Attributes:
        scale: factor on the embeddings, or None.
    """

    embed: Embedding
    decoder: Stack
    head: Head
    scale: float | None = None
    role = "embedding"

    def children(self) -> Mapping[str, Child]:
        return {"embed": self.embed, "decoder": self.decoder, "head": self.head}

    def steps(self, w: Workload) -> Iterator[Step]:
        yield Step(":ids", "token ids", w.rows, note="Text cut into pieces of the vocabulary.", dtype="int64")
        yield from self.steps_of("embed", w, note="One row of the table per token.")
        if self.scale is not None:
            yield Step(":scaled", "scale embeddings", (*w.rows, self.embed.d_model), formula=f"{self.scale:g} x")
        yield from self.steps_of("decoder", w)
        yield from self.steps_of("head", w)
        yield from self._outcome_steps(w)

    def _outcome_steps(self, w: Workload) -> Iterator[Step]:
        if not w.training:
            note = "The distribution of the next token, from the last position."
            shape = (w.batch, self.head.vocab_size)
            yield Step(":probabilities", "softmax", shape, formula="softmax(logits[-1])", note=note, dtype="float32")
        if w.tokens > 1:
            note = "Each position against the token that follows it; mean, in nats."
            yield Step(":loss", "cross-entropy", (), formula="-log p(next token)", note=note, dtype="float32")

    def forward(self, net: Any, ids: Any, ctx: Any = None) -> Any:
        if ctx is None:
            from scantling.tensor.context import Context

            ctx = Context.of(ids)
        x = net.embed(ctx.mark(net, "ids", ids))
        if self.scale is not None:
            x = ctx.mark(net, "scaled", x * self.scale)
        x = net.decoder(x, ctx)
        return net.head(x[:, -1:] if ctx.last_only else x, net.embed.weight, ctx)

    def outcome(self, net: Any, ids: Any, logits: Any, ctx: Any) -> tuple[Any, Any]:
        """Next-token probabilities (B, V) or None in training, and the loss () or None where T is 1."""
        probabilities = None if ctx.training else ctx.mark(net, "probabilities", logits[:, -1].float().softmax(-1))
        loss = ctx.mark(net, "loss", ctx.cross_entropy(logits[:, :-1], ids[:, 1:])) if ids.shape[1] > 1 else None
        return probabilities, loss
