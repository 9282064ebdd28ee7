"""What a GGUF architecture says of itself, and the reading of its metadata key by key."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scantling.cards import Card
from scantling.checkpoint.config_keys import Keys
from scantling.checkpoint.files import open_regular, shown
from scantling.checkpoint.names import Row
from scantling.errors import ScantlingInputError

Value = int | float | bool | str | list[bool]
Written = tuple[dict[str, Value], dict[str, list[float]]]
"""Metadata by key, and tensors that belong to it, such as ``rope_freqs.weight``.

Keys stand without the architecture's name; those that begin with ``tokenizer.`` are whole.
"""


@dataclass(frozen=True)
class Architecture:
    """One value of ``general.architecture``; `read` and `write` are inverse on every card that `write` can say.

    Attributes:
        read: the sections of the card.
        write: the same as metadata. It may leave out what it has no key for: reading back shows what was lost.
        rows: the table of tensor names.
        unread: keys that `write` may set and that llama.cpp reads and does not apply, with what it does instead.
        notes: what llama.cpp does otherwise in every model.
    """

    read: Callable[[Meta], dict[str, Any]]
    write: Callable[[Card], Written]
    rows: Callable[[Card], Sequence[Row]]
    unread: Mapping[str, str]
    notes: Sequence[str] = ()


class Meta:
    """The metadata of one architecture, each key to be taken once, and the tensors beside it.

    Attributes:
        tensors: by name; whether one is there tells what no key says (an untied head, biases).
    """

    def __init__(self, metadata: Mapping[str, Any], tensors: Mapping[str, Any], where: str) -> None:
        self.tensors, self.where = tensors, where
        self._prefix = f"{metadata['general.architecture']}."
        self._keys = Keys(metadata, where)
        self._foreign = frozenset(key for key in metadata if not key.startswith(self._prefix))

    def raw(self, name: str, default: Any = None) -> Any:
        """The value as it stands."""
        return self._keys.raw(self._prefix + name, default)

    def size(self, name: str, default: int | None = None, least: int = 1) -> int:
        """A whole number of at least `least`."""
        return self._keys.size(self._prefix + name, default, least)

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number; the shortest decimal of its float32."""
        return short(self._keys.number(self._prefix + name, default))

    def only(self, name: str, *allowed: Any) -> None:
        """Refuse any value but these; missing is fine."""
        self._keys.only(self._prefix + name, *allowed)

    def only_beside(self, key: str, allowed: Any) -> None:
        """The same of a key that is not the architecture's, by its full name."""
        self._keys.only(key, allowed)

    def has(self, name: str) -> bool:
        """Whether the file has a tensor of that name."""
        return name in self.tensors

    def vocab_size(self) -> int:
        """Rows of the token table: what the tensor says, since the key is optional."""
        if not self.has("token_embd.weight"):
            raise ScantlingInputError(f"{self.where}: tensor 'token_embd.weight' is missing")
        rows = int(self.tensors["token_embd.weight"].shape[0])
        stated = self.raw("vocab_size", rows)
        if stated != rows:
            name = f"{self._prefix}vocab_size"
            raise ScantlingInputError(f"{self.where}: {name} is {stated} and 'token_embd.weight' has {rows} rows")
        return rows

    def floats(self, name: str, n: int) -> list[float]:
        """The `n` numbers of a small F32 tensor that belongs to the metadata.

        Raises:
            ScantlingInputError: it is of another kind or length.
        """
        tensor = self.tensors[name]
        found = tuple(tensor.shape)
        if tensor.kind != "F32" or found != (n,):
            raise ScantlingInputError(
                f"{self.where}: tensor {name!r} is {tensor.kind} of shape {list(found)}; F32 of shape {[n]} is needed"
            )
        if (values := getattr(tensor, "values", None)) is None:
            file, _ = open_regular(tensor.file)
            with file:
                file.seek(tensor.start)
                values = struct.unpack(f"<{n}f", file.read(4 * n))
        if bad := [value for value in values if not 0 < value < math.inf]:
            raise ScantlingInputError(f"{self.where}: tensor {name!r} holds {bad[0]}; numbers above 0 are needed")
        return [short(value) for value in values]

    def refuse(self, name: str, right: str) -> ScantlingInputError:
        """The error that the value of a key is not `right`."""
        return ScantlingInputError(f"{self.where}: {self._prefix}{name} is {shown(self.raw(name))}; {right}")

    def finish(self) -> None:
        """Refuse, by name, a key of the architecture that was not taken."""
        self._keys.finish(self._foreign)


def short(value: float) -> float:
    """The shortest decimal that is the same float32: GGUF stores 1e-5 as 9.999999747378752e-06."""
    try:
        single = struct.pack("<f", value)
    except OverflowError:
        return value
    value = float(struct.unpack("<f", single)[0])
    shortest = next((text for n in range(1, 10) if struct.pack("<f", float(text := f"{value:.{n}g}")) == single), None)
    return value if shortest is None else float(shortest)
