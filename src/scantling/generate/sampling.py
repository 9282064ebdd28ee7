"""How a token is drawn: the settings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from scantling.errors import ScantlingInputError

if TYPE_CHECKING:
    import torch

MAX_TEMPERATURE = 10.0
COLD = 1e-5
"""Below this the likeliest token is certain for all that float32 can tell, and logits / temperature would overflow."""
MAX_BIAS = 100.0


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn.

    Attributes:
        temperature: divides the logits; 0 (anything below 1e-5) takes the likeliest token and needs no seed.
        top_k: keep the k likeliest; 0 keeps all, as does any number from the vocabulary's size on.
        top_p: keep the likeliest tokens up to the one that brings their mass to p (Holtzman et al., arXiv:1904.09751);
            1.0 keeps all, 0.0 keeps one.
        min_p: keep tokens at least this fraction as likely as the likeliest (arXiv:2407.01082); 0.0 keeps all.
        seed: of the draws, 64 bits; None is a new one each time. On the CPU, PyTorch draws by its low 32 bits.
        typical_p: keep the most typical tokens up to this mass (arXiv:2202.00666); 1.0 keeps all.
        epsilon_cutoff: keep tokens at least this likely; eta_cutoff: the same, less in flat distributions
            (arXiv:2210.15191); 0.0 keeps all.
        repetition_penalty: above 1.0, against tokens of the prompt and of the text (arXiv:1909.05858).
        presence_penalty, frequency_penalty: taken from the logits of generated tokens, once and each time; 0.0 is none.
        no_repeat_ngram: no n tokens in a row come twice, the prompt included; 0 lets them.
        logit_bias: added to the logits of the tokens named; a mapping, or pairs.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    typical_p: float = 1.0
    epsilon_cutoff: float = 0.0
    eta_cutoff: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram: int = 0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        _within("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        for name in ("top_p", "min_p", "epsilon_cutoff", "eta_cutoff"):
            _within(name, getattr(self, name), 0.0, 1.0)
        _within("typical_p", self.typical_p, 0.0, 1.0)
        _within("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        for name in ("presence_penalty", "frequency_penalty"):
            _within(name, getattr(self, name), -100.0, 100.0)
        for name in ("top_k", "no_repeat_ngram"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ScantlingInputError(f"{name} is {value!r}; a whole number is needed, 0 for no limit")
        if self.seed is not None and (isinstance(self.seed, bool) or not isinstance(self.seed, int)):
            raise ScantlingInputError(f"seed is {self.seed!r}; a whole number is needed")
        if self.seed is not None and not -(2**63) <= self.seed < 2**64:
            raise ScantlingInputError(f"seed is {self.seed}; a 64-bit number is needed")
        object.__setattr__(self, "logit_bias", _bias(self.logit_bias))

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.temperature < COLD

    @property
    def looks_back(self) -> bool:
        """Whether the logits are changed before they are filtered."""
        penalties = self.repetition_penalty != 1.0 or self.presence_penalty or self.frequency_penalty
        return bool(penalties or self.no_repeat_ngram or self.logit_bias)

    def generators(self, rows: int) -> list[torch.Generator]:
        """A source of draws for each row of a batch, so that a row draws what it would draw alone."""
        return [self._generator() for _ in range(rows)]

    def _generator(self) -> torch.Generator:
        import torch

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


def _bias(given: object) -> tuple[tuple[int, float], ...]:
    right = f"token ids with numbers from -{MAX_BIAS:g} to {MAX_BIAS:g} are needed"
    try:
        listed = list(given.items() if isinstance(given, Mapping) else given)  # type: ignore[call-overload]
        pairs = dict(listed)
    except (TypeError, ValueError):
        raise ScantlingInputError(f"logit_bias is {given!r}; {right}") from None
    for token, value in pairs.items():
        whole = isinstance(token, int) and not isinstance(token, bool) and token >= 0
        number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MAX_BIAS
        if not (whole and number):
            raise ScantlingInputError(f"logit_bias gives {value!r} to {token!r}; {right}")
    if len(pairs) < len(listed):
        twice = next(token for i, (token, _) in enumerate(listed) if token in dict(listed[:i]))
        raise ScantlingInputError(f"logit_bias names token {twice} twice; one number for each is needed")
    return tuple(sorted(pairs.items()))
