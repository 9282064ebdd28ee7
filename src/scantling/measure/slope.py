"""How something grows: the exponent of a power law through measured points, with its confidence interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scantling.errors import ScantlingInputError

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Slope:
    """y ~ x^exponent.

    Attributes:
        low, high: of the confidence interval; both the exponent itself where the points lie on the line, infinite with
            two points, which leave nothing to judge the line by.
    """

    exponent: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.exponent:.2f} ({CONFIDENCE:.0%} interval {self.low:.2f} to {self.high:.2f})"


def slope(x: Sequence[float], y: Sequence[float]) -> Slope:
    """The least squares line through (log x, log y), and the interval of its slope by Student's t with n - 2 degrees
    of freedom.

    Raises:
        ScantlingInputError: fewer than two different x, or anything not above 0.
    """
    if len(set(x)) < 2 or min(*x, *y) <= 0:
        raise ScantlingInputError("an exponent needs at least two different lengths, and sizes above 0")
    logs = [(math.log(a), math.log(b)) for a, b in zip(x, y, strict=True)]
    middle_x, middle_y = (math.fsum(column) / len(logs) for column in zip(*logs, strict=True))
    spread = math.fsum((a - middle_x) ** 2 for a, _ in logs)
    exponent = math.fsum((a - middle_x) * (b - middle_y) for a, b in logs) / spread
    free = len(logs) - 2
    if not free:
        return Slope(exponent, -math.inf, math.inf)
    left = math.fsum((b - middle_y - exponent * (a - middle_x)) ** 2 for a, b in logs)
    half = student(CONFIDENCE, free) * math.sqrt(left / free / spread)
    return Slope(exponent, exponent - half, exponent + half)


def student(confidence: float, free: int) -> float:
    """The t that a Student variable of `free` degrees of freedom stays within with this probability, both sides.

    By bisection over the integral of its density; with t = sqrt(free) tan(a) that is the integral of cos(a)^(free - 1).
    """
    scale = math.exp(math.lgamma((free + 1) / 2) - math.lgamma(free / 2)) / math.sqrt(math.pi)
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        inside = 2 * scale * _cosines(middle, free - 1)
        low, high = (middle, high) if inside < confidence else (low, middle)
    return math.sqrt(free) * math.tan(low)


def _cosines(end: float, power: int) -> float:
    """The integral of cos^power from 0 to `end`, by its recursion."""
    found = end if power % 2 == 0 else math.sin(end)
    for n in range(2 + power % 2, power + 1, 2):
        found = math.cos(end) ** (n - 1) * math.sin(end) / n + (n - 1) / n * found
    return found
