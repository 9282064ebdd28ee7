"""DeepSeek configs and files: what real ones hold besides the model, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.conftest import GOLDEN

import scantling as sc
from scantling.cards.read import read_text, to_yaml
from scantling.checkpoint.families import FAMILIES
from scantling.checkpoint.hf_config import card_of_config
from scantling.checkpoint.names import links
from scantling.tensor.context import Context

TINY = GOLDEN / "tiny"


def config(name: str, **changes: Any) -> dict[str, Any]:
    return {**json.loads((TINY / name / "config.json").read_text()), **changes}


def card(name: str, **changes: Any) -> sc.Card:
    return card_of_config(config(name, **changes), name, name)


def changed(folder: Path, name: str, tensors: dict[str, torch.Tensor] | None = None, **changes: Any) -> Path:
    """The fixture with other config values and more tensors."""
    shutil.copytree(TINY / name, folder, dirs_exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(name, **changes)))
    weights = load_file(folder / "model.safetensors") | (tensors or {})
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def ids() -> torch.Tensor:
    return torch.randint(0, 131, (2, 12), generator=torch.Generator().manual_seed(0))


EXTRA = {
    "model.layers.2.enorm.weight": torch.ones(48),
    "model.layers.2.self_attn.o_proj.weight": torch.ones(48, 48),
    "model.layers.2.shared_head.head.weight": torch.ones(131, 48),
}


def test_layers_that_predict_further_ahead_are_passed_over(tmp_path: Path) -> None:
    folder = changed(tmp_path, "deepseek-v3", EXTRA)
    assert torch.equal(sc.load(folder).logits(ids()), sc.load(TINY / "deepseek-v3").logits(ids()))


@pytest.mark.parametrize("announced", [0, None])
def test_layers_that_nobody_announced_are_refused(tmp_path: Path, announced: int | None) -> None:
    folder = changed(tmp_path, "deepseek-v3", EXTRA, num_nextn_predict_layers=announced)
    with pytest.raises(sc.ScantlingInputError, match=r"model\.layers\.2\.\S+ and 2 more is not part of the model"):
        sc.load(folder)


def test_a_layer_beyond_the_announced_ones_is_refused(tmp_path: Path) -> None:
    folder = changed(tmp_path, "deepseek-v3", {**EXTRA, "model.layers.3.enorm.weight": torch.ones(48)})
    with pytest.raises(sc.ScantlingInputError, match=r"'model\.layers\.3\.enorm\.weight' is not part"):
        sc.load(folder)


def test_sizes_of_a_quantised_release_are_counted(tmp_path: Path) -> None:
    quantised = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    data = json.loads((GOLDEN / "configs" / "deepseek-v3.json").read_text()) | {"quantization_config": quantised}
    model = sc.assemble(card_of_config(data, "deepseek-v3", "deepseek-v3"))
    assert model.params == 671026404352
    # The published figure counts the buffers that choose experts too: 58 layers of 256.
    assert model.params + sum(shape[0] for shape in model.named_buffers.values()) == 671026419200
    with pytest.raises(sc.ScantlingInputError, match="fp8"):
        sc.load(changed(tmp_path, "deepseek-v3", quantization_config=quantised))


def test_null_is_none_and_missing_is_the_usual_rank() -> None:
    data = config("deepseek-v2")
    del data["q_lora_rank"]
    silent = card_of_config(data, "silent", "silent").attention
    assert card("deepseek-v2").attention.q_rank is None
    assert silent.q_rank == 1536
    assert sc.assemble(card("deepseek-v2")).decoder.blocks[1].children()["mlp"].shared.d_ff == 40
    assert sc.assemble(card("deepseek-v2", n_shared_experts=None)).decoder.blocks[1].children()["mlp"].shared is None


def test_dense_layers_come_first() -> None:
    kinds = {
        n: [type(block.children()["mlp"]).__name__ for block in sc.assemble(made).decoder.blocks]
        for n in (0, 1, 2, 5)
        if (made := card("deepseek-v3", first_k_dense_replace=n))
    }
    dense, sparse = "GatedMLP", "MoE"
    assert kinds == {0: [sparse, sparse], 1: [dense, sparse], 2: [dense, dense], 5: [dense, dense]}


@pytest.mark.parametrize("name", ["deepseek-v2-lite", "deepseek-v3"])
def test_a_published_card_survives_yaml(name: str) -> None:
    data = json.loads((GOLDEN / "configs" / f"{name}.json").read_text())
    made = card_of_config(data, name, name)
    assert read_text(to_yaml(made), name) == made


def test_greedy_looks_at_no_groups() -> None:
    assert sc.assemble(card("deepseek-v2", n_group=3, topk_group=1)) == sc.assemble(card("deepseek-v2"))


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("deepseek-v2", "norm_topk_prob", True),
        ("deepseek-v2", "topk_method", "noaux_tc"),
        ("deepseek-v2", "scoring_func", "sigmoid"),
        ("deepseek-v2", "mlp_bias", True),
        ("deepseek-v3", "topk_method", "greedy"),
        ("deepseek-v3", "scoring_func", "softmax"),
        ("deepseek-v3", "attention_bias", True),
        ("deepseek-v3", "moe_layer_freq", 2),
        ("deepseek-v3", "num_key_value_heads", 2),
        ("deepseek-v3", "head_dim", 12),
        ("deepseek-v3", "qk_head_dim", 12),
        ("deepseek-v3", "num_nextn_predict_layers", -1),
        ("deepseek-v3", "first_k_dense_replace", -1),
        ("deepseek-v3", "kv_lora_rank", None),
        ("deepseek-v3", "n_routed_experts", None),
        ("deepseek-v3", "index_topk", 64),
    ],
)
def test_what_would_change_results_is_refused_by_name(name: str, key: str, value: Any) -> None:
    with pytest.raises(sc.ScantlingInputError, match=key):
        card(name, **{key: value})


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("deepseek-v3", {"rope_interleave": False}),
        ("deepseek-v3", {"norm_topk_prob": False}),
        ("deepseek-v3", {"n_group": 1, "topk_group": 1}),
        ("deepseek-v2", {"routed_scaling_factor": 2.0}),
        ("deepseek-v2", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}),
        ("deepseek-v2-qlora-groups", {"topk_group": 1}),
    ],
)
def test_other_values_give_the_logits_of_the_original(tmp_path: Path, name: str, changes: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    folder = changed(tmp_path, name, **changes)
    original = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    with torch.inference_mode():
        wanted = original(ids()).logits
    torch.testing.assert_close(sc.load(folder).logits(ids()), wanted, atol=5e-5, rtol=1e-4)
    if changes != {"routed_scaling_factor": 2.0}:
        assert not torch.allclose(wanted, sc.load(TINY / name).logits(ids()), atol=1e-2)


@pytest.mark.parametrize("name", ["deepseek-v2", "deepseek-v2-qlora-groups", "deepseek-v3"])
def test_experts_have_the_gradients_of_the_original(name: str) -> None:
    """The original fuses what its files hold expert by expert."""
    transformers = pytest.importorskip("transformers")
    original = transformers.AutoModelForCausalLM.from_pretrained(TINY / name, attn_implementation="eager")
    original(ids()).logits.square().sum().backward()
    theirs = {}
    for fused, parameter in original.named_parameters():
        if ".experts." not in fused:
            continue
        stem, _, projection = fused.rpartition(".")
        for expert, grad in enumerate(parameter.grad):
            pieces = (
                {"gate_proj": grad[:20], "up_proj": grad[20:]} if projection == "gate_up_proj" else {projection: grad}
            )
            theirs |= {f"{stem}.{expert}.{part}.weight": piece for part, piece in pieces.items()}

    lm = sc.load(TINY / name)
    lm.net.requires_grad_(True)
    lm.net(ids(), Context.of(ids())).square().sum().backward()
    ours = {n: p.grad for n, p in lm.net.named_parameters()}
    family = FAMILIES[config(name)["model_type"]]
    compared = 0
    for link in links(family.rows(lm.card), lm.parts.named_stored):
        if link.theirs[0] in theirs:
            for their_name, grad in zip(link.theirs, link.transform.save([ours[n] for n in link.ours]), strict=True):
                torch.testing.assert_close(grad, theirs[their_name], atol=2e-3, rtol=2e-3)
                compared += 1
    assert compared == len(theirs) == 18


def test_experts_that_all_say_nothing_weigh_nothing() -> None:
    """Sigmoids of very negative scores are 0 in float32; divided by their sum they must not be NaN."""
    lm = sc.load(TINY / "deepseek-v3")
    router: Any = lm.net.get_submodule("decoder.blocks.1.mlp.router")
    with torch.no_grad():
        router.choose.weight.fill_(-1e4)
    x = torch.ones(1, 1, 48)
    kept, _ = router(x, Context(1, 1, x.device))
    assert torch.count_nonzero(kept) == 0
