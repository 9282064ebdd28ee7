"""Any Python callable as a subject: what it can do is read from its signature."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from scantling.audits.protocol import Abilities, Facts, Feed, Run, Subject
from scantling.errors import ScantlingInputError

NAMES = {"mask": "attention_mask", "positions": "position_ids", "documents": "document_ids"}
"""Our names of what a pass reads, and those that callables give their arguments."""


def from_callable(call: Callable[..., Any], facts: Facts, name: str | None = None) -> Subject:
    """A subject from ids (B, T) -> logits (B, T, V), or an object with `logits`, or a tuple that begins with them.

    Arguments named attention_mask, position_ids and document_ids (B, T) are used where the callable has them. A torch
    module can also be cast, trained, and searched for its tables.

    Raises:
        ScantlingInputError: it is not callable.
    """
    if not callable(call):
        raise ScantlingInputError(f"what is audited is {type(call).__name__}; a callable of ids is needed")
    module = call if isinstance(call, nn.Module) else None
    known = _arguments(call if module is None else module.forward)
    takes = frozenset(ours for ours, theirs in NAMES.items() if theirs in known)
    run = runner(call, takes)
    modes: dict[str, Run] = {}
    if module is not None:
        modes["in training"] = trained(module, run)
    label = name or str(type(call).__name__ if module is not None else getattr(call, "__name__", "callable"))
    can = Abilities(
        takes=takes - {"documents"},
        module=module,
        modes=modes,
        packed={"document_ids": run} if "documents" in takes else {},
        cast=None if module is None else lambda dtype: _cast(module, facts, label, dtype),
        tables=None if module is None else tables_of(module, facts.vocab_size),
    )
    return Subject(label, run, facts, can)


def runner(call: Callable[..., Any], takes: frozenset[str]) -> Run:
    """A pass that hands over what the feed has and the callable takes."""

    def run(feed: Feed) -> Tensor:
        given = {"mask": feed.mask, "positions": feed.positions, "documents": feed.documents}
        named = {NAMES[key]: value for key, value in given.items() if key in takes and value is not None}
        return logits_of(call(feed.ids, **named))

    return run


def logits_of(given: Any) -> Tensor:
    """The logits in whatever a model gives.

    Raises:
        ScantlingInputError: there are none.
    """
    out = getattr(given, "logits", given)
    if isinstance(out, tuple | list) and out and isinstance(out[0], Tensor):
        out = out[0]
    if not isinstance(out, Tensor):
        try:
            out = torch.as_tensor(out)
        except (TypeError, ValueError, RuntimeError):
            raise ScantlingInputError(f"the model gives {type(out).__name__}; logits (B, T, V) are needed") from None
    found: Tensor = out
    if found.dim() != 3:
        raise ScantlingInputError(f"the model gives shape {tuple(found.shape)}; logits (B, T, V) are needed")
    return found


def trained(module: nn.Module, run: Run, seed: int = 5) -> Run:
    """A pass in training mode under one seed; modes of all modules are put back."""

    def training(feed: Feed) -> Tensor:
        before = {m: m.training for m in module.modules()}
        module.train()
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                out: Tensor = run(feed)
                return out
        finally:
            for m, was in before.items():
                m.training = was

    return training


def tables_of(module: nn.Module, rows: int) -> Callable[[], tuple[Tensor, Tensor]] | None:
    """The first table of at least so many rows, and the last matrix that gives as many numbers."""
    tables = [m for m in module.modules() if isinstance(m, nn.Embedding) and m.num_embeddings >= rows]
    heads = [m for m in module.modules() if isinstance(m, nn.Linear) and m.out_features >= rows]
    if not tables or not heads or tables[0].weight.shape != heads[-1].weight.shape:
        return None
    return lambda: (tables[0].weight, heads[-1].weight)


def _cast(module: nn.Module, facts: Facts, name: str, dtype: str) -> Subject:
    twin = copy.deepcopy(module).to(getattr(torch, dtype))
    return from_callable(twin, replace(facts, dtype=dtype), name)


def _arguments(call: Callable[..., Any]) -> frozenset[str]:
    try:
        return frozenset(inspect.signature(call).parameters)
    except (TypeError, ValueError):
        return frozenset()
