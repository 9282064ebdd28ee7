"""Cases about what a model is trained on: labels, borders, padding, and where a run goes on."""

from __future__ import annotations

import json
from itertools import islice

import numpy as np
import torch
from tests.cases.small import built, card
from tests.data_room.made import BARE, PLAIN, corpus, numbered

from scantling.data import Batch, Seq2Seq, batches, one_pass
from scantling.data.corpus import Marks


def test_labels_are_the_next_tokens() -> None:
    """TRAIN-05: 1, 2, 3, ... : the label of each token is that token plus one, in every way of making rows."""
    for mode in ("packed", "padded", "concatenated"):
        (batch,) = one_pass(corpus([list(range(1, 9))], BARE).train, "causal", 1, 8, mode)
        assert batch.ids.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8]]
        assert batch.labels.tolist() == [[2, 3, 4, 5, 6, 7, 8, -100]]


def test_the_decoder_reads_what_it_is_judged_on_one_step_late() -> None:
    """TRAIN-06: labels [7, 8, 9, 1] and the start token 0: [0, 7, 8, 9] is read, and 4 tokens are judged."""
    pair = corpus([[5, 6, 7, 8, 9]], Marks(after=(1,), eos=1), kind="pairs", firsts=[2])
    (batch,) = one_pass(pair.train, Seq2Seq(start_id=0), 1, 4, "padded")
    assert batch.decoder_ids is not None
    assert batch.decoder_ids.tolist() == [[0, 7, 8, 9]]
    assert batch.labels.tolist() == [[7, 8, 9, 1]]
    assert batch.scored == 4


def test_an_end_that_is_also_padding_is_learned() -> None:
    """TRAIN-07: rows [5, 6, E] and [5, 6, 7, 8, E] where padding is E, too: E is judged at the end of each text."""
    marks = Marks(eos=2, pad=2)
    (batch,) = one_pass(corpus([[5, 6], [5, 6, 7, 8]], marks).train, "causal", 2, 5, "padded")
    assert batch.ids.tolist() == [[5, 6, 2, 2, 2], [5, 6, 7, 8, 2]]
    assert batch.labels.tolist() == [[6, 2, -100, -100, -100], [6, 7, 8, 2, -100]]
    pairs = corpus([[4, 5, 6], [4, 5, 6, 7, 8]], marks, kind="pairs", firsts=[1, 1])
    (both,) = one_pass(pairs.train, "seq2seq", 2, 5, "padded")
    assert both.labels.tolist() == [[5, 6, 2, -100, -100], [5, 6, 7, 8, 2]]


def test_a_prompt_has_no_labels() -> None:
    """TRAIN-08: a prompt of 4 tokens and an answer of 3, where 0 is a token as any other: 3 are judged."""
    talk = [[5, 0, 7, 9, 0, 8, 1]]
    chat = corpus(talk, BARE, kind="chat", spoken=[[False] * 4 + [True] * 3])
    pair = corpus(talk, BARE, kind="pairs", firsts=[4])
    for data in (chat, pair):
        (batch,) = one_pass(data.train, "causal", 1, 7)
        assert batch.labels.tolist() == [[-100, -100, -100, 0, 8, 1, -100]]


def test_conversations_whose_prompts_are_judged_are_noted() -> None:
    """TRAIN-08: a mask that is the assistant's at every token is said before a run; one message of theirs is enough."""
    talk = [[5, 0, 7, 9, 0, 8, 1]] * 3
    every = corpus(talk, BARE, kind="chat", spoken=[[True] * 7] * 3)
    (note,) = every.notes
    assert note.startswith("every token of the first 3 conversations is judged as the assistant's, prompts included")
    assert corpus(talk, BARE, kind="chat", spoken=[[False] * 4 + [True] * 3, [True] * 7, [True] * 7]).notes == ()


def test_a_run_goes_on_where_it_stopped_in_an_epoch() -> None:
    """TRAIN-09: 3 epochs of 25 batches, stopped after 40: the rest is the same, and is not epoch 0 again."""
    data = corpus(numbered(*[4] * 50), BARE)
    whole = list(islice(batches(data, "causal", 2, 4, "padded", 7), 75))
    assert [b.cursor["epoch"] for b in whole] == [0] * 24 + [1] * 25 + [2] * 25 + [3]
    stopped = json.loads(json.dumps(whole[39].cursor))
    rest = list(islice(batches(data, "causal", 2, 4, "padded", 7, stopped), 35))
    assert all(np.array_equal(a.ids, b.ids) for a, b in zip(whole[40:], rest, strict=True))
    assert sum(b.tokens for b in whole[40:]) == sum(b.tokens for b in rest) == 35 * 8
    assert not any(np.array_equal(a.ids, b.ids) for a, b in zip(whole[15:25], rest[:10], strict=True))


def shared(batch: Batch, lm: object) -> float:
    """The sum of the losses of a packed batch, by the model's own masks."""
    numbers = np.where(batch.attention_mask, batch.document_ids, -1)
    logits = lm.logits(batch.ids, document_ids=numbers)  # type: ignore[attr-defined]
    labels = torch.from_numpy(batch.labels)
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"))


def test_a_document_does_not_predict_the_next_one() -> None:
    """MASK-08: documents of 6 and 5 tokens with their ends in one row: 9 judged, and the loss of each alone."""
    lm = built(card())
    for marks, inner in ((PLAIN, (5, 4)), (BARE, (6, 5))):
        documents = numbered(*inner)
        (batch,) = one_pass(corpus(documents, marks).train, "causal", 1, 11)
        assert batch.scored == 9
        border = batch.labels[0, len(documents[0]) - 1]
        assert border == (-100 if marks is BARE else marks.eos)
        alone = 0.0
        for document in documents:
            ids = torch.tensor([[*document, *marks.ends]])
            log_p = lm.logits(ids[:, :-1]).log_softmax(-1)
            alone -= float(log_p.gather(-1, ids[:, 1:, None]).sum())
        assert abs(shared(batch, lm) - alone) < 1e-4


def test_a_row_that_is_cut_into_shards_keeps_its_targets() -> None:
    """TRAIN-15: ids 1..8 in two shards have the targets [2, 3, 4, 5] and [6, 7, 8, none]: 7 are judged, and not 6."""
    (batch,) = one_pass(corpus([list(range(1, 9))], BARE).train, "causal", 1, 8)
    shards = np.split(batch.labels[0], 2)
    assert [shard.tolist() for shard in shards] == [[2, 3, 4, 5], [6, 7, 8, -100]]
    assert batch.scored == 7
