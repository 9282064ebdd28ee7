"""What the cases share: small cards, strong weights, recorded logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tests.conftest import DATA

import scantling as sc
from scantling.cards.read import from_dict
from scantling.tensor.context import Context

CASES = DATA / "cases"
CLOSE = {"atol": 2e-5, "rtol": 1e-4}

LLAMA: dict[str, Any] = {
    "name": "small",
    "family": "decoder",
    "n_layers": 2,
    "d_model": 32,
    "vocab_size": 64,
    "context": 64,
    "attention": {"kind": "multi_head", "n_heads": 4, "n_kv_heads": 2, "d_head": 8},
    "position": {"kind": "rope", "theta": 10000.0},
    "norm": {"kind": "rmsnorm", "eps": 1e-5},
    "mlp": {"kind": "gated", "act": "silu", "d_ff": 48},
    "tied": False,
}
GPT2: dict[str, Any] = {
    **LLAMA,
    "attention": {"kind": "multi_head", "n_heads": 4, "bias": ["q", "k", "v", "o"]},
    "position": {"kind": "learned"},
    "norm": {"kind": "layernorm", "eps": 1e-5},
    "mlp": {"kind": "plain", "act": "gelu_tanh", "bias": True},
    "tied": True,
}


def card(base: dict[str, Any] = LLAMA, **changes: Any) -> sc.Card:
    """A small card; a section that changes is laid over the base's own."""
    laid = {k: {**base[k], **v} if isinstance(v, dict) and k in base else v for k, v in changes.items()}
    return from_dict({**base, **laid}, "small")


def built(drawn: sc.Card, dtype: str = "float32", seed: int = 0) -> sc.Model:
    """A model whose weights are large enough that a fault shows in its logits (spread about 1)."""
    parts = sc.assemble(drawn)
    net = parts.build(seed=seed)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in net.parameters():
            weight.add_(torch.randn(weight.shape, generator=draw) * 0.2)
    return sc.Model(drawn, parts, net.to(getattr(torch, dtype)).requires_grad_(False))


def tokens(count: int, batch: int = 1, seed: int = 1, vocab: int = 64) -> torch.Tensor:
    """Random ids (batch, count)."""
    return torch.randint(0, vocab, (batch, count), generator=torch.Generator().manual_seed(seed))


def recorded(folder: Path) -> tuple[list[list[int]], torch.Tensor]:
    """The ids and the last row of logits that the original gave for them."""
    wanted = json.loads((folder / "expected.json").read_text())
    return wanted["input_ids"], torch.tensor(wanted["last_row"])


def captured(lm: sc.Model, ids: torch.Tensor, kernel: str = "reference", **options: Any) -> dict[str, torch.Tensor]:
    """Every capture point of one pass, and the logits as ``logits``."""
    seen: dict[str, torch.Tensor] = {}

    def keep(path: str, value: torch.Tensor) -> torch.Tensor:
        seen[path] = value
        return value

    ctx = Context.of(ids, kernel_name=kernel, recorder=keep, **options)
    with torch.no_grad():
        seen["logits"] = lm.net(ids, ctx)
    return seen
