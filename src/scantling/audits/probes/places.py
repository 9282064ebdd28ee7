"""Positions in half precision: are neighbours still apart after a cast?"""

from __future__ import annotations

import torch

from scantling.audits import draw
from scantling.audits.ask import could_not, listed, not_applicable
from scantling.audits.draw import Effort
from scantling.audits.finding import Finding, Verdict
from scantling.audits.judge import unit_of
from scantling.audits.planted_subject import planted
from scantling.audits.protocol import Subject
from scantling.audits.registry import Plant, Probe
from scantling.audits.wide import cast, wide

NAME = "places"
PAIRS = (7, 63, 127, 128, 255, 256, 257, 511, 512, 1023, 1024, 2047, 2048, 4095)
"""Positions whose successor is asked: bfloat16 holds whole numbers up to 256, float16 up to 2,048."""
DTYPES = ("bfloat16", "float16")
SEEN = 32.0
"""Roundings that a step from one position to the next must move the logits by in full precision to be asked of a dtype.
"""


def probe(subject: Subject, effort: Effort) -> list[Finding]:
    """A token at position p and at p + 1 behind the same tokens must have other logits, in 16 bits too."""
    if subject.facts.position in ("none", "alibi", "relative"):
        return [not_applicable(NAME, "positions are distances here: there is nothing to cast")]
    if "positions" not in subject.can.takes:
        return [could_not(NAME, "it takes no positions")]
    limit = subject.facts.context
    pairs = [p for p in PAIRS if limit is None or p + 1 < limit]
    if not pairs:
        return [not_applicable(NAME, "it has too few positions")]
    full = cast(subject, "float32") or subject
    ids = draw.ids(subject.facts, 1, 6, effort.seed)
    steps = {p: _step(full, ids, p) for p in pairs}
    exact = {p: _step(wide(subject), ids, p) for p in pairs} if 0.0 in steps.values() else steps
    lost = SEEN * unit_of("float32")
    if max(exact.values()) < lost:
        return [not_applicable(NAME, "positions that are given do not move the logits, in full precision either")]
    # What is truly below the rounding of float32 may be lost in it.
    same = [p for p, step in steps.items() if step == 0 and not 0 < exact[p] < lost]
    found = [_finding("float32", same, ids)]
    for dtype in DTYPES:
        narrow = cast(subject, dtype)
        if narrow is None:
            found.append(could_not(NAME, "it cannot be cast", dtype))
            continue
        # What full precision moves by less than the dtype's own rounding may be lost in it.
        asked = [p for p, step in steps.items() if step > SEEN * unit_of(dtype)]
        found.append(_finding(dtype, [p for p in asked if _step(narrow, ids, p) == 0], ids))
    return found


def _step(subject: Subject, ids: torch.Tensor, p: int) -> float:
    """How far the last token's logits move from position p to p + 1, over the largest of them."""
    # Stated as real tokens, so that a jump in the positions is not taken for another document.
    mask, rows = torch.ones_like(ids), []
    with torch.no_grad():
        for last in (p, p + 1):
            positions = torch.tensor([[0, 1, 2, 3, 4, last]])
            rows.append(subject.run(draw.feed(subject, ids, positions=positions, mask=mask))[:, -1].double())
    if not bool(rows[0].isfinite().all() and rows[1].isfinite().all()):
        return 0.0 if bool((rows[0].isnan() & rows[1].isnan()).all()) else float("inf")
    return float((rows[0] - rows[1]).abs().max() / rows[0].abs().max().clamp(min=1e-300))


def _finding(dtype: str, same: list[int], ids: torch.Tensor) -> Finding:
    if not same:
        return Finding(NAME, Verdict.CLEAN, "neighbouring positions stay apart", 0.0, dtype, "pairs")
    p = same[0]
    text = f"positions {p} and {p + 1} are one in {dtype}: they are rounded before they are used"
    shown = {"ids": listed(ids), "position_ids": [[0, 1, 2, 3, 4, p], [0, 1, 2, 3, 4, p + 1]]}
    return Finding(NAME, Verdict.DEFECT, text, float(len(same)), dtype, "pairs", shown, {"collisions": same})


PROBE = Probe(
    NAME,
    "whether neighbouring positions stay apart in 16 bits",
    probe,
    (
        Plant("positions are cast with the weights", lambda: planted("positions in the weights' dtype")),
        Plant("positions are rounded to bfloat16 always", lambda: planted("positions in half the bits")),
        Plant("waves of rounded positions", lambda: planted("positions in half the bits", position="sinusoidal")),
        Plant("positions are rounded to eights", lambda: planted("positions eight apart")),
        Plant("sound, rotary", planted, False, Verdict.CLEAN),
        Plant("sound, learned", lambda: planted(position="learned"), False, Verdict.CLEAN),
        Plant("sound, waves", lambda: planted(position="sinusoidal"), False, Verdict.CLEAN),
        Plant("ALiBi", lambda: planted(position="alibi"), False, Verdict.NOT_APPLICABLE),
    ),
)
