"""Future leak: does a logit depend on a token after it?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from scantling.audits import draw
from scantling.audits.ask import Question, Shown, ask, could_not, listed, not_applicable
from scantling.audits.draw import Effort
from scantling.audits.finding import Finding, Verdict
from scantling.audits.planted import Tiny
from scantling.audits.planted_subject import planted
from scantling.audits.protocol import Run, Subject
from scantling.audits.reach import reach
from scantling.audits.registry import Plant, Probe

NAME = "future"
MEANING = "a logit depends on a token after it: what is to be predicted is seen"
GOOD = "no logit depends on a later token, bit by bit and by gradient"

SMALL = 2.0**-20
"""Of the largest gradient of a row: what moves a logit less than its own rounding does is no leak that matters."""


def runs(subject: Subject) -> dict[str, Callable[[Subject], Run]]:
    """Every way to compute the same logits: by kernel, and by mode."""
    ways: dict[str, Callable[[Subject], Run]] = {}
    for name in subject.can.kernels:
        ways[f"kernel {name}"] = lambda s, name=name: s.can.kernels[name]  # type: ignore[misc]
    for name in subject.can.modes:
        ways[name] = lambda s, name=name: s.can.modes[name]  # type: ignore[misc]
    return ways if subject.can.kernels else {"": lambda s: s.run, **ways}


def probe(subject: Subject, effort: Effort) -> list[Finding]:
    """Each token is replaced in turn, and each logit before it must stay as it is; then a long row at three cuts; then
    the gradient of each logit in each later token's vector, which must be zero."""
    if not subject.facts.per_token:
        return [not_applicable(NAME, "the head gives one answer per row, which may read all of it")]
    tokens = draw.length(subject, effort)
    if subject.facts.family == "encoder":
        return [_both_ways(subject, tokens, effort.seed)]
    found = []
    for where, pick in runs(subject).items():
        short = ask(subject, _pairs(where, pick, effort.seed), tokens)
        found.append(short)
        if short.verdict in (Verdict.CLEAN, Verdict.ROUNDING):
            longer = draw.length(subject, effort, min(160, effort.longest))
            if longer > tokens:
                found.append(ask(subject, _cuts(where, pick, effort.seed), longer, fewest=8))
            if where not in subject.can.modes:
                found += _by_gradient(subject, where, pick, tokens, effort.seed)
    return found


def _pairs(where: str, pick: Callable[[Subject], Run], seed: int) -> Question:
    def measure(subject: Subject, tokens: int) -> tuple[Tensor, Tensor, Shown]:
        ids, run = draw.ids(subject.facts, 1, tokens, seed), pick(subject)
        base = run(draw.feed(subject, ids))
        rows = [run(draw.feed(subject, draw.replaced(subject.facts, ids, t)))[:, :t] for t in range(1, tokens)]
        a, b = torch.cat([base[:, :t] for t in range(1, tokens)], 1), torch.cat(rows, 1)
        moved = [(t, i) for t in range(1, tokens) for i in range(t) if bool((rows[t - 1][:, i] != base[:, i]).any())]
        if not moved:
            return a, b, {}
        t, i = moved[0]
        instead = draw.replaced(subject.facts, ids, t)
        return a, b, {"ids": listed(ids), "instead": listed(instead), "moves": i, "pairs": len(moved)}

    def place(at: tuple[int, ...]) -> str:
        t, rest = 1, at[1]
        while rest >= t:
            rest, t = rest - t, t + 1
        return f"the logits at position {rest} read the token at {t}"

    return Question(NAME, where, measure, MEANING, GOOD, place=place)


def _cuts(where: str, pick: Callable[[Subject], Run], seed: int) -> Question:
    def measure(subject: Subject, tokens: int) -> tuple[Tensor, Tensor, Shown]:
        ids, run = draw.ids(subject.facts, 1, tokens, seed), pick(subject)
        base = run(draw.feed(subject, ids))
        a, b = [], []
        shown: Shown = {}
        for cut in sorted({tokens // 4, tokens // 2, tokens - 2}):
            instead = draw.replaced(subject.facts, ids, slice(cut, None))
            moved = run(draw.feed(subject, instead))
            a.append(base[:, :cut])
            b.append(moved[:, :cut])
            if not shown and not torch.equal(a[-1], b[-1]):
                shown = {"ids": listed(ids), "instead": listed(instead), "cut": cut}
        return torch.cat(a, 1), torch.cat(b, 1), shown

    return Question(NAME, where, measure, MEANING + ", in long rows only", GOOD)


def _by_gradient(subject: Subject, where: str, pick: Callable[[Subject], Run], tokens: int, seed: int) -> list[Finding]:
    """What the bits cannot show: a dependence smaller than a last place."""
    try:
        pairs = reach(subject, pick(subject), draw.feed(subject, draw.ids(subject.facts, 1, tokens, seed)))
    except Exception as error:
        return [could_not(NAME, f"gradients cannot be taken: {str(error).splitlines()[0][:120]}", where)]
    if pairs is None:
        return []
    ahead = pairs.triu(1)
    worst = float(ahead.max())
    query, key = divmod(int(ahead.argmax()), tokens)
    data = {"reached": reached(pairs)}
    if worst == 0:
        return [Finding(NAME, Verdict.CLEAN, GOOD, 0.0, where, data=data)]
    at = f"{where}; the logits at position {query} have a gradient in the token at {key}"
    unit = "of the row's largest gradient"
    if worst <= SMALL:
        text = "later tokens have gradients below rounding"
        return [Finding(NAME, Verdict.ROUNDING, text, worst, at, unit, data=data)]
    shown = {"ids": listed(draw.ids(subject.facts, 1, tokens, seed)), "query": query, "key": key}
    return [Finding(NAME, Verdict.DEFECT, MEANING, worst, at, unit, shown, data)]


def reached(pairs: Tensor) -> list[str]:
    """Per query a string: x where the key is reached, . where not."""
    return ["".join("x" if cell else "." for cell in row) for row in (pairs > 0).tolist()]


def _both_ways(subject: Subject, tokens: int, seed: int) -> Finding:
    """An encoder reads both ways: a later token must reach an earlier one."""
    ids = draw.ids(subject.facts, 1, tokens, seed)
    with torch.no_grad():
        base = subject.run(draw.feed(subject, ids))
        ahead = subject.run(draw.feed(subject, draw.replaced(subject.facts, ids, tokens - 1)))[:, :-1]
        behind = subject.run(draw.feed(subject, draw.replaced(subject.facts, ids, 0)))[:, 1:]
    moves = not torch.equal(ahead, base[:, :-1]), not torch.equal(behind, base[:, 1:])
    shown = {"ids": listed(ids), "instead": listed(draw.replaced(subject.facts, ids, tokens - 1))}
    if moves == (True, True) or moves == (False, False):
        text = "an encoder reads both ways" if moves[0] else "no token reads another"
        return Finding(NAME, Verdict.NOT_APPLICABLE, f"{text}: there is no future to hide")
    if subject.facts.sparse:
        return Finding(NAME, Verdict.NOT_APPLICABLE, "an encoder whose layers read chosen positions only, as it says")
    side = "backwards" if moves[1] else "forwards"
    return Finding(NAME, Verdict.DEFECT, f"an encoder that reads only {side}", where="", smallest=shown)


def _noisy() -> Subject:
    """Adds what is summed over the row and takes it away again: only its rounding stays."""
    sound = planted(name="a sum over the row, added and taken away")
    net = sound.can.module
    assert isinstance(net, Tiny)

    def add(_: Any, __: Any, out: Tensor) -> Tensor:
        total = out.sum(1, keepdim=True)
        return (out + total) - total

    net.embed.register_forward_hook(add)
    return sound


PROBE = Probe(
    NAME,
    "does a logit depend on a token after it, on any kernel, in training too",
    probe,
    (
        Plant("the mask is off by one", lambda: planted("mask off by one")),
        Plant("the mask is reversed", lambda: planted("mask reversed")),
        Plant("no mask", lambda: planted("no mask")),
        Plant("no mask in one block", lambda: planted("no mask in the last block")),
        Plant("hidden keys are only unlikely", lambda: planted("weak mask")),
        Plant("no mask past some length", lambda: planted("mask lost beyond 24")),
        Plant("no mask in training", lambda: planted("mask lost in training", dropout=0.1)),
        Plant("an encoder that reads backwards only", lambda: planted("causal", family="encoder")),
        Plant("sound", planted, False, Verdict.CLEAN),
        Plant("sound, with a window", lambda: planted(window=5), False, Verdict.CLEAN),
        Plant("later tokens move rounding only", _noisy, False, Verdict.ROUNDING),
        Plant("an encoder", lambda: planted(family="encoder", position="learned"), False, Verdict.NOT_APPLICABLE),
        Plant("sound, in bfloat16", lambda: planted(dtype="bfloat16"), False, Verdict.CLEAN),
    ),
)
