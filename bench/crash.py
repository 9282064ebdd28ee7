"""Kill a training run at random instants and let it go on: `python bench/crash.py --kills 200`.

A small net trains with a checkpoint after every update. A process that trains is killed by SIGKILL after a random time,
again and again, until the run is done; then another run begins. Each run must end with the losses, the weights and the
optimizer state of one that was never killed, to the bit, and no checkpoint that was there may be lost. The last line of
standard output is JSON; the exit status is 1 if anything was lost or differs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import scantling as sc
from scantling.cards.read import from_dict, training_of
from scantling.data import Corpus, byte_tokenizer, prepare
from scantling.data.sources import stdlib_files
from scantling.train import checkpoints
from scantling.train.start import train
from scantling.train.watch import Metrics, read_metrics

CARD: dict[str, Any] = {
    "name": "crash",
    "family": "decoder",
    "n_layers": 2,
    "d_model": 32,
    "vocab_size": 320,
    "context": 64,
    "attention": {"kind": "multi_head", "n_heads": 4},
    "position": {"kind": "rope", "theta": 10000.0},
    "norm": {"kind": "rmsnorm", "eps": 1e-5},
    "mlp": {"kind": "gated", "act": "silu", "d_ff": 48},
    "tied": True,
    "dropout": {"residual": 0.1, "attention": 0.1},
}
SETTINGS: dict[str, Any] = {
    "steps": 20,
    "batch": 2,
    "accumulation": 2,
    "save_every": 1,
    "keep": 2,
    "evaluation.every": 5,
    "evaluation.tokens": 200,
    "evaluation.sample_tokens": 2,
}


@dataclass
class Tally:
    """What happened.

    Attributes:
        kills: processes that were killed while they trained.
        resumes: processes that went on from a checkpoint.
        during_save: kills that left a checkpoint half written.
        lost: kills after which a checkpoint that had been there was gone or damaged.
        runs: that came to their end, and `different` ones among them.
    """

    kills: int = 0
    resumes: int = 0
    during_save: int = 0
    lost: int = 0
    runs: int = 0
    different: int = 0


def corpus_in(folder: Path) -> Corpus:
    """A few files of the standard library, in bytes."""
    files = sorted(stdlib_files(), key=lambda path: (path.stat().st_size, path.name))
    chosen = [str(path) for path in files if path.stat().st_size > 1500][:8]
    return prepare(chosen, byte_tokenizer(), folder / "corpus", held_out=0.2, workers=1)


def go(corpus: Corpus, out: Path) -> None:
    """Train into a folder, going on where it has a checkpoint."""
    torch.set_num_threads(1)
    lm = sc.new(from_dict(CARD, "crash"))
    lm.tokenizer = corpus.tokenizer
    with checkpoints.held(out):
        checkpoints.clean(out)
        found = checkpoints.newest(out)
        metrics = Metrics(out, 0 if found is None else found.step)
        train(lm, corpus, training_of(lm.card, SETTINGS, "crash"), out, [metrics], found)
        metrics.close()


def ending(out: Path) -> tuple[Any, ...]:
    """What two runs must have in common."""
    last = checkpoints.folder_of(out, SETTINGS["steps"])
    losses = [(r["step"], r["loss"], r["norm"], r["lr"]) for r in read_metrics(out) if r["kind"] == "step"]
    return losses, (last / "model.safetensors").read_bytes(), (last / "training/optimizer.safetensors").read_bytes()


def check(out: Path, before: int, tally: Tally) -> int:
    """Look at a folder after a kill; returns the step of the newest checkpoint."""
    tally.during_save += any(out.glob(".tmp-step-*")) or any(out.glob("..tmp-step-*"))
    damaged = [step for step in checkpoints.steps(out) if checkpoints.fault_of(checkpoints.folder_of(out, step))]
    newest = max(checkpoints.steps(out), default=0)
    tally.lost += bool(damaged) or newest < before
    return newest


def run_once(corpus: Corpus, out: Path, seconds: float, limit: int, tally: Tally, draw: random.Random) -> bool:
    """One run with kills; whether it came to its end before there were `limit` of them."""
    fork = multiprocessing.get_context("fork")
    newest = 0
    while tally.kills < limit:
        child = fork.Process(target=go, args=(corpus, out))
        tally.resumes += newest > 0
        child.start()
        child.join(draw.uniform(0.0, seconds))
        if child.exitcode is None:
            assert child.pid is not None
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGKILL)
            child.join()
        if child.exitcode == 0:
            return True
        if child.exitcode != -signal.SIGKILL:
            raise SystemExit(f"the run ended by itself with status {child.exitcode}")
        tally.kills += 1
        newest = check(out, newest, tally)
    child = fork.Process(target=go, args=(corpus, out))
    child.start()
    child.join()
    return child.exitcode == 0


def crash(kills: int, seed: int, folder: Path) -> Tally:
    """Kill so often; see the head of this file."""
    torch.set_num_threads(1)
    corpus, draw, tally = corpus_in(folder), random.Random(seed), Tally()
    began = time.perf_counter()
    straight = multiprocessing.get_context("fork").Process(target=go, args=(corpus, folder / "straight"))
    straight.start()
    straight.join()
    seconds = time.perf_counter() - began
    wanted = ending(folder / "straight")
    while tally.kills < kills:
        out = folder / f"run-{tally.runs}"
        # A kill comes after a third of the time of a whole run on average, so most runs see several.
        if not run_once(corpus, out, 0.66 * seconds, kills, tally, draw):
            raise SystemExit("a run did not come to its end")
        tally.runs += 1
        tally.different += ending(out) != wanted
        print(
            f"{tally.kills} kills, {tally.runs} runs, {tally.lost} lost, {tally.different} different", file=sys.stderr
        )
    return tally


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        tally = crash(asked.kills, asked.seed, Path(folder))
        print(json.dumps({**asdict(tally), "seed": asked.seed, "seconds": round(time.perf_counter() - began, 1)}))
    sys.exit(1 if tally.lost or tally.different else 0)


if __name__ == "__main__":
    main()
