"""One vector in place of a text's many."""

from __future__ import annotations

from scantling.parts.dims import Dim, elements
from scantling.parts.part import Step, Workload
from scantling.parts.saved import Value


def pooled_step(w: Workload, d: Dim, pool: str) -> Step:
    """The row of (B, T, d) -> (B, d): the first token, the mean of real ones, or the last real one."""
    formula = {"first": "x[0]", "mean": "mean of real x", "last": "last real x"}[pool]
    # One token's vector is a view of the stream.
    axes, note, x = (w.B, d), "One vector for the text.", w.read(0)
    out = Value("mean", elements(axes), x.dtype) if pool == "mean" else x
    return Step(":pooled", f"pool: {pool}", axes, formula=formula, note=note, dtype=x.dtype, out=out)
