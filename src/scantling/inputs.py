"""What callers hand in - ids, labels, masks, positions, kinds of tokens, prefixes - as tensors, checked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from scantling.cards import Card
from scantling.cards.rules import position_limit, positions_text
from scantling.errors import ScantlingInputError, need

if TYPE_CHECKING:
    from torch import Tensor


def tensor(values: Any, what: str) -> Tensor:
    """A tensor of numbers; unsigned and foreign integers become int64.

    Raises:
        ScantlingInputError: they are not numbers, or in lists of unequal lengths.
    """
    torch = need("torch", "run the model")
    if getattr(getattr(values, "dtype", None), "kind", "") == "u":
        values = values.astype("int64")
    try:
        return torch.as_tensor(values)  # type: ignore[no-any-return]
    except (ValueError, TypeError, RuntimeError, OverflowError):
        raise ScantlingInputError(f"{what} are a list of integers, or equally long lists of them") from None


def token_ids(ids: Any, vocab_size: int) -> Tensor:
    """Ids as a (B, T) int64 tensor.

    Raises:
        ScantlingInputError: empty, ragged, not integers, or out of the vocabulary.
    """
    found = tensor(ids, "token ids")
    found = found[None] if found.dim() == 1 else found
    if found.dim() != 2 or found.numel() == 0:
        raise ScantlingInputError(f"token ids have shape {list(found.shape)}; at least one row of one token is needed")
    if not _whole(found):
        raise ScantlingInputError(f"token ids are {found.dtype}; integers are needed")
    low, high = int(found.min()), int(found.max())
    if low < 0 or high >= vocab_size:
        raise ScantlingInputError(f"token id {low if low < 0 else high} is outside the vocabulary of {vocab_size}")
    return found.long()


def check_length(ids: Tensor, card: Card) -> None:
    """Refuse ids (B, T) that are longer than the positions that exist."""
    limit = position_limit(card)
    if limit is not None and ids.shape[1] > limit:
        raise ScantlingInputError(f"{ids.shape[1]} tokens and the model has {positions_text(card)}")


def padding(attention_mask: Any, ids: Tensor) -> Tensor:
    """The mask as (B, T) bool beside ids (B, T).

    Raises:
        ScantlingInputError: another shape, or values other than 0 and 1.
    """
    mask = tensor(attention_mask, "attention_mask").to(ids.device)
    mask = mask[None] if mask.dim() == 1 else mask
    if mask.shape != ids.shape:
        raise ScantlingInputError(f"attention_mask has shape {list(mask.shape)} and ids {list(ids.shape)}")
    if bool(((mask != 0) & (mask != 1)).any()):
        raise ScantlingInputError("attention_mask has values other than 0 (padding) and 1 (a real token)")
    return mask.bool()


def filled_prompts(ids: Tensor, labels: Tensor) -> str | None:
    """What to say where a row of labels (B, T) begins with one id several times that is not what ids (B, T) have there.

    That is what becomes of a prompt whose labels were filled with a number other than -100: it is judged.
    """
    same = (labels == labels[:, :1]).long().cumprod(1).bool() & (labels[:, :1] >= 0)
    counts = same.sum(1)
    rows = (counts > 1) & ((labels != ids) & same).any(1)
    if not bool(rows.any()):
        return None
    row = int(rows.long().argmax())
    return (
        f"the first {int(counts[row])} labels of row {row} are all {int(labels[row, 0])}, and the tokens there are "
        "others: they are judged as that token; what is not to be judged, such as a prompt, has the label -100"
    )


def labels(values: Any) -> Tensor:
    """Labels as (B, T) int64.

    Raises:
        ScantlingInputError: empty, ragged, or no integers.
    """
    found = tensor(values, "labels")
    found = found[None] if found.dim() == 1 else found
    if found.dim() != 2 or found.numel() == 0:
        raise ScantlingInputError(f"labels have shape {list(found.shape)}; rows of at least one label are needed")
    if not _whole(found):
        raise ScantlingInputError(f"labels are {found.dtype}; integers are needed")
    return found.long()


def check_judged(labels: Tensor, vocab_size: int) -> None:
    """Refuse labels (B, T) as they are judged: out of the vocabulary, or -100 all of them."""
    if bool(((labels < 0) & (labels != -100) | (labels >= vocab_size)).any()):
        raise ScantlingInputError(f"a label is outside the vocabulary of {vocab_size} and is not -100")
    if not bool((labels != -100).any()):
        raise ScantlingInputError("no label is left after the shift: at least two tokens with labels are needed")


def check_smoothing(share: Any) -> None:
    """Refuse a share of the targets that is no number from 0 to 1."""
    if isinstance(share, bool) or not isinstance(share, int | float):
        raise ScantlingInputError(f"label_smoothing is {share!r}; a number from 0 to 1 is needed")
    if not 0 <= share <= 1:
        raise ScantlingInputError(f"label_smoothing is {share}; a number from 0 to 1 is needed")


def positions(position_ids: Any, ids: Tensor, card: Card) -> Tensor:
    """Positions as (1 or B, T) integers beside ids (B, T).

    Raises:
        ScantlingInputError: another shape, no integers, or positions that do not exist.
    """
    found = tensor(position_ids, "position_ids").to(ids.device)
    found = found[None] if found.dim() == 1 else found
    if not _whole(found) or tuple(found.shape) not in {tuple(ids.shape), (1, ids.shape[1])}:
        right = f"integers of shape {list(ids.shape)} or {[1, ids.shape[1]]} are needed"
        raise ScantlingInputError(f"position_ids are {found.dtype} of shape {list(found.shape)}; {right}")
    limit, low, high = position_limit(card), int(found.min()), int(found.max())
    if low < 0 or (limit is not None and high >= limit):
        end = "" if limit is None else f" and below the {positions_text(card)}"
        raise ScantlingInputError(f"position id {low if low < 0 else high}: ids are at least 0{end}")
    return found


def documents(document_ids: Any, ids: Tensor, card: Card, what: str = "document_ids") -> Tensor:
    """Numbers of the documents that share a row as (B, T) int64 beside ids (B, T); negative is padding.

    Raises:
        ScantlingInputError: another shape, no integers, a document in two pieces, or one longer than the positions.
    """
    from scantling.tensor.mask import Packed

    found = tensor(document_ids, what).to(ids.device)
    found = found[None] if found.dim() == 1 else found
    if not _whole(found) or found.shape != ids.shape:
        right = f"integers of shape {list(ids.shape)} are needed"
        raise ScantlingInputError(f"{what} are {found.dtype} of shape {list(found.shape)}; {right}")
    torn = _runs(found) != _runs(found.sort(-1).values)
    if bool(torn.any()):
        row = int(torn.int().argmax())
        raise ScantlingInputError(
            f"{what}: a document of row {row} stands in two pieces; its tokens must be neighbours"
        )
    limit, longest = position_limit(card), Packed.of(found).longest
    if limit is not None and longest > limit:
        raise ScantlingInputError(f"{what}: a document of {longest} tokens, and the model has {positions_text(card)}")
    return found.long()


def unjudged(document_ids: Tensor, card: Card) -> Tensor:
    """Where packed rows (B, T) are not judged: padding, and a first token that another document would predict."""
    from scantling.tensor.mask import Packed

    hidden = document_ids < 0
    return hidden | (Packed.of(document_ids).positions == 0) if card.family == "decoder" else hidden


def types(token_type_ids: Any, ids: Tensor, card: Card) -> Tensor:
    """Kinds of tokens as (B, T) int64 beside ids (B, T).

    Raises:
        ScantlingInputError: the model has none, another shape, or kinds that do not exist.
    """
    found, known = tensor(token_type_ids, "token_type_ids").to(ids.device), card.embedding.types
    found = found[None] if found.dim() == 1 else found
    if known is None:
        raise ScantlingInputError("token_type_ids are given and the model has no kinds of tokens")
    if not _whole(found) or found.shape != ids.shape:
        right = f"integers of shape {list(ids.shape)} are needed"
        raise ScantlingInputError(f"token_type_ids are {found.dtype} of shape {list(found.shape)}; {right}")
    low, high = int(found.min()), int(found.max())
    if low < 0 or high >= known:
        raise ScantlingInputError(
            f"token_type_ids have {low if low < 0 else high}; the model has kinds 0 to {known - 1}"
        )
    return found.long()


def prefixes(prefix_lengths: Any, ids: Tensor, real: Tensor | None) -> Tensor:
    """Lengths of the rows' prefixes, (B) integers.

    Args:
        real: (B, T) bool, True at real tokens; None where all are.

    Raises:
        ScantlingInputError: another shape, no integers, or longer than the row.
    """
    lengths = tensor(prefix_lengths, "prefix_lengths").to(ids.device)
    if not _whole(lengths) or tuple(lengths.shape) != (ids.shape[0],):
        raise ScantlingInputError(
            f"prefix_lengths are {lengths.dtype} of shape {list(lengths.shape)}; an integer for each of "
            f"{ids.shape[0]} rows is needed"
        )
    most = lengths.new_full(lengths.shape, ids.shape[1]) if real is None else real.sum(-1)
    if bool(((lengths < 0) | (lengths > most)).any()):
        raise ScantlingInputError(
            f"prefix_lengths are {lengths.tolist()}; the rows have {most.tolist()} tokens, and a prefix at least 0 "
            "and at most all of them"
        )
    return lengths


def _runs(rows: Tensor) -> Tensor:
    """How often a number that is not negative begins, in each of the rows (B, T): (B)."""
    return ((rows.diff(dim=-1) != 0) & (rows[:, 1:] >= 0)).sum(-1) + (rows[:, 0] >= 0)


def _whole(found: Tensor) -> bool:
    """Whether the numbers are integers."""
    return not (found.is_floating_point() or found.is_complex() or str(found.dtype) == "torch.bool")
