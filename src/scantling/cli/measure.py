"""`scantling measure`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from scantling.assembly import assemble
from scantling.checkpoint.find import Found, card_of, find
from scantling.cli import show
from scantling.errors import ScantlingInputError, nearest, need

if TYPE_CHECKING:
    from scantling.measure import Asked, Figure
    from scantling.model import Model

FREE = ("checklist", "parameters")
"""Figures that allocate nothing."""
NAMES = (*FREE, "time", "memory", "residual", "gradients", "entropy", "outliers", "routing", "shape")


def _lengths(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """``128,256,512`` as numbers."""
    if value is None:
        return None
    try:
        found = tuple(int(piece) for piece in value.split(","))
    except ValueError:
        found = ()
    if len(set(found)) < 2 or min(found) < 4 or max(found) > 2**20:
        raise click.BadParameter(
            f"{value!r} is no list of at least two different lengths from 4 on, as in 128,256,512", ctx, param
        )
    return found


@click.command()
@click.argument("model", required=False)
@click.option("--only", metavar="NAMES", help=f"Of {', '.join(NAMES)}; several with commas. [default: all it has]")
@click.option("--tokens", "lengths", callback=_lengths, metavar="LENGTHS", help="Of rows. [default: 128,256,512,1024]")
@click.option("--batch", type=click.IntRange(1, 4096), default=1, show_default=True, help="Rows (B).")
@click.option(
    "--steps", type=click.IntRange(1, 10**6), default=10, show_default=True, help="Updates between gradients."
)
@click.option(
    "--lr", type=click.FloatRange(0, min_open=True), default=1e-3, show_default=True, help="Of those updates."
)
@click.option("--passes", type=click.IntRange(1, 1000), default=3, show_default=True, help="The fastest is the time.")
@click.option("--dtype", help="Of the weights; default: the file's, float32 of a card.")
@click.option("--device", default="cpu", show_default=True)
@click.option("--png", type=click.Path(path_type=Path, file_okay=False), metavar="FOLDER", help="Also write plots.")
@click.option("--html", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Also write a page.")
@show.seed_option
@show.revision_option
@show.json_option
def command(model: str | None, as_json: bool, png: Path | None, html: Path | None, **given: Any) -> None:
    """Measure MODEL and set each figure beside its prediction.

    Without MODEL, SmolLM2-135M-Instruct; a preset or a card gets initial weights. What does not fit into the free
    memory is refused before anything is built; --only checklist,parameters allocates nothing. docs/measure.md says
    what each figure is and how it is predicted.
    """
    need("torch", "measure a model")
    for option, path in (("--html", html), ("--png", png)):
        if path is not None and not path.parent.is_dir():
            raise ScantlingInputError(f"{option} {path}: the folder {path.parent} does not exist")
    if png is not None or html is not None:
        need("matplotlib", "draw plots")
    lm, asked, names = _prepared(model, _names(given["only"]), given)
    figures = [_measured(lm, asked, name) for name in names]
    _written(lm.card.name, figures, png, html)
    if as_json:
        show.emit({"name": lm.card.name, "figures": [figure.as_json() for figure in figures]})
        return
    for figure in figures:
        show.table(figure.columns, figure.rows, f"{lm.card.name}: {figure.title}")
        for note in figure.notes:
            show.say(note)
        show.say()


def _names(only: str | None) -> tuple[str, ...] | None:
    """The figures that are asked for, in the order of the list.

    Raises:
        ScantlingInputError: no such figure.
    """
    if only is None:
        return None
    asked = [name.strip() for name in only.split(",")]
    for name in asked:
        if name not in NAMES:
            raise ScantlingInputError(f"--only: no figure {name!r}{nearest(name, NAMES)}; known: {', '.join(NAMES)}")
    return tuple(name for name in NAMES if name in asked)


def _prepared(
    model: str | None, names: tuple[str, ...] | None, given: dict[str, Any]
) -> tuple[Model, Asked, tuple[str, ...]]:
    """The model, the rows, and the figures that it has.

    Raises:
        ScantlingInputError: it does not fit, rows are too long, or a figure is asked for that the model has not.
    """
    from scantling.checkpoint.find import default_model
    from scantling.measure import Asked, answerable
    from scantling.measure.asked import fitting
    from scantling.measure.need import bytes_needed, check
    from scantling.model import Model
    from scantling.tensor.memory import device_of, free_bytes
    from scantling.units import weights_dtype

    place = device_of(given["device"])
    if place.type == "meta":
        raise ScantlingInputError("device 'meta' holds no values: measure on cpu, cuda or mps")
    card = card_of(str(default_model()) if model is None else model, revision=given["revision"])
    found = None if model is None else find(model, revision=given["revision"], weights=False)
    parts = assemble(card)
    drawing = Model(card, parts, parts.build(device="meta", seed=None))
    has = answerable(drawing)
    if names is not None and (missing := [name for name in names if name not in has]):
        raise ScantlingInputError(f"--only {missing[0]}: {card.name} has no such figure; it has {', '.join(has)}")
    names = has if names is None else names
    lengths = fitting(drawing, given["lengths"])
    asked = Asked(lengths, given["batch"], given["steps"], given["lr"], given["passes"], given["seed"] or 0)
    if set(names) <= set(FREE):
        return drawing, asked, names
    own = card.dtype if found is not None and found.kind == "folder" and card.dtype != "unknown" else "float32"
    dtype = weights_dtype(given["dtype"] or own)
    check(card.name, bytes_needed(parts, asked, dtype, names), free_bytes(place))
    return _loaded(model, found, given), asked, names


def _loaded(model: str | None, found: Found | None, given: dict[str, Any]) -> Model:
    from scantling.loading import from_card, load

    dtype, device = given["dtype"], given["device"]
    if found is not None and (found.kind in ("preset", "card") or found.path.name == "config.json"):
        return from_card(str(found.path), seed=given["seed"] or 0, dtype=dtype or "float32", device=device)
    lm = load(model, dtype=dtype, device=device, revision=given["revision"])
    for note in lm.notes:
        click.echo(f"note: {note}", err=True)
    return lm


def _measured(lm: Model, asked: Asked, name: str) -> Figure:
    from scantling.measure import FIGURES

    click.echo(f"measuring {name} ...", err=True)
    return FIGURES[name](lm, asked)


def _written(name: str, figures: list[Figure], png: Path | None, html: Path | None) -> None:
    from scantling.measure.plots import page, write_png

    if png is not None:
        for path in write_png(figures, png):
            click.echo(f"plot: {path}", err=True)
    if html is not None:
        html.write_text(page(name, figures), encoding="utf-8")
        click.echo(f"page: {html}", err=True)
