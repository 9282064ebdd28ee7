"""Prose of the page: why figures go wrong, and what holds where a statement or a piece of code does not."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tests.figures.quoted import made

import scantling as sc
from scantling.cards import presets
from scantling.cards.schema import MoE, MultiHead
from scantling.numbers.flops import half_at
from scantling.parts.part import Workload


@dataclass(frozen=True)
class Remark:
    """Something said or written besides the figures, and what holds."""

    said: str
    holds: str


def remarks() -> list[Remark]:
    """In the order of the page."""
    odd = made(d_model=5, vocab_size=7, position={"kind": "sinusoidal"}, attention={"kind": "multi_head", "n_heads": 1})
    shape = next(step.shape for step in odd.steps(Workload(tokens=3)) if step.path.endswith(":added"))
    eps = torch.finfo(torch.float32).eps
    norms = {name: sc.card(name).norm.eps for name in ("llama-7b", "llama-2-7b")}
    return [
        Remark(
            "A head is d / H wide.",
            f"Usual, and false for {', '.join(_wide_heads())}: the width of a head is a key of the card by itself.",
        ),
        Remark(
            "A router is `top-k(softmax(x W))`.",
            f"The weights of the chosen differ: {'; '.join(_routers())}. Each changes the output.",
        ),
        Remark(
            "`nn.RMSNorm(d)` is the norm of LLaMA.",
            f"Without eps torch adds float32's own {eps:.3g}; LLaMA 7B says {norms['llama-7b']:g} and LLaMA-2 7B"
            f" {norms['llama-2-7b']:g}. A card always states it.",
        ),
        Remark(
            "A block that takes `kv_cache`, under a model that never hands one down and always starts its rotations at"
            " position 0.",
            "Cached decoding through it would turn every new query by the angles of position 0. Here positions continue"
            " after the cache, and a law compares cached with uncached logits.",
        ),
        Remark(
            "`forward(ids, targets)` with a cross-entropy of logits and targets as they come.",
            "Right only if the caller has shifted the targets; otherwise each position is asked for the token it reads."
            " Here labels are the ids, shifted once, inside.",
        ),
        Remark(
            "`W_q = W_k = W_v = ...` in a demonstration of attention.",
            "One matrix under three names, so queries, keys and values are the same and the scores symmetric.",
        ),
        Remark(
            "Waves with `pe[:, 1::2] = cos(...)` over all frequencies.",
            f"Fails where d is odd: one cosine too many. Here a stream of d 5 is {shape} after its waves.",
        ),
        Remark(
            "L is the number of layers, or the length of the text; b and n, or B and T.",
            "Sources differ, so a formula needs its legend. Here L counts layers, B rows, T new positions, S keys.",
        ),
        Remark(
            "An exercise about 1,000 layers quotes an earlier section for `trains at any depth` and for outliers.",
            "That section says neither, only that pre-norm trains at depth without a fragile warm-up.",
        ),
        Remark(
            "RMSNorm is 10 % faster, 16 bits are twice as fast, good runs reach 40 to 55 % of the peak.",
            "Measurements of somebody's machine and no arithmetic: not recomputed here. `scantling roofline` measures"
            " this one, and `scantling cost` says how an MFU compares.",
        ),
        Remark(
            "A depth of d / L of 100 to 130 is what scaling laws call optimal.",
            "The same text says before that quality hardly depends on it, which is what arXiv:2001.08361 found.",
        ),
        Remark(
            "T5's comparison found decoders better at equal compute.",
            "Not recomputed here: it is an experiment and no arithmetic. An encoder-decoder of 2 P parameters costs"
            " about as much per token as a decoder of P, so that the two equalities must not be mixed.",
        ),
    ]


def kinds() -> list[str]:
    """Why figures go wrong, each kind with the rows above that show it."""
    d = sc.card("llama-2-7b").d_model
    half = half_at(made(d_model=d, vocab_size=1, attention={"kind": "multi_head", "n_heads": 32}))
    two = sc.assemble(sc.card("llama-2-70b"))
    grouped = sc.card("walk-5.9b").attention.n_kv_heads
    return [
        "**One table or two.** A model whose head is the token table has V d once, any other twice. A formula with"
        " `(x 2 if untied)` has to be told which rows of its table are untied: LLaMA-2 70B is, and its two tables hold"
        f" {2 * two.embed.params:,} parameters, not half of that.",
        "**Grouped heads.** Keys and values of fewer heads make attention smaller, the cache smaller by H / H_kv, and"
        f" leave scores and mix as they are. A walk through shapes with {grouped} KV heads whose sum is that of a model"
        " with as many as query heads is two models in one table; and a saving of 8 is that of 64 heads over 8.",
        "**Two errors that nearly cancel.** 12 L d² is off for the MLP (three matrices of 3.5 d) in one direction and"
        " for grouped heads in the other: naming one of them does not explain the difference.",
        "**The head.** A table of a layer's FLOPs is no whole model: the head multiplies V d per token, tied or not."
        " 2 N hides that by counting the input table, which is only looked up.",
        f"**Half of the square.** A causal model needs T (T + 1) / 2 pairs of T². At d {d} attention passes half of the"
        f" blocks' FLOPs at {half['full']:,} when the square is charged and at {half['causal']:,} when it is not; a"
        " share without its convention says neither.",
        "**Conditions.** 2 N needs T << 6 d, not T << d; a share of parameters is of a layer or of the model; 2 d of"
        " norms is RMSNorm's; a count of matrices leaves out biases and norms.",
        "**Ranges that the table beside them leaves.** d / L of 100 to 130, 10 to 25 % at 2 k to 8 k, a model as large"
        " as GPT-2 XL, a straight line that lies well below a curve: each is contradicted by the rows it summarises.",
        "**Digits.** 85.0 for 84.9, 1.5 beside 1.56, 70 beside a rounded 69, a quarter of a million as 0 million.",
        "**A paper's own totals.** 65 and 213 million of the 2017 models cannot come from one vocabulary; with 37,000"
        " shared pieces they are the counts above.",
    ]


def _wide_heads() -> list[str]:
    found = []
    for name in presets():
        card = sc.card(name)
        heads = card.attention
        if isinstance(heads, MultiHead) and heads.n_heads * (heads.d_head or 0) != card.d_model:
            found.append(f"{name} ({heads.n_heads} x {heads.d_head} on {card.d_model})")
    return found


def _routers() -> list[str]:
    found = []
    for name in presets():
        mlp = sc.card(name).mlp
        if isinstance(mlp, MoE):
            divided = "divided by their sum" if mlp.normalize else "as they are"
            found.append(
                f"{name} {mlp.scores}, {divided}{', selected with a stored shift' if mlp.selection_bias else ''}"
            )
    return found
