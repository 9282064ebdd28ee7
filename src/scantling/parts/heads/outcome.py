"""What is read from scores: probabilities, and losses in training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from scantling.parts.dims import Dims, elements
from scantling.parts.leaf import WIDE
from scantling.parts.part import Step, Workload
from scantling.parts.saved import Value


def cross_entropy(rows: int, classes: int, targets: Value) -> tuple[Value, ...]:
    """What the loss keeps: the logarithms of all probabilities, the targets, and how many there are."""
    return Value("log-probabilities", rows * classes, WIDE), targets, Value("number of targets", 1, WIDE)


def score_steps(w: Workload, axes: Dims, scores: str, note: str) -> Iterator[Step]:
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


def score_outcome(net: Any, logits: Any, ctx: Any, scores: str) -> tuple[Any, Any]:
    """Probabilities, None in training; and a loss in training, of targets that the context knows."""
    if ctx.training:
        return None, ctx.mark(net, "loss", ctx.judge(logits, scores))
    wide = logits.float()
    return ctx.mark(net, "probabilities", wide.softmax(-1) if scores == "softmax" else wide.sigmoid()), None
