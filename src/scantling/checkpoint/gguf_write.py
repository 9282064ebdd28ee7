"""Writing a model as one GGUF file: the same tables as for reading, and the card read back before a byte is written."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from msgspec.structs import replace

from scantling.cards import Card
from scantling.cards.schema import MultiHead
from scantling.checkpoint.families.gguf import ARCHITECTURES, card_of_gguf
from scantling.checkpoint.families.gguf.architecture import Value
from scantling.checkpoint.families.gguf.differ import differences
from scantling.checkpoint.files import shown
from scantling.checkpoint.gguf_types import GGUFArray
from scantling.checkpoint.names import Link, foreign_shapes, written_out
from scantling.checkpoint.whole_file import whole_file
from scantling.errors import ScantlingInputError, nearest, need

if TYPE_CHECKING:
    import numpy
    from numpy.typing import NDArray

Shapes = Mapping[str, tuple[int, ...]]

DTYPES = {"f32": ("F32", 0), "f16": ("F16", 1), "bf16": ("BF16", 32), "q8_0": ("Q8_0", 7), "q4_0": ("Q4_0", 2)}
"""By what a user asks for: the tensors' kind and the value of ``general.file_type`` (gguf, `LlamaFileType`)."""
_BLOCK = {"Q8_0": 32, "Q4_0": 32}
_ALWAYS_F32 = ("position_embd.weight", "token_types.weight", "ffn_gate_inp.weight")
"""Matrices that llama.cpp, too, keeps in F32, as it does every vector."""
_QUANTIZATION_VERSION = 2


class Vocabulary(Protocol):
    """What a tokenizer must be able to say of itself."""

    def gguf_metadata(self, rows: int) -> tuple[Mapping[str, Any], tuple[str, ...]]:
        """``tokenizer.*`` for a token table of so many rows, and what a user should know."""


class Model(Protocol):
    """What is written: a card, its net, and a tokenizer or None."""

    @property
    def card(self) -> Card: ...
    @property
    def net(self) -> Any: ...
    @property
    def tokenizer(self) -> Vocabulary | None: ...


@dataclass(frozen=True)
class Drawing:
    """A card as GGUF says it.

    Attributes:
        architecture: a key of `ARCHITECTURES`.
        metadata: its keys, by their full names.
        beside: small tensors that belong to the metadata.
        table: the weights' names on both sides.
        notes: what llama.cpp reads of it and does not apply.
    """

    architecture: str
    metadata: dict[str, Value]
    beside: dict[str, list[float]]
    table: list[Link]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Stub:
    """A tensor that is about to be written, as far as the card asks for it."""

    shape: tuple[int, ...]
    kind: str = "F32"
    values: Sequence[float] | None = None


def write_gguf(lm: Model, path: str | os.PathLike[str], dtype: str = "f32") -> tuple[str, ...]:
    """Write a model as one GGUF file; it appears under its name only when it is complete.

    Args:
        dtype: of the matrices: f32, f16, bf16, q8_0 or q4_0. Vectors, learned positions and routers stay F32; a matrix
            whose rows are no multiple of a block stays F16.

    Returns:
        What a user should know.

    Raises:
        ScantlingInputError: the path exists, no architecture can say what the card says, the vocabulary cannot be
            written, or a weight is beyond the dtype.
        MissingExtra: gguf or torch is not installed.
    """
    if dtype not in DTYPES:
        raise ScantlingInputError(f"dtype {dtype!r} for GGUF; known: {', '.join(DTYPES)}{nearest(dtype, DTYPES)}")
    target = Path(path)
    if target.exists() or target.is_symlink():
        raise ScantlingInputError(f"{target} exists; nothing is overwritten, so name a new file")
    weights = lm.net.state_dict()
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    drawing = drawn(lm.card, shapes)
    vocabulary, said = _vocabulary(lm)
    kinds = {
        name: _kind(name, shape, DTYPES[dtype][0]) for name, shape in foreign_shapes(drawing.table, shapes).items()
    }
    metadata = {**_general(lm.card, dtype), **drawing.metadata, **vocabulary}
    with whole_file(target) as part:
        _write(part, drawing, metadata, kinds, weights)
    return (*drawing.notes, *said, *_notes(lm.card, kinds, DTYPES[dtype][0]))


def drawn(card: Card, weights: Shapes) -> Drawing:
    """The first architecture that says all of the card: what it would write is read back and compared.

    Args:
        weights: by our names.

    Raises:
        ScantlingInputError: none does; the message names the nearest and what it cannot say.
    """
    two_stacks = card.family == "encoder-decoder"
    if two_stacks or not isinstance(card.attention, MultiHead):
        what = "family is encoder-decoder" if two_stacks else "attention.kind is latent"
        raise ScantlingInputError(
            f"card {shown(card.name)} cannot be written as GGUF: {what}, which none of the architectures here has "
            f"({', '.join(ARCHITECTURES)})"
        )
    card, weights = _read_parts(card, weights)
    faults: dict[str, list[str]] = {}
    for name in ARCHITECTURES:
        drawing, faults[name] = _attempt(name, card, weights)
        if not faults[name]:
            return drawing
    best = min(faults, key=lambda name: len(faults[name]))
    raise ScantlingInputError(
        f"card {shown(card.name)} cannot be written as GGUF: of its architectures {best!r} is nearest, "
        f"and {faults[best][0]}"
    )


def _read_parts(card: Card, weights: Shapes) -> tuple[Card, Shapes]:
    """The same without a transform whose result nobody reads."""
    if not card.head.spare:
        return card, weights
    plain = replace(card, head=replace(card.head, transform=None, spare=False))
    return plain, {name: shape for name, shape in weights.items() if not name.startswith("head.transform.")}


def _attempt(name: str, card: Card, weights: Shapes) -> tuple[Drawing, list[str]]:
    kind = ARCHITECTURES[name]
    keys, beside = kind.write(card)
    table, missing = written_out(kind.rows(card), weights)
    unread = [(key, what) for key, what in kind.unread.items() if keys.get(key)]
    notes = tuple(f"llama.cpp does not apply {name}.{key} ({shown(keys[key])}): it {what}" for key, what in unread)
    metadata = {key if key.startswith("tokenizer.") else f"{name}.{key}": value for key, value in keys.items()}
    drawing = Drawing(name, metadata, beside, table, (*notes, *kind.notes))
    stubs = {theirs: _Stub(shape) for theirs, shape in foreign_shapes(table, weights).items()}
    stubs |= {theirs: _Stub((len(values),), values=values) for theirs, values in beside.items()}
    try:
        back = card_of_gguf({"general.architecture": name, **metadata}, stubs, "card")
    except ScantlingInputError as error:
        # It refuses the card whole, so it is nearer than none.
        return drawing, [str(error).removeprefix("card: ")] * 100
    # The kind of head first: where it differs, all that is said of the head does.
    found = sorted(differences(card, back), key=lambda difference: difference[0] != "head.kind")
    faults = [f"it cannot say {key} {shown(here)} (it means {shown(there)})" for key, here, there in found]
    return drawing, [*faults, *(f"it has no tensor for {weight!r}" for weight in missing)]


def _vocabulary(lm: Model) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    if lm.tokenizer is None:
        note = "the model has no tokenizer, so the file has no vocabulary"
        return {"tokenizer.ggml.model": "none"}, (note,)
    return lm.tokenizer.gguf_metadata(lm.card.vocab_size)


def _general(card: Card, dtype: str) -> dict[str, Value]:
    found: dict[str, Value] = {"general.type": "model", "general.name": card.name}
    found["general.file_type"] = DTYPES[dtype][1]
    if DTYPES[dtype][0] in _BLOCK:
        found["general.quantization_version"] = _QUANTIZATION_VERSION
    return found


def _kind(name: str, shape: tuple[int, ...], wanted: str) -> str:
    """The kind of one tensor."""
    if len(shape) < 2 or name.endswith(_ALWAYS_F32):
        return "F32"
    return "F16" if shape[-1] % _BLOCK.get(wanted, 1) else wanted


def _notes(card: Card, kinds: Mapping[str, str], wanted: str) -> Iterator[str]:
    if odd := [name for name, kind in kinds.items() if wanted in _BLOCK and kind == "F16"]:
        more = f" and {len(odd) - 3} more" if len(odd) > 3 else ""
        named = ", ".join(map(repr, odd[:3]))
        yield f"stored as F16, as their rows are no multiple of {_BLOCK[wanted]}: {named}{more}"
    if card.head.spare:
        yield "the head's transform is left out, as nothing reads its result"
    if any((card.dropout.embedding, card.dropout.attention, card.dropout.residual)):
        yield "GGUF says nothing of training: dropout is left out"


def _write(
    part: Path, drawing: Drawing, metadata: Mapping[str, Any], kinds: Mapping[str, str], weights: Mapping[str, Any]
) -> None:
    """Header first, then the tensors one after another, so that only one is held in memory beside the model."""
    np, gguf, torch = need("numpy", "write GGUF"), need("gguf", "write GGUF"), need("torch", "write GGUF")
    writer = gguf.GGUFWriter(part, drawing.architecture)
    for key, value in metadata.items():
        _add(writer, gguf, key, value)
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    for name, shape in foreign_shapes(drawing.table, shapes).items():
        writer.add_tensor_info(name, shape, np.float32, _nbytes(gguf, shape, kinds[name]), _type(gguf, kinds[name]))
    for name, values in drawing.beside.items():
        writer.add_tensor_info(name, (len(values),), np.float32, 4 * len(values))
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for link in drawing.table:
            ours = [weights[name].detach().to("cpu", torch.float32) for name in link.ours]
            for name, tensor in zip(link.theirs, link.transform.save(ours), strict=True):
                writer.write_tensor_data(_encoded(gguf, name, tensor.contiguous().numpy(), kinds[name]))
        for values in drawing.beside.values():
            writer.write_tensor_data(np.asarray(values, np.float32))
        writer.flush()
        for file in writer.fout:
            os.fsync(file.fileno())
    finally:
        writer.close()


def _type(gguf: Any, kind: str) -> Any:
    return gguf.GGMLQuantizationType[kind]


def _nbytes(gguf: Any, shape: tuple[int, ...], kind: str) -> int:
    block, nbytes = gguf.GGML_QUANT_SIZES[_type(gguf, kind)]
    return math.prod(shape) // int(block) * int(nbytes)


def _encoded(gguf: Any, name: str, values: NDArray[numpy.float32], kind: str) -> NDArray[Any]:
    np = need("numpy", "write GGUF")
    if kind != "F32" and kind != "BF16":
        # Blocks have a factor in float16: of the largest number over 127 (Q8_0) or over 8 (Q4_0).
        limit = {"F16": 1, "Q8_0": 127, "Q4_0": 8}[kind] * float(np.finfo(np.float16).max)
        largest = float(np.abs(values).max(initial=0.0))
        if limit < largest < math.inf:
            raise ScantlingInputError(f"tensor {name!r} holds {largest:.4g}, beyond {kind}; write it as bf16 or f32")
    with np.errstate(all="ignore"):
        encoded: NDArray[Any] = gguf.quants.quantize(values, _type(gguf, kind))
    return encoded


def _add(writer: Any, gguf: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        # Not add_string, which leaves empty text out.
        writer.add_key_value(key, value, gguf.GGUFValueType.STRING)
    elif len(value):
        kind = gguf.GGUFValueType[value.kind.upper()] if isinstance(value, GGUFArray) else None
        writer.add_key_value(key, value, gguf.GGUFValueType.ARRAY, sub_type=kind)
