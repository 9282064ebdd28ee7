"""What callers hand in beside the ids, made into the context of one pass; and a pass that is watched."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from scantling import inputs
from scantling.errors import ScantlingInputError, need

if TYPE_CHECKING:
    from torch import Tensor

    from scantling.model import Model


@dataclass(frozen=True)
class Given:
    """Everything that a pass may be given beside ids (B, T); None where it is not. See `Model.logits`."""

    attention_mask: Any = None
    position_ids: Any = None
    token_type_ids: Any = None
    decoder_ids: Any = None
    prefix_lengths: Any = None
    document_ids: Any = None
    decoder_document_ids: Any = None


def prepare(model: Model, ids: Any, given: Given, kernel: str = "fused") -> tuple[Tensor, Any, Tensor | None]:
    """What the net is called with: ids, context, and the source of an encoder-decoder.

    Raises:
        ScantlingInputError: anything given that does not fit the ids or the card.
    """
    rows = model.ids(ids)
    if not model.parts.two_stacks:
        for name in ("decoder_ids", "decoder_document_ids"):
            if getattr(given, name) is not None:
                raise ScantlingInputError(f"{name} go with an encoder-decoder, and this card is {model.card.family}")
        return rows, _context(model, rows, given, given.document_ids, kernel), None
    if given.decoder_ids is None:
        raise ScantlingInputError("decoder_ids are missing: an encoder-decoder scores a target beside its source")
    target = model.ids(given.decoder_ids)
    if target.shape[0] != rows.shape[0]:
        raise ScantlingInputError(f"decoder_ids have {target.shape[0]} rows and ids {rows.shape[0]}")
    if (given.document_ids is None) != (given.decoder_document_ids is None):
        raise ScantlingInputError(
            "document_ids are those of the source and decoder_document_ids of the target: give both"
        )
    context = _context(model, target, given, given.decoder_document_ids, kernel)
    if given.document_ids is not None:
        _refuse_padding(given)
        context.source_documents = inputs.documents(given.document_ids, rows, model.card)
    else:
        inputs.check_length(rows, model.card)
        context.source_padding = _hidden(given, rows)
    return target, context, rows


def hidden_states(model: Model, ids: Any, given: Given) -> list[Tensor]:
    """The residual stream (B, T, d) before the first block and after each, the last one after the final norm.

    Of an encoder-decoder: the encoder's, or where `given` has a target the decoder's.
    """
    torch = need("torch", "run the model")
    seen: list[Tensor] = []
    encoder = model.parts.decoder is None or (model.parts.two_stacks and given.decoder_ids is None)
    stack: Any = model.net.encoder if encoder else model.net.decoder
    if model.parts.two_stacks and given.decoder_ids is None:
        given = replace(given, decoder_ids=model.ids(ids)[:, :1])
    hooks = [block.register_forward_pre_hook(lambda _, args: seen.append(args[0])) for block in stack.blocks]
    if not len(stack.blocks):
        hooks.append(stack.register_forward_hook(lambda _, __, out: seen.append(out)))
    hooks.append(stack.register_forward_hook(lambda _, __, out: seen.append(out)))
    try:
        with torch.no_grad():
            model.net(*prepare(model, ids, given))
    finally:
        for hook in hooks:
            hook.remove()
    return seen[-len(stack.blocks) - 1 :]


def _context(model: Model, ids: Tensor, given: Given, document_ids: Any, kernel: str) -> Any:
    """Of the stack that the head reads; an encoder-decoder's mask is that of its source."""
    from scantling.tensor.context import Context

    card, head = model.card, model.parts.head
    documents = None
    if document_ids is not None:
        _refuse_padding(given)
        if getattr(head, "pool", None):
            raise ScantlingInputError(
                "document_ids: this head gives one vector per row, so each text needs its own row"
            )
        documents = inputs.documents(
            document_ids, ids, card, "decoder_document_ids" if model.parts.two_stacks else "document_ids"
        )
    positions = None if given.position_ids is None else inputs.positions(given.position_ids, ids, card)
    if positions is None and documents is None:
        inputs.check_length(ids, card)
    types = None if given.token_type_ids is None else inputs.types(given.token_type_ids, ids, card)
    real = None if model.parts.two_stacks else _hidden(given, ids)
    if real is not None and getattr(head, "pool", None) and not bool(real.any(-1).all()):
        raise ScantlingInputError("a row is padding only: the head pools over at least one real token")
    return Context.of(
        ids,
        positions=positions,
        padding=real,
        kernel_name=kernel,
        types=types,
        prefix_lengths=_prefixes(model, ids, given.prefix_lengths, real),
        documents=documents,
    )


def _prefixes(model: Model, ids: Tensor, prefix_lengths: Any, real: Tensor | None) -> Tensor | None:
    if prefix_lengths is None:
        return None
    if not model.reads_prefix:
        raise ScantlingInputError(
            f"prefix_lengths are given and no layer of {model.card.name!r} reads a prefix: its card needs "
            "attention.prefix"
        )
    return inputs.prefixes(prefix_lengths, ids, real)


def _refuse_padding(given: Given) -> None:
    for name in ("attention_mask", "prefix_lengths"):
        if getattr(given, name) is not None:
            raise ScantlingInputError(f"{name} and document_ids are given: in packed rows a negative number is padding")


def _hidden(given: Given, ids: Tensor) -> Tensor | None:
    """The mask where it hides anything."""
    mask = None if given.attention_mask is None else inputs.padding(given.attention_mask, ids)
    return None if mask is None or bool(mask.all()) else mask
