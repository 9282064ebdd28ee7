"""Whether two computations that must agree do: equal, apart by rounding, or apart.

The decision uses no tolerance of our own choosing for the size of a difference. What must be equal is computed twice
more: with every matrix product summed from the other end, which shows how large rounding is in this very computation,
and with the weights in float64, where rounding shrinks and a fault does not. `docs/audit.md` derives the bounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from scantling.audits.finding import Verdict
from scantling.audits.other_order import OtherOrder
from scantling.audits.protocol import Subject
from scantling.audits.wide import cast

Measure: TypeAlias = Callable[[Subject], tuple[Tensor, Tensor]]
"""Two results of one subject, of the same shape, that must be equal."""

TIMES_NOISE = 32.0
"""A difference up to so many times the measured rounding is rounding. The largest of some thousand differences and the
largest effect of one other order of summation are draws of the same kind, so their ratio is a small number."""

TIMES_ERROR = 4.0
"""A difference that is left in float64, up to so many times float32's own error, is that of parts that stay in float32.
"""


ANGLES = 16.0
"""Positions up to which the rounding of angles is of the size of other roundings."""


@dataclass(frozen=True)
class Gap:
    """How far two results are apart.

    Attributes:
        size: largest difference over the standard deviation of the logits.
        absolute: largest difference of two logits.
        at: where, as an index into the results.
        real: more than rounding.
        how: what decided.
        share: of what rounding explains.
    """

    size: float
    absolute: float
    at: tuple[int, ...]
    real: bool
    how: str
    share: float = 0.0

    @property
    def verdict(self) -> Verdict:
        """Clean, rounding or defect."""
        if self.absolute == 0:
            return Verdict.CLEAN
        return Verdict.DEFECT if self.real else Verdict.ROUNDING


def gap(subject: Subject, measure: Measure, positions: int = 0) -> Gap:
    """Judge what `measure` gives for a subject.

    Args:
        positions: where the two results have the same tokens at other positions, the largest of them: the angle of
            position p is rounded in proportion to p.

    Raises:
        whatever the subject raises.
    """
    with torch.no_grad():
        a, b = measure(subject)
        largest, at = _worst(a, b)
        spread = spread_of(a)
        if largest == 0:
            return Gap(0.0, 0.0, at, False, "equal bit by bit")
        if not math.isfinite(largest):
            return Gap(math.inf, largest, at, True, "one of the two is no number")
        lowest = TIMES_NOISE * unit_of("float32") * _peak(a, b)
        if largest <= lowest / 4:
            how = f"rounding explains {lowest:.2g} at least"
            return Gap(largest / spread, largest, at, False, how, largest / lowest)
        again = measure(subject)
        if max(_worst(a, again[0])[0], _worst(b, again[1])[0]) > 0:
            # What does not repeat is chance, and shows nothing of the size of rounding.
            bound = TIMES_NOISE * unit_of(subject.facts.dtype) * _peak(a, b)
            how = f"it does not repeat; rounding explains {bound:.2g}"
            return Gap(largest / spread, largest, at, largest > bound, how, largest / bound)
        wide = cast(subject, "float64")
        precise = None if wide is None else _tried(wide, measure)
        if wide is not None and precise is not None:
            c, d = precise
            left, _ = _worst(c, d)
            # Where float64 gives no numbers, as a mask that overflows makes it, it decides nothing.
            if math.isfinite(left) and bool(c.isfinite().any()):
                kept = _kept(subject, measure, (a, b), (c, d)) * max(1.0, positions / ANGLES)
                bound = max(TIMES_NOISE * _noise(wide, measure, c, d), kept)
                how = f"in float64 {left:.2g} are left, rounding explains {bound:.2g}"
                return Gap(largest / spread, largest, at, left > bound, how, left / bound)
        unit = max(unit_of(subject.facts.dtype), torch.finfo(a.dtype).eps / 2)
        bound = TIMES_NOISE * max(_noise(subject, measure, a, b), unit * _peak(a, b)) * max(1.0, positions / ANGLES)
        how = f"against {bound:.2g}, {TIMES_NOISE:g} times what another order of summation moves"
        return Gap(largest / spread, largest, at, largest > bound, how, largest / bound)


def _tried(subject: Subject, measure: Measure) -> tuple[Tensor, Tensor] | None:
    """The two results, or None where this dtype does not run them."""
    try:
        return measure(subject)
    except Exception:
        return None


def _kept(subject: Subject, measure: Measure, own: tuple[Tensor, Tensor], precise: tuple[Tensor, Tensor]) -> float:
    """What rounding may leave in float64: norms, softmax and angles that are float32 whatever the weights are cannot
    err more than all of the model in float32 does; tables that were computed in the dtype of the weights keep its
    rounding."""
    narrow = cast(subject, "float32")
    single = own if narrow is subject else None if narrow is None else _tried(narrow, measure)
    errors = [] if single is None else [_worst(x, y)[0] for x, y in zip(single, precise, strict=True)]
    error = max((e for e in errors if math.isfinite(e)), default=0.0)
    module = subject.can.module
    tables = module is not None and any(b.is_floating_point() and b.dim() > 1 for b in module.buffers())
    unit = max(unit_of("float32"), unit_of(subject.facts.dtype) if tables else 0.0)
    return max(TIMES_ERROR * error, TIMES_NOISE * unit * _peak(*precise))


def _noise(subject: Subject, measure: Measure, a: Tensor, b: Tensor) -> float:
    """What another order of summation moves."""
    with OtherOrder():  # type: ignore[no-untyped-call]
        c, d = measure(subject)
    noise = max(_worst(a, c)[0], _worst(b, d)[0])
    return noise if math.isfinite(noise) else 0.0


def _peak(a: Tensor, b: Tensor) -> float:
    """The largest logit."""
    both = torch.cat([a.flatten(), b.flatten()]).abs()
    return float(both[both.isfinite()].max()) if bool(both.isfinite().any()) else 0.0


def unit_of(dtype: str) -> float:
    """The largest relative error of one rounding to a dtype."""
    found: Any = getattr(torch, dtype, torch.float32)
    return float(torch.finfo(found).eps) / 2


def _worst(a: Tensor, b: Tensor) -> tuple[float, tuple[int, ...]]:
    if a.shape != b.shape:
        raise ValueError(f"two results of one probe have shapes {tuple(a.shape)} and {tuple(b.shape)}")
    if a.numel() == 0:
        return 0.0, ()
    # Equal infinities are no difference, and neither are two that are no number.
    same = (a == b) | (a.isnan() & b.isnan())
    apart = torch.where(same, torch.zeros_like(a, dtype=torch.float64), (a.double() - b.double()).abs())
    apart = torch.where(apart.isnan(), torch.full_like(apart, math.inf), apart)
    index = int(apart.argmax())
    return float(apart.flatten()[index]), tuple(int(i) for i in torch.unravel_index(torch.tensor(index), a.shape))


def worst(a: Tensor, b: Tensor) -> tuple[float, float]:
    """The largest difference, and the standard deviation of the first."""
    return _worst(a, b)[0], spread_of(a)


def spread_of(a: Tensor) -> float:
    """The standard deviation of the logits; 1 where there is none."""
    finite = a[a.isfinite()]
    spread = float(finite.double().std()) if finite.numel() > 1 else 0.0
    return spread if spread > 0 else 1.0
