"""Encoders and encoder-decoders that are only a card and weights: heads, labels, what a target begins with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace as changed
from tests.conftest import GOLDEN

import scantling as sc
from scantling.cards.schema import Head, Transform

TINY = GOLDEN / "tiny"
IDS = torch.tensor([[5, 3, 88, 1, 17, 40], [7, 7, 20, 99, 4, 2]])
LABELS = {"n_labels": 3, "bias": True}
POOLED = {"kind": "sequence", "pool": "first", **LABELS}
HEADS = {
    "bert-sequence": ("bert", Head(**POOLED, transform=Transform(act="tanh")), "BertForSequenceClassification"),
    "bert-several": (
        "bert",
        Head(**POOLED, transform=Transform(act="tanh"), scores="sigmoid"),
        "BertForSequenceClassification",
    ),
    "bert-tokens": ("bert", Head(kind="tokens", **LABELS), "BertForTokenClassification"),
    "bert-pooler": ("bert", Head(kind="embedding", pool="first", transform=Transform(act="tanh")), "BertModel"),
    "bert-bare": ("bert", Head(kind="none"), "BertModel"),
    "roberta-sequence": (
        "roberta",
        Head(**POOLED, transform=Transform(act="tanh")),
        "RobertaForSequenceClassification",
    ),
    "roberta-bare": ("roberta", Head(kind="none"), "RobertaModel"),
    "distilbert-sequence": (
        "distilbert",
        Head(**POOLED, transform=Transform(act="relu")),
        "DistilBertForSequenceClassification",
    ),
    "distilbert-bare": ("distilbert", Head(kind="none"), "DistilBertModel"),
    "electra-tokens": ("electra-discriminator", Head(kind="tokens", **LABELS), "ElectraForTokenClassification"),
    "modernbert-mean": (
        "modernbert",
        Head(**POOLED | {"pool": "mean"}, transform=Transform(act="gelu", norm=True, bias=False)),
        "ModernBertForSequenceClassification",
    ),
    "modernbert-bare": ("modernbert", Head(kind="none"), "ModernBertModel"),
}


def with_head(name: str, head: Head, **more: Any) -> sc.Model:
    """A model with random weights: the card of a fixture with another head."""
    lm = sc.new(changed(sc.load(TINY / name).card, head=head, **more), seed=4)
    with torch.no_grad():
        for weight in lm.net.parameters():
            weight += 0.2 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(weight.numel()))
    lm.net.eval()
    return lm


def config_of(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


@pytest.mark.parametrize("case", list(HEADS))
def test_the_original_implementation_reads_every_head(case: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    name, head, architecture = HEADS[case]
    lm = with_head(name, head, tied=False)
    sc.save(lm, tmp_path / "born")
    assert config_of(tmp_path / "born")["architectures"] == [architecture]
    model = getattr(transformers, architecture).from_pretrained(tmp_path / "born", attn_implementation="eager").eval()
    assert getattr(model.config, "problem_type", None) == (
        "multi_label_classification" if head.scores == "sigmoid" else None
    )
    with torch.no_grad():
        out = model(input_ids=IDS)
    wanted = out.logits if head.n_labels else out.last_hidden_state if head.kind == "none" else out.pooler_output
    torch.testing.assert_close(lm.logits(IDS), wanted, atol=2e-5, rtol=1e-4)
    assert sc.load(tmp_path / "born").parts == lm.parts


def test_names_of_labels_go_along(tmp_path: Path) -> None:
    lm = with_head("bert", HEADS["bert-sequence"][1], tied=False)
    lm.labels = ("sad", "glad", "neither")
    sc.save(lm, tmp_path / "born")
    assert config_of(tmp_path / "born")["label2id"] == {"sad": 0, "glad": 1, "neither": 2}
    assert sc.load(tmp_path / "born").labels == lm.labels


def test_a_head_that_no_family_has_stays_in_our_own_layout(tmp_path: Path) -> None:
    last = Head(**POOLED | {"pool": "last"}, transform=Transform(act="tanh"))
    lm = with_head("bert", last, tied=False)
    lm.labels = ("sad", "glad", "neither")
    assert sc.save(lm, tmp_path / "own").model_type == "scantling"
    again = sc.load(tmp_path / "own")
    assert (again.parts, again.labels) == (lm.parts, lm.labels)
    torch.testing.assert_close(again.logits(IDS), lm.logits(IDS), atol=0, rtol=0)


@pytest.mark.parametrize("name", ["bert", "distilbert", "modernbert"])
def test_a_mean_over_tokens_gets_the_files_of_sentence_transformers(name: str, tmp_path: Path) -> None:
    lm = with_head(name, Head(kind="embedding", pool="mean", normalize=True), tied=False)
    saved = sc.save(lm, tmp_path / "born")
    assert saved.model_type == name
    assert {"modules.json", "1_Pooling/config.json", "sentence_bert_config.json"} <= saved.files.keys()
    pooling = json.loads((tmp_path / "born" / "1_Pooling" / "config.json").read_text())
    assert [key for key, value in pooling.items() if value is True] == ["pooling_mode_mean_tokens"]
    again = sc.load(tmp_path / "born")
    assert again.parts == lm.parts
    sc.save(again, tmp_path / "born", overwrite=True)
    assert sc.load(tmp_path / "born").parts == lm.parts


@pytest.mark.parametrize(("name", "start"), [("t5", 0), ("t5-v1_1", 9), ("bart", 2), ("marian", 130)])
def test_what_a_target_begins_with_goes_along(name: str, start: int, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    lm = with_head(name, sc.load(TINY / name).card.head)
    sc.save(lm, tmp_path / "silent")
    assert sc.load(tmp_path / "silent").start_id is None
    lm.start_id, lm.eos_ids = start, frozenset({1})
    sc.save(lm, tmp_path / "born")
    again = sc.load(tmp_path / "born")
    assert (again.start_id, again.eos_ids) == (start, frozenset({1}))
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "born", attn_implementation="eager").eval()
    theirs = model.generate(IDS[:1], max_new_tokens=8, do_sample=False, num_beams=1, use_cache=False)
    ours = again.generate(IDS[:1], max_new_tokens=8)
    assert ours.tolist() == theirs.tolist()


def test_an_encoder_decoder_in_our_own_layout_keeps_its_start(tmp_path: Path) -> None:
    card = sc.load(TINY / "t5").card
    lm = sc.new(changed(card, norm=changed(card.norm, at=["out"])), seed=1)
    lm.start_id, lm.eos_ids = 3, frozenset({1, 2})
    assert sc.save(lm, tmp_path / "own").model_type == "scantling"
    again = sc.load(tmp_path / "own")
    assert (again.start_id, again.eos_ids, again.parts) == (3, frozenset({1, 2}), lm.parts)
    assert again.generate([[4, 5]], max_new_tokens=3)[0, 0] == 3
