"""The popular formulas applied to one card: each beside the exact number, with the terms that make the difference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from scantling.cards.schema import Card, Latent
from scantling.numbers.count import count
from scantling.numbers.flops import BACKWARD, flops
from scantling.numbers.memory import memory
from scantling.numbers.training import Recipe, state_lines, training_memory
from scantling.parts.attention import Attention
from scantling.parts.latent import LatentAttention
from scantling.parts.mlp import MLP, GatedMLP
from scantling.parts.part import Workload
from scantling.parts.transformer import Transformer
from scantling.study.activations import activations
from scantling.study.formula import Formula, formula
from scantling.units import DTYPE_BYTES

KAPLAN = "Kaplan et al., arXiv:2001.08361, section 2.1"
PALM = "Chowdhery et al. (PaLM), arXiv:2204.02311, appendix B"
CHINCHILLA = "Hoffmann et al. (Chinchilla), arXiv:2203.15556, appendix F"
ZERO = "Rajbhandari et al. (ZeRO), arXiv:1910.02054, section 3.1"
VLLM = "Kwon et al. (vLLM), arXiv:2309.06180, section 3"
GQA = "Ainslie et al., arXiv:2305.13245"

ADAM_16 = Recipe("bf16-master", main_gradients=False)
"""16 bytes per parameter: 2 + 2 of weights and gradients, 4 of the master copy, 8 of moments (ZeRO, section 3.1)."""
ADAM_18 = Recipe("bf16-master", main_gradients=True)
"""The same with gradients that are kept and added up in float32."""


def examine(card: Card, model: Transformer, w: Workload, dtype: str = "bfloat16") -> list[Formula]:
    """Every formula that says something about `card`, assembled as `model`.

    Args:
        w: the pass whose FLOPs and cache are meant.
        dtype: of weights and cache.
    """
    return [
        *_parameters(model),
        *_flops(card, model, w),
        *_cache(card, model, dtype),
        *_memory(model, w, dtype),
        *activations(card, model, w, dtype),
    ]


def _parameters(model: Transformer) -> Iterator[Formula]:
    counted = count(model)
    tables = (counted.shortcut - 12 * _layers(model) * model.d_model**2) // _table(model)
    name = f"12 L d^2 + {'' if tables == 1 else f'{tables} '}V d"
    assumes = "attention is 4 d^2 and the MLP 8 d^2 in every layer; no norms, biases, positions, experts"
    yield formula("parameters", name, (counted.total, "all parameters"), counted.reasons, assumes, KAPLAN)


def _table(model: Transformer) -> int:
    """V d as the shortcut counts it."""
    vocab = getattr(model.head, "vocab_size", model.embed.rows)
    return int(vocab) * model.d_model


def _layers(model: Transformer) -> int:
    return sum(len(stack.blocks) for stack in model.stacks.values())


def _flops(card: Card, model: Transformer, w: Workload) -> Iterator[Formula]:
    f = flops(model, w)
    mix = f.by_part.get("scores and mix", 0)
    forward = (f.forward, f"forward FLOPs of B {w.batch}, T {w.tokens:,}, full square")
    training = (f.training, f"training FLOPs of B {w.batch}, T {w.tokens:,}, full square")
    products = f.forward - mix
    terms = {"scores and mix": mix, _LOOKED_UP: products - f.rule_2n}
    assumes = "every parameter is multiplied once per token and T << 6 d, so that scores and mix are small"
    yield formula("FLOPs", "2 N per token", forward, terms, assumes, KAPLAN)
    three = {why: (1 + BACKWARD) * n for why, n in terms.items()}
    yield formula("FLOPs", "6 N per token", training, three, assumes, KAPLAN)
    if model.active_params != model.params:
        idle = {
            "parameters of experts that a token does not use": -6
            * (model.params - model.active_params)
            * w.batch
            * w.tokens
        }
        everything = "as 6 N, and every expert works on every token"
        yield formula("FLOPs", "6 N per token, N with all experts", training, three | idle, everything, KAPLAN)
    heads, width = _heads(card)
    guess = 12 * _layers(model) * heads * width * w.keys * w.batch * w.tokens
    terms = {"scores and mix are not 12 L H Q T": 3 * mix - guess, _LOOKED_UP: 3 * (products - f.rule_2n)}
    assumes = "every parameter is multiplied once per token; all L layers have H heads of size Q over the full square"
    yield formula("FLOPs", "6 N + 12 L H Q T per token", training, terms, assumes, PALM)
    yield _chinchilla(card, model, w, training, f.by_part)


_LOOKED_UP = "parameters that no product uses: looked-up tables, norms, biases"


def _chinchilla(
    card: Card, model: Transformer, w: Workload, training: tuple[int, str], by_part: Mapping[str, int]
) -> Formula:
    """Training FLOPs as appendix F adds them up: embeddings + L x (attention + dense block) + logits, times 3."""
    n, layers, d = w.batch * w.tokens, _layers(model), model.d_model
    heads, width = _heads(card)
    wide, pairs = heads * width, n * w.keys
    guesses = {
        "projections are not 4 of d x (H x key size)": 8 * n * d * wide * layers,
        "scores and mix": 4 * pairs * wide * layers,
        "softmax, which costs no product": 3 * heads * pairs * layers,
        "the MLP is not two matrices of d x d_ff": 4 * n * d * _d_ff(model) * layers,
        "the embedding is a lookup and no product": 2 * n * _table(model),
        "the head is not V d": 2 * n * _table(model),
    }
    mlp = sum(by_part.get(role, 0) for role in ("mlp", "experts", "router"))
    named = (by_part.get("attention projections", 0), by_part.get("scores and mix", 0), 0, mlp, 0)
    exact = dict(zip(guesses, (*named, sum(by_part.values()) - sum(named)), strict=True))
    terms = {why: 3 * (exact[why] - guess) for why, guess in guesses.items()}
    assumes = "all heads have keys of their own, the MLP is plain, and the embedding is a product"
    return formula("FLOPs", "3 (2 T V d + L (attention + dense) + 2 T V d)", training, terms, assumes, CHINCHILLA)


def _heads(card: Card) -> tuple[int, int]:
    """H and the width of one head's key, as the card's own attention has them."""
    attention = card.attention
    if isinstance(attention, Latent):
        return attention.n_heads, attention.d_nope + attention.d_rope
    return attention.n_heads, attention.d_head or card.d_model // attention.n_heads


def _d_ff(model: Transformer) -> int:
    """Width of the first MLP, or of the first expert."""
    return next((part.d_ff for _, part, _ in model.walk() if isinstance(part, MLP | GatedMLP)), 0)


def _cache(card: Card, model: Transformer, dtype: str) -> Iterator[Formula]:
    if model.decoder is None:
        return
    size = DTYPE_BYTES[dtype]
    layers, d = len(model.decoder.blocks), model.d_model
    kept = memory(model, Workload(), dtype, dtype).kv_per_token
    exact = (kept, f"bytes in the cache for one more position, {dtype}")
    attentions = [part for _, part, _ in model.decoder.walk() if isinstance(part, Attention | LatentAttention)]
    every = 2 * size * sum(a.n_heads * a.d_head for a in attentions)
    # Latent attention keeps neither keys nor values, so none of its heads has any.
    own = 2 * size * sum(a.n_kv_heads * a.d_head for a in attentions if isinstance(a, Attention))
    terms = {
        "heads are not d wide together": every - 2 * size * layers * d,
        "query heads share keys and values, or a latent stands for both": kept - every,
    }
    assumes = "multi-head attention whose heads are d wide together, in every layer"
    yield formula("KV cache", f"2 L d x {size} bytes per token", exact, terms, assumes, VLLM)
    if isinstance(card.attention, Latent):
        heads, width = _heads(card)
        name, guess = f"2 L H D x {size} bytes per token", 2 * size * layers * heads * width
    else:
        _, width = _heads(card)
        kv_heads = card.attention.n_kv_heads or card.attention.n_heads
        name, guess = f"2 L H_kv D x {size} bytes per token", 2 * size * layers * kv_heads * width
    terms = {"layers differ": own - guess if own else 0, "a latent is kept instead": kept - (own or guess)}
    yield formula("KV cache", name, exact, terms, "all layers keep keys and values of H_kv heads of size D", GQA)


def _memory(model: Transformer, w: Workload, dtype: str) -> Iterator[Formula]:
    size = DTYPE_BYTES[dtype]
    kept = memory(model, w, dtype, dtype)
    exact = (kept.weights + kept.kv, f"bytes of weights and cache of B {w.batch} x {w.keys:,} positions, {dtype}")
    terms = {"KV cache": kept.kv, "stored besides, trained by no gradient": kept.weights - size * model.params}
    assumes = "nothing but weights is in memory"
    yield formula("memory", f"{size} bytes per parameter, inference", exact, terms, assumes, ZERO)
    for each, recipe in ((16, ADAM_16), (18, ADAM_18)):
        lines = state_lines(training_memory(model, Workload(), recipe), recipe)
        exact = (sum(lines.values()), "bytes of training states: " + ", ".join(lines))
        counts = lines["counts of updates"]
        untrained = exact[0] - counts - each * model.params
        terms = {"numbers that no gradient trains have weights only": untrained, "counts of updates": counts}
        assumes = "Adam in mixed precision, everything trained, nothing sharded; activations come on top"
        yield formula("memory", f"{each} bytes per parameter, training", exact, terms, assumes, ZERO)
