"""Cases about masks: causal, padding, window."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.cases.small import CLOSE, GPT2, LLAMA, built, captured, card, tokens

import scantling as sc
from scantling.generate.engine import Session
from scantling.tensor import mask
from scantling.tensor.attend import Terms, kernel
from scantling.tensor.cache import Cache
from scantling.tensor.context import Context
from scantling.visibility import Visibility

KERNELS = ["fused", "reference"]


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("queries", [1, 2, 5])
def test_later_queries_see_the_keys_before_them(queries: int, name: str) -> None:
    """MASK-01: 5 keys; the last query sees all 5 and one before it 4, where an aligned triangle sees 1 and 2."""
    draw = torch.Generator().manual_seed(0)
    q = torch.randn(1, 2, queries, 8, generator=draw)
    k, v = (torch.randn(1, 2, 5, 8, generator=draw) for _ in "kv")
    for explicit in (False, True):
        seen, causal = mask.build(Visibility(), queries, 5 - queries, None, q.device, explicit=explicit)
        found = kernel(name)(q, k, v, Terms(seen, causal, 8**-0.5), lambda _, value: value)
        for i in range(queries):
            reach = 5 - queries + 1 + i
            weights = (q[:, :, i : i + 1] @ k[:, :, :reach].transpose(-1, -2) * 8**-0.5).softmax(-1)
            torch.testing.assert_close(found[:, :, i : i + 1], weights @ v[:, :, :reach], **CLOSE)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("cut", [1, 3])
def test_a_cached_piece_reads_everything_before_it(cut: int, name: str) -> None:
    """MASK-01: the last 1 or 2 of 5 tokens over a cache of the others give what one pass gives."""
    lm, ids = built(card()), tokens(5)
    cache = Cache(lm.parts.named_state(sc.Workload(tokens=5)), torch.float32, "cpu")
    with torch.no_grad():
        lm.net(ids[:, :cut], Context.of(ids[:, :cut], cache=cache, kernel_name=name))
        cache.advance(cut)
        found = lm.net(ids[:, cut:], Context.of(ids[:, cut:], cache=cache, kernel_name=name))
    torch.testing.assert_close(found, lm.logits(ids)[:, cut:], **CLOSE)


SCORED: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"attention": {"window": 2}},
    "cap": {"attention": {"softcap": 5.0}},
    "sinks": {"attention": {"sinks": True}},
}


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("changes", [*SCORED.values(), {"position": {"kind": "alibi"}}], ids=[*SCORED, "alibi"])
def test_rows_of_padding_give_no_nan(changes: dict[str, Any], dtype: str, name: str) -> None:
    """MASK-03: padded left, right, and a row of nothing but padding; forward and backward, real rows unaffected."""
    base = {**LLAMA, **changes} if "position" in changes else LLAMA
    lm = built(card(base, **({} if "position" in changes else changes)), dtype)
    lm.net.requires_grad_(True)
    ids = tokens(7, batch=4)
    padding = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0], [0] * 7, [1] * 7]).bool()
    positions = (padding.long().cumsum(-1) - 1).clamp(min=0)
    logits = lm.net(ids, Context.of(ids, padding=padding, positions=positions, kernel_name=name))
    assert bool(logits.isfinite().all())
    logits.float().square().mean().backward()
    grads = [p.grad for p in lm.net.parameters()]
    assert all(grad is not None and bool(grad.isfinite().all()) for grad in grads)
    if dtype == "float32":
        with torch.no_grad():
            alone = lm.net(ids[:1, 3:], Context.of(ids[:1, 3:], kernel_name=name))
            whole = lm.net(ids[3:], Context.of(ids[3:], kernel_name=name))
        torch.testing.assert_close(logits[:1, 3:], alone, **CLOSE)
        torch.testing.assert_close(logits[3:], whole, **CLOSE)


@pytest.mark.parametrize(("base", "moves"), [(GPT2, True), (LLAMA, False)], ids=["learned", "rope"])
def test_left_padding_does_not_shift_positions(base: dict[str, Any], moves: bool) -> None:
    """MASK-04: 5 ids behind 4 pads against the same alone; with the mask and no positions, learned ones would shift."""
    lm, ids = built(card(base)), tokens(5)
    alone = lm.logits(ids)[:, -1]
    row = torch.cat((torch.zeros(1, 4, dtype=torch.int64), ids), 1)
    attention_mask = torch.tensor([[0] * 4 + [1] * 5])
    with torch.inference_mode():
        torch.testing.assert_close(Session(lm, 1, 12).prefill(row, attention_mask), alone, **CLOSE)
    positions = (attention_mask.cumsum(-1) - 1).clamp(min=0)
    torch.testing.assert_close(lm.logits(row, attention_mask, positions)[:, -1], alone, **CLOSE)
    shifted = (lm.logits(row, attention_mask)[:, -1] - alone).abs().max()
    assert shifted > 0.1 if moves else shifted < 1e-4
    assert (lm.logits(row)[:, -1] - alone).abs().max() > 0.1
    new = lm.generate(row, 6, attention_mask=attention_mask, ignore_eos=True)[:, 9:]
    assert torch.equal(new, lm.generate(ids, 6, ignore_eos=True)[:, 5:])


@pytest.mark.parametrize("base", [GPT2, LLAMA], ids=["learned", "rope"])
def test_what_is_seen_inside_does_not_depend_on_the_batch(base: dict[str, Any]) -> None:
    """MASK-05: hidden states and attention maps of a prompt alone and beside a longer one."""
    lm, ids = built(card(base)), tokens(5)
    rows = torch.cat((torch.cat((torch.zeros(1, 3, dtype=torch.int64), ids), 1), tokens(8, seed=5)))
    padding = torch.tensor([[0] * 3 + [1] * 5, [1] * 8]).bool()
    positions = (padding.long().cumsum(-1) - 1).clamp(min=0)
    for a, b in zip(lm.hidden(ids), lm.hidden(rows, padding.long(), positions), strict=True):
        torch.testing.assert_close(b[:1, 3:], a, **CLOSE)
    alone, batch = captured(lm, ids), captured(lm, rows, padding=padding, positions=positions)
    for i in range(lm.card.n_layers):
        maps = batch[f"decoder.blocks.{i}.attn:weights"][:1, :, 3:]
        torch.testing.assert_close(maps[..., 3:], alone[f"decoder.blocks.{i}.attn:weights"], **CLOSE)
        assert torch.count_nonzero(maps[..., :3]) == 0


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("window", [1, 3, 4, 5])
def test_a_window_of_w_is_w_keys_with_its_own(window: int, name: str) -> None:
    """MASK-09: one layer, window 4, 12 tokens: the keys 8 to 11 reach the last query, none before."""
    lm = built(card(n_layers=1, attention={"window": window}))
    ids = tokens(12)
    stream: list[torch.Tensor] = []

    def keep(_: Any, __: Any, out: torch.Tensor) -> torch.Tensor:
        stream.append(out.detach().requires_grad_(True))
        return stream[-1]

    embed: Any = lm.net.embed
    hook = embed.register_forward_hook(keep)
    lm.net(ids, Context.of(ids, kernel_name=name))[0, -1].square().sum().backward()
    hook.remove()
    assert stream[0].grad is not None
    reached = stream[0].grad[0].abs().sum(-1).nonzero().flatten().tolist()
    assert reached == list(range(12 - window, 12))


@pytest.mark.parametrize("name", KERNELS)
def test_prefill_and_steps_agree_on_the_window(name: str) -> None:
    """MASK-10: window 4, 12 tokens one by one from the first, against one pass."""
    lm, ids = built(card(attention={"window": 4})), tokens(12)
    session = Session(lm, 1, 12, name)
    with torch.inference_mode():
        rows = [session.prefill(ids[:, :1]), *(session.step(ids[:, t]) for t in range(1, 12))]
    torch.testing.assert_close(torch.stack(rows, 1), lm.logits(ids), **CLOSE)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("changes", SCORED.values(), ids=SCORED)
def test_no_cell_of_the_matrix_sees_the_future(
    changes: dict[str, Any], weights: bool, training: bool, dropout: float, name: str
) -> None:
    """MASK-15: dropout or none, maps asked for or not, training or not: other later tokens move nothing earlier."""
    lm = built(card(**changes, dropout={"attention": dropout, "residual": dropout, "embedding": dropout}))
    lm.net.train(training)
    ids = tokens(9)
    other = torch.cat((ids[:, :5], (ids[:, 5:] + 7) % 64), 1)
    outcomes, seen = [], []
    for row in (ids, other):
        torch.manual_seed(3)
        recorder = (lambda path, value: (seen.append(path), value)[1]) if weights else None
        with torch.no_grad():
            outcomes.append(lm.net(row, Context.of(row, kernel_name=name, training=training, recorder=recorder)))
    first, second = outcomes
    torch.testing.assert_close(first[:, :5], second[:, :5], atol=1e-6, rtol=0)
    assert (first[:, 5:] - second[:, 5:]).abs().max() > 1e-2
    assert any(path.endswith("attn:weights") for path in seen) == (weights and name == "reference")
