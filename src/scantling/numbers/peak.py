"""The highest that a training step stands: what is held at once, temporaries included.

Where the account of what autograd keeps is exact, this is a model: of each row it holds the output, what is kept of
it, and in the backward a gradient for each of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby

from scantling.numbers.optimizers import trained, working
from scantling.numbers.training import PIECE, Recipe, TrainingMemory, asked, judged
from scantling.parts.heads import Head
from scantling.parts.part import Workload
from scantling.parts.saved import NARROW
from scantling.parts.transformer import Transformer
from scantling.units import DTYPE_BYTES

FLOATS = ("float64", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Row:
    """A row in the backward.

    Attributes:
        kept: bytes that the forward left here.
        again: bytes that the second forward of its region leaves here besides.
        region: what is computed again together.
        moment: bytes held only while the row's gradients are made.
        gradient: bytes of the gradients of the weights used here.
    """

    kept: int
    again: int
    region: str
    moment: int
    gradient: int
    repeat: int


def training_peak(model: Transformer, w: Workload, recipe: Recipe, memory: TrainingMemory) -> dict[str, int]:
    """Bytes at the moments that can be the highest of a step, by name; the states are there at each.

    Args:
        memory: the lines of the same step.
    """
    w, weights, formats = asked(w, recipe), trained(model), recipe.formats
    base = memory.weights + memory.master + sum(memory.optimizer.values())
    summed = sum(memory.gradients.values())
    narrow = [weight.numel * DTYPE_BYTES[formats.weights] for weight in weights]
    waiting = summed if recipe.micro_batches > 1 else 0
    # Gradients that stay are added to; those that do not are made anew in each backward.
    made = 0 if waiting and not recipe.main_gradients else DTYPE_BYTES[formats.weights]
    rows, scored = [*_rows(model, w, recipe, made)], _matrix(model, recipe) * made
    # What a chunked loss has made stays until the backward ends, beside the gradient of the matrix itself.
    kept = memory.activations + memory.loss_gradients + waiting
    found = {
        "end of the forward": kept + _scored(model, w, recipe, memory),
        # Gradients of the log-probabilities and of the logits, both as wide as what a plain loss keeps.
        "backward of the loss": kept + 2 * memory.loss + scored,
        "backward of the blocks": max(_walk(rows, kept, scored), default=0),
        "update": summed + working(weights, recipe.optimizer, formats.updated),
    }
    if recipe.main_gradients:
        # One narrow gradient after another goes when it is added; the first time, when its float32 one is made.
        found["gradients added"] = summed + (sum(narrow) if waiting else max(narrow))
    return {moment: base + held for moment, held in found.items()}


def _scored(model: Transformer, w: Workload, recipe: Recipe, memory: TrainingMemory) -> int:
    """What stands at the end of the forward beside all that is kept.

    Copies that autocast made and no row keeps, until autocast ends. With a plain loss the logits, and once more in
    float32. With a chunked one the sum of the matrix's gradient in float32, narrow copies of vectors and matrix under
    autocast, and one piece of scores in float32, beside which a narrow copy makes the product that is added to the sum.
    """
    size, wide = DTYPE_BYTES[w.autocast or w.dtype], DTYPE_BYTES["float32"]
    whole = (step for step in judged(model, replace(w, recompute="none"), recipe.loss))
    copies = sum(v.nbytes(w.dtype) * s.repeat for s in whole for v in s.saved if v.name == NARROW) - memory.copies
    if recipe.loss == "plain":
        return copies + memory.loss + memory.logits * size // wide
    assert isinstance(model.head, Head)
    head, tokens = model.head, w.batch * w.tokens
    rows = min(recipe.rows or max(16, PIECE // head.vocab_size), tokens)
    matrix = head.rows * head.width
    sums = matrix * (wide + size) + rows * head.rows * size if size < wide else 0
    read = size * head.width * (tokens + head.rows) if w.autocast else 0
    return copies + read + sums + rows * head.rows * wide


def _matrix(model: Transformer, recipe: Recipe) -> int:
    """Elements of the matrix whose gradient a chunked loss makes; 0 with a plain one."""
    return model.head.rows * model.head.width if recipe.loss == "chunked" and isinstance(model.head, Head) else 0


def _rows(model: Transformer, w: Workload, recipe: Recipe, element: int) -> Iterator[Row]:
    """The rows of the forward as the backward finds them; `element` is bytes of an element of a gradient."""
    head = model.head
    tied = head.rows * head.width if isinstance(head, Head) and head.tied else 0
    table, shared = "target_embed" if model.target_embed else "embed", model.two_stacks and model.target_embed is None
    whole = judged(model, replace(w, recompute="none"), recipe.loss)
    for step, full in zip(judged(model, w, recipe.loss), whole, strict=True):
        kept = sum(v.nbytes(w.dtype) for v in full.saved if (v.dtype or w.dtype) in FLOATS)
        out = step.numel * DTYPE_BYTES[step.dtype or w.dtype] if step.stored and step.path != ":loss" else 0
        gradient, moment = step.params * element, out + kept
        if step.path == "head:product":
            gradient += tied * element
        elif tied and step.path == table:
            # The head has made a gradient of the same matrix. Where it is a turned view, the table's is added to it in
            # a third; where it is a tensor of its own, as after a chunked loss or the target's table, in place.
            own = recipe.loss == "chunked" or (shared and step.params)
            copies = 1 if own else 2
            gradient, moment = 0, moment + copies * tied * element
        again = full.saved_bytes - step.saved_bytes
        yield Row(step.saved_bytes, again, _region(step.path, w.recompute), moment, gradient, step.repeat)


def _region(path: str, recompute: str) -> str:
    """What is computed again together with a row: its block, or its attention."""
    module = path.partition(":")[0]
    stack, blocks, rest = module.rpartition("blocks.")
    return f"{stack}{blocks}{rest.partition('.')[0]}" if recompute == "block" and blocks else module


def _walk(rows: list[Row], kept: int, made: int) -> Iterator[int]:
    """What is held at each row of the backward, from the last to the first, the states left out.

    Of equal blocks the last and the first are looked at: what is kept shrinks and what is made grows evenly.

    Args:
        made: gradients that there are already.
    """
    for repeat, run in groupby(reversed(rows), key=lambda row: row.repeat):
        unit = [*run]
        each, grown = sum(row.kept for row in unit), sum(row.gradient for row in unit)
        for k in {0, repeat - 1}:
            yield from _iteration(unit, kept - k * each, made + k * grown)
        kept, made = kept - repeat * each, made + repeat * grown


def _iteration(unit: list[Row], kept: int, made: int) -> Iterator[int]:
    inner: defaultdict[str, int] = defaultdict(int)
    for row in unit:
        inner[row.region] += row.again
    for row in unit:
        made += row.gradient
        yield kept + inner[row.region] + made + row.moment
        kept, inner[row.region] = kept - row.kept, inner[row.region] - row.again
