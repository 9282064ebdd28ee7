"""What inspect says of sound checkpoints: facts from tensors alone, cards that rebuild the model, and the limits."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.checkpoint.header_files import header_file, header_folder, shapes_of_config
from tests.conftest import GOLDEN, golden_json

import scantling as sc
from scantling.cards import read_text
from scantling.cards.schema import Latent, MultiHead
from scantling.checkpoint.find import default_encoder, default_model
from scantling.checkpoint.inspect.facts import Facts, facts_of
from scantling.checkpoint.inspect.naming import held, named
from scantling.checkpoint.inspect.parts import part_of
from scantling.checkpoint.inspect.tables import collapsed, collapsed_names
from scantling.checkpoint.names import (
    Alternate,
    Halves,
    Interleave,
    Split,
    Stack,
    Transform,
    Transpose,
    TransposeEach,
    Unsqueeze,
)
from scantling.checkpoint.sharded import read_checkpoint
from scantling.inspection import Inspection, checklist, inspect
from scantling.numbers.count import count

TINY = GOLDEN / "tiny"
MODELS = sorted(path.name for path in TINY.iterdir() if path.is_dir())
CONFIGS = sorted(path.stem for path in (GOLDEN / "configs").glob("*.json"))


def facts_by_tensors(name: str) -> Facts:
    shapes = {key: info.shape for key, info in read_checkpoint(TINY / name).tensors.items()}
    return facts_of(named(shapes, gguf=False))


def recorded(name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((TINY / name / "config.json").read_text())
    return config


def first(config: dict[str, Any], *keys: str) -> Any:
    """The value of the first of these keys that the config has."""
    return next((config[key] for key in keys if config.get(key) is not None), None)


LAYERS = ("num_hidden_layers", "n_layer", "n_layers")
WIDTH = ("hidden_size", "n_embd", "d_model", "dim")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
WIDE = ("intermediate_size", "ffn_dim", "n_inner", "d_ff", "ffn_hidden_size", "hidden_dim")


@pytest.mark.parametrize("name", MODELS)
def test_sizes_that_tensors_show_are_those_of_the_recorded_config(name: str) -> None:
    """Read here from the raw config; the facts know nothing but names and shapes."""
    facts, config = facts_by_tensors(name), recorded(name)
    stacks = [config.get(f"{side}_layers") for side in ("encoder", "decoder")]
    stacks = stacks if stacks[0] else [config.get("num_layers"), config.get("num_decoder_layers")]
    layers = first(config, *LAYERS)
    if stacks[0]:
        layers = stacks[0] if stacks[0] == stacks[1] else f"{stacks[0]} + {stacks[1]}"
    assert facts.value("layers") == layers
    assert facts.value("d_model") == first(config, *WIDTH)
    assert facts.value("rows") == config["vocab_size"]
    wide = first(config, *WIDE)
    if facts.value("mlp") in ("plain", "gated") and wide is not None:
        assert facts.value("d_ff") == wide
    experts = first(config, "num_local_experts", "num_experts", "n_routed_experts")
    if experts:
        assert facts.value("experts") == experts
    heads, d_head = first(config, *HEADS), first(config, "head_dim", "d_kv")
    if heads and d_head and facts.value("attention") == "multi_head":
        assert facts.value("q_width") == heads * d_head
    shown = facts.value("heads")
    assert shown in (None, heads)


def test_heads_are_known_where_a_tensor_has_one_number_for_each_and_nowhere_else() -> None:
    """QK-norm over a head or for each, sinks, biases per head, latent attention: these have one; the others do not."""
    known = {name for name in MODELS if facts_by_tensors(name).value("heads") is not None}
    assert known == {
        "deepseek-v2", "deepseek-v2-qlora-groups", "deepseek-v3", "gemma3-text", "gpt-oss", "phi-qknorm", "qwen3",
        "qwen3-moe", "qwen3-moe-nonorm", "stablelm-parallel-qknorm", "t5", "t5-v1_1",
    }  # fmt: skip
    latent = facts_by_tensors("deepseek-v3")
    config = recorded("deepseek-v3")
    keys = {"heads": "num_attention_heads", "d_nope": "qk_nope_head_dim", "d_rope": "qk_rope_head_dim"}
    keys |= {"d_value": "v_head_dim", "kv_rank": "kv_lora_rank", "q_rank": "q_lora_rank"}
    assert {key: latent.value(key) for key in keys} == {key: config[theirs] for key, theirs in keys.items()}


@pytest.mark.parametrize("name", MODELS)
def test_names_belong_to_the_family_that_wrote_them(name: str) -> None:
    shapes = {key: info.shape for key, info in read_checkpoint(TINY / name).tensors.items()}
    found = named(shapes, gguf=False)
    assert recorded(name)["model_type"] in found.families
    assert found.known == len(shapes)
    # Every tensor has exactly one role.
    roles = held(found, found.readings[0])
    stored = [name for role in roles.values() for names in role.names.values() for name in names]
    assert sorted(stored) == sorted(shapes)


def test_a_norm_that_two_families_name_alike_is_told_by_its_neighbours() -> None:
    """post_attention_layernorm stands before the MLP in Llama and on attention's update in OLMo 2."""
    assert facts_by_tensors("olmo2").value("norm_at") == "res"
    assert facts_by_tensors("llama-gqa").value("norm_at") == "in"
    # OPT has one set of names for norms before and after its sublayers, so they tell nothing.
    assert facts_by_tensors("opt").value("norm_at") == facts_by_tensors("opt-postnorm-proj").value("norm_at")
    assert facts_by_tensors("opt-postnorm-proj").value("final_norm") is False


@given(st.lists(st.one_of(st.integers(0, 999).map(str), st.text("abcxyz_", min_size=1)), min_size=1, max_size=8))
@settings(deadline=None)
def test_numbers_are_taken_out_of_a_name_and_put_back(pieces: list[str]) -> None:
    name = ".".join(pieces)
    pattern, numbers = collapsed(name)
    assert pattern.format(*numbers) == ".".join(str(int(p)) if p.isdecimal() else p for p in pieces)
    assert len(numbers) == sum(piece.isdecimal() for piece in pieces)


NAMES = st.lists(st.one_of(st.integers(0, 10**10).map(str), st.text("ab{}\n.0", max_size=4)), min_size=1, max_size=5)


@given(st.lists(NAMES.map(".".join), max_size=6))
@settings(deadline=None)
def test_many_names_at_once_are_each_by_itself(names: list[str]) -> None:
    assert list(collapsed_names(names)) == [collapsed(name) for name in names]


def test_names_with_braces_are_names(tmp_path: Path) -> None:
    assert collapsed("a.{}.b") != collapsed("a.1.b")
    assert collapsed("a.{}.b")[1] == ()
    shapes = {"a.{}.b": (2,), "a.1.b": (2,), "{": (1,), "model.layers.{0}.input_layernorm.weight": (48,), "{}{i}": (1,)}
    header_file(tmp_path / "model.safetensors", shapes)
    (finding,) = (f for f in inspect(tmp_path).findings if f.code == "names_unknown")
    assert "5 of 5 tensors: 'a.{}.b', 'a.1.b', '{', " in finding.message


TURNS = [Transform(), Transpose(), Unsqueeze(), Split(), Split(Transpose()), Interleave(2), Halves(2)]


@pytest.mark.parametrize("transform", TURNS, ids=str)
def test_a_shape_is_turned_as_loading_turns_the_tensor(transform: Transform) -> None:
    for shape in ((4, 6), (8, 3)):
        (theirs,) = transform.saved_shapes([shape])
        assert transform.as_ours(theirs) == shape


def test_shapes_of_experts_are_turned_as_loading_turns_them() -> None:
    assert TransposeEach().as_ours(TransposeEach().saved_shapes([(5, 4, 6)])[0]) == (5, 4, 6)
    assert Stack().as_ours(Stack().saved_shapes([(5, 4, 6)])[0]) == (4, 6)
    together = Alternate(TransposeEach())
    assert together.as_ours(together.saved_shapes([(5, 4, 6)] * 2)[0]) == (5, 8, 6)


@pytest.mark.parametrize("name", MODELS)
def test_parts_by_name_are_the_parts_of_the_tree(name: str) -> None:
    model = sc.assemble(sc.card(TINY / name))
    by_tree = {
        f"{path}.{weight}" if path else weight: role
        for path, part, role in model.walk()
        for weight in (*part.weights(), *part.buffers())
    }
    assert {weight: part_of(weight) for weight in by_tree} == by_tree
    found = inspect(TINY / name)
    stored = {role: n for role, n in count(model).by_part.items() if n}
    if model.named_stored == model.named_weights:
        assert dict(found.by_part) == stored


def rebuilt(found: Inspection) -> Any:
    """The model of the printed card."""
    return sc.assemble(read_text(found.card_yaml(), "the printed card"))


@pytest.mark.parametrize("name", MODELS)
def test_the_printed_card_rebuilds_the_model(name: str) -> None:
    found = inspect(TINY / name)
    model = rebuilt(found)
    assert model == sc.assemble(sc.card(TINY / name))
    assert sum(math.prod(shape) for shape in model.named_stored.values()) == found.total
    assert found.total == sum(info.numel for info in read_checkpoint(TINY / name).tensors.values())


@pytest.mark.parametrize("name", CONFIGS)
def test_headers_of_real_models(name: str, tmp_path: Path) -> None:
    """Names and shapes of the real checkpoint, whose digest the config's tests compare with the recorded one."""
    config = GOLDEN / "configs" / f"{name}.json"
    folder = header_folder(tmp_path / name, shapes_of_config(config), config)
    found = inspect(folder)
    assert found.ok
    assert {finding.code for finding in found.findings} <= {
        "dtype", "rope_default", "shard_sizes", "window_off", "window_wide", "special_id", "tensor_ignored",
    }  # fmt: skip
    assert all(line.agree is not False for line in found.lines)
    model = rebuilt(found)
    known = golden_json("params.json")[name]
    # Recorded of this one is the masked LM; its config says BertModel, which has a pooler and no head.
    total, stored = (
        (22_713_216,) * 2 if name == "all-minilm-l6-v2" else (known["total_unique"], known["checkpoint_elements"])
    )
    assert (model.params, found.total) == (total, stored)
    assert found.total == sum(math.prod(shape) for shape in model.named_stored.values())
    alone = inspect(config)
    assert "no_weights" in {finding.code for finding in alone.findings}
    assert alone.ok
    assert rebuilt(alone).params == total


def test_the_real_decoder() -> None:
    found = inspect(default_model())
    assert found.findings == ()
    assert (found.total, rebuilt(found).params) == (134_515_008, 134_515_008)
    assert {(k.dtype, k.tensors) for k in found.kinds} == {("Q4_1", 210), ("Q8_0", 1), ("float32", 61)}
    assert sum(k.nbytes for k in found.kinds) == found.gathered.nbytes
    card = found.card
    assert card is not None
    assert isinstance(card.attention, MultiHead)
    assert (card.n_layers, card.d_model, card.attention.n_heads, card.attention.n_kv_heads) == (30, 576, 9, 3)
    assert card.inference is not None
    assert card.inference.quantisation == "Q4_1 (210 of 272 tensors), Q8_0 (1 of 272 tensors)"
    assert card.inference.cache == card.training == "unknown"
    assert found.layout is not None
    assert found.layout.startswith("neighbours, by the names and by the rows")
    checked = checklist(found)
    assert checked["heads"] == "9 of 64, 3 KV heads"
    assert checked["expansion"] == 1536 / 576
    assert checked["residual order"] == "pre-norm"
    assert checked["position"] == "rope, base 100,000"
    assert checked["MLP share"] == pytest.approx(30 * 3 * 576 * 1536 / 134_515_008)


def test_the_same_weights_in_the_other_layout(smollm: Any, tmp_path: Path) -> None:
    """Saved for transformers, the rows are reordered: halves by the names, and by the rows."""
    sc.save(smollm, tmp_path / "model", dtype="bfloat16")
    found = inspect(tmp_path / "model")
    assert found.findings == ()
    assert found.layout is not None
    assert found.layout.startswith("halves, by the names and by the rows")


def test_the_real_encoder() -> None:
    found = inspect(default_encoder())
    assert [finding.code for finding in found.findings] == ["tensor_ignored"]
    assert "embeddings.position_ids" in found.findings[0].message
    assert (found.total, rebuilt(found).params) == (22_713_216, 22_713_216)
    assert found.families[:1] == ("bert",)
    checked = checklist(found)
    assert checked["position"] == "learned, 512 positions"
    assert checked["attention"] == "multi_head, both ways"
    assert checked["residual order"] == "post-norm"


def test_a_corrected_card_rebuilds_what_its_config_does_not(tmp_path: Path) -> None:
    """Qwen3-4B's shape with the head size left out: 4,022,468,096 parameters by the tensors, not 3,668,570,240."""
    config = {
        "model_type": "qwen3", "hidden_size": 2560, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 9728, "vocab_size": 151936, "rope_theta": 1e6,
        "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "hidden_act": "silu",
        "torch_dtype": "bfloat16",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    shapes = shapes_of_config(tmp_path / "config.json")
    wrong = header_folder(tmp_path / "wrong", shapes, {**config, "head_dim": 80})
    assert sc.assemble(sc.card(wrong)).params == 3_668_570_240
    found = inspect(wrong)
    assert [finding.code for finding in found.findings if finding.severity == "error"] == ["head_size"]
    assert rebuilt(found).params == found.total == 4_022_468_096
    assert found.card_yaml().startswith("# head size: by the tensors, not by the config\n")


def test_what_tensors_cannot_tell_is_unknown(tmp_path: Path) -> None:
    shutil.copyfile(TINY / "llama-gqa" / "model.safetensors", tmp_path / "model.safetensors")
    found = inspect(tmp_path / "model.safetensors")
    assert found.card is None
    with pytest.raises(sc.ScantlingInputError, match="no card rebuilds these tensors: there is no config"):
        found.card_yaml()
    partial = found.partial()
    attention = partial["attention"]
    assert [attention[key] for key in ("n_heads", "n_kv_heads", "d_head")] == ["unknown"] * 3
    assert partial["norm"] == {"kind": "unknown", "eps": "unknown", "at": ["in"]}
    assert partial["position"] == {"kind": "unknown"}
    assert (partial["n_layers"], partial["d_model"], partial["vocab_size"]) == (2, 48, 131)
    assert partial["training"] == partial["inference"] == "unknown"


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of a process is read from Linux's /proc")
@pytest.mark.parametrize("name", ["llama-3.1-405b", "deepseek-v3"])
def test_no_torch_and_little_memory_for_hundreds_of_billions_of_parameters(name: str, tmp_path: Path) -> None:
    """In a process of its own: no torch, and less than 200 MB at its largest; of 1,137 tensors, and of 45,395."""
    config = GOLDEN / "configs" / f"{name}.json"
    folder = header_folder(tmp_path / "model", shapes_of_config(config), config)
    code = (
        "import sys, json\n"
        "from scantling.inspection import inspect\n"
        "found = inspect(sys.argv[1])\n"
        "status = dict(line.split(':', 1) for line in open('/proc/self/status'))\n"
        "peak = int(status['VmHWM'].split()[0]) * 1024\n"
        "print(json.dumps([found.total, peak, 'torch' in sys.modules, len(found.gathered.files)]))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True)
    total, peak, torch_loaded, files = json.loads(done.stdout)
    assert total == golden_json("params.json")[name]["checkpoint_elements"]
    assert peak < 200 * 10**6
    assert not torch_loaded
    assert files > 150


def test_latent_widths_of_real_models() -> None:
    for name, attention in (
        ("deepseek-v3", Latent(n_heads=128, kv_rank=512, q_rank=1536, d_nope=128, d_rope=64, d_value=128, eps=1e-6)),
        ("deepseek-v2-lite", Latent(n_heads=16, kv_rank=512, d_nope=128, d_rope=64, d_value=128, eps=1e-6)),
    ):
        shapes = shapes_of_config(GOLDEN / "configs" / f"{name}.json")
        facts = facts_of(named(shapes, gguf=False))
        shown = {key: facts.value(key) for key in ("kv_rank", "d_nope", "d_rope", "d_value")}
        assert shown == {key: getattr(attention, key) for key in shown}
        assert facts.value("heads") == attention.n_heads
        assert facts.value("q_rank") == (attention.q_rank or "none")
