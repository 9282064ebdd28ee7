"""Config keys that say which layers differ: types of attention, layers without RoPE, dense layers among sparse ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, TypeVar

from scantling.checkpoint.config_keys import Keys
from scantling.checkpoint.header import shown
from scantling.errors import ScantlingInputError

MAX_LAYERS = 1024
FULL, SLIDING = "full_attention", "sliding_attention"

T = TypeVar("T", str, int)


def pattern(layers: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A card's `pattern` from what differs in each layer: the shortest run of layers that repeats, neighbours counted.

    >>> pattern([{}, {}, {"position": {"kind": "none"}}] * 2)
    [{'times': 2}, {'position': {'kind': 'none'}}]
    >>> pattern([{}, {}])
    []
    """
    repeats = (p for p in range(1, len(layers)) if all(a == b for a, b in zip(layers, layers[p:], strict=False)))
    period = next(repeats, len(layers))
    out: list[dict[str, Any]] = []
    for layer, run in groupby(layers[:period]):
        times = len(list(run))
        out.append({"times": times, **layer} if times > 1 else dict(layer))
    return [] if out in ([], [{}]) else out


def n_layers(keys: Keys) -> int:
    """num_hidden_layers, small enough to write every layer out."""
    n = keys.size("num_hidden_layers")
    if n > MAX_LAYERS:
        raise ScantlingInputError(f"{keys.where}: num_hidden_layers is {n}; at most {MAX_LAYERS} are possible")
    return n


def listed(keys: Keys, name: str, kind: type[T]) -> list[T] | None:
    """A list of strings or whole numbers, or None where the key is null or missing."""
    values = keys.raw(name)
    if values is None:
        return None
    if not isinstance(values, list) or any(type(value) is not kind for value in values):
        wanted = "names" if kind is str else "whole numbers"
        raise ScantlingInputError(f"{keys.where}: {name} is {shown(values)}; a list of {wanted} is needed")
    return values


def window(keys: Keys, usual: int) -> int | None:
    """sliding_window of a family with a default of its own: `usual` where the key is missing, None where it is null."""
    return keys.optional_size("sliding_window") if "sliding_window" in keys.data else usual


def windows(keys: Keys, window: int | None, usual: Sequence[str]) -> list[dict[str, Any]]:
    """What `layer_types` says about the window of each layer.

    Args:
        window: of the layers that slide; None where none may.
        usual: the types where the config does not list them, one per layer.

    Raises:
        ScantlingInputError: too few or unknown types, or a sliding layer without a window.
    """
    types = listed(keys, "layer_types", str)
    types = list(usual) if types is None else types
    if len(types) != len(usual):
        raise ScantlingInputError(f"{keys.where}: layer_types names {len(types)} layers and the model has {len(usual)}")
    if odd := [kind for kind in types if kind not in (FULL, SLIDING)]:
        raise ScantlingInputError(f"{keys.where}: layer_types has {shown(odd[0])}; known: {FULL}, {SLIDING}")
    if SLIDING in types and window is None:
        raise ScantlingInputError(f"{keys.where}: layer_types has {SLIDING!r} and no sliding_window is in use")
    return [{"attention": {"window": window}} if kind == SLIDING else {} for kind in types]
