"""Packed rows: several documents in one row give what was recorded of each alone, and bad numbers are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.conftest import GOLDEN, stacks_of
from tests.test_laws import CARDS, LENGTHS, check_packing, ids_of, run, strong

import scantling as sc
from scantling.cards.schema import DynamicScaling, LongRopeScaling

CLOSE = {"atol": 5e-5, "rtol": 1e-4}
TINY = sorted(path.name for path in (GOLDEN / "tiny").iterdir())
OF_TOKENS = [name for name in TINY if stacks_of(name) == "decoder"]
TWO_STACKS = [name for name in TINY if stacks_of(name) == "encoder-decoder"]


def packed_of(rows: torch.Tensor, real: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The real tokens of all rows (B, T) in one row, and the number of each one's document."""
    numbers = torch.arange(rows.shape[0])[:, None].expand_as(rows)
    return rows[real][None], numbers[real][None]


@pytest.mark.parametrize("kernel", ["fused", "reference"])
@pytest.mark.parametrize("name", OF_TOKENS)
def test_a_pack_has_the_recorded_logits(name: str, kernel: str) -> None:
    folder = GOLDEN / "tiny" / name
    lm, io = sc.load(folder), load_file(folder / "io.safetensors")
    real = io["attention_mask"].bool()
    if isinstance(getattr(lm.card.position, "scaling", None), DynamicScaling | LongRopeScaling):
        # By design angles follow the longest document of a pass: only those of one length have those they have alone.
        whole = real.all(-1)
        ids, real, wanted = io["input_ids"][whole], real[whole], io["logits"][whole]
    else:
        ids, wanted = io["input_ids"], io["logits_positions_from_mask"]
    row, numbers = packed_of(ids, real)
    torch.testing.assert_close(lm.logits(row, document_ids=numbers, kernel=kernel)[0], wanted[real], **CLOSE)


@pytest.mark.parametrize("name", TWO_STACKS)
def test_a_target_reads_its_own_source(name: str) -> None:
    folder = GOLDEN / "tiny" / name
    lm, io = sc.load(folder), load_file(folder / "io.safetensors")
    read, real = io["attention_mask"].bool(), io["decoder_attention_mask"].bool()
    source, sources = packed_of(io["input_ids"], read)
    target, targets = packed_of(io["decoder_input_ids"], real)
    logits = lm.logits(source, document_ids=sources, decoder_ids=target, decoder_document_ids=targets)
    for row in range(len(read)):
        pair = io["input_ids"][row, read[row]], io["decoder_input_ids"][row, real[row]]
        alone = lm.logits(pair[0], decoder_ids=pair[1])
        torch.testing.assert_close(logits[targets == row], alone[0], atol=2e-4, rtol=1e-4)


def test_without_numbers_the_documents_read_each_other() -> None:
    """The law can fail: the same rows, taken for one document each."""
    card = CARDS["llama"]
    net, ids = strong(card), ids_of(card, 3, 9)
    first = LENGTHS[0][0]
    documents = torch.tensor([[0] * first + [1] * (9 - first)] * 3)
    apart, together = run(net, ids, documents=documents), run(net, ids)
    torch.testing.assert_close(apart[:, :first], together[:, :first], **CLOSE)
    assert not torch.allclose(apart[:, first:], together[:, first:], atol=0.1)


@pytest.mark.parametrize("fault", ["positions go on", "a neighbour is seen"])
def test_the_law_sees_a_fault(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from scantling.tensor.mask import Packed

    if fault == "positions go on":
        monkeypatch.setattr(Packed, "positions", property(lambda packed: torch.arange(9).expand_as(packed.starts)))
    else:
        right = Packed.of
        shifted = classmethod(lambda cls, documents: right(documents.roll(1, -1)))
        monkeypatch.setattr(Packed, "of", shifted)
    # Rotations tell distances only, so positions that go on show where they are learned.
    with pytest.raises(AssertionError):
        check_packing(CARDS["gpt2"])


def test_the_loss_stops_at_the_border_of_a_document() -> None:
    """MASK-08: documents of 6 and 5 tokens have 5 + 4 targets; the loss is that of both alone, weighted by targets."""
    lm = sc.load(GOLDEN / "tiny" / "llama-gqa")
    one, two = ids_of(lm.card, 1, 6, seed=1), ids_of(lm.card, 1, 5, seed=2)
    row = torch.cat((one, two, torch.zeros(1, 3, dtype=torch.int64)), 1)
    numbers = torch.tensor([[0] * 6 + [1] * 5 + [-1] * 3])
    alone = [float(lm.loss(document, document)) for document in (one, two)]
    packed = float(lm.loss(row, row, document_ids=numbers))
    assert packed == pytest.approx((5 * alone[0] + 4 * alone[1]) / 9, abs=1e-6)
    assert packed != pytest.approx(float(lm.loss(row[:, :11], row[:, :11])), abs=1e-3)


def test_another_first_document_does_not_move_the_second() -> None:
    """MASK-06."""
    lm = sc.load(GOLDEN / "tiny" / "llama-gqa")
    second = ids_of(lm.card, 1, 5, seed=2)
    numbers = [0] * 6 + [1] * 5
    moved = [lm.logits(torch.cat((ids_of(lm.card, 1, 6, seed), second), 1), document_ids=numbers) for seed in (3, 4)]
    assert torch.equal(moved[0][:, 6:], moved[1][:, 6:])
    assert not torch.equal(moved[0][:, :6], moved[1][:, :6])


def test_a_pack_may_be_longer_than_the_table_of_positions() -> None:
    lm = sc.load(GOLDEN / "tiny" / "gpt2")
    limit = lm.card.context
    ids = ids_of(lm.card, 1, 2 * limit)
    numbers = [0] * limit + [1] * limit
    packed = lm.logits(ids, document_ids=numbers)
    torch.testing.assert_close(packed[:, limit:], lm.logits(ids[:, limit:]), **CLOSE)
    with pytest.raises(sc.ScantlingInputError, match=rf"a document of {limit + 1} tokens, and the model has"):
        lm.logits(ids, document_ids=[0] * (limit + 1) + [1] * (limit - 1))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"document_ids": [0, 0, 1]}, r"document_ids are torch.int64 of shape \[1, 3\]; integers of shape \[1, 5\]"),
        ({"document_ids": [0.0] * 5}, r"document_ids are torch.float32 .* integers of shape \[1, 5\]"),
        ({"document_ids": [0, 1, 1, 0, 2]}, "a document of row 0 stands in two pieces"),
        ({"document_ids": [0] * 5, "attention_mask": [1] * 5}, "attention_mask and document_ids are given"),
        ({"decoder_document_ids": [0] * 5}, "decoder_document_ids go with an encoder-decoder"),
    ],
)
def test_numbers_that_make_no_sense(given: dict[str, Any], message: str) -> None:
    lm = sc.load(GOLDEN / "tiny" / "llama-gqa")
    with pytest.raises(sc.ScantlingInputError, match=message):
        lm.logits([[1, 2, 3, 4, 5]], **given)


def test_padding_may_come_in_two_pieces() -> None:
    lm: Any = sc.load(GOLDEN / "tiny" / "llama-gqa")
    logits = lm.logits([[0, 5, 6, 7, 0]], document_ids=[[-1, 3, 3, 3, -1]])
    torch.testing.assert_close(logits[:, 1:4], lm.logits([[5, 6, 7]]), **CLOSE)


def test_two_stacks_need_the_numbers_of_both() -> None:
    lm = sc.load(GOLDEN / "tiny" / TWO_STACKS[0])
    with pytest.raises(sc.ScantlingInputError, match="give both"):
        lm.logits([[1, 2]], decoder_ids=[[1, 2]], document_ids=[[0, 1]])
    with pytest.raises(sc.ScantlingInputError, match="one pair per row"):
        lm.loss([[1, 2]], [[1, 2]], document_ids=[[0, 1]])


def test_a_text_that_is_pooled_has_a_row_of_its_own() -> None:
    lm = sc.new(next(card for card in CARDS.values() if card.head.kind == "sequence"))
    with pytest.raises(sc.ScantlingInputError, match="each text needs its own row"):
        lm.logits([[1, 2, 3]], document_ids=[[0, 0, 1]])
