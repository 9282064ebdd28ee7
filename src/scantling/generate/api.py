"""What `Model.generate` is asked for, sorted out: one prompt or several, text or ids."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from scantling.errors import ScantlingInputError
from scantling.generate.batching import in_order
from scantling.generate.beam import Beams, beam_rows, beam_search, beam_texts
from scantling.generate.engine import best_of, checked_mask, continue_ids
from scantling.generate.request import Request
from scantling.generate.sampling import Sampling
from scantling.generate.session import start
from scantling.generate.settings import Generation, Options
from scantling.generate.text import complete

if TYPE_CHECKING:
    from scantling.model import Model


@dataclass(frozen=True)
class Wanted:
    """Everything that a call asks for beside its prompts."""

    max_new_tokens: int
    sampling: Sampling
    options: Options
    beams: Beams | None
    best_of: int


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

    def wanted(
        self,
        max_new_tokens: int,
        sampling: Sampling | None,
        options: Options | None,
        beams: Beams | None,
        count: int,
    ) -> Wanted:
        """The same as records, where none is given whole.

        Raises:
            ScantlingInputError: a setting is named beside a record that holds it, settings exclude each other, or a
                record is of another kind.
        """
        records = (("sampling", sampling, Sampling), ("options", options, Options), ("beams", beams, Beams))
        for what, given, kind in records:
            if given is not None and not isinstance(given, kind):
                raise ScantlingInputError(f"{what} is {given!r}; a scantling.generate.{kind.__name__} is needed")
        of = {"sampling": sampling, "options": options}
        for field in fields(self):
            where = "options" if field.name in ("stop", "ignore_eos") else "sampling"
            if of[where] is not None and getattr(self, field.name) != field.default:
                raise ScantlingInputError(f"{field.name} and {where} are given: put it into {where}, or leave that out")
        if beams is not None and count != 1:
            raise ScantlingInputError("beams and best_of are given: beams draw nothing; leave one of them out")
        named = Sampling(self.temperature, self.top_k, self.top_p, self.min_p, self.seed)
        plain = Options(self.stop, self.ignore_eos)
        return Wanted(max_new_tokens, sampling or named, options or plain, beams, count)


def generate(model: Model, prompt: Any, wanted: Wanted, attention_mask: Any) -> Any:
    """See `Model.generate`."""
    options = wanted.options
    if isinstance(prompt, str):
        _no_mask(attention_mask, "a text has no padding")
        return texts(model, prompt, wanted)[0].text
    if _texts(prompt):
        _no_mask(attention_mask, "texts have no padding")
        return [one.text for one in each(model, prompt, wanted)]
    if options.stop:
        raise ScantlingInputError("stop strings go with a text prompt; ids are not decoded")
    if wanted.best_of != 1:
        raise ScantlingInputError("best_of goes with a text prompt")
    if _unequal(prompt):
        _no_mask(attention_mask, "rows of unequal lengths have no padding")
        made = each(model, prompt, wanted)
        begins = start(model, len(prompt)).tolist() if model.parts.two_stacks else prompt
        return [[*row, *one.ids] for row, one in zip(begins, made, strict=True)]
    ids = model.ids(prompt)
    if wanted.beams is None:
        return continue_ids(model, ids, wanted.max_new_tokens, wanted.sampling, attention_mask, options)
    mask = checked_mask(model, ids, attention_mask)
    keep = {"attention_mask": mask, "ignore_eos": options.ignore_eos, "keeping": options.keeping}
    found = beam_search(model, ids, wanted.max_new_tokens, wanted.beams, wanted.sampling, **keep)  # type: ignore[arg-type]
    return beam_rows(model, ids, found)[:1]


def texts(model: Model, prompt: str, wanted: Wanted) -> list[Generation]:
    """The texts of one prompt, the best first: one, or as many as beams or `best_of` say."""
    how = (wanted.max_new_tokens, wanted.sampling, wanted.options)
    if wanted.beams is not None:
        return beam_texts(model, prompt, wanted.max_new_tokens, wanted.beams, *how[1:])
    return [complete(model, prompt, *how)] if wanted.best_of == 1 else best_of(model, prompt, *how, wanted.best_of)


def each(model: Model, prompts: Sequence[Any], wanted: Wanted) -> Iterator[Generation]:
    """One text of each prompt, in their order and as soon as it is there; decoded together, where none is searched for.

    Raises:
        ScantlingInputError: what one of the prompts is refused for; or rows of ids, and a search for the best text.
    """
    if wanted.beams is None and wanted.best_of == 1:
        asked = [Request(prompt, wanted.max_new_tokens, wanted.sampling, wanted.options) for prompt in prompts]
        yield from (handle.result() for handle in in_order(model, asked))
        return
    if not _texts(prompts):
        raise ScantlingInputError("rows of unequal lengths: only plain generation takes them together")
    for prompt in prompts:
        yield texts(model, prompt, wanted)[0]


def _no_mask(attention_mask: Any, why: str) -> None:
    if attention_mask is not None:
        raise ScantlingInputError(f"attention_mask goes with ids; {why}")


def _texts(prompts: Any) -> bool:
    return isinstance(prompts, list | tuple) and bool(prompts) and all(isinstance(one, str) for one in prompts)


def _unequal(prompts: Any) -> bool:
    rows = isinstance(prompts, list | tuple) and bool(prompts) and all(isinstance(o, list | tuple) for o in prompts)
    return rows and len({len(row) for row in prompts}) > 1
