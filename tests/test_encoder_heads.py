"""Heads of encoders against the original classes, built here with random weights, saved and loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

import scantling as sc
from scantling.cards.rules import complete
from scantling.checkpoint.find import card_of
from scantling.checkpoint.hf_config import card_of_config
from scantling.errors import ScantlingInputError

BERT = {
    "vocab_size": 61,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "max_position_embeddings": 32,
    "initializer_range": 0.3,
}
DISTIL = {
    "vocab_size": 61,
    "dim": 24,
    "n_layers": 2,
    "n_heads": 3,
    "hidden_dim": 40,
    "max_position_embeddings": 32,
    "initializer_range": 0.3,
}
MODERN = BERT | {
    "pad_token_id": 0,
    "bos_token_id": 1,
    "cls_token_id": 1,
    "eos_token_id": 2,
    "sep_token_id": 2,
    "local_attention": 6,
    "num_hidden_layers": 4,
}
CONFIGS = {
    "Bert": BERT,
    "Roberta": BERT | {"type_vocab_size": 1, "layer_norm_eps": 1e-5},
    "Electra": BERT | {"embedding_size": 12},
    "DistilBert": DISTIL,
    "ModernBert": MODERN,
}
CASES = [
    *((family, f"For{task}Classification", {}) for family in CONFIGS for task in ("Sequence", "Token")),
    *((family, "ForMaskedLM", {}) for family in CONFIGS),
    *((family, "Model", {}) for family in CONFIGS),
    ("Bert", "ForPreTraining", {}),
    ("Electra", "ForPreTraining", {}),
    ("ModernBert", "ForSequenceClassification", {"classifier_pooling": "mean", "classifier_bias": True}),
    ("ModernBert", "ForTokenClassification", {"norm_bias": True, "attention_bias": True, "mlp_bias": True}),
    ("ModernBert", "ForMaskedLM", {"decoder_bias": False, "global_attn_every_n_layers": 2}),
    ("Bert", "ForMaskedLM", {"tie_word_embeddings": False}),
    ("Roberta", "ForMaskedLM", {"tie_word_embeddings": False}),
    ("DistilBert", "ForMaskedLM", {"tie_word_embeddings": False}),
    ("Electra", "ForMaskedLM", {"tie_word_embeddings": False, "embedding_size": 24}),
    ("Electra", "ForSequenceClassification", {"embedding_size": 24}),
    ("Roberta", "Model", {"pad_token_id": 4, "type_vocab_size": 2}),
    ("DistilBert", "ForTokenClassification", {"sinusoidal_pos_embds": True, "activation": "relu"}),
]


def saved(folder: Path, family: str, task: str, more: dict[str, Any]) -> Any:
    """A random model of the original implementation, in evaluation mode, and its folder written."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(len(task) + len(family))
    labels = {"num_labels": 5} if "Classification" in task else {}
    config = getattr(transformers, f"{family}Config")(**(CONFIGS[family] | labels | more))
    model = getattr(transformers, family + task)(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            # Norms and shifts begin at 1 and 0, where a wrong one would not show.
            if weight.dim() == 1:
                weight += 0.2 * torch.randn_like(weight)
            assert weight.abs().sum() > 0, name
    model.save_pretrained(folder)
    return model


def told(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """What the original makes of ids: logits, or the pooled vector, or the stream."""
    with torch.no_grad():
        out = model(ids, attention_mask=mask)
    for key in ("logits", "prediction_logits", "pooler_output", "last_hidden_state"):
        if out.get(key) is not None:
            return out[key]
    raise AssertionError(out.keys())


@pytest.mark.parametrize(("family", "task", "more"), CASES, ids=lambda x: str(x) if x else "")
def test_each_class_gives_the_logits_of_the_original(tmp_path: Path, family: str, task: str, more: Any) -> None:
    model = saved(tmp_path, family, task, more)
    pad = int(more.get("pad_token_id", 1 if family == "Roberta" else 0))
    ids, mask = torch.randint(5, 61, (3, 14)), torch.ones(3, 14, dtype=torch.int64)
    mask[1, 9:], mask[2, 2:] = 0, 0
    ids = ids.masked_fill(mask == 0, pad)
    lm = sc.load(tmp_path)
    ours, theirs = lm.logits(ids, mask), told(model, ids, mask)
    assert ours.shape == theirs.shape
    if ours.shape[:2] == mask.shape:
        ours, theirs = ours[mask.bool()], theirs[mask.bool()]
    assert float(theirs.std()) > 0.05
    torch.testing.assert_close(ours, theirs, atol=3e-5, rtol=1e-4)
    unread = sum(".weight" in note or ".bias" in note for note in lm.notes)
    assert unread == (task == "ForPreTraining" and family == "Bert") + (
        task == "ForMaskedLM" and family in ("Bert", "Roberta") and more.get("tie_word_embeddings") is False
    )
    if task != "ForPreTraining" and not unread:
        assert lm.parts.params == model.num_parameters()


def config(family: str, task: str, **more: Any) -> dict[str, Any]:
    return {**CONFIGS[family], "model_type": family.lower(), "architectures": [family + task], **more}


def test_labels_have_names_and_a_number(tmp_path: Path) -> None:
    names = {"0": "sad", "1": "glad", "2": "neither"}
    saved(tmp_path, "Bert", "ForSequenceClassification", {"num_labels": 3, "id2label": names})
    lm = sc.load(tmp_path)
    assert lm.labels == ("sad", "glad", "neither")
    assert (lm.card.head.n_labels, lm.card.head.scores) == (3, "softmax")


@pytest.mark.parametrize(
    ("more", "n_labels", "scores"),
    [
        ({}, 2, "softmax"),
        ({"num_labels": 7}, 7, "softmax"),
        ({"num_labels": 1}, 1, "sigmoid"),
        ({"id2label": {"0": "a", "1": "b", "2": "c"}}, 3, "softmax"),
        ({"problem_type": "multi_label_classification", "num_labels": 4}, 4, "sigmoid"),
        ({"problem_type": "single_label_classification"}, 2, "softmax"),
    ],
)
def test_what_the_labels_are(more: Any, n_labels: int, scores: str) -> None:
    head = card_of_config(config("Bert", "ForSequenceClassification", **more), "x", "x").head
    assert (head.n_labels, head.scores) == (n_labels, scores)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            config("Bert", "ForQuestionAnswering"),
            r"architectures is 'BertForQuestionAnswering'; known: BertForMaskedLM",
        ),
        (config("Bert", "ForMaskdLM"), "did you mean 'BertForMaskedLM'"),
        (config("Electra", "ForCausalLM"), "known: ElectraForPreTraining"),
        (config("Bert", "ForSequenceClassification", num_labels=3, id2label={"0": "a"}), "they must agree"),
        (config("Bert", "ForSequenceClassification", id2label=["a"]), "a mapping is needed"),
        (config("Bert", "ForSequenceClassification", problem_type="regression"), "problem_type is 'regression'"),
        (config("Bert", "Model", position_embedding_type="relative_key"), "position_embedding_type"),
        (config("Bert", "Model", is_decoder=True), "is_decoder is True, which is not supported"),
        (config("Bert", "Model", add_cross_attention=True), "add_cross_attention"),
        (config("Bert", "Model", architectures=[3]), "architectures is 3"),
        (config("Roberta", "Model", max_position_embeddings=2), "at least 3 is needed"),
        (config("Electra", "ForMaskedLM", tie_word_embeddings=False), "tie_word_embeddings is False"),
        (config("ModernBert", "ForSequenceClassification", classifier_pooling="max"), "known: cls, mean"),
        (config("ModernBert", "Model", rope_scaling={"type": "linear", "factor": 2.0}), "rope_scaling"),
        (config("ModernBert", "Model", layer_types=["full_attention"]), "names 1 layers"),
        (config("ModernBert", "Model", attention_dropout=0.1), "attention_dropout is 0.1"),
    ],
)
def test_what_is_not_understood_is_refused(data: Any, message: str) -> None:
    with pytest.raises(ScantlingInputError, match=message):
        card_of_config(data, "x", "x")


def test_a_config_without_architectures_is_the_bare_model() -> None:
    data = config("Bert", "Model")
    del data["architectures"]
    assert card_of_config(data, "x", "x").head == card_of_config(config("Bert", "Model"), "x", "x").head


def test_roberta_has_as_many_positions_as_its_table_leaves() -> None:
    card = sc.card("roberta-base")
    assert (card.context, card.position.offset) == (512, 2)
    assert dict(sc.assemble(card).named_weights)["encoder.position.table.weight"] == (514, 768)


def test_positions_counted_from_ids_are_an_encoders() -> None:
    """A decoder's cache holds keys and no ids, so the count of a later piece would begin anew."""
    roberta = sc.card("roberta-base")
    plain = replace(roberta.embedding, types=None)
    drawn = replace(roberta, family="decoder", embedding=plain, head=replace(roberta.head, transform=None))
    with pytest.raises(ScantlingInputError, match=r"position.pad_id is 1: it is defined for a card of family encoder"):
        complete(drawn)


def test_a_missing_pooler_is_an_error_unless_the_config_says_so(tmp_path: Path) -> None:
    model = saved(tmp_path, "Bert", "Model", {})
    tensors = {k: v for k, v in load_file(tmp_path / "model.safetensors").items() if not k.startswith("pooler")}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ScantlingInputError, match=r"'bert.pooler.dense.weight' and 1 more is missing"):
        sc.load(tmp_path)
    data = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(data | {"add_pooling_layer": False}))
    lm = sc.load(tmp_path)
    with torch.no_grad():
        wanted = model(torch.tensor([[5, 6, 7]])).last_hidden_state
    torch.testing.assert_close(lm.logits([[5, 6, 7]]), wanted, atol=1e-5, rtol=1e-4)


def test_a_tied_head_stored_again_must_equal_the_table(tmp_path: Path) -> None:
    saved(tmp_path, "Bert", "ForMaskedLM", {})
    tensors = load_file(tmp_path / "model.safetensors")
    again = tensors["bert.embeddings.word_embeddings.weight"].clone()
    save_file(tensors | {"cls.predictions.decoder.weight": again}, tmp_path / "model.safetensors")
    assert any("stored again" in note for note in sc.load(tmp_path).notes)
    save_file(tensors | {"cls.predictions.decoder.weight": again + 1}, tmp_path / "model.safetensors")
    with pytest.raises(ScantlingInputError, match="differ; set tie_word_embeddings to false"):
        sc.load(tmp_path)


POOLING = {"word_embedding_dimension": 24, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": False}


def sentence_folder(folder: Path, kinds: list[str], pooling: dict[str, Any]) -> None:
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(POOLING | pooling))


@pytest.mark.parametrize(
    ("mode", "pool", "pick"),
    [
        ("mean_tokens", "mean", lambda x, n: x[:n].mean(0)),
        ("cls_token", "first", lambda x, n: x[0]),
        ("lasttoken", "last", lambda x, n: x[n - 1]),
    ],
)
@pytest.mark.parametrize("family", ["Bert", "DistilBert"])
def test_modules_beside_the_config_decide_the_head(
    tmp_path: Path, family: str, mode: str, pool: str, pick: Any
) -> None:
    model = saved(tmp_path, family, "Model", {})
    sentence_folder(tmp_path, ["Transformer", "Pooling", "Normalize"], {f"pooling_mode_{mode}": True})
    ids, mask = torch.randint(5, 61, (2, 9)), torch.ones(2, 9, dtype=torch.int64)
    mask[1, 4:] = 0
    lm = sc.load(tmp_path)
    head = lm.card.head
    assert (head.kind, head.pool, head.normalize, head.spare) == ("embedding", pool, True, family == "Bert")
    assert card_of(tmp_path).head == head
    assert lm.parts.params == model.num_parameters()
    with torch.no_grad():
        stream = model(ids, attention_mask=mask).last_hidden_state
    wanted = torch.stack([pick(x, int(n)) for x, n in zip(stream, mask.sum(1), strict=True)])
    wanted = wanted / wanted.norm(dim=-1, keepdim=True)
    torch.testing.assert_close(lm.logits(ids, mask), wanted, atol=1e-5, rtol=1e-4)


def test_without_normalize_the_vector_keeps_its_length(tmp_path: Path) -> None:
    saved(tmp_path, "Bert", "ForMaskedLM", {})
    sentence_folder(tmp_path, ["Transformer", "Pooling"], {"pooling_mode_mean_tokens": True})
    lm = sc.load(tmp_path)
    assert lm.card.head.transform is None
    torch.testing.assert_close(lm.logits([[5, 6, 7]]), lm.hidden([[5, 6, 7]])[-1].mean(1), atol=1e-6, rtol=1e-5)
    assert "cls.predictions" in lm.notes[0]


@pytest.mark.parametrize(
    ("kinds", "pooling", "message"),
    [
        (["Transformer", "Pooling"], {"pooling_mode_max_tokens": True}, "pooling_mode_max_tokens is asked for"),
        (["Transformer", "Pooling"], {"pooling_mode_weightedmean_tokens": True}, "weightedmean_tokens is asked for"),
        (["Transformer", "Pooling"], {}, "no mode is asked for"),
        (
            ["Transformer", "Pooling"],
            {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True},
            "cls_token and pooling_mode_mean_tokens is asked for; exactly one",
        ),
        (["Transformer", "Pooling"], {"pooling_mode_best": True}, "'pooling_mode_best' is not known"),
        (["Transformer", "Pooling", "Dense"], {"pooling_mode_mean_tokens": True}, "'Dense'; Transformer, Pooling"),
        (["Transformer"], {"pooling_mode_mean_tokens": True}, "the modules are 'Transformer'"),
    ],
)
def test_other_modules_and_ways_of_pooling_are_refused(
    tmp_path: Path, kinds: list[str], pooling: dict[str, Any], message: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config("Bert", "Model")))
    sentence_folder(tmp_path, kinds, pooling)
    with pytest.raises(ScantlingInputError, match=message):
        card_of(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"idx": 0}', "a JSON list is needed"),
        ('[{"idx": 0}]', "an object with type and path is needed"),
        ("[3]", "an object with type and path is needed"),
        ('[{"type": "a.Transformer", "path": "../x"}]', "a folder inside this one is needed"),
    ],
)
def test_malformed_modules_are_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config("Bert", "Model")))
    (tmp_path / "modules.json").write_text(text)
    with pytest.raises(ScantlingInputError, match=message):
        card_of(tmp_path)
