"""Beam search: the recorded beams, the optimum of an exhaustive search, and when it may stop."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.cases.small import built, card
from tests.conftest import GOLDEN

import scantling as sc
from scantling.generate.beam import Beams, beam_rows, beam_search
from scantling.generate.keeping import Keeping
from scantling.generate.sample import Sampling

NAMES = sorted(p.name for p in (GOLDEN / "tiny").iterdir())
IOS = {name: load_file(GOLDEN / "tiny" / name / "io.safetensors") for name in NAMES}
RECORDED = [name for name in NAMES if "beam_ids" in IOS[name]]


def test_beams_are_recorded_for_every_writer_but_one() -> None:
    writers = [name for name in NAMES if "gen_input_ids" in IOS[name]]
    assert set(writers) - set(RECORDED) == {"llama-rope-dynamic"}


@pytest.mark.parametrize("name", RECORDED)
def test_beams_equal_the_recorded_ones(name: str) -> None:
    """Three beams, 10 tokens, no end-of-text: ids and scores."""
    lm, io = sc.load(GOLDEN / "tiny" / name), IOS[name]
    mask = io["gen_attention_mask"][:1]
    made = beam_search(lm, io["gen_input_ids"][:1], 10, Beams(3), attention_mask=mask, ignore_eos=True)
    assert torch.equal(beam_rows(lm, io["gen_input_ids"][:1], made), io["beam_ids"])
    scores = torch.tensor([one.score for one in made.hypotheses])
    torch.testing.assert_close(scores, io["beam_scores"], atol=1e-4, rtol=1e-4)


def three() -> sc.Model:
    lm = built(card(vocab_size=3, n_layers=1), seed=5)
    return sc.Model(lm.card, lm.parts, lm.net, eos_ids=frozenset({2}))


def every_text(lm: sc.Model, prompt: list[int], limit: int) -> dict[tuple[int, ...], float]:
    """Sum of log-probabilities of each text that ends with token 2 or has `limit` tokens."""
    found = {}
    for length in range(1, limit + 1):
        for ids in product(range(3), repeat=length):
            if 2 in ids[:-1] or (length < limit and ids[-1] != 2):
                continue
            logs = lm.logits([[*prompt, *ids]]).log_softmax(-1)[0, len(prompt) - 1 : -1]
            found[ids] = float(logs.gather(1, torch.tensor(ids)[:, None]).sum())
    return found


@pytest.mark.parametrize("alpha", [1.0, 0.0, -1.0, 2.0])
def test_wide_beams_find_the_optimum(alpha: float) -> None:
    lm = three()
    every = every_text(lm, [0, 1], 5)
    best = max(every, key=lambda ids: every[ids] / len(ids) ** alpha)
    made = beam_search(lm, torch.tensor([[0, 1]]), 5, Beams(40, alpha)).hypotheses
    assert made[0].ids == best
    assert made[0].total == pytest.approx(every[best], abs=1e-4)
    assert made[0].score == pytest.approx(every[best] / len(best) ** alpha, abs=1e-4)
    assert [one.score for one in made] == sorted((one.score for one in made), reverse=True)


def test_one_beam_is_greedy() -> None:
    lm = sc.load(GOLDEN / "tiny" / "gpt2")
    (made,) = beam_search(lm, torch.tensor([[5, 9, 11]]), 12, Beams(1), ignore_eos=True).hypotheses
    assert list(made.ids) == lm.generate([[5, 9, 11]], 12, ignore_eos=True)[0, 3:].tolist()


@pytest.mark.parametrize(("n", "penalty"), [(2, 1.0), (0, 1.7)])
def test_blocking_and_penalties_equal_the_originals(n: int, penalty: float) -> None:
    transformers = pytest.importorskip("transformers")
    folder = GOLDEN / "tiny" / "llama-gqa"
    original = transformers.AutoModelForCausalLM.from_pretrained(folder)
    ids = IOS["llama-gqa"]["gen_input_ids"][:1]
    settings = {"num_beams": 3, "max_new_tokens": 12, "do_sample": False, "length_penalty": 0.6}
    if n:
        settings["no_repeat_ngram_size"] = n
    theirs = original.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        repetition_penalty=penalty,
        eos_token_id=None,
        pad_token_id=0,
        **settings,
    )
    lm = sc.load(folder)
    how = Sampling(no_repeat_ngram=n, repetition_penalty=penalty)
    made = beam_search(lm, ids, 12, Beams(3, 0.6), how, ignore_eos=True)
    assert torch.equal(beam_rows(lm, ids, made)[:1], theirs)


@pytest.mark.parametrize("alpha", [-1.0, 0.0, 1.0])
@pytest.mark.parametrize("early", [False, True])
def test_the_best_row_ends_where_the_originals_ends(alpha: float, early: bool) -> None:
    transformers = pytest.importorskip("transformers")
    folder = GOLDEN / "tiny" / "llama-gqa"
    original, ids = transformers.AutoModelForCausalLM.from_pretrained(folder), torch.tensor([[5, 9, 11, 5]])
    settings = {"num_beams": 3, "max_new_tokens": 25, "do_sample": False, "pad_token_id": 0}
    settings |= {"length_penalty": alpha, "early_stopping": early, "eos_token_id": [1, 2]}
    theirs = original.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    lm = sc.load(folder)
    lm.eos_ids = frozenset({1, 2})
    assert torch.equal(lm.generate(ids, 25, beams=Beams(3, alpha, early)), theirs)


@pytest.mark.parametrize("kind", ["ring", "int8"])
def test_beams_over_another_cache(kind: str) -> None:
    lm, ids = sc.load(GOLDEN / "tiny" / "mistral-swa"), IOS["mistral-swa"]["gen_input_ids"][:1]
    keeping = Keeping("ring") if kind == "ring" else Keeping(numbers="int8")
    made = beam_search(lm, ids, 10, Beams(3), ignore_eos=True, keeping=keeping)
    if kind == "ring":
        assert torch.equal(beam_rows(lm, ids, made), IOS["mistral-swa"]["beam_ids"])
    assert len(made.hypotheses) == 3


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda lm: Beams(0), "beams is 0"),
        (lambda lm: Beams(2, float("nan")), "length_penalty is nan"),
        (lambda lm: beam_search(lm, torch.ones(2, 3).long(), 4, Beams(2)), "one prompt at a time"),
        (
            lambda lm: beam_search(lm, torch.ones(1, 3).long(), 4, Beams(2), Sampling(temperature=1.0)),
            "beam search draws nothing",
        ),
    ],
)
def test_wrong_settings_are_refused(make: Any, words: str) -> None:
    with pytest.raises(sc.ScantlingInputError, match=words):
        make(sc.load(GOLDEN / "tiny" / "gpt2"))
