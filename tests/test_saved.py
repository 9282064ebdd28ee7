"""Law 5: what the parts say autograd keeps is what torch keeps, byte for byte; and what is computed again instead."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.test_laws import CARDS, SAMPLED, sampled_cards, strong
from torch.utils.flop_counter import FlopCounterMode

import scantling as sc
from scantling.cards import Card
from scantling.numbers.flops import flops, recomputed
from scantling.parts.part import Workload, total
from scantling.parts.saved import POLICIES
from scantling.tensor.context import Context
from scantling.tensor.kept import Kept
from scantling.tensor.recompute import POLICIES as RUN

KERNELS = ("reference", "fused")
DTYPES = (("float32", None), ("bfloat16", None), ("float32", "bfloat16"))
"""Of weights and activations, and of autocast."""
POOLED = ("sequence", "embedding")
"""Heads that read one vector per row, which packed rows do not have."""
SHORT = Workload(batch=2, tokens=6, source=7, training=True)


def forward(net: Any, w: Workload) -> tuple[Any, Any]:
    """A training forward: the loss, None where the head has none, and the output."""
    model = net.part
    vocab = getattr(model.head, "vocab_size", model.embed.rows)
    ids = torch.randint(0, vocab, (w.batch, w.tokens), generator=torch.Generator().manual_seed(0))
    source = ids[:, :1].repeat(1, w.sources) if model.two_stacks else None
    texts: dict[str, Any] = {}
    if w.packed:
        texts = {"documents": (torch.arange(w.tokens) // 3).expand(w.batch, -1)}
        texts |= {"source_documents": (torch.arange(w.sources) // 4).expand(w.batch, -1)} if model.two_stacks else {}
    ctx = Context.of(ids, training=True, kernel_name=w.kernel, recompute=w.recompute, **texts)
    with torch.autocast("cpu", torch.bfloat16, enabled=w.autocast is not None):
        out = net(ids, ctx, source)
        _, loss = model.outcome(net, ids, out, ctx)
    return loss, out


def check(card: Card, w: Workload) -> None:
    model = sc.assemble(card)
    net = model.build(dtype=w.dtype).train()
    with Kept(net.parameters()) as kept:
        result = forward(net, w)
    said = total(model.steps(w), "saved_bytes")
    assert (said, said) == (kept.nbytes, kept.nbytes_now), (w.dtype, w.autocast, w.kernel, w.recompute, w.packed)
    assert total(model.steps(replace(w, unrolled=True)), "saved_bytes") == said
    del result


@pytest.mark.parametrize("card", CARDS.values(), ids=CARDS)
def test_declared_is_kept(card: Card) -> None:
    for dtype, autocast in DTYPES:
        for kernel in KERNELS:
            for recompute in POLICIES:
                check(card, replace(SHORT, dtype=dtype, autocast=autocast, kernel=kernel, recompute=recompute))


@pytest.mark.parametrize("name", [name for name, card in CARDS.items() if card.head.kind not in POOLED])
def test_declared_is_kept_of_packed_rows(name: str) -> None:
    for kernel in KERNELS:
        check(CARDS[name], replace(SHORT, packed=True, kernel=kernel))


def _workload(dtypes: tuple[str, str | None], **asked: Any) -> Workload:
    return Workload(training=True, dtype=dtypes[0], autocast=dtypes[1], **asked)


WORKLOADS = st.builds(
    _workload,
    dtypes=st.sampled_from(DTYPES),
    batch=st.integers(1, 3),
    tokens=st.integers(1, 9),
    source=st.integers(1, 7),
    kernel=st.sampled_from(KERNELS),
    recompute=st.sampled_from(POLICIES),
)


@SAMPLED
@given(sampled_cards(), WORKLOADS)
def test_declared_is_kept_by_sampled_cards(card: Card, w: Workload) -> None:
    check(card, w if card.head.kind in POOLED else replace(w, packed=w.sources % 2 == 0))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@settings(SAMPLED, max_examples=600)
@given(sampled_cards(), WORKLOADS)
def test_declared_is_kept_by_many_sampled_cards(card: Card, w: Workload) -> None:
    check(card, w if card.head.kind in POOLED else replace(w, packed=w.sources % 2 == 0))


LONG = ("llama", "window", "chunks", "prefix", "alibi", "gemma", "sinks", "latent", "post-norm with dropout")
LONG += ("t5's bias in a decoder", "modernbert", "pooler", "t5", "bart")


@pytest.mark.parametrize("name", LONG)
def test_blocks_of_queries_keep_what_is_declared(name: str) -> None:
    """Beyond 256 queries the fused kernel works in blocks, each of which keeps its own mask and its own cut of keys."""
    card = msgspec.structs.replace(CARDS[name], context=600)
    for tokens, batch in ((257, 2), (530, 1)):
        w = replace(SHORT, batch=batch, tokens=tokens, source=300)
        check(card, replace(w, dtype="bfloat16"))
        check(card, replace(w, autocast="bfloat16", packed=card.head.kind not in POOLED))


@pytest.mark.parametrize("dtype", ["float16", "float64"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma", "norm per head", "groups of experts", "bert", "t5"])
def test_other_dtypes_keep_what_is_declared(name: str, dtype: str) -> None:
    check(CARDS[name], replace(SHORT, dtype=dtype))


@pytest.mark.parametrize(
    ("where", "name"), [("mlp", "GatedMLP"), ("leaf", "Linear"), ("mixing", "Mixing"), ("leaf", "RMSNorm")]
)
def test_a_row_that_forgets_what_it_keeps_is_found(monkeypatch: pytest.MonkeyPatch, where: str, name: str) -> None:
    kind = getattr(import_module(f"scantling.parts.{where}"), name)
    right = kind.steps

    def forgetful(self: Any, *asked: Any) -> Any:
        for step in right(self, *asked):
            yield replace(step, saved=step.saved[1:])

    monkeypatch.setattr(kind, "steps", forgetful)
    with pytest.raises(AssertionError):
        check(CARDS["llama"], SHORT)


def test_what_is_kept_and_never_used_is_seen_and_then_gone() -> None:
    """The two counts of the hooks differ where a graph is thrown away."""
    x = torch.ones(4, requires_grad=True)
    with Kept([x]) as kept:
        thrown = (x + 1).exp()
        used = (x + 2).exp()
    assert kept.nbytes == kept.nbytes_now == 32
    del thrown
    assert (kept.nbytes, kept.nbytes_now) == (32, 16)
    assert used.sum() > 0


class TestPolicies:
    def test_both_rooms_know_the_same(self) -> None:
        assert RUN == POLICIES
        with pytest.raises(sc.ScantlingInputError, match="'all'; use one of none, selective, block"):
            Workload(recompute="all")
        with pytest.raises(sc.ScantlingInputError, match="unknown recompute policy 'all'"):
            Context(1, 1, torch.device("cpu"), recompute="all")

    @pytest.mark.parametrize("recompute", ["selective", "block"])
    @pytest.mark.parametrize("name", ["llama", "post-norm with dropout", "mixtral", "latent", "bert", "t5", "2017"])
    def test_gradients_are_the_same(self, name: str, recompute: str) -> None:
        """Dropout included: the random numbers are those of the first time."""
        net, found = strong(CARDS[name]).train(), []
        for policy in ("none", recompute):
            torch.manual_seed(5)
            net.zero_grad()
            loss, out = forward(net, replace(SHORT, recompute=policy))
            (out.sum() if loss is None else loss).backward()
            found.append({path: weight.grad.clone() for path, weight in net.named_parameters() if weight.requires_grad})
        for path, gradient in found[0].items():
            torch.testing.assert_close(found[1][path], gradient, rtol=0, atol=0, msg=path)

    def test_without_gradients_nothing_is_done_twice(self) -> None:
        net, calls = strong(CARDS["llama"]), []
        net.decoder.blocks[0].mlp.up.register_forward_hook(lambda *_: calls.append(1))
        with torch.no_grad():
            forward(net, replace(SHORT, recompute="block"))
        assert calls == [1]

    @pytest.mark.parametrize("kernel", KERNELS)
    @pytest.mark.parametrize("card", CARDS.values(), ids=CARDS)
    def test_flops_of_the_second_time(self, card: Card, kernel: str) -> None:
        """The count of a step's products is three forwards and what is computed again, by torch's own counter."""
        model = sc.assemble(card)
        net = model.build().train()
        for recompute in POLICIES:
            w = replace(SHORT, kernel=kernel, recompute=recompute)
            with FlopCounterMode(display=False, custom_mapping=FUSED) as counter:
                loss, out = forward(net, w)
                (out.sum() if loss is None else loss).backward()
            assert counter.get_total_flops() == 3 * flops(model, w).forward + recomputed(model, w), recompute

    @SAMPLED
    @given(sampled_cards(), st.sampled_from(KERNELS), st.sampled_from(POLICIES))
    def test_flops_of_a_step_of_sampled_cards(self, card: Card, kernel: str, recompute: str) -> None:
        model, w = sc.assemble(card), replace(SHORT, kernel=kernel, recompute=recompute)
        net = model.build().train()
        with FlopCounterMode(display=False, custom_mapping=FUSED) as counter:
            loss, out = forward(net, w)
            (out.sum() if loss is None else loss).backward()
        assert counter.get_total_flops() == 3 * flops(model, w).forward + recomputed(model, w)

    def test_the_last_product_of_a_block_is_not_repeated(self) -> None:
        """Of a block of 12 d^2 the down-projection, 4 d^2, has a result that no gradient needs."""
        model = sc.assemble(CARDS["gpt2"])
        d, n = 24, SHORT.batch * SHORT.tokens
        w = replace(SHORT, recompute="block")
        block = flops(model, w).forward - 2 * n * d * model.head.rows
        assert recomputed(model, w) == block - 2 * 2 * n * 4 * d * d
        assert recomputed(model, SHORT) == 0


def _fused_flops(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    (b, h, t, d), s = q, k[2]
    return 2 * b * h * t * s * (d + v[3])


def _fused_backward_flops(grad: Any, q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    return 2 * _fused_flops(q, k, v)


ATEN = torch.ops.aten
FUSED = {
    ATEN._scaled_dot_product_flash_attention_for_cpu: _fused_flops,
    ATEN._scaled_dot_product_flash_attention_for_cpu_backward: _fused_backward_flops,
}
"""Torch's counter does not know the fused kernel of the CPU; its two products, and four for the backward."""
