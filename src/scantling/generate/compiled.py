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
from scantling.generate.compiled_step import DecodeStep, PagedStep, exported, named
from scantling.generate.session import follows_length, renewals
from scantling.parts.part import Workload
from scantling.tensor.paged import PagedCache
from scantling.tensor.slots import SlotCache
from scantling.tensor.store import Plain

if TYPE_CHECKING:
    from scantling.generate.compiled_session import CompiledSession
    from scantling.model import Model

Step = Callable[[Tensor, Tensor, list[Tensor]], Tensor]
"""ids (B), pasts (B), slots -> logits (B, V)."""
Paged = Callable[[Tensor, Tensor, Tensor], Tensor]
"""ids (B), pasts (B), tables (B, W) with W > 1 -> logits (B, V)."""


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
        weights, run = _weights(model), self._run(model, rows)
        # What was compiled takes strides for granted, and checks none.
        return lambda ids, pasts, slots: run([ids.contiguous(), pasts.contiguous(), *weights, *slots])[0]

    def paged(self, model: Model, cache: PagedCache, size: int, rows: int) -> Paged | None:
        """The compiled step over a cache in blocks of `size`, for at most so many rows; None where there is none.

        Raises:
            ScantlingInputError: a cache in 8 bits.
        """
        if not all(isinstance(one, Plain) for one in cache.stores.values()):
            raise ScantlingInputError("the compiled step keeps keys and values as they are, and int8 is asked for")
        # On CUDA a graph of launches has one size; and sizes of 1 are not open to an export.
        if model.device.type == "cuda" or next(iter(cache.stores.values())).shape[0] < 2:
            return None
        weights, run = _weights(model), self._run(model, rows, size)
        stores = [one.values for one in cache.stores.values() if isinstance(one, Plain)]
        return lambda *at: run([*(one.contiguous() for one in at), *weights, *stores])[0]

    def _run(self, model: Model, rows: int, size: int = 0) -> Callable[[list[Tensor]], list[Tensor]]:
        about = _about(model, rows, size)
        key = (*about, torch.get_num_threads())
        if key not in self.steps:
            self.steps[key] = kept.Package(*about).runner(lambda: _export(model, rows, size))
        return self.steps[key]


def compiled(model: Model, rows: int, block: int = 0) -> Compiled:
    """See `Model.compile`."""
    if isinstance(rows, bool) or not isinstance(rows, int) or rows < 1:
        raise ScantlingInputError(f"rows is {rows!r}; a whole number of at least 1 is needed")
    if isinstance(block, bool) or not isinstance(block, int) or block < 0:
        raise ScantlingInputError(f"block is {block!r}; a whole number of at least 1 is needed, or 0 for none")
    if (why := why_not(model)) is not None:
        raise ScantlingInputError(why)
    made = Compiled()
    if block:
        made.paged(model, blocks(model, block), block, rows)
    else:
        made.step(model, slots(model, rows, 2), rows)
    return made


def is_kept(model: Model, rows: int, size: int = 0) -> bool:
    """Whether the step for so many rows is in the cache folder, or needs no place there.

    Args:
        size: positions of a block, where the cache is one of blocks.
    """
    return model.device.type == "cuda" or kept.Package(*_about(model, rows, size)).is_whole


def _about(model: Model, rows: int, size: int) -> tuple[str, ...]:
    """What tells one step from another: the card, the net with its widths, the device, the rows, slots or blocks."""
    card = replace(model.card, name="", source=None, published=None, dtype="unknown", training=None, inference=None)
    # A net may have been changed since it was built, by adapters or other widths, and its weights may be views.
    held = named(model.net).items()
    net = [repr(model.net), *(f"{name} {one.dtype} {[*one.shape]} {[*one.stride()]}" for name, one in held)]
    kind = "one row" if rows == 1 else "rows", f"blocks of {size}" if size else "slots"
    return msgspec.json.encode(card).decode(), *net, str(model.device), *kind


def _weights(model: Model) -> list[Tensor]:
    return [tensor.detach() for tensor in named(model.net).values()]


def slots(model: Model, rows: int, capacity: int) -> SlotCache:
    """An empty cache for so many positions of so many rows."""
    return SlotCache(model.parts.named_state(Workload(batch=rows, tokens=capacity)), model.dtype, model.device)


def blocks(model: Model, size: int) -> PagedCache:
    """A cache of a few blocks of so many positions."""
    return PagedCache(model.parts.named_state(Workload(tokens=size)), 4, model.dtype, model.device)


def _export(model: Model, rows: int, size: int = 0) -> torch.export.ExportedProgram:
    with torch.inference_mode(False):
        if size:
            paged = blocks(model, size)
            stores = [one.values for one in paged.stores.values() if isinstance(one, Plain)]
            return exported(PagedStep(model.net, list(paged.stores)), _weights(model), stores, rows)
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
