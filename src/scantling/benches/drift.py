"""How far every way of running a model is from the plain one in float32, layer by layer, at several lengths.

The plain one is a whole pass, without a cache, with torch's fused kernel. Others change one thing each: the kernel, the
dtype of weights and activations, how keys and values are kept, how wide the matrices are, the compiled pass.

An encoder-decoder reads the same tokens as source and as target, and the stream of both stacks is compared.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from scantling.errors import ScantlingError, ScantlingInputError, need
from scantling.generate.keeping import Keeping
from scantling.generate.room import known_tokens
from scantling.generate.session import Session, Source, begin
from scantling.parts.heads import Head

if TYPE_CHECKING:
    from scantling.model import Model

LIKELY = 40
"""Tokens of a position whose log-probabilities are compared."""
PIECE = 16
"""Positions that go through a cache at once."""
BLOCKS = ("q8_0", "q4_0")


@dataclass(frozen=True)
class Seen:
    """What a way of running gave.

    Attributes:
        stream: the residual stream (T, d) at `places`; None where nobody tells.
        logits: (T, V).
    """

    stream: list[Tensor] | None
    logits: Tensor


@dataclass(frozen=True)
class Drift:
    """How far one way is from the plain one, at one length.

    Attributes:
        kind: kernel, dtype, cache, weights or engine.
        layers: root mean square of the difference of the stream over that of the stream, at `places`; None where the
            way shows no stream.
        logits: the same of the logits, over their standard deviation.
        likely: the largest difference of a log-probability among the `LIKELY` likeliest tokens of a position, in nats.
        agree: share of positions whose likeliest token is the same; both None where no vocabulary is scored.
    """

    kind: str
    way: str
    tokens: int
    layers: tuple[float, ...] | None
    logits: float
    likely: float | None
    agree: float | None


def drifts(
    model: Model, ids: Sequence[int], lengths: Sequence[int], said: Callable[[str], object]
) -> tuple[list[Drift], list[str]]:
    """Every way at every length, over the first tokens of `ids`; and who did not run, and why.

    Args:
        model: in float32.
        said: told what happens now.

    Raises:
        ScantlingInputError: a model in another dtype, or fewer ids than the longest length.
    """
    if model.dtype != torch.float32:
        raise ScantlingInputError(f"drift is measured from float32, and the weights are {model.dtype}")
    if len(ids) < max(lengths):
        raise ScantlingInputError(f"{max(lengths)} tokens are asked for and the text has {len(ids)}")
    found, missing = list[Drift](), list[str]()
    with torch.inference_mode():
        plain = {n: _whole(model, ids[:n]) for n in lengths}
        for kind, way, run in _ways(model):
            said(f"running {kind} {way}")
            try:
                for n in lengths:
                    found.append(_drift((kind, way, n), plain[n], run(ids[:n]), isinstance(model.parts.head, Head)))
            except (ScantlingError, RuntimeError) as error:
                missing.append(f"{kind} {way} does not run: {str(error).splitlines()[0]}")
    return found, missing


def _ways(model: Model) -> Iterator[tuple[str, str, Callable[[Sequence[int]], Seen]]]:
    """Kind, name, and what runs it."""
    yield "kernel", "reference", partial(_whole, model, kernel="reference")
    for dtype in ("bfloat16", "float16"):
        yield "dtype", dtype, _changed(model, partial(_narrowed, dtype=dtype))
    if model.parts.decoder is not None:
        for kind, numbers in (("full", "plain"), ("ring", "plain"), ("full", "int8"), ("ring", "int8")):
            name = kind if numbers == "plain" else f"{kind}, {numbers}"
            yield "cache", name, partial(_cached, model, keeping=Keeping(kind, numbers))
    for width in BLOCKS:
        yield "weights", width, _changed(model, partial(_rounded, width=width))
    if model.parts.decoder is not None:
        for activations in ("exact", "int8"):
            yield "engine", f"packed, {activations}", partial(_packed, model, activations=activations)


def _changed(model: Model, change: Callable[[Any], Any]) -> Callable[[Sequence[int]], Seen]:
    """A whole pass through a copy of the net, made at the first call and gone with the function."""
    made: list[Model] = []

    def run(ids: Sequence[int]) -> Seen:
        if not made:
            made.append(replace(model, net=change(copy.deepcopy(model.net)), packed=None, compiled=None))
        return _whole(made[0], ids)

    return run


def _narrowed(net: Any, dtype: str) -> Any:
    return net.to(getattr(torch, dtype))


def _rounded(net: Any, width: str) -> Any:
    """Every matrix whose rows are whole blocks, as blocks of that format hold it, in float32."""
    gguf = need("gguf", "round weights to blocks")
    kind = gguf.GGMLQuantizationType[width.upper()]
    block = gguf.GGML_QUANT_SIZES[kind][0]
    wide = [weight for weight in net.parameters() if weight.dim() == 2 and weight.shape[1] % block == 0]
    if not wide:
        raise ScantlingInputError(f"no matrix has rows of whole blocks of {block}")
    for weight in wide:
        stored = gguf.quants.quantize(weight.detach().numpy(), kind)
        weight.data.copy_(torch.from_numpy(gguf.quants.dequantize(stored, kind)))
    return net


def _whole(model: Model, ids: Sequence[int], kernel: str = "fused") -> Seen:
    with _stream(model) as taken:
        target = [list(ids)] if model.parts.two_stacks else None
        logits = model.logits([list(ids)], kernel=kernel, decoder_ids=target)[0]
    return Seen(taken(), logits)


def _cached(model: Model, ids: Sequence[int], keeping: Keeping) -> Seen:
    """The same in pieces over a cache."""
    rows = torch.tensor([ids], device=model.device)
    source = Source(rows) if model.parts.two_stacks else None
    session = Session(model, 1, len(ids), source=source, keeping=keeping)
    with _stream(model) as taken:
        logits = [session.score(rows[:, i : i + PIECE])[0].float() for i in range(0, len(ids), PIECE)]
    return Seen(taken(), torch.cat(logits))


def _packed(model: Model, ids: Sequence[int], activations: str) -> Seen:
    """The compiled pass shows its logits only."""
    twin = replace(model)
    twin.pack(activations=activations)
    rows = torch.tensor([ids])
    session, first, _ = begin(twin, rows[:, :1], len(ids))
    rest = session.score(rows[:, 1:])[0] if len(ids) > 1 else first[:0]
    return Seen(None, torch.cat([first, rest]).float())


@contextmanager
def _stream(model: Model) -> Iterator[Callable[[], list[Tensor]]]:
    """Collects the residual stream of every pass inside; what it gives has the passes' tokens after one another."""
    seen: list[list[Tensor]] = []
    hooks = [hook for stack in _stacks(model).values() for hook in _hooked(stack, seen)]
    try:
        yield lambda: [torch.cat(pieces) for pieces in seen]
    finally:
        for hook in hooks:
            hook.remove()


def _hooked(stack: Any, seen: list[list[Tensor]]) -> Iterator[Any]:
    """Hooks that put what a stack's embeddings and blocks give behind what is `seen` already."""
    before: list[list[Tensor]] = [[] for _ in range(len(stack.blocks) + 1)]
    seen += before
    for block, place in zip(stack.blocks, before[:-1], strict=True):
        yield block.register_forward_pre_hook(lambda _, given, place=place: place.append(given[0][0].float()))
    yield stack.register_forward_hook(lambda _, __, out: before[-1].append(out[0].float()))


def _stacks(model: Model) -> dict[str, Any]:
    """The stacks of the net by their names, in the order in which they read."""
    net: Any = model.net
    return {name: getattr(net, name) for name in model.parts.stacks}


def places(model: Model) -> list[str]:
    """Where the stream is compared: embeddings first, then after each block; of two stacks the encoder's first."""
    stacks = _stacks(model)
    names = {name: ["embeddings", *(f"block {i}" for i in range(len(s.blocks)))] for name, s in stacks.items()}
    return [place if len(names) == 1 else f"{name} {place}" for name, each in names.items() for place in each]


def _drift(what: tuple[str, str, int], plain: Seen, other: Seen, words: bool) -> Drift:
    layers = None
    if other.stream is not None and plain.stream is not None:
        pairs = zip(plain.stream, other.stream, strict=True)
        layers = tuple(_size(b.double() - a.double()) / max(_size(a.double()), 1e-300) for a, b in pairs)
    a, b = (x.double().reshape(-1, x.shape[-1]) for x in (plain.logits, other.logits))
    off = _size(b - a) / float(a.std())
    if not words:
        return Drift(*what, layers, off, None, None)
    likely, at = a.log_softmax(-1).topk(min(LIKELY, a.shape[-1]), -1)
    apart = (b.log_softmax(-1).gather(-1, at) - likely).abs().max()
    same = (a.argmax(-1) == b.argmax(-1)).double().mean()
    return Drift(*what, layers, off, float(apart), float(same))


def _size(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


def sample_ids(model: Model, tokens: int, text: str | None) -> list[int]:
    """The ids that drift is measured over: those of a text, or random ones.

    Raises:
        ScantlingInputError: a text for a model without a tokenizer.
    """
    if text is None:
        draw = torch.Generator().manual_seed(0)
        known = known_tokens(model)
        ids: list[int] = torch.randint(min(3, known - 1), known, (tokens,), generator=draw).tolist()
        return ids
    if model.tokenizer is None:
        raise ScantlingInputError("--text is given and the model has no tokenizer; without it ids are random")
    return model.tokenizer.encode(text)[:tokens]
