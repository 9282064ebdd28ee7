"""Shifts that keep experts busy: moved by counting, held in float32, and put back where a run goes on."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.train.small import fresh
from tests.train.test_run import Killer, content, go, losses, settings

import scantling as sc
from scantling.data import Corpus, byte_tokenizer
from scantling.tensor.router_losses import Routing
from scantling.train.balance import Balance
from scantling.train.ranks import Ranks
from scantling.train.watch import read_metrics

ROUTER = "decoder.blocks.1.mlp.router"
MOE: dict[str, Any] = {
    "kind": "moe",
    "n_experts": 4,
    "top_k": 2,
    "expert": {"kind": "gated", "act": "silu", "d_ff": 16},
    "scores": "sigmoid",
    "selection_bias": True,
}


def experts(dtype: str = "float32") -> sc.Model:
    lm = fresh(mlp=MOE, vocab_size=320, dtype=dtype)
    lm.tokenizer = byte_tokenizer()
    return lm


def test_a_shift_moves_by_the_sign_of_what_is_missing() -> None:
    """Choices 5, 1, 2 and 0 have the mean 2: down, up, not at all, up; padding is not counted."""
    lm = experts()
    balance = Balance(lm.net, lm.parts, 0.25)
    chosen = torch.tensor([[[0, 1], [0, 2], [0, 2], [0, 0], [3, 3]]])
    real = torch.tensor([[True, True, True, True, False]])
    balance.count({path: Routing(torch.zeros(1, 5, 4), chosen) for path in balance.shifts}, real)
    balance.update(Ranks())
    assert set(balance.shifts) == {"decoder.blocks.0.mlp.router", ROUTER}
    assert lm.net.get_buffer(f"{ROUTER}.selection_bias").tolist() == [-0.25, 0.25, 0.0, 0.25]
    balance.update(Ranks())
    assert balance.shifts[ROUTER].tolist() == [-0.25, 0.25, 0.0, 0.25]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_moves_the_shifts_by_its_own_choices(precision: str, corpus: Corpus, tmp_path: Path) -> None:
    """Two micro-batches of an update together, as a hook on the router counts them; steps of 1e-5 are not lost."""
    lm = experts()
    counts: Counter[int] = Counter()
    lm.net.get_submodule(ROUTER).register_forward_hook(lambda m, args, out: counts.update(out[1].flatten().tolist()))
    plan = settings(precision=precision, steps=1, save_every=0, router_shift=1e-5, boundary="concatenated")
    # Nothing is looked at before the one update, so the hook sees its forwards first.
    seen: list[list[int]] = []

    class Ear:
        def record(self, record: Any) -> None:
            if record["kind"] == "step":
                seen.append([counts[e] for e in range(4)])

        def close(self) -> None:
            return

    summary = go(lm, corpus, plan, tmp_path, Ear())
    mean = sum(seen[0]) / 4
    assert sum(seen[0]) == 2 * 2 * 3 * 48
    wanted = torch.tensor([1e-5 * ((mean > n) - (mean < n)) for n in seen[0]])
    kept = load_file(summary.folder / "training" / "optimizer.safetensors")
    torch.testing.assert_close(kept[f"router/{ROUTER}"], wanted)
    assert bool(wanted.any())


def test_a_favourite_loses_its_favour(corpus: Corpus, tmp_path: Path) -> None:
    """A router that begins by sending every token to experts 0 and 1 spreads them, without any loss on routers."""
    shares = {}
    for shift in (0.0, 0.05):
        lm = experts()
        with torch.no_grad():
            # Scores that differ by more than a step of the shifts.
            lm.net.get_parameter(f"{ROUTER}.choose.weight").mul_(5)
            lm.net.get_buffer(f"{ROUTER}.selection_bias").copy_(torch.tensor([0.6, 0.6, 0.0, 0.0]))
        out = tmp_path / str(shift)
        plan = settings(steps=20, save_every=0, router_balance=0.0, router_shift=shift, optimizer__lr=1e-3)
        go(lm, corpus, plan, out)
        each = [r["routers"][ROUTER]["shares"] for r in read_metrics(out) if r["kind"] == "step"]
        shares[shift] = max(sum(column) / 10 for column in zip(*each[-10:], strict=True))
    assert shares[0.0] > 0.45
    assert shares[0.05] < 0.4


def test_a_run_with_shifts_goes_on_to_the_bit(corpus: Corpus, tmp_path: Path) -> None:
    plan = settings(precision="bf16", router_shift=1e-5)
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    go(experts(), corpus, plan, straight)
    with pytest.raises(KeyboardInterrupt):
        go(experts(), corpus, plan, broken, Killer(6, None))
    go(experts(), corpus, plan, broken)
    assert losses(broken) == losses(straight)
    assert content(broken / "step-8") == content(straight / "step-8")
