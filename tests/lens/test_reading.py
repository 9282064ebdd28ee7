"""Sums, lens, patching, scores, distributions and directions, each against a value that was made by other means."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.cases.small import CLOSE, GPT2, built, card, tokens

import scantling as sc
from scantling.lens import (
    Direction,
    Metric,
    Noise,
    attribute,
    capture,
    decompose,
    head_scores,
    lens_logits,
    logit_lens,
    next_tokens,
    patch_grid,
    read_direction,
    read_tuned,
    repeated_tokens,
    steering,
)

LAYERNORM = {"kind": "layernorm", "eps": 1e-5, "bias": True}
PLACEMENTS: dict[str, dict[str, Any]] = {
    "pre": {"norm": {**LAYERNORM, "at": ["in"]}},
    "post": {"norm": {**LAYERNORM, "at": ["out"]}},
    "before the addition": {"norm": {**LAYERNORM, "at": ["res"]}},
    "sandwich": {"norm": {**LAYERNORM, "at": ["in", "res"]}},
    "all three": {"norm": {**LAYERNORM, "at": ["in", "res", "out"]}},
    "plus one": {"norm": {"kind": "rmsnorm", "eps": 1e-5, "plus_one": True}, "embedding": {"scale": 5.0}},
    "parallel": {"norm": LAYERNORM, "residual": {"parallel": True}},
    "shared norm": {"norm": LAYERNORM, "residual": {"parallel": True, "shared_norm": True}},
    "from the norm": {"norm": LAYERNORM, "residual": {"from_norm": True}},
    "norm below": {"norm": LAYERNORM, "embedding": {"norm": LAYERNORM}},
    "capped": {"head": {"kind": "lm", "softcap": 3.0, "bias": True, "scale": 0.5}},
}


@pytest.mark.parametrize("changes", PLACEMENTS.values(), ids=PLACEMENTS)
def test_terms_add_up_wherever_the_norms_stand(changes: dict[str, Any]) -> None:
    base = {**GPT2, **changes}
    lm, ids = built(card(base)), tokens(6)
    stream = decompose(lm, ids, by_head=True)
    assert stream.error < 2e-6
    assert [term.kind for term in stream.terms[:2]] == ["embed", "position"]
    assert sum(term.head is not None for term in stream.terms) == 2 * 4
    wanted = lm.logits(ids)[0, 3]
    found = attribute(lm, ids, range(64), position=3)
    torch.testing.assert_close(found.sums.float(), wanted, **CLOSE)
    assert found.softcap == (3.0 if "head" in changes else None)


def test_a_sum_without_a_term_is_not_the_stream() -> None:
    lm, ids = built(card()), tokens(6)
    stream = decompose(lm, ids)
    apart = (stream.values[1:].sum(0) - stream.stream.double()).abs().max()
    assert apart > 0.1


def test_readings_follow_the_models_own_answer() -> None:
    lm, ids = built(card()), tokens(6)
    readings = logit_lens(lm, ids, top=3)
    last, logits = readings[-1], lm.logits(ids)[0]
    assert [r.point for r in readings] == ["decoder.blocks.0:in", "decoder.blocks.0", "decoder.blocks.1"]
    assert torch.equal(last.top[:, 0], logits.argmax(-1))
    assert last.ranks.tolist() == [1] * 6
    torch.testing.assert_close(last.divergence, torch.zeros(6), **CLOSE)
    probabilities = logits.softmax(-1)
    torch.testing.assert_close(last.entropy, torch.distributions.Categorical(probabilities).entropy(), **CLOSE)
    first = dict(lens_logits(lm, ids))["decoder.blocks.0"][0].softmax(-1)
    torch.testing.assert_close(readings[1].divergence, (probabilities * (probabilities / first).log()).sum(-1), **CLOSE)
    asked = logit_lens(lm, ids, positions=[-1], targets=[7])
    assert int(asked[-1].ranks[0]) == int((logits[-1] > logits[-1, 7]).sum()) + 1


def test_a_tuned_lens_reads_through_its_maps(tmp_path: Path) -> None:
    lm, ids = built(card()), tokens(6)
    draw = torch.Generator().manual_seed(1)
    maps = {"decoder.blocks.0.weight": torch.randn(32, 32, generator=draw)}
    maps["decoder.blocks.0.bias"] = torch.randn(32, generator=draw)
    save_file(maps, tmp_path / "tuned.safetensors")
    found = dict(lens_logits(lm, ids, tuned=read_tuned(tmp_path / "tuned.safetensors")))
    net: Any = lm.net
    moved = lm.hidden(ids)[1] @ maps["decoder.blocks.0.weight"].T + maps["decoder.blocks.0.bias"]
    wanted = net.decoder.final_norm(moved) @ net.head.matrix.weight.T
    torch.testing.assert_close(found["decoder.blocks.0"], wanted, **CLOSE)
    assert torch.equal(found["decoder.blocks.1"], lm.logits(ids))
    with pytest.raises(sc.ScantlingInputError, match=r"no 'decoder.blocks.0.bias'"):
        list(lens_logits(lm, ids, tuned={"decoder.blocks.0.weight": maps["decoder.blocks.0.weight"]}))
    with pytest.raises(sc.ScantlingInputError, match=r"shape \[3\]"):
        list(lens_logits(lm, ids, tuned={**maps, "decoder.blocks.0.bias": torch.zeros(3)}))
    with pytest.raises(sc.ScantlingInputError, match="unknown"):
        list(lens_logits(lm, ids, tuned={**maps, "decoder.blocks.1.bias": torch.zeros(32)}))


@pytest.mark.parametrize("kind", ["stream", "attn", "mlp", "heads"])
def test_patching_brings_back_what_must_come_back(kind: str) -> None:
    """Texts that differ at token 2 of 6: nothing before it can matter, and the stream on top carries all of it."""
    lm, clean = built(card()), tokens(6)
    other = clean.clone()
    other[0, 2] = (other[0, 2] + 1) % 64
    grid = patch_grid(lm, clean, other, Metric(3, 5), kind)
    assert grid.clean == pytest.approx(float(lm.logits(clean)[0, -1, 3] - lm.logits(clean)[0, -1, 5]), abs=1e-5)
    assert grid.values.shape == ((2, 4) if kind == "heads" else (2, 6))
    if kind != "heads":
        torch.testing.assert_close(grid.restored[:, :2], torch.zeros(2, 2), atol=1e-4, rtol=0)
    if kind == "stream":
        torch.testing.assert_close(grid.restored[-1], torch.tensor([0.0] * 5 + [1.0]), atol=1e-4, rtol=0)


def test_one_patch_is_the_pass_with_that_value_put_in() -> None:
    lm, clean, other = built(card()), tokens(5), tokens(5, seed=9)
    grid = patch_grid(lm, clean, other, Metric(3), "mlp", positions=[1, -1])
    value = capture(lm, clean, ["decoder.blocks.0.mlp"])["decoder.blocks.0.mlp"]
    kept: Any = lm.net

    def force(_: Any, __: Any, out: torch.Tensor) -> torch.Tensor:
        out = out.clone()
        out[:, 1] = value[:, 1]
        return out

    hook = kept.decoder.blocks[0].mlp.register_forward_hook(force)
    wanted = lm.logits(other)[0, -1].softmax(-1)[3]
    hook.remove()
    torch.testing.assert_close(grid.values[0, 0], wanted, **CLOSE)
    assert grid.positions == (1, 4)


def test_noise_on_the_subject_is_undone_by_the_stream_on_top() -> None:
    lm, clean = built(card()), tokens(6)
    grid = patch_grid(lm, clean, Noise([1, 2], draws=2), Metric(3, 5))
    assert grid.corrupted != grid.clean
    torch.testing.assert_close(grid.restored[-1, -1], torch.tensor(1.0), atol=1e-4, rtol=0)
    assert torch.equal(grid.values, patch_grid(lm, clean, Noise([1, 2], draws=2), Metric(3, 5)).values)


def test_what_cannot_be_patched_is_said() -> None:
    lm, clean = built(card()), tokens(6)
    with pytest.raises(sc.ScantlingInputError, match="in both passes"):
        patch_grid(lm, clean, clean, Metric(3, 5))
    with pytest.raises(sc.ScantlingInputError, match="6 tokens and the corrupted one 5"):
        patch_grid(lm, clean, tokens(5), Metric(3, 5))
    with pytest.raises(sc.ScantlingInputError, match="has no cross"):
        patch_grid(lm, clean, tokens(6, seed=2), Metric(3, 5), "cross")
    labels = built(
        card({**GPT2, "family": "encoder", "head": {"kind": "sequence", "n_labels": 3, "pool": "mean"}, "tied": False})
    )
    with pytest.raises(sc.ScantlingInputError, match="logits of a vocabulary"):
        patch_grid(labels, clean, tokens(6, seed=2), Metric(1))
    with pytest.raises(sc.ScantlingInputError, match="compared with itself"):
        patch_grid(lm, clean, tokens(6, seed=2), Metric(3, 3))
    with pytest.raises(sc.ScantlingInputError, match="outside the vocabulary of 64"):
        patch_grid(lm, clean, tokens(6, seed=2), Metric(64))


def test_head_scores_are_means_of_their_diagonals() -> None:
    lm = built(card())
    ids = repeated_tokens(lm, 7, 3, seed=2)
    assert torch.equal(ids[:, :7], ids[:, 7:])
    seen = capture(lm, ids, ["decoder.blocks.*.attn:weights"], kernel="reference")
    for score in head_scores(lm, length=7, rows=3, seed=2):
        weights = seen[f"{score.path}:weights"][:, score.head].tolist()
        # The token after the first occurrence of the one at q stands at q - 7 + 1.
        induction = [row[q][q - 6] for row in weights for q in range(7, 13)]
        previous = [row[q][q - 1] for row in weights for q in range(1, 14)]
        assert score.induction == pytest.approx(sum(induction) / len(induction), abs=1e-5)
        assert score.previous == pytest.approx(sum(previous) / len(previous), abs=1e-5)


def test_temperatures_divide_the_logits() -> None:
    lm, ids = built(card()), tokens(6)
    found = next_tokens(lm, ids, temperatures=[0.0, 0.5, 1.0, 2.0], top=64)
    logits = lm.logits(ids)[0, -1].double()
    for row, temperature in zip(found.probabilities[1:], (0.5, 1.0, 2.0), strict=True):
        weights = (logits[found.ids] / temperature).exp()
        torch.testing.assert_close(row, weights / weights.sum(), atol=1e-6, rtol=1e-5)
    assert found.probabilities[0].tolist() == [1.0] + [0.0] * 63
    assert next_tokens(lm, ids, temperatures=[1e-310], top=1).probabilities.tolist() == [[1.0]]
    assert found.entropies[0] == 0
    assert bool((found.entropies.diff() > 0).all())
    with pytest.raises(sc.ScantlingInputError, match="temperature is -1"):
        next_tokens(lm, ids, temperatures=[-1.0])
    with pytest.raises(sc.ScantlingInputError, match="position 6: there are 6 tokens"):
        next_tokens(lm, ids, position=6)


def test_a_direction_goes_through_a_file(tmp_path: Path) -> None:
    lm, ids = built(card()), tokens(4)
    made = Direction("decoder.blocks.0", torch.randn(32, generator=torch.Generator().manual_seed(0)))
    made.save(tmp_path / "d.safetensors")
    read = read_direction(lm, tmp_path / "d.safetensors")
    assert read.point == made.point
    with steering(lm, read, 3.0):
        found = lm.logits(ids)
    stream = lm.hidden(ids)[1] + 3.0 * made.vector
    net: Any = lm.net
    hook = net.decoder.blocks[1].register_forward_pre_hook(lambda _, given: (stream, *given[1:]))
    torch.testing.assert_close(found, lm.logits(ids), **CLOSE)
    hook.remove()
    save_file({"decoder.block.0": made.vector}, tmp_path / "wrong.safetensors")
    with pytest.raises(sc.ScantlingInputError, match=r"did you mean 'decoder.blocks.0'"):
        read_direction(lm, tmp_path / "wrong.safetensors")
    save_file({"decoder.blocks.0": torch.full((32,), float("nan"))}, tmp_path / "nan.safetensors")
    with pytest.raises(sc.ScantlingInputError, match="not finite"):
        read_direction(lm, tmp_path / "nan.safetensors")
    (tmp_path / "pickle.bin").write_bytes(b"\x80\x04K\x01.")
    with pytest.raises(sc.ScantlingInputError):
        read_direction(lm, tmp_path / "pickle.bin")
