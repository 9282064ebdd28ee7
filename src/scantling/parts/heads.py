"""Heads: what is read from the stream at the end."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from scantling.parts.dims import Dim, Dims, Shape, elements
from scantling.parts.leaf import WIDE, Linear, Norm, read_by
from scantling.parts.mlp import activated
from scantling.parts.part import FREE, Factor, Part, Step, Workload
from scantling.parts.saved import Value


@dataclass(frozen=True)
class Transform(Part):
    """norm(act(x W^T + b)): (..., d_in) -> (..., d_out), before the output matrix (BERT, arXiv:1810.04805)."""

    d_in: int
    d_out: int
    act: str
    bias: bool = True
    norm: Norm | None = None

    def children(self) -> Mapping[str, Part]:
        named: dict[str, Part] = {"dense": Linear(self.d_in, self.d_out, self.bias)}
        return named | ({"norm": self.norm} if self.norm else {})

    def steps(self, w: Workload) -> Iterator[Step]:
        out, note = Dim("d_out", self.d_out), "One more look at each vector before the scores."
        dense = yield from self.steps_of("dense", w, "transform", note)
        axes = (*w.rows, out)
        acted, kept = activated(self.act, dense, elements(axes))
        formula, saved = f"{self.act}(x W^T)", w.keep(*kept)
        yield Step(":acted", self.act, axes, formula=formula, dtype=acted.dtype, saved=saved, out=acted)
        if self.norm:
            yield from self.steps_of("norm", w.on(acted), sizes={"d": out})

    def forward(self, net: Any, x: Any, ctx: Any) -> Any:
        x = ctx.mark(net, "acted", ctx.activate(self.act, net.dense(x)))
        return net.norm(x) if self.norm else x


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
            yield from _outcome(w, (w.B, w.T, V), "softmax", "The distribution of each token's own place.")
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
            return _judged(net, logits, ctx, "softmax")
        probabilities = None if ctx.training else ctx.mark(net, "probabilities", logits[:, -1].float().softmax(-1))
        loss = ctx.mark(net, "loss", ctx.cross_entropy(logits[:, :-1], ids[:, 1:])) if ids.shape[1] > 1 else None
        return probabilities, loss


def cross_entropy(rows: int, classes: int, targets: Value) -> tuple[Value, ...]:
    """What the loss keeps: the logarithms of all probabilities, the targets, and how many there are."""
    return Value("log-probabilities", rows * classes, WIDE), targets, Value("number of targets", 1, WIDE)


def _outcome(w: Workload, axes: Dims, scores: str, note: str) -> Iterator[Step]:
    """Probabilities in inference; in training the loss, whose targets come from outside."""
    if not w.training:
        yield Step(":probabilities", scores, axes, formula=f"{scores}(logits)", note=note, dtype=WIDE)
        return
    numel = elements(axes)
    if scores == "sigmoid":
        saved: tuple[Value, ...] = (w.cast(w.read(numel), numel, WIDE), Value("targets", numel, WIDE))
    else:
        classes = axes[-1].size
        saved = cross_entropy(numel // classes, classes, Value("targets", numel // classes, "int64"))
    yield Step(":loss", "cross-entropy", (), formula="-log p(target)", note="Mean, in nats.", dtype=WIDE, saved=saved)


def _judged(net: Any, logits: Any, ctx: Any, scores: str) -> tuple[Any, Any]:
    if ctx.training:
        return None, ctx.mark(net, "loss", ctx.judge(logits, scores))
    wide = logits.float()
    return ctx.mark(net, "probabilities", wide.softmax(-1) if scores == "softmax" else wide.sigmoid()), None


@dataclass(frozen=True)
class Labels(Part):
    """A score per label, of each token (B, T, n_labels) or, pooled, of the text (B, n_labels); reads (B, T, d).

    Attributes:
        pool: ``first``, ``mean`` or ``last``: the text's vector; None scores every token.
        scores: ``softmax`` where labels exclude each other, ``sigmoid`` where not.
        flat: the one label's axis is dropped: (B, T) (ELECTRA's replaced tokens, arXiv:2003.10555, section 2).
    """

    d_model: int
    n_labels: int
    transform: Transform | None = None
    pool: str | None = None
    bias: bool = True
    scores: str = "softmax"
    flat: bool = False
    role = "head"

    def children(self) -> Mapping[str, Part]:
        named: dict[str, Part] = {} if self.transform is None else {"transform": self.transform}
        return named | {"matrix": Linear(self.d_model, self.n_labels, self.bias)}

    def steps(self, w: Workload) -> Iterator[Step]:
        d, inner = Dim("d_model", self.d_model), w
        if self.pool:
            yield (step := _pooled_step(w, d, self.pool))
            inner = replace(w.on(step.out), lead=(w.B,))
        if self.transform:
            inner = inner.on((yield from self.steps_of("transform", inner, sizes={"d_in": d, "d_out": d})))
        note, sizes = "A score for every label.", {"d_in": d, "d_out": Dim("n_labels", self.n_labels)}
        logits = yield from self.steps_of("matrix", inner, "classifier", note, sizes)
        if self.flat:
            note, op, dtype = "One score per token.", "drop the axis", logits.dtype
            flat = Step(":flat", op, inner.rows, formula="x[..., 0]", note=note, dtype=dtype, stored=False, out=logits)
            yield flat

    def forward(self, net: Any, x: Any, table: Any, ctx: Any) -> Any:
        if self.pool:
            x = ctx.mark(net, "pooled", ctx.pool(x, self.pool))
        if self.transform:
            x = net.transform(x, ctx)
        logits = net.matrix(x)
        return ctx.mark(net, "flat", logits[..., 0]) if self.flat else logits

    def outcome_steps(self, w: Workload) -> Iterator[Step]:
        """Rows of what is read from the logits."""
        lead = (w.B,) if self.pool else (w.B, w.T)
        axes = lead if self.flat else (*lead, Dim("n_labels", self.n_labels))
        yield from _outcome(w, axes, self.scores, "How likely each label is.")

    def outcome(self, net: Any, ids: Any, logits: Any, ctx: Any) -> tuple[Any, Any]:
        """Probabilities, None in training; and a loss in training."""
        return _judged(net, logits, ctx, self.scores)


@dataclass(frozen=True)
class TextVector(Part):
    """One vector for the whole text: (B, T, d) -> (B, d) (Reimers and Gurevych, arXiv:1908.10084, section 3).

    Attributes:
        pool: ``first``, ``mean`` over real tokens, or ``last``.
        transform: on the pooled vector, or None.
        spare: the transform reads the first token and nobody reads its result; in training it is left out.
        normalize: divided by its Euclidean length.
    """

    d_model: int
    pool: str
    transform: Transform | None = None
    spare: bool = False
    normalize: bool = False
    role = "head"

    def children(self) -> Mapping[str, Part]:
        return {} if self.transform is None else {"transform": self.transform}

    def steps(self, w: Workload) -> Iterator[Step]:
        text, d = replace(w, lead=(w.B,)), Dim("d_model", self.d_model)
        square = {"d_in": d, "d_out": d}
        if self.spare and not w.training:
            yield from self.steps_of("transform", text, note="In the file; nothing reads it.", sizes=square)
        yield (step := _pooled_step(w, d, self.pool))
        text = text.on(step.out)
        if self.transform and not self.spare:
            text = text.on((yield from self.steps_of("transform", text, sizes=square)))
        if self.normalize:
            note = "Length 1, so that a product of two vectors is their cosine."
            x, names = text.read(w.batch * self.d_model), ("lengths", "lengths, at least 1e-12")
            saved = w.keep(x, *(Value(name, w.batch, x.dtype) for name in names))
            yield Step(":unit", "normalise", (w.B, d), formula="x / |x|", note=note, dtype=x.dtype, saved=saved)

    def forward(self, net: Any, x: Any, table: Any, ctx: Any) -> Any:
        if self.spare and not ctx.training:
            net.transform(ctx.pool(x, "first"), ctx)
        x = ctx.mark(net, "pooled", ctx.pool(x, self.pool))
        if self.transform and not self.spare:
            x = net.transform(x, ctx)
        return ctx.mark(net, "unit", ctx.unit(x)) if self.normalize else x

    def outcome_steps(self, w: Workload) -> Iterator[Step]:
        """Nothing is read from a vector."""
        return iter(())

    def outcome(self, net: Any, ids: Any, logits: Any, ctx: Any) -> tuple[Any, Any]:
        """Nothing."""
        return None, None


@dataclass(frozen=True)
class NoHead(Part):
    """The stream itself: (B, T, d)."""

    d_model: int
    role = "head"

    def steps(self, w: Workload) -> Iterator[Step]:
        return iter(())

    def forward(self, net: Any, x: Any, table: Any, ctx: Any) -> Any:
        return x

    def outcome_steps(self, w: Workload) -> Iterator[Step]:
        """Nothing is read from the stream."""
        return iter(())

    def outcome(self, net: Any, ids: Any, logits: Any, ctx: Any) -> tuple[Any, Any]:
        """Nothing."""
        return None, None


def _pooled_step(w: Workload, d: Dim, pool: str) -> Step:
    formula = {"first": "x[0]", "mean": "mean of real x", "last": "last real x"}[pool]
    # One token's vector is a view of the stream.
    axes, note, x = (w.B, d), "One vector for the text.", w.read(0)
    out = Value("mean", elements(axes), x.dtype) if pool == "mean" else x
    return Step(":pooled", f"pool: {pool}", axes, formula=formula, note=note, dtype=x.dtype, out=out)


AnyHead = Head | Labels | TextVector | NoHead
