"""Whether the head and the token table are one matrix, where both are stored."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from scantling.checkpoint.files import shown
from scantling.checkpoint.inspect.codes import Finding
from scantling.checkpoint.inspect.declared import Declared
from scantling.checkpoint.inspect.gather import Gathered, Stored
from scantling.checkpoint.inspect.sample import equal
from scantling.checkpoint.matching import Matched


def copies_of_the_table(
    copies: Sequence[str], gathered: Gathered, declared: Declared, beside: Matched
) -> tuple[list[str], list[Finding]]:
    """Those of the stored copies of a tied matrix that differ from it, and what there is to say of all of them.

    Raises:
        ScantlingInputError: a file cannot be read any more.
    """
    table = _stored_as("embed.weight", declared, gathered, beside)
    parted: list[str] = []
    findings = []
    for copy in copies if table is not None else ():
        assert table is not None
        name, other = table[0], gathered.tensors[copy]
        answer = equal(other, table[1])
        if answer is None:
            text = f"{shown(copy)} is stored beside {shown(name)}, in another form, and was not compared with it"
            findings.append(Finding("tied_copy", text))
        elif answer[0]:
            text = f"{shown(copy)} repeats {shown(name)} ({other.nbytes:,} bytes): {answer[1]}"
            findings.append(Finding("tied_copy", text))
        else:
            findings.append(Finding("tied_differs", f"{shown(copy)} and {shown(name)} are different: {answer[1]}"))
            parted.append(copy)
    return parted, findings


def head_that_is_the_table(gathered: Gathered, declared: Declared, beside: Matched) -> Iterator[Finding]:
    """A head of its own, by the config, that holds the token table again.

    Raises:
        ScantlingInputError: a file cannot be read any more.
    """
    table = _stored_as("embed.weight", declared, gathered, beside)
    head = None if declared.card.tied else _stored_as("head.matrix.weight", declared, gathered, beside)
    if table is None or head is None or declared.card.head.kind != "lm":
        return
    answer = equal(head[1], table[1])
    if answer is not None and answer[0]:
        yield Finding("untied_equal", f"{shown(head[0])} is {shown(table[0])} again: {answer[1]}")


def _stored_as(ours: str, declared: Declared, gathered: Gathered, beside: Matched) -> tuple[str, Stored] | None:
    """A weight of ours in the file: its name there and the tensor."""
    link = next((link for link in declared.table if link.ours == (ours,)), None)
    name = None if link is None else beside.names.get(link.theirs[0])
    return None if name is None else (name, gathered.tensors[name])
