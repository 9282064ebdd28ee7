"""What `scantling lens` is asked for: which views, and what cannot be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from scantling.cli.lens_options import OF_A_STACK, OF_VIEWS, SUMMARY, VIEWS, WITHOUT_TEXT
from scantling.errors import ScantlingInputError, nearest, need

if TYPE_CHECKING:
    from scantling.lens.reading import Prompt
    from scantling.model import Model


def views_of(given: dict[str, Any]) -> list[str]:
    """The views that are asked for, in the order of the list.

    Raises:
        ScantlingInputError: an unknown one.
    """
    asked, changed = given["asked"], given["changed"]
    found = list(asked["show"])
    for name in found:
        if name not in VIEWS:
            raise ScantlingInputError(f"no view {name!r}{nearest(name, VIEWS)}; known: {', '.join(VIEWS)}")
    brings = {
        "patch": changed["corrupted"] is not None or changed["noise"] is not None,
        "ablate": bool(changed["ablate"]),
        "steer": bool(changed["direction"] or changed["toward"] or changed["away"]),
        "logit-lens": asked["every"] or asked["tuned"] is not None,
        "attention": (bool(asked["layer"]) or asked["head"] is not None) and "cross-attention" not in found,
    }
    found += [name for name, there in brings.items() if there and name not in found]
    return [name for name in VIEWS if name in (found or SUMMARY)]


def check(prompt: str | None, views: Sequence[str], given: dict[str, Any]) -> None:
    """Refuse what cannot be before a model is loaded."""
    changed = given["changed"]
    if prompt is None and any(name not in WITHOUT_TEXT for name in views):
        raise ScantlingInputError("give a PROMPT: only --show induction and --show points do without")
    if prompt is not None and not prompt.strip():
        raise ScantlingInputError("the prompt is empty: at least one token is needed")
    if "points" in views and len(views) > 1:
        raise ScantlingInputError("--show points lists names and goes with no other view")
    if "patch" in views and (changed["corrupted"] is None) == (changed["noise"] is None):
        raise ScantlingInputError("patch needs a --corrupted TEXT or --noise POSITIONS, one of them")
    if "ablate" in views and not changed["ablate"]:
        raise ScantlingInputError("ablate needs --ablate WHAT: 18.6 is head 6 of layer 18, 18.mlp a sublayer")
    pairs = bool(changed["toward"] or changed["away"])
    if "steer" in views and pairs == (changed["direction"] is not None):
        raise ScantlingInputError("steer needs a --direction FILE, or --toward and --away texts, one of them")
    if changed["direction"] is not None and (changed["at"] or changed["keep"]):
        raise ScantlingInputError("--at and --save-direction go with --toward and --away: a --direction has its point")
    if len(changed["toward"]) != len(changed["away"]):
        raise ScantlingInputError(
            f"{len(changed['toward'])} --toward and {len(changed['away'])} --away: one of each makes a pair"
        )
    _check_files(changed, given["outputs"])
    _check_options(views)


def _check_files(changed: dict[str, Any], outputs: dict[str, Any]) -> None:
    if outputs["capture"] and outputs["arrays"] is None:
        raise ScantlingInputError("--capture goes with --arrays FILE")
    files = {name: outputs[name] for name in ("png", "svg", "html", "arrays")} | {"save-direction": changed["keep"]}
    for name, path in files.items():
        if path is not None and not path.parent.is_dir():
            raise ScantlingInputError(f"--{name} {path}: the folder {path.parent} does not exist")
        if path is not None and name in ("png", "svg"):
            need("matplotlib", "draw charts")
            if path.suffix.lower() != f".{name}":
                raise ScantlingInputError(f"--{name} {path}: the name must end in .{name}")


def _check_options(views: Sequence[str]) -> None:
    """Refuse an option that changes nothing in the views that are shown."""
    ctx = click.get_current_context()
    for option in ctx.command.params:
        its = OF_VIEWS.get(option.name or "", views)
        stated = ctx.get_parameter_source(option.name or "") is ParameterSource.COMMANDLINE
        if stated and not set(its) & set(views):
            raise ScantlingInputError(f"{option.opts[0]} goes with --show {' or '.join(its)}, which is not asked for")


def fitting(lm: Model, prompt: Prompt | None, views: list[str], given: dict[str, Any]) -> list[str]:
    """The views; of the summary, those that this model and text can have, and a note about the others.

    Raises:
        ScantlingInputError: a view of the answer beside --stack encoder.
    """
    from scantling.lens.attribution import matrix_of, vocabulary_head
    from scantling.lens.maps import check_size

    summary = not given["asked"]["show"] and views == list(SUMMARY)
    if lm.parts.two_stacks and given["asked"]["stack"] == "encoder":
        views = ["attention", "residual"] if summary else views
        if left := [name for name in views if name not in OF_A_STACK]:
            raise ScantlingInputError(f"--stack encoder goes with {', '.join(OF_A_STACK)}: {left[0]} is of the decoder")
        return views
    if not summary or prompt is None:
        return views
    try:
        vocabulary_head(lm)
    except ScantlingInputError as error:
        click.echo(f"note: {error}; shown are attention and residual", err=True)
        return ["attention", "residual"]
    try:
        matrix_of(lm)
    except ScantlingInputError as error:
        click.echo(f"note: {error}", err=True)
        views = ["next", "logit-lens", "attention"]
    try:
        check_size(prompt)
    except ScantlingInputError as error:
        click.echo(f"note: {error}", err=True)
        views = [name for name in views if name != "attention"]
    return views
