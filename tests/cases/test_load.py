"""Cases about loading checkpoints."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.cases.small import CASES, CLOSE, LLAMA, built, card, recorded, tokens
from tests.conftest import DATA, GOLDEN

import scantling as sc
from scantling.checkpoint.gguf import read_gguf
from scantling.checkpoint.gguf_write import write_gguf
from scantling.checkpoint.header import read_safetensors
from scantling.checkpoint.names import Interleave, Split


def test_bfloat16_keeps_its_bits(tmp_path: Path) -> None:
    """LOAD-08: the fixture's six values, through a model's weight and back into a file."""
    expected = json.loads((CASES / "bf16.expected.json").read_text())
    stored = load_file(CASES / "bf16.safetensors")["w"]
    assert read_safetensors(CASES / "bf16.safetensors").tensors["w"].dtype == "bfloat16"
    bits = torch.tensor(expected["raw_u16"], dtype=torch.int16)
    assert torch.equal(stored.view(torch.int16), bits)
    source = GOLDEN / "tiny" / "llama-gqa"
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(source / "model.safetensors").items()}
    tensors["model.norm.weight"].view(-1)[:6] = stored.flatten()
    shutil.copyfile(source / "config.json", tmp_path / "config.json")
    save_file(tensors, tmp_path / "model.safetensors")
    weight: Any = sc.load(tmp_path).net.get_parameter("decoder.final_norm.weight")
    right = [float(value) for row in expected["w"] for value in row]
    assert weight[:6].tolist() == right
    assert right[:4] == [1.0, -2.5, 3.140625, 65280.0]
    assert math.isinf(right[5])
    save_file({"w": weight[:6].reshape(2, 3).contiguous()}, tmp_path / "again.safetensors")
    assert torch.equal(load_file(tmp_path / "again.safetensors")["w"].view(torch.int16), bits)


def test_a_tied_head_owns_no_matrix_of_its_own() -> None:
    """LOAD-14: the file has no head, and the model has none either: there is nothing that could stay random."""
    lm = sc.load(DATA / "checkpoints" / "tied-head-absent")
    assert lm.card.tied
    names = {name for name, _ in lm.net.named_parameters()}
    assert not [name for name in names if name.startswith("head")]
    embed: Any = lm.net.get_parameter("embed.weight")
    hidden = lm.hidden([[3, 4]])[-1]
    torch.testing.assert_close(lm.logits([[3, 4]]), hidden @ embed.T, **CLOSE)


def test_fused_queries_keys_and_values_are_read_head_by_head() -> None:
    """LOAD-23: the fixture (biases, 25 % of each head turned); a split in three blocks is off by 2.3."""
    folder = CASES / "neox-fused-qkv"
    ids, wanted = recorded(folder)
    lm = sc.load(folder)
    torch.testing.assert_close(lm.logits(ids)[0, -1], wanted, atol=2e-6, rtol=0)
    stored = load_file(folder / "model.safetensors")
    state = lm.net.state_dict()
    for i in range(lm.card.n_layers):
        for end in ("weight", "bias"):
            fused = stored[f"gpt_neox.layers.{i}.attention.query_key_value.{end}"]
            width = state[f"decoder.blocks.{i}.attn.q.{end}"].shape[0]
            for p, block in zip("qkv", fused.split(width), strict=True):
                state[f"decoder.blocks.{i}.attn.{p}.{end}"] = block
    lm.net.load_state_dict(state)
    assert (lm.logits(ids)[0, -1] - wanted).abs().max() > 2


@pytest.mark.parametrize("wrapper", ["", "_orig_mod.", "module._orig_mod."])
@pytest.mark.parametrize("name", ["embed_out.weight", "lm_head.weight"])
def test_the_head_of_neox_under_both_of_its_names(name: str, wrapper: str, tmp_path: Path) -> None:
    """LOAD-23, LOAD-30: files name the head embed_out, dumps of the newer original's modules lm_head."""
    folder = CASES / "neox-fused-qkv"
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = tensors.pop("lm_head.weight")
    save_file({wrapper + key: value for key, value in tensors.items()}, tmp_path / "model.safetensors")
    shutil.copyfile(folder / "config.json", tmp_path / "config.json")
    ids, wanted = recorded(folder)
    lm = sc.load(tmp_path)
    torch.testing.assert_close(lm.logits(ids)[0, -1], wanted, atol=2e-6, rtol=0)
    assert [wrapper in note for note in lm.notes] == ([True] if wrapper else [])


@pytest.mark.parametrize("wrapper", ["", "module."])
@pytest.mark.parametrize("name", ["embed_out.weight", "lm_head.weight"])
def test_a_tied_head_that_is_stored_again_under_any_of_its_names(name: str, wrapper: str, tmp_path: Path) -> None:
    """LOAD-16: equal to the table it is noted, different it is refused; it is never overwritten in silence."""
    folder = GOLDEN / "tiny" / "gpt-neox-sequential-tied"
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = tensors["gpt_neox.embed_in.weight"].clone()
    shutil.copyfile(folder / "config.json", tmp_path / "config.json")
    save_file({wrapper + key: value for key, value in tensors.items()}, tmp_path / "model.safetensors")
    lm = sc.load(tmp_path)
    assert any("stored again" in note for note in lm.notes)
    assert torch.equal(lm.logits([[1, 2]]), sc.load(folder).logits([[1, 2]]))
    tensors[name][0] += 1
    save_file({wrapper + key: value for key, value in tensors.items()}, tmp_path / "model.safetensors")
    with pytest.raises(sc.ScantlingInputError, match=f"{name}.*differ"):
        sc.load(tmp_path)


def test_a_fused_grouped_matrix_in_both_layouts() -> None:
    """LOAD-24: 192 rows are 8 queries, 2 keys and 2 values of 16 channels; each layout is named, none is guessed."""
    d_head = 192 // (8 + 2 * 2)
    assert d_head == 16
    shapes = [(8 * d_head, 128), (2 * d_head, 128), (2 * d_head, 128)]
    q, k, v = (torch.randn(shape) for shape in shapes)
    blocks = torch.cat((q, k, v))
    by_group = torch.cat(
        [piece for g in range(2) for piece in (q[g * 64 : g * 64 + 64], *(x[g * 16 : g * 16 + 16] for x in (k, v)))]
    )
    assert blocks.shape == by_group.shape == (192, 128)
    for transform, fused in ((Split(), blocks), (Interleave(2), by_group)):
        assert all(torch.equal(a, b) for a, b in zip(transform.load([fused], shapes), (q, k, v), strict=True))
        assert torch.equal(transform.save([q, k, v])[0], fused)
        assert transform.saved_shapes(shapes) == [(192, 128)]
    assert not torch.equal(Split().load([by_group], shapes)[0], q)


def test_falcons_groups_give_the_logits_of_the_original(tmp_path: Path) -> None:
    """LOAD-24: per-group interleaving with 8 query and 2 KV heads, as the original reads it."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.FalconConfig(
        vocab_size=64,
        hidden_size=128,
        num_hidden_layers=1,
        num_attention_heads=8,
        num_kv_heads=2,
        new_decoder_architecture=True,
        bias=False,
        initializer_range=0.2,
    )
    original = transformers.FalconForCausalLM(config).eval()
    assert original.transformer.h[0].self_attention.query_key_value.weight.shape == (192, 128)
    original.save_pretrained(tmp_path)
    ids = tokens(9)
    with torch.no_grad():
        torch.testing.assert_close(sc.load(tmp_path).logits(ids), original(ids).logits, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("kernel", ["fused", "reference"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (8, 2), (6, 3), (4, 1)])
def test_query_head_i_reads_kv_head_i_over_r(heads: int, kv_heads: int, kernel: str) -> None:
    """LOAD-27: a multi-head copy whose KV heads stand r times in a row is the same model; tiled ones are not."""
    grouped = built(card(attention={"n_heads": heads, "n_kv_heads": kv_heads}))
    full = built(card(attention={"n_heads": heads, "n_kv_heads": heads}))
    ids, repeats = tokens(9), heads // kv_heads
    wanted = grouped.logits(ids, kernel=kernel)

    def copied(tiled: bool) -> torch.Tensor:
        state = dict(grouped.net.state_dict())
        for name in [n for n in state if ".attn.k." in n or ".attn.v." in n]:
            per_head = state[name].unflatten(0, (kv_heads, -1))
            per_head = per_head.repeat(repeats, 1, 1) if tiled else per_head.repeat_interleave(repeats, 0)
            state[name] = per_head.flatten(0, 1)
        full.net.load_state_dict(state)
        return full.logits(ids, kernel=kernel)

    torch.testing.assert_close(copied(tiled=False), wanted, **CLOSE)
    if kv_heads > 1:
        assert (copied(tiled=True) - wanted).abs().max() > 0.1


def test_gguf_dimensions_are_turned_into_rows_and_columns() -> None:
    """LOAD-28: the file lists (128, 64), (128, 128) and (128, 32), fastest first."""
    tensors = read_gguf(DATA / "checkpoints" / "gguf-llama-gqa" / "model.gguf").tensors
    shapes = [tensors[name].shape for name in ("token_embd.weight", "blk.0.ffn_down.weight", "blk.0.attn_k.weight")]
    assert shapes == [(64, 128), (128, 128), (32, 128)]


def test_a_small_last_shard_is_no_damage(tmp_path: Path) -> None:
    """FALSE-08: the second shard holds one tensor; the checkpoint is complete and loads without a note."""
    source = DATA / "checkpoints" / "untied"
    tensors = load_file(source / "model.safetensors")
    last = tensors.pop("lm_head.weight")
    names = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    save_file(tensors, tmp_path / names[0])
    save_file({"lm_head.weight": last}, tmp_path / names[1])
    placed = dict.fromkeys(tensors, names[0]) | {"lm_head.weight": names[1]}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    shutil.copyfile(source / "config.json", tmp_path / "config.json")
    ids, wanted = recorded(source)
    lm = sc.load(tmp_path)
    assert lm.notes == ()
    torch.testing.assert_close(lm.logits(ids)[0, -1], wanted, atol=5e-6, rtol=1e-5)


def test_inspect_says_why_a_shard_is_small(tmp_path: Path) -> None:
    """FALSE-08: complete, and the next tensor did not fit; in the middle of the shards and at their end."""
    table = {"model.embed_tokens.weight": (1000, 64), "model.norm.weight": (64,)}
    rest = {"lm_head.weight": (1000, 64), "model.layers.0.input_layernorm.weight": (64,)}
    names = [f"model-0000{i}-of-00004.safetensors" for i in range(1, 5)]
    pieces = [
        table,
        {"model.layers.0.mlp.up_proj.weight": (160, 64)},
        rest,
        {"model.layers.0.mlp.down_proj.weight": (2, 64)},
    ]
    for name, piece in zip(names, pieces, strict=True):
        save_file({key: torch.ones(shape) for key, shape in piece.items()}, tmp_path / name)
    placed = {key: name for name, piece in zip(names, pieces, strict=True) for key in piece}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    middle, last = (f for f in sc.inspect(tmp_path).findings if f.code == "shard_sizes")
    assert (middle.severity, last.severity) == ("info", "info")
    assert middle.message.startswith(
        f"{names[1]} has 40,960 bytes, 16.0% of the largest; it is complete, with one tensor"
    )
    assert middle.cause == "the next tensor did not fit: 'lm_head.weight' has 256,000 bytes"
    assert last.cause == f"it is the last and holds what did not fit into {names[2]} any more"


def test_what_a_file_has_besides_is_listed_and_not_counted() -> None:
    """LOAD-20: the buffer of positions, the pooler and the next-sentence head of an old BERT file."""
    found = sc.inspect(DATA / "checkpoints" / "bert-gamma-beta")
    (ignored,) = (finding for finding in found.findings if finding.code == "tensor_ignored")
    assert all(name in ignored.message for name in ("position_ids", "seq_relationship", "pooler.dense"))
    lm = sc.load(DATA / "checkpoints" / "bert-gamma-beta")
    assert found.total == lm.parts.params
    assert found.ok


def test_the_tied_matrix_is_one_tensor_after_a_meta_build() -> None:
    """LOAD-19: built on meta, then given storage: the head reads the table itself, so no two copies can part."""
    parts = sc.assemble(card({**LLAMA, "tied": True}))
    net = parts.build(device="meta").to_empty(device="cpu")
    with torch.no_grad():
        for weight in net.parameters():
            weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)) * 0.3)
    assert [name for name in net.state_dict() if tuple(net.state_dict()[name].shape) == (64, 32)] == ["embed.weight"]
    ids = torch.tensor([[37, 43, 12, 8, 6]])
    before = net(ids)
    with torch.no_grad():
        table: Any = net.get_parameter("embed.weight")
        table[63] += 1.0
    changed = (net(ids) - before).abs().amax((0, 1)) > 0
    assert changed.nonzero().flatten().tolist() == [63]


def test_gains_of_gemma_are_w_in_one_format_and_1_plus_w_in_the_other(tmp_path: Path) -> None:
    """LOAD-29: both files of one small Gemma card give its logits bit by bit."""
    gguf = pytest.importorskip("gguf")
    lm = sc.load(GOLDEN / "tiny" / "gemma2")
    with torch.no_grad():
        for name, weight in lm.net.named_parameters():
            if "norm" in name:
                # Steps of 1/64, so that 1 + w and back loses nothing.
                weight.copy_((torch.arange(weight.numel()) % 41 - 20) / 64)
    ids = tokens(9)
    wanted = lm.logits(ids)
    sc.save(lm, tmp_path / "folder")
    write_gguf(lm, tmp_path / "one.gguf")
    kept = load_file(tmp_path / "folder" / "model.safetensors")["model.norm.weight"]
    stored = {tensor.name: tensor.data for tensor in gguf.GGUFReader(tmp_path / "one.gguf").tensors}
    assert kept.tolist() == [(i % 41 - 20) / 64 for i in range(kept.numel())]
    assert stored["output_norm.weight"].tolist() == [1 + w for w in kept.tolist()]
    for path in (tmp_path / "folder", tmp_path / "one.gguf"):
        assert torch.equal(sc.load(path).logits(ids), wanted)
