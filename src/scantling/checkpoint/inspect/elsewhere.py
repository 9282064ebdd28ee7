"""Checkpoints behind http addresses: small files are fetched, of the weights only the headers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar
from urllib.parse import unquote, urlsplit

from scantling.checkpoint.files import refuse
from scantling.checkpoint.gguf import read_gguf
from scantling.checkpoint.header import read_safetensors
from scantling.checkpoint.inspect.codes import Finding
from scantling.checkpoint.inspect.gather import INDEX, SINGLE, Gathered, Weights, of_headers, of_shards
from scantling.checkpoint.remote import Address, fetch_small
from scantling.checkpoint.sharded import read_shards
from scantling.errors import need

BESIDE = ("config.json", "card.yaml", "modules.json", "1_Pooling/config.json", "sentence_bert_config.json")
"""Small files that say what the model is."""
_FILES = (".safetensors", ".gguf", ".json")
_AT_ONCE = 8
A = TypeVar("A")
B = TypeVar("B")


def hub_address(repo: str, revision: str | None) -> Address:
    """The folder of a hub repository, with the credentials that huggingface_hub has.

    Raises:
        MissingExtra: huggingface_hub is not installed.
        ScantlingInputError: no such name is possible.
    """
    hub = need("huggingface_hub", f"look into {repo!r} on the hub")
    utils = need("huggingface_hub.utils", f"look into {repo!r} on the hub")
    try:
        text = hub.hf_hub_url(repo, "config.json", revision=revision)
        headers = utils.build_hf_headers()
    except ValueError as error:
        refuse(Path(repo), f"is no hub repository: {' '.join(str(error).split())[:200]}")
    return Address(text.removesuffix("config.json"), headers)


def as_folder(address: Address) -> Address:
    """The same address, with a slash at its end unless it names a file."""
    if address.suffix in _FILES or address.text.endswith("/"):
        return address
    return Address(address.text + "/", address.headers)


def name_of(address: Address) -> str:
    """The last piece of the address that names a model, fit for a folder."""
    pieces = [unquote(piece) for piece in urlsplit(address.text).path.split("/") if piece]
    if pieces and address.suffix in _FILES:
        pieces.pop()
    if len(pieces) > 3 and pieces[-2] == "resolve":
        pieces = pieces[:-2]
    return re.sub(r"[^\w.-]", "_", pieces[-1])[:80].strip(".") or "model" if pieces else "model"


def gather_address(address: Address, folder: Path, *, limit: int) -> Gathered:
    """Read the headers of a file, or of the folder that an address names.

    Args:
        folder: where small files are put.
        limit: bytes of the longest header accepted in one file.

    Raises:
        ScantlingInputError: there is no checkpoint, a file is malformed, or the server cannot be asked.
    """
    if address.suffix == ".gguf":
        header = read_gguf(address)
        size = address.opened()[1]
        return Gathered(address, "gguf", (Weights(address, size, len(header.tensors)),), header.tensors, header=header)
    if address.suffix == ".safetensors":
        found = of_headers(address, [read_safetensors(address, limit=limit)])
        return _with_config(found, address, folder)
    if address.name == INDEX:
        return _sharded(address, folder, limit)
    if address.suffix == ".json":
        (folder / "config.json").write_bytes(address.fetched())
        return _alone(address, folder)
    return _folder(address, folder, limit)


def _folder(address: Address, folder: Path, limit: int) -> Gathered:
    single = address.with_name(SINGLE)
    if single.exists():
        found = of_headers(address, [read_safetensors(single, limit=limit)])
        return _with_config(found, address, folder)
    index = address.with_name(INDEX)
    if index.exists():
        return _sharded(index, folder, limit)
    if not fetch_small(address, folder, BESIDE[:1]):
        right = "give the address of the folder or of a file"
        refuse(address, f"has neither {SINGLE}, nor {INDEX}, nor config.json; {right}")
    return _alone(address, folder)


def _sharded(index: Address, folder: Path, limit: int) -> Gathered:
    (folder / INDEX).write_bytes(index.fetched())
    shards = read_shards(folder / INDEX, limit, beside=index, each=_side_by_side)
    return _with_config(of_shards(index, shards), index, folder)


def _alone(address: Address, folder: Path) -> Gathered:
    found = Gathered(address, "none", config=folder / "config.json")
    found.findings.append(Finding("no_weights", "config.json stands alone, without tensors"))
    return found


def _with_config(found: Gathered, address: Address, folder: Path) -> Gathered:
    if "config.json" in fetch_small(address, folder, BESIDE):
        found.config = folder / "config.json"
    else:
        found.findings.append(Finding("no_config", "there is no config.json beside it"))
    return found


def _side_by_side(read: Callable[[A], B], places: Sequence[A] | Iterable[A]) -> Iterator[B]:
    """As `map`, some at a time."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        yield from pool.map(read, places)
