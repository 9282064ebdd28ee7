"""docs/measure.md and its drawings: what `scantling measure` shows, and what depth does to pre- and post-norm.

``python -m tests.measure.page --write`` runs the experiments, about a minute, and rewrites them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import scantling as sc
from scantling.cards.read import from_dict
from scantling.measure import Asked
from scantling.measure.figure import Line, Plot
from scantling.measure.gradients import batch_of, norms, updates
from scantling.measure.plots import drawn
from scantling.measure.stream import stream
from scantling.numbers.flops import flops
from scantling.parts.part import Workload

DOCS = Path(__file__).parents[2] / "docs"
PATH = DOCS / "measure.md"
PLACES = {"in": "pre-norm", "out": "post-norm"}
DEPTHS = (4, 8, 16, 32, 64)
DEEPEST = 1000
COLUMNS = ("last block", "last / first", "last / first after", "loss after")
HEADS = (1, 2, 4, 8, 16)
ASKED = Asked(lengths=(16, 32), steps=20, lr=1e-3)

SHOWN = {
    "checklist": (
        "width, layers, heads, expansion, split, kind of positions, attention variant and residual order, by the "
        "shapes, modules and their order in a pass of 5 tokens",
        "the card",
    ),
    "parameters": ("numbers in the built modules, by what the modules around them are called", "the parts list"),
    "time": (
        "seconds between a module's beginning and end, the modules inside it left out; of each part the fastest of "
        "`--passes`",
        "shares of FLOPs; and the roofline of each row: FLOPs at the measured peak or bytes at the measured bandwidth, "
        "whichever takes longer. The crossover is where scores and mix (rotation, scores, softmax, mix) take half of "
        "the blocks' time",
    ),
    "memory": (
        "the highest that torch's allocator stands during a pass, of each kernel",
        "the account's working space",
    ),
    "residual": (
        "root mean square of the stream after each block",
        "pre-norm: the root of all squares that were added; post-norm: the size of the norm's gain",
    ),
    "gradients": (
        "norm per block of one batch's gradient, as the weights are and after `--steps` updates of AdamW on that batch",
        "pre-norm: as 1 over the size of what the block reads, scaled to the measured mean",
    ),
    "entropy": (
        "of each head's weights, mean over queries, in nats",
        "at most the logarithm of the keys that are seen",
    ),
    "outliers": (
        "largest element over the rms, and kurtosis, after each block",
        "of n normal numbers at most sqrt(2 ln 2n), and 3",
    ),
    "routing": ("the busiest expert's share, entropy of the choice, experts nobody chose", "an even spread"),
    "shape": (
        "parameters built, FLOPs by torch's counter, and seconds of one token, of the card and of twins with other "
        "heads, and with a quarter of the layers at twice the width",
        "the account; the roofline; and how many products wait for each other",
    ),
}
HEADER = """# What `scantling measure` measures

`scantling measure MODEL` sets each figure beside its prediction. MODEL is anything that other commands take; a preset
or a card gets initial weights. `--only` chooses figures, `--tokens 128,256,512` the lengths, `--png FOLDER` and
`--html FILE` write plots and a page. This page is made by `python -m tests.measure.page --write` (or `make docs`); a
test runs its smaller half again.

{table}
**T x T is stored** if, from the second longest row to the longest, the peak grows by more than half a score matrix
(B x H x T x T) beyond what is in proportion to T. Beside the verdict stands the exponent of peak ~ T^k with its 95 %
interval: least squares through the logarithms, Student's t with n - 2 degrees of freedom. Peaks are exact counts of
bytes, so the interval shows how far a single power is from what a T + b T^2 does, and no noise. The fused kernel takes
256 queries at a time where a mask or a bias is asked for, so rows of at most 256 tokens are one piece there.

What does not fit is refused before anything is built, with the bytes that it would take; `--only checklist,parameters`
allocates nothing at any size. Times are of this machine while other programs run on it; the rest repeats.

## Pre-norm and post-norm by depth

A decoder of width 64 with 4 heads, LayerNorm, GELU, matrices drawn from N(0, 2 / (d_in + d_out)) and vectors of tokens
and positions from N(0, 1), on {tokens} random tokens.
Xiong et al. (*On Layer Normalization in the Transformer Architecture*, arXiv:2002.04745) prove for initialisation that
with the norm between the residual blocks (post-norm) the expected gradients of the parameters near the output are
large, and that with the norm inside them (pre-norm) gradients are well behaved, which is why the one needs a warm-up of
the learning rate and the other does not. NormFormer (arXiv:2110.09456) adds that pre-norm gradients are larger in early
layers than in late ones. Below, the gradient of the last block stays as large as it is in post-norm and falls with
depth in pre-norm; after {steps} updates of AdamW at {lr:g} on the same rows, without warm-up, deep post-norm stacks
have next to no gradient left in their first block, and do not learn.

![Gradient norm per block](norm-placement.svg)

"""


def model(place: str, depth: int, heads: int = 4) -> sc.Card:
    """The decoder of the experiments."""
    said: dict[str, Any] = {
        "name": f"{PLACES[place]}-{depth}",
        "family": "decoder",
        "n_layers": depth,
        "d_model": 64,
        "vocab_size": 128,
        "context": 64,
        "attention": {"kind": "multi_head", "n_heads": heads},
        "position": {"kind": "learned"},
        "norm": {"kind": "layernorm", "eps": 1e-5, "at": [place]},
        "mlp": {"kind": "plain", "act": "gelu", "bias": True},
        "tied": False,
    }
    return from_dict(said, "page")


def drawn_anew(card: sc.Card) -> sc.Model:
    """The model with matrices from N(0, 2 / (d_in + d_out)), as Glorot and Bengio draw them, and vectors of size 1."""
    lm = sc.new(card)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in lm.net.named_parameters():
            if weight.dim() == 2:
                std = 1.0 if name == "embed.weight" or "position" in name else (2 / sum(weight.shape)) ** 0.5
                weight.copy_(torch.empty(weight.shape).normal_(0.0, std, generator=draw))
    return lm


def profile(place: str, depth: int, steps: int = ASKED.steps) -> tuple[list[float], list[float], list[float]]:
    """Gradient norms of the blocks at initialisation, after the updates, and the losses before and after."""
    lm = drawn_anew(model(place, depth))
    batch = batch_of(lm, ASKED)
    first, loss = norms(lm.net, lm.parts, batch)
    for _ in updates(lm.net, lm.parts, batch, replace(ASKED, steps=steps)):
        pass
    last, end = norms(lm.net, lm.parts, batch)
    blocks = [name for name in first if ".blocks." in name]
    return [first[name] for name in blocks], [last[name] for name in blocks], [loss, end]


def over(by_block: Sequence[float]) -> float:
    """The last block's over the first one's."""
    return by_block[-1] / by_block[0]


def by_depth(depths: Iterable[int] = DEPTHS) -> tuple[list[tuple[str, ...]], list[Line]]:
    """Rows of the table, and the lines of the drawing."""
    rows, lines = [], []
    for depth in depths:
        cells = [str(depth)]
        for place, name in PLACES.items():
            first, last, losses = profile(place, depth)
            cells += [f"{x:.3g}" for x in (first[-1], over(first), over(last), losses[1])]
            at = tuple(i / max(1, depth - 1) for i in range(depth))
            lines.append(Line(f"{name}, {depth} layers", at, tuple(first), place == "in"))
        rows.append(tuple(cells))
    return rows, lines


def sizes(depth: int = DEEPEST) -> list[tuple[str, list[float]]]:
    """The stream after each block of stacks of that depth."""
    return [
        (name, [x.rms_out for x in stream(drawn_anew(model(place, depth)), ASKED)]) for place, name in PLACES.items()
    ]


def invariants() -> list[tuple[str, ...]]:
    """Parameters and FLOPs by the number of heads at one width."""
    rows = []
    for heads in HEADS:
        parts = sc.assemble(model("in", 4, heads))
        built = sum(p.numel() for p in parts.build(device="meta").parameters())
        rows.append((str(heads), f"{built:,}", f"{parts.params:,}", f"{flops(parts, Workload(tokens=64)).forward:,}"))
    return rows


def header() -> str:
    """All that stands before the first table of numbers."""
    lines = ["| figure | measured | predicted |", "|---|---|---|"]
    lines += [f"| `{name}` | {measured} | {predicted} |" for name, (measured, predicted) in SHOWN.items()]
    return HEADER.format(table="\n".join(lines) + "\n", tokens=ASKED.length, steps=ASKED.steps, lr=ASKED.lr)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Numbers stand to the right."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---:|" * len(columns)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


def written() -> dict[Path, bytes]:
    """The page and its drawings."""
    rows, lines = by_depth()
    columns = (
        "layers",
        *(f"{name}: {what}" for name in PLACES.values() for what in COLUMNS),
    )
    text = header() + table(columns, rows)
    deep = sizes()
    marks = [1, 10, 100, DEEPEST]
    text += f"\n## The stream to {DEEPEST:,} layers\n\nRoot mean square after so many blocks, at initialisation.\n\n"
    text += "![Size of the stream](stream-by-depth.svg)\n\n"
    text += table(("", *(f"{n:,}" for n in marks)), ((name, *(f"{x[n - 1]:.3g}" for n in marks)) for name, x in deep))
    text += "\n## Heads cost nothing\n\nAt one width, 4 layers and 64 tokens: the number of heads is in no count.\n\n"
    text += table(("heads", "parameters built", "predicted", "FLOPs forward"), invariants())
    at = sorted({round(DEEPEST ** (i / 40)) for i in range(41)})
    gradients = Plot("depth, 0 the first block, 1 the last", "norm of the gradient", tuple(lines), "y")
    depths = Plot(
        "block", "root mean square", tuple(Line(name, tuple(at), tuple(x[n - 1] for n in at)) for name, x in deep), "xy"
    )
    return {
        PATH: text.encode(),
        DOCS / "norm-placement.svg": drawn(gradients, "Gradient norm per block at initialisation", "svg"),
        DOCS / "stream-by-depth.svg": drawn(depths, "Size of the residual stream", "svg"),
    }


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        for path, content in written().items():
            path.write_bytes(content)
    else:
        print(written()[PATH].decode(), end="")
