"""Cases that were reported as faults and were none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cases.small import CLOSE, LLAMA, built, card, tokens

import scantling as sc
from scantling.cli.main import _run
from scantling.parts.moe import Router
from scantling.study.compare import equivalences
from scantling.tensor.context import Context


@pytest.mark.parametrize("turned", [8, 4])
def test_the_two_rope_layouts_differ_by_an_order_of_rows(turned: int) -> None:
    """FALSE-01: halves and neighbours with the same weights differ; with each head's rows even then odd they agree."""
    position = {"kind": "rope", "theta": 1e4, "d_rotary": turned}
    halves = built(card({**LLAMA, "position": position}))
    neighbours = built(card({**LLAMA, "position": {**position, "interleaved": True}}))
    ids = tokens(9)
    assert (halves.logits(ids) - neighbours.logits(ids)).abs().max() > 0.1
    order = [*range(0, turned, 2), *range(1, turned, 2), *range(turned, 8)]
    state = dict(neighbours.net.state_dict())
    for name in [n for n in state if ".attn.q." in n or ".attn.k." in n]:
        state[name] = state[name].unflatten(0, (-1, 8))[:, order].flatten(0, 1)
    halves.net.load_state_dict(state)
    torch.testing.assert_close(halves.logits(ids), neighbours.logits(ids), **CLOSE)


@pytest.mark.parametrize("norm", [None, {"kind": "rmsnorm", "eps": 1e-6}])
def test_compare_says_equivalent_up_to_a_permutation(norm: dict[str, Any] | None) -> None:
    """FALSE-01: two cards that differ in the layout alone, and none that differ in anything besides."""
    position, attention = {"kind": "rope", "theta": 1e4}, {"qk_norm": norm}
    halves = card({**LLAMA, "position": position}, attention=attention)
    neighbours = card({**LLAMA, "position": {**position, "interleaved": True}}, attention=attention)
    (said,) = equivalences([halves, neighbours])
    assert "equivalent up to a permutation" in said
    assert ("norms" in said) == (norm is not None)
    assert equivalences([halves, halves]) == []
    assert equivalences([halves, card({**LLAMA, "position": {**position, "interleaved": True, "theta": 2e4}})]) == []
    assert equivalences([halves, card({**LLAMA, "position": {"kind": "none"}})]) == []


def test_the_command_says_it_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """FALSE-01: as a note under the tables, and in JSON."""
    paths = [str(tmp_path / f"{name}.yaml") for name in ("halves", "neighbours")]
    for path, interleaved in zip(paths, (False, True), strict=True):
        said = {
            **LLAMA,
            "name": Path(path).stem,
            "position": {"kind": "rope", "theta": 1e4, "interleaved": interleaved},
        }
        Path(path).write_text(json.dumps(said))
    assert _run(["compare", *paths, "--json"]) == 0
    (note,) = json.loads(capsys.readouterr().out)["notes"]
    assert note.startswith("halves and neighbours are equivalent up to a permutation")
    assert _run(["compare", paths[0], paths[0]]) == 0
    assert "equivalent" not in capsys.readouterr().out


def kept(logits: list[float], **choice: Any) -> list[float]:
    """The weights that a router gives the experts it keeps."""
    n = len(logits)
    net: Any = Router(n, n, 2, **choice).build()
    with torch.no_grad():
        net.choose.weight.copy_(torch.eye(n))
        weights, _ = net(torch.tensor([[logits]]), Context(1, 1, torch.device("cpu")))
    return weights.flatten().tolist()  # type: ignore[no-any-return]


def test_softmax_before_or_after_the_choice_is_one_where_weights_are_divided_by_their_sum() -> None:
    """FALSE-03: router logits 2, 1, 0.5, -1, the two best."""
    logits = [2.0, 1.0, 0.5, -1.0]
    both = [0.7310586, 0.2689414]
    assert kept(logits, scores="softmax", normalize=True) == pytest.approx(both, abs=5e-8)
    assert kept(logits, scores="top_softmax", normalize=False) == pytest.approx(both, abs=5e-8)
    assert kept(logits, scores="top_softmax", normalize=True) == pytest.approx(both, abs=5e-8)
    whole = torch.tensor(logits).softmax(-1)[:2].tolist()
    assert kept(logits, scores="softmax", normalize=False) == pytest.approx(whole, abs=5e-8)
    assert sum(whole) < 0.9


def test_centred_logits_have_the_same_distribution() -> None:
    """FALSE-06: with a centred head the logits move by a constant per position, and no probability or loss does."""
    lm, ids = built(card()), tokens(9)
    logits, loss = lm.logits(ids), lm.loss(ids, ids)
    with torch.no_grad():
        head: Any = lm.net.get_parameter("head.matrix.weight")
        head.sub_(head.mean(0))
    moved = lm.logits(ids) - logits
    assert moved.abs().max() > 1e-2
    assert float((moved - moved.mean(-1, keepdim=True)).abs().max()) < 1e-5
    torch.testing.assert_close(lm.logits(ids).softmax(-1), logits.softmax(-1), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(lm.loss(ids, ids), loss)


def test_compare_says_equal_up_to_a_constant_per_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """FALSE-06: a model and its copy with a centred head; the copy itself; and one with another head."""
    lm = built(card())
    folders = {name: str(tmp_path / name) for name in ("plain", "same", "centred", "other")}
    head: Any = lm.net.get_parameter("head.matrix.weight")
    own = head.clone()
    for name, matrix in (("plain", own), ("same", own), ("centred", own - own.mean(0)), ("other", 1.01 * own)):
        head.copy_(matrix)
        sc.save(lm, folders[name])
    said = {}
    for name in ("same", "centred", "other"):
        assert _run(["compare", folders["plain"], folders[name], "--tokens", "8", "--logits", "--json"]) == 0
        said[name] = json.loads(capsys.readouterr().out)["notes"]
    assert said["same"] == ["logits, a row; a longer row; beside padding: equal bit by bit"]
    for name, verdict in (("centred", "equal up to a constant per row"), ("other", ": different; the largest")):
        assert said[name]
        assert all(verdict in note for note in said[name])


def test_logits_of_two_models_of_one_vocabulary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, vocab in (("small", 64), ("large", 96)):
        sc.save(built(card(vocab_size=vocab)), str(tmp_path / name))
    small, large = str(tmp_path / "small"), str(tmp_path / "large")
    for asked, message in (
        ((small, large), "has vocab_size 64 and"),
        ((small,), "--logits compares two models, and 1 are named"),
        (("tiny", "tiny"), "is a card without weights"),
    ):
        assert _run(["compare", *asked, "--logits"]) == 2
        assert message in capsys.readouterr().err
