"""Models that decode through a step which torch compiled: ahead of time on a CPU, in a graph of launches on CUDA."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
import torch
from msgspec.structs import replace
from torch import Tensor

from scantling.errors import ScantlingInputError
from scantling.generate import compiled_kept as kept
from scantling.generate.compiled_step import DecodeStep, exported, named
from scantling.generate.session import follows_length, renewals
from scantling.parts.part import Workload
from scantling.tensor.slots import SlotCache

if TYPE_CHECKING:
    from scantling.generate.compiled_session import CompiledSession
    from scantling.model import Model

Step = Callable[[Tensor, Tensor, list[Tensor]], Tensor]
"""ids (B), pasts (B), slots -> logits (B, V)."""


def why_not(model: Model) -> str | None:
    """Why no step of this model can be compiled; None where one can."""
    name = model.card.name
    if model.parts.decoder is None or model.card.head.kind != "lm":
        return f"{name} writes no text, and the compiled step is one of decoding"
    if model.parts.two_stacks:
        return f"{name} is an encoder-decoder, and the compiled step reads one text"
    if follows_length(model):
        return f"{name}: dynamic NTK turns keys by the length so far, and the compiled step does not know it"
    if model.device.type not in ("cpu", "cuda"):
        return f"steps are compiled for CPUs and CUDA devices, and the weights are on {model.device}"
    return None


def fits(model: Model, capacity: int) -> str | None:
    """Why texts of so many positions cannot go through the compiled step; None where they can."""
    for length in sorted(renewals(model)):
        if capacity > length:
            return (
                f"{model.card.name}: past {length} positions LongRoPE turns all keys anew, and the compiled step keeps "
                f"them; {capacity} are asked for"
            )
    return None


@dataclass
class Compiled:
    """What a model decodes with instead of its net; prompts go through the net.

    Attributes:
        steps: that were compiled or loaded, by what they are for.
    """

    steps: dict[tuple[object, ...], Callable[[list[Tensor]], list[Tensor]]] = field(default_factory=dict)

    def session(self, model: Model, batch: int, capacity: int) -> CompiledSession:
        """The same as a session of PyTorch is used, of so many rows."""
        from scantling.generate.compiled_session import CompiledSession

        return CompiledSession(model, self, batch, capacity)

    def step(self, model: Model, cache: SlotCache, rows: int) -> Step:
        """The compiled step over a cache of so many rows, with the weights that the net has now."""
        if model.device.type == "cuda":
            return _graphed(model, cache)
        weights = _weights(model)
        key = (*_about(model, rows), torch.get_num_threads())
        if key not in self.steps:
            made = kept.Package(*_about(model, rows))
            self.steps[key] = made.runner(lambda: _export(model, rows))
        run = self.steps[key]
        return lambda ids, pasts, slots: run([ids, pasts, *weights, *slots])[0]


def compiled(model: Model, rows: int) -> Compiled:
    """See `Model.compile`."""
    if isinstance(rows, bool) or not isinstance(rows, int) or rows < 1:
        raise ScantlingInputError(f"rows is {rows!r}; a whole number of at least 1 is needed")
    if (why := why_not(model)) is not None:
        raise ScantlingInputError(why)
    made = Compiled()
    made.step(model, slots(model, rows, 2), rows)
    return made


def is_kept(model: Model, rows: int) -> bool:
    """Whether the step for so many rows is in the cache folder, or needs no place there."""
    return model.device.type == "cuda" or kept.Package(*_about(model, rows)).is_whole


def _about(model: Model, rows: int) -> tuple[str, ...]:
    """What tells one step from another: the card, the width of the weights, the device, and one row or several."""
    card = replace(model.card, name="", source=None, published=None, dtype="unknown", training=None, inference=None)
    widths = sorted({str(tensor.dtype) for tensor in named(model.net).values()})
    return msgspec.json.encode(card).decode(), *widths, str(model.device), "one row" if rows == 1 else "rows"


def _weights(model: Model) -> list[Tensor]:
    return [tensor.detach() for tensor in named(model.net).values()]


def slots(model: Model, rows: int, capacity: int) -> SlotCache:
    """An empty cache for so many positions of so many rows."""
    return SlotCache(model.parts.named_state(Workload(batch=rows, tokens=capacity)), model.dtype, model.device)


def _export(model: Model, rows: int) -> torch.export.ExportedProgram:
    with torch.inference_mode(False):
        cache = slots(model, rows, 64)
        return exported(DecodeStep(model.net, list(cache.shapes)), _weights(model), cache.first(64), rows)


def _graphed(model: Model, cache: SlotCache) -> Step:
    """On CUDA: compiled at the first call of this process, and replayed as one graph of launches."""
    step = DecodeStep(model.net, list(cache.shapes))
    whole: Sequence[Tensor] = cache.first(cache.capacity)
    for slot in whole:
        torch._dynamo.mark_static_address(slot)
    run = torch.compile(step.over_net, mode="reduce-overhead", fullgraph=True, dynamic=False)

    def decode(ids: Tensor, pasts: Tensor, _: list[Tensor]) -> Tensor:
        # The next replay writes over what this one gives.
        found: Tensor = run(ids, pasts, whole).clone()
        return found

    return decode
