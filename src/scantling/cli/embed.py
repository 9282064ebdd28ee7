"""`scantling embed`."""

from __future__ import annotations

from pathlib import Path

import click

from scantling.cli import show
from scantling.errors import ScantlingInputError, need


@click.command()
@click.argument("texts", nargs=-1, metavar="[TEXT]...")
@click.option("-m", "--model", help="Folder, .safetensors or hub id of an encoder; default: all-MiniLM-L6-v2.")
@click.option("--file", "source", type=click.Path(path_type=Path), help="A text per line, after those of the command.")
@click.option("--out", type=click.Path(path_type=Path), help="Write the vectors to this .npy file, float32 (N, d).")
@click.option("--batch-size", type=click.IntRange(min=1), help="Texts that run together; default: by their tokens.")
@click.option("--max-length", type=click.IntRange(min=1), help="Tokens of a text that are read; default: the model's.")
@click.option("--dtype", help="Of the weights; default: the file's.")
@click.option("--compile", "compiled", is_flag=True, help="Through torch.compile: a minute first, then faster.")
@click.option("--device", default="cpu", show_default=True)
@show.revision_option
@show.json_option
def command(
    texts: tuple[str, ...],
    model: str | None,
    source: Path | None,
    out: Path | None,
    batch_size: int | None,
    max_length: int | None,
    dtype: str | None,
    compiled: bool,
    device: str,
    revision: str | None,
    as_json: bool,
) -> None:
    """A vector per TEXT; with two texts or more also their cosines."""
    wanted = [*texts, *(() if source is None else lines(source))]
    _check(wanted, out)
    torch = need("torch", "embed texts")
    from scantling.generate.embed import encode_for_vectors, vectors

    lm = show.encoder(model, device, revision, dtype)
    encoded = encode_for_vectors(lm, wanted, max_length)
    for note in encoded.notes:
        click.echo(f"note: {note}", err=True)
    found = vectors(lm, encoded.rows, batch_size, compiled=compiled)
    if out is not None:
        need("numpy", "write .npy files").save(out, found.numpy())
        click.echo(f"{found.shape[0]} vectors of {found.shape[1]} numbers written to {out}", err=True)
    if as_json:
        show.emit({"embeddings": found.tolist()})
    elif out is None:
        unit = torch.nn.functional.normalize(found, dim=-1)
        cosines = (unit @ unit.T).tolist()
        head = [f"cos {i}" for i in range(1, len(wanted) + 1)] if 1 < len(wanted) <= 12 else []
        rows = [
            (i + 1, show.short(text), len(row), _start(vector), *(cosines[i] if head else ()))
            for i, (text, row, vector) in enumerate(zip(wanted, encoded.rows, found.tolist(), strict=True))
        ]
        show.table(("", "text", "tokens", f"vector, {found.shape[1]} numbers", *head), rows)


def lines(path: Path) -> list[str]:
    """The lines of a text file that are not blank.

    Raises:
        ScantlingInputError: no such file, or not UTF-8.
    """
    if not path.is_file():
        raise ScantlingInputError(f"{path}: no such file")
    try:
        return [line for line in path.read_text("utf-8").splitlines() if line.strip()]
    except UnicodeDecodeError as error:
        raise ScantlingInputError(f"{path}: not UTF-8 at byte {error.start}") from None


def _check(texts: list[str], out: Path | None) -> None:
    show.not_empty(texts)
    if out is not None and (out.suffix != ".npy" or not out.parent.is_dir()):
        raise ScantlingInputError(f"--out is {str(out)!r}; a .npy file in a folder that exists is needed")


def _start(vector: list[float]) -> str:
    return " ".join(f"{x:.5f}" for x in vector[:5]) + (" ..." if len(vector) > 5 else "")
