"""Weights of a checkpoint, by our names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from scantling.cards import Card
from scantling.checkpoint.config_keys import read_json
from scantling.checkpoint.described import (
    Described,
    DescribedFolder,
    Shapes,
    Weights,
    describe_gguf,
    describe_safetensors,
)
from scantling.checkpoint.find import Found
from scantling.checkpoint.gguf_values import dequantise
from scantling.checkpoint.header import TensorInfo
from scantling.checkpoint.hf_config import end_ids, labels, start_id
from scantling.checkpoint.names import Link
from scantling.checkpoint.origin import Origin
from scantling.checkpoint.sentence import TextRules, text_rules
from scantling.errors import ScantlingInputError, need

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "Described",
    "DescribedFolder",
    "Loaded",
    "describe_gguf",
    "describe_safetensors",
    "dtype_of",
    "load_gguf",
    "load_safetensors",
]


@dataclass(frozen=True)
class Loaded:
    """Weights ready for a net.

    Attributes:
        tensors: by our names, all of one dtype.
        notes: what a user should know: prefixes removed, tensors passed over, dtypes mixed.
        eos_ids: ids that end a text, by config.json.
        start_id: what a target begins with, by config.json.
        labels: names of what a classifier tells apart, by config.json.
        restated: by our names, what the model computes itself and the file stores all the same.
        origin: the folder that they were read from; None for a GGUF file.
        text_rules: what sentence-transformers does to a text before it is read.
    """

    card: Card
    tensors: dict[str, Tensor]
    notes: tuple[str, ...]
    eos_ids: frozenset[int] = frozenset()
    start_id: int | None = None
    labels: tuple[str, ...] = ()
    restated: Mapping[str, Tensor] = field(default_factory=dict)
    origin: Origin | None = None
    text_rules: TextRules = field(default_factory=TextRules)


def load_safetensors(found: Found, weights_of: Weights, dtype: str | None) -> Loaded:
    """Read a folder or file of safetensors.

    Args:
        weights_of: the weights that a card's model has, by our names.
        dtype: of the result; None keeps the file's.

    Raises:
        ScantlingInputError: a file is malformed, or a tensor is missing, unknown, or of another shape.
    """
    torch = need("torch", "load weights")
    file = describe_safetensors(found, weights_of)
    read, config, card = _reader(file.tensors), file.config, file.card
    notes = [*file.notes, *file.copy_notes(lambda a, b: torch.equal(read(a), read(b)))]
    name, mixed = dtype_of(file.read, dtype)
    target = getattr(torch, name)
    tensors = _translate(
        file.table,
        file.weights,
        lambda name: (
            read(file.names[name]).to(target) if name in file.names else torch.zeros(file.wanted[name], dtype=target)
        ),
    )
    return Loaded(
        card,
        tensors,
        (*notes, *mixed),
        end_ids(config),
        start_id(config),
        labels(config, card),
        {ours: read(name) for name, ours in file.computed.items()},
        Origin(read_json(config), config.parent),
        text_rules(config.parent) if card.family == "encoder" else TextRules(),
    )


def load_gguf(found: Found, weights_of: Weights, dtype: str | None) -> Loaded:
    """Read a GGUF file, its blocks dequantised to float32 (or `dtype`).

    Raises:
        ScantlingInputError: the file is malformed or its tensors contradict its metadata.
    """
    torch = need("torch", "load weights")
    file = describe_gguf(found, weights_of)
    target = getattr(torch, dtype or "float32")
    read = lambda name: torch.from_numpy(dequantise(file.header.tensors[file.names[name]]))  # noqa: E731
    return Loaded(file.card, _translate(file.table, file.weights, read, target), (file.note,))


def _translate(
    table: list[Link], weights: Shapes, read: Callable[[str], Tensor], target: Any = None
) -> dict[str, Tensor]:
    """Our tensors, each of the dtype `target` in the end: 1 is subtracted from a gain before it is rounded."""
    tensors: dict[str, Tensor] = {}
    for link in table:
        shapes = [weights[name] for name in link.ours]
        ours = link.transform.load([read(name) for name in link.theirs], shapes)
        cast = ours if target is None else [tensor.to(target) for tensor in ours]
        tensors |= {name: tensor.contiguous() for name, tensor in zip(link.ours, cast, strict=True)}
    return tensors


def _reader(infos: Mapping[str, TensorInfo]) -> Callable[[str], Tensor]:
    """Tensors by their names in the files, each file opened once."""
    safetensors = need("safetensors", "load weights")
    need("torch", "load weights")
    files: dict[str, Any] = {}

    def read(name: str) -> Tensor:
        path = str(infos[name].file)
        if path not in files:
            files[path] = safetensors.safe_open(path, framework="pt")
        tensor: Tensor = files[path].get_tensor(name)
        return tensor

    return read


def dtype_of(infos: list[TensorInfo], asked: str | None = None) -> tuple[str, tuple[str, ...]]:
    """The dtype of the net: asked for, or the file's; float32 where a file mixes them, and a note that it does.

    Raises:
        ScantlingInputError: a tensor holds no floating-point numbers.
    """
    found = sorted({info.dtype for info in infos}, key=lambda name: (name != "float32", name != "float64", name))
    if odd := [name for name in found if name not in ("float64", "float32", "float16", "bfloat16")]:
        info = next(info for info in infos if info.dtype == odd[0])
        raise ScantlingInputError(f"{info.file}: tensor {info.name!r} is {odd[0]}; weights are floating-point numbers")
    if asked:
        return asked, ()
    if len(found) == 1:
        return found[0], ()
    return "float32", (f"the file mixes {', '.join(found)}; loaded as float32",)
