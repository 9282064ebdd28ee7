"""Small arithmetic and small models that are run: what norms, heads, masks and targets do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from tests.figures.quoted import Figure, Section, made

from scantling.parts.attention import Attention
from scantling.parts.leaf import LayerNorm, RMSNorm
from scantling.parts.transformer import Transformer
from scantling.tensor.context import Context

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


def sections() -> Iterator[Section]:
    """The tables of arithmetic on small vectors, and of what a block without masks and positions does."""
    text = "Arithmetic on a vector of two numbers, and which heads share."
    yield Section("Small arithmetic", text, "sc.assemble(card).build()", [*_arithmetic()])
    text = "A stack as it is often written down to explain attention: no mask, no positions."
    yield Section("A block without mask and positions", text, "sc.assemble(card).build()", [*_unmasked()])


def _arithmetic() -> Iterator[Figure]:
    x = torch.tensor([1.0, 3.0])
    centred = LayerNorm(2, 1e-12).build()(x)
    yield Figure("LayerNorm of [1, 3]", "[-1, 1]", _rounded(centred))
    sized = RMSNorm(2, 1e-12).build()(x) * 5**0.5
    yield Figure("RMSNorm of [1, 3]", "[1, 3] / sqrt 5", f"{_rounded(sized)} / sqrt 5")
    groups = _kv_heads(8, 2)
    yield Figure("8 query heads over 2: those that read KV head 0", "0 to 3", _span(groups, 0))
    yield Figure("8 query heads over 2: those that read KV head 1", "4 to 7", _span(groups, 1))
    yield Figure("targets of [BOS, A, B] in a text that ends with EOS", "[A, B, EOS]", _targets())


def _rounded(x: Any) -> str:
    return f"[{', '.join(f'{value:.0f}' for value in x.tolist())}]"


def _kv_heads(n_heads: int, n_kv_heads: int) -> list[int]:
    """The KV head of each query head, by giving every KV head a value of its own."""
    part = Attention(n_heads, n_heads, n_kv_heads, 1, 1.0, biases=frozenset("v"))
    net = part.build()
    with torch.no_grad():
        net.v.weight.zero_()
        net.v.bias.copy_(torch.arange(n_kv_heads))
        net.o.weight.copy_(torch.eye(n_heads))
        read = net(torch.zeros(1, 1, n_heads), Context(1, 1, torch.device("cpu")))
    return [round(value) for value in read[0, 0].tolist()]


def _span(groups: list[int], kv_head: int) -> str:
    reading = [i for i, found in enumerate(groups) if found == kv_head]
    return f"{reading[0]} to {reading[-1]}"


def _targets() -> str:
    """The tokens that the loss of a text asks for, found by trying every shift."""
    tokens, ids = ["BOS", "A", "B", "EOS"], torch.tensor([[0, 1, 2, 3]])
    model, net = _small()
    with torch.inference_mode():
        logits = net(ids)
        _, loss = model.outcome(net, ids, logits, Context.of(ids))
    table = logits[0].log_softmax(-1)
    for shift in range(4):
        wanted = ids[0, shift:]
        if torch.isclose(-table[: len(wanted)].gather(1, wanted[:, None]).mean(), loss):
            return f"[{', '.join(tokens[shift:])}]"
    return "none"


def _unmasked() -> Iterator[Figure]:
    plain, causal = _logits(family="encoder"), _logits()
    order, changed = torch.tensor([4, 2, 7, 0, 6, 1, 3, 5]), IDS.clone()
    changed[0, -1] = 8
    moves = lambda f: _yes(not torch.equal(f(IDS)[:, 0], f(changed)[:, 0]))  # noqa: E731
    turns = lambda f: _yes(torch.allclose(f(IDS[:, order]), f(IDS)[:, order], atol=1e-5))  # noqa: E731
    yield Figure("without a mask, the last token moves the first position", "yes", moves(plain))
    yield Figure("with a causal mask", "no", moves(causal))
    yield Figure(
        "without mask and positions, another order of the tokens only reorders the output", "yes", turns(plain)
    )
    yield Figure("with a causal mask, still without positions", "no", turns(causal))
    bag = _logits(family="encoder", n_layers=0, head={"kind": "embedding", "pool": "mean"})
    same = torch.allclose(bag(IDS), bag(IDS[:, order]), atol=1e-6)
    yield Figure('a table and a mean: "dog bites man" is "man bites dog"', "yes", _yes(same))


def _yes(found: bool) -> str:
    return "yes" if found else "no"


def _small(**keys: Any) -> tuple[Transformer, Any]:
    heads = {"kind": "multi_head", "n_heads": 4}
    model = made(**{"d_model": 16, "vocab_size": 10, "n_layers": 2, "attention": heads, "tied": False, **keys})
    net = model.build(seed=1)
    with torch.no_grad():
        for weight in net.parameters():
            weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(2)) * 0.2)
    return model, net


def _logits(**keys: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    _, net = _small(**keys)

    def run(ids: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            return net(ids)  # type: ignore[no-any-return]

    return run
