"""Texts to vectors: all-MiniLM-L6-v2 over many short texts and some long ones, beside sentence-transformers.

usage: python bench/embed.py [--rounds 5] [--short 1000] [--long 64] [--dtypes bfloat16,float32] [--compiled]

sentence-transformers runs at every batch size of `SIZES` in a round before the race, and races at its best one.
"""

from __future__ import annotations

import argparse
import os
import random
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from race import machine, race, report

import scantling
from scantling.checkpoint.find import default_encoder

SIZES = (4, 8, 16, 32, 64)


def texts(count: int, least: int, most: int) -> list[str]:
    """Random words of the tokenizer's own."""
    lines = (default_encoder() / "vocab.txt").read_text("utf-8").splitlines()
    words, draw = [word for word in lines if word.isalpha() and len(word) > 2], random.Random(0)
    return [" ".join(draw.choices(words, k=draw.randint(least, most))) for _ in range(count)]


def rate(embed: Callable[[Sequence[str]], Any], given: Sequence[str]) -> Callable[[], float]:
    """Texts per second."""

    def run() -> float:
        began = time.perf_counter()
        embed(given)
        return len(given) / (time.perf_counter() - began)

    return run


def theirs(dtype: str) -> Callable[[int], Callable[[Sequence[str]], Any]]:
    """sentence-transformers on the same folder, by the batch size."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(default_encoder()), device="cpu", model_kwargs={"dtype": getattr(torch, dtype)})

    def at(size: int) -> Callable[[Sequence[str]], Any]:
        settings = {"batch_size": size, "normalize_embeddings": True, "show_progress_bar": False}
        return lambda given: model.encode(list(given), **settings, convert_to_tensor=True)

    return at


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--short", type=int, default=1000)
    options.add_argument("--long", type=int, default=64)
    options.add_argument("--dtypes", default="bfloat16,float32")
    options.add_argument("--compiled", action="store_true", help="also through torch.compile")
    given = options.parse_args()
    print(machine("scantling", "torch", "sentence-transformers"), f"; {torch.get_num_threads()} threads\n")
    warnings.filterwarnings("ignore", message="text .* its end is cut")
    jobs = {"short": texts(given.short, 5, 20), "long": texts(given.long, 400, 400)}
    for dtype in given.dtypes.split(","):
        lm, peer, absent = scantling.load(default_encoder(), dtype=dtype), None, {}
        try:
            peer = theirs(dtype)
        except ImportError as error:
            absent = {"sentence-transformers": str(error).splitlines()[0]}
        for name, job in jobs.items():
            contenders = {"scantling": rate(lm.embed, job)}
            if given.compiled:
                contenders["scantling, compiled"] = rate(lambda given, lm=lm: lm.embed(given, compiled=True), job)
            against = ""
            if peer is not None:
                tried = {size: rate(peer(size), job)() for size in SIZES}
                best = max(tried, key=lambda size: tried[size])
                against = f"sentence-transformers, batches of {best}"
                contenders[against] = rate(peer(best), job)
            lengths = f"{len(job)} {name} texts, {dtype}"
            report(lengths, "texts/s", race(contenders, given.rounds), against, absent=absent)


if __name__ == "__main__":
    main()
