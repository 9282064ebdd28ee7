"""What a model of `transformers` says of itself: read from its config, and from which tables a pass looks up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from scantling.audits import Facts
from scantling.audits.protocol import Position

STRETCHED = ("dynamic", "longrope")
TRIED = 512
"""Tokens up to which a row past the config's longest is tried."""


def declared(folder: str, key: str) -> Any:
    """A value of the folder's config.json, as it stands there; None where it does not."""
    path = Path(folder) / "config.json"
    return json.loads(path.read_text(encoding="utf-8")).get(key) if path.exists() else None


def facts(model: Any, tied: bool | None) -> Facts:
    """What the config says, and what kind of positions a pass uses."""
    config = model.config
    family = "encoder-decoder" if config.is_encoder_decoder else "decoder" if decodes(model) else "encoder"
    position, context, first = positions(model)
    ropes = rope_sections(config)
    stretched = [r for r in ropes if r.get("rope_type") in STRETCHED]
    longest = most_positions(config)
    context = limit(model, longest, position) if context is None else context
    original = next(
        (r["original_max_position_embeddings"] for r in ropes if "original_max_position_embeddings" in r), None
    )
    trained = original or longest
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    return Facts(
        vocab_size=config.vocab_size,
        family=family,  # type: ignore[arg-type]
        position=position,
        windows=windows(config, family == "encoder"),
        context=context,
        trained_length=trained,
        switch=trained if stretched else None,
        tied=tied,
        routed=any(getattr(config, key, None) for key in ("num_local_experts", "n_routed_experts", "num_experts")),
        sinks=any(name.endswith(".sinks") for name, _ in model.named_parameters()),
        dropout=None,
        pad_id=getattr(config, "pad_token_id", None),
        start_id=getattr(config, "decoder_start_token_id", None),
        first_position=first,
        per_token=per_token(model),
        dtype=dtype,
    )


def decodes(model: Any) -> bool:
    """Whether it predicts the next token: the class for causal language models, or a config that says so."""
    causal = any("CausalLM" in kind.__name__ or "LMHeadModel" in kind.__name__ for kind in type(model).__mro__)
    return causal or bool(getattr(model.config, "is_decoder", False))


def per_token(model: Any) -> bool:
    """Whether it answers for each token, by the length of what it gives."""
    out = run(model, 5)
    found = getattr(out, "logits", None)
    found = out.last_hidden_state if found is None else found
    return bool(found.dim() > 1 and found.shape[1] == 5)


def rope_sections(config: Any) -> list[dict[str, Any]]:
    """The rotary settings, one section or one per kind of layer."""
    found = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    if not isinstance(found, dict):
        return []
    return [v for v in found.values() if isinstance(v, dict)] or [found]


def windows(config: Any, both_ways: bool) -> tuple[int | None, ...] | None:
    """Per layer, how many keys back a query reads; None where the config does not speak of windows."""
    if not hasattr(config, "sliding_window") or config.is_encoder_decoder:
        return None
    kinds = getattr(config, "layer_types", None)
    width, layers = config.sliding_window, int(config.num_hidden_layers)
    if kinds is not None and not set(kinds) <= {"full_attention", "sliding_attention"}:
        return None
    if width is None:
        return (None,) * layers
    # An encoder's is the furthest distance, a decoder's the number of keys.
    reach = int(width) + int(both_ways)
    return tuple(reach if kinds is None or kinds[i] == "sliding_attention" else None for i in range(layers))


def most_positions(config: Any) -> int | None:
    """The longest row that the config speaks of."""
    found = getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", None)
    return found if isinstance(found, int) else None


def limit(model: Any, longest: int | None, position: Position | None) -> int | None:
    """The longest row that runs at all, where a longer one is tried and does not; None where there is no end."""
    if longest is None or (longest > TRIED and position in ("rope", "relative")):
        return None
    if longest > TRIED:
        return longest
    try:
        run(model, longest + 1)
    except (IndexError, RuntimeError, ValueError):
        return longest
    return None


def run(model: Any, tokens: int) -> Any:
    """A row of that many like tokens."""
    ids = torch.full((1, tokens), 3, dtype=torch.int64, device=model.device)
    return model(input_ids=ids, **({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}))


def positions(model: Any) -> tuple[Position | None, int | None, int]:
    """The kind of positions; how many there are, where they stand in a table; and the number of the first."""
    config = model.config
    if getattr(config, "alibi", False) is True or getattr(getattr(config, "attn_config", None), "alibi", False) is True:
        return "alibi", None, 0
    if hasattr(config, "relative_attention_num_buckets"):
        return "relative", None, 0
    table = position_table(model)
    if table is not None:
        rows, first = table
        return "learned", min(rows, most_positions(config) or rows), first
    if rope_sections(config) or getattr(config, "rotary_dim", None):
        return "rope", None, 0
    return None, None, 0


def position_table(model: Any) -> tuple[int, int] | None:
    """Rows of a table that gives another vector to each position, from that of the first one on, and its row."""
    tokens = 4
    found: list[tuple[int, int]] = []
    words = model.get_input_embeddings()

    def look(module: nn.Module, given: tuple[Any, ...], out: Any) -> None:
        if module is words or not isinstance(out, Tensor) or out.dim() not in (2, 3) or out.shape[-2] != tokens:
            return
        rows = out.reshape(-1, tokens, out.shape[-1])[0]
        if len({tuple(row) for row in rows.tolist()}) == tokens:
            asked = given[0] if given and isinstance(given[0], Tensor) and not given[0].is_floating_point() else None
            first = 0 if asked is None or len(set(asked.flatten().tolist())) < tokens else int(asked.min())
            found.append((int(module.num_embeddings) - first, first))  # type: ignore[arg-type]

    hooks = [m.register_forward_hook(look) for m in model.modules() if isinstance(m, nn.Embedding)]
    try:
        run(model, tokens)
    finally:
        for hook in hooks:
            hook.remove()
    return min(found, default=None)
