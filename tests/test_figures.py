"""docs/figures.md is what the package computes, and every verdict follows from the two numbers of its row."""

from __future__ import annotations

from fractions import Fraction

import pytest
from tests.figures import page
from tests.figures.quoted import CONDITION, ROUNDING, SAME, VERDICTS, WRONG, Figure

import scantling as sc

FIGURES = [(section.title, figure) for section in page.sections() for figure in section.figures]


def test_the_page_is_up_to_date() -> None:
    """``make docs``, or ``python -m tests.figures --write``, rewrites it."""
    assert page.PATH.read_text() == page.page()


@pytest.mark.parametrize(("title", "figure"), FIGURES, ids=[f"{title}: {f.what}: {f.quoted}" for title, f in FIGURES])
def test_a_verdict_follows_from_the_numbers(title: str, figure: Figure) -> None:
    assert figure.verdict in VERDICTS
    assert (figure.why == "") == (figure.verdict == SAME)
    if figure.verdict != CONDITION:
        assert figure.found == figure.verdict


KNOWN = [
    ("GPT-2 small, KV cache per token", "36.9 kB", 36_864),
    ("Llama 3 8B, KV cache per token", "131 kB", 131_072),
    ("logits of 2 x 1024 x 32000 in float32", "262 MB", 262_144_000),
    ("scores of 8 heads at T 4096 in float16", "256 MiB", 256 * 2**20),
    ("6 N D", "8.4e22", 84 * 10**21),
    ("time", "2.4 days", Fraction(8_203_125, 40)),
    ("device-hours at 2 dollars", "about $117 k", Fraction(350_000, 3)),
    ("d 4096, T 2048", "7.7 %", Fraction(1, 13)),
    ("d 4096, T 8192", "25 %", Fraction(1, 4)),
    ("d 4096, T 16384", "40.0 %", Fraction(2, 5)),
    ("d 4096, T 32768", "57.1 %", Fraction(4, 7)),
    ("d 4096, T 131072", "84.2 %", Fraction(16, 19)),
    ("GPT-2 small, all", "124,439,808", 124_439_808),
    ("Llama 3 8B, all", "8,030,261,248", 8_030_261_248),
    ("12 L d² + V d", "728,629,248", 728_629_248),
    ("all 32 layers", "6.5 B", 5_670_961_152),
    ("transformer-base", "65 M", 63_045_632),
    ("transformer-big", "213 M", 214_171_648),
]


@pytest.mark.parametrize(("what", "quoted", "exact"), KNOWN, ids=[f"{what}: {quoted}" for what, quoted, _ in KNOWN])
def test_the_figures_that_everyone_quotes(what: str, quoted: str, exact: Fraction) -> None:
    """By hand: 2 x 12 x 12 x 64 x 2 bytes, 4 T d over 24 d² + 4 T d, 84e21 / (1024 x 4e14) seconds, and so on."""
    found = [figure.exact for _, figure in FIGURES if (figure.what, figure.quoted) == (what, quoted)]
    assert exact in found


def test_each_verdict_occurs() -> None:
    assert {figure.verdict for _, figure in FIGURES} == set(VERDICTS)
    assert len(FIGURES) > 250


@pytest.mark.parametrize(
    ("quoted", "exact", "found"),
    [
        ("2.4 days", 205_078, SAME),
        ("-6 %", Fraction(-584, 10_000), SAME),
        ("85.0 M", 84_934_656, ROUNDING),
        ("85 M", 84_934_656, SAME),
        ("0.26 B", 524_288_000, WRONG),
        ("8.4e22", 84 * 10**21, SAME),
        ("about $117 k", Fraction(350_000, 3), SAME),
        ("256 MiB", 2**28, SAME),
        ("256 MB", 2**28, WRONG),
        ("(2, 8)", (2, 8), SAME),
        ("(2, 8)", (8, 2), WRONG),
    ],
)
def test_what_a_verdict_is(quoted: str, exact: Fraction, found: str) -> None:
    assert Figure("it", quoted, exact).found == found


def test_a_changed_number_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache with one head too many makes another page and another verdict."""
    from tests.figures import memory

    from scantling.parts.attention import Attention

    right = Attention.state

    def larger(self: Attention, w: sc.Workload) -> dict[str, tuple[int, ...]]:
        return {name: (b, h + 1, s, d) for name, (b, h, s, d) in right(self, w).items()}

    monkeypatch.setattr(Attention, "state", larger)
    found = next(figure for figure in memory._memory() if figure.quoted == "36.9 kB")
    assert (found.verdict, found.found) == (SAME, WRONG)
    monkeypatch.setattr(page, "sections", lambda: (*memory.sections(),))
    assert page.page() != page.PATH.read_text()
