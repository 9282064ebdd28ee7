"""Saving: every family goes back into the files it came from, and other programs read them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from re import fullmatch
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tests.cards.strategies import any_cards, legal_cards
from tests.conftest import DATA, GOLDEN

import scantling as sc
from scantling.cards import presets
from scantling.cards.read import from_dict
from scantling.checkpoint.config_choice import choose
from scantling.checkpoint.families import family
from scantling.checkpoint.header import read_safetensors

TINY = GOLDEN / "tiny"
MODELS = sorted(p.name for p in TINY.iterdir() if p.is_dir())
CASES = DATA / "checkpoints"


def config_of(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors, found by the files' names alone."""
    return {name: t for file in sorted(folder.glob("model*.safetensors")) for name, t in load_file(file).items()}


def same_bits(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    def bits(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.contiguous().reshape(-1).view(torch.uint8)

    return set(one) == set(other) and all(
        t.dtype == other[n].dtype and t.shape == other[n].shape and torch.equal(bits(t), bits(other[n]))
        for n, t in one.items()
    )


def theirs(folder: Path, io: Mapping[str, torch.Tensor], kernel: str) -> torch.Tensor:
    """What the original implementation answers, whatever it is that the config names."""
    transformers = pytest.importorskip("transformers")
    (architecture,) = config_of(folder)["architectures"]
    model = getattr(transformers, architecture).from_pretrained(folder, attn_implementation=kernel)
    names = ("input_ids", "attention_mask", "token_type_ids", "decoder_input_ids", "decoder_attention_mask")
    with torch.no_grad():
        logits: torch.Tensor = model(**{name: io[name] for name in names if name in io}).logits
    return logits


@pytest.fixture(scope="module", params=MODELS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[sc.Model, Path, Path]:
    """A tiny model, the folder it came from, and folders `single` and `shards` that it was saved to."""
    source, to = TINY / request.param, tmp_path_factory.mktemp("saved")
    lm = sc.load(source)
    sc.save(lm, to / "single")
    sc.save(lm, to / "shards", max_shard_bytes=20_000)
    return lm, source, to


@pytest.mark.parametrize("form", ["single", "shards"])
def test_the_tensors_are_those_of_the_original_bit_for_bit(case: Any, form: str) -> None:
    lm, source, to = case
    saved, original = tensors_of(to / form), tensors_of(source)
    kind = family(config_of(source)["model_type"], "here")
    dropped = [name.removeprefix(kind.prefix) for name in original if name not in saved]
    assert all(any(fullmatch(pattern, name) for pattern in kind.ignored) for name in dropped)
    assert same_bits(saved, {name: t for name, t in original.items() if name in saved})
    assert sum(t.numel() for t in saved.values()) == sum(map(prod, lm.parts.named_stored.values()))


def test_one_file_is_the_very_file_that_the_library_writes(case: Any, tmp_path: Path) -> None:
    _, _, to = case
    ours = to / "single" / "model.safetensors"
    save_file(load_file(ours), tmp_path / "library.safetensors", metadata={"format": "pt"})
    assert ours.read_bytes() == (tmp_path / "library.safetensors").read_bytes()


def test_the_index_names_the_shard_of_every_tensor_and_their_sum(case: Any) -> None:
    _, _, to = case
    index = json.loads((to / "shards" / "model.safetensors.index.json").read_text())
    shards = sorted((to / "shards").glob("*.safetensors"))
    assert [s.name for s in shards] == [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    held = {}
    for shard in shards:
        with safe_open(shard, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            held |= dict.fromkeys(file.keys(), shard.name)
        tensors = read_safetensors(shard).tensors
        assert sum(t.nbytes for t in tensors.values()) <= 20_000 or len(tensors) == 1
    assert index["weight_map"] == held
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors_of(to / "shards").values())


@pytest.mark.parametrize("form", ["single", "shards"])
def test_the_original_implementation_reads_it_to_equal_logits(case: Any, form: str) -> None:
    _, source, to = case
    io, kernel = load_file(source / "io.safetensors"), json.loads((source / "meta.json").read_text())
    wanted = theirs(source, io, kernel["attn_implementation"])
    torch.testing.assert_close(
        theirs(to / form, io, kernel["attn_implementation"]), wanted, atol=1e-6, rtol=0, equal_nan=True
    )


@pytest.mark.parametrize("form", ["single", "shards"])
def test_our_own_load_gives_the_same_model(case: Any, form: str) -> None:
    lm, source, to = case
    again = sc.load(to / form)
    assert again.parts == lm.parts
    assert replace_name(again.card, lm.card.name) == lm.card
    assert same_bits(again.net.state_dict(), lm.net.state_dict())
    assert again.eos_ids == lm.eos_ids
    assert again.notes == ()
    if lm.card.family == "decoder":
        ids = load_file(source / "io.safetensors")["input_ids"]
        torch.testing.assert_close(again.logits(ids), lm.logits(ids), atol=1e-6, rtol=0)


def replace_name(card: sc.Card, name: str) -> sc.Card:
    from msgspec.structs import replace as changed

    return changed(card, name=name)


def test_card_yaml_is_the_card(case: Any) -> None:
    lm, _, to = case
    assert sc.card(to / "single" / "card.yaml") == lm.card


def test_the_config_is_kept_key_for_key(case: Any) -> None:
    _, source, to = case
    config = config_of(source)
    if config.get("num_nextn_predict_layers"):
        # Layers that predict further ahead are never loaded, so a saved folder announces none.
        config["num_nextn_predict_layers"] = 0
    assert config_of(to / "single") == config
    assert list(config_of(to / "single")) == list(config)


@pytest.mark.parametrize("name", [n for n in MODELS if (TINY / n / "config_hub.json").exists()])
def test_the_hubs_spelling_is_kept_also_of_the_dtype(name: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    shutil.copyfile(TINY / name / "config_hub.json", source / "config.json")
    shutil.copyfile(TINY / name / "model.safetensors", source / "model.safetensors")
    lm = sc.load(source)
    sc.save(lm, tmp_path / "same")
    sc.save(lm, tmp_path / "half", dtype="bf16")
    skip = {"num_nextn_predict_layers": 0} if "num_nextn_predict_layers" in config_of(source) else {}
    assert config_of(tmp_path / "same") == config_of(source) | skip
    assert config_of(tmp_path / "half") == config_of(source) | skip | {"torch_dtype": "bfloat16"}


EXPRESSED = {
    # Without a window, or with full rotation, one family is another.
    "mistral-full": "llama",
    "phi3": "llama",
    "phi3-longrope-long": "llama",
    "phi3-longrope-short": "llama",
    # Experts in some layers only, and the first GPT: in our own layout.
    "qwen3-moe": "scantling",
    "openai-gpt-postnorm": "scantling",
}
"""Where the family that a card alone is saved as is not the one that it was loaded from."""


def test_a_model_that_is_only_a_card_and_weights_gets_a_config_that_is_true(case: Any, tmp_path: Path) -> None:
    """The config is written from the card alone; the original implementation answers as it did when recorded."""
    lm, source, _ = case
    saved = sc.save(replace(lm, origin=None), tmp_path / "born")
    assert saved.model_type == EXPRESSED.get(lm.card.name, config_of(source)["model_type"])
    again = sc.load(tmp_path / "born")
    assert (again.parts, again.card.context) == (lm.parts, lm.card.context)
    assert (again.start_id, again.eos_ids, again.labels) == (lm.start_id, lm.eos_ids, lm.labels)
    assert same_bits(again.net.state_dict(), lm.net.state_dict())
    if saved.model_type != "scantling":
        io = load_file(source / "io.safetensors")
        real = io.get("decoder_attention_mask", io["attention_mask"]).bool()
        kernel = json.loads((source / "meta.json").read_text())["attn_implementation"]
        logits = theirs(tmp_path / "born", io, kernel)
        torch.testing.assert_close(logits[real], io["logits"][real], atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "model_type"),
    [
        ("gpt2-xl", "gpt2"),
        ("gpt3", "gpt2"),
        ("llama-2-70b", "llama"),
        ("llama-3.1-405b", "llama"),
        ("smollm2-135m", "llama"),
        ("mistral-7b-v0.1", "mistral"),
        ("mixtral-8x22b-v0.1", "mixtral"),
        ("qwen2.5-7b", "qwen2"),
        ("qwen3-8b", "qwen3"),
        ("qwen3-30b-a3b", "qwen3_moe"),
        ("gemma-2b", "gemma"),
        ("gemma-2-9b", "gemma2"),
        ("olmo-2-7b", "olmo2"),
        ("pythia-1.4b", "gpt_neox"),
        ("smollm3-3b", "smollm3"),
        ("bloom-7b1", "bloom"),
        ("opt-125m", "opt"),
        ("deepseek-v2-lite", "deepseek_v2"),
        ("deepseek-v3", "deepseek_v3"),
        ("falcon-7b", "falcon"),
        ("mpt-7b", "mpt"),
        ("gpt-j-6b", "gptj"),
        ("phi-2", "phi"),
        ("phi-3-mini-4k", "mistral"),
        ("phi-3.5-mini", "mistral"),
        ("stablelm-2-1.6b", "stablelm"),
        ("gemma-3-1b", "gemma3_text"),
        ("gpt-oss-20b", "gpt_oss"),
        ("bert-large-uncased", "bert"),
        ("roberta-base", "roberta"),
        ("distilbert-base-uncased", "distilbert"),
        ("electra-small-discriminator", "electra"),
        ("modernbert-base", "modernbert"),
        ("all-minilm-l6-v2", "bert"),
        ("t5-11b", "t5"),
        ("t5-v1_1-base", "t5"),
        ("bart-base", "bart"),
        ("opus-mt-en-de", "marian"),
    ],
)
def test_the_family_that_expresses_a_preset(name: str, model_type: str) -> None:
    card = sc.card(name)
    parts = sc.assemble(card)
    choice = choose(card, None, lambda c: sc.assemble(c) == parts and c.context == card.context, "bfloat16", {})
    assert choice.model_type == model_type
    recorded = GOLDEN / "configs" / f"{name}.json"
    if model_type != "scantling" and recorded.exists():
        published = json.loads(recorded.read_text())
        sizes = (
            *("hidden_size", "num_key_value_heads", "n_embd", "rope_theta", "moe_intermediate_size", "rms_norm_eps"),
            *("first_k_dense_replace", "n_shared_experts", "num_kv_heads", "new_decoder_architecture", "rotary_dim"),
            *(
                "partial_rotary_factor",
                "d_kv",
                "feed_forward_proj",
                "relative_attention_num_buckets",
                "scale_embedding",
            ),
            *("decoder_layers", "embedding_size", "local_attention", "global_attn_every_n_layers", "norm_topk_prob"),
            *("type_vocab_size", "rope_local_base_freq", "query_pre_attn_scalar", "layer_norm_eps"),
        )
        written = {key: choice.config[key] for key in sizes if key in choice.config and published.get(key) is not None}
        assert written == {key: published[key] for key in written}


def test_every_published_model_is_expressed_by_a_family() -> None:
    own = set()
    for name in presets():
        card = sc.card(name)
        parts = sc.assemble(card)
        same = lambda c, p=parts, n=card.context: sc.assemble(c) == p and c.context == n  # noqa: E731
        if choose(card, None, same, "float32", {}).config["model_type"] == "scantling":
            own.add(name)
    # No class of transformers has these.
    assert own == {"naive", "naive-with-positions", "transformer-base", "transformer-big"}


def assert_comes_back(lm: sc.Model, folder: Path) -> None:
    """Saved in shards and loaded, the model is the same bit for bit."""
    saved = sc.save(lm, folder, max_shard_bytes=3000)
    again = sc.load(folder)
    assert again.parts == lm.parts
    assert same_bits(again.net.state_dict(), lm.net.state_dict())
    assert sc.card(folder / "card.yaml") == lm.card
    if saved.model_type == "scantling":
        assert again.card == lm.card
        assert set(tensors_of(folder)) == set(lm.parts.named_stored)


@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.too_slow])
@given(data=legal_cards())
def test_any_legal_card_is_saved_and_loaded_bit_for_bit(
    data: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    card = from_dict(data, "drawn")
    lm = sc.new(card, seed=3)
    with torch.no_grad():
        for i, weight in enumerate(lm.net.parameters()):
            weight.copy_(torch.arange(weight.numel()).reshape(weight.shape) + 1000.0 * i)
    assert_comes_back(lm, tmp_path_factory.mktemp("drawn") / "model")


@settings(deadline=None, max_examples=10, suppress_health_check=list(HealthCheck))
@given(data=any_cards().filter(lambda data: data["family"] != "decoder"))
def test_any_card_with_an_encoder_is_saved_and_loaded_bit_for_bit(
    data: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Tables of waves are computed again and not stored; shifts that are never trained are stored with the weights."""
    lm = sc.new(from_dict(data, "drawn"), seed=3)
    with torch.no_grad():
        for i, (name, tensor) in enumerate(lm.net.state_dict().items()):
            if name in lm.parts.named_stored:
                tensor.copy_(torch.arange(tensor.numel()).reshape(tensor.shape) + 1000.0 * i)
    assert_comes_back(lm, tmp_path_factory.mktemp("drawn") / "model")


# Faults that users met elsewhere.


def test_a_tied_model_has_one_matrix_in_memory_and_in_the_file(tmp_path: Path) -> None:
    """LOAD-18: the file is as large as the unique parameters, and the original implementation reads it."""
    lm = sc.new(tied_card(), seed=1)
    sc.save(lm, tmp_path / "tied")
    names = set(tensors_of(tmp_path / "tied"))
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    header = read_safetensors(tmp_path / "tied" / "model.safetensors")
    assert sum(t.nbytes for t in header.tensors.values()) == 4 * lm.parts.params
    io = {"input_ids": torch.tensor([[5, 3, 88, 1]])}
    torch.testing.assert_close(theirs(tmp_path / "tied", io, "eager"), lm.logits(io["input_ids"]), atol=1e-5, rtol=1e-5)


SHARDED = """
import sys
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
import scantling as sc
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}.rendezvous", rank=0, world_size=1)
lm = sc.load(sys.argv[1])
mesh = init_device_mesh("cpu", (1,))
for block in lm.net.decoder.blocks:
    fully_shard(block, mesh=mesh)
fully_shard(lm.net, mesh=mesh)
assert type(next(iter(lm.net.state_dict().values()))).__name__ == "DTensor"
sc.save(lm, sys.argv[2])
dist.destroy_process_group()
"""


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without torch.distributed")
def test_a_tied_model_under_fsdp_is_saved_whole(tmp_path: Path) -> None:
    """LOAD-18, with one process."""
    source = TINY / "llama-mha-tied-bias"
    command = [sys.executable, "-c", SHARDED, str(source), str(tmp_path / "m")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert same_bits(tensors_of(tmp_path / "m"), tensors_of(source))


def tied_card() -> sc.Card:
    from msgspec.structs import replace as changed

    return changed(sc.load(TINY / "llama-mha-tied-bias").card, name="tied")


def test_training_goes_on_after_saving_as_if_it_had_not_been_interrupted(tmp_path: Path) -> None:
    """LOAD-19: built on meta and materialised, trained, saved, resumed: the next loss is the same to the last bit."""
    ids = torch.randint(0, 131, (2, 16), generator=torch.Generator().manual_seed(0))

    def step(net: Any) -> float:
        logits = net(ids)
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        net.zero_grad()
        loss.backward()
        with torch.no_grad():
            for weight in net.parameters():
                weight -= 0.1 * weight.grad
        return float(loss.detach())

    lm = sc.new(tied_card(), seed=1)
    first = [step(lm.net) for _ in range(20)]
    sc.save(lm, tmp_path / "at-20")
    on = [step(lm.net) for _ in range(3)]
    again = sc.load(tmp_path / "at-20")
    again.net.requires_grad_(True)
    assert [step(again.net) for _ in range(3)] == on
    assert on[0] < first[0]


def test_untied_tables_stay_two(tmp_path: Path) -> None:
    """LOAD-16."""
    sc.save(sc.load(CASES / "untied"), tmp_path / "again")
    assert same_bits(tensors_of(tmp_path / "again"), tensors_of(CASES / "untied"))
    expected = json.loads((CASES / "untied" / "expected.json").read_text())
    logits = sc.load(tmp_path / "again").logits(expected["input_ids"])
    torch.testing.assert_close(logits[0, -1], torch.tensor(expected["last_row"]), atol=5e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bits_keep_their_patterns_and_float32_is_rounded_as_torch_rounds(dtype: str, tmp_path: Path) -> None:
    """LOAD-08."""
    wide = sc.load(TINY / "llama-gqa")
    sc.save(wide, tmp_path / "narrow", dtype=dtype)
    original = {n: t.to(getattr(torch, dtype)) for n, t in tensors_of(TINY / "llama-gqa").items()}
    assert same_bits(tensors_of(tmp_path / "narrow"), original)
    assert config_of(tmp_path / "narrow")["dtype"] == sc.load(tmp_path / "narrow").card.dtype == dtype
    sc.save(sc.load(tmp_path / "narrow"), tmp_path / "again")
    assert same_bits(tensors_of(tmp_path / "again"), original)


def test_names_of_wrapped_and_compiled_nets_are_plain_in_the_file(tmp_path: Path) -> None:
    """LOAD-30."""
    lm = sc.load(CASES / "compiled-ddp-prefix")
    compiled, parallel = torch.nn.Module(), torch.nn.Module()
    parallel.module, compiled._orig_mod = lm.net, parallel
    wrapped = replace(lm, net=compiled)
    assert all(name.startswith("_orig_mod.module.") for name in wrapped.net.state_dict())
    sc.save(wrapped, tmp_path / "plain")
    assert not any("_orig_mod" in name or "module" in name for name in tensors_of(tmp_path / "plain"))
    assert sc.load(tmp_path / "plain").notes == ()


def test_a_neox_head_that_is_tied_and_stored_again(tmp_path: Path) -> None:
    """The copy is known by the family's own name for it: GPT-NeoX calls its head embed_out."""
    source = TINY / "gpt-neox-sequential-tied"
    shutil.copyfile(source / "config.json", tmp_path / "config.json")
    tensors = load_file(source / "model.safetensors")
    table = tensors["gpt_neox.embed_in.weight"]
    save_file(tensors | {"embed_out.weight": table.clone()}, tmp_path / "model.safetensors")
    lm = sc.load(tmp_path)
    assert lm.notes == ("'embed_out.weight' is stored again and equals the embeddings it is tied to",)
    sc.save(lm, tmp_path / "once")
    assert same_bits(tensors_of(tmp_path / "once"), tensors)
    save_file(tensors | {"embed_out.weight": table + 1}, tmp_path / "model.safetensors")
    with pytest.raises(sc.ScantlingInputError, match=r"'embed_out.weight' and 'gpt_neox.embed_in.weight' differ"):
        sc.load(tmp_path)
    save_file(tensors | {"lm_head.weight": table.clone()}, tmp_path / "model.safetensors")
    # Newer files of the family have the other name.
    assert sc.load(tmp_path).notes == ("'lm_head.weight' is stored again and equals the embeddings it is tied to",)
