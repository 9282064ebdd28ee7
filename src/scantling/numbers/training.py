"""Memory of a training step, line by line, in bytes: what is held all the time, and what waits for the backward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from scantling.errors import ScantlingInputError, nearest
from scantling.numbers.memory import held, largest_scores, logits_of
from scantling.numbers.optimizers import states, trained
from scantling.parts.heads import Head
from scantling.parts.part import Step, Workload, total
from scantling.parts.saved import NARROW
from scantling.parts.transformer import Transformer
from scantling.units import DTYPE_BYTES

PIECE = 2**24
"""Logits in one piece of a chunked loss, unless its rows are given."""


@dataclass(frozen=True)
class Precision:
    """In which formats a step holds and computes things.

    Attributes:
        weights: while they compute; activations and gradients have the same.
        autocast: what products run in, where it is narrower.
        master: the second copy of the weights, which the optimiser updates (Micikevicius et al., arXiv:1710.03740,
            section 3.1); None where it updates the weights themselves.
    """

    name: str
    weights: str
    autocast: str | None = None
    master: str | None = None

    @property
    def updated(self) -> str:
        """Format of what the optimiser updates, and so of its moments."""
        return self.master or self.weights


PRECISIONS = {
    precision.name: precision
    for precision in (
        Precision("fp32", "float32"),
        Precision("bf16-mixed", "float32", autocast="bfloat16"),
        Precision("bf16-master", "bfloat16", master="float32"),
        Precision("bf16", "bfloat16"),
    )
}
"""All in float32; float32 with torch.autocast; bfloat16 with a float32 copy of the weights; all in bfloat16."""


@dataclass(frozen=True)
class Recipe:
    """How a step is made.

    Attributes:
        precision: a key of PRECISIONS.
        optimizer: one of OPTIMIZERS.
        loss: ``plain`` holds all logits; ``chunked`` scores, judges and differentiates some rows after others.
        rows: of a piece of the chunked loss; None for as many as make `PIECE` logits.
        micro_batches: forwards and backwards before one update; gradients stay between them.
        main_gradients: with a master copy, gradients are summed in float32, and the narrow ones do not outlive a
            backward: what `train` does, 18 bytes a parameter with AdamW. False keeps them as narrow as the weights, 16
            bytes. None is True where there is a master copy.
    """

    precision: str = "bf16-mixed"
    optimizer: str = "adamw"
    loss: str = "plain"
    rows: int | None = None
    micro_batches: int = 1
    main_gradients: bool | None = None

    def __post_init__(self) -> None:
        for what, known in (("precision", PRECISIONS), ("loss", ("plain", "chunked"))):
            if (value := getattr(self, what)) not in known:
                raise ScantlingInputError(f"no {what} {value!r}{nearest(value, known)}; known: {', '.join(known)}")
        for what in ("rows", "micro_batches"):
            if (size := getattr(self, what)) is not None and size < 1:
                raise ScantlingInputError(f"{what} is {size}; at least 1 is needed")
        master = PRECISIONS[self.precision].master is not None
        if self.main_gradients is None:
            object.__setattr__(self, "main_gradients", master)
        elif self.main_gradients and not master:
            raise ScantlingInputError(
                f"{self.precision} has no master copy, so its gradients are never kept in another format; "
                "main gradients go with bf16-master"
            )

    @property
    def formats(self) -> Precision:
        """The precision itself."""
        return PRECISIONS[self.precision]


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes by line.

    Attributes:
        weights: every parameter and buffer, as they compute.
        master: the second copy of what is trained.
        gradients: of what is trained, by format.
        optimizer: the optimiser's states, by item.
        activations: what autograd keeps for the backward, a plain loss's own included: what torch's hooks count.
        copies: of them, narrow copies of weights that autocast makes.
        loss: of the activations, what a plain loss keeps; 0 with a chunked one.
        loss_gradients: what a chunked loss has made when the forward ends: the gradients of its vectors and its matrix.
        logits: (B, T, V) in float32, if all are kept.
        scores: (B, H, T, S) of one layer, the largest, if a kernel stores them; a fused kernel does not.
    """

    weights: int
    master: int
    gradients: dict[str, int]
    optimizer: dict[str, int]
    activations: int
    copies: int
    loss: int
    loss_gradients: int
    logits: int
    scores: int

    @property
    def total(self) -> int:
        """States and activations, all at once: what is there in the forward of every micro-batch but the first."""
        return self.states + self.activations

    @property
    def states(self) -> int:
        """All that does not depend on the batch: weights, master copy, gradients, optimiser."""
        return self.weights + self.master + sum(self.gradients.values()) + sum(self.optimizer.values())


def state_lines(memory: TrainingMemory, recipe: Recipe) -> dict[str, int]:
    """Bytes of what does not depend on the batch, by item with its format."""
    formats = recipe.formats
    lines = {f"weights, {formats.weights}": memory.weights}
    if formats.master:
        lines[f"master copy, {formats.master}"] = memory.master
    return lines | memory.gradients | memory.optimizer


def asked(w: Workload, recipe: Recipe) -> Workload:
    """The training pass over `w` in the recipe's formats."""
    formats = recipe.formats
    return replace(w, training=True, past=0, last_only=False, dtype=formats.weights, autocast=formats.autocast)


def training_memory(model: Transformer, w: Workload, recipe: Recipe = Recipe()) -> TrainingMemory:
    """Every line for a step over `w`, of which dtype and autocast are those of the recipe.

    Raises:
        ScantlingInputError: a chunked loss and a head without a vocabulary, or no such optimizer.
    """
    formats, w = recipe.formats, asked(w, recipe)
    if recipe.loss == "chunked" and not isinstance(model.head, Head):
        raise ScantlingInputError("a chunked loss is that of a vocabulary, and this head has none")
    weights = trained(model)
    numel = sum(weight.numel for weight in weights)
    kept = "float32" if recipe.main_gradients else formats.weights
    steps = [*judged(model, w, recipe.loss)]
    copies = (v.nbytes(w.dtype) * step.repeat for step in steps for v in step.saved if v.name == NARROW)
    return TrainingMemory(
        weights=held(model) * DTYPE_BYTES[formats.weights],
        master=numel * DTYPE_BYTES[formats.master] if formats.master else 0,
        gradients={f"gradients, {kept}": numel * DTYPE_BYTES[kept]},
        optimizer=states(weights, recipe.optimizer, formats.updated),
        activations=total(steps, "saved_bytes"),
        copies=sum(copies),
        loss=sum(step.saved_bytes for step in steps if step.path == ":loss"),
        loss_gradients=_chunked(model, w) if recipe.loss == "chunked" else 0,
        logits=logits_of(model, w) * DTYPE_BYTES["float32"],
        scores=largest_scores(model, w) * DTYPE_BYTES[w.autocast or w.dtype],
    )


def judged(model: Transformer, w: Workload, loss: str) -> Iterator[Step]:
    """The rows of a pass; with a chunked loss, those before the scores."""
    for step in model.steps(w):
        if loss == "chunked" and step.path in SCORED:
            return
        yield step


SCORED = ("head:product", "head.matrix")
"""The rows whose output are the scores of a vocabulary."""


def _chunked(model: Transformer, w: Workload) -> int:
    """A chunked loss has made the gradients of its vectors and of its matrix when the forward ends."""
    assert isinstance(model.head, Head)
    size = DTYPE_BYTES[w.autocast or w.dtype]
    return size * model.head.width * (w.batch * w.tokens + model.head.rows)
