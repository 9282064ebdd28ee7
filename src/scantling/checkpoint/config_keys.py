"""Reading a config.json key by key: each is taken with its type, known to be irrelevant, or refused by name."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from scantling.checkpoint.files import open_regular, shown
from scantling.errors import ScantlingInputError, nearest

MAX_BYTES = 16 * 1024 * 1024

COMMON = frozenset(
    {
        "_name_or_path",
        "architectures",
        "auto_map",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "unk_token_id",
        "sep_token_id",
        "model_type",
        "transformers_version",
        "use_cache",
        "initializer_range",
        "task_specific_params",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "tokenizer_class",
        "prefix",
        "problem_type",
        "id2label",
        "label2id",
        "num_labels",
        "chunk_size_feed_forward",
        "gradient_checkpointing",
        "pretraining_tp",
        "transformers.js_config",
    }
)
"""Keys of any family that change neither sizes nor results; those that could are checked by `Keys.only`."""

ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu2": "relu2",
    "silu": "silu",
    "swish": "silu",
}
"""Their names of activations and ours."""


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        ScantlingInputError: no such file, too large, not UTF-8, not JSON, a duplicate key, or not an object.
    """
    data = _json(path)
    if not isinstance(data, dict):
        raise ScantlingInputError(f"{path}: a JSON object is needed, this is a {type(data).__name__}")
    return data


def read_json_list(path: Path) -> list[Any]:
    """A JSON list from a file; errors as for `read_json`."""
    data = _json(path)
    if not isinstance(data, list):
        raise ScantlingInputError(f"{path}: a JSON list is needed, this is a {type(data).__name__}")
    return data


def _json(path: Path) -> Any:
    file, size = open_regular(path)
    with file:
        if size > MAX_BYTES:
            raise ScantlingInputError(f"{path}: {size} bytes; a config has at most {MAX_BYTES}")
        raw = file.read(MAX_BYTES)
    try:
        return json.loads(raw.decode("utf-8"), object_pairs_hook=_once, parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise ScantlingInputError(f"{path}: not UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise ScantlingInputError(f"{path}: not JSON at line {error.lineno}: {error.msg}") from None
    except RecursionError:
        raise ScantlingInputError(f"{path}: not a config: nested too deeply") from None
    except ValueError:
        raise ScantlingInputError(f"{path}: not a config: a whole number has too many digits") from None
    except _Bad as error:
        raise ScantlingInputError(f"{path}: {error}") from None


class _Bad(Exception):
    pass


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data: dict[str, Any] = {}
    for key, value in pairs:
        if key in data:
            raise _Bad(f"key {shown(key)} stands twice")
        data[key] = value
    return data


def _refuse_constant(name: str) -> float:
    raise _Bad(f"{name} is no number a config may hold")


def near(value: object, known: Iterable[str]) -> str:
    """`nearest` for a value from a config, of any type and length."""
    return nearest(value[:80], known) if isinstance(value, str) else ""


class Keys:
    """The keys of a config, each to be taken once.

    Attributes:
        where: names the config in messages.
    """

    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        self.data, self.where = data, where
        self._taken: set[str] = set()

    def raw(self, name: str, default: Any = None) -> Any:
        """The value as it stands; null and missing are the default."""
        self._taken.add(name)
        value = self.data.get(name)
        return default if value is None else value

    def size(self, name: str, default: int | None = None, least: int = 1) -> int:
        """A whole number of at least `least`; required where there is no default."""
        value = self.raw(name, default)
        if value is None:
            raise ScantlingInputError(f"{self.where}: {name} is missing")
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            right = f"a whole number of at least {least} is needed"
            raise ScantlingInputError(f"{self.where}: {name} is {shown(value)}; {right}")
        return value

    def optional_size(self, name: str) -> int | None:
        """A positive integer, or None where the key is null or missing."""
        return None if self.raw(name) is None else self.size(name)

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number; required where there is no default."""
        value = self.raw(name, default)
        if value is None:
            raise ScantlingInputError(f"{self.where}: {name} is missing")
        fine = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
        if not fine:
            raise ScantlingInputError(f"{self.where}: {name} is {shown(value)}; a number is needed")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self.raw(name, default)
        if not isinstance(value, bool):
            raise ScantlingInputError(f"{self.where}: {name} is {shown(value)}; true or false is needed")
        return value

    def activation(self, name: str, default: str | None = None) -> str:
        """Our name of the activation; `default` is a name of theirs."""
        value = self.raw(name, default)
        if not isinstance(value, str) or value not in ACTIVATIONS:
            known = ", ".join(ACTIVATIONS)
            raise ScantlingInputError(
                f"{self.where}: {name} is {shown(value)}; known: {known}{near(value, ACTIVATIONS)}"
            )
        return ACTIVATIONS[value]

    def spelled(self, *names: str) -> str:
        """Of the spellings of one key, the one that this config uses; the first where it uses none.

        Raises:
            ScantlingInputError: two spellings with different values.
        """
        used = [name for name in names if self.raw(name) is not None] or [names[0]]
        for other in used[1:]:
            if self.raw(other) != self.raw(used[0]):
                both = f"{used[0]} is {shown(self.raw(used[0]))} and {other} is {shown(self.raw(other))}"
                raise ScantlingInputError(f"{self.where}: {both}; they must agree")
        return used[0]

    def only(self, name: str, *allowed: Any) -> None:
        """Take a key that is understood only where it is missing, null, or one of these values."""
        value = self.raw(name)
        # True == 1 == 1.0, so types count too.
        if value is not None and not any(type(value) is type(a) and value == a for a in allowed):
            right = " or ".join(repr(a) for a in allowed) or "null"
            raise ScantlingInputError(
                f"{self.where}: {name} is {shown(value)}, which is not supported; it must be {right}"
            )

    def dtype(self) -> str:
        """The stored dtype, under its old key torch_dtype or its new key dtype; ``unknown`` where neither says."""
        old, new = (
            v.removeprefix("torch.") if isinstance(v, str) else v for v in (self.raw("torch_dtype"), self.raw("dtype"))
        )
        if old is not None and new is not None and old != new:
            raise ScantlingInputError(
                f"{self.where}: torch_dtype is {shown(old)} and dtype is {shown(new)}; they must agree"
            )
        value = next((v for v in (new, old) if v is not None), None)
        if value is None:
            return "unknown"
        if not isinstance(value, str) or value not in ("float32", "float16", "bfloat16"):
            raise ScantlingInputError(f"{self.where}: dtype is {shown(value)}; known: float32, float16, bfloat16")
        return value

    def finish(self, irrelevant: frozenset[str]) -> None:
        """Refuse, by name, a key that was neither taken nor irrelevant."""
        self.raw("quantization_config")
        for name, allowed in (("is_encoder_decoder", [False]), ("is_decoder", [True, False])):
            if name not in self._taken:
                self.only(name, *allowed)
        left = sorted(set(self.data) - self._taken - irrelevant - COMMON)
        if left:
            raise ScantlingInputError(
                f"{self.where}: config key {shown(left[0])} is not known to this family{near(left[0], self._taken)}"
            )
