"""Texts to vectors: all-MiniLM-L6-v2 over many short texts and some long ones, beside sentence-transformers.

usage: python bench/embed.py [--rounds 5] [--short 1000] [--long 64] [--dtypes bfloat16,float32] [--compiled]

Each contender has a process of its own. sentence-transformers runs at every batch size of `SIZES` in a round before the
race, and races at its best one.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from race import machine, race, report

import scantling
from scantling.checkpoint.find import default_encoder

SIZES = (4, 8, 16, 32, 64)

Rate = Callable[[int | None], float]
"""Texts per second, at a batch size where one can be chosen."""


def texts(count: int, least: int, most: int) -> list[str]:
    """Random words of the tokenizer's own."""
    lines = (default_encoder() / "vocab.txt").read_text("utf-8").splitlines()
    words, draw = [word for word in lines if word.isalpha() and len(word) > 2], random.Random(0)
    return [" ".join(draw.choices(words, k=draw.randint(least, most))) for _ in range(count)]


def ours(dtype: str, compiled: bool) -> Callable[[Sequence[str], int | None], Any]:
    """`embed`, which chooses its batches itself."""
    lm = scantling.load(default_encoder(), dtype=dtype)
    return lambda given, _: lm.embed(given, compiled=compiled)


def theirs(dtype: str) -> Callable[[Sequence[str], int | None], Any]:
    """sentence-transformers on the same folder."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(default_encoder()), device="cpu", model_kwargs={"dtype": getattr(torch, dtype)})
    settings = {"normalize_embeddings": True, "show_progress_bar": False, "convert_to_tensor": True}
    return lambda given, size: model.encode(list(given), batch_size=size, **settings)


def work(who: str, dtype: str, job: list[str]) -> None:
    """Embed the job once for each batch size that comes as a line, and answer with the rate."""
    warnings.filterwarnings("ignore", message="text .* its end is cut")
    embed = theirs(dtype) if who == "theirs" else ours(dtype, who == "compiled")
    for line in sys.stdin:
        began = time.perf_counter()
        embed(job, json.loads(line))
        print(len(job) / (time.perf_counter() - began), flush=True)


@contextmanager
def contender(who: str, dtype: str, job: Sequence[int]) -> Iterator[Rate]:
    """A process that embeds; job: how many texts, and their least and most words."""
    command = [sys.executable, __file__, "--work", who, dtype, *map(str, job)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def rate(size: int | None) -> float:
            process.stdin.write(json.dumps(size) + "\n")  # type: ignore[union-attr]
            process.stdin.flush()  # type: ignore[union-attr]
            line = process.stdout.readline()  # type: ignore[union-attr]
            if not line:
                raise SystemExit(f"{who} ended; what it said is above")
            return float(line)

        yield rate
        process.stdin.close()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--short", type=int, default=1000)
    options.add_argument("--long", type=int, default=64)
    options.add_argument("--dtypes", default="bfloat16,float32")
    options.add_argument("--compiled", action="store_true", help="also through torch.compile")
    options.add_argument("--work", nargs=5, help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.work is not None:
        who, dtype, *job = given.work
        work(who, dtype, texts(*map(int, job)))
        return
    print(machine("scantling", "torch", "sentence-transformers"), f"; {torch.get_num_threads()} threads\n")
    for dtype in given.dtypes.split(","):
        for name, job in {"short": (given.short, 5, 20), "long": (given.long, 400, 400)}.items():
            compete(f"{job[0]} {name} texts, {dtype}", dtype, job, given)


def compete(title: str, dtype: str, job: tuple[int, int, int], given: argparse.Namespace) -> None:
    """One race, and its report."""
    with ExitStack() as running:
        found = running.enter_context(contender("ours", dtype, job))
        contenders: dict[str, Callable[[], float]] = {"scantling": lambda: found(None)}
        if given.compiled:
            compiled = running.enter_context(contender("compiled", dtype, job))
            contenders["scantling, compiled"] = lambda: compiled(None)
        against, absent = "", dict[str, str]()
        if find_spec("sentence_transformers") is None:
            absent = {"sentence-transformers": "not installed"}
        else:
            peer = running.enter_context(contender("theirs", dtype, job))
            tried = {size: peer(size) for size in (SIZES[-1], *SIZES)}
            best = max(tried, key=lambda size: tried[size])
            against = f"sentence-transformers, batches of {best}"
            contenders[against] = lambda: peer(best)
        report(title, "texts/s", race(contenders, given.rounds), against, absent=absent)


if __name__ == "__main__":
    main()
