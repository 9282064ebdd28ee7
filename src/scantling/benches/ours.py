"""Our own engines, run once for a load."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from scantling.benches.plan import Load, prompts
from scantling.generate.batching import Engine
from scantling.generate.embed import vectors
from scantling.generate.engine import Options
from scantling.generate.keeping import Keeping
from scantling.generate.limits import Limits
from scantling.generate.request import Request
from scantling.generate.room import known_tokens, needed
from scantling.generate.session import begin

if TYPE_CHECKING:
    from scantling.model import Model


class Ours:
    """A loaded model, whichever way it decodes.

    Attributes:
        read_bytes: of weights that a step reads, where they are packed; None where the parts tell.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        packed = model.packed
        # A packed model may have no net yet, and is not to be made to load one.
        self._device = model.device if packed is None else torch.device("cpu")
        self.read_bytes = None if packed is None else packed.weights.read_nbytes
        self.weights_bytes = None if packed is None else packed.weights.nbytes

    def run(self, load: Load) -> dict[str, Any]:
        """Seconds to the first token, seconds of the steps after it, how many tokens these made, bytes of the cache."""
        if self._model.card.family == "encoder":
            return self._embed(load)
        return self._paged(load) if load.kind == "paged" else self._session(load)

    def _session(self, load: Load) -> dict[str, Any]:
        known = known_tokens(self._model)
        ids = torch.tensor(prompts(load, self._model.card.vocab_size), device=self._device)
        keeping = None if load.cache == "full" else Keeping(load.kind, load.numbers)
        with torch.inference_mode():
            began = time.perf_counter()
            session, logits, _ = begin(self._model, ids, load.tokens + 1, keeping=keeping)
            new = logits[:, :known].argmax(-1)
            self._wait()
            first = time.perf_counter()
            for _ in range(load.tokens):
                new = session.step(new)[:, :known].argmax(-1)
            self._wait()
            end = time.perf_counter()
        return _timed(first - began, end - first, load.batch * load.tokens, session.cache.nbytes)

    def _paged(self, load: Load) -> dict[str, Any]:
        """The first token of every row, then the rest; rows that are there first decode beside the others' prompts."""
        rows = [
            Request(row, load.tokens + 1, options=Options(ignore_eos=True))
            for row in prompts(load, self._model.card.vocab_size)
        ]
        needs = [needed(self._model, load.prompt, load.tokens + 1)] * load.batch
        engine = Engine(self._model, replace(Limits.for_all(needs, load.batch), numbers=load.numbers))
        began = time.perf_counter()
        handles = [engine.submit(row) for row in rows]
        while not all(handle.ids for handle in handles):
            engine.step()
        self._wait()
        first, before = time.perf_counter(), sum(len(handle.ids) for handle in handles)
        engine.run()
        self._wait()
        end = time.perf_counter()
        made = sum(len(handle.ids) for handle in handles) - before
        return _timed(first - began, end - first, made, engine.cache.nbytes)

    def _embed(self, load: Load) -> dict[str, Any]:
        rows = prompts(load, self._model.card.vocab_size)
        began = time.perf_counter()
        vectors(self._model, rows, load.batch)
        self._wait()
        return _timed(time.perf_counter() - began, 0.0, 0, 0)

    def _wait(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize()


def _timed(first: float, decode: float, made: int, cache: int | None) -> dict[str, Any]:
    return {"first_seconds": first, "decode_seconds": decode, "made": made, "cache_bytes": cache}
