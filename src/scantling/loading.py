"""Models from files, folders, hub ids and cards."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from msgspec.structs import replace

from scantling.assembly import assemble
from scantling.cards import Card
from scantling.cards import card as read_card
from scantling.checkpoint.config_keys import read_json
from scantling.checkpoint.files import here
from scantling.checkpoint.find import Found, card_of, default_model, find
from scantling.checkpoint.gguf import read_gguf
from scantling.checkpoint.hf_config import end_ids, start_id
from scantling.checkpoint.load import (
    Described,
    DescribedFolder,
    Loaded,
    describe_gguf,
    describe_safetensors,
    dtype_of,
    load_gguf,
    load_safetensors,
)
from scantling.checkpoint.origin import Origin
from scantling.errors import ScantlingInputError, need
from scantling.model import Model
from scantling.text.pieces import FILES as SENTENCEPIECE
from scantling.text.tokenizer import Tokenizer
from scantling.units import weights_dtype

if TYPE_CHECKING:
    from torch import Tensor, nn

    from scantling.native.weights import Weights


def load(
    model: str | os.PathLike[str] | None = None,
    *,
    dtype: str | None = None,
    device: str = "cpu",
    revision: str | None = None,
) -> Model:
    """Load a model with its weights.

    Args:
        model: a folder with config.json and safetensors, a .safetensors file beside its config.json, a .gguf file,
            or a hub id; None is the default model, SmolLM2-135M-Instruct.
        dtype: of the weights; None keeps the file's (float32 for GGUF).
        device: any torch device.

    Raises:
        ScantlingInputError: no such model, a card without weights, or a checkpoint that contradicts itself.
        MissingExtra: torch or a file format's library is not installed.
    """
    found = _find(model, revision)
    if found.kind in ("preset", "card"):
        example = read_card(found.path).name
        raise ScantlingInputError(
            f"{example!r} is a card without weights; name a folder, a hub id, a .safetensors or a .gguf file, "
            f"or give it initial weights: scantling.new({str(found.path)!r})"
        )
    name = weights_dtype(dtype) if dtype else None
    need("torch", "load weights")
    from scantling.tensor.memory import device_of

    place = device_of(device)
    if place.type == "meta":
        raise ScantlingInputError("device 'meta' holds no values: weights are loaded on cpu, cuda or mps")
    loader = load_gguf if found.kind == "gguf" else load_safetensors
    loaded = loader(found, _weights_of, name)
    built = _built(loaded, _tokenizer(found), place)
    built.file = found.path if found.kind == "gguf" else None
    return built


def load_packed(
    model: str | os.PathLike[str] | None = None, *, activations: str = "exact", revision: str | None = None
) -> Model:
    """Load a model that decodes through the compiled pass, as `Model.pack` makes it.

    Nothing is read but the file's header and, the first time, its weights as they are stored; PyTorch is imported and
    the net is loaded only when something is asked for that needs them.

    Args:
        model: as in `load`.
        activations: see `Model.pack`.

    Raises:
        ScantlingInputError: what `load` and `Model.pack` refuse.
    """
    found = _find(model, revision)
    if found.kind in ("preset", "card"):
        return load(model, revision=revision)
    describe = describe_gguf if found.kind == "gguf" else describe_safetensors
    return packed_file(describe(found, _weights_of), activations)


def packed_file(file: Described | DescribedFolder, activations: str) -> Model:
    """The same of a file or folder whose headers were read."""
    made = _packed_gguf(file, activations) if isinstance(file, Described) else _packed_folder(file, activations)
    if activations == "int8" and made.packed is not None and not made.packed.weights.rounds:
        made.notes = (*made.notes, "no matrix is in blocks of 8 or 4 bits, so activations stay float32")
    return made


def _packed_folder(file: DescribedFolder, activations: str) -> Model:
    from scantling.checkpoint.stored_values import same
    from scantling.generate.packed import of_folder

    notes = [*file.notes, *file.copy_notes(lambda a, b: same(file.tensors[a], file.tensors[b]))]
    dtype, mixed = dtype_of(file.read)
    if dtype == "float64":
        # Rare, and no card says it.
        whole = load(file.where)
        whole.pack(activations=activations)
        return whole
    card = replace(file.card, dtype=cast("Any", dtype))
    made = Model(card, assemble(card), cast("nn.Module", None), None, (*notes, *mixed))
    made.origin, made.start_id = Origin(read_json(file.config), file.config.parent), start_id(file.config)
    where = file.where
    _pack_beside(made, where, of_folder(file), activations, lambda: _folder_tokenizer(where))
    made.eos_ids |= end_ids(file.config)
    return made


def _packed_gguf(file: Described, activations: str) -> Model:
    from scantling.generate.packed import of_gguf

    path, parts = here(file.header.path), assemble(file.card)
    card = replace(file.card, dtype="float32")
    made = Model(card, parts, cast("nn.Module", None), None, (file.note,), file=path)
    _pack_beside(made, path, of_gguf(made, file.header), activations, lambda: _gguf_tokenizer(file.header.metadata))
    return made


def _pack_beside(
    made: Model, path: Path, weights: Weights, activations: str, tokenizer: Callable[[], Tokenizer | None]
) -> None:
    """Weights in tiles, the tokenizer, and a net that is loaded when it is asked for.

    Laying out tiles needs no Python, and making the tokenizer nothing else.
    """
    from concurrent.futures import ThreadPoolExecutor

    from scantling.generate.packed import pack

    del made.net
    made._later = lambda: load(path).net  # type: ignore[attr-defined]
    with ThreadPoolExecutor(1) as beside:
        packing = beside.submit(pack, made, "stored", activations, weights)
        made.tokenizer = tokenizer()
        made.packed = packing.result()
    made.eos_ids = made.tokenizer.eos_ids if made.tokenizer else frozenset()


def from_card(
    card: Card | str | os.PathLike[str], *, seed: int = 0, dtype: str = "float32", device: str = "cpu"
) -> Model:
    """A model with initial weights, which can be trained and saved; its parameters take gradients.

    Args:
        card: a card, or any MODEL, of which only the card is used.
        seed: of the weights.
        dtype: of the weights.
        device: any torch device but meta.

    Raises:
        ScantlingInputError: no such model, a card that contradicts itself, or one too large for the free memory.
        MissingExtra: torch is not installed.
    """
    card = card if isinstance(card, Card) else card_of(card)
    parts, name = assemble(card), weights_dtype(dtype)
    net = parts.build(device=device, dtype=name, seed=seed)
    stored: Any = name if name != "float64" else card.dtype
    return Model(replace(card, dtype=stored), parts, net)


def tokenizer_of(model: str | os.PathLike[str] | None = None, *, revision: str | None = None) -> Tokenizer:
    """The tokenizer of a model, without its weights; None is the default model.

    Raises:
        ScantlingInputError: no such model, or it has no tokenizer.
    """
    found = _find(model, revision)
    tokenizer = _tokenizer(found)
    if tokenizer is None and (found.path / "source.spm").exists():
        return Tokenizer.from_folder(found.path)
    if tokenizer is None:
        raise ScantlingInputError(f"{found.path}: no tokenizer; a folder with tokenizer.json, or a .gguf file, has one")
    return tokenizer


def _find(model: str | os.PathLike[str] | None, revision: str | None) -> Found:
    return Found("gguf", default_model()) if model is None else find(model, revision=revision)


def _tokenizer(found: Found) -> Tokenizer | None:
    if found.kind in ("preset", "card"):
        return None
    if found.kind == "gguf":
        return _gguf_tokenizer(read_gguf(found.path).metadata)
    return _folder_tokenizer(found.path)


def _folder_tokenizer(path: Path) -> Tokenizer | None:
    """Of a folder, or of the one in which a file lies."""
    folder = path if path.is_dir() else path.parent
    has_one = any((folder / name).exists() for name in ("tokenizer.json", *SENTENCEPIECE))
    return Tokenizer.from_folder(folder) if has_one else None


def _gguf_tokenizer(metadata: dict[str, object]) -> Tokenizer | None:
    if metadata.get("tokenizer.ggml.model") in ("none", "no_vocab"):
        return None
    return Tokenizer.from_gguf(metadata) if any(key.startswith("tokenizer.") for key in metadata) else None


def _weights_of(card: Card) -> dict[str, tuple[int, ...]]:
    return assemble(card).named_stored


def _built(loaded: Loaded, tokenizer: Tokenizer | None, device: Any) -> Model:
    from scantling.parts.net import computed

    parts = assemble(loaded.card)
    net = parts.build(device="meta")
    constants = {name: value.to(_dtype_of(loaded.tensors)) for name, value in computed(parts).items()}
    notes = (*loaded.notes, *_restated(loaded, constants))
    net.load_state_dict(loaded.tensors | constants, strict=True, assign=True)
    net = net.to(device).eval().requires_grad_(False)
    dtype: Any = str(next(net.parameters()).dtype).removeprefix("torch.")
    card = replace(loaded.card, dtype=dtype) if dtype in ("float32", "float16", "bfloat16") else loaded.card
    ends = loaded.eos_ids | (tokenizer.eos_ids if tokenizer else frozenset())
    marks = (loaded.start_id, loaded.labels, loaded.origin, loaded.text_rules)
    return Model(card, parts, net, tokenizer, notes, ends, *marks)


def _restated(loaded: Loaded, constants: dict[str, Tensor]) -> list[str]:
    """A note for each table that the file stores although it is computed.

    Raises:
        ScantlingInputError: the stored one is another: the weights belong to other positions.
    """
    torch = need("torch", "compare weights")
    for name, stored in loaded.restated.items():
        computed = constants[name].float()
        # Half of the dtypes' last places, and what sines of large angles lose in float32.
        apart = 0.01 if stored.dtype == torch.bfloat16 else 1e-3
        if stored.shape != computed.shape or not torch.allclose(stored.float(), computed, atol=apart, rtol=0):
            raise ScantlingInputError(f"the stored {name!r} differs from the waves that the config asks for")
    return [f"{name!r} is stored and equals the waves that are computed" for name in loaded.restated]


def _dtype_of(tensors: dict[str, Tensor]) -> Any:
    return next(iter(tensors.values())).dtype
