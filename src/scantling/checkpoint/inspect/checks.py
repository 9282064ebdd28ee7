"""What else may not fit: dtypes, ids and tables, windows, the base and the layout of RoPE."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from scantling.cards import Card
from scantling.cards.schema import MultiHead, RoPE
from scantling.checkpoint.files import Elsewhere, shown
from scantling.checkpoint.header import TensorInfo
from scantling.checkpoint.inspect.codes import Finding
from scantling.checkpoint.inspect.compare import Comparison
from scantling.checkpoint.inspect.declared import Declared
from scantling.checkpoint.inspect.gather import Gathered, Stored, dtype_of
from scantling.checkpoint.inspect.kinds import Kind
from scantling.checkpoint.inspect.layout import Layout, chosen, layout_of
from scantling.checkpoint.inspect.sample import read_rows
from scantling.checkpoint.inspect.tokens import gguf_ids, tokenizer_ids
from scantling.checkpoint.names import Halves
from scantling.errors import MissingExtra

FLOATS = ("float64", "float32", "float16", "bfloat16")
_BASES = ("rotary_emb_base", "rope_local_base_freq", "freq_base")
_CLOSE = 0.02
"""Relative error of a base that is computed from angles in 16 bits."""
_ANGLES = {"float64": "d", "float32": "f", "float16": "e"}


def checks(
    gathered: Gathered, declared: Declared | None, found: Comparison, stored: Sequence[Kind]
) -> Iterator[Finding]:
    """Findings that need no comparison of names; `stored` is how the model's tensors are stored.

    Raises:
        ScantlingInputError: a file cannot be read any more.
    """
    yield from _dtypes(gathered, declared, found, stored)
    yield from _ids(gathered, declared, found)
    if declared is not None:
        yield from _windows(declared)
        yield from _base(gathered, declared, found)


def _dtypes(
    gathered: Gathered, declared: Declared | None, found: Comparison, stored: Sequence[Kind]
) -> Iterator[Finding]:
    quantised = declared is not None and declared.quantised is not None
    if gathered.form == "gguf" or quantised or not stored:
        return
    floats = [kind.dtype for kind in stored if kind.dtype in FLOATS]
    if odd := sum(kind.tensors for kind in stored if kind.dtype not in FLOATS):
        weights = (gathered.tensors[name] for name in found.weights)
        first = next(tensor for tensor in weights if dtype_of(tensor) not in FLOATS)
        yield Finding("dtype_odd", f"{odd} tensors such as {shown(first.name)}, which is {dtype_of(first)}")
    if len(floats) > 1:
        counts = {kind.dtype: kind.tensors for kind in stored}
        yield Finding("dtype_mixed", ", ".join(f"{dtype} ({counts[dtype]} tensors)" for dtype in floats))
    stated = "unknown" if declared is None else declared.card.dtype
    if stated != "unknown" and floats and floats[0] != stated:
        yield Finding("dtype", f"the config says {stated} and the tensors are {floats[0]}")


def _ids(gathered: Gathered, declared: Declared | None, found: Comparison) -> Iterator[Finding]:
    rows = found.file.value("rows")
    if not isinstance(rows, int):
        return
    folder = gathered.folder
    ids = gguf_ids(gathered.header) if gathered.header else tokenizer_ids(folder) if folder else None
    if ids is not None and ids > rows:
        yield Finding("tokenizer_larger", f"the tokenizer has {ids:,} ids and the token table {rows:,} rows")
    elif ids is not None and ids < rows:
        yield Finding(
            "tokenizer_smaller",
            f"the tokenizer has {ids:,} ids and the token table {rows:,} rows: {rows - ids:,} are never given",
        )
    data = {} if declared is None else declared.data
    for key, value in data.items():
        if key.endswith("_token_id") and any(i >= rows for i in _whole_numbers(value)):
            yield Finding("special_id", f"{key} is {shown(value)} and the token table has {rows:,} rows")


def _whole_numbers(value: Any) -> list[int]:
    return [i for i in (value if isinstance(value, list) else [value]) if type(i) is int]


def _windows(declared: Declared) -> Iterator[Finding]:
    data, card = declared.data, declared.card
    window = data.get("sliding_window")
    if type(window) is int and window > 0 and data.get("use_sliding_window") is False:
        yield Finding("window_off", f"sliding_window is {window:,} and use_sliding_window is false")
    wide = {section.window for section in _attentions(card) if section.window and section.window >= card.context}
    for size in sorted(wide):
        yield Finding("window_wide", f"the window is {size:,} positions and the context {card.context:,}")


def _attentions(card: Card) -> list[MultiHead]:
    every = [card.attention, *(layer.attention for layer in card.pattern)]
    return [section for section in every if isinstance(section, MultiHead)]


def _base(gathered: Gathered, declared: Declared, found: Comparison) -> Iterator[Finding]:
    position = declared.card.position
    if not isinstance(position, RoPE):
        return
    # A config with rotary_dim has no key for the base.
    if gathered.form != "gguf" and not _states_base(declared.data) and "rotary_dim" not in declared.data:
        yield Finding("rope_default", f"theta {position.theta:,g} is the default of {declared.name}")
    if position.scaling is not None:
        return
    for group in found.named.groups:
        if not group.pattern.endswith("rotary_emb.inv_freq") or not group.names:
            continue
        tensor = gathered.tensors[next(iter(group.names.values()))]
        base = _base_of(tensor)
        if base is not None and abs(base / position.theta - 1) > _CLOSE:
            yield Finding(
                "rope_parameters",
                f"{shown(tensor.name)} has the angles of base {base:,.4g} and the config says {position.theta:,g}",
            )


def _states_base(data: Mapping[str, Any]) -> bool:
    """Whether any key of the config, nested ones included, gives a base."""
    return any(
        (("theta" in key or key in _BASES) and value is not None)
        or (isinstance(value, Mapping) and _states_base(value))
        for key, value in data.items()
    )


def _base_of(tensor: Stored) -> float | None:
    """The base b of angles b^(-2 i / d), from the last of them."""
    pairs, form = tensor.numel, _ANGLES.get(dtype_of(tensor))
    if len(tensor.shape) != 1 or not 1 < pairs <= 2**16 or not isinstance(tensor, TensorInfo):
        return None
    raw = next(read_rows(tensor, [0]))
    if form is not None:
        angles = struct.unpack(f"<{pairs}{form}", raw)
    elif dtype_of(tensor) == "bfloat16":
        angles = struct.unpack(f"<{pairs}f", b"".join(b"\0\0" + raw[i : i + 2] for i in range(0, len(raw), 2)))
    else:
        return None
    last = angles[-1]
    return None if not 0 < last < 1 else float(last ** (-pairs / (pairs - 1)))


def qk_layout(gathered: Gathered, declared: Declared, found: Comparison) -> tuple[str | None, list[Finding]]:
    """How rotated pairs lie in the rows of queries and keys, by a few rows: in words, and what contradicts the names.

    Raises:
        ScantlingInputError: a file cannot be read any more.
    """
    if isinstance(gathered.where, Elsewhere):
        return "not looked at: the rows are on another machine", []
    card = found.card or declared.card
    attention, position = card.attention, card.position
    if not isinstance(attention, MultiHead) or not isinstance(position, RoPE) or not found.rebuilds:
        return None, []
    assert attention.d_head is not None
    assert position.d_rotary is not None
    pairs = {
        link.ours[0]: link for link in declared.table if link.ours[0].endswith((".attn.q.weight", ".attn.k.weight"))
    }
    layers = chosen(sorted({int(name.split(".")[2]) for name in pairs}))
    stack = "encoder" if card.family == "encoder" else "decoder"
    picked = [pairs.get(f"{stack}.blocks.{i}.attn.{p}.weight") for i in layers for p in "qk"]
    if any(link is None or len(link.ours) > 1 for link in picked) or not picked:
        return "not looked at: queries and keys are stored together", []
    heads = {"q": attention.n_heads, "k": attention.n_kv_heads or attention.n_heads}
    by_name = found.beside
    rows = [
        (gathered.tensors[by_name[link.theirs[0]]], heads[link.ours[0].split(".")[-2]])
        for link in picked
        if link is not None and link.theirs[0] in by_name
    ]
    try:
        seen = layout_of(rows, position.d_rotary, attention.d_head)
    except MissingExtra as error:
        return f"not looked at: {error}", []
    stored = any(isinstance(link.transform, Halves) for link in picked if link is not None) or position.interleaved
    return _verdict(seen, "neighbours" if stored else "halves")


def _verdict(seen: Layout | None, wanted: str) -> tuple[str, list[Finding]]:
    if seen is None:
        return "not looked at: the rows cannot be read", []
    numbers = (
        f"norms of rows half a head apart correlate by {seen.far:+.2f} and of neighbours by {seen.near:+.2f}, "
        f"in {seen.matrices} matrices"
    )
    if seen.pairs == "unknown":
        return f"{wanted} by the names; the rows do not tell ({numbers})", []
    if seen.pairs == wanted:
        return f"{wanted}, by the names and by the rows ({numbers})", []
    text = f"pairs lie as {seen.pairs} by the rows and as {wanted} by the names and the config: {numbers}"
    return f"{wanted} by the names, {seen.pairs} by the rows", [Finding("qk_layout", text)]
