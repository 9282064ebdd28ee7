"""What `Model.generate` is asked for, sorted out: one prompt or several, text or ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from scantling.errors import ScantlingInputError
from scantling.generate.batching import generate_all
from scantling.generate.engine import Generation, Options, complete, continue_ids
from scantling.generate.request import Request
from scantling.generate.sample import Sampling

if TYPE_CHECKING:
    from scantling.model import Model


@dataclass(frozen=True)
class Asked:
    """The settings that a call names one by one."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: Sequence[str] = ()
    ignore_eos: bool = False

    def settings(self, sampling: Sampling | None, options: Options | None) -> tuple[Sampling, Options]:
        """The same as records, where none is given whole.

        Raises:
            ScantlingInputError: a setting is named beside a record that holds it.
        """
        of = {"sampling": sampling, "options": options}
        for field in fields(self):
            where = "options" if field.name in ("stop", "ignore_eos") else "sampling"
            if of[where] is not None and getattr(self, field.name) != field.default:
                raise ScantlingInputError(f"{field.name} and {where} are given: put it into {where}, or leave that out")
        named = Sampling(self.temperature, self.top_k, self.top_p, self.min_p, self.seed)
        return sampling or named, options or Options(self.stop, self.ignore_eos)


def generate(
    model: Model, prompt: Any, max_new_tokens: int, settings: tuple[Sampling, Options], attention_mask: Any
) -> Any:
    """See `Model.generate`."""
    sampling, options = settings
    if isinstance(prompt, str):
        _no_mask(attention_mask, "a text has no padding")
        return complete(model, prompt, max_new_tokens, sampling, options).text
    if _texts(prompt):
        _no_mask(attention_mask, "texts have no padding")
        return [one.text for one in _each(model, prompt, max_new_tokens, settings)]
    if options.stop:
        raise ScantlingInputError("stop strings go with a text prompt; ids are not decoded")
    if _unequal(prompt):
        _no_mask(attention_mask, "rows of unequal lengths have no padding")
        made = _each(model, prompt, max_new_tokens, settings)
        return [[*row, *one.ids] for row, one in zip(prompt, made, strict=True)]
    return continue_ids(model, model.ids(prompt), max_new_tokens, sampling, attention_mask, options)


def _each(
    model: Model, prompts: Sequence[Any], max_new_tokens: int, settings: tuple[Sampling, Options]
) -> list[Generation]:
    """One text of each prompt, decoded together; of an encoder-decoder, one after the other."""
    sampling, options = settings
    if not model.parts.two_stacks:
        asked = [Request(prompt, max_new_tokens, sampling, options) for prompt in prompts]
        return [handle.result() for handle in generate_all(model, asked)]
    if not _texts(prompts):
        raise ScantlingInputError("sources of unequal lengths: pad them, and say where with attention_mask")
    return [complete(model, prompt, max_new_tokens, sampling, options) for prompt in prompts]


def _no_mask(attention_mask: Any, why: str) -> None:
    if attention_mask is not None:
        raise ScantlingInputError(f"attention_mask goes with ids; {why}")


def _texts(prompts: Any) -> bool:
    return isinstance(prompts, list | tuple) and bool(prompts) and all(isinstance(one, str) for one in prompts)


def _unequal(prompts: Any) -> bool:
    rows = isinstance(prompts, list | tuple) and bool(prompts) and all(isinstance(o, list | tuple) for o in prompts)
    return rows and len({len(row) for row in prompts}) > 1
