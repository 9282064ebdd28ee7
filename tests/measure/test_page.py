"""docs/measure.md is what its generator says."""

from __future__ import annotations

import re

import pytest
from tests.measure import page

from scantling.measure import FIGURES

TEXT = page.PATH.read_text(encoding="utf-8")


def numbers(line: str) -> list[float]:
    return [float(cell) for cell in re.findall(r"[-+.\de]*\d[-+.\de]*", line.replace(",", ""))]


def test_the_head_and_every_figure_are_there() -> None:
    head = page.header()
    assert TEXT.startswith(head)
    assert re.findall(r"^\| `(\w+)` \|", head, re.MULTILINE) == list(FIGURES)
    for name in re.findall(r"\((\S+\.svg)\)", TEXT):
        assert (page.DOCS / name).read_text(encoding="utf-8").startswith("<?xml")


def test_the_shallow_rows_come_out_again() -> None:
    first_table = TEXT.split("![Size of the stream]")[0]
    written = {line.split("|")[1].strip(): numbers(line) for line in first_table.splitlines() if line.startswith("| ")}
    rows, _ = page.by_depth((4, 8))
    for row in rows:
        made = numbers(" ".join(row))
        for column, (old, new) in enumerate(zip(written[row[0]], made, strict=True)):
            # After the updates a processor's rounding has grown.
            trained = column % 4 in (3, 0) and column > 0
            assert new == pytest.approx(old, rel=0.5 if trained else 0.05)


def test_heads_are_in_no_count() -> None:
    rows = page.invariants()
    assert len({row[1:] for row in rows}) == 1
    assert all(built == predicted for _, built, predicted, _ in rows)
    for row in rows:
        assert f"| {' | '.join(row)} |" in TEXT


def test_post_norm_holds_the_stream_and_pre_norm_lets_it_grow_as_the_root_of_depth() -> None:
    (_, pre), (_, post) = page.sizes(100)
    assert post == pytest.approx([1.0] * 100, abs=1e-3)
    assert pre[99] / pre[24] == pytest.approx(2, rel=0.2)
