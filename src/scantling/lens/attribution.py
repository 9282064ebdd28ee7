"""Direct logit attribution: what each summand of the stream adds to a logit, effects through later layers left out.

(Elhage et al., A Mathematical Framework for Transformer Circuits, transformer-circuits.pub/2021/framework.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from scantling.errors import ScantlingInputError
from scantling.lens.hooks import ALL_REAL, Edit
from scantling.lens.residual import Term, decompose, wide
from scantling.parts.heads import Head
from scantling.passes import Given

if TYPE_CHECKING:
    from scantling.model import Model

BIAS = Term("head.bias", None, "shift")


@dataclass(frozen=True)
class Attribution:
    """What adds up to logits at one position.

    Attributes:
        terms: the summands; the last one is the head's shift, where it has one.
        values: (N, K) in float64: what each adds to each of K logits.
        logits: (K) as the model gives them.
        softcap: of the head, or None; the sums are of the logits before it.
    """

    terms: tuple[Term, ...]
    values: Tensor
    logits: Tensor
    softcap: float | None

    @property
    def sums(self) -> Tensor:
        """(K) what the terms add up to, through the head's cap."""
        total = self.values.sum(0)
        return total if self.softcap is None else self.softcap * (total / self.softcap).tanh()

    @property
    def error(self) -> float:
        """The largest difference between a sum and its logit."""
        return float((self.sums - wide(self.logits)).abs().max())


def attribute(
    lm: Model,
    ids: Any,
    tokens: Sequence[int],
    given: Given = ALL_REAL,
    *,
    position: int = -1,
    by_head: bool = True,
    edits: Sequence[Edit] = (),
) -> Attribution:
    """What every head and MLP adds to the logits of `tokens` at one position of one row.

    The difference of two columns is what each adds to a difference of logits, in which shifts that all tokens share
    are gone.

    Args:
        ids: (1, T); of an encoder-decoder the source, with the target in `given`.
        tokens: ids of the vocabulary.
        position: of the token that is read from; negative ones count from the end.
        by_head: heads one by one, instead of whole attentions.

    Raises:
        ScantlingInputError: more than one row, a token outside the vocabulary, or a head whose output is no sum of what
            it is given.
    """
    matrix, shift = matrix_of(lm)
    if outside := [t for t in tokens if not 0 <= t < lm.card.vocab_size]:
        raise ScantlingInputError(f"token id {outside[0]} is outside the vocabulary of {lm.card.vocab_size}")
    found = decompose(lm, ids, given, positions=[position], by_head=by_head, edits=edits)
    if found.stream.shape[0] != 1:
        raise ScantlingInputError(f"{found.stream.shape[0]} rows: attribution is of one text")
    chosen = torch.as_tensor(tokens, device=matrix.device)
    values = found.values[:, 0, 0] @ wide(matrix[chosen]).T
    terms = found.terms
    if shift is not None:
        values, terms = torch.cat((values, wide(shift[chosen])[None])), (*terms, BIAS)
    with torch.no_grad():
        logits = head_of(lm)(found.stream)[0, 0, chosen]
    head = lm.parts.head
    assert isinstance(head, Head)
    return Attribution(terms, values, logits, head.softcap)


def matrix_of(lm: Model) -> tuple[Tensor, Tensor | None]:
    """What makes logits (V) of the stream (d): a matrix (V, d) that holds the head's factor, and a shift (V) or None.

    Raises:
        ScantlingInputError: the head gives no logits of a vocabulary, or makes something of the stream that is no sum.
    """
    head = vocabulary_head(lm)
    if head.transform is not None:
        raise ScantlingInputError(
            f"the head of {lm.card.name} passes the stream through {head.transform.act} before its matrix, so its "
            "logits are no sum over the stream: decompose the stream instead"
        )
    net: Any = getattr(lm.net, "_orig_mod", lm.net)
    table = (net.target_embed if lm.parts.target_embed else net.embed).weight
    matrix, shift = head.matrix(net.head, table)
    if head.width != head.d_model:
        matrix = wide(matrix) @ wide(net.head.narrow.weight)
    return matrix.detach() * (head.scale or 1.0), None if shift is None else shift.detach()


def vocabulary_head(lm: Model) -> Head:
    """The head, if it scores a vocabulary.

    Raises:
        ScantlingInputError: it does not.
    """
    if not isinstance(lm.parts.head, Head):
        raise ScantlingInputError(
            f"the head of {lm.card.name} is of kind {lm.card.head.kind!r}: logits of a vocabulary (lm) are needed"
        )
    return lm.parts.head


def head_of(lm: Model) -> Any:
    """The head as a function of the normed stream (..., T, d), in float32."""
    from scantling.tensor.context import Context

    net: Any = getattr(lm.net, "_orig_mod", lm.net)
    table = (net.target_embed if lm.parts.target_embed else net.embed).weight

    def logits(stream: Tensor) -> Tensor:
        ctx = Context(stream.shape[0], stream.shape[1], stream.device)
        made: Tensor = net.head(stream, table, ctx)
        return made.float()

    return logits
