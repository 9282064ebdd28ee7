"""The page docs/figures.md, put together from the tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.figures import claims, compute, memory, parameters, remarks
from tests.figures.quoted import SAME, VERDICTS, Figure, Section

PATH = Path(__file__).parents[2] / "docs" / "figures.md"

HEADER = """# Figures commonly quoted for Transformers

Tables, worked examples and exercises about Transformers quote the same figures again and again. Here each of them
stands beside what this package computes from the cards of the same models. This page is made by
`python -m tests.figures --write` (or `make docs`); a test recomputes every row and fails where the page is out of date
or a verdict does not follow from the two numbers.

{verdicts}
Of {total} figures {counts}.
"""


@cache
def sections() -> tuple[Section, ...]:
    """Every table, in the order of the page."""
    modules = (parameters, compute, memory, claims)
    return tuple(section for module in modules for section in module.sections())


def figures() -> Iterator[Figure]:
    """Every figure."""
    for section in sections():
        yield from section.figures


def page() -> str:
    """The whole document."""
    found = Counter(figure.verdict for figure in figures())
    verdicts = "".join(f"- **{name}**: {said}.\n" for name, said in VERDICTS.items())
    *most, last = (f"{found[name]} are *{name}*" for name in VERDICTS)
    counts = f"{', '.join(most)}, and {last}"
    lines = [HEADER.format(verdicts=verdicts, total=found.total(), counts=counts)]
    for section in sections():
        lines += [f"## {section.title}", "", section.text, f"Printed by `{section.by}`.", ""]
        lines += ["| figure | quoted | exact | verdict | why |", "|---|---|---|---|---|"]
        lines += [_row(figure) for figure in section.figures]
        lines.append("")
    lines += ["## Why figures go wrong", "", *(f"- {kind}" for kind in remarks.kinds()), ""]
    lines += ["## Statements and code beside the figures", ""]
    lines += [f"- *{remark.said}* {remark.holds}" for remark in remarks.remarks()]
    return "\n".join([*lines, ""])


def _row(figure: Figure) -> str:
    verdict = figure.verdict if figure.verdict == SAME else f"**{figure.verdict}**"
    return f"| {figure.what} | {figure.quoted} | {figure.shown} | {verdict} | {figure.why} |"
