"""MPT (MosaicML 2023): ALiBi, no biases at all, clipped queries, keys and values in some models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from scantling.cards import Card
from scantling.cards.schema import ALiBi, LayerNorm, MultiHead
from scantling.checkpoint.config_keys import Keys
from scantling.checkpoint.family import Family
from scantling.checkpoint.header import shown
from scantling.checkpoint.names import Row, Split
from scantling.errors import ScantlingInputError


def _card(keys: Keys) -> dict[str, Any]:
    d_model = keys.size(keys.spelled("d_model", "hidden_size"))
    heads = keys.size(keys.spelled("n_heads", "num_attention_heads"))
    keys.only("no_bias", True)
    keys.only("logit_scale")
    keys.only("embedding_fraction", 1.0, 1)
    keys.only("norm_type", "low_precision_layernorm", "layernorm")
    attention = _attention_keys(keys)
    return {
        "n_layers": keys.size(keys.spelled("n_layers", "num_hidden_layers")),
        "d_model": d_model,
        "vocab_size": keys.size("vocab_size"),
        "context": keys.size("max_seq_len", 2048),
        "attention": {
            "kind": "multi_head",
            "n_heads": heads,
            "scale": _optional(attention, "softmax_scale"),
            "clip": _optional(attention, "clip_qkv"),
        },
        "position": {"kind": "alibi"},
        "norm": {"kind": "layernorm", "eps": keys.number("layer_norm_epsilon", 1e-5), "bias": False},
        "mlp": {"kind": "plain", "act": "gelu", "d_ff": 4 * d_model},
        "dropout": {
            "embedding": keys.number("emb_pdrop", 0.0),
            "attention": attention.number("attn_pdrop", 0.0),
            "residual": keys.number("resid_pdrop", 0.0),
        },
    }


def _attention_keys(keys: Keys) -> Keys:
    """The nested attn_config, everything in it that is no number already seen to."""
    data = keys.raw("attn_config", {})
    if not isinstance(data, Mapping):
        raise ScantlingInputError(f"{keys.where}: attn_config is {shown(data)}; a mapping is needed")
    attention = Keys(data, f"{keys.where}: attn_config")
    attention.only("alibi", True)
    attention.only("attn_type", "multihead_attention")
    for name in ("prefix_lm", "qk_ln", "attn_uses_sequence_id"):
        attention.only(name, False)
    for name in ("attn_pdrop", "clip_qkv", "softmax_scale"):
        attention.raw(name)
    # transformers draws the slopes for 8 whatever alibi_bias_max says; MosaicML's own code obeys it.
    attention.finish(_OF_ANY_CONFIG | {"alibi_bias_max", "attn_impl"})
    return attention


def _optional(keys: Keys, name: str) -> float | None:
    return None if keys.raw(name) is None else keys.number(name)


def _rows(card: Card) -> Sequence[Row]:
    theirs, ours = "transformer.blocks.{i}", "decoder.blocks.{i}"
    return (
        Row("transformer.wte", "embed"),
        Row(f"{theirs}.norm_1", f"{ours}.attn_norm"),
        Row(f"{theirs}.attn.Wqkv", tuple(f"{ours}.attn.{p}" for p in "qkv"), Split()),
        Row(f"{theirs}.attn.out_proj", f"{ours}.attn.o"),
        Row(f"{theirs}.norm_2", f"{ours}.mlp_norm"),
        Row(f"{theirs}.ffn.up_proj", f"{ours}.mlp.up"),
        Row(f"{theirs}.ffn.down_proj", f"{ours}.mlp.down"),
        Row("transformer.norm_f", "decoder.final_norm"),
        Row("lm_head", "head.matrix"),
    )


# transformers wrote the nested section as a whole config, with the settings that any config had.
_OF_ANY_CONFIG = frozenset(
    {
        "add_cross_attention",
        "bad_words_ids",
        "begin_suppress_tokens",
        "cross_attention_hidden_size",
        "decoder_start_token_id",
        "diversity_penalty",
        "do_sample",
        "dtype",
        "early_stopping",
        "encoder_no_repeat_ngram_size",
        "exponential_decay_length_penalty",
        "finetuning_task",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "length_penalty",
        "max_length",
        "min_length",
        "no_repeat_ngram_size",
        "num_beam_groups",
        "num_beams",
        "num_return_sequences",
        "output_scores",
        "pruned_heads",
        "remove_invalid_values",
        "repetition_penalty",
        "return_dict_in_generate",
        "suppress_tokens",
        "temperature",
        "tf_legacy_loss",
        "tie_encoder_decoder",
        "tie_word_embeddings",
        "top_k",
        "top_p",
        "torch_dtype",
        "torchscript",
        "typical_p",
        "use_bfloat16",
    }
)


def _config(card: Card) -> dict[str, Any] | None:
    attention, norm = card.attention, card.norm
    if not isinstance(attention, MultiHead) or not isinstance(norm, LayerNorm) or not isinstance(card.position, ALiBi):
        return None
    return {
        "architectures": ["MptForCausalLM"],
        "vocab_size": card.vocab_size,
        "d_model": card.d_model,
        "n_layers": card.n_layers,
        "n_heads": attention.n_heads,
        "expansion_ratio": 4,
        "max_seq_len": card.context,
        "layer_norm_epsilon": norm.eps,
        "no_bias": True,
        "emb_pdrop": card.dropout.embedding,
        "resid_pdrop": card.dropout.residual,
        "attn_config": {
            "alibi": True,
            # transformers takes a whole number here and refuses 0.0.
            "attn_pdrop": card.dropout.attention or 0,
            "clip_qkv": attention.clip,
            "softmax_scale": attention.scale,
        },
    }


FAMILY = Family(
    card=_card,
    config=_config,
    rows=_rows,
    prefix="transformer.",
    irrelevant=frozenset(
        {
            # transformers makes the MLP 4 d_model wide whatever this says, and a file of another width is refused.
            "expansion_ratio",
            "init_config",
            "init_device",
            # With ALiBi there is no table.
            "learned_pos_emb",
            "tokenizer_name",
            "verbose",
        }
    ),
)
