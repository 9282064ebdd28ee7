"""`scantling inspect`."""

from __future__ import annotations

import sys
from typing import Any

import click

from scantling.assembly import assemble
from scantling.checkpoint.header import FORMAT_LIMIT, HEADER_LIMIT
from scantling.checkpoint.inspect.gather import dtype_of
from scantling.checkpoint.inspect.reproduce import UNKNOWN, nine_lines
from scantling.checkpoint.inspect.summary import Line
from scantling.cli import show
from scantling.inspection import Inspection, checklist, inspect
from scantling.units import count_text

_WHERE = {"gguf": "the metadata"}


@click.command()
@click.argument("path")
@click.option("--card", "only_card", is_flag=True, help="Print the card that rebuilds the model, as YAML.")
@click.option("--hash", "hashes", is_flag=True, help="Also the sha256 of every file of weights, which reads all of it.")
@click.option("--tensors", "listed", is_flag=True, help="Also every tensor: name, shape (rows, columns), part.")
@click.option("--big", is_flag=True, help="Accept safetensors headers up to the format's 100 MB, not only 16 MiB.")
@show.revision_option
@show.json_option
@click.pass_context
def command(
    ctx: click.Context,
    path: str,
    only_card: bool,
    hashes: bool,
    listed: bool,
    big: bool,
    revision: str | None,
    as_json: bool,
) -> None:
    """Look into the checkpoint at PATH from its headers alone, whatever its size.

    PATH is a folder, a .safetensors or .gguf file, an index, a config.json, an http address of one of them, or a hub
    id. What names and shapes show stands beside what the config says; every contradiction is a finding with its likely
    cause. Exit status 1 if one of them is an error.
    """
    progress = _Progress() if hashes else None
    found = inspect(
        path, revision=revision, hashes=hashes, header_limit=FORMAT_LIMIT if big else HEADER_LIMIT, progress=progress
    )
    if as_json:
        show.emit(_json(found) | ({"tensor_list": _tensors(found)} if listed else {}))
    elif only_card:
        _card(found)
    else:
        _print(found)
        if listed:
            show.table(
                ("tensor", "stored as", "shape", "bytes", "is"), [tuple(row.values()) for row in _tensors(found)]
            )
        _findings(found)
    ctx.exit(0 if found.ok and not (only_card and found.card is None) else 1)


class _Progress:
    """The share that is read, on standard error: one line that changes on a terminal, else a line per file."""

    def __init__(self) -> None:
        self._file, self._share = "", -1

    def __call__(self, name: str, done: int, total: int) -> None:
        share = 100 * done // total if total else 100
        if sys.stderr.isatty():
            if share != self._share:
                click.echo(f"\rsha256 {share:3d} % {name}", err=True, nl=done == total)
        elif name != self._file:
            click.echo(f"sha256 of {name}", err=True)
        self._file, self._share = name, share


def _card(found: Inspection) -> None:
    """The card, or what is known of it; what it leaves open goes to standard error."""
    for finding in found.findings:
        click.echo(f"{finding.severity}: {finding.message}: {finding.cause}", err=True)
    if found.card is not None:
        click.echo(found.card_yaml(), nl=False)
        return
    from scantling.cards.read import flow

    for key, value in found.partial().items():
        click.echo(f"{key}: {flow(value)}")
    click.echo(f"error: this is no complete card: {found.why_no_card()}", err=True)


def _json(found: Inspection) -> dict[str, Any]:
    import msgspec

    gathered = found.gathered
    card = None if found.card is None else msgspec.to_builtins(found.card)
    return {
        "path": str(gathered.where),
        "format": gathered.form,
        "files": [
            {"name": f.path.name, "bytes": f.nbytes, "tensors": f.tensors, "sha256": found.checksums.get(f.path.name)}
            for f in gathered.files
        ],
        "tensors": len(gathered.tensors),
        "total_params": None if found.card is None else assemble(found.card).params,
        "numbers": found.total,
        "bytes": gathered.nbytes,
        "card": found.partial() if card is None else card,
        "complete": card is not None,
        "families": list(found.families),
        "config_family": None if found.declared is None else found.declared.name,
        "facts": [
            {
                "key": line.fact.key,
                "what": line.fact.what,
                "tensors": UNKNOWN if line.tensors is None else line.tensors,
                "config": line.config,
                "agree": line.agree,
            }
            for line in found.lines
        ],
        "by_part": dict(found.by_part),
        "dtypes": [{"dtype": k.dtype, "tensors": k.tensors, "params": k.numel, "bytes": k.nbytes} for k in found.kinds],
        "quantisation": found.quantisation,
        "qk_layout": found.layout,
        "checklist": checklist(found),
        "reproduction": None if found.card is None else nine_lines(found.card),
        "findings": [
            {"code": f.code, "severity": f.severity, "message": f.message, "cause": f.cause} for f in found.findings
        ],
    }


def _print(found: Inspection) -> None:
    gathered = found.gathered
    show.say(_headline(found))
    show.say()
    side = _WHERE.get(gathered.form, "the config")
    rows = [_row(line) for line in found.lines if _speaks(line)]
    if found.families:
        rows.insert(0, _families(found))
    show.table(("", "by the tensors", f"by {side}", "agree"), rows)
    if found.total:
        shares = [(part, n, f"{100 * n / found.total:.2f} %") for part, n in found.by_part.items()]
        show.table(("part", "numbers", "share"), shares)
        kinds = [(k.dtype, k.tensors, k.numel, k.nbytes, 8 * k.nbytes / k.numel) for k in found.kinds if k.numel]
        show.table(("stored as", "tensors", "numbers", "bytes", "bits each"), kinds)
    if found.checksums:
        show.table(("file", "sha256"), found.checksums.items())
    if found.layout is not None:
        show.say(f"rotated pairs: {found.layout}")
        show.say()
    show.table(("checklist", ""), [(k, _share(k, v)) for k, v in checklist(found).items()])


def _families(found: Inspection) -> tuple[str, ...]:
    """The first of the families that have these names, and whether the config's is one of them."""
    names, said = found.families, "" if found.declared is None else found.declared.name
    first = [said] if said in names else []
    listed = [*first, *(name for name in names if name != said)]
    more = f" and {len(listed) - 4} more" if len(listed) > 4 else ""
    agree = "" if not said else "yes" if first else "NO"
    return ("names of", ", ".join(listed[:4]) + more, said, agree)


def _tensors(found: Inspection) -> list[dict[str, Any]]:
    """Every tensor with what it is by our names, the numbers of layers and experts in place."""
    roles = found.comparison.file.roles.values()
    ours = {
        name: " + ".join(part.replace("{i}", str(layer)) for part in role.ours)
        for role in roles
        for layer, names in role.names.items()
        for name in names
    }
    return [
        {"name": name, "dtype": dtype_of(t), "shape": tuple(t.shape), "bytes": t.nbytes, "is": ours.get(name)}
        for name, t in found.gathered.tensors.items()
    ]


def _share(key: str, value: Any) -> Any:
    if value is None:
        return UNKNOWN
    if isinstance(value, float):
        return f"{100 * value:.1f} %" if key.endswith("share") else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else value


def _headline(found: Inspection) -> str:
    gathered = found.gathered
    name = str(gathered.where)
    if gathered.form == "none":
        return f"{name}: a config without tensors"
    kind = f"GGUF version {gathered.header.version}" if gathered.header else gathered.form
    files = "1 file" if len(gathered.files) == 1 else f"{len(gathered.files)} files"
    sizes = f"{len(gathered.tensors):,} tensors, {gathered.nbytes:,} bytes"
    return f"{name}: {kind}, {files}, {sizes}, {found.total:,} numbers ({count_text(found.total)})"


def _speaks(line: Line) -> bool:
    """Whether one of the two sides says something; that both have none of a thing is not worth a line."""
    nothing = (None, False, "none")
    return line.tensors not in nothing or line.config not in nothing


def _row(line: Line) -> tuple[Any, ...]:
    agree = {True: "yes", False: "NO", None: ""}[line.agree]
    tensors = UNKNOWN if line.tensors is None else _text(line.tensors)
    return (line.fact.what, tensors, "" if line.config is None else _text(line.config), agree)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _findings(found: Inspection) -> None:
    if not found.findings:
        show.say("no findings")
        return
    for finding in found.findings:
        show.say(f"{finding.severity}: {finding.code}: {finding.message}")
        show.say(f"    likely cause: {finding.cause}")
