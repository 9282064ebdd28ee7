"""What headers say, held against the model that the config or the metadata names: no weight is read here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from scantling.cards import Card
from scantling.cards.schema import Sinusoidal
from scantling.checkpoint.families import family
from scantling.checkpoint.families.gguf import architecture, card_of_gguf
from scantling.checkpoint.families.gguf.rope import BESIDE
from scantling.checkpoint.family import Family
from scantling.checkpoint.find import Found, config_path
from scantling.checkpoint.gguf import GGUFHeader, read_gguf
from scantling.checkpoint.header import TensorInfo
from scantling.checkpoint.hf_config import beyond, read_config
from scantling.checkpoint.matching import WRAPPERS, bare, match
from scantling.checkpoint.names import Link, foreign_shapes, heads, links
from scantling.checkpoint.sharded import read_checkpoint
from scantling.errors import ScantlingInputError

Shapes = Mapping[str, tuple[int, ...]]
Weights = Callable[[Card], Shapes]


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
