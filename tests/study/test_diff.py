"""What changes between two cards: nothing to itself, the mirror image the other way round, and known changes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

import scantling as sc
from scantling.cards import presets
from scantling.cards.schema import Card
from scantling.cli.main import _run
from scantling.parts.part import Workload
from scantling.study.diff import Diff, diff

W = Workload(1, 16)
MIRROR = {"same": "same", "other_shape": "other_shape", "new": "gone", "gone": "new"}


def between(a: Card, b: Card) -> Diff:
    return diff(a, b, W)


def pairs(d: Diff, back: bool = False) -> set[Any]:
    """Every change as something that can be compared, seen from the other side with `back`."""

    def turned(old: Any, new: Any) -> tuple[str, str]:
        return (repr(new), repr(old)) if back else (repr(old), repr(new))

    return {
        *(("key", c.what, *turned(c.old, c.new)) for c in d.keys),
        *(("number", c.what, *turned(c.old, c.new)) for c in d.numbers),
        *(("part", c.path, *turned(c.old, c.new)) for c in d.parts),
        *((MIRROR[w.fate] if back else w.fate, w.name, w.tensors, *turned(w.old, w.new)) for w in d.weights),
    }


@pytest.mark.parametrize("name", presets())
def test_nothing_changes_to_itself(name: str) -> None:
    card = sc.card(name)
    d = between(card, card)
    assert d.equal
    model = sc.assemble(card)
    assert d.tensors("same")[0] == len(model.named_stored)
    assert [d.tensors(fate) for fate in ("other_shape", "new", "gone")] == [(0, 0)] * 3


@given(a=st.sampled_from(presets()), b=st.sampled_from(presets()))
@settings(max_examples=15, deadline=None)
def test_the_other_way_round_is_the_mirror_image(a: str, b: str) -> None:
    there, back = between(sc.card(a), sc.card(b)), between(sc.card(b), sc.card(a))
    assert pairs(there) == pairs(back, back=True)
    assert there.equal == back.equal == (a == b or not pairs(there) - {p for p in pairs(there) if p[0] == "same"})
    # Each stored tensor of either card is in one place.
    stored = [len(sc.assemble(sc.card(name)).named_stored) for name in (a, b)]
    both = there.tensors("same")[0] + there.tensors("other_shape")[0]
    assert [both + there.tensors(fate)[0] for fate in ("gone", "new")] == stored


def test_a_name_is_no_change() -> None:
    card = sc.card("gpt2")
    assert between(card, replace(card, name="other", source=None, published=None)).equal


def test_a_base_of_the_angles_changes_a_key_and_nothing_else() -> None:
    card = sc.card("llama-3-8b")
    d = between(card, replace(card, position=replace(card.position, theta=1e6)))
    assert [(c.what, c.old, c.new) for c in d.keys] == [("position.theta", 500000.0, 1e6)]
    assert (d.parts, d.numbers) == ((), ())
    assert not d.equal
    assert d.tensors("same") == (291, 8030261248)


def test_llama_2_7b_to_llama_3_8b() -> None:
    d = between(sc.card("llama-2-7b"), sc.card("llama-3-8b"))
    assert {c.what for c in d.keys} == {
        "vocab_size",
        "context",
        "attention.n_kv_heads",
        "position.theta",
        "mlp.d_ff",
        "dtype",
    }
    numbers = {c.what: (c.old, c.new) for c in d.numbers}
    assert numbers["parameters: total"] == (6738415616, 8030261248)
    assert numbers["memory: KV cache per token, bfloat16, bytes"] == (524288, 131072)
    states = "memory: training states, bf16-master, adamw, bytes"
    assert numbers[states] == (18 * 6738415616 + 4 * 291, 18 * 8030261248 + 4 * 291)
    old, new = numbers["cost: training on 10^12 tokens in such rows, FLOPs"]
    assert (old, new) == tuple(10**12 * n for n in numbers["FLOPs: training per token"])
    assert "parameters: norm" not in numbers
    # Of each of 32 layers q, o and two norms stay, k, v and the MLP's three change; the last norm stays.
    same = 32 * (2 * 4096 * 4096 + 2 * 4096) + 4096
    assert d.tensors("same") == (32 * 4 + 1, same)
    assert d.tensors("other_shape") == (32 * 5 + 2, 8030261248 - same)
    assert d.tensors("new") == d.tensors("gone") == (0, 0)
    k = next(part for part in d.parts if part.path == "decoder.blocks.0.attn.k")
    assert (k.old or {})["shape"] == (1, 1, 4096)
    assert (k.new or {})["shape"] == (1, 1, 1024)
    assert (k.new or {})["params"] == 4096 * 1024
    assert {p.path for p in d.parts if p.old is None} == {f"decoder.blocks.0.attn:{x}_shared" for x in "kv"}


def test_untying_adds_one_tensor() -> None:
    card = sc.card("gpt2")
    d = between(card, replace(card, tied=False))
    assert d.tensors("new") == (1, 50257 * 768)
    assert d.tensors("gone") == (0, 0)
    # 4 norms' halves, 4 attention matrices and 2 of the MLP with their shifts in each of 12 layers; 2 tables, a norm.
    assert d.tensors("same") == (12 * (4 + 2 * (4 + 2)) + 2 + 2, 124439808)
    assert [c.what for c in d.keys] == ["tied"]


def test_layers_that_come_and_go() -> None:
    card = sc.card("llama-3.2-1b")
    d = between(card, replace(card, n_layers=18))
    assert d.tensors("new")[0] == 2 * 9
    assert {w.name for w in d.weights if w.fate == "new"} <= {w.name for w in d.weights if w.fate == "same"}
    assert {(p.old or {})["repeat"] for p in d.parts} == {16}
    assert {(p.new or {})["repeat"] for p in d.parts} == {18}


def test_families_can_be_compared() -> None:
    d = between(sc.card("bert-base-uncased"), sc.card("t5-base"))
    assert d.keys[0].what == "family"
    numbers = {c.what: (c.old, c.new) for c in d.numbers}
    assert numbers["FLOPs: decode, one step at that length"][0] is None


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(["diff", "llama-2-7b", "llama-3-8b", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["a"], told["b"], told["equal"], told["tokens"]) == ("llama-2-7b", "llama-3-8b", False, 4096)
    assert told["weights"]["same"] == {"tensors": 129, "elements": 1074008064}
    assert {"what": "attention.n_kv_heads", "old": 32, "new": 8} in told["keys"]
    assert _run(["diff", "llama-2-7b", "bert-base-uncased", "--tokens", "64"]) == 0
    out = capsys.readouterr().out
    assert "only in the first" in out
    assert _run(["diff", "gpt2", "gpt2"]) == 0
    assert "nothing differs" in capsys.readouterr().out
    assert _run(["diff", "gpt2", "gpt-2"]) == 2
