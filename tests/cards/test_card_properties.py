"""Any legal card survives being written; any text is a card or one sentence."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, composite
from msgspec.structs import replace

from cards.strategies import (
    ACTS,
    SCALINGS,
    any_cards,
    attentions,
    embeddings,
    latents,
    legal_cards,
    mlps,
    norms,
    positions,
    qk_norms,
    residuals,
    scalings,
)
from scantling.assembly import assemble
from scantling.cards import Card, preset, presets, read_text, to_yaml
from scantling.cards.read import from_dict
from scantling.cards.rules import complete, table_rows
from scantling.cards.schema import Gated, Latent, MoE, NoPosition, Plain, Source
from scantling.errors import ScantlingInputError
from scantling.parts.part import Workload, total

FAST = settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))


@given(any_cards())
@FAST
def test_a_legal_card_survives_being_written(data: dict[str, Any]) -> None:
    card = from_dict(data, "drawn")
    assert read_text(to_yaml(card), "written") == card


@given(legal_cards())
@FAST
def test_a_legal_card_assembles(data: dict[str, Any]) -> None:
    card = from_dict(data, "drawn")
    model = assemble(card)
    # A plain MLP without biases is the least a block can have.
    width = card.embedding.width or card.d_model
    least = table_rows(card) * width + card.n_layers * (4 * card.d_model + 2 * card.d_model)
    assert least <= model.params < 200_000
    assert model.params == total(model.steps(Workload(batch=1, tokens=3, unrolled=True)), "params")


@given(legal_cards())
@FAST
def test_reading_fills_in_what_depends_on_other_keys(data: dict[str, Any]) -> None:
    card = from_dict(data, "drawn")
    attention, stated = card.attention, data["attention"]
    if isinstance(attention, Latent):
        turned = attention.d_rope
    else:
        assert attention.n_kv_heads == (stated.get("n_kv_heads") or stated["n_heads"])
        assert attention.d_head == stated.get("d_head", data["d_model"] // stated["n_heads"])
        turned = attention.d_head
    if data["position"]["kind"] == "rope":
        assert card.position.d_rotary == data["position"].get("d_rotary", turned)  # type: ignore[union-attr]
    for mlp, said in ((card.mlp, data["mlp"]), (getattr(card.mlp, "expert", None), data["mlp"].get("expert"))):
        if said and said["kind"] in ("plain", "gated"):
            usual = 4 * card.d_model if said["kind"] == "plain" else 256
            assert mlp.d_ff == (said.get("d_ff") or usual)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("d_model", "gated", "plain"), [(1, 256, 4), (96, 256, 384), (97, 512, 388), (768, 2048, 3072)]
)
def test_widths_by_default(d_model: int, gated: int, plain: int) -> None:
    small = replace(preset("tiny"), d_model=d_model, position=NoPosition())
    for kind, width in ((Gated, gated), (Plain, plain)):
        card = complete(replace(small, mlp=kind(act="silu")))
        assert card.mlp == kind(act="silu", d_ff=width)
        experts = complete(replace(small, mlp=MoE(n_experts=2, top_k=1, expert=kind(act="silu")))).mlp
        assert experts == MoE(n_experts=2, top_k=1, expert=kind(act="silu", d_ff=width))
    assert complete(replace(small, d_model=4096, mlp=Gated(act="silu"))).mlp == Gated(act="silu", d_ff=11008)


FLAGS = ("residual.parallel", "residual.shared_norm", "residual.from_norm", "norm.plus_one", "norm.final")
FLAGS += ("norm.rounded", "attention.qk_norm.rounded")
FLAGS += ("attention.sinks", "mlp.bias", "mlp.selection_bias", "head.bias", "embedding.scale_rounded")
FLAGS += ("position.scaled", "position.rounded", "position.from_mask", "position.scaling.truncate")
VALUES = ("attention.softcap", "attention.clip", "attention.q_rank", "position.kind alibi", "position.offset")
VALUES += ("mlp.clamp.limit", "mlp.scores sigmoid", "mlp.scores top_softmax", "mlp.group_score top2", "mlp.top_groups")
VALUES += ("mlp.scale", "mlp.shared.kind", "embedding.width", "embedding.norm.kind", "head.scale", "pattern.times")
VALUES += ("pattern.attention.window", "pattern.position.kind none", "pattern.position.kind rope", "pattern.mlp.kind")


def test_the_strategies_draw_every_choice() -> None:
    seen: set[str] = set()

    def keys(prefix: str, section: Any) -> None:
        """Every key path and every word or flag that stands at it."""
        if isinstance(section, dict):
            for key, value in section.items():
                keys(f"{prefix}.{key}" if prefix else key, value)
        elif isinstance(section, list):
            for value in section:
                keys(prefix, value)
        else:
            seen.add(prefix)
            seen.add(f"{prefix} {section}")

    @given(st.tuples(scalings(8), qk_norms(), latents(4), residuals(), embeddings()))
    @settings(FAST, max_examples=300)
    def look_inside(drawn: Any) -> None:
        scaling, qk_norm, latent, (residual, norm), embedding = drawn
        sections = {"residual": residual, "norm": norm, "attention": latent | {"qk_norm": qk_norm}}
        keys("", sections | {"embedding": embedding, "position": {"scaling": scaling}})

    @given(norms(), mlps(), positions(8), attentions(4, 4, False))
    @settings(FAST, max_examples=600)
    def look(norm: dict[str, Any], mlp: dict[str, Any], position: dict[str, Any], attention: dict[str, Any]) -> None:
        keys("", {"norm": norm, "mlp": mlp, "position": position, "attention": attention})
        seen.update(section["kind"] for section in (norm, mlp, position, attention))
        seen.update(*(section.keys() for section in (norm, mlp, position, attention)))
        seen.add("at " + "+".join(sorted(norm.get("at", []))))
        seen.add(f"act {mlp.get('act')}")
        seen.add(f"expert {mlp.get('expert', mlp)['kind']}")
        seen.add(f"{position['kind']} {position.get('interleaved')}")

    @given(legal_cards())
    @settings(FAST, max_examples=250)
    def look_at_all(data: dict[str, Any]) -> None:
        keys("", data)
        seen.update(data, (f"layers {data['n_layers']}", f"tied {data['tied']}"))

    look_inside()
    look()
    look_at_all()
    places = ["in", "out", "res", "in+out", "in+res", "out+res", "in+out+res"]
    assert {f"at {p}" for p in places} <= seen
    assert {f"act {a}" for a in ACTS} <= seen
    assert {"none", "sinusoidal", "learned", "rope", "rmsnorm", "layernorm", "plain", "gated", "moe"} <= seen
    assert {"rope True", "rope False", "expert plain", "expert gated", "normalize"} <= seen
    assert {"n_kv_heads", "window", "bias", "scale", "scale_by_layer", "d_head", "theta", "d_rotary"} <= seen
    assert {"layers 0", "layers 1", "layers 2", "layers 3", "tied True", "tied False"} <= seen
    assert {f"position.scaling.kind {kind}" for kind in SCALINGS} <= seen
    assert {f"attention.qk_norm.over {over}" for over in ("head", "each_head", "width")} <= seen
    assert {f"attention.kind {kind}" for kind in ("multi_head", "latent")} <= seen
    assert {f"{key} True" for key in FLAGS} <= seen
    assert set(VALUES) <= seen
    assert {"embedding", "head", "dropout", "dtype", "source", "published"} <= seen


AWKWARD = [
    "",
    " ",
    "a ",
    "\ta",
    "no",
    "null",
    "~",
    "1e5",
    "0o7",
    "2024-01-01",
    "<<",
    "=",
    "a: b",
    "- a",
    "#",
    "a #b",
    "&a",
    "*a",
]
AWKWARD += [
    "!a",
    "%a",
    "@a",
    "`",
    "'",
    '"',
    "...",
    "---",
    "a\n...\n",
    "a\nb",
    "\r",
    "\x00",
    "\x1b[0m",
    "\x85",
    "é\x85\\x85",
    "\xa0",
]
AWKWARD += [
    "a\u2003",
    "\u2028",
    "\u202e",
    "\ufeff",
    "\U0001f600",
    "{",
    "a, b",
    "[]",
    "?",
    "? a",
    "|",
    "\\N",
    "x" * 2000,
]


@pytest.mark.parametrize("name", AWKWARD)
def test_an_awkward_name_survives_being_written(name: str) -> None:
    card = replace(preset("tiny"), name=name, source=Source(config=name, note=name))
    assert read_text(to_yaml(card), "written") == card


@pytest.mark.parametrize("name", presets())
def test_a_preset_survives_being_written(name: str) -> None:
    assert read_text(to_yaml(preset(name)), "written") == preset(name)


WORDS = ["name", "family", "decoder", "attention", "norm", "at", "[in]", "kind", "rope", "true", "null", "1e-5", "2"]
MARKS = [": ", "\n", " ", "- ", "? ", "{", "}", "[", "]", ", ", "#", "|", ">", "&a ", "*a", "!!", "!", "%", "@", "`"]
MARKS += ['"', "'", "---\n", "...\n", "\t", "<<: ", "\\", "~", "0x", "0b", "1_", "+.", ".inf", ".nan", "2001-1-1", ":"]
MARKS += ["\ufeff", "\x85", "\u2028", "\x00", "\ud800", "\r", "\r\n", "=", "12:30:45", "2001-12-14t21:59:43.10-99:99"]
SCRAPS = st.lists(st.sampled_from(WORDS + MARKS) | st.text(max_size=3), max_size=40).map("".join)
ODD = st.sampled_from(
    [
        None,
        True,
        -1,
        0,
        1,
        2,
        2**63,
        10**400,
        0.5,
        float("nan"),
        float("inf"),
        "",
        "x",
        "none",
        [],
        [[]],
        {},
        {"kind": 1},
    ]
) | st.recursive(st.integers() | st.text(max_size=5), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner))


@composite
def spoilt(draw: DrawFn) -> dict[str, Any]:
    """A legal card with up to three keys renamed, taken away, or given an odd value."""
    card = deepcopy(draw(legal_cards()))
    for _ in range(draw(st.integers(1, 3))):
        at: Any = card
        while True:
            if not at:
                break
            key = draw(st.sampled_from(sorted(at)))
            if isinstance(at[key], dict) and draw(st.booleans()):
                at = at[key]
                continue
            value = at.pop(key)
            change = draw(st.sampled_from(["value", "value", "rename", "remove"]))
            if change == "value":
                at[key] = draw(ODD)
            elif change == "rename":
                at[key + draw(st.text(max_size=2))] = value
            break
    return card


@composite
def cut(draw: DrawFn) -> str:
    """A written card with a few characters taken out, doubled, or replaced by scraps."""
    text = to_yaml(from_dict(draw(legal_cards()), "drawn"))
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(text)))
        end = min(len(text), start + draw(st.integers(0, 12)))
        text = text[:start] + draw(st.just("") | st.just(text[start:end] * 2) | SCRAPS) + text[end:]
    return text


def assert_card_or_one_sentence(source: str | dict[str, Any]) -> None:
    try:
        card = read_text(source, "odd.yaml") if isinstance(source, str) else from_dict(source, "odd.yaml")
    except ScantlingInputError as error:
        message = str(error)
        assert message.startswith(("odd.yaml: ", "card "))
        assert len(message.splitlines()) == 1
        assert 20 < len(message) < 600
    else:
        assert isinstance(card, Card)
        assert complete(card) == card


ANYTHING = st.one_of(SCRAPS, cut(), spoilt(), spoilt().map(lambda card: json.dumps(card, ensure_ascii=False)))


@given(ANYTHING)
@settings(FAST, max_examples=400)
def test_anything_is_a_card_or_one_sentence(source: str | dict[str, Any]) -> None:
    assert_card_or_one_sentence(source)


@pytest.mark.slow
@given(ANYTHING)
@settings(FAST, max_examples=1000, derandomize=False)
def test_anything_more_of_it(source: str | dict[str, Any]) -> None:
    assert_card_or_one_sentence(source)
