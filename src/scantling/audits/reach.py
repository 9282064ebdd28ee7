"""Which token reaches which logit, by gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from scantling.audits.protocol import Feed, Run, Subject


def reach(subject: Subject, run: Run, feed: Feed) -> Tensor | None:
    """How strongly each token's vector reaches each position's logits, over the largest of the row: (T, T) float64.

    The vectors are what the table of tokens gives for these ids. None where the subject has no module, or none of its
    tables is asked for the ids, or what it gives takes no gradient.
    """
    module = subject.can.module
    if module is None:
        return None
    leaves: list[Tensor] = []

    def keep(_: nn.Module, given: tuple[Any, ...], out: Any) -> Any:
        ids = given[0] if given else None
        if not isinstance(ids, Tensor) or not isinstance(out, Tensor) or ids.shape != feed.ids.shape:
            return out
        if leaves or not torch.equal(ids, feed.ids):
            return out
        leaves.append(out.detach().requires_grad_(True))
        return leaves[0]

    hooks = [m.register_forward_hook(keep) for m in module.modules() if isinstance(m, nn.Embedding)]
    try:
        with torch.enable_grad():
            logits = run(feed)
            if not leaves or not logits.requires_grad:
                return None
            return _pairs(logits, leaves[0])
    finally:
        for hook in hooks:
            hook.remove()


def _pairs(logits: Tensor, leaf: Tensor) -> Tensor:
    draw = torch.Generator().manual_seed(3)
    weights = torch.randn(logits.shape[-1], generator=draw).to(logits)
    rows = []
    for query in range(logits.shape[1]):
        (grad,) = torch.autograd.grad((logits[0, query] * weights).sum(), leaf, retain_graph=True, allow_unused=True)
        rows.append(torch.zeros(leaf.shape[1]) if grad is None else grad[0].double().norm(dim=-1).cpu())
    found = torch.stack([row.double() for row in rows])
    return found / found.max(-1, keepdim=True).values.clamp(min=1e-300)
