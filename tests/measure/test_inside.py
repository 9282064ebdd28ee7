"""What happens inside: parameters, entropy, the residual stream, gradients, routers."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from tests.cases.small import GPT2, LLAMA, built, card, tokens
from tests.measure import page

import scantling as sc
from scantling.measure import Asked, answerable
from scantling.measure.checklist import checklist
from scantling.measure.entropy import entropy, measured, spreads
from scantling.measure.gradients import batch_of, gradients, norms
from scantling.measure.parameters import by_module, parameters
from scantling.measure.routing import routing
from scantling.measure.shape import shape, twins
from scantling.measure.stream import layer, outliers, residual, stream
from scantling.model import Model
from scantling.numbers.count import count
from scantling.visibility import Visibility

ASKED = Asked(lengths=(8, 16), steps=2)
PRESETS = ("gpt2", "llama-3-8b", "mixtral-8x7b-v0.1", "deepseek-v3", "bert-base-uncased", "t5-small", "falcon-7b")
EXPERTS = {"kind": "moe", "n_experts": 4, "top_k": 2, "expert": {"kind": "gated", "act": "silu", "d_ff": 16}}


def drawing(name: str) -> Model:
    parts = sc.assemble(sc.card(name))
    return Model(sc.card(name), parts, parts.build(device="meta", seed=None))


@pytest.mark.parametrize("name", PRESETS)
def test_shares_and_facts_of_built_models_equal_the_account(name: str) -> None:
    lm = drawing(name)
    assert by_module(lm.net) == count(lm.parts).by_part
    assert parameters(lm, ASKED).data["equal"] is True
    figure = checklist(lm, ASKED)
    assert [row for row in figure.rows if not row[3]] == []


def test_the_shares_of_gpt2_are_the_published_ones() -> None:
    # 12 blocks of 768: 4 d^2 + 4 d of attention, 8 d^2 + 5 d of the MLP; 50,257 + 1,024 rows; 25 norms of 2 d.
    rows = {row[0]: row[1] for row in parameters(drawing("gpt2"), ASKED).rows}
    d = 768
    assert rows["attention"] == 12 * (4 * d * d + 4 * d)
    assert rows["mlp"] == 12 * (8 * d * d + 5 * d)
    assert rows["embedding"] == 50257 * d
    assert rows["norm"] == 25 * 2 * d


def test_a_module_that_is_not_in_the_account_shows() -> None:
    lm = built(card())
    lm.net.get_submodule("decoder.blocks.0.attn").register_parameter("extra", torch.nn.Parameter(torch.zeros(3)))
    figure = parameters(lm, ASKED)
    assert figure.data["equal"] is False
    assert "NOT equal" in figure.notes[0]


def test_even_attention_has_the_logarithm_of_its_keys() -> None:
    lm = built(card(n_layers=1))
    for name, weight in lm.net.named_parameters():
        if name.endswith("attn.q.weight"):
            weight.zero_()
    (found,) = spreads(lm, ASKED)
    # Query t of a causal row sees t + 1 keys.
    assert ASKED.length == 16
    exact = math.fsum(math.log(t + 1) for t in range(16)) / 16
    assert found.bound == pytest.approx(exact, rel=1e-12)
    assert found.heads == pytest.approx([exact] * 4, rel=1e-6)


def test_an_encoder_sees_all_keys_and_a_window_its_own() -> None:
    both_ways = built(card({**GPT2, "family": "encoder"}, n_layers=1))
    assert spreads(both_ways, ASKED)[0].bound == pytest.approx(math.log(16), rel=1e-12)
    near = built(card(n_layers=1, attention={"window": 4}))
    exact = (math.log(2) + math.log(3) + 13 * math.log(4)) / 16
    assert spreads(near, ASKED)[0].bound == pytest.approx(exact, rel=1e-12)


def test_one_key_alone_is_no_choice() -> None:
    weights = torch.eye(5).expand(1, 2, 5, 5).double()
    heads, bound = measured(weights, None, False)
    assert heads == (0.0, 0.0)
    assert bound == pytest.approx(math.log(5))


def test_a_sink_is_one_key_more() -> None:
    weights = torch.full((1, 1, 4, 4), 1 / 5).double()
    heads, bound = measured(weights, Visibility(causal=False), True)
    assert heads[0] == pytest.approx(math.log(5))
    assert bound == pytest.approx(math.log(5))


@pytest.mark.parametrize("base", [LLAMA, GPT2, {**GPT2, "family": "encoder"}, {**GPT2, "family": "encoder-decoder"}])
def test_no_head_exceeds_the_bound(base: dict[str, Any]) -> None:
    figure = entropy(built(card(base)), ASKED)
    assert figure.rows
    for row in figure.rows:
        assert 0 <= row[2] <= row[1] <= row[3] <= row[4] * (1 + 1e-6)  # type: ignore[operator]


def test_a_planted_channel_is_found() -> None:
    lm = built(card(GPT2, n_layers=3, d_model=64))
    clean = stream(lm, ASKED)
    with torch.no_grad():
        lm.net.get_parameter("decoder.blocks.1.mlp.down.bias")[37] += 400.0
    found = stream(lm, ASKED)
    assert clean[0] == found[0]
    assert found[1].channel == found[2].channel == 37
    # One channel of 64 that outweighs all others: the rms is its size over sqrt(64), the kurtosis 64.
    assert found[1].peak == pytest.approx(8, rel=0.05)
    assert found[1].kurtosis == pytest.approx(64, rel=0.1)
    assert "channel 37" in outliers(built_with_spike(lm), ASKED).notes[0]


def built_with_spike(lm: Model) -> Model:
    """One token's channel alone, which stands out farther than a channel of all tokens."""
    with torch.no_grad():
        lm.net.get_parameter("decoder.blocks.1.mlp.down.bias")[37] -= 400.0
        lm.net.get_parameter("decoder.position.table.weight")[3, 37] += 4000.0
    return lm


def test_normal_numbers_have_no_outliers() -> None:
    x = torch.randn(1, 400, 100, generator=torch.Generator().manual_seed(1))
    found = layer("x", torch.zeros_like(x), x)
    assert found.kurtosis == pytest.approx(3, abs=0.1)
    assert found.peak < found.normal_peak == math.sqrt(2 * math.log(80000))
    assert found.rms_added == found.rms_out


def test_the_stream_is_what_hidden_gives() -> None:
    lm = built(card())
    hidden = lm.hidden(_ids(lm))
    found = stream(lm, ASKED)
    assert found[0].rms_in == pytest.approx(float(hidden[0].double().pow(2).mean().sqrt()))
    assert found[0].rms_out == pytest.approx(float(hidden[1].double().pow(2).mean().sqrt()))


def _ids(lm: Model) -> torch.Tensor:
    from scantling.measure.asked import rows

    return rows(lm, ASKED, ASKED.length)


def test_post_norm_keeps_the_stream_and_pre_norm_lets_it_grow() -> None:
    post = residual(sc.new(card(GPT2, n_layers=8, norm={"at": ["out"]})), ASKED)
    for row in post.rows:
        assert row[1] == pytest.approx(1, abs=0.01)
        assert row[2] == 1
    pre = [row[1] for row in residual(sc.new(card(GPT2, n_layers=8)), ASKED).rows]
    assert pre == sorted(pre)


def test_norms_are_torchs_own_gradients() -> None:
    lm = sc.new(card(n_layers=2))
    batch = batch_of(lm, ASKED)
    found, loss = norms(lm.net, lm.parts, batch)
    lm.net.zero_grad()
    logits: Any = lm.net(batch.ids)
    wanted = torch.nn.functional.cross_entropy(logits[0, :-1], batch.ids[0, 1:])
    wanted.backward()  # type: ignore[no-untyped-call]
    assert loss == pytest.approx(wanted.item(), rel=1e-5)
    squares = [float(p.grad.pow(2).sum()) for p in lm.net.get_submodule("decoder.blocks.1").parameters()]  # type: ignore[union-attr]
    assert found["decoder.blocks.1"] == pytest.approx(math.sqrt(math.fsum(squares)), rel=1e-4)


def test_the_last_blocks_gradient_stays_in_post_norm_and_falls_in_pre_norm() -> None:
    last = {key: page.profile(*key, steps=0)[0][-1] for key in itertools.product(("in", "out"), (4, 32))}
    assert last["out", 32] == pytest.approx(last["out", 4], rel=0.25)
    # The last norm divides by the stream's size, which grows as sqrt(L), and each block writes as much as another.
    assert last["in", 4] / last["in", 32] == pytest.approx(math.sqrt(32 / 4), rel=0.3)


def test_without_warm_up_deep_post_norm_loses_its_first_gradients() -> None:
    found = {key: page.profile(*key)[1:] for key in itertools.product(("in", "out"), (4, 16))}
    over = {key: page.over(norms) for key, (norms, _) in found.items()}
    assert over["out", 16] > 10 * over["out", 4]
    assert over["in", 16] < over["in", 4] < 1
    ends = {key: losses[1] for key, (_, losses) in found.items()}
    assert ends["in", 16] < ends["out", 16] / 4


def test_updates_lower_the_loss_and_leave_the_model_as_it_was() -> None:
    lm = built(card())
    before = {name: weight.clone() for name, weight in lm.net.state_dict().items()}
    figure = gradients(lm, Asked(lengths=(8, 16), steps=5, lr=0.01))
    assert len(figure.data["losses"]) == 6
    assert figure.data["losses"][-1] < figure.data["losses"][0]
    assert all(torch.equal(weight, before[name]) for name, weight in lm.net.state_dict().items())
    assert not any(p.requires_grad for p in lm.net.parameters())


def test_every_expert_is_counted() -> None:
    lm = built(card({**LLAMA, "mlp": EXPERTS}))
    figure = routing(lm, Asked(lengths=(8, 64)))
    for shares in figure.data["shares"].values():
        assert sum(shares) == pytest.approx(1)
        assert len(shares) == 4
    with torch.no_grad():
        # A router of zeros has no preference; what it chooses is up to the order of equals.
        for name, weight in lm.net.named_parameters():
            if ".router." in name:
                weight.zero_()
    for row in routing(lm, Asked(lengths=(8, 64))).rows:
        assert row[3] == pytest.approx(row[4]) == pytest.approx(math.log(4))


@pytest.mark.parametrize("base", [LLAMA, GPT2])
def test_other_shapes_have_the_same_parameters_and_flops(base: dict[str, Any]) -> None:
    lm = built(card(base, n_layers=4))
    figure = shape(lm, Asked(lengths=(8, 16), passes=1))
    rows = {row[0]: dict(zip(figure.columns, row, strict=True)) for row in figure.rows}
    assert list(rows) == ["as it is", "half the heads", "twice the heads", "4 times shallower, twice as wide"]
    for row in rows.values():
        assert row["parameters built"] == row["predicted"]
        assert row["FLOPs counted"] == row["predicted FLOPs"]
    own = rows["as it is"]
    for name, heads in (("half the heads", 2), ("twice the heads", 8)):
        assert rows[name]["heads"] == heads
        assert rows[name]["parameters built"] == own["parameters built"]
        assert rows[name]["FLOPs counted"] == own["FLOPs counted"]
    # 4 blocks of width 32 and one of width 64 have equal matrices, and the head's product is one of either's.
    shallow = rows["4 times shallower, twice as wide"]
    assert own["products in sequence"] - 1 == 4 * (shallow["products in sequence"] - 1)  # type: ignore[operator]
    assert own["ms a token"] > 0  # type: ignore[operator]
    assert shallow["ms a token"] > 0  # type: ignore[operator]


def test_the_matrices_of_a_shallow_twin_are_as_many() -> None:
    drawn = card(n_layers=4)
    (twin,) = (t for t in twins(drawn) if t.card.n_layers == 1)
    sums = [count(sc.assemble(c)).by_part for c in (drawn, twin.card)]
    assert sums[0]["attention"] == sums[1]["attention"] == 4 * (2 * 32 * 32 + 2 * 32 * 16)
    assert sums[0]["mlp"] == sums[1]["mlp"] == 4 * 3 * 32 * 48


def test_a_model_has_the_figures_that_make_sense() -> None:
    labels = card({**GPT2, "family": "encoder"}, head={"kind": "sequence", "n_labels": 3}, tied=False)
    assert "gradients" not in answerable(built(labels))
    assert "routing" not in answerable(built(card()))
    assert "routing" in answerable(built(card({**LLAMA, "mlp": EXPERTS})))
    assert "shape" in answerable(built(card(n_layers=4)))
    assert "shape" not in answerable(built(card(n_layers=3)))
    assert answerable(drawing("naive")) == ("parameters",)
    with pytest.raises(sc.errors.ScantlingInputError, match="sequence"):
        gradients(built(labels), ASKED)


def test_text_is_read_where_there_is_a_tokenizer_and_ids_are_drawn_where_there_is_none() -> None:
    assert torch.equal(_ids(built(card())), _ids(built(card())))
    assert tokens(16).shape == _ids(built(card())).shape
