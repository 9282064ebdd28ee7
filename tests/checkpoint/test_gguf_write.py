"""GGUF files written by us: read back by us, by the gguf package, and by transformers under its own names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from safetensors.torch import load_file
from tests.cards.strategies import legal_cards
from tests.checkpoint.gguf_tiny import ARCHITECTURE, recorded, tiny, vocabulary, with_attention, with_card
from tests.conftest import DATA, GOLDEN

import scantling as sc
from scantling.cards.read import from_dict
from scantling.checkpoint.gguf import read_gguf
from scantling.checkpoint.gguf_write import drawn, write_gguf
from scantling.cli.to_gguf import to_gguf

CLOSE = {"atol": 5e-5, "rtol": 1e-4}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Tiny models as F32 GGUF, each written once."""
    folder = tmp_path_factory.mktemp("gguf")

    def written(name: str) -> Path:
        path = folder / f"{name}.gguf"
        if not path.exists():
            write_gguf(tiny(name), path)
        return path

    return written


@pytest.mark.parametrize("name", ARCHITECTURE)
def test_read_back_the_logits_are_the_same_numbers(name: str, files: Any) -> None:
    io, before, after = recorded(name), tiny(name), sc.load(files(name))
    assert read_gguf(files(name)).metadata["general.architecture"] == ARCHITECTURE[name]
    logits = after.logits(io["input_ids"], io["attention_mask"])
    assert torch.equal(logits, before.logits(io["input_ids"], io["attention_mask"]))
    real = io["attention_mask"].bool()
    torch.testing.assert_close(logits[real], io["logits"][real], **CLOSE)


@pytest.mark.parametrize("name", ARCHITECTURE)
def test_written_again_it_is_the_same_file(name: str, files: Any, tmp_path: Path) -> None:
    again = tmp_path / "again.gguf"
    write_gguf(sc.load(files(name)), again)
    assert again.read_bytes() == files(name).read_bytes()


@pytest.mark.parametrize("name", ["llama-gqa", "llama-mha-tied-bias", "mixtral", "qwen2", "qwen3", "gemma2", "gpt2"])
def test_the_gguf_package_reads_what_we_read(name: str, files: Any) -> None:
    reader, header = gguf.GGUFReader(files(name)), read_gguf(files(name))
    theirs = {tensor.name: tensor for tensor in reader.tensors}
    assert list(theirs) == list(header.tensors)
    known = gguf.get_tensor_name_map(_architecture(header), 8).mapping
    names = {f"{entry[1]}.{suffix}" for entry in known.values() for suffix in ("weight", "bias")}
    assert set(theirs) <= names
    for tensor in header.tensors.values():
        assert tuple(theirs[tensor.name].data.shape) == tensor.shape
        ours = np.fromfile(tensor.file, "<f4", tensor.numel, offset=tensor.start).reshape(tensor.shape)
        assert np.array_equal(theirs[tensor.name].data, ours)


def _architecture(header: Any) -> Any:
    names = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    return names[header.metadata["general.architecture"]]


@pytest.mark.parametrize(
    "name",
    ["llama-gqa", "llama-mha-tied-bias", "qwen2", "qwen3", "phi3-partial-swa-tied", "gpt2", "gemma2", "gemma3-text"],
)
def test_transformers_reads_the_original_weights_under_its_own_names(name: str, files: Any, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    folder = GOLDEN / "tiny" / name
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))
    lm, path = tiny(name), tmp_path / "model.gguf"
    lm.tokenizer = vocabulary()
    write_gguf(lm, path)
    found = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)
    wanted = load_file(folder / "model.safetensors")
    assert set(found["tensors"]) == set(wanted)
    # Gemma's gains are stored as 1 + w, so what is below the last bit of 1 is gone.
    atol = 2.0**-24 if name.startswith("gemma") else 0.0
    for key, tensor in wanted.items():
        torch.testing.assert_close(found["tensors"][key].float(), tensor, atol=atol, rtol=0)
    config = found["config"]
    assert config["model_type"] in (json.loads((folder / "config.json").read_text())["model_type"], "llama")
    assert config["vocab_size"] == 131


def test_gains_are_stored_as_one_plus_w(files: Any) -> None:
    """LOAD-29: transformers keeps w, GGUF 1 + w, and both give the same logits."""
    wanted = load_file(GOLDEN / "tiny" / "gemma2" / "model.safetensors")
    reader = gguf.GGUFReader(files("gemma2"))
    stored = {tensor.name: tensor.data for tensor in reader.tensors}
    pairs = {
        "output_norm": "norm",
        "blk.1.attn_norm": "layers.1.input_layernorm",
        "blk.1.post_attention_norm": "layers.1.post_attention_layernorm",
        "blk.1.ffn_norm": "layers.1.pre_feedforward_layernorm",
        "blk.1.post_ffw_norm": "layers.1.post_feedforward_layernorm",
    }
    for theirs, original in pairs.items():
        weight = wanted[f"model.{original}.weight"].numpy()
        assert float(np.abs(weight).max()) > 0.01
        assert np.array_equal(stored[f"{theirs}.weight"], weight + np.float32(1))


def test_queries_and_keys_lie_in_pairs_by_their_own_heads(files: Any) -> None:
    """Row 2i of a head is our row i, row 2i + 1 our row i + d_head / 2, for the 2 KV heads as for the 6."""
    wanted = load_file(GOLDEN / "tiny" / "llama-gqa" / "model.safetensors")
    stored = {tensor.name: tensor.data for tensor in gguf.GGUFReader(files("llama-gqa")).tensors}
    for letter, heads in (("q", 6), ("k", 2)):
        original = wanted[f"model.layers.1.self_attn.{letter}_proj.weight"].numpy()
        rows = [h * 10 + half * 5 + i for h in range(heads) for i in range(5) for half in (0, 1)]
        assert np.array_equal(stored[f"blk.1.attn_{letter}.weight"], original[rows])


def test_llama3_scaling_is_a_tensor_of_divisors(files: Any) -> None:
    """The numbers of the original's own inverse frequencies: plain over scaled."""
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = transformers.AutoConfig.from_pretrained(GOLDEN / "tiny" / "llama-rope-llama3")
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 500.0 ** (-torch.arange(0, 10, 2) / 10)
    stored = {tensor.name: tensor.data for tensor in gguf.GGUFReader(files("llama-rope-llama3")).tensors}
    torch.testing.assert_close(torch.tensor(stored["rope_freqs.weight"].tolist()), plain / scaled, atol=1e-6, rtol=1e-6)
    assert "llama.rope.scaling.type" not in read_gguf(files("llama-rope-llama3")).metadata


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("mistral-swa", "'llama' is nearest, and it cannot say attention.window 7 (it means None)"),
        ("qwen2-swa", "'qwen2' is nearest, and it cannot say attention.window of layer 1 6 (it means None)"),
        ("llama-rope-dynamic", "it cannot say position.scaling.kind 'dynamic'"),
        ("llama-rope-yarn-mscale", "it cannot say position.scaling.mscale 0.9"),
        ("llama-mqa", "it cannot say mlp.act 'gelu_tanh' (it means 'silu')"),
        ("gpt2-untied-invlayer", "'gpt2' is nearest, and it cannot say attention.scale_by_layer True"),
        ("qwen3-moe-nonorm", "'qwen3moe' is nearest, and it cannot say mlp.normalize False"),
        ("deepseek-v3", "attention.kind is latent, which none of the architectures here has (qwen2, llama,"),
        ("olmo2", "it cannot say norm.at ['res'] (it means ['in'])"),
        ("bloom", "it cannot say embedding.norm.kind 'layernorm'"),
        ("smollm3", "it cannot say position.kind of layer 1 'none' (it means 'rope')"),
    ],
)
def test_a_card_that_no_architecture_can_say_is_refused(name: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(sc.ScantlingInputError) as caught:
        write_gguf(tiny(name), tmp_path / "model.gguf")
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


PRESETS = {
    "llama-7b": "llama",
    "llama-3.1-405b": "llama",
    "smollm2-135m": "llama",
    "mistral-7b-v0.3": "llama",
    "mixtral-8x7b": "llama",
    "qwen2.5-7b": "qwen2",
    "qwen3-8b": "qwen3",
    "qwen3-30b-a3b": "qwen3moe",
    "phi-3-mini-4k": "phi3",
    "phi-3.5-mini": "phi3",
    "gemma-7b": "gemma",
    "gemma-2-9b": "gemma2",
    "gemma-3-1b": "gemma3",
    "gpt2-xl": "gpt2",
}


@pytest.mark.parametrize(("name", "architecture"), PRESETS.items())
def test_published_models_are_written_as_what_llama_cpp_calls_them(name: str, architecture: str) -> None:
    card = sc.card(name)
    drawing = drawn(card, sc.assemble(card).named_weights)
    assert drawing.architecture == architecture
    assert len(drawing.notes) == (architecture == "phi3")
    known = gguf.MODEL_TENSORS[{kind: key for key, kind in gguf.MODEL_ARCH_NAMES.items()}[architecture]]
    names = {gguf.TENSOR_NAMES[tensor].format(bid=i) for tensor in known for i in range(card.n_layers)}
    written = {name for link in drawing.table for name in link.theirs} | set(drawing.beside)
    assert {name.rpartition(".")[0] for name in written} <= names


@settings(max_examples=60, deadline=None)
@given(data=legal_cards())
def test_any_card_is_said_whole_or_refused_in_one_sentence(data: dict[str, Any]) -> None:
    card = from_dict(data, "drawn")
    weights = sc.assemble(card).named_weights
    refused = ""
    try:
        said = {name for link in drawn(card, weights).table for name in link.ours}
    except sc.ScantlingInputError as error:
        refused = str(error)
    if refused:
        assert "cannot be written as GGUF" in refused
        assert "\n" not in refused
    else:
        assert said == set(weights)


def test_what_llama_cpp_does_not_apply_is_noted(tmp_path: Path) -> None:
    notes = write_gguf(tiny("gemma2"), tmp_path / "scaled.gguf")
    assert "llama.cpp does not apply gemma2.attention.scale (0.223" in notes[0]
    lm = with_attention(tiny("gemma2"), scale=None)
    assert write_gguf(lm, tmp_path / "plain.gguf") == ("the model has no tokenizer, so the file has no vocabulary",)
    assert "gemma2.attention.scale" not in read_gguf(tmp_path / "plain.gguf").metadata


def test_a_sparse_qwen3_is_qwen3moe(tmp_path: Path) -> None:
    from msgspec.structs import replace

    lm, ids = tiny("qwen3-moe-nonorm"), recorded("qwen3-moe-nonorm")["input_ids"]
    lm = with_card(lm, mlp=replace(lm.card.mlp, normalize=True))
    write_gguf(lm, tmp_path / "moe.gguf")
    back = sc.load(tmp_path / "moe.gguf")
    assert back.parts == lm.parts
    assert torch.equal(back.logits(ids), lm.logits(ids))
    metadata = read_gguf(tmp_path / "moe.gguf").metadata
    assert metadata["general.architecture"] == "qwen3moe"
    assert (metadata["qwen3moe.expert_count"], metadata["qwen3moe.expert_used_count"]) == (5, 3)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "q8_0", "q4_0"])
def test_every_dtype_holds_what_the_gguf_package_makes_of_the_numbers(dtype: str, tmp_path: Path) -> None:
    source, path = DATA / "checkpoints" / "gguf-llama-gqa" / "model.gguf", tmp_path / "model.gguf"
    write_gguf(sc.load(source), path, dtype)
    kind = gguf.GGMLQuantizationType[dtype.upper()]
    original = {tensor.name: tensor.data for tensor in gguf.GGUFReader(source).tensors}
    written = gguf.GGUFReader(path).tensors
    assert {tensor.name for tensor in written} == set(original)
    for tensor in written:
        matrix = original[tensor.name].ndim == 2
        assert tensor.tensor_type == (kind if matrix else gguf.GGMLQuantizationType.F32)
        values = gguf.quants.quantize(np.ascontiguousarray(original[tensor.name]), tensor.tensor_type)
        assert tensor.data.tobytes() == values.tobytes()
    file_type = "ALL_F32" if dtype == "f32" else f"MOSTLY_{kind.name}"
    assert read_gguf(path).metadata["general.file_type"] == gguf.LlamaFileType[file_type]


def test_routers_and_learned_positions_stay_f32(tmp_path: Path) -> None:
    for name, kept in (("mixtral", "blk.1.ffn_gate_inp.weight"), ("gpt2", "position_embd.weight")):
        write_gguf(tiny(name), tmp_path / name, "f16")
        kinds = {tensor.name: tensor.kind for tensor in read_gguf(tmp_path / name).tensors.values()}
        assert (kinds[kept], kinds["token_embd.weight"]) == ("F32", "F16")


def test_rows_that_fill_no_block_stay_f16_and_are_named(tmp_path: Path) -> None:
    notes = write_gguf(tiny("llama-gqa"), tmp_path / "model.gguf", "q8_0")
    assert "stored as F16, as their rows are no multiple of 32: 'token_embd.weight', 'blk.0.attn_q.weight'" in notes[1]
    assert "and 13 more" in notes[1]


def quantisable() -> list[str]:
    """Every kind that the gguf package can make."""
    block = np.ones((1, 256), np.float32)
    names = []
    for kind in gguf.GGMLQuantizationType:
        try:
            gguf.quants.quantize(block, kind)
        except NotImplementedError:
            continue
        names.append(kind.name)
    return names


@pytest.mark.parametrize("kind", quantisable())
def test_a_file_of_any_kind_reads_as_the_gguf_package_reads_it(kind: str, tmp_path: Path) -> None:
    from scantling.checkpoint.gguf_values import dequantise

    values = np.random.default_rng(5).normal(size=(3, 512)).astype(np.float32)
    type_ = gguf.GGMLQuantizationType[kind]
    blocks = gguf.quants.quantize(values, type_)
    writer = gguf.GGUFWriter(tmp_path / "one.gguf", "llama")
    writer.add_tensor("token_embd.weight", blocks, raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensor = read_gguf(tmp_path / "one.gguf").tensors["token_embd.weight"]
    assert (tensor.kind, tensor.shape) == (kind, (3, 512))
    assert np.array_equal(dequantise(tensor), gguf.quants.dequantize(blocks, type_).astype(np.float32))


def test_nothing_is_overwritten_and_nothing_half_written_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lm, path = tiny("llama-gqa"), tmp_path / "model.gguf"
    path.write_bytes(b"precious")
    with pytest.raises(sc.ScantlingInputError, match=r"model\.gguf exists; nothing is overwritten"):
        write_gguf(lm, path)
    assert path.read_bytes() == b"precious"
    path.unlink()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gguf.GGUFWriter, "write_tensor_data", full)
    with pytest.raises(sc.ScantlingInputError, match=r"model\.gguf: cannot be written: No space left on device"):
        write_gguf(lm, path)
    assert not list(tmp_path.iterdir())


def test_a_number_beyond_the_dtype_is_refused(tmp_path: Path) -> None:
    lm = tiny("llama-gqa")
    lm.net.embed.weight.data[3, 4] = 1e6
    with pytest.raises(
        sc.ScantlingInputError, match=r"'token_embd\.weight' holds 1e\+06, beyond F16; write it as bf16"
    ):
        write_gguf(lm, tmp_path / "model.gguf", "f16")
    write_gguf(lm, tmp_path / "model.gguf", "bf16")
    assert sc.load(tmp_path / "model.gguf").net.embed.weight[3, 4] == float(torch.tensor(1e6).bfloat16())


def test_the_dtype_must_be_known(tmp_path: Path) -> None:
    with pytest.raises(sc.ScantlingInputError, match=r"dtype 'q8' for GGUF; known: f32, f16, bf16, q8_0, q4_0; did"):
        write_gguf(tiny("llama-gqa"), tmp_path / "model.gguf", "q8")


def test_the_adapter_of_the_command(tmp_path: Path) -> None:
    lm, path = tiny("llama-gqa"), tmp_path / "model.gguf"
    report = to_gguf(lm, path)
    assert (report["model_type"], report["dtype"]) == ("llama", "f32")
    assert report["files"] == [{"name": "model.gguf", "bytes": path.stat().st_size}]
    assert len(report["notes"]) == 1
    with pytest.raises(sc.ScantlingInputError, match="exists; a GGUF file is never replaced"):
        to_gguf(lm, path)
    with pytest.raises(sc.ScantlingInputError, match=r"must be named \.gguf"):
        to_gguf(lm, tmp_path / "model")
    to_gguf(lm, tmp_path / "half.gguf", dtype="float16")
    assert read_gguf(tmp_path / "half.gguf").metadata["general.file_type"] == 1
