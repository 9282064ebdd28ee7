"""By what a text is made: PyTorch, the step that it compiles, or the compiled pass."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import click

from scantling.assembly import assemble
from scantling.checkpoint.find import Found, default_model, find
from scantling.errors import ScantlingInputError
from scantling.units import weights_dtype

if TYPE_CHECKING:
    from scantling.checkpoint.load import Described, DescribedFolder
    from scantling.generate.settings import Options
    from scantling.model import Model


def with_engine(given: dict[str, Any]) -> tuple[Model, str]:
    """The model by the engine that is asked for, and a line that says which was taken where none is named.

    Raises:
        ScantlingInputError: what loading refuses, or options that the engine asked for does not have.
    """
    from scantling.loading import load, load_packed, packed_file

    engine, named = given.get("engine", "torch"), {name: given[name] for name in ("model", "revision")}
    if engine == "compile":
        return _compiled(given), ""
    if engine.startswith("packed"):
        if beside := _of_torch(given) or _of_width(given):
            raise ScantlingInputError(f"{beside} goes with --engine torch")
        _say_if_compiled()
        return load_packed(**named, activations="int8" if engine == "packed-int8" else "exact"), ""
    why = ""
    if engine == "auto":
        found = _of_torch(given) or _of_drafts(given) or file_for_packed(**named, dtype=given["dtype"])
        if not isinstance(found, str):
            _say_if_compiled()
            return packed_file(found, "exact"), f"engine: packed, exact, on the file's own {_own(found)}"
        why = f"engine: torch: {found}"
    return load(given["model"], dtype=given["dtype"], device=given["device"], revision=given["revision"]), why


def _own(file: Described | DescribedFolder) -> str:
    """How a file stores its matrices, in words."""
    from scantling.checkpoint.load import Described, dtype_of

    if not isinstance(file, Described):
        return dtype_of(file.read)[0]
    kinds = Counter(tensor.kind for tensor in file.header.tensors.values() if len(tensor.shape) > 1)
    return " and ".join(kind for kind, _ in kinds.most_common())


def _compiled(given: dict[str, Any]) -> Model:
    """A model whose step is compiled before anything is timed."""
    from scantling.loading import load

    if beside := _of_torch(given | {"device": "cpu"}):
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
        f"--device {given['device']}": given["device"] != "cpu",
        f"--cache {kept['kind']}": kept["kind"] != "full",
        f"--cache-numbers {kept['numbers']}": kept["numbers"] != "plain",
        "--contrastive": given.get("contrasted", {}).get("contrastive") is not None,
    }
    return next((name for name, wanted in asked.items() if wanted), None)


def _of_drafts(given: dict[str, Any]) -> str | None:
    """The option that would have the net in memory beside the tiles."""
    return "--draft-layers" if given.get("drafted", {}).get("draft_layers") is not None else None


def _of_width(given: dict[str, Any]) -> str | None:
    """--dtype, where it names what the pass does not compute with."""
    if given["dtype"] is None:
        return None
    found = file_for_packed(given["model"], given["revision"], given["dtype"])
    return found if isinstance(found, str) and found.startswith("--dtype") else None


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


def file_for_packed(
    model: str | None, revision: str | None, dtype: str | None = None
) -> Described | DescribedFolder | str:
    """The file or folder that the compiled pass reads; else why PyTorch decodes.

    Args:
        dtype: that the weights are asked for in; the pass has them as they are stored, and computes in float32.

    Raises:
        ScantlingInputError: no such model or dtype, or its file is malformed.
    """
    from scantling.checkpoint.load import Described, describe_gguf, describe_safetensors, dtype_of
    from scantling.native.library import missing
    from scantling.native.program import outline

    found = Found("gguf", default_model()) if model is None else find(model, revision=revision)
    if found.kind in ("preset", "card"):
        return "a card has no weights"
    describe = describe_gguf if found.kind == "gguf" else describe_safetensors
    file = describe(found, lambda card: assemble(card).named_stored)
    width = "float32" if isinstance(file, Described) else dtype_of(file.read)[0]
    if dtype is not None and weights_dtype(dtype) not in ("float32", width):
        return f"--dtype {dtype}"
    if width == "float64":
        return "the weights are float64, and the compiled pass computes in float32"
    if (why := missing()) is not None:
        return why
    known = outline(assemble(file.card))
    return f"the compiled pass does not know {file.card.name}: {known}" if isinstance(known, str) else file
