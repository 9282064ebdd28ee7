"""Cases about choosing tokens, ending texts, and drafts."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from tests.cases.small import LLAMA, built, card, tokens
from tests.conftest import DATA, GOLDEN

import scantling as sc
from scantling.generate.batching import Engine, Limits
from scantling.generate.beam import Beams, beam_search
from scantling.generate.engine import Options, complete
from scantling.generate.processors import History, adjusted, filtered, repetition
from scantling.generate.request import Request
from scantling.generate.sample import Sampling, choose
from scantling.generate.speculative import acceptance, residual
from scantling.text.tokenizer import Tokenizer

FIXTURE = DATA / "tok-bytelevel"


def kept(probabilities: list[float], **how: Any) -> int:
    logits = torch.tensor([probabilities], dtype=torch.float64).log()
    return int(filtered(logits, Sampling(temperature=1.0, **how)).isfinite().sum())


@pytest.mark.parametrize(
    ("probabilities", "p", "n"),
    [
        ([0.5, 0.41, 0.09], 0.9, 2),
        ([0.5, 0.35, 0.10, 0.05], 0.9, 3),
        ([0.5, 0.3, 0.15, 0.05], 0.6, 2),
        ([0.5, 0.3, 0.15, 0.05], 0.85, 3),
        ([0.4, 0.3, 0.2, 0.1], 0.8, 3),
    ],
)
def test_the_token_that_crosses_the_threshold_is_kept(probabilities: list[float], p: float, n: int) -> None:
    """GEN-01, GEN-02: the least number of tokens whose mass is at least p."""
    assert kept(probabilities, top_p=p) == n


def test_a_tie_with_the_threshold() -> None:
    """GEN-02: mass before the token >= p is compared, in float32: .5 + .3 is .8 there or just below it."""
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
    before = logits.softmax(-1).cumsum(-1)[0, 1]
    found = int(filtered(logits, Sampling(temperature=1.0, top_p=0.8)).isfinite().sum())
    assert found == (2 if before >= 0.8 else 3)
    assert kept([0.5, 0.3, 0.2], top_p=0.79) == 2
    assert kept([0.5, 0.3, 0.2], top_p=0.81) == 3


def test_the_edges_of_top_p() -> None:
    """GEN-04: 0 keeps the best token, 1 all; others are refused."""
    assert kept([0.5, 0.3, 0.2], top_p=0) == 1
    assert kept([0.5, 0.3, 0.2], top_p=1) == 3
    for wrong in (1.5, -0.1):
        with pytest.raises(sc.ScantlingInputError, match="top_p is"):
            Sampling(temperature=1.0, top_p=wrong)


@pytest.mark.parametrize("temperature", [0, 1e-8])
@pytest.mark.parametrize("more", [{}, {"top_k": 2}, {"top_p": 0.5}, {"repetition_penalty": 3.0}])
def test_temperature_zero_is_greedy_after_the_penalties(temperature: float, more: dict[str, Any]) -> None:
    """GEN-05: the same token each time, without a seed; negative and NaN are refused."""
    logits = torch.tensor([[3.0, 2.9, 0.1]])
    how = Sampling(temperature=temperature, **more)
    wanted = 1 if "repetition_penalty" in more else 0
    for _ in range(5):
        assert int(choose(logits, how, how.generators(1), [History([0])])) == wanted
    for wrong in (-0.5, float("nan")):
        with pytest.raises(sc.ScantlingInputError, match="temperature is"):
            Sampling(temperature=wrong)


def test_a_penalty_makes_no_token_likelier() -> None:
    """GEN-07: logits 2, -1, .5, seen 0, 1, 1, penalty 1.5: 1.3333, -1.5, .5."""
    found = repetition(torch.tensor([2.0, -1.0, 0.5]), 1.5, [0, 1, 1])
    torch.testing.assert_close(found, torch.tensor([2 / 1.5, -1.5, 0.5]))


def test_what_penalties_cover() -> None:
    """GEN-09: repetition counts the prompt, frequency and presence only what was generated, as their settings say."""
    logits = torch.ones(1, 8)
    prompt = History([5], [3, 3])
    assert adjusted(logits, Sampling(repetition_penalty=2.0), [prompt])[0].tolist() == [1, 1, 1, 0.5, 1, 0.5, 1, 1]
    assert adjusted(logits, Sampling(presence_penalty=0.5), [prompt])[0].tolist() == [1, 1, 1, 0.5, 1, 1, 1, 1]
    assert adjusted(logits, Sampling(frequency_penalty=0.5), [prompt])[0].tolist() == [1, 1, 1, 0, 1, 1, 1, 1]
    told = Sampling.__doc__ or ""
    assert "of the prompt and of the text" in told
    assert "of generated tokens" in told


@pytest.mark.parametrize(("k", "n"), [(0, 64), (1, 1), (64, 64), (100, 64)])
def test_top_k_beyond_the_vocabulary(k: int, n: int) -> None:
    """GEN-10: of 64 tokens; -1 is refused, 0 is off."""
    logits = torch.randn(1, 64, generator=torch.Generator().manual_seed(0))
    assert int(filtered(logits, Sampling(temperature=1.0, top_k=k)).isfinite().sum()) == n
    with pytest.raises(sc.ScantlingInputError, match="top_k is -1; a whole number is needed, 0 for no limit"):
        Sampling(top_k=-1)


@pytest.mark.parametrize(("alpha", "best", "goes_on"), [(1.0, -0.12, True), (-1.0, -2.4, False), (0.0, -1.2, False)])
def test_when_no_running_beam_can_win(alpha: float, best: float, goes_on: bool) -> None:
    """GEN-12: finished: sum -1.0, length 2; running: -1.2, length 2, limit 10."""
    beams = Beams(1, alpha)
    assert beams.reachable(-1.2, 2, 10) == pytest.approx(best)
    assert (beams.reachable(-1.2, 2, 10) > beams.score(-1.0, 2)) == goes_on


def test_stopping_early_is_asked_for() -> None:
    """GEN-12: by default the search goes on while a running beam can win; `early_stopping` ends it with the first."""
    lm = built(card(vocab_size=4, n_layers=1), seed=2)
    lm = sc.Model(lm.card, lm.parts, lm.net, eos_ids=frozenset({2}))
    late, early = (beam_search(lm, torch.tensor([[0, 1]]), 12, Beams(2, 2.0, stop)) for stop in (False, True))
    assert [one.ids[-1] for one in early.hypotheses] == [2, 2]
    assert early.steps < late.steps
    assert early.hypotheses[0].score < late.hypotheses[0].score


P, Q = torch.tensor([0.3, 0.5, 0.2]), torch.tensor([0.6, 0.3, 0.1])


def test_drafts_leave_the_distribution() -> None:
    """GEN-14, GEN-16: p is what comes out, over all proposals; a greedy draft or a wrong replacement gives another."""
    greedy, out, wrong = torch.zeros(3), torch.zeros(3), torch.zeros(3)
    for token in range(3):
        stays = acceptance(P, Q, token)
        out[token] += Q[token] * stays
        wrong[token] += Q[token] * stays
        out += Q[token] * (1 - stays) * (residual(P, Q, token) if stays < 1 else 0)
        wrong += Q[token] * (1 - stays) * P
    stays = acceptance(P, Q, 0)
    greedy[0] += stays
    greedy += (1 - stays) * residual(P, Q, 0)
    torch.testing.assert_close(out, P)
    torch.testing.assert_close(wrong, torch.tensor([0.39, 0.45, 0.16]))
    torch.testing.assert_close(greedy, torch.tensor([0.5, 1 / 3, 1 / 6]))


def test_100_000_drafts() -> None:
    """GEN-14, GEN-16: drawn by the judge of each rule; chi-square with 2 degrees of freedom, 13.8 is p = 0.001."""
    from scantling.generate.speculative import _Judge

    for rule in ("shared", "residual"):
        judge = _Judge(Sampling(temperature=1.0, seed=1), rule, torch.Generator().manual_seed(1))
        seen = torch.zeros(3)
        for _ in range(100_000):
            token, _ = judge.settle(0, P, Q, judge.draw(0, Q))
            judge.passed(1)
            seen[token] += 1
        wanted = P * 100_000
        assert float(((seen - wanted) ** 2 / wanted).sum()) < 13.8


class Scripted(torch.nn.Module):
    """A net that writes a text: the logits of position t favour the script's token t + 1."""

    def __init__(self, script: list[int], vocab: int) -> None:
        super().__init__()
        self.script, self.vocab = script, vocab
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, ids: torch.Tensor, ctx: Any, _: Any = None) -> torch.Tensor:
        following = [self.script[min(int(p) + 1, len(self.script) - 1)] for p in ctx.positions[0]]
        return torch.nn.functional.one_hot(torch.tensor([following]), self.vocab).float()


def writer(text: str, prompt: str, fixture: str = "tok-bytelevel") -> sc.Model:
    """A model that goes on with `text` after `prompt`, and then ends where the tokenizer has an end."""
    tokenizer = Tokenizer.from_folder(DATA / fixture)
    script = [*tokenizer.encode(prompt), *tokenizer.encode(text, add_special=False), *sorted(tokenizer.eos_ids)[:1]]
    drawn = card({**LLAMA, "vocab_size": 512, "context": 256})
    return sc.Model(drawn, sc.assemble(drawn), Scripted(script, 512), tokenizer, eos_ids=tokenizer.eos_ids)


def streamed(lm: sc.Model, prompt: str, stop: list[str]) -> list[tuple[str, str, str, int]]:
    """Text, the pieces that were let out, reason and count: of one text, and of the engine."""
    pieces: list[str] = []
    done = complete(lm, prompt, 40, Sampling(), Options(stop=stop), show=pieces.append)
    engine, taken = Engine(lm, Limits(positions=512)), ""
    handle = engine.submit(Request(prompt, 40, options=Options(stop=stop)))
    while engine.busy:
        engine.step()
        taken += handle.take()
        assert not any(one in taken for one in stop)
    other = handle.result()
    return [
        (done.text, "".join(pieces), done.finish_reason, done.new_tokens),
        (other.text, taken, other.finish_reason, other.new_tokens),
    ]


def test_no_part_of_a_stop_string_is_sent() -> None:
    """GEN-17: 'alpha beta gamma delta' with stop 'beta gamma', token by token: 'alpha ' in every way of asking."""
    lm = writer("alpha beta gamma delta", "hello")
    assert lm.tokenizer is not None
    for text, sent, reason, count in streamed(lm, "hello", ["beta gamma"]):
        assert (text, sent, reason) == ("alpha ", "alpha ", "stop")
        assert count <= len(lm.tokenizer.encode("alpha beta gamma delta", add_special=False))


@pytest.mark.parametrize(
    ("text", "stop", "wanted"),
    [("go stop! now", ["stop"], "go "), ("wait... more", [".."], "wait"), ("one two", ["two", "one"], "")],
)
def test_a_stop_string_that_ends_inside_a_token(text: str, stop: list[str], wanted: str) -> None:
    """GEN-19: cut exactly before the first match; the token that brought it counts."""
    lm = writer(text, "hello")
    for found, sent, reason, count in streamed(lm, "hello", stop):
        assert (found, sent, reason) == (wanted, wanted, "stop")
        assert lm.tokenizer is not None
        ids = lm.tokenizer.encode(text, add_special=False)
        whole = [lm.tokenizer.decode(ids[:n]) for n in range(len(ids) + 1)]
        assert count == next(n for n, piece in enumerate(whole) if any(one in piece for one in stop))


def test_characters_of_several_tokens_are_streamed_whole() -> None:
    """GEN-20: the four strings of the fixture, through a whole generation: no replacement mark, and the same text."""
    cases = json.loads((FIXTURE / "expected.json").read_text())
    assert len(cases) == 4
    for case in cases.values():
        for found, sent, _, count in streamed(writer(case["right_text"], "hello"), "hello", []):
            assert found == sent == case["right_text"]
            assert "\ufffd" not in sent
            assert count == len(case["ids"]) + 1


def test_blanks_between_words_stay() -> None:
    """GEN-22: pieces of a metaspace vocabulary, through a whole generation: the right text, no blank in front."""
    case = json.loads((DATA / "tok-metaspace" / "expected.json").read_text())
    lm = writer(case["right_text"], "hello", "tok-metaspace")
    for found, sent, _, _ in streamed(lm, "hello", []):
        assert found == sent
        assert found.startswith(case["right_text"].lstrip())


def test_one_start_token_with_and_without_a_template() -> None:
    """GEN-23: a template that writes the start token gets no second one; a plain prompt gets its one."""
    case = json.loads((FIXTURE / "double-bos.json").read_text())
    lm = writer("ok", "hello")
    engine = Engine(lm, Limits(positions=512))
    templated = engine.submit(Request(case["text_from_template"], 1))
    assert templated.prompt == case["encode_right"]
    assert lm.tokenizer is not None
    assert engine.submit(Request("hello", 1)).prompt.count(lm.tokenizer.bos_id) == 1


@pytest.mark.parametrize(("limit", "new"), [(1, 1), (3, 3), (4, 3), (100, 3)])
def test_new_tokens_are_counted_without_the_prompt(limit: int, new: int) -> None:
    """GEN-24: a prompt of 5 in a context of 8; 0 gives the prompt alone for ids, and is refused for a request."""
    lm = built(card(context=8))
    prompt = tokens(5)
    assert lm.generate(prompt, limit).shape[1] == 5 + new
    engine = Engine(lm, Limits(positions=64))
    handle = engine.submit(Request(prompt[0].tolist(), limit))
    engine.run()
    done = handle.result()
    assert (done.new_tokens, done.prompt_tokens, done.finish_reason) == (new, 5, "length")
    assert done.context_full == (limit > new)
    assert torch.equal(lm.generate(prompt, 0), prompt)
    with pytest.raises(sc.ScantlingInputError, match="max_new_tokens is 0"):
        engine.submit(Request(prompt[0].tolist(), 0))
    with pytest.raises(sc.ScantlingInputError, match="the context holds 8"):
        engine.submit(Request(tokens(8)[0].tolist(), 1))


def test_temperature_zero_with_drafts_is_the_target_alone() -> None:
    """GEN-14: greedy with drafts equals plain greedy of the target."""
    from scantling.generate.speculative import Drafting, Speculation

    lm = sc.load(GOLDEN / "tiny" / "llama-gqa")
    for rule in ("shared", "residual"):
        made = Speculation(lm, torch.tensor([[5, 9]]), 20, Sampling(), Drafting(layers=1, rule=rule, switch=False))
        with torch.inference_mode():
            found = [token for token, _ in made]
        assert found == lm.generate([[5, 9]], 20, ignore_eos=True)[0, 2:].tolist()
