"""Inputs of probes: random ids, other tokens, padding, positions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from scantling.audits.protocol import Facts, Feed, Subject


@dataclass(frozen=True)
class Effort:
    """How much a probe may run.

    Attributes:
        tokens: of an ordinary row.
        longest: of a row where length is the question.
        seed: of the ids.
    """

    tokens: int = 18
    longest: int = 320
    seed: int = 0


ORDINARY = Effort()


def length(subject: Subject, effort: Effort, wanted: int | None = None) -> int:
    """Tokens of a row: what is wanted, or the ordinary number, as far as the context goes."""
    most = wanted or effort.tokens
    return most if subject.facts.context is None else min(most, subject.facts.context)


def ids(facts: Facts, batch: int, tokens: int, seed: int = 0) -> Tensor:
    """Random ids (B, T) without the id of padding."""
    draw = torch.Generator().manual_seed(1000 + seed)
    low = 0 if facts.pad_id is None else 1
    found = torch.randint(low, facts.vocab_size, (batch, tokens), generator=draw)
    return found if facts.pad_id is None else (found + facts.pad_id) % facts.vocab_size


def other(facts: Facts, given: Tensor) -> Tensor:
    """Another token in each place; never the one of padding."""
    step = max(1, facts.vocab_size // 3)
    moved = (given + step) % facts.vocab_size
    return moved if facts.pad_id is None else torch.where(moved == facts.pad_id, (moved + 1) % facts.vocab_size, moved)


def replaced(facts: Facts, given: Tensor, places: slice | int) -> Tensor:
    """A copy with other tokens at some columns."""
    changed = given.clone()
    changed[:, places] = other(facts, given[:, places])
    return changed


def feed(subject: Subject, given: Tensor, seed: int = 0, **more: Tensor | None) -> Feed:
    """A feed of these ids on the subject's device; an encoder-decoder gets a source of seven tokens beside them."""
    source = more.pop("source", None)
    if subject.facts.family == "encoder-decoder":
        if source is None:
            source = ids(subject.facts, 1, 7, seed + 77).expand(given.shape[0], -1)
        source = source.to(subject.device)
    at = more.get("positions")
    if at is not None:
        more["positions"] = at + subject.facts.first_position
    placed = {name: None if value is None else value.to(subject.device) for name, value in more.items()}
    return Feed(given.to(subject.device), source=source, **placed)


def pad(facts: Facts, given: Tensor, left: int = 0, right: int = 0) -> tuple[Tensor, Tensor]:
    """Ids (B, T) with padding beside them, and their mask."""
    rows, tokens = given.shape
    filler = 0 if facts.pad_id is None else facts.pad_id
    whole = given.new_full((rows, left + tokens + right), filler)
    whole[:, left : left + tokens] = given
    mask = torch.zeros_like(whole)
    mask[:, left : left + tokens] = 1
    return whole, mask


def counted(mask: Tensor) -> Tensor:
    """Positions that do not count padding: (B, T)."""
    return (mask.cumsum(-1) - 1).clamp(min=0)
