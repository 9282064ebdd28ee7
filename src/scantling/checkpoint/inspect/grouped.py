"""Many names in a few words."""

from __future__ import annotations

from collections.abc import Iterable

from scantling.checkpoint.files import shown
from scantling.checkpoint.inspect.tables import HOLE, collapsed_names


def grouped(names: Iterable[str], most: int = 6) -> str:
    """Names with the numbers in them put together: ``'h.{0..11}.ln_1.weight'``."""
    groups: dict[str, list[tuple[int, ...]]] = {}
    for pattern, numbers in collapsed_names(list(names)):
        groups.setdefault(pattern, []).append(numbers)
    texts = [shown(_filled(pattern, numbers)) for pattern, numbers in groups.items()]
    more = f" and {len(texts) - most} more names" if len(texts) > most else ""
    return ", ".join(texts[:most]) + more


def _filled(pattern: str, numbers: list[tuple[int, ...]]) -> str:
    for values in zip(*numbers, strict=True):
        different = sorted(set(values))
        run = different == list(range(different[0], different[-1] + 1)) and len(different) > 2
        text = f"{different[0]}..{different[-1]}" if run else ",".join(map(str, different[:4]))
        many = f"{{{text}{',...' if not run and len(different) > 4 else ''}}}" if len(different) > 1 else text
        pattern = pattern.replace(HOLE, many, 1)
    return pattern.removesuffix("{")
