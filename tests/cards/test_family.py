"""What the family of a card rules out, and bad input to a model of each family."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from msgspec.structs import replace as changed
from tests.conftest import GOLDEN

import scantling as sc
from scantling.cards.read import from_dict
from scantling.cards.schema import Head

TINY = GOLDEN / "tiny"
RELATIVE = {"kind": "relative", "buckets": 8, "max_distance": 16}
ROPE = {"kind": "rope", "theta": 10000.0}


def card(**sections: Any) -> sc.Card:
    base = {
        "name": "x",
        "family": "encoder-decoder",
        "n_layers": 2,
        "d_model": 16,
        "vocab_size": 30,
        "context": 32,
        "attention": {"kind": "multi_head", "n_heads": 4},
        "position": ROPE,
        "norm": {"kind": "rmsnorm", "eps": 1e-5},
        "mlp": {"kind": "plain", "act": "relu"},
        "tied": True,
    }
    return from_dict(base | sections, "here")


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"pattern": [{"attention": {"window": 4}}], "decoder": {"attention": {"n_heads": 2}}},
            "decoder.attention is 'a section': the pattern has attention of its own for every layer",
        ),
        (
            {"pattern": [{"times": 2, "mlp": {"d_ff": 20}}, {}], "encoder": {"mlp": {"d_ff": 44}}},
            "encoder.mlp is 'a section': the pattern has mlp of its own for every layer",
        ),
        (
            {
                "position": RELATIVE,
                "pattern": [{"attention": {"window": 4}}, {}],
                "decoder": {"attention": {"n_heads": 2, "d_head": 4}},
            },
            "all layers share one table",
        ),
        (
            {"position": {"kind": "learned", "offset": 2, "pad_id": 1}},
            "position.pad_id is 1: it is defined for a card of family encoder",
        ),
        (
            {"family": "decoder", "position": {"kind": "learned", "offset": 2, "pad_id": 1}},
            "cannot be counted again",
        ),
    ],
)
def test_what_would_have_no_effect_or_a_wrong_one_is_refused(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(sc.ScantlingInputError, match=message):
        card(**sections)


def test_a_side_counts_where_the_pattern_says_nothing() -> None:
    parts = sc.assemble(card(pattern=[{"mlp": {"d_ff": 20}}, {}], decoder={"mlp": {"d_ff": 44}}))
    assert parts.encoder is not None
    assert parts.decoder is not None
    widths = [
        [block.children()["mlp"].children()["up"].weights()["weight"][0] for block in stack.blocks]  # type: ignore[union-attr]
        for stack in (parts.encoder, parts.decoder)
    ]
    assert widths == [[20, 64], [20, 44]]


def test_a_stack_whose_heads_differ_has_its_own_table() -> None:
    lm = sc.new(card(position=RELATIVE, decoder={"attention": {"n_heads": 2, "d_head": 4}}))
    assert lm.net.state_dict()["decoder.position.table.weight"].shape == (8, 2)
    assert lm.logits([[1, 2, 3]], decoder_ids=[[1, 2]]).shape == (1, 2, 30)


def test_bad_labels_get_one_sentence() -> None:
    for name in ("bert", "t5", "llama-gqa"):
        lm = sc.load(TINY / name)
        for labels, message in (
            ([[1.7, 2.2]], "labels are torch.float32; integers are needed"),
            (torch.tensor([[True, False]]), "labels are torch.bool"),
            (torch.tensor(3), r"labels have shape \[\]"),
            ([], r"labels have shape \[1, 0\]"),
            ([[[1, 2]]], r"labels have shape \[1, 1, 2\]"),
        ):
            with pytest.raises(sc.ScantlingInputError, match=message):
                lm.loss([[1, 2]], labels)


def test_bad_positions_and_rows_of_padding_get_one_sentence() -> None:
    bert = sc.load(TINY / "bert")
    with pytest.raises(sc.ScantlingInputError, match=r"position_ids are torch\.bool"):
        bert.logits([[1, 2]], position_ids=[[True, False]])
    mean = sc.new(changed(bert.card, head=Head(kind="embedding", pool="mean"), tied=False))
    with pytest.raises(sc.ScantlingInputError, match="a row is padding only"):
        mean.logits([[1, 2], [3, 4]], [[0, 0], [1, 1]])
    assert not bool(mean.logits([[1, 2], [3, 4]], [[0, 1], [1, 1]]).isnan().any())


def test_a_stack_without_layers_may_have_sections_of_its_own() -> None:
    """They are without effect, as those of a card without layers are."""
    from tests.test_laws import BASE

    side = {"n_layers": 0, "mlp": {"kind": "plain", "act": "relu", "d_ff": 8}}
    changes = {"family": "encoder-decoder", "encoder": side, "pattern": [{}, {"position": {"kind": "none"}}]}
    model = sc.assemble(from_dict({**BASE, **changes}, "card"))
    assert model.encoder is not None
    assert len(model.encoder.blocks) == 0
