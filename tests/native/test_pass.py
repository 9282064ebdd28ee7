"""The compiled pass gives what PyTorch gives, whatever it is compiled for, however wide the weights are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.native.tiled import BLOCKS, tiled
from tests.test_laws import strong

import scantling as sc
from scantling.cards.read import from_dict
from scantling.native import library
from scantling.native.decoder import Decoder
from scantling.native.packed import Packed
from scantling.native.program import outline
from scantling.native.tiles import Stored, lay, nbytes, padded, tile_kind
from scantling.native.weights import OfGGUF, OfNet, as_asked

BASE: dict[str, Any] = {
    "name": "small",
    "family": "decoder",
    "n_layers": 3,
    "d_model": 48,
    "vocab_size": 70,
    "context": 64,
    "attention": {"kind": "multi_head", "n_heads": 4, "n_kv_heads": 2, "d_head": 16},
    "position": {"kind": "rope", "theta": 10000.0},
    "norm": {"kind": "rmsnorm", "eps": 1e-5},
    "mlp": {"kind": "gated", "act": "silu", "d_ff": 80},
    "tied": False,
}
ATTENTION = BASE["attention"]
CHANGES: dict[str, dict[str, Any]] = {
    "llama": {},
    "tied": {"tied": True},
    "one kv head": {"attention": ATTENTION | {"n_kv_heads": 1}},
    "as many kv heads": {"attention": ATTENTION | {"n_kv_heads": 4}},
    "wide heads": {"attention": ATTENTION | {"d_head": 48}},
    "window": {"attention": ATTENTION | {"window": 5}},
    "windows by turns": {"pattern": [{"attention": {"window": 20}}, {}]},
    "layers without positions": {"pattern": [{}, {"position": {"kind": "none"}}]},
    "biases": {"attention": ATTENTION | {"bias": ["q", "k", "v", "o"]}, "mlp": BASE["mlp"] | {"bias": True}},
    "qk-norm": {"attention": ATTENTION | {"qk_norm": {"kind": "rmsnorm", "eps": 1e-6}}},
    "neighbours turned": {"position": {"kind": "rope", "theta": 500.0, "interleaved": True}},
    "neighbours turned, normed, in part": {
        "position": {"kind": "rope", "theta": 500.0, "interleaved": True, "d_rotary": 8},
        "attention": ATTENTION | {"qk_norm": {"kind": "rmsnorm", "eps": 1e-6}, "bias": ["q", "k"]},
    },
    "half of a head turned": {"position": {"kind": "rope", "theta": 10000.0, "d_rotary": 8}},
    "yarn": {
        "position": {
            "kind": "rope",
            "theta": 10000.0,
            "scaling": {"kind": "yarn", "factor": 4.0, "trained_length": 16},
        }
    },
    "caps": {"attention": ATTENTION | {"softcap": 2.0}, "head": {"kind": "lm", "softcap": 3.0}},
    "scales": {
        "embedding": {"scale": 6.9},
        "head": {"kind": "lm", "scale": 0.3},
        "attention": ATTENTION | {"scale": 0.1},
    },
    "one plus the gain": {"norm": {"kind": "rmsnorm", "eps": 1e-6, "plus_one": True}},
    "padded vocabulary": {"embedding": {"vocab_multiple": 48}},
    **{
        f"gated, {act}": {"mlp": {"kind": "gated", "act": act, "d_ff": 80}}
        for act in ("gelu", "gelu_tanh", "relu", "relu2", "quick_gelu")
    },
    "odd widths": {
        "d_model": 36,
        "attention": ATTENTION | {"d_head": 6, "bias": ["q", "v"]},
        "mlp": BASE["mlp"] | {"d_ff": 50, "bias": True},
    },
    "layer norms everywhere": {
        "d_model": 40,
        "norm": {"kind": "layernorm", "eps": 1e-5, "at": ["in", "res"]},
        "attention": ATTENTION | {"qk_norm": {"kind": "layernorm", "eps": 1e-5}, "d_head": 10},
    },
    "norms after the sum": {"norm": {"kind": "rmsnorm", "eps": 1e-5, "at": ["out"]}},
    "learned": {"position": {"kind": "learned"}},
    "penalties": {"position": {"kind": "alibi"}},
    "parallel": {"residual": {"parallel": True}},
    "experts": {
        "mlp": {"kind": "moe", "n_experts": 5, "top_k": 3, "expert": {"kind": "gated", "act": "silu", "d_ff": 40}}
    },
    "plain experts, sigmoids": {
        "mlp": {
            "kind": "moe",
            "n_experts": 20,
            "top_k": 2,
            "scores": "sigmoid",
            "normalize": False,
            "expert": {"kind": "plain", "act": "relu", "d_ff": 24, "bias": True},
        }
    },
    "a shared expert, gated, of another kind": {
        "mlp": {
            "kind": "moe",
            "n_experts": 6,
            "top_k": 2,
            "expert": {"kind": "gated", "act": "silu", "d_ff": 24},
            "shared": {"kind": "plain", "act": "gelu", "d_ff": 72, "bias": True},
            "shared_gate": True,
        }
    },
    "groups of experts": {
        "mlp": {
            "kind": "moe",
            "n_experts": 12,
            "top_k": 3,
            "groups": 4,
            "top_groups": 2,
            "expert": {"kind": "gated", "act": "silu", "d_ff": 24},
        }
    },
    "groups by their two best, selection biases, a shared expert": {
        "mlp": {
            "kind": "moe",
            "n_experts": 16,
            "top_k": 4,
            "scores": "sigmoid",
            "selection_bias": True,
            "scale": 2.5,
            "groups": 4,
            "top_groups": 2,
            "group_score": "top2",
            "expert": {"kind": "gated", "act": "silu", "d_ff": 24},
            "shared": {"kind": "gated", "act": "silu", "d_ff": 40},
        }
    },
    "plain": {"mlp": {"kind": "plain", "act": "gelu", "d_ff": 112, "bias": True}},
}
CARDS = {name: from_dict({**BASE, **changes}, name) for name, changes in CHANGES.items()}
CLOSE = {"atol": 3e-5, "rtol": 1e-4}

pytestmark = pytest.mark.skipif(library.missing() is not None, reason=str(library.missing()))


def decoder(card: sc.Card, net: Any, width: str = "stored", march: str = "native", **options: Any) -> Decoder:
    found = outline(sc.assemble(card))
    assert not isinstance(found, str), found
    return Decoder(Packed(found, OfNet(net.state_dict(), width), march=march), capacity=card.context, **options)


def net_of(card: sc.Card) -> Any:
    """As `strong`, and what is set by counting is not zero either."""
    net, draw = strong(card), torch.Generator().manual_seed(8)
    for name, values in net.named_buffers():
        if name.endswith("selection_bias"):
            values.copy_(torch.rand(values.shape, generator=draw))
    return net


def ids_of(card: sc.Card, tokens: int, seed: int = 0) -> list[int]:
    draw = torch.Generator().manual_seed(seed)
    return [int(i) for i in torch.randint(0, card.vocab_size, (tokens,), generator=draw)]


def wanted_logits(net: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = net(torch.tensor([ids]))[0].float()
    return logits


def all_logits(native: Decoder, ids: list[int], cuts: tuple[int, ...], slot: int = 0) -> torch.Tensor:
    found = []
    for start, end in zip((0, *cuts), (*cuts, len(ids)), strict=True):
        rows = end - start
        best = native.run(ids[start:end], [slot] * rows, range(start, end), [True] * rows)
        logits = torch.tensor(native.logits[:rows].copy())
        found.append(logits)
        vocab = native.packed.outline.head.vocab_size
        assert best == logits[:, :vocab].argmax(-1).tolist()
    return torch.cat(found)


@pytest.mark.parametrize("name", CARDS)
def test_logits_are_those_of_pytorch(name: str) -> None:
    """30 positions in passes of 1, 2, 4, 7 and 16 rows, so that all products run."""
    card = CARDS[name]
    net, ids = net_of(card), ids_of(card, 30)
    found = all_logits(decoder(card, net), ids, (1, 3, 7, 14))
    torch.testing.assert_close(found[:, : card.vocab_size], wanted_logits(net, ids), **CLOSE)


@pytest.mark.parametrize("march", ["x86-64", "x86-64-v3"])
def test_other_processors(march: str) -> None:
    card = CARDS["biases"]
    net, ids = strong(card), ids_of(card, 20)
    for width in ("stored", "bf16", "q8_0", "q4_1"):
        one, two = (all_logits(decoder(card, net, width, march=m), ids, (5,)) for m in ("native", march))
        torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-5)


def quantised_net(card: sc.Card, width: str) -> tuple[Any, Any]:
    """A net, and the same with every matrix as `width` rounds it."""
    quants = pytest.importorskip("gguf.quants")
    net, rounded = strong(card), strong(card)
    for tensor in rounded.state_dict().values():
        if tensor.dim() != 2:
            continue
        if width == "bf16":
            tensor.copy_(tensor.bfloat16().float())
        else:
            kind = quants.GGMLQuantizationType[width.upper()]
            tensor.copy_(torch.tensor(quants.dequantize(quants.quantize(tensor.numpy(), kind), kind)))
    return net, rounded


@pytest.mark.parametrize("width", ["bf16", "q8_0", "q4_0", "q4_1"])
def test_packed_weights_are_read_exactly(width: str) -> None:
    """Sizes that divide by 32, as block formats need."""
    sizes = {"d_model": 64, "vocab_size": 96, "mlp": BASE["mlp"] | {"d_ff": 96}, "tied": True}
    card = from_dict({**BASE, **sizes}, "blocks")
    net, rounded = quantised_net(card, width)
    ids = ids_of(card, 24)
    found = all_logits(decoder(card, net, width), ids, (1, 3, 7))
    torch.testing.assert_close(found, wanted_logits(rounded, ids), **CLOSE)


@pytest.mark.skipif(library.missing() is not None or not library.library().sc_integer_dot(), reason="no VNNI")
@pytest.mark.parametrize("width", ["q8_0", "q4_1"])
def test_activations_of_8_bits_are_near(width: str) -> None:
    """As far from exact as 8 bits are: in the fast mode alone, and by less than the step of 1/127 suggests."""
    sizes = {"d_model": 64, "vocab_size": 96, "mlp": BASE["mlp"] | {"d_ff": 96}}
    card = from_dict({**BASE, **sizes}, "blocks")
    net, rounded = quantised_net(card, width)
    ids = ids_of(card, 24)
    wanted = wanted_logits(rounded, ids)
    found = all_logits(decoder(card, net, width, quantised=True), ids, (1, 3, 7))
    error = (found - wanted).norm() / wanted.norm()
    assert 1e-4 < error < 0.03


def test_rows_of_several_sequences_share_a_pass() -> None:
    """What else is in the pass changes no bit of a row: the same tokens alone, beside others, and in other slots."""
    card = CARDS["window"]
    net = strong(card)
    native = decoder(card, net, slots=3)
    texts = [ids_of(card, n, seed) for seed, n in enumerate((9, 12, 7))]
    alone = [all_logits(native, ids, tuple(range(1, len(ids))), slot) for slot, ids in enumerate(texts)]
    again = decoder(card, net, slots=3)
    found: list[list[Any]] = [[], [], []]
    for position in range(12):
        live = [slot for slot in (2, 0, 1) if position < len(texts[slot])]
        again.run([texts[s][position] for s in live], live, [position] * len(live), [True] * len(live))
        for row, slot in enumerate(live):
            found[slot].append(again.logits[row].copy())
    for slot in range(3):
        assert np.array_equal(np.stack(found[slot]), alone[slot].numpy())


@pytest.mark.parametrize("width", ["stored", "bf16", "q8_0", "q4_1"])
@pytest.mark.parametrize("heads", [(4, 1), (6, 2), (4, 2), (3, 3)])
def test_the_number_of_rows_changes_no_bit(width: str, heads: tuple[int, int]) -> None:
    """A prompt in passes of 128 rows, in others and token by token, with heads in groups of 4, 3, 2 and 1."""
    attention = ATTENTION | {"n_heads": heads[0], "n_kv_heads": heads[1], "d_head": 32, "window": 40}
    sizes = {"d_model": 64, "vocab_size": 96, "mlp": BASE["mlp"] | {"d_ff": 96}, "attention": attention}
    card = from_dict({**BASE, **sizes, "context": 160}, "rows")
    net, ids = strong(card), ids_of(card, 150)
    for quantised in {False, bool(library.library().sc_integer_dot())}:
        native = decoder(card, net, width, quantised=quantised)
        together = all_logits(native, ids, (128,))
        assert torch.equal(all_logits(native, ids, tuple(range(1, 150))), together)
        assert torch.equal(all_logits(native, ids, (2, 5, 9, 15, 22, 31, 41, 54, 66, 133)), together)


@pytest.mark.parametrize("march", ["x86-64", "x86-64-v3"])
def test_the_number_of_rows_changes_no_bit_on_other_processors(march: str) -> None:
    card = CARDS["window"]
    net, ids = strong(card), ids_of(card, 60)
    for width in ("stored", "bf16", "q8_0", "q4_1"):
        native = decoder(card, net, width, march=march)
        together = all_logits(native, ids, ())
        assert torch.equal(all_logits(native, ids, tuple(range(1, 60))), together)
        assert torch.equal(all_logits(native, ids, (2, 5, 9, 15, 28)), together)


@pytest.mark.parametrize("march", ["native", "x86-64", "x86-64-v3"])
def test_half_precision_is_read_as_it_is(march: str) -> None:
    """Tables, gains and matrices in float16, down to the smallest: what the same values in float32 give."""
    card = CARDS["window"]
    net, ids = strong(card), ids_of(card, 24)
    net.get_parameter("embed.weight").data[:, ::5] *= 2.0**-12
    native = decoder(card, net.half(), march=march)
    assert native.packed.layers[0].mlp.up.kind == native.packed.out.kind == "f16"
    torch.testing.assert_close(all_logits(native, ids, (1, 9)), wanted_logits(net.float(), ids), **CLOSE)


@pytest.mark.parametrize("threads", [1, 3, 5])
def test_the_number_of_threads_changes_no_bit(threads: int) -> None:
    card = CARDS["llama"]
    net, ids = strong(card), ids_of(card, 20)
    one, many = (all_logits(decoder(card, net, threads=n), ids, (4, 5)) for n in (2, threads))
    assert torch.equal(one, many)


def test_rounding_to_bfloat16_is_that_of_torch() -> None:
    values = torch.randn(40, 64, generator=torch.Generator().manual_seed(0)) * 10
    values[0, :4] = torch.tensor([1.00390625, 1.01171875, 0.0, -1e-40])
    bits = as_asked(values.numpy(), "bf16").data
    assert np.array_equal(bits.view(np.int16), values.bfloat16().view(torch.int16).numpy())


@pytest.mark.parametrize("march", ["native", "x86-64"])
@pytest.mark.parametrize(("rows", "columns"), [(48, 96), (37, 64), (16, 70), (5, 6)])
@pytest.mark.parametrize("kind", ["F32", "BF16", "F16", "Q8_0", "Q4_0", "Q4_1"])
def test_tiles_look_as_they_are_described(kind: str, rows: int, columns: int, march: str) -> None:
    """Rows out of order and twice, two matrices under one another, rows and columns of zeros at the end."""
    draw = np.random.default_rng(rows)
    if kind in BLOCKS:
        columns = padded(columns, 32)
        data = draw.integers(0, 256, (rows, columns // 32 * BLOCKS[kind]), np.uint8)
        # Steps of blocks are numbers.
        data[:, 1 :: BLOCKS[kind]] &= 0xFB
    else:
        data = draw.integers(0, 2**16, (rows, columns), np.uint32 if kind == "F32" else np.uint16)
    stored = Stored(kind, data, columns)
    order = draw.integers(-1, rows, rows + 9)
    turns = draw.permutation(len(order) + rows)
    to = np.full(nbytes(tile_kind(kind), len(turns), columns), 7, np.uint8)
    lay(library.library(march), [stored, stored], [order, np.arange(rows)], turns, to)
    whole = np.concatenate([np.where(order[:, None] < 0, np.zeros_like(data[:1]), data[order]), data])[turns]
    assert np.array_equal(to, tiled(Stored(kind, whole, columns)))


def test_real_weights_keep_their_blocks(smollm: Any) -> None:
    """SmolLM2 as it is shipped: logits of a real text against PyTorch on the same values in float32."""
    from scantling.checkpoint.families.gguf import architecture
    from scantling.checkpoint.find import default_model
    from scantling.checkpoint.gguf import read_gguf

    header = read_gguf(default_model())
    found = outline(smollm.parts)
    assert not isinstance(found, str)
    rows = tuple(architecture(header.metadata, "file").rows(smollm.card))
    native = Decoder(Packed(found, OfGGUF(header, rows, smollm.parts.named_weights)), capacity=64)
    ids = smollm.tokenizer.encode("The three primary colours are red, yellow and blue, and the rest is mixed of them.")
    wanted = smollm.logits(ids)[0]
    logits = all_logits(native, ids, (1, 9))
    torch.testing.assert_close(logits, wanted, atol=2e-4, rtol=1e-4)
    assert native.packed.nbytes < 113_000_000


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"position": {"kind": "sinusoidal"}}, "it has no positions of kind Sinusoidal"),
        ({"attention": ATTENTION | {"chunk": 8}}, "attention is causal, with or without a window"),
        ({"attention": ATTENTION | {"d_head": 272}}, "heads have up to 256 channels"),
        (
            {
                "mlp": {"kind": "moe", "n_experts": 2, "top_k": 1, "expert": BASE["mlp"]},
                "residual": {"parallel": True},
            },
            "its experts stand in blocks whose sublayers follow one another",
        ),
        ({"pattern": [{}, {"attention": {"n_kv_heads": 4}}]}, "heads of one size and number"),
    ],
)
def test_what_it_cannot_run_is_said(changes: dict[str, Any], message: str) -> None:
    found = outline(sc.assemble(from_dict({**BASE, **changes}, "other")))
    assert isinstance(found, str)
    assert message in found


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (([70], [0], [0]), "token id 70 is outside 0 to 69"),
        (([1], [1], [0]), "slot 1 is outside 0 to 0"),
        (([1], [0], [-1]), "position -1 is outside 0 to 63"),
        (([1] * 129, [0] * 129, range(129)), "1 to 128 rows, and 129 are given"),
        (([], [], []), "1 to 128 rows, and 0 are given"),
    ],
)
def test_nothing_out_of_range_is_run(given: Any, message: str) -> None:
    card = CARDS["llama"]
    native = decoder(card, strong(card))
    with pytest.raises(sc.ScantlingInputError, match=message):
        native.run(*given, [True] * len(given[0]))


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """A pass that was made before is enough; in an empty cache folder it is missing."""
    library.library()
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert library.missing() is None
    library.library.__wrapped__()
    monkeypatch.setenv("SCANTLING_CACHE", str(tmp_path))
    assert "no C++ compiler" in str(library.missing())
    with pytest.raises(sc.ScantlingInputError, match="everything runs through PyTorch, slower"):
        library.library.__wrapped__()
