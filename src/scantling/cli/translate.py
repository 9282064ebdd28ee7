"""`scantling translate`."""

from __future__ import annotations

from typing import Any

import click

from scantling.cards import Card
from scantling.cli import drawing, show
from scantling.errors import ScantlingInputError


@click.command()
@click.argument("sources", metavar="TEXT...", nargs=-1, required=True)
@click.option("-m", "--model", required=True, help="An encoder-decoder: folder, .safetensors file or hub id.")
@click.option("--prefix", default="", help='Before each text, as T5 wants it: "translate English to German: ".')
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=256, show_default=True, help="Per text.")
@drawing.beam_options
@click.option("--no-repeat-ngram", type=int, default=0, metavar="N", help="No N tokens in a row come twice.")
@drawing.draft_options
@click.option("--dtype", help="Of the weights; default: the file's.")
@click.option("--device", default="cpu", show_default=True)
@show.revision_option
@show.json_option
def command(
    sources: tuple[str, ...],
    model: str,
    prefix: str,
    max_new_tokens: int,
    searched: dict[str, Any],
    no_repeat_ngram: int,
    drafted: dict[str, Any],
    dtype: str | None,
    device: str,
    revision: str | None,
    as_json: bool,
) -> None:
    """Write the target of each TEXT, the likeliest token at every step, or by beam search; one line per text.

    Without beams or drafts up to 16 texts are decoded together, and each becomes what it becomes alone.
    Whatever an encoder-decoder was trained for: translations, summaries, answers.
    """
    from scantling.checkpoint.find import card_of

    _check(card_of(model, revision=revision))
    if not all(sources):
        raise ScantlingInputError("a text is empty: at least one character is needed")
    from scantling.errors import need

    need("torch", "translate")
    from scantling.generate.api import Asked, each, texts
    from scantling.generate.sampling import Sampling
    from scantling.generate.settings import Options
    from scantling.loading import load, tokenizer_of

    drafting = drawing.drafting({"drafted": drafted, "dtype": dtype, "device": device, "revision": revision})
    sampling, options = Sampling(no_repeat_ngram=no_repeat_ngram), Options(drafting=drafting)
    how = Asked().wanted(max_new_tokens, sampling, options, drawing.beams(searched), 1)
    lm = load(model, dtype=dtype, device=device, revision=revision)
    if lm.tokenizer is None:
        # It says what the folder has instead.
        tokenizer_of(model, revision=revision)
    for note in lm.notes:
        click.echo(f"note: {note}", err=True)
    done = []
    prefixed = [prefix + text for text in sources]
    # Drafts are for one text at a time.
    made = each(lm, prefixed, how) if drafting is None else (texts(lm, text, how)[0] for text in prefixed)
    for text, one in zip(sources, made, strict=True):
        done.append(one)
        if done[-1].finish_reason == "length":
            click.echo(f"note: cut after {done[-1].new_tokens} tokens, before the end: {text[:60]!r}", err=True)
        if not as_json:
            show.say(" ".join(done[-1].text.splitlines()))
        if done[-1].ledger is not None and not as_json:
            click.echo(drawing.drafts_text(done[-1].ledger), err=True)
    if as_json:
        rows: dict[str, list[Any]] = {
            "text": [one.text for one in done],
            "source_tokens": [one.prompt_tokens for one in done],
            "new_tokens": [one.new_tokens for one in done],
            "finish_reason": [one.finish_reason for one in done],
        }
        if drafting is not None:
            rows["drafts"] = [drawing.drafts_json(one.ledger) for one in done if one.ledger is not None]
        show.emit(rows if len(done) > 1 else {key: values[0] for key, values in rows.items()})


def _check(card: Card) -> None:
    if card.family == "decoder":
        better = "a decoder goes on from a text: use `scantling generate`"
    elif card.family == "encoder":
        better = "an encoder writes no text"
    else:
        return
    raise ScantlingInputError(
        f"translate needs an encoder-decoder, and {card.name} is of family {card.family}: {better}"
    )
