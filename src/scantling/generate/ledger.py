"""How drafts fare, and whether they pay."""

from __future__ import annotations

from dataclasses import dataclass

TRIAL = 6
"""Rounds of drafts before they are judged, and between judgements; as many plain steps are timed before them."""


@dataclass
class Ledger:
    """How drafts fare, as it is counted and timed.

    Attributes:
        drafted, accepted: proposals, and how many of them stayed.
        rounds, tokens: passes that judged proposals, and the tokens that came of them.
        seconds: of these rounds, drafting included.
        plain_steps, plain_seconds: of steps without proposals, among them the first few.
        off: drafting was stopped because it did not pay.
    """

    drafted: int = 0
    accepted: int = 0
    rounds: int = 0
    tokens: int = 0
    seconds: float = 0.0
    plain_steps: int = 0
    plain_seconds: float = 0.0
    off: bool = False

    @property
    def acceptance(self) -> float | None:
        """Share of the proposals that stayed; None where there were none."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def speed_up(self) -> float | None:
        """Seconds per token of plain steps over those of rounds with drafts; None until both were timed."""
        if not (self.plain_steps and self.tokens and self.seconds):
            return None
        return (self.plain_seconds / self.plain_steps) / (self.seconds / self.tokens)

    def plain(self, seconds: float) -> None:
        """One step without proposals."""
        self.plain_steps += 1
        self.plain_seconds += seconds

    def round(self, drafted: int, accepted: int, seconds: float, switch: bool) -> None:
        """One pass that judged proposals; where it is time to judge and they do not pay, they are switched off."""
        self.drafted += drafted
        self.accepted += accepted
        self.rounds += 1
        self.tokens += accepted + 1
        self.seconds += seconds
        due = switch and self.rounds % TRIAL == 0
        self.off = due and self.speed_up is not None and self.speed_up < 1
