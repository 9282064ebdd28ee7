"""Jobs side by side on the processor, each on a thread of its own.

Threads that share one operation wait for the slowest of them at its end, hundreds of times in a pass. With a job each
they wait once, at the end of all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Job = TypeVar("Job")
Result = TypeVar("Result")

IDLE = 0.02
"""Of the whole time, how much threads may wait at the end for the last one."""


def side_by_side(run: Callable[[Job], Result], jobs: Sequence[Job], sizes: Sequence[int]) -> Iterator[Result]:
    """What `run` makes of each job, in their order.

    As many as keep all threads evenly busy go side by side, each with its share of torch's threads; the others one
    after the other, each on all of them.

    Args:
        sizes: of the jobs, in any unit of the time that they take.
    """
    threads = torch.get_num_threads()
    streams, first = division(sizes, threads)
    if streams > 1:
        yield from _apart(run, jobs[:first], streams, threads)
    for job in jobs[first:]:
        yield run(job)


def division(sizes: Sequence[int], threads: int) -> tuple[int, int]:
    """How many streams, and how many of the first jobs go through them: (1, 0) where none is worth it."""
    streams = threads
    while streams > 1:
        first = even(sizes, streams)
        if 2 * sum(sizes[:first]) > sum(sizes):
            return streams, first
        streams //= 2
    return 1, 0


def even(sizes: Sequence[int], streams: int) -> int:
    """How many of the first jobs keep the streams busy to the end, a free one taking the next: 0 where none do."""
    loads, found = [0] * streams, 0
    for count, size in enumerate(sizes, 1):
        loads[loads.index(min(loads))] += size
        if streams * max(loads) - sum(loads) <= IDLE * sum(loads):
            found = count
    return found


def _apart(run: Callable[[Job], Result], jobs: Sequence[Job], streams: int, threads: int) -> Iterator[Result]:
    def begin() -> None:
        # Asked first: a new thread takes over the number of the process when it is first used.
        torch.get_num_threads()
        torch.set_num_threads(threads // streams)

    pool = ThreadPoolExecutor(streams, "scantling-stream", begin)
    try:
        yield from pool.map(run, jobs)
    finally:
        pool.shutdown(cancel_futures=True)
        # It is the calling thread's number that the process goes on with.
        torch.set_num_threads(threads)
