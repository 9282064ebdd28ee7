"""The laws of the house, over cards that together use every registered part, and over sampled legal cards."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.cards.rest import REST
from tests.cards.strategies import any_cards

import scantling as sc
from scantling.cards import Card
from scantling.cards.read import from_dict
from scantling.parts.dims import Dim
from scantling.parts.part import Part, Workload, cycles, total
from scantling.study.verify import verify
from scantling.tensor.cache import Cache
from scantling.tensor.context import Context

CLOSE = {"atol": 2e-4, "rtol": 1e-4}

BASE: dict[str, Any] = {
    "name": "law",
    "family": "decoder",
    "n_layers": 2,
    "d_model": 24,
    "vocab_size": 31,
    "context": 32,
    "attention": {"kind": "multi_head", "n_heads": 4, "n_kv_heads": 2, "d_head": 6},
    "position": {"kind": "rope", "theta": 10000.0},
    "norm": {"kind": "rmsnorm", "eps": 1e-5},
    "mlp": {"kind": "gated", "act": "silu", "d_ff": 20},
    "tied": False,
}
EXPERTS = {"kind": "moe", "n_experts": 4, "top_k": 2, "expert": {"kind": "gated", "act": "silu", "d_ff": 12}}
CHANGES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2": {
        "attention": {"kind": "multi_head", "n_heads": 4, "bias": ["q", "k", "v", "o"], "scale_by_layer": True},
        "position": {"kind": "learned"},
        "norm": {"kind": "layernorm", "eps": 1e-5},
        "mlp": {"kind": "plain", "act": "gelu_tanh", "bias": True},
        "tied": True,
    },
    "mixtral": {"mlp": EXPERTS},
    "a shared expert with a gate": {
        "mlp": {**EXPERTS, "shared": {"kind": "gated", "act": "silu", "d_ff": 10}, "shared_gate": True}
    },
    "experts with biases": {
        "mlp": {**EXPERTS, "normalize": False, "expert": {"kind": "plain", "act": "relu", "d_ff": 9, "bias": True}}
    },
    "window": {"attention": {"kind": "multi_head", "n_heads": 4, "n_kv_heads": 1, "d_head": 6, "window": 3}},
    "chunks": {
        "attention": {"kind": "multi_head", "n_heads": 4, "n_kv_heads": 2, "d_head": 6, "chunk": 4},
        "pattern": [{}, {"attention": {"chunk": None}, "position": {"kind": "none"}}],
    },
    "band and stride": {
        "attention": {"kind": "multi_head", "n_heads": 4, "d_head": 6, "window": 3, "stride": {"every": 4}},
        "pattern": [{"attention": {"window": None}}, {}],
    },
    "fixed blocks": {
        "attention": {
            "kind": "multi_head",
            "n_heads": 4,
            "n_kv_heads": 2,
            "d_head": 6,
            "chunk": 4,
            "stride": {"every": 4, "last": 2},
        },
        "pattern": [{"attention": {"chunk": None}}, {}],
    },
    "prefix": {"attention": {"kind": "multi_head", "n_heads": 4, "d_head": 6, "prefix": True, "window": 7}},
    "post-norm waves": {
        "position": {"kind": "sinusoidal"},
        "norm": {"kind": "layernorm", "eps": 1e-5, "at": ["out"], "bias": False},
        "mlp": {"kind": "plain", "act": "relu", "d_ff": 20},
    },
    "sandwich": {"norm": {"kind": "rmsnorm", "eps": 1e-6, "at": ["in", "res"]}, "head": {"softcap": 5.0}},
    "no position": {"position": {"kind": "none"}, "embedding": {"scale": 4.5, "vocab_multiple": 8}},
    "partial neighbours": {"position": {"kind": "rope", "theta": 100.0, "d_rotary": 4, "interleaved": True}},
    "no layers": {"n_layers": 0},
    "parallel, one norm": {"residual": {"parallel": True, "shared_norm": True}},
    "parallel, two norms": {"residual": {"parallel": True}, "norm": {"kind": "layernorm", "eps": 1e-5}},
    "added to the norm": {"residual": {"from_norm": True}, "embedding": {"norm": {"kind": "layernorm", "eps": 1e-5}}},
    "alibi": {"position": {"kind": "alibi"}, "attention": {"kind": "multi_head", "n_heads": 6, "d_head": 4}},
    "alibi as falcon": {
        "position": {"kind": "alibi", "scaled": True, "rounded": True},
        "attention": {"kind": "multi_head", "n_heads": 3, "d_head": 5, "window": 4},
    },
    "gemma": {
        "attention": {
            "kind": "multi_head",
            "n_heads": 4,
            "n_kv_heads": 2,
            "d_head": 6,
            "softcap": 4.0,
            "qk_norm": {"kind": "rmsnorm", "eps": 1e-6, "plus_one": True},
        },
        "norm": {"kind": "rmsnorm", "eps": 1e-6, "plus_one": True, "at": ["in", "res"]},
        "position": {"kind": "rope", "theta": 1e4, "scaling": {"kind": "linear", "factor": 4.0}},
        "pattern": [{"attention": {"window": 3}, "position": {"theta": 100.0, "scaling": None}}, {}],
        "embedding": {"scale": 24**0.5, "scale_rounded": True},
        "n_layers": 3,
    },
    "norm over the width": {
        "attention": {
            "kind": "multi_head",
            "n_heads": 4,
            "n_kv_heads": 2,
            "d_head": 6,
            "qk_norm": {"kind": "rmsnorm", "eps": 1e-6, "over": "width"},
        },
        "norm": {"kind": "rmsnorm", "eps": 1e-6, "at": ["res"]},
    },
    "norm per head": {
        "attention": {
            "kind": "multi_head",
            "n_heads": 4,
            "n_kv_heads": 2,
            "d_head": 6,
            "clip": 0.7,
            "qk_norm": {"kind": "layernorm", "eps": 1e-6, "over": "each_head"},
        },
    },
    "sinks": {
        "attention": {"kind": "multi_head", "n_heads": 4, "n_kv_heads": 2, "d_head": 6, "sinks": True, "window": 5},
        "mlp": {
            **EXPERTS,
            "bias": True,
            "scores": "top_softmax",
            "normalize": False,
            "expert": {"kind": "gated", "act": "silu", "d_ff": 12, "bias": True, "clamp": {"limit": 1.0, "alpha": 1.7}},
        },
    },
    "groups of experts": {
        "mlp": {
            **EXPERTS,
            "n_experts": 6,
            "scores": "sigmoid",
            "selection_bias": True,
            "scale": 2.5,
            "groups": 3,
            "top_groups": 2,
            "group_score": "top2",
            "shared": {"kind": "gated", "act": "silu", "d_ff": 8},
        },
        "pattern": [{"times": 1, "mlp": {"kind": "gated", "act": "silu", "d_ff": 20}}, {"times": 2}],
        "n_layers": 3,
    },
    "latent": {
        "attention": {
            "kind": "latent",
            "n_heads": 3,
            "kv_rank": 10,
            "d_nope": 5,
            "d_rope": 4,
            "d_value": 7,
            "eps": 1e-6,
        },
        "position": {
            "kind": "rope",
            "theta": 1e4,
            "interleaved": True,
            "scaling": {
                "kind": "yarn",
                "factor": 4.0,
                "trained_length": 8,
                "mscale": 0.707,
                "mscale_all_dim": 0.707,
            },
        },
    },
    "latent, queries too": {
        "attention": {
            "kind": "latent",
            "n_heads": 4,
            "kv_rank": 8,
            "q_rank": 9,
            "d_nope": 4,
            "d_rope": 6,
            "d_value": 3,
            "eps": 1e-6,
            "scale": 0.3,
        },
        "position": {"kind": "rope", "theta": 1e4, "d_rotary": 4},
        "pattern": [{}, {"position": {"kind": "none"}}],
    },
    "tied head with a shift": {"tied": True, "head": {"bias": True}},
    "narrow table": {"embedding": {"width": 10}, "tied": True, "head": {"bias": True, "scale": 0.5}},
    "narrow table, own head": {
        "embedding": {"width": 10, "vocab_multiple": 8},
        "position": {"kind": "learned", "offset": 2},
    },
    "positions from the mask": {"position": {"kind": "learned", "offset": 2, "from_mask": True}},
    "linear": {"position": {"kind": "rope", "theta": 1e4, "scaling": {"kind": "linear", "factor": 4.0}}},
    "yarn": {
        "position": {"kind": "rope", "theta": 1e4, "scaling": {"kind": "yarn", "factor": 4.0, "trained_length": 8}}
    },
    "llama3": {
        "position": {
            "kind": "rope",
            "theta": 1e4,
            "scaling": {
                "kind": "llama3",
                "factor": 8.0,
                "trained_length": 16,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            },
        }
    },
    "dynamic, short": {
        "position": {"kind": "rope", "theta": 1e4, "scaling": {"kind": "dynamic", "factor": 4.0, "trained_length": 16}}
    },
    "longrope, short": {
        "position": {
            "kind": "rope",
            "theta": 1e4,
            "scaling": {
                "kind": "longrope",
                "trained_length": 16,
                "short_factor": [1.0, 1.1, 1.2],
                "long_factor": [1.0, 2.0, 3.0],
            },
        }
    },
    "t5's bias in a decoder": {"position": {"kind": "relative", "buckets": 8, "max_distance": 9}},
}
LAYERNORM = {"kind": "layernorm", "eps": 1e-5}
POST = LAYERNORM | {"at": ["out"]}
BIASED = {"kind": "multi_head", "n_heads": 4, "bias": ["q", "k", "v", "o"]}
BERT = {"attention": BIASED, "norm": POST, "mlp": {"kind": "plain", "act": "gelu", "d_ff": 20, "bias": True}}
ENCODERS: dict[str, dict[str, Any]] = {
    "bert": {
        **BERT,
        "position": {"kind": "learned"},
        "embedding": {"types": 2, "norm": LAYERNORM},
        "head": {"bias": True, "transform": {"act": "gelu", "norm": True}},
        "tied": True,
    },
    "roberta": {**BERT, "position": {"kind": "learned", "offset": 4, "pad_id": 3}, "head": {"kind": "none"}},
    "electra": {
        **BERT,
        "position": {"kind": "learned"},
        "embedding": {"types": 2, "norm": LAYERNORM, "width": 10, "widen": "after", "widen_bias": True},
        "head": {"kind": "replaced", "bias": True, "transform": {"act": "gelu"}},
    },
    "modernbert": {
        "norm": LAYERNORM | {"bias": False, "skip_first": True},
        "pattern": [{}, {"attention": {"window": 3}, "position": {"theta": 100.0}}],
        "n_layers": 3,
        "head": {"kind": "tokens", "n_labels": 5, "bias": True, "scores": "sigmoid"},
    },
    "sentences": {
        **BERT,
        "position": {"kind": "learned"},
        "embedding": {"types": 2, "norm": LAYERNORM},
        "head": {"kind": "embedding", "pool": "mean", "normalize": True, "transform": {"act": "tanh"}, "spare": True},
    },
    "pooler": {"position": {"kind": "alibi"}, "head": {"kind": "embedding", "transform": {"act": "tanh"}}},
    "text labels": {"position": {"kind": "none"}, "head": {"kind": "sequence", "n_labels": 3, "pool": "last"}},
    "t5 encoder": {"position": {"kind": "relative", "buckets": 8, "max_distance": 9}, "mlp": EXPERTS},
}
SEQ2SEQ: dict[str, dict[str, Any]] = {
    "2017": {
        "position": {"kind": "sinusoidal"},
        "norm": POST,
        "mlp": {"kind": "plain", "act": "relu", "d_ff": 20, "bias": True},
        "embedding": {"scale": 24**0.5},
        "tied": True,
    },
    "t5": {
        "position": {"kind": "relative", "buckets": 8, "max_distance": 9},
        "attention": {"kind": "multi_head", "n_heads": 3, "d_head": 5, "scale": 1.0},
        "head": {"scale": 0.3},
        "tied": True,
    },
    "bart": {
        **BERT,
        "position": {"kind": "learned", "offset": 2},
        "embedding": {"norm": LAYERNORM},
        "head": {"bias": True, "bias_fixed": True},
        "encoder": {"n_layers": 1},
        "decoder": {"attention": {"n_heads": 3}, "mlp": {"d_ff": 12}, "cross": {"n_heads": 2, "n_kv_heads": 1}},
    },
    "marian": {
        "position": {"kind": "sinusoidal", "halves": True, "table": True},
        "norm": POST,
        "embedding": {"shared": False},
        "head": {"bias": True},
    },
    "two modern stacks": {
        "encoder": {"mlp": EXPERTS},
        "decoder": {"n_layers": 1, "attention": {"window": 4}, "mlp": {"d_ff": 16}},
    },
}
CARDS = {name: from_dict({**BASE, **change}, name) for name, change in (CHANGES | REST).items()}
CARDS |= {name: from_dict({**BASE, "family": "encoder", **change}, name) for name, change in ENCODERS.items()}
CARDS |= {name: from_dict({**BASE, "family": "encoder-decoder", **change}, name) for name, change in SEQ2SEQ.items()}
WITH_DECODER = {name: card for name, card in CARDS.items() if card.family != "encoder"}


POOLED = ("sequence", "embedding")
"""Heads that give one result per row."""


def registered() -> set[type[Part]]:
    """Every final part that exists."""
    found, todo = set(), [Part]
    while todo:
        kind = todo.pop()
        todo += kind.__subclasses__()
        if "__dataclass_fields__" in kind.__dict__ and kind.__module__.startswith("scantling."):
            found.add(kind)
    return found


def strong(card: Card, seed: int = 3) -> Any:
    """A net whose weights are large enough that a wrong shape of the computation shows."""
    net = sc.assemble(card).build(seed=seed)
    with torch.no_grad():
        for weight in net.parameters():
            weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed)) * 0.2)
    return net


def ids_of(card: Card, batch: int, tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, card.vocab_size, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def source_of(net: Any, ids: torch.Tensor) -> torch.Tensor | None:
    """A source for each row, told by its first token; None where there is one stack."""
    if not net.part.two_stacks:
        return None
    return (ids[:, :1] + 5 * torch.arange(7)) % net.part.head.vocab_size


def run(net: Any, ids: torch.Tensor, source: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
    return net(ids, Context.of(ids, **options), source_of(net, ids) if source is None else source)


def continued(net: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    """A pass over more ids, whose cache holds what came before."""
    return net(ids, Context.of(ids, **options))


def test_the_cards_use_every_registered_part() -> None:
    used = {type(part) for card in CARDS.values() for _, part, _ in sc.assemble(card).walk()}
    walked = [part for card in CARDS.values() for _, part, _ in sc.assemble(card).walk()]
    used |= {type(part.position) for part in walked if hasattr(part, "position")}
    assert registered() == used


def check_declared_weights(card: Card) -> None:
    """Laws 1 and 2."""
    model = sc.assemble(card)
    net = model.build()
    assert {n: tuple(p.shape) for n, p in net.state_dict().items()} == model.named_weights | model.named_buffers
    assert {n: tuple(p.shape) for n, p in net.named_parameters()} == model.named_weights
    assert total(model.steps(Workload(tokens=4)), "params") == model.params == sum(p.numel() for p in net.parameters())


def check_execution(card: Card) -> None:
    """Laws 3 and 4, and 10's meta build: every row in order, FLOPs by torch's counter, cache bytes."""
    assert [row for row in verify(sc.assemble(card)) if not row.equal] == []


def check_gradients(card: Card) -> None:
    """Law 6."""
    net = strong(card).train()
    ids = ids_of(card, 2, 6)
    run(net, ids, training=True).sum().backward()
    without = [name for name, p in net.named_parameters() if p.requires_grad and p.grad is None]
    if card.head.spare:
        assert all(name.startswith("head.transform") for name in without)
    else:
        assert without == []


def check_cache(card: Card, cuts: list[int], kernel: str) -> None:
    """Law 7: whatever the cuts, the cached logits are those of one pass, and the bytes are the declared ones."""
    net, model = strong(card), sc.assemble(card)
    ids = ids_of(card, 2, 12)
    whole = run(net, ids, kernel_name=kernel)
    w = Workload(batch=2, tokens=12, source=7)
    cache = Cache(model.named_state(w), torch.float32, "cpu")
    pieces = []
    for start, end in zip([0, *cuts], [*cuts, 12], strict=True):
        more = continued if start else run
        pieces.append(more(net, ids[:, start:end], cache=cache, kernel_name=kernel))
        cache.advance(end - start)
    torch.testing.assert_close(torch.cat(pieces, 1), whole, **CLOSE)
    assert cache.nbytes == 4 * sum(torch.Size(shape).numel() for shape in model.named_state(w).values())


def check_padding(card: Card) -> None:
    """Law 8: padding on either side, of the source too, and the neighbours of a row change no real token."""
    net = strong(card)
    pad = getattr(card.position, "pad_id", None)
    ids = ids_of(card, 3, 9)
    ids = ids if pad is None else ids.masked_fill(ids == pad, pad - 1)
    source = source_of(net, ids)
    alone = run(net, ids[:1, :6], source=None if source is None else source[:1])
    pooled = card.head.kind in POOLED
    for left in (0, 2, 3):
        row = ids_of(card, 3, 9, seed=7)
        row = row if pad is None else torch.full_like(row, pad)
        row[0, left : left + 6] = ids[0, :6]
        mask = torch.ones_like(row, dtype=torch.bool)
        mask[0] = False
        mask[0, left : left + 6] = True
        positions = None if pad is not None else (mask.long().cumsum(-1) - 1).clamp(min=0)
        options: dict[str, Any] = {"padding": mask, "positions": positions}
        if source is not None:
            # The source of the first row is the same, with three more columns that are none.
            longer = torch.cat((source, source[:, :3]), 1)
            options |= {"source": longer, "source_padding": (torch.arange(10) < 7).expand(3, 10)}
        padded = run(net, row, **options)
        torch.testing.assert_close(padded[:1] if pooled else padded[:1, left : left + 6], alone, **CLOSE)
        if getattr(card.position, "from_mask", False) and not any(layer.position for layer in card.pattern):
            assert torch.equal(run(net, row, **{**options, "positions": None})[:1], padded[:1])
    order = torch.tensor([2, 0, 1])
    torch.testing.assert_close(run(net, ids[order]), run(net, ids)[order], **CLOSE)


LENGTHS = ([5, 1, 3], [2, 7], [4, 4])
"""Of the documents in the rows of a pack; what is left of the third row is padding."""


def check_packing(card: Card, kernel: str = "fused") -> None:
    """Law 8: a document in a packed row, its source too, gives what it gives alone, whatever stands beside it."""
    net = strong(card)
    pad = getattr(card.position, "pad_id", None)
    ids = ids_of(card, 3, 9)
    ids = ids if pad is None else ids.masked_fill(ids == pad, pad - 1)
    numbers = torch.full((3, 9), -1)
    owners = torch.full((3, 14), -1)
    for row, lengths in enumerate(LENGTHS):
        numbers[row, : sum(lengths)] = torch.repeat_interleave(torch.tensor(lengths))
        # The source of document i has 5 - i tokens.
        owners[row, : sum(5 - i for i in range(len(lengths)))] = torch.repeat_interleave(
            torch.tensor([5 - i for i in range(len(lengths))])
        )
    source = ids_of(card, 3, 14, seed=4) if net.part.two_stacks else None
    options: dict[str, Any] = {"documents": numbers, "kernel_name": kernel}
    packed = run(net, ids, source=source, **options, source_documents=None if source is None else owners)
    for row, lengths in enumerate(LENGTHS):
        for i in range(len(lengths)):
            own = ids[row, numbers[row] == i][None]
            read = None if source is None else source[row, owners[row] == i][None]
            alone = run(net, own, source=read, kernel_name=kernel)
            torch.testing.assert_close(packed[row, numbers[row] == i][None], alone, **CLOSE)
    assert bool(packed.isfinite().all())


def outputs_and_stream(card: Card, kernel: str) -> tuple[torch.Tensor, torch.Tensor]:
    """What a net gives for a row of 8, and the vectors of those tokens that it depends on."""
    net = strong(card)
    ids = ids_of(card, 1, 8)
    stream: list[torch.Tensor] = []

    def keep(_: Any, __: Any, out: torch.Tensor) -> torch.Tensor:
        stream.append(out.detach().requires_grad_(True))
        return stream[-1]

    table = net.embed if card.embedding.shared else net.target_embed
    hook = table.register_forward_hook(keep)
    out = run(net, ids, kernel_name=kernel)
    hook.remove()
    # Of two uses of one table, the last is the target's.
    return out, stream[-1]


def check_causality(card: Card, kernel: str, own: bool = False) -> None:
    """Law 9: the gradient of every past logit with respect to a future vector is exactly 0.

    `own`: and with respect to its own vector it is not, which a norm over one channel cannot promise.
    """
    logits, stream = outputs_and_stream(card, kernel)
    for t in range(7):
        (grad,) = torch.autograd.grad(logits[0, t].square().sum(), stream, retain_graph=True)
        assert torch.count_nonzero(grad[0, t + 1 :]) == 0
        assert own is False or torch.count_nonzero(grad[0, t]) > 0
    window = getattr(card.attention, "window", None)
    if card.family == "decoder" and card.n_layers == 1 and window:
        (grad,) = torch.autograd.grad(logits[0, 7].square().sum(), stream)
        assert torch.count_nonzero(grad[0, : max(0, 8 - window)]) == 0


def check_both_ways(card: Card, kernel: str) -> None:
    """An encoder's every output depends on every token, before it and after it."""
    out, stream = outputs_and_stream(card, kernel)
    for t in range(8) if card.head.kind not in POOLED else [...]:
        weights = torch.linspace(0.5, 1.5, out[0, t].numel()).view(out[0, t].shape)
        (grad,) = torch.autograd.grad((out[0, t] * weights).sum(), stream, retain_graph=True)
        assert bool((grad[0].abs().sum(-1) > 0).all())


@pytest.mark.parametrize("card", CARDS.values(), ids=CARDS)
class TestEveryPart:
    def test_declared_weights(self, card: Card) -> None:
        check_declared_weights(card)

    def test_execution(self, card: Card) -> None:
        check_execution(card)

    def test_gradients(self, card: Card) -> None:
        check_gradients(card)

    def test_padding_and_neighbours(self, card: Card) -> None:
        check_padding(card)

    @pytest.mark.parametrize("kernel", ["fused", "reference"])
    def test_packing(self, card: Card, kernel: str) -> None:
        if card.head.kind in POOLED:
            with pytest.raises(sc.ScantlingInputError, match="give each text a row of its own"):
                check_packing(card, kernel)
        else:
            check_packing(card, kernel)

    def test_kernels_agree(self, card: Card) -> None:
        net, ids = strong(card), ids_of(card, 2, 9)
        torch.testing.assert_close(run(net, ids), run(net, ids, kernel_name="reference"), **CLOSE)

    def test_a_copy_is_independent_and_equal(self, card: Card) -> None:
        net, ids = strong(card), ids_of(card, 1, 5)
        twin = copy.deepcopy(net)
        assert torch.equal(run(twin, ids), run(net, ids))
        with torch.no_grad():
            twin.embed.weight.add_(1.0)
        assert not torch.equal(run(twin, ids), run(net, ids))

    def test_it_compiles_without_a_graph_break(self, card: Card) -> None:
        torch._dynamo.reset()
        net, ids = strong(card), ids_of(card, 1, 5)
        compiled = torch.compile(net, fullgraph=True, backend="eager")
        source = source_of(net, ids)
        torch.testing.assert_close(compiled(ids, None, source), net(ids, None, source))

    def test_the_same_seed_builds_the_same_weights(self, card: Card) -> None:
        model = sc.assemble(card)
        one, two, other = (model.build(seed=seed).state_dict() for seed in (1, 1, 2))
        assert all(torch.equal(one[name], two[name]) for name in one)
        assert not all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("card", WITH_DECODER.values(), ids=WITH_DECODER)
class TestEveryDecoder:
    @pytest.mark.parametrize("kernel", ["fused", "reference"])
    def test_cache(self, card: Card, kernel: str) -> None:
        check_cache(card, [5, 6, 7, 10], kernel)

    @pytest.mark.parametrize("kernel", ["fused", "reference"])
    def test_no_future(self, card: Card, kernel: str) -> None:
        check_causality(card, kernel, own=True)


@pytest.mark.parametrize("kernel", ["fused", "reference"])
@pytest.mark.parametrize("name", ENCODERS)
def test_an_encoder_reads_both_ways(name: str, kernel: str) -> None:
    check_both_ways(CARDS[name], kernel)


def test_an_encoder_has_no_cache() -> None:
    model = sc.assemble(CARDS["bert"])
    assert model.named_state(Workload(tokens=5)) == {}
    with pytest.raises(sc.ScantlingInputError, match="an encoder reads both ways"):
        list(model.steps(Workload(past=3)))


SAMPLED = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
CUTS = st.lists(st.integers(1, 11), max_size=4, unique=True).map(sorted)


def sampled_cards() -> st.SearchStrategy[Card]:
    """Legal cards with room for the lengths used here."""
    return any_cards().map(lambda data: from_dict({**data, "context": max(data["context"], 16)}, "sampled"))


@SAMPLED
@given(sampled_cards())
def test_sampled_cards_weigh_what_they_declare(card: Card) -> None:
    check_declared_weights(card)


@SAMPLED
@given(sampled_cards())
def test_sampled_cards_do_what_they_declare(card: Card) -> None:
    check_execution(card)


@SAMPLED
@given(sampled_cards(), CUTS, st.sampled_from(["fused", "reference"]))
def test_sampled_cards_keep_the_cache_exact(card: Card, cuts: list[int], kernel: str) -> None:
    if card.family != "encoder":
        check_cache(card, cuts, kernel)


@SAMPLED
@given(sampled_cards())
def test_sampled_cards_are_causal_and_blind_to_padding(card: Card) -> None:
    if card.family != "encoder":
        check_causality(card, "fused")
    check_padding(card)
    check_gradients(card)
    if card.head.kind not in POOLED:
        check_packing(card)


@pytest.mark.slow
@pytest.mark.timeout(2400)
@settings(SAMPLED, max_examples=200)
@given(sampled_cards(), CUTS)
def test_many_sampled_cards_hold_every_law(card: Card, cuts: list[int]) -> None:
    check_declared_weights(card)
    check_execution(card)
    check_gradients(card)
    check_padding(card)
    if card.head.kind not in POOLED:
        check_packing(card, kernel="reference" if cuts else "fused")
    if card.family != "encoder":
        check_cache(card, cuts, "fused")
        check_causality(card, "reference")


@given(st.integers(1, 9), st.integers(0, 9), st.one_of(st.none(), st.integers(1, 12)), st.booleans())
def test_visible_pairs_are_those_of_the_predicate(tokens: int, past: int, window: int | None, causal: bool) -> None:
    visibility = sc_visibility(causal, window)
    pairs = [(q, k) for q in range(past, past + tokens) for k in range(past + tokens) if visibility.sees(q, k)]
    assert visibility.pairs(tokens, past) == len(pairs)


def sc_visibility(causal: bool, window: int | None) -> Any:
    from scantling.visibility import Visibility

    return Visibility(causal, window)


@given(st.lists(st.sampled_from("ab"), max_size=14))
def test_runs_of_blocks_cover_them_in_order(letters: list[str]) -> None:
    blocks: Any = tuple(letters)
    out: list[str] = []
    for start, period, times in cycles(blocks):
        assert start == len(out)
        out += list(blocks[start : start + period]) * times
    assert out == letters


class TestPlantedDrift:
    """A wrong row, shape, weight or cache must make the comparison fail."""

    @pytest.fixture
    def model(self) -> Any:
        return sc.assemble(CARDS["llama"])

    def odd(self, model: Any) -> list[str]:
        return [row.what for row in verify(model) if not row.equal]

    def test_nothing_is_odd_without_a_fault(self, model: Any) -> None:
        assert self.odd(model) == []

    def test_a_wrong_flop_row(self, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.change_steps(monkeypatch, "parts.leaf.Linear", cost=lambda s: s.cost._replace(full=s.flops + 1))
        odd = self.odd(model)
        assert all("FLOPs" in what for what in odd)
        assert len(odd) == 6

    def test_a_wrong_shape(self, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.change_steps(
            monkeypatch, "parts.leaf.RMSNorm", dims=lambda s: (*s.dims[:-1], Dim("wrong", s.shape[-1] + 1))
        )
        odd = self.odd(model)
        assert all("shapes" in what for what in odd)
        assert len(odd) == 6

    def test_wrong_parameters_in_a_row(self, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.change_steps(monkeypatch, "parts.leaf.RMSNorm", params=lambda s: s.params - 1)
        assert self.odd(model) == ["parameters"]

    def test_a_missing_row(self, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("scantling.parts.leaf.RMSNorm.steps", lambda self, w: iter(()))
        assert "shapes, prefill, fused kernel" in self.odd(model)

    def test_a_wrong_order(self, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        from scantling.parts.mlp import GatedMLP

        right = GatedMLP.steps
        monkeypatch.setattr(GatedMLP, "steps", lambda self, w: iter([*right(self, w)][::-1]))
        assert "shapes, decode, reference kernel" in self.odd(model)

    def test_an_undeclared_weight(self, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        from scantling.parts.leaf import Linear

        monkeypatch.setattr(Linear, "module", lambda self, path: torch.nn.Linear(self.d_in, self.d_out, bias=True))
        assert "weights, names and shapes" in self.odd(model)

    def test_a_wrong_cache(self, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        from scantling.parts.attention import Attention

        right = Attention.state

        def larger(self: Any, w: Workload) -> Any:
            return {name: (b, h + 1, s, d) for name, (b, h, s, d) in right(self, w).items()}

        monkeypatch.setattr(Attention, "state", larger)
        with pytest.raises(RuntimeError, match="size"):
            verify(model)

    def test_a_forward_that_computes_more_than_it_declares(self, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        from scantling.parts.mlp import GatedMLP

        right = GatedMLP.forward

        def twice(self: Any, net: Any, x: Any, ctx: Any, *groups: Any) -> Any:
            net.up.weight @ net.down.weight
            return right(self, net, x, ctx, *groups)

        monkeypatch.setattr(GatedMLP, "forward", twice)
        assert "FLOPs, prefill, fused kernel" in self.odd(model)

    def change_steps(self, monkeypatch: pytest.MonkeyPatch, where: str, **fields: Any) -> None:
        from dataclasses import replace
        from importlib import import_module

        module, _, name = where.rpartition(".")
        kind = getattr(import_module(f"scantling.{module}"), name)
        right = kind.steps

        def wrong(self: Any, w: Workload) -> Any:
            for step in right(self, w):
                yield replace(step, **{field: change(step) for field, change in fields.items()})

        monkeypatch.setattr(kind, "steps", wrong)
