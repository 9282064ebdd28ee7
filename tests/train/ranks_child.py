"""One rank of the tests of several processes: runs the jobs of a file one after the other, each in its own folder.

Run as ``python -m tests.train.ranks_child FOLDER`` with the variables that torchrun sets; FOLDER has jobs.json, a
list of {"out", "model", "plan", "break"}: the model's and the plan's changes, and what is done to it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from tests.train.small import fresh
from tests.train.test_run import settings

import scantling as sc
from scantling.data import byte_tokenizer, open_corpus
from scantling.errors import ScantlingError
from scantling.train import checkpoints
from scantling.train.ranks import Ranks, joined
from scantling.train.start import train
from scantling.train.watch import Metrics


def drawn(changes: dict[str, Any]) -> sc.Model:
    """A small net with grouped queries and a tied table, or what `changes` make of it; no dropout."""
    lm = fresh(**{"vocab_size": 320, "tied": True, **changes})
    lm.tokenizer = byte_tokenizer()
    return lm


def run(job: dict[str, Any], folder: Path) -> None:
    """Train as the job says; only rank 0 watches. What goes wrong is written, by rank."""
    out = folder / job["out"]
    plan = settings(**job["plan"])
    rank = Ranks.here(plan.parallel).rank
    lm = drawn(job["model"])
    if job.get("break") == "weights" and rank == 1:
        with torch.no_grad():
            lm.net.embed.weight[0, 0] = float("nan")
    found = checkpoints.newest(out)
    watchers = [Metrics(out, 0 if found is None else found.step)] if rank == 0 else []
    corpus = open_corpus(folder / "corpus", held_out=0.2)
    try:
        train(lm, corpus, plan, out, watchers, found)
    except ScantlingError as error:
        (out / f"error-{rank}.txt").write_text(str(error))


def main(folder: Path) -> None:
    """All jobs."""
    torch.set_num_threads(1)
    with joined("cpu", f"file://{folder / 'meeting'}"):
        for job in json.loads((folder / "jobs.json").read_text()):
            (folder / job["out"]).mkdir(exist_ok=True)
            run(job, folder)
            if os.environ["RANK"] == "0":
                print("done", job["out"], flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
