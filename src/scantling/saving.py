"""Saving a model: what it is, put together for `checkpoint.save`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from scantling.assembly import assemble
from scantling.cards import Card
from scantling.cards.schema import Dropout
from scantling.checkpoint.matching import bare
from scantling.checkpoint.save import MAX_SHARD_BYTES, Content, Progress, Saved, write
from scantling.model import Model
from scantling.parts.transformer import Transformer


def save(
    lm: Model,
    folder: str | os.PathLike[str],
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    dtype: str | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Saved:
    """Save a model in the Hugging Face layout, with card.yaml beside it.

    The folder is written beside its place and put there when it is complete, so a process that is killed leaves what
    was there. A loaded model keeps its config.json and its tokenizer's files; one that was made from a card gets a
    config of the first family that can express it, or our own layout, which `load` reads.

    Args:
        folder: made anew; one that exists must be empty, or hold only what saving writes where it may be replaced.
        max_shard_bytes: of the tensors in one file.
        dtype: float32, float16 or bfloat16; None keeps the net's.
        overwrite: an existing folder may be replaced.
        progress: called after each file of weights: its name, bytes written, bytes in all.

    Raises:
        ScantlingInputError: the folder exists, the disk is too small, the net is not what its card describes, or a
            number is too large for `dtype`.
    """
    card, parts, tokenizer = lm.card, lm.parts, lm.tokenizer
    computed = parts.named_weights.keys() - parts.named_stored.keys()
    first = () if tokenizer is None else tokenizer.ends
    ends = [*first, *sorted(lm.eos_ids - frozenset(first))]
    content = Content(
        card=card,
        weights=parts.named_stored,
        state={name: tensor for name, tensor in lm.net.state_dict().items() if bare(name) not in computed},
        describes=lambda other: other.context == card.context and assemble(other) == parts,
        in_use=lambda other: other.context == card.context and _undropped(other) == _undropped(card),
        origin=lm.origin,
        tokenizer_files=dict if tokenizer is None else tokenizer.files,
        tokens={
            "bos_token_id": None if tokenizer is None else tokenizer.bos_id,
            "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
            **({} if lm.start_id is None or not parts.two_stacks else {"decoder_start_token_id": lm.start_id}),
            **_labels(lm.labels),
        },
        text_rules=lm.text_rules,
    )
    return write(content, Path(folder), max_shard_bytes, dtype, overwrite, progress)


def _undropped(card: Card) -> Transformer:
    """The parts as they are in evaluation."""
    return assemble(replace(card, dropout=Dropout()))


def _labels(names: Sequence[str]) -> dict[str, Any]:
    """What a config says of the labels of a classifier, where they have names."""
    if not names:
        return {}
    return {"id2label": {str(i): n for i, n in enumerate(names)}, "label2id": {n: i for i, n in enumerate(names)}}
