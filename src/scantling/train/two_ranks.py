"""Two processes against one, on the same rows: `--prove` starts them, from its own model, and compares.

Run as ``python -m scantling.train.two_ranks FOLDER`` with torchrun's variables, this file is one of the two. The
folder has the model, ``rows.safetensors`` with a micro-batch of one row each, and ``settings.json``; rank 0 leaves
``found.safetensors`` there: whole gradients and the losses of some updates.
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import msgspec
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from scantling.cards.training import Parallel, Training
from scantling.loading import load
from scantling.model import Model
from scantling.saving import save
from scantling.train import settings
from scantling.train.division import WHOLE, Division
from scantling.train.forward import Inputs
from scantling.train.optim import Optimizers, Recipe, groups
from scantling.train.ranks import Ranks, joined
from scantling.train.step import Stepper

UPDATES = 3
"""Made after the gradient, by the run's own optimizer, all of the same rows."""

SECONDS = 600
"""That the processes may take."""

MODEL, ROWS, SETTINGS, FOUND = "model", "rows.safetensors", "settings.json", "found.safetensors"


@dataclass(frozen=True)
class Seen:
    """What one process, or several together, made of the rows.

    Attributes:
        gradients: of the first update, whole, by name.
        losses: of `UPDATES` updates.
    """

    gradients: dict[str, Tensor]
    losses: list[float]


def alone(lm: Model, rows: Sequence[Inputs], training: Training) -> Seen:
    """By this process, on a copy of the net in host memory."""
    own = copy.copy(lm)
    own.net = copy.deepcopy(lm.net).cpu()
    return _seen(own, [_moved(row) for row in rows], training, Ranks())


def by_two(lm: Model, rows: Sequence[Inputs], training: Training) -> Seen | str:
    """By two processes that share the weights, or all of them where the optimizer cannot; or why they did not end well.

    Args:
        rows: micro-batches; each process takes a half of them.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save(lm, folder / MODEL)
        save_file(_plain(rows), folder / ROWS)
        whole = training.optimizer.kind in WHOLE
        layout = Parallel(replicated=2) if whole else Parallel(sharded=2)
        plan = msgspec.structs.replace(training, parallel=layout, lora=None, compile=False)
        (folder / SETTINGS).write_bytes(msgspec.json.encode(plan))
        if (fault := _run(folder)) is not None:
            return fault
        found = load_file(folder / FOUND)
        return Seen({n.removeprefix("g/"): t for n, t in found.items() if n != "losses"}, found["losses"].tolist())


def _run(folder: Path) -> str | None:
    """Start both and wait for them; the last line of what the first that failed said."""
    command = [sys.executable, "-m", "scantling.train.two_ranks", str(folder)]
    threads = str(max(1, torch.get_num_threads() // 2))
    common = {**os.environ, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": threads}
    started = [
        subprocess.Popen(
            command,
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=SECONDS)[1] for process in started]
    except subprocess.TimeoutExpired:
        return f"two processes did not end within {SECONDS} s"
    finally:
        for process in started:
            process.kill()
    failed = [text.strip().splitlines()[-1:] for text, p in zip(said, started, strict=True) if p.returncode]
    return f"a process ended with an error: {''.join(failed[0])}" if failed else None


def _seen(lm: Model, rows: Sequence[Inputs], training: Training, ranks: Ranks) -> Seen:
    named = {name: weight for name, weight in lm.net.named_parameters() if name in lm.parts.named_stored}
    own, how = Division(lm, named, ranks), settings.how_of(training)
    still = Recipe("sgd", lr=0.0, momentum=0.0, weight_decay=0.0)
    kept = Kept(groups(lm.parts, own.weights, still), still)
    Stepper(lm, kept, how, None, training.seed, own).update(0, rows, 1.0)
    recipe = settings.recipe_of(training)
    moved = Optimizers(groups(lm.parts, own.weights, recipe), recipe)
    stepper = Stepper(lm, moved, how, training.clip, training.seed, own)
    losses = [stepper.update(step, rows, 1.0).loss for step in range(UPDATES)]
    return Seen(own.whole(kept.kept), losses)


class Kept(Optimizers):
    """Keeps the gradient instead of using it."""

    kept: dict[str, Tensor]

    def step(self, factor: float) -> None:
        self.kept = {name: gradient.clone() for name, gradient in self.gradients()}
        self.clear()


def _plain(rows: Sequence[Inputs]) -> dict[str, Tensor]:
    return {
        f"{number:03}/{field.name}": value.cpu().contiguous()
        for number, row in enumerate(rows)
        for field in fields(row)
        if isinstance(value := getattr(row, field.name), Tensor)
    }


def _rows(plain: Mapping[str, Tensor]) -> list[Inputs]:
    by_row: dict[str, dict[str, Tensor]] = {}
    for name, tensor in plain.items():
        number, _, column = name.partition("/")
        by_row.setdefault(number, {})[column] = tensor
    judged = {number: int((row["labels"] >= 0).sum()) for number, row in by_row.items()}
    return [Inputs(judged=judged[number], **by_row[number]) for number in sorted(by_row)]


def _moved(row: Inputs) -> Inputs:
    return _rows(_plain([row]))[0]


def main(folder: Path) -> None:
    """One of the two."""
    plan = msgspec.json.decode((folder / SETTINGS).read_bytes(), type=Training)
    with joined("cpu", (folder / "meeting").absolute().as_uri()):
        ranks = Ranks.here(plan.parallel)
        lm = load(folder / MODEL, dtype="float32")
        lm.net.requires_grad_(True)
        rows = _rows(load_file(folder / ROWS))
        half = len(rows) // 2
        seen = _seen(lm, rows[ranks.rank * half : (ranks.rank + 1) * half], plan, ranks)
        if ranks.rank == 0:
            gradients = {f"g/{name}": tensor.contiguous() for name, tensor in seen.gradients.items()}
            save_file({**gradients, "losses": torch.tensor(seen.losses, dtype=torch.float64)}, folder / FOUND)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
