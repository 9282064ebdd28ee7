"""Ends of texts: does padding a batch hide the tokens that end its rows?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from scantling.audits.ask import not_applicable
from scantling.audits.draw import Effort
from scantling.audits.finding import Finding, Verdict
from scantling.audits.planted_subject import planted
from scantling.audits.protocol import Subject
from scantling.audits.registry import Plant, Probe

NAME = "ends"
Rows = Sequence[Sequence[int]]


def probe(subject: Subject, _: Effort) -> list[Finding]:
    """Rows of unequal length that end in the token that also pads: their last labels must be scored, padding not."""
    if subject.can.collate is None:
        return [not_applicable(NAME, "it brings nothing that pads rows and makes their labels")]
    end = subject.facts.vocab_size - 1
    rows = [[1, 2, end], [1, 2, 3, 2, end], [3, end]]
    ids, labels = subject.can.collate(rows, end)
    hidden, scored = 0, 0
    for i, row in enumerate(rows):
        start = _start(ids[i].tolist(), row)
        wanted = torch.full_like(labels[i], -100)
        wanted[start : start + len(row)] = torch.tensor(row)
        hidden += int(labels[i, start + len(row) - 1] != end)
        scored += int(((labels[i] != -100) & (wanted == -100)).sum())
    shown = {"rows": [list(row) for row in rows], "labels": labels.tolist()}
    if hidden:
        text = f"the end of {hidden} of {len(rows)} rows is not scored: the model never learns to stop"
        return [Finding(NAME, Verdict.DEFECT, text, float(hidden), "padding is the end token", "rows", shown)]
    if scored:
        text = f"{scored} labels of padding are scored: the model learns to repeat the end"
        return [Finding(NAME, Verdict.DEFECT, text, float(scored), "padding is the end token", "labels", shown)]
    text = "ends of rows are scored and padding is not"
    return [Finding(NAME, Verdict.CLEAN, text, 0.0, "padding is the end token", "rows")]


def _start(padded: list[int], row: Sequence[int]) -> int:
    """Where a row begins in its padded form."""
    for at in range(len(padded) - len(row) + 1):
        if padded[at : at + len(row)] == list(row):
            return at
    return 0


def collating(how: Callable[[list[int], int, int], list[int]], left: bool = False) -> Subject:
    """A subject with a collator; `how` makes the labels of a padded row from it, its own length and the padding."""

    def collate(rows: Rows, end: int) -> tuple[Tensor, Tensor]:
        most = max(map(len, rows))
        pads = [[end] * (most - len(row)) for row in rows]
        padded = [p + list(row) if left else list(row) + p for row, p in zip(rows, pads, strict=True)]
        labels = [how(p, len(row), end) for p, row in zip(padded, rows, strict=True)]
        return torch.tensor(padded), torch.tensor(labels)

    subject = planted()
    return replace(subject, can=replace(subject.can, collate=collate))


def _by_id(padded: list[int], _: int, end: int) -> list[int]:
    return [-100 if i == end else i for i in padded]


def _by_length(padded: list[int], length: int, _: int) -> list[int]:
    return [*padded[:length], *[-100] * (len(padded) - length)]


def _by_length_left(padded: list[int], length: int, _: int) -> list[int]:
    return [*[-100] * (len(padded) - length), *padded[len(padded) - length :]]


def _one_less(padded: list[int], length: int, end: int) -> list[int]:
    return _by_length(padded, length - 1, end)


PROBE = Probe(
    NAME,
    "whether padding a batch hides the tokens that end its rows",
    probe,
    (
        Plant("labels are hidden by the id of padding", lambda: collating(_by_id)),
        Plant("the same, padded on the left", lambda: collating(_by_id, left=True)),
        Plant("padding is scored", lambda: collating(lambda padded, _, __: padded)),
        Plant("one label too few", lambda: collating(_one_less)),
        Plant("hidden by length", lambda: collating(_by_length), False, Verdict.CLEAN),
        Plant("padded on the left, hidden by length", lambda: collating(_by_length_left, True), False, Verdict.CLEAN),
        Plant("none", planted, False, Verdict.NOT_APPLICABLE),
    ),
)
