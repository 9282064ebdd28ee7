"""Drafts for targets of encoder-decoders: from the source, from a model that reads it too, from the first layers."""

from __future__ import annotations

import gc
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.cases.small import GPT2, LLAMA, built, card
from tests.conftest import GOLDEN, stacks_of
from tests.generate.test_speculative import HOWS, check_frequencies, drafted, plain
from tests.test_cli import call
from tests.test_translate import write_tokenizer

import scantling as sc
from scantling.generate import Drafting, Keeping, Options, Sampling, complete
from scantling.generate.draft import LookupDraft, early_exit
from scantling.generate.ledger import TRIAL
from scantling.generate.speculative import Speculation
from scantling.tensor.cache import Cache

PAIRS = sorted(p.name for p in (GOLDEN / "tiny").iterdir() if stacks_of(p.name) == "encoder-decoder")
NEW = 20


def pair(base: dict[str, Any] = LLAMA, seed: int = 1, **changes: Any) -> sc.Model:
    lm = built(card(base, family="encoder-decoder", **changes), seed=seed)
    lm.start_id = 0
    return lm


def copying(**replaced: int) -> sc.Model:
    """Writes its source: position t of the target reads position t of the source, and nothing else.

    replaced: by ``t`` and the id of a token of the source what is written in its place.
    """
    sizes = {"vocab_size": 32, "context": 32, "d_model": 64, "n_layers": 1}
    lm = pair(GPT2, attention={"n_heads": 1}, **sizes)
    one = torch.eye(32)
    with torch.no_grad():
        for name, weight in lm.net.named_parameters():
            weight.fill_(1.0 if name.endswith("norm.weight") else 0.0)
        cross = lm.net.decoder.blocks[0].cross
        lm.net.embed.weight[:, :32] = one
        for stack in (lm.net.encoder, lm.net.decoder):
            stack.position.table.weight[:, 32:] = one
        cross.q.weight[32:, 32:] = cross.k.weight[32:, 32:] = 5 * one
        written = [replaced.get(f"t{token}", token) for token in range(32)]
        cross.v.weight[:32, :32], cross.o.weight[:32, :32] = one, 10 * one[written].T
    lm.eos_ids = frozenset({1})
    return lm


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("how", HOWS, ids=["greedy", "sampled", "penalised"])
def test_drafts_change_no_token(name: str, how: Sampling) -> None:
    """Every kind of draft, in every family: token for token what the model writes without, also when it samples."""
    lm, io = sc.load(GOLDEN / "tiny" / name), load_file(GOLDEN / "tiny" / name / "io.safetensors")
    sources = [
        row[real.bool()].tolist() for row, real in zip(io["gen_input_ids"], io["gen_attention_mask"], strict=True)
    ]
    # Another model of the same vocabulary: what one layer of the decoder makes of the source.
    other = sc.load(GOLDEN / "tiny" / {"t5": "t5-v1_1", "marian": "marian"}.get(name, "t5" if "t5" in name else "bart"))
    kinds = [{"lookup": 3}, {"layers": 1}, {"model": early_exit(other, 1)}]
    proposed = 0
    for source, recorded in zip(sources, io["expected_ids"].tolist(), strict=True):
        wanted = plain(lm, source, 24, how)
        assert not how.greedy or [lm.start_id, *wanted[:NEW]] == recorded
        for kind in kinds:
            found, ledger = drafted(lm, source, 24, how, Drafting(**kind, switch=False, count=3))
            assert found == wanted
            assert ledger.tokens + ledger.plain_steps == 23
            proposed += ledger.drafted
    assert proposed > 24


@pytest.mark.parametrize("name", PAIRS)
def test_a_model_that_drafts_for_itself_is_always_right(name: str) -> None:
    """So each round is its 4 proposals and a token more, and 24 tokens after the first take 5 rounds."""
    lm = sc.load(GOLDEN / "tiny" / name)
    found, ledger = drafted(lm, [5, 9, 11], 25, Sampling(temperature=1.3, seed=5), Drafting(model=lm, switch=False))
    assert found == plain(lm, [5, 9, 11], 25, Sampling(temperature=1.3, seed=5))
    assert (ledger.acceptance, ledger.rounds, ledger.tokens) == (1.0, 5, 24)


def test_lookup_reads_the_source_first() -> None:
    nobody: Any = None
    lookup = LookupDraft(2, [5, 6, 7, 8, 6, 7, 9, 1])
    # Of two places the nearest to where the copy would be, also after it went back to the beginning.
    assert lookup.propose([0, 6, 7], 2, nobody) == ([8, 6], [None, None])
    assert lookup.propose([0, 6, 7, 8, 6, 7], 4, nobody)[0] == [9, 1]
    assert lookup.propose([0, 6, 7, 8, 6, 7, 5], 4, nobody)[0] == [6, 7, 8, 6]
    assert lookup.propose([0, 6, 7, 8, 6, 7, 5, 6, 7], 4, nobody)[0] == [8, 6, 7, 9]
    # A longer ending counts before the source does; nothing follows the source's last token.
    assert lookup.propose([0, 3, 6, 4, 3, 6], 2, nobody)[0] == [4, 3]
    assert LookupDraft(2, [5, 1]).propose([0, 1], 2, nobody)[0] == []
    # One token may stand in place of the source's, and no second one.
    assert lookup.propose([0, 6, 7, 3], 2, nobody)[0] == []
    assert lookup.propose([0, 5, 6, 7], 2, nobody)[0] == [8, 6]
    assert lookup.propose([0, 5, 6, 7, 3], 2, nobody)[0] == [6, 7]
    assert lookup.propose([0, 5, 6, 7, 3, 4], 2, nobody)[0] == []
    assert lookup.propose([0, 1, 3, 1], 2, nobody)[0] == [3, 1]
    # The end of the source and the beginning of the target are no neighbours.
    assert LookupDraft(2, [4, 1]).propose([1, 5, 4, 1], 2, nobody)[0] == [5, 4]


def test_a_copy_is_accepted_whole() -> None:
    lm = copying()
    source = [5, 9, 11, 5, 9, 12, 5, 9, 11, 13, 20, 21, 22, 5, 9, 14, 30, 31, 29, 28, 27, 8, 8, 8, 7, 1]
    assert lm.generate([source], 30)[0].tolist() == [0, *source]
    passes = []
    hook = lm.net.encoder.register_forward_hook(lambda *_: passes.append(1))
    found, ledger = drafted(lm, source, len(source), Sampling(), Drafting(lookup=2, switch=False))
    hook.remove()
    assert found == source
    assert len(passes) == 1
    # The first token comes with the start; 25 more at 4 proposals a round and the model's own token.
    assert (ledger.acceptance, ledger.rounds, ledger.plain_steps) == (1.0, 5, 0)
    # A lookup in what is written alone would have had nothing to propose for the first tokens.
    assert LookupDraft(2).propose([0, 5], 4, None)[0] == []  # type: ignore[arg-type]


def test_a_copy_goes_on_behind_a_correction() -> None:
    lm, source = copying(t9=19), [*range(2, 19), 1]
    found, ledger = drafted(lm, source, len(source), Sampling(), Drafting(lookup=2, switch=False))
    assert found == [19 if token == 9 else token for token in source]
    # 3 4 5 6 and the model's 7; 8, and 19 where 9 was proposed; 10 to 13 and 14; 15 to 18 and the end.
    assert (ledger.rounds, ledger.plain_steps, ledger.drafted, ledger.accepted) == (4, 0, 16, 13)


@pytest.mark.parametrize("rule", ["shared", "residual"])
@pytest.mark.parametrize("who", ["model", "lookup", "layers"])
def test_targets_come_as_often_as_their_probability_says(rule: str, who: str) -> None:
    big = pair(vocab_size=3)
    kind = {
        "model": {"model": pair(vocab_size=3, n_layers=1, seed=2)},
        "lookup": {"lookup": 2},
        "layers": {"layers": 1},
    }
    check_frequencies(big, [0, 1, 0, 2], 600, Drafting(**kind[who], rule=rule, switch=False, count=3))


@pytest.mark.parametrize("family", ["decoder", "encoder-decoder"])
def test_drafts_over_a_cache_in_8_bits(family: str) -> None:
    """Token for token what is written over such a cache without drafts."""
    lm = built(card(n_layers=3), seed=1) if family == "decoder" else pair(n_layers=3)
    how, eight = Sampling(temperature=1.5, seed=2), Options(ignore_eos=True, keeping=Keeping("full", "int8"))
    prompt = [[5, 9, 11, 7, 5, 9]]
    wanted = lm.generate(prompt, 40, sampling=how, options=eight)
    for kind in ({"lookup": 2}, {"layers": 1}, {"layers": 2}, {"model": early_exit(lm, 2)}):
        drafts = replace(eight, drafting=Drafting(**kind, switch=False))
        assert torch.equal(lm.generate(prompt, 40, sampling=how, options=drafts), wanted)


def bytes_of_caches() -> int:
    """Of the tensors that all caches alive hold."""
    held = [kept for cache in gc.get_objects() if issubclass(type(cache), Cache) for kept in cache._stores.values()]
    return sum(t.untyped_storage().nbytes() for kept in held for t in vars(kept).values() if torch.is_tensor(t))


@pytest.mark.parametrize("numbers", ["plain", "int8"])
@pytest.mark.parametrize("family", ["decoder", "encoder-decoder"])
def test_bytes_of_all_caches_are_reported(family: str, numbers: str) -> None:
    make = (lambda **changes: built(card(**changes))) if family == "decoder" else pair
    lm, small = make(n_layers=3), make(n_layers=1, attention={"n_kv_heads": 1})
    gc.collect()
    assert bytes_of_caches() == 0
    alone = 0
    for kind in ({"lookup": 2}, {"layers": 1}, {"model": small}):
        made = Speculation(
            lm, torch.tensor([[5, 9, 11, 7]]), 12, Sampling(), Drafting(**kind), Keeping("full", numbers)
        )
        assert bytes_of_caches() == made.session.cache.nbytes + made.draft_bytes
        alone = alone or made.session.cache.nbytes
        # A cache of the draft's own has one layer of 3 and half the KV heads.
        assert made.draft_bytes == (alone // 6 if "model" in kind else 0)
        del made
        gc.collect()


@pytest.mark.parametrize("layers", [1, 2])
def test_an_early_exit_reads_the_cache_of_the_whole(layers: int) -> None:
    """Its proposals are those of the model that ends there, by whole passes; what it read is not read again."""
    lm = pair(n_layers=3)
    source, short = [[5, 9, 11, 7]], early_exit(lm, layers)
    made = Speculation(lm, torch.tensor(source), 12, Sampling(), Drafting(layers=layers, switch=False))
    crossed = {path: made.session.cache.read(path).clone() for path in made.session.cache.shapes if "cross" in path}
    seen: list[int] = []
    drafts: Any = made._drafter
    first = drafts._short.net.decoder.blocks[0]
    hook = first.register_forward_pre_hook(lambda _, given: seen.append(given[0].shape[1]))
    text = [lm.start_id]
    with torch.inference_mode():
        steps = iter(made)
        text.append(next(steps)[0])
        proposals, _ = made._proposals()
    hook.remove()
    assert seen == [1] * 4
    assert made.session.filled == made.session.cache.length == 1
    for proposal in proposals:
        assert proposal == int(short.logits(source, decoder_ids=[text])[0, -1].argmax())
        text.append(proposal)
    for path, was in crossed.items():
        assert torch.equal(made.session.cache.read(path), was)


def test_a_draft_begins_and_ends_where_its_own_targets_do() -> None:
    """Another beginning, and fewer positions than the model has: nothing is proposed past them."""
    lm, small = pair(GPT2), pair(GPT2, n_layers=1, context=10, seed=2)
    small.start_id = 3
    for how in HOWS:
        found, ledger = drafted(lm, [5, 9, 11], 40, how, Drafting(model=small, switch=False))
        assert found == plain(lm, [5, 9, 11], 40, how)
        assert ledger.drafted
        # The last proposal, of position 10, is not read; the tokens after it come one by one.
        assert ledger.plain_steps >= 39 - 10
    with pytest.raises(sc.ScantlingInputError, match="cannot draft: the source has 11 tokens and it has 10 learned"):
        drafted(lm, [5] * 11, 4, Sampling(), Drafting(model=small))
    alone = built(card(GPT2, n_layers=1, context=10), seed=2)
    big = built(card(GPT2), seed=1)
    found, ledger = drafted(big, [5, 9, 11], 40, Sampling(), Drafting(model=alone, switch=False))
    assert found == plain(big, [5, 9, 11], 40, Sampling())
    assert ledger.drafted


def test_switching_off_leaves_the_target_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    from scantling.generate import speculative

    lm = sc.load(GOLDEN / "tiny" / "t5")
    ticks = iter(range(10**6))
    monkeypatch.setattr(speculative.time, "perf_counter", lambda: next(ticks) ** 4)
    how = Sampling(temperature=1.0, seed=4)
    found, ledger = drafted(lm, [5, 9, 11], 50, how, Drafting(layers=1))
    assert (ledger.off, ledger.rounds) == (True, TRIAL)
    assert found == plain(lm, [5, 9, 11], 50, how)


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair") / "t5"
    shutil.copytree(GOLDEN / "tiny" / "t5", folder)
    write_tokenizer(folder)
    return folder


def test_on_the_command_line(t5: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lm, texts = sc.load(t5), ["w33 w50 w18", "w74 w74"]
    wanted = [lm.generate(text, 24) for text in texts]
    done = complete(lm, texts[0], 24, Sampling(), Options(drafting=Drafting(lookup=2, switch=False)))
    assert (done.text, done.ledger is not None) == (wanted[0], True)
    base = ("-m", str(t5), "--max-new-tokens", "24", "--json")
    _, out, _ = call(capsys, "generate", texts[0], *base)
    alone = json.loads(out)["cache_bytes"]
    for kind in (("--draft-lookup", "2"), ("--draft-layers", "1"), ("--draft-model", str(t5))):
        status, out, err = call(capsys, "generate", texts[0], *base, *kind)
        assert status == 0, err
        made = json.loads(out)
        assert made["text"] == wanted[0]
        assert made["cache_bytes"] == made["predicted"]["cache_bytes"] == alone * (2 if "model" in kind[0] else 1)
        status, out, err = call(capsys, "translate", *texts, *base, *kind)
        assert status == 0, err
        made = json.loads(out)
        assert made["text"] == wanted
        assert [one["accepted"] <= one["drafted"] for one in made["drafts"]] == [True, True]
    _, out, err = call(capsys, "translate", *texts, *base[:-1], "--draft-model", str(t5))
    assert out.splitlines() == wanted
    assert err.count("tokens stayed (100%)") == 2


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Drafting(model=built(card())), "cannot draft for small: an encoder-decoder that scores a vocabulary"),
        (lambda: Drafting(model=pair(vocab_size=9)), "small has 9 tokens and small 64"),
        (lambda: Drafting(model=built(card(family="encoder-decoder"))), "does not say with what a target begins"),
        (lambda: Drafting(layers=2), "from 1 to 1 is needed"),
    ],
)
def test_drafts_that_cannot_be_are_refused(make: Any, words: str) -> None:
    with pytest.raises(sc.ScantlingInputError, match=words):
        drafted(pair(), [1, 2], 4, Sampling(), make())


def test_settings_that_exclude_drafts() -> None:
    lm, drafts = pair(), Drafting(lookup=2)
    for options, words in (
        (Options(drafting=drafts, keeping=Keeping("ring")), "a ring cache cannot go back"),
        (Options(drafting=drafts, chunk=2), "reads its source both ways"),
    ):
        with pytest.raises(sc.ScantlingInputError, match=words):
            lm.generate([[1, 2, 3]], 4, options=options)
    with pytest.raises(sc.ScantlingInputError, match="one text at a time"):
        lm.generate([[1, 2], [2, 3]], 4, options=Options(drafting=drafts))
    with pytest.raises(sc.ScantlingInputError, match="without padding"):
        lm.generate([[1, 2]], 4, attention_mask=[[1, 0]], options=Options(drafting=drafts))
