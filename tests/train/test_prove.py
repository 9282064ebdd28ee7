"""Each line of the proof holds on several families, and catches the fault that it is there for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.cases.small import GPT2, LLAMA
from tests.train.small import fresh
from tests.train.test_objectives import BOTH, ENCODER
from tests.train.test_run import model, settings

import scantling as sc
from scantling.cards.read import from_dict
from scantling.cli.main import _run
from scantling.data import Corpus, Sources, byte_tokenizer, prepare
from scantling.tensor.context import Context
from scantling.train import forward, pieces, prove, step, two_ranks
from scantling.train.optim import Optimizers

MOE = {"kind": "moe", "n_experts": 4, "top_k": 2, "expert": {"kind": "gated", "act": "silu", "d_ff": 16}}


@pytest.fixture(autouse=True)
def no_second_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """`test_ranks.py` starts the processes; here this one stands for both."""
    monkeypatch.setattr(two_ranks, "by_two", two_ranks.alone)


def verdicts(lm: sc.Model, corpus: Corpus, **changes: Any) -> dict[str, prove.Verdict]:
    return {v.name: v for v in prove.prove(lm, corpus, settings(**changes), new=True)}


def test_all_hold_on_a_llama_with_dropout(corpus: Corpus) -> None:
    lm = model()
    before = {name: weight.detach().clone() for name, weight in lm.net.named_parameters()}
    found = verdicts(lm, corpus, label_smoothing=0.1, z_loss=1e-4)
    assert [v.name for v in found.values() if v.holds is not True] == []
    assert all(torch.equal(weight, before[name]) for name, weight in lm.net.named_parameters())
    assert lm.card.training is None


@pytest.mark.parametrize("precision", ["bf16-master", "bf16-mixed"])
def test_all_hold_on_gpt2_in_16_bits(precision: str, corpus: Corpus) -> None:
    lm = sc.new(from_dict({**GPT2, "vocab_size": 320}, "gpt2"))
    lm.tokenizer = byte_tokenizer()
    found = verdicts(lm, corpus, precision=precision)
    assert [v.name for v in found.values() if v.holds is not True] == []


def test_all_hold_on_experts(corpus: Corpus) -> None:
    found = verdicts(fresh(mlp=MOE, vocab_size=320), corpus)
    assert [v.name for v in found.values() if v.holds is not True] == []


@dataclass(frozen=True)
class Family:
    """A model of a family, data for it, and the objective that is its own."""

    card: dict[str, Any]
    data: Corpus

    def model(self) -> sc.Model:
        return sc.new(from_dict(self.card, self.card["family"]))


@pytest.fixture(scope="session")
def families(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Family]:
    """A decoder, BERT and the Transformer of 2017 with T5's positions, each small."""
    folder = tmp_path_factory.mktemp("families")
    files = []
    for n in range(8):
        files.append(folder / f"{n}.txt")
        files[-1].write_text(f"Document {n} is about {n * 7} things and no more than {n + 3} others.\n" * (1 + n % 3))
    text = prepare([str(f) for f in files], byte_tokenizer("masked"), folder / "masked", workers=1)
    tsv = folder / "pairs.tsv"
    tsv.write_text("".join(f"word {i} here\tthere {i}\n" for i in range(60)))
    pairs = prepare(Sources((str(tsv),), "pairs"), byte_tokenizer("seq2seq"), folder / "pairs", workers=1)
    decoder = {**LLAMA, "position": {"kind": "learned"}, "vocab_size": 320, "tied": True}
    return {
        # With rotations only distances count, so positions that go on show in a learned table alone.
        "decoder": Family(decoder, corpus),
        "encoder": Family({**ENCODER, "position": {"kind": "learned"}, "context": 128}, text),
        "encoder-decoder": Family({**BOTH, "vocab_size": 320}, pairs),
    }


FAMILIES = ("decoder", "encoder", "encoder-decoder")


@pytest.mark.parametrize("name", FAMILIES)
def test_all_hold_on_three_families(name: str, families: dict[str, Family]) -> None:
    family = families[name]
    found = verdicts(family.model(), family.data, boundary=None, label_smoothing=0.1)
    skipped = {"packed == separate": None} if name == "encoder-decoder" else {}
    assert {v.name: v.holds for v in found.values() if v.holds is not True} == skipped
    assert set(found) == set(prove.CHECKS)


def mean_of_means(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = forward.forward
    monkeypatch.setattr(
        step, "forward", lambda net, parts, batch, count, how: whole(net, parts, batch, batch.judged, how)
    )


def documents_see_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    apart = forward.inputs
    monkeypatch.setattr(forward, "inputs", lambda *given: replace(apart(*given), documents=None))


def positions_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    apart = forward.inputs

    def wrong(rows: Any, *given: Any) -> forward.Inputs:
        found = apart(rows, *given)
        return replace(found, positions=torch.arange(found.ids.shape[1])[None])

    monkeypatch.setattr(forward, "inputs", lambda rows, *given: wrong(rows, *given))


def pieces_forget_what_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    right = pieces._piece

    def wrong(logits: Any, labels: Any, *rest: Any) -> Any:
        return right(logits, labels.clamp(min=0), *rest)

    monkeypatch.setattr(pieces, "_piece", wrong)


def the_state_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Optimizers, "restore", lambda *_: None)


def labels_are_shifted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    right = prove._rows

    def wrong(*given: Any) -> Any:
        batch = right(*given)
        return replace(batch, labels=np.concatenate([batch.labels[:, 1:], np.full((len(batch.ids), 1), -100)], 1))

    monkeypatch.setattr(prove, "_rows", wrong)


def weights_begin_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    right = prove._ground

    def wrong(*given: Any) -> Any:
        ground = right(*given)
        with torch.no_grad():
            ground.lm.net.embed.weight.mul_(50)
        return ground

    monkeypatch.setattr(prove, "_ground", wrong)


def a_gate_gets_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Context.activate
    monkeypatch.setattr(Context, "activate", lambda ctx, name, x: right(ctx, name, x).detach())


def a_rank_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    half = two_ranks.alone
    monkeypatch.setattr(two_ranks, "by_two", lambda lm, rows, plan: half(lm, rows[: len(rows) // 2], plan))


FAULTS: list[tuple[Callable[[pytest.MonkeyPatch], None], str]] = [
    (mean_of_means, "accumulation == full batch"),
    (documents_see_each_other, "packed == separate"),
    (positions_go_on, "packed == separate"),
    (pieces_forget_what_is_ignored, "loss in pieces == plain loss"),
    (the_state_is_forgotten, "resumed == uninterrupted"),
    (labels_are_shifted_twice, "inputs and targets are one apart"),
    (weights_begin_too_large, "first loss is ln V"),
    (a_gate_gets_no_gradient, "gradient reaches every weight"),
    (a_rank_is_forgotten, "2 ranks == 1 rank"),
]


CAUGHT = [
    pytest.param(plant, line, name, id=f"{plant.__name__}-{name}")
    for plant, line in FAULTS
    for name in FAMILIES
    if not (name == "encoder-decoder" and line == "packed == separate")
]


@pytest.mark.parametrize(("plant", "line", "name"), CAUGHT)
def test_each_line_catches_its_fault(
    plant: Callable[[pytest.MonkeyPatch], None],
    line: str,
    name: str,
    families: dict[str, Family],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    family = families[name]
    plant(monkeypatch)
    ground = prove._ground(family.model(), family.data, settings(boundary=None), True)
    holds, message = prove.CHECKS[line](ground)
    assert holds is False, message


def test_every_line_has_a_fault() -> None:
    assert {line for _, line in FAULTS} == set(prove.CHECKS)


def test_trained_weights_are_not_held_to_ln_v(corpus: Corpus) -> None:
    found = {v.name: v for v in prove.prove(model(), corpus, settings(), new=False)}
    assert found["first loss is ln V"].holds is None


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for i in range(4):
        (tmp_path / f"{i}.txt").write_text(f"Document {i} is about {i * 7} things.\n" * (3 + i))
    command = ["train", "tiny", "--prove", "--tokenizer", "bytes", "--data", str(tmp_path / "0.txt")]
    command += [x for i in (1, 2, 3) for x in ("--data", str(tmp_path / f"{i}.txt"))]
    assert _run(command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["holds"] * 8
    mean_of_means(monkeypatch)
    assert _run(command) == 1
    assert "BROKEN  accumulation == full batch" in capsys.readouterr().out
