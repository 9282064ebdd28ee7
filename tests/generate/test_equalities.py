"""The ways of writing one text, over every recorded model: each gives the same, or is refused by the model's name.

What decoders give in chunks, alone, in blocks, over rings and with drafts is held against the recorded numbers in
test_caches.py, test_batching.py and test_speculative.py; here is what the other stacks do, and the plain pass.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.conftest import GOLDEN, stacks_of
from tests.test_golden_seq2seq import close

import scantling as sc
from scantling.cards.schema import Relative
from scantling.generate.batching import Engine
from scantling.generate.beam import Beams, beam_rows, beam_search
from scantling.generate.engine import Options
from scantling.generate.keeping import Keeping, reaches
from scantling.generate.session import Session, Source, follows_length
from scantling.parts.part import Workload

NAMES = sorted(p.name for p in (GOLDEN / "tiny").iterdir())
DECODERS, PAIRS, ENCODERS = (
    [name for name in NAMES if stacks_of(name) == stacks] for stacks in ("decoder", "encoder-decoder", "encoder")
)
NEW = 20


def loaded(name: str) -> tuple[sc.Model, dict[str, Any]]:
    folder = GOLDEN / "tiny" / name
    return sc.load(folder), load_file(folder / "io.safetensors")


def test_every_recorded_model_is_of_one_kind() -> None:
    assert sorted([*DECODERS, *PAIRS, *ENCODERS]) == NAMES


@pytest.mark.parametrize("name", [*DECODERS, *PAIRS])
def test_over_a_cache_and_without_one(name: str) -> None:
    """New positions by a whole pass over everything before them, rows padded as they were recorded."""
    lm, io = loaded(name)
    ids, mask, rows = io["gen_input_ids"], io["gen_attention_mask"], io["expected_ids"]
    differ = []
    for i in (0, 1, 2, 5, 9, 14, NEW - 1):
        if lm.parts.two_stacks:
            whole = lm.logits(ids, mask, decoder_ids=rows[:, : 1 + i])[:, -1]
        else:
            real = torch.cat([mask, mask.new_ones(len(mask), i)], 1)
            at = (real.cumsum(-1) - 1).clamp(min=0)
            whole = lm.logits(rows[:, : ids.shape[1] + i], real, at)[:, -1]
        if follows_length(lm):
            differ.append(float((whole - io["gen_logits"][:, i]).abs().max()))
            continue
        torch.testing.assert_close(whole, io["gen_logits"][:, i], **close(lm))
    if follows_length(lm):
        # Keys that were kept have the base of an earlier length, and a whole pass that of its own.
        assert name == "llama-rope-dynamic"
        assert differ[0] < 5e-5 < max(differ)


@pytest.mark.parametrize("name", DECODERS)
def test_rings_of_recorded_models_go_round(name: str) -> None:
    """What is held against the full cache is a cache that really is smaller."""
    lm, io = loaded(name)
    length = io["gen_input_ids"].shape[1] + NEW
    ring, full = (Keeping(kind).allocate(lm, Workload(batch=1, tokens=length)).nbytes for kind in ("ring", "full"))
    windows = [reach for reach in reaches(lm.parts).values() if reach is not None]
    assert (ring < full) == bool(windows)
    assert all(window < length for window in windows)


@pytest.mark.parametrize("kind", ["full", "ring"])
@pytest.mark.parametrize("chunk", [1, 4])
@pytest.mark.parametrize("name", PAIRS)
def test_a_target_in_chunks_is_the_whole_target(name: str, chunk: int, kind: str) -> None:
    lm, io = loaded(name)
    source = Source(io["gen_input_ids"], io["gen_attention_mask"].bool())
    with torch.inference_mode():
        session = Session(lm, len(source.ids), NEW, source=source, keeping=Keeping(kind))
        found = session.prefill(io["expected_ids"][:, :11], chunk=chunk)
        torch.testing.assert_close(found, io["gen_logits"][:, 10], **close(lm))
        torch.testing.assert_close(session.step(io["expected_ids"][:, 11]), io["gen_logits"][:, 11], **close(lm))


@pytest.mark.parametrize("name", PAIRS)
def test_sources_of_unequal_lengths(name: str) -> None:
    """Padded they give what each gives alone, token for token: left, too, where positions are relative."""
    lm, _ = loaded(name)
    sources = [[5, 9, 11, 7, 30, 8], [12, 6], [3, 3, 40, 41]]
    alone = [lm.generate([source], 12, ignore_eos=True)[0] for source in sources]
    for left in (False, True) if isinstance(lm.card.position, Relative) else (False,):
        padding = [[1] * (6 - len(source)) for source in sources]
        rows = [(pad + s) if left else (s + pad) for s, pad in zip(sources, padding, strict=True)]
        real = [[0] * len(pad) + [1] * len(s) for s, pad in zip(sources, padding, strict=True)]
        mask = real if left else [row[::-1] for row in real]
        together = lm.generate(rows, 12, attention_mask=mask, ignore_eos=True)
        assert [row.tolist() for row in together] == [row.tolist() for row in alone]


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("keeping", [Keeping("ring"), Keeping("full", "int8"), Keeping("ring", "int8")], ids=str)
def test_beams_over_every_cache(name: str, keeping: Keeping) -> None:
    """The recorded beams, and sums of log-probabilities that a row has by itself: rows of the source move, too."""
    lm, io = loaded(name)
    ids, mask = io["gen_input_ids"][:1], io["gen_attention_mask"][:1]
    made = beam_search(lm, ids, 10, Beams(3), attention_mask=mask, ignore_eos=True, keeping=keeping)
    rows = beam_rows(lm, ids, made)
    assert keeping.numbers != "plain" or torch.equal(rows, io["beam_ids"])
    for row, found in zip(rows, made.hypotheses, strict=True):
        session = Session(lm, 1, 11, source=Source(ids, mask.bool()), keeping=keeping)
        with torch.inference_mode():
            logs = torch.cat([session.score(token.view(1, 1)) for token in row[:-1]], 1)[0].log_softmax(-1)
        assert found.total == pytest.approx(float(logs.gather(1, row[1:, None]).sum()), abs=2e-4)


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize(
    ("options", "why"),
    [
        (Options(chunk=2), "reads its source both ways"),
    ],
)
def test_what_a_pair_of_stacks_does_not_do_is_said(name: str, options: Options, why: str) -> None:
    lm, _ = loaded(name)
    with pytest.raises(sc.ScantlingInputError, match=f"{lm.card.name}.*{why}"):
        lm.generate([[5, 6, 7]], 4, options=options)


@pytest.mark.parametrize("name", ENCODERS)
def test_an_encoder_writes_no_text(name: str) -> None:
    lm, _ = loaded(name)
    for attempt in (
        lambda: lm.generate("some text", 4),
        lambda: lm.generate([[5, 6, 7]], 4),
        lambda: lm.generate([[5], [6, 7]], 4),
        lambda: Engine(lm),
    ):
        with pytest.raises(sc.ScantlingInputError, match=f"text is written by a decoder.*{lm.card.name} is a card"):
            attempt()
