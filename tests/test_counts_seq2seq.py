"""Encoder-decoders: what independent software counted, and the arithmetic of the 2017 paper."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.conftest import GOLDEN, golden_json

import scantling as sc
from scantling.checkpoint.hf_config import card_of_config
from scantling.numbers.count import count
from scantling.numbers.flops import decode, flops
from scantling.numbers.memory import memory

PARAMS = golden_json("params.json")
PAPER = golden_json("vaswani.json")


def config(name: str) -> Any:
    return json.loads((GOLDEN / "configs" / f"{name}.json").read_text())


@pytest.mark.parametrize("size", ["base", "big"])
def test_the_transformer_of_2017(size: str) -> None:
    wanted, model = PAPER[size], sc.assemble(sc.card(f"transformer-{size}"))
    assert model.params == wanted["total"] == {"base": 63045632, "big": 214171648}[size]
    counted = count(model)
    encoder, decoder = (run.by_part for run in counted.per_layer)
    assert [run.times for run in counted.per_layer] == [6, 6]
    per_layer = wanted["per_encoder_layer"]
    assert encoder == {
        "attention": per_layer["attention"],
        "mlp": per_layer["feed_forward"],
        "norm": per_layer["norms"],
    }
    per_layer = wanted["per_decoder_layer"]
    assert decoder == {
        "attention": per_layer["self_attention"],
        "cross_attention": per_layer["cross_attention"],
        "mlp": per_layer["feed_forward"],
        "norm": per_layer["norms"],
    }
    assert counted.by_part["embedding"] == wanted["shared_embedding"]
    assert "position" not in counted.by_part
    assert "head" not in counted.by_part


def test_the_stacks_of_torch_itself() -> None:
    """torch.nn.Transformer(512, 8, 6, 6, 2048) has shifts in attention and a norm on top of both stacks."""
    from msgspec.structs import replace

    card = sc.card("transformer-base")
    attention = replace(card.attention, bias=["q", "k", "v", "o"])
    model = sc.assemble(replace(card, attention=attention, norm=replace(card.norm, final=True)))
    assert model.encoder is not None
    assert model.decoder is not None
    assert model.encoder.params + model.decoder.params == PAPER["base"]["nn_Transformer_stacks"] == 44140544


def test_t5_1_1_small_keeps_its_own_head() -> None:
    """PAR-10: from a config, the original ties the head of every T5 and counts 60,511,616."""
    small = {"d_ff": 1024, "d_kv": 64, "d_model": 512, "num_layers": 8, "num_decoder_layers": 8, "num_heads": 6}
    base = {"model_type": "t5", "vocab_size": 32128, "feed_forward_proj": "gated-gelu", "is_encoder_decoder": True}
    hub = base | small | {"tie_word_embeddings": False}
    newer = base | small | {"tie_word_embeddings": True, "scale_decoder_outputs": False}
    for data in (hub, newer):
        card = card_of_config(data, "small", "small")
        assert sc.assemble(card).params == 76961152
        assert (card.tied, card.head.scale) == (False, None)
    tied = card_of_config(base | small, "small", "small")
    assert sc.assemble(tied).params == 60511616
    assert tied.head.scale == 512**-0.5


BARE = {"t5-small": "T5Model", "t5-11b": "T5Model", "bart-base": "BartModel", "opus-mt-en-de": "MarianModel"}


@pytest.mark.parametrize("name", BARE)
def test_the_bare_model_has_as_many_parameters(name: str) -> None:
    bare = config(name) | {"architectures": [BARE[name]]}
    assert sc.assemble(card_of_config(bare, name, name)).params == PARAMS[name]["automodel_total"]


def test_per_layer_figures_of_t5_11b() -> None:
    counted = count(sc.assemble(sc.card("t5-11b")))
    assert [run.times for run in counted.per_layer] == [24, 24]
    assert [sum(run.by_part.values()) for run in counted.per_layer] == [201328640, 268438528]
    assert counted.by_part["position"] == PARAMS["t5-11b"]["split_over_layers"]["relative_bias"] == 8192
    assert counted.total == 11307321344


def test_waves_in_a_table_are_counted_and_not_stored() -> None:
    model = sc.assemble(sc.card("opus-mt-en-de"))
    counted = count(model)
    assert counted.by_part["position"] == 2 * 512 * 512
    assert counted.buffers == 58101
    assert not [name for name in model.named_stored if "position" in name]


def test_the_source_is_encoded_once() -> None:
    model = sc.assemble(sc.card("t5-small"))
    one = [decode(model, past, 1, source=100) for past in (1, 2, 3)]
    per_position = 4 * 8 * 64 * 6
    assert one[1] - one[0] == one[2] - one[1] == per_position
    assert decode(model, 1, 3, source=100) == sum(one)
    longer = decode(model, 1, 1, source=101)
    assert longer - one[0] == per_position
    first = flops(model, sc.Workload(tokens=1, source=100)).forward
    # The decoder's first pass sees itself alone; the encoder and the source's keys and values come on top.
    d, inner, d_ff = 512, 512, 2048
    encoder = 6 * 100 * (2 * 4 * d * inner + 2 * 2 * d * d_ff + 4 * 100 * inner)
    cross = 6 * 100 * 2 * 2 * d * inner
    assert first - (one[0] - per_position) == encoder + cross


def test_the_cache_keeps_target_and_source() -> None:
    model = sc.assemble(sc.card("t5-small"))
    m = memory(model, sc.Workload(batch=2, tokens=20, source=50), "float16", "float16")
    per_position = 2 * 6 * 512 * 2
    assert m.kv_per_token == per_position
    assert m.kv == 2 * per_position * (20 + 50)


def test_the_rule_counts_each_stack_by_what_it_reads() -> None:
    model = sc.assemble(sc.card("transformer-base"))
    stacks, table = PAPER["base"]["stacks"], PAPER["base"]["shared_embedding"]
    encoder = 6 * PAPER["base"]["per_encoder_layer"]["total"]
    f = flops(model, sc.Workload(tokens=10, source=30))
    assert f.rule_2n == 2 * (10 * (stacks - encoder + table) + 30 * encoder)
    assert flops(model, sc.Workload(tokens=10)).rule_2n == 2 * 10 * model.params
    assert flops(model, sc.Workload(tokens=1, past=9, source=30)).rule_2n == 2 * (model.params - encoder)
