"""What a checkpoint keeps of a run besides its progress, and how it is written into the checkpoint's folder."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from msgspec.structs import replace
from torch import Tensor

from scantling.cards import to_yaml
from scantling.cards.training import Training
from scantling.checkpoint.save import Saved
from scantling.data import Corpus
from scantling.model import Model
from scantling.saving import save
from scantling.train.division import Division
from scantling.train.ema import Ema
from scantling.train.lora import Adapters
from scantling.train.step import Stepper

MEAN = "ema"
"""The folder in a checkpoint that has the mean of the weights, a model like any other."""


@dataclass(frozen=True)
class Held:
    """Whole tensors in rank 0; nothing in other ranks.

    Attributes:
        weights: the net's; None where they stand whole in the net.
        tensors: of optimizers, mean, adapters and routers.
    """

    weights: dict[str, Tensor] | None
    tensors: dict[str, Tensor]


@dataclass(frozen=True)
class Keeping:
    """What a run keeps.

    Attributes:
        ema: the mean of the weights, where one is made.
        adapters: where they are trained in place of the weights.
    """

    lm: Model
    stepper: Stepper
    division: Division
    ema: Ema | None = None
    adapters: Adapters | None = None

    def held(self) -> Held:
        """What there is to keep now; a meeting of all ranks."""
        tensors = {
            f"optimizer/{name}": value for name, value in self.division.whole(self.stepper.optimizers.state()).items()
        }
        if self.ema is not None:
            tensors |= {f"ema/{name}": value for name, value in self.division.whole(self.ema.means).items()}
        if self.adapters is not None:
            tensors |= {f"lora/{name}": value for name, value in self.adapters.weights.items()}
        if self.stepper.balance is not None:
            tensors |= {f"router/{path}": shift for path, shift in self.stepper.balance.shifts.items()}
        return Held(self.division.state() if self.division.divided else None, tensors)

    def write(self, held: Held, folder: Path) -> tuple[str, ...]:
        """Write model, mean and adapters, as folders that any reader takes; returns notes.

        Raises:
            ScantlingInputError: the model cannot be written.
        """
        weights = held.weights
        saved = self._save(weights, folder)
        if self.ema is not None and weights is None:
            with self.ema.swapped():
                self._save(None, folder / MEAN)
        elif self.ema is not None and weights is not None:
            means = {name: held.tensors[f"ema/{name}"].to(weights[name].dtype) for name in self.ema.means}
            self._save(weights | means, folder / MEAN)
        if self.adapters is None:
            return tuple(saved.notes)
        return (*saved.notes, *self.adapters.save_peft(folder / "adapter", saved.model_type))

    def _save(self, weights: dict[str, Tensor] | None, folder: Path) -> Saved:
        """The net, adapters merged, as a folder of its own; with the weights given, or as they stand."""
        with nullcontext() if self.adapters is None else self.adapters.merged():
            return save(self.lm if weights is None else self.rebuilt(weights), folder)

    def rebuilt(self, weights: Mapping[str, Tensor]) -> Model:
        """The model with whole weights, in host memory, where there are any."""
        whole = copy.copy(self.lm)
        if weights:
            whole.net = self.lm.parts.build("meta", str(self.lm.dtype).removeprefix("torch."))
            whole.net.load_state_dict(weights, assign=True)
        return whole

    def about(self, corpus: Corpus, training: Training) -> dict[str, Any]:
        """What a run must have in common with the one that it goes on from."""
        return {
            "card": _fingerprint(self.lm),
            "corpus": corpus.manifest.key,
            "training": msgspec.json.decode(msgspec.json.encode(training)),
            "torch": torch.__version__,
            "base": None if self.adapters is None else self.adapters.base,
        }


def _fingerprint(lm: Model) -> str:
    """A hash of what the card says of the model itself."""
    bare = replace(lm.card, name="", training=None, source=None, published=None, dtype="unknown")
    return hashlib.sha256(to_yaml(bare).encode()).hexdigest()
