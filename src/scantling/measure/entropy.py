"""How widely each head spreads its weights, beside the most that is possible."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from scantling.measure.asked import Asked, rows, run
from scantling.measure.figure import Figure, Line, Plot
from scantling.model import Model


@dataclass(frozen=True)
class Spread:
    """One attention layer.

    Attributes:
        heads: mean entropy over queries of each head, in nats.
        bound: mean over queries of ln(keys that are seen): that of a head that prefers nobody.
    """

    path: str
    heads: tuple[float, ...]
    bound: float

    @property
    def mean(self) -> float:
        """Over heads."""
        return sum(self.heads) / len(self.heads)


def entropy(lm: Model, asked: Asked) -> Figure:
    """Entropy of attention per layer and head, with the plain kernel, which names its weights."""
    layers = spreads(lm, asked)
    table = tuple(
        (x.path, x.mean, min(x.heads), max(x.heads), x.bound, x.mean / x.bound if x.bound else None) for x in layers
    )
    at = tuple(range(len(layers)))
    curves = {
        "mean": [x.mean for x in layers],
        "least of all heads": [min(x.heads) for x in layers],
        "most of all heads": [max(x.heads) for x in layers],
    }
    lines = tuple(Line(label, at, tuple(values)) for label, values in curves.items())
    lines += (Line("uniform", at, tuple(x.bound for x in layers), True),)
    columns = ("layer", "mean nats", "least head", "most head", "uniform", "share")
    data = {"heads": {x.path: x.heads for x in layers}, "tokens": asked.length}
    note = (
        f"rows of {asked.length} tokens; uniform: the mean over queries of the logarithm of the keys that are seen, "
        "no head can have more"
    )
    plots = (Plot("layer", "nats", lines),) if layers else ()
    return Figure("entropy", "Entropy of attention per layer", columns, table, (note,), plots, data)


def spreads(lm: Model, asked: Asked) -> list[Spread]:
    """Every layer of attention in the order of execution."""
    modules: dict[str, Any] = dict(lm.net.named_modules())
    found: list[Spread] = []

    def record(path: str, value: Tensor) -> Tensor:
        name, _, point = path.partition(":")
        if point == "weights":
            part = modules[name].part
            found.append(
                Spread(
                    name, *measured(value.double(), getattr(part, "visibility", None), getattr(part, "sinks", False))
                )
            )
        return value

    run(lm, rows(lm, asked, asked.length), "reference", record)
    return found


def measured(weights: Tensor, visibility: Any, sinks: bool) -> tuple[tuple[float, ...], float]:
    """Mean entropy of each head, and the bound, in nats.

    Args:
        weights: (B, H, T, S).
        visibility: which keys a query sees; None: all.
        sinks: a sink takes what is missing to 1, as one key more.
    """
    queries, keys = weights.shape[-2:]
    each = -torch.xlogy(weights, weights).sum(-1)
    if sinks:
        rest = (1 - weights.sum(-1)).clamp(min=0)
        each = each - torch.xlogy(rest, rest)
    seen = torch.full((queries,), float(keys), dtype=torch.float64, device=weights.device)
    if visibility is not None:
        place = torch.arange(queries, device=weights.device)
        seen = visibility.sees(place[:, None], place[None, :]).sum(-1).double()
    return tuple(each.mean((0, 2)).tolist()), float((seen + sinks).log().mean())
