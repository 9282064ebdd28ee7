"""Quoted bytes, shapes, and the sizes of published models."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from tests.figures.quoted import CONDITION, ROUNDING, WRONG, Figure, Section, counted, made, memory_of, parts, shapes

import scantling as sc
from scantling.numbers.memory import memory
from scantling.parts.part import Workload

B, T = 2, 1024


def sections() -> Iterator[Section]:
    """The tables about memory, shapes and sizes."""
    text = "Keys and values of one position in 16 bits, weights, logits in float32, the scores of one layer in 16 bits."
    yield Section("Memory", text, "scantling memory MODEL --batch B --tokens T", [*_memory()])
    text = "One pass of B 2, T 1024 through d 4096, 32 layers, 32 heads with 8 of keys and values, d_ff 11008, V 32000:"
    text += " the preset `walk-5.9b`."
    yield Section("A tensor's way", text, "scantling trace walk-5.9b --batch 2 --tokens 1024", [*_walk()])
    text = "Smaller shapes that are worked out by hand."
    yield Section("Shapes of small examples", text, "scantling trace CARD.yaml", [*_small()])
    text = "Sizes as tables list them, beside the presets, which are made of the published configs."
    yield Section("Sizes of models", text, "scantling cards", [*_sizes()])


def _memory() -> Iterator[Figure]:
    yield Figure("GPT-2 small, KV cache per token", "36.9 kB", memory_of("gpt2").kv_per_token)
    yield Figure("Llama 3 8B, KV cache per token", "131 kB", memory_of("llama-3-8b").kv_per_token)
    yield Figure("Llama 3 8B, weights in 16 bits", "16 GB", memory_of("llama-3-8b").weights)
    logits = memory_of("walk-5.9b", batch=B, tokens=T).logits
    yield Figure("logits of 2 x 1024 x 32000, numbers", "6.6e7", logits // 4)
    yield Figure("logits of 2 x 1024 x 32000 in float32", "262 MB", logits)
    large, one = (memory_of("llama-3-8b", batch=b, tokens=t).logits for b, t in ((10, 2048), (1, 1)))
    why = f"from {-(-(10**10) // one):,} tokens on, as in these 10 rows of 2,048"
    yield Figure("logits with a vocabulary of 128 k", "10 GB", large, CONDITION, why)
    eight = made(d_model=512, vocab_size=1, attention={"kind": "multi_head", "n_heads": 8})
    scores = memory(eight, Workload(tokens=4096), "float16", "float16").scores
    yield Figure("scores of 8 heads at T 4096, numbers", "134,217,728", scores // 2)
    yield Figure("scores of 8 heads at T 4096 in float16", "256 MiB", scores)
    double = memory(eight, Workload(tokens=8192), "float16", "float16").scores
    yield Figure("scores at twice the length", "4 x", Fraction(double, scores))
    for name in ("llama-3-70b", "llama-3-8b", "mistral-7b-v0.1", "walk-5.9b"):
        heads = sc.card(name).attention
        right, why = heads.n_heads == 64, f"{heads.n_heads} heads over {heads.n_kv_heads}; 8 is 64 heads over 8"
        saved = Fraction(heads.n_heads, heads.n_kv_heads)
        yield Figure(f"{name}, cache saved by grouped heads", "8 x", saved, *(() if right else (WRONG, why)))


def _walk() -> Iterator[Figure]:
    model, card = parts("walk-5.9b"), sc.card("walk-5.9b")
    rows = shapes(model, batch=B, tokens=T)
    listed = [
        ("token ids", ":ids", "(2, 1024)", None),
        ("embedding lookup", "embed", "(2, 1024, 4096)", "131 M"),
        ("RMSNorm", "attn_norm", "(2, 1024, 4096)", "4 K"),
        ("W_Q", "attn.q", "(2, 1024, 4096)", "16.8 M"),
        ("W_K", "attn.k", "(2, 1024, 1024)", "4.2 M"),
        ("W_V", "attn.v", "(2, 1024, 1024)", "4.2 M"),
        ("heads of q", "attn:q_heads", "(2, 32, 1024, 128)", None),
        ("heads of k", "attn:k_heads", "(2, 8, 1024, 128)", None),
        ("RoPE on q", "attn:q_rotated", "(2, 32, 1024, 128)", "0"),
        ("RoPE on k", "attn:k_rotated", "(2, 8, 1024, 128)", "0"),
        ("k repeated 4 x", "attn:k_shared", "(2, 32, 1024, 128)", None),
        ("attention", "attn:mixed", "(2, 32, 1024, 128)", None),
        ("heads merged", "attn:merged", "(2, 1024, 4096)", None),
        ("W_O", "attn.o", "(2, 1024, 4096)", "16.8 M"),
        ("residual add", ":after_attn", "(2, 1024, 4096)", None),
        ("RMSNorm", "mlp_norm", "(2, 1024, 4096)", "4 K"),
        ("gate", "mlp.gate", "(2, 1024, 11008)", "45.1 M"),
        ("up", "mlp.up", "(2, 1024, 11008)", "45.1 M"),
        ("SiLU x gate", "mlp:hidden", "(2, 1024, 11008)", None),
        ("down", "mlp.down", "(2, 1024, 4096)", "45.1 M"),
        ("residual add", ":after_mlp", "(2, 1024, 4096)", None),
        ("final RMSNorm", "final_norm", "(2, 1024, 4096)", "4 K"),
        ("LM head", "head.matrix", "(2, 1024, 32000)", "131 M"),
    ]
    for what, path, shape, weights in listed:
        yield Figure(f"{what}, shape", shape, rows[path].shape)
        if weights is not None:
            yield Figure(f"{what}, parameters", weights, rows[path].params)
    blocks = sum(run.times * sum(run.by_part.values()) for run in counted("walk-5.9b").per_layer)
    why = f"6.5 B is what 32 layers hold with keys and values for all 32 heads ({_ungrouped():,}); these have 8"
    yield Figure("all 32 layers", "6.5 B", blocks, WRONG, why)
    why = f"only d_ff is its own: its keys and values have {sc.card('llama-2-7b').attention.n_kv_heads} heads"
    told = f"{model.params:,} parameters, and LLaMA-2 7B has {parts('llama-2-7b').params:,}"
    yield Figure("the whole model", "LLaMA-2 7B", told, WRONG, why)
    yield Figure("d / H", "128", Fraction(card.d_model, card.attention.n_heads))


def _ungrouped() -> int:
    found = counted("llama-2-7b")
    return sum(run.times * sum(run.by_part.values()) for run in found.per_layer)


def _small() -> Iterator[Figure]:
    heads = {"kind": "multi_head", "n_heads": 8}
    rows = shapes(made(d_model=512, vocab_size=1, attention=heads), batch=2, tokens=128, kernel="reference")
    yield Figure("B 2, T 128, d 512, 8 heads: q", "(2, 8, 128, 64)", rows["attn:q_heads"].shape)
    yield Figure("scores", "(2, 8, 128, 128)", rows["attn:scores"].shape)
    yield Figure("heads side by side", "(2, 128, 512)", rows["attn:merged"].shape)
    one = shapes(made(d_model=64, vocab_size=1, attention={"kind": "multi_head", "n_heads": 1}), tokens=8)
    yield Figure("one head, T 8, d 64: output", "(1, 8, 64)", one["attn.o"].shape)
    waves = {"position": {"kind": "sinusoidal"}}
    many = shapes(made(d_model=128, vocab_size=1, attention=heads, **waves), tokens=16)
    yield Figure("8 heads, T 16, d 128: with waves added", "(1, 16, 128)", many["position:added"].shape)
    yield Figure("8 heads, T 16, d 128: output of attention", "(1, 16, 128)", many["attn.o"].shape)
    yield Figure("8 heads, T 16, d 128: output of the MLP", "(1, 16, 128)", many["mlp.down"].shape)
    rows = shapes(made(d_model=8, vocab_size=3, attention=heads), tokens=3)
    yield Figure("ids of three tokens", "(1, 3)", rows[":ids"].shape)
    yield Figure("their vectors, d 8", "(1, 3, 8)", rows["embed"].shape)
    mlp = {"kind": "plain", "act": "gelu", "bias": True}
    stack = made(d_model=128, vocab_size=1000, n_layers=4, attention=heads, mlp=mlp, tied=False)
    rows = shapes(stack, batch=2, tokens=16)
    yield Figure("d 128, B 2, T 16: a block", "(2, 16, 128)", rows[":after_mlp"].shape)
    yield Figure("inside the MLP, four times as wide", "(2, 16, 512)", rows["mlp:hidden"].shape)
    yield Figure("V 1000: logits", "(2, 16, 1000)", rows["head.matrix"].shape)
    naive = made(
        family="encoder",
        n_layers=0,
        d_model=128,
        vocab_size=1000,
        attention={"kind": "multi_head", "n_heads": 1},
        head={"kind": "embedding", "pool": "mean"},
        tied=False,
    )
    yield Figure("a table and its mean, d 128, four tokens", "(1, 128)", shapes(naive, tokens=4)["head:pooled"].shape)
    gpt2 = shapes(parts("gpt2"), tokens=5)
    yield Figure("GPT-2 small, T 5: ids", "(1, 5)", gpt2[":ids"].shape)
    yield Figure("GPT-2 small, T 5: next-token probabilities", "(1, 50257)", gpt2[":probabilities"].shape)


SIZES = {
    "gpt2": ("124 M", "12", "768", "12", "12", "3072", "1024", "50257"),
    "gpt2-xl": ("1.56 B", "48", "1600", "25", "25", "6400", "1024", "50257"),
    "gpt3-175b": ("175 B", "96", "12288", "96", "96", "49152", "2048", "50257"),
    "llama-2-7b": ("6.7 B", "32", "4096", "32", "32", "11008", "4096", "32000"),
    "llama-2-70b": ("69 B", "80", "8192", "64", "8", "28672", "4096", "32000"),
    "llama-3-8b": ("8.0 B", "32", "4096", "32", "8", "14336", "8192", "128256"),
    "llama-3-70b": ("70 B", "80", "8192", "64", "8", "28672", "8192", "128256"),
    "mistral-7b-v0.1": ("7.2 B", "32", "4096", "32", "8", "14336", "8192", "32000"),
    "mixtral-8x7b-v0.1": ("46.7 B", "32", "4096", "32", "8", "14336", "32768", "32000"),
}
"""N, L, d, H, H_kv, d_ff, context, V as they are listed side by side."""
COLUMNS = ("N", "L", "d", "H", "H_kv", "d_ff", "context", "V")
ODD = {
    ("llama-3-70b", "N"): (
        ROUNDING,
        "cut, where LLaMA-2 70B beside it is rounded; to the nearest it is 71 B",
    ),
    ("gpt2", "act"): (
        CONDITION,
        "by its tanh approximation",
    ),
    ("mistral-7b-v0.1", "context"): (WRONG, "the config has 32,768 positions and a window of 4,096"),
}

CHOICES = {
    "gpt2": {
        "position": "learned",
        "norm": "layernorm",
        "norm at": "in",
        "mlp": "plain",
        "act": "gelu",
        "biases": "q k v o",
        "tied": "yes",
    },
    "llama-3-8b": {
        "position": "rope",
        "norm": "rmsnorm",
        "norm at": "in",
        "mlp": "gated",
        "act": "silu",
        "biases": "none",
        "tied": "no",
    },
}
"""How the two are told apart, in the words of a card."""


def _sizes() -> Iterator[Figure]:
    for name, row in SIZES.items():
        card = sc.card(name)
        expert = card.mlp.expert if hasattr(card.mlp, "expert") else card.mlp
        heads = card.attention
        layers, widths = (card.n_layers, card.d_model), (heads.n_heads, heads.n_kv_heads, expert.d_ff)
        held = (parts(name).params, *layers, *widths, card.context, card.vocab_size)
        for column, said, exact in zip(COLUMNS, row, held, strict=True):
            yield Figure(f"{name}, {column}", said, exact, *ODD.get((name, column), ()))
    yield Figure("mistral-7b-v0.1, window", "4096", sc.card("mistral-7b-v0.1").attention.window)
    yield Figure("mixtral-8x7b-v0.1, active", "12.9 B", counted("mixtral-8x7b-v0.1").active)
    yield Figure("mixtral-8x7b-v0.1, experts", "8", sc.card("mixtral-8x7b-v0.1").mlp.n_experts)
    for name, what, said in (("gpt2", "d_ff over d", "4 x"), ("llama-3-8b", "d_ff over d", "3.5 x")):
        card = sc.card(name)
        yield Figure(f"{name}, {what}", said, Fraction(card.mlp.d_ff, card.d_model))
    for name, words in CHOICES.items():
        card = sc.card(name)
        kinds = {key: str(getattr(card, key).__struct_config__.tag) for key in ("position", "norm", "mlp")}
        held_here = kinds | {
            "act": card.mlp.act,
            "norm at": " ".join(card.norm.at),
            "tied": "yes" if card.tied else "no",
        }
        held_here["biases"] = " ".join(card.attention.bias) or "none"
        for what, said in words.items():
            yield Figure(f"{name}, {what}", said, held_here[what], *ODD.get((name, what), ()))
    yield Figure("llama-3-8b, theta of RoPE", "500,000", round(sc.card("llama-3-8b").position.theta))
    yield Figure("llama-3.1-8b, context", "128 k", sc.card("llama-3.1-8b").context, CONDITION, "a k of 1,024")
