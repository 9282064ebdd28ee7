"""A quoted figure beside the exact one, and the verdict that follows from both."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal
from fractions import Fraction
from functools import cache
from typing import Any

import scantling as sc
from scantling.cards.read import from_dict
from scantling.numbers.count import Count, count
from scantling.numbers.flops import Flops, flops
from scantling.numbers.memory import Memory, memory
from scantling.parts.part import Step, Workload
from scantling.parts.transformer import Transformer

SAME, ROUNDING, CONDITION, WRONG = "same", "rounding", "condition", "wrong"
VERDICTS = {
    SAME: "the exact value, rounded to the digits that are quoted, is what is quoted",
    ROUNDING: "off by no more than one in the last digit that is quoted",
    CONDITION: "true under a condition that is not said, or of something else than what it stands beside",
    WRONG: "wrong",
}
UNITS = {
    "": 1,
    "%": Fraction(1, 100),
    "k": 10**3,
    "K": 10**3,
    "M": 10**6,
    "B": 10**9,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "MiB": 2**20,
    "GFLOP": 10**9,
    "days": 86400,
    "h": 3600,
    "s": 1,
    "x": 1,
}
NUMBER = re.compile(r"(?:about )?\$?(-?[\d,]+(?:\.\d+)?)(?:e(\d+))?(?: ?([a-zA-Z%]+))?")

Exact = int | Fraction | str | tuple[int, ...]


@dataclass(frozen=True)
class Figure:
    """One figure.

    Attributes:
        what: it is of.
        quoted: as it is quoted: a number with a unit of `UNITS`, or words or a shape, which must be equal.
        exact: what the package computes, in bytes, FLOPs, seconds or plain numbers.
        verdict: one of `VERDICTS`.
        why: the reason, where the verdict is not `SAME`.
    """

    what: str
    quoted: str
    exact: Exact
    verdict: str = SAME
    why: str = ""

    @property
    def found(self) -> str:
        """The verdict by the numbers alone: same, rounding, or wrong."""
        if isinstance(self.exact, str | tuple):
            return SAME if self.quoted == shown(self.exact) else WRONG
        value, step, scale = self._read()
        scaled = Fraction(self.exact) / scale
        if _rounded(scaled, step) == value:
            return SAME
        return ROUNDING if abs(scaled - value) <= step else WRONG

    def _read(self) -> tuple[Fraction, Fraction, Fraction]:
        """The quoted number, one in its last digit, and its unit."""
        match = NUMBER.fullmatch(self.quoted)
        assert match is not None, self.quoted
        digits, power, unit = match.groups()
        digits, scale = digits.replace(",", ""), Fraction(UNITS[unit or ""]) * 10 ** int(power or 0)
        return Fraction(digits), Fraction(1, 10 ** len(digits.partition(".")[2])), scale

    @property
    def shown(self) -> str:
        """The exact value as the page prints it: in full, and in the quoted unit with two more digits."""
        if isinstance(self.exact, str | tuple):
            return shown(self.exact)
        _, step, scale = self._read()
        match = NUMBER.fullmatch(self.quoted)
        assert match is not None
        unit = match[3] or ""
        whole = f"{self.exact:,}" if isinstance(self.exact, int) else ""
        if whole and scale == 1:
            return whole + (f" {unit}" if unit else "")
        scaled = _rounded(Fraction(self.exact) / scale, step / 100)
        places = len(str(step.denominator)) + 1
        power = f"e{match[2]}" if match[2] else ""
        short = f"{Decimal(scaled.numerator) / Decimal(scaled.denominator):,.{places}f}".rstrip("0").rstrip(".")
        short = f"{'$' if '$' in self.quoted else ''}{short}{power}{' ' if unit else ''}{unit}"
        return f"{whole} = {short}" if whole and unit not in ("days", "h", "s") else short


def shown(value: str | tuple[int, ...]) -> str:
    """Words, or a shape."""
    return value if isinstance(value, str) else f"({', '.join(map(str, value))})"


def _rounded(value: Fraction, step: Fraction) -> Fraction:
    places = (Decimal(value.numerator) / Decimal(value.denominator)) / (Decimal(step.numerator) / step.denominator)
    return Fraction(places.to_integral_value(ROUND_HALF_UP)) * step


@dataclass(frozen=True)
class Section:
    """A table of the page.

    Attributes:
        by: the commands that print these numbers.
    """

    title: str
    text: str
    by: str
    figures: Sequence[Figure]


@cache
def parts(name: str) -> Transformer:
    """A preset's parts."""
    return sc.assemble(sc.card(name))


@cache
def counted(name: str) -> Count:
    """A preset's parameters."""
    return count(parts(name))


def flops_of(name: str, **work: Any) -> Flops:
    """FLOPs of one pass of a preset."""
    return flops(parts(name), Workload(**work))


def memory_of(name: str, dtype: str = "bfloat16", **work: Any) -> Memory:
    """Bytes of a preset, weights and cache in one dtype."""
    return memory(parts(name), Workload(**work), dtype, dtype)


def made(**keys: Any) -> Transformer:
    """A small card that no preset is: what is not said is a plain decoder of one block."""
    plain = {
        "name": "quoted",
        "family": "decoder",
        "n_layers": 1,
        "context": 2**20,
        "position": {"kind": "none"},
        "norm": {"kind": "layernorm", "eps": 1e-5},
        "mlp": {"kind": "plain", "act": "gelu"},
        "tied": True,
    }
    return sc.assemble(from_dict({**plain, **keys}, "quoted"))


def shapes(model: Transformer, **work: Any) -> dict[str, Step]:
    """Rows of a pass by path, without what stands before the block."""
    found = {}
    for step in model.steps(Workload(**work)):
        path = step.path.removeprefix("decoder.").removeprefix("encoder.")
        found[path.replace("blocks.0.", "").replace("blocks.0:", ":")] = step
    return found
