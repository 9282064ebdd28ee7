"""The decode loop: one pass over the prompt, then one position at a time over a preallocated cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from scantling import inputs
from scantling.errors import ScantlingInputError
from scantling.generate.constrain import Shape
from scantling.generate.contrastive import search
from scantling.generate.ledger import Ledger
from scantling.generate.processors import History
from scantling.generate.room import encoded, known_tokens, room
from scantling.generate.sample import choose, logprobs
from scantling.generate.sampling import Sampling
from scantling.generate.session import AnySession, Session, Source, begin, start
from scantling.generate.settings import Chosen, Generation, Options
from scantling.generate.speculative import Speculation
from scantling.generate.text import complete

if TYPE_CHECKING:
    from scantling.model import Model

__all__ = [
    "Generation",
    "Options",
    "Session",
    "Source",
    "complete",
    "continue_ids",
    "encoded",
    "inference_mode",
    "room",
    "start",
    "tokens",
]

inference_mode = torch.inference_mode


@dataclass(frozen=True)
class Drawn:
    """One step of a batch.

    Attributes:
        ids: (B), the new ones.
        logits: (B, V), the model's own, that they were drawn from.
        fulfilled: every row has a constraint that lets nothing more come.
        ledger: how drafts fare, where there are any.
        draft_bytes: allocated for keys and values of a draft model.
    """

    ids: Tensor
    logits: Tensor
    session: AnySession
    fulfilled: bool = False
    ledger: Ledger | None = None
    draft_bytes: int = 0

    @property
    def cache_bytes(self) -> int:
        """Allocated for keys and values."""
        return self.session.cache.nbytes + self.draft_bytes


def tokens(
    model: Model,
    ids: Tensor,
    max_new_tokens: int,
    sampling: Sampling,
    attention_mask: Tensor | None = None,
    options: Options | None = None,
) -> Iterator[Drawn]:
    """New ids, one step at a time; the first comes with the end of the prefill.

    Raises:
        ScantlingInputError: the prompt leaves no room in the context, or the model writes no text.
    """
    options, generators, known = options or Options(), sampling.generators(ids.shape[0]), known_tokens(model)
    if options.drafting is not None:
        yield from _with_drafts(model, ids, max_new_tokens, sampling, attention_mask, options)
        return
    if options.contrastive is not None:
        yield from _contrastive(model, ids, max_new_tokens, sampling, attention_mask, options)
        return
    session, logits, limit = begin(
        model, ids, max_new_tokens, attention_mask, keeping=options.keeping, chunk=options.chunk
    )
    histories = begun(model, ids, attention_mask, options.shape)
    for i in range(limit):
        new = choose(logits[:, :known], sampling, generators, histories)
        for history, token in zip(histories, new.tolist(), strict=True):
            history.add(token)
        fulfilled = all(history.constraint is not None and history.constraint.done for history in histories)
        yield Drawn(new, logits[:, :known], session, fulfilled)
        if i + 1 < limit:
            logits = session.step(new)


def _with_drafts(
    model: Model, ids: Tensor, max_new_tokens: int, sampling: Sampling, mask: Tensor | None, options: Options
) -> Iterator[Drawn]:
    if ids.shape[0] != 1 or (mask is not None and not bool(mask.all())):
        raise ScantlingInputError("drafts are for one text at a time, without padding")
    assert options.drafting is not None
    made = Speculation(model, ids, max_new_tokens, sampling, options.drafting, options.keeping, options.chunk)
    for token, logits in made:
        yield Drawn(ids.new_tensor([token]), logits, made.session, ledger=made.ledger, draft_bytes=made.draft_bytes)


def _contrastive(
    model: Model, ids: Tensor, max_new_tokens: int, sampling: Sampling, mask: Tensor | None, options: Options
) -> Iterator[Drawn]:
    if mask is not None and not bool(mask.all()):
        raise ScantlingInputError("contrastive search is for one text at a time, without padding")
    assert options.contrastive is not None
    history = begun(model, ids, None, options.shape)[0]
    kept = (options.keeping, options.chunk)
    for token, logits, session in search(model, ids, max_new_tokens, options.contrastive, sampling, history, *kept):
        fulfilled = history.constraint is not None and history.constraint.done
        yield Drawn(ids.new_tensor([token]), logits, session, fulfilled)


def begun(model: Model, ids: Tensor, mask: Tensor | None, shape: Shape | None = None) -> list[History]:
    """What stands before the first new token of each row; of an encoder-decoder, what its target begins with."""
    if model.parts.two_stacks:
        prompts = start(model, ids.shape[0]).tolist()
    elif mask is None:
        prompts = ids.tolist()
    else:
        prompts = [row[real].tolist() for row, real in zip(ids, mask.bool(), strict=True)]
    ends = model.eos_ids
    return [History(row, constraint=None if shape is None else shape.start(model.tokenizer, ends)) for row in prompts]


def one_by_one(
    model: Model, prompt: list[int], max_new_tokens: int, sampling: Sampling, options: Options
) -> Iterator[Chosen]:
    """The tokens behind one prompt, for `text.complete`."""
    ids, logprob = model.ids(prompt), None
    room(model, len(prompt), max_new_tokens)
    for drawn in tokens(model, ids, max_new_tokens, sampling, options=options):
        token = int(drawn.ids)
        if options.logprobs is not None:
            (logprob,) = logprobs(drawn.logits, [token], options.logprobs)
        rows = 1 if options.contrastive is None else min(options.contrastive.top_k, known_tokens(model))
        yield Chosen(token, drawn.cache_bytes, drawn.fulfilled, logprob, drawn.ledger, rows)


def best_of(
    model: Model, prompt: str, max_new_tokens: int, sampling: Sampling, options: Options, count: int
) -> list[Generation]:
    """`count` texts of one prompt, the best first: by the mean log-probability of their tokens.

    Each is drawn with a seed of its own: the seed given, and those that follow it.

    Raises:
        ScantlingInputError: a count below 1, or greedy sampling, which would give one text so many times.
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ScantlingInputError(f"best_of is {count!r}; a whole number of at least 1 is needed")
    if count > 1 and sampling.greedy:
        raise ScantlingInputError("best_of with temperature 0 gives one text so many times; set a temperature")
    asked = options if options.logprobs is not None else replace(options, logprobs=0)
    seeds = [None if sampling.seed is None else (sampling.seed + i) % 2**63 for i in range(count)]
    made = [complete(model, prompt, max_new_tokens, replace(sampling, seed=seed), asked) for seed in seeds]
    return sorted(made, key=lambda one: -mean_logprob(one))


def mean_logprob(one: Generation) -> float:
    """Mean log-probability of the tokens of a text that was made with log-probabilities."""
    assert one.logprobs is not None
    return sum(token.logprob for token in one.logprobs) / len(one.logprobs)


def continue_ids(
    model: Model,
    ids: Tensor,
    max_new_tokens: int,
    sampling: Sampling,
    attention_mask: Any,
    options: Options | None = None,
) -> Tensor:
    """Whole rows (B, T + new) for prompts (B, T); a row that ended goes on with its last id.

    Of an encoder-decoder the rows are the targets, (B, 1 + new) with what they begin with, and prompts may be padded
    anywhere.
    """
    options = options or Options()
    mask = checked_mask(model, ids, attention_mask)
    if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 0:
        raise ScantlingInputError(f"max_new_tokens is {max_new_tokens}; at least 0 is needed")
    rows = start(model, ids.shape[0]) if model.parts.two_stacks else ids
    if max_new_tokens == 0:
        return rows
    ends = [] if options.ignore_eos else sorted(model.eos_ids)
    done = torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)
    columns = [rows]
    with torch.inference_mode():
        for drawn in tokens(model, ids, max_new_tokens, sampling, mask, options):
            new = torch.where(done, columns[-1][:, -1], drawn.ids)
            columns.append(new[:, None])
            if ends:
                done = done | torch.isin(new, torch.tensor(ends, device=ids.device))
                if bool(done.all()):
                    break
    return torch.cat(columns, 1).clone()


def checked_mask(model: Model, ids: Tensor, attention_mask: Any) -> Tensor | None:
    """The mask (B, T) beside prompts (B, T), or None.

    Raises:
        ScantlingInputError: another shape, a row of padding only, or one padded on the right.
    """
    mask = None if attention_mask is None else inputs.padding(attention_mask, ids)
    if mask is not None and not bool(mask.any(-1).all()):
        raise ScantlingInputError("a row is padding only: at least one real token is needed")
    if mask is not None and not model.parts.two_stacks and not bool(mask[:, -1].all()):
        raise ScantlingInputError("the last token of a row is padding: rows of a batch are padded on the left")
    return mask
