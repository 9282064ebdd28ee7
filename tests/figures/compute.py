"""Quoted FLOPs, shares of attention, time and money."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from tests.figures.quoted import CONDITION, ROUNDING, SAME, WRONG, Figure, Section, counted, flops_of, made, parts

from scantling.numbers.cost import run, work_of
from scantling.numbers.flops import MIX, Flops, flops, half_at
from scantling.numbers.hardware import device
from scantling.parts.part import Workload
from scantling.parts.transformer import Transformer

D = 4096


def sections() -> Iterator[Section]:
    """The tables about arithmetic."""
    text = "A plain block of d 4096 with an MLP of 4 d: `24 d² + 4 T d` FLOPs per token and layer, forward."
    yield Section("FLOPs of a layer", text, "scantling flops CARD.yaml --tokens T", [*_layer()])
    text = "Scores and mix over all of the blocks' FLOPs, the whole T x T square charged."
    yield Section("Attention's share", text, "scantling flops CARD.yaml", [*_shares()])
    text = "`2 N` forward and `6 N` with the backward, per token, beside the matrix products themselves."
    yield Section("2 N and 6 N", text, "scantling flops MODEL`, `scantling examine MODEL", [*_rules()])
    text = "One head of width 64, scores and mix of a whole text."
    yield Section("One head", text, "scantling flops CARD.yaml", [*_head()])
    text = "7 billion parameters, 2 trillion tokens, 1,024 H100 at 400 TFLOP/s each, 2 dollars an hour."
    command = "scantling cost --params 7B --train-tokens 2T --devices 1024 --device h100 --tflops 400 --price 2"
    yield Section("What training costs", text, command, [*_cost()])


def _textbook(tokens: int) -> tuple[Transformer, Flops]:
    model = made(d_model=D, vocab_size=1, attention={"kind": "multi_head", "n_heads": 32})
    return model, flops(model, Workload(tokens=tokens))


def _layer() -> Iterator[Figure]:
    _, one = _textbook(1)
    by_part = one.by_part
    yield Figure("q, k, v and o, 8 d²", "8 d²", _in_d(by_part["attention projections"], 2))
    yield Figure("MLP, 16 d²", "16 d²", _in_d(by_part["mlp"], 2))
    yield Figure("scores and mix at T = 1, 4 T d", "4 d", _in_d(by_part[MIX], 1))
    rest = by_part["attention projections"] + by_part["mlp"]
    yield Figure("24 d²", "4.0e8", rest)
    for tokens, said in ((2048, "3.4e7"), (8192, "1.3e8"), (32768, "5.4e8"), (131072, "2.1e9")):
        yield Figure(f"4 T d at T = {tokens}", said, _textbook(tokens)[1].by_part[MIX] // tokens)
    blocks = flops_of("gpt2", tokens=1).by_part
    why = f"{_percent(Fraction(blocks['head'], sum(blocks.values())))} of a forward pass of GPT-2 small on one token"
    why += f", {_percent(_head_share('llama-3-8b'))} of Llama 3 8B, {_percent(_head_share('llama-2-7b'))} of LLaMA-2 7B"
    told = "projections, scores and mix, MLP, and the head's 2 V d"
    yield Figure("what a forward pass consists of", "projections, scores and mix, MLP", told, WRONG, why)


def _in_d(count: int, power: int) -> str:
    return f"{count // D**power} d{'²' if power == 2 else ''}"


def _percent(share: Fraction) -> str:
    return f"{float(100 * share):.1f} %"


def _head_share(name: str) -> Fraction:
    by_part = flops_of(name, tokens=1).by_part
    return Fraction(by_part["head"], sum(by_part.values()))


def _share(found: Flops, convention: str = "full") -> Fraction:
    costs = {role: getattr(cost, convention) for role, cost in found.costs.items() if role != "head"}
    return Fraction(costs[MIX], sum(costs.values()))


def _shares() -> Iterator[Figure]:
    for tokens, said in ((2048, "7.7 %"), (8192, "25 %"), (16384, "40.0 %"), (32768, "57.1 %"), (131072, "84.2 %")):
        yield Figure(f"d 4096, T {tokens}", said, _share(_textbook(tokens)[1]))
    model, _ = _textbook(1)
    half = half_at(model)
    low, high = (_percent(_share(_textbook(tokens)[1])) for tokens in (2048, 8192))
    yield Figure("at 2 k to 8 k", "10-25 %", f"{low} to {high}", WRONG, "the same table has 7.7 % at 2,048")
    why = f"over the full square; with causal work only, where flash kernels skip the rest, {half['causal']:,}"
    yield Figure("more than half", "past 32 k", f"from T = 6 d = {half['full']:,}", WRONG, why)
    short, middle, long = (_share(_textbook(tokens)[1]) for tokens in (8192, 16384, 32768))
    straight = short + (long - short) * Fraction(16384 - 8192, 32768 - 8192)
    why = f"a straight line between the rows for 8,192 and 32,768 gives {_percent(straight)}, not far below"
    said, told = "well below the true value", f"{float(100 * (middle - straight)):.1f} points below"
    yield Figure("interpolated to T = 16,384", said, told, WRONG, why)
    causal = [_percent(_share(_textbook(tokens)[1], "causal")) for tokens in (2048, 8192, 16384, 32768, 131072)]
    why = f"causal work is half of the square, and the shares are then {', '.join(causal)}"
    yield Figure("the table above, for causal kernels", "the same", "lower", CONDITION, why)
    condition = f"at T = d the share is {_percent(_share(_textbook(D)[1]))}: what has to be small is T / 6 d"
    yield Figure("24 d² + 4 T d is 2 N a layer when", "T << d", "T << 6 d", CONDITION, condition)


def _rules() -> Iterator[Figure]:
    yield Figure("GPT-2 small, 2 N", "0.25 GFLOP", flops_of("gpt2").rule_2n)
    yield Figure("Llama 3 8B, 2 N", "16 GFLOP", flops_of("llama-3-8b").rule_2n)
    exact = flops_of("llama-3-8b", tokens=2048).forward // 2048
    why = "2 N counts the input table, which does no arithmetic, and leaves out scores and mix; here they nearly cancel"
    yield Figure("Llama 3 8B, a token of 2,048, counted", "16 GFLOP", exact, CONDITION, why)
    exact = flops_of("gpt2", tokens=1024).forward // 1024
    more = f"scores and mix are {_percent(Fraction(flops_of('gpt2', tokens=1024).by_part[MIX], 1024 * exact))} of it"
    yield Figure("GPT-2 small, a token of 1,024, counted", "0.25 GFLOP", exact, CONDITION, more)
    tokens = 4096
    found = flops_of("llama-2-7b", tokens=tokens)
    six = Fraction(found.rule_6n, found.training) - 1
    why = f"6 N is {float(100 * six):.0f} % off at T = 4,096 over the full square, {_off(found)} % over the causal half"
    said, told = (f"{n / tokens / 1e9:.1f} GFLOP" for n in (found.rule_6n, found.training))
    yield Figure("LLaMA-2 7B, T 4,096, training per token: 6 N", said, told, CONDITION, why)
    yield Figure("forward and backward over the forward", "3 x", Fraction(found.training, found.forward))
    mixtral = counted("mixtral-8x7b-v0.1")
    yield Figure("Mixtral 8x7B, N of all experts", "46.7 B", mixtral.total)
    yield Figure("Mixtral 8x7B, N of the active ones", "12.9 B", mixtral.active)


def _off(found: Flops) -> str:
    return f"{float(100 * (Fraction(found.rule_6n, found.training_causal) - 1)):.0f}"


def _head() -> Iterator[Figure]:
    entries = {512: "0", 2048: "4", 8192: "67", 32768: "1,074"}
    for tokens, said in {512: "0.1", 2048: "1.1", 8192: "17.2", 32768: "274.9"}.items():
        model = made(d_model=64, vocab_size=1, attention={"kind": "multi_head", "n_heads": 1})
        yield Figure(f"T {tokens}, scores and mix", f"{said} GFLOP", flops(model, Workload(tokens=tokens)).by_part[MIX])
        rows = model.steps(Workload(tokens=tokens, kernel="reference"))
        scores = next(step.numel for step in rows if step.path.endswith(":scores"))
        verdict, why = (CONDITION, "to whole millions; there are a quarter of one") if tokens == 512 else (SAME, "")
        yield Figure(f"T {tokens}, entries of the scores", f"{entries[tokens]} M", scores, verdict, why)
    once, twice = (flops(model, Workload(tokens=tokens)).by_part[MIX] for tokens in (4096, 8192))
    yield Figure("twice the length", "4 x", Fraction(twice, once))


def _cost() -> Iterator[Figure]:
    work = work_of(7 * 10**9, 2 * 10**12).total("6nd")
    peak = device("h100").peak("bf16")
    plan = run(work, 1024, peak, tflops=400)
    seconds = Fraction(work, 1024 * 400 * 10**12)
    assert abs(plan.seconds - seconds) < 1e-6
    yield Figure("6 N D", "8.4e22", work)
    yield Figure("time", "2.05e5 s", seconds)
    yield Figure("time", "2.4 days", seconds)
    yield Figure("time", "57 h", seconds)
    yield Figure("device-hours at 2 dollars", "about $117 k", seconds / 3600 * 1024 * 2)
    yield Figure("share of the dense peak in bf16", "40 %", Fraction(400 * 10**12) / Fraction(peak))
    exact = work_of(parts("llama-2-7b").params, 2 * 10**12).total("6nd")
    why = f"with the N of LLaMA-2 7B, {parts('llama-2-7b').params:,}, instead of 7 billion"
    yield Figure("6 N D", "8.4e22", exact, CONDITION, why)
    why = "nearer to 7"
    yield Figure("a loss at every position over one at 15 % of them", "6 x", 1 / Fraction(15, 100), ROUNDING, why)
