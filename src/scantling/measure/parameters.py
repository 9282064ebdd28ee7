"""Which share of the parameters each component has: counted on the built modules, beside the account."""

from __future__ import annotations

from collections import Counter

from torch import nn

from scantling.measure.asked import Asked
from scantling.measure.figure import Figure
from scantling.model import Model
from scantling.numbers.count import count
from scantling.parts.net import Net

OUTSIDE = {"embed": "embedding", "target_embed": "embedding", "widen": "embedding", "head": "head"}
INSIDE = {"attn": "attention", "cross": "cross_attention", "mlp": "mlp", "position": "position", "types": "types"}
WITHIN_MLP = {"router": "router", "experts": "experts"}


def parameters(lm: Model, asked: Asked) -> Figure:
    """Counted by the names and classes of modules; predicted by the parts list."""
    built, predicted = by_module(lm.net), count(lm.parts).by_part
    total, said = sum(built.values()), sum(predicted.values())
    rows = tuple(
        (name, built.get(name, 0), predicted.get(name, 0), built.get(name, 0) / total, predicted.get(name, 0) / said)
        for name in sorted(built.keys() | predicted.keys(), key=lambda name: -predicted.get(name, 0))
    )
    equal = all(row[1] == row[2] for row in rows)
    verdict = "equal in every row" if equal else "NOT equal"
    note = f"{total:,} parameters in the modules, {said:,} in the account: {verdict}"
    columns = ("component", "built", "predicted", "share built", "share predicted")
    return Figure("parameters", "Parameters per component", columns, rows, (note,), data={"equal": equal})


def by_module(net: nn.Module) -> dict[str, int]:
    """Parameters of a built model, a tied matrix once, by what the modules around them are called."""
    sums: Counter[str] = Counter()
    for path, module in net.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                sums[_component(path.split("."), module)] += parameter.numel()
    return {name: n for name, n in sums.items() if n}


def _component(names: list[str], module: nn.Module) -> str:
    own = type(module.part).__name__ if isinstance(module, Net) else type(module).__name__
    if own.endswith("Norm"):
        return "norm"
    if names[0] in OUTSIDE:
        return OUTSIDE[names[0]]
    for name in names:
        if name in INSIDE and name != "mlp":
            return INSIDE[name]
    return next((WITHIN_MLP[name] for name in names if name in WITHIN_MLP), "mlp" if "mlp" in names else "embedding")
