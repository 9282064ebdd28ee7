"""The support matrix is what the tests run, and docs/support.md is the matrix."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from msgspec.structs import replace
from tests import choices, support_matrix
from tests.choices import Choice, made
from tests.test_laws import CARDS

import scantling as sc
from scantling.cards import schema
from scantling.cards.read import from_dict


def test_the_page_is_up_to_date() -> None:
    """``make docs``, or ``python -m tests.support_matrix --write``, rewrites it."""
    assert support_matrix.PATH.read_text() == support_matrix.page()


def test_a_card_of_the_laws_makes_each_choice() -> None:
    every = set().union(*(made_here for _, made_here in support_matrix.law_cards()))
    assert [str(choice) for choice in choices.choices() if choice not in every] == []


def test_no_cell_of_a_law_is_empty() -> None:
    cells = {cell for _, row in support_matrix.rows() for cell in row[:6]}
    assert cells == {"yes", "within the trained length"}


def test_rows_are_unique_and_name_what_the_schema_has() -> None:
    names = [str(choice) for choice in choices.choices()]
    assert len(names) == len(set(names))
    assert {"attention.kind: latent", "attention (multi_head).window", "norm (rmsnorm).at: res"} <= set(names)
    assert {"position (rope).scaling.kind: yarn", "mlp (gated).act: relu2", "tied: true"} <= set(names)
    assert not [name for name in names if name.startswith(("name", "dtype", "source", "published", "vocab_size"))]


def test_notes_change_no_model() -> None:
    """The keys that have no row."""
    card = sc.card("tiny")
    source, published = schema.Source(config="x"), schema.Published(params=1, where="y")
    noted = replace(card, name="other", dtype="float16", source=source, published=published)
    assert {key for key in card.__struct_fields__ if getattr(card, key) != getattr(noted, key)} == choices.NOTES
    assert sc.assemble(noted) == sc.assemble(card)


def test_a_new_choice_appears_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    class Tuned(schema.Embedding, frozen=True, kw_only=True, forbid_unknown_fields=True):
        spin: Literal["left", "right"] | None = None
        steep: bool = False

    found = {str(choice) for choice in choices._of(Tuned, "embedding", set())}
    assert {"embedding.spin: left", "embedding.spin: right", "embedding.steep: true", "embedding.scale"} <= found
    new = Choice(Tuned, "embedding", "steep", True)
    assert [cell(new) for cell in support_matrix.COLUMNS.values()][:7] == ["no test"] * 6 + [""]


@pytest.mark.parametrize(
    ("changes", "yes", "no"),
    [
        ({}, ["attention (multi_head).n_kv_heads", "tied: false"], ["attention (multi_head).window", "pattern"]),
        (
            {"attention": {"kind": "multi_head", "n_heads": 4, "n_kv_heads": 4, "d_head": 6}},
            ["attention.kind: multi_head"],
            ["attention (multi_head).n_kv_heads", "attention (multi_head).d_head"],
        ),
        (
            {"mlp": {"kind": "gated", "act": "silu", "d_ff": 256}},
            ["mlp (gated).act: silu"],
            ["mlp (gated).d_ff", "mlp (gated).act: gelu"],
        ),
        (
            {"pattern": [{"attention": {"window": 3}}, {}]},
            ["pattern", "pattern.attention.kind: multi_head", "attention (multi_head).window"],
            ["pattern.times", "pattern.mlp.kind: gated"],
        ),
        (
            {"norm": {"kind": "layernorm", "eps": 1e-5, "at": ["in", "res"], "final": True}},
            ["norm (layernorm).at: in", "norm (layernorm).at: res", "norm (layernorm).final: true"],
            ["norm (layernorm).at: out", "norm (rmsnorm).at: in", "norm (layernorm).bias: false"],
        ),
    ],
)
def test_what_a_card_chooses(changes: dict[str, Any], yes: list[str], no: list[str]) -> None:
    from tests.test_laws import BASE

    found = {str(choice) for choice in made(from_dict({**BASE, **changes}, "card"))}
    assert set(yes) <= found
    assert not set(no) & found


def test_families_are_those_of_the_configs() -> None:
    cells = {str(choice): row[6].split(", ") for choice, row in support_matrix.rows()}
    assert cells["attention.kind: latent"] == ["deepseek_v2", "deepseek_v3"]
    assert cells["position.kind: alibi"] == ["bloom", "falcon", "mpt"]
    assert cells["attention (multi_head).sinks: true"] == ["gpt_oss"]
    assert cells["norm (rmsnorm).plus_one: true"] == ["gemma", "gemma2", "gemma3_text"]
    assert "mixtral" in cells["mlp.kind: moe"]


def test_angles_that_follow_the_length_are_found() -> None:
    following = {name for name, card in CARDS.items() if support_matrix.follows_length(card)}
    assert following == {"dynamic, short", "longrope, short", "longrope with its factor"}
