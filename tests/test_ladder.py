"""The ladder: one choice per rung, each with the cost that follows from its formula; and the bag of words below it."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
import torch
from click.testing import CliRunner

import scantling as sc
from scantling.cards import ladder, preset, presets
from scantling.cards.read import from_dict
from scantling.cards.schema import Card
from scantling.cli.cards import command
from scantling.loading import tokenizer_of
from scantling.model import Model
from scantling.numbers.flops import flops
from scantling.numbers.memory import memory
from scantling.parts.part import Workload
from scantling.study.verify import verify

L, D, H, HEAD, F, V, T_MAX = 4, 128, 4, 32, 512, 2048, 256
GATED, KV, W, E, K, EXPERT = 344, 2, 64, 8, 2, 172
B, T = 2, 100
TOKENS = B * T

TRIANGLE = T * (T + 1) // 2
BAND = W * (W + 1) // 2 + (T - W) * W
"""Pairs seen by T queries: without and with the window."""

RUNGS: dict[str, tuple[str, int, int, int, int]] = {
    # what changes, and by how much: parameters, FLOPs over the full square, FLOPs of visible pairs, cached numbers
    "ladder-01-positions": ("position", 0, 0, 0, 0),
    "ladder-02-2017": (
        "n_layers",
        L * (4 * D * D + 2 * D * F + F + D + 2 * 2 * D),
        L * (TOKENS * (8 * D * D + 4 * D * F) + B * 4 * T * T * D),
        L * (TOKENS * (8 * D * D + 4 * D * F) + B * 4 * TRIANGLE * D),
        L * 2 * H * HEAD,
    ),
    "ladder-03-pre-norm": ("norm", 2 * D, 0, 0, 0),
    "ladder-04-learned": ("position", T_MAX * D, 0, 0, 0),
    "ladder-05-gelu": ("mlp", 0, 0, 0, 0),
    "ladder-06-rmsnorm": ("norm", -(2 * L + 1) * D, 0, 0, 0),
    "ladder-07-rope": ("position", -T_MAX * D, 0, 0, 0),
    "ladder-08-no-bias": ("mlp", -L * (F + D), 0, 0, 0),
    "ladder-09-swiglu": (
        "mlp",
        L * (3 * D * GATED - 2 * D * F),
        *(L * TOKENS * (6 * D * GATED - 4 * D * F),) * 2,
        0,
    ),
    "ladder-10-gqa": (
        "attention",
        -L * 2 * D * (H - KV) * HEAD,
        *(-L * TOKENS * 4 * D * (H - KV) * HEAD,) * 2,
        -L * 2 * (H - KV) * HEAD,
    ),
    "ladder-11-untied": ("tied", V * D, 0, 0, 0),
    "ladder-12-qk-norm": ("attention", L * 2 * HEAD, 0, 0, 0),
    "ladder-13-local-global": ("pattern", 0, 0, -L // 2 * B * 4 * (TRIANGLE - BAND) * D, 0),
    "ladder-14-experts": (
        "mlp",
        L * (E * 3 * D * EXPERT + E * D - 3 * D * GATED),
        *(L * TOKENS * (K * 6 * D * EXPERT + 2 * D * E - 6 * D * GATED),) * 2,
        0,
    ),
}


def test_the_steps_are_the_cards_and_stay_out_of_the_presets() -> None:
    assert ladder() == ["ladder-00-naive", *RUNGS]
    assert not set(ladder()) & set(presets())
    runner = CliRunner()
    shown = runner.invoke(command, ["--ladder"])
    assert [line.split()[0] for line in shown.stdout.splitlines()[2:] if line] == ladder()
    assert "arXiv:2305.13245" in shown.stdout
    assert "ladder" not in runner.invoke(command).stdout


@pytest.mark.parametrize(("name", "below"), [(name, ladder()[i]) for i, name in enumerate(RUNGS)])
def test_a_rung_is_one_choice_and_costs_what_its_formula_says(name: str, below: str) -> None:
    what, params, full, visible, cached = RUNGS[name]
    one, two = preset(below), preset(name)
    changed = [f.name for f in msgspec.structs.fields(Card) if getattr(one, f.name) != getattr(two, f.name)]
    assert changed in (["name", what, "source"], [what, "name", "source"], ["name", "source", what])
    before, after = sc.assemble(one), sc.assemble(two)
    work = Workload(batch=B, tokens=T)
    assert after.params - before.params == params
    assert flops(after, work).forward - flops(before, work).forward == full
    assert flops(after, work).forward_visible - flops(before, work).forward_visible == visible
    assert kept(after) - kept(before) == cached


def kept(model: Any) -> int:
    """Numbers that the cache keeps per token."""
    return memory(model, Workload(), "float16", "float16").kv_per_token // 2


def test_the_first_rung_weighs_its_table() -> None:
    model = sc.assemble(preset("ladder-00-naive"))
    assert (model.params, kept(model)) == (V * D, 0)
    assert flops(model, Workload(batch=B, tokens=T)).forward == 2 * TOKENS * D * V


@pytest.mark.parametrize("name", ladder())
def test_every_rung_is_what_it_predicts_and_trains(name: str) -> None:
    card = preset(name)
    model = sc.assemble(card)
    assert [row.what for row in verify(model) if not row.equal] == []
    assert card.source is not None
    assert card.source.note
    net = model.build(seed=1)
    ids = torch.arange(24).view(2, 12) % 7
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    losses = []
    for _ in range(5):
        loss = torch.nn.functional.cross_entropy(net(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[0] == pytest.approx(math.log(V), abs=0.5)
    assert losses[-1] < losses[0] - 0.3


@pytest.fixture(scope="module")
def ids() -> list[list[int]]:
    """The same three words in two orders, as ids of a real tokenizer.

    A leading space makes each word the same token wherever it stands: a byte-level tokenizer has one id for a word
    that begins a text and another for one that follows a space.
    """
    tokenizer = tokenizer_of()
    rows = [tokenizer.encode(" dog bites man"), tokenizer.encode(" man bites dog")]
    assert rows[0] == rows[1][::-1]
    assert len(set(rows[0])) == 3
    assert tokenizer.encode("dog")[0] not in rows[0]
    return rows


class TestDogBitesMan:
    """Who bites whom, read from the mean of the vectors."""

    def read(self, name: str, ids: list[list[int]], **changes: Any) -> torch.Tensor:
        """The vectors (2, 3, d) that come out of the last block."""
        data = msgspec.to_builtins(preset(name)) | {"vocab_size": 49152} | changes
        card = from_dict(data, name)
        model = sc.assemble(card)
        return Model(card, model, model.build(seed=2)).hidden(ids)[-1]

    def mean(self, vectors: torch.Tensor) -> torch.Tensor:
        """The mean over words (2, d) in float32, of exact sums.

        fsum rounds the exact sum once. A plain sum rounds at each addition, so its last bit can depend on the order of
        the words even where their vectors are the same; a sum rounded once cannot.
        """
        words = vectors.shape[1]
        sums = [[math.fsum(channel) / words for channel in row] for row in vectors.mT.tolist()]
        return torch.tensor(sums, dtype=torch.float32)

    def test_a_bag_of_words_cannot_tell_who_bites(self, ids: list[list[int]]) -> None:
        vectors = self.read("ladder-00-naive", ids)
        assert torch.equal(vectors[0], vectors[1].flip(0))
        dog, man = self.mean(vectors)
        assert torch.equal(dog, man)
        assert bool(dog.abs().sum() > 0)

    def text_vectors(self, name: str, ids: list[list[int]]) -> torch.Tensor:
        """The vectors (2, d) that the card's own head gives."""
        model = sc.assemble(preset(name))
        return Model(preset(name), model, model.build(seed=2)).logits(ids)

    def test_the_naive_card_cannot_tell_either_and_positions_can(self, ids: list[list[int]]) -> None:
        dog, man = self.text_vectors("naive", ids)
        assert torch.equal(dog, man)
        assert bool(dog.abs().sum() > 0)
        dog, man = self.text_vectors("naive-with-positions", ids)
        assert float((dog - man).abs().max()) > 1e-3

    def test_the_mean_of_exact_sums_does_not_depend_on_the_order(self) -> None:
        draw = torch.Generator().manual_seed(0)
        vectors = torch.randn(1, 50, 200, generator=draw) * 10 ** torch.randint(-8, 8, (1, 50, 1), generator=draw)
        other = vectors[:, torch.randperm(50, generator=draw)]
        assert torch.equal(self.mean(vectors), self.mean(other))
        assert not torch.equal(vectors.mean(1), other.mean(1))

    def test_positions_make_other_vectors_of_the_same_words(self, ids: list[list[int]]) -> None:
        vectors = self.read("ladder-01-positions", ids)
        first, last = vectors[0, 0], vectors[1, 2]
        assert float((first - last).abs().max()) > 0.5
        # Only the word in the middle stands where it stood.
        assert torch.equal(vectors[0, 1], vectors[1, 1])
        # A mean is linear: mean(x + p) = mean(x) + mean(p), so it still sees nothing but rounding.
        dog, man = self.mean(vectors)
        torch.testing.assert_close(dog, man, atol=1e-6, rtol=0)

    def test_the_order_shows_in_the_mean_once_something_after_the_sum_bends(self, ids: list[list[int]]) -> None:
        normed = {"embedding": {"norm": {"kind": "layernorm", "eps": 1e-5}}}
        dog, man = self.mean(self.read("ladder-00-naive", ids, **normed))
        assert torch.equal(dog, man)
        dog, man = self.mean(self.read("ladder-01-positions", ids, **normed))
        assert float((dog - man).abs().max()) > 1e-3

    def test_attention_tells_who_bites(self, ids: list[list[int]]) -> None:
        dog, man = self.mean(self.read("ladder-02-2017", ids))
        assert float((dog - man).abs().max()) > 1e-3
