"""Whether a layout fits into the memory of its devices, by the account of `scantling plan`."""

from __future__ import annotations

import os
from dataclasses import replace

import torch

from scantling.cards.training import Training
from scantling.errors import ScantlingInputError
from scantling.model import Model
from scantling.numbers.hardware import device
from scantling.numbers.parallel.assumptions import RESERVED
from scantling.numbers.parallel.communication import Fabric
from scantling.numbers.parallel.job import Job
from scantling.numbers.parallel.layouts import Layout, Mesh
from scantling.numbers.parallel.memory import PRECISIONS, Memory, Precision
from scantling.numbers.parallel.step import Simulator
from scantling.numbers.parallel.work import speed
from scantling.train.division import rows_of_a_pass
from scantling.train.ranks import Ranks
from scantling.train.settings import rows_of
from scantling.units import bytes_text

_NAMES = {"fp32": "fp32", "bf16-mixed": "fp32", "bf16-master": "mixed", "bf16": "bf16"}
"""What the plan calls a precision of training."""


def check(lm: Model, training: Training, ranks: Ranks) -> None:
    """Whether every rank has the memory that the plan predicts; one process alone is not looked at.

    Raises:
        ScantlingInputError: it has not.
    """
    available = memory(lm.device) if ranks.size > 1 and training.lora is None else None
    if available is None:
        return
    needed = predicted(lm, training, ranks)
    if lm.device.type == "cpu":
        needed = replace(needed, reserved=0)
    if needed.total > available:
        raise ScantlingInputError(
            f"the plan predicts {bytes_text(needed.total)} in each of {ranks.size} ranks (weights "
            f"{bytes_text(needed.weights)}, gradients {bytes_text(needed.gradients)}, optimizer "
            f"{bytes_text(needed.optimizer)}, the rest for activations), and {bytes_text(available)} are there: take "
            "more ranks, a smaller batch, or --over-memory to try all the same"
        )


def memory(place: torch.device) -> int | None:
    """Bytes for one rank: of a GPU all of it, of a machine's memory the share of one of its ranks; None if unknown."""
    if place.type == "cuda":
        return int(torch.cuda.get_device_properties(place).total_memory)
    try:
        whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None
    return whole // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def predicted(lm: Model, training: Training, ranks: Ranks) -> Memory:
    """What the plan says of the fullest rank. Times are not asked for, so whose links they are does not matter."""
    row = device("h100")
    data = ranks.data
    layout = Layout(
        Mesh(data=data, tensor=ranks.tensor),
        zero=0 if ranks.replicated or data == 1 else 3,
        micro_batch=rows_of_a_pass(training, ranks),
        sequence=False,
        recompute=training.recompute,
    )
    job = Job(
        model=lm.parts,
        devices=ranks.size,
        tokens=max(tokens for _, tokens in rows_of(lm.card, training)),
        sequences=training.batch * training.accumulation,
        speed=speed(row, "bf16"),
        fabric=Fabric(ranks.size, row.bandwidth, row.bandwidth),
        memory=RESERVED,
        precision=_precision(training),
    )
    return Simulator(job).estimate(layout).memory


def _precision(training: Training) -> Precision:
    """Bytes of a parameter; optimizers with one moment keep half of AdamW's two, and one of 8 bits a byte for each."""
    found = PRECISIONS[_NAMES[training.precision]]
    moment = found.weights if training.precision == "bf16" else 4
    spared = {"adamw": 0, "adamw-8bit": 2 * (moment - 1)}.get(training.optimizer.kind, moment)
    return replace(found, state=found.state - spared)
