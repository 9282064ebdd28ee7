"""By what a text is made: PyTorch, the step that it compiles, or the compiled pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from scantling.assembly import assemble
from scantling.checkpoint.find import Found, default_model, find
from scantling.errors import ScantlingInputError

if TYPE_CHECKING:
    from scantling.checkpoint.load import Described
    from scantling.generate.settings import Options
    from scantling.model import Model

NO_BLOCKS = "the weights are not in blocks of 4 or 8 bits"


def with_engine(given: dict[str, Any]) -> tuple[Model, str]:
    """The model by the engine that is asked for, and a line that says which was taken where none is named.

    Raises:
        ScantlingInputError: what loading refuses, or options that the engine asked for does not have.
    """
    from scantling.loading import load, load_packed, packed_gguf

    engine, named = given.get("engine", "torch"), {name: given[name] for name in ("model", "revision")}
    if engine == "compile":
        return _compiled(given), ""
    beside = _of_torch(given)
    if engine.startswith("packed"):
        if beside:
            raise ScantlingInputError(f"{beside} goes with --engine torch")
        _say_if_compiled()
        activations = "int8" if engine == "packed-int8" else "exact"
        return load_packed(given["model"], activations=activations, revision=given["revision"]), ""
    if engine == "auto":
        found = beside or file_for_packed(**named)
        if not isinstance(found, str):
            _say_if_compiled()
            return packed_gguf(found, "exact"), "engine: packed, exact, on the file's own blocks"
        # Only of files whose blocks the pass could hold is it news that PyTorch reads them.
        beside = "" if found == NO_BLOCKS else f"engine: torch: {found}"
    return load(given["model"], dtype=given["dtype"], device=given["device"], revision=given["revision"]), beside or ""


def _compiled(given: dict[str, Any]) -> Model:
    """A model whose step is compiled before anything is timed."""
    from scantling.loading import load

    if beside := _of_torch(given | {"dtype": None, "device": "cpu"}):
        raise ScantlingInputError(f"{beside} goes with --engine torch")
    lm = load(given["model"], dtype=given["dtype"], device=given["device"], revision=given["revision"])
    from scantling.generate.batching import Limits
    from scantling.generate.compiled import is_kept, why_not

    if (why := why_not(lm)) is not None:
        raise ScantlingInputError(why)
    # Conversations and batched requests are kept in blocks.
    many, talk = given.get("prompts") is not None, "context" in given
    rows, block = 2 if many else 1, Limits().block if many or talk else 0
    if not is_kept(lm, rows, block):
        click.echo(
            f"compiling the step of {lm.card.name} in {str(lm.dtype).removeprefix('torch.')}, once ...", err=True
        )
    lm.compile(rows, block=block)
    return lm


def _of_torch(given: dict[str, Any]) -> str | None:
    """The first option that only PyTorch has."""
    kept = given.get("kept", {"kind": "full", "numbers": "plain"})
    asked = {
        "--dtype": given["dtype"] is not None,
        f"--device {given['device']}": given["device"] != "cpu",
        f"--cache {kept['kind']}": kept["kind"] != "full",
        f"--cache-numbers {kept['numbers']}": kept["numbers"] != "plain",
        "--contrastive": given.get("contrasted", {}).get("contrastive") is not None,
    }
    return next((name for name, wanted in asked.items() if wanted), None)


def _say_if_compiled() -> None:
    from scantling.native.library import is_built, missing

    if missing() is None and not is_built():
        click.echo("compiling the pass for this processor, once ...", err=True)


def engine_of(lm: Model, options: Options) -> str:
    """What a text is made by: ``torch``, ``compile``, ``packed`` or ``packed-int8``."""
    if lm.compiled is not None and options.keeping is None:
        return "compile"
    if lm.packed is None or options.keeping is not None:
        return "torch"
    return "packed" if lm.packed.activations == "exact" else "packed-int8"


def file_for_packed(model: str | None, revision: str | None) -> Described | str:
    """The file of blocks that tiles hold as they are, as they hold a router in float32; else why PyTorch decodes.

    Raises:
        ScantlingInputError: no such model, or its file is malformed.
    """
    from scantling.native.library import missing
    from scantling.native.program import outline
    from scantling.native.tiles import block_bytes

    found = Found("gguf", default_model()) if model is None else find(model, revision=revision)
    if found.kind != "gguf":
        return NO_BLOCKS
    if (why := missing()) is not None:
        return why
    from scantling.checkpoint.load import describe_gguf

    file = describe_gguf(found, lambda card: assemble(card).named_stored)
    matrices = [tensor for tensor in file.header.tensors.values() if len(tensor.shape) > 1 and tensor.kind != "F32"]
    if not matrices:
        return NO_BLOCKS
    for tensor in matrices:
        if block_bytes(tensor.kind) is None:
            return f"{tensor.name} is stored as {tensor.kind}, and tiles hold Q4_0, Q4_1 and Q8_0"
    known = outline(assemble(file.card))
    return f"the compiled pass does not know {file.card.name}: {known}" if isinstance(known, str) else file
