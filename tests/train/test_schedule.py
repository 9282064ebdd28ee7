"""Learning rates against transformers' own schedules and the paper's formula."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

import scantling as sc
from scantling.train.schedule import Schedule

STEPS, WARMUP, DECAY = 50, 8, 12


def theirs(make: Callable[..., Any], **settings: Any) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = make(optimizer, **settings)
    rates = []
    for _ in range(STEPS + 1):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return rates[1:]


CASES: dict[str, tuple[Callable[..., Any], dict[str, Any], dict[str, Any]]] = {
    "constant": (transformers.get_constant_schedule_with_warmup, {}, {}),
    "cosine": (
        transformers.get_cosine_with_min_lr_schedule_with_warmup,
        {"num_training_steps": STEPS, "min_lr_rate": 0.1},
        {"final": 0.1},
    ),
    "linear": (transformers.get_linear_schedule_with_warmup, {"num_training_steps": STEPS}, {}),
    "wsd": (
        transformers.get_wsd_schedule,
        {"num_decay_steps": DECAY, "num_training_steps": STEPS, "decay_type": "linear"},
        {"decay": DECAY},
    ),
    "inverse_sqrt": (transformers.get_inverse_sqrt_schedule, {}, {}),
}


@pytest.mark.parametrize("kind", list(CASES))
def test_each_kind_gives_the_rates_of_transformers(kind: str) -> None:
    """Theirs counts from 0, whose rate is 0 and whose update is none; ours is theirs from its second update on."""
    make, settings, ours = CASES[kind]
    schedule = Schedule(kind, STEPS, WARMUP, **ours)
    assert [schedule.factor(i) for i in range(STEPS)] == pytest.approx(
        theirs(make, num_warmup_steps=WARMUP, **settings), abs=1e-12
    )


def test_noam_is_the_papers_formula() -> None:
    d_model, warmup = 512, 4000
    peak = (d_model * warmup) ** -0.5
    schedule = Schedule("inverse_sqrt", 100_000, warmup)
    for step in (1, 10, 3999, 4000, 4001, 16_000, 100_000):
        wanted = d_model**-0.5 * min(step**-0.5, step * warmup**-1.5)
        assert peak * schedule.factor(step - 1) == pytest.approx(wanted, rel=1e-12)
    assert schedule.factor(15_999) == pytest.approx(0.5)


def test_ends() -> None:
    assert Schedule("cosine", 10, final=0.1).factor(9) == pytest.approx(0.1)
    assert Schedule("cosine", 11, 1).factor(5) == pytest.approx(0.5)
    assert Schedule("linear", 10).factor(99) == 0.0
    assert Schedule("wsd", 10, 2, 0.0, 4).factor(5) == 1.0
    assert Schedule("wsd", 10, 2, 0.0, 4).factor(7) == pytest.approx(0.5)
    assert Schedule("wsd", 10, 2, 0.2, 4).factor(7) == pytest.approx(0.6)
    assert Schedule("wsd", 10, 2, 0.0, 0).factor(9) == 1.0
    assert math.isclose(Schedule("linear", 4, 4).factor(0), 0.25)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("cos", 10), "use one of"),
        (("cosine", 0), "at least 1 step"),
        (("cosine", 10, 11), "more updates than the 10"),
        (("wsd", 10, 5, 0.0, 6), "more updates than the 10"),
        (("cosine", 10, 0, 1.5), "from 0 to 1"),
    ],
)
def test_refusals(settings: tuple[Any, ...], message: str) -> None:
    with pytest.raises(sc.ScantlingInputError, match=message):
        Schedule(*settings)
