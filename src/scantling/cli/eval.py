"""`scantling eval`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from scantling.cli import show
from scantling.errors import ScantlingInputError, need

if TYPE_CHECKING:
    from scantling.model import Model
    from scantling.train.evaluate import Score, Windows


@click.command()
@click.argument("model")
@click.option("--data", multiple=True, metavar="D", help="Text files, folders, .jsonl, .parquet or datasets.")
@show.encoding_option
@click.option("--tokens", type=click.IntRange(min=1), metavar="N", help="At most so many. [default: all]")
@click.option("--window", type=click.IntRange(min=2), help="Tokens of a window. [default: the context]")
@click.option("--stride", type=click.IntRange(min=1), help="New tokens of each window. [default: half a window]")
@click.option("--start/--no-start", default=None, help="A start token in each window. [default: as the tokenizer does]")
@click.option("--half", is_flag=True, help="llama.cpp's way: judge only the second half of disjoint windows.")
@click.option("--dtype", help="Of the weights; default: the file's (float32 for GGUF).")
@click.option("--device", default="cpu", show_default=True)
@show.revision_option
@show.json_option
def command(
    model: str,
    data: tuple[str, ...],
    encoding_errors: Any,
    tokens: int | None,
    window: int | None,
    stride: int | None,
    start: bool | None,
    half: bool,
    dtype: str | None,
    device: str,
    revision: str | None,
    as_json: bool,
) -> None:
    """Score text by MODEL, a decoder: loss in nats, perplexity and bits per byte, every token judged once.

    Each document is scored for itself. Without --data the sources of Python's standard library are the text.
    """
    need("torch", "score text")
    from dataclasses import replace

    from scantling.data import Sources, prepare, shown_progress
    from scantling.loading import load
    from scantling.train.evaluate import score_documents, start_of, windows_for

    lm = load(model, dtype=dtype, device=device, revision=revision)
    if lm.tokenizer is None:
        raise ScantlingInputError(f"{model} has no tokenizer to read a text with")
    with shown_progress() as progress:
        corpus = prepare(Sources(data, encoding_errors=encoding_errors), lm.tokenizer, held_out=0.0, progress=progress)
    for note in (*lm.notes, *corpus.notes):
        click.echo(f"note: {note}", err=True)
    first = _start(lm, start_of(corpus), start)
    windows = replace(windows_for(lm, stride, window, first), half=half)
    score = score_documents(lm, corpus.train, windows, tokens)
    if as_json:
        show.emit(_data(score, windows))
    else:
        _print(lm, score, windows)


def _start(lm: Model, own: int | None, asked: bool | None) -> int | None:
    if asked is None:
        return own
    if not asked:
        return None
    known = own if own is not None or lm.tokenizer is None else lm.tokenizer.bos_id
    if known is None:
        raise ScantlingInputError("--start: the tokenizer names no token that begins a text")
    return known


def _data(score: Score, windows: Windows) -> dict[str, Any]:
    return {
        "loss": score.loss,
        "perplexity": score.perplexity,
        "bits_per_byte": score.bits_per_byte,
        "tokens": score.tokens,
        "bytes": None if score.bytes is None else round(score.bytes),
        "window": windows.size,
        "stride": windows.size if windows.half else windows.stride,
        "start_token": windows.start,
        "judged": "second halves of windows" if windows.half else "every token once",
    }


def _print(lm: Model, score: Score, windows: Windows) -> None:
    data = _data(score, windows)
    first = "none" if windows.start is None else f"{windows.start}, not judged"
    rows = [
        ("loss", data["loss"], "nats per token"),
        ("perplexity", data["perplexity"], "exp of the loss"),
        ("bits per byte", data["bits_per_byte"], "of UTF-8; does not depend on the vocabulary"),
        ("tokens", data["tokens"], f"judged: {data['judged']}"),
        ("window", data["window"], f"stride {data['stride']}, start token: {first}"),
    ]
    show.table(("what", lm.card.name, ""), rows)
