"""Loading: faults that users met in other loaders, each with the right outcome."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.conftest import DATA, GOLDEN

import scantling as sc

CASES = DATA / "checkpoints"


def last_row(lm: Any, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    wanted = json.loads((CASES / name / "expected.json").read_text())
    return lm.logits(wanted["input_ids"])[0, -1], torch.tensor(wanted["last_row"])


@pytest.mark.parametrize(
    "name",
    ["shards-good", "tied-head-absent", "untied", "mistral-window-4", "mistral-window-null"],
)
def test_right_logits_without_a_note(name: str) -> None:
    lm = sc.load(CASES / name)
    torch.testing.assert_close(*last_row(lm, name), atol=5e-6, rtol=1e-5)
    assert lm.notes == ()


def test_wrapper_prefixes_are_removed_and_named() -> None:
    lm = sc.load(CASES / "compiled-ddp-prefix")
    torch.testing.assert_close(*last_row(lm, "compiled-ddp-prefix"), atol=5e-6, rtol=1e-5)
    assert "_orig_mod.module." in lm.notes[0]


def test_of_two_copies_the_index_decides_with_a_note() -> None:
    lm = sc.load(CASES / "shards-same-name-twice")
    torch.testing.assert_close(*last_row(lm, "shards-same-name-twice"), atol=5e-6, rtol=1e-5)
    assert "second copy" in lm.notes[0]


def test_gguf_rows_are_put_back_by_their_own_heads() -> None:
    lm = sc.load(CASES / "gguf-llama-gqa" / "model.gguf")
    torch.testing.assert_close(*last_row(lm, "gguf-llama-gqa"), atol=5e-6, rtol=1e-5)
    assert lm.tokenizer is None


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("shards-one-missing", ["model-00002-of-00002.safetensors", "9824 parameters"]),
        ("shards-extra-not-in-index", ["model.norm.weight", "leaves out"]),
        ("gpt2-linear-layout", ["c_attn.weight", "[96, 32]", "[32, 96]"]),
    ],
)
def test_folders_that_contradict_themselves_are_refused(name: str, words: list[str]) -> None:
    with pytest.raises(sc.ScantlingInputError) as error:
        sc.load(CASES / name)
    assert all(word in str(error.value) for word in words)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A writable copy of a tiny Llama."""
    source = GOLDEN / "tiny" / "llama-gqa"
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(source / name, tmp_path / name)
    return tmp_path


def rewrite(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def configure(folder: Path, **keys: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | keys))


def assert_refused(folder: Path, *words: str) -> None:
    with pytest.raises(sc.ScantlingInputError) as error:
        sc.load(folder)
    assert all(word in str(error.value) for word in words), str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_tensor_is_an_error_never_a_random_one(folder: Path) -> None:
    rewrite(folder, lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))
    assert_refused(folder, "model.layers.1.mlp.up_proj.weight", "is missing")


def test_a_tensor_the_model_does_not_have_is_an_error(folder: Path) -> None:
    rewrite(folder, lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(60)}))
    assert_refused(folder, "model.layers.0.self_attn.q_proj.bias", "not part of the model")


def test_more_layers_in_the_file_than_in_the_config(folder: Path) -> None:
    configure(folder, num_hidden_layers=1)
    assert_refused(folder, "model.layers.1.", "not part of the model")


def test_a_shape_that_contradicts_the_config_names_tensor_found_and_expected(folder: Path) -> None:
    configure(folder, intermediate_size=80)
    assert_refused(folder, "mlp.", "76", "80")


def test_an_untied_config_without_a_head(folder: Path) -> None:
    rewrite(folder, lambda t: t.pop("lm_head.weight"))
    assert_refused(folder, "lm_head.weight", "is missing")


def test_a_tied_config_with_another_head(folder: Path) -> None:
    configure(folder, tie_word_embeddings=True)
    assert_refused(folder, "lm_head.weight", "model.embed_tokens.weight", "differ", "tie_word_embeddings")


def test_a_tied_config_with_the_same_head_stored_again(folder: Path) -> None:
    configure(folder, tie_word_embeddings=True)
    rewrite(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    lm = sc.load(folder)
    assert "stored again" in lm.notes[0]
    assert lm.parts.params == 50064 - 131 * 48


def test_old_rotary_buffers_carry_no_weights(folder: Path) -> None:
    wanted = sc.load(folder).logits([[1, 2, 3]])
    rewrite(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(5)}))
    assert torch.equal(sc.load(folder).logits([[1, 2, 3]]), wanted)


def test_the_base_models_prefix_may_be_left_out() -> None:
    source = GOLDEN / "tiny" / "gpt2"
    wanted = sc.load(source).logits([[1, 2, 3]])
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copyfile(source / "config.json", folder / "config.json")
        tensors = {k.removeprefix("transformer."): v for k, v in load_file(source / "model.safetensors").items()}
        tensors["h.0.attn.bias"] = torch.ones(1, 1, 64, 64).tril()
        save_file(tensors, folder / "model.safetensors")
        assert torch.equal(sc.load(folder).logits([[1, 2, 3]]), wanted)


@pytest.mark.parametrize(
    ("dtype", "name"), [(torch.bfloat16, "bfloat16"), (torch.float16, "float16"), (torch.float32, "float32")]
)
def test_the_files_dtype_is_kept(folder: Path, dtype: torch.dtype, name: str) -> None:
    rewrite(folder, lambda t: t.update({k: v.to(dtype) for k, v in t.items()}))
    lm = sc.load(folder)
    assert {p.dtype for p in lm.net.parameters()} == {dtype}
    assert lm.card.dtype == name
    assert sc.load(folder, dtype="fp32").dtype == torch.float32


def test_mixed_dtypes_become_the_widest_and_it_is_said(folder: Path) -> None:
    rewrite(folder, lambda t: t.update({"model.norm.weight": t["model.norm.weight"].bfloat16()}))
    lm = sc.load(folder)
    assert lm.dtype == torch.float32
    assert "mixes" in lm.notes[0]


def test_integers_are_no_weights(folder: Path) -> None:
    rewrite(folder, lambda t: t.update({"model.norm.weight": torch.ones(48, dtype=torch.int32)}))
    assert_refused(folder, "model.norm.weight", "int32", "floating-point")


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("gpt2", "card without weights"),
        ("no-such-model", "no model 'no-such-model'"),
        ("./nowhere", "no model './nowhere'"),
        ("missing.gguf", "no such file"),
        ("missing.yaml", "no such file"),
    ],
)
def test_names_that_hold_no_weights(model: str, words: str) -> None:
    with pytest.raises(sc.ScantlingInputError, match=words):
        sc.load(model)


def test_a_card_file_has_no_weights(tmp_path: Path) -> None:
    from scantling.cards import to_yaml

    path = tmp_path / "my.yaml"
    path.write_text(to_yaml(sc.card("tiny")))
    with pytest.raises(sc.ScantlingInputError, match="'tiny' is a card without weights"):
        sc.load(path)


def test_a_folder_without_config(tmp_path: Path) -> None:
    shutil.copyfile(GOLDEN / "tiny" / "llama-gqa" / "model.safetensors", tmp_path / "model.safetensors")
    assert_refused(tmp_path, "no config.json")
    with pytest.raises(sc.ScantlingInputError, match=r"no config\.json"):
        sc.load(tmp_path / "model.safetensors")


def test_a_folder_without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert_refused(folder, "holds no weights")


def test_sizes_need_only_the_config(folder: Path) -> None:
    from scantling.checkpoint.find import card_of

    (folder / "model.safetensors").unlink()
    assert sc.assemble(card_of(folder)).params == sc.assemble(card_of(folder / "config.json")).params == 50064


def test_truncated_weights(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-100])
    assert_refused(folder, "model.safetensors", "100")


def test_a_file_alone_takes_the_config_beside_it(folder: Path) -> None:
    assert torch.equal(sc.load(folder / "model.safetensors").logits([[4]]), sc.load(folder).logits([[4]]))


def test_the_net_shares_no_memory_between_untied_tables(folder: Path) -> None:
    net: Any = sc.load(folder).net
    assert net.embed.weight.data_ptr() != net.head.matrix.weight.data_ptr()


def test_save_and_load_of_the_state_dict_is_bitwise(folder: Path, tmp_path: Path) -> None:
    lm = sc.load(folder)
    save_file(lm.net.state_dict(), tmp_path / "ours.safetensors")
    again = lm.parts.build(seed=None)
    again.load_state_dict(load_file(tmp_path / "ours.safetensors"))
    assert torch.equal(again(lm.ids([[3, 1, 2]])), lm.net(lm.ids([[3, 1, 2]])))


def test_a_model_larger_than_the_memory_is_refused_before_it_is_built() -> None:
    with pytest.raises(sc.ScantlingInputError, match=r"the weights need .* and cpu has .* free"):
        sc.assemble(sc.card("gpt3")).build()


def test_a_hub_id_without_network_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("huggingface_hub")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(sc.ScantlingInputError, match="hub repository 'nobody/nothing' cannot be fetched"):
        sc.load("nobody/nothing")
