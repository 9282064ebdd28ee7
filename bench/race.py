"""Interleaved races: every contender runs once per round, so that drift of the machine hits all alike."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version


def race(contenders: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """One unrecorded round to warm up, then `rounds` rounds: the figures of each contender."""
    figures: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + 1):
        for name, run in contenders.items():
            figure = run()
            if number:
                figures[name].append(figure)
    return figures


def report(
    title: str, unit: str, figures: Mapping[str, list[float]], against: str, higher_is_better: bool = True
) -> None:
    """Median, spread and the ratio of medians beside the contender `against`; above 1 is better."""
    print(f"{title} ({unit}; {len(next(iter(figures.values())))} interleaved rounds)")
    base = statistics.median(figures[against])
    for name, values in figures.items():
        median = statistics.median(values)
        ratio = median / base if higher_is_better else base / median
        print(f"  {name:34} median {median:9.3f}   from {min(values):9.3f} to {max(values):9.3f}   {ratio:5.2f}x")
    print()


def machine(*packages: str) -> str:
    """The machine and the versions that were found installed."""
    found = []
    for package in packages:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            found.append(f"{package} not installed")
    return f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}; {', '.join(found)}"
