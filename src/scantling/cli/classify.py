"""`scantling classify`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from scantling.cli import show
from scantling.errors import need

if TYPE_CHECKING:
    from torch import Tensor

    from scantling.model import Model


@click.command()
@click.argument("texts", nargs=-1, required=True, metavar="TEXT...")
@click.option("-m", "--model", required=True, help="Folder, .safetensors or hub id of a classifier.")
@click.option("--batch-size", type=click.IntRange(min=1), default=32, show_default=True)
@click.option("--device", default="cpu", show_default=True)
@show.revision_option
@show.json_option
def command(
    texts: tuple[str, ...], model: str, batch_size: int, device: str, revision: str | None, as_json: bool
) -> None:
    """The labels of each TEXT, the likeliest first; of a token classifier, the likeliest label of each token."""
    show.not_empty(texts)
    need("torch", "classify texts")
    from scantling.generate.embed import encode, scores

    lm = show.encoder(model, device, revision)
    encoded = encode(lm, texts)
    found = scores(lm, encoded.rows, batch_size)
    for note in encoded.notes:
        click.echo(f"note: {note}", err=True)
    by_token = lm.card.head.kind != "sequence"
    labels = [
        _of_tokens(lm, row, score) if by_token else _of_text(lm, score)
        for row, score in zip(encoded.rows, found, strict=True)
    ]
    if as_json:
        show.emit({"labels": labels})
        return
    for text, listed in zip(texts, labels, strict=True):
        show.table(tuple(listed[0]), [tuple(entry.values()) for entry in listed], title=show.short(text))


def _of_text(lm: Model, scores: Tensor) -> list[dict[str, Any]]:
    order = scores.argsort(descending=True).tolist()
    return [{"label": lm.labels[i], "score": float(scores[i])} for i in order]


def _of_tokens(lm: Model, row: list[int], scores: Tensor) -> list[dict[str, Any]]:
    """Special tokens are left out: nobody labels them."""
    assert lm.tokenizer is not None
    if lm.card.head.kind == "replaced":
        replaced = scores[:, 0]
        best = [("replaced", float(p)) if p > 0.5 else ("original", float(1 - p)) for p in replaced]
    else:
        best = [(lm.labels[int(i)], float(p)) for p, i in zip(*scores.max(-1), strict=True)]
    return [
        {"token": lm.tokenizer.decode([i], skip_special=False), "label": label, "score": score}
        for i, (label, score) in zip(row, best, strict=True)
        if not lm.tokenizer.is_special(i)
    ]
