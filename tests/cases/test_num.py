"""Cases about positions, norms, numerics and routing."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.cases.small import CLOSE, GPT2, LLAMA, built, captured, card, tokens
from tests.conftest import GOLDEN

import scantling as sc
from scantling.cards.read import from_dict
from scantling.checkpoint.hf_config import card_of_config
from scantling.parts.leaf import RMSNorm
from scantling.parts.position import ALiBi, Sinusoidal
from scantling.parts.rope import RoPE
from scantling.tensor import rotate
from scantling.tensor.attend import Terms, kernel
from scantling.tensor.context import Context
from scantling.tensor.router_losses import Routing, load_balancing_loss

SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"kind": "linear", "factor": 4.0},
    "dynamic": {"kind": "dynamic", "factor": 4.0, "trained_length": 8},
    "yarn": {"kind": "yarn", "factor": 4.0, "trained_length": 8},
    "llama3": {
        "kind": "llama3",
        "factor": 8.0,
        "trained_length": 8,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
    "longrope": {
        "kind": "longrope",
        "trained_length": 8,
        "short_factor": [1.0] * 4,
        "long_factor": [1.0, 2.0, 3.0, 4.0],
    },
}


def turned(position: RoPE, x: torch.Tensor) -> torch.Tensor:
    """x (1, 1, T, D) turned by its positions."""
    ctx = Context(1, x.shape[2], x.device)
    return rotate.rotate(x, *position.rotation(ctx))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("d_rotary", [8, 4])
@pytest.mark.parametrize("scaling", [None, *SCALINGS.values()], ids=["none", *SCALINGS])
def test_scores_depend_on_the_distance_only(scaling: Any, d_rotary: int, interleaved: bool) -> None:
    """NUM-01: one q and one k at all positions give a Toeplitz matrix; a mixture of the forms does not."""
    if scaling and scaling["kind"] == "longrope":
        scaling = {**scaling, **{key: scaling[key][: d_rotary // 2] for key in ("short_factor", "long_factor")}}
    position = {"kind": "rope", "theta": 1e4, "d_rotary": d_rotary, "interleaved": interleaved, "scaling": scaling}
    drawn = card({**LLAMA, "position": {k: v for k, v in position.items() if v is not None}})
    rope: Any = sc.assemble(drawn).decoder.blocks[0].children()["attn"]
    draw = torch.Generator().manual_seed(0)
    q, k = (torch.randn(8, generator=draw).expand(1, 1, 12, 8) for _ in "qk")

    def deviation(turn: Any) -> float:
        scores = turn(q) @ turn(k).transpose(-1, -2)
        return max(float(scores[0, 0].diagonal(i).max() - scores[0, 0].diagonal(i).min()) for i in range(-11, 12))

    assert deviation(lambda x: turned(rope.position, x)) < 1e-4
    cos, sin, form = rope.position.rotation(Context(1, 12, q.device))
    assert deviation(lambda x: rotate.rotate(x, cos, sin, not form)) > 0.1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("base", [LLAMA, {**LLAMA, "position": {"kind": "sinusoidal"}}], ids=["rope", "waves"])
def test_neighbouring_positions_stay_apart_in_16_bits(base: dict[str, Any], dtype: str) -> None:
    """NUM-03: the positions themselves would collide (769 of 4096 are left in bfloat16), the tables do not."""
    every = torch.arange(4096)
    assert (every.bfloat16().unique().numel(), torch.arange(32768).half().unique().numel()) == (769, 6145)
    assert every[256].bfloat16() == every[257].bfloat16()
    lm = built(card({**base, "context": 4096}, n_layers=1), dtype)
    ids = torch.full((1, 4096), 5)
    seen = captured(lm, ids, kernel="fused")
    point = "decoder.blocks.0.attn:q_rotated" if base is LLAMA else "decoder.position:added"
    values = seen[point].flatten(0, -3)[0] if base is LLAMA else seen[point][0]
    assert values.dtype == getattr(torch, dtype)
    assert bool((values[1:] != values[:-1]).any(-1).all())


@pytest.mark.parametrize(
    ("heads", "slopes"),
    [
        (6, [1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 2, 1 / 8]),
        (8, [2.0**-i for i in range(1, 9)]),
        (12, [*(2.0**-i for i in range(1, 9)), 0.70711, 0.35355, 0.17678, 0.08839]),
    ],
)
def test_alibi_slopes(heads: int, slopes: list[float]) -> None:
    """NUM-05, NUM-06: the first of 8 is 1/2; other counts take every other slope of twice the power below."""
    assert ALiBi(heads).slopes() == pytest.approx(slopes, abs=5e-6)


def test_alibi_slopes_of_40_heads() -> None:
    """NUM-05: 32 slopes of 32 heads, then every other of 64."""
    slopes = ALiBi(40).slopes()
    assert slopes[:32] == pytest.approx([2 ** (-i / 4) for i in range(1, 33)])
    assert slopes[32:] == pytest.approx([2 ** (-i / 8) for i in range(1, 16, 2)])


def test_alibi_scores_fall_with_the_distance() -> None:
    """NUM-05: what is added to the scores is slope times distance, in every head."""
    lm = built(
        card({**LLAMA, "position": {"kind": "alibi"}, "attention": {"kind": "multi_head", "n_heads": 6, "d_head": 4}})
    )
    ids = torch.full((1, 7), 5)
    scores = captured(lm, ids)["decoder.blocks.0.attn:scores"][0]
    slopes = torch.tensor([1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 2, 1 / 8])
    steps = scores.diagonal(0, 1, 2)[:, -1:] - scores[:, -1]
    distance = torch.arange(6, -1, -1).float()
    torch.testing.assert_close(steps, slopes[:, None] * distance, atol=1e-4, rtol=0)


def norm_of(kind: str) -> tuple[RMSNorm, Any]:
    """Our norm and the original's class that it must equal."""
    transformers = pytest.importorskip("transformers")
    models = transformers.models
    return {
        "llama": (RMSNorm(4096, 1e-6), models.llama.modeling_llama.LlamaRMSNorm),
        "qwen3": (RMSNorm(4096, 1e-6), models.qwen3.modeling_qwen3.Qwen3RMSNorm),
        "deepseek": (RMSNorm(4096, 1e-6), models.deepseek_v3.modeling_deepseek_v3.DeepseekV3RMSNorm),
        "gemma": (RMSNorm(4096, 1e-6, True, False), models.gemma.modeling_gemma.GemmaRMSNorm),
        "olmo2": (RMSNorm(4096, 1e-6, False, False), models.olmo2.modeling_olmo2.Olmo2RMSNorm),
        "gpt-oss": (RMSNorm(4096, 1e-6, False, False), models.gpt_oss.modeling_gpt_oss.GptOssRMSNorm),
    }[kind]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", ["llama", "qwen3", "deepseek", "gemma", "olmo2", "gpt-oss"])
def test_each_order_of_gain_and_rounding_is_its_familys(kind: str, dtype: torch.dtype) -> None:
    """NUM-11: bit-equal to the original in 16 bits; the other order differs in a quarter of the entries."""
    part, original = norm_of(kind)
    draw = torch.Generator().manual_seed(0)
    x, gain = torch.randn(8, 4096, generator=draw).to(dtype), torch.randn(4096, generator=draw).to(dtype)
    theirs = original(4096, eps=1e-6).to(dtype)
    nets = [part.build(dtype=str(dtype).removeprefix("torch."))]
    nets.append(RMSNorm(4096, 1e-6, part.plus_one, not part.rounded).build(dtype=str(dtype).removeprefix("torch.")))
    with torch.no_grad():
        for net in (theirs, *nets):
            net.weight.copy_(gain)
        ours, other = (net(x) for net in nets)
        if dtype == torch.float32:
            torch.testing.assert_close(ours, theirs(x))
            return
        assert torch.equal(ours, theirs(x))
    if not part.plus_one:
        assert 0.15 < float((other != ours).float().mean()) < 0.35


SAME_BITS = ["llama-gqa", "mistral-swa", "qwen3", "smollm3", "phi3", "gemma2", "gemma3-text", "stablelm"]


@pytest.mark.parametrize("name", SAME_BITS)
def test_bfloat16_logits_are_the_originals_bit_by_bit(name: str) -> None:
    """NUM-11, NUM-16: norms, QK-norms, embedding factors and caps rounded where the original rounds them."""
    transformers = pytest.importorskip("transformers")
    folder = GOLDEN / "tiny" / name
    ids = load_file(folder / "io.safetensors")["input_ids"][:1]
    original = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation="eager"
    )
    with torch.no_grad():
        assert torch.equal(
            sc.load(folder, dtype="bfloat16").logits(ids, kernel="reference"), original(ids).logits.float()
        )


@pytest.mark.parametrize("name", ["olmo2", "gpt-oss"])
def test_a_gain_before_the_rounding_is_read_from_the_family(name: str) -> None:
    """NUM-11: every norm of the families that multiply in float32, QK-norms too."""
    lm = sc.load(GOLDEN / "tiny" / name)
    norms = [part for _, part, _ in lm.parts.walk() if isinstance(part, RMSNorm)]
    assert norms
    assert not any(norm.rounded for norm in norms)


@pytest.mark.parametrize(("eps", "first"), [(1e-5, 0.2828427), (1e-6, 0.5345225)])
@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("plus_one", [False, True])
def test_epsilon_stands_inside_the_root(plus_one: bool, rounded: bool, eps: float, first: float) -> None:
    """NUM-12: outside it the first entry would be 0.6284807."""
    norm = RMSNorm(4, eps, plus_one, rounded).build()
    assert norm(torch.tensor([1e-3, -2e-3, 2e-3, 1e-3]))[0].item() == pytest.approx(first, abs=1e-7)


@pytest.mark.parametrize("name", ["fused", "reference"])
@pytest.mark.parametrize(("cap", "weights"), [(50.0, [0.9994478, 0.0005522, 4e-22]), (None, [1.0, 9e-27, 0.0])])
def test_a_cap_on_the_scores_holds_in_every_kernel(cap: float | None, weights: list[float], name: str) -> None:
    """NUM-14: scores 120, 60 and 0."""
    q, k = torch.ones(1, 1, 1, 1), torch.tensor([120.0, 60.0, 0.0]).view(1, 1, 3, 1)
    found = kernel(name)(q, k, torch.eye(3)[None, None], Terms(None, False, 1.0, softcap=cap), lambda _, value: value)
    assert found.flatten().tolist() == pytest.approx(weights, rel=0.15, abs=1e-30)
    assert float(found.flatten()[0]) == pytest.approx(weights[0], abs=5e-8)


@pytest.mark.parametrize(
    ("d_model", "half", "full"),
    [(3072, 55.5, 55.4256), (1152, 34.0, 33.9411), (2048, 45.25, 45.2548), (2304, 48.0, 48.0)],
)
def test_the_embedding_factor_is_rounded_to_the_dtype(d_model: int, half: float, full: float) -> None:
    """NUM-16: the card says that the factor is rounded; the stream shows it."""
    config = json.loads((GOLDEN / "configs" / "gemma-2b.json").read_text())
    config |= {"hidden_size": d_model, "num_hidden_layers": 1, "intermediate_size": 8, "vocab_size": 8}
    drawn = card_of_config(config | {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8}, "g", "g")
    assert drawn.embedding.scale_rounded
    for dtype, factor in (("bfloat16", half), ("float32", full)):
        net = sc.assemble(drawn).build(dtype=dtype)
        with torch.no_grad():
            net.embed.weight.fill_(1.0)
        seen: dict[str, torch.Tensor] = {}
        ids = torch.zeros(1, 1, dtype=torch.int64)
        net(ids, Context.of(ids, recorder=lambda path, value, seen=seen: seen.setdefault(path, value)))
        assert seen[":scaled"][0, 0, 0].item() == pytest.approx(factor, abs=5e-5)


@pytest.mark.parametrize("name", ["fused", "reference"])
def test_dropout_of_attention_acts_in_training_only(name: str) -> None:
    """NUM-19: attention dropout 0.5; the functional kernel drops regardless of mode, the model does not."""
    lm = built(card(dropout={"attention": 0.5}))
    ids = tokens(9)
    lm.net.eval()
    assert torch.equal(lm.logits(ids, kernel=name), lm.logits(ids, kernel=name))
    assert torch.equal(lm.generate(ids, 8, ignore_eos=True), lm.generate(ids, 8, ignore_eos=True))
    torch.testing.assert_close(lm.logits(ids, kernel=name), built(card()).logits(ids, kernel=name), **CLOSE)
    lm.net.train()
    draws = [lm.net(ids, Context.of(ids, training=True, kernel_name=name)) for _ in range(2)]
    assert not torch.equal(*draws)


def test_waves_interleave_sines_and_cosines() -> None:
    """NUM-20: position 1 of 8 channels, as in the paper; not halves, and no divisor d / 2 - 1."""
    paper = [0.841471, 0.540302, 0.099833, 0.995004, 0.01, 0.99995, 0.001, 1.0]
    drawn = card(
        {**GPT2, "position": {"kind": "sinusoidal"}, "attention": {"kind": "multi_head", "n_heads": 1}}, d_model=8
    )
    assert sc.assemble(drawn).decoder.position == Sinusoidal(8)
    net = sc.assemble(drawn).build()
    with torch.no_grad():
        net.embed.weight.zero_()
    seen: dict[str, torch.Tensor] = {}
    ids = torch.zeros(1, 2, dtype=torch.int64)
    net(ids, Context.of(ids, recorder=lambda path, value: seen.setdefault(path, value)))
    assert seen["decoder.position:added"][0, 1].tolist() == pytest.approx(paper, abs=1e-6)
    assert seen["decoder.position:added"][0, 0].tolist() == [0.0, 1.0] * 4


def test_a_feed_forward_that_overflows_16_bits_is_finite_in_bfloat16() -> None:
    """NUM-13: a down projection that yields 66246.39: inf in float16 alone (65504 is its largest number)."""
    assert torch.tensor([65519.0, 65520.0]).half().tolist() == [65504.0, float("inf")]
    mlp = from_dict({**LLAMA, "mlp": {"kind": "plain", "act": "relu", "d_ff": 1}, "d_model": 8}, "mlp")
    found = {}
    for dtype in ("float16", "bfloat16", "float32"):
        net: Any = sc.assemble(mlp).build(dtype=dtype).decoder.blocks[0].mlp
        with torch.no_grad():
            net.up.weight.fill_(32.0)
            net.down.weight.fill_(66246.39 / 256)
            x = torch.ones(1, 1, 8, dtype=net.up.weight.dtype)
            found[dtype] = float(net(x, Context(1, 1, x.device))[0, 0, 0])
    assert found["float16"] == float("inf")
    assert found["bfloat16"] == pytest.approx(66246.39, rel=2**-7)
    assert found["float32"] == pytest.approx(66246.39, rel=1e-6)


FAR = (-200, -128, -16, -8, -1, 0, 1, 8, 16, 128, 200)


@pytest.mark.parametrize(
    ("family", "wanted"),
    [
        ("encoder", [15, 15, 10, 8, 1, 0, 17, 24, 26, 31, 31]),
        ("decoder", [31, 31, 16, 8, 1, 0, 0, 0, 0, 0, 0]),
    ],
)
def test_buckets_of_distances(family: str, wanted: list[int]) -> None:
    """NUM-07: key minus query, 32 buckets up to 128; and a model's scores are shifted by those rows of its table."""
    found = rotate.buckets(torch.tensor(FAR), 32, 128, family == "encoder")
    assert found.tolist() == wanted
    base = {**LLAMA, "family": family, "position": {"kind": "relative"}, "context": 256}
    lm = built(card(base, n_layers=1))
    ids = torch.full((1, 201), 5)
    with torch.no_grad():
        lm.net.get_parameter(f"{family}.position.table.weight").zero_()
    plain = captured(lm, ids)[f"{family}.blocks.0.attn:scores"][0]
    with torch.no_grad():
        lm.net.get_parameter(f"{family}.position.table.weight").copy_(torch.arange(32)[:, None] + torch.zeros(32, 4))
    shift = captured(lm, ids)[f"{family}.blocks.0.attn:scores"][0] - plain
    seen = {d: (0, d) if d > 0 else (-d, 0) for d in FAR if family == "encoder" or d <= 0}
    for (query, key), row in zip(seen.values(), wanted, strict=False):
        assert shift[:, query, key].tolist() == pytest.approx([row] * 4, abs=1e-4)


STATES = torch.tensor([[[1.0, 0.0], [1.0, 0.0], [0.0, 2.0], [0.0, 2.0]]])


@pytest.mark.parametrize(
    ("kind", "mask", "wanted"),
    [
        ("mean", [1, 1, 0, 0], [1.0, 0.0]),
        ("mean", [0, 0, 1, 1], [0.0, 2.0]),
        ("mean", [1, 1, 1, 1], [0.5, 1.0]),
        ("mean", [0, 0, 0, 0], [0.0, 0.0]),
        ("last", [1, 1, 0, 0], [1.0, 0.0]),
        ("last", [0, 0, 1, 1], [0.0, 2.0]),
        ("first", [1, 1, 0, 0], [1.0, 0.0]),
        ("first", [0, 0, 1, 1], [0.0, 2.0]),
    ],
)
def test_padding_is_not_pooled(kind: str, mask: list[int], wanted: list[float]) -> None:
    """NUM-10: without the mask the mean would be [0.5, 1]; that of nothing but padding is 0."""
    ctx = Context.of(torch.zeros(1, 4, dtype=torch.int64), padding=torch.tensor([mask]).bool())
    assert ctx.pool(STATES, kind)[0].tolist() == wanted


@pytest.mark.parametrize("pool", ["mean", "last", "first"])
@pytest.mark.parametrize("position", [{"kind": "rope", "theta": 1e4}, {"kind": "learned"}], ids=["rope", "learned"])
def test_the_vector_of_a_text_does_not_depend_on_its_neighbours(position: dict[str, Any], pool: str) -> None:
    """NUM-10: alone, and beside a text that is 30 tokens longer, padded on either side; padding alone is refused."""
    base = {**LLAMA, "family": "encoder", "position": position, "head": {"kind": "embedding", "pool": pool}}
    lm = built(card({**base, "head": {**base["head"], "normalize": True}}))
    text, longer = tokens(7), tokens(37, seed=2)
    alone = lm.logits(text)[0]
    assert float(alone.norm()) == pytest.approx(1.0, abs=1e-6)
    for left in (0, 30):
        rows, mask = torch.cat((torch.zeros_like(longer), longer)), torch.ones(2, 37, dtype=torch.int64)
        rows[0, left : left + 7] = text
        mask[0] = 0
        mask[0, left : left + 7] = 1
        places = (mask.cumsum(-1) - 1).clamp(min=0)
        vectors = lm.logits(rows, mask, places)
        torch.testing.assert_close(vectors[0], alone, atol=1e-5, rtol=0)
        mask[1] = 0
        with pytest.raises(sc.ScantlingInputError, match="a row is padding only"):
            lm.logits(rows, mask, places)
    other = lm.logits(longer)[0]
    assert float((alone - other).abs().max()) > 0.05


def test_the_importance_of_experts_is_softmaxed_once() -> None:
    """NUM-18: what enters the balance loss, the choice of expert 0 apart; a token of padding does not count."""
    logits = torch.tensor([[[2.0, 1.0, 0.5, -1.0], [-9.0, 9.0, 0.0, 3.0]]])
    once, real = [0.6095, 0.2242, 0.1360, 0.0303], torch.tensor([[True, False]])
    twice = logits.softmax(-1).softmax(-1)[0, 0].tolist()
    assert twice == pytest.approx([0.3492, 0.2376, 0.2175, 0.1957], abs=5e-5)
    assert Routing(logits, logits.topk(1, -1).indices).probabilities[0, 0].tolist() == pytest.approx(once, abs=5e-5)
    for expert in range(4):
        chosen = torch.full((1, 2, 1), expert)
        found = load_balancing_loss([Routing(logits, chosen)], real)
        assert float(found) == pytest.approx(4 * once[expert], abs=2e-4)


def test_waves_of_marian_stand_in_halves() -> None:
    """NUM-20: position 1 of 8 channels: all sines, then all cosines, in the model's own table."""
    halves = [0.841471, 0.099833, 0.01, 0.001, 0.540302, 0.995004, 0.99995, 1.0]
    drawn = card(
        {**GPT2, "position": {"kind": "sinusoidal", "halves": True, "table": True}, "attention": LLAMA["attention"]},
        d_model=8,
    )
    net = sc.assemble(drawn).build()
    assert net.get_parameter("decoder.position.table.weight")[1].tolist() == pytest.approx(halves, abs=1e-6)
    assert sc.load(GOLDEN / "tiny" / "marian").card.position.halves
