"""Rows gathered by expert give what each gives alone, to the last bit, whoever else is in the pass."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conftest import GOLDEN
from tests.native.test_pass import BASE, CLOSE, all_logits, decoder, ids_of, net_of, wanted_logits

import scantling as sc
from scantling.cards.read import from_dict
from scantling.native import library
from scantling.native.decoder import Decoder

pytestmark = pytest.mark.skipif(library.missing() is not None, reason=str(library.missing()))
FAMILIES = ("gpt-oss", "mixtral", "qwen3-moe", "qwen3-moe-nonorm")


def experts_card(n_experts: int, top_k: int, context: int = 160, **more: Any) -> sc.Card:
    """Widths that divide by 32, as block formats need."""
    expert = {"kind": "gated", "act": "silu", "d_ff": 64}
    mlp = {"kind": "moe", "n_experts": n_experts, "top_k": top_k, "expert": expert, **more}
    sizes = {"n_layers": 2, "d_model": 64, "vocab_size": 96, "context": context}
    return from_dict({**BASE, **sizes, "mlp": mlp}, "experts")


def modes(width: str) -> list[bool]:
    """Exact, and with 8-bit activations where this processor and these weights have them."""
    return [False, True] if width in ("q8_0", "q4_1") and library.library().sc_integer_dot() else [False]


SHARED: dict[str, Any] = {"shared": {"kind": "gated", "act": "silu", "d_ff": 96}, "shared_gate": True}


@pytest.mark.parametrize("width", ["stored", "bf16", "q8_0", "q4_1"])
@pytest.mark.parametrize(("n_experts", "top_k", "more"), [(4, 2, {}), (40, 3, {}), (8, 2, SHARED)])
def test_the_number_of_rows_changes_no_bit(width: str, n_experts: int, top_k: int, more: dict[str, Any]) -> None:
    """A prompt in one pass, in unequal pieces and token by token: many rows per expert, few, and a shared one."""
    card = experts_card(n_experts, top_k, **more)
    net, ids = net_of(card), ids_of(card, 150)
    for quantised in modes(width):
        native = decoder(card, net, width, quantised=quantised)
        together = all_logits(native, ids, (128,))
        assert torch.equal(all_logits(native, ids, tuple(range(1, 150))), together)
        assert torch.equal(all_logits(native, ids, (2, 5, 9, 15, 22, 31, 41, 54, 66, 133)), together)


@pytest.mark.parametrize("more", [{}, SHARED])
def test_a_full_pass_is_that_of_pytorch(more: dict[str, Any]) -> None:
    card = experts_card(8, 2, **more)
    net, ids = net_of(card), ids_of(card, 128)
    torch.testing.assert_close(all_logits(decoder(card, net), ids, ())[:, :96], wanted_logits(net, ids), **CLOSE)


@pytest.mark.parametrize("name", FAMILIES)
def test_pieces_of_recorded_families(name: str) -> None:
    """60 tokens in pieces of one size, for several sizes, are those of one pass."""
    lm = sc.load(GOLDEN / "tiny" / name)
    lm.pack("f32")
    assert lm.packed is not None
    ids = ids_of(lm.card, 60)
    native = Decoder(lm.packed.weights, capacity=64)
    together = all_logits(native, ids, ())
    for size in (1, 2, 3, 7, 16, 33):
        assert torch.equal(all_logits(native, ids, tuple(range(size, 60, size))), together)


@pytest.mark.parametrize("march", ["x86-64", "x86-64-v3"])
def test_rows_by_expert_on_other_processors(march: str) -> None:
    card = experts_card(6, 2, **SHARED)
    net, ids = net_of(card), ids_of(card, 60)
    for width in ("stored", "q4_1"):
        native = decoder(card, net, width, march=march)
        assert torch.equal(all_logits(native, ids, tuple(range(1, 60))), all_logits(native, ids, ()))


@pytest.mark.parametrize("threads", [1, 3, 5])
def test_the_number_of_threads_changes_no_bit(threads: int) -> None:
    card = experts_card(9, 3, **SHARED)
    net, ids = net_of(card), ids_of(card, 60)
    one, many = (all_logits(decoder(card, net, threads=n), ids, (1, 5, 11)) for n in (2, threads))
    assert torch.equal(one, many)


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 20),
    st.integers(1, 4),
    st.sampled_from(["bf16", "q8_0", "q4_1"]),
    st.booleans(),
    st.lists(st.tuples(*[st.integers(0, 24)] * 3), max_size=5),
)
def test_what_else_is_in_the_pass_changes_no_bit(
    n_experts: int, top_k: int, width: str, quantised: bool, ends: list[tuple[int, ...]]
) -> None:
    """Three texts that advance by any numbers of rows, beside each other, under any number of experts."""
    card = experts_card(n_experts, min(top_k, n_experts), context=32)
    net, texts = net_of(card), [ids_of(card, 24, seed) for seed in range(3)]
    options: dict[str, Any] = {"slots": 3, "quantised": quantised and True in modes(width)}
    alone, beside = (decoder(card, net, width, **options) for _ in range(2))
    read, found = [0, 0, 0], np.zeros((3, 24, card.vocab_size), np.float32)
    for end in [*ends, (24, 24, 24)]:
        rows = [(slot, at) for slot in range(3) for at in range(read[slot], end[slot])]
        read = [max(old, new) for old, new in zip(read, end, strict=True)]
        if rows:
            slots, places = zip(*rows, strict=True)
            beside.run([texts[slot][at] for slot, at in rows], slots, places, [True] * len(rows))
            found[slots, places] = beside.logits[: len(rows)]
    for slot, ids in enumerate(texts):
        assert np.array_equal(found[slot], all_logits(alone, ids, tuple(range(1, 24)), slot).numpy())
