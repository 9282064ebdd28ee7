"""Low-rank adapters on linear maps, put on and taken off from outside by path (Hu et al., arXiv:2106.09685, section 4).

An adapted map gives W x + (alpha / r) B A x: A (r, d_in) is drawn, B (d_out, r) begins at 0, and W is not trained.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from scantling.checkpoint.families import family
from scantling.checkpoint.names import Transform, links
from scantling.checkpoint.safetensors_write import flush
from scantling.errors import ScantlingInputError, nearest
from scantling.model import Model
from scantling.parts.leaf import Linear
from scantling.parts.part import Part

A, B = "lora_a", "lora_b"
"""Names of an adapter's matrices beside the weight."""

ADAPTER = "adapter_model.safetensors"
CONFIG = "adapter_config.json"


@dataclass(frozen=True)
class Recipe:
    """Which maps are adapted, and how.

    Attributes:
        rank: r.
        alpha: the update is multiplied by alpha / r.
        targets: names of linear maps in the blocks: q, k, v, o, gate, up, down.
        dropout: on what A reads, in training.
        seed: of A.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]
    dropout: float = 0.0
    seed: int = 0

    @property
    def scale(self) -> float:
        """Factor on B A."""
        return self.alpha / self.rank


def adapted(parts: Part, targets: Sequence[str]) -> dict[str, Linear]:
    """The linear maps of the blocks with these names, by path. Needs no weights.

    Raises:
        ScantlingInputError: no map has one of the names.
    """
    inner = {p: part for p, part, _ in parts.walk() if isinstance(part, Linear) and ".blocks." in f".{p}"}
    known = sorted({path.rpartition(".")[2] for path in inner})
    for target in targets:
        if target not in known:
            raise ScantlingInputError(
                f"lora.targets: no linear map of the blocks is named {target!r}{nearest(target, known)}; "
                f"there are {', '.join(known)}"
            )
    return {path: part for path, part in inner.items() if path.rpartition(".")[2] in targets}


def added_params(parts: Part, rank: int, targets: Sequence[str]) -> int:
    """Parameters of all adapters: r (d_in + d_out) each."""
    return sum(rank * (part.d_in + part.d_out) for part in adapted(parts, targets).values())


class Adapters:
    """Adapters on the net of a model; nothing else of it is trained while they are on.

    Attributes:
        base: a hash of the weights that they are for.

    Raises:
        ScantlingInputError: no map has one of the names.
    """

    def __init__(self, lm: Model, recipe: Recipe) -> None:
        self.lm, self.recipe = lm, recipe
        self.modules: dict[str, Any] = {path: lm.net.get_submodule(path) for path in adapted(lm.parts, recipe.targets)}
        lm.net.requires_grad_(False)
        self.base = _digest(lm.net)
        draw = torch.Generator().manual_seed(recipe.seed)
        self._held: dict[str, nn.Parameter] = {}
        for path, module in self.modules.items():
            weight = module.weight
            # As torch's own nn.Linear begins: uniform up to d_in^-0.5.
            bound = 1 / math.sqrt(weight.shape[1])
            first = torch.empty(recipe.rank, weight.shape[1]).uniform_(-bound, bound, generator=draw)
            self._held[f"{path}.{A}"] = nn.Parameter(first.to(weight.device, weight.dtype))
            self._held[f"{path}.{B}"] = nn.Parameter(weight.new_zeros(weight.shape[0], recipe.rank))
        self._hooks: list[Any] = []
        self._on()

    @property
    def weights(self) -> dict[str, nn.Parameter]:
        """What is trained, by name."""
        return dict(self._held)

    def _on(self) -> None:
        for path, module in self.modules.items():
            module.register_parameter(A, self._held[f"{path}.{A}"])
            module.register_parameter(B, self._held[f"{path}.{B}"])
            self._hooks.append(module.register_forward_hook(self._add))

    def _off(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for module in self.modules.values():
            delattr(module, A)
            delattr(module, B)

    def _add(self, module: Any, given: tuple[Tensor, ...], out: Tensor) -> Tensor:
        x = given[0]
        # The matrices take gradients while they are trained; a look at held-out text runs without.
        if self.recipe.dropout and torch.is_grad_enabled():
            x = F.dropout(x, self.recipe.dropout)
        return out + F.linear(F.linear(x, module.lora_a), module.lora_b) * self.recipe.scale

    @contextmanager
    def merged(self) -> Iterator[None]:
        """The plain net with B A in its weights, while the block runs."""
        kept = {path: module.weight.detach().clone() for path, module in self.modules.items()}
        self._off()
        try:
            with torch.no_grad():
                for path, module in self.modules.items():
                    module.weight += self._update(path).to(module.weight.dtype)
            yield
        finally:
            with torch.no_grad():
                for path, module in self.modules.items():
                    module.weight.copy_(kept[path])
            self._on()

    def merge(self) -> None:
        """Put B A into the weights for good, and take the adapters off."""
        self._off()
        with torch.no_grad():
            for path, module in self.modules.items():
                module.weight += self._update(path).to(module.weight.dtype)

    def _update(self, path: str) -> Tensor:
        a, b = (self._held[f"{path}.{name}"].detach().float() for name in (A, B))
        return b @ a * self.recipe.scale

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Put matrices back.

        Raises:
            ScantlingInputError: they are those of other adapters.
        """
        if tensors.keys() != self._held.keys() or any(t.shape != self._held[n].shape for n, t in tensors.items()):
            raise ScantlingInputError("the checkpoint's adapters are of another rank or on other maps")
        for name, tensor in tensors.items():
            self._held[name].copy_(tensor)

    def save_peft(self, folder: Path, model_type: str) -> tuple[str, ...]:
        """Write the adapters as the `peft` library reads them, beside weights of that layout; returns notes.

        Raises:
            OSError: it cannot be written.
        """
        names = self._foreign(model_type)
        if isinstance(names, str):
            return (names,)
        folder.mkdir()
        tensors = {}
        for path, theirs in names.items():
            for ours, name in ((A, "lora_A"), (B, "lora_B")):
                tensor = self._held[f"{path}.{ours}"].detach().cpu().contiguous()
                tensors[f"base_model.model.{theirs}.{name}.weight"] = tensor
        save_file(tensors, folder / ADAPTER)
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM" if self.lm.card.family == "decoder" else "SEQ_2_SEQ_LM",
            "r": self.recipe.rank,
            "lora_alpha": self.recipe.alpha,
            "lora_dropout": self.recipe.dropout,
            "target_modules": sorted({name.rpartition(".")[2] for name in names.values()}),
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
            "base_model_name_or_path": None if self.lm.origin is None else str(self.lm.origin.folder),
        }
        with (folder / CONFIG).open("w", encoding="utf-8") as file:
            file.write(json.dumps(config, indent=1) + "\n")
            flush(file)
        return ()

    def _foreign(self, model_type: str) -> dict[str, str] | str:
        """Their module names by our paths; a sentence where their layout has no such map."""
        table = links(family(model_type, "the saved folder").rows(self.lm.card), self.lm.parts.named_stored)
        plain = {
            link.ours[0]: link.theirs[0]
            for link in table
            if len(link.ours) == len(link.theirs) == 1 and type(link.transform) is Transform
        }
        found = {}
        for path in self.modules:
            if f"{path}.weight" not in plain:
                return (
                    f"adapters are merged only: {model_type} stores {path} fused or turned, so peft has no place for it"
                )
            found[path] = plain[f"{path}.weight"].removesuffix(".weight")
        return found


def _digest(net: nn.Module) -> str:
    """SHA-256 of all weights by name."""
    digest = hashlib.sha256()
    for name, weight in net.state_dict().items():
        digest.update(name.encode())
        digest.update(weight.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
