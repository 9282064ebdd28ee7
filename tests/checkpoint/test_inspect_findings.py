"""Every kind of finding, planted in a checkpoint that has none; and the checkpoints that must have none."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.checkpoint.header_files import header_folder, shapes_of_config
from tests.conftest import DATA, GOLDEN
from torch import Tensor

import scantling as sc
from scantling.cards import to_yaml
from scantling.checkpoint.inspect.codes import CODES
from scantling.cli.main import _run
from scantling.inspection import Inspection, inspect

TINY = GOLDEN / "tiny"
Tensors = dict[str, Tensor]


@dataclass
class Planted:
    """A fault.

    Attributes:
        base: the tiny model that it is planted in.
        config: keys that are set; None removes one.
        change: of the tensors, in place.
        codes: all findings that it must give.
        said: words of the message of the first of them.
    """

    base: str
    codes: tuple[str, ...]
    said: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    change: Callable[[Tensors], None] | None = None
    files: Callable[[Path], None] | None = None


def plant(fault: Planted, folder: Path) -> Path:
    source = TINY / fault.base
    config = json.loads((source / "config.json").read_text()) | fault.config
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value != "gone"}))
    tensors = load_file(source / "model.safetensors")
    if fault.change is not None:
        fault.change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    if fault.files is not None:
        fault.files(folder)
    return folder


def codes(found: Inspection) -> list[str]:
    return [finding.code for finding in found.findings]


def renamed(old: str, new: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if old in name]:
            tensors[name.replace(old, new)] = tensors.pop(name)

    return change


def without(*parts: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if any(part in name for part in parts)]:
            del tensors[name]

    return change


def put(name: str, value: Callable[[Tensors], Tensor]) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[name] = value(tensors)

    return change


def to(dtype: torch.dtype, part: str = "") -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors |= {name: tensor.to(dtype) for name, tensor in tensors.items() if part in name}

    return change


def one_layer_other(tensors: Tensors) -> None:
    name = "model.layers.1.self_attn.q_proj.weight"
    tensors[name] = tensors[name][:48]


def split_in_two(folder: Path, edit: Callable[[dict[str, Tensors], dict[str, str]], None] | None = None) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {f"model-0000{i}-of-00002.safetensors": {} for i in (1, 2)}
    first, second = files
    placed = {}
    for i, name in enumerate(names):
        placed[name] = first if i < len(names) // 2 else second
        files[placed[name]][name] = tensors[name]
    if edit is not None:
        edit(files, placed)
    for file, piece in files.items():
        if piece:
            save_file(piece, folder / file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": placed}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def sharded(edit: Callable[[dict[str, Tensors], dict[str, str]], None]) -> Callable[[Path], None]:
    return lambda folder: split_in_two(folder, edit)


def lose_second(files: dict[str, Tensors], placed: dict[str, str]) -> None:
    files["model-00002-of-00002.safetensors"].clear()


def move_one(files: dict[str, Tensors], placed: dict[str, str]) -> None:
    first, second = files
    name = next(iter(files[second]))
    files[first][name] = files[second].pop(name)


def unlist_one(files: dict[str, Tensors], placed: dict[str, str]) -> None:
    del placed["model.norm.weight"]


def copy_one(files: dict[str, Tensors], placed: dict[str, str]) -> None:
    first, second = files
    files[second]["lm_head.weight"] = torch.zeros_like(files[first]["lm_head.weight"])


def one_alone(files: dict[str, Tensors], placed: dict[str, str]) -> None:
    """The second shard holds one tensor only."""
    first, second = files
    last = list(files[second])[-1]
    for name in [name for name in files[second] if name != last]:
        files[first][name] = files[second].pop(name)
        placed[name] = first


def wrong_total(folder: Path) -> None:
    split_in_two(folder)
    path = folder / "model.safetensors.index.json"
    data = json.loads(path.read_text())
    data["metadata"]["total_size"] += 4
    path.write_text(json.dumps(data))


def loose_shards(folder: Path) -> None:
    split_in_two(folder)
    (folder / "model.safetensors.index.json").unlink()


def index_beside(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model.safetensors"}}')


def tokenizer_of(count: int) -> Callable[[Path], None]:
    data = {"added_tokens": [{"id": count - 1, "content": ']{\\"vocab\\": {'}], "normalizer": None}
    model = {"type": "BPE", "vocab": {f"t{i}": i for i in range(count - 1)}, "merges": []}
    return lambda folder: (folder / "tokenizer.json").write_text(json.dumps({**data, "model": model})) and None


def angles(base: float, pairs: int) -> Callable[[Tensors], None]:
    value = torch.tensor([base ** (-i / pairs) for i in range(pairs)])
    return put("model.layers.0.self_attn.rotary_emb.inv_freq", lambda _: value)


def classifier(labels: int) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith("cls.")]:
            del tensors[name]
        tensors |= {"bert.pooler.dense.weight": torch.ones(48, 48), "bert.pooler.dense.bias": torch.ones(48)}
        tensors |= {"classifier.weight": torch.ones(labels, 48), "classifier.bias": torch.ones(labels)}

    return change


FAULTS: dict[str, Planted] = {
    "a shard is not there": Planted("llama-gqa", ("shard_missing",), "with 11 of the 21", files=sharded(lose_second)),
    "a tensor is in the other shard": Planted("llama-gqa", ("index_absent",), "1 tensors", files=sharded(move_one)),
    "a tensor is not in the index": Planted(
        "llama-gqa", ("index_extra",), "model.norm.weight", files=sharded(unlist_one)
    ),
    "a second copy": Planted("llama-gqa", ("index_copy",), "lm_head.weight", files=sharded(copy_one)),
    "shards without an index": Planted("llama-gqa", ("index_missing",), "2 files", files=loose_shards),
    "an index beside one file": Planted("llama-gqa", ("index_unused",), "passed over", files=index_beside),
    "a wrong total": Planted("llama-gqa", ("index_size",), "total_size is", files=wrong_total),
    "a small last shard": Planted("llama-gqa", ("shard_sizes",), "it is complete", files=sharded(one_alone)),
    "no weights": Planted(
        "llama-gqa", ("no_weights",), "stands alone", files=lambda f: (f / "model.safetensors").unlink()
    ),
    "no config": Planted("llama-gqa", ("no_config",), "no config.json", files=lambda f: (f / "config.json").unlink()),
    "an unknown family": Planted("llama-gqa", ("config_refused",), "'lama'", {"model_type": "lama"}),
    "two scalings": Planted(
        "llama-gqa",
        ("config_refused",),
        "they must agree",
        {"rope_parameters": "gone", "rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2.0}},
    ),
    "quantised": Planted("llama-gqa", ("quantised",), "gptq", {"quantization_config": {"quant_method": "gptq"}}),
    "wrappers": Planted("llama-gqa", ("wrapper_prefix",), "_orig_mod.", change=renamed("model.", "_orig_mod.model.")),
    "old norms": Planted(
        "bert", ("other_names",), "LayerNorm.gamma", change=renamed("LayerNorm.weight", "LayerNorm.gamma")
    ),
    "another family": Planted(
        "llama-gqa",
        ("family",),
        "the config says gpt_neox",
        {
            "model_type": "gpt_neox",
            "rms_norm_eps": "gone",
            "mlp_bias": "gone",
            "head_dim": "gone",
            "num_key_value_heads": "gone",
            "num_attention_heads": 6,
            "rope_parameters": "gone",
            "pretraining_tp": "gone",
            "rotary_emb_base": 10000,
        },
    ),
    "names of nobody": Planted(
        "llama-gqa",
        ("names_unknown", "no_config"),
        "21 of 21",
        change=lambda t: [t.update({f"x.{i}.y": t.pop(n)}) for i, n in enumerate(list(t))] and None,
        files=lambda f: (f / "config.json").unlink(),
    ),
    "a tensor is missing": Planted(
        "llama-gqa", ("tensor_missing",), "model.layers.1.mlp.up_proj", change=without("layers.1.mlp.up_proj")
    ),
    "a tensor too many": Planted(
        "llama-gqa", ("tensor_extra",), "score.weight", change=put("score.weight", lambda _: torch.ones(2, 48))
    ),
    "a buffer": Planted("llama-gqa", ("tensor_ignored",), "inv_freq", change=angles(10000.0, 5)),
    "two names of one": Planted(
        "llama-gqa",
        ("tensor_twice", "wrapper_prefix"),
        "module.model.norm",
        change=put("module.model.norm.weight", lambda t: t["model.norm.weight"].clone()),
    ),
    "a layer left out": Planted(
        "gemma3-text", ("layer_gap", "tensor_missing"), "1 are not there", change=without("layers.1.")
    ),
    "fewer layers": Planted(
        "llama-gqa", ("layer_count",), "2 by the tensors, 3 by the config", {"num_hidden_layers": 3}
    ),
    "another width": Planted("llama-gqa", ("width",), "48 by the tensors, 52", {"hidden_size": 52}),
    "another head size": Planted("llama-gqa", ("head_size", "kv_heads"), "60 by the tensors, 48", {"head_dim": 8}),
    "no head size": Planted("llama-gqa", ("head_size", "kv_heads"), "6 heads of 8", {"head_dim": "gone"}),
    "other heads": Planted("qwen3", ("heads",), "6 by the tensors, 4", {"num_attention_heads": 4}),
    "other KV heads": Planted("llama-gqa", ("kv_heads",), "20 by the tensors, 30", {"num_key_value_heads": 3}),
    "other heads of one width": Planted(
        "qwen3",
        ("head_size",),
        "14 by the tensors, 28",
        {"num_attention_heads": 3, "head_dim": 28, "num_key_value_heads": 1},
    ),
    "another latent": Planted("deepseek-v2", ("latent",), "20 by the tensors, 16", {"kv_lora_rank": 16}),
    "another d_ff": Planted("llama-gqa", ("mlp_width",), "76 by the tensors, 152", {"intermediate_size": 152}),
    "another MLP": Planted(
        "t5",
        ("mlp_kind", "tensor_extra", "tensor_missing"),
        "plain by the tensors, gated",
        {"feed_forward_proj": "gated-gelu", "dense_act_fn": "gelu_new", "is_gated_act": True},
    ),
    "fewer experts": Planted("mixtral", ("experts",), "4 by the tensors, 3", {"num_local_experts": 3}),
    "a padded table": Planted(
        "llama-gqa",
        ("vocab_padded",),
        "136 by the tensors, 130",
        {"vocab_size": 130},
        change=lambda t: (
            [t.update({n: torch.cat([t[n], t[n][:5]])}) for n in ("model.embed_tokens.weight", "lm_head.weight")]
            and None
        ),
    ),
    "another table": Planted("llama-gqa", ("vocab_rows",), "131 by the tensors, 133", {"vocab_size": 133}),
    "other positions": Planted(
        "gpt2",
        ("positions",),
        "64 by the tensors, 32",
        {"n_positions": 32, "n_ctx": "gone", "bos_token_id": 1, "eos_token_id": 2},
    ),
    "biases that are not there": Planted(
        "llama-gqa", ("biases",), "none by the tensors, q k v o", {"attention_bias": True}
    ),
    "norms that are not there": Planted("phi", ("norms",), "none by the tensors, head", {"qk_layernorm": True}),
    "other labels": Planted(
        "bert",
        ("head_kind",),
        "3 by the tensors, 2",
        {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "no", "1": "yes"}},
        change=classifier(3),
    ),
    "a layer of another shape": Planted(
        "llama-gqa", ("head_size", "shape"), "60, 48 by the tensors", change=one_layer_other
    ),
    "two tables under one tie": Planted(
        "llama-mha-tied-bias",
        ("tied_differs",),
        "131 of 131 rows differ",
        change=put("lm_head.weight", lambda t: t["model.embed_tokens.weight"] + 1),
    ),
    "one row of a tie": Planted(
        "llama-mha-tied-bias",
        ("tied_differs",),
        "1 of 131 rows differ",
        change=put("lm_head.weight", lambda t: torch.cat([t["model.embed_tokens.weight"][:-1], torch.ones(1, 48)])),
    ),
    "a tie that is stored": Planted(
        "llama-mha-tied-bias",
        ("tied_copy",),
        "25,152 bytes",
        change=put("lm_head.weight", lambda t: t["model.embed_tokens.weight"].clone()),
    ),
    "a tie in another dtype": Planted(
        "llama-mha-tied-bias",
        ("tied_copy",),
        "not compared",
        change=put("lm_head.weight", lambda t: t["model.embed_tokens.weight"].bfloat16()),
    ),
    "a head that is not there": Planted("llama-gqa", ("untied_absent",), "no matrix for it", change=without("lm_head")),
    "a head that is the table": Planted(
        "llama-gqa",
        ("untied_equal",),
        "all 131 rows are equal",
        change=put("lm_head.weight", lambda t: t["model.embed_tokens.weight"].clone()),
    ),
    "another dtype": Planted(
        "llama-gqa", ("dtype",), "the config says bfloat16 and the tensors are float32", {"dtype": "bfloat16"}
    ),
    "two dtypes": Planted(
        "llama-gqa", ("dtype_mixed",), "float32 (16 tensors), bfloat16 (5 tensors)", change=to(torch.bfloat16, "norm")
    ),
    "whole numbers": Planted("llama-gqa", ("dtype_odd",), "int8", change=to(torch.int8, "layers.0.mlp.up")),
    "no base": Planted("llama-gqa", ("rope_default",), "10,000", {"rope_parameters": "gone"}),
    "angles of another base": Planted(
        "llama-gqa",
        ("rope_parameters", "tensor_ignored"),
        "base 5e+05",
        {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}},
        change=angles(500000.0, 5),
    ),
    "a window that is off": Planted(
        "qwen2", ("window_off",), "use_sliding_window is false", {"sliding_window": 8, "use_sliding_window": False}
    ),
    "a window that hides nothing": Planted("mistral-swa", ("window_wide",), "64", {"sliding_window": 64}),
    "too large a tokenizer": Planted("llama-gqa", ("tokenizer_larger",), "132 ids", files=tokenizer_of(132)),
    "spare rows": Planted("llama-gqa", ("tokenizer_smaller",), "3 are never given", files=tokenizer_of(128)),
    "an id beyond the table": Planted(
        "llama-gqa", ("special_id",), "eos_token_id is [2, 131]", {"eos_token_id": [2, 131]}
    ),
}


FIXTURES: dict[str, tuple[str, tuple[str, ...], int]] = {
    "bert-gamma-beta": ("bert-gamma-beta", ("other_names", "tensor_ignored"), 0),
    "compiled-ddp-prefix": ("compiled-ddp-prefix", ("wrapper_prefix",), 0),
    "gguf-llama-gqa": ("gguf-llama-gqa/model.gguf", (), 0),
    "gpt2-linear-layout": ("gpt2-linear-layout", ("transposed",), 1),
    "mistral-window-4": ("mistral-window-4", (), 0),
    "mistral-window-null": ("mistral-window-null", (), 0),
    "neox-fused-qkv": ("neox-fused-qkv", ("other_names",), 0),
    "qwen3-head-dim": ("qwen3-head-dim", (), 0),
    "shards-extra-not-in-index": ("shards-extra-not-in-index", ("index_extra",), 1),
    "shards-good": ("shards-good", (), 0),
    "shards-one-missing": ("shards-one-missing", ("shard_missing",), 1),
    "shards-same-name-twice": ("shards-same-name-twice", ("index_copy",), 0),
    "t5-v1.1-untied": ("t5-v1.1-untied", (), 0),
    "tied-head-absent": ("tied-head-absent", (), 0),
    "untied": ("untied", (), 0),
}
"""Checkpoints with faults of the list of cases: the findings and the exit status of each."""


def fixture(name: str) -> Path:
    return next(path for room in ("checkpoints", "cases") if (path := DATA / room / name).exists())


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
def test_a_planted_fault_is_named(fault: Planted, tmp_path: Path) -> None:
    found = inspect(plant(fault, tmp_path))
    assert sorted(codes(found)) == sorted(fault.codes)
    first = next(finding for finding in found.findings if finding.code == fault.codes[0])
    assert fault.said in first.message
    assert first.cause
    assert found.ok == all(CODES[code].severity != "error" for code in fault.codes)


def test_every_code_is_planted_somewhere() -> None:
    planted = {code for fault in FAULTS.values() for code in fault.codes}
    planted |= {code for _, found, _ in FIXTURES.values() for code in found}
    elsewhere = {"layers_beyond", "attention_kind", "qk_layout"}
    assert planted | elsewhere == set(CODES)
    assert not planted & elsewhere


@pytest.mark.parametrize(("path", "expected", "status"), FIXTURES.values(), ids=FIXTURES.keys())
def test_the_verdict_on_each_case(path: str, expected: tuple[str, ...], status: int) -> None:
    found = inspect(fixture(path))
    # One of the configs keeps the ids of a vocabulary that is far larger than its own.
    assert tuple(code for code in codes(found) if code != "special_id") == expected
    assert found.ok == (status == 0)


REFUSED = {
    "bad-dtype": "none of F64",
    "duplicate-key": "each may appear once",
    "header-132MB-declared": "over the limit",
    "header-2e63": "9223372036854775808",
    "shape-size-mismatch": "needs",
    "truncated-data": "bytes are missing",
    "truncated-header": "bytes are missing",
}
"""Single files of the list of cases that are no safetensors, and a word of why."""


@pytest.mark.parametrize("name", sorted(path.stem for path in (DATA / "checkpoints" / "st").iterdir()))
def test_the_verdict_on_each_file(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    status = _run(["inspect", str(DATA / "checkpoints" / "st" / f"{name}.safetensors")])
    said = capsys.readouterr()
    if name in REFUSED:
        assert (status, said.out, said.err.count("\n")) == (2, "", 1)
        assert REFUSED[name] in said.err
    else:
        assert name in ("bf16", "good")
        assert status == 0
        assert "names_unknown" in said.out


def test_facts_of_the_cases() -> None:
    """What each of these files was made to show."""
    window = {name: inspect(fixture(f"mistral-window-{name}")).card for name in ("4", "null")}
    assert [getattr(card.attention, "window", 0) for card in window.values() if card] == [4, None]
    wide = inspect(fixture("qwen3-head-dim"))
    assert (wide.comparison.file.value("d_head"), wide.comparison.file.value("heads")) == (16, 4)
    assert inspect(fixture("t5-v1.1-untied")).comparison.file.value("tied") is False
    assert inspect(fixture("tied-head-absent")).comparison.file.value("tied") is True
    lost = inspect(fixture("shards-one-missing")).findings[0].message
    assert "'model-00002-of-00002.safetensors'" in lost
    assert "11 of the 21 tensors" in lost
    assert "9824 parameters" in lost
    turned = inspect(fixture("gpt2-linear-layout")).findings[0]
    assert all(name in turned.message for name in ("c_attn", "c_fc", "mlp.c_proj"))
    assert "square" in turned.cause


def test_spellings_of_rope_give_one_card(tmp_path: Path) -> None:
    folder = DATA / "checkpoints" / "rope-spellings"
    cards = {}
    for name in ("v5", "v4", "old-type-key", "no-scaling"):
        place = tmp_path / name / "model"
        place.mkdir(parents=True)
        shutil.copyfile(folder / "model.safetensors", place / "model.safetensors")
        shutil.copyfile(folder / f"config.{name}.json", place / "config.json")
        cards[name] = inspect(place).card
    assert cards["v5"] == cards["v4"] == cards["old-type-key"] is not None
    assert cards["no-scaling"] not in (None, cards["v5"])
    assert getattr(cards["v5"].position, "scaling", None) is not None


@pytest.mark.parametrize("name", sorted(path.name for path in TINY.iterdir() if path.is_dir()))
def test_a_sound_checkpoint_has_nothing_wrong(name: str) -> None:
    found = inspect(TINY / name)
    # Some of the recorded configs keep the ids of a vocabulary that is far larger than theirs.
    assert set(codes(found)) <= {"special_id"}
    assert found.comparison.rebuilds
    assert all(line.agree is not False for line in found.lines)
    config = json.loads((TINY / name / "config.json").read_text())
    assert config["model_type"] in found.families


def test_layers_beyond_the_models_own(tmp_path: Path) -> None:
    """A layer that predicts a token further ahead, as DeepSeek V3's files have it after their own."""

    def ahead(tensors: Tensors) -> None:
        for name in [name for name in tensors if ".layers.1." in name]:
            tensors[name.replace(".layers.1.", ".layers.2.")] = tensors[name].clone()
        tensors |= {"model.layers.2.eh_proj.weight": torch.ones(48, 96), "model.layers.2.enorm.weight": torch.ones(48)}

    found = inspect(plant(Planted("deepseek-v3", (), config={"num_nextn_predict_layers": 1}, change=ahead), tmp_path))
    assert codes(found) == ["layers_beyond", "tensor_ignored"]
    assert found.comparison.file.value("layers") == 2
    assert found.total == inspect(TINY / "deepseek-v3").total


def test_another_kind_of_attention(tmp_path: Path) -> None:
    """A card of our own beside tensors of a model with another kind."""
    tensors = sc.new(TINY / "deepseek-v2", seed=0).net.state_dict()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "scantling", "layout": 1}')
    (tmp_path / "card.yaml").write_text(to_yaml(sc.card(TINY / "deepseek-v2")))
    assert inspect(tmp_path).findings == ()
    (tmp_path / "card.yaml").write_text(to_yaml(sc.card(TINY / "llama-gqa")))
    found = inspect(tmp_path)
    assert found.findings[0].code == "attention_kind"
    assert "latent by the tensors, multi_head by the config" in found.findings[0].message
    assert not found.ok


@pytest.mark.parametrize("stored", ["halves", "neighbours"])
def test_rows_tell_how_pairs_lie(stored: str, tmp_path: Path) -> None:
    """Norms of rows that go together in pairs, and rise from pair to pair as trained ones do."""
    config = json.loads((TINY / "mistral-full" / "config.json").read_text())
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    config |= sizes | {"num_hidden_layers": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    torch.manual_seed(3)
    tensors = {name: torch.randn(shape) for name, shape in shapes_of_config(tmp_path / "config.json").items()}
    size = torch.cat([torch.linspace(0, 2, 16), torch.linspace(0, 2, 16).flip(0)]).exp()
    pairs = size[::2]
    rows = pairs.repeat_interleave(2) if stored == "neighbours" else pairs.repeat(2)
    for name in [name for name in tensors if "q_proj" in name or "k_proj" in name]:
        tensors[name] = tensors[name] * rows.repeat(tensors[name].shape[0] // 32)[:, None]
    save_file(tensors, tmp_path / "model.safetensors")
    found = inspect(tmp_path)
    assert codes(found) == ([] if stored == "halves" else ["qk_layout"])
    assert found.layout is not None
    assert ("by the names and by the rows" in found.layout) == (stored == "halves")


def test_random_rows_tell_nothing() -> None:
    found = inspect(TINY / "llama-gqa")
    assert found.layout is not None
    assert "the rows do not tell" in found.layout


def test_a_table_of_zeros_is_no_tie(tmp_path: Path) -> None:
    """A file that was never written holds zeros; that two tables of it are equal means nothing."""
    config = TINY / "llama-gqa" / "config.json"
    folder = header_folder(tmp_path / "model", shapes_of_config(config), config)
    assert codes(inspect(folder)) == ["dtype"]


def test_the_bytes_of_a_base_in_16_bits(tmp_path: Path) -> None:
    """Angles are stored in any dtype; their base is read within the rounding of 16 bits."""
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for base, expected in ((10000.0, ["tensor_ignored"]), (500000.0, ["rope_parameters", "tensor_ignored"])):
            value = torch.tensor([base ** (-i / 5) for i in range(5)]).to(dtype)
            change = put("model.layers.0.self_attn.rotary_emb.inv_freq", lambda _, value=value: value)
            folder = tmp_path / f"{dtype}-{base}".replace(".", "-")
            folder.mkdir()
            rope = {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}
            assert codes(inspect(plant(Planted("llama-gqa", (), config=rope, change=change), folder))) == expected


def test_a_tie_that_is_none_is_untied_in_the_card(tmp_path: Path) -> None:
    """The printed card has both matrices, and nothing of the file is left out."""
    fault = FAULTS["two tables under one tie"]
    found = inspect(plant(fault, tmp_path))
    assert found.card is not None
    assert not found.card.tied
    stored = sum(tensor.numel() for tensor in load_file(tmp_path / "model.safetensors").values())
    assert sc.assemble(found.card).params == found.total == stored


def test_t5_with_a_head_of_its_own_under_a_tie(tmp_path: Path) -> None:
    """T5 scales the stream before a tied head; untied, as in T5 1.1, it does not."""

    def part(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["shared.weight"] * 2

    found = inspect(plant(Planted("t5", (), change=part), tmp_path))
    assert codes(found) == ["tied_differs"]
    assert found.card is not None
    assert (found.card.tied, found.card.head.scale) == (False, None)
    lost = tmp_path / "lost"
    lost.mkdir()
    found = inspect(plant(Planted("t5-v1_1", (), change=without("lm_head")), lost))
    assert codes(found) == ["untied_absent", "tensor_missing"]
    assert found.card is None


def test_two_tables_of_an_encoder_decoder(tmp_path: Path) -> None:
    """A second table that is not the shared one cannot be told by a card of this family."""
    change = put("encoder.embed_tokens.weight", lambda t: t["shared.weight"] + 1)
    found = inspect(plant(Planted("t5", (), change=change), tmp_path))
    assert codes(found) == ["tied_differs"]
    assert found.card is None


def test_a_quantised_checkpoint_keeps_its_configs_card(tmp_path: Path) -> None:
    found = inspect(plant(FAULTS["quantised"], tmp_path))
    assert found.card is not None
    assert found.card.inference is not None
    assert found.card.inference.quantisation == "gptq"


def test_an_incomplete_download_has_no_card() -> None:
    found = inspect(fixture("shards-one-missing"))
    assert found.card is None
    with pytest.raises(sc.ScantlingInputError, match="no card rebuilds these tensors: 1 of the shards"):
        found.card_yaml()
