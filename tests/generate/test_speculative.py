"""Drafts change nothing: the same tokens as without, or the same distribution, enumerated and drawn."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.cases.small import built, card
from tests.conftest import GOLDEN, stacks_of

import scantling as sc
from scantling.generate.draft import LookupDraft, early_exit
from scantling.generate.engine import Options, complete
from scantling.generate.keeping import Keeping
from scantling.generate.ledger import TRIAL, Ledger
from scantling.generate.sample import Sampling
from scantling.generate.speculative import Drafting, Speculation, acceptance, residual
from scantling.tensor.context import Context

DECODERS = sorted(p.name for p in (GOLDEN / "tiny").iterdir() if stacks_of(p.name) == "decoder")


def drafted(lm: sc.Model, prompt: list[int], new: int, how: Sampling, drafting: Drafting) -> tuple[list[int], Ledger]:
    made = Speculation(lm, torch.tensor([prompt]), new, how, drafting)
    with torch.inference_mode():
        return [token for token, _ in made], made.ledger


def plain(lm: sc.Model, prompt: list[int], new: int, how: Sampling) -> list[int]:
    rows = lm.generate([prompt], new, sampling=how, options=Options(ignore_eos=True))
    return rows[0, 1 if lm.parts.two_stacks else len(prompt) :].tolist()


HOWS = [
    Sampling(),
    Sampling(temperature=1.3, seed=5),
    Sampling(temperature=0.9, seed=6, top_k=20, top_p=0.9, repetition_penalty=1.3, frequency_penalty=0.2),
]


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("how", HOWS, ids=["greedy", "sampled", "penalised"])
def test_drafts_change_no_token(name: str, how: Sampling) -> None:
    """Early exit and lookup, in every family: token for token what the model writes without, also when it samples."""
    lm, io = sc.load(GOLDEN / "tiny" / name), load_file(GOLDEN / "tiny" / name / "io.safetensors")
    prompt = io["gen_input_ids"][0].tolist()
    if name == "llama-rope-dynamic":
        with pytest.raises(sc.ScantlingInputError, match="dynamic NTK turns each token by its own length"):
            drafted(lm, prompt, 5, how, Drafting(lookup=3))
        return
    wanted = plain(lm, prompt, 24, how)
    for drafting in (Drafting(layers=1, switch=False), Drafting(lookup=2, switch=False, count=3)):
        found, ledger = drafted(lm, prompt, 24, how, drafting)
        assert found == wanted
        assert ledger.tokens + ledger.plain_steps == 23
    if how.greedy:
        assert wanted[:20] == io["expected_ids"][0, len(prompt) :].tolist()


def test_a_model_that_drafts_for_itself_is_always_right() -> None:
    lm = sc.load(GOLDEN / "tiny" / "llama-gqa")
    for how in HOWS:
        found, ledger = drafted(lm, [5, 9, 11], 25, how, Drafting(model=lm, switch=False))
        assert found == plain(lm, [5, 9, 11], 25, how)
        assert ledger.acceptance == 1.0
        assert ledger.rounds == 5
        assert ledger.tokens == 24


def test_another_model_drafts(tmp_path: Any) -> None:
    big, small = built(card(n_layers=3), seed=1), built(card(n_layers=1), seed=2)
    for how in HOWS:
        found, ledger = drafted(big, [5, 9, 11], 40, how, Drafting(model=small, switch=False))
        assert found == plain(big, [5, 9, 11], 40, how)
        assert ledger.drafted > ledger.accepted


def test_a_crossing_of_longrope() -> None:
    from tests.cases.test_cache import LONGROPE

    lm = built(card(position=LONGROPE))
    for how in HOWS:
        for drafting in (Drafting(layers=1, switch=False), Drafting(model=lm, switch=False, count=5)):
            assert drafted(lm, list(range(9)), 30, how, drafting)[0] == plain(lm, list(range(9)), 30, how)


P, Q = torch.tensor([0.3, 0.5, 0.2]), torch.tensor([0.6, 0.3, 0.1])


def outcome(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """The distribution of the token under the residual rule: every proposal, accepted or replaced."""
    out = torch.zeros(len(p))
    for token in q.nonzero().flatten().tolist():
        stays = acceptance(p, q, token)
        out[token] += q[token] * stays
        if stays < 1:
            out += q[token] * (1 - stays) * residual(p, q, token)
    return out


def test_the_residual_rule_gives_p_exactly() -> None:
    torch.testing.assert_close(outcome(P, Q), P)
    draw = torch.Generator().manual_seed(0)
    for _ in range(50):
        p, q = torch.rand(7, generator=draw), torch.rand(7, generator=draw)
        p[2] = q[4] = 0
        torch.testing.assert_close(outcome(p / p.sum(), q / q.sum()), p / p.sum(), atol=1e-6, rtol=1e-5)
    for token in range(3):
        sure = torch.nn.functional.one_hot(torch.tensor(token), 3).float()
        stays = acceptance(P, None, token)
        torch.testing.assert_close(stays * sure + (1 - stays) * residual(P, None, token), P)


def chances(lm: sc.Model, prompt: list[int], length: int, how: Sampling) -> dict[tuple[int, ...], float]:
    """Exact probability of each text of that length, by passes over the whole of it."""
    found = {}
    for ids in product(range(lm.card.vocab_size), repeat=length):
        if lm.parts.two_stacks:
            logits = lm.logits([prompt], decoder_ids=[[lm.start_id, *ids]])[0, :-1]
        else:
            logits = lm.logits([[*prompt, *ids]])[0, len(prompt) - 1 : -1]
        logs = (logits / how.temperature).log_softmax(-1)
        found[ids] = float(logs.gather(1, torch.tensor(ids)[:, None]).sum().exp())
    return found


def check_frequencies(lm: sc.Model, prompt: list[int], draws: int, drafting: Drafting) -> None:
    """Every text of 3 tokens, enumerated; so many drawn; chi-square at p = 0.001."""
    exact = chances(lm, prompt, 3, Sampling(temperature=2.0))
    assert sum(exact.values()) == pytest.approx(1, abs=1e-4)
    seen = dict.fromkeys(exact, 0)
    accepted = proposed = 0
    for seed in range(draws):
        ids, ledger = drafted(lm, prompt, 3, Sampling(temperature=2.0, seed=seed), drafting)
        seen[tuple(ids)] += 1
        accepted, proposed = accepted + ledger.accepted, proposed + ledger.drafted
    assert 0 < accepted < proposed
    common = [ids for ids, chance in exact.items() if chance * draws >= 5]
    rare = [ids for ids in exact if ids not in common]
    pairs = [(seen[ids], exact[ids] * draws) for ids in common]
    pairs.append((sum(seen[ids] for ids in rare), sum(exact[ids] for ids in rare) * draws))
    square = sum((got - wanted) ** 2 / wanted for got, wanted in pairs if wanted > 0)
    freedom = len(pairs) - 1
    assert freedom > 10
    # Wilson-Hilferty: the 0.999 quantile of chi-square.
    assert square < freedom * (1 - 2 / (9 * freedom) + 3.09 * (2 / (9 * freedom)) ** 0.5) ** 3


@pytest.mark.parametrize("rule", ["shared", "residual"])
@pytest.mark.parametrize("who", ["model", "lookup"])
def test_texts_come_as_often_as_their_probability_says(rule: str, who: str) -> None:
    big = built(card(vocab_size=3, n_layers=2), seed=1)
    small = built(card(vocab_size=3, n_layers=1), seed=2)
    source = {"model": small} if who == "model" else {"lookup": 2}
    check_frequencies(big, [0, 1, 0], 1000, Drafting(**source, rule=rule, switch=False, count=3))


def test_lookup_finds_the_last_repetition() -> None:
    lookup = LookupDraft(3)
    nobody: Any = None
    assert lookup.propose([1, 2, 3, 9, 1, 2, 3], 2, nobody)[0] == [9, 1]
    assert lookup.propose([7, 3, 5, 1, 3], 4, nobody)[0] == [5, 1, 3]
    assert lookup.propose([1, 2, 3], 4, nobody)[0] == []
    assert lookup.propose([4], 4, nobody)[0] == []


def test_an_early_exit_copies_nothing() -> None:
    lm = sc.load(GOLDEN / "tiny" / "llama-gqa")
    short = early_exit(lm, 1)
    assert len(short.net.decoder.blocks) == 1
    ours = dict(lm.net.named_parameters())
    for name, weight in short.net.named_parameters():
        assert weight.data_ptr() == ours[name].data_ptr()
    ids = [[5, 9, 11]]
    assert not torch.equal(short.logits(ids), lm.logits(ids))
    stream = lm.hidden(ids)[1]
    ctx = Context.of(torch.tensor(ids))
    wanted = lm.net.head(lm.net.decoder.final_norm(stream), lm.net.embed.weight, ctx)
    torch.testing.assert_close(short.logits(ids), wanted)


def test_drafts_that_do_not_pay_are_switched_off() -> None:
    slow = Ledger()
    for _ in range(TRIAL):
        slow.plain(1.0)
    for i in range(TRIAL):
        assert not slow.off
        slow.round(4, 0, 1.5, switch=True)
        assert slow.rounds == i + 1
    assert slow.off
    assert slow.speed_up == pytest.approx(1 / 1.5)
    good = Ledger()
    good.plain(1.0)
    for _ in range(5 * TRIAL):
        good.round(4, 2, 1.5, switch=True)
    assert not good.off
    assert (good.acceptance, good.speed_up) == (0.5, pytest.approx(2.0))
    kept = Ledger()
    kept.plain(1.0)
    for _ in range(TRIAL):
        kept.round(4, 0, 9.0, switch=False)
    assert not kept.off


def test_switching_off_leaves_the_text_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    from scantling.generate import speculative

    lm = sc.load(GOLDEN / "tiny" / "llama-gqa")
    ticks = iter(range(10**6))
    monkeypatch.setattr(speculative.time, "perf_counter", lambda: next(ticks) ** 2)
    how = Sampling(temperature=1.0, seed=4)
    found, ledger = drafted(lm, [5, 9, 11], 50, how, Drafting(layers=1))
    assert ledger.off
    assert ledger.rounds == TRIAL
    assert found == plain(lm, [5, 9, 11], 50, how)


def test_text_with_drafts(smollm: Any) -> None:
    prompt, new = "one two three four one two three four one two", 20
    without = complete(smollm, prompt, new, Sampling(), Options(logprobs=0))
    done = complete(smollm, prompt, new, Sampling(), Options(logprobs=0, drafting=Drafting(lookup=3, switch=False)))
    assert (done.text, done.ids, done.finish_reason) == (without.text, without.ids, without.finish_reason)
    assert done.ledger is not None
    assert done.ledger.accepted > 0
    assert done.logprobs is not None
    assert without.logprobs is not None
    for mine, other in zip(done.logprobs, without.logprobs, strict=True):
        assert mine.logprob == pytest.approx(other.logprob, abs=2e-3)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda lm: Drafting(), "name one"),
        (lambda lm: Drafting(layers=1, lookup=2), "name one"),
        (lambda lm: Drafting(lookup=0), "draft lookup is 0"),
        (lambda lm: Drafting(lookup=2, count=65), "draft count is 65"),
        (lambda lm: Drafting(model="x"), "draft model is 'x'; give what scantling.load returns"),
        (lambda lm: Drafting(lookup=2, switch="no"), "draft switch is 'no'; True or False is needed"),
        (lambda lm: Drafting(lookup=2, rule="hope"), "unknown rule of acceptance 'hope'"),
        (lambda lm: drafted(lm, [1, 2], 4, Sampling(), Drafting(layers=2)), "from 1 to 1 is needed"),
        (
            lambda lm: drafted(lm, [1, 2], 4, Sampling(), Drafting(model=built(card()))),
            "small has 64 tokens and llama-gqa 131",
        ),
        (
            lambda lm: drafted(lm, [1, 2], 4, Sampling(), Drafting(model=sc.load(GOLDEN / "tiny" / "t5"))),
            "cannot draft for llama-gqa: a decoder that scores a vocabulary is needed",
        ),
        (lambda lm: lm.generate([[1], [2]], 2, options=Options(drafting=Drafting(lookup=2))), "one text at a time"),
        (lambda lm: lm.generate([[1], [2, 3]], 2, options=Options(drafting=Drafting(lookup=2))), "one text at a time"),
        (
            lambda lm: lm.generate([1, 2], 2, options=Options(drafting=Drafting(lookup=2), keeping=Keeping("ring"))),
            "a ring cache cannot go back",
        ),
    ],
)
def test_drafts_that_cannot_be_are_refused(make: Any, words: str) -> None:
    with pytest.raises(sc.ScantlingInputError, match=words):
        make(sc.load(GOLDEN / "tiny" / "llama-gqa"))
