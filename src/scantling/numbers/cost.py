"""What training costs: FLOPs in three named conventions, time, device-hours, money, energy."""

from __future__ import annotations

from dataclasses import dataclass

from scantling.errors import ScantlingInputError
from scantling.numbers import mfu
from scantling.numbers.flops import flops
from scantling.parts.part import Workload
from scantling.parts.transformer import Transformer

CONVENTIONS = {
    "6nd": "6 N D: N active parameters, tables included, D tokens",
    "full": "matrix products, forward and backward, attention over the full square",
    "causal": "matrix products, forward and backward, attention over the causal half, windows ignored",
    "visible": "matrix products, forward and backward, attention over the pairs that are seen, windows included",
}
"""How FLOPs of training are counted; recomputed activations are never among them."""
ASSUMED_MFU = 0.40


@dataclass(frozen=True)
class Work:
    """FLOPs of a training run over `tokens`.

    Attributes:
        params: every parameter, or what the caller gave.
        active: those that one token uses, the N of 6 N D.
        tokens: D; of an encoder-decoder those of the target, each row with a source of the same length.
        context: tokens per row, None where there is no model.
        flops: by convention; only ``6nd`` where there is no model.
    """

    params: int
    active: int
    tokens: int
    context: int | None
    flops: dict[str, int]

    def total(self, convention: str) -> int:
        """FLOPs in one convention.

        Raises:
            ScantlingInputError: a count of parameters alone does not tell them.
        """
        if convention not in self.flops:
            raise ScantlingInputError(f"{convention} FLOPs need a model; a count of parameters only gives 6nd")
        return self.flops[convention]


def work(model: Transformer, tokens: int, context: int) -> Work:
    """FLOPs of training `model` on `tokens` in rows of `context`."""
    f = flops(model, Workload(batch=1, tokens=context))
    row = {"6nd": f.rule_6n, "full": f.training, "causal": f.training_causal, "visible": f.training_visible}
    by_convention = {name: (n * tokens + context // 2) // context for name, n in row.items()}
    return Work(model.params, model.active_params, tokens, context, by_convention)


def work_of(params: int, tokens: int) -> Work:
    """FLOPs by the number of (active) parameters alone."""
    return Work(params, params, tokens, None, {"6nd": 6 * params * tokens})


@dataclass(frozen=True)
class Run:
    """A training run in time.

    Attributes:
        total_flops: the model's FLOPs, in one convention.
        devices: how many work at once.
        seconds: from first to last step.
        peak: dense FLOP/s of one device, None where it is not known.
        given: what the time was computed from: tflops, mfu, seconds, or assumed.
    """

    total_flops: int
    devices: int
    seconds: float
    peak: float | None
    given: str

    @property
    def days(self) -> float:
        """Days of wall-clock time."""
        return self.seconds / 86400

    @property
    def device_hours(self) -> float:
        """Hours times devices."""
        return self.seconds / 3600 * self.devices

    @property
    def rate(self) -> float:
        """The model's FLOP/s on one device."""
        return self.total_flops / (self.seconds * self.devices)

    @property
    def mfu(self) -> float | None:
        """Share of the dense peak, if it is known."""
        return None if self.peak is None else self.rate / self.peak

    def money(self, price: float) -> float:
        """At a price per device-hour, in its currency."""
        return self.device_hours * price

    def energy(self, watts: float) -> float:
        """kWh at so many watts per device, without host and cooling unless they are in the watts."""
        return self.device_hours * watts / 1000


def run(
    total_flops: int,
    devices: int,
    peak: float | None,
    tflops: float | None = None,
    share: float | None = None,
    seconds: float | None = None,
) -> Run:
    """A run from one of: TFLOP/s that each device reaches, a share of the peak, or a measured time.

    With none of them, `ASSUMED_MFU` of the peak.

    Raises:
        ScantlingInputError: more than one, a share without a peak, more than the peak, or no FLOPs at all.
    """
    if not total_flops:
        raise ScantlingInputError("the model multiplies no matrices, so that no FLOPs take any time")
    given = {"tflops": tflops, "mfu": share, "seconds": seconds}
    stated = [name for name, value in given.items() if value is not None]
    if len(stated) > 1:
        raise ScantlingInputError(f"{' and '.join(stated)} are given: one of them sets the time, and the others follow")
    if tflops is not None:
        seconds = total_flops / (tflops * 1e12 * devices)
    elif seconds is None:
        if peak is None:
            raise ScantlingInputError(
                "the time needs a speed: name a device, its dense peak, the TFLOP/s reached, or a measured time"
            )
        seconds = mfu.seconds(total_flops, ASSUMED_MFU if share is None else share, devices, peak)
    if peak is not None:
        mfu.mfu(total_flops, seconds, devices, peak)
    return Run(total_flops, devices, seconds, peak, stated[0] if stated else "assumed")
