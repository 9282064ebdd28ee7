"""Pieces of documents put into rows: best-fit packing, without a token lost."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray


def best_fit(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Items in bins by best-fit decreasing: the largest first, each into the fullest bin that still has room for it.

    Best-fit decreasing needs at most 11/9 of the fewest bins possible, plus a constant (D. S. Johnson, "Near-optimal
    bin packing algorithms", MIT 1973); for documents: H. Ding and others, arXiv:2404.10830, section 3.
    Among bins equally full the one opened first is taken, and among items of one size the first.

    Args:
        sizes: of the items, 1 .. capacity each.

    Returns:
        For each bin the numbers of its items; bins in the order in which they were opened.
    """
    order = sorted(range(len(sizes)), key=lambda item: -sizes[item])
    bins: list[list[int]] = []
    with_room: dict[int, list[int]] = {}
    # Bit r is set where a bin with room r is open: the lowest bit from `size` on is the fullest bin that fits.
    rooms = 0
    for item in order:
        size = sizes[item]
        fitting = rooms >> size
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1
            place = heappop(with_room[room])
            if not with_room[room]:
                rooms &= ~(1 << room)
            bins[place].append(item)
        else:
            room, place = capacity, len(bins)
            bins.append([item])
        left = room - size
        if left:
            heappush(with_room.setdefault(left, []), place)
            rooms |= 1 << left
    return bins


def cut(spans: NDArray[np.int64], longest: int) -> NDArray[np.int64]:
    """Spans of documents cut into pieces of `longest` units; what is left of a span is its last piece.

    Args:
        spans: (N, 3) of document, start, end.

    Returns:
        (M, 3) of document, start, end, in the same order.
    """
    counts = -(-(spans[:, 2] - spans[:, 1]) // longest)
    owner = np.repeat(np.arange(len(spans)), counts)
    number = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    start = spans[owner, 1] + number * longest
    return np.stack([spans[owner, 0], start, np.minimum(start + longest, spans[owner, 2])], axis=1)


def joined(pieces: NDArray[np.int64]) -> NDArray[np.int64]:
    """Pieces (M, 3) sorted by document and start, with those that touch made one."""
    if len(pieces) == 0:
        return pieces
    pieces = pieces[np.lexsort((pieces[:, 1], pieces[:, 0]))]
    touch = (pieces[1:, 0] == pieces[:-1, 0]) & (pieces[1:, 1] == pieces[:-1, 2])
    first = np.flatnonzero(np.concatenate([[True], ~touch]))
    last = np.concatenate([first[1:] - 1, [len(pieces) - 1]])
    return np.column_stack([pieces[first, :2], pieces[last, 2]])
