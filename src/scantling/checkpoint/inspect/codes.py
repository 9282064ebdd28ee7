"""Every kind of finding: its severity, what it means, and its likely cause. The page docs/inspect.md is this table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["info", "warning", "error"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")


@dataclass(frozen=True)
class Code:
    """One kind of finding.

    Attributes:
        severity: error where loading would be refused or give another model, warning where it may be another model
            than was meant, info where all is well and worth knowing.
        means: what was found.
        cause: how it usually comes about.
    """

    severity: Severity
    means: str
    cause: str


@dataclass(frozen=True)
class Finding:
    """Something found in one checkpoint.

    Attributes:
        code: a key of `CODES`.
        message: what and where, with its numbers.
        cause: the likely cause here; by default the usual one.
    """

    code: str
    message: str
    cause: str = ""

    def __post_init__(self) -> None:
        if not self.cause:
            object.__setattr__(self, "cause", CODES[self.code].cause)

    @property
    def severity(self) -> Severity:
        """Of its code."""
        return CODES[self.code].severity


def _error(means: str, cause: str) -> Code:
    return Code("error", means, cause)


def _warning(means: str, cause: str) -> Code:
    return Code("warning", means, cause)


def _info(means: str, cause: str) -> Code:
    return Code("info", means, cause)


CODES: dict[str, Code] = {
    "shard_missing": _error("the index names a file that is not there", "the download is not complete"),
    "index_absent": _error(
        "the index puts a tensor into a shard that does not hold it", "index and shards are of different revisions"
    ),
    "index_extra": _error(
        "a shard holds a tensor that the index leaves out",
        "a tensor was added or the index was written before; loaders that trust the index drop it in silence",
    ),
    "index_copy": _warning(
        "a tensor stands in a second shard besides the one that the index names",
        "an old shard was left behind; the index decides here, in other loaders the file that is read last",
    ),
    "index_missing": _error("there are several files of weights and no index", "the index was not downloaded"),
    "index_unused": _info("an index lies beside a single file", "the shards were merged into one file"),
    "index_size": _warning(
        "total_size of the index is not the size of the tensors",
        "the index is of another dtype or revision, or counts a tied matrix twice",
    ),
    "shard_sizes": _info(
        "one shard is much smaller than the others, and complete", "the next tensor did not fit into the one before"
    ),
    "no_weights": _info("there is a config and no tensors", "only the config was fetched"),
    "no_config": _warning(
        "there are tensors and no config", "the file was copied alone; what tensors do not show stays unknown"
    ),
    "config_refused": _error(
        "the config or metadata cannot be read as a model", "an unknown family or key, or keys that contradict others"
    ),
    "quantised": _info("the weights are stored quantised", "they were converted to save memory"),
    "wrapper_prefix": _warning(
        "names carry the prefix of a wrapper", "the state dict of a compiled or wrapped model was saved"
    ),
    "other_names": _info(
        "names are spelled in another way that the family knows", "the file was written by an older or newer program"
    ),
    "family": _error("names and config are of different families", "the config of another model"),
    "names_unknown": _warning("no table of names knows these tensors", "a family that is not known here"),
    "tensor_missing": _error("tensors are missing", "the file is not complete, or the config is of another model"),
    "tensor_extra": _error("tensors are no part of the model of the config", "the config is of another model"),
    "tensor_ignored": _info("tensors carry no weights of this model", "buffers, or heads of other tasks"),
    "tensor_twice": _error("one tensor stands under two names", "two state dicts were merged"),
    "layer_gap": _error("numbers of layers are left out", "layers were removed, or a shard is missing"),
    "layers_beyond": _info(
        "there are layers beyond the model's own", "they predict tokens further ahead, in training or for drafting"
    ),
    "layer_count": _error(
        "the number of layers is another", "the config of another size of the family, or layers were removed or added"
    ),
    "width": _error("d_model is another", "the config of another size of the family"),
    "head_size": _error(
        "the width of queries is not heads times head size",
        "head_dim is missing in the config, or d_model / n_heads was taken for it",
    ),
    "kv_heads": _error(
        "the width of keys is not KV heads times head size",
        "the number of KV heads is missing, or the number of query heads per KV head was taken for it",
    ),
    "heads": _error("the number of heads is another", "the config of another size of the family"),
    "latent": _error("the widths of latent attention are others", "the config of another size of the family"),
    "attention_kind": _error("the attention is of another kind", "the config of another family"),
    "mlp_width": _error(
        "d_ff is another", "the width of gate and up together was taken for one, or the config of another size"
    ),
    "mlp_kind": _error("the MLP is of another kind", "the config of another family"),
    "experts": _error("the experts are others", "the config of another size of the family"),
    "vocab_padded": _error(
        "the token table has more rows than the config has tokens",
        "the table was padded to a multiple for speed and vocab_size was not",
    ),
    "vocab_rows": _error("the token table has other rows than the config says", "tokens were added or removed"),
    "positions": _error(
        "the position table has other rows than the config says",
        "the context was changed, or rows that no position uses were counted",
    ),
    "biases": _error("biases are others", "a family with other biases, or a flag of the config that is wrong"),
    "norms": _error("the norms are others", "the config of another family"),
    "head_kind": _error("the head is another", "the config was saved from another class"),
    "shape": _error("a tensor has another shape", "the config of another model"),
    "transposed": _error(
        "matrices are stored the other way round",
        "they were exported from nn.Linear, (d_out, d_in), where the family stores (d_in, d_out); square ones do not "
        "show it and must be turned too",
    ),
    "tied_differs": _error(
        "the config ties the head to the token table, and the file has another matrix for it",
        "tie_word_embeddings is wrong, or the head was trained or quantised apart",
    ),
    "tied_copy": _info(
        "the head is tied and stored all the same", "the state dict was saved with both names of one matrix"
    ),
    "untied_absent": _error(
        "the config has a head of its own and the file has none",
        "tie_word_embeddings is wrong or missing, or the head was left out when the file was saved",
    ),
    "untied_equal": _warning(
        "the config has a head of its own and it equals the token table", "tie_word_embeddings is wrong or missing"
    ),
    "dtype": _warning("the config says another dtype than the tensors have", "the weights were converted after"),
    "dtype_mixed": _info("the tensors have several dtypes", "some weights are kept in a wider one"),
    "dtype_odd": _error("weights are no floating-point numbers", "they are quantised and the config does not say how"),
    "rope_default": _info(
        "the config does not state the base of RoPE", "it means the family's default, or the key was lost"
    ),
    "rope_parameters": _error(
        "the stored angles of RoPE are not those of the config",
        "the base or its scaling was changed or lost, as where it moved into rope_parameters",
    ),
    "qk_layout": _warning(
        "the rows of queries and keys look as if their rotated pairs lay otherwise",
        "the file was converted without reordering the rows, or reordered twice",
    ),
    "window_off": _info("a window is stated and not in use", "a switch beside it is off"),
    "window_wide": _info(
        "a window is as long as the context", "the model was made for longer texts, or reads them all"
    ),
    "tokenizer_larger": _error(
        "the tokenizer has ids beyond the token table", "tokens were added and the table was not enlarged"
    ),
    "tokenizer_smaller": _info(
        "the token table has rows that the tokenizer never gives", "the table is padded, or keeps spare tokens"
    ),
    "special_id": _warning("an id of the config is beyond the token table", "the ids are of another vocabulary"),
}
"""By code, in the order of the page."""
