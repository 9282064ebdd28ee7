"""One stack's tensors as parts of its blocks, and which layers and widths they make up."""

from __future__ import annotations

import re
from collections.abc import Mapping

from scantling.checkpoint.inspect.naming import Held, Named
from scantling.checkpoint.names import Shape

_READERS = ("attn.q.weight", "attn.k.weight", "attn.v.weight", "mlp.gate.weight", "mlp.up.weight")
_WRITERS = ("attn.o.weight", "mlp.down.weight")


class View:
    """One stack's tensors, by what they are in a block."""

    def __init__(self, side: str, roles: Mapping[str, Held], layers: list[int], width: int | None) -> None:
        self.side, self.roles, self.layers, self.width = side, roles, layers, width

    def role(self, part: str) -> Held | None:
        """Of a part of the blocks, such as ``attn.q.weight``."""
        return self.roles.get(f"{self.side}.blocks.{{i}}.{part}")

    def outside(self, part: str) -> Held | None:
        """Of a part of the stack outside the blocks."""
        return self.roles.get(f"{self.side}.{part}")

    def has(self, part: str) -> bool:
        """Whether any of the model's own layers has it."""
        role = self.role(part)
        return role is not None and any(layer in role.shapes for layer in self.layers)

    def shapes(self, part: str) -> list[Shape]:
        """The different shapes of a part, in the order of the layers."""
        role = self.role(part)
        return [] if role is None else list(dict.fromkeys(role.shapes[i] for i in self.layers if i in role.shapes))

    def reads(self, part: str) -> list[int]:
        """Rows of a matrix that reads the stream: its shape is (rows, d_model)."""
        return [self._facing(shape, 1)[0] for shape in self.shapes(part) if len(shape) > 1]

    def writes(self, part: str) -> list[int]:
        """Columns of a matrix that adds to the stream: its shape is (d_model, columns)."""
        return [self._facing(shape, 0)[1] for shape in self.shapes(part) if len(shape) > 1]

    def _facing(self, shape: Shape, axis: int) -> Shape:
        """(rows, columns), turned if only then the stream's width stands on its `axis`."""
        rows, columns = shape[-2:]
        return (columns, rows) if self._is_turned(shape, axis) else (rows, columns)

    def _is_turned(self, shape: Shape, axis: int) -> bool:
        sides = shape[-2:]
        return len(sides) == 2 and self.width is not None and sides[axis] != self.width == sides[1 - axis]

    def turned(self) -> list[str]:
        """Names of matrices that are stored the other way round."""
        out = []
        for axis, parts in ((1, _READERS), (0, _WRITERS)):
            for role in filter(None, map(self.role, parts)):
                out += [n for i, shape in role.shapes.items() if self._is_turned(shape, axis) for n in role.names[i]]
        return out


def layers_of(named: Named, roles: Mapping[str, Held]) -> tuple[dict[str, list[int]], tuple[tuple[str, int], ...]]:
    """The numbers of each stack's own layers, and those of layers beyond them."""
    found: dict[str, set[int]] = {}
    for name, role in roles.items():
        side, _, rest = name.partition(".blocks.")
        if rest:
            found.setdefault(side, set()).update(role.shapes)
    odd = _layers_with_other_names(named)
    out: dict[str, list[int]] = {}
    beyond = []
    for side, numbers in found.items():
        last = max(numbers)
        while last in odd and last in numbers and last > 0:
            beyond.append((side, last))
            numbers.remove(last)
            last -= 1
        out[side] = sorted(numbers)
    return out, tuple(sorted(beyond))


def _layers_with_other_names(named: Named) -> set[int]:
    """Layers that hold tensors without a role under names that layer 0 does not have."""
    odd: set[int] = set()
    for group in named.groups:
        if group.roles or group.ignored:
            continue
        first = {numbers[0] for numbers in group.members if numbers}
        odd |= first if 0 not in first else set()
    return odd


def stream_width(roles: Mapping[str, Held]) -> int | None:
    """d_model: the length of a norm's gain in the blocks, or the columns of the token table."""
    for name, role in roles.items():
        if re.search(r"blocks\.\{i\}\.(attn|mlp)(_res|_out)?_norm\.weight$", name):
            return next(iter(role.shapes.values()))[0]
    for name in ("decoder.final_norm.weight", "encoder.final_norm.weight", "embed.weight"):
        if name in roles and (shape := next(iter(roles[name].shapes.values()))):
            return shape[-1]
    return None
