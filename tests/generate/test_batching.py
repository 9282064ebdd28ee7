"""Continuous batching: what each request gives alone, whoever joins and leaves; bounded memory; nobody starves."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tests.cases.small import LLAMA, built, card, tokens
from tests.conftest import GOLDEN, stacks_of

import scantling as sc
from scantling.generate.batching import Engine, Limits, in_order
from scantling.generate.engine import Options, complete
from scantling.generate.request import Request
from scantling.generate.sample import Sampling
from scantling.numbers.cache import blocks_needed, paged_bytes
from scantling.tensor.paged import Blocks

DECODERS = sorted(p.name for p in (GOLDEN / "tiny").iterdir() if stacks_of(p.name) == "decoder")
ON = Options(ignore_eos=True)


def alone(lm: sc.Model, prompt: list[int], new: int, sampling: Sampling | None = None) -> list[int]:
    rows = lm.generate([prompt], new, sampling=sampling or Sampling(), options=ON)
    return rows[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", DECODERS)
def test_requests_that_join_and_leave_give_what_each_gives_alone(name: str) -> None:
    """Paged equals full: unequal prompts in pieces of 3, blocks of 4, at most 3 at once, a cache that is too small."""
    lm, io = sc.load(GOLDEN / "tiny" / name), load_file(GOLDEN / "tiny" / name / "io.safetensors")
    rows = zip(io["gen_input_ids"], io["gen_attention_mask"].bool(), strict=True)
    prompts = [row[mask].tolist() for row, mask in rows]
    prompts += [prompts[0][:6] + prompts[1][:3], prompts[0][:5], [7]]
    news = [20, 13, 20, 9, 4, 15]
    engine = Engine(lm, Limits(rows=3, positions=60, block=4, chunk=3))
    handles = []
    for prompt, new in zip(prompts, news, strict=True):
        handles.append(engine.submit(Request(prompt, new, options=Options(ignore_eos=True, logprobs=0))))
        engine.step()
        engine.step()
    engine.run()
    for handle, prompt, new in zip(handles, prompts, news, strict=True):
        assert handle.ids == alone(lm, prompt, new)
        assert handle.result().finish_reason == "length"
    assert engine.blocks.free == engine.blocks.count == 15
    wanted = io["expected_ids"][:, io["gen_input_ids"].shape[1] :]
    if name == "llama-rope-dynamic":
        return  # by design: recorded with the padded length
    assert handles[0].ids == wanted[0].tolist()
    for i in (0, 1, 2):
        found = torch.tensor([token.logprob for token in handles[i].result().logprobs or ()])
        logs = io["gen_logits"][i, : len(found)].log_softmax(-1)
        if handles[i].ids == wanted[i, : len(found)].tolist():
            torch.testing.assert_close(found, logs.gather(1, wanted[i, : len(found), None])[:, 0], atol=2e-4, rtol=1e-4)
        else:
            assert name == "phi3-longrope-long"  # by design: a row that is short on its own has the short factors


@pytest.mark.parametrize("name", ["llama-gqa", "marian"])
@pytest.mark.parametrize("failing", [0, 1, 2, 5])
def test_a_pass_that_fails_loses_no_request(name: str, failing: int) -> None:
    """Memory that is not there for one pass, of a prompt or of a step: the next run does all that was asked."""
    lm = sc.load(GOLDEN / "tiny" / name)
    engine = Engine(lm, Limits(rows=3, positions=120, block=4, chunk=6))
    prompts = [[5, 9, 3, 7, 11, 4, 8, 6], [12, 5], [7, 7, 9]]
    handles = [engine.submit(Request(prompt, 6, options=ON)) for prompt in prompts]
    passes = 0

    def fail(*_: Any) -> None:
        nonlocal passes
        passes += 1
        if passes == failing + 1:
            raise RuntimeError("not enough memory")

    hook = lm.net.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="not enough memory"):
        engine.run()
    hook.remove()
    engine.run()
    wanted = [lm.generate([prompt], 6, options=ON)[0, -6:].tolist() for prompt in prompts]
    assert [handle.ids for handle in handles] == wanted
    assert engine.blocks.free == engine.blocks.count


def test_a_crossing_of_longrope_is_each_requests_own() -> None:
    position = {
        "kind": "rope",
        "theta": 1e4,
        "scaling": {
            "kind": "longrope",
            "trained_length": 16,
            "short_factor": [1.0, 1.0, 1.0, 1.0],
            "long_factor": [1.0, 2.0, 4.0, 8.0],
        },
    }
    lm = built(card({**LLAMA, "position": position}))
    prompts = [tokens(n, seed=n)[0].tolist() for n in (4, 12, 16, 20)]
    handles = list(in_order(lm, [Request(prompt, 20) for prompt in prompts]))
    for handle, prompt in zip(handles, prompts, strict=True):
        assert handle.ids == alone(lm, prompt, 20)


def test_a_prompt_that_is_read_both_ways() -> None:
    lm = built(card(attention={"prefix": True}))
    prompts = [tokens(n, seed=n)[0].tolist() for n in (3, 9, 17)]
    engine = Engine(lm, Limits(chunk=2, block=4, positions=48))
    handles = [engine.submit(Request(prompt, 10)) for prompt in prompts]
    engine.run()
    assert [handle.ids for handle in handles] == [alone(lm, prompt, 10) for prompt in prompts]


@pytest.fixture(scope="module")
def lm() -> Any:
    return sc.load(GOLDEN / "tiny" / "llama-gqa")


def test_requests_have_settings_of_their_own(lm: Any) -> None:
    hows = [
        Sampling(),
        Sampling(temperature=1.0, seed=3),
        Sampling(temperature=1.0, seed=4, top_k=5),
        Sampling(repetition_penalty=2.0, no_repeat_ngram=2),
    ]
    handles = in_order(lm, [Request([5, 9, 11], 12, how, ON) for how in hows])
    assert [handle.ids for handle in handles] == [alone(lm, [5, 9, 11], 12, how) for how in hows]


def test_beginnings_are_shared(lm: Any) -> None:
    head = tokens(32, vocab=131)[0].tolist()
    engine = Engine(lm, Limits(block=8, positions=512))
    first = engine.submit(Request([*head, 5], 6, options=ON))
    engine.run()
    assert engine.shared == 0
    second = engine.submit(Request([*head, 6], 6, options=ON))
    third = engine.submit(Request([*head[:20], 7], 6, options=ON))
    whole = engine.submit(Request(head, 6, options=ON))
    engine.step()
    assert engine.shared == 32 + 16 + 24
    engine.run()
    assert first.ids == alone(lm, [*head, 5], 6)
    assert second.ids == alone(lm, [*head, 6], 6)
    assert third.ids == alone(lm, [*head[:20], 7], 6)
    assert whole.ids == alone(lm, head, 6)


def test_a_long_prompt_delays_the_others_by_a_piece_only(lm: Any) -> None:
    engine = Engine(lm, Limits(chunk=4, block=4, positions=256))
    short = engine.submit(Request([3, 4], 30, options=ON))
    engine.step()
    long = engine.submit(Request(tokens(40, vocab=131)[0].tolist(), 5, options=ON))
    for _ in range(9):
        before = len(short.ids)
        engine.step()
        assert len(short.ids) == before + 1
        assert not long.ids
    engine.step()
    assert long.ids


def test_a_short_prompt_passes_a_long_one(lm: Any) -> None:
    engine = Engine(lm, Limits(chunk=4, block=4, positions=256))
    long = engine.submit(Request(tokens(40, vocab=131)[0].tolist(), 5, options=ON))
    short = engine.submit(Request([3, 4], 5, options=ON))
    engine.step()
    engine.step()
    assert short.ids
    assert not long.ids


def test_the_first_to_come_is_never_sent_back(lm: Any) -> None:
    """A cache that holds one and a half of four requests: all end, the first in the fewest possible steps."""
    engine = Engine(lm, Limits(block=4, positions=40, rows=4))
    handles = [engine.submit(Request([1, 2, i], 25, options=ON)) for i in range(4)]
    steps = 0
    while not handles[0].finished:
        engine.step()
        steps += 1
        held = sum(len(handle.table) for handle in handles)
        assert held + engine.blocks.free >= engine.blocks.count
    assert steps == 24
    engine.run()
    assert engine.preempted > 0
    assert [handle.ids for handle in handles] == [alone(lm, [1, 2, i], 25) for i in range(4)]


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10**6))
def test_any_traffic_ends_with_what_each_gives_alone(seed: int) -> None:
    lm, draw = TINY, random.Random(seed)
    engine = Engine(
        lm, Limits(rows=draw.randint(1, 4), block=draw.randint(1, 5), positions=60, chunk=draw.randint(1, 9))
    )
    sent = []
    for _ in range(draw.randint(1, 7)):
        prompt = [draw.randrange(3) for _ in range(draw.randint(1, 20))]
        sent.append((engine.submit(Request(prompt, draw.randint(1, 12), options=ON)), prompt))
        for _ in range(draw.randint(0, 6)):
            engine.step()
        if draw.random() < 0.2:
            draw.choice(sent)[0].cancel()
    engine.run()
    assert engine.blocks.free == engine.blocks.count
    for handle, prompt in sent:
        wanted = alone(lm, prompt, handle.limit)
        assert handle.ids == wanted[: len(handle.ids)]
        assert handle.finish_reason == "cancelled" or handle.ids == wanted


TINY = built(card(vocab_size=8, n_layers=1))


@pytest.mark.parametrize("numbers", ["plain", "int8"])
def test_memory_is_what_the_account_says_and_does_not_grow(lm: Any, numbers: str) -> None:
    engine = Engine(lm, Limits(block=8, positions=100, numbers=numbers))
    assert engine.blocks.count == 12
    before = engine.cache.nbytes
    assert before == paged_bytes(lm.parts, 12, 8, "float32", numbers)
    handle = engine.submit(Request(list(range(1, 14)), 6, options=ON))
    engine.run()
    assert engine.cache.nbytes == before
    # 13 tokens of prompt and 5 that were read again: the last one is not.
    assert handle.result().cache_bytes == paged_bytes(lm.parts, blocks_needed([18], 8), 8, "float32", numbers)


def test_alone_in_the_batch_to_the_last_bit(smollm: Any) -> None:
    """The invariant engine gives the same log-probabilities, bit for bit, whatever else is in the batch."""
    asked = Options(logprobs=0, ignore_eos=True)
    request = Request("The capital of France is", 6, options=asked)
    limits = Limits(invariant=True, positions=1024, chunk=8)
    single = Engine(smollm, limits)
    first = single.submit(request)
    single.run()
    crowd = Engine(smollm, limits)
    others = [crowd.submit(Request(f"{'word ' * n}", 3, options=ON)) for n in (1, 5)]
    crowd.step()
    second = crowd.submit(request)
    crowd.run()
    assert all(other.finished for other in others)
    assert first.result().logprobs == second.result().logprobs


def test_10_000_tokens_leave_nothing_behind(lm: Any) -> None:
    """No tensor more after the last thousand than after the first, and no block that is not free."""
    import gc

    def tensors() -> int:
        gc.collect()
        return sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())

    engine = Engine(lm, Limits(rows=20, positions=1024, block=8))
    counts, written = [], 0
    for turn in range(10):
        handles = [engine.submit(Request([turn, i], 50, options=ON)) for i in range(20)]
        engine.run()
        written += sum(len(handle.ids) for handle in handles)
        del handles
        counts.append(tensors())
    assert written == 10_000
    assert max(counts) == counts[0]
    assert engine.blocks.free == engine.blocks.count
    assert len(engine.blocks._known) <= engine.blocks.count


def test_text_streams_and_stops(smollm: Any) -> None:
    whole = complete(smollm, "The capital of France is", 12, Sampling())
    stop = whole.text[8:12]
    engine = Engine(smollm, Limits(positions=2048))
    plain = engine.submit(Request("The capital of France is", 12))
    cut = engine.submit(Request("The capital of France is", 12, options=Options(stop=stop)))
    pieces = []
    while engine.busy:
        engine.step()
        pieces.append(plain.take())
    assert "".join(pieces) == plain.text == whole.text
    assert plain.result().ids == whole.ids
    assert cut.text == whole.text[: whole.text.find(stop)]
    assert cut.finish_reason == "stop"


def test_a_full_context_says_so(lm: Any) -> None:
    (handle,) = in_order(lm, [Request([7] * 60, 10, options=ON)])
    done = handle.result()
    assert (done.finish_reason, done.new_tokens, done.context_full) == ("length", 4, True)


def test_a_request_that_fails_leaves_the_others(lm: Any) -> None:
    engine = Engine(lm, Limits())
    good = engine.submit(Request([1, 2], 5, options=ON))
    bad = engine.submit(Request(list(range(40)), 20, Sampling(no_repeat_ngram=1, logit_bias={}), ON))
    worse = engine.submit(Request([1], 5, Sampling(logit_bias={500: 1.0}), ON))
    engine.run()
    assert good.ids == alone(lm, [1, 2], 5)
    assert bad.finish_reason == "length"
    assert worse.finish_reason == "error"
    with pytest.raises(sc.ScantlingInputError, match="logit_bias names token 500"):
        worse.result()


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (lambda: Request([]), "at least one row of one token"),
        (lambda: Request([[1, 2], [3, 4]]), "a request has one prompt, and 2 rows of ids are given"),
        (lambda: Request(None), "token ids are a list of integers"),
        (lambda: "w5", "'w5' is no request; give a scantling.generate.Request"),
        (lambda: Request([999]), "token id 999 is outside"),
        (lambda: Request([1] * 64), "the context holds 64"),
        (lambda: Request([1], 0), "max_new_tokens is 0"),
        (lambda: Request("text"), "no tokenizer"),
        (lambda: Request([1], 60), "need 16 blocks of 4 positions and the cache has 10"),
        (lambda: Request([1], options=Options(stop="x")), "stop strings need a tokenizer"),
        (lambda: Request([1], options=Options(chunk=3)), "settings of the engine"),
    ],
)
def test_requests_that_cannot_be_are_refused_at_once(lm: Any, request_: Any, words: str) -> None:
    engine = Engine(lm, Limits(block=4, positions=40))
    with pytest.raises(sc.ScantlingInputError, match=words):
        engine.submit(request_())
    assert not engine.busy


def test_engines_that_cannot_be(lm: Any) -> None:
    with pytest.raises(sc.ScantlingInputError, match="text is written by a decoder"):
        Engine(sc.load(GOLDEN / "tiny" / "bert"))
    for field in ("rows", "positions", "block", "chunk", "sources"):
        with pytest.raises(sc.ScantlingInputError, match=f"{field} is 0"):
            Limits(**{field: 0})
    with pytest.raises(sc.ScantlingInputError, match="has no block of 16"):
        Limits(positions=8)
    with pytest.raises(sc.ScantlingInputError, match="a cache of 15 positions has no block of 16"):
        Limits(sources=15)
    with pytest.raises(sc.ScantlingInputError, match="None is no model"):
        Engine(None)  # type: ignore[arg-type]
    with pytest.raises(sc.ScantlingInputError, match="limits is 'x'"):
        Engine(lm, "x")  # type: ignore[arg-type]
    with pytest.raises(sc.ScantlingInputError, match="invariant is 'no'; True or False is needed"):
        Limits(invariant="no")  # type: ignore[arg-type]
    with pytest.raises(sc.ScantlingInputError, match="not finished"):
        Engine(lm).submit(Request([1])).result()


class TestBlocks:
    def test_a_block_is_known_until_its_place_is_needed(self) -> None:
        blocks = Blocks(2, 2)
        a = blocks.take()
        chain = blocks.publish(a, 0, [1, 2])
        blocks.give_back([a])
        assert blocks.begin([1, 2, 3]) == ([a], chain)
        assert blocks.begin([1, 2]) == ([], 0)
        assert blocks.begin([2, 1, 3]) == ([], 0)
        blocks.give_back([a])
        assert blocks.free == 2
        assert sorted((blocks.take(), blocks.take())) == [0, 1]
        assert blocks.begin([1, 2, 3]) == ([], 0)
        with pytest.raises(sc.ScantlingInputError, match="all 2 blocks of the cache are held"):
            blocks.take()

    def test_what_one_still_holds_is_not_given_to_another(self) -> None:
        blocks = Blocks(2, 1)
        a = blocks.take()
        blocks.publish(a, 0, [9])
        held, _ = blocks.begin([9, 8])
        assert held == [a]
        blocks.give_back([a])
        assert blocks.free == 1
        assert blocks.take() != a


def test_a_batch_of_texts_or_of_unequal_rows_in_one_call(smollm: Any, lm: Any) -> None:
    texts = ["The capital of France is", "Hello", "One two three four five six seven"]
    assert smollm.generate(texts, 5) == [smollm.generate(text, 5) for text in texts]
    rows = lm.generate([[5, 9, 11], [7], [1, 2]], 6, ignore_eos=True)
    assert rows == [[*prompt, *alone(lm, prompt, 6)] for prompt in ([5, 9, 11], [7], [1, 2])]
    assert torch.is_tensor(lm.generate([[5, 9], [7, 7]], 6))
