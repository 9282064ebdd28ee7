"""Whether a model is decoded by the compiled pass where nobody says by what."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scantling.assembly import assemble
from scantling.checkpoint.find import Found, default_model, find
from scantling.native.library import missing
from scantling.native.program import outline
from scantling.native.tiles import block_bytes

if TYPE_CHECKING:
    from scantling.checkpoint.load import Described


def file_for_packed(model: str | None, revision: str | None) -> Described | str:
    """The file where all matrices are blocks that tiles hold as they are; else why PyTorch decodes.

    Raises:
        ScantlingInputError: no such model, or its file is malformed.
    """
    found = Found("gguf", default_model()) if model is None else find(model, revision=revision)
    if found.kind != "gguf":
        return "the weights are not in blocks of 4 or 8 bits"
    if (why := missing()) is not None:
        return why
    from scantling.checkpoint.load import describe_gguf

    file = describe_gguf(found, lambda card: assemble(card).named_stored)
    for tensor in file.header.tensors.values():
        if len(tensor.shape) > 1 and block_bytes(tensor.kind) is None:
            return f"{tensor.name} is stored as {tensor.kind}, and tiles hold Q4_0, Q4_1 and Q8_0"
    known = outline(assemble(file.card))
    return f"the compiled pass does not know {file.card.name}: {known}" if isinstance(known, str) else file
