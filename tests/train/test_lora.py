"""Adapters: what they add, that they are taken off again, and that peft reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cases.small import GPT2, tokens
from tests.train.small import fresh
from tests.train.test_run import fresh_other, go, losses, model, settings

import scantling as sc
from scantling.cards.read import from_dict
from scantling.data import Corpus
from scantling.train import checkpoints
from scantling.train.lora import A, Adapters, B, Recipe, added_params

LORA: dict[str, Any] = {"rank": 4, "alpha": 8, "targets": ["q", "v"]}


def adapters(lm: sc.Model, **changes: Any) -> Adapters:
    return Adapters(lm, Recipe(**{"rank": 3, "alpha": 6.0, "targets": ("q", "v", "down")} | changes))


def disturb(put_on: Adapters) -> None:
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in put_on.weights.values():
            weight.copy_(torch.randn(weight.shape, generator=draw) * 0.3)


def test_new_adapters_change_nothing() -> None:
    lm, ids = fresh(), tokens(9)
    before = lm.logits(ids)
    put_on = adapters(lm)
    assert torch.equal(lm.logits(ids), before)
    trained = [name for name, weight in lm.net.named_parameters() if weight.requires_grad]
    assert sorted(trained) == sorted(put_on.weights)


def test_an_adapted_map_is_the_papers_sum() -> None:
    lm = fresh()
    put_on = adapters(lm)
    disturb(put_on)
    path = "decoder.blocks.1.attn.q"
    module: Any = lm.net.get_submodule(path)
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    a, b = (put_on.weights[f"{path}.{name}"] for name in (A, B))
    wanted = x @ module.weight.T + 2.0 * (x @ a.T) @ b.T
    torch.testing.assert_close(module(x), wanted)


def test_merging_gives_the_same_logits_and_comes_off_again() -> None:
    lm, ids = fresh(), tokens(9)
    plain = {name: weight.clone() for name, weight in lm.net.state_dict().items()}
    put_on = adapters(lm)
    disturb(put_on)
    adapted = lm.logits(ids)
    with put_on.merged():
        assert lm.net.state_dict().keys() == plain.keys()
        torch.testing.assert_close(lm.logits(ids), adapted, atol=1e-5, rtol=1e-5)
    assert torch.equal(lm.logits(ids), adapted)
    for name, weight in plain.items():
        assert torch.equal(lm.net.state_dict()[name], weight)
    put_on.merge()
    torch.testing.assert_close(lm.logits(ids), adapted, atol=1e-5, rtol=1e-5)
    assert lm.net.state_dict().keys() == plain.keys()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_peft_reads_the_adapters(tmp_path: Path) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    lm, ids = fresh(), tokens(9)
    sc.save(lm, tmp_path / "base")
    lm = sc.load(tmp_path / "base")
    put_on = adapters(lm, targets=("q", "o", "gate"))
    disturb(put_on)
    assert put_on.save_peft(tmp_path / "adapter", "llama") == ()
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    theirs = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, lm.logits(ids), atol=5e-5, rtol=1e-4)


def test_a_fused_layout_says_that_peft_has_no_place(tmp_path: Path) -> None:
    lm = sc.new(from_dict(GPT2, "gpt2"))
    (note,) = adapters(lm, targets=("q",)).save_peft(tmp_path / "adapter", "gpt2")
    assert "peft has no place for it" in note
    assert not (tmp_path / "adapter").exists()


def test_a_run_trains_adapters_alone_and_goes_on_to_the_bit(corpus: Corpus, tmp_path: Path) -> None:
    plan = settings(lora=LORA, optimizer__lr=3e-2)
    lm = model()
    base = {name: weight.detach().clone() for name, weight in lm.net.named_parameters()}
    straight = tmp_path / "straight"
    summary = go(lm, corpus, plan, straight)
    for name, weight in base.items():
        assert torch.equal(lm.net.get_parameter(name), weight), name
    merged = sc.load(summary.folder)
    assert not torch.equal(
        merged.net.get_parameter("decoder.blocks.0.attn.q.weight"), base["decoder.blocks.0.attn.q.weight"]
    )
    assert torch.equal(merged.net.get_parameter("embed.weight"), base["embed.weight"])
    ids = tokens(9, vocab=320)
    torch.testing.assert_close(merged.logits(ids), lm.logits(ids), atol=1e-5, rtol=1e-5)
    assert (summary.folder / "adapter" / "adapter_model.safetensors").exists()
    broken = tmp_path / "broken"
    go(model(), corpus, settings(lora=LORA, optimizer__lr=3e-2, steps=8, save_every=4, keep=3), broken)
    import shutil

    shutil.rmtree(broken / "step-8")
    assert checkpoints.steps(broken) == [4]
    go(model(), corpus, plan, broken)
    assert losses(broken) == losses(straight)
    with pytest.raises(sc.ScantlingInputError, match="other weights than"):
        go(fresh_other(), corpus, settings(lora=LORA, steps=12), broken)
    with pytest.raises(sc.ScantlingInputError, match="of another rank or on other maps"):
        go(model(), corpus, settings(lora={**LORA, "rank": 2}, steps=12), broken)


def test_only_maps_of_the_blocks_can_be_adapted() -> None:
    with pytest.raises(sc.ScantlingInputError, match="no linear map of the blocks is named 'matrix'"):
        adapters(fresh(), targets=("matrix",))
    with pytest.raises(sc.ScantlingInputError, match="did you mean 'gate'"):
        adapters(fresh(), targets=("gat",))


def test_counts_need_no_weights() -> None:
    """8 numbers for each of q and v of two blocks: 32 to 32 and 32 to 16."""
    assert added_params(fresh().parts, 4, ["q", "v"]) == 2 * 4 * (32 + 32 + 32 + 16)
