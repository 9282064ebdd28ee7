"""Read the tokenizer's files of a model folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from scantling.errors import ScantlingError, ScantlingInputError, need
from scantling.text import pieces

MAX_TOKENIZER_BYTES = 256 * 2**20
MAX_JSON_BYTES = 16 * 2**20
MAX_TEMPLATE_BYTES = 256 * 2**10

_OTHER_FORMS = {
    "vocab.json": "a vocabulary of the old BPE form",
    "vocab.txt": "a WordPiece vocabulary",
    "tekken.json": "a tekken vocabulary",
    "source.spm": "a SentencePiece model of the source's language",
    "target.spm": "a SentencePiece model of the target's language",
}
_T = TypeVar("_T")


def guarded(action: Callable[[], _T], what: str) -> _T:
    """Run a call into the `tokenizers` library, whose panics are not even `Exception`s.

    Raises:
        ScantlingInputError: the library refused or panicked; `what` begins the message.
    """
    try:
        return action()
    except (ScantlingError, KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:
        raise ScantlingInputError(f"{what}: {' '.join(str(error).split())[:300]}") from None


def sentencepiece_of(root: Path) -> Path | None:
    """The SentencePiece model of a folder that has no tokenizer.json, or None."""
    if (root / "tokenizer.json").is_file():
        return None
    return next((root / name for name in pieces.FILES if (root / name).is_file()), None)


def read_library(root: Path) -> Any:
    """The `tokenizers.Tokenizer` of a folder, with truncation and padding switched off.

    Raises:
        ScantlingInputError: no tokenizer.json, or one that is too large or malformed.
    """
    path = root / "tokenizer.json"
    if not path.is_file():
        found = [f"{name} ({what})" for name, what in _OTHER_FORMS.items() if (root / name).is_file()]
        if (root / "source.spm").is_file():
            raise ScantlingInputError(
                f"{root} has no tokenizer.json; it has {', '.join(found)}, and a pair of vocabularies cannot be read: "
                "give token ids instead of text"
            )
        beside = f"; it has {', '.join(found)}, which must be converted first" if found else ""
        raise ScantlingInputError(
            f"{root} has no tokenizer.json{beside}; write one with transformers: "
            "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        )
    data = _read(path, MAX_TOKENIZER_BYTES)
    tokenizers = need("tokenizers", "read tokenizer.json")
    library = guarded(lambda: tokenizers.Tokenizer.from_buffer(data), f"{path} is no tokenizer")
    library.no_truncation()
    library.no_padding()
    return library


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of at most 16 MiB; an empty one where the file does not exist.

    Raises:
        ScantlingInputError: too large, not UTF-8, not JSON (NaN and Infinity are not), or not an object.
    """
    if not path.is_file():
        return {}
    data = _read(path, MAX_JSON_BYTES)
    try:
        value = json.loads(data.decode(), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ScantlingInputError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ScantlingInputError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


def named_id(
    library: Any, sources: Mapping[str, Mapping[str, Any]], field: str, *, required: bool = True
) -> int | None:
    """The id of the token that `field` names in the first source that has it, or None.

    Args:
        required: a token that is named must exist; otherwise one that does not is None.

    Raises:
        ScantlingInputError: the field is neither text nor an object with `content`, or no such token exists.
    """
    for source, config in sources.items():
        value = config.get(field)
        if value is None:
            continue
        token = value.get("content") if isinstance(value, dict) else value
        if not isinstance(token, str):
            raise ScantlingInputError(f"{source}: {field} is {value!r}, neither text nor an object with content")
        found = library.token_to_id(token)
        if found is None and not required:
            return None
        if found is None:
            raise ScantlingInputError(f"{source}: {field} is {token!r}, which tokenizer.json does not have")
        return int(found)
    return None


def listed_ids(config: Mapping[str, Any], field: str) -> list[int]:
    """The ids under `field` of generation_config.json, which holds one id, a list of ids, or nothing.

    Raises:
        ScantlingInputError: something else is there.
    """
    value = config.get(field)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
            raise ScantlingInputError(f"generation_config.json: {field} has {token_id!r}, which is no token id")
    return ids


def optional_flag(config: Mapping[str, Any], field: str) -> bool | None:
    """A true/false field of tokenizer_config.json, or None where it is absent or null.

    Raises:
        ScantlingInputError: something else is there.
    """
    value = config.get(field)
    if value is not None and not isinstance(value, bool):
        raise ScantlingInputError(f"tokenizer_config.json: {field} is {value!r}, not true or false")
    return value


def chat_template(root: Path, config: Mapping[str, Any]) -> str | None:
    """The default template: chat_template.jinja, or else what tokenizer_config.json holds, or None.

    Raises:
        ScantlingInputError: the file is too large or not UTF-8, or the field is malformed or names no default.
    """
    path = root / "chat_template.jinja"
    if path.is_file():
        try:
            return _read(path, MAX_TEMPLATE_BYTES).decode()
        except UnicodeDecodeError as error:
            raise ScantlingInputError(f"{path} is not UTF-8: {error}") from None
    value = config.get("chat_template")
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        if "default" not in named:
            raise ScantlingInputError(f"tokenizer_config.json: chat_template names {list(named)}, but no 'default'")
        value = named["default"]
    if value is not None and not isinstance(value, str):
        raise ScantlingInputError(f"tokenizer_config.json: chat_template is a {type(value).__name__}, not text")
    return value


def _read(path: Path, limit: int) -> bytes:
    with path.open("rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise ScantlingInputError(f"{path} is larger than the {limit:,} bytes allowed")
    return data


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")
