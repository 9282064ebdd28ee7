"""What of the division among processes needs none: pieces, refusals, predicted memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as relaxed
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.cases.small import LLAMA
from tests.train.small import fresh
from tests.train.test_run import model, settings
from tests.train.test_step import MOE

import scantling as sc
from scantling.cards.read import from_dict
from scantling.cards.schema import Dropout
from scantling.cards.training import Parallel, Training
from scantling.cli.main import _run
from scantling.errors import ScantlingInputError
from scantling.numbers.parallel.assumptions import RESERVED
from scantling.train import division, fits, tensor_ranks
from scantling.train.division import Cut, place, rows_of_a_pass
from scantling.train.ranks import Ranks, _divided


@relaxed(deadline=None)
@given(st.integers(1, 9), st.integers(1, 4), st.integers(1, 5), st.integers(1, 3), st.sampled_from([None, 0, 1]))
def test_pieces_make_the_whole(rows: int, width: int, data: int, tensor: int, dim: int | None) -> None:
    """They are torch's own chunks of chunks, and each value is in one of those that count."""
    shape = (rows * tensor, width * tensor)
    whole = torch.arange(shape[0] * shape[1]).view(shape)
    seen = []
    for rank in range(data * tensor):
        ranks = Ranks(data * tensor, rank, tensor)
        piece = whole[place(Cut(shape, dim), ranks, rank)]
        first = whole if dim is None else whole.chunk(tensor, dim)[ranks.tensor_rank]
        chunks = first.chunk(data, 0)
        wanted = chunks[ranks.data_rank] if ranks.data_rank < len(chunks) else first[:0]
        assert torch.equal(piece, wanted)
        if dim is not None or ranks.tensor_rank == 0:
            seen += piece.flatten().tolist()
    assert sorted(seen) == list(range(whole.numel()))


@pytest.mark.parametrize(
    ("changes", "tensor", "why"),
    [
        ({}, 4, "decoder.blocks.0.attn cannot be divided: 2 KV heads do not divide among 4"),
        ({}, 3, "4 heads do not divide among 3"),
        ({"mlp": {"d_ff": 51}}, 2, "d_ff 51 does not divide among 2"),
        ({"position": {"kind": "alibi"}}, 2, "its shift of the scores is by head"),
        ({"attention": {"qk_norm": {"kind": "rmsnorm", "eps": 1e-5, "over": "width"}}}, 2, "is over all heads"),
        ({"attention": {"qk_norm": {"kind": "rmsnorm", "eps": 1e-5, "over": "each_head"}}}, 2, "gains are by head"),
        ({"attention": {"sinks": True}}, 2, "its sinks are by head"),
        ({"dropout": 0.1}, 2, "dropout of attention weights"),
        ({"mlp": MOE}, 2, "experts are divided by other means"),
    ],
)
def test_what_tensor_ranks_cannot_share_is_refused(changes: dict[str, Any], tensor: int, why: str) -> None:
    with pytest.raises(ScantlingInputError, match=why):
        tensor_ranks.check(fresh(**changes).parts, tensor)


@pytest.mark.parametrize(("name", "why"), [("deepseek-v2-lite", "latent"), ("t5-small", "by head")])
def test_what_a_preset_has_that_tensor_ranks_cannot_share(name: str, why: str) -> None:
    parts = sc.assemble(replace(sc.card(name), dropout=Dropout()))
    with pytest.raises(ScantlingInputError, match=why):
        tensor_ranks.check(parts, 2)


def test_what_tensor_ranks_share() -> None:
    """By outputs q, k, v, gate and up, by inputs o and down, tables by tokens; an odd table stays whole."""
    found = tensor_ranks.dimensions(fresh(tied=True).parts, 2)
    block = {f"attn.{name}": 0 for name in "qkv"} | {"attn.o": 1, "mlp.gate": 0, "mlp.up": 0, "mlp.down": 1}
    blocks = {f"decoder.blocks.{i}.{name}.weight": dim for i in range(2) for name, dim in block.items()}
    assert found == blocks | {"embed.weight": 0}
    assert tensor_ranks.dimensions(fresh(vocab_size=65).parts, 2) == blocks


@pytest.mark.parametrize(
    ("parallel", "size", "why"),
    [
        (Parallel(tensor=3), 4, "layout of 3 ranks or a multiple, and 4 are running"),
        (Parallel(tensor=2), 1, "layout of 2 ranks or a multiple, and 1 is running"),
        (Parallel(sharded=2), 4, "layout of 2 ranks"),
        (Parallel(replicated=2, tensor=2), 4, "replicated ranks hold all weights"),
    ],
)
def test_a_layout_of_other_ranks_is_refused(parallel: Parallel, size: int, why: str) -> None:
    with pytest.raises(ScantlingInputError, match=why):
        _divided(parallel, size)


def test_layouts() -> None:
    assert _divided(Parallel(), 1) == (1, False)
    assert _divided(Parallel(), 4) == (1, False)
    assert _divided(Parallel(tensor=2), 4) == (2, False)
    assert _divided(Parallel(sharded=2, tensor=2), 4) == (2, False)
    assert _divided(Parallel(replicated=4), 4) == (1, True)
    four = [Ranks(4, rank, 2) for rank in range(4)]
    assert [(ranks.data_rank, ranks.tensor_rank) for ranks in four] == [(0, 0), (0, 1), (1, 0), (1, 1)]


@pytest.mark.parametrize(
    ("batch", "accumulation", "data", "rows"), [(3, 2, 1, 3), (16, 1, 2, 8), (16, 2, 4, 8), (4, 6, 3, 4), (6, 4, 3, 4)]
)
def test_rows_of_a_pass_divide_those_of_an_update(batch: int, accumulation: int, data: int, rows: int) -> None:
    assert rows_of_a_pass(settings(batch=batch, accumulation=accumulation), Ranks(data)) == rows


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"batch": 3, "accumulation": 1}, "3 rows, which 2 ranks cannot share"),
        ({"compile": True, "batch": 2}, "training.compile"),
        ({"lora": {"rank": 2}, "batch": 2}, "adapters are not trained by sharded or tensor ranks"),
        ({"optimizer__kind": "muon", "batch": 2}, "muon needs whole matrices"),
        ({"optimizer__kind": "adamw-8bit", "batch": 2}, "the blocks of 8-bit moments are not divided by sharded or"),
    ],
)
def test_settings_that_do_not_go_together(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ScantlingInputError, match=why):
        division.check(model(), settings(**changes), Ranks(2))
    division.check(model(), settings(**changes), Ranks(1))


def test_a_layout_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, gradients and two moments in float32 are 16 bytes a parameter, shared by four ranks."""
    lm, plan = model(), settings(batch=4)
    found = fits.predicted(lm, plan, Ranks(4))
    state = (found.weights, found.gradients, found.optimizer)
    assert state == (lm.parts.params, lm.parts.params, 2 * lm.parts.params)
    assert fits.predicted(lm, settings(batch=4, optimizer__kind="sgd"), Ranks(4)).optimizer == lm.parts.params
    eight = settings(batch=4, optimizer__kind="adamw-8bit", parallel__replicated=4)
    # Every rank has all of it: two moments of a byte each.
    assert fits.predicted(lm, eight, Ranks(4, replicated=True)).optimizer == 2 * lm.parts.params
    needed = found.total - RESERVED
    monkeypatch.setattr(fits, "memory", lambda place: needed)
    fits.check(lm, plan, Ranks(4))
    monkeypatch.setattr(fits, "memory", lambda place: needed - 1)
    with pytest.raises(ScantlingInputError, match=r"the plan predicts .* in each of 4 ranks .* --over-memory"):
        fits.check(lm, plan, Ranks(4))
    fits.check(lm, plan, Ranks(1))


def test_the_memory_of_a_machine_is_shared_by_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = fits.memory(torch.device("cpu"))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert whole is not None
    assert fits.memory(torch.device("cpu")) == whole // 4


def test_the_settings_of_a_card_may_say_how_ranks_share() -> None:
    card = from_dict({**LLAMA, "training": {"parallel": {"sharded": 2, "tensor": 2}}}, "card")
    assert card.training.parallel == Parallel(sharded=2, tensor=2)  # type: ignore[union-attr]


def test_the_command_looks_at_the_memory_unless_told_not_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(lm: sc.Model, plan: Training, ranks: Ranks) -> None:
        raise ScantlingInputError(f"the plan predicts more than {ranks.size} rank has")

    monkeypatch.setattr(fits, "check", refuse)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for i in range(4):
        (tmp_path / f"{i}.txt").write_text(f"Text {i} says {i * 7}.\n" * (9 + i))
    asked = ["train", "tiny", "--tokenizer", "bytes", "--steps", "1", "--batch", "2", "--tokens", "16"]
    asked += ["--out", str(tmp_path / "run"), *(f"--data={tmp_path / f'{i}.txt'}" for i in range(4))]
    assert _run(asked) == 2
    assert "error: the plan predicts more than 1 rank has" in capsys.readouterr().err
    assert _run([*asked, "--over-memory"]) == 0
