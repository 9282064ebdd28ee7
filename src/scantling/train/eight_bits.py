"""AdamW whose moments are held in 8 bits (Dettmers et al., arXiv:2110.02861), in plain torch, on any device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from scantling.numbers.optimizers import AT_ONCE, BLOCK, SMALLEST

DECADES = 7


@cache
def codes(signed: bool) -> Tensor:
    """What the 256 codes stand for, ascending, (256,) float32 within [-1, 1] or [0, 1] (section 2.2 and appendix F).

    Each decade from 10^-7 to 1 is cut into equal steps, twice as many as the one below has, and a code stands for the
    middle of one; 0 and 1 have codes of their own. Without signs there is room for twice the steps.
    """
    found = [torch.tensor([0.0, 1.0], dtype=torch.float64)]
    for decade in range(DECADES):
        steps = 2 ** (decade + (0 if signed else 1))
        edges = torch.linspace(0.1, 1.0, steps + 1, dtype=torch.float64)
        middles = (edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade - DECADES + 1)
        found += [middles, -middles] if signed else [middles]
    return torch.cat(found).sort().values.float()


class Coded:
    """Blocks of `BLOCK` values, each as a code of 8 bits and a scale of the block, its largest size."""

    def __init__(self, signed: bool, device: torch.device) -> None:
        self.table = codes(signed).to(device)
        self._between = (self.table[1:] + self.table[:-1]) / 2

    def read(self, held: Tensor, scales: Tensor) -> Tensor:
        """Codes (n,) uint8 and scales (ceil(n / BLOCK),) -> (n,) float32."""
        wide = scales.repeat_interleave(BLOCK)[: len(held)]
        return self.table[held.int()].mul_(wide)

    def write(self, values: Tensor, held: Tensor, scales: Tensor) -> None:
        """The nearest codes of (n,) float32, and the scales, in place."""
        short = -len(values) % BLOCK
        blocks = torch.nn.functional.pad(values, (0, short)).view(-1, BLOCK)
        torch.amax(blocks.abs(), 1, out=scales)
        shares = blocks / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
        held.copy_(torch.bucketize(shares.flatten()[: len(values)], self._between, out_int32=True))


class AdamW8(torch.optim.Optimizer):
    """AdamW (arXiv:1711.05101, algorithm 2); tensors of fewer than `SMALLEST` values keep moments in float32.

    The moments are read into float32, updated, used, and written back, `AT_ONCE` values after others.
    """

    def __init__(
        self, params: Iterable[Any], lr: float, betas: tuple[float, float], eps: float, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._first: dict[torch.device, Coded] = {}
        self._second: dict[torch.device, Coded] = {}

    @property
    def tables(self) -> list[Tensor]:
        """What the codes stand for: held once, whatever the weights."""
        return [coded.table for side in (self._first, self._second) for coded in side.values()]

    def entries(self, weight: Tensor) -> dict[str, tuple[int, ...]]:
        """What the state of a weight has, with its shapes."""
        shape, scales = tuple(weight.shape), (-(-weight.numel() // BLOCK),)
        if weight.numel() < SMALLEST:
            return {"step": (), "exp_avg": shape, "exp_avg_sq": shape}
        return {"step": (), "first": shape, "first_scales": scales, "second": shape, "second_scales": scales}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update by the gradients that there are."""
        assert closure is None
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update(weight, group)

    def _update(self, weight: Tensor, group: dict[str, Any]) -> None:
        state = self.state[weight]
        if not state:
            state["step"] = 0
            for name, shape in self.entries(weight).items():
                if name != "step":
                    coded = name in ("first", "second")
                    zeros = torch.zeros(shape, dtype=torch.uint8 if coded else torch.float32, device=weight.device)
                    # Nothing is written yet, and the code of 0 is not number 0 where there are signs.
                    state[name] = zeros.fill_(int((codes(name == "first") < 0).sum())) if coded else zeros
        state["step"] += 1
        flat, gradient = weight.view(-1), weight.grad.reshape(-1)  # type: ignore[union-attr]
        if "exp_avg" in state:
            moments = state["exp_avg"].view(-1), state["exp_avg_sq"].view(-1)
            _adamw(flat, gradient.float(), moments, state["step"], group)
            return
        first, second = self._coded(weight.device)
        for start in range(0, len(flat), AT_ONCE):
            cut, blocks = slice(start, start + AT_ONCE), slice(start // BLOCK, (start + AT_ONCE) // BLOCK)
            held = [(state[name].view(-1)[cut], state[f"{name}_scales"][blocks]) for name in ("first", "second")]
            moments = first.read(*held[0]), second.read(*held[1])
            _adamw(flat[cut], gradient[cut].float(), moments, state["step"], group)
            first.write(moments[0], *held[0])
            second.write(moments[1], *held[1])

    def _coded(self, device: torch.device) -> tuple[Coded, Coded]:
        if device not in self._first:
            self._first[device], self._second[device] = Coded(True, device), Coded(False, device)
        return self._first[device], self._second[device]


def _adamw(weight: Tensor, gradient: Tensor, moments: tuple[Tensor, Tensor], step: int, group: dict[str, Any]) -> None:
    """One update of a flat weight and its float32 moments, in place."""
    (one, two), (b1, b2) = moments, group["betas"]
    one.lerp_(gradient, 1 - b1)
    two.mul_(b2).addcmul_(gradient, gradient, value=1 - b2)
    size = (two / (1 - b2**step)).sqrt_().add_(group["eps"])
    weight.mul_(1 - group["lr"] * group["weight_decay"])
    weight.sub_((one / size).mul_(group["lr"] / (1 - b1**step)).to(weight.dtype))
