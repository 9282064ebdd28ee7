"""Beam search: the likeliest whole texts among those that stay among the likeliest beginnings."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from scantling.errors import ScantlingInputError
from scantling.generate.engine import begun
from scantling.generate.keeping import Keeping
from scantling.generate.processors import History, adjusted
from scantling.generate.room import encoded, known_tokens
from scantling.generate.sampling import Sampling
from scantling.generate.session import begin, start
from scantling.generate.settings import Generation, Options
from scantling.generate.writer import Writer

if TYPE_CHECKING:
    from scantling.model import Model


@dataclass(frozen=True)
class Beams:
    """How many texts are kept, and how they are compared.

    Attributes:
        count: beginnings that are kept at every step, and whole texts in the end.
        length_penalty: a in score = sum of log-probabilities / length^a, the length counting new tokens with their
            end-of-text; 0 compares sums, above 0 favours long texts, below 0 short ones.
        early_stopping: end as soon as there are `count` whole texts; else go on until no beginning can still beat the
            worst of them.
    """

    count: int = 4
    length_penalty: float = 1.0
    early_stopping: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.count, bool) or not isinstance(self.count, int) or self.count < 1:
            raise ScantlingInputError(f"beams is {self.count!r}; a whole number of at least 1 is needed")
        alpha = self.length_penalty
        if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not -10 <= alpha <= 10:
            raise ScantlingInputError(f"length_penalty is {alpha!r}; a number from -10 to 10 is needed")

    def score(self, total: float, length: int) -> float:
        """Of a text of `length` new tokens whose log-probabilities add up to `total`."""
        return total / float(length**self.length_penalty)

    def reachable(self, total: float, length: int, limit: int) -> float:
        """A score that no continuation of a beginning exceeds: later tokens add nothing above 0 to its sum.

        With a penalty above 0 the sum is best divided by the greatest length, else by the present one.
        """
        return self.score(total, limit if self.length_penalty > 0 else length)


@dataclass(frozen=True)
class Hypothesis:
    """A text of a beam search.

    Attributes:
        ids: new tokens, end-of-text included where it came.
        total: sum of their log-probabilities.
        score: what they are compared by.
    """

    ids: tuple[int, ...]
    total: float
    score: float


@dataclass(frozen=True)
class Found:
    """What a search gave: the best texts, the best first, and what it took; see `engine.Generation`.

    Attributes:
        steps: decode steps after the first token.
        rows: beginnings that went through the model together in each of them.
    """

    hypotheses: list[Hypothesis]
    prefill_seconds: float
    decode_seconds: float
    cache_bytes: int
    limit: int
    steps: int
    rows: int


@dataclass(frozen=True)
class _Running:
    ids: tuple[int, ...]
    total: float
    row: int


def beam_search(
    model: Model,
    ids: Tensor,
    max_new_tokens: int,
    beams: Beams,
    sampling: Sampling | None = None,
    *,
    attention_mask: Tensor | None = None,
    ignore_eos: bool = False,
    keeping: Keeping | None = None,
) -> Found:
    """The best texts after one prompt (1, T), the best first; of an encoder-decoder, after one source.

    Args:
        sampling: its penalties, n-gram blocking and bias act on the log-probabilities, as in transformers.

    Raises:
        ScantlingInputError: several prompts, a temperature, or what `begin` refuses.
    """
    how = sampling or Sampling()
    if not how.greedy:
        raise ScantlingInputError(f"beams and temperature {how.temperature:g} are given: beam search draws nothing")
    if ids.shape[0] != 1:
        raise ScantlingInputError(f"beam search takes one prompt at a time, and {ids.shape[0]} are given")
    ends = frozenset[int]() if ignore_eos else model.eos_ids
    (history,) = begun(model, ids, attention_mask)
    search = _Search(beams, how, ends, history.prompt, known_tokens(model))
    began = time.perf_counter()
    with torch.inference_mode():
        session, logits, limit = begin(model, ids, max_new_tokens, attention_mask, keeping=keeping)
        first, steps = time.perf_counter(), 0
        while not search.step(logits, limit):
            rows = [one.row for one in search.running]
            if rows != list(range(logits.shape[0])):
                session.select(torch.tensor(rows, device=ids.device))
            logits = session.step(torch.tensor([one.ids[-1] for one in search.running], device=ids.device))
            steps += 1
    seconds = (first - began, time.perf_counter() - first)
    return Found(search.finished, *seconds, session.cache.nbytes, limit, steps, logits.shape[0])


class _Search:
    """The beginnings and the whole texts of one search, the best first."""

    def __init__(self, beams: Beams, how: Sampling, ends: frozenset[int], prompt: Sequence[int], known: int) -> None:
        self._beams, self._how, self._ends, self._prompt, self._known = beams, how, ends, prompt, known
        self.running = [_Running((), 0.0, 0)]
        self.finished: list[Hypothesis] = []

    def step(self, logits: Tensor, limit: int) -> bool:
        """Take the logits (rows, V) after each beginning; whether the search is over."""
        grown = self._grown(logits)
        count, length = self._beams.count, len(grown[0].ids)
        if length == limit:
            # As many as are kept at every step; all of them end here.
            self._finish(grown[:count])
            return True
        # Texts that end count only if they are among the best `count`; the others are there to go on with.
        self._finish([one for one in grown[:count] if one.ids[-1] in self._ends])
        self.running = [one for one in grown if one.ids[-1] not in self._ends][:count]
        if not self.running:
            return True
        if len(self.finished) < count:
            return False
        best = self._beams.reachable(self.running[0].total, length, limit)
        return self._beams.early_stopping or best <= self.finished[-1].score

    def _grown(self, logits: Tensor) -> list[_Running]:
        """The best beginnings that are one token longer, with room for those that end."""
        logs = logits[:, : self._known].float().log_softmax(-1)
        histories = [History(self._prompt, list(one.ids)) for one in self.running]
        logs = adjusted(logs, self._how, histories)
        totals = logs + torch.tensor([one.total for one in self.running], device=logs.device)[:, None]
        most = min(self._beams.count * (1 + len(self._ends)), totals.numel())
        best = totals.flatten().topk(most)
        pairs = zip(best.values.tolist(), best.indices.tolist(), strict=True)
        kept = [(total, *divmod(place, logs.shape[1])) for total, place in pairs if total > float("-inf")]
        return [_Running((*self.running[row].ids, token), total, row) for total, row, token in kept]

    def _finish(self, ended: Sequence[_Running]) -> None:
        self.finished += [Hypothesis(o.ids, o.total, self._beams.score(o.total, len(o.ids))) for o in ended]
        self.finished = sorted(self.finished, key=lambda one: -one.score)[: self._beams.count]


def beam_texts(
    model: Model, prompt: str, max_new_tokens: int, beams: Beams, sampling: Sampling, options: Options
) -> list[Generation]:
    """The best texts after a prompt, the best first; their log-probability is that of the whole text.

    Raises:
        ScantlingInputError: as `beam_search`, or a setting that beams cannot follow.
    """
    for name in ("stop", "logprobs", "shape", "drafting", "contrastive", "chunk"):
        if getattr(options, name) not in ((), None):
            raise ScantlingInputError(f"{name} and beams are given: beams keep several texts; leave one of them out")
    ids = model.ids(encoded(model, prompt, max_new_tokens))
    keep = {"ignore_eos": options.ignore_eos, "keeping": options.keeping}
    found = beam_search(model, ids, max_new_tokens, beams, sampling, **keep)  # type: ignore[arg-type]
    return [_text(model, one, found, ids.shape[1], max_new_tokens, options) for one in found.hypotheses]


def _text(model: Model, one: Hypothesis, found: Found, prompt_tokens: int, asked: int, options: Options) -> Generation:
    writer = Writer(model, options)
    for token in one.ids:
        writer.push(token)
    writer.finish("length")
    seconds = (found.prefill_seconds, found.decode_seconds)
    full = writer.reason == "length" and found.limit < asked
    return Generation(
        writer.text,
        list(one.ids),
        prompt_tokens,
        len(one.ids),
        writer.reason or "length",
        *seconds,
        found.cache_bytes,
        found.limit,
        full,
        rows=found.rows,
        beyond=found.steps - (len(one.ids) - 1),
    )


def beam_rows(model: Model, ids: Tensor, found: Found) -> Tensor:
    """Whole rows (count, T + new) of a search after ids (1, T), shorter ones filled with their last id."""
    rows = start(model, 1) if model.parts.two_stacks else ids
    longest = max(len(one.ids) for one in found.hypotheses)
    new = [[*one.ids, *[one.ids[-1]] * (longest - len(one.ids))] for one in found.hypotheses]
    return torch.cat((rows.expand(len(new), -1), model.ids(new)), 1)
