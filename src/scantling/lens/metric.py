"""What is measured of an answer: a difference of logits, or a probability."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from scantling.errors import ScantlingInputError
from scantling.lens.attribution import vocabulary_head

if TYPE_CHECKING:
    from scantling.model import Model


@dataclass(frozen=True)
class Metric:
    """A number of logits (B, T, V), read at one position.

    Attributes:
        token: the id of the answer.
        against: of the token that it is compared with: the difference of logits, which is that of log-probabilities.
            None takes the answer's probability.
        position: negative ones count from the end.
    """

    token: int
    against: int | None = None
    position: int = -1

    @property
    def name(self) -> str:
        """What the number is."""
        return "probability" if self.against is None else "logit difference"

    def __call__(self, logits: Tensor) -> Tensor:
        """(B) in float32."""
        here = logits[:, self.position]
        if self.against is None:
            return here.softmax(-1)[:, self.token]
        return here[:, self.token] - here[:, self.against]

    def check(self, lm: Model) -> None:
        """Refuse a model without logits of a vocabulary, and tokens that do not exist.

        Raises:
            ScantlingInputError: the head is another, a token is outside the vocabulary, or both are the same.
        """
        vocabulary_head(lm)
        for token in (self.token, self.against):
            if token is not None and not 0 <= token < lm.card.vocab_size:
                raise ScantlingInputError(f"token id {token} is outside the vocabulary of {lm.card.vocab_size}")
        if self.token == self.against:
            raise ScantlingInputError(f"token {self.token} is compared with itself: its difference is always 0")
