"""How the tensors of a model are stored: sums by dtype or kind of block."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from scantling.checkpoint.inspect.gather import Stored, dtype_of


@dataclass(frozen=True)
class Kind:
    """Tensors of one dtype or kind of block; `numel` and `nbytes` are sums."""

    dtype: str
    tensors: int
    numel: int
    nbytes: int


def kinds(tensors: Mapping[str, Stored], names: Iterable[str]) -> tuple[Kind, ...]:
    """The tensors with these names by dtype or kind of block, the largest first."""
    alike: dict[str, list[Stored]] = {}
    for name in names:
        tensor = tensors[name]
        alike.setdefault(dtype_of(tensor), []).append(tensor)
    found = (
        Kind(dtype, len(each), sum([tensor.numel for tensor in each]), sum([tensor.nbytes for tensor in each]))
        for dtype, each in alike.items()
    )
    return tuple(sorted(found, key=lambda kind: -kind.nbytes))
