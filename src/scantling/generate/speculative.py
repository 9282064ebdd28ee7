"""Speculative decoding: several tokens are proposed cheaply and judged in one pass of the model.

Two rules judge, and neither changes the distribution of the text.

``shared``: drafter and model run the same race over the same draws (see `sample.race`), and a proposal is accepted if
the model draws it too. The text is the one that the model draws without drafts, token for token, for any seed
(arXiv:2408.07978, section 3); so it may be switched on and off at will.

``residual``: a proposal x, drawn from q, is accepted with probability min(1, p(x) / q(x)); otherwise the token is drawn
from max(p - q, 0), normalised (Leviathan et al., arXiv:2211.17192, section 2.3). It accepts 1 - d of the proposals, d
the total variation between p and q, which is the most that is possible; the text of a seed is another one than without.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from scantling.errors import ScantlingInputError
from scantling.generate.draft import Drafter, ExitDraft, LookupDraft, ModelDraft, check_pair, early_exit
from scantling.generate.keeping import Keeping
from scantling.generate.ledger import TRIAL, Ledger
from scantling.generate.processors import History, adjusted, filtered
from scantling.generate.room import known_tokens
from scantling.generate.sampling import Sampling
from scantling.generate.session import AnySession, Session, begin, follows_length, renewals, start

if TYPE_CHECKING:
    from scantling.model import Model

RULES = ("shared", "residual")


@dataclass(frozen=True)
class Drafting:
    """Who proposes and how proposals are judged; exactly one of model, layers and lookup.

    Attributes:
        model: a smaller model with the same vocabulary; for an encoder-decoder another one, which reads the source too.
        layers: the model itself, ended after so many layers, of an encoder-decoder those of its decoder.
        lookup: the text, and of an encoder-decoder the source: what followed the same tokens there, at most so many of
            them as the text ends with.
        count: tokens proposed at once.
        rule: ``shared`` or ``residual``.
        switch: stop drafting for the rest of the text when it is measured to be slower than plain decoding. Not under
            ``residual`` with a seed, whose text would then depend on the clock.
    """

    model: Model | None = None
    layers: int | None = None
    lookup: int | None = None
    count: int = 4
    rule: str = "shared"
    switch: bool = True

    def __post_init__(self) -> None:
        if sum(one is not None for one in (self.model, self.layers, self.lookup)) != 1:
            raise ScantlingInputError("drafts come from a model, from the first layers, or from a lookup: name one")
        if self.model is not None and not hasattr(self.model, "parts"):
            raise ScantlingInputError(f"draft model is {self.model!r}; give what scantling.load returns")
        if not isinstance(self.switch, bool):
            raise ScantlingInputError(f"draft switch is {self.switch!r}; True or False is needed")
        for name in ("count", "lookup"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 64):
                raise ScantlingInputError(f"draft {name} is {value!r}; a whole number from 1 to 64 is needed")
        if self.rule not in RULES:
            raise ScantlingInputError(f"unknown rule of acceptance {self.rule!r}: use one of {', '.join(RULES)}")

    def drafter(self, session: AnySession, capacity: int, keeping: Keeping | None) -> Drafter:
        """Who proposes, for the one text of a session, of at most `capacity` positions.

        Raises:
            ScantlingInputError: a model that cannot draft for the session's, or layers that it does not have.
        """
        model, read = session.model, session.source
        source = None if read is None else read.ids[0].tolist()
        if self.lookup is not None:
            return LookupDraft(self.lookup, source or ())
        if self.layers is not None:
            short = early_exit(model, self.layers)
            # Only a session of PyTorch lets another net at its cache.
            return ExitDraft(short, session) if isinstance(session, Session) else ModelDraft(short, capacity, keeping)
        assert self.model is not None
        check_pair(model, self.model)
        return ModelDraft(self.model, capacity, keeping, source)


def acceptance(p: Tensor, q: Tensor | None, token: int) -> float:
    """Probability that a proposal drawn from q (V) stays where p (V) is wanted; q None is certainty."""
    drawn_with = 1.0 if q is None else float(q[token])
    return min(1.0, float(p[token]) / drawn_with)


def residual(p: Tensor, q: Tensor | None, token: int) -> Tensor:
    """What is drawn from (V) where a proposal did not stay."""
    left = p.index_fill(0, torch.tensor([token], device=p.device), 0.0) if q is None else (p - q).clamp(min=0)
    # Where p and q differ by roundings only, nothing may be left, and either will do.
    return left / left.sum() if bool(left.sum() > 0) else p


@dataclass
class _Judge:
    """Draws tokens by one of the rules; the draws of a place are the same for drafter and model."""

    how: Sampling
    rule: str
    generator: torch.Generator
    noise: list[Tensor] = field(default_factory=list)

    def odds(self, logits: Tensor, history: History) -> Tensor:
        """(V) of logits (1, V) after the tokens before."""
        logits = adjusted(logits, self.how, [history])
        if self.how.greedy:
            return torch.nn.functional.one_hot(logits.argmax(-1)[0], logits.shape[-1]).float()
        return filtered(logits, self.how).softmax(-1)[0].cpu()

    def draw(self, place: int, odds: Tensor) -> int:
        """The token of a place, counted from the next one."""
        if self.how.greedy:
            return int(odds.argmax())
        if self.rule == "residual":
            return int(torch.multinomial(odds, 1, generator=self.generator))
        while len(self.noise) <= place:
            drawn = torch.empty(odds.shape, dtype=torch.float32).exponential_(generator=self.generator)
            self.noise.append(drawn.clamp(min=torch.finfo(torch.float32).tiny))
        return int((odds / self.noise[place]).argmax())

    def settle(self, place: int, p: Tensor, q: Tensor | None, proposal: int) -> tuple[int, bool]:
        """The token of a place, and whether it is the one that was proposed."""
        if self.rule == "shared" or self.how.greedy:
            token = self.draw(place, p)
            return token, token == proposal
        if float(torch.rand((), generator=self.generator)) < acceptance(p, q, proposal):
            return proposal, True
        left = residual(p, q, proposal)
        return int(torch.multinomial(left, 1, generator=self.generator)), False

    def passed(self, places: int) -> None:
        """So many places are settled."""
        del self.noise[:places]


def check_speculation(model: Model, keeping: Keeping | None) -> None:
    """Refuse what cannot go back or cannot be judged several tokens at once.

    Raises:
        ScantlingInputError: a ring cache, or dynamic NTK.
    """
    name = model.card.name
    if keeping is not None and keeping.kind == "ring":
        raise ScantlingInputError("drafts that do not stay are taken back, and a ring cache cannot go back: use full")
    if follows_length(model):
        raise ScantlingInputError(f"{name}: dynamic NTK turns each token by its own length: drafts would change it")


class Speculation:
    """One text, or target of a source, with drafts; iterate it for tokens with the logits (1, V) of each.

    Attributes:
        session: of the model that judges.
        limit: tokens that there is room for.
        ledger: how drafts fare.
    """

    def __init__(
        self,
        model: Model,
        ids: Tensor,
        max_new_tokens: int,
        sampling: Sampling,
        drafting: Drafting,
        keeping: Keeping | None = None,
        chunk: int | None = None,
    ) -> None:
        check_speculation(model, keeping)
        self._model, self._drafting = model, drafting
        self._known, self._renewals = known_tokens(model), renewals(model)
        self._judge = _Judge(sampling, drafting.rule, sampling.generators(1)[0])
        self._may_switch = drafting.switch and (drafting.rule == "shared" or sampling.seed is None)
        self.session: AnySession
        self.session, self._logits, self.limit = begin(model, ids, max_new_tokens, keeping=keeping, chunk=chunk)
        begins = start(model, 1) if model.parts.two_stacks else ids
        # The last token is not read: a target's place for it is that of the token that it begins with.
        capacity = self.limit if model.parts.two_stacks else ids.shape[1] + self.limit
        self._drafter = drafting.drafter(self.session, capacity, keeping)
        self._history = History(begins[0].tolist())
        self.ledger = Ledger()

    @property
    def draft_bytes(self) -> int:
        """Allocated for keys and values of the proposals beside those of the session."""
        return self._drafter.nbytes

    def __iter__(self) -> Iterator[tuple[int, Tensor]]:
        judge, history, new = self._judge, self._history, self._history.new
        logits = self._logits[:, : self._known]
        new.append(judge.draw(0, judge.odds(logits, history)))
        judge.passed(1)
        yield new[-1], logits
        while len(new) < self.limit:
            began = time.perf_counter()
            proposals, drawn_from = self._proposals()
            scored = self._scored(proposals)
            settled = self._settled(scored, proposals, drawn_from)
            self._note(len(proposals), len(settled) - 1, time.perf_counter() - began)
            for i, token in enumerate(settled):
                new.append(token)
                yield token, scored[i : i + 1]

    def _note(self, drafted: int, accepted: int, seconds: float) -> None:
        if drafted:
            self.ledger.round(drafted, accepted, seconds, self._may_switch)
        else:
            self.ledger.plain(seconds)

    def _proposals(self) -> tuple[list[int], list[Tensor | None]]:
        count = min(self._drafting.count, self.limit - len(self._history.new) - 1)
        for length in self._renewals:
            if self.session.filled <= length < self.session.filled + count + 1:
                # The pass that crosses this length turns all keys anew; what it brings must stay.
                count = max(0, length - self.session.filled - 1)
        trial = self.ledger.plain_steps < TRIAL and self._may_switch
        if count < 1 or self.ledger.off or trial:
            return [], []
        text, drafted = [*self._history.prompt, *self._history.new], list[int]()

        def pick(place: int, logits: Tensor) -> tuple[int, Tensor]:
            odds = self._judge.odds(logits, self._after(drafted))
            drafted.append(self._judge.draw(place, odds))
            return drafted[-1], odds

        return self._drafter.propose(text, count, pick)

    def _after(self, proposals: Sequence[int]) -> History:
        return History(self._history.prompt, [*self._history.new, *proposals])

    def _scored(self, proposals: Sequence[int]) -> Tensor:
        """The model's logits (proposals + 1, V): after the last token, and after each proposal."""
        ids = torch.tensor([[self._history.new[-1], *proposals]], device=self._model.device)
        return self.session.score(ids)[0, :, : self._known]

    def _settled(self, scored: Tensor, proposals: Sequence[int], drawn_from: Sequence[Tensor | None]) -> list[int]:
        """The proposals that stay, and the token after them."""
        settled: list[int] = []
        for i, proposal in enumerate(proposals):
            p = self._judge.odds(scored[i : i + 1], self._after(proposals[:i]))
            token, stays = self._judge.settle(i, p, drawn_from[i], proposal)
            settled.append(token)
            if not stays:
                break
        else:
            last = len(proposals)
            p = self._judge.odds(scored[last : last + 1], self._after(proposals))
            settled.append(self._judge.draw(last, p))
        self._judge.passed(len(settled))
        if len(settled) <= len(proposals):
            self.session.rewind(len(proposals) + 1 - len(settled))
        return settled
