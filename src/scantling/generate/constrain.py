"""Text that must match: a regular expression or a JSON schema, through the library llguidance."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from scantling.errors import ScantlingInputError, need
from scantling.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Shape:
    """What a text must look like: exactly one of a regular expression, which it matches whole, and a JSON schema."""

    regex: str | None = None
    json_schema: str | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if (self.regex is None) == (self.json_schema is None):
            raise ScantlingInputError("give a regular expression or a JSON schema, and not both")
        if self.regex is not None and not isinstance(self.regex, str):
            raise ScantlingInputError(f"regex is {type(self.regex).__name__}; text is needed")

    def start(self, tokenizer: Tokenizer | None, eos_ids: frozenset[int]) -> Constraint:
        """A constraint at the beginning of a text.

        Raises:
            ScantlingInputError: no tokenizer, no end-of-text, or an expression or schema that cannot be followed.
            MissingExtra: llguidance is not installed.
        """
        library = need("llguidance", "constrain a text")
        if tokenizer is None or not eos_ids:
            raise ScantlingInputError("a constrained text needs a model with a tokenizer and an end-of-text token")
        matcher = library.LLMatcher
        schema = "" if self.regex is not None else self._schema()
        try:
            if self.regex is not None:
                grammar = matcher.grammar_from_regex(self.regex)
            else:
                grammar = matcher.grammar_from_json_schema(schema)
        except ValueError as error:
            raise ScantlingInputError(_told(error, self)) from None
        if problem := matcher.validate_grammar(grammar, _tokens(tokenizer, tuple(sorted(eos_ids)))):
            raise ScantlingInputError(_told(problem, self))
        return Constraint(matcher(_tokens(tokenizer, tuple(sorted(eos_ids))), grammar, log_level=0), self)

    def _schema(self) -> str:
        if not isinstance(self.json_schema, str):
            try:
                return json.dumps(self.json_schema, allow_nan=False)
            except (TypeError, ValueError, RecursionError):
                raise ScantlingInputError("the JSON schema has values that are no JSON") from None
        try:
            json.loads(self.json_schema)
        except (ValueError, RecursionError) as error:
            raise ScantlingInputError(f"the JSON schema is no JSON: {error}") from None
        return self.json_schema


class Constraint:
    """Where one text stands in the grammar that it follows; made by `Shape.start`."""

    def __init__(self, matcher: Any, shape: Shape) -> None:
        self._matcher, self._shape = matcher, shape

    @property
    def done(self) -> bool:
        """Whether nothing more may come but the end."""
        return bool(self._matcher.is_stopped())

    def allowed(self, tokens: int) -> Tensor:
        """(tokens) bool, True at each that may come next; where the text may end here, end-of-text is one of them.

        Raises:
            ScantlingInputError: nothing matches, or finding out takes the library more than it allows itself.
        """
        words = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.uint8)
        self._check()
        bits = words[:, None].bitwise_right_shift(torch.arange(8, dtype=torch.uint8)).bitwise_and(1).bool().flatten()
        out = torch.zeros(tokens, dtype=torch.bool)
        out[: min(tokens, len(bits))] = bits[:tokens]
        return out

    def take(self, token: int) -> None:
        """Go on behind a token that was allowed.

        Raises:
            ScantlingInputError: as `allowed`.
        """
        self._matcher.consume_token(token)
        self._check()

    def _check(self) -> None:
        """A matcher that failed would let end-of-text through, as if the text were whole."""
        if not self._matcher.is_error():
            return
        problem = str(self._matcher.get_error()).partition("\n")[0]
        raise ScantlingInputError(_told("no text matches it" if "NoExtension" in problem else problem, self._shape))


@lru_cache(maxsize=4)
def _tokens(tokenizer: Tokenizer, eos_ids: tuple[int, ...]) -> Any:
    library = need("llguidance", "constrain a text")
    try:
        return library.LLTokenizer(tokenizer.definition, n_vocab=tokenizer.vocab_size, eos_token=list(eos_ids))
    except ValueError as error:
        raise ScantlingInputError(f"llguidance cannot follow a text of this tokenizer: {error}") from None


def _told(problem: object, shape: Shape) -> str:
    what = "regular expression" if shape.regex is not None else "JSON schema"
    return f"the {what} cannot be followed: {' '.join(str(problem).split())[:200]}"
