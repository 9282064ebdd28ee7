"""How a text is made, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from scantling.errors import ScantlingInputError

if TYPE_CHECKING:
    from scantling.generate.constrain import Shape
    from scantling.generate.contrastive import Contrastive
    from scantling.generate.keeping import Keeping
    from scantling.generate.ledger import Ledger
    from scantling.generate.sample import Logprob
    from scantling.generate.speculative import Drafting


@dataclass(frozen=True)
class Generation:
    """What was generated and what it took.

    Attributes:
        text: the new text, without the prompt; of an encoder-decoder, the target's.
        ids: the new ids, end-of-text included where it came.
        finish_reason: ``stop`` (end-of-text, a stop string, or a constraint that is fulfilled) or ``length`` (the
            limit, or a full context).
        prefill_seconds: the pass over the prompt and the choice of the first token.
        decode_seconds: everything after the first token.
        cache_bytes: allocated for keys and values, those of a draft model included.
        limit: new tokens that were allowed, by the caller and by the context.
        context_full: it ended because no position was left, before the caller's limit.
        logprobs: of each new token, where they were asked for.
        ledger: how drafts fared, where there were any.
        rows: texts or candidates that went through the model together, and were in the cache.
        beyond: steps of these rows after the last token of this text, for other texts of the same search.
    """

    text: str
    ids: list[int]
    prompt_tokens: int
    new_tokens: int
    finish_reason: str
    prefill_seconds: float
    decode_seconds: float
    cache_bytes: int
    limit: int
    context_full: bool = False
    logprobs: tuple[Logprob, ...] | None = None
    ledger: Ledger | None = None
    rows: int = 1
    beyond: int = 0

    @property
    def steps(self) -> int:
        """Decode steps after the first token."""
        return self.new_tokens - 1 + self.beyond


@dataclass(frozen=True)
class Options:
    """How a text is made, beside how its tokens are drawn.

    Attributes:
        stop: strings that end the text; they are not part of it.
        ignore_eos: go on past end-of-text.
        keeping: how keys and values are kept; default every position, as it is.
        chunk: tokens of a prompt that go through at once; None for all.
        logprobs: so many of the likeliest tokens are reported beside each chosen one; None reports none at all.
        shape: what the text must match, or None.
        drafting: who proposes tokens, or None.
        contrastive: choose tokens by contrastive search; one text at a time.
    """

    stop: Sequence[str] = ()
    ignore_eos: bool = False
    keeping: Keeping | None = None
    chunk: int | None = None
    logprobs: int | None = None
    shape: Shape | None = None
    drafting: Drafting | None = None
    contrastive: Contrastive | None = None

    def __post_init__(self) -> None:
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        if not isinstance(stop, list | tuple) or not all(isinstance(one, str) for one in stop):
            raise ScantlingInputError(f"stop is {self.stop!r}; a string, or a list of strings, is needed")
        object.__setattr__(self, "stop", tuple(stop))
        top = self.logprobs
        if top is not None and (isinstance(top, bool) or not isinstance(top, int) or not 0 <= top <= 100):
            raise ScantlingInputError(f"logprobs is {top!r}; a whole number from 0 to 100 is needed")
        if self.shape is not None and self.drafting is not None:
            raise ScantlingInputError("a regular expression or JSON schema and drafts are given: leave the drafts out")
        if self.contrastive is not None and self.drafting is not None:
            raise ScantlingInputError("contrastive search and drafts are given: leave one of them out")


@dataclass(frozen=True)
class Chosen:
    """One token of a text as it was chosen.

    Attributes:
        cache_bytes: allocated for keys and values.
        fulfilled: a constraint lets nothing more come.
        rows: candidates that were in the cache.
        logprob: where it was asked for.
        ledger: how drafts fare, where there are any.
    """

    id: int
    cache_bytes: int
    fulfilled: bool = False
    logprob: Logprob | None = None
    ledger: Ledger | None = None
    rows: int = 1
