"""What a probe answers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Verdict(StrEnum):
    """Clean: what must be equal is equal bit by bit, or the property holds. Rounding: it differs as sums in another
    order do, and no more. By design: it differs, and what the model says of itself explains it. Not applicable: the
    question does not arise. Could not run: it arises, and the subject has not the ability that it takes."""

    CLEAN = "clean"
    ROUNDING = "rounding"
    BY_DESIGN = "by design"
    DEFECT = "defect"
    NOT_APPLICABLE = "not applicable"
    COULD_NOT_RUN = "could not run"


@dataclass(frozen=True)
class Finding:
    """One answer.

    Attributes:
        probe: its name in the registry.
        size: of what differs, in `unit`; None where nothing was measured.
        unit: ``spreads`` are standard deviations of the logits.
        where: under which circumstances, and at which place.
        smallest: the smallest input that shows it, where there is a defect.
        message: what it means.
        data: further figures for the reports.
    """

    probe: str
    verdict: Verdict
    message: str
    size: float | None = None
    where: str = ""
    unit: str = "spreads"
    smallest: Mapping[str, Any] | None = None
    data: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Plain values; sizes that are no number become strings, which JSON can say."""
        size = self.size if self.size is None or math.isfinite(self.size) else str(self.size)
        return {
            "probe": self.probe,
            "verdict": str(self.verdict),
            "size": size,
            "unit": self.unit,
            "where": self.where,
            "smallest": None if self.smallest is None else dict(self.smallest),
            "message": self.message,
            "data": dict(self.data),
        }
