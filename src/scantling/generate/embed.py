"""Texts to vectors and scores: batches of like length, padded on the right."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from scantling.errors import ScantlingInputError
from scantling.generate.laid_out import can, hooked, laid_out
from scantling.generate.streams import side_by_side
from scantling.parts.heads import Head, Labels, TextVector
from scantling.passes import Given, prepare
from scantling.tensor.context import Context
from scantling.tensor.pages import for_pass

if TYPE_CHECKING:
    from scantling.model import Model

Batch: TypeAlias = tuple[list[int], Tensor, Tensor | None]
"""Numbers of rows, their ids (B, T), and the mask (B, T) where there is padding."""

MOST_TOKENS = 1024
"""Of a batch, padding included; more rows do not make matrix products faster, and their activations leave the cache."""
FULL_TOKENS = 384
"""From here on products are as fast as they get, and a batch may end for the sake of equal lengths."""
MANY_TOKENS = 2048
"""From here on matrices are laid out for the processor first, which takes about as long as so many tokens."""


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
    rows, notes = [], []
    around: _Around | None = None
    for number, (text, row) in enumerate(zip(texts, model.tokenizer.encode_many(texts), strict=True), 1):
        if not row:
            raise ScantlingInputError(f"text {number} is empty: at least one token is needed")
        if len(row) > limit:
            if around is None or not around.fits(row):
                around = _Around.of(row, model.tokenizer.encode(text, add_special=False))
            if around.size >= limit:
                raise ScantlingInputError(f"{why}: the special tokens around text {number} leave no room for it")
            notes.append(f"text {number} has {len(row)} tokens and {why}; its end is cut")
            row = around.shortened(row, limit)
        rows.append(row)
    return Encoded(rows, tuple(notes))


@dataclass(frozen=True)
class _Around:
    """The special tokens before and behind a text: the same for all texts, so that one is read twice and not each."""

    before: list[int]
    behind: list[int]

    @classmethod
    def of(cls, row: list[int], bare: list[int]) -> _Around:
        """From the ids of a text with them, and without."""
        added = len(row) - len(bare)
        start = next((i for i in range(added + 1) if row[i : i + len(bare)] == bare), added)
        return cls(row[:start], row[start + len(bare) :])

    @property
    def size(self) -> int:
        return len(self.before) + len(self.behind)

    def fits(self, row: list[int]) -> bool:
        return row[: len(self.before)] == self.before and row[len(row) - len(self.behind) :] == self.behind

    def shortened(self, row: list[int], limit: int) -> list[int]:
        """The row with as many tokens of the text as fit; the special tokens around it stay."""
        return row[: limit - len(self.behind)] + self.behind


def batches(model: Model, rows: Sequence[list[int]], batch_size: int | None = None) -> Iterator[Batch]:
    """Rows of like length together: their numbers, ids (B, T) padded on the right, and the mask (B, T).

    The mask is None where the rows of a batch are equally long: attention without one is faster.

    Args:
        batch_size: rows of a batch; None goes by tokens, see `cut`.

    Raises:
        ScantlingInputError: the batch size is not positive.
    """
    if batch_size is not None and (isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1):
        raise ScantlingInputError(f"batch_size is {batch_size!r}; a whole number of at least 1 is needed")
    pad = getattr(model.card.position, "pad_id", None) or 0
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))
    lengths = [len(rows[i]) for i in order]
    ends = cut(lengths) if batch_size is None else [*range(batch_size, len(order), batch_size), len(order)]
    for start, end in zip([0, *ends], ends, strict=False):
        chosen, longest = order[start:end], lengths[start]
        ids = torch.tensor([rows[i] + [pad] * (longest - len(rows[i])) for i in chosen])
        mask = None
        if lengths[end - 1] < longest:
            real = torch.tensor([len(rows[i]) for i in chosen])
            mask = (torch.arange(longest) < real[:, None]).long()
        yield chosen, ids, mask


def cut(lengths: Sequence[int]) -> list[int]:
    """Where batches of rows of these lengths, the longest first, end: by tokens, padding included.

    A batch holds at most `MOST_TOKENS`, or one row. One that has `FULL_TOKENS` ends where the length changes, so that
    most batches need neither padding nor a mask.
    """
    ends, start = [], 0
    for i, length in enumerate(lengths):
        tokens = (i - start) * lengths[start]
        if i > start and (tokens + lengths[start] > MOST_TOKENS or (length < lengths[i - 1] and tokens >= FULL_TOKENS)):
            ends.append(i)
            start = i
    return [*ends, len(lengths)]


def vectors(
    model: Model, rows: Sequence[list[int]], batch_size: int | None = None, *, compiled: bool = False
) -> Tensor:
    """A vector per row of ids, (N, d) in float32: the head's own, or the normalised mean of the last hidden states.

    Args:
        batch_size: as `batches` takes it.
        compiled: through torch.compile, which takes a minute before the first vector; it pays for many texts.

    Raises:
        ScantlingInputError: the batch size is not positive, or a compiled net is watched or edited.
    """
    out = torch.empty(len(rows), model.card.d_model)
    head = isinstance(model.parts.head, TextVector)
    if not compiled and sum(map(len, rows)) >= MANY_TOKENS and can(model.net):
        model = replace(model, net=laid_out(model.net))
    if compiled and hooked(model.net):
        raise ScantlingInputError("compiled code would not notice that the net is watched or edited: leave it out")
    run = _compiled(model.net) if compiled else model.net

    def found(batch: Batch) -> Tensor:
        _, ids, mask = batch
        with torch.inference_mode():
            if head:
                return run(*prepare(model, ids, Given(mask))).float().cpu()  # type: ignore[no-any-return]
            context = Context.of(ids, padding=None if mask is None else mask.bool())
            return context.unit(context.pool(model.hidden(ids, mask)[-1].cpu().float(), "mean"))

    jobs = list(batches(model, rows, batch_size))
    apart = model.device.type == "cpu" and not compiled and not hooked(model.net)
    made = side_by_side(found, jobs, [ids.numel() for _, ids, _ in jobs]) if apart else map(found, jobs)
    with for_pass(model.device, sum(map(len, rows))):
        for (chosen, _, _), some in zip(jobs, made, strict=True):
            out[chosen] = some
    return out


_COMPILED: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def _compiled(net: Any) -> Any:
    """The net through torch.compile, for any number of rows and tokens; made once for each net."""
    if net not in _COMPILED:
        _COMPILED[net] = torch.compile(net, dynamic=True)
    return _COMPILED[net]


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


def scores(model: Model, rows: Sequence[list[int]], batch_size: int | None = None) -> list[Tensor]:
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
