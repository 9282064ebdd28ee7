"""Activation patching and causal tracing: which layer and position carries the answer.

A clean pass gives the answer and a corrupted one does not; into the corrupted one a clean value is put at one layer and
one position, and how much of the answer comes back is read (Meng et al., arXiv:2202.05262, section 2.1, where noise on
the subject's embeddings corrupts; here that or another text).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from scantling.errors import ScantlingInputError
from scantling.lens.edits import BY_HEAD, put
from scantling.lens.hooks import ALL_REAL, Captured, Edit, capture
from scantling.lens.metric import Metric
from scantling.lens.points import places, stack_of
from scantling.lens.residual import checked_positions
from scantling.passes import Given

if TYPE_CHECKING:
    from scantling.model import Model

KINDS = ("stream", "attn", "cross", "mlp", "heads")
ROWS = 32
"""Patched passes that run as rows of one."""


@dataclass(frozen=True)
class Noise:
    """Gaussian noise on the embeddings at some positions, of the clean text.

    Attributes:
        positions: of the tokens that are spoiled.
        times: its standard deviation in those of the embeddings of the text; 3 in arXiv:2202.05262.
        draws: noises that results are averaged over.
        seed: of the noise.
    """

    positions: Sequence[int]
    times: float = 3.0
    draws: int = 4
    seed: int = 0


@dataclass(frozen=True)
class Grid:
    """What patching each place gave.

    Attributes:
        kind: ``stream``, ``attn``, ``cross``, ``mlp``, or ``heads``.
        values: (L, P) of the metric, by layer and position; by layer and head for ``heads``.
        positions: of the columns; heads for ``heads``.
        clean, corrupted: the metric without patching.
    """

    kind: str
    values: Tensor
    positions: tuple[int, ...]
    clean: float
    corrupted: float
    metric: Metric

    @property
    def restored(self) -> Tensor:
        """(L, P): 0 where nothing of the answer came back, 1 where all of it did."""
        return (self.values - self.corrupted) / (self.clean - self.corrupted)


def patch_grid(
    lm: Model,
    clean: Any,
    corrupted: Any,
    metric: Metric,
    kind: str = "stream",
    *,
    given: Given = ALL_REAL,
    stack: str | None = None,
    positions: Sequence[int] | None = None,
    step: Callable[[str], None] = lambda _: None,
) -> Grid:
    """Put clean values into a corrupted pass, one layer and position (or head, at all positions) at a time.

    Args:
        clean: ids (T) or (1, T); of an encoder-decoder the source, with the target in `given`.
        corrupted: ids of as many tokens, or a `Noise` on the clean ones.
        kind: what is patched: ``stream`` after each block, what ``attn``, ``cross`` or ``mlp`` writes, or ``heads``.
        stack: in which; by default the one that the head reads.
        positions: which are tried; None for all. ``heads`` takes none.
        step: is called with a word about each layer.

    Raises:
        ScantlingInputError: no such kind, texts of unequal length, a metric that is the same in both passes, or
            positions that do not exist.
    """
    metric.check(lm)
    where, points = stack_of(lm, stack)[0], _points(lm, kind, stack)
    before, spoilt = _texts(lm, clean, corrupted)
    good = capture(lm, before, [f"{where}:in", *points], given)
    edits = _noises(good[f"{where}:in"], where, corrupted) if isinstance(corrupted, Noise) else [()]
    bad = torch.stack([metric(capture(lm, spoilt, [], given, edit).out)[0] for edit in edits]).mean()
    score = float(metric(good.out)[0])
    if abs(score - float(bad)) <= 1e-6 * max(1.0, abs(score)):
        raise ScantlingInputError(f"the {metric.name} is {score:.4g} in both passes: there is nothing to bring back")
    heads = kind == "heads"
    if heads and positions is not None:
        raise ScantlingInputError("heads are patched at all positions: leave positions out")
    columns = checked_positions(good[f"{where}:in"].shape[1], positions)
    rows, passes = [], _Spoilt(lm, spoilt, given, metric, good, edits)
    for point in points:
        step(point)
        if heads:
            columns = list(range(good[point].shape[1]))
        rows.append(passes.row(point, columns))
    if len({len(row) for row in rows}) > 1:
        raise ScantlingInputError("layers have unequal numbers of heads, which make no grid: patch attn instead")
    return Grid(kind, torch.stack(rows), tuple(columns), score, float(bad), metric)


def _texts(lm: Model, clean: Any, corrupted: Any) -> tuple[Tensor, Tensor]:
    """Ids (1, T) of the clean text and of the one that is corrupted; the same where noise corrupts it."""
    before, spoilt = lm.ids(clean), lm.ids(clean if isinstance(corrupted, Noise) else corrupted)
    if before.shape != spoilt.shape or before.shape[0] != 1:
        raise ScantlingInputError(
            f"the clean text has {before.shape[1]} tokens and the corrupted one {spoilt.shape[1]}: "
            "patching needs one row of as many"
        )
    return before, spoilt


def _points(lm: Model, kind: str, stack: str | None) -> list[str]:
    if kind not in KINDS:
        raise ScantlingInputError(f"unknown kind of patch {kind!r}: use one of {', '.join(KINDS)}")
    where, found = stack_of(lm, stack)
    if kind == "stream":
        return [f"{where}.blocks.{i}" for i in range(len(found.blocks))]
    name = "attn" if kind == "heads" else kind
    points = [f"{p.path}:mixed" if kind == "heads" else p.path for p in places(lm, stack, (name,))]
    if not points:
        raise ScantlingInputError(f"the {where} of {lm.card.name} has no {kind} to patch")
    return points


def _noises(embedded: Tensor, where: str, noise: Noise) -> list[tuple[Edit, ...]]:
    at = checked_positions(embedded.shape[1], noise.positions)
    if not at or noise.draws < 1:
        raise ScantlingInputError("noise needs at least one position and one draw")
    size = noise.times * float(embedded.std())
    draw = torch.Generator().manual_seed(noise.seed)
    return [
        (_spoil(f"{where}:in", at, torch.randn(len(at), embedded.shape[-1], generator=draw) * size),)
        for _ in range(noise.draws)
    ]


def _spoil(point: str, at: Sequence[int], noise: Tensor) -> Edit:
    def change(x: Tensor) -> Tensor:
        x[:, at] += noise.to(x)
        return x

    return Edit(point, change)


@dataclass(frozen=True)
class _Spoilt:
    """The corrupted pass, in one way or several, and the clean values to put into it."""

    lm: Model
    ids: Tensor
    given: Given
    metric: Metric
    good: Captured
    edits: Sequence[Sequence[Edit]]

    def row(self, point: str, columns: Sequence[int]) -> Tensor:
        """The metric with each column patched, averaged over the ways of corruption; a column is a row of a pass."""
        found = []
        for start in range(0, len(columns), ROWS):
            some, value = columns[start : start + ROWS], self.good[point]
            patch = _head_patch(point, value, some) if _by_head(point) else put(point, value, [[c] for c in some])
            rows, given = self.ids.expand(len(some), -1), _repeated(self.given, len(some))
            passes = [capture(self.lm, rows, [], given, [*edit, patch]).out for edit in self.edits]
            found.append(torch.stack([self.metric(out) for out in passes]).mean(0))
        return torch.cat(found)


def _by_head(point: str) -> bool:
    return point.rpartition(":")[2] in BY_HEAD


def _head_patch(point: str, value: Tensor, heads: Sequence[int]) -> Edit:
    def change(x: Tensor) -> Tensor:
        for row, head in enumerate(heads):
            x[row, head] = value[0, head].to(x)
        return x

    return Edit(point, change)


def _repeated(given: Given, rows: int) -> Given:
    """The same of several equal rows."""

    def more(value: Any) -> Any:
        wide = torch.as_tensor(value)
        wide = wide[None] if wide.dim() == 1 else wide
        return wide.expand(rows, -1) if wide.shape[0] == 1 else wide

    names = ("attention_mask", "position_ids", "token_type_ids", "decoder_ids")
    return replace(given, **{name: more(value) for name in names if (value := getattr(given, name)) is not None})
