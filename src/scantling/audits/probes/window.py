"""Window edge: does each layer read exactly the keys that its window says?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from scantling.audits import draw
from scantling.audits.ask import Question, ask, could_not, listed, not_applicable
from scantling.audits.draw import Effort
from scantling.audits.finding import Finding, Verdict
from scantling.audits.planted_subject import planted
from scantling.audits.probes.cache import pieces
from scantling.audits.protocol import Subject
from scantling.audits.registry import Plant, Probe
from scantling.audits.wide import wide

NAME = "window"
GOOD = "each layer reads as far back as its window says"


def probe(subject: Subject, effort: Effort) -> list[Finding]:
    """Per layer, by gradient: the furthest key that a query reads, in a row a little longer than the window; then the
    same row over a cache."""
    facts = subject.facts
    if facts.windows is None:
        return [not_applicable(NAME, "it does not say that its layers have windows")]
    sizes = [w for w in facts.windows if w is not None]
    if not sizes:
        return [not_applicable(NAME, "no layer has a window")]
    tokens = draw.length(subject, effort, min(max(sizes) + 4, effort.longest))
    if tokens <= max(sizes):
        text = f"its window of {max(sizes):,} is not shorter than the longest row asked, {tokens:,}"
        return [not_applicable(NAME, text)]
    found = _layers(subject, facts.windows, tokens, effort.seed)
    for name in subject.can.cached:
        cut = _filled(max(sizes))
        question = Question(
            NAME,
            f"{name}, a full window and then single tokens",
            pieces(name, cut, effort.seed),
            "past the window, a cache gives other logits than one pass",
            GOOD,
        )
        found.append(ask(subject, question, tokens, fewest=max(sizes) + 1))
    return found


def _filled(window: int) -> Callable[[int], list[int]]:
    return lambda tokens: [min(window, tokens - 1), *[1] * (tokens - min(window, tokens - 1))]


def _layers(subject: Subject, windows: tuple[int | None, ...], tokens: int, seed: int) -> list[Finding]:
    if len(subject.can.blocks) != len(windows):
        return [could_not(NAME, "its layers cannot be reached one by one")]
    precise = wide(subject)
    ids = draw.ids(subject.facts, 1, tokens, seed)
    found = []
    for at, window in enumerate(windows):
        reads = layer_reach(precise, precise.can.blocks[at], ids)
        if reads is None:
            return [could_not(NAME, "gradients cannot be taken through its layers")]
        found.append(_judged(subject, at, window, reads, ids))
    return found


def _judged(subject: Subject, at: int, window: int | None, reads: Tensor, ids: Tensor) -> Finding:
    tokens = reads.shape[0]
    query, key = torch.arange(tokens)[:, None], torch.arange(tokens)[None]
    limit = tokens if window is None else window
    near = (query - key < limit) & (key - query < limit)
    right = near if subject.facts.family == "encoder" else near & (key <= query)
    where = f"layer {at}, window {'none' if window is None else window}"
    if torch.equal(reads, right):
        return Finding(NAME, Verdict.CLEAN, GOOD, 0.0, where, "keys")
    wrong = (reads != right).nonzero()[0].tolist()
    extra, missing = int((reads & ~right)[-1].sum()), int((right & ~reads)[-1].sum())
    text = f"query {wrong[0]} {'reads' if reads[tuple(wrong)] else 'does not read'} key {wrong[1]}"
    back = tokens - int(reads[-1].int().argmax())
    message = f"the last query reads {back} keys back, its own included, where the window says {limit}"
    size = float(extra + missing)
    return Finding(NAME, Verdict.DEFECT, message, size, f"{where}; {text}", "keys", {"ids": listed(ids)})


def layer_reach(subject: Subject, block: nn.Module, ids: Tensor) -> Tensor | None:
    """Which positions of a layer's input each position of its output depends on: (T, T) bool."""
    leaf: list[Tensor] = []
    outs: list[Tensor] = []

    def before(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if args:
            leaf.append(args[0].detach().requires_grad_(True))
            return (leaf[0], *args[1:]), named
        leaf.append(named["hidden_states"].detach().requires_grad_(True))
        return args, {**named, "hidden_states": leaf[0]}

    def after(_: nn.Module, __: Any, out: Any) -> None:
        outs.append(out[0] if isinstance(out, tuple | list) else out)

    hooks = [block.register_forward_pre_hook(before, with_kwargs=True), block.register_forward_hook(after)]
    try:
        with torch.enable_grad():
            subject.run(draw.feed(subject, ids))
            if not outs or not outs[0].requires_grad or outs[0].dim() != 3:
                return None
            rows = []
            for t in range(ids.shape[1]):
                (grad,) = torch.autograd.grad(
                    outs[0][0, t].sum() + outs[0][0, t].square().sum(), leaf, retain_graph=True
                )
                rows.append(grad[0].abs().sum(-1) > 0)
            return torch.stack(rows).cpu()
    finally:
        for hook in hooks:
            hook.remove()


PROBE = Probe(
    NAME,
    "whether each layer reads exactly as far as its window says, with a cache too",
    probe,
    (
        Plant("one key more", lambda: planted("window plus one", window=5)),
        Plant("one key less", lambda: planted("window minus one", window=5)),
        Plant("the window is not used", lambda: planted("no window", window=5)),
        Plant("it is not used in one layer", lambda: planted("no window in the last block", window=5)),
        Plant("one key more in the cache", lambda: planted("window plus one with a cache", window=5)),
        Plant("an encoder's window, one key more", lambda: planted("window plus one", window=4, family="encoder")),
        Plant("sound", lambda: planted(window=5), False, Verdict.CLEAN),
        Plant("an encoder's window", lambda: planted(window=4, family="encoder"), False, Verdict.CLEAN),
        Plant("no window", planted, False, Verdict.NOT_APPLICABLE),
        Plant("a window that no row fills", lambda: planted(window=500), False, Verdict.NOT_APPLICABLE),
    ),
)
