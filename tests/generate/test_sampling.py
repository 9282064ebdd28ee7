"""The processors of logits, each beside the recorded one, and what they are given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tests.conftest import GOLDEN

import scantling as sc
from scantling.generate import processors
from scantling.generate.engine import Options, best_of, complete, mean_logprob
from scantling.generate.processors import History, adjusted, filtered
from scantling.generate.sample import Sampling, choose, race

RECORDED = load_file(GOLDEN / "sampling.safetensors")
HISTORIES = [History(row) for row in RECORDED["input_ids"].tolist()]


@pytest.fixture(scope="module")
def lm() -> Any:
    return sc.load(GOLDEN / "tiny" / "llama-gqa")


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("typical_0_7", Sampling(temperature=1.0, typical_p=0.7)),
        ("epsilon_0_01", Sampling(temperature=1.0, epsilon_cutoff=0.01)),
        ("eta_0_01", Sampling(temperature=1.0, eta_cutoff=0.01)),
        ("repetition_1_3", Sampling(temperature=1.0, repetition_penalty=1.3)),
        ("no_repeat_ngram_2", Sampling(temperature=1.0, no_repeat_ngram=2)),
        (
            "chain_repetition_temperature_topk_topp",
            Sampling(temperature=0.7, top_k=5, top_p=0.8, repetition_penalty=1.3),
        ),
    ],
)
def test_processors_equal_the_recorded_ones(name: str, how: Sampling) -> None:
    mine = filtered(adjusted(RECORDED["logits"], how, HISTORIES), how)
    torch.testing.assert_close(mine, RECORDED[name])
    assert not torch.equal(RECORDED[name], RECORDED["logits"])


def test_every_recorded_processor_is_compared() -> None:
    from tests.test_generate import test_filters_equal_the_recorded_ones as others

    here = {mark.args[1][i][0] for mark in test_processors_equal_the_recorded_ones.pytestmark for i in range(6)}
    there = {mark.args[1][i][0] for mark in others.pytestmark for i in range(5)}
    assert here | there | {"logits", "input_ids"} == set(RECORDED)


def test_an_n_gram_over_the_seam_of_prompt_and_text_is_blocked() -> None:
    how = Sampling(no_repeat_ngram=3)
    found = adjusted(torch.zeros(1, 8), how, [History([1, 2, 3, 4], [1, 2])])
    assert found[0].isinf().nonzero().flatten().tolist() == [3]


@given(st.lists(st.integers(0, 3), max_size=12), st.integers(1, 4))
def test_blocking_lets_no_n_gram_come_twice(seen: list[int], n: int) -> None:
    """Against a search of all n-grams: a token is left exactly if the text with it has no n-gram twice at its end."""
    found = processors.no_repeat_ngram(torch.zeros(4), n, seen)
    for token in range(4):
        text = [*seen, token]
        last = text[-n:]
        twice = len(text) >= n and any(text[i : i + n] == last for i in range(len(text) - n))
        assert bool(found[token].isinf()) == twice


def test_a_bias_forbids_and_favours() -> None:
    how = Sampling(logit_bias={2: -100, 0: 5})
    logits = torch.tensor([[1.0, 2.0, 9.0]])
    assert adjusted(logits, how, [History([0])]).tolist() == [[6.0, 2.0, -91.0]]
    with pytest.raises(sc.ScantlingInputError, match="logit_bias names token 7; the tokens are 0 to 2"):
        adjusted(logits, Sampling(logit_bias={7: 1}), [History([0])])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("typical_p", 1.2),
        ("epsilon_cutoff", -0.1),
        ("eta_cutoff", 2),
        ("repetition_penalty", 0),
        ("repetition_penalty", -1.0),
        ("presence_penalty", float("nan")),
        ("frequency_penalty", "much"),
        ("no_repeat_ngram", -1),
        ("no_repeat_ngram", 1.5),
        ("logit_bias", "abc"),
        ("logit_bias", 5),
    ],
)
def test_settings_out_of_range_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(sc.ScantlingInputError, match=f"{field} is "):
        Sampling(**{field: value})


@pytest.mark.parametrize("bias", [{-1: 1.0}, {"a": 1.0}, {1: 101.0}, {1: float("nan")}, {True: 1.0}])
def test_a_bias_out_of_range_is_refused(bias: Any) -> None:
    with pytest.raises(sc.ScantlingInputError, match="logit_bias gives"):
        Sampling(logit_bias=bias)


def test_a_text_without_any_token_left_says_so() -> None:
    with pytest.raises(sc.ScantlingInputError, match="after 2 new tokens no token is left to choose"):
        adjusted(torch.zeros(1, 3), Sampling(no_repeat_ngram=1), [History([0], [2, 1])])


def test_a_race_draws_what_another_with_like_odds_draws() -> None:
    """Two races over one source of draws agree at least as often as (1 - d) / (1 + d), d their distance."""
    p, q = torch.tensor([0.3, 0.5, 0.2]), torch.tensor([0.4, 0.4, 0.2])
    first, second = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    same = sum(race(p, first) == race(q, second) for _ in range(4000)) / 4000
    assert same > 0.9 / 1.1 - 0.03


def test_log_probabilities_are_the_models_own(lm: Any, smollm: Any) -> None:
    asked = Options(logprobs=3)
    done = complete(smollm, "The capital of France is", 4, Sampling(temperature=1.5, top_k=40, seed=5), asked)
    ids = smollm.tokenizer.encode("The capital of France is")
    logs = smollm.logits([ids + done.ids]).log_softmax(-1)[0]
    assert done.logprobs is not None
    for i, token in enumerate(done.logprobs):
        row = logs[len(ids) - 1 + i, : smollm.tokenizer.vocab_size]
        assert token.id == done.ids[i]
        assert token.logprob == pytest.approx(float(row[token.id]), abs=2e-3)
        assert [i for i, _ in token.top] == row.topk(3).indices.tolist()
    assert complete(smollm, "The capital of France is", 1, Sampling()).logprobs is None
    with pytest.raises(sc.ScantlingInputError, match="logprobs is -1"):
        Options(logprobs=-1)


def test_the_best_of_several_is_first(smollm: Any) -> None:
    how = Sampling(temperature=1.2, seed=3)
    made = best_of(smollm, "Once upon a time", 5, how, Options(), 3)
    alone = [
        complete(smollm, "Once upon a time", 5, Sampling(temperature=1.2, seed=3 + i), Options(logprobs=0))
        for i in range(3)
    ]
    assert [one.ids for one in made] == [one.ids for one in sorted(alone, key=lambda one: -mean_logprob(one))]
    assert len({tuple(one.ids) for one in made}) == 3
    negative = best_of(smollm, "Once", 3, Sampling(temperature=1.2, seed=-1), Options(), 2)
    alone = [complete(smollm, "Once", 3, Sampling(temperature=1.2, seed=seed)) for seed in (-1, 0)]
    assert {tuple(one.ids) for one in negative} == {tuple(one.ids) for one in alone}
    with pytest.raises(sc.ScantlingInputError, match="temperature 0 gives one text"):
        best_of(smollm, "Once", 5, Sampling(), Options(), 2)
    with pytest.raises(sc.ScantlingInputError, match="best_of is 0"):
        best_of(smollm, "Once", 5, how, Options(), 0)


def test_rows_of_a_batch_have_histories_of_their_own(lm: Any) -> None:
    how = Sampling(repetition_penalty=1.5, no_repeat_ngram=2, frequency_penalty=0.3)
    rows = [[5, 9, 11, 5], [1, 2, 3, 1]]
    together = lm.generate(rows, 12, sampling=how)
    for row, whole in zip(rows, together, strict=True):
        assert torch.equal(lm.generate([row], 12, sampling=how)[0], whole)
    assert not torch.equal(lm.generate(rows, 12), together)


def test_padding_is_no_history(lm: Any) -> None:
    how = Sampling(repetition_penalty=5.0)
    alone = lm.generate([[7, 8]], 6, sampling=how)[0, 2:]
    padded = lm.generate([[60, 61, 7, 8]], 6, sampling=how, attention_mask=[[0, 0, 1, 1]])[0, 4:]
    assert torch.equal(alone, padded)


def test_records_and_single_settings_do_not_mix(lm: Any) -> None:
    with pytest.raises(sc.ScantlingInputError, match="top_k and sampling are given"):
        lm.generate([1, 2], 3, top_k=5, sampling=Sampling())
    with pytest.raises(sc.ScantlingInputError, match="ignore_eos and options are given"):
        lm.generate([1, 2], 3, ignore_eos=True, options=Options())


def test_greedy_is_after_the_penalties() -> None:
    logits = torch.tensor([[2.0, 1.9, 0.0]])
    how = Sampling(repetition_penalty=2.0)
    assert int(choose(logits, how, how.generators(1), [History([0])])) == 1


SETTINGS = st.fixed_dictionaries(
    {},
    optional={
        "top_k": st.integers(1, 40),
        "top_p": st.floats(0.01, 0.99),
        "min_p": st.floats(0.001, 0.9),
        "typical_p": st.floats(0.05, 0.99),
        "epsilon_cutoff": st.floats(0.0005, 0.3),
        "eta_cutoff": st.floats(0.0005, 0.3),
        "repetition_penalty": st.floats(0.5, 2.0),
        "no_repeat_ngram": st.integers(1, 3),
    },
)


@settings(deadline=None, max_examples=60)
@given(st.floats(0.3, 2.5), SETTINGS, st.lists(st.integers(0, 39), min_size=1, max_size=12), st.integers(0, 10**6))
def test_any_settings_together_are_those_of_transformers(
    temperature: float, chosen: dict[str, Any], seen: list[int], seed: int
) -> None:
    """The same processors in the order in which its `generate` applies them, penalties before filters."""
    transformers = pytest.importorskip("transformers")
    theirs = transformers.generation.logits_process
    how = Sampling(temperature=temperature, **chosen)
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(seed)) * 3
    build = {
        "repetition_penalty": theirs.RepetitionPenaltyLogitsProcessor,
        "no_repeat_ngram": theirs.NoRepeatNGramLogitsProcessor,
        "temperature": theirs.TemperatureLogitsWarper,
        "top_k": theirs.TopKLogitsWarper,
        "top_p": theirs.TopPLogitsWarper,
        "min_p": theirs.MinPLogitsWarper,
        "typical_p": theirs.TypicalLogitsWarper,
        "epsilon_cutoff": theirs.EpsilonLogitsWarper,
        "eta_cutoff": theirs.EtaLogitsWarper,
    }
    wanted, ids = logits, torch.tensor([seen])
    for name, processor in build.items():
        if name == "temperature" or name in chosen:
            wanted = processor(temperature if name == "temperature" else chosen[name])(ids, wanted)
    found = filtered(adjusted(logits, how, [History(seen)]), how)
    torch.testing.assert_close(found, wanted)
