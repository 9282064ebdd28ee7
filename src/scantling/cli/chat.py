"""`scantling chat`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from scantling.cli import drawing, show
from scantling.errors import ScantlingError, ScantlingInputError

if TYPE_CHECKING:
    from scantling.generate.chat import Conversation


@click.command()
@click.option("-m", "--model", help="A model with a chat template; default: SmolLM2-135M-Instruct.")
@click.option("--system", metavar="TEXT", help="What stands before the first message; default: what the template says.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=512, show_default=True, help="Of an answer.")
@click.option("--context", type=click.IntRange(min=16), default=4096, show_default=True, help="Tokens of all together.")
@drawing.sampling_options
@drawing.engine_option
@click.option("--dtype", help="Of the weights; default: the file's (float32 for GGUF).")
@click.option("--device", default="cpu", show_default=True)
@show.revision_option
@click.option("--json", "as_json", is_flag=True, help="A JSON object per answer, each on one line.")
def command(**given: Any) -> None:
    """Talk with a model: a line is a message, and the answer streams.

    /reset begins anew, /exit ends, as does the end of the input; Ctrl-C stops an answer. Without a terminal the lines
    come from standard input and only the answers are printed.
    """
    from scantling.errors import need

    need("torch", "chat")
    sampling = drawing.sampling(given["drawn"])
    lm = drawing.loaded(given)
    from scantling.generate.chat import Conversation

    more = {"max_new_tokens": given["max_new_tokens"], "positions": given["context"]}
    talk = Conversation(lm, given["system"], sampling, **more)
    tty = sys.stdin.isatty()
    if given["why"]:
        click.echo(given["why"], err=True)
    if tty:
        click.echo(f"{lm.card.name}: /reset begins anew, /exit ends", err=True)
    while True:
        if tty:
            click.echo("> ", err=True, nl=False)
        line = _line()
        if not line or line.strip() == "/exit":
            return
        _turn(talk, line.rstrip("\r\n"), given["as_json"], tty)


def _line() -> str:
    try:
        return sys.stdin.readline()
    except UnicodeDecodeError as error:
        raise ScantlingInputError(f"standard input is not {error.encoding}: {error.reason}") from None


def _turn(talk: Conversation, line: str, as_json: bool, tty: bool) -> None:
    """One line of input. At a terminal an error is said, or an answer stopped, and the conversation goes on."""
    if line.strip() == "/reset":
        talk.reset()
        click.echo("the conversation begins anew", err=True)
        return
    if not line.strip():
        return
    try:
        if line.startswith("/"):
            raise ScantlingInputError(f"no command {line.split()[0]!r}; known: /reset, /exit")
        made = talk.say(line, None if as_json else _write)
    except ScantlingError as error:
        if not tty:
            raise
        click.echo(f"error: {error}", err=True)
        return
    except KeyboardInterrupt:
        if not tty:
            raise
        click.echo("\nstopped; the message and its answer are forgotten", err=True)
        return
    if as_json:
        show.line(
            {
                "text": made.text,
                "prompt_tokens": made.prompt_tokens,
                "new_tokens": made.new_tokens,
                "finish_reason": made.finish_reason,
                "prefill_seconds": made.prefill_seconds,
                "decode_seconds": made.decode_seconds,
                "cache_bytes": made.cache_bytes,
            }
        )
        return
    show.say()
    if made.finish_reason == "length":
        click.echo(f"note: the answer was cut after {made.new_tokens} tokens", err=True)


def _write(piece: str) -> None:
    sys.stdout.write(piece)
    sys.stdout.flush()
