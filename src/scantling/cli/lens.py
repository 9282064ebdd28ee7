"""`scantling lens`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from scantling.cli import drawing, lens_asked, show
from scantling.cli.lens_options import VIEWS, change_options, output_options, reading_options
from scantling.errors import ScantlingInputError, need

if TYPE_CHECKING:
    from scantling.lens.metric import Metric
    from scantling.lens.reading import Prompt
    from scantling.lens.sections import Section
    from scantling.lens.steer import Direction
    from scantling.model import Model


@click.command(epilog="\b\nViews:\n" + "\n".join(f"  {name:<16} {what}" for name, what in VIEWS.items()))
@click.argument("prompt", required=False)
@click.option("-m", "--model", help="Folder, .safetensors, .gguf or hub id; default: SmolLM2-135M-Instruct.")
@reading_options
@change_options
@output_options
@click.option("--dtype", help="Of the weights; default: the file's (float32 for GGUF).")
@click.option("--device", default="cpu", show_default=True)
@show.revision_option
@show.json_option
def command(prompt: str | None, **given: Any) -> None:
    """Look inside a model while it reads PROMPT. docs/lens.md says what each view means.

    Without --show: what comes next, the logit lens, what adds to the answer, and what the heads read. The options of
    patch, ablate and steer bring their view along.
    """
    views = lens_asked.views_of(given)
    lens_asked.check(prompt, views, given)
    need("torch", "look inside a model")
    from scantling.generate.text import templated
    from scantling.lens.reading import read_prompt

    lm = drawing.loaded(given)
    asked, read = given["asked"], None
    if prompt is not None:
        text = templated(lm, [{"role": "user", "content": prompt}], "--chat") if asked["chat"] else prompt
        how = {name: asked[name] for name in ("target", "position", "stack")}
        read = read_prompt(lm, text, as_ids=asked["ids"], **how)
    if views == ["points"]:
        _points(lm, given["as_json"])
        return
    sections = list(_sections(lm, read, lens_asked.fitting(lm, read, views, given), given))
    _write(lm, read, sections, given)
    if given["as_json"]:
        show.emit(_json(lm, read, sections))
        return
    for section in sections:
        show.say(f"{section.name}: {section.title}\n")
        show.table(section.columns, section.rows)
        for note in section.notes:
            show.say(note)
        if section.notes:
            show.say()


def _sections(lm: Model, prompt: Prompt | None, views: Sequence[str], given: dict[str, Any]) -> Iterator[Section]:
    from scantling.lens import changes, maps
    from scantling.lens import views as reading
    from scantling.lens.logit_lens import read_tuned
    from scantling.lens.metric import Metric
    from scantling.lens.reading import token_id

    asked, changed = given["asked"], given["changed"]
    top = asked["top"]
    if "induction" in views:
        yield reading.induction_view(lm, changed["length"], changed["rows"], changed["seed"], top)
    if prompt is None:
        return
    token, against = (None if asked[name] is None else token_id(lm, asked[name]) for name in ("token", "against"))
    silent = {"attention", "cross-attention", "residual"}
    answers = reading.answers(prompt, token, against, _looked_at(prompt)) if set(views) - silent else (0, 0)
    metric = Metric(answers[0], None if changed["metric"] == "probability" else answers[1], _looked_at(prompt))
    tuned = None if asked["tuned"] is None else read_tuned(asked["tuned"])
    layers = list(asked["layer"]) or None
    made: dict[str, Callable[[], Section]] = {
        "next": lambda: reading.next_view(prompt, asked["temperature"], top),
        "logit-lens": lambda: (
            reading.lens_grid_view(prompt, tuned)
            if asked["every"]
            else reading.lens_view(prompt, tuned, answers[0], top)
        ),
        "attribution": lambda: reading.attribution_view(prompt, *answers, top),
        "attention": lambda: maps.attention_view(prompt, layers, asked["head"], top, False),
        "cross-attention": lambda: maps.attention_view(prompt, layers, asked["head"], top, True),
        "residual": lambda: reading.residual_view(prompt),
        "patch": lambda: _patch(prompt, metric, given),
        "ablate": lambda: changes.ablate_view(prompt, changed["ablate"], metric, changed["mean"], top),
        "steer": lambda: changes.steer_view(
            prompt, _direction(lm, changed), changed["strength"], metric, top, changed["new"]
        ),
    }
    for name in views:
        if name in made:
            yield made[name]()


def _looked_at(prompt: Prompt) -> int:
    """Where the answer stands: of an encoder-decoder's source it has no place, so at the end of the target."""
    of_source = prompt.lm.parts.two_stacks and prompt.stack == "encoder"
    return -1 if of_source else prompt.position


def _patch(prompt: Prompt, metric: Metric, given: dict[str, Any]) -> Section:
    from scantling.lens.changes import noise_on, patch_view
    from scantling.lens.reading import read_prompt

    changed, asked = given["changed"], given["asked"]
    if changed["noise"] is not None:
        corrupted: Any = noise_on(changed["noise"], changed["times"], 4, changed["seed"])
    else:
        corrupted = read_prompt(prompt.lm, changed["corrupted"], as_ids=asked["ids"], target=asked["target"]).ids
    try:
        return patch_view(prompt, corrupted, metric, changed["kind"], _step)
    finally:
        if sys.stderr.isatty():
            click.echo("\r\x1b[K", err=True, nl=False)


def _step(point: str) -> None:
    """Say which layer is patched: a line that is written anew on a terminal, a line each elsewhere."""
    tty = sys.stderr.isatty()
    click.echo(f"\rpatching {point}\x1b[K" if tty else f"patching {point}", err=True, nl=not tty)


def _direction(lm: Model, changed: dict[str, Any]) -> Direction:
    from scantling.lens.points import layer_number, stack_of
    from scantling.lens.steer import direction_of, read_direction

    if changed["direction"] is not None:
        return read_direction(lm, changed["direction"])
    where, stack = stack_of(lm)
    at = changed["at"] or str(len(stack.blocks) // 2)
    point = f"{where}.blocks.{layer_number(lm, int(at))}" if at.lstrip("-").isdigit() else at
    made = direction_of(lm, list(zip(changed["toward"], changed["away"], strict=True)), point)
    if changed["keep"] is not None:
        made.save(changed["keep"])
        click.echo(f"direction: {changed['keep']}", err=True)
    return made


def _write(lm: Model, prompt: Prompt | None, sections: Sequence[Section], given: dict[str, Any]) -> None:
    from scantling.cli.lens_page import page
    from scantling.lens.arrays import write_arrays
    from scantling.lens.hooks import capture
    from scantling.lens.plots import draw

    outputs = given["outputs"]
    for name in ("png", "svg"):
        if (path := outputs[name]) is not None:
            draw(sections, path)
            click.echo(f"charts: {path}", err=True)
    if (path := outputs["html"]) is not None:
        path.write_text(page(prompt, lm.card.name, _about(lm, prompt), sections), encoding="utf-8")
        click.echo(f"page: {path}", err=True)
    if (path := outputs["arrays"]) is not None:
        arrays = {name: value for section in sections for name, value in section.arrays.items()}
        if outputs["capture"]:
            if prompt is None:
                raise ScantlingInputError("--capture needs a PROMPT")
            arrays |= capture(lm, prompt.ids, outputs["capture"], prompt.given).values
        if not arrays:
            raise ScantlingInputError("these views have no arrays: name some with --capture")
        write_arrays(path, arrays)
        click.echo(f"arrays: {path}, {len(arrays)} tensors", err=True)


def _about(lm: Model, prompt: Prompt | None) -> str:
    width = str(lm.dtype).removeprefix("torch.")
    what = "" if prompt is None else f"{len(prompt.read)} tokens read, looked at token {prompt.position}; "
    return f"{what}{lm.card.n_layers} layers, d_model {lm.card.d_model}, weights in {width}"


def _points(lm: Model, as_json: bool) -> None:
    from scantling.lens.points import known

    names = known(lm.parts)
    if as_json:
        show.emit(list(names))
        return
    for name in names:
        show.say(name)


def _json(lm: Model, prompt: Prompt | None, sections: Sequence[Section]) -> dict[str, Any]:
    found: dict[str, Any] = {"model": lm.card.name}
    if prompt is not None:
        found["tokens"] = [{"id": i, "text": text} for i, text in zip(prompt.read, prompt.words, strict=True)]
        found["position"] = prompt.position
    return found | {section.name: _lists(section.data) for section in sections}


def _lists(data: Any) -> Any:
    """Data with lists in place of tensors."""
    if isinstance(data, Mapping):
        return {key: _lists(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_lists(value) for value in data]
    return data.tolist() if hasattr(data, "tolist") else data
