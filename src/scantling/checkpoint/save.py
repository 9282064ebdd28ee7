"""Saving in the Hugging Face layout: config.json, safetensors (shards where they are large), tokenizer, card.yaml."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from scantling.cards import Card, to_yaml
from scantling.checkpoint.config_choice import Describes, choose
from scantling.checkpoint.families import family, own
from scantling.checkpoint.matching import bare
from scantling.checkpoint.names import Link, foreign_shapes, links
from scantling.checkpoint.origin import Origin, carried, is_ours
from scantling.checkpoint.safetensors_write import flush, write_safetensors
from scantling.checkpoint.sentence import TextRules, modules
from scantling.checkpoint.sharded import MAX_SHARDS
from scantling.checkpoint.whole_folder import check_room, check_target, leftovers, whole_folder
from scantling.errors import ScantlingInputError, need
from scantling.units import DTYPE_BYTES, weights_dtype

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]
Progress = Callable[[str, int, int], None]
"""Called after each file of weights: its name, bytes of weights written so far, bytes of weights in all."""

MAX_SHARD_BYTES = 5 * 10**9
"""Of the tensors in one file, unless the caller asks for another: what can be up- and downloaded in one go."""


@dataclass(frozen=True)
class Content:
    """What is to be saved.

    Attributes:
        weights: names and shapes of the model's parameters, by our names.
        state: the tensors; their names may carry prefixes of wrappers.
        describes: whether a card is this model's.
        in_use: whether a card is this model's but for its dropout.
        origin: where the model was read from.
        tokenizer_files: text files of the tokenizer by their names, for a model whose origin has none.
        tokens: bos_token_id, eos_token_id and what else a config says of ids and labels.
        text_rules: for files of sentence-transformers.
    """

    card: Card
    weights: Mapping[str, Shape]
    state: Mapping[str, Tensor]
    describes: Describes
    in_use: Describes = lambda _: False
    origin: Origin | None = None
    tokenizer_files: Callable[[], Mapping[str, str]] = field(default=dict)
    tokens: Mapping[str, Any] = field(default_factory=dict)
    text_rules: TextRules = field(default_factory=TextRules)


@dataclass(frozen=True)
class Saved:
    """What was saved.

    Attributes:
        model_type: of the config.json; ``scantling`` for our own layout.
        dtype: of the weights.
        files: sizes in bytes by name, in alphabetical order.
        notes: what a user should know.
    """

    folder: Path
    model_type: str
    dtype: str
    files: dict[str, int]
    notes: tuple[str, ...]


def check_folder(folder: Path, overwrite: bool) -> None:
    """Refuse, before anything is read, a folder that cannot be saved to.

    Raises:
        ScantlingInputError: see `whole_folder.check_target`.
    """
    check_target(folder.resolve(), overwrite, is_ours)


def write(
    content: Content,
    folder: Path,
    max_shard_bytes: int,
    dtype: str | None,
    overwrite: bool,
    progress: Progress | None,
) -> Saved:
    """Write the folder; it appears whole or not at all.

    Raises:
        ScantlingInputError: the folder exists, the disk is too small, or the net is not what the card describes.
    """
    target = folder.resolve()
    check_target(target, overwrite, is_ours)
    state = _checked(content)
    name, notes = _dtype(state, dtype)
    card = replace(content.card, dtype=name)
    choice = choose(card, content.origin, content.describes, name, content.tokens, content.in_use)
    table = links(family(choice.model_type, str(folder)).rows(card), content.weights)
    shapes = foreign_shapes(table, content.weights)
    shards = _shards(shapes, max_shard_bytes, DTYPE_BYTES[name])
    texts, copies, more = _companions(content)
    if choice.modules:
        texts |= {name: text for name, text in modules(card, content.text_rules).items() if name not in copies}
    texts |= {"config.json": json.dumps(choice.config, indent=2) + "\n", own.CARD_FILE: to_yaml(card)}
    if len(shards) > 1:
        texts["model.safetensors.index.json"] = _index(shards, shapes, DTYPE_BYTES[name])
    nbytes = {file: DTYPE_BYTES[name] * sum(prod(shapes[n]) for n in names) for file, names in shards.items()}
    headers = 4096 * len(shards) + sum(100 + 2 * len(n) for n in shapes)
    others = sum(len(text.encode()) for text in texts.values()) + sum(p.stat().st_size for p in copies.values())
    check_room(target, sum(nbytes.values()) + headers + others)

    read = _reader(table, state, name)
    with whole_folder(target) as fresh:
        done = 0
        for file, names in shards.items():
            write_safetensors(fresh / file, {n: shapes[n] for n in names}, name, read)
            done += nbytes[file]
            if progress is not None:
                progress(file, done, sum(nbytes.values()))
        _write_companions(fresh, texts, copies)
        sizes = {p.relative_to(fresh).as_posix(): p.stat().st_size for p in sorted(fresh.rglob("*")) if p.is_file()}
    left = [f"{left!r} beside it is left from a save that was cut off; delete it" for left in leftovers(target)]
    return Saved(folder, choice.model_type, name, sizes, (*notes, *choice.notes, *more, *left))


def _checked(content: Content) -> dict[str, Tensor]:
    """The tensors by our names, each there and of its shape.

    Raises:
        ScantlingInputError: the net has been changed: a tensor is missing, of another shape or unknown, or has no data.
    """
    state = {bare(name): tensor for name, tensor in content.state.items()}
    for name, shape in content.weights.items():
        if name not in state:
            raise ScantlingInputError(f"the net has no {name!r}, which its card describes, so it cannot be saved")
        if tuple(state[name].shape) != tuple(shape):
            found = list(state[name].shape)
            raise ScantlingInputError(f"{name!r} has shape {found} in the net and {list(shape)} by its card")
        if state[name].device.type == "meta":
            raise ScantlingInputError(f"{name!r} is on the device 'meta' and holds no values that could be saved")
    if unknown := [name for name in state if name not in content.weights]:
        raise ScantlingInputError(
            f"the net has {unknown[0]!r}, which its card does not describe: no file would hold it"
        )
    return state


def _dtype(state: Mapping[str, Tensor], asked: str | None) -> tuple[str, tuple[str, ...]]:
    """The dtype of the files, and a note where the net mixes several."""
    found = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in state.values()})
    name = weights_dtype(asked) if asked is not None else found[0] if len(found) == 1 else "float32"
    if name not in ("float32", "float16", "bfloat16"):
        raise ScantlingInputError(f"weights cannot be saved as {name}: use float32, float16 or bfloat16 (dtype)")
    mixed = len(found) > 1 and asked is None
    return name, (f"the net mixes {', '.join(found)}; saved as float32",) if mixed else ()


def _shards(shapes: Mapping[str, Shape], limit: int, item: int) -> dict[str, list[str]]:
    """Names of tensors by file, each file filled up to the limit; a larger tensor is alone in its file."""
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise ScantlingInputError(f"max_shard_bytes is {limit!r}; a whole number of at least 1 is needed")
    groups: list[list[str]] = []
    size = 0
    for name, shape in shapes.items():
        nbytes = item * prod(shape)
        if not groups or size + nbytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += nbytes
    if len(groups) > MAX_SHARDS:
        raise ScantlingInputError(
            f"max_shard_bytes {limit} makes {len(groups)} files; at most {MAX_SHARDS} are possible"
        )
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{i + 1:05}-of-{len(groups):05}.safetensors": names for i, names in enumerate(groups)}


def _index(shards: Mapping[str, list[str]], shapes: Mapping[str, Shape], item: int) -> str:
    numbers = sum(prod(shape) for shape in shapes.values())
    metadata = {"total_parameters": numbers, "total_size": item * numbers}
    files = {name: file for file, names in shards.items() for name in names}
    return json.dumps({"metadata": metadata, "weight_map": dict(sorted(files.items()))}, indent=2) + "\n"


def _reader(table: list[Link], state: Mapping[str, Tensor], dtype: str) -> Callable[[str], Tensor]:
    """Their tensors by their names, made when they are asked for."""
    torch = need("torch", "save weights")
    target = getattr(torch, dtype)
    places = {name: (link, i) for link in table for i, name in enumerate(link.theirs)}

    def read(name: str) -> Tensor:
        link, i = places[name]
        with torch.no_grad():
            tensor = link.transform.save([_whole(state[ours].detach()) for ours in link.ours])[i]
            new = tensor.to(target)
            if new.dtype != tensor.dtype and not torch.equal(new.isfinite(), tensor.isfinite()):
                raise ScantlingInputError(f"tensor {name!r} has numbers too large for {dtype}; save it as bfloat16")
        result: Tensor = new
        return result

    return read


def _whole(tensor: Any) -> Any:
    """A tensor whose parts lie on several processes (FSDP, tensor parallel), put together; any other as it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _companions(content: Content) -> tuple[dict[str, str], dict[str, Path], tuple[str, ...]]:
    """Files beside the weights: texts that are made, files that are copied, and a note where those are gone."""
    origin = content.origin
    if origin is None:
        return dict(content.tokenizer_files()), {}, ()
    if origin.folder.is_dir():
        return {}, {name: origin.folder / name for name in carried(origin.folder)}, ()
    note = f"{origin.folder} is gone: its tokenizer is written as it was read, its other files are not carried along"
    return dict(content.tokenizer_files()), {}, (note,)


def _write_companions(folder: Path, texts: Mapping[str, str], copies: Mapping[str, Path]) -> None:
    for name, source in copies.items():
        (folder / name).parent.mkdir(exist_ok=True)
        with source.open("rb") as old, (folder / name).open("wb") as new:
            shutil.copyfileobj(old, new)
            flush(new)
    for name, text in texts.items():
        (folder / name).parent.mkdir(exist_ok=True)
        with (folder / name).open("wb") as new:
            new.write(text.encode())
            flush(new)
