"""Quoted parameter counts: the shortcut, its parts, whole models."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from tests.figures.quoted import CONDITION, ROUNDING, WRONG, Figure, Section, counted, made, parts

import scantling as sc
from scantling.numbers.count import count
from scantling.parts.leaf import LayerNorm
from scantling.parts.mlp import GatedMLP
from scantling.parts.part import Part

_HEADS = {"kind": "multi_head", "n_heads": 32}


def sections() -> Iterator[Section]:
    """The tables about parameters."""
    text = "`12 L d² + V d`, the second term twice where the head has a matrix of its own, beside the exact totals."
    yield Section("The shortcut", text, "scantling count MODEL`, `scantling examine MODEL", [*_shortcut()])
    text = "Where the shortcut under-counts, and how parameters divide between attention and MLP."
    yield Section(
        "Inside a layer", text, "scantling count llama-2-70b`, `scantling compare llama-2-7b llama-2-70b", [*_layers()]
    )
    text = "Each row of a parts list of GPT-2 small, biases included, and of Llama 3 8B."
    yield Section(
        "Two models part by part", text, "scantling parts gpt2`, `scantling count gpt2 llama-3-8b", [*_parts()]
    )
    text = "Small exercises with round sizes."
    yield Section("Worked exercises", text, "scantling count CARD.yaml", [*_exercises()])
    text = "The 2017 paper's own totals, with one table of 37,000 rows for source, target and head."
    yield Section("The original", text, "scantling count transformer-base transformer-big", [*_original()])


def _blocks(name: str) -> int:
    """12 L d^2 of a preset, as its shortcut counts it."""
    card, found = sc.card(name), counted(name)
    return found.shortcut - (1 if card.tied else 2) * card.vocab_size * card.d_model


def _table(name: str) -> int:
    return parts(name).embed.params


def _shortcut() -> Iterator[Figure]:
    held = sum(run.times * sum(run.by_part.values()) for run in counted("gpt2").per_layer)
    why = f"to the nearest it is {_blocks('gpt2') / 1e6:.1f} M; the blocks hold {held:,} with their biases and norms"
    yield Figure("GPT-2 small, 12 L d²", "85.0 M", _blocks("gpt2"), ROUNDING, why)
    yield Figure("GPT-2 small, 12 L d²", "85 M", _blocks("gpt2"))
    yield Figure("GPT-2 small, V d", "38.6 M", _table("gpt2"))
    yield Figure("GPT-2 small, positions", "0.8 M", counted("gpt2").by_part["position"])
    yield Figure("GPT-2 small, all", "124 M", parts("gpt2").params)
    yield Figure("GPT-2 XL, 12 L d²", "1.475 B", _blocks("gpt2-xl"))
    yield Figure("GPT-2 XL, V d", "80 M", _table("gpt2-xl"))
    yield Figure("GPT-2 XL, all", "1.56 B", parts("gpt2-xl").params)
    why = "cut and not rounded; beside the figure above it reads like another model"
    yield Figure("GPT-2 XL, all", "1.5 B", parts("gpt2-xl").params, ROUNDING, why)
    yield Figure("GPT-3, 12 L d²", "173.9 B", _blocks("gpt3-175b"))
    yield Figure("GPT-3, 12 L d²", "174 B", _blocks("gpt3-175b"))
    yield Figure("GPT-3, V d", "0.6 B", _table("gpt3-175b"))
    yield Figure("GPT-3, all", "175 B", parts("gpt3-175b").params)
    yield Figure("LLaMA-2 7B, 12 L d²", "6.44 B", _blocks("llama-2-7b"))
    why = "right with both tables, 2 V d: the model is untied, and the formula has to say which models count twice"
    yield Figure("LLaMA-2 7B, V d", "0.26 B", 2 * _table("llama-2-7b"), CONDITION, why)
    yield Figure("LLaMA-2 7B, all", "6.7 B", parts("llama-2-7b").params)
    yield Figure("LLaMA-2 70B, 12 L d²", "64.4 B", _blocks("llama-2-70b"))
    why = "that is one table; the model is untied like the 7 B above it, where two were counted"
    yield Figure("LLaMA-2 70B, V d", "0.26 B", 2 * _table("llama-2-70b"), WRONG, why)
    yield Figure("LLaMA-2 70B, all", "69 B", parts("llama-2-70b").params)
    yield Figure("LLaMA-2 70B, error of the shortcut", "-6 %", _error("llama-2-70b"))


def _error(name: str) -> Fraction:
    return Fraction(counted(name).shortcut, counted(name).total) - 1


def _layers() -> Iterator[Figure]:
    layer = counted("llama-2-70b").per_layer[0].by_part
    tables = 2 * _table("llama-2-70b")
    yield Figure("LLaMA-2 70B, attention of a layer", "151 M", layer["attention"])
    yield Figure("LLaMA-2 70B, MLP of a layer", "705 M", layer["mlp"])
    yield Figure("LLaMA-2 70B, both", "856 M", layer["attention"] + layer["mlp"])
    yield Figure("LLaMA-2 70B, 80 layers and 2 V d", "69.0 B", 80 * (layer["attention"] + layer["mlp"]) + tables)
    card = sc.card("llama-2-70b")
    yield Figure("LLaMA-2 70B, d_ff / d", "3.5", Fraction(card.mlp.d_ff, card.d_model))
    why = "the MLP makes a layer larger and grouped heads make it smaller: two errors of opposite sign"
    more, less = layer["mlp"] - 8 * card.d_model**2, layer["attention"] - 4 * card.d_model**2
    said, told = "the MLP is 10.5 d², not 8 d²", f"MLP {more:+,}, attention {less:+,} a layer"
    yield Figure("LLaMA-2 70B, why 12 L d² is too low", said, told, CONDITION, why)
    seven = counted("llama-2-7b").per_layer[0].by_part
    both = seven["attention"] + seven["mlp"]
    yield Figure("7 B, attention's share of a layer", "33 %", Fraction(seven["attention"], both))
    yield Figure("7 B, MLP's share of a layer", "67 %", Fraction(seven["mlp"], both))
    whole = counted("llama-2-7b")
    shares = {role: f"{100 * n / whole.total:.1f} %" for role, n in whole.by_part.items()}
    tables = 100 * (whole.by_part["embedding"] + whole.by_part["head"]) / whole.total
    why = f"of a layer; of the whole model attention has {shares['attention']}, the MLP {shares['mlp']}, tables"
    why += f" {tables:.1f} %"
    yield Figure("7 B, MLP's share of all", "67 %", Fraction(whole.by_part["mlp"], whole.total), CONDITION, why)
    for name, said in (("gpt2", "64"), ("gpt3-175b", "128"), ("llama-2-7b", "128"), ("llama-2-70b", "102")):
        yield Figure(f"{name}, d / L", said, Fraction(sc.card(name).d_model, sc.card(name).n_layers))
    ratio = Fraction(sc.card("gpt2-xl").d_model, sc.card("gpt2-xl").n_layers)
    why = f"GPT-2 small has 64 and GPT-2 XL {float(ratio):.1f}: the range holds for GPT-3 and LLaMA-2 only"
    span = f"{float(ratio):.1f} to {sc.card('gpt3-175b').d_model // sc.card('gpt3-175b').n_layers}"
    yield Figure("d / L of the models of that table and GPT-2 XL", "100 to 130", span, WRONG, why)
    d_ff = Fraction(8, 3) * 4096
    yield Figure("8/3 of 4096", "10922.7", d_ff)
    unsaid = made(d_model=4096, vocab_size=1, attention=_HEADS, mlp={"kind": "gated", "act": "silu"})
    rounded = next(part.d_ff for _, part, _ in unsaid.walk() if isinstance(part, GatedMLP))
    yield Figure("8/3 of 4096, to the next multiple of 256", "11008", rounded)
    yield Figure("LLaMA-2 7B, d_ff", "11008", sc.card("llama-2-7b").mlp.d_ff)


def _parts() -> Iterator[Figure]:
    gpt2, card = parts("gpt2"), sc.card("gpt2")
    weights = {name: sum(p.params for path, p, _ in gpt2.walk() if path == name) for name in _ROWS}
    block = "decoder.blocks.0"
    attention = sum(weights[f"{block}.attn.{letter}"] for letter in "qkv")
    yield Figure("GPT-2 small, token table", "38.6 M", weights["embed"])
    yield Figure("GPT-2 small, positions", "786 K", weights["decoder.position.table"])
    yield Figure("GPT-2 small, q, k and v of a block", "1.77 M", attention)
    yield Figure("GPT-2 small, output matrix of a block", "591 K", weights[f"{block}.attn.o"])
    yield Figure("GPT-2 small, MLP of a block", "4.72 M", weights[f"{block}.mlp"])
    yield Figure("GPT-2 small, a block", "7,087,872", weights[block])
    yield Figure("GPT-2 small, a block", "7.09 M", weights[block])
    yield Figure("GPT-2 small, a block", "7.1 M", weights[block])
    yield Figure("GPT-2 small, 12 d² for a block", "7.08 M", _blocks("gpt2") // card.n_layers)
    yield Figure("GPT-2 small, final norm", "1,536", weights["decoder.final_norm"])
    yield Figure("GPT-2 small, token table", "38,597,376", weights["embed"])
    yield Figure("GPT-2 small, positions", "786,432", weights["decoder.position.table"])
    yield Figure("GPT-2 small, head (tied)", "0", weights["head"])
    yield Figure("GPT-2 small, all", "124,439,808", gpt2.params)
    llama = parts("llama-3-8b")
    block_8b = next(p.params for path, p, _ in llama.walk() if path == block)
    yield Figure("Llama 3 8B, a block", "218,112,000", block_8b)
    yield Figure("Llama 3 8B, a block", "218 M", block_8b)
    yield Figure("Llama 3 8B, all", "8,030,261,248", llama.params)
    yield Figure("Llama 3 8B, all", "8.03 B", llama.params)
    yield Figure("a norm's parameters, LayerNorm over RMSNorm", "2 x", LayerNorm(768, 1e-5).params // 768)
    why = "of RMSNorm; the two LayerNorms of a GPT-2 layer have 4 d"
    norms = counted("gpt2").per_layer[0].by_part["norm"]
    yield Figure("norms of a layer of GPT-2 small, 2 d", "1,536", norms, CONDITION, why)
    router = next(part for _, part, role in parts("mixtral-8x7b-v0.1").walk() if role == "router")
    per_d = f"{router.params // sc.card('mixtral-8x7b-v0.1').d_model} d"
    yield Figure("Mixtral 8x7B, a router of E = 8 experts, d E", "8 d", per_d)


_ROWS = (
    "embed",
    "decoder.position.table",
    *(f"decoder.blocks.0.attn.{letter}" for letter in "qkvo"),
    "decoder.blocks.0.mlp",
    "decoder.blocks.0",
    "decoder.final_norm",
    "head",
)


def _exercises() -> Iterator[Figure]:
    heads = {"kind": "multi_head", "n_heads": 16}
    model = made(n_layers=24, d_model=1536, vocab_size=32000, attention=heads)
    found = count(model)
    yield Figure("L 24, d 1536, V 32000: 12 L d²", "679,477,248", found.shortcut - model.embed.params)
    yield Figure("V d", "49,152,000", model.embed.params)
    yield Figure("12 L d² + V d", "728,629,248", found.shortcut)
    yield Figure("12 L d² + V d", "0.73 B", found.shortcut)
    share = f"{float(100 * Fraction(found.shortcut, parts('gpt2-xl').params)):.0f} % of it"
    yield Figure("beside GPT-2 XL", "roughly its size", share, WRONG, "less than half")
    walk = made(n_layers=32, d_model=4096, vocab_size=32000, attention=_HEADS)
    tied = count(walk)
    yield Figure("L 32, d 4096, V 32000, MLP of 4 d: in the blocks", "6,442,450,944", tied.shortcut - walk.embed.params)
    yield Figure("tied", "6,573,522,944", tied.shortcut)
    yield Figure("untied", "6,704,594,944", tied.shortcut + walk.embed.params)
    for d, said in ((128, "196,608"), (256, "786,432"), (512, "3,145,728"), (1024, "12,582,912")):
        block = _plain_block(d)
        why = f"without biases and norms; the block that is written there has {block.params:,}, 13 d more"
        yield Figure(f"a block of d {d}, 4 d² + 8 d²", said, _matrices(block), CONDITION, why)
    share = Fraction(4 * 512**2, _matrices(_plain_block(512)))
    yield Figure("attention's share of that", "33 %", share)
    yield Figure("MLP's share of that", "67 %", 1 - share)


def _plain_block(d: int) -> Part:
    biased = {"kind": "multi_head", "n_heads": 8, "bias": ["q", "k", "v", "o"]}
    mlp = {"kind": "plain", "act": "gelu", "bias": True}
    model = made(d_model=d, vocab_size=1, attention=biased, mlp=mlp)
    return next(part for path, part, _ in model.walk() if path == "decoder.blocks.0")


def _matrices(block: Part) -> int:
    return sum(shape[0] * shape[1] for shape in block.named_weights.values() if len(shape) == 2)


def _original() -> Iterator[Figure]:
    for name, said in (("transformer-base", "65 M"), ("transformer-big", "213 M")):
        model = parts(name)
        why = (
            f"no one vocabulary gives both of the paper's figures: 65 M need {_rows('transformer-base', 65):,} rows,"
            f" 213 M {_rows('transformer-big', 213):,}"
        )
        yield Figure(name, said, model.params, WRONG, why)


def _rows(name: str, millions: int) -> int:
    """Rows of the one table with which the model would have so many parameters."""
    model = parts(name)
    return (millions * 10**6 - model.params + model.embed.params) // model.d_model
