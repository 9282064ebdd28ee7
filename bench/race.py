"""Interleaved races: every contender runs once per round, so that drift of the machine hits all alike."""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import scantling
from scantling.benches.child import Child
from scantling.benches.contest import Row, Subject, contest
from scantling.benches.plan import Contender, Load
from scantling.benches.timing import Spread, interleaved
from scantling.checkpoint.find import card_of, default_model

race = interleaved
"""Every contender once per round, after one round to warm up."""

LIBRARIES = ("torch", "transformers", "xllamacpp", "openvino-genai")


def report(
    title: str,
    unit: str,
    figures: Mapping[str, Sequence[float]],
    against: str,
    higher_is_better: bool = True,
    absent: Mapping[str, str] | None = None,
) -> None:
    """Median, spread and the ratio of medians beside the contender `against`; above 1 is better.

    Args:
        absent: who did not run, and why.
    """
    rounds = len(next(iter(figures.values()), ()))
    print(f"{title} ({unit}; {rounds} interleaved rounds)")
    base = Spread.of(figures[against]).median if against in figures else None
    for name, values in figures.items():
        found = Spread.of(values)
        ratio = None if base is None else found.median / base if higher_is_better else base / found.median
        shown = "" if ratio is None else f"   {ratio:5.2f}x"
        print(f"  {name:34} median {found.median:9.3f}   from {found.low:9.3f} to {found.high:9.3f}{shown}")
    for name, why in (absent or {}).items():
        print(f"  {name:34} did not run: {why}")
    print(flush=True)


def machine(*packages: str) -> str:
    """The machine and the versions that were found installed."""
    found = []
    for package in packages:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            found.append(f"{package} not installed")
    return f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}; {', '.join(found)}"


def options(about: str | None, rounds: int = 5, tokens: int = 64) -> argparse.ArgumentParser:
    """What the races of generation share."""
    made = argparse.ArgumentParser(description=about)
    made.add_argument("--rounds", type=int, default=rounds)
    made.add_argument("--tokens", type=int, default=tokens, help="steps after the first new token")
    made.add_argument("--peers", default="transformers,llama.cpp,llama-server,openvino")
    made.add_argument("--dtypes", default="bfloat16,float32", help="of torch and of transformers")
    return made


def subject(model: Path | None = None) -> Subject:
    """A GGUF file as a contest takes it; None is the default model, as it is shipped."""
    path = model or default_model()
    card = card_of(path)
    return Subject(str(path), scantling.assemble(card), card.family, card.vocab_size, stored=path)


def written(card: str, kind: str, folder: Path) -> Path:
    """A GGUF file of that kind with the card's initial weights, which speed does not depend on."""
    file = folder / f"{Path(card).stem}-{kind}.gguf"
    print(f"writing {file.name} ...", file=sys.stderr)
    with Child() as writer:
        asked = {"model": card, "initial": True, "dtype": "float32", "revision": None}
        writer.ask("write", **asked, file=str(file), kind=kind)
    return file


def contested(
    title: str,
    who: Subject,
    loads: Sequence[Load],
    given: argparse.Namespace,
    phase: Callable[[Row], Spread | None],
    engines: Sequence[Contender] | None = None,
) -> None:
    """One race of our engines and the peers: a table per load, each beside the best peer of that load."""
    peers = [name for name in given.peers.split(",") if name]
    entrants = list(engines) if engines is not None else ours(given.dtypes)
    for peer in peers:
        entrants += [Contender(peer, dtype) for dtype in given.dtypes.split(",")] if peer == "transformers" else []
        entrants += [Contender(peer, "stored")] if peer != "transformers" else []
    print(machine("scantling", *LIBRARIES), "\n")
    found = contest(who, entrants, loads, given.rounds, lambda text: print(text, file=sys.stderr))
    for load in loads:
        rows = {row.contender.name: row for row in found.rows if row.load == load}
        rates = {name: rate for name, row in rows.items() if (rate := phase(row)) is not None}
        theirs = {name: rate for name, rate in rates.items() if rows[name].contender.is_peer}
        best = max(theirs, key=lambda name: theirs[name].median, default="")
        print(f"{title}: {replace(load, cache='full').name} (tokens/s, all rows; {given.rounds} interleaved rounds)")
        for name, rate in rates.items():
            row = rows[name]
            ratio = f"{rate.median / theirs[best].median:5.2f}x" if best else ""
            share = row.decode_share if phase is decoding else row.prefill_share
            of = "" if share is None else f"{100 * share:6.1f} % of the roofline"
            print(f"  {name:24} median {rate.median:9.2f}   from {rate.low:9.2f} to {rate.high:9.2f}   {ratio} {of}")
        print()
    for line in found.missing:
        print(f"  {line}")
    print(flush=True)


def ours(dtypes: str) -> list[Contender]:
    """Every engine of ours on weights as they are stored, and torch in these dtypes."""
    packed = [Contender("packed", "stored"), Contender("packed-int8", "stored")]
    return [*packed, *(Contender("torch", dtype) for dtype in dtypes.split(","))]


def decoding(row: Row) -> Spread | None:
    """New tokens per second."""
    return row.decode_rate


def reading(row: Row) -> Spread | None:
    """Tokens of prompts per second."""
    return row.prefill_rate


def scratch() -> tempfile.TemporaryDirectory[str]:
    """A folder for files that a race writes."""
    return tempfile.TemporaryDirectory(prefix="scantling-race-")
