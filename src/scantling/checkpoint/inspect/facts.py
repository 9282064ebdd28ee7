"""What names and shapes alone say of a model, whoever's names they are, and what they cannot say."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from scantling.checkpoint.inspect.naming import NO_LAYER, Held, Named, Reading, held
from scantling.checkpoint.inspect.view import View, layers_of, stream_width
from scantling.checkpoint.names import Shape, Stack

Value = int | str | bool | None
SIDES = ("encoder", "decoder")
_PLACES = {"norm": "in", "res_norm": "res", "out_norm": "out"}
_CAUSAL_MASK = re.compile(r"\.(attn|attention)\.bias$")
_ANGLES = re.compile(r"\.rotary(_emb)?\.inv_freq$")


@dataclass(frozen=True)
class Fact:
    """One thing about a model.

    Attributes:
        key: a word for programs.
        what: for readers.
        value: None where tensors do not tell; several values of different layers or stacks are one text.
    """

    key: str
    what: str
    value: Value


@dataclass(frozen=True)
class Facts:
    """All facts, and what was noticed on the way.

    Attributes:
        facts: by key.
        roles: the tensors by our names.
        turned: names of matrices that are stored the other way round than their names say.
        beyond: layers after the model's own, which hold tensors that no other layer has.
    """

    facts: dict[str, Fact]
    roles: dict[tuple[str, ...], Held]
    turned: tuple[str, ...]
    beyond: tuple[tuple[str, int], ...]

    def value(self, key: str) -> Value:
        """The value of a fact; None where it is unknown."""
        return self.facts[key].value if key in self.facts else None


def facts_of(named: Named) -> Facts:
    """Derive what can be known: what every reading of the names agrees on."""
    first, *others = [_read(named, reading) for reading in named.readings]
    agreed = {
        key: fact if all(other.value(key) == fact.value for other in others) else replace(fact, value=None)
        for key, fact in first.facts.items()
    }
    return replace(first, facts=agreed)


def _read(named: Named, reading: Reading) -> Facts:
    roles = held(named, reading)
    by_name = {name: role for names, role in roles.items() for name in names}
    layers, beyond = layers_of(named, by_name)
    width = stream_width(by_name)
    sides = [side for side in SIDES if any(name.startswith(f"{side}.") for name in by_name)]
    views = [View(side, by_name, layers.get(side, []), width) for side in sides]
    found = list(_whole(by_name, views, width))
    found += _merged([list(_attention(view)) for view in views])
    found += _merged([list(_mlp(view)) for view in views])
    found += _merged([list(_norms(view)) for view in views])
    found += [*_position(named, views), *_head(by_name, views)]
    turned = [name for view in views for name in view.turned()]
    return Facts({fact.key: fact for fact in found}, roles, tuple(turned), beyond)


def _one(values: Iterable[int | str | bool]) -> Value:
    """The value that all have, or each different one; None where there is none."""
    different = list(dict.fromkeys(values))
    if len(different) < 2:
        return different[0] if different else None
    return ", ".join(str(value) for value in different)


def _merged(sides: list[list[Fact]]) -> list[Fact]:
    """The facts of two stacks as one list, values that differ side by side."""
    if len(sides) < 2:
        return sides[0] if sides else []
    by_key = [{fact.key: fact for fact in side} for side in sides]
    out = []
    for key in dict.fromkeys(key for side in by_key for key in side):
        mine = [side[key] for side in by_key if key in side]
        values = [fact.value for fact in mine]
        same = all(value == values[0] for value in values)
        out.append(Fact(key, mine[0].what, values[0] if same else " + ".join(map(_text, values))))
    return out


def _text(value: Value) -> str:
    return "unknown" if value is None else str(value)


def _whole(roles: Mapping[str, Held], views: list[View], width: int | None) -> Iterator[Fact]:
    family = {("decoder",): "decoder", ("encoder",): "encoder", SIDES: "encoder-decoder"}
    table = _outside(roles, "embed.weight")
    yield Fact("family", "family", family.get(tuple(view.side for view in views)))
    counts = [1 + max(view.layers, default=-1) for view in views]
    whole: Value = counts[0] if len(counts) == 1 or len(set(counts)) == 1 else " + ".join(map(str, counts))
    yield Fact("layers", "layers", whole if counts else None)
    yield Fact("d_model", "width d_model", width)
    yield Fact("rows", "rows of the token table", table[0] if len(table) == 2 else None)
    if len(table) == 2 and table[1] != width:
        yield Fact("table_width", "width of the token table", table[1])


def _outside(roles: Mapping[str, Held], name: str) -> Shape:
    return roles[name].shapes.get(NO_LAYER, ()) if name in roles else ()


def _attention(view: View) -> Iterator[Fact]:
    if view.has("attn.kv_down.weight"):
        yield from _latent(view)
        return
    q, k, out = view.reads("attn.q.weight"), view.reads("attn.k.weight"), view.writes("attn.o.weight")
    fused = _fused(view)
    if fused and out:
        q, k = out[:1], [(fused[0] - out[0]) // 2]
    yield Fact("attention", "attention", "multi_head" if q or out else None)
    heads, kv_heads, d_head = _heads(view, q, k)
    yield Fact("heads", "heads", heads)
    yield Fact("kv_heads", "KV heads", kv_heads)
    yield Fact("d_head", "head size", d_head)
    yield Fact("q_width", "width of all queries", _one(q or out))
    yield Fact("kv_width", "width of all keys", _one(k))
    if len(q) == len(k) == 1 and k[0] and q[0] % k[0] == 0:
        yield Fact("group", "query heads per KV head", q[0] // k[0])
    yield Fact("bias", "biases of q, k, v, o", " ".join(_biases(view)) or "none" if q or fused else None)
    yield Fact("qk_norm", "QK-norm", _qk_norm(view, q))
    yield Fact("sinks", "sinks", view.has("attn.sinks"))


def _fused(view: View) -> list[int]:
    """Rows of the matrix that holds queries, keys and values."""
    key = f"{view.side}.blocks.{{i}}.attn.q.weight"
    role = view.roles.get(key)
    return view.reads("attn.q.weight") if role is not None and len(role.ours) == 3 else []


def _biases(view: View) -> list[str]:
    return [p for p in "qkvo" if view.has(f"attn.{p}.bias")]


def _heads(view: View, q: list[int], k: list[int]) -> tuple[Value, Value, Value]:
    """Heads, KV heads and their size, where a tensor has one number per head or per channel of a head."""
    if len(q) != 1 or len(k) > 1:
        return None, None, None
    d_head = heads = None
    gain = view.role("attn.q_norm.weight")
    scores = _scores(view)
    if gain is not None and isinstance(gain.transform, Stack):
        heads = len(gain.names[view.layers[0]]) if view.layers else None
    elif gain is not None and (sizes := view.shapes("attn.q_norm.weight")) and sizes[0][-1] != q[0]:
        d_head = sizes[0][-1]
    elif sinks := view.shapes("attn.sinks"):
        heads = sinks[0][0]
    elif scores:
        heads = scores[-1]
    if heads and q[0] % heads == 0:
        d_head = q[0] // heads
    if not d_head or q[0] % d_head or (k and k[0] % d_head):
        return None, None, None
    return q[0] // d_head, k[0] // d_head if k else None, d_head


def _qk_norm(view: View, q: list[int]) -> Value:
    gain = view.role("attn.q_norm.weight")
    if gain is None or not view.has("attn.q_norm.weight"):
        return "none"
    if isinstance(gain.transform, Stack):
        return "each_head"
    return "width" if view.shapes("attn.q_norm.weight")[0][-1] in q else "head"


def _latent(view: View) -> Iterator[Fact]:
    """Multi-head latent attention: five widths follow from the shapes of four matrices.

    With H heads of n channels without and r with position and v of values, the rows of q_up are H (n + r), those of
    kv_up H (n + v), the columns of o H v, and the rows of kv_down the rank and r.
    """
    yield Fact("attention", "attention", "latent")
    rank, down = (_one(x) for x in (_lengths(view, "attn.kv_norm.weight"), view.reads("attn.kv_down.weight")))
    q_rank = _one(_lengths(view, "attn.q_norm.weight"))
    ups = view.shapes("attn.q_up.weight")
    q = _one(shape[0] for shape in ups) if ups else _one(view.reads("attn.q.weight"))
    kv, out = _one(shape[0] for shape in view.shapes("attn.kv_up.weight")), _one(view.writes("attn.o.weight"))
    sizes: list[Value] = [None] * 4
    if type(rank) is type(down) is type(q) is type(kv) is type(out) is int and down > rank:
        d_rope = down - rank
        nope = kv - out
        heads = (q - nope) // d_rope
        if heads > 0 and not (q - nope) % d_rope and not nope % heads and not out % heads:
            sizes = [heads, nope // heads, d_rope, out // heads]
    for key, what, value in zip(
        ("heads", "d_nope", "d_rope", "d_value"),
        ("heads", "channels without position", "channels with position", "channels of values"),
        sizes,
        strict=True,
    ):
        yield Fact(key, what, value)
    yield Fact("kv_rank", "rank of keys and values", rank)
    yield Fact("q_rank", "rank of queries", q_rank if q_rank is not None else "none")


def _lengths(view: View, part: str) -> list[int]:
    return [shape[-1] for shape in view.shapes(part) if shape]


def _mlp(view: View) -> Iterator[Fact]:
    experts = view.shapes("mlp.experts.down.weight") or view.shapes("mlp.experts.gate.weight")
    kind = next((k for k, part in (("gated", "gate"), ("plain", "up")) if view.has(f"mlp.{part}.weight")), None)
    inside = next((k for k, part in (("gated", "gate"), ("plain", "up")) if view.has(f"mlp.experts.{part}.weight")), "")
    yield Fact("mlp", "MLP", f"experts, {inside}" if experts else kind)
    if kind is not None:
        yield Fact("d_ff", "d_ff", _one(view.writes("mlp.down.weight")))
        yield Fact("mlp_bias", "biases of the MLP", view.has("mlp.down.bias"))
    if not experts:
        return
    role = view.role("mlp.experts.down.weight") or view.role("mlp.experts.gate.weight")
    assert role is not None
    counts = (
        len(role.names[i]) if isinstance(role.transform, Stack) else role.shapes[i][0]
        for i in view.layers
        if i in role.shapes
    )
    yield Fact("experts", "experts", _one(counts))
    yield Fact("d_expert", "d_ff of an expert", _one(view.writes("mlp.experts.down.weight")))
    shared = _one(view.writes("mlp.shared.down.weight"))
    yield Fact("d_shared", "d_ff of shared experts", "none" if shared is None else shared)
    yield Fact("dense_layers", "layers without experts", sum(i not in role.shapes for i in view.layers))
    yield Fact("router_bias", "bias of the router", view.has("mlp.router.choose.bias"))
    yield Fact("selection_bias", "shift of the choice of experts", view.has("mlp.router.selection_bias"))


def _norms(view: View) -> Iterator[Fact]:
    present = [p for suffix, p in _PLACES.items() if any(view.has(f"{x}_{suffix}.weight") for x in ("attn", "mlp"))]
    yield Fact("norm_at", "norm at", " ".join(present) or ("none" if view.layers else None))
    shifted = any(view.has(f"{x}_{suffix}.bias") for suffix in _PLACES for x in ("attn", "mlp"))
    yield Fact("norm", "norm", "layernorm" if shifted else None)
    yield Fact("norm_bias", "shift of the norms", shifted if present else None)
    yield Fact("final_norm", "final norm", view.outside("final_norm.weight") is not None)
    yield Fact("embed_norm", "norm on the embeddings", view.outside("embed_norm.weight") is not None)
    shared = view.has("attn_norm.weight") and not any(view.has(f"mlp_{suffix}.weight") for suffix in _PLACES)
    yield Fact("residual", "residual", "parallel, one norm" if shared else None)
    first = view.role("attn_norm.weight")
    if first is not None and view.layers and view.layers[0] not in first.shapes:
        yield Fact("skip_first", "first norm left out", True)


def _position(named: Named, views: list[View]) -> Iterator[Fact]:
    tables = [shape for view in views if (shape := _outside(view.roles, f"{view.side}.position.table.weight"))]
    scores = any(_scores(view) for view in views)
    kind: Value = "relative" if scores else "table" if tables else None
    yield Fact("position", "position", kind)
    if tables:
        what = "buckets of distances" if scores else "rows of the position table"
        yield Fact("position_rows", what, _one(shape[0] for shape in tables))
    if (types := [view.outside("types.table.weight") for view in views]) and types[0] is not None:
        yield Fact("types", "kinds of tokens", _first(types[0].shapes)[0])
    for pattern, key, what, count in (
        (_ANGLES, "d_rotary", "turned channels of a head", lambda shape: 2 * shape[-1]),
        (_CAUSAL_MASK, "context", "context, by the stored mask", lambda shape: shape[-1]),
    ):
        if (value := _one(_buffers(named, pattern, count))) is not None:
            yield Fact(key, what, value)


def _scores(view: View) -> Shape:
    """Of a table that shifts the scores, a row per distance and a column per head; its columns are no stream's."""
    shape = _outside(view.roles, f"{view.side}.position.table.weight")
    return shape if shape and shape[-1] not in (view.width, _table_width(view)) else ()


def _first(shapes: Mapping[int, Shape]) -> Shape:
    return next(iter(shapes.values()), ())


def _table_width(view: View) -> int | None:
    shape = _outside(view.roles, "embed.weight")
    return shape[-1] if shape else None


def _buffers(named: Named, pattern: re.Pattern[str], count: Callable[[Shape], int]) -> Iterator[int]:
    for group in named.groups:
        if not group.roles and pattern.search(group.pattern):
            yield from (count(shape) for shape in group.members.values() if shape and (len(shape) in (1, 4)))


def _head(roles: Mapping[str, Held], views: list[View]) -> Iterator[Fact]:
    rows, matrix = _outside(roles, "embed.weight")[:1], _outside(roles, "head.matrix.weight")
    decodes = any(view.side == "decoder" for view in views)
    scores = bool(matrix) and matrix[:1] == rows
    shift = _outside(roles, "head.bias") or _outside(roles, "head.matrix.bias")
    own = scores or decodes or (bool(shift) and shift[-1:] == rows)
    kind = "lm" if own and (scores or not matrix) else "labels" if matrix else None
    yield Fact("head", "head", kind)
    if kind == "labels":
        yield Fact("n_labels", "labels", matrix[0])
    yield Fact("tied", "tied", not matrix if kind == "lm" and rows else None)
    yield Fact("head_bias", "bias of the head", bool(shift) if kind else None)
    yield Fact("transform", "matrix before the head", "head.transform.dense.weight" in roles if kind else None)
