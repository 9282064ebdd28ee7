"""Weights of a checkpoint, by our names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scantling.cards import Card
from scantling.cards.schema import Sinusoidal
from scantling.checkpoint.config_keys import read_json
from scantling.checkpoint.families import family
from scantling.checkpoint.families.gguf import architecture, card_of_gguf
from scantling.checkpoint.families.gguf.rope import BESIDE
from scantling.checkpoint.family import Family
from scantling.checkpoint.find import Found, config_path
from scantling.checkpoint.gguf import GGUFHeader, read_gguf
from scantling.checkpoint.gguf_values import dequantise
from scantling.checkpoint.header import TensorInfo
from scantling.checkpoint.hf_config import beyond, end_ids, labels, read_config, start_id
from scantling.checkpoint.matching import WRAPPERS, bare, match
from scantling.checkpoint.names import Link, foreign_shapes, heads, links
from scantling.checkpoint.origin import Origin
from scantling.checkpoint.sentence import TextRules, text_rules
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


@dataclass(frozen=True)
class DescribedFolder:
    """Safetensors whose headers describe a whole model; see `Loaded` for what else is known.

    Attributes:
        tensors: of the files, by their names there.
        names: their names there, by their usual ones; a usual one that is not here stands for zeros.
        wanted: shapes by the usual names.
        copies: names of tensors that repeat the token table.
        computed: by their names there, our names of tensors that the model computes itself.
    """

    kind: Family
    where: Path
    config: Path
    card: Card
    weights: Shapes
    table: list[Link]
    tensors: Mapping[str, TensorInfo]
    names: Mapping[str, str]
    wanted: Shapes
    copies: list[str]
    computed: Mapping[str, str]
    notes: tuple[str, ...]

    @property
    def read(self) -> list[TensorInfo]:
        """The tensors that the model is made of."""
        return [self.tensors[name] for name in self.names.values()]

    def copy_notes(self, same: Callable[[str, str], bool]) -> list[str]:
        """A note for each tensor that repeats the token table, as a head or as another stack's table.

        Args:
            same: whether two tensors of the files are equal.

        Raises:
            ScantlingInputError: one differs from the table.
        """
        return [_check_copy(same, name, self) for name in self.copies]


def describe_safetensors(found: Found, weights_of: Weights) -> DescribedFolder:
    """Read the headers of a folder or file and hold them against the model that its config names.

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
    other_head = () if card.head.kind == "lm" else kind.vocabulary_head
    ignored = (*kind.ignored, *other_head, *beyond(config, kind, card.n_layers))
    wanted = foreign_shapes(table, weights)
    names, extra = match(shapes, wanted, kind.prefix, ignored, str(where), kind.renamed, kind.absent)
    notes = [*header.notes, *_wrapper_notes(names), *_unread_notes(shapes.keys() - names.values() - set(extra))]
    again = {*kind.copies, *(name.removeprefix(kind.prefix) for name in heads(rows) if card.tied)}
    copies = [name for name in extra if bare(name, kind.renamed).removeprefix(kind.prefix) in again]
    computed = _computed(kind, card, [name for name in extra if name not in copies], str(where))
    tensors = header.tensors
    return DescribedFolder(
        kind, where, config, card, weights, table, tensors, names, wanted, copies, computed, tuple(notes)
    )


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


@dataclass(frozen=True)
class Described:
    """A GGUF file whose header describes a whole model.

    Attributes:
        names: of its tensors in the file, by their usual ones.
        note: how they are stored.
    """

    header: GGUFHeader
    card: Card
    weights: Shapes
    table: list[Link]
    names: Mapping[str, str]
    note: str


def describe_gguf(found: Found, weights_of: Weights) -> Described:
    """Read the header of a GGUF file and hold it against the model that it names.

    Raises:
        ScantlingInputError: the file is malformed or its tensors contradict its metadata.
    """
    header = read_gguf(found.path)
    where = str(found.path)
    card = card_of_gguf(header.metadata, header.tensors, where)
    weights = weights_of(card)
    table = links(architecture(header.metadata, where).rows(card), weights)
    shapes = {name: tensor.shape for name, tensor in header.tensors.items()}
    names, extra = match(shapes, foreign_shapes(table, weights), "", (), where)
    if extra := [name for name in extra if name not in BESIDE]:
        raise ScantlingInputError(f"{where}: tensor {extra[0]!r} is not part of the model that the metadata describes")
    kinds = Counter(tensor.kind for tensor in header.tensors.values())
    note = "stored as " + ", ".join(f"{kind} ({n} tensors)" for kind, n in kinds.most_common())
    return Described(header, card, weights, table, names, note)


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


def _check_copy(same: Callable[[str, str], bool], copy: str, file: DescribedFolder) -> str:
    """The note about a tensor that repeats the token table, as a head or as another stack's table."""
    embed, kind = next(link.theirs[0] for link in file.table if link.ours == ("embed.weight",)), file.kind
    if not same(copy, file.names[embed]):
        what, end = "ties the head to the embeddings", "; set tie_word_embeddings to false"
        if bare(copy, kind.renamed).removeprefix(kind.prefix) in kind.copies:
            what, end = "has one table for source and target", ""
        raise ScantlingInputError(
            f"{file.where}: the config {what}, but {copy!r} and {file.names[embed]!r} differ{end}"
        )
    return f"{copy!r} is stored again and equals the embeddings it is tied to"


def _computed(kind: Family, card: Card, extra: list[str], where: str) -> dict[str, str]:
    """Of the tensors that the model does not store, those that it computes: their name in the file -> ours.

    Raises:
        ScantlingInputError: it does not compute them either.
    """
    rows = {f"{row.theirs}.weight": f"{row.ours}.weight" for row in kind.rows(card) if "{i}" not in row.theirs}
    waves = isinstance(card.position, Sinusoidal) and card.position.table
    known = {full: ours for full, ours in rows.items() if waves and ours.endswith("position.table.weight")}
    found = {name: known.get(name) or known.get(kind.prefix + name) for name in extra}
    if unknown := [name for name, ours in found.items() if ours is None]:
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        raise ScantlingInputError(
            f"{where}: tensor {unknown[0]!r}{more} is not part of the model that the config describes"
        )
    return {name: ours for name, ours in found.items() if ours is not None}


def _wrapper_notes(names: Mapping[str, str]) -> list[str]:
    odd = [name for name in names.values() if name.startswith(WRAPPERS)]
    return [f"names such as {odd[0]!r} carry the prefix of a wrapper, which was removed"] if odd else []


def _unread_notes(unread: Iterable[str]) -> list[str]:
    """What a file has and this model does not read: buffers, and heads of other tasks."""
    names = sorted(unread)
    if not names:
        return []
    more = f" and {len(names) - 6} more" if len(names) > 6 else ""
    return [f"not read: {', '.join(map(repr, names[:6]))}{more}"]


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
