"""Cases about cached and uncached runs."""

from __future__ import annotations

import pytest
import torch
from tests.cases.shrink import shrunk
from tests.cases.small import CLOSE, LLAMA, built, card, tokens

import scantling as sc
from scantling.cards import presets
from scantling.generate.keeping import Keeping
from scantling.generate.session import Session, Source
from scantling.parts.rope import Dynamic, RoPE


def stepped(
    lm: sc.Model, ids: torch.Tensor, prompt: int, mask: torch.Tensor | None = None, kind: str = "full"
) -> torch.Tensor:
    """Logits (B, T - prompt + 1, V) of the last prompt token and of each token after it, one at a time."""
    session = Session(lm, ids.shape[0], ids.shape[1], keeping=Keeping(kind))
    with torch.inference_mode():
        rows = [session.prefill(ids[:, :prompt], mask)]
        rows += [session.step(ids[:, t]) for t in range(prompt, ids.shape[1])]
    return torch.stack(rows, 1)


def far(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference, relative to the spread of the logits."""
    return float((a - b).abs().max() / b.std())


@pytest.mark.parametrize("name", [name for name in presets() if sc.card(name).family == "decoder"])
def test_a_prefill_of_10_and_20_steps_equal_one_pass(name: str) -> None:
    """CACHE-01: every preset of a decoder, made small; alone, and behind 4 tokens of padding beside a longer row."""
    lm = built(shrunk(sc.card(name)))
    ids = tokens(30, vocab=61)
    whole = lm.logits(ids)[:, 9:]
    alone = stepped(lm, ids, 10)
    assert far(alone, whole) < 1e-4
    assert torch.equal(alone.argmax(-1), whole.argmax(-1))
    rows = torch.cat((torch.cat((torch.zeros(1, 4, dtype=torch.int64), ids), 1), tokens(34, seed=2, vocab=61)))
    mask = torch.ones(2, 14, dtype=torch.int64)
    mask[0, :4] = 0
    padded = stepped(lm, rows, 14, mask)[:1]
    assert far(padded, whole) < 1e-4
    assert torch.equal(padded.argmax(-1), whole.argmax(-1))


@pytest.mark.parametrize("name", [name for name in presets() if sc.card(name).family == "encoder-decoder"])
def test_a_target_of_10_and_20_steps_equals_one_pass(name: str) -> None:
    """CACHE-01: every preset of two stacks, made small; its source alone, and padded beside a longer one."""
    lm = built(shrunk(sc.card(name)))
    source, target = tokens(9, seed=4, vocab=61), tokens(30, vocab=61)
    whole = lm.logits(source, decoder_ids=target)[:, 9:]
    rows = torch.cat((torch.cat((source, torch.zeros(1, 5, dtype=torch.int64)), 1), tokens(14, seed=2, vocab=61)))
    real = torch.ones(2, 14, dtype=torch.bool)
    real[0, 9:] = False
    for given in (Source(source), Source(rows, real)):
        ids = target.expand(len(given.ids), -1)
        session = Session(lm, len(ids), 30, source=given)
        with torch.inference_mode():
            found = [session.prefill(ids[:, :10]), *(session.step(ids[:, t]) for t in range(10, 30))]
        first = torch.stack(found, 1)[:1]
        assert far(first, whole) < 1e-4
        assert torch.equal(first.argmax(-1), whole.argmax(-1))


@pytest.mark.parametrize("kernel", ["fused", "reference"])
def test_16_bits_differ_by_rounding_only(kernel: str) -> None:
    """CACHE-02: in bfloat16 cached and uncached logits differ by roundings (2^-8 each), in float32 they do not."""
    ids = tokens(20)
    differences = {}
    for dtype in ("float32", "bfloat16"):
        lm = built(card(n_layers=4), dtype)
        with torch.inference_mode():
            session = Session(lm, 1, 20, kernel)
            rows = [session.prefill(ids[:, :10]), *(session.step(ids[:, t]) for t in range(10, 20))]
        differences[dtype] = far(torch.stack(rows, 1).float(), lm.logits(ids, kernel=kernel)[:, 9:])
    assert differences["float32"] < 1e-5
    assert differences["bfloat16"] < 0.1


@pytest.mark.parametrize("kind", ["full", "ring"])
@pytest.mark.parametrize("pattern", [[], [{"attention": {"window": None}}, {}]])
def test_a_prompt_longer_than_the_window(pattern: list[dict[str, object]], kind: str) -> None:
    """CACHE-03: window 8, a prompt of 20 in one piece, then 10 tokens: no key is overwritten that is still read."""
    lm = built(card(n_layers=3, attention={"window": 8}, pattern=pattern))
    ids = tokens(30)
    torch.testing.assert_close(stepped(lm, ids, 20, kind=kind), lm.logits(ids)[:, 19:], **CLOSE)


def test_a_dynamic_base_follows_the_length() -> None:
    """CACHE-06: theta 10000, 16 channels, trained on 16, factor 2."""
    rope = RoPE(16, 10000.0, scaling=Dynamic(2.0, 16))
    for length, theta in ((8, 10000.0), (16, 10000.0), (32, 35097.924)):
        assert rope.frequencies(length) == pytest.approx([theta ** (-i / 8) for i in range(8)], rel=1e-7)


DYNAMIC = {"kind": "rope", "theta": 1e4, "scaling": {"kind": "dynamic", "factor": 2.0, "trained_length": 16}}
LONGROPE = {
    "kind": "rope",
    "theta": 1e4,
    "scaling": {
        "kind": "longrope",
        "trained_length": 16,
        "short_factor": [1.0, 1.0, 1.0, 1.0],
        "long_factor": [1.0, 2.0, 4.0, 8.0],
    },
}


@pytest.mark.parametrize("position", [DYNAMIC, LONGROPE], ids=["dynamic", "longrope"])
def test_a_long_prompt_leaves_nothing_behind(position: dict[str, object]) -> None:
    """CACHE-07: 8 tokens, then 32, then the same 8: the first and the third are identical, the second is stretched."""
    lm = built(card({**LLAMA, "position": position}))
    short, long = tokens(8), torch.cat((tokens(8), tokens(24, seed=3)), 1)
    first = lm.logits(short)
    stretched = lm.logits(long)[:, :8]
    assert torch.equal(lm.logits(short), first)
    assert (stretched - first).abs().max() > 1e-3
    generated = lm.generate(short, 4, ignore_eos=True)
    lm.generate(long, 4, ignore_eos=True)
    assert torch.equal(lm.generate(short, 4, ignore_eos=True), generated)
