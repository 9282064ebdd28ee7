"""Predicted == built == counted: the part tree's arithmetic against what torch builds and does, on the meta device."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

from scantling.errors import need
from scantling.numbers.flops import BACKWARD
from scantling.parts.part import Workload, total
from scantling.parts.transformer import Transformer
from scantling.units import DTYPE_BYTES
from scantling.visibility import Visibility

PREFILL = Workload(batch=2, tokens=11, source=7)
DECODE = Workload(batch=2, tokens=1, past=11, source=7)
PREFIX = 5
TRAINING = Workload(batch=2, tokens=11, source=7, training=True)


@dataclass(frozen=True)
class Row:
    """One comparison.

    Attributes:
        predicted: from the part tree.
        built: from the built module, or None where nothing is built for it.
        counted: from what was executed, or None where nothing is executed for it.
    """

    what: str
    predicted: Any
    built: Any
    counted: Any

    @property
    def equal(self) -> bool:
        """Whether all that is there agrees."""
        return all(other is None or other == self.predicted for other in (self.built, self.counted))


def verify(model: Transformer) -> list[Row]:
    """Compare parameters, names, shapes, every row of the trace, FLOPs and cache bytes; nothing is allocated.

    Raises:
        MissingExtra: torch is not installed.
    """
    need("torch", "build the model")
    net = model.build(device="meta")
    rows = [*_weights(model, net)]
    passes = {"prefill": PREFILL, "decode": DECODE, "training": TRAINING}
    if model.decoder is None:
        del passes["decode"]
    for name, work in passes.items():
        for kernel in ("reference", "fused"):
            w = replace(work, kernel=kernel)
            executed, counted = _counted(model, net, w)
            what = f"{name}, {kernel} kernel"
            rows.append(_trace(model, w, executed, f"shapes, {what}"))
            times = 1 + BACKWARD if w.training else 1
            rows.append(Row(f"FLOPs, {what}", times * total(model.steps(w), "flops"), None, counted))
            if w == PREFILL:
                rows.append(_cache(model, executed))
    return rows


def _weights(model: Transformer, net: Any) -> Iterator[Row]:
    built = {name: tuple(p.shape) for name, p in net.state_dict().items()}
    parameters, buffers = (sum(x.numel() for x in tensors) for tensors in (net.parameters(), net.buffers()))
    stored = sum(x.numel() for x in net.state_dict().values())
    yield Row("parameters", total(model.steps(PREFILL), "params"), parameters, stored - buffers)
    if model.named_buffers:
        predicted = sum(math.prod(shape) for shape in model.named_buffers.values())
        yield Row("buffers", predicted, buffers, stored - parameters)
    yield Row("parameters by declaration", model.params, sum(p.numel() for p in net.parameters()), None)
    for visibility in sorted({part.visibility for _, part, _ in model.walk() if hasattr(part, "visibility")}, key=repr):
        yield _pairs(visibility)
    declared = model.named_weights | model.named_buffers
    yield Row("weights, names and shapes", _digest(declared), _digest(built), None)


def _pairs(visibility: Visibility) -> Row:
    """Visible pairs of the prefill and the decode step: the closed form against the mask that kernels are given."""
    import torch

    from scantling.tensor.mask import Seen

    counted = 0
    for w in (PREFILL, DECODE):
        prefix = torch.tensor([PREFIX]) if visibility.prefix else None
        seen = Seen(visibility, w.past, w.tokens, None, torch.device("cpu"), prefix)
        counted += int(seen.rows(0, w.tokens).sum())
    predicted = sum(visibility.pairs(w.tokens, w.past, PREFIX) for w in (PREFILL, DECODE))
    names = ("window", "chunk", "stride", "last")
    reach = [] if visibility.causal else [", both ways"]
    reach += [f", {name} {value}" for name in names if (value := getattr(visibility, name)) is not None]
    reach += [f", prefix {PREFIX}"] if visibility.prefix else []
    return Row(f"visible pairs{''.join(reach)}", predicted, None, counted)


def _trace(model: Transformer, w: Workload, executed: list[tuple[str, Any]], what: str) -> Row:
    """Every row of the trace, in order, against what ran; where they differ, the first difference."""
    predicted = [(step.path, step.shape) for step in model.steps(replace(w, unrolled=True))]
    shapes = [(path, tuple(value.shape)) for path, value in executed]
    if predicted == shapes:
        return Row(what, f"{len(predicted)} rows", None, f"{len(shapes)} rows")
    pairs = zip_longest(predicted, shapes)
    number, (wanted, seen) = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
    return Row(what, f"row {number}: {wanted}", None, f"row {number}: {seen}")


def _counted(model: Transformer, net: Any, w: Workload) -> tuple[list[tuple[str, Any]], int]:
    """What one pass produced, and torch's own count of its FLOPs (with the backward in training)."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    # Torch's counter finds nothing in the fused CPU kernel, so attention is counted through the math backend.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.set_grad_enabled(w.training):
        executed = _run(model, net, w)
        if w.training:
            last = executed[-1][1]
            (last if last.dim() == 0 else last.sum()).backward()
    return executed, int(counter.get_total_flops())


def _run(model: Transformer, net: Any, w: Workload) -> list[tuple[str, Any]]:
    """Execute one pass on the net's device and record every leaf module's output and every capture point, in order."""
    import torch

    from scantling.tensor.cache import Cache
    from scantling.tensor.context import Context

    seen: list[tuple[str, Any]] = []

    def record(path: str, value: Any) -> Any:
        seen.append((path, value))
        return value

    device = next(net.parameters()).device
    ids = torch.zeros(w.batch, w.tokens, dtype=torch.int64, device=device)
    source = ids.new_zeros(w.batch, w.sources) if model.two_stacks and w.past == 0 else None
    cache = None
    if not w.training:
        cache = Cache(model.named_state(w), torch.float32, device)
        cache.advance(w.past)
    ctx = Context.of(ids, cache=cache, kernel_name=w.kernel, training=w.training, recorder=record)
    with _hooked(net, record):
        logits = net(ids, ctx, source)
    model.outcome(net, ids, logits, ctx)
    return seen


@contextmanager
def _hooked(net: Any, record: Any) -> Iterator[None]:
    """Record the output of every leaf: torch's own modules, and parts whose whole work is one row."""
    from scantling.parts.net import Net

    hooks = []
    for path, module in net.named_modules():
        leaf = not any(True for _ in module.children())
        if isinstance(module, Net):
            leaf = leaf and any(step.path == "" for step in module.part.steps(PREFILL))
        if leaf:
            hooks.append(module.register_forward_hook(lambda _, __, out, path=path: record(path, out)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _cache(model: Transformer, executed: list[tuple[str, Any]]) -> Row:
    """Declared against allocated, and against the keys and values that the pass really made."""
    import torch

    from scantling.tensor.cache import Cache

    shapes = model.named_state(PREFILL)
    predicted = DTYPE_BYTES["float32"] * sum(math.prod(shape) for shape in shapes.values())
    made = [value for path, value in executed if path in shapes]
    built = Cache(shapes, torch.float32, "meta").nbytes
    return Row("KV cache bytes, float32", predicted, built, sum(v.numel() * v.element_size() for v in made))


def _digest(shapes: dict[str, tuple[int, ...]]) -> str:
    """Number of tensors, and a hash of all names and shapes in order of the names."""
    lines = "\n".join(f"{name}\t{','.join(map(str, shape))}" for name, shape in sorted(shapes.items()))
    return f"{len(shapes)} tensors, sha256 {hashlib.sha256(lines.encode()).hexdigest()[:12]}"
