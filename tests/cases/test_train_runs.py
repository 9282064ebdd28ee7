"""Cases about training runs: what counts how much, who decays, where a run goes on, what is named when it breaks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cases.small import GPT2, LLAMA
from tests.data_room.made import BARE, corpus, numbered
from tests.train.small import fresh, random_documents, rows, tensors
from tests.train.test_run import Killer, go, settings

import scantling as sc
from scantling.cards.read import from_dict, training_of
from scantling.checkpoint.families import family
from scantling.checkpoint.names import links
from scantling.data import Seq2Seq, one_pass
from scantling.data.corpus import Marks
from scantling.numbers.flops import flops
from scantling.parts.part import Workload
from scantling.train import checkpoints
from scantling.train.forward import How, forward
from scantling.train.lora import added_params
from scantling.train.optim import Optimizers, Recipe, groups
from scantling.train.speed import DocumentFlops, document_sizes
from scantling.train.start import train
from scantling.train.step import Stepper
from scantling.train.watch import Metrics, read_metrics


def test_groups_of_the_optimizer() -> None:
    """PAR-16: GPT-2 small: 124,318,464 values decay and 121,344 do not; 50 and 98 tensors as its own file has them."""
    card = sc.card("gpt2")
    parts = sc.assemble(card)
    weights = {name: torch.empty(shape, device="meta") for name, shape in parts.named_weights.items()}
    found = {group.name: group for group in groups(parts, weights, Recipe())}
    assert found["decayed"].numel == 124_318_464
    assert found["plain"].numel == 121_344
    assert found["decayed"].numel + found["plain"].numel == parts.params
    decayed = [
        {name in found["decayed"].weights for name in link.ours}
        for link in links(family("gpt2", "gpt2").rows(card), parts.named_weights)
        for _ in link.theirs
    ]
    assert [decayed.count({True}), decayed.count({False})] == [50, 98]
    assert sum("embed" in name for name in found["decayed"].weights) == 1


def test_an_adapter_adds_r_times_both_widths() -> None:
    """PAR-06: CodeLlama-7B, r 16 on q and v: 8,388,608 more, 6,746,935,296 in all."""
    card = from_dict(
        {
            **LLAMA,
            "n_layers": 32,
            "d_model": 4096,
            "vocab_size": 32016,
            "context": 16384,
            "attention": {"kind": "multi_head", "n_heads": 32},
            "mlp": {"kind": "gated", "act": "silu", "d_ff": 11008},
        },
        "codellama",
    )
    parts = sc.assemble(card)
    added = added_params(parts, 16, ["q", "v"])
    assert (parts.params, added, parts.params + added) == (6_738_546_688, 8_388_608, 6_746_935_296)


def test_averages_of_micro_batches_are_far_off() -> None:
    """TRAIN-01: what a mean of the two means would have trained on is another gradient, by a tenth and more."""
    short, long = random_documents(3, 10)

    def gradient(weight_by_tokens: bool) -> torch.Tensor:
        lm = fresh()
        for some in (short, long):
            batch = tensors(rows([some], tokens=10), lm)
            count = 11 if weight_by_tokens else 2 * batch.judged
            forward(lm.net, lm.parts, batch, count, How()).objective.backward()
        return torch.cat([w.grad.flatten() for w in lm.net.parameters() if w.grad is not None])

    right, naive = gradient(True), gradient(False)
    assert float((naive - right).norm() / right.norm()) > 0.1


def test_a_run_of_three_epochs_goes_on_to_the_bit(tmp_path: Path) -> None:
    """TRAIN-09: dropout 0.1, epochs of 25 updates, accumulation 2, killed after update 47 with a checkpoint at 40."""
    data = corpus(numbered(*[12] * 100, first=4), vocab_size=1300)
    card = from_dict({**GPT2, "vocab_size": 1300, "dropout": {"residual": 0.1, "attention": 0.1}}, "small")
    keys: dict[str, Any] = {
        "steps": 75,
        "batch": 2,
        "accumulation": 2,
        "tokens": 16,
        "boundary": "padded",
        "save_every": 40,
    }
    plan = training_of(card, {**keys, "keep": 9, "evaluation.samples": 0}, "case")

    def go(out: Path, *watchers: Any) -> list[tuple[Any, ...]]:
        found = checkpoints.newest(out)
        metrics = Metrics(out, 0 if found is None else found.step)
        try:
            train(sc.new(card), data, plan, out, [metrics, *watchers], found)
        finally:
            metrics.close()
        steps = [r for r in read_metrics(out) if r["kind"] == "step"]
        return [(r["step"], r["loss"], r["lr"], r["norm"], r["tokens"]) for r in steps]

    straight = go(tmp_path / "straight")
    with pytest.raises(KeyboardInterrupt):
        go(tmp_path / "broken", Killer(47, None))
    assert checkpoints.steps(tmp_path / "broken") == [40]
    assert go(tmp_path / "broken") == straight
    assert len(straight) == 75
    ends = [(tmp_path / name / "step-75" / "model.safetensors").read_bytes() for name in ("straight", "broken")]
    assert ends[0] == ends[1]


def test_an_overflow_in_16_bits_is_named() -> None:
    """NUM-13: float16 ends at 65504; the map that passes it is named, and bfloat16 goes through."""
    outcomes = {}
    for dtype in ("float16", "bfloat16"):
        lm = fresh(dtype=dtype)
        with torch.no_grad():
            for name, factor in (("gate", 100.0), ("up", 100.0), ("down", 5e5)):
                lm.net.get_parameter(f"decoder.blocks.1.mlp.{name}.weight").mul_(factor)
        recipe = Recipe()
        optimizers = Optimizers(groups(lm.parts, dict(lm.net.named_parameters()), recipe), recipe)
        batch = tensors(rows(random_documents(9), tokens=9), lm)
        outcomes[dtype] = Stepper(lm, optimizers, How(), 1.0, 0).update(0, [batch], 1.0)
    assert outcomes["bfloat16"].fault is None
    fault = str(outcomes["float16"].fault)
    assert "decoder.blocks.1.mlp.down gives the first value that is not finite" in fault
    assert "float16 ends at 65504; bfloat16 does not" in fault


def test_packed_rows_cost_the_sum_of_the_documents_squares() -> None:
    """FLP-14: a row of 4096, 2048, 1024 and 1024 tokens: 23,068,672 pairs, where one text of 8192 has 67,108,864."""
    parts = sc.assemble(from_dict({**LLAMA, "n_layers": 1, "context": 8192}, "case"))
    packed, whole = (
        next(one_pass(corpus(numbered(*sizes), BARE).train, "causal", 1, 8192))
        for sizes in ((4096, 2048, 1024, 1024), (8192,))
    )
    assert packed.documents == 4
    cost = DocumentFlops(parts)
    # Scores and mix of 4 heads of 8, forward and twice that backward; all else goes by the 8192 tokens of either row.
    assert cost.of(whole) - cost.of(packed) == 3 * 4 * 32 * (67_108_864 - 23_068_672)
    assert cost.of(whole) == flops(parts, Workload(1, 8192, training=True)).training


def test_padding_costs_nothing_and_a_stream_is_one_document() -> None:
    """Rows of 8 with texts of 5 and 3: two documents where they are apart, one where they see each other."""
    data = corpus(numbered(5, 3), BARE).train
    sizes = {mode: document_sizes(next(one_pass(data, "causal", 2, 8, mode))) for mode in ("padded", "concatenated")}
    assert sizes == {"padded": {(5, None): 1, (3, None): 1}, "concatenated": {(8, None): 1}}
    pairs = corpus([[5, 6, 7, 8, 9], [20, 30]], Marks(after=(1,), eos=1), kind="pairs", firsts=[2, 1])
    batch = next(one_pass(pairs.train, Seq2Seq(start_id=0), 3, 6, "padded"))
    # Two tokens of source with their end, and three of target with theirs; the third row is empty.
    assert document_sizes(batch) == {(4, 3): 1, (2, 2): 1}


def test_the_mfu_of_a_run_counts_documents(tmp_path: Path) -> None:
    """FLP-14: rows of 32 with four texts of 8: the run's FLOPs are those of texts of 8, and the rows' own are more."""
    lm = fresh(vocab_size=1300)
    go(lm, corpus(numbered(*[8] * 64), BARE, vocab_size=1300), settings(steps=3, batch=2, tokens=32), tmp_path)
    (account,) = [r for r in read_metrics(tmp_path) if r["kind"] == "account"]
    # Two of three updates are timed, each of two micro-batches of two rows of four texts.
    assert account["flops_of_updates"] == 2 * 16 * flops(lm.parts, Workload(1, 8, training=True)).training
    assert account["mfu"] == pytest.approx(account["flops_of_updates"] / account["seconds"] / account["peak"])
    assert account["flops_counted"] > account["flops_of_updates"] / 4
