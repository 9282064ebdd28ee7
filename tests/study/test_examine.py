"""Popular formulas against the exact numbers: published errors, the papers' own tables, arithmetic by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.conftest import golden_json
from tests.test_saved import forward

import scantling as sc
from scantling.cards import ladder, presets
from scantling.cards.read import from_dict
from scantling.cli.main import _run
from scantling.numbers.training import Recipe, state_lines, training_memory
from scantling.parts.part import Workload
from scantling.study.examine import ADAM_16, ADAM_18, examine
from scantling.study.formula import Formula
from scantling.tensor.kept import Kept


def formulas(name: str, tokens: int = 64, source: int | None = None) -> dict[str, Formula]:
    card = sc.card(name)
    return {f.name: f for f in examine(card, sc.assemble(card), Workload(1, tokens, source=source))}


def states(name: str, recipe: Recipe) -> dict[str, int]:
    return state_lines(training_memory(sc.assemble(sc.card(name)), Workload(), recipe), recipe)


PALM = "6 N + 12 L H Q T per token"
APPENDIX_F = "3 (2 T V d + L (attention + dense) + 2 T V d)"


@pytest.mark.parametrize("name", [*presets(), *ladder()])
def test_the_terms_are_the_whole_error(name: str) -> None:
    found = formulas(name, source=48 if sc.card(name).family == "encoder-decoder" else None)
    assert len(found) == len(set(found))
    for f in found.values():
        assert sum(f.terms.values()) == f.exact - f.estimate, f.name
        assert isinstance(f.estimate, int)
        assert f.assumes
        assert f.source
    assert ("2 L d x 2 bytes per token" in found) == (sc.card(name).family != "encoder")


@pytest.mark.parametrize(
    ("name", "error"), [("gpt2-xl", -0.17), ("gpt3-175b", -0.02), ("llama-2-7b", -0.50), ("llama-2-70b", -5.84)]
)
def test_the_shortcut_is_off_by_what_is_recorded(name: str, error: float) -> None:
    (shortcut,) = [f for f in formulas(name).values() if f.subject == "parameters"]
    assert shortcut.error is not None
    assert round(100 * shortcut.error, 2) == error


def test_two_errors_of_opposite_sign_in_llama_2_70b() -> None:
    shortcut = formulas("llama-2-70b")["12 L d^2 + 2 V d"]
    d, layers = 8192, 80
    # Grouped heads save 2 d (d - 8 x 128) a layer; 3 matrices of 3.5 d make 10.5 d^2 instead of 8 d^2.
    saved, more = layers * 2 * d * (d - 8 * 128), layers * (3 * d * 28672 - 8 * d * d)
    assert (saved, more) == (80 * 117440512, 80 * 167772160)
    assert list(shortcut.terms.values()) == [-saved, more, 161 * d]
    assert shortcut.estimate == 12 * layers * d * d + 2 * 32000 * d


@pytest.mark.parametrize(("name", "tokens"), [("gpt2", 1024), ("llama-2-7b", 2048), ("llama-2-70b", 4096)])
def test_six_n_against_what_the_original_was_measured_to_cost(name: str, tokens: int) -> None:
    real = golden_json("flops.json")[f"{name}@B1T{tokens}"]
    found = formulas(name, tokens)
    assert found["2 N per token"].exact == real["total"]
    assert found["6 N per token"].exact == real["forward_backward"]
    assert found["6 N per token"].estimate == 6 * golden_json("params.json")[name]["total_unique"] * tokens


def test_six_n_misses_a_seventh_at_4096() -> None:
    """Recorded: LLaMA-2 7B at T 4096 costs 46.1 GFLOP a token, 6 N is 40.4, 12 % less."""
    six = formulas("llama-2-7b", 4096)["6 N per token"]
    assert six.exact / 4096 == pytest.approx(46.1e9, rel=1e-3)
    assert six.estimate / 4096 == pytest.approx(40.4e9, rel=1e-3)
    assert six.error == pytest.approx(-0.12, abs=5e-3)


def test_palm_counts_the_scores_and_only_looked_up_parameters_too_much() -> None:
    palm = formulas("llama-2-7b", 2048)[PALM]
    n, looked_up = 6738415616, 32000 * 4096 + 65 * 4096
    assert palm.estimate == (6 * n + 12 * 32 * 32 * 128 * 2048) * 2048
    assert list(palm.terms.values()) == [-6 * looked_up * 2048]


CHINCHILLA_A4 = [
    (73, 10, 640, 2560, 10, 64, 1.03),
    (305, 20, 1024, 4096, 16, 64, 1.10),
    (552, 24, 1280, 5120, 10, 128, 1.08),
    (1143, 26, 1792, 7168, 14, 128, 1.04),
    (1592, 28, 2048, 8192, 16, 128, 1.03),
    (6794, 40, 3584, 14336, 28, 128, 0.99),
]
"""arXiv:2203.15556, table A4: millions of parameters, L, d, d_ff, H, key size, FLOPs / 6ND."""


@pytest.mark.parametrize(("millions", "layers", "d", "d_ff", "heads", "key", "ratio"), CHINCHILLA_A4)
def test_appendix_f_reproduces_table_a4(
    millions: int, layers: int, d: int, d_ff: int, heads: int, key: int, ratio: float
) -> None:
    """Table A4 at 2048 tokens and V 32,000; its ratios leave the two products with the tables out.

    Their models have d^2 more parameters a layer, for relative positions.
    """
    tokens, vocab = 2048, 32000
    section: dict[str, Any] = {"kind": "multi_head", "n_heads": heads, "d_head": key}
    card = from_dict(
        {
            "name": "a4",
            "family": "decoder",
            "n_layers": layers,
            "d_model": d,
            "vocab_size": vocab,
            "context": tokens,
            "attention": section,
            "position": {"kind": "none"},
            "norm": {"kind": "rmsnorm", "eps": 1e-5},
            "mlp": {"kind": "plain", "act": "gelu", "d_ff": d_ff},
            "tied": True,
        },
        "a4",
    )
    model = sc.assemble(card)
    params = model.params + layers * d * d
    assert round(params / 1e6) == pytest.approx(millions, abs=1)
    found = {f.name: f for f in examine(card, model, Workload(1, tokens))}[APPENDIX_F]
    blocks = found.estimate - 2 * 3 * 2 * tokens * vocab * d
    assert blocks / (6 * params * tokens) == pytest.approx(ratio, abs=0.0075)
    # On such a model the formula differs from the exact number by the softmax and the looked-up table only.
    assert set(found.terms) == {"softmax, which costs no product", "the embedding is a lookup and no product"}


def test_appendix_f_by_hand_for_gpt2() -> None:
    tokens, v, d, layers, heads = 1024, 50257, 768, 12, 12
    attention = 2 * 3 * tokens * d * d + 4 * tokens * tokens * d + 3 * heads * tokens * tokens + 2 * tokens * d * d
    dense = 2 * tokens * (d * 4 * d + d * 4 * d)
    wanted = 3 * (2 * tokens * v * d + layers * (attention + dense) + 2 * tokens * d * v)
    assert formulas("gpt2", tokens)[APPENDIX_F].estimate == wanted


@pytest.mark.parametrize(
    ("name", "plain", "grouped", "exact"),
    [
        # OPT 13B in the vLLM paper has 2 x 5120 x 40 x 2 bytes; the same for the shape of LLaMA-2 13B.
        ("llama-2-13b", 819200, 819200, 819200),
        ("llama-3-8b", 524288, 131072, 131072),
        ("gemma-7b", 2 * 28 * 3072 * 2, 2 * 28 * 16 * 256 * 2, 2 * 28 * 16 * 256 * 2),
        # A latent of 512 and a turned key of 64 in each of 61 layers.
        ("deepseek-v3", 2 * 61 * 7168 * 2, 2 * 61 * 128 * 192 * 2, 61 * (512 + 64) * 2),
    ],
)
def test_cache_rules(name: str, plain: int, grouped: int, exact: int) -> None:
    a, b = [f for f in formulas(name).values() if f.subject == "KV cache"]
    assert (a.estimate, b.estimate) == (plain, grouped)
    assert a.exact == b.exact == exact


def test_bytes_of_the_training_states_item_by_item() -> None:
    n, tensors = 1235814400, 16 * 9 + 2
    assert states("llama-3.2-1b", ADAM_16) == {
        "weights, bfloat16": 2 * n,
        "master copy, float32": 4 * n,
        "gradients, bfloat16": 2 * n,
        "first moments, float32": 4 * n,
        "second moments, float32": 4 * n,
        "counts of updates": 4 * tensors,
    }
    assert sum(states("llama-3.2-1b", ADAM_18).values()) == 18 * n + 4 * tensors


def test_what_is_computed_or_counted_is_not_trained() -> None:
    """Marian's table of waves and DeepSeek's selection biases have no gradients and no moments."""
    marian = states("opus-mt-en-de", ADAM_16)
    waves = 2 * 512 * 512
    assert marian["weights, bfloat16"] // 2 - marian["gradients, bfloat16"] // 2 >= waves
    rule = formulas("deepseek-v3")["16 bytes per parameter, training"]
    assert rule.terms["numbers that no gradient trains have weights only"] == 2 * 58 * 256
    assert rule.exact - rule.estimate == sum(rule.terms.values())


def test_the_activations_of_a_gpt_beside_the_published_formula() -> None:
    """34 T d + 5 H T^2 bytes a layer; torch keeps float32 weights of attention besides."""
    rule = formulas("gpt2", 1024)[KORTHIKANTI[0]]
    assert rule.estimate == 12 * (34 * 1024 * 768 + 5 * 12 * 1024**2)
    assert rule.exact > rule.estimate


def test_two_bytes_per_parameter_leaves_the_cache_out() -> None:
    rule = formulas("llama-2-7b", 4096)["2 bytes per parameter, inference"]
    assert (rule.estimate, rule.terms) == (2 * 6738415616, {"KV cache": 4096 * 524288})


def test_experts_that_do_not_work() -> None:
    found = formulas("mixtral-8x7b", 128)
    every = found["6 N per token, N with all experts"]
    assert every.estimate == 6 * 46702792704 * 128
    assert found["6 N per token"].estimate == 6 * 12879925248 * 128
    assert "6 N per token, N with all experts" not in formulas("llama-2-7b")


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(["examine", "llama-2-70b", "--tokens", "4096", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    shortcut = told["formulas"][0]
    assert (shortcut["estimate"], shortcut["exact"]) == (64948797440, 68976648192)
    assert shortcut["error"] == pytest.approx(-0.0584, abs=1e-4)
    assert told["remarks"] == []
    assert _run(["examine", "gpt2"]) == 0
    out = capsys.readouterr().out
    assert "50,304" in out
    assert "arXiv:2204.02311" in out
    assert _run(["examine", "t5-base", "--source-tokens", "100", "--tokens", "20", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["source_tokens"] == 100
    assert _run(["examine", "bert-base-uncased"]) == 0
    assert _run(["examine", "gpt2", "--source-tokens", "5"]) == 2


KORTHIKANTI = ("s b h (34 + 5 a s / h) a layer", "34 s b h a layer", "2 s b h a layer")


def of_a_gpt(**keys: Any) -> dict[str, Formula]:
    """A block as the paper has it, 3 layers of d 64 with 4 heads, B 2, T 24, in bfloat16."""
    biased = {"kind": "multi_head", "n_heads": 4, "bias": ["q", "k", "v", "o"]}
    plain = {
        "name": "gpt",
        "family": "decoder",
        "n_layers": 3,
        "d_model": 64,
        "vocab_size": 100,
        "context": 32,
        "attention": biased,
        "position": {"kind": "learned"},
        "norm": {"kind": "layernorm", "eps": 1e-5},
        "mlp": {"kind": "plain", "act": "gelu", "bias": True},
        "tied": True,
    }
    card = from_dict({**plain, **keys}, "gpt")
    return {f.name: f for f in examine(card, sc.assemble(card), Workload(2, 24))}


def test_korthikanti_of_the_block_that_it_is_about() -> None:
    """s b h = 24 x 2 x 64; by hand 34 of them and 5 x 4 x 24^2 x 2 bytes of scores a layer, or 2 of them."""
    found, unit = of_a_gpt(), 24 * 2 * 64
    whole, selective, block = (found[name] for name in KORTHIKANTI)
    assert whole.estimate == 3 * (34 * unit + 5 * 4 * 24 * 24 * 2)
    assert (selective.estimate, block.estimate) == (3 * 34 * unit, 3 * 2 * unit)
    # MLP and attention besides the scores agree; the norms' means and deviations are not in the formula.
    assert set(selective.terms) == {
        "norms",
        "dropout of what is added to the stream",
        "outside the blocks: embeddings, positions, final norm, head, loss",
    }
    assert selective.terms["norms"] == 3 * 2 * (2 * 24 * 2) * 2
    assert selective.terms["dropout of what is added to the stream"] == -3 * 2 * unit
    assert set(block.terms) == {"outside the blocks: embeddings, positions, final norm, head, loss"}


def test_korthikanti_leaves_the_loss_out() -> None:
    """12 GB said, 45 measured: logits and their float32 copies are outside of its blocks."""
    model, w = sc.assemble(sc.card("llama-2-7b")), Workload(8, 512)
    found = {f.name: f for f in examine(sc.card("llama-2-7b"), model, w)}[KORTHIKANTI[2]]
    outside = found.terms["outside the blocks: embeddings, positions, final norm, head, loss"]
    assert outside > 8 * 511 * 32000 * 4
    assert found.estimate == 32 * 2 * 8 * 512 * 4096


@pytest.mark.parametrize("policy", ["none", "selective", "block"])
def test_what_korthikanti_is_compared_with_is_what_torch_keeps(policy: str) -> None:
    """The exact numbers beside the formula are those of the hooks, for a card with experts and grouped heads."""
    card = sc.card("tiny")
    model = sc.assemble(card)
    found = examine(card, model, Workload(2, 24), "float32")
    exact = {f.name: f.exact for f in found}[KORTHIKANTI[("none", "selective", "block").index(policy)]]
    net = model.build().train()
    w = Workload(2, 24, training=True, kernel="reference", recompute=policy)
    with Kept(net.parameters()) as kept:
        result = forward(net, w)
    assert result is not None
    assert exact == kept.nbytes
