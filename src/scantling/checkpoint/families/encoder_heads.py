"""Heads of encoders: which one a checkpoint has follows from the `architectures` of its config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from scantling.cards import Card
from scantling.checkpoint.config_keys import Keys, near
from scantling.checkpoint.header import shown
from scantling.errors import ScantlingInputError

Heads = Mapping[str, Callable[[Keys], dict[str, Any]]]
"""By the name of the original class, what makes the card's head section."""


def head(keys: Keys, heads: Heads, bare: str) -> dict[str, Any]:
    """The card's head section.

    Args:
        bare: the class without a head, which is also what a config without `architectures` describes.

    Raises:
        ScantlingInputError: another class; the message names those that are known.
    """
    listed = keys.raw("architectures", [bare])
    name = listed[0] if isinstance(listed, list) and listed else listed
    if not isinstance(name, str) or name not in heads:
        known = ", ".join(heads)
        raise ScantlingInputError(f"{keys.where}: architectures is {shown(name)}; known: {known}{near(name, heads)}")
    return heads[name](keys)


def stream(keys: Keys) -> dict[str, Any]:
    """No head: the vectors of all tokens."""
    return {"kind": "none"}


def pooler(keys: Keys) -> dict[str, Any]:
    """BERT's pooler: the first token's vector through a matrix and tanh."""
    return {"kind": "embedding", "pool": "first", "transform": {"act": "tanh"}}


def sequence(keys: Keys, act: str) -> dict[str, Any]:
    """One label for the text, read from the first token through a matrix and `act`."""
    return {"kind": "sequence", "pool": "first", "transform": {"act": act}, "bias": True, **labelled(keys)}


def tokens(keys: Keys) -> dict[str, Any]:
    """One label for each token, read from its vector as it is."""
    return {"kind": "tokens", "bias": True, **labelled(keys)}


def labelled(keys: Keys) -> dict[str, Any]:
    """How many labels there are, and whether they exclude each other.

    One label alone is a yes or no: a softmax over it would always be 1.

    Raises:
        ScantlingInputError: id2label and num_labels contradict each other, or the task is no classification.
    """
    names = keys.raw("id2label")
    if names is not None and not isinstance(names, Mapping):
        raise ScantlingInputError(f"{keys.where}: id2label is {shown(names)}; a mapping is needed")
    count = keys.size("num_labels", 2 if names is None else len(names))
    if names is not None and len(names) != count:
        raise ScantlingInputError(
            f"{keys.where}: num_labels is {count} and id2label names {len(names)}; they must agree"
        )
    keys.only("problem_type", "single_label_classification", "multi_label_classification")
    many = keys.raw("problem_type") == "multi_label_classification"
    return {"n_labels": count, "scores": "sigmoid" if many or count == 1 else "softmax"}


def written(card: Card, name: str) -> dict[str, Any]:
    """The way back: the class that the card's head makes, and its labels.

    Args:
        name: of the classes, before ``For...`` and ``Model``.
    """
    ends = {"lm": "ForMaskedLM", "replaced": "ForPreTraining", "sequence": "ForSequenceClassification"}
    end = {**ends, "tokens": "ForTokenClassification"}.get(card.head.kind, "Model")
    found: dict[str, Any] = {"architectures": [f"{name}{end}"]}
    if card.head.n_labels is None:
        return found
    labels = [f"LABEL_{i}" for i in range(card.head.n_labels)]
    many = card.head.scores == "sigmoid" and len(labels) > 1
    return {
        **found,
        "id2label": {str(i): label for i, label in enumerate(labels)},
        "label2id": {label: i for i, label in enumerate(labels)},
        "problem_type": "multi_label_classification" if many else None,
    }
