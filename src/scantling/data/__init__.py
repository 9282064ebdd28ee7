"""Data for training: sources, tokenised once into a corpus, and batches that any number of ranks share."""

from __future__ import annotations

from scantling.data.batch import Batch
from scantling.data.batching import batches, one_pass
from scantling.data.corpus import Corpus, Documents, open_corpus
from scantling.data.display import shown_progress
from scantling.data.layout import Layout
from scantling.data.learned import learned_tokenizer
from scantling.data.making import Progress, cache_folder, prepare
from scantling.data.masked import MaskedLM
from scantling.data.named import OBJECTIVES
from scantling.data.ngrams import Overlap, overlap
from scantling.data.objectives import Causal, Objective, PrefixLM
from scantling.data.seq2seq import Seq2Seq, SpanCorruption
from scantling.data.sources import Sources
from scantling.data.vocabulary import byte_tokenizer, check_size, read_tokenizer, train_tokenizer

__all__ = [
    "OBJECTIVES",
    "Batch",
    "Causal",
    "Corpus",
    "Documents",
    "Layout",
    "MaskedLM",
    "Objective",
    "Overlap",
    "PrefixLM",
    "Progress",
    "Seq2Seq",
    "Sources",
    "SpanCorruption",
    "batches",
    "byte_tokenizer",
    "cache_folder",
    "check_size",
    "learned_tokenizer",
    "one_pass",
    "open_corpus",
    "overlap",
    "prepare",
    "read_tokenizer",
    "shown_progress",
    "train_tokenizer",
]
