"""`scantling examine`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from scantling.assembly import assemble
from scantling.cards import Card
from scantling.checkpoint.find import card_of
from scantling.cli import show
from scantling.parts.part import Workload
from scantling.study.checks import Remark, checks
from scantling.study.examine import examine
from scantling.study.formula import Formula
from scantling.units import storage_dtype


@click.command()
@click.argument("model")
@show.workload_options(past=False)
@click.option("--source-tokens", type=click.IntRange(1, 2**40), help="Of an encoder-decoder's source (S). [default: T]")
@click.option("--dtype", default="bfloat16", help="Of weights and cache.", show_default=True)
@click.option(
    "--devices", type=click.IntRange(1, 2**20), default=8, help="That would share the heads.", show_default=True
)
@show.revision_option
@show.json_option
def command(
    model: str,
    batch: int,
    tokens: int | None,
    source_tokens: int | None,
    dtype: str,
    devices: int,
    revision: str | None,
    as_json: bool,
) -> None:
    """The popular formulas beside the exact numbers of MODEL, with what each leaves out; then what looks unusual."""
    card = card_of(model, revision=revision)
    w = show.workload(card, batch, tokens, 0, source_tokens)
    formulas = examine(card, assemble(card), w, storage_dtype(dtype))
    remarks = checks(card, devices)
    if as_json:
        show.emit(_data(card, w, storage_dtype(dtype), formulas, remarks))
        return
    show.say(f"{card.name}, {show.sizes(card, w)}")
    show.say()
    _print(formulas)
    if not remarks:
        show.say("nothing about the card looks unusual")
    for remark in remarks:
        show.say(f"note: {remark.message}")


def _data(
    card: Card, w: Workload, dtype: str, formulas: Sequence[Formula], remarks: Sequence[Remark]
) -> dict[str, Any]:
    return {
        "name": card.name,
        "batch": w.batch,
        "tokens": w.tokens,
        **show.sources(card, w),
        "dtype": dtype,
        "formulas": [
            {
                "subject": f.subject,
                "formula": f.name,
                "estimate": f.estimate,
                "exact": f.exact,
                "exact_is": f.exact_is,
                "error": f.error,
                "assumes": f.assumes,
                "terms": dict(f.terms),
                "source": f.source,
            }
            for f in formulas
        ],
        "remarks": [{"code": r.code, "key": r.key, "message": r.message, "source": r.source} for r in remarks],
    }


def _print(formulas: Sequence[Formula]) -> None:
    rows = [(f.subject, f.name, f.estimate, f.exact, _error(f), f.exact_is) for f in formulas]
    show.table(("of", "formula", "it says", "exact", "error", "which is"), rows)
    broken = [
        (f.name, why, n, f"{100 * n / f.exact:+.2f} %" if f.exact else "")
        for f in formulas
        for why, n in f.terms.items()
    ]
    if broken:
        show.table(("formula", "what it leaves out (or, negative, counts too much)", "size", "of the exact"), broken)
    show.table(("formula", "assumes", "source"), [(f.name, f.assumes, f.source) for f in formulas])


def _error(f: Formula) -> str:
    return "exact" if f.estimate == f.exact else "" if f.error is None else f"{100 * f.error:+.2f} %"
