"""Random legal cards, small enough to build: every choice of the schema, in every combination that is legal."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy, composite

ACTS = ("relu", "gelu", "gelu_tanh", "quick_gelu", "relu2", "silu", "tanh")
PLACES = ("in", "res", "out")
SCALINGS = ("linear", "dynamic", "yarn", "llama3", "longrope")
USUAL: dict[str, dict[str, Any]] = {
    "plain": {},
    "gated": {"clamp": None},
    "moe": {"selection_bias": False, "groups": 1, "top_groups": 1, "group_score": "max"},
}
"""What an MLP of a layer says of keys that the card's own may have and that are not legal with every other key."""


def some(draw: DrawFn, options: dict[str, SearchStrategy[Any]]) -> dict[str, Any]:
    """Each optional key is there or not."""
    return {key: draw(value) for key, value in options.items() if draw(st.booleans())}


def positive(high: float = 100.0) -> SearchStrategy[float]:
    return st.floats(1e-3, high, allow_nan=False) | st.integers(1, int(high))


EPS = st.floats(1e-12, 0.1)


@composite
def qk_norms(draw: DrawFn) -> dict[str, Any]:
    """A bias is a layernorm's, plus_one and rounded an rmsnorm's, and a norm of each head has none of them."""
    kind = draw(st.sampled_from(["rmsnorm", "layernorm"]))
    section = {"kind": kind, "eps": draw(EPS)} | some(draw, {"over": st.sampled_from(["head", "each_head", "width"])})
    if section.get("over") == "each_head":
        return section
    return section | draw(gains(kind))


@composite
def gains(draw: DrawFn, kind: str) -> dict[str, Any]:
    """How a norm's gain is applied; with plus_one it multiplies before anything is rounded."""
    if kind == "layernorm":
        return some(draw, {"bias": st.booleans()})
    section = some(draw, {"plus_one": st.booleans()})
    rounded = st.sampled_from([None, False] if section.get("plus_one") else [None, False, True])
    return section | some(draw, {"rounded": rounded})


@composite
def reaches(draw: DrawFn, most: int = 40) -> dict[str, Any]:
    """All keys that say who reads whom, or none of them; `most` is the longest window or chunk."""
    size = st.integers(1, most)
    kind = draw(st.sampled_from(["full", "window", "chunk", "strided", "band", "fixed", "blocks"]))
    reach: dict[str, Any] = {"window": None, "chunk": None, "stride": None, "prefix": draw(st.booleans())}
    if kind == "full":
        return {} if draw(st.booleans()) else reach
    if kind in ("window", "chunk"):
        return reach | {kind: draw(size)}
    every = draw(size)
    if kind in ("strided", "band"):
        return reach | {"stride": {"every": every}, "window": draw(size) if kind == "band" else None}
    stride = {"every": every, "last": draw(st.integers(1, every))}
    return reach | {"stride": stride, "chunk": every if kind == "blocks" else None}


@composite
def attentions(draw: DrawFn, d_head: int, n_heads: int, must_state: bool) -> dict[str, Any]:
    divisors = [n for n in range(1, n_heads + 1) if n_heads % n == 0]
    section = {"kind": "multi_head", "n_heads": n_heads} | some(
        draw,
        {
            "n_kv_heads": st.sampled_from(divisors) | st.none(),
            "bias": st.lists(st.sampled_from("qkvo"), unique=True),
            "scale": positive(2.0) | st.none(),
            "scale_by_layer": st.booleans(),
            "qk_norm": qk_norms() | st.none(),
            "softcap": positive() | st.none(),
            "sinks": st.booleans(),
            "clip": positive() | st.none(),
        },
    )
    if must_state or draw(st.booleans()):
        section["d_head"] = d_head
    return section | draw(reaches())


@composite
def latents(draw: DrawFn, d_rope: int) -> dict[str, Any]:
    """Its position must be rope."""
    widths = st.integers(1, 8)
    section = {"kind": "latent", "d_rope": d_rope, "eps": draw(EPS), "n_heads": draw(st.integers(1, 4))}
    section |= {name: draw(widths) for name in ("kv_rank", "d_nope", "d_value")}
    return section | some(draw, {"q_rank": widths | st.none(), "scale": positive(2.0) | st.none()})


@composite
def scalings(draw: DrawFn, d_rotary: int) -> dict[str, Any]:
    """Caches of dynamic and longrope are exact up to the trained length only, which no length in the tests exceeds."""
    kinds = SCALINGS if d_rotary >= 4 else tuple(kind for kind in SCALINGS if kind != "dynamic")
    kind = draw(st.sampled_from(kinds))
    far, factor = st.integers(64, 4096), {"factor": draw(positive())} if kind != "longrope" else {}
    section = {"kind": kind} | factor
    match kind:
        case "dynamic":
            section["trained_length"] = draw(far)
        case "yarn":
            section["trained_length"] = draw(st.integers(1, 4096))
            names = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")
            section |= some(draw, {**dict.fromkeys(names, positive(2.0)), "truncate": st.booleans()})
        case "llama3":
            low = draw(positive(8.0))
            more = {"low_freq_factor": low, "high_freq_factor": low + draw(positive(8.0))}
            section |= {"trained_length": draw(st.integers(1, 4096))} | more
        case "longrope":
            divisors = st.lists(positive(8.0), min_size=d_rotary // 2, max_size=d_rotary // 2)
            section |= {"trained_length": draw(far), "short_factor": draw(divisors), "long_factor": draw(divisors)}
            section |= some(draw, {"attention_factor": positive(2.0) | st.none()})
    return section


@composite
def ropes(draw: DrawFn, d_head: int, most: int | None = None) -> dict[str, Any]:
    """RoPE for heads of `d_head` channels, of which at most `most` are turned."""
    most = d_head if most is None else most
    section: dict[str, Any] = {"kind": "rope", "theta": draw(positive(1e6))} | some(
        draw, {"interleaved": st.booleans()}
    )
    if most < d_head or d_head % 2 or draw(st.booleans()):
        section["d_rotary"] = draw(st.integers(1, most // 2).map(lambda n: 2 * n))
    if draw(st.booleans()):
        section["scaling"] = draw(scalings(section.get("d_rotary", d_head)) | st.none())
        if (section["scaling"] or {}).get("kind") == "yarn":
            section["theta"] = draw(st.floats(2.0, 1e6))
    return section


@composite
def positions(draw: DrawFn, d_head: int) -> dict[str, Any]:
    kinds = ["none", "sinusoidal", "learned", "alibi", *(["rope"] if d_head >= 2 else [])]
    match kind := draw(st.sampled_from(kinds)):
        case "sinusoidal":
            return {"kind": kind} | some(draw, {"theta": positive(1e6)})
        case "rope":
            return draw(ropes(d_head))
        case "learned":
            return {"kind": kind} | some(draw, {"offset": st.integers(0, 3), "from_mask": st.booleans()})
        case "alibi":
            options = {"max_bias": positive(16.0), "scaled": st.booleans(), "rounded": st.booleans()}
            return {"kind": kind} | some(draw, options)
    return {"kind": kind}


@composite
def norms(draw: DrawFn, places: tuple[str, ...] = PLACES, needed: tuple[str, ...] = ()) -> dict[str, Any]:
    """`at` is drawn from `places` and has those that are `needed`; without it, it is in."""
    kind = draw(st.sampled_from(["rmsnorm", "layernorm"]))
    at = st.lists(st.sampled_from(places), min_size=1, max_size=3, unique=True)
    at = at.map(lambda drawn: [*drawn, *(place for place in needed if place not in drawn)])
    section = {"kind": kind, "eps": draw(EPS)} | some(draw, {"at": at, "final": st.booleans() | st.none()})
    return section | draw(gains(kind))


@composite
def residuals(draw: DrawFn) -> tuple[dict[str, Any], dict[str, Any]]:
    """A residual section and a norm section that is legal with it."""
    if draw(st.booleans()):
        return {"parallel": True} | some(draw, {"shared_norm": st.booleans()}), draw(norms(("in",)))
    if draw(st.booleans()):
        return {"from_norm": True}, draw(norms(needed=("in",)))
    keys = ("parallel", "shared_norm", "from_norm")
    return some(draw, dict.fromkeys(keys, st.just(False))), draw(norms())


@composite
def dense(draw: DrawFn, must_state: bool = False) -> dict[str, Any]:
    section = {"kind": draw(st.sampled_from(["plain", "gated"])), "act": draw(st.sampled_from(ACTS))}
    section |= some(draw, {"d_ff": st.integers(1, 48) | st.none(), "bias": st.booleans()})
    if section["kind"] == "gated" and section["act"] == "silu":
        section |= some(
            draw, {"clamp": st.fixed_dictionaries({"limit": positive(), "alpha": positive(4.0)}) | st.none()}
        )
    return section | ({"d_ff": draw(st.integers(1, 48))} if must_state else {})


@composite
def mlps(draw: DrawFn) -> dict[str, Any]:
    if draw(st.integers(0, 2)):
        return draw(dense())
    n_experts = draw(st.integers(1, 4))
    scores = draw(st.sampled_from(["softmax", "sigmoid", "top_softmax"]))
    section: dict[str, Any] = {"kind": "moe", "n_experts": n_experts, "expert": draw(dense()), "scores": scores}
    room = n_experts
    # A softmax over the chosen ones only has neither groups nor a bias that decides who is chosen.
    if scores != "top_softmax":
        section |= some(draw, {"selection_bias": st.booleans()})
        groups = draw(st.sampled_from([n for n in range(1, n_experts + 1) if n_experts % n == 0]))
        top_groups = draw(st.integers(1, groups))
        room = n_experts // groups * top_groups
        section |= {"groups": groups, "top_groups": top_groups} if draw(st.booleans()) or groups > 1 else {}
        if n_experts // groups > 1:
            section |= some(draw, {"group_score": st.sampled_from(["max", "top2"])})
    section["top_k"] = draw(st.integers(1, room))
    options = {"normalize": st.booleans(), "bias": st.booleans(), "scale": positive(4.0)}
    section |= some(draw, options | {"shared": dense(must_state=True) | st.none()})
    return section | (some(draw, {"shared_gate": st.booleans()}) if section.get("shared") else {})


@composite
def layers(draw: DrawFn, card: dict[str, Any], d_model: int) -> dict[str, Any]:
    """What differs in some layers; every head must be as wide as what the position turns."""
    layer = some(draw, {"times": st.integers(1, 3), "mlp": mlps().map(lambda mlp: USUAL[mlp["kind"]] | mlp)})
    own = card["attention"]
    turned = card["position"]["kind"] == "rope"
    width = own["d_rope"] if own["kind"] == "latent" else own.get("d_head", d_model // own["n_heads"])
    most = card["position"].get("d_rotary", width) if turned else 0
    match draw(st.sampled_from(["as it is", "keys", "latent" if turned else "heads", "heads"])):
        case "keys" if own["kind"] == "multi_head":
            changes = {"sinks": st.booleans(), "scale": positive(2.0)}
            layer["attention"] = some(draw, changes) | draw(reaches(9))
        case "latent":
            width = draw(st.sampled_from([most, most + 2]))
            layer["attention"] = draw(latents(width))
        case "heads":
            width = max(most, draw(st.integers(1, 8)))
            layer["attention"] = {"n_kv_heads": None} | draw(attentions(width, draw(st.integers(1, 4)), True))
    if draw(st.booleans()):
        # A rope that the layer lays over the card's keeps the keys it does not name, so it names them all.
        layer["position"] = {"kind": "none"}
        if width >= 2 and draw(st.booleans()):
            usual = {"interleaved": False, "scaling": None, "d_rotary": width // 2 * 2}
            layer["position"] = usual | draw(ropes(width // 2 * 2))
    return layer


@composite
def embeddings(draw: DrawFn) -> dict[str, Any]:
    options = {
        "scale": positive() | st.none(),
        "vocab_multiple": st.integers(1, 64),
        "width": st.integers(1, 20) | st.none(),
        "norm": norms().map(lambda norm: {k: v for k, v in norm.items() if k not in ("at", "final")}) | st.none(),
    }
    section = some(draw, options)
    return section | (some(draw, {"scale_rounded": st.booleans()}) if section.get("scale") else {})


@composite
def legal_cards(draw: DrawFn, max_layers: int = 3) -> dict[str, Any]:
    """A card as plain mappings; its model has fewer than 200,000 parameters."""
    n_heads, d_head = draw(st.integers(1, 4)), draw(st.integers(1, 8))
    d_model = n_heads * d_head
    must_state = d_model > 16 or draw(st.booleans())
    if must_state:
        d_model = draw(st.integers(1, 16))
    if draw(st.integers(0, 4)):
        attention, position = draw(attentions(d_head, n_heads, must_state)), draw(positions(d_head))
    else:
        d_rope = 2 * draw(st.integers(1, 4))
        attention, position = draw(latents(d_rope)), draw(ropes(d_rope))
    residual, norm = draw(residuals())
    card = {
        "name": draw(st.text(st.characters(exclude_categories=["Cs"]), max_size=20)),
        "family": "decoder",
        "n_layers": draw(st.integers(0, max_layers)),
        "d_model": d_model,
        "vocab_size": draw(st.integers(1, 80)),
        "context": draw(st.integers(1, 32)),
        "attention": attention,
        "position": position,
        "norm": norm,
        "mlp": draw(mlps()),
        "tied": draw(st.booleans()),
    }
    if residual or draw(st.booleans()):
        card["residual"] = residual
    if draw(st.booleans()):
        card["pattern"] = draw(st.lists(layers(card, d_model), max_size=3))
    chances = dict.fromkeys(("embedding", "attention", "residual"), st.floats(0, 0.9))
    text = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
    head = {"softcap": positive() | st.none(), "scale": positive(2.0) | st.none(), "bias": st.booleans()}
    return card | some(
        draw,
        {
            "embedding": embeddings(),
            "head": st.fixed_dictionaries({}, optional=head),
            "dropout": st.fixed_dictionaries({}, optional=chances),
            "dtype": st.sampled_from(["float32", "float16", "bfloat16"]),
            "source": st.fixed_dictionaries({"config": text}, optional={"note": text | st.none()}) | st.none(),
            "published": st.fixed_dictionaries({"params": st.integers(1, 10**15), "where": text}) | st.none(),
        },
    )


@composite
def heads(draw: DrawFn) -> dict[str, Any]:
    """What an encoder can end in."""
    kind = draw(st.sampled_from(["lm", "tokens", "sequence", "replaced", "embedding", "none"]))
    section: dict[str, Any] = {"kind": kind}
    options: dict[str, SearchStrategy[Any]] = {}
    if kind not in ("embedding", "none"):
        options |= {"bias": st.booleans()}
    if kind == "lm":
        options |= {"softcap": positive() | st.none(), "scale": positive(2.0) | st.none()}
    if kind != "none":
        transforms = st.fixed_dictionaries(
            {"act": st.sampled_from(ACTS)}, optional={"norm": st.booleans(), "bias": st.booleans()}
        )
        options |= {"transform": transforms}
    if kind in ("sequence", "embedding"):
        options |= {"pool": st.sampled_from(["first", "mean", "last"])}
    if kind in ("tokens", "sequence"):
        section["n_labels"] = draw(st.integers(1, 5))
        options |= {"scores": st.sampled_from(["softmax", "sigmoid"])}
    if kind == "embedding":
        options |= {"normalize": st.booleans()}
    section |= some(draw, options)
    if kind == "embedding" and "transform" in section:
        section |= some(draw, {"spare": st.booleans()})
    return section


@composite
def relatives(draw: DrawFn) -> dict[str, Any]:
    buckets = 4 * draw(st.integers(1, 4))
    return {"kind": "relative", "buckets": buckets, "max_distance": buckets // 2 + draw(st.integers(1, 40))}


def _multi_head(card: dict[str, Any]) -> bool:
    sections = [card["attention"], *(layer.get("attention", {}) for layer in card.get("pattern", []))]
    return all(section.get("kind", "multi_head") == "multi_head" for section in sections)


@composite
def any_cards(draw: DrawFn) -> dict[str, Any]:
    """A legal card of any family, drawn from the decoders'."""
    family = draw(st.sampled_from(["decoder", "encoder", "encoder-decoder"]))
    if family == "decoder":
        return draw(legal_cards())
    card = draw(legal_cards(max_layers=2).filter(_multi_head)) | {"family": family}
    for section in (card, *card.get("pattern", [])):
        if "attention" in section:
            section["attention"] = {k: v for k, v in section["attention"].items() if k != "prefix"}
    if card["position"]["kind"] in ("none", "alibi") and not any("attention" in x for x in card.get("pattern", [])):
        card |= {"position": draw(relatives()), "n_layers": max(1, card["n_layers"])}
        # The first layer reads the stack's table; the others may do without.
        card["pattern"] = [
            {k: v for k, v in layer.items() if k != "position"} if i == 0 else {**layer, "position": {"kind": "none"}}
            for i, layer in enumerate(card.get("pattern", []))
        ]
    elif card["position"]["kind"] == "alibi":
        card["position"] = {"kind": "alibi"}
    norm = card["norm"]
    sequential = not card.get("residual", {}).get("parallel") and "in" in norm.get("at", ["in"])
    card["norm"] = norm | (some(draw, {"skip_first": st.booleans()}) if sequential else {})
    if family == "encoder":
        head = draw(heads())
        card |= {"head": head, "tied": card["tied"] and head["kind"] == "lm"}
        embedding = {"types": draw(st.integers(1, 3))} if draw(st.booleans()) else {}
        card["embedding"] = card.get("embedding", {}) | embedding
        width = card["embedding"].get("width")
        if width not in (None, card["d_model"]):
            card["embedding"] |= some(draw, {"widen": st.just("after"), "widen_bias": st.booleans()})
        return card
    embedding = {k: v for k, v in card.get("embedding", {}).items() if k != "width"}
    card["embedding"] = embedding | some(draw, {"shared": st.booleans()})
    if card.get("head", {}).get("bias"):
        card["head"] |= some(draw, {"bias_fixed": st.booleans()})
    card["n_layers"] = max(1, card["n_layers"])
    for side, least in (("encoder", 1 if card["position"]["kind"] == "relative" else 0), ("decoder", 1)):
        # The pattern's own would come before it, and one without any effect is refused.
        free = not any("mlp" in layer for layer in card.get("pattern", []))
        # What it leaves out would be the card's own, as a clamp that does not go with its activation.
        plain = dense(True).map(lambda mlp: USUAL[mlp["kind"]] | mlp)
        options = {"n_layers": st.integers(least, 2), **({"mlp": plain} if free else {})}
        card |= some(draw, {side: st.fixed_dictionaries({}, optional=options)})
    if draw(st.booleans()):
        bias = st.lists(st.sampled_from("qkvo"), unique=True)
        usual = {
            "window": None,
            "chunk": None,
            "stride": None,
            "sinks": False,
            "clip": None,
            "qk_norm": None,
            "scale_by_layer": False,
        }
        cross = {"n_heads": 2, "n_kv_heads": draw(st.sampled_from([1, 2])), "d_head": draw(st.integers(1, 6))}
        card["decoder"] = card.get("decoder", {}) | {"cross": usual | cross | {"bias": draw(bias)}}
    return card
