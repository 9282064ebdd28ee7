"""Inverse sizing: what it offers is legal, counted, within the tolerance, and the published fits come out."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import scantling as sc
from scantling.cards.read import read_text, to_yaml
from scantling.cli.main import _run
from scantling.errors import ScantlingInputError
from scantling.numbers.memory import memory
from scantling.parts.part import Workload
from scantling.study.laws import LAWS, law, split
from scantling.study.size import TOLERANCE, Sized, Wish, fitting, near, parse_number

FEW = settings(max_examples=10, deadline=None)


def check(sized: Sized, wish: Wish) -> None:
    """The card is legal, reads back as itself, has the promised sizes, and was counted right."""
    card = read_text(to_yaml(sized.card), "sized")
    assert card == sized.card
    assert sc.assemble(card).params == sized.params
    attention, mlp = card.attention, card.mlp
    assert (card.vocab_size, card.context, card.tied) == (wish.vocab_size, wish.context, wish.tied)
    assert attention.d_head in (64, 128)  # type: ignore[union-attr]
    assert attention.n_heads * attention.d_head == card.d_model  # type: ignore[union-attr, operator]
    assert attention.n_heads % attention.n_kv_heads == 0  # type: ignore[union-attr, operator]
    assert mlp.d_ff % 256 == 0  # type: ignore[union-attr, operator]
    if card.d_model >= 1024:
        assert 90 <= card.d_model / card.n_layers <= 140
        assert attention.n_heads % 4 == 0


@given(target=st.floats(7.7, 12.3).map(lambda x: 10**x), tied=st.booleans())
@FEW
def test_every_card_is_legal_and_near(target: float, tied: bool) -> None:
    wish = Wish(tied=tied)
    found = near(target, wish, 4)
    assert found
    off = [abs(sized.params / target - 1) for sized in found]
    assert off == sorted(off)
    assert off[-1] <= TOLERANCE
    for sized in found:
        check(sized, wish)


@given(
    gib=st.floats(0.5, 200),
    context=st.sampled_from([2048, 8192, 32768]),
    batch=st.sampled_from([1, 4]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)
@FEW
def test_what_fits_fits_and_the_largest_comes_first(gib: float, context: int, batch: int, dtype: str) -> None:
    wish = Wish(context=context, dtype=dtype)  # type: ignore[arg-type]
    limit = int(gib * 2**30)
    found = fitting(limit, wish, batch, 3)
    assert [s.params for s in found] == sorted((s.params for s in found), reverse=True)
    for sized in found:
        check(sized, wish)
        kept = memory(sc.assemble(sized.card), Workload(batch, 1, context - 1), dtype, dtype)
        assert sized.memory == kept.weights + kept.kv <= limit
        heads, layers = sized.card.attention.n_kv_heads, sized.card.n_layers  # type: ignore[union-attr]
        size = 4 if dtype == "float32" else 2
        assert kept.kv == 2 * layers * heads * sized.card.attention.d_head * size * batch * context  # type: ignore[union-attr, operator]


def test_nothing_larger_of_the_front_fits() -> None:
    """Every card of the front near a larger number of parameters takes more than there is."""
    wish, limit = Wish(context=8192), 24 * 2**30
    best = fitting(limit, wish)[0]
    for sized in near(best.params * 1.03, wish, 60):
        need = 2 * sized.params + sized.kv_per_token * 8192
        assert sized.params <= best.params or need > limit


def test_a_known_shape_is_found_again() -> None:
    """LLaMA-2 70B's sizes differ from the front's 70 B by two layers."""
    sizes = [(s.card.n_layers, s.card.d_model, s.card.mlp.d_ff) for s in near(70e9, Wish(), 20)]  # type: ignore[union-attr]
    assert (82, 8192, 28672) in sizes


def test_gpt2_style() -> None:
    wish = Wish("gpt2", 50257, 1024, True)
    for sized in near(1.5e9, wish):
        check(sized, wish)
        assert sized.card.attention.n_kv_heads == sized.card.attention.n_heads  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("budget", "name", "params"),
    [
        # Section D.4: 2.86 B by approach 1 at 1e21.
        (1e21, "chinchilla-1", 2.86e9),
        # Gopher's budget: 67 B, 63 B and 40 B by the three approaches (sections 3.1 to 3.3).
        (5.76e23, "chinchilla-1", 67e9),
        (5.76e23, "chinchilla-2", 63e9),
        (5.76e23, "chinchilla-3", 40e9),
        # Table A3, approach 3, up to the rounding of its constants.
        (1.71e24, "chinchilla-3", 67e9),
        (1.30e28, "chinchilla-1", 1e13),
        (1.20e20, "chinchilla-2", 1e9),
    ],
)
def test_the_published_predictions(budget: float, name: str, params: float) -> None:
    assert split(budget, law(name)).params == pytest.approx(params, rel=0.03)


@pytest.mark.parametrize("name", ["chinchilla-1", "epoch", "20-tokens"])
def test_chinchilla_itself(name: str) -> None:
    """6 x 70e9 x 1.4e12 FLOPs are best spent on about 70 B parameters and 1.4 T tokens."""
    best = split(6 * 70e9 * 1.4e12, law(name))
    assert best.params == pytest.approx(70e9, rel=0.05)
    assert best.tokens == pytest.approx(1.4e12, rel=0.05)


@given(budget=st.floats(18, 27).map(lambda x: 10**x), name=st.sampled_from([n for n in LAWS if LAWS[n].loss]))
@settings(max_examples=30, deadline=None)
def test_no_other_split_has_a_lower_loss(budget: float, name: str) -> None:
    found, loss = split(budget, law(name)), LAWS[name].loss
    assert loss is not None
    assert found.loss is not None
    assert 6 * found.params * found.tokens == pytest.approx(budget)
    for factor in (0.9, 0.99, 1.01, 1.1):
        assert loss(found.params * factor, found.tokens / factor) > found.loss


@pytest.mark.parametrize("name", list(LAWS))
def test_more_is_spent_on_both(name: str) -> None:
    splits = [split(10.0**x, law(name)) for x in range(17, 29)]
    assert all(a.params < b.params and a.tokens < b.tokens for a, b in pairwise(splits))


@pytest.mark.parametrize(
    ("text", "value"), [("1.3B", 1.3e9), ("350m", 3.5e8), ("2T", 2e12), ("1e21", 1e21), ("5.76e+23", 5.76e23), ("7", 7)]
)
def test_numbers_as_people_write_them(text: str, value: float) -> None:
    assert parse_number(text) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize("text", ["", "B", "-1B", "0", "nan", "1e999", "1.3 Q", "1,3B"])
def test_what_is_no_number(text: str) -> None:
    with pytest.raises(ScantlingInputError, match="is no size"):
        parse_number(text)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--params", "1B", "--budget", "1e21"], "one of --params"),
        ([], "one of --params"),
        (["--params", "1k"], "within 5%"),
        (["--params", "9e15"], "can be asked for"),
        (["--fit", "1MB"], "nothing fits into"),
        (["--fit", "lots"], "is no size"),
        (["--budget", "1e40"], "can be spent"),
        (["--budget", "1e21", "--law", "epoc"], "did you mean 'epoch'"),
        (["--params", "1B", "--yaml", "100"], "cards were found"),
        (["--params", "1B", "--dtype", "float64"], "not as float64"),
    ],
)
def test_wrong_input_gets_one_sentence(capsys: pytest.CaptureFixture[str], args: list[str], says: str) -> None:
    assert _run(["size", *args]) == 2
    captured = capsys.readouterr()
    assert says in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert _run(["size", "--budget", "5.76e23", "--law", "chinchilla-1", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [row["law"] for row in told["laws"]] == list(LAWS)
    assert told["laws"][0]["params"] == pytest.approx(67e9, rel=1e-3)
    assert told["cards"][0]["params"] == pytest.approx(67e9, rel=0.01)
    path = tmp_path / "mine.yaml"
    assert _run(["size", "--params", "1.3B", "--yaml", "2", "--out", str(path)]) == 0
    assert _run(["size", "--params", "1.3B", "--yaml", "2"]) == 0
    assert capsys.readouterr().out == path.read_text()
    assert _run(["count", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["total_params"] == pytest.approx(1.3e9, rel=TOLERANCE)
    assert _run(["size", "--params", "1.3B", "--out", str(path)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert _run(["size", "--fit", "24GiB", "--context", "8192", "--most", "3"]) == 0
    assert "GiB" in capsys.readouterr().out
