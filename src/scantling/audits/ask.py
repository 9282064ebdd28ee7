"""One question of a probe: two results that must be equal, what a difference means, and the smallest input for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from torch import Tensor

from scantling.audits.finding import Finding, Verdict
from scantling.audits.judge import Gap, gap
from scantling.audits.protocol import Subject
from scantling.errors import ScantlingError

Shown: TypeAlias = Mapping[str, Any]
Measured: TypeAlias = tuple[Tensor, Tensor, Shown]
Measure: TypeAlias = Callable[[Subject, int], Measured]

REFUSALS = (ScantlingError, NotImplementedError, ValueError)
"""What a subject raises to say that it does not do something. Anything else is a crash."""


@dataclass(frozen=True)
class Question:
    """What must be equal.

    Attributes:
        probe: whose question it is.
        where: under which circumstances.
        measure: a subject and a number of tokens -> both results, and the input that gave them.
        meaning: of a difference.
        good: what it means that there is none.
        design: why a difference is by design, or None where it is none.
        total: the longest row that such a number of tokens makes.
        place: from the index of the worst logit to words.
        moved: the two results have the same tokens at other positions.
    """

    probe: str
    where: str
    measure: Measure
    meaning: str
    good: str
    design: str | None = None
    total: Callable[[int], int] = lambda tokens: tokens
    place: Callable[[tuple[int, ...]], str] | None = None
    moved: bool = False


def ask(subject: Subject, question: Question, tokens: int, fewest: int = 2) -> Finding:
    """Judge a question on rows of `tokens`, and shrink the input where it shows a defect.

    Args:
        fewest: tokens below which the question cannot be asked.
    """
    q = question
    try:
        found = _gap(subject, q, tokens)
    except REFUSALS as error:
        return Finding(q.probe, Verdict.COULD_NOT_RUN, f"it refuses: {_first_line(error)}", where=q.where)
    except Exception as error:
        return crashed(q.probe, error, q.where)
    answer = Finding(
        q.probe, found.verdict, f"{q.good}", found.size, q.where, data={"decided": found.how, "share": found.share}
    )
    if not found.real:
        return answer
    if q.design is not None:
        return replace(answer, verdict=Verdict.BY_DESIGN, message=q.design)
    switch = subject.facts.switch
    if switch is not None and q.total(tokens) > switch:
        return _beyond(subject, q, answer, switch, fewest)
    at = q.where if q.place is None else "; ".join(filter(None, (q.where, q.place(found.at))))
    return replace(answer, message=q.meaning, where=at, smallest=_smallest(subject, q, tokens, fewest))


def _gap(subject: Subject, q: Question, tokens: int) -> Gap:
    return gap(subject, lambda s: q.measure(s, tokens)[:2], q.total(tokens) if q.moved else 0)


def _beyond(subject: Subject, q: Question, answer: Finding, switch: int, fewest: int) -> Finding:
    """Rows past the length from which positions depend on the length: by design if shorter rows agree."""
    fits = [n for n in range(fewest, switch + 1) if q.total(n) <= switch]
    short = max(fits, default=None)
    why = f"positions depend on the length of rows past {switch} tokens"
    if short is None:
        return replace(answer, verdict=Verdict.BY_DESIGN, message=f"{why}; no shorter row to compare with")
    if _gap(subject, q, short).real:
        smallest = _smallest(subject, q, short, fewest)
        return replace(answer, message=f"{q.meaning}, also within {switch} tokens", smallest=smallest)
    return replace(answer, verdict=Verdict.BY_DESIGN, message=f"{why}; rows of up to {switch} agree")


def _smallest(subject: Subject, q: Question, tokens: int, fewest: int) -> Shown | None:
    """The input with the fewest tokens that still shows the difference."""
    for n in sorted({*range(fewest, min(tokens, fewest + 6)), *range(fewest, tokens, 4), tokens}):
        try:
            if _gap(subject, q, n).real:
                return q.measure(subject, n)[2]
        except Exception:
            continue
    return None


def merged(findings: list[Finding]) -> list[Finding]:
    """Answers of one probe that say the same in several circumstances become one."""
    groups: dict[tuple[Any, ...], list[Finding]] = {}
    for finding in findings:
        alone = finding.verdict in (Verdict.DEFECT, Verdict.BY_DESIGN)
        key = (finding.probe, finding.verdict, finding.message, finding.unit, id(finding) if alone else 0)
        groups.setdefault(key, []).append(finding)
    return [_one(group) for group in groups.values()]


def _one(group: list[Finding]) -> Finding:
    if len(group) == 1:
        return group[0]
    worst = max(group, key=lambda f: -math.inf if f.size is None else f.size)
    places = dict.fromkeys(f.where for f in group if f.where)
    data: dict[str, Any] = {}
    for finding in group:
        data |= {key: value for key, value in finding.data.items() if key not in data}
    return replace(worst, where="; ".join(places), data={**data, **worst.data})


def could_not(probe: str, why: str, where: str = "") -> Finding:
    """The subject lacks what the question takes."""
    return Finding(probe, Verdict.COULD_NOT_RUN, why, where=where)


def not_applicable(probe: str, why: str) -> Finding:
    """The question does not arise."""
    return Finding(probe, Verdict.NOT_APPLICABLE, why)


def crashed(probe: str, error: Exception, where: str = "") -> Finding:
    """What is no refusal: an error that the subject did not mean."""
    text = f"it crashes: {type(error).__name__}: {_first_line(error)}"
    return Finding(probe, Verdict.DEFECT, text, where=where, data={"crash": True})


def _first_line(error: Exception) -> str:
    return (str(error).strip() or "no message").splitlines()[0][:200]


def listed(ids: Tensor) -> list[Any]:
    """Ids as plain lists; a single row as one list."""
    rows: list[Any] = ids.tolist()
    return rows[0] if len(rows) == 1 else rows
