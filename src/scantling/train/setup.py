"""From a MODEL, data and settings to what `start.train` takes: weights, a tokenizer, a corpus."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from scantling.cards import Card
from scantling.cards.training import Training
from scantling.checkpoint.find import card_of, find
from scantling.data import (
    Corpus,
    Progress,
    Sources,
    byte_tokenizer,
    cache_folder,
    learned_tokenizer,
    prepare,
    read_tokenizer,
)
from scantling.data.sources import find_sources
from scantling.data.vocabulary import N_SENTINELS, Purpose
from scantling.errors import ScantlingInputError
from scantling.loading import from_card, load
from scantling.model import Model
from scantling.tensor.memory import device_of
from scantling.text.tokenizer import Tokenizer
from scantling.train.settings import WEIGHTS, objective_of
from scantling.train.speed import peak

Report = Callable[[Progress], None]
"""Is told how far tokenising is."""


@dataclass(frozen=True)
class Asked:
    """What is to be trained on what.

    Attributes:
        tokenizer: a path, ``bytes``, or None: the model's own, else one learned from the data.
        out: where the corpus goes; None is the cache.
    """

    sources: Sources
    tokenizer: str | None = None
    out: Path | None = None
    held_out: float = 0.05


FAST_ENOUGH = 0.9
"""Share of float32's speed below which narrow products are said to be slow."""

ASKED = "data.json"
"""What a run was begun with, in its folder."""


def write_asked(run: Path, asked: Asked) -> None:
    """Remember what a run is trained on, so that it can go on without being told again.

    Raises:
        ScantlingInputError: it cannot be written.
    """
    sources = {**_said(asked.sources), "paths": [_whole(path) for path in asked.sources.paths]}
    plain = {"sources": sources, "tokenizer": asked.tokenizer, "held_out": asked.held_out}
    part = run / f".{ASKED}.part"
    try:
        part.write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")
        part.replace(run / ASKED)
    except OSError as error:
        raise ScantlingInputError(f"{run / ASKED}: cannot be written: {error.strerror}") from None


def read_asked(run: Path) -> Asked | None:
    """What a run was begun with, or None where its folder does not say.

    Raises:
        ScantlingInputError: the file cannot be read.
    """
    try:
        plain = json.loads((run / ASKED).read_text(encoding="utf-8"))
        sources: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in plain["sources"].items()
        }
        return Asked(Sources(**sources), plain["tokenizer"], None, plain["held_out"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ScantlingInputError(
            f"{run / ASKED}: does not say what the run was begun with; name it (--data)"
        ) from None


def _said(sources: Sources) -> dict[str, object]:
    """The fields of the sources, as JSON."""
    return {field.name: getattr(sources, field.name) for field in fields(sources)}


def _whole(path: str) -> str:
    """A path from the root, where it is one; names of datasets stay."""
    return str(Path(path).resolve()) if Path(path).exists() else path


def model_of(name: str, training: Training, seed: int, device: str, revision: str | None = None) -> Model:
    """The weights that training begins with: a checkpoint's, or new ones of a card.

    Raises:
        ScantlingInputError: no such model or device.
    """
    dtype = WEIGHTS[training.precision]
    found = find(name, revision=revision)
    if found.kind in ("preset", "card") or (found.kind == "folder" and not _has_weights(found.path)):
        return from_card(card_of(name, revision=revision), seed=seed, dtype=dtype, device=device)
    device_of(device)
    return load(name, dtype=dtype, device=device, revision=revision)


def _has_weights(folder: Path) -> bool:
    return folder.is_dir() and (any(folder.glob("*.safetensors")) or any(folder.glob("*.safetensors.index.json")))


def corpus_of(
    lm: Model, training: Training, asked: Asked, progress: Callable[[Progress], None] | None = None
) -> Corpus:
    """The data in the model's tokens; the model gets the tokenizer where it has none.

    Raises:
        ScantlingInputError: bad data or no such tokenizer.
    """
    tokenizer = tokenizer_of(lm, training, asked)
    corpus = prepare(asked.sources, tokenizer, asked.out, held_out=asked.held_out, progress=progress)
    if lm.tokenizer is None:
        lm.tokenizer = tokenizer
        lm.eos_ids = frozenset(tokenizer.eos_ids)
        if lm.parts.two_stacks and lm.start_id is None:
            lm.start_id = corpus.marks.pad
    return corpus


def tokenizer_of(lm: Model, training: Training, asked: Asked) -> Tokenizer:
    """The tokenizer that is named, the model's own, or one that is learned from the data.

    Raises:
        ScantlingInputError: it cannot be read or learned.
    """
    objective = objective_of(lm.card, training)
    alone: Purpose = "chat" if asked.sources.kind == "chat" else "causal"
    purpose: Purpose = "masked" if objective == "masked" else "seq2seq" if lm.parts.two_stacks else alone
    if asked.tokenizer == "bytes":
        return byte_tokenizer(purpose, sentinels=N_SENTINELS if objective == "spans" else 0)
    if asked.tokenizer is not None:
        return read_tokenizer(asked.tokenizer)
    return lm.tokenizer or _learned(lm.card, asked, purpose, N_SENTINELS if objective == "spans" else 0)


def _learned(card: Card, asked: Asked, purpose: Purpose, sentinels: int) -> Tokenizer:
    """A byte-level BPE of the card's size, kept in the cache under the hash of what it was learned from."""
    found, _ = find_sources(asked.sources)
    said = [[s.sha256 for s in found], asked.sources.options, card.vocab_size, purpose, sentinels, asked.held_out]
    folder = cache_folder() / "tokenizers" / hashlib.sha256(json.dumps(said).encode()).hexdigest()[:32]
    if (folder / "tokenizer.json").exists():
        return Tokenizer.from_folder(folder)
    sources, share = asked.sources, asked.held_out
    tokenizer = learned_tokenizer(sources, card.vocab_size, purpose, sentinels=sentinels, held_out=share)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in sorted(tokenizer.files().items(), reverse=True):
            part = folder / f".{name}.part"
            part.write_text(text, encoding="utf-8")
            part.replace(folder / name)
    except OSError as error:
        raise ScantlingInputError(f"{folder}: cannot be written: {error.strerror}") from None
    return tokenizer


def slow_products_note(precision: str, device: str) -> str | None:
    """A note where narrow products are slower than those of float32, as on a CPU without units for them."""
    if precision == "fp32" or device != "cpu":
        return None
    place = torch.device(device)
    share = peak(place, torch.bfloat16).flops / peak(place, torch.float32).flops
    if share >= FAST_ENOUGH:
        return None
    return (
        f"products in bfloat16 run at {share:.2f} times the speed of those in float32 on this machine, measured: "
        "training.precision: fp32 is faster here, in more memory"
    )


def single_thread_note(device: str) -> str | None:
    """A note where torch runs on fewer threads than there are CPUs, as a variable may have told it."""
    import os

    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if device == "cpu" and torch.get_num_threads() < allowed:
        return f"torch runs on {torch.get_num_threads()} of {allowed} CPUs (OMP_NUM_THREADS)"
    return None
