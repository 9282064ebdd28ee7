"""Encoders as GGUF of the architecture bert: read back by us, by the gguf package, and run by llama.cpp."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from msgspec.structs import replace as changed
from safetensors.torch import load_file
from tests.checkpoint.gguf_tiny import recorded, tiny, with_card
from tests.conftest import GOLDEN

import scantling as sc
from scantling.cards.schema import Head
from scantling.checkpoint.families.gguf import card_of_gguf
from scantling.checkpoint.find import card_of, default_encoder
from scantling.checkpoint.gguf import read_gguf
from scantling.checkpoint.gguf_write import write_gguf
from scantling.text.tokenizer import Tokenizer

CHILD = Path(__file__).parents[1] / "llama_cpp_embed_child.py"
SENTENCES = [
    "A man is eating food.",
    "Naïve café, ÀÉÎ straße in Zürich: $100 #1!",
    "It is a truth universally acknowledged, that a single man is in want of a wife. " * 4,
    "supercalifragilisticexpialidocious 1234567 3.14",
    "“quoted” ‘x’ … ½ Ⅷ ﬁ 中文字 русский",
]
BARE, POOLED = Head(kind="none"), Head(kind="embedding", pool="mean", normalize=True)


def llama_cpp(path: Path, texts: list[str]) -> dict[str, Any]:
    """Its ids of each text and what its embeddings endpoint gives."""
    asked = json.dumps({"model": str(path), "texts": texts})
    done = subprocess.run([sys.executable, CHILD], input=asked, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    (answer,) = (line for line in done.stdout.splitlines() if line.startswith("answer:"))
    found: dict[str, Any] = json.loads(answer.removeprefix("answer:"))
    return found


def vocabulary() -> Tokenizer:
    letters, digits = "abcdefghijklmnopqrstuvwxyz", "0123456789"
    pairs = [a + b for a in letters for b in "aeiou"][:54]
    begin = [*(f"▁{sign}" for sign in letters + digits), *(f"▁{pair}" for pair in pairs)]
    values = {
        "model": "bert",
        "tokens": ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *begin, *letters, *digits],
        "token_type": [3] * 5 + [1] * 126,
        "bos_token_id": 2,
        "seperator_token_id": 3,
        "unknown_token_id": 1,
        "mask_token_id": 4,
    }
    return Tokenizer.from_gguf({f"tokenizer.ggml.{key}": value for key, value in values.items()})


def headed(name: str, head: Head) -> sc.Model:
    """A recorded encoder under another head, which has no weights."""
    lm = tiny(name)
    card = changed(lm.card, head=head, tied=False)
    parts = sc.assemble(card)
    net = parts.build()
    net.load_state_dict({key: value for key, value in lm.net.state_dict().items() if not key.startswith("head.")})
    return replace(lm, card=card, parts=parts, net=net.eval().requires_grad_(False), tokenizer=vocabulary())


@pytest.fixture(scope="module")
def minilm() -> sc.Model:
    return sc.load(default_encoder())


@pytest.fixture(scope="module")
def files(minilm: sc.Model, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The real model in each dtype, written once."""
    folder = tmp_path_factory.mktemp("bert")

    def written(dtype: str) -> Path:
        path: Path = folder / f"{dtype}.gguf"
        if not path.exists():
            write_gguf(minilm, path, dtype)
        return path

    return written


@pytest.mark.parametrize("head", [BARE, POOLED, changed(POOLED, pool="first"), changed(POOLED, pool="last")])
@pytest.mark.parametrize("name", ["bert", "distilbert"])
def test_read_back_it_is_the_same_model(name: str, head: Head, tmp_path: Path) -> None:
    io, before, path = recorded(name), headed(name, head), tmp_path / "model.gguf"
    write_gguf(before, path)
    after = sc.load(path)
    assert sc.assemble(after.card) == before.parts
    found = after.logits(io["input_ids"], io["attention_mask"])
    assert torch.equal(found, before.logits(io["input_ids"], io["attention_mask"]))
    write_gguf(after, tmp_path / "again.gguf")
    assert (tmp_path / "again.gguf").read_bytes() == path.read_bytes()


def test_the_stream_is_what_transformers_computes(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    path, io = tmp_path / "model.gguf", recorded("bert")
    write_gguf(headed("bert", BARE), path)
    model = transformers.AutoModel.from_pretrained(GOLDEN / "tiny" / "bert", attn_implementation="eager").eval()
    with torch.no_grad():
        wanted = model(io["input_ids"], attention_mask=io["attention_mask"]).last_hidden_state
    real = io["attention_mask"].bool()
    found = sc.load(path).logits(io["input_ids"], io["attention_mask"])
    torch.testing.assert_close(found[real], wanted[real], atol=5e-5, rtol=1e-4)


def test_names_and_numbers_by_the_gguf_package(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(headed("bert", POOLED), path)
    reader = gguf.GGUFReader(path)
    known = gguf.get_tensor_name_map(gguf.MODEL_ARCH.BERT, 2)
    stored = load_file(GOLDEN / "tiny" / "bert" / "model.safetensors")
    wanted = {}
    for key, value in stored.items():
        # Their converter leaves the head for masks out.
        if (name := known.get_name(key.removeprefix("bert."), try_suffixes=(".weight", ".bias"))) and "cls." not in key:
            wanted[name] = value
    found = {tensor.name: tensor.data for tensor in reader.tensors}
    assert len(wanted) == 2 * 16 + 5
    assert set(found) == set(wanted)
    assert all(np.array_equal(found[name], value.numpy()) for name, value in wanted.items())
    metadata = read_gguf(path).metadata
    assert {key: metadata[f"bert.{key}"] for key in ("pooling_type", "attention.causal", "context_length")} == {
        "pooling_type": gguf.PoolingType.MEAN,
        "attention.causal": False,
        "context_length": 64,
    }
    assert metadata["tokenizer.ggml.token_type_count"] == 3


@pytest.mark.parametrize("head", [BARE, POOLED, changed(POOLED, pool="first"), changed(POOLED, pool="last")])
@pytest.mark.parametrize("name", ["bert", "distilbert"])
def test_llama_cpp_pools_as_the_card_says(name: str, head: Head, tmp_path: Path) -> None:
    lm, path, texts = headed(name, head), tmp_path / "model.gguf", ["bade cafe 12 x?", "zig"]
    write_gguf(lm, path)
    assert lm.tokenizer is not None
    answer = llama_cpp(path, texts)
    assert answer["ids"] == [lm.tokenizer.encode(text) for text in texts]
    for ids, vectors in zip(answer["ids"], answer["vectors"], strict=True):
        assert len(vectors) == (len(ids) if head == BARE else 1)
        # Of the stream, whose numbers are near 1, and of vectors of length 1: GELU is that of tanh there.
        atol = 4e-3 if head == BARE else 5e-4
        torch.testing.assert_close(lm.logits(ids)[0].view(-1, 48), torch.tensor(vectors), atol=atol, rtol=0)


def test_the_real_model_read_back_gives_the_same_vectors(minilm: sc.Model, files: Any) -> None:
    again = sc.load(files("f32"))
    assert torch.equal(again.embed(SENTENCES), minilm.embed(SENTENCES))
    card = card_of(files("f32"))
    assert card.head == POOLED
    assert changed(minilm.card, head=POOLED, dropout=card.dropout, name=card.name, dtype=card.dtype) == changed(
        card, attention=minilm.card.attention
    )
    assert sc.assemble(card).params == 22713216 - 384 * 384 - 384


@pytest.mark.parametrize(
    ("dtype", "to_read", "to_original", "closest"),
    [("f32", 5e-4, 5e-4, 0.99999), ("f16", 5e-4, 5e-4, 0.99999), ("q8_0", 8e-3, 1e-2, 0.999)],
)
def test_llama_cpp_gives_the_vectors_of_the_real_model(
    dtype: str, to_read: float, to_original: float, closest: float, minilm: sc.Model, files: Any
) -> None:
    """Largest difference and least cosine: 3.0e-4 and 1 - 1.3e-6 as F32, 3.3e-4 and 1 - 1.5e-6 as F16, 5.0e-3 and
    1 - 4.7e-4 as Q8_0. Most of that is GELU, which is that of tanh there: with it the first is 6.6e-5.
    """
    answer = llama_cpp(files(dtype), SENTENCES)
    theirs = torch.tensor([vectors[0] for vectors in answer["vectors"]])
    assert minilm.tokenizer is not None
    assert answer["ids"] == [minilm.tokenizer.encode(text) for text in SENTENCES]
    tanh = with_card(minilm, mlp=changed(minilm.card.mlp, act="gelu_tanh"))
    bounds = [(sc.load(files(dtype)), to_read), (minilm, to_original), *([(tanh, 1.5e-4)] if dtype == "f32" else [])]
    for lm, atol in bounds:
        ours = lm.embed(SENTENCES)
        assert float((ours * theirs).sum(-1).min()) > closest
        torch.testing.assert_close(ours, theirs, atol=atol, rtol=0)


def test_what_llama_cpp_does_otherwise_is_said(minilm: sc.Model, tmp_path: Path) -> None:
    notes = write_gguf(minilm, tmp_path / "model.gguf", "q8_0")
    assert any("GELU by its tanh form" in note for note in notes)
    assert "the head's transform is left out, as nothing reads its result" in notes
    kinds = {name: tensor.kind for name, tensor in read_gguf(tmp_path / "model.gguf").tensors.items()}
    assert kinds["token_types.weight"] == kinds["position_embd.weight"] == "F32"
    assert kinds["token_embd.weight"] == kinds["blk.5.ffn_down.weight"] == "Q8_0"


@pytest.mark.parametrize(
    ("name", "head", "told"),
    [
        ("bert", None, "'bert' is nearest, and it cannot say head.kind 'lm' \\(it means 'none'\\)"),
        ("bert", changed(POOLED, normalize=False), r"it cannot say head.normalize False \(it means True\)"),
        ("roberta", POOLED, r"it cannot say position.offset 2 \(it means 0\)"),
        ("electra-discriminator", POOLED, r"it cannot say embedding.width 28 \(it means None\)"),
        ("bart", None, "family is encoder-decoder, which none of the architectures here has"),
    ],
)
def test_what_it_cannot_say_is_refused(name: str, head: Head | None, told: str, tmp_path: Path) -> None:
    lm = tiny(name)
    if head is not None:
        card = changed(lm.card, head=head, tied=False)
        lm = replace(lm, card=card, parts=sc.assemble(card), net=sc.assemble(card).build())
    with pytest.raises(sc.ScantlingInputError, match=told):
        write_gguf(lm, tmp_path / "model.gguf")
    assert list(tmp_path.iterdir()) == []


def test_another_activation_is_refused(tmp_path: Path) -> None:
    lm = headed("bert", POOLED)
    with pytest.raises(sc.ScantlingInputError, match=r"mlp.act 'gelu_tanh' \(it means 'gelu'\)"):
        write_gguf(with_card(lm, mlp=changed(lm.card.mlp, act="gelu_tanh")), tmp_path / "model.gguf")


KEYS = {
    "context_length": 64,
    "embedding_length": 48,
    "block_count": 2,
    "feed_forward_length": 76,
    "attention.head_count": 4,
    "attention.layer_norm_epsilon": 9.999999960041972e-13,
    "attention.causal": False,
    "pooling_type": 2,
}


def read(tensors: dict[str, Any] | None = None, **changes: Any) -> sc.Card:
    count = changes.pop("token_type_count", None)
    keys = KEYS | {key.replace("__", "."): value for key, value in changes.items()}
    metadata = {f"bert.{key}": value for key, value in keys.items() if value is not None}
    if count is not None:
        metadata["tokenizer.ggml.token_type_count"] = count
    table = {"token_embd.weight": SimpleNamespace(shape=(131, 48))}
    return card_of_gguf({"general.architecture": "bert", **metadata}, table | (tensors or {}), "x.gguf")


def test_the_card_of_metadata() -> None:
    types = {"token_types.weight": SimpleNamespace(shape=(2, 48)), "blk.0.attn_q.bias": 0, "blk.0.ffn_up.bias": 0}
    card = read(types, token_type_count=2)
    assert (card.family, card.norm.at, card.norm.eps, card.embedding.types) == ("encoder", ["out"], 1e-12, 2)
    assert (card.attention.bias, card.mlp.bias, card.mlp.act) == (["q"], True, "gelu")
    assert card.head == changed(POOLED, pool="first")
    assert read(pooling_type=None).head == read(pooling_type=0).head == BARE
    assert read(token_type_count=1).embedding.types is None


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"attention__causal": None}, "bert.attention.causal is None; it must be false, as an encoder reads both ways"),
        ({"attention__causal": True}, "bert.attention.causal is True"),
        ({"pooling_type": 4}, "bert.pooling_type is 4; 0 .* are read"),
        ({"token_type_count": 2}, "tokenizer.ggml.token_type_count is 2, which is not supported; it must be 1"),
        ({"attention__head_count_kv": 2}, "bert.attention.head_count_kv is 2"),
        ({"classifier__output_labels": ["a", "b"]}, "'bert.classifier.output_labels' is not known"),
    ],
)
def test_metadata_of_another_model_is_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(sc.ScantlingInputError, match=told):
        read(**changes)
