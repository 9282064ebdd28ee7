"""Cases about reading configs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.cases.small import CLOSE, built, card, tokens
from tests.conftest import GOLDEN

import scantling as sc
from scantling.checkpoint.families import FAMILIES
from scantling.checkpoint.hf_config import card_of_config
from scantling.checkpoint.names import links
from scantling.numbers.memory import memory
from scantling.parts.attention import Attention
from scantling.parts.rope import RoPE

TINY = sorted(path.name for path in (GOLDEN / "tiny").iterdir())


def test_a_window_of_one_sees_itself_only() -> None:
    """CFG-08: with window 1 the tokens before change nothing."""
    lm = built(card(attention={"window": 1}))
    ids = tokens(9)
    torch.testing.assert_close(lm.logits(ids)[:, -1], lm.logits(ids[:, -1:], position_ids=[8])[:, -1], **CLOSE)


@pytest.mark.parametrize("window", [12, 13, 10**6])
@pytest.mark.parametrize("kernel", ["fused", "reference"])
def test_a_window_as_long_as_the_text_is_none(window: int, kernel: str) -> None:
    """CFG-08: 12 tokens under a window of at least 12; 11 is already another model."""
    plain, ids = built(card()), tokens(12)
    wanted = plain.logits(ids, kernel=kernel)
    torch.testing.assert_close(built(card(attention={"window": window})).logits(ids, kernel=kernel), wanted, **CLOSE)
    assert (built(card(attention={"window": 11})).logits(ids, kernel=kernel) - wanted).abs().max() > 1e-3


def test_the_stored_dtype_of_a_silent_config_is_that_of_its_tensors(tmp_path: Path) -> None:
    """CFG-12: no dtype in the config and bfloat16 in the file; 2 bytes per parameter, not 4."""
    source = GOLDEN / "tiny" / "llama-gqa"
    config = {k: v for k, v in json.loads((source / "config.json").read_text()).items() if "dtype" not in k}
    (tmp_path / "config.json").write_text(json.dumps(config))
    half = {name: tensor.bfloat16() for name, tensor in load_file(source / "model.safetensors").items()}
    save_file(half, tmp_path / "model.safetensors")
    lm = sc.load(tmp_path)
    assert (lm.card.dtype, lm.dtype) == ("bfloat16", torch.bfloat16)
    assert memory(lm.parts, sc.Workload(), lm.card.dtype, "bfloat16").weights == 2 * 50064
    one_b = sc.assemble(sc.card("llama-3.2-1b"))
    assert memory(one_b, sc.Workload(), "bfloat16", "bfloat16").weights == 2_471_628_800


PARTIAL: dict[str, tuple[dict[str, Any], int]] = {
    "phi": ({"model_type": "phi", "num_hidden_layers": 1}, 64),
    "stablelm": ({"model_type": "stablelm", "num_hidden_layers": 1, "num_key_value_heads": 4}, 32),
    "gpt_neox": ({"model_type": "gpt_neox", "num_hidden_layers": 1}, 32),
    "glm": ({"model_type": "glm", "num_hidden_layers": 1, "head_dim": 128}, 64),
    "gptj": ({"model_type": "gptj", "n_layer": 1, "n_head": 4, "n_embd": 512, "rotary_dim": 64}, 64),
}


@pytest.mark.parametrize("name", PARTIAL)
def test_part_of_each_head_is_turned_by_the_familys_default(name: str) -> None:
    """CFG-13: heads of 128 channels; the angles are laid out over the turned ones alone."""
    config, turned = PARTIAL[name]
    sizes = {"hidden_size": 512, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 64}
    sizes |= {"max_position_embeddings": 64, "hidden_act": "silu"}
    sizes = {"vocab_size": 64} if name == "gptj" else sizes
    model = sc.assemble(card_of_config(sizes | config, name, "config.json"))
    attention = model.decoder.blocks[0].children()["attn"]
    assert isinstance(attention, Attention)
    assert isinstance(attention.position, RoPE)
    assert (attention.d_head, attention.position.d_rotary) == (128, turned)
    assert attention.position.frequencies(1) == pytest.approx(
        [10000.0 ** (-2 * i / turned) for i in range(turned // 2)], rel=1e-12
    )


def test_a_layout_with_a_stated_head_width_goes_both_ways(tmp_path: Path) -> None:
    """CFG-16: 2 heads of 16 on a stream of 64: the original's logits, and its tensors bit by bit on the way back."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        initializer_range=0.3,
        max_position_embeddings=64,
    )
    original = transformers.LlamaForCausalLM(config).eval()
    original.save_pretrained(tmp_path)
    lm, ids = sc.load(tmp_path), tokens(9)
    assert lm.card.attention.d_head == 16
    with torch.no_grad():
        torch.testing.assert_close(lm.logits(ids), original(ids).logits, **CLOSE)
    theirs, ours = original.state_dict(), lm.net.state_dict()
    back: dict[str, torch.Tensor] = {}
    for link in links(FAMILIES["llama"].rows(lm.card), lm.parts.named_weights):
        back |= zip(link.theirs, link.transform.save([ours[name] for name in link.ours]), strict=True)
    assert back.keys() == theirs.keys()
    assert all(torch.equal(back[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize(("scalar", "scale"), [(256, 0.0625), (224, 0.0668153)])
def test_the_scale_of_the_scores_is_the_configs(scalar: int, scale: float) -> None:
    """CFG-22: Gemma 2 with 16 heads of 256 on a stream of 3584."""
    config = json.loads((GOLDEN / "configs" / "gemma-2-9b.json").read_text()) | {"query_pre_attn_scalar": scalar}
    model = sc.assemble(card_of_config(config, "gemma-2-9b", "config.json"))
    attention = model.decoder.blocks[0].children()["attn"]
    assert isinstance(attention, Attention)
    assert (attention.n_heads, attention.d_head, attention.d_model) == (16, 256, 3584)
    assert attention.scale == pytest.approx(scale, abs=5e-8)


def test_logits_follow_the_scale_of_the_config(tmp_path: Path) -> None:
    """CFG-22: a config with another scalar gives other logits, which are those of the original."""
    transformers = pytest.importorskip("transformers")
    source = GOLDEN / "tiny" / "gemma2"
    config = json.loads((source / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"query_pre_attn_scalar": 3}))
    shutil.copyfile(source / "model.safetensors", tmp_path / "model.safetensors")
    ids = tokens(9)
    original = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    found = sc.load(tmp_path).logits(ids)
    with torch.no_grad():
        torch.testing.assert_close(found, original(ids).logits, **CLOSE)
    assert (found - sc.load(source).logits(ids)).abs().max() > 1e-3


NOT_THE_CLASS = {("mistral", "sliding_window"), ("deepseek_v3", "num_key_value_heads")}
"""By design: Mistral without the key has no window (CFG-06), and DeepSeek's class says 128 whatever the heads are."""
ONE_OF_EACH = {json.loads((GOLDEN / "tiny" / name / "config.json").read_text())["model_type"]: name for name in TINY}


@pytest.mark.parametrize("model_type", sorted(ONE_OF_EACH))
def test_a_key_that_is_missing_or_null_means_what_the_original_takes_it_for(model_type: str) -> None:
    """CFG-07, CFG-17: every key of every family: the model that the original's defaults describe, or a refusal."""
    transformers = pytest.importorskip("transformers")
    errors = pytest.importorskip("huggingface_hub.errors")
    config = json.loads((GOLDEN / "tiny" / ONE_OF_EACH[model_type] / "config.json").read_text())
    compared = 0
    for key in sorted(set(config) - {"model_type", "transformers_version", "architectures"}):
        without = {k: v for k, v in config.items() if k != key}
        if (model_type, key) in NOT_THE_CLASS:
            continue
        for said in (without, {**without, key: None}):
            try:
                ours = sc.assemble(card_of_config(said, "x", "x"))
                resolved = transformers.CONFIG_MAPPING[model_type].from_dict(said).to_dict()
            except (sc.ScantlingInputError, errors.StrictDataclassError):
                continue
            compared += 1
            assert ours == sc.assemble(card_of_config(json.loads(json.dumps(resolved)), "x", "x")), key
    assert compared >= 10


@pytest.mark.parametrize(("rows", "params"), [(514, 124_645_632), (512, 124_644_096)])
def test_rows_for_padding_are_no_usable_positions(rows: int, params: int) -> None:
    """CFG-10: RoBERTa base; two of the table's rows stand before position 0, and its ids start at 2."""
    config = json.loads((GOLDEN / "configs" / "roberta-base.json").read_text())
    config |= {"architectures": ["RobertaModel"], "max_position_embeddings": rows}
    drawn = card_of_config(config, "roberta", "config.json")
    assert sc.assemble(drawn).params == params
    assert drawn.context == rows - 2
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    lm = built(card_of_config(config | sizes, "roberta", "config.json"))
    table: Any = lm.net.get_parameter("encoder.position.table.weight")
    read: list[torch.Tensor] = []
    hook = lm.net.get_submodule("encoder.position.table").register_forward_hook(lambda _, given, __: read.append(given))
    lm.logits([[5] * (rows - 2)])
    lm.logits([[5, 6, 7, 1, 1]])
    hook.remove()
    assert table.shape[0] == rows
    assert read[0][0].flatten().tolist() == list(range(2, rows))
    assert read[1][0].flatten().tolist() == [2, 3, 4, 1, 1]
    with pytest.raises(sc.ScantlingInputError, match=f"{rows - 1} tokens and the model has {rows - 2} learned"):
        lm.logits([[5] * (rows - 1)])


def test_a_head_width_of_its_own_is_written_into_the_config(tmp_path: Path) -> None:
    """CFG-15: 4 heads of 16 on a stream of 96, where the quotient is 24; the original reads it to equal logits."""
    transformers = pytest.importorskip("transformers")
    lm = built(card(d_model=96, attention={"n_heads": 4, "n_kv_heads": 2, "d_head": 16}))
    saved = sc.save(lm, tmp_path / "wide")
    config = json.loads((tmp_path / "wide" / "config.json").read_text())
    assert saved.model_type == config["model_type"] != "scantling"
    assert config["head_dim"] == 16
    original = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "wide", attn_implementation="eager")
    ids = tokens(9)
    with torch.no_grad():
        theirs = original(ids).logits
    assert float(theirs.std()) > 0.1
    torch.testing.assert_close(lm.logits(ids), theirs, **CLOSE)
    assert sc.load(tmp_path / "wide").parts == lm.parts


def test_a_padded_table_is_recognised(tmp_path: Path) -> None:
    """CFG-21: 300 tokens in a table of 304 rows: named with its multiple, and the card keeps both numbers."""
    source = GOLDEN / "tiny" / "mistral-full"
    config = json.loads((source / "config.json").read_text()) | {"vocab_size": 300}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = load_file(source / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = torch.cat([tensors[name]] * 3)[:304]
    save_file(tensors, tmp_path / "model.safetensors")
    found = sc.inspect(tmp_path)
    (finding,) = found.findings
    assert finding.code == "vocab_padded"
    assert "304 by the tensors, 300 by the config: 4 rows more" in finding.message
    assert "multiple of 8" in finding.cause
    assert found.card is not None
    assert (found.card.vocab_size, found.card.embedding.vocab_multiple) == (300, 8)
    assert sc.assemble(found.card).params == found.total
