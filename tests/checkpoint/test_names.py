"""The tables of names: they go both ways, they cover the model, and a misfit is named."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conftest import GOLDEN
from torch import Tensor

from scantling.assembly import assemble
from scantling.cards import Card
from scantling.cards.read import from_dict
from scantling.checkpoint.families import FAMILIES
from scantling.checkpoint.families.gguf import ARCHITECTURES
from scantling.checkpoint.family import Family
from scantling.checkpoint.hf_config import read_config
from scantling.checkpoint.matching import WRAPPERS, match
from scantling.checkpoint.names import (
    Halves,
    Link,
    Row,
    Shape,
    Split,
    Stack,
    Transform,
    Transpose,
    elements,
    foreign_shapes,
    links,
)
from scantling.errors import ScantlingInputError

SIZES = st.integers(1, 5)
CALM = settings(deadline=None, max_examples=60)


def filled(shape: Sequence[int], start: int = 0) -> Tensor:
    """Every element another number, so that any reordering shows."""
    return torch.arange(start, start + math.prod(shape), dtype=torch.float64).reshape(tuple(shape))


def assert_goes_both_ways(transform: Transform, ours: list[Tensor]) -> list[Tensor]:
    shapes = [tuple(x.shape) for x in ours]
    theirs = transform.save(ours)
    assert [tuple(x.shape) for x in theirs] == [tuple(s) for s in transform.saved_shapes(shapes)]
    assert sum(x.numel() for x in theirs) == sum(x.numel() for x in ours)
    again = transform.load(theirs, shapes)
    assert len(again) == len(ours)
    assert all(torch.equal(a, b) for a, b in zip(again, ours, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(transform.save(again), theirs, strict=True))
    return theirs


@CALM
@given(st.lists(st.lists(SIZES, min_size=1, max_size=3), min_size=1, max_size=3))
def test_nothing_changed(shapes: list[list[int]]) -> None:
    ours = [filled(shape) for shape in shapes]
    assert all(a is b for a, b in zip(assert_goes_both_ways(Transform(), ours), ours, strict=True))


@CALM
@given(st.lists(SIZES, min_size=1, max_size=2))
def test_transposed(shape: list[int]) -> None:
    (theirs,) = assert_goes_both_ways(Transpose(), [filled(shape)])
    assert list(theirs.shape) == shape[::-1]
    assert torch.equal(theirs, filled(shape).t() if len(shape) == 2 else filled(shape))


@CALM
@given(st.lists(SIZES, min_size=1, max_size=4), st.none() | SIZES, st.booleans())
def test_split(rows: list[int], width: int | None, turned: bool) -> None:
    shapes = [(r,) if width is None else (r, width) for r in rows]
    ours = [filled(shape, 100 * i) for i, shape in enumerate(shapes)]
    (theirs,) = assert_goes_both_ways(Split(Transpose()) if turned else Split(), ours)
    whole = theirs.t() if turned and width is not None else theirs
    assert whole.shape[0] == sum(rows)
    assert torch.equal(whole[: rows[0]], ours[0])


@CALM
@given(st.lists(SIZES, min_size=1, max_size=3))
def test_stacked(shape: list[int]) -> None:
    ours = filled(shape)
    theirs = assert_goes_both_ways(Stack(), [ours])
    assert len(theirs) == shape[0]
    assert all(torch.equal(expert, ours[e]) for e, expert in enumerate(theirs))


@CALM
@given(st.integers(1, 4), st.integers(1, 4), st.none() | SIZES)
def test_halves(n_heads: int, pairs: int, width: int | None) -> None:
    rows = n_heads * 2 * pairs
    ours = filled((rows,) if width is None else (rows, width))
    (theirs,) = assert_goes_both_ways(Halves(n_heads), [ours])
    for head in range(n_heads):
        start = head * 2 * pairs
        for pair in range(pairs):
            assert torch.equal(theirs[start + 2 * pair], ours[start + pair])
            assert torch.equal(theirs[start + 2 * pair + 1], ours[start + pairs + pair])


def test_halves_of_one_head_of_six() -> None:
    ours = torch.tensor([0, 1, 2, 3, 4, 5])
    assert Halves(1).save([ours])[0].tolist() == [0, 3, 1, 4, 2, 5]
    assert Halves(3).save([ours])[0].tolist() == [0, 1, 2, 3, 4, 5]


def card_of(family: str, **changes: Any) -> Card:
    gpt2 = family == "gpt2"
    expert = {"kind": "gated", "act": "silu", "d_ff": 20}
    moe = {"kind": "moe", "n_experts": 3, "top_k": 2, "expert": expert}
    sections = {
        "name": "small",
        "family": "decoder",
        "n_layers": 2,
        "d_model": 16,
        "vocab_size": 11,
        "context": 10,
        "attention": {"kind": "multi_head", "n_heads": 4, **({"bias": list("qkvo")} if gpt2 else {"n_kv_heads": 2})},
        "position": {"kind": "learned"} if gpt2 else {"kind": "rope", "theta": 1e4},
        "norm": {"kind": "layernorm", "eps": 1e-5} if gpt2 else {"kind": "rmsnorm", "eps": 1e-5},
        "mlp": {"kind": "plain", "act": "gelu_tanh", "bias": True} if gpt2 else moe if family == "mixtral" else expert,
        "tied": gpt2,
    }
    return from_dict(sections | changes, "small")


LLAMA, GPT2 = FAMILIES["llama"], FAMILIES["gpt2"]
# The table of a GGUF architecture stands in the place of the family's.
GGUF = replace(LLAMA, rows=ARCHITECTURES["llama"].rows)
CASES: dict[str, tuple[Family, Card]] = {
    "gpt2": (GPT2, card_of("gpt2")),
    "gpt2 untied": (GPT2, card_of("gpt2", tied=False)),
    "llama": (LLAMA, card_of("llama")),
    "llama tied": (LLAMA, card_of("llama", tied=True)),
    "llama without layers": (LLAMA, card_of("llama", n_layers=0)),
    "llama with biases": (
        LLAMA,
        card_of(
            "llama",
            attention={"kind": "multi_head", "n_heads": 4, "d_head": 6, "bias": list("qkvo")},
            mlp={"kind": "gated", "act": "silu", "d_ff": 20, "bias": True},
        ),
    ),
    "llama of eleven layers": (LLAMA, card_of("llama", n_layers=11)),
    "mistral": (FAMILIES["mistral"], card_of("mistral")),
    "mixtral": (FAMILIES["mixtral"], card_of("mixtral")),
    "gguf llama": (GGUF, card_of("llama")),
    "gguf llama tied": (GGUF, card_of("llama", tied=True)),
    "gguf mixtral": (GGUF, card_of("mixtral")),
}
CONFIGS = sorted((GOLDEN / "tiny").glob("*/config.json"))
for path in CONFIGS:
    small, model_type = read_config(path)
    CASES[f"tiny {path.parent.name}"] = (FAMILIES[model_type], small)


def test_every_family_has_a_case() -> None:
    recorded = {json.loads(path.read_text())["model_type"] for path in CONFIGS}
    # Of two there is no recorded model: tests/checkpoint/test_families_live.py builds them.
    assert recorded | {"glm", "qwen2_moe"} == set(FAMILIES)


@pytest.mark.parametrize("name", CASES)
def test_a_table_covers_every_weight_once_and_goes_both_ways(name: str) -> None:
    family, card = CASES[name]
    model = assemble(card)
    weights = model.named_stored
    table = links(family.rows(card), weights)
    assert Counter(n for link in table for n in link.ours) == Counter(dict.fromkeys(weights, 1))
    foreign = foreign_shapes(table, weights)
    assert Counter(n for link in table for n in link.theirs) == Counter(dict.fromkeys(foreign, 1))
    computed = sum(elements(part.weights()) for _, part, _ in model.walk() if part.computed)
    stored = model.params - computed + elements(model.named_buffers)
    assert elements(foreign) == elements(weights) == stored
    ours = {n: filled(shape, 10_000 * i) for i, (n, shape) in enumerate(weights.items())}
    theirs: dict[str, Tensor] = {}
    for link in table:
        theirs |= zip(link.theirs, link.transform.save([ours[n] for n in link.ours]), strict=True)
    assert {n: tuple(x.shape) for n, x in theirs.items()} == foreign
    for link in table:
        again = link.transform.load([theirs[n] for n in link.theirs], [weights[n] for n in link.ours])
        assert all(torch.equal(x, ours[n]) for x, n in zip(again, link.ours, strict=True))


# Shapes as the library that wrote the checkpoint has them, for the small cards above.
KNOWN: dict[str, dict[str, Shape]] = {
    "gpt2": {
        "transformer.wte.weight": (11, 16),
        "transformer.wpe.weight": (10, 16),
        "transformer.h.1.ln_1.bias": (16,),
        "transformer.h.0.attn.c_attn.weight": (16, 48),
        "transformer.h.0.attn.c_attn.bias": (48,),
        "transformer.h.0.attn.c_proj.weight": (16, 16),
        "transformer.h.1.mlp.c_fc.weight": (16, 64),
        "transformer.h.1.mlp.c_fc.bias": (64,),
        "transformer.h.1.mlp.c_proj.weight": (64, 16),
        "transformer.ln_f.weight": (16,),
    },
    "gpt2 untied": {"lm_head.weight": (11, 16)},
    "llama": {
        "model.embed_tokens.weight": (11, 16),
        "model.layers.0.input_layernorm.weight": (16,),
        "model.layers.1.self_attn.q_proj.weight": (16, 16),
        "model.layers.1.self_attn.k_proj.weight": (8, 16),
        "model.layers.1.self_attn.o_proj.weight": (16, 16),
        "model.layers.0.post_attention_layernorm.weight": (16,),
        "model.layers.0.mlp.gate_proj.weight": (20, 16),
        "model.layers.0.mlp.down_proj.weight": (16, 20),
        "model.norm.weight": (16,),
        "lm_head.weight": (11, 16),
    },
    "llama with biases": {
        "model.layers.0.self_attn.q_proj.weight": (24, 16),
        "model.layers.0.self_attn.v_proj.bias": (24,),
        "model.layers.1.mlp.up_proj.bias": (20,),
    },
    "llama of eleven layers": {"model.layers.10.self_attn.v_proj.weight": (8, 16)},
    "mixtral": {
        "model.layers.1.block_sparse_moe.gate.weight": (3, 16),
        "model.layers.1.block_sparse_moe.experts.0.w1.weight": (20, 16),
        "model.layers.1.block_sparse_moe.experts.2.w2.weight": (16, 20),
        "model.layers.0.block_sparse_moe.experts.1.w3.weight": (20, 16),
    },
    "gguf llama": {
        "token_embd.weight": (11, 16),
        "blk.1.attn_k.weight": (8, 16),
        "blk.0.attn_output.weight": (16, 16),
        "blk.0.ffn_down.weight": (16, 20),
        "output_norm.weight": (16,),
        "output.weight": (11, 16),
    },
    "gguf mixtral": {"blk.0.ffn_gate_inp.weight": (3, 16), "blk.1.ffn_down_exps.weight": (3, 16, 20)},
}
COUNTS = {"gpt2": 28, "gpt2 untied": 29, "llama": 21, "llama tied": 20, "llama without layers": 3, "mixtral": 35}
COUNTS |= {"gguf llama": 21, "gguf llama tied": 20, "gguf mixtral": 23}


def foreign_of(name: str) -> dict[str, Shape]:
    family, card = CASES[name]
    weights = assemble(card).named_stored
    return foreign_shapes(links(family.rows(card), weights), weights)


@pytest.mark.parametrize("name", KNOWN)
def test_known_names_and_shapes(name: str) -> None:
    assert KNOWN[name].items() <= foreign_of(name).items()


@pytest.mark.parametrize("name", COUNTS)
def test_known_number_of_tensors(name: str) -> None:
    assert len(foreign_of(name)) == COUNTS[name]


def test_queries_come_before_keys_before_values() -> None:
    family, card = CASES["gpt2"]
    table = links(family.rows(card), assemble(card).named_stored)
    fused = next(link for link in table if link.theirs == ("transformer.h.1.attn.c_attn.weight",))
    assert fused.ours == tuple(f"decoder.blocks.1.attn.{p}.weight" for p in "qkv")


def test_experts_stand_in_the_order_of_their_numbers() -> None:
    weights: dict[str, Shape] = {"blocks.0.up.weight": (11, 2, 3)}
    (link,) = links([Row("h.{i}.e.{e}.up", "blocks.{i}.up", Stack())], weights)
    assert link == Link(tuple(f"h.0.e.{e}.up.weight" for e in range(11)), ("blocks.0.up.weight",), Stack())
    assert foreign_shapes([link], weights) == {f"h.0.e.{e}.up.weight": (2, 3) for e in range(11)}


def test_rows_for_weights_that_the_model_lacks_are_left_out() -> None:
    rows = [Row("a", "x"), Row("b", "y"), Row("c.{i}", "blocks.{i}.z"), Row("d", ("x", "y"), Split())]
    (only,) = links(rows, {"x.weight": (2,)})
    assert (only.theirs, only.ours) == (("a.weight",), ("x.weight",))
    found = links(rows, {"blocks.2.z.bias": (2,), "y.bias": (1,)})
    assert [(link.theirs, link.ours) for link in found] == [
        (("b.bias",), ("y.bias",)),
        (("c.2.bias",), ("blocks.2.z.bias",)),
    ]


def test_a_weight_without_a_row_is_a_fault_of_the_table() -> None:
    with pytest.raises(AssertionError, match=r"no row for \['z.weight'\]"):
        links([Row("a", "x")], {"x.weight": (2,), "z.weight": (2,)})


def test_elements() -> None:
    assert elements({"a": (2, 3), "b": (), "c": (0, 4)}) == 7


def matched(
    found: Mapping[str, Shape], name: str = "llama", family: Family = LLAMA
) -> tuple[dict[str, str], list[str]]:
    return match(found, foreign_of(name), family.prefix, family.ignored, "model.safetensors")


def unmatched(found: Mapping[str, Shape], name: str = "llama", family: Family = LLAMA) -> str:
    with pytest.raises(ScantlingInputError) as caught:
        matched(found, name, family)
    message = str(caught.value)
    assert message.startswith("model.safetensors: tensor ")
    assert len(message.splitlines()) == 1
    assert len(message) < 600
    return message


def test_equal_names_match_whatever_their_order() -> None:
    found = list(foreign_of("llama").items())
    random.Random(0).shuffle(found)
    assert matched(dict(found)) == (dict(zip(*2 * [[n for n, _ in found]], strict=True)), [])


@pytest.mark.parametrize("wrapper", ["", "module.", "_orig_mod.", "_orig_mod.module.", "module._orig_mod.module."])
@pytest.mark.parametrize("base", [True, False])
def test_prefixes_are_seen_through(wrapper: str, base: bool) -> None:
    assert WRAPPERS == ("_orig_mod.", "module.")
    wanted = foreign_of("llama")
    theirs = {n: wrapper + (n if base else n.removeprefix("model.")) for n in wanted}
    assert matched({theirs[n]: shape for n, shape in wanted.items()}) == (theirs, [])


def test_the_base_models_prefix_is_its_familys() -> None:
    wanted = foreign_of("gpt2")
    theirs = {n: n.removeprefix("transformer.") for n in wanted}
    assert matched({theirs[n]: shape for n, shape in wanted.items()}, "gpt2", GPT2) == (theirs, [])
    message = unmatched({n.replace("transformer.", "model."): s for n, s in wanted.items()}, "gpt2", GPT2)
    assert "tensor 'transformer.wte.weight' and 27 more is missing; the file has 'model.wte.weight'" in message


def test_a_missing_tensor_is_named() -> None:
    found = foreign_of("llama")
    del found["model.norm.weight"]
    assert unmatched(found) == "model.safetensors: tensor 'model.norm.weight' is missing"
    found["model.final_norm.weight"] = (16,)
    assert unmatched(found) == (
        "model.safetensors: tensor 'model.norm.weight' is missing; "
        "the file has 'model.final_norm.weight', which the model does not know"
    )
    del found["lm_head.weight"]
    assert "tensor 'model.norm.weight' and 1 more is missing" in unmatched(found)
    assert "tensor 'model.embed_tokens.weight' and 20 more is missing" in unmatched({})


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("model.norm.weight", (17,), "has shape [17] and the config asks for [16]"),
        ("model.norm.weight", (16, 1), "has shape [16, 1] and the config asks for [16]"),
        ("model.norm.weight", (), "has shape [] and the config asks for [16]"),
        ("model.layers.1.self_attn.k_proj.weight", (16, 8), "has shape [16, 8] and the config asks for [8, 16]"),
        ("model.layers.0.mlp.up_proj.weight", (0, 16), "has shape [0, 16] and the config asks for [20, 16]"),
        ("lm_head.weight", (12, 16), "has shape [12, 16] and the config asks for [11, 16]"),
    ],
)
def test_a_wrong_shape_is_named_with_the_right_one(name: str, shape: Shape, words: str) -> None:
    assert unmatched(foreign_of("llama") | {name: shape}) == f"model.safetensors: tensor {name!r} {words}"


def test_a_wrong_shape_is_named_as_the_file_names_it() -> None:
    found = {f"module.{n}": shape for n, shape in foreign_of("llama").items()} | {"module.model.norm.weight": (3,)}
    assert "tensor 'module.model.norm.weight' has shape [3] and the config asks for [16]" in unmatched(found)


def test_shapes_may_be_lists() -> None:
    found: Any = {n: list(shape) for n, shape in foreign_of("llama").items()}
    assert matched(found)[1] == []


def test_what_the_model_does_not_know_is_returned() -> None:
    more: dict[str, Shape] = {
        "model.layers.2.mlp.up_proj.weight": (20, 16),
        "model.layers.0.self_attn.q_proj.bias": (16,),
        "score.weight": (2, 16),
        "rotary_emb.inv_freq": (2,),
        "model.layers.0.self_attn.rotary_emb.inv_freq.more": (2,),
    }
    assert matched(foreign_of("llama") | more)[1] == list(more)
    assert matched(foreign_of("llama tied") | {"lm_head.weight": (11, 16)}, "llama tied")[1] == ["lm_head.weight"]


@pytest.mark.parametrize("wrapper", ["", "module.", "_orig_mod."])
def test_buffers_are_ignored(wrapper: str) -> None:
    rope = {f"{wrapper}model.layers.{i}.self_attn.rotary_emb.inv_freq": (2,) for i in (0, 1, 10)}
    assert matched(foreign_of("llama") | rope)[1] == []
    masks = {
        f"{wrapper}{p}h.{i}.attn.{n}": (1, 1)
        for p in ("", "transformer.")
        for i in (0, 1)
        for n in ("bias", "masked_bias")
    }
    assert matched(foreign_of("gpt2") | masks, "gpt2", GPT2)[1] == []


def test_a_mask_of_gpt2_is_not_taken_for_a_bias() -> None:
    names, extra = matched(foreign_of("gpt2") | {"transformer.h.0.attn.bias": (1, 1, 10, 10)}, "gpt2", GPT2)
    assert extra == []
    assert "transformer.h.0.attn.bias" not in names.values()
    assert names["transformer.h.0.attn.c_attn.bias"] == "transformer.h.0.attn.c_attn.bias"


@CALM
@given(st.data())
def test_any_one_damage_is_found(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(CASES)))
    family, _ = CASES[name]
    found: dict[str, Shape] = dict(foreign_of(name))
    victim = data.draw(st.sampled_from(sorted(found)))
    shape = found.pop(victim)
    if data.draw(st.booleans()):
        other = data.draw(st.lists(st.integers(0, 70), max_size=3).map(tuple).filter(lambda s: s != shape))
        found[victim] = other
        assert f"{victim!r} has shape {list(other)} and the config asks for {list(shape)}" in unmatched(
            found, name, family
        )
    else:
        assert f"{victim!r} is missing" in unmatched(found, name, family)
