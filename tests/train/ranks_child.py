"""One rank of the tests of several processes: runs the jobs of a file one after the other, each in its own folder.

Run as ``python -m tests.train.ranks_child FOLDER`` with the variables that torchrun sets; FOLDER has the corpus and
jobs.json, a list of {"out", "model", "plan", "twist"}: what is changed of the model and of the plan, and what happens.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.train.small import fresh
from tests.train.test_run import Killer, settings

import scantling as sc
from scantling.data import byte_tokenizer, open_corpus
from scantling.errors import ScantlingError
from scantling.train import checkpoints
from scantling.train.optim import clip, total_norm
from scantling.train.ranks import Ranks, joined
from scantling.train.start import begin, train
from scantling.train.step import Outcome, Stepper
from scantling.train.watch import Metrics


def drawn(changes: dict[str, Any]) -> sc.Model:
    """A small net with grouped queries and a tied table, or what `changes` make of it; no dropout."""
    lm = fresh(**{"vocab_size": 320, "tied": True, **changes})
    lm.tokenizer = byte_tokenizer()
    return lm


def run(job: dict[str, Any], folder: Path) -> None:
    """Train as the job says; rank 0 alone watches. What goes wrong is written, by rank."""
    out, plan, lm = folder / job["out"], settings(**job["plan"]), drawn(job["model"])
    corpus = open_corpus(folder / "corpus", held_out=0.2)
    ranks = Ranks.here(plan.parallel)
    if job.get("twist") == "a weight is not finite in rank 1" and ranks.rank == 1:
        with torch.no_grad():
            lm.net.get_parameter("decoder.blocks.1.mlp.up.weight").fill_(float("nan"))
    if job.get("twist") == "shards of the gradient":
        shards_of_the_gradient(lm, corpus, plan, out)
        return
    found = checkpoints.newest(out)
    watchers: list[Any] = [Metrics(out, 0 if found is None else found.step)] if ranks.rank == 0 else []
    if job.get("twist") == "rank 1 is told to stop" and ranks.rank == 1:
        watchers = [Killer(3, signal.SIGTERM)]
    with pytest.MonkeyPatch.context() as patch:
        if job.get("twist") == "rank 1 dies" and ranks.rank == 1:
            patch.setattr(Stepper, "update", dying)
        try:
            train(lm, corpus, plan, out, watchers, found)
        except ScantlingError as error:
            (out / f"error-{ranks.rank}.txt").write_text(f"{type(error).__name__}: {error}")


def dying(stepper: Stepper, step: int, *given: Any) -> Outcome:
    """No update: the process is gone."""
    os._exit(9)


def shards_of_the_gradient(lm: sc.Model, corpus: Any, plan: Any, out: Path) -> None:
    """A gradient of which rank 0 has the number 3 and rank 1 the number 4, clipped to a norm of 1."""
    stepper = begin(lm, corpus, plan, out, []).stepper
    for weight in stepper.optimizers.weights.values():
        weight.grad = torch.zeros_like(weight)
    held = stepper.optimizers.weights["embed.weight"].grad
    assert held is not None
    held[0, 0] = 3.0 + stepper.ranks.rank
    gradients = dict(stepper.optimizers.gradients())
    assert stepper.division is not None
    norm = total_norm(stepper.division.norms(gradients))
    clip(gradients, norm, 1.0)
    (out / f"clipped-{stepper.ranks.rank}.json").write_text(json.dumps([norm, float(held[0, 0])]))


def main(folder: Path) -> None:
    """All jobs."""
    torch.set_num_threads(1)
    with joined("cpu", (folder / "meeting").as_uri()):
        for job in json.loads((folder / "jobs.json").read_text()):
            (folder / job["out"]).mkdir(exist_ok=True)
            run(job, folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
