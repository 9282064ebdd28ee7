"""`scantling convert`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import click

from scantling.cli import show
from scantling.cli.to_gguf import check_gguf, gguf_kind, to_gguf
from scantling.units import bytes_text, parse_bytes

if TYPE_CHECKING:
    from scantling.model import Model


def _check_hf(folder: Path, overwrite: bool) -> None:
    from scantling.checkpoint.save import check_folder

    check_folder(folder, overwrite)


def _to_hf(lm: Model, folder: Path, max_shard_bytes: int, overwrite: bool, dtype: str | None) -> dict[str, Any]:
    from scantling.saving import save

    saved = save(lm, folder, max_shard_bytes=max_shard_bytes, overwrite=overwrite, progress=_progress)
    return {
        "path": str(saved.folder),
        "model_type": saved.model_type,
        "dtype": saved.dtype,
        "files": [{"name": name, "bytes": size} for name, size in saved.files.items()],
        "notes": list(saved.notes),
    }


Writer: TypeAlias = "Callable[[Model, Path, int, bool, str | None], dict[str, Any]]"
FORMATS: dict[str, tuple[Callable[[Path, bool], None], Writer]] = {
    "hf": (_check_hf, _to_hf),
    "gguf": (check_gguf, to_gguf),
}
"""What refuses a bad destination before anything is read, and what writes: `path`, `files`, `notes` and more."""


@click.command()
@click.argument("source", metavar="SRC")
@click.argument("destination", metavar="DST", type=click.Path(path_type=Path))
@click.option("--to", "form", type=click.Choice(list(FORMATS)), required=True, help="A Hugging Face folder, or a file.")
@click.option(
    "--dtype", help="float32, float16 or bfloat16, for gguf also q8_0 or q4_0; default: the source's (GGUF: float32)."
)
@click.option("--max-shard-size", default="5GB", show_default=True, metavar="SIZE", help="Of one file of weights.")
@click.option("--overwrite", is_flag=True, help="Replace DST, if nothing but a checkpoint lies in it.")
@show.revision_option
@show.json_option
def command(
    source: str,
    destination: Path,
    form: str,
    dtype: str | None,
    max_shard_size: str,
    overwrite: bool,
    revision: str | None,
    as_json: bool,
) -> None:
    """Read the weights of SRC (a folder, a .safetensors or .gguf file, a hub id) and write them to DST.

    DST appears whole or not at all. Blocks of a GGUF file become the numbers they stand for; nothing is quantised
    unless --dtype says so.
    """
    check, write = FORMATS[form]
    size = parse_bytes(max_shard_size)
    check(destination, overwrite)
    from scantling.loading import load

    blocks = form == "gguf"
    kind = gguf_kind(dtype) if blocks and dtype else dtype
    lm = load(source, dtype=None if blocks else dtype, revision=revision)
    report = write(lm, destination, size, overwrite, kind)
    report |= {"total_params": lm.parts.params, "notes": [*lm.notes, *report["notes"]]}
    for note in report["notes"]:
        click.echo(f"note: {note}", err=True)
    if as_json:
        show.emit(report)
        return
    show.table(("file", "bytes"), [(file["name"], file["bytes"]) for file in report["files"]])
    total = sum(file["bytes"] for file in report["files"])
    show.say(f"{destination}: {lm.parts.params:,} parameters, {bytes_text(total)}, as {report['model_type']}")


def _progress(file: str, done: int, total: int) -> None:
    click.echo(f"{file}: {bytes_text(done)} of {bytes_text(total)}", err=True)
