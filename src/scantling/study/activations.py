"""The published formulas of activation memory against what each part of the card keeps for the backward, in bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from scantling.cards.schema import Card
from scantling.parts.part import Workload
from scantling.parts.transformer import Transformer
from scantling.study.formula import Formula, formula

KORTHIKANTI = "Korthikanti et al., arXiv:2205.05198"
IN_TRAINING = ("float32", "float16", "bfloat16")
SCORES = "scores, softmax and its dropout"
OUTSIDE = "outside the blocks: embeddings, positions, final norm, head, loss"
PARTS = {
    "attention": "attention besides: what it reads, queries, keys, values, result",
    "cross_attention": "cross-attention",
    "mlp": "MLP: what it reads, before and after the activation",
    "experts": "MLP: what it reads, before and after the activation",
    "router": "router",
    "norm": "norms",
    "other": "dropout of what is added to the stream",
}
_PER_LAYER = {PARTS["attention"]: 10, PARTS["mlp"]: 18, PARTS["norm"]: 4, PARTS["other"]: 2}
"""The 34 of the paper, of s b h bytes each (section 4.1): 11 of attention and 19 of the MLP, a mask of dropout in each,
and 4 of the norms."""


def activations(card: Card, model: Transformer, w: Workload, dtype: str) -> Iterator[Formula]:
    """What a training pass over rows like those of `w` keeps: nothing, the inner part of attention, whole blocks again.

    Args:
        dtype: of weights and activations; bfloat16 where nobody trains in it.
    """
    if not model.stacks:
        return
    kind = dtype if dtype in IN_TRAINING else "bfloat16"
    training = Workload(w.batch, w.tokens, source=w.source, training=True, kernel="reference", dtype=kind)
    heads, layers = card.attention.n_heads, sum(len(stack.blocks) for stack in model.stacks.values())
    unit = w.tokens * w.batch * model.d_model
    kept = {policy: _kept(model, replace(training, recompute=policy)) for policy in ("none", "selective", "block")}
    # What is computed again with the selective policy is the inner part of attention, so the rest is what is left.
    inner = Counter({SCORES: sum(kept["none"].values()) - sum(kept["selective"].values())})
    about = f"bytes kept for the backward of B {w.batch}, T {w.tokens:,}, {kind}"
    pairs = 5 * heads * w.tokens**2 * w.batch * layers
    each = {part: count * unit * layers for part, count in _PER_LAYER.items()}
    usual = "16 bits, MLP of 4 d with GELU, LayerNorm, dropout with masks of 1 byte, as many KV heads as heads"
    yield formula(
        "activations",
        "s b h (34 + 5 a s / h) a layer",
        (sum(kept["none"].values()), f"{about}, scores stored"),
        _terms(kept["selective"] + inner, each | {SCORES: pairs}),
        f"{usual}; nothing outside the blocks; a kernel that stores the scores",
        f"{KORTHIKANTI}, eq. 1",
    )
    yield formula(
        "activations",
        "34 s b h a layer",
        (sum(kept["selective"].values()), f"{about}, the inner part of attention computed again"),
        _terms(kept["selective"], each),
        f"{usual}; nothing outside the blocks; scores, softmax and mix are computed again (or never stored)",
        f"{KORTHIKANTI}, section 5",
    )
    yield formula(
        "activations",
        "2 s b h a layer",
        (sum(kept["block"].values()), f"{about}, whole blocks computed again"),
        _terms(kept["block"], {"the input of each block": 2 * unit * layers}, "the input of each block"),
        "16 bits; the input of each block is all that is kept, and nothing outside the blocks",
        f"{KORTHIKANTI}, section 5",
    )


def _kept(model: Transformer, w: Workload) -> Counter[str]:
    """Bytes by what keeps them: parts of the blocks, and all that is outside."""
    roles = {path: role for path, _, role in model.walk()}
    sums: Counter[str] = Counter()
    for step in model.steps(w):
        path = step.path.partition(":")[0]
        name = PARTS.get(roles[path], roles[path]) if ".blocks." in path else OUTSIDE
        sums[name] += step.saved_bytes * step.repeat
    return sums


def _terms(kept: Counter[str], guesses: dict[str, int], whole: str | None = None) -> dict[str, int]:
    """What is kept less what the formula says of it, part by part.

    Args:
        whole: one name for everything inside the blocks.
    """
    exact: Counter[str] = Counter()
    for name, size in kept.items():
        exact[name if whole is None or name == OUTSIDE else whole] += size
    return {name: exact.get(name, 0) - guesses.get(name, 0) for name in [*guesses, *(exact.keys() - guesses.keys())]}
