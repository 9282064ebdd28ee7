"""The head that scores a vocabulary."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from scantling.parts.dims import Dim, Shape, elements
from scantling.parts.heads.outcome import cross_entropy, score_outcome, score_steps
from scantling.parts.heads.transform import Transform
from scantling.parts.leaf import WIDE, Linear, read_by
from scantling.parts.part import FREE, Factor, Part, Step, Workload
from scantling.parts.saved import Value


@dataclass(frozen=True)
class Head(Part):
    """Logits from the stream: (B, T, d) -> (B, T, V).

    Attributes:
        width: of the vectors that the matrix reads; a projection narrows the stream to it where it is not d_model.
        rows: of the matrix; at least `vocab_size`, more where the vocabulary is padded.
        tied: the matrix is the embedding's, so the head owns none (Press and Wolf, arXiv:1608.05859).
        bias: a shift per token.
        fixed: the shift is a buffer that no gradient trains (BART, Marian).
        scale: factor on the stream before the matrix (T5), or None.
        softcap: c in c * tanh(logits / c), or None.
        transform: from d_model to `width`, in the projection's place, or None.
        next_token: the logits are of the token that follows (decoders), not of the token itself (masked LM).
    """

    d_model: int
    width: int
    rows: int
    vocab_size: int
    tied: bool
    bias: bool = False
    fixed: bool = False
    scale: float | None = None
    softcap: float | None = None
    transform: Transform | None = None
    next_token: bool = True
    role = "head"

    @property
    def initial(self) -> Mapping[str, float]:
        return {"bias": 0.0}

    def children(self) -> Mapping[str, Part]:
        named: dict[str, Part] = {}
        if self.transform:
            named["transform"] = self.transform
        elif self.width != self.d_model:
            named["narrow"] = Linear(self.d_model, self.width)
        return named if self.tied else named | {"matrix": Linear(self.width, self.rows, self.bias and not self.fixed)}

    @property
    def _own_bias(self) -> bool:
        return self.bias and (self.tied or self.fixed)

    def weights(self) -> Mapping[str, Shape]:
        return {"bias": (self.rows,)} if self._own_bias and not self.fixed else {}

    def buffers(self) -> Mapping[str, Shape]:
        return {"bias": (self.rows,)} if self._own_bias and self.fixed else {}

    def steps(self, w: Workload) -> Iterator[Step]:
        V, rows = Dim("V", self.vocab_size), Dim("V" if self.rows == self.vocab_size else "V_rows", self.rows)
        d = Dim("d_model", self.d_model)
        width = d if self.width == self.d_model else Dim("d_embed", self.width)
        bounds = "Keeps the logits in bounds."
        if self.transform:
            w = w.on((yield from self.steps_of("transform", w, sizes={"d_in": d, "d_out": width})))
        elif self.width != self.d_model:
            note, sizes = "Back to the width of the token table.", {"d_in": d, "d_out": width}
            w = w.on((yield from self.steps_of("narrow", w, "narrow", note, sizes)))
        if self.scale:
            formula, dtype = f"{self.scale:g} x", w.read(0).dtype
            yield (step := Step(":scaled", "scale", (*w.rows, width), formula=formula, note=bounds, dtype=dtype))
            w = w.on(step.out)
        dtype = (yield from self._product_steps(w, width, rows)).dtype
        if self.softcap:
            formula, logits = f"{self.softcap:g} tanh(x / {self.softcap:g})", (*w.rows, rows)
            saved = w.keep(Value("tanh of the logits", elements(logits), dtype))
            yield Step(":capped", "soft cap", logits, formula=formula, note=bounds, dtype=dtype, saved=saved)
        if self.rows != self.vocab_size:
            note, axes = "Padded rows are no tokens.", (*w.rows, V)
            yield Step(":cut", "cut the padding", axes, formula="x[:V]", note=note, dtype=dtype, stored=False)

    def _product_steps(self, w: Workload, width: Dim, rows: Dim) -> Generator[Step, None, Value]:
        logits, note = (*w.rows, rows), "A score for every token of the vocabulary."
        owned = 0 if self.fixed else self.rows
        shift = () if self.fixed else (Factor("b", (rows,), FREE, weight=True, formula="dy summed over rows"),)
        if not self.tied:
            out = yield from self.steps_of("matrix", w, "LM head", note, {"d_in": width, "d_out": rows})
            if self._own_bias:
                note, op = "A stored shift per token.", "shift"
                yield (step := Step(":shifted", op, logits, owned, formula="x + b", note=note, factors=shift))
                out = step.out
            return out
        numel = elements((*w.rows, width))
        x, table = (
            Factor("x", (*w.rows, width), formula="dy E"),
            Factor("E", (rows, width), formula="dy^T x", weight=True),
        )
        step = Step(
            ":product",
            "LM head (tied)",
            logits,
            owned if self.bias else 0,
            next(Linear(self.width, self.rows).steps(w)).cost,
            formula="x E^T + b" if self.bias else "x E^T",
            note=note,
            # A shift is not cast, and the sum is as wide as the shift.
            dtype=None if self.bias else w.autocast,
            factors=(x, table, *shift) if self.bias else (x, table),
            saved=w.keep(*read_by(w, w.read(numel), numel, self.width * self.rows)),
        )
        yield step
        return step.out

    def forward(self, net: Any, x: Any, table: Any, ctx: Any) -> Any:
        """Logits; where the context stops before them, the vectors (B, T, width) that `matrix` multiplies."""
        if self.transform:
            x = net.transform(x, ctx)
        elif self.width != self.d_model:
            x = net.narrow(x)
        if self.scale:
            x = ctx.mark(net, "scaled", x * self.scale)
        if ctx.before_scores:
            return x
        if self.tied:
            logits = x @ table.T
            logits = ctx.mark(net, "product", logits + net.bias if self.bias else logits)
        else:
            logits = net.matrix(x)
            logits = ctx.mark(net, "shifted", logits + net.bias) if self._own_bias else logits
        if self.softcap:
            logits = ctx.mark(net, "capped", (logits / self.softcap).tanh() * self.softcap)
        if self.rows != self.vocab_size:
            logits = ctx.mark(net, "cut", logits[..., : self.vocab_size])
        return logits

    def matrix(self, net: Any, table: Any) -> tuple[Any, Any]:
        """The matrix (rows, width) and the shift (rows,), or None, that make logits of the vectors before them."""
        if self.tied:
            return table, net.bias if self.bias else None
        return net.matrix.weight, net.bias if self._own_bias else net.matrix.bias

    def outcome_steps(self, w: Workload) -> Iterator[Step]:
        """Rows of what is read from the logits: probabilities, and a loss where there is a target."""
        V = Dim("V", self.vocab_size)
        if not self.next_token:
            yield from score_steps(w, (w.B, w.T, V), "softmax", "The distribution of each token's own place.")
            return
        if not w.training:
            note = "The distribution of the next token, from the last position."
            yield Step(":probabilities", "softmax", (w.B, V), formula="softmax(logits[-1])", note=note, dtype=WIDE)
        if w.tokens > 1 and not w.last_only:
            note = "Each position against the token that follows it; mean, in nats."
            judged = w.batch * (w.tokens - 1)
            # Of one row, and of one target in each, they are a view of the ids.
            view = w.beside if w.batch == 1 or w.tokens == 2 else None
            targets = view or Value("targets", judged, "int64")
            saved = w.keep(*cross_entropy(judged, V.size, targets))
            yield Step(":loss", "cross-entropy", (), formula="-log p(next token)", note=note, dtype=WIDE, saved=saved)

    def outcome(self, net: Any, ids: Any, logits: Any, ctx: Any) -> tuple[Any, Any]:
        """Probabilities, None in training; and the loss, None where there is no target."""
        if not self.next_token:
            return score_outcome(net, logits, ctx, "softmax")
        probabilities = None if ctx.training else ctx.mark(net, "probabilities", logits[:, -1].float().softmax(-1))
        loss = ctx.mark(net, "loss", ctx.cross_entropy(logits[:, :-1], ids[:, 1:])) if ids.shape[1] > 1 else None
        return probabilities, loss
