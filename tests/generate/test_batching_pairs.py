"""Continuous batching of encoder-decoders: what each source gives alone, whoever joins and leaves; bounded memory."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tests.cases.small import LLAMA, built, card, tokens
from tests.conftest import GOLDEN, stacks_of
from tests.test_golden_seq2seq import close

import scantling as sc
from scantling.generate.batching import Engine, Limits, in_order
from scantling.generate.engine import Options
from scantling.generate.keeping import Keeping
from scantling.generate.request import Request
from scantling.generate.sample import Sampling
from scantling.numbers.cache import blocks_needed, cache_bytes, paged_bytes
from scantling.numbers.memory import memory
from scantling.parts.part import Workload
from scantling.tensor.paged import Blocks

PAIRS = sorted(p.name for p in (GOLDEN / "tiny").iterdir() if stacks_of(p.name) == "encoder-decoder")
ON = Options(ignore_eos=True)
SAMPLED = Sampling(temperature=1.0, seed=5, top_k=40)


def alone(lm: sc.Model, source: list[int], new: int, how: Sampling | None = None, on: Options = ON) -> list[int]:
    """By a session of this source."""
    return lm.generate([source], new, sampling=how or Sampling(), options=on)[0, 1:].tolist()


def pair(seed: int = 0, **changes: Any) -> sc.Model:
    return replace(built(card({**LLAMA, "family": "encoder-decoder"}, **changes), seed=seed), start_id=3)


@contextmanager
def encodings(lm: sc.Model) -> Iterator[list[tuple[int, int]]]:
    """Rows and tokens of each pass of the encoder."""
    found: list[tuple[int, int]] = []
    encoder: Any = lm.net.encoder
    hook = encoder.register_forward_hook(lambda _, read, __: found.append((read[0].shape[0], read[0].shape[1])))
    try:
        yield found
    finally:
        hook.remove()


@pytest.fixture(scope="module", params=PAIRS)
def case(request: pytest.FixtureRequest) -> tuple[sc.Model, dict[str, Any]]:
    folder = GOLDEN / "tiny" / request.param
    return sc.load(folder), load_file(folder / "io.safetensors")


@pytest.mark.parametrize("numbers", ["plain", "int8"])
def test_requests_that_join_and_leave_give_what_each_gives_alone(case: Any, numbers: str) -> None:
    """Paged equals full, and the recorded logits: blocks of 4, at most 3 at once, a cache that is too small."""
    lm, io = case
    rows = zip(io["gen_input_ids"], io["gen_attention_mask"].bool(), strict=True)
    sources = [row[mask].tolist() for row, mask in rows]
    sources += [sources[0][:6] + sources[1][:3], sources[0][:5], [7, 1], sources[0]]
    news = [20, 20, 13, 9, 4, 15]
    hows = [Sampling()] * 4 + [SAMPLED] * 2
    engine = Engine(lm, Limits(rows=3, positions=40, block=4, chunk=30, numbers=numbers, sources=64))
    asked = Options(ignore_eos=True, logprobs=0)
    handles = []
    with encodings(lm) as passes:
        for source, new, how in zip(sources, news, hows, strict=True):
            handles.append(engine.submit(Request(source, new, how, asked)))
            engine.step()
            engine.step()
        engine.run()
    assert engine.preempted > 0
    assert sum(rows for rows, _ in passes) == len(sources)
    keeping = Options(ignore_eos=True, keeping=Keeping(numbers=numbers))
    for handle, source, new, how in zip(handles, sources, news, hows, strict=True):
        assert handle.ids == alone(lm, source, new, how, keeping)
        assert handle.result().finish_reason == "length"
    assert (engine.blocks.free, engine.sources.free) == (engine.blocks.count, engine.sources.count) == (10, 16)
    if numbers == "plain":
        for handle, ids, logits in zip(handles[:2], io["expected_ids"][:, 1:], io["gen_logits"], strict=True):
            assert handle.ids == ids.tolist()
            found = torch.tensor([token.logprob for token in handle.result().logprobs or ()])
            torch.testing.assert_close(found, logits.log_softmax(-1).gather(1, ids[:, None])[:, 0], **close(lm))


def test_unequal_sources_in_one_call(case: Any) -> None:
    lm, _ = case
    sources = [[5, 9, 11, 7, 30, 8, 1], [12, 1], [3, 3, 40, 41, 1]]
    rows = lm.generate(sources, 12, ignore_eos=True)
    assert rows == [[lm.start_id, *alone(lm, source, 12)] for source in sources]
    drawn = lm.generate(sources, 12, ignore_eos=True, temperature=1.0, seed=3)
    assert drawn == [[lm.start_id, *alone(lm, source, 12, Sampling(1.0, seed=3))] for source in sources]


LENGTHS: dict[str, dict[str, Any]] = {
    "dynamic": {"kind": "dynamic", "factor": 4.0, "trained_length": 8},
    "longrope": {
        "kind": "longrope",
        "trained_length": 8,
        "short_factor": [1.0, 1.0, 1.0, 1.0],
        "long_factor": [1.0, 2.0, 4.0, 8.0],
    },
}


@pytest.mark.parametrize("scaling", LENGTHS.values(), ids=LENGTHS)
def test_angles_that_follow_the_length_of_each_own_source(scaling: dict[str, Any]) -> None:
    """No source is padded to another one's length, which would turn it by other angles."""
    lm = pair(position={"scaling": scaling})
    sources = [tokens(n, seed=n)[0].tolist() for n in (4, 8, 9, 20)]
    with encodings(lm) as passes:
        handles = list(in_order(lm, [Request(source, 14, options=ON) for source in sources]))
    assert passes == [(1, len(source)) for source in sources]
    assert [handle.ids for handle in handles] == [alone(lm, source, 14) for source in sources]


def test_windows_of_both_stacks() -> None:
    lm = pair(attention={"window": 5})
    sources = [tokens(n, seed=n)[0].tolist() for n in (3, 9, 17)]
    handles = in_order(lm, [Request(source, 12, options=ON) for source in sources])
    assert [handle.ids for handle in handles] == [alone(lm, source, 12) for source in sources]


SMALL = pair(vocab_size=8, n_layers=1)


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10**6))
def test_any_traffic_ends_with_what_each_gives_alone(seed: int) -> None:
    lm, draw = SMALL, random.Random(seed)
    block = draw.randint(1, 5)
    engine = Engine(
        lm,
        Limits(draw.randint(1, 4), positions=draw.randint(20, 40), block=block, chunk=draw.randint(1, 20), sources=24),
    )
    sent = []
    for _ in range(draw.randint(1, 7)):
        source = [draw.randrange(3) for _ in range(draw.randint(1, 20))]
        how = Sampling(temperature=float(draw.randrange(2)), seed=draw.randrange(9))
        sent.append((engine.submit(Request(source, draw.randint(1, 12), how, ON)), source))
        for _ in range(draw.randint(0, 6)):
            engine.step()
        if draw.random() < 0.2:
            draw.choice(sent)[0].cancel()
    engine.run()
    assert (engine.blocks.free, engine.sources.free) == (engine.blocks.count, engine.sources.count)
    for handle, source in sent:
        wanted = alone(lm, source, handle.limit, handle.request.sampling)
        assert handle.ids == wanted[: len(handle.ids)]
        assert handle.finish_reason == "cancelled" or handle.ids == wanted


def test_the_same_words_of_other_sources_share_no_block() -> None:
    """Targets that are forced to be the same, in a cache so small that they are read again."""
    lm = pair()
    force, asked = Sampling(logit_bias={5: 100.0}), Options(ignore_eos=True, logprobs=2)
    sources = [tokens(6, seed=seed)[0].tolist() for seed in range(3)]
    engine = Engine(lm, Limits(block=2, positions=28, chunk=64))
    handles = [engine.submit(Request(source, 12, force, asked)) for source in sources]
    while engine.busy:
        engine.step()
        held = [block for handle in handles for block in handle.table]
        assert len(held) == len(set(held))
    assert engine.preempted > 0
    assert engine.shared > 0  # its own blocks, that nobody had needed since
    for handle, source in zip(handles, sources, strict=True):
        (single,) = in_order(lm, [Request(source, 12, force, asked)])
        assert handle.ids == [5] * 12
        for found, wanted in zip(handle.result().logprobs or (), single.result().logprobs or (), strict=True):
            assert [i for i, _ in found.top] == [i for i, _ in wanted.top]
            assert [p for _, p in found.top] == pytest.approx([p for _, p in wanted.top], abs=1e-4)


def test_beginnings_are_known_by_what_they_depend_on() -> None:
    blocks = Blocks(3, 2)
    a = blocks.take()
    chain = blocks.publish(a, (7, 8), [1, 2])
    assert blocks.begin([1, 2, 3], (7, 8)) == ([a], chain)
    assert blocks.begin([1, 2, 3], (7, 9)) == ([], (7, 9))
    assert blocks.begin([1, 2, 3]) == ([], 0)


def test_short_sources_go_through_together_and_a_long_one_whole() -> None:
    lm = pair()
    short = [tokens(n, seed=n)[0].tolist() for n in (3, 5, 4, 5)]
    engine = Engine(lm, Limits(chunk=20, block=4, positions=256))
    handles = [engine.submit(Request(source, 6, options=ON)) for source in short]
    long = engine.submit(Request(tokens(40)[0].tolist(), 6, options=ON))
    with encodings(lm) as passes:
        engine.step()
        assert passes == [(4, 5)]
        assert [len(handle.ids) for handle in handles] == [2, 2, 2, 2]
        assert not long.ids
        engine.step()
        assert passes == [(4, 5), (1, 40)]
        assert [len(handle.ids) for handle in handles] == [3, 3, 3, 3]
        assert len(long.ids) == 2


def test_a_source_waits_for_room_and_the_first_is_never_sent_back() -> None:
    """Sources of 8 in a cache of 20 of them: two at once, in their order, though blocks of targets are free."""
    lm = pair()
    engine = Engine(lm, Limits(block=4, positions=200, sources=20))
    sources = [tokens(8, seed=seed)[0].tolist() for seed in range(5)]
    handles = [engine.submit(Request(source, 6, options=ON)) for source in sources]
    ended: list[int] = []
    while engine.busy:
        ended += [handle.number for handle in engine.step()]
        assert len(engine.prefilling) + len(engine.decoding) <= 2
        assert sum(len(handle.source_table) for handle in handles) + engine.sources.free == 5
    assert ended == [1, 2, 3, 4, 5]
    assert engine.preempted == 0
    assert [handle.ids for handle in handles] == [alone(lm, source, 6) for source in sources]


@pytest.mark.parametrize("numbers", ["plain", "int8"])
def test_memory_is_what_the_account_says_and_does_not_grow(case: Any, numbers: str) -> None:
    lm, _ = case
    engine = Engine(lm, Limits(block=8, positions=100, numbers=numbers, sources=60))
    before = engine.cache.nbytes
    assert before == paged_bytes(lm.parts, 12, 8, "float32", numbers, 7)
    handle = engine.submit(Request(list(range(2, 15)), 18, options=ON))
    engine.run()
    assert engine.cache.nbytes == before
    # The start and 17 tokens that were read again, the last one is not; and 13 of the source.
    held = [blocks_needed([length], 8) for length in (18, 13)]
    assert held == [3, 2]
    bytes_held = paged_bytes(lm.parts, held[0], 8, "float32", numbers, held[1])
    assert handle.result().cache_bytes == bytes_held
    account = memory(lm.parts, Workload(tokens=18, source=13), "float32", "float32", page=8, numbers=numbers)
    assert account.kv == bytes_held


def test_bytes_of_blocks_that_are_filled_are_those_of_a_whole_cache() -> None:
    """Cross-attention with heads of its own: of 3 blocks of targets and 5 of sources."""
    parts = sc.assemble(
        card({**LLAMA, "family": "encoder-decoder"}, decoder={"cross": {"n_heads": 2, "n_kv_heads": 1}})
    )
    texts, sources = 4 * 2 * 2 * (2 * 8), 4 * 2 * 2 * (1 * 8)
    assert paged_bytes(parts, 3, 16, "float32", source_blocks=5) == 16 * (3 * texts + 5 * sources)
    assert cache_bytes(parts, Workload(tokens=48, source=80), "float32") == 16 * (3 * texts + 5 * sources)


def test_alone_in_the_batch_to_the_last_bit() -> None:
    lm, asked = pair(), Options(logprobs=0, ignore_eos=True)
    limits = Limits(invariant=True, positions=512, chunk=8)
    request = Request(tokens(11)[0].tolist(), 9, options=asked)
    single, crowd = Engine(lm, limits), Engine(lm, limits)
    first = single.submit(request)
    single.run()
    for n in (3, 20):
        crowd.submit(Request(tokens(n, seed=n)[0].tolist(), 7, options=ON))
    second = crowd.submit(request)
    with encodings(lm) as passes:
        crowd.run()
    assert sorted(passes) == [(1, 3), (1, 11), (1, 20)]
    assert first.result().logprobs == second.result().logprobs


def test_5_000_tokens_leave_nothing_behind() -> None:
    import gc

    def held() -> int:
        gc.collect()
        return sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())

    engine, counts = Engine(SMALL, Limits(rows=20, positions=1024, block=8)), []
    for turn in range(5):
        handles = [engine.submit(Request([turn, i % 8], 50, options=ON)) for i in range(20)]
        engine.run()
        assert sum(len(handle.ids) for handle in handles) == 1000
        del handles
        counts.append(held())
    assert max(counts) == counts[0]
    assert (engine.blocks.free, engine.sources.free) == (engine.blocks.count, engine.sources.count)


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (lambda: Request([1] * 21, 6), "a source of 21 tokens needs 6 blocks of 4 positions and the cache has 5"),
        (lambda: Request([1], 60), "60 new tokens need 16 blocks of 4 positions and the cache has 10"),
        (lambda: Request([]), "at least one row of one token"),
        (lambda: Request([99]), "token id 99 is outside"),
    ],
)
def test_requests_that_cannot_be_are_refused_at_once(request_: Callable[[], Request], words: str) -> None:
    engine = Engine(pair(), Limits(block=4, positions=40, sources=20))
    with pytest.raises(sc.ScantlingInputError, match=words):
        engine.submit(request_())
    assert not engine.busy


def test_a_model_that_does_not_say_how_targets_begin_is_refused() -> None:
    with pytest.raises(sc.ScantlingInputError, match="does not say with what a target begins"):
        Engine(replace(pair(), start_id=None)).submit(Request([5]))
