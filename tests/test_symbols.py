"""Shapes in symbols: the symbols say the numbers, and the numbers are those that the card has under these names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from tests.test_laws import CARDS, SAMPLED, sampled_cards

import scantling as sc
from scantling.cards import Card, presets
from scantling.cards.rules import table_rows
from scantling.parts.dims import ONE, Dim
from scantling.parts.part import Step, Workload

EVERY = {**CARDS, **{name: sc.card(name) for name in presets()}}
KEYS = {
    "d_model": ("d_model",),
    "H": ("n_heads",),
    "H_kv": ("n_kv_heads", "n_heads"),
    "d_ff": ("d_ff",),
    "V": ("vocab_size",),
    "d_embed": ("width",),
    "E": ("n_experts",),
    "k": ("top_k",),
    "kv_rank": ("kv_rank",),
    "q_rank": ("q_rank",),
    "d_nope": ("d_nope",),
    "d_rope": ("d_rope",),
    "d_value": ("d_value",),
    "n_labels": ("n_labels",),
    "buckets": ("buckets",),
    "types": ("types",),
}
"""Symbols and the keys of a card that hold their sizes."""


def passes(card: Card) -> list[Workload]:
    """A prefill, a training pass and a decode step in which all lengths differ."""
    source = 13 if card.family == "encoder-decoder" else None
    found = [
        Workload(3, 11, source=source),
        Workload(3, 11, source=source, training=True, kernel="reference"),
        Workload(3, 11, source=source, last_only=True),
    ]
    return found if card.family == "encoder" else [*found, Workload(3, 2, past=5, source=source)]


def steps(card: Card) -> Iterator[tuple[Workload, Step]]:
    model = sc.assemble(card)
    for w in passes(card):
        for step in model.steps(w):
            yield w, step


def dims(step: Step) -> Iterator[Dim]:
    yield from step.dims
    for factor in step.factors:
        yield from factor.dims


def held(card: Any, key: str) -> set[int]:
    """Every number that stands under a key anywhere in a card."""
    if isinstance(card, dict):
        own = {card[key]} if isinstance(card.get(key), int) else set()
        return own.union(*(held(value, key) for value in card.values()))
    return set().union(*(held(value, key) for value in card)) if isinstance(card, list) else set()


def allowed(card: Card) -> dict[str, set[int]]:
    """For each symbol the sizes that the card has under that name."""
    said = msgspec.to_builtins(card)
    found = {name: set().union(*(held(said, key) for key in keys)) for name, keys in KEYS.items()}
    latent = {a + b for a in found["d_nope"] for b in found["d_rope"]}
    found["d_head"] = latent | held(said, "d_head") | {card.d_model // n for n in found["H"]}
    found["positions"] = set(range(card.context, card.context + 8))
    found["V_rows"] = {table_rows(card)} - found["V"]
    if card.head.kind != "lm":
        found["V"].add(table_rows(card))
    if card.head.kind == "replaced":
        found["n_labels"].add(1)
    return found


def check(card: Card) -> None:
    known = allowed(card)
    for w, step in steps(card):
        lengths = {"B": w.batch, "T": w.tokens, "S": w.past + w.tokens, "T_src": w.sources}
        sizes = known | {name: {size} for name, size in lengths.items()}
        for dim in dims(step):
            assert eval(dim.symbol, {}, dict(dim.names)) == dim.size, (step.path, dim)
            assert all(size in sizes[name] for name, size in dim.names), (step.path, dim)


@pytest.mark.parametrize("name", EVERY)
def test_symbols_are_the_numbers_of_the_card(name: str) -> None:
    check(EVERY[name])


@SAMPLED
@given(sampled_cards())
def test_symbols_of_sampled_cards(card: Card) -> None:
    check(card)


def symbols(name: str, **work: Any) -> dict[str, tuple[str, ...]]:
    found = sc.assemble(sc.card(name)).steps(Workload(**work))
    return {step.path.removeprefix("decoder.blocks.0."): step.symbols for step in found}


def test_the_shapes_of_a_block_as_papers_write_them() -> None:
    found = symbols("llama-3-8b", tokens=7, kernel="reference")
    assert found["embed"] == ("B", "T", "d_model")
    assert found["attn.q"] == ("B", "T", "H*d_head")
    assert found["attn.k"] == ("B", "T", "H_kv*d_head")
    assert found["attn:q_heads"] == ("B", "H", "T", "d_head")
    assert found["attn:k_rotated"] == ("B", "H_kv", "T", "d_head")
    assert found["attn:keys"] == ("B", "H_kv", "S", "d_head")
    assert found["attn:scores"] == ("B", "H", "T", "S")
    assert found["attn:merged"] == ("B", "T", "H*d_head")
    assert found["mlp:hidden"] == ("B", "T", "d_ff")
    assert found["head.matrix"] == ("B", "T", "V")
    assert found[":probabilities"] == ("B", "V")


def test_the_shapes_of_experts_latents_and_a_source() -> None:
    experts = symbols("mixtral-8x7b", tokens=7)
    assert experts["mlp.router.choose"] == ("B", "T", "E")
    assert experts["mlp:sent"] == ("B*T*k", "d_model")
    assert experts["mlp.experts:hidden"] == ("B*T*k", "d_ff")
    latent = symbols("deepseek-v3", tokens=7)
    assert latent["attn.kv_down"] == ("B", "T", "kv_rank+d_rope")
    assert latent["attn.kv_up"] == ("B", "S", "H*(d_nope+d_value)")
    assert latent["attn:latent"] == ("B", "1", "S", "kv_rank")
    t5 = symbols("t5-small", tokens=7, source=9)
    assert t5["encoder.blocks.0.attn:k_heads"] == ("B", "H_kv", "T_src", "d_head")
    assert t5["decoder.position.table"] == ("S+T-1", "H")
    assert t5["cross.k"] == ("B", "T_src", "H_kv*d_head")
    assert t5["attn:keys"] == ("B", "H_kv", "S", "d_head")


def test_brackets_where_a_sum_is_multiplied_or_taken_away() -> None:
    a, b, c = Dim("a", 7), Dim("b", 5), Dim("c", 3)
    assert (a * (b + c)).symbol == "a*(b+c)"
    assert ((b - c) * a, a - (b - c)) == (
        Dim("(b-c)*a", 14, (("b", 5), ("c", 3), ("a", 7))),
        Dim("a-(b-c)", 5, (("a", 7), ("b", 5), ("c", 3)), loose=True),
    )
    assert (ONE.names, (a + ONE).names) == ((), (("a", 7),))


def test_a_wrong_name_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    from scantling.parts import attention

    right = attention.Dim
    swapped = {"H": "H_kv", "H_kv": "H"}
    monkeypatch.setattr(attention, "Dim", lambda name, size: right(swapped.get(name, name), size))
    with pytest.raises(AssertionError):
        check(CARDS["llama"])


def test_a_name_for_another_size_is_refused() -> None:
    model = sc.assemble(CARDS["llama"])
    with pytest.raises(AssertionError):
        list(model.steps_of("embed", Workload(), sizes={"d": Dim("d_model", model.d_model + 1)}))
