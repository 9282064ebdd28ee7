"""GGUF files through the compiled pass: every family that can be written as one, from the file's own numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoint.gguf_tiny import ARCHITECTURE, recorded, tiny
from tests.native.test_golden import UNKNOWN

import scantling as sc
from scantling.cards.read import from_dict
from scantling.checkpoint.gguf import read_gguf
from scantling.checkpoint.gguf_write import write_gguf
from scantling.cli.engines import file_for_packed
from scantling.generate.packed import PackedWeights
from scantling.loading import load_packed
from scantling.native import library
from scantling.native.packed import Packed
from scantling.native.program import outline
from scantling.native.tiles import Stored
from scantling.native.weights import OfNet, as_asked

pytestmark = pytest.mark.skipif(library.missing() is not None, reason=str(library.missing()))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed weights of these files are left nowhere."""
    monkeypatch.setenv("SCANTLING_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("name", [name for name in ARCHITECTURE if name not in UNKNOWN])
def test_a_file_decodes_as_its_net_does(name: str, dtype: str, tmp_path: Path) -> None:
    """Experts, fused queries, keys and values, fused gates: without a net, and in float32 the recorded text."""
    path = tmp_path / "tiny.gguf"
    write_gguf(tiny(name), path, dtype)
    lm, io = load_packed(path), recorded(name)
    assert lm.packed is not None
    ids, mask = io["gen_input_ids"], io["gen_attention_mask"]
    text = ids[0][mask[0].bool()]
    found = lm.packed.session(lm, 1, len(text)).score(text[None])[0]
    rows = lm.generate(ids, 20, attention_mask=mask, ignore_eos=True)
    assert not lm.is_built
    torch.testing.assert_close(found, sc.load(path).logits(text)[0], atol=5e-5, rtol=1e-4)
    if dtype == "f32":
        assert torch.equal(rows, io["expected_ids"])


MIXED: dict[str, Any] = {
    "family": "decoder",
    "n_layers": 2,
    "d_model": 64,
    "vocab_size": 96,
    "context": 64,
    "attention": {"kind": "multi_head", "n_heads": 4, "n_kv_heads": 2, "d_head": 16},
    "position": {"kind": "rope", "theta": 10000.0},
    "norm": {"kind": "rmsnorm", "eps": 1e-6, "at": ["in"]},
    "tied": False,
    "mlp": {"kind": "moe", "n_experts": 5, "top_k": 2, "expert": {"kind": "gated", "act": "silu", "d_ff": 32}},
}


@pytest.mark.parametrize("dtype", ["q8_0", "q4_0"])
def test_experts_stay_in_the_blocks_of_the_file(dtype: str, tmp_path: Path) -> None:
    """Every expert's own blocks: the same logits as their values in float32, and as many bytes as the blocks have."""
    path = tmp_path / "mixed.gguf"
    write_gguf(sc.new(from_dict({"name": "mixed", **MIXED}, "a test"), seed=4), path, dtype)
    assert not isinstance(file_for_packed(str(path), None), str)
    lm, whole = load_packed(path), sc.load(path)
    assert lm.packed is not None
    text = torch.randint(0, 96, (24,), generator=torch.Generator().manual_seed(2))
    found = lm.packed.session(lm, 1, 24).score(text[None])[0]
    torch.testing.assert_close(found, whole.logits(text)[0], atol=2e-5, rtol=1e-4)
    experts = [tensor for name, tensor in read_gguf(path).tensors.items() if "_exps" in name]
    assert {tensor.kind for tensor in experts} == {dtype.upper()}
    mlps = [layer.mlp for layer in lm.packed.weights.layers]
    held = sum(part.data.nbytes for mlp in mlps for part in (mlp.up, mlp.down))
    # A tile says each block's least value beside its step, as Q4_0 need not.
    assert held == sum(tensor.nbytes for tensor in experts) * (20 if dtype == "q4_0" else 18) // 18
    assert not lm.is_built


@pytest.mark.parametrize("others", ["Q8_0", "Q4_1", "F32"])
def test_queries_keys_and_values_in_blocks_of_their_own(others: str) -> None:
    """Files of experts keep keys and values wider than queries; the product that all three share loses nothing."""
    lm = sc.new(from_dict({"name": "mixed", **MIXED}, "a test"), seed=4)
    wanted = {"q": "Q4_0", "k": others, "v": "Q8_0"}
    weights = OfNet(lm.net.state_dict())
    blocks: dict[str, Stored] = {}
    for i in range(2):
        for name, kind in wanted.items():
            full = f"decoder.blocks.{i}.attn.{name}.weight"
            blocks[full] = as_asked(weights.matrix(full).data, kind.lower())
            values = blocks[full].held_as("F32").data
            lm.net.get_parameter(full).data = torch.from_numpy(values.copy())
    plain = lm.logits(torch.arange(24))[0]

    class Mixed(OfNet):
        def matrix(self, name: str) -> Stored:
            return blocks.get(name) or super().matrix(name)

    found = outline(lm.parts)
    assert not isinstance(found, str)
    lm.packed = PackedWeights(Packed(found, Mixed(lm.net.state_dict())))
    assert lm.packed.weights.layers[0].qkv.kind == ("q8" if others == "Q8_0" else "f32")
    ours = lm.packed.session(lm, 1, 24).score(torch.arange(24)[None])[0]
    torch.testing.assert_close(ours, plain, atol=2e-5, rtol=1e-4)
