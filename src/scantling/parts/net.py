"""The hull: the single nn.Module class of ours, which holds what a part declares and runs the part's forward."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from scantling.errors import ScantlingInputError
from scantling.parts.part import Part, join
from scantling.tensor.init import initialise
from scantling.tensor.memory import device_of, free_bytes
from scantling.units import DTYPE_BYTES, bytes_text, weights_dtype


class Net(nn.Module):
    """A built part.

    Attributes:
        part: the drawing it was built from.
        path: where it stands in the tree, as in the state dict.
    """

    def __init__(self, part: Part, path: str = "") -> None:
        super().__init__()
        self.part = part
        self.path = path
        for name, shape in part.weights().items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))
        for name, shape in part.buffers().items():
            self.register_buffer(name, torch.empty(shape))
        for name, child in part.children().items():
            at = join(path, name)
            if isinstance(child, tuple):
                self.add_module(name, nn.ModuleList(p.module(join(at, str(i))) for i, p in enumerate(child)))
            else:
                self.add_module(name, child.module(at))

    def forward(self, *args: Any, **named: Any) -> Any:
        """The part's forward, with this module as its hull."""
        return self.part.forward(self, *args, **named)

    def extra_repr(self) -> str:
        return type(self.part).__name__


def build(part: Part, device: str, dtype: str, seed: int | None) -> nn.Module:
    """Build `part` on `device`; see `Part.build`."""
    name, place = weights_dtype(dtype), device_of(device)
    with torch.device("meta"):
        net = part.module("").to(getattr(torch, name)).eval()
    if place.type == "meta":
        return net
    needed, free = part.params * DTYPE_BYTES[name], free_bytes(place)
    if free is not None and needed > free:
        raise ScantlingInputError(
            f"the weights need {bytes_text(needed)} in {name} and {place} has {bytes_text(free)} free: "
            f"build on device 'meta', or choose a smaller card or dtype"
        )
    net = net.to_empty(device=place)
    if seed is not None:
        initialise(net, seed)
    net.load_state_dict(computed(part), strict=False)
    return net


def computed(part: Part) -> dict[str, torch.Tensor]:
    """The weights of a tree that are computed and not loaded, by their names in the state dict."""
    return {join(path, name): value for path, p, _ in part.walk() if p.computed for name, value in p.compute().items()}
