"""Who reads whom: windows, chunks, strides and prefixes against papers, other software and gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.test_laws import BASE, CLOSE, ids_of, run, strong

import scantling as sc
from scantling.cards.read import from_dict
from scantling.checkpoint.hf_config import card_of_config
from scantling.errors import ScantlingInputError
from scantling.generate.engine import Session
from scantling.model import Model
from scantling.numbers.flops import flops
from scantling.parts.part import Workload
from scantling.tensor.cache import Cache
from scantling.tensor.context import Context
from scantling.tensor.mask import Seen
from scantling.visibility import Visibility

HEADS = {"kind": "multi_head", "n_heads": 4, "n_kv_heads": 2, "d_head": 6}


def reading(reach: dict[str, Any], **changes: Any) -> Any:
    return from_dict({**BASE, "n_layers": 1, "attention": {**HEADS, **reach}, **changes}, "reach")


def model_of(card: Any) -> Model:
    return Model(card, sc.assemble(card), strong(card))


@st.composite
def visibilities(draw: st.DrawFn) -> Visibility:
    causal = draw(st.booleans())
    prefix = causal and draw(st.booleans())
    size = st.integers(1, 14)
    every = draw(size)
    return draw(
        st.sampled_from(
            [
                Visibility(causal, prefix=prefix),
                Visibility(causal, draw(size), prefix=prefix),
                Visibility(causal, chunk=draw(size), prefix=prefix),
                Visibility(causal, stride=every, prefix=prefix),
                Visibility(causal, draw(size), stride=every, prefix=prefix),
                Visibility(causal, stride=every, last=draw(st.integers(1, every)), prefix=prefix),
                Visibility(causal, chunk=every, stride=every, last=draw(st.integers(1, every)), prefix=prefix),
            ]
        )
    )


@settings(max_examples=400)
@given(visibilities(), st.integers(1, 25), st.integers(0, 25), st.integers(0, 30))
def test_pairs_and_spans_are_those_of_the_predicate(v: Visibility, tokens: int, past: int, prefix: int) -> None:
    keys = past + tokens
    seen = {q: [k for k in range(keys) if v.sees(q, k, prefix)] for q in range(past, keys)}
    assert v.pairs(tokens, past, prefix) == sum(map(len, seen.values()))
    for first in range(past, keys):
        start, end = v.span(first, keys - 1, keys, prefix)
        assert all(start <= k < end for q in range(first, keys) for k in seen[q])
    assert all(q in ks for q, ks in seen.items())
    if past == 0 and not v.prefix:
        full = tokens * (tokens + 1) // 2 if v.causal else tokens**2
        assert v.narrows(keys) or v.pairs(tokens) == full


@given(visibilities(), st.integers(1, 9), st.integers(0, 9), st.integers(0, 12))
def test_the_mask_of_tensors_is_the_predicate_of_integers(v: Visibility, tokens: int, past: int, prefix: int) -> None:
    lengths = torch.tensor([prefix, 0])
    rows = Seen(v, past, tokens, None, torch.device("cpu"), lengths).rows(0, tokens)
    for row, length in enumerate(lengths.tolist()):
        for q in range(tokens):
            for k in range(past + tokens):
                assert bool(rows[row % rows.shape[0], 0, q, k]) == v.sees(past + q, k, length)


def test_the_counts_are_instant_at_any_length() -> None:
    n = 10**12
    assert Visibility(chunk=8192).pairs(8192 * n) == n * 8192 * 8193 // 2
    assert Visibility(stride=128).pairs(128 * n) == 128 * n * (n + 1) // 2
    assert Visibility(False, 1).pairs(n) == n


def test_the_sets_of_the_sparse_transformer_paper() -> None:
    """arXiv:1904.10509, section 4.3: A(1) = {t .. i}, t = max(0, i - l), and A(2) = {j : (i - j) mod l = 0}; then
    A(1) = {j : floor(j / l) = floor(i / l)} and A(2) = {j : j mod l in {t .. l}}, t = l - c."""
    n, l, c = 40, 6, 2
    strided, band = Visibility(stride=l), Visibility(window=l + 1)
    both, fixed = Visibility(window=l + 1, stride=l), Visibility(chunk=l, stride=l, last=c)
    for i in range(n):
        near, far = set(range(max(0, i - l), i + 1)), {j for j in range(i + 1) if (i - j) % l == 0}
        block = {j for j in range(i + 1) if j // l == i // l}
        summaries = {j for j in range(i + 1) if l - c <= j % l <= l}
        assert {j for j in range(n) if band.sees(i, j)} == near
        assert {j for j in range(n) if strided.sees(i, j)} == far
        assert {j for j in range(n) if both.sees(i, j)} == near | far
        assert {j for j in range(n) if fixed.sees(i, j)} == block | summaries
        assert {j for j in range(n) if Visibility(stride=l, last=c).sees(i, j)} == summaries | {i}


@pytest.mark.parametrize("left", [0, 1, 5])
def test_chunks_stand_where_transformers_puts_them(left: int) -> None:
    from transformers.masking_utils import chunked_causal_mask_function

    theirs = chunked_causal_mask_function(4, torch.tensor([left]))
    padding = torch.arange(15)[None] >= left
    ours = Seen(Visibility(chunk=4), 0, 15, padding, torch.device("cpu")).rows(0, 15)[0, 0]
    for q in range(left, 15):
        assert ours[q].tolist() == [
            bool(theirs(0, 0, torch.tensor(q), torch.tensor(k))) and k >= left for k in range(15)
        ]


REACHES: dict[str, dict[str, Any]] = {
    "window": {"window": 3},
    "chunk": {"chunk": 3},
    "strided": {"stride": {"every": 3}},
    "band": {"window": 2, "stride": {"every": 4}},
    "fixed": {"stride": {"every": 4, "last": 1}},
    "blocks": {"chunk": 4, "stride": {"every": 4, "last": 2}},
    "prefix": {"prefix": True},
    "prefix in a window": {"prefix": True, "window": 3},
    "prefix in chunks": {"prefix": True, "chunk": 3},
}


@pytest.mark.parametrize("kernel", ["fused", "reference"])
@pytest.mark.parametrize("reach", REACHES.values(), ids=REACHES)
def test_gradients_flow_where_the_predicate_says_and_nowhere_else(reach: dict[str, Any], kernel: str) -> None:
    card = reading(reach, position={"kind": "none"})
    net, ids, prefix = strong(card), ids_of(card, 2, 10), torch.tensor([6, 2])
    v = next(part.visibility for _, part, _ in sc.assemble(card).walk() if hasattr(part, "visibility"))
    stream: list[torch.Tensor] = []

    def keep(_: Any, __: Any, out: torch.Tensor) -> torch.Tensor:
        stream.append(out.detach().requires_grad_(True))
        return stream[-1]

    net.embed.register_forward_hook(keep)
    logits = run(net, ids, kernel_name=kernel, prefix_lengths=prefix)
    for t in range(10):
        (grad,) = torch.autograd.grad(logits[:, t].square().sum(), stream[0], retain_graph=True)
        for row in range(2):
            read = [bool(torch.count_nonzero(grad[row, k])) for k in range(10)]
            assert read == [v.sees(t, k, int(prefix[row])) for k in range(10)]


@pytest.mark.parametrize("reach", REACHES.values(), ids=REACHES)
def test_long_rows_go_through_blocks_of_queries(reach: dict[str, Any]) -> None:
    """More queries than a block of the fused kernel, padded rows among them, against the written-out reference."""
    card = reading(reach, n_layers=2, context=1024)
    net, ids, prefix = strong(card), ids_of(card, 2, 600), torch.tensor([300, 5])
    mask = torch.ones(2, 600, dtype=torch.bool)
    mask[1, :7] = False
    for padding in (None, mask):
        one, two = (
            run(net, ids, kernel_name=kernel, padding=padding, prefix_lengths=prefix)
            for kernel in ("fused", "reference")
        )
        real = mask if padding is not None else torch.ones_like(mask)
        torch.testing.assert_close(one[real], two[real], **CLOSE)


class TestPrefix:
    CARD = reading({"prefix": True}, n_layers=2)

    def test_padding_and_neighbours_change_no_real_token(self) -> None:
        model = model_of(self.CARD)
        ids, other = ids_of(self.CARD, 1, 7), ids_of(self.CARD, 1, 10, seed=5)
        alone = model.logits(ids, prefix_lengths=[4])
        for left in (0, 1, 3):
            row = other.clone()
            row[0, left : left + 7] = ids[0]
            mask = torch.zeros(1, 10, dtype=torch.int64)
            mask[0, left : left + 7] = 1
            mask = torch.cat([mask, torch.ones_like(mask)])
            positions = (mask.cumsum(-1) - 1).clamp(min=0)
            out = model.logits(torch.cat([row, other]), mask, positions, prefix_lengths=[4, 9])
            torch.testing.assert_close(out[:1, left : left + 7], alone, **CLOSE)

    def test_length_0_and_1_are_causal_and_the_whole_row_is_bidirectional(self) -> None:
        model, ids = model_of(self.CARD), ids_of(self.CARD, 1, 6)
        causal = model.logits(ids)
        for length in (0, 1):
            assert torch.equal(model.logits(ids, prefix_lengths=[length]), causal)
        whole = model.logits(ids, prefix_lengths=[6])
        changed = ids.clone()
        changed[0, 5] = (ids[0, 5] + 1) % self.CARD.vocab_size
        moved = (model.logits(changed, prefix_lengths=[6]) - whole).abs().amax(-1)[0]
        assert bool((moved > 1e-3).all())

    @pytest.mark.parametrize("kernel", ["fused", "reference"])
    def test_cached_decoding_equals_one_pass_once_the_prefix_is_in(self, kernel: str) -> None:
        net, ids, prefix = strong(self.CARD), ids_of(self.CARD, 2, 12), torch.tensor([5, 3])
        whole = run(net, ids, prefix_lengths=prefix, kernel_name=kernel)
        cache = Cache(sc.assemble(self.CARD).named_state(Workload(batch=2, tokens=12)), torch.float32, "cpu")
        pieces = []
        for start, end in ((0, 5), (5, 6), (6, 10), (10, 12)):
            pieces.append(run(net, ids[:, start:end], cache=cache, prefix_lengths=prefix, kernel_name=kernel))
            cache.advance(end - start)
        torch.testing.assert_close(torch.cat(pieces, 1), whole, **CLOSE)
        assert not torch.allclose(whole, run(net, ids), atol=1e-2)

    def test_a_prefix_that_is_cut_is_refused(self) -> None:
        net, ids, prefix = strong(self.CARD), ids_of(self.CARD, 1, 6), torch.tensor([5])
        cache = Cache(sc.assemble(self.CARD).named_state(Workload(tokens=6)), torch.float32, "cpu")
        with pytest.raises(ScantlingInputError, match="a prefix of 5 tokens goes into a cache in one pass"):
            Context.of(ids[:, :3], cache=cache, prefix_lengths=prefix)
        run(net, ids[:, :3], cache=cache)
        cache.advance(3)
        with pytest.raises(ScantlingInputError, match="positions 3 to 5"):
            Context.of(ids[:, 3:], cache=cache, prefix_lengths=prefix)

    def test_generation_takes_the_prompt_as_the_prefix(self) -> None:
        model, ids = model_of(self.CARD), ids_of(self.CARD, 2, 6)
        mask = torch.ones(2, 6, dtype=torch.int64)
        mask[1, :2] = 0
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        session = Session(model, 2, 8)
        first = session.prefill(ids, mask)
        wanted = model.logits(ids, mask, positions, prefix_lengths=[6, 4])[:, -1]
        torch.testing.assert_close(first, wanted, **CLOSE)
        new = first.argmax(-1)
        longer, real = torch.cat([ids, new[:, None]], 1), torch.cat([mask, mask.new_ones(2, 1)], 1)
        wanted = model.logits(longer, real, (real.cumsum(-1) - 1).clamp(min=0), prefix_lengths=[6, 4])[:, -1]
        torch.testing.assert_close(session.step(new), wanted, **CLOSE)
        assert model.generate(ids, 2, attention_mask=mask)[:, 6].tolist() == new.tolist()

    def test_the_flops_count_each_rows_pairs(self) -> None:
        model = sc.assemble(self.CARD)
        per_pair = 2 * 2 * self.CARD.attention.n_heads * self.CARD.attention.d_head * self.CARD.n_layers
        causal = flops(model, Workload(batch=2, tokens=10)).forward_visible
        both = flops(model, Workload(batch=2, tokens=10, prefix_lengths=(6, 3))).forward_visible
        # p positions see p^2 pairs among themselves instead of p (p + 1) / 2.
        assert both - causal == per_pair * (6 * 5 // 2 + 3 * 2 // 2)
        with pytest.raises(ScantlingInputError, match="a length of at least 0 for each of 2 rows"):
            Workload(batch=2, tokens=10, prefix_lengths=(6,))

    @pytest.mark.parametrize(
        ("lengths", "message"),
        [
            ([7], "the rows have \\[6\\] tokens"),
            ([-1], "at least 0"),
            ([1, 2], "for each of 1 rows"),
            ([0.5], "float32"),
        ],
    )
    def test_lengths_that_no_row_can_have_are_refused(self, lengths: list[Any], message: str) -> None:
        with pytest.raises(ScantlingInputError, match=message):
            model_of(self.CARD).logits(ids_of(self.CARD, 1, 6), prefix_lengths=lengths)

    def test_a_card_without_prefix_refuses_lengths(self) -> None:
        with pytest.raises(ScantlingInputError, match=r"needs attention\.prefix"):
            model_of(reading({})).logits([1, 2, 3], prefix_lengths=[2])


@pytest.mark.parametrize(
    ("reach", "message"),
    [
        ({"window": 4, "chunk": 4}, "attention.chunk is 4: there is a window of 4 already"),
        ({"chunk": 4, "stride": {"every": 4}}, "attention.stride.last is None: distances go with a window"),
        (
            {"window": 4, "stride": {"every": 4, "last": 1}},
            "attention.stride.last is 1: fixed positions go with a chunk",
        ),
        ({"stride": {"every": 4, "last": 5}}, "attention.stride.last is 5: it cannot exceed every 4"),
        ({"chunk": 8, "stride": {"every": 4, "last": 1}}, "attention.stride.every is 4: it must be the chunk, 8"),
        ({"kind": "hashed"}, "attention.kind is 'hashed': hashed attention .Reformer, arXiv:2001.04451. finds"),
    ],
)
def test_contradictions_are_refused(reach: dict[str, Any], message: str) -> None:
    with pytest.raises(ScantlingInputError, match=message):
        reading(reach)


def test_a_pattern_names_a_contradiction_with_its_place() -> None:
    with pytest.raises(ScantlingInputError, match=r"pattern\[1\].attention.chunk is 4"):
        reading({"window": 3}, pattern=[{}, {"attention": {"chunk": 4}}])


def test_the_card_is_written_with_its_reach() -> None:
    card = reading({"chunk": 4, "stride": {"every": 4, "last": 2}, "prefix": True})
    assert "chunk: 4, stride: {every: 4, last: 2}, prefix: true" in sc.cards.to_yaml(card)


def test_hashed_models_are_refused_by_name() -> None:
    with pytest.raises(ScantlingInputError, match="model_type is 'reformer', which cannot be read: hashed attention"):
        card_of_config({"model_type": "reformer"}, "r", str(Path("config.json")))
