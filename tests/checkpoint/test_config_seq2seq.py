"""Configs and files of T5, BART and Marian: spellings, what is refused, copies of the table."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.conftest import DATA, GOLDEN

import scantling as sc
from scantling.checkpoint.hf_config import card_of_config


def config(name: str, **changes: Any) -> dict[str, Any]:
    data = json.loads((GOLDEN / "configs" / f"{name}.json").read_text()) | changes
    return {key: value for key, value in data.items() if value != "gone"}


def card(name: str, **changes: Any) -> sc.Card:
    return card_of_config(config(name, **changes), name, name)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("t5-small", {"architectures": ["T5EncoderModel"]}, r"architectures is \['T5EncoderModel'\]"),
        ("t5-small", {"architectures": ["T5ForQuestionAnswering"]}, "T5ForQuestionAnswering"),
        ("t5-small", {"architectures": "T5Model"}, None),
        ("t5-v1_1-base", {"architectures": ["T5Model"]}, "a T5ForConditionalGeneration is needed"),
        ("t5-small", {"feed_forward_proj": "gated-gleu"}, "feed_forward_proj is 'gated-gleu'; known: relu"),
        ("t5-small", {"feed_forward_proj": 3}, "feed_forward_proj is 3"),
        ("t5-small", {"dense_act_fn": "silu"}, "dense_act_fn is 'silu', which is not supported; it must be 'relu'"),
        ("t5-small", {"is_gated_act": True}, "is_gated_act is True"),
        ("t5-small", {"tie_word_embeddings": False, "scale_decoder_outputs": True}, "only a tied head is scaled"),
        ("t5-small", {"is_encoder_decoder": False}, "is_encoder_decoder is False"),
        ("t5-small", {"is_decoder": True}, "is_decoder is True"),
        ("t5-small", {"num_decoder_layers": 0.5}, "num_decoder_layers is 0.5"),
        ("t5-small", {"relative_attention_num_buckets": 30}, "a multiple of 4"),
        ("t5-small", {"rope_theta": 1e4}, "rope_theta"),
        ("bart-base", {"architectures": ["BartForSequenceClassification"]}, "BartForSequenceClassification"),
        ("bart-base", {"architectures": ["BartForCausalLM"]}, "BartForCausalLM"),
        ("bart-base", {"normalize_before": True}, "normalize_before is True"),
        ("bart-base", {"add_final_layer_norm": True}, "add_final_layer_norm is True"),
        ("bart-base", {"normalize_embedding": False}, "normalize_embedding is False"),
        ("bart-base", {"static_position_embeddings": True}, "static_position_embeddings is True"),
        ("bart-base", {"extra_pos_embeddings": 0}, "extra_pos_embeddings is 0"),
        ("bart-base", {"encoder_layerdrop": 0.1}, "encoder_layerdrop is 0.1"),
        ("bart-base", {"tie_word_embeddings": False}, "tie_word_embeddings is False"),
        ("bart-base", {"num_hidden_layers": 12}, "num_hidden_layers is 12"),
        ("bart-base", {"decoder_attention_heads": 5}, "n_heads is 5"),
        ("opus-mt-en-de", {"share_encoder_decoder_embeddings": False}, "share_encoder_decoder_embeddings is False"),
        ("opus-mt-en-de", {"decoder_vocab_size": 58102}, "decoder_vocab_size is 58102"),
        ("opus-mt-en-de", {"static_position_embeddings": False}, "static_position_embeddings is False"),
        ("opus-mt-en-de", {"architectures": ["MarianForCausalLM"]}, "MarianForCausalLM"),
        ("gpt2", {"is_encoder_decoder": True}, "is_encoder_decoder is True"),
    ],
)
def test_keys_that_would_change_results_are_refused(name: str, changes: dict[str, Any], message: str | None) -> None:
    if message is None:
        assert card(name, **changes)
        return
    with pytest.raises(sc.ScantlingInputError, match=message) as caught:
        card(name, **changes)
    assert "\n" not in str(caught.value)


def test_what_the_hub_files_hold_besides_is_known() -> None:
    bart = config("bart-base") | {
        "add_bias_logits": False,
        "add_final_layer_norm": False,
        "classif_dropout": 0.1,
        "classifier_dropout": 0.0,
        "early_stopping": True,
        "forced_bos_token_id": 0,
        "forced_eos_token_id": 2,
        "gradient_checkpointing": False,
        "no_repeat_ngram_size": 3,
        "num_beams": 4,
        "task_specific_params": {"summarization": {"length_penalty": 1.0}},
        "torch_dtype": "float32",
        "extra_pos_embeddings": 2,
        "static_position_embeddings": False,
        "force_bos_token_to_be_generated": True,
    }
    assert sc.assemble(card_of_config(bart, "bart", "bart")) == sc.assemble(card("bart-base"))
    marian = config("opus-mt-en-de") | {
        "_num_labels": 3,
        "bad_words_ids": [[58100]],
        "classif_dropout": 0.0,
        "num_beams": 6,
        "share_encoder_decoder_embeddings": True,
        "decoder_vocab_size": 58101,
    }
    assert sc.assemble(card_of_config(marian, "m", "m")) == sc.assemble(card("opus-mt-en-de"))


@pytest.mark.parametrize(
    ("proj", "kind", "act"),
    [
        ("relu", "Plain", "relu"),
        ("gelu", "Plain", "gelu"),
        ("gated-gelu", "Gated", "gelu_tanh"),
        ("gated-silu", "Gated", "silu"),
        ("gated-relu", "Gated", "relu"),
    ],
)
def test_feed_forwards_of_t5_by_name(proj: str, kind: str, act: str) -> None:
    mlp = card("t5-small", feed_forward_proj=proj).mlp
    assert (type(mlp).__name__, mlp.act) == (kind, act)


@pytest.mark.parametrize("proj", ["gelu", "gated-silu", "gated-gelu"])
def test_feed_forwards_of_t5_compute_what_the_original_computes(proj: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    data = json.loads((GOLDEN / "tiny" / "t5" / "config.json").read_text()) | {"feed_forward_proj": proj}
    for derived in ("dense_act_fn", "is_gated_act"):
        del data[derived]
    torch.manual_seed(5)
    original = transformers.T5ForConditionalGeneration(transformers.T5Config(**data)).eval()
    original.save_pretrained(tmp_path)
    lm = sc.load(tmp_path)
    source, target = torch.tensor([[5, 6, 7, 1]]), torch.tensor([[0, 8, 9]])
    with torch.no_grad():
        wanted = original(input_ids=source, decoder_input_ids=target).logits
    torch.testing.assert_close(lm.logits(source, decoder_ids=target), wanted, atol=5e-5, rtol=1e-4)


def test_the_context_of_t5() -> None:
    assert card("t5-small").context == 512
    assert card("t5-small", n_positions=1024).context == 1024
    assert card("t5-small", n_positions="gone").context == 512


def rewritten(tmp_path: Path, name: str, change: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    folder = tmp_path / name
    shutil.copytree(GOLDEN / "tiny" / name, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({key: value.contiguous().clone() for key, value in tensors.items()}, folder / "model.safetensors")
    return folder


def assert_same(folder: Path, name: str) -> sc.Model:
    lm, wanted = sc.load(folder), sc.load(GOLDEN / "tiny" / name)
    source, target = [[5, 6, 7]], [[2, 8]]
    assert torch.equal(lm.logits(source, decoder_ids=target), wanted.logits(source, decoder_ids=target))
    return lm


@pytest.mark.parametrize(
    ("name", "table", "copies"),
    [
        ("t5", "shared.weight", ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight")),
        ("t5-v1_1", "shared.weight", ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")),
        ("bart", "model.shared.weight", ("model.encoder.embed_tokens.weight", "lm_head.weight")),
        ("marian", "model.shared.weight", ("model.decoder.embed_tokens.weight", "lm_head.weight")),
    ],
)
def test_copies_of_the_table_are_compared_and_noted(
    tmp_path: Path, name: str, table: str, copies: tuple[str, ...]
) -> None:
    folder = rewritten(tmp_path, name, lambda t: t.update(dict.fromkeys(copies, t[table])))
    lm = assert_same(folder, name)
    assert [note.split()[0] for note in lm.notes] == [repr(copy) for copy in sorted(copies)]
    for copy in copies:
        other = rewritten(tmp_path / copy, name, lambda t, copy=copy: t.update({copy: t[table] + 1}))
        with pytest.raises(sc.ScantlingInputError, match=f"{copy}' and '{table}' differ"):
            sc.load(other)


def test_a_stranger_beside_a_copy_is_still_refused(tmp_path: Path) -> None:
    folder = rewritten(
        tmp_path, "t5", lambda t: t.update({"lm_head.weight": t["shared.weight"], "stranger": torch.ones(2)})
    )
    with pytest.raises(sc.ScantlingInputError, match="'stranger' is not part of the model"):
        sc.load(folder)


@pytest.mark.parametrize("name", ["bart", "marian"])
def test_files_of_the_bare_model(tmp_path: Path, name: str) -> None:
    def bare(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["final_logits_bias"]
        for key in list(tensors):
            tensors[key.removeprefix("model.")] = tensors.pop(key)

    folder = rewritten(tmp_path, name, bare)
    lm, wanted = sc.load(folder), sc.load(GOLDEN / "tiny" / name)
    shift = wanted.net.state_dict()["head.bias"]
    assert float(shift.abs().max()) > 0.1
    source, target = [[5, 6, 7]], [[2, 8]]
    logits = lm.logits(source, decoder_ids=target) + shift
    torch.testing.assert_close(logits, wanted.logits(source, decoder_ids=target))
    assert not lm.net.state_dict()["head.bias"].any()


def test_stored_waves_must_be_the_waves(tmp_path: Path) -> None:
    def wave(position: int, channel: int) -> float:
        return torch.sin(torch.tensor(position / 10000 ** (2 * channel / 48), dtype=torch.float64)).item()

    def stored(tensors: dict[str, torch.Tensor]) -> None:
        angles = torch.arange(64)[:, None] / 10000 ** (2 * torch.arange(24) / 48)
        for stack in ("encoder", "decoder"):
            tensors[f"model.{stack}.embed_positions.weight"] = torch.cat([angles.sin(), angles.cos()], 1)

    folder = rewritten(tmp_path, "marian", stored)
    lm = assert_same(folder, "marian")
    assert len(lm.notes) == 2
    assert "equals the waves" in lm.notes[0]
    assert float(lm.net.state_dict()["encoder.position.table.weight"][7, 3]) == pytest.approx(wave(7, 3), abs=1e-6)

    def other(tensors: dict[str, torch.Tensor]) -> None:
        stored(tensors)
        tensors["model.decoder.embed_positions.weight"][5, 3] += 0.1

    with pytest.raises(sc.ScantlingInputError, match=r"decoder\.position\.table\.weight' differs from the waves"):
        sc.load(rewritten(tmp_path / "other", "marian", other))


def test_a_tensor_of_old_t5_files_that_nothing_reads(tmp_path: Path) -> None:
    unused = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    assert_same(rewritten(tmp_path, "t5", lambda t: t.update({unused: torch.ones(12, 5)})), "t5")


def test_a_t5_1_1_file_keeps_its_own_head() -> None:
    """PAR-10: the hub's spelling of an untied head, with logits of the original."""
    folder = DATA / "checkpoints" / "t5-v1.1-untied"
    wanted = json.loads((folder / "expected.json").read_text())
    lm = sc.load(folder)
    logits = lm.logits(wanted["input_ids"], decoder_ids=wanted["decoder_input_ids"])
    assert logits.argmax(-1)[0].tolist() == wanted["argmax"]
    torch.testing.assert_close(logits[0, -1], torch.tensor(wanted["last_row"]), atol=5e-5, rtol=1e-4)
    assert lm.parts.params == wanted["parameters"]
    assert lm.card.tied is wanted["head_is_tied"] is False
    assert lm.card.head.scale is None
