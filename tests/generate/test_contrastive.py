"""Contrastive search beside the paper's formula, written out over whole passes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import GOLDEN, stacks_of
from tests.generate.test_commands import answer, tiny  # noqa: F401
from tests.test_cli import call

import scantling as sc
from scantling.generate import Contrastive, Drafting, Engine, Keeping, Options, Request, Sampling, complete
from scantling.generate.processors import repetition

TINY = GOLDEN / "tiny"
PAIRS = sorted(p.name for p in TINY.iterdir() if stacks_of(p.name) == "encoder-decoder")
PROMPT = [5, 9, 17, 9, 40, 3, 77]


def by_the_formula(lm: Any, prompt: list[int], new: int, k: int, alpha: float, penalty: float = 1.0) -> list[int]:
    """argmax over the k likeliest v of (1 - alpha) p(v | x) - alpha max_j cos(h_v, h_j): no cache, one text a pass."""
    ids = list(prompt)
    for _ in range(new):
        logits = lm.logits([ids])[0, -1]
        if penalty != 1.0:
            logits = repetition(logits, penalty, ids)
        p = logits.double().softmax(-1)
        scores = {}
        for v in p.argsort(descending=True)[:k].tolist():
            states = lm.hidden([[*ids, v]])[-1][0].double()
            cosines = torch.nn.functional.cosine_similarity(states[-1:], states[:-1])
            scores[v] = (1 - alpha) * float(p[v]) - alpha * float(cosines.max())
        ids.append(max(scores, key=lambda v: scores[v]))
    return ids[len(prompt) :]


@pytest.mark.parametrize("name", ["llama-gqa", "gpt2", "gemma2", "deepseek-v2", "phi3-longrope-long"])
@pytest.mark.parametrize(("k", "alpha"), [(4, 0.6), (2, 0.3)])
def test_tokens_are_those_of_the_formula(name: str, k: int, alpha: float) -> None:
    lm = sc.load(TINY / name)
    options = Options(ignore_eos=True, contrastive=Contrastive(k, alpha))
    found = lm.generate([PROMPT], 10, options=options)[0, len(PROMPT) :].tolist()
    assert found == by_the_formula(lm, PROMPT, 10, k, alpha)
    greedy = lm.generate([PROMPT], 10, ignore_eos=True)[0, len(PROMPT) :].tolist()
    assert alpha < 0.6 or found != greedy


def test_a_weight_of_zero_is_greedy_and_penalties_come_first() -> None:
    lm = sc.load(TINY / "llama-gqa")
    plain = Options(ignore_eos=True, contrastive=Contrastive(5, 0.0))
    assert torch.equal(lm.generate([PROMPT], 12, options=plain), lm.generate([PROMPT], 12, ignore_eos=True))
    both = Options(ignore_eos=True, contrastive=Contrastive(3, 0.5))
    found = lm.generate([PROMPT], 8, sampling=Sampling(repetition_penalty=1.8), options=both)
    assert found[0, len(PROMPT) :].tolist() == by_the_formula(lm, PROMPT, 8, 3, 0.5, penalty=1.8)


def by_the_original(folder: Path, source: list[int], new: int, k: int, alpha: float) -> list[int]:
    """The same of the target of a source, over the states of the original's decoder and its start: no cache."""
    transformers = pytest.importorskip("transformers")
    original = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder)
    read, ids = torch.tensor([source]), [original.config.decoder_start_token_id]

    def scored(target: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            out = original(
                input_ids=read, decoder_input_ids=torch.tensor([target]), use_cache=False, output_hidden_states=True
            )
        return out.logits[0, -1].double(), out.decoder_hidden_states[-1][0].double()

    for _ in range(new):
        p = scored(ids)[0].softmax(-1)
        scores = {}
        for v in p.argsort(descending=True)[:k].tolist():
            states = scored([*ids, v])[1]
            cosines = torch.nn.functional.cosine_similarity(states[-1:], states[:-1])
            scores[v] = (1 - alpha) * float(p[v]) - alpha * float(cosines.max())
        ids.append(max(scores, key=lambda v: scores[v]))
    return ids


@pytest.mark.parametrize("name", PAIRS)
def test_targets_are_those_of_the_original(name: str) -> None:
    lm = sc.load(TINY / name)
    for k, alpha in ((4, 0.6), (2, 0.3)):
        options = Options(ignore_eos=True, contrastive=Contrastive(k, alpha))
        found = lm.generate([PROMPT], 10, options=options)[0].tolist()
        assert found == by_the_original(TINY / name, PROMPT, 10, k, alpha)
        ring = replace(options, keeping=Keeping("ring"))
        assert lm.generate([PROMPT], 10, options=ring)[0].tolist() == found
    plain = Options(ignore_eos=True, contrastive=Contrastive(5, 0.0))
    assert torch.equal(lm.generate([PROMPT], 12, options=plain), lm.generate([PROMPT], 12, ignore_eos=True))


def test_a_target_fills_the_positions_that_there_are() -> None:
    """Candidates for the last token are read too: one fewer than a plain target, whose last token is not."""
    lm = sc.load(TINY / "bart")
    options = Options(ignore_eos=True, contrastive=Contrastive(2, 0.5))
    assert lm.generate([PROMPT], 500, ignore_eos=True).shape == (1, 1 + 64)
    assert lm.generate([PROMPT], 500, options=options).shape == (1, 64)
    assert sc.load(TINY / "t5").generate([PROMPT], 80, options=options).shape == (1, 81)


def test_a_cache_in_rings_and_a_prompt_in_chunks_change_nothing() -> None:
    lm = sc.load(TINY / "mistral-swa")
    asked = {"ignore_eos": True, "contrastive": Contrastive(4, 0.6)}
    whole = lm.generate([PROMPT * 2], 10, options=Options(**asked))
    kept = lm.generate([PROMPT * 2], 10, options=Options(**asked, keeping=Keeping("ring"), chunk=3))
    assert torch.equal(whole, kept)


def test_it_fills_the_context_to_the_last_position() -> None:
    lm = sc.load(TINY / "llama-gqa")
    options = Options(ignore_eos=True, contrastive=Contrastive(2, 0.5))
    assert lm.generate([PROMPT], 500, options=options).shape == (1, lm.card.context)


def test_a_text_ends_at_a_stop_string(tiny: Path) -> None:  # noqa: F811
    lm = sc.load(tiny)
    how = Contrastive(4, 0.6)
    whole = complete(lm, "w5 w6", 12, Sampling(), Options(ignore_eos=True, contrastive=how))
    word = whole.text.split()[4]
    cut = complete(lm, "w5 w6", 12, Sampling(), Options(stop=word, ignore_eos=True, contrastive=how))
    assert (cut.finish_reason, cut.text) == ("stop", whole.text[: whole.text.index(word)])


def test_on_the_command_line(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    lm = sc.load(tiny)
    made = answer(capsys, tiny, "w5 w6", "--contrastive", "4", "--max-new-tokens", "8")
    assert made["text"] == lm.generate("w5 w6", 8, options=Options(contrastive=Contrastive(4, 0.6)))
    assert made["cache_bytes"] == made["predicted"]["cache_bytes"]
    other = answer(capsys, tiny, "w5 w6", "--contrastive", "4", "--penalty-alpha", "0", "--max-new-tokens", "8")
    assert other["text"] == lm.generate("w5 w6", 8)
    for given, message in {
        ("--penalty-alpha", "0.5"): "--penalty-alpha is for --contrastive K",
        ("--contrastive", "1"): "contrastive top_k is 1; a whole number from 2 to 1000",
        ("--contrastive", "4", "--penalty-alpha", "1.5"): "a number from 0 to 1 is needed",
        ("--contrastive", "4", "--temperature", "1"): "the search draws nothing",
        ("--contrastive", "4", "--beams", "2"): "contrastive and beams are given",
        ("--contrastive", "4", "--draft-layers", "1"): "contrastive search and drafts are given",
    }.items():
        status, _, err = call(capsys, "generate", "w5", "-m", str(tiny), *given)
        assert (status, message in err) == (2, True), err


def test_several_texts_and_other_searches_are_refused() -> None:
    lm = sc.load(TINY / "llama-gqa")
    how = Options(contrastive=Contrastive())
    with pytest.raises(sc.ScantlingInputError, match="one prompt at a time, and 2 are given"):
        lm.generate([PROMPT, PROMPT], 4, options=how)
    with pytest.raises(sc.ScantlingInputError, match="one text at a time, and the engine decodes several"):
        Engine(lm).submit(Request(PROMPT, 4, options=how))
    with pytest.raises(sc.ScantlingInputError, match="reads its source both ways"):
        sc.load(TINY / "t5-v1_1").generate([PROMPT], 4, options=Options(contrastive=Contrastive(), chunk=2))
    with pytest.raises(sc.ScantlingInputError, match="leave one of them out"):
        Options(contrastive=Contrastive(), drafting=Drafting(lookup=2))
    with pytest.raises(sc.ScantlingInputError, match="one text at a time, without padding"):
        lm.generate([[0, 5, 6]], 4, attention_mask=[[0, 1, 1]], options=how)
