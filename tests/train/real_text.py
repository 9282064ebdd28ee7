"""Real text for the slow tests of training, and the statistics that they end with."""

from __future__ import annotations

import gettext
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.metadata import files
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from scantling.data import Corpus, Documents, open_corpus

PAIRS = "jupyterlab-language-pack-fr-fr"
"""Messages of JupyterLab and its extensions in English and French, under the BSD licence."""


def topics(folder: Path) -> Path:
    """The help texts of Python's own documentation, a file each: `pydoc_data.topics`."""
    from pydoc_data.topics import topics as texts

    folder.mkdir()
    for name, text in sorted(texts.items()):
        (folder / f"{name.replace('/', '-')}.txt").write_text(text, encoding="utf-8")
    return folder


def french(path: Path, longest: int = 60) -> Path:
    """Lines of an English message of at most so many characters, a tab and its translation; each message once."""
    found: dict[str, str] = {}
    for file in sorted(str(f.locate()) for f in files(PAIRS) or () if str(f).endswith(".mo")):
        with open(file, "rb") as catalog:
            for key, target in gettext.GNUTranslations(catalog)._catalog.items():  # type: ignore[attr-defined]
                source = (key[0] if isinstance(key, tuple) else key).rpartition("\x04")[2]
                plain = not any(sign in source + target for sign in "\n\t\r")
                if plain and source.strip() and target.strip() and len(source) <= longest and len(target) <= longest:
                    found.setdefault(source, target)
    path.write_text("".join(f"{source}\t{target}\n" for source, target in found.items()), encoding="utf-8")
    return path


def prepared(cache: Path, held_out: float) -> Corpus:
    """The one corpus that a run made, its halves as the run saw them."""
    (manifest,) = (cache / "scantling" / "data").glob("*/manifest.json")
    return open_corpus(manifest.parent, held_out=held_out)


def each(documents: Documents) -> Iterator[Documents]:
    """One document after another, for itself."""
    for n in range(len(documents)):
        yield replace(documents, spans=documents.spans[n : n + 1])


def unigram(corpus: Corpus, vocab_size: int) -> NDArray[np.float64]:
    """Log-probability of each id by how often it comes in the training half, one added to each count (Laplace)."""
    counts = np.ones(vocab_size)
    for n in range(len(corpus.train)):
        np.add.at(counts, corpus.train.ids(n), 1)
    logs: NDArray[np.float64] = np.log(counts / counts.sum())
    return logs


def sign_flips(differences: Sequence[float], draws: int = 100_000) -> float:
    """The one-sided p of a mean above 0, where chance alone decides the sign of each difference.

    A permutation test over items that are independent of each other (Fisher, 1935, section 21): of so many draws of the
    signs, the share whose mean is at least the one that was found, the found one counted in.
    """
    values = np.asarray(differences, np.float64)
    draw, hits = np.random.default_rng(0), 0
    for _ in range(draws // 1000):
        signs = draw.choice((-1.0, 1.0), (1000, len(values)))
        hits += int((signs @ values >= values.sum() - 1e-12).sum())
    return (hits + 1) / (draws + 1)


def chrf(written: str, wanted: str, order: int = 6, beta: float = 2.0) -> float:
    """chrF of one text: F of character n-grams up to `order`, spaces left out (Popović, 2015, section 2).

    Precision and recall are means over the orders that either text is long enough for, as sacreBLEU reckons.
    """
    shares: list[tuple[float, float]] = []
    for n in range(1, order + 1):
        ours, theirs = (_grams("".join(text.split()), n) for text in (written, wanted))
        if not ours or not theirs:
            continue
        common = sum((ours & theirs).values())
        shares.append((common / ours.total(), common / theirs.total()))
    if not shares:
        return 0.0
    precision, recall = (sum(side) / len(shares) for side in zip(*shares, strict=True))
    below = beta**2 * precision + recall
    return 100 * (1 + beta**2) * precision * recall / below if below else 0.0


def _grams(text: str, n: int) -> Counter[str]:
    return Counter(text[i : i + n] for i in range(len(text) - n + 1))
