"""`scantling embed`, `fill` and `classify`: output, JSON, and one sentence for every wrong input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import scantling as sc
from scantling.cli.main import _run

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "man", "is", "eating", "food", "bread", "##s", "."]


def call(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    capsys.readouterr()  # what saving a model printed
    status = _run(list(args))
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def answer(capsys: pytest.CaptureFixture[str], *args: str) -> Any:
    status, out, err = call(capsys, *args, "--json")
    assert status == 0
    assert all(line.startswith("note: ") for line in err.splitlines())
    return json.loads(out)


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    status, out, err = call(capsys, *args)
    assert (status, out) == (2, "")
    last = err.splitlines()[-1]
    assert last.startswith("error: ")
    return last


def folder(path: Path, cls: str, tokenizer: bool = True, mask: bool = True, **more: Any) -> Path:
    """A random model of the original implementation with a small WordPiece tokenizer, written to a folder."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    torch.manual_seed(3)
    kind = cls.partition("For")[0].removesuffix("Model")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 20}
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=len(WORDS), max_position_embeddings=12, initializer_range=0.5, **(sizes | more)
    )
    getattr(transformers, cls)(config).save_pretrained(path)
    if tokenizer:
        made = Tokenizer(models.WordPiece({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
        made.normalizer = normalizers.BertNormalizer()
        made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        made.add_special_tokens(WORDS[:5])
        made.post_processor = processors.TemplateProcessing(
            "[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
        made.enable_truncation(4)
        made.enable_padding(length=9)
        made.save(str(path / "tokenizer.json"))
        (path / "tokenizer_config.json").write_text(json.dumps({"mask_token": "[MASK]"} if mask else {}))
    return path


def test_embed_is_the_default_encoder(capsys: pytest.CaptureFixture[str]) -> None:
    (vector, other) = answer(capsys, "embed", "A man is eating food.", "The girl is carrying a baby.")["embeddings"]
    assert vector[:5] == pytest.approx([0.03324, 0.00441, -0.00628, 0.04838, -0.1387], abs=6e-6)
    assert sum(a * b for a, b in zip(vector, other, strict=True)) == pytest.approx(-0.1050, abs=5e-5)


def test_embed_a_file_and_write_the_vectors(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    made = folder(tmp_path / "m", "BertModel")
    texts = tmp_path / "texts.txt"
    texts.write_text("a man\n\nis eating food.\n", encoding="utf-8")
    out = tmp_path / "v.npy"
    status, shown, err = call(capsys, "embed", "bread", "-m", str(made), "--file", str(texts), "--out", str(out))
    assert (status, shown) == (0, "")
    assert "3 vectors of 16 numbers written" in err
    vectors = numpy.load(out)
    lm = sc.load(made)
    wanted = lm.logits([[2, 10, 3]])[0]
    torch.testing.assert_close(torch.from_numpy(vectors)[0], wanted, atol=1e-6, rtol=0)
    assert vectors.shape == (3, 16)
    assert lm.tokenizer is not None
    assert lm.tokenizer.encode("is eating food.") == [2, 7, 8, 9, 12, 3]
    status, shown, _ = call(capsys, "embed", "a man", "a man", "-m", str(made))
    assert status == 0
    assert shown.splitlines()[2].split()[-2:] == ["1", "1"]


def test_a_long_text_is_cut_with_a_note(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    made = folder(tmp_path, "BertModel")
    _, _, err = call(capsys, "embed", "bread " * 20, "-m", str(made))
    assert "note: text 1 has 22 tokens and the context holds 12; its end is cut" in err
    (cut, whole) = answer(capsys, "embed", "bread " * 20, "bread " * 10, "-m", str(made))["embeddings"]
    assert cut == pytest.approx(whole, abs=1e-6)


@pytest.mark.parametrize("cls", ["BertForMaskedLM", "ElectraForMaskedLM"])
def test_fill(capsys: pytest.CaptureFixture[str], tmp_path: Path, cls: str) -> None:
    transformers = pytest.importorskip("transformers")
    made = folder(tmp_path, cls)
    found = answer(capsys, "fill", "a [MASK] is [MASK] food.", "-m", str(made), "--top", "3")["tokens"]
    ids = torch.tensor([[2, 5, 4, 7, 4, 9, 12, 3]])
    with torch.no_grad():
        scores = getattr(transformers, cls).from_pretrained(made).eval()(ids).logits[0].softmax(-1)
    assert len(found) == 2
    for place, guesses in zip((2, 4), found, strict=True):
        likely = scores[place].topk(3)
        assert [g["id"] for g in guesses] == likely.indices.tolist()
        assert [g["probability"] for g in guesses] == pytest.approx(likely.values.tolist(), abs=1e-5)
        assert [g["token"] for g in guesses] == [WORDS[i] for i in likely.indices]
    status, out, _ = call(capsys, "fill", "a [MASK]", "-m", str(made), "--top", "2")
    assert (status, len(out.split("\n\n")[0].splitlines())) == (0, 4)


def test_classify_texts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    names = {0: "sad", 1: "glad", 2: "neither"}
    made = folder(tmp_path, "BertForSequenceClassification", num_labels=3, id2label=names)
    found = answer(capsys, "classify", "a man", "is eating food.", "-m", str(made))["labels"]
    original = transformers.AutoModelForSequenceClassification.from_pretrained(made).eval()
    for ids, labels in zip(([2, 5, 6, 3], [2, 7, 8, 9, 12, 3]), found, strict=True):
        with torch.no_grad():
            wanted = original(torch.tensor([ids])).logits[0].softmax(-1)
        assert {entry["label"]: entry["score"] for entry in labels} == pytest.approx(
            {names[i]: float(wanted[i]) for i in range(3)}, abs=1e-5
        )
        assert labels == sorted(labels, key=lambda entry: -entry["score"])


def test_labels_that_do_not_exclude_each_other(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    more = {"num_labels": 3, "problem_type": "multi_label_classification"}
    made = folder(tmp_path, "BertForSequenceClassification", **more)
    (labels,) = answer(capsys, "classify", "a man", "-m", str(made))["labels"]
    with torch.no_grad():
        original = transformers.AutoModelForSequenceClassification.from_pretrained(made).eval()
        wanted = original(torch.tensor([[2, 5, 6, 3]])).logits[0].sigmoid()
    assert {e["label"]: e["score"] for e in labels} == pytest.approx(
        {f"LABEL_{i}": float(wanted[i]) for i in range(3)}, abs=1e-5
    )


def test_classify_tokens(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    made = folder(tmp_path, "BertForTokenClassification", num_labels=4)
    (found,) = answer(capsys, "classify", "man eating foods", "-m", str(made))["labels"]
    with torch.no_grad():
        original = transformers.AutoModelForTokenClassification.from_pretrained(made).eval()
        wanted = original(torch.tensor([[2, 6, 8, 9, 11, 3]])).logits[0, 1:-1].softmax(-1).max(-1)
    assert [entry["token"] for entry in found] == ["man", "eating", "food", "##s"]
    assert [entry["label"] for entry in found] == [f"LABEL_{i}" for i in wanted.indices.tolist()]
    assert [entry["score"] for entry in found] == pytest.approx(wanted.values.tolist(), abs=1e-5)


def test_classify_replaced_tokens(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    made = folder(tmp_path, "ElectraForPreTraining")
    (found,) = answer(capsys, "classify", "man eating foods", "-m", str(made))["labels"]
    with torch.no_grad():
        original = transformers.ElectraForPreTraining.from_pretrained(made).eval()
        replaced = original(torch.tensor([[2, 6, 8, 9, 11, 3]])).logits[0, 1:-1].sigmoid()
    assert [entry["label"] for entry in found] == ["replaced" if p > 0.5 else "original" for p in replaced]
    assert [entry["score"] for entry in found] == pytest.approx(
        [max(float(p), 1 - float(p)) for p in replaced], abs=1e-5
    )
    assert len({entry["label"] for entry in found}) == 2


def test_wrong_uses_get_one_sentence(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    bare = str(folder(tmp_path / "bare", "BertModel"))
    masked = str(folder(tmp_path / "masked", "BertForMaskedLM", mask=False))
    mute = str(folder(tmp_path / "mute", "BertForMaskedLM", tokenizer=False))
    filling = str(folder(tmp_path / "filling", "BertForMaskedLM"))
    for args, message in {
        ("embed",): "no text is given",
        ("embed", ""): "text 1 is empty",
        ("embed", "x", "  "): "text 2 is empty",
        ("embed", "x", "--file", "nowhere.txt"): "nowhere.txt: no such file",
        ("embed", "x", "--out", "vectors.txt"): "a .npy file in a folder that exists is needed",
        ("embed", "x", "-m", "gpt2"): "gpt2 is of family decoder; this command needs an encoder",
        ("embed", "x", "-m", "bert-base-uncased"): "is a card without weights",
        ("embed", "x", "-m", mute): "the model has no tokenizer",
        ("fill", "", "-m", filling): "text 1 is empty",
        ("fill", "a man", "-m", filling): "the text has no mask: write [MASK] where a word is missing",
        ("fill", "a [MASK]", "-m", masked): "the model's tokenizer has no mask token",
        ("fill", "a [MASK]", "-m", bare): "the card's head is embedding; a masked language model (lm) is needed",
        ("fill", "a [MASK]", "-m", "llama-3-8b"): "is of family decoder",
        ("classify", "a", "-m", bare): "the card's head is embedding; a head of kind sequence, tokens or replaced",
        ("classify", "", "-m", bare): "text 1 is empty",
        ("classify", "-m", bare): "Missing argument",
        ("fill", "x"): "Missing option",
    }.items():
        assert message in refused(capsys, *args), args
