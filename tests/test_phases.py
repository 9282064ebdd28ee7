"""FLOPs by phase: the textbook's closed forms, torch's own formula of a fused backward, and where attention is half."""

from __future__ import annotations

import json
from typing import Any

import pytest
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

import scantling as sc
from scantling.cards import presets
from scantling.cards.read import from_dict
from scantling.cli.main import _run
from scantling.numbers.flops import CONVENTIONS, flops, half_at, recomputed
from scantling.numbers.phases import Phase, phases
from scantling.parts.part import FREE, Cost, Workload
from scantling.parts.saved import POLICIES

D, L, V = 4096, 3, 32000
TEXTBOOK: dict[str, Any] = {
    "name": "textbook",
    "family": "decoder",
    "n_layers": L,
    "d_model": D,
    "vocab_size": V,
    "context": 2**20,
    "attention": {"kind": "multi_head", "n_heads": 32},
    "position": {"kind": "none"},
    "norm": {"kind": "rmsnorm", "eps": 1e-5},
    "mlp": {"kind": "plain", "act": "gelu"},
    "tied": True,
}


def textbook(**keys: Any) -> Any:
    return sc.assemble(from_dict({**TEXTBOOK, **keys}, "textbook"))


def by_name(model: Any, **work: Any) -> dict[str, Phase]:
    return {phase.name: phase for phase in phases(model, Workload(**work))}


def test_the_phases_of_a_textbook_decoder() -> None:
    """24 d^2 + 4 S d a layer and token, 2 V d for each position that is scored; the backward twice the forward."""
    b, t = 2, 1000
    found = by_name(textbook(), batch=b, tokens=t)
    assert list(found) == ["prefill", "decode", "training"]
    assert found["prefill"].model.full == b * (L * t * (24 * D * D + 4 * t * D) + 2 * V * D)
    assert found["prefill"].model.causal == b * (L * (t * 24 * D * D + 4 * D * t * (t + 1) // 2) + 2 * V * D)
    assert found["decode"].model == Cost.of(b * (L * (24 * D * D + 4 * t * D) + 2 * V * D))
    assert found["training"].model.full == 3 * b * t * (L * (24 * D * D + 4 * t * D) + 2 * V * D)
    assert found["decode"].work.past == t - 1
    assert [phase.hardware == phase.model for phase in found.values()] == [True, True, False]


def test_a_window_is_in_one_convention_only() -> None:
    heads = {"kind": "multi_head", "n_heads": 32, "window": 512}
    mix = by_name(textbook(attention=heads), tokens=1000)["prefill"].forward["scores and mix"]
    pairs = [1000 * 1000, 1000 * 1001 // 2, 512 * 513 // 2 + 488 * 512]
    assert [n // (4 * D * L) for n in mix] == pairs


def test_a_fused_backward_has_five_products() -> None:
    """Torch's counter charges flash attention's backward with the scores once more than its forward."""
    b, h, t, d = 2, 32, 64, 128
    shape = (b, h, t, d)
    forward, backward = sdpa_flop_count(shape, shape, shape), sdpa_backward_flop_count(shape, shape, shape, shape)
    step = by_name(textbook(), batch=b, tokens=t)["training"]
    assert 3 * L * forward == step.by_part["scores and mix"].full
    assert L * (forward + backward) == step.by_part["scores and mix"].full + step.hardware.full - step.model.full
    assert by_name(textbook(), batch=b, tokens=t, kernel="reference")["training"].again == {}


def test_an_encoder_has_no_decode_and_a_source_is_read_once() -> None:
    assert list(by_name(sc.assemble(sc.card("bert-base-uncased")), tokens=64)) == ["forward", "training"]
    model = sc.assemble(sc.card("t5-small"))
    found = by_name(model, tokens=20, source=300)
    d, d_ff, layers, v = 512, 2048, 6, 32128
    # Self-attention, queries and outputs of cross-attention, MLP; keys and values of the source are kept.
    once = layers * (8 * d * d + 4 * d * d + 4 * d * d_ff + 4 * d * (20 + 300)) + 2 * v * d
    assert found["decode"].model.full == once
    assert found["prefill"].model.full > 300 * layers * (8 * d * d + 4 * d * d_ff)


def test_a_later_piece_is_no_training_step() -> None:
    assert list(by_name(textbook(), tokens=1, past=7)) == ["decode"]
    assert list(by_name(textbook(), tokens=3, past=7)) == ["prefill", "decode"]
    assert list(by_name(textbook(), tokens=1)) == ["prefill", "training"]


def test_half_of_the_textbook_block() -> None:
    """6 d over the square; causal 4 d (T + 1) / 2 = 24 d, so 12 d - 1; a window of 512 never."""
    assert half_at(textbook()) == {"full": 6 * D, "causal": 12 * D - 1, "visible": 12 * D - 1}
    heads = {"kind": "multi_head", "n_heads": 32, "window": 512}
    assert half_at(textbook(attention=heads)) == {"full": 6 * D, "causal": 12 * D - 1, "visible": None}


@pytest.mark.parametrize("source", [1, 100, 512, 7000])
def test_half_beside_a_source_of_its_own_length(source: int) -> None:
    """From there on, and not just before; a long source alone is no reason to say that every target does."""
    model = sc.assemble(sc.card("t5-base"))

    def share(tokens: int, convention: str) -> float:
        return flops(model, Workload(tokens=tokens, source=source)).share(convention)

    for convention, length in half_at(model, source).items():
        assert length is not None
        assert all(share(length + more, convention) >= 0.5 for more in (0, 1, 2, length, 100 * length))
        assert length == 1 or share(length - 1, convention) < 0.5


@pytest.mark.parametrize("name", presets())
def test_half_is_reached_there_and_not_before(name: str) -> None:
    model = sc.assemble(sc.card(name))
    for convention, length in half_at(model).items():
        if length is None:
            assert flops(model, Workload(tokens=2**40)).share(convention) < 0.5
            continue
        assert flops(model, Workload(tokens=length)).share(convention) >= 0.5
        assert length == 1 or flops(model, Workload(tokens=length - 1)).share(convention) < 0.5


@pytest.mark.parametrize(
    ("convention", "shares"),
    [("full", [7.7, 25.0, 40.0, 57.1, 84.2]), ("causal", [4.0, 14.3, 25.0, 40.0, 72.7])],
)
def test_the_table_of_shares(
    convention: str, shares: list[float], capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    path = tmp_path / "textbook.yaml"
    path.write_text(json.dumps(TEXTBOOK))
    assert _run(["flops", str(path), "--tokens", "64", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["attention_share_by_tokens"]
    assert [row["tokens"] for row in rows] == [2048, 8192, 16384, 32768, 131072, 2**20]
    assert [round(100 * row[convention], 1) for row in rows[:5]] == shares


def test_the_columns_have_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(["flops", "mixtral-8x7b-v0.1", "--tokens", "64"]) == 0
    out = capsys.readouterr().out
    assert all(f"({name}: {said})" in out for name, said in CONVENTIONS.items())
    assert "12.880 B active of 46.703 B parameters; looking up a row of a table costs no FLOPs" in out
    assert "hardware FLOPs: all of it" in out


def test_a_table_of_positions_ends_the_table_of_shares(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(["flops", "gpt2", "--tokens", "64", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["tokens"] for row in found["attention_share_by_tokens"]] == [1024]
    assert found["lookup_flops"] == 0
    assert [phase["phase"] for phase in found["phases"]] == ["prefill", "decode", "training"]
    assert found["phases"][2]["model_flops"]["full"] == found["training_flops"]


@pytest.mark.parametrize("kernel", ["fused", "reference"])
def test_what_a_policy_computes_again(kernel: str) -> None:
    """Selective: scores and mix of every layer (the mix itself where nothing after it is kept); none: nothing."""
    b, t = 2, 1000
    again = {}
    for policy in POLICIES:
        found = by_name(textbook(), batch=b, tokens=t, kernel=kernel, recompute=policy)["training"]
        said = f"forward again, {policy} recompute"
        again[policy] = found.again.get(said, FREE)
        assert found.model == by_name(textbook(), batch=b, tokens=t)["training"].model
        assert found.hardware.full - found.model.full == sum(cost.full for cost in found.again.values())
    products = {"fused": 4, "reference": 2}[kernel]
    assert again["none"] == FREE
    assert again["selective"].full == products * b * L * t * t * D
    assert again["selective"].causal == products * b * L * t * (t + 1) // 2 * D
    # Of a block all but its last product, whose output nothing in it keeps.
    assert again["block"].full == b * t * L * (24 * D * D + 4 * t * D - 8 * D * D)
    assert again["block"].full == recomputed(
        textbook(), Workload(b, t, training=True, kernel=kernel, recompute="block")
    )


def test_the_command_names_the_policy(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(["flops", "gpt2", "--tokens", "64", "--recompute", "block", "--json"]) == 0
    training = json.loads(capsys.readouterr().out)["phases"][2]
    assert training["recompute"] == "block"
    again = training["computed_again"]["forward again, block recompute"]
    assert again["full"] == recomputed(sc.assemble(sc.card("gpt2")), Workload(1, 64, training=True, recompute="block"))
    assert training["hardware_flops"]["full"] - training["model_flops"]["full"] > again["full"]
