"""Random legal cards, small enough to build: every choice of the schema, in every combination."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy, composite

ACTS = ("relu", "gelu", "gelu_tanh", "quick_gelu", "relu2", "silu")
PLACES = ("in", "res", "out")


def some(draw: DrawFn, options: dict[str, SearchStrategy[Any]]) -> dict[str, Any]:
    """Each optional key is there or not."""
    return {key: draw(value) for key, value in options.items() if draw(st.booleans())}


def positive(high: float = 100.0) -> SearchStrategy[float]:
    return st.floats(1e-3, high, allow_nan=False) | st.integers(1, int(high))


@composite
def attentions(draw: DrawFn, d_head: int, n_heads: int, must_state: bool) -> dict[str, Any]:
    divisors = [n for n in range(1, n_heads + 1) if n_heads % n == 0]
    section = {"kind": "multi_head", "n_heads": n_heads} | some(
        draw,
        {
            "n_kv_heads": st.sampled_from(divisors) | st.none(),
            "window": st.integers(1, 40) | st.none(),
            "bias": st.lists(st.sampled_from("qkvo"), unique=True),
            "scale": positive(2.0) | st.none(),
            "scale_by_layer": st.booleans(),
        },
    )
    if must_state or draw(st.booleans()):
        section["d_head"] = d_head
    return section


@composite
def positions(draw: DrawFn, d_head: int) -> dict[str, Any]:
    kinds = ["none", "sinusoidal", "learned", *(["rope"] if d_head >= 2 else [])]
    match kind := draw(st.sampled_from(kinds)):
        case "sinusoidal":
            return {"kind": kind} | some(draw, {"theta": positive(1e6)})
        case "rope":
            widths = st.integers(1, d_head // 2).map(lambda n: 2 * n)
            section = {"kind": kind, "theta": draw(positive(1e6))} | some(draw, {"interleaved": st.booleans()})
            if d_head % 2 or draw(st.booleans()):
                section["d_rotary"] = draw(widths)
            return section
        case "learned":
            return {"kind": kind} | some(draw, {"offset": st.integers(0, 3), "from_mask": st.booleans()})
    return {"kind": kind}


@composite
def norms(draw: DrawFn) -> dict[str, Any]:
    kind = draw(st.sampled_from(["rmsnorm", "layernorm"]))
    at = st.lists(st.sampled_from(PLACES), min_size=1, max_size=3, unique=True)
    section = {"kind": kind, "eps": draw(st.floats(1e-12, 0.1))} | some(draw, {"at": at})
    return section | (some(draw, {"bias": st.booleans()}) if kind == "layernorm" else {})


@composite
def dense(draw: DrawFn) -> dict[str, Any]:
    section = {"kind": draw(st.sampled_from(["plain", "gated"])), "act": draw(st.sampled_from(ACTS))}
    return section | some(draw, {"d_ff": st.integers(1, 48) | st.none(), "bias": st.booleans()})


@composite
def mlps(draw: DrawFn) -> dict[str, Any]:
    if draw(st.integers(0, 2)):
        return draw(dense())
    n_experts = draw(st.integers(1, 4))
    section = {"kind": "moe", "n_experts": n_experts, "top_k": draw(st.integers(1, n_experts)), "expert": draw(dense())}
    return section | some(draw, {"normalize": st.booleans()})


@composite
def legal_cards(draw: DrawFn, max_layers: int = 3) -> dict[str, Any]:
    """A card as plain mappings; its model has fewer than 200,000 parameters."""
    n_heads, d_head = draw(st.integers(1, 4)), draw(st.integers(1, 8))
    d_model = n_heads * d_head
    must_state = d_model > 16 or draw(st.booleans())
    if must_state:
        d_model = draw(st.integers(1, 16))
    card = {
        "name": draw(st.text(st.characters(exclude_categories=["Cs"]), max_size=20)),
        "family": "decoder",
        "n_layers": draw(st.integers(0, max_layers)),
        "d_model": d_model,
        "vocab_size": draw(st.integers(1, 80)),
        "context": draw(st.integers(1, 32)),
        "attention": draw(attentions(d_head, n_heads, must_state)),
        "position": draw(positions(d_head)),
        "norm": draw(norms()),
        "mlp": draw(mlps()),
        "tied": draw(st.booleans()),
    }
    chances = dict.fromkeys(("embedding", "attention", "residual"), st.floats(0, 0.9))
    text = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
    return card | some(
        draw,
        {
            "embedding": st.fixed_dictionaries(
                {}, optional={"scale": positive() | st.none(), "vocab_multiple": st.integers(1, 64)}
            ),
            "head": st.fixed_dictionaries({}, optional={"softcap": positive() | st.none()}),
            "dropout": st.fixed_dictionaries({}, optional=chances),
            "dtype": st.sampled_from(["float32", "float16", "bfloat16"]),
            "source": st.fixed_dictionaries({"config": text}, optional={"note": text | st.none()}) | st.none(),
            "published": st.fixed_dictionaries({"params": st.integers(1, 10**15), "where": text}) | st.none(),
        },
    )
