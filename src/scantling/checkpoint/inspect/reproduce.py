"""The reproduction card: everything that is needed to build the model again, and `unknown` where nobody says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from msgspec.structs import replace

from scantling.cards import Card, to_yaml
from scantling.cards.schema import Gated, Inference, Latent, Learned, MoE, MultiHead, Plain, Relative, RoPE, Sinusoidal
from scantling.checkpoint.inspect.compare import Comparison
from scantling.checkpoint.inspect.declared import Declared
from scantling.checkpoint.inspect.facts import Facts, Value
from scantling.checkpoint.inspect.gather import Gathered
from scantling.checkpoint.inspect.kinds import Kind

FLOATS = ("float32", "float16", "bfloat16")
UNKNOWN: Final = "unknown"


def reproduction(
    gathered: Gathered, declared: Declared | None, found: Comparison, stored: Sequence[Kind]
) -> Card | None:
    """The card that rebuilds the checkpoint's model; None where none does.

    Shapes of quantised weights are not those of the model, so there the config's card is taken as it is.
    """
    compared = declared is not None and declared.quantised is None and bool(gathered.tensors)
    if found.card is None or (compared and not found.rebuilds) or not gathered.complete:
        return None
    dtype = _dtype(stored) or found.card.dtype
    quantisation = quantised(gathered, declared, stored)
    inference = Inference(
        quantisation=quantisation, cache=UNKNOWN, batch=UNKNOWN, prompt_tokens=UNKNOWN, new_tokens=UNKNOWN
    )
    return replace(found.card, dtype=dtype, training=UNKNOWN, inference=inference)


def quantised(gathered: Gathered, declared: Declared | None, stored: Sequence[Kind]) -> str:
    """Kinds of blocks with the number of tensors, the method of the config, none, or unknown."""
    if declared is not None and declared.quantised is not None:
        return declared.quantised
    if not gathered.tensors:
        return UNKNOWN
    total = sum(kind.tensors for kind in stored)
    blocks = [kind for kind in sorted(stored, key=lambda kind: -kind.tensors) if not kind.dtype[0].islower()]
    return ", ".join(f"{kind.dtype} ({kind.tensors} of {total} tensors)" for kind in blocks) or "none"


def _dtype(stored: Sequence[Kind]) -> Any:
    """The dtype of most of the numbers, if a card can say it."""
    most = max(stored, key=lambda kind: kind.numel, default=None)
    return most.dtype if most is not None and most.dtype in FLOATS else None


def card_text(card: Card, changed: Iterable[str], facts: Facts) -> str:
    """The card as YAML, with a line for what is not the config's own."""
    lines = [f"# {facts.facts[key].what}: by the tensors, not by the config\n" for key in changed]
    return "".join(lines) + to_yaml(card)


def partial(facts: Facts, dtype: str) -> dict[str, Any]:
    """What tensors alone show, in the sections of a card; unknown where they do not tell."""
    attention, position, mlp = _attention(facts), _position(facts), _mlp(facts)
    said = {
        "family": facts.value("family"),
        "n_layers": facts.value("layers"),
        "d_model": facts.value("d_model"),
        "vocab_size": facts.value("rows"),
        "context": facts.value("context"),
        "attention": attention,
        "position": position,
        "norm": {"kind": facts.value("norm"), "eps": None, "at": _listed(facts.value("norm_at"))},
        "mlp": mlp,
        "tied": facts.value("tied"),
        "dtype": dtype,
        "training": None,
        "inference": None,
    }
    return {key: _or_unknown(value) for key, value in said.items()}


def _or_unknown(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _or_unknown(inner) for key, inner in value.items()}
    return UNKNOWN if value is None else value


def _listed(value: Value) -> Any:
    return value.split() if isinstance(value, str) and value != "none" else None


def _attention(facts: Facts) -> dict[str, Any]:
    if facts.value("attention") == "latent":
        keys = {"heads": "n_heads", "kv_rank": "kv_rank", "q_rank": "q_rank"}
        keys |= {key: key for key in ("d_nope", "d_rope", "d_value")}
        return {"kind": "latent", **{ours: facts.value(key) for key, ours in keys.items()}}
    bias = facts.value("bias")
    return {
        "kind": facts.value("attention"),
        "n_heads": facts.value("heads"),
        "n_kv_heads": facts.value("kv_heads"),
        "d_head": facts.value("d_head"),
        "bias": [] if bias == "none" else _listed(bias),
    }


def _position(facts: Facts) -> dict[str, Any]:
    kind = facts.value("position")
    if kind == "relative":
        return {"kind": kind, "buckets": facts.value("position_rows"), "max_distance": None}
    return {"kind": None} if kind is None else {"kind": None, "rows": facts.value("position_rows")}


def _mlp(facts: Facts) -> dict[str, Any]:
    kind = facts.value("mlp")
    if isinstance(kind, str) and kind.startswith("experts"):
        inner = kind.removeprefix("experts, ") or None
        expert = {"kind": inner, "act": None, "d_ff": facts.value("d_expert")}
        return {"kind": "moe", "n_experts": facts.value("experts"), "top_k": None, "expert": expert}
    return {"kind": kind, "act": None, "d_ff": facts.value("d_ff"), "bias": facts.value("mlp_bias")}


def nine_lines(card: Card) -> dict[str, Any]:
    """The card in the nine lines of a reproduction configuration: architecture, layers ... training, inference."""
    attention, position, mlp = card.attention, card.position, card.mlp
    scaling = position.scaling if isinstance(position, RoPE) else None
    trained = getattr(scaling, "trained_length", None) or card.context
    layers: Any = card.n_layers
    if card.decoder is not None and card.decoder.n_layers is not None:
        layers = {"encoder": card.n_layers, "decoder": card.decoder.n_layers}
    base = position.theta if isinstance(position, RoPE | Sinusoidal) else None
    return {
        "architecture": card.family,
        "layers": layers,
        "width": card.d_model,
        "attention": _attention_line(attention),
        "position": {
            "method": str(position.__struct_config__.tag),
            "base": base,
            "scaling": "none" if scaling is None else str(scaling.__struct_config__.tag),
            "trained_length": trained,
            **({"rows": card.context + position.offset} if isinstance(position, Learned) else {}),
            **({"buckets": position.buckets} if isinstance(position, Relative) else {}),
        },
        "norm": {
            "type": str(card.norm.__struct_config__.tag),
            "pre_or_post": order(card),
            "epsilon": card.norm.eps,
        },
        "ffn": _feed_forward_line(mlp),
        "training": UNKNOWN if card.training is None else card.training,
        "inference": {
            name: getattr(card.inference, name, None) or UNKNOWN
            for name in ("cache", "quantisation", "batch", "prompt_tokens", "new_tokens")
        },
    }


def _attention_line(attention: MultiHead | Latent) -> dict[str, Any]:
    if isinstance(attention, Latent):
        ranks = {"kv_rank": attention.kv_rank, "q_rank": attention.q_rank}
        return {"kind": "latent", "heads": attention.n_heads, **ranks, "kernel": UNKNOWN}
    return {
        "kind": "multi_head",
        "heads": attention.n_heads,
        "kv_heads": attention.n_kv_heads,
        "head_dim": attention.d_head,
        "window": attention.window or "none",
        "kernel": UNKNOWN,
    }


def _feed_forward_line(mlp: Plain | Gated | MoE) -> dict[str, Any]:
    inner = mlp.expert if isinstance(mlp, MoE) else mlp
    kind = str(inner.__struct_config__.tag)
    return {
        "activation_or_gate": f"{inner.act}, gated" if kind == "gated" else inner.act,
        "intermediate_width": inner.d_ff,
        "experts": {"number": mlp.n_experts, "per_token": mlp.top_k} if isinstance(mlp, MoE) else "none",
    }


def order(card: Card) -> str:
    """Where the norms of a sublayer stand, in the words that papers use."""
    names = {("in",): "pre", ("out",): "post", ("in", "res"): "sandwich", ("res",): "on the update"}
    return names.get(tuple(sorted(card.norm.at)), " and ".join(card.norm.at))
