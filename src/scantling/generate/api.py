"""What `Model.generate` is asked for, sorted out: one prompt or several, text or ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from scantling.errors import ScantlingInputError
from scantling.generate.engine import Options, complete, continue_ids
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
        if attention_mask is not None:
            raise ScantlingInputError("attention_mask goes with ids; a text has no padding")
        return complete(model, prompt, max_new_tokens, sampling, options).text
    if options.stop:
        raise ScantlingInputError("stop strings go with a text prompt; ids are not decoded")
    return continue_ids(model, model.ids(prompt), max_new_tokens, sampling, attention_mask, options)
