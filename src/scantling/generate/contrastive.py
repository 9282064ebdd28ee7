"""Contrastive search: of the likeliest tokens the one whose state is least like those before it.

Su, Lan, Wang, Yogatama, Kong, Collier, A Contrastive Framework for Neural Text Generation (arXiv:2202.06417): the next
token is the candidate v of the k likeliest with the largest (1 - alpha) p(v) - alpha max_j cos(h_v, h_j), where h_v is
the state of v after the text so far, and h_j those of the tokens of the text, the prompt included. Of an
encoder-decoder the states are the decoder's, and the text is the target with what it begins with.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from scantling.errors import ScantlingInputError
from scantling.generate.keeping import Keeping
from scantling.generate.processors import History, adjusted
from scantling.generate.room import known_tokens
from scantling.generate.session import AnySession, begin

if TYPE_CHECKING:
    from scantling.generate.sample import Sampling
    from scantling.model import Model


@dataclass(frozen=True)
class Contrastive:
    """How candidates are found and judged.

    Attributes:
        top_k: candidates of a step; each goes through the model.
        alpha: the weight of being unlike; 0 is greedy.
    """

    top_k: int = 4
    alpha: float = 0.6

    def __post_init__(self) -> None:
        if isinstance(self.top_k, bool) or not isinstance(self.top_k, int) or not 2 <= self.top_k <= 1000:
            raise ScantlingInputError(f"contrastive top_k is {self.top_k!r}; a whole number from 2 to 1000 is needed")
        number = isinstance(self.alpha, int | float) and not isinstance(self.alpha, bool)
        if not number or not 0 <= self.alpha <= 1:
            raise ScantlingInputError(f"contrastive alpha is {self.alpha!r}; a number from 0 to 1 is needed")


def search(
    model: Model,
    ids: Tensor,
    max_new_tokens: int,
    how: Contrastive,
    sampling: Sampling,
    history: History,
    keeping: Keeping | None = None,
    chunk: int | None = None,
) -> Iterator[tuple[int, Tensor, AnySession]]:
    """New tokens after a prompt or source (1, T), each with the logits (1, V) that it was chosen by and the session.

    Args:
        sampling: its penalties, n-gram blocking and bias act on the logits before the candidates are taken.
        history: what stands before; it is told of every token.

    Raises:
        ScantlingInputError: several prompts, a temperature, or what `begin` refuses.
    """
    if ids.shape[0] != 1:
        raise ScantlingInputError(f"contrastive search takes one prompt at a time, and {ids.shape[0]} are given")
    if not sampling.greedy:
        raise ScantlingInputError(
            f"contrastive search and temperature {sampling.temperature:g} are given: the search draws nothing"
        )
    known = known_tokens(model)
    with _states(model) as seen:
        # The compiled pass gives no states.
        kept = keeping or Keeping()
        session, logits, limit = begin(model, ids, max_new_tokens, keeping=kept, chunk=chunk, reads_last=True)
        states = _unit(torch.cat(seen, 1)[0])
        for _ in range(limit):
            row = logits[:, :known]
            likely = adjusted(row, sampling, [history]).float().softmax(-1)[0].topk(min(how.top_k, known))
            seen.clear()
            session.select(torch.zeros(len(likely.indices), dtype=torch.int64, device=ids.device))
            scored = session.step(likely.indices)
            made = _unit(seen[-1][:, -1])
            apart = (made @ states.T).amax(-1)
            best = int(((1 - how.alpha) * likely.values - how.alpha * apart).argmax())
            token = int(likely.indices[best])
            history.add(token)
            yield token, row, session
            session.select(torch.tensor([best], device=ids.device))
            logits, states = scored[best : best + 1], torch.cat([states, made[best : best + 1]])


@contextmanager
def _states(model: Model) -> Iterator[list[Tensor]]:
    """What the decoder gave to the head in each pass since the list was cleared: (B, T, d)."""
    seen: list[Tensor] = []
    net: Any = model.net
    hook = net.decoder.register_forward_hook(lambda _, __, out: seen.append(out))
    try:
        yield seen
    finally:
        hook.remove()


def _unit(states: Tensor) -> Tensor:
    """Rows (N, d) of length 1, in float32."""
    return torch.nn.functional.normalize(states.float(), dim=-1)
