"""What every command shares: its options, its tables, its JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from scantling.cards import Card
from scantling.cards.rules import position_limit, positions_text
from scantling.errors import ScantlingInputError
from scantling.parts.part import Workload

if TYPE_CHECKING:
    from scantling.model import Model

F = TypeVar("F", bound=Callable[..., Any])

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON: plain integers, bytes, seconds.")
revision_option = click.option("--revision", metavar="REV", help="Branch, tag or commit of a hub id.")
encoding_option = click.option(
    "--encoding-errors",
    type=click.Choice(["strict", "replace"]),
    default="strict",
    show_default=True,
    help="Bytes that are no UTF-8: refuse them, or read each as U+FFFD.",
)
seed_option = click.option("--seed", type=int, help="Of the random numbers; default: new ones each time.")


def workload_options(tokens: int | None = None, past: bool = True) -> Callable[[F], F]:
    """--batch, --tokens, --past and --source-tokens; `tokens` is the default length, None the model's context."""

    def add(command: F) -> F:
        shown = "the model's context" if tokens is None else str(tokens)
        if past:
            command = click.option(
                "--source-tokens",
                type=click.IntRange(1, 2**40),
                help="Tokens of an encoder-decoder's source (S). [default: P + T]",
            )(command)
            command = click.option(
                "--past",
                type=click.IntRange(0, 2**40),
                default=0,
                help="Positions already in the cache (P).",
                show_default=True,
            )(command)
        command = click.option(
            "--tokens",
            type=click.IntRange(1, 2**40),
            default=tokens,
            help=f"New tokens per row (T). [default: {shown}]",
        )(command)
        return click.option("--batch", type=click.IntRange(1, 2**40), default=1, help="Rows (B).", show_default=True)(
            command
        )

    return add


def workload(
    card: Card, batch: int, tokens: int | None, past: int, source_tokens: int | None = None, **more: Any
) -> Workload:
    """What the command line asks for; without --tokens, the model's context.

    Raises:
        ScantlingInputError: more positions than a table has, or a source for a model that reads none.
    """
    new = max(1, card.context - past) if tokens is None else tokens
    limit = position_limit(card)
    if limit is not None and past + new > limit:
        raise ScantlingInputError(
            f"{past + new:,} positions (past + tokens) are asked for and {card.name} has {positions_text(card)}"
        )
    if source_tokens is None:
        return Workload(batch, new, past, **more)
    if card.family != "encoder-decoder":
        raise ScantlingInputError(f"--source-tokens: {card.name} is of family {card.family} and reads no source")
    if limit is not None and source_tokens > limit:
        raise ScantlingInputError(
            f"a source of {source_tokens:,} is asked for and {card.name} has {positions_text(card)}"
        )
    return Workload(batch, new, past, source_tokens, **more)


def sizes(card: Card, w: Workload) -> str:
    """``B 1, T 512, P 0``, and of an encoder-decoder the source's S."""
    source = f", S {w.sources:,} of the source" if card.family == "encoder-decoder" else ""
    return f"B {w.batch}, T {w.tokens:,}, P {w.past:,}{source}"


def sources(card: Card, w: Workload) -> dict[str, int]:
    """The source's length for JSON, where there is a source."""
    return {"source_tokens": w.sources} if card.family == "encoder-decoder" else {}


def not_empty(texts: Sequence[str]) -> None:
    """Refuse a command without texts, or with an empty one.

    Raises:
        ScantlingInputError: there is none, or one has no visible character.
    """
    if not texts:
        raise ScantlingInputError("no text is given: at least one is needed")
    if empty := [i for i, text in enumerate(texts, 1) if not text.strip()]:
        raise ScantlingInputError(f"text {empty[0]} is empty: at least one character is needed")


def encoder(model: str | None, device: str, revision: str | None, dtype: str | None = None) -> Model:
    """An encoder with its weights, all-MiniLM-L6-v2 where none is named; what loading noticed goes to standard error.

    Raises:
        ScantlingInputError: no such model, or one of another family.
    """
    from scantling.checkpoint.find import card_of, default_encoder
    from scantling.loading import load

    found = str(default_encoder()) if model is None else model
    if (card := card_of(found, revision=revision)).family != "encoder":
        raise ScantlingInputError(f"{found} is of family {card.family}; this command needs an encoder")
    lm = load(found, dtype=dtype, device=device, revision=revision)
    for note in lm.notes:
        click.echo(f"note: {note}", err=True)
    return lm


def short(text: str, most: int = 48) -> str:
    """A text on one line, cut where it is long."""
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 3] + "..."


def width() -> int:
    """Columns of the terminal; without one, as many as a line needs."""
    import shutil

    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 4000


def emit(data: Any) -> None:
    """JSON on standard output."""
    click.echo(json.dumps(data, indent=2, ensure_ascii=False))


def line(data: Any) -> None:
    """JSON on one line of standard output, at once."""
    click.echo(json.dumps(data, ensure_ascii=False))
    sys.stdout.flush()


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]], title: str | None = None) -> None:
    """A table on standard output: numbers to the right with thousands separated, text to the left.

    On a terminal it fits the width; elsewhere each row is one line, however long.
    """
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    tty = sys.stdout.isatty()
    console = Console(file=sys.stdout, width=width(), highlight=False, markup=False, emoji=False)
    data = [list(row) for row in rows]
    drawn = Table(box=SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", pad_edge=False)
    for i, name in enumerate(columns):
        numeric = any(isinstance(row[i], int | float) for row in data)
        longest = max((len(cell(row[i])) for row in data), default=0)
        drawn.add_column(
            name,
            justify="right" if numeric else "left",
            no_wrap=numeric or not tty,
            overflow="fold",
            min_width=min(longest, 18),
        )
    for row in data:
        drawn.add_row(*(Text(cell(value)) for value in row))
    with console.capture() as captured:
        console.print(drawn)
    click.echo("\n".join(line.rstrip() for line in captured.get().splitlines()).strip("\n") + "\n")


def cell(value: Any) -> str:
    """A value as tables print it."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.4g}"
    if isinstance(value, tuple):
        return f"({', '.join(map(str, value))})"
    return str(value)


def say(text: str = "") -> None:
    """A line on standard output."""
    click.echo(text)


def standard_input() -> str:
    """All of standard input, without the end of its last line.

    Raises:
        ScantlingInputError: it is not text.
    """
    try:
        text = sys.stdin.read()
    except UnicodeDecodeError as error:
        raise ScantlingInputError(f"standard input is not {error.encoding} at byte {error.start}") from None
    return text.removesuffix("\n").removesuffix("\r")
