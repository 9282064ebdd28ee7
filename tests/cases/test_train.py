"""Cases about the loss that a model is trained on."""

from __future__ import annotations

import pytest
import torch
from tests.cases.small import built, card, tokens

import scantling as sc


def test_labels_are_shifted_once() -> None:
    """TRAIN-05: the loss is that of logits[:-1] against ids[1:]; shifted by the caller, too, it is another one."""
    lm, ids = built(card()), tokens(9, batch=2)
    log_p = lm.logits(ids).log_softmax(-1)
    by_offset = [
        float(-log_p[:, : 9 - offset].gather(-1, ids[:, offset:, None]).mean()) if offset else 0.0 for offset in (1, 2)
    ]
    assert float(lm.loss(ids, ids)) == pytest.approx(by_offset[0], abs=1e-6)
    assert abs(by_offset[0] - by_offset[1]) > 0.01
    crossed = torch.nn.functional.cross_entropy(lm.logits(ids).flatten(0, 1)[:-1], ids.flatten()[1:])
    assert abs(float(lm.loss(ids, ids)) - float(crossed)) > 1e-3


@pytest.mark.parametrize("prompt", [0, 4])
def test_a_prompt_is_left_out_of_the_loss(prompt: int) -> None:
    """TRAIN-08: 4 tokens of prompt and 3 of answer, where 0 is a token as any other: 3 are judged."""
    lm = built(card())
    ids = torch.tensor([[5, 0, 7, 9, 0, 8, 1]])
    labels = ids.clone()
    labels[:, :prompt] = -100
    first = max(prompt, 1)
    each = -lm.logits(ids).log_softmax(-1)[0, range(first - 1, 6), ids[0, first:]]
    assert each.numel() == (3 if prompt else 6)
    assert float(lm.loss(ids, labels)) == pytest.approx(float(each.mean()), abs=1e-6)


def test_a_prompt_whose_labels_are_real_ids_is_warned_of() -> None:
    """TRAIN-08: 0 is a token as any other, so a prompt that is filled with it is judged: 6 tokens and not 3."""
    lm = built(card())
    ids = torch.tensor([[5, 0, 7, 9, 0, 8, 1]])
    filled = torch.tensor([[0, 0, 0, 0, 0, 8, 1]])
    with pytest.warns(UserWarning, match=r"the first 5 labels of row 0 are all 0, .* has the label -100"):
        loss = lm.loss(ids, filled)
    each = -lm.logits(ids).log_softmax(-1)[0, range(6), filled[0, 1:]]
    assert float(loss) == pytest.approx(float(each.mean()), abs=1e-6)
    # A text that repeats a token is no such prompt, and warnings are errors here.
    repeated = torch.tensor([[5, 5, 5, 2, 3]])
    lm.loss(repeated, repeated)


def test_an_ignored_label_is_not_in_the_mean() -> None:
    """TRAIN-13: equal to the framework's own cross-entropy, labels that are not judged among them."""
    lm, ids = built(card()), tokens(12, batch=3)
    labels = ids.masked_fill(torch.arange(36).view(3, 12) % 5 == 0, -100)
    labels[1] = -100
    wanted = torch.nn.functional.cross_entropy(lm.logits(ids)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    assert float(lm.loss(ids, labels)) == pytest.approx(float(wanted), abs=1e-6)
    with pytest.raises(sc.ScantlingInputError, match="no label is left"):
        lm.loss(ids, torch.full_like(ids, -100))
