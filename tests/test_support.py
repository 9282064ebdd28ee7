"""The support matrix is what the tests run, and docs/support.md is the matrix."""

from __future__ import annotations

from dataclasses import replace as replace_card
from typing import Any, Literal

import pytest
from msgspec.structs import replace
from tests import choices, support_matrix, test_laws
from tests.choices import Choice, made
from tests.test_laws import CARDS

import scantling as sc
from scantling.cards import schema
from scantling.cards.read import from_dict
from scantling.checkpoint.families.gguf import ARCHITECTURES


def test_the_page_is_up_to_date() -> None:
    """``make docs``, or ``python -m tests.support_matrix --write``, rewrites it."""
    assert support_matrix.PATH.read_text() == support_matrix.page()


def test_a_stale_page_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A law that no longer runs over a card, or a table of GGUF that is gone, makes another page."""
    page = support_matrix.PATH.read_text()
    laws = support_matrix.law_cards()
    few = {**laws, "padding": laws["padding"] - {name for name, card in CARDS.items() if card.family == "encoder"}}
    with monkeypatch.context() as patch:
        patch.setattr(support_matrix, "law_cards", lambda: few)
        assert support_matrix.page() != page
    silent = tuple(replace_card(card, architecture="") for card in support_matrix.written())
    with monkeypatch.context() as patch:
        patch.setattr(support_matrix, "written", lambda: silent)
        assert support_matrix.page() != page
    assert support_matrix.page() == page


def test_a_card_of_the_laws_makes_each_choice() -> None:
    every = set().union(*map(support_matrix.choices_of, CARDS))
    assert [str(choice) for choice in choices.choices() if choice not in every] == []


def test_laws_run_over_the_cards_that_they_are_about() -> None:
    laws = support_matrix.law_cards()
    assert list(laws) == [
        "cached decoding",
        "padding",
        "packing",
        "reference kernel",
        "fused kernel",
        "compile",
        "verify",
    ]
    assert laws["cached decoding"] == {name for name, card in CARDS.items() if card.family != "encoder"}
    assert {"bert", "t5", "llama"} < laws["padding"] == set(CARDS)
    assert laws["packing"] == {name for name, card in CARDS.items() if card.head.kind not in test_laws.POOLED}
    assert all(laws[column] == set(CARDS) for column in list(laws)[3:])


def test_a_law_that_does_not_run_has_no_cards() -> None:
    decoder = test_laws.TestEveryDecoder
    assert "llama" in support_matrix.cards_of(decoder, decoder.test_cache, kernel="fused")
    assert support_matrix.cards_of(decoder, decoder.test_cache, kernel="another") == frozenset()
    assert support_matrix.cards_of(test_laws.test_an_encoder_has_no_cache) == frozenset()


def test_no_cell_of_a_law_is_empty() -> None:
    cells = {cell for _, row in support_matrix.rows() for cell in row[1:7]}
    assert cells == {"yes", "within the trained length", "a row each"}
    alone = {str(choice) for choice, row in support_matrix.rows() if "a row each" in row}
    assert alone == {
        *(f"head.kind: {kind}" for kind in ("sequence", "embedding")),
        *(f"head.pool: {pool}" for pool in ("first", "mean", "last")),
        "head.spare: true",
        "head.normalize: true",
    }
    cached = {str(choice): row[0] for choice, row in support_matrix.rows()}
    assert set(cached.values()) == {"yes", "within the trained length", "encoders only"}
    assert {key for key, cell in cached.items() if cell == "encoders only"} == {
        "family: encoder",
        "position (learned).pad_id",
        "embedding.types",
        *(f"head.kind: {kind}" for kind in ("tokens", "sequence", "replaced", "embedding")),
        *(f"head.pool: {pool}" for pool in ("first", "mean", "last")),
        "head.spare: true",
        "head.normalize: true",
        "head.n_labels",
        "head.scores: sigmoid",
    }


def test_what_a_decoder_may_choose_is_not_for_encoders_only() -> None:
    """Where no decoder of the laws made these choices, the page would say that there is no test."""
    by_name = {str(choice): choice for choice in choices.choices()}
    for name in ("embedding.widen: after", "embedding.widen_bias: true", "head.transform", "head.kind: none"):
        assert not support_matrix.encoders_only(by_name[name])
    assert support_matrix.encoders_only(by_name["embedding.types"])


def test_saving_is_what_the_writers_do() -> None:
    cells = {str(choice): row[8:] for choice, row in support_matrix.rows()}
    assert cells["attention (multi_head).softcap"] == ["Hugging Face", "gemma2"]
    assert cells["attention.kind: latent"] == ["Hugging Face", ""]
    assert cells["head.kind: sequence"] == ["own layout", ""]
    assert cells["embedding.types"][0] == "Hugging Face"
    assert cells["norm.kind: layernorm"] == ["Hugging Face", "bert, gpt2"]
    assert "qwen3moe" in cells["mlp.kind: moe"][1]
    known = {name for row in cells.values() for name in row[1].split(", ")} - {""}
    assert known == set(ARCHITECTURES)


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
    run = {"training": schema.Training(), "inference": schema.Inference(cache="unknown")}
    noted = replace(card, name="other", dtype="float16", source=source, published=published, **run)
    assert {key for key in card.__struct_fields__ if getattr(card, key) != getattr(noted, key)} == choices.NOTES
    assert sc.assemble(noted) == sc.assemble(card)


def test_a_new_choice_appears_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    class Tuned(schema.Embedding, frozen=True, kw_only=True, forbid_unknown_fields=True):
        spin: Literal["left", "right"] | None = None
        steep: bool = False

    found = {str(choice) for choice in choices._of(Tuned, "embedding", set())}
    assert {"embedding.spin: left", "embedding.spin: right", "embedding.steep: true", "embedding.scale"} <= found
    new = Choice(Tuned, "embedding", "steep", True)
    assert [cell(new) for cell in support_matrix.COLUMNS.values()] == [*["no test"] * 7, "", "own layout", ""]


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
    cells = {str(choice): row[7].split(", ") for choice, row in support_matrix.rows()}
    assert cells["attention.kind: latent"] == ["deepseek_v2", "deepseek_v3"]
    assert cells["position.kind: alibi"] == ["bloom", "falcon", "mpt"]
    assert cells["attention (multi_head).sinks: true"] == ["gpt_oss"]
    assert cells["norm (rmsnorm).plus_one: true"] == ["gemma", "gemma2", "gemma3_text"]
    assert "mixtral" in cells["mlp.kind: moe"]


def test_angles_that_follow_the_length_are_found() -> None:
    following = {name for name, card in CARDS.items() if support_matrix.follows_length(card)}
    assert following == {"dynamic, short", "longrope, short", "longrope with its factor"}
