"""Weights of a checkpoint, by our names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from scantling.cards import Card
from scantling.checkpoint.config_keys import read_json
from scantling.checkpoint.families import family
from scantling.checkpoint.families.gguf import architecture, card_of_gguf
from scantling.checkpoint.find import Found, config_path
from scantling.checkpoint.gguf import read_gguf
from scantling.checkpoint.gguf_values import dequantise
from scantling.checkpoint.header import TensorInfo
from scantling.checkpoint.hf_config import beyond, end_ids, read_config
from scantling.checkpoint.names import Link, bare, foreign_shapes, heads, links, match
from scantling.checkpoint.origin import Origin
from scantling.checkpoint.sharded import read_checkpoint
from scantling.errors import ScantlingInputError, need

if TYPE_CHECKING:
    from torch import Tensor

Shapes = Mapping[str, tuple[int, ...]]
Weights = Callable[[Card], Shapes]


@dataclass(frozen=True)
class Loaded:
    """Weights ready for a net.

    Attributes:
        tensors: by our names, all of one dtype.
        notes: what a user should know: prefixes removed, tensors passed over, dtypes mixed.
        eos_ids: ids that end a text, by config.json.
        origin: the folder that they were read from; None for a GGUF file.
    """

    card: Card
    tensors: dict[str, Tensor]
    notes: tuple[str, ...]
    eos_ids: frozenset[int] = frozenset()
    origin: Origin | None = None


def load_safetensors(found: Found, weights_of: Weights, dtype: str | None) -> Loaded:
    """Read a folder or file of safetensors.

    Args:
        weights_of: the weights that a card's model has, by our names.
        dtype: of the result; None keeps the file's.

    Raises:
        ScantlingInputError: a file is malformed, or a tensor is missing, unknown, or of another shape.
    """
    config = config_path(found)
    card, model_type = read_config(config, weights=True)
    where = found.path.parent if found.path.suffix == ".json" else found.path
    header = read_checkpoint(where)
    kind, weights = family(model_type, str(config)), weights_of(card)
    rows = kind.rows(card)
    table = links(rows, weights)
    shapes = {name: info.shape for name, info in header.tensors.items()}
    ignored = (*kind.ignored, *beyond(config, kind, card.n_layers))
    names, extra = match(shapes, foreign_shapes(table, weights), kind.prefix, ignored, str(where))
    notes = [*header.notes, *_wrapper_notes(names)]
    read = _reader(header.tensors)
    stored = {prefix + head for head in heads(rows) for prefix in ("", kind.prefix)}
    if card.tied and (copies := [name for name in extra if bare(name) in stored]):
        notes += [_check_tied(read, copy, names, table, str(where)) for copy in copies]
        extra = [name for name in extra if name not in copies]
    if extra:
        more = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
        raise ScantlingInputError(
            f"{where}: tensor {extra[0]!r}{more} is not part of the model that the config describes"
        )
    target, mixed = _dtype([header.tensors[name] for name in names.values()], dtype)
    tensors = _translate(table, weights, lambda name: read(names[name]).to(target))
    return Loaded(card, tensors, (*notes, *mixed), end_ids(config), Origin(read_json(config), config.parent))


def load_gguf(found: Found, weights_of: Weights, dtype: str | None) -> Loaded:
    """Read a GGUF file, its blocks dequantised to float32 (or `dtype`).

    Raises:
        ScantlingInputError: the file is malformed or its tensors contradict its metadata.
    """
    torch = need("torch", "load weights")
    header = read_gguf(found.path)
    where = str(found.path)
    card = card_of_gguf(header.metadata, header.tensors, where)
    weights = weights_of(card)
    table = links(architecture(header.metadata, where).rows(card), weights)
    shapes = {name: tensor.shape for name, tensor in header.tensors.items()}
    names, extra = match(shapes, foreign_shapes(table, weights), "", (), where)
    if extra:
        raise ScantlingInputError(f"{where}: tensor {extra[0]!r} is not part of the model that the metadata describes")
    target = getattr(torch, dtype or "float32")
    read = lambda name: torch.from_numpy(dequantise(header.tensors[names[name]])).to(target)  # noqa: E731
    kinds = Counter(tensor.kind for tensor in header.tensors.values())
    note = "stored as " + ", ".join(f"{kind} ({n} tensors)" for kind, n in kinds.most_common())
    return Loaded(card, _translate(table, weights, read), (note,))


def _translate(table: list[Link], weights: Shapes, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for link in table:
        shapes = [weights[name] for name in link.ours]
        ours = link.transform.load([read(name) for name in link.theirs], shapes)
        tensors |= {name: tensor.contiguous() for name, tensor in zip(link.ours, ours, strict=True)}
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


def _check_tied(
    read: Callable[[str], Tensor], head: str, names: Mapping[str, str], table: list[Link], where: str
) -> str:
    embed = next(link.theirs[0] for link in table if link.ours == ("embed.weight",))
    torch = need("torch", "compare weights")
    if not torch.equal(read(head), read(names[embed])):
        raise ScantlingInputError(
            f"{where}: the config ties the head to the embeddings, but {head!r} and {names[embed]!r} differ; "
            "set tie_word_embeddings to false"
        )
    return f"{head!r} is stored again and equals the embeddings it is tied to"


def _wrapper_notes(names: Mapping[str, str]) -> list[str]:
    wrapped = [found for wanted, found in names.items() if not wanted.endswith(found) and not found.endswith(wanted)]
    stripped = [found for wanted, found in names.items() if found != wanted and found.endswith(wanted)]
    odd = wrapped or stripped
    return [f"names such as {odd[0]!r} carry the prefix of a wrapper, which was removed"] if odd else []


def _dtype(infos: list[TensorInfo], asked: str | None) -> tuple[Any, tuple[str, ...]]:
    """The dtype of the net: asked for, or the file's; the widest where a file mixes them."""
    torch = need("torch", "load weights")
    found = sorted({info.dtype for info in infos}, key=lambda name: (name != "float32", name != "float64", name))
    if odd := [name for name in found if name not in ("float64", "float32", "float16", "bfloat16")]:
        info = next(info for info in infos if info.dtype == odd[0])
        raise ScantlingInputError(f"{info.file}: tensor {info.name!r} is {odd[0]}; weights are floating-point numbers")
    if asked:
        return getattr(torch, asked), ()
    if len(found) == 1:
        return getattr(torch, found[0]), ()
    return torch.float32, (f"the file mixes {', '.join(found)}; loaded as float32",)
