"""What an audit is run on: a model of ours, one of `transformers`, or any callable, each made a subject."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from scantling.errors import ScantlingInputError, need

if TYPE_CHECKING:
    from scantling.audits import Facts, Report, Subject


def audit(
    model: Any,
    *,
    vocab_size: int | None = None,
    facts: Facts | None = None,
    probes: Iterable[str] | None = None,
    tokens: int = 18,
    longest: int = 320,
    seed: int = 0,
) -> Report:
    """Look for the classic failure modes of Transformers in a model.

    Args:
        model: what `scantling.load` gives, a model of transformers, a `Subject`, or any callable from ids (B, T) to
            logits (B, T, V). Arguments of a callable named attention_mask, position_ids and document_ids are used.
        vocab_size: of a callable: ids are drawn below it.
        facts: what a callable says of itself: its family, kind of positions, windows, lengths; `vocab_size` is in it.
        probes: names; default all.
        tokens: of an ordinary row.
        longest: of a row where length is the question.
        seed: of the ids.

    Raises:
        ScantlingInputError: not callable, without a vocabulary, or no such probe.
    """
    need("torch", "audit a model")
    from scantling.audits import Effort, examine

    if tokens < 4 or longest < tokens:
        raise ScantlingInputError(
            f"tokens {tokens} and longest {longest}: at least 4, and no less than tokens, are needed"
        )
    return examine(subject(model, vocab_size=vocab_size, facts=facts), probes, Effort(tokens, longest, seed))


def subject(model: Any, *, vocab_size: int | None = None, facts: Facts | None = None) -> Subject:
    """Any model as the subject of an audit; see `audit`.

    Raises:
        ScantlingInputError: not callable, or without a vocabulary.
    """
    from scantling.audits import Facts, Subject, from_callable

    if isinstance(model, Subject):
        return model
    if hasattr(model, "card") and hasattr(model, "parts") and hasattr(model, "net"):
        from scantling.subjects.ours import ours

        return ours(model)
    if any(kind.__module__.startswith("transformers.") for kind in type(model).__mro__):
        from scantling.subjects.theirs import theirs

        return theirs(model)
    if facts is None:
        if vocab_size is None:
            raise ScantlingInputError("vocab_size is missing: an audit of a callable draws its ids below it")
        facts = Facts(vocab_size)
    return from_callable(model, facts)
