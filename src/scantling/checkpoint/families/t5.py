"""T5 (arXiv:1910.10683), T5 1.1 and Flan-T5: relative positions per bucket, RMSNorm, no biases, unscaled scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scantling.cards import Card
from scantling.cards.schema import Gated, MoE, MultiHead, Relative
from scantling.checkpoint.config_keys import ACTIVATIONS, Keys, near
from scantling.checkpoint.config_write import FIRST_ACTIVATIONS
from scantling.checkpoint.families.seq2seq import GENERATION, architecture
from scantling.checkpoint.family import Family
from scantling.checkpoint.header import shown
from scantling.checkpoint.names import Row
from scantling.errors import ScantlingInputError


def _card(keys: Keys) -> dict[str, Any]:
    d_model, layers = keys.size("d_model", 512), keys.size("num_layers", 6, least=0)
    decoder_layers = keys.size("num_decoder_layers", layers, least=0)
    saved_from = architecture(keys, "T5ForConditionalGeneration", "T5WithLMHeadModel", "T5Model")
    tied = _tied(keys)
    if not tied and saved_from == "T5Model":
        raise ScantlingInputError(
            f"{keys.where}: architectures is ['T5Model'] and the head is untied, so the weights have no head; "
            "a T5ForConditionalGeneration is needed"
        )
    dropout = keys.number("dropout_rate", 0.1)
    sections: dict[str, Any] = {
        "n_layers": layers,
        "d_model": d_model,
        "vocab_size": keys.size("vocab_size", 32128),
        # Relative positions have no limit; 512 is the length of the pre-training.
        "context": keys.size("n_positions", 512),
        "attention": {
            "kind": "multi_head",
            "n_heads": keys.size("num_heads", 8),
            "d_head": keys.size("d_kv", 64),
            "scale": 1.0,
        },
        "position": {
            "kind": "relative",
            "buckets": keys.size("relative_attention_num_buckets", 32),
            "max_distance": keys.size("relative_attention_max_distance", 128),
        },
        "norm": {"kind": "rmsnorm", "eps": keys.number("layer_norm_epsilon", 1e-6)},
        "mlp": {**_feed_forward(keys), "d_ff": keys.size("d_ff", 2048)},
        "tied": tied,
        "dropout": {"embedding": dropout, "attention": dropout, "residual": dropout},
    }
    if tied:
        sections["head"] = {"scale": d_model**-0.5}
    return sections | ({} if decoder_layers == layers else {"decoder": {"n_layers": decoder_layers}})


def _tied(keys: Keys) -> bool:
    """Whether the head is the token table, whose scores are then scaled.

    Configs of transformers 5 say tie_word_embeddings of every T5 and keep the truth in scale_decoder_outputs.
    """
    tied = keys.flag("tie_word_embeddings", True)
    scaled = keys.flag("scale_decoder_outputs", tied)
    if scaled and not tied:
        raise ScantlingInputError(
            f"{keys.where}: scale_decoder_outputs is True and tie_word_embeddings is False; only a tied head is scaled"
        )
    return scaled


def _feed_forward(keys: Keys) -> dict[str, Any]:
    name = keys.raw("feed_forward_proj", "relu")
    gated = isinstance(name, str) and name.startswith("gated-")
    act = "gelu_new" if name == "gated-gelu" else name.removeprefix("gated-") if isinstance(name, str) else name
    if not isinstance(act, str) or act not in ACTIVATIONS:
        known = f"{', '.join(ACTIVATIONS)}, each also with gated- before it"
        raise ScantlingInputError(
            f"{keys.where}: feed_forward_proj is {shown(name)}; known: {known}{near(act, ACTIVATIONS)}"
        )
    keys.only("dense_act_fn", act)
    keys.only("is_gated_act", gated)
    return {"kind": "gated" if gated else "plain", "act": ACTIVATIONS[act]}


def _rows(card: Card) -> Sequence[Row]:
    gated = isinstance(card.mlp, Gated)
    pieces = {
        "attn": {f"SelfAttention.{p}": p for p in "qkvo"},
        "cross": {f"EncDecAttention.{p}": p for p in "qkvo"},
        "mlp": {
            **({"DenseReluDense.wi_0": "gate", "DenseReluDense.wi_1": "up"} if gated else {"DenseReluDense.wi": "up"}),
            "DenseReluDense.wo": "down",
        },
    }
    rows = [Row("shared", "embed"), Row("lm_head", "head.matrix")]
    for stack, sublayers in (("encoder", ("attn", "mlp")), ("decoder", ("attn", "cross", "mlp"))):
        first = f"{stack}.block.0.layer.0.SelfAttention"
        rows.append(Row(f"{first}.relative_attention_bias", f"{stack}.position.table"))
        rows.append(Row(f"{stack}.final_layer_norm", f"{stack}.final_norm"))
        for n, sublayer in enumerate(sublayers):
            theirs, ours = f"{stack}.block.{{i}}.layer.{n}", f"{stack}.blocks.{{i}}.{sublayer}"
            rows.append(Row(f"{theirs}.layer_norm", f"{ours}_norm"))
            rows += [Row(f"{theirs}.{name}", f"{ours}.{part}") for name, part in pieces[sublayer].items()]
    return rows


def _config(card: Card) -> dict[str, Any] | None:
    attention, position, mlp, decoder = card.attention, card.position, card.mlp, card.decoder
    if not isinstance(attention, MultiHead) or not isinstance(position, Relative) or isinstance(mlp, MoE):
        return None
    act = FIRST_ACTIVATIONS[mlp.act]
    gated = "gated-gelu" if act == "gelu_new" else f"gated-{act}"
    return {
        "architectures": ["T5ForConditionalGeneration"],
        "is_encoder_decoder": True,
        "vocab_size": card.vocab_size,
        "d_model": card.d_model,
        "num_layers": card.n_layers,
        "num_decoder_layers": card.n_layers if decoder is None or decoder.n_layers is None else decoder.n_layers,
        "num_heads": attention.n_heads,
        "d_kv": attention.d_head,
        "d_ff": mlp.d_ff,
        "feed_forward_proj": gated if isinstance(mlp, Gated) else act,
        "relative_attention_num_buckets": position.buckets,
        "relative_attention_max_distance": position.max_distance,
        "layer_norm_epsilon": card.norm.eps,
        "n_positions": card.context,
        "dropout_rate": card.dropout.residual,
    }


FAMILY = Family(
    card=_card,
    config=_config,
    rows=_rows,
    prefix="",
    stacks="encoder-decoder",
    copies=("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"),
    ignored=(r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",),
    irrelevant=GENERATION | {"classifier_dropout", "initializer_factor"},
)
