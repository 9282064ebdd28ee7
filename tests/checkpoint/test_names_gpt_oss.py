"""Expert tensors as gpt-oss stores them: (E, d_in, d_out), gate and up in turn, names without ``.weight``."""

from __future__ import annotations

import pytest
import torch

from scantling.checkpoint.names import Alternate, Row, Transform, TransposeEach, foreign_shapes, links

E, D, D_FF = 3, 5, 4


def assert_round_trip(transform: Transform, theirs: torch.Tensor, ours: list[tuple[int, ...]]) -> list[torch.Tensor]:
    loaded = transform.load([theirs], ours)
    assert [tuple(x.shape) for x in loaded] == ours
    (saved,) = transform.save(loaded)
    assert torch.equal(saved, theirs)
    assert transform.saved_shapes(ours) == [tuple(theirs.shape)]
    return loaded


def test_a_stack_of_matrices_is_transposed_and_a_stack_of_vectors_stays() -> None:
    theirs, shift = torch.randn(E, D_FF, D), torch.randn(E, D)
    (ours,) = assert_round_trip(TransposeEach(), theirs, [(E, D, D_FF)])
    x = torch.randn(D_FF)
    torch.testing.assert_close(torch.nn.functional.linear(x, ours[1]), x @ theirs[1])
    assert torch.equal(assert_round_trip(TransposeEach(), shift, [(E, D)])[0], shift)


def test_gate_and_up_come_in_turn() -> None:
    theirs, shift = torch.randn(E, D, 2 * D_FF), torch.randn(E, 2 * D_FF)
    gate, up = assert_round_trip(Alternate(TransposeEach()), theirs, [(E, D_FF, D)] * 2)
    x = torch.randn(D)
    both = x @ theirs[2]
    torch.testing.assert_close(torch.nn.functional.linear(x, gate[2]), both[::2])
    torch.testing.assert_close(torch.nn.functional.linear(x, up[2]), both[1::2])
    gate, up = assert_round_trip(Alternate(TransposeEach()), shift, [(E, D_FF)] * 2)
    assert torch.equal(gate, shift[:, ::2])
    assert torch.equal(up, shift[:, 1::2])


@pytest.mark.parametrize("n", [1, 2, 3])
def test_any_number_in_turn(n: int) -> None:
    assert_round_trip(Alternate(), torch.randn(E, n * D_FF, D), [(E, D_FF, D)] * n)


def test_names_end_as_the_row_says() -> None:
    rows = [
        Row("m.{i}.experts.down", "blocks.{i}.down", TransposeEach(), (("", ".weight"), ("_bias", ".bias"))),
        Row("m.{i}.sinks", "blocks.{i}.sinks", suffixes=(("", ""),)),
        Row("m.{i}.q", "blocks.{i}.q"),
    ]
    weights = {
        "blocks.0.down.weight": (E, D, D_FF),
        "blocks.0.down.bias": (E, D),
        "blocks.0.sinks": (6,),
        "blocks.0.q.weight": (D, D),
    }
    assert foreign_shapes(links(rows, weights), weights) == {
        "m.0.experts.down": (E, D_FF, D),
        "m.0.experts.down_bias": (E, D),
        "m.0.sinks": (6,),
        "m.0.q.weight": (D, D),
    }
