"""Choosing the next token. The filters are applied in the order temperature, top-k, top-p, min-p."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from scantling.errors import ScantlingInputError

MAX_TEMPERATURE = 10.0
COLD = 1e-5
"""Below this the likeliest token is certain for all that float32 can tell, and logits / temperature would overflow."""


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn.

    Attributes:
        temperature: divides the logits; 0 (anything below 1e-5) takes the likeliest token and needs no seed.
        top_k: keep the k likeliest; 0 keeps all, as does any number from the vocabulary's size on.
        top_p: keep the likeliest tokens up to the one that brings their mass to p (Holtzman et al., arXiv:1904.09751);
            1.0 keeps all, 0.0 keeps one.
        min_p: keep tokens at least this fraction as likely as the likeliest (arXiv:2407.01082); 0.0 keeps all.
        seed: of the draws; None is a new one each time.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None

    def __post_init__(self) -> None:
        _within("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        _within("top_p", self.top_p, 0.0, 1.0)
        _within("min_p", self.min_p, 0.0, 1.0)
        if isinstance(self.top_k, bool) or not isinstance(self.top_k, int) or self.top_k < 0:
            raise ScantlingInputError(f"top_k is {self.top_k!r}; a whole number is needed, 0 for no limit")
        if self.seed is not None and (isinstance(self.seed, bool) or not isinstance(self.seed, int)):
            raise ScantlingInputError(f"seed is {self.seed!r}; a whole number is needed")
        if self.seed is not None and not -(2**63) <= self.seed < 2**64:
            raise ScantlingInputError(f"seed is {self.seed}; a 64-bit number is needed")

    def generators(self, rows: int) -> list[torch.Generator]:
        """A source of draws for each row of a batch, so that a row draws what it would draw alone."""
        return [self._generator() for _ in range(rows)]

    def _generator(self) -> torch.Generator:
        generator = torch.Generator()
        if self.seed is None:
            generator.seed()
        else:
            generator.manual_seed(self.seed)
        return generator


def _within(name: str, value: float, low: float, high: float) -> None:
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not math.isfinite(value)
        or not low <= value <= high
    ):
        raise ScantlingInputError(f"{name} is {value!r}; a number from {low:g} to {high:g} is needed")


def filtered(logits: Tensor, how: Sampling) -> Tensor:
    """Logits (B, V) with the temperature applied and every token that may not be drawn at -inf; temperature > 0."""
    logits = logits.float() / how.temperature
    if how.top_k:
        logits = top_k(logits, how.top_k)
    if how.top_p < 1.0:
        logits = top_p(logits, how.top_p)
    return min_p(logits, how.min_p) if how.min_p else logits


def top_k(logits: Tensor, k: int) -> Tensor:
    """Keep the k likeliest tokens of each row (B, V), and ties with the last of them."""
    last = logits.topk(min(k, logits.shape[-1]), -1).values[..., -1:]
    return logits.masked_fill(logits < last, float("-inf"))


def top_p(logits: Tensor, p: float) -> Tensor:
    """Keep the likeliest tokens of each row (B, V) up to and including the one that brings their mass to p."""
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    mass = ordered.softmax(-1).cumsum(-1)
    drop = torch.zeros_like(mass, dtype=torch.bool)
    drop[..., 1:] = mass[..., :-1] >= p
    return logits.masked_fill(torch.zeros_like(drop).scatter(-1, order, drop), float("-inf"))


def min_p(logits: Tensor, fraction: float) -> Tensor:
    """Keep the tokens of each row (B, V) at least `fraction` as likely as the likeliest."""
    probabilities = logits.softmax(-1)
    floor = fraction * probabilities.amax(-1, keepdim=True)
    return logits.masked_fill(probabilities < floor, float("-inf"))


def choose(logits: Tensor, how: Sampling, generators: list[torch.Generator]) -> Tensor:
    """The next token of each row: logits (B, V) -> ids (B); row i draws from generator i."""
    if how.temperature < COLD:
        return logits.argmax(-1)
    probabilities = filtered(logits, how).softmax(-1).cpu()
    rows = zip(probabilities, generators, strict=True)
    drawn = [torch.multinomial(row, 1, generator=generator) for row, generator in rows]
    return torch.cat(drawn).to(logits.device)
