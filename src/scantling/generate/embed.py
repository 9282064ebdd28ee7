"""Texts to vectors and scores: batches of like length, padded on the right."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from scantling.errors import ScantlingInputError
from scantling.parts.heads import Head, Labels, TextVector
from scantling.tensor.context import Context

if TYPE_CHECKING:
    from scantling.model import Model


@dataclass(frozen=True)
class Encoded:
    """Texts as ids.

    Attributes:
        rows: the ids of each text, special tokens included, none longer than the limit.
        notes: which texts were cut.
    """

    rows: list[list[int]]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Guess:
    """A token that may stand at a mask."""

    token: str
    id: int
    probability: float


def encode_for_vectors(model: Model, texts: Sequence[str], max_length: int | None = None) -> Encoded:
    """The same as sentence-transformers prepares texts: its length and its case.

    Args:
        max_length: in place of its length.

    Raises:
        ScantlingInputError: as `encode`, or a length that is no whole number, or beyond the context.
    """
    rules, context = model.text_rules, model.card.context
    if isinstance(max_length, bool) or not isinstance(max_length, int | None):
        raise ScantlingInputError(f"max_length is {max_length!r}; a whole number is needed")
    if max_length is not None and not 1 <= max_length <= context:
        raise ScantlingInputError(
            f"max_length is {max_length}; at least 1 and at most the context, {context}, is needed"
        )
    if rules.lower and not isinstance(texts, str):
        texts = [text.lower() if isinstance(text, str) else text for text in texts]
    if max_length is not None:
        return encode(model, texts, max_length, f"max_length is {max_length}")
    if rules.max_length is not None and rules.max_length < context:
        return encode(model, texts, rules.max_length, f"max_seq_length is {rules.max_length}")
    return encode(model, texts)


def encode(model: Model, texts: Sequence[str], limit: int | None = None, why: str = "") -> Encoded:
    """The ids of texts as an encoder reads them; what exceeds the limit is cut from the end of the text.

    Args:
        limit: tokens, special ones included; default as many as the context holds.
        why: what sets the limit, for the notes.

    Raises:
        ScantlingInputError: no encoder, no tokenizer, no texts, or a text without any token.
    """
    if model.card.family != "encoder":
        raise ScantlingInputError(
            f"card {model.card.name[:60]!r} is of family {model.card.family}; an encoder is needed"
        )
    if model.tokenizer is None:
        raise ScantlingInputError("the model has no tokenizer beside it; a folder with tokenizer.json has one")
    if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
        raise ScantlingInputError("texts are a list of strings")
    if not texts:
        raise ScantlingInputError("no text is given: at least one is needed")
    limit, why = (model.card.context, f"the context holds {model.card.context}") if limit is None else (limit, why)
    rows, cut = [], []
    for number, text in enumerate(texts, 1):
        row = model.tokenizer.encode(text)
        if not row:
            raise ScantlingInputError(f"text {number} is empty: at least one token is needed")
        if len(row) > limit:
            bare = model.tokenizer.encode(text, add_special=False)
            if len(row) - len(bare) >= limit:
                raise ScantlingInputError(f"{why}: the special tokens around text {number} leave no room for it")
            cut.append(f"text {number} has {len(row)} tokens and {why}; its end is cut")
            row = _cut(row, bare, limit)
        rows.append(row)
    return Encoded(rows, tuple(cut))


def _cut(row: list[int], bare: list[int], limit: int) -> list[int]:
    """The row with as many tokens of the text as fit; the special tokens around it stay."""
    around = len(row) - len(bare)
    start = next((i for i in range(around + 1) if row[i : i + len(bare)] == bare), around)
    return row[:start] + bare[: limit - around] + row[start + len(bare) :]


def batches(model: Model, rows: Sequence[list[int]], batch_size: int) -> Iterator[tuple[list[int], Tensor, Tensor]]:
    """Rows of like length together: their numbers, ids (B, T) padded on the right, and the mask (B, T).

    Raises:
        ScantlingInputError: the batch size is not positive.
    """
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise ScantlingInputError(f"batch_size is {batch_size!r}; a whole number of at least 1 is needed")
    pad = getattr(model.card.position, "pad_id", None) or 0
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        ids = torch.full((len(chosen), len(rows[chosen[0]])), pad)
        mask = torch.zeros_like(ids)
        for i, number in enumerate(chosen):
            ids[i, : len(rows[number])] = torch.tensor(rows[number])
            mask[i, : len(rows[number])] = 1
        yield chosen, ids, mask


def vectors(model: Model, rows: Sequence[list[int]], batch_size: int = 32) -> Tensor:
    """A vector per row of ids, (N, d) in float32: the head's own, or the normalised mean of the last hidden states."""
    out = torch.empty(len(rows), model.card.d_model)
    for chosen, ids, mask in batches(model, rows, batch_size):
        if isinstance(model.parts.head, TextVector):
            found = model.logits(ids, mask)
        else:
            context = Context.of(ids, padding=mask.bool())
            found = context.unit(context.pool(model.hidden(ids, mask)[-1].cpu().float(), "mean"))
        out[chosen] = found.cpu()
    return out


def fill(model: Model, text: str, top: int = 5) -> tuple[list[list[Guess]], tuple[str, ...]]:
    """For each mask in a text, the likeliest tokens; and notes.

    Raises:
        ScantlingInputError: the model scores no vocabulary or its tokenizer has no mask, or the text has none.
    """
    if top < 1:
        raise ScantlingInputError(f"top is {top}; at least 1 is needed")
    encoded = encode(model, [text])
    if not isinstance(model.parts.head, Head):
        raise ScantlingInputError(f"the card's head is {model.card.head.kind}; a masked language model (lm) is needed")
    tokenizer = model.tokenizer
    assert tokenizer is not None
    if tokenizer.mask_id is None:
        raise ScantlingInputError("the model's tokenizer has no mask token")
    (row,) = encoded.rows
    places = [i for i, token in enumerate(row) if token == tokenizer.mask_id]
    if not places:
        raise ScantlingInputError(
            f"the text has no mask: write {tokenizer.token(tokenizer.mask_id)} where a word is missing"
        )
    known = min(model.card.vocab_size, tokenizer.vocab_size)
    likely = model.logits([row])[0, places].softmax(-1)[:, :known].topk(min(top, known))
    guesses = [
        [
            Guess(tokenizer.decode([int(i)], skip_special=False), int(i), float(p))
            for p, i in zip(values, ids, strict=True)
        ]
        for values, ids in zip(likely.values, likely.indices, strict=True)
    ]
    return guesses, encoded.notes


def scores(model: Model, rows: Sequence[list[int]], batch_size: int = 32) -> list[Tensor]:
    """What a classifier makes of each row, as probabilities: (n_labels), or (T, n_labels) where tokens are labelled.

    Raises:
        ScantlingInputError: the card's head tells no labels apart.
    """
    head = model.parts.head
    if not isinstance(head, Labels):
        right = "sequence, tokens or replaced is needed"
        raise ScantlingInputError(f"the card's head is {model.card.head.kind}; a head of kind {right}")
    out: list[Tensor] = [torch.empty(0)] * len(rows)
    for chosen, ids, mask in batches(model, rows, batch_size):
        logits = model.logits(ids, mask).cpu()
        logits = logits[..., None] if head.flat else logits
        found = logits.softmax(-1) if head.scores == "softmax" else logits.sigmoid()
        for i, number in enumerate(chosen):
            out[number] = found[i] if head.pool else found[i, : len(rows[number])]
    return out
