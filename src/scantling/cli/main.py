"""The entry point: verbs are imported when they are called, and every error of a user is one sentence."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import click

from scantling.errors import ScantlingError, nearest

VERBS = {
    "audit": "the classic failure modes, in any model",
    "bench": "prefill and decode measured, beside other tools",
    "card": "print a model's card as YAML",
    "cards": "list the presets",
    "chat": "talk with a model",
    "classify": "labels of texts or of their tokens",
    "compare": "models side by side",
    "convert": "checkpoint formats",
    "cost": "training: FLOPs, time, device-hours, money, energy, MFU",
    "count": "exact parameters",
    "diff": "what changes from one model to another",
    "embed": "a vector per text",
    "eval": "loss, perplexity and bits per byte of a text",
    "examine": "popular formulas beside the exact numbers",
    "fill": "the likeliest words at a mask",
    "flops": "FLOPs per component and convention",
    "generate": "continue a prompt",
    "inspect": "a checkpoint from its headers: what it is and whether its config is true of it",
    "lens": "look inside while it reads: attention, logit lens, attribution, patching, steering",
    "measure": "measured beside predicted: parameters, time, memory, gradients, what happens inside",
    "memory": "weights, cache, logits, scores, in bytes",
    "parts": "the exploded parts list",
    "plan": "layouts of training on many devices, ranked",
    "roofline": "bounds of decode and prefill on a device",
    "size": "cards for a number of parameters, a budget or a memory",
    "tokenize": "text to token ids",
    "trace": "every step of a pass, shape by shape",
    "train": "train a card, or a checkpoint further",
    "translate": "source texts to target texts, by an encoder-decoder",
    "verify": "predicted, built and counted, side by side",
}


class ReaderGoneError(Exception):
    """Nobody reads standard output any more."""


@contextmanager
def _reader_watched() -> Iterator[None]:
    """Click would end a closed pipe with status 1, which reads as a finding."""
    try:
        yield
    except BrokenPipeError:
        raise ReaderGoneError from None


class Verbs(click.Group):
    """Commands in `scantling.cli.VERB`, each loaded only when it is needed."""

    def invoke(self, ctx: click.Context) -> Any:
        with _reader_watched():
            return super().invoke(ctx)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        with _reader_watched():
            return super().parse_args(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        command: click.Command = import_module(f"scantling.cli.{cmd_name}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and args[0] not in VERBS:
            ctx.fail(f"no command {args[0]!r}{nearest(args[0], VERBS)}; known: {', '.join(VERBS)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(VERBS.items()))


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="scantling", message="%(prog)s %(version)s")
def scantling() -> None:
    """One card describes a Transformer; from it come its parts, exact numbers, shapes, model and text.

    MODEL is a preset (`scantling cards`), a card (.yaml), a folder with config.json, a .safetensors or .gguf file,
    or a hub id.
    """


def main() -> None:
    """Run a command. Exit status 0 fine, 1 a finding, 2 wrong usage or bad input."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal or locale that is not UTF-8 has no line of a table and not every character of a text.
        sys.stdout.reconfigure(errors="replace")
    sys.exit(_run(sys.argv[1:]))


def _run(args: list[str]) -> int:
    try:
        result = scantling.main(args, prog_name="scantling", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.ctx.get_help() if error.ctx else error.format_message())
        return 0
    except click.ClickException as error:
        usage = f" (see `{error.ctx.command_path} --help`)" if isinstance(error, click.UsageError) and error.ctx else ""
        return _fail(error.format_message().rstrip(".") + usage)
    except ScantlingError as error:
        return _fail(str(error))
    except SystemExit as error:
        return int(error.code or 0)
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        return 130
    except (ReaderGoneError, BrokenPipeError):
        # The reader is gone; what is left in the buffer has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        return _fail(f"{error.filename or 'standard output'}: {error.strerror}")


def _fail(message: str) -> int:
    click.echo(f"error: {' '.join(message.split())}", err=True)
    return 2


if __name__ == "__main__":
    main()
