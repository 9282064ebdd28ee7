"""How routers spread tokens over experts, beside an even spread."""

from __future__ import annotations

import math

from scantling.measure.asked import Asked, rows, run
from scantling.measure.figure import Figure
from scantling.model import Model
from scantling.tensor.router_losses import load


def routed(lm: Model) -> bool:
    """Whether any layer has a router."""
    return any(hasattr(part, "router") for _, part, _ in lm.parts.walk())


def routing(lm: Model, asked: Asked) -> Figure:
    """Of every router: how busy its busiest expert is, how undecided it is, and which experts nobody chose."""
    found = {path: load(one) for path, one in run(lm, rows(lm, asked, asked.length), keep_routing=True).routing.items()}
    table = tuple(
        (path, max(x.shares), 1 / len(x.shares), x.entropy, math.log(len(x.shares)), len(x.dead))
        for path, x in found.items()
    )
    columns = ("router", "busiest expert's share", "even share", "entropy, nats", "uniform", "experts nobody chose")
    note = f"over {asked.batch * asked.length:,} tokens; of few tokens some experts stay idle by chance"
    data = {"shares": {path: x.shares for path, x in found.items()}}
    return Figure("routing", "Routers and experts", columns, table, (note,), data=data)
