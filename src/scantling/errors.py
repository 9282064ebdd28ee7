"""The errors that a user can cause, and the one way to import an optional library."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable
from types import ModuleType


class ScantlingError(Exception):
    """Anything Scantling reports in one sentence instead of a traceback."""


class ScantlingInputError(ScantlingError, ValueError):
    """Bad input: the message says what is wrong, where, and what would be right."""


class MissingExtra(ScantlingError, ImportError):
    """An optional library is not installed; the message names the command that brings it."""


_EXTRA_OF = {
    "torch": "torch",
    "safetensors": "torch",
    "numpy": "torch",
    "tokenizers": "text",
    "jinja2": "text",
    "gguf": "gguf",
    "huggingface_hub": "hub",
    "llguidance": "guide",
    "pyarrow": "data",
    "datasets": "data",
    "matplotlib": "plot",
    "tensorboard": "board",
    "transformers": "transformers",
    "wandb": "wandb",
    "trackio": "trackio",
    "sentencepiece": "sentencepiece",
}


def need(module: str, purpose: str) -> ModuleType:
    """Import an optional module, or say which command installs it.

    Raises:
        MissingExtra: the module is not installed; `purpose` completes "... is needed to ...".
    """
    top = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != top:
            raise
        extra = _EXTRA_OF[top]
        raise MissingExtra(
            f"{top} is needed to {purpose} and is not installed; get it with: pip install 'scantling[{extra}]'"
        ) from None


def nearest(word: str, known: Iterable[str]) -> str:
    """A clause that names the known word most like `word`, or the empty string.

    >>> nearest("n_head", ["n_heads", "d_model"])
    "; did you mean 'n_heads'?"
    """
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""
