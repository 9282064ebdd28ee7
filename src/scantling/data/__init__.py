"""Data for training: sources, tokenised once into a corpus, and batches that any number of ranks share."""

from __future__ import annotations

from scantling.data.batch import Batch
from scantling.data.batches import batches, one_pass
from scantling.data.corpus import Corpus, Documents, open_corpus
from scantling.data.layout import Layout
from scantling.data.objectives import Causal, Objective, PrefixLM
from scantling.data.prepare import Progress, cache_folder, prepare
from scantling.data.sources import Sources
from scantling.data.vocabulary import byte_tokenizer, check_size, read_tokenizer, train_tokenizer

__all__ = [
    "Batch",
    "Causal",
    "Corpus",
    "Documents",
    "Layout",
    "Objective",
    "PrefixLM",
    "Progress",
    "Sources",
    "batches",
    "byte_tokenizer",
    "cache_folder",
    "check_size",
    "one_pass",
    "open_corpus",
    "prepare",
    "read_tokenizer",
    "train_tokenizer",
]
