"""Choosing tokens, stop strings, limits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from tests.conftest import GOLDEN

import scantling as sc
from scantling.generate import sample
from scantling.generate.engine import Options, complete
from scantling.generate.processors import filtered
from scantling.generate.request import Request
from scantling.generate.sample import Sampling, choose
from scantling.generate.stops import StopFilter

RECORDED = load_file(GOLDEN / "sampling.safetensors")


@pytest.fixture(scope="module")
def lm() -> Any:
    return sc.load(GOLDEN / "tiny" / "llama-gqa")


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("temperature_0_7", Sampling(temperature=0.7)),
        ("top_k_5", Sampling(temperature=1.0, top_k=5)),
        ("top_p_0_8", Sampling(temperature=1.0, top_p=0.8)),
        ("top_p_0_05", Sampling(temperature=1.0, top_p=0.05)),
        ("min_p_0_1", Sampling(temperature=1.0, min_p=0.1)),
    ],
)
def test_filters_equal_the_recorded_ones(name: str, how: Sampling) -> None:
    torch.testing.assert_close(filtered(RECORDED["logits"], how), RECORDED[name])


def kept(probabilities: list[float], **how: Any) -> int:
    logits = torch.tensor([probabilities], dtype=torch.float64).log()
    return int(filtered(logits, Sampling(temperature=1.0, **how)).isfinite().sum())


@pytest.mark.parametrize(
    ("probabilities", "p", "n"),
    [
        ([0.5, 0.41, 0.09], 0.9, 2),
        ([0.5, 0.35, 0.10, 0.05], 0.9, 3),
        ([0.5, 0.3, 0.15, 0.05], 0.6, 2),
        ([0.5, 0.3, 0.15, 0.05], 0.85, 3),
        ([0.4, 0.3, 0.2, 0.1], 0.8, 3),
        ([0.5, 0.3, 0.2], 0.79, 2),
        ([0.5, 0.3, 0.2], 0.81, 3),
        ([0.5, 0.3, 0.2], 0.0, 1),
        ([0.5, 0.3, 0.2], 1.0, 3),
    ],
)
def test_top_p_keeps_the_token_that_crosses_the_threshold(probabilities: list[float], p: float, n: int) -> None:
    assert kept(probabilities, top_p=p) == n


@pytest.mark.parametrize(("k", "n"), [(0, 4), (1, 1), (3, 3), (4, 4), (100, 4)])
def test_top_k_beyond_the_vocabulary_keeps_all(k: int, n: int) -> None:
    assert kept([0.4, 0.3, 0.2, 0.1], top_k=k) == n


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1.0),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", 11),
        ("top_p", 1.5),
        ("top_p", -0.1),
        ("top_k", -1),
        ("top_k", 2.5),
        ("min_p", 1.1),
        ("seed", 2**64),
        ("temperature", True),
    ],
)
def test_settings_out_of_range_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(sc.ScantlingInputError, match=f"{field} is "):
        Sampling(**{field: value})


def test_temperature_zero_is_greedy_and_needs_no_seed() -> None:
    logits = torch.tensor([[0.1, 3.0, 2.9]])
    for how in (
        Sampling(),
        Sampling(temperature=0.0, top_p=0.0),
        Sampling(temperature=1e-8),
        Sampling(temperature=0, top_k=2),
    ):
        assert int(choose(logits, how, how.generators(1))) == 1


def test_draws_follow_the_distribution() -> None:
    """Chi-square over 100,000 draws, 9 degrees of freedom: 27.88 is p = 0.001."""
    probabilities = torch.tensor([0.3, 0.2, 0.15, 0.1, 0.08, 0.07, 0.04, 0.03, 0.02, 0.01])
    how = Sampling(temperature=1.0, seed=11)
    drawn = choose(probabilities.log().expand(100_000, -1), how, how.generators(1) * 100_000)
    seen = torch.bincount(drawn, minlength=10).double()
    wanted = probabilities.double() * 100_000
    assert float(((seen - wanted) ** 2 / wanted).sum()) < 27.88


def test_seeds_belong_to_requests(lm: Any) -> None:
    draw = lambda seed: lm.generate([[5, 9, 11]], 12, temperature=1.5, seed=seed).tolist()  # noqa: E731
    first = draw(1)
    torch.manual_seed(99)
    assert draw(1) == first
    assert draw(2) != first
    assert draw(None) != draw(None)


def test_a_row_of_a_batch_draws_what_it_draws_alone(lm: Any) -> None:
    rows = [[5, 9, 11], [1, 2, 3]]
    together = lm.generate(rows, 12, temperature=1.0, seed=4)
    for row, drawn in zip(rows, together, strict=True):
        assert torch.equal(lm.generate([row], 12, temperature=1.0, seed=4)[0], drawn)


def test_a_tiny_temperature_is_greedy() -> None:
    how = Sampling(temperature=1e-40)
    assert int(choose(torch.tensor([[5.0, 80.0, -3.0]]), how, how.generators(1))) == 1


def test_end_of_text_of_the_config_ends_rows() -> None:
    lm = sc.load(GOLDEN / "tiny" / "llama-gqa")
    assert lm.eos_ids == {2}
    every = sc.Model(lm.card, lm.parts, lm.net, eos_ids=frozenset(range(131)))
    assert every.generate([[1, 2]], 8).shape == (1, 3)
    assert every.generate([[1, 2]], 8, ignore_eos=True).shape == (1, 10)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"stop": 5}, "stop is 5; a string, or a list of strings"),
        ({"stop": ["x", 5]}, "a string, or a list of strings"),
        ({"stop": None}, "stop is None"),
        ({"beams": 3}, "beams is 3; a scantling.generate.Beams is needed"),
        ({"sampling": {"top_k": 2}}, "a scantling.generate.Sampling is needed"),
        ({"options": {"stop": "x"}}, "a scantling.generate.Options is needed"),
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"seed": "x"}, "seed is 'x'"),
        ({"max_new_tokens": True}, "max_new_tokens is True"),
        ({"best_of": 2}, "best_of goes with a text prompt"),
    ],
)
def test_settings_of_another_kind_are_refused(lm: Any, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(sc.ScantlingInputError, match=words):
        lm.generate([5, 6], **{"max_new_tokens": 3, **settings})


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Options(contrastive=4), "contrastive is 4; a scantling.generate.Contrastive"),  # type: ignore[arg-type]
        (lambda: Options(keeping="ring"), "keeping is 'ring'; a scantling.generate.Keeping"),  # type: ignore[arg-type]
        (lambda: Options(shape="a+"), "shape is 'a.'; a scantling.generate.Shape"),  # type: ignore[arg-type]
        (lambda: Options(drafting=3), "drafting is 3; a scantling.generate.Drafting"),  # type: ignore[arg-type]
        (lambda: Options(ignore_eos="no"), "ignore_eos is 'no'; True or False"),  # type: ignore[arg-type]
        (lambda: Request("a", 3, {"top_k": 2}), "sampling is {'top_k': 2}; a scantling.generate.Sampling"),  # type: ignore[arg-type]
        (lambda: Request("a", 3, options=None), "options is None; a scantling.generate.Options"),  # type: ignore[arg-type]
        (lambda: Sampling(logit_bias=((5, 1.0), (5, 2.0))), "names token 5 twice"),
    ],
)
def test_records_of_another_kind_are_refused(make: Any, words: str) -> None:
    with pytest.raises(sc.ScantlingInputError, match=words):
        make()


@pytest.mark.parametrize("limit", [None, "3", 3.0, True, -1])
@pytest.mark.parametrize("prompt", ["a", ["a", "b"], [[5]], [[5], [6, 7]]])
def test_limits_that_are_none_are_refused(lm: Any, smollm: Any, limit: Any, prompt: Any) -> None:
    model = smollm if "a" in prompt else lm
    with pytest.raises(sc.ScantlingInputError, match=r"max_new_tokens is .*; a whole number of at least"):
        model.generate(prompt, limit)


def test_rows_may_be_tensors_of_unequal_lengths(lm: Any) -> None:
    rows = [[5], [6, 7]]
    assert lm.generate([torch.tensor(row) for row in rows], 3) == lm.generate(rows, 3)


def test_settings_that_would_be_ignored_are_refused(lm: Any, smollm: Any) -> None:
    with pytest.raises(sc.ScantlingInputError, match="stop strings go with a text"):
        lm.generate([1, 2], 3, stop=["x"])
    with pytest.raises(sc.ScantlingInputError, match="attention_mask goes with ids"):
        smollm.generate("hello", 3, attention_mask=[[1]])


@pytest.mark.parametrize("kind", ["uint8", "uint16", "int16", "int32", "int64"])
def test_ids_of_any_integer_kind(lm: Any, kind: str) -> None:
    import numpy

    assert torch.equal(lm.logits(numpy.array([[1, 2, 3]], dtype=kind)), lm.logits([[1, 2, 3]]))


def test_positions_are_checked(lm: Any) -> None:
    ids = [[1, 2, 3, 4]]
    assert torch.equal(lm.logits(ids, position_ids=[0, 1, 2, 3]), lm.logits(ids))
    for wrong in ([[0]], [[0.0, 1.0, 2.0, 3.0]], [[-1, 0, 1, 2]], [0, 1]):
        with pytest.raises(sc.ScantlingInputError, match="position"):
            lm.logits(ids, position_ids=wrong)
    with pytest.raises(sc.ScantlingInputError, match="64 learned positions"):
        sc.load(GOLDEN / "tiny" / "gpt2").logits(ids, position_ids=[61, 62, 63, 64])


def test_masks_are_zeros_and_ones(lm: Any) -> None:
    assert torch.equal(lm.logits([1, 2], attention_mask=[1, 1]), lm.logits([1, 2]))
    with pytest.raises(sc.ScantlingInputError, match="other than 0"):
        lm.logits([[1, 2]], attention_mask=[[0.0, -1e9]])


def test_logits_can_be_trained_on(lm: Any) -> None:
    weight = torch.zeros(131, requires_grad=True)
    (lm.logits([[1, 2, 3]]) * weight).sum().backward()
    assert weight.grad is not None


@pytest.mark.parametrize("labels", [[[1, 2]], [[1, 2, 131]], [[1, -5, 2]], None, "abc"])
def test_bad_labels_are_refused(lm: Any, labels: Any) -> None:
    with pytest.raises(sc.ScantlingInputError, match="label"):
        lm.loss([[1, 2, 3]], labels)


def test_a_window_needs_no_square_of_memory() -> None:
    """Blocks of queries over the keys in their reach give what one mask over everything gives."""
    from tests.test_laws import BASE, strong

    from scantling.cards.read import from_dict
    from scantling.tensor.context import Context

    attention = {"kind": "multi_head", "n_heads": 4, "n_kv_heads": 2, "d_head": 6, "window": 37}
    card = from_dict({**BASE, "context": 1024, "attention": attention}, "window")
    net = strong(card)
    ids = torch.randint(0, 31, (2, 700), generator=torch.Generator().manual_seed(0))
    padding = torch.ones(2, 700, dtype=torch.bool)
    padding[1, :90] = False
    for options in ({}, {"padding": padding}):
        fused = net(ids, Context.of(ids, **options))
        plain = net(ids, Context.of(ids, kernel_name="reference", **options))
        torch.testing.assert_close(fused[padding], plain[padding], atol=2e-4, rtol=1e-4)


def test_dropout_acts_in_training_only() -> None:
    from tests.test_laws import BASE, strong

    from scantling.cards.read import from_dict

    card = from_dict({**BASE, "dropout": {"embedding": 0.3, "attention": 0.3, "residual": 0.3}}, "dropout")
    net, ids = strong(card), torch.tensor([[1, 2, 3, 4]])
    assert torch.equal(net(ids), net(ids))
    net.train()
    assert not torch.equal(net(ids), net(ids))


def test_rows_of_a_padded_table_are_never_drawn(lm: Any) -> None:
    class Small:
        vocab_size = 40
        eos_ids = frozenset[int]()

    known = sc.Model(lm.card, lm.parts, lm.net, Small())  # type: ignore[arg-type]
    drawn = known.generate([[1, 2]], 60, temperature=5.0, seed=0)
    assert int(drawn.max()) < 40


@pytest.mark.parametrize(("limit", "new"), [(1, 1), (3, 3), (4, 3), (100, 3), (0, 0)])
def test_the_context_bounds_the_new_tokens(lm: Any, limit: int, new: int) -> None:
    prompt = [[7] * (lm.card.context - 3)]
    assert lm.generate(prompt, limit).shape[1] == lm.card.context - 3 + new


@pytest.mark.parametrize("length", [0, 1, 100])
def test_a_prompt_that_fills_the_context_is_refused(lm: Any, length: int) -> None:
    with pytest.raises(sc.ScantlingInputError, match=rf"has {64 + length} tokens and the context holds 64: at most 63"):
        lm.generate([[7] * (64 + length)], 5)


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([], "at least one row of one token"),
        ([[]], "at least one row of one token"),
        ([[1, 2], [3]], "equally long"),
        ([1.5], "integers are needed"),
        ([True, False], "integers are needed"),
        ([131], "token id 131 is outside the vocabulary of 131"),
        ([-1], "token id -1 is outside"),
        (["a"], "list of integers"),
        ([[[1]]], "at least one row"),
    ],
)
def test_bad_ids_are_refused(lm: Any, ids: Any, words: str) -> None:
    with pytest.raises(sc.ScantlingInputError, match=words):
        lm.logits(ids)


def test_text_without_a_tokenizer_is_refused(lm: Any) -> None:
    with pytest.raises(sc.ScantlingInputError, match="no tokenizer"):
        lm.generate("hello")


def test_masks_must_fit_and_pad_on_the_left(lm: Any) -> None:
    with pytest.raises(sc.ScantlingInputError, match="padded on the left"):
        lm.generate([[1, 2, 3]], 2, attention_mask=[[1, 1, 0]])
    with pytest.raises(sc.ScantlingInputError, match="attention_mask has shape"):
        lm.logits([[1, 2, 3]], attention_mask=[[1, 1]])


def test_learned_positions_end_where_the_table_ends() -> None:
    gpt2 = sc.load(GOLDEN / "tiny" / "gpt2")
    assert gpt2.logits([[1] * 64]).shape == (1, 64, 131)
    with pytest.raises(sc.ScantlingInputError, match="65 tokens and the model has 64 learned positions"):
        gpt2.logits([[1] * 65])


def test_a_loss_needs_a_label(lm: Any) -> None:
    with pytest.raises(sc.ScantlingInputError, match="no label is left"):
        lm.loss([[1]], [[1]])


PIECES = ["al", "pha ", "be", "ta g", "amma ", "del", "ta"]


@pytest.mark.parametrize(
    ("stops", "text"),
    [
        (["beta gamma"], "alpha "),
        (["gamma", "beta gamma"], "alpha "),
        (["ta"], "alpha be"),
        (["nothing"], "alpha beta gamma delta"),
        (["delta!"], "alpha beta gamma delta"),
        ([], "alpha beta gamma delta"),
        (["a"], ""),
    ],
)
def test_stop_strings_are_cut_exactly(stops: list[str], text: str) -> None:
    gate = StopFilter(stops)
    out = "".join(gate.push(piece) for piece in PIECES)
    out += gate.finish()
    assert out == text == gate.text
    assert gate.hit == (text != "alpha beta gamma delta")


@given(st.lists(st.text("ab", max_size=4), max_size=8), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_stop_strings_over_any_pieces_equal_a_search_of_the_whole(pieces: list[str], stops: list[str]) -> None:
    gate, whole = StopFilter(stops), "".join(pieces)
    out = ""
    for piece in pieces:
        out += gate.push(piece)
        assert not any(stop in out for stop in stops)
    out += gate.finish()
    ends = [whole[: i + len(s)] for s in stops if (i := whole.find(s)) >= 0]
    if not ends:
        assert out == whole
    else:
        assert gate.hit
        assert whole.startswith(out)
        assert any(whole[len(out) :].startswith(stop) for stop in stops)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(sc.ScantlingInputError, match="stop string is empty"):
        StopFilter([""])


def test_streamed_text_holds_back_what_may_become_a_stop_string(smollm: Any) -> None:
    whole = complete(smollm, "The capital of France is", 12, Sampling()).text
    stop = whole[8:12]
    pieces: list[str] = []
    done = complete(smollm, "The capital of France is", 12, Sampling(), Options(stop=[stop]), show=pieces.append)
    assert done.finish_reason == "stop"
    assert done.text == whole[: whole.find(stop)] == "".join(pieces)


def test_a_stream_is_the_text_in_pieces(smollm: Any) -> None:
    making, pieces = smollm.stream("Once upon a time", 9, stop=["mysterious"]), []
    while True:
        # What the caller computes between two pieces is the caller's own.
        assert not torch.is_inference_mode_enabled()
        try:
            pieces.append(next(making))
        except StopIteration as end:
            made = end.value
            break
    assert len(pieces) > 1
    assert "".join(pieces) == made.text == smollm.generate("Once upon a time", 9, stop=["mysterious"])
    early = smollm.stream("Once upon a time", 9)
    next(early)
    early.close()
    for prompt, limit in (("", 3), ("a", 0), ("a " * 9000, 3)):
        with pytest.raises(sc.ScantlingInputError):
            smollm.stream(prompt, limit)


def test_empty_prompt_and_limits(smollm: Any) -> None:
    with pytest.raises(sc.ScantlingInputError, match="prompt is empty"):
        complete(smollm, "", 4, Sampling())
    with pytest.raises(sc.ScantlingInputError, match="max_new_tokens is 0"):
        complete(smollm, "a", 0, Sampling())
    with pytest.raises(sc.ScantlingInputError, match="the context holds 8192"):
        complete(smollm, "word " * 9000, 4, Sampling())


def test_the_order_of_the_filters_is_stated() -> None:
    assert "temperature, top-k, top-p, min-p" in (sample.__doc__ or "")
