"""What this machine reaches: how fast it reads memory and multiplies matrices, measured for about two seconds."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from itertools import cycle
from typing import Any

from scantling.errors import ScantlingInputError, need
from scantling.numbers.hardware import Device

SECONDS = 2.0
READ_SHARE = 0.3
"""Of the time, for reading; the dtypes share the rest."""
MOST_READ = 512 * 2**20
"""Bytes of the set that is read, at most: far beyond the caches of any processor."""
LEAST_READ = 2**20
PRODUCTS = ((512, 512, 512), (1024, 1024, 1024), (2048, 1024, 2048), (2048, 2048, 2048))
"""(rows, inner, columns) of the products that are tried, small ones first; the fastest is the peak."""
PASSES = 4
"""A product that leaves no time for so many passes is not tried."""
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "int8": "int8"}
"""Arithmetic that torch multiplies dense matrices in on every device, by its own names."""


@dataclass(frozen=True)
class Rate:
    """One thing that was measured, in bytes or operations per second.

    Attributes:
        best: the fastest pass: what bounds are made of.
        median: of all passes; far below the best where other programs were running.
        passes: how many.
        what: the size it was measured on.
    """

    best: float
    median: float
    passes: int
    what: str


@dataclass(frozen=True)
class Calibration:
    """What was measured, when and how.

    Attributes:
        at: local time of day with its offset, ISO 8601.
        seconds: it took.
        load: programs that waited for a processor in the last minute, before it began; None where nobody knows.
        read: reading of memory.
        products: by arithmetic, of `DTYPES`.
        free: bytes that could still be allocated.
        missing: why an arithmetic that was tried besides is not among the products.
    """

    at: str
    seconds: float
    place: str
    threads: int
    torch: str
    load: float | None
    read: Rate
    products: dict[str, Rate]
    free: int | None
    missing: tuple[str, ...] = ()

    @property
    def device(self) -> Device:
        """As a row of the table of devices."""
        products = ", ".join(f"{name} {rate.what}" for name, rate in self.products.items())
        return Device(
            name="this",
            about=f"{platform.machine()} {self.place}, {self.threads} threads, measured {self.at}",
            source=f"measured on this machine at {self.at} in {self.seconds:.1f} s with torch {self.torch}: read "
            f"{self.read.what}; products {products}; the fastest pass of each",
            dense_tflops={name: rate.best / 1e12 for name, rate in self.products.items()},
            memory_gb=None if self.free is None else self.free / 1e9,
            memory_gb_per_s=self.read.best / 1e9,
        )


def calibrate(
    arithmetic: Sequence[str],
    nbytes: int,
    seconds: float = SECONDS,
    place: str = "cpu",
    besides: Sequence[str] = (),
) -> Calibration:
    """Measure this machine.

    Args:
        arithmetic: what matrices are multiplied in, of `DTYPES`.
        nbytes: of the set that is read over and over; what does not fit into a cache is read from memory.
        seconds: about how long to measure.
        place: any torch device.
        besides: more arithmetic, which may be missing on this machine.

    Raises:
        ScantlingInputError: no such device, or one that does not multiply in that arithmetic.
        MissingExtra: torch is not installed.
    """
    need("torch", "measure this machine")
    import torch

    from scantling.tensor.memory import device_of, free_bytes

    unknown = [name for name in (*arithmetic, *besides) if name not in DTYPES]
    if unknown:
        raise ScantlingInputError(f"products in {unknown[0]} cannot be measured here; known: {', '.join(DTYPES)}")
    device, load = device_of(place), _load()
    at, start = datetime.now().astimezone().isoformat(timespec="seconds"), time.perf_counter()
    with torch.inference_mode():
        read = _read(torch, device, min(max(nbytes, LEAST_READ), MOST_READ), seconds * READ_SHARE)
        each = seconds * (1 - READ_SHARE) / max(1, len(arithmetic) + len(besides))
        products = {name: _product(torch, device, name, each) for name in arithmetic}
        missing = []
        for name in besides:
            try:
                products[name] = _product(torch, device, name, each)
            except ScantlingInputError as error:
                missing.append(str(error))
    took, how = time.perf_counter() - start, (torch.get_num_threads(), torch.__version__)
    return Calibration(at, took, place, *how, load, read, products, free_bytes(device), tuple(missing))


def _load() -> float | None:
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return None


def _read(torch: Any, device: Any, nbytes: int, seconds: float) -> Rate:
    """Sums and matrix-vector products over one set: neither writes anything, and now one is faster, now the other."""
    rows = max(1, nbytes // (4 * 1024))
    held = torch.ones(rows, 1024, device=device)
    vector, out = torch.ones(1024, device=device), torch.empty(rows, device=device)
    passes: list[Callable[[], Any]] = [held.sum, lambda: torch.mv(held, vector, out=out)]
    taken = _timed(torch, device, passes, seconds)
    size = 4 * rows * 1024
    return Rate(size / min(taken), size / statistics.median(taken), len(taken), f"{size / 1e6:,.0f} MB")


def _product(torch: Any, device: Any, name: str, seconds: float) -> Rate:
    """The fastest of the products, each tried as long as there is time for it."""
    dtype, product = getattr(torch, DTYPES[name]), torch._int_mm if name == "int8" else torch.mm
    rates: list[tuple[float, str]] = []
    end, best = time.perf_counter() + seconds, 0.0
    for left, (m, k, n) in zip(range(len(PRODUCTS), 0, -1), PRODUCTS, strict=True):
        now, work = time.perf_counter(), 2 * m * k * n
        if best and now + PASSES * work / best > end:
            break
        # As in every linear layer, the matrix has a row per output.
        x, weight = (torch.ones(shape, device=device).to(dtype) for shape in ((m, k), (n, k)))
        try:
            taken = _timed(torch, device, [partial(product, x, weight.t())], (end - now) / left)
        except (RuntimeError, AttributeError) as error:
            line = str(error).splitlines()[0]
            raise ScantlingInputError(f"this machine does not multiply matrices in {name}: {line}") from None
        rates += [(work / each, f"{m} x {k} x {n}") for each in taken]
        best = max(rates)[0]
    return Rate(best, statistics.median(rate for rate, _ in rates), len(rates), max(rates)[1])


def _timed(torch: Any, device: Any, runs: Sequence[Callable[[], Any]], seconds: float) -> list[float]:
    """Seconds of each pass of the runs in turn until the time is over; the first pass of each is not among them."""
    found: list[float] = []
    end = time.perf_counter() + seconds
    for i, run in enumerate(cycle(runs)):
        if i >= 2 * len(runs) and time.perf_counter() >= end:
            break
        start = time.perf_counter()
        run()
        if device.type != "cpu":
            torch.accelerator.synchronize()
        if i >= len(runs):
            # What is left out woke the threads.
            found.append(time.perf_counter() - start)
    return found
