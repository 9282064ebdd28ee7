"""Tiny encoder-decoders, recorded from the original implementation: logits, both stacks, loss, gradients, targets."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.conftest import GOLDEN, stacks_of

import scantling as sc
from scantling.checkpoint.families import family
from scantling.checkpoint.names import links
from scantling.generate.engine import Session, Source
from scantling.tensor.context import Context

MODELS = [name for name in sorted(p.name for p in (GOLDEN / "tiny").iterdir()) if stacks_of(name) == "encoder-decoder"]


@pytest.fixture(scope="module", params=MODELS)
def case(request: pytest.FixtureRequest) -> tuple[sc.Model, dict[str, Any]]:
    folder = GOLDEN / "tiny" / request.param
    return sc.load(folder), load_file(folder / "io.safetensors")


def close(lm: sc.Model) -> dict[str, float]:
    """The measured tolerances: Marian's embeddings are scaled and never normed, so its rounding is larger."""
    scaled = lm.card.embedding.scale is not None and lm.card.embedding.norm is None
    return {"atol": 2e-4 if scaled else 5e-5, "rtol": 1e-4}


def test_there_is_a_fixture_of_every_family() -> None:
    kinds = {json.loads((GOLDEN / "tiny" / name / "config.json").read_text())["model_type"] for name in MODELS}
    assert kinds == {"t5", "bart", "marian"}


@pytest.mark.parametrize("kernel", ["fused", "reference"])
def test_logits(case: Any, kernel: str) -> None:
    lm, io = case
    real = io["decoder_attention_mask"].bool()
    logits = lm.logits(io["input_ids"], io["attention_mask"], kernel=kernel, decoder_ids=io["decoder_input_ids"])
    torch.testing.assert_close(logits[real], io["logits"][real], **close(lm))


def test_hidden_states_of_both_stacks(case: Any) -> None:
    lm, io = case
    for prefix, mask, ids in (
        ("enc_hidden", "attention_mask", None),
        ("dec_hidden", "decoder_attention_mask", io["decoder_input_ids"]),
    ):
        hidden = lm.hidden(io["input_ids"], io["attention_mask"], decoder_ids=ids)
        recorded = sorted(key for key in io if key.startswith(prefix))
        assert len(hidden) == len(recorded)
        real = io[mask].bool()
        for state, key in zip(hidden, recorded, strict=True):
            torch.testing.assert_close(state[real], io[key][real], **close(lm))


def maps(lm: sc.Model, io: dict[str, Any]) -> dict[str, torch.Tensor]:
    seen: dict[str, torch.Tensor] = {}

    def record(path: str, value: torch.Tensor) -> torch.Tensor:
        return seen.setdefault(path, value)

    padding = io["attention_mask"].bool()
    target = io["decoder_input_ids"]
    ctx = Context.of(target, kernel_name="reference", recorder=record, source_padding=padding)
    with torch.no_grad():
        lm.net(target, ctx, io["input_ids"])
    return seen


def test_cross_attention_maps(case: Any) -> None:
    lm, io = case
    seen = maps(lm, io)
    for i in range(2):
        torch.testing.assert_close(seen[f"decoder.blocks.{i}.cross:weights"][:1], io[f"cross_attn.{i}"], **close(lm))


def test_nobody_reads_padding_of_the_source(case: Any) -> None:
    lm, io = case
    padding = io["attention_mask"] == 0
    assert int(padding.sum()) == 11
    for path, weights in maps(lm, io).items():
        if path.endswith(("cross:weights", "attn:weights")) and weights.shape[-1] == padding.shape[1]:
            hidden = weights.masked_select(padding[:, None, None, :])
            if path.startswith("encoder"):
                # A padded position reads itself, so that its row is not empty.
                own = torch.eye(padding.shape[1], dtype=torch.bool) & padding[:, None, None, :]
                hidden = weights.masked_select(padding[:, None, None, :] & ~own)
            assert float(hidden.abs().max()) == 0.0
            torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))


def test_self_attention_of_the_original(case: Any) -> None:
    """All maps of both stacks, against the original implementation run here."""
    transformers = pytest.importorskip("transformers")
    lm, io = case
    seen = maps(lm, io)
    folder = GOLDEN / "tiny" / lm.card.name
    original = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder, attn_implementation="eager")
    with torch.no_grad():
        out = original(
            input_ids=io["input_ids"],
            attention_mask=io["attention_mask"],
            decoder_input_ids=io["decoder_input_ids"],
            output_attentions=True,
        )
    real, target = io["attention_mask"].bool(), io["decoder_attention_mask"].bool()
    for stack, theirs, rows in (("encoder", out.encoder_attentions, real), ("decoder", out.decoder_attentions, target)):
        assert len(theirs) == len(lm.parts.stacks[stack].blocks)
        for i, recorded in enumerate(theirs):
            ours = seen[f"{stack}.blocks.{i}.attn:weights"].transpose(1, 2)[rows]
            torch.testing.assert_close(ours, recorded.transpose(1, 2)[rows], **close(lm))


def test_loss(case: Any) -> None:
    lm, io = case
    meta = json.loads((GOLDEN / "tiny" / lm.card.name / "meta.json").read_text())
    loss = lm.loss(io["input_ids"], io["labels"], io["attention_mask"])
    assert float(loss) == pytest.approx(meta["loss"], abs=1e-5)
    assert lm.parts.params == meta["n_params"]


def test_targets_of_padded_sources(case: Any) -> None:
    lm, io = case
    rows = lm.generate(io["gen_input_ids"], 20, attention_mask=io["gen_attention_mask"], ignore_eos=True)
    assert torch.equal(rows, io["expected_ids"])


def test_each_source_alone_gives_what_the_batch_gives(case: Any) -> None:
    lm, io = case
    assert int(io["gen_attention_mask"].sum()) < io["gen_attention_mask"].numel()
    for row, mask, wanted in zip(io["gen_input_ids"], io["gen_attention_mask"], io["expected_ids"], strict=True):
        assert torch.equal(lm.generate(row[mask.bool()], 20, ignore_eos=True)[0], wanted)


def test_cached_logits_equal_the_recorded_ones_step_by_step(case: Any) -> None:
    lm, io = case
    ids, padding = io["gen_input_ids"], io["gen_attention_mask"].bool()
    session = Session(lm, ids.shape[0], 20, source=Source(ids, padding))
    with torch.inference_mode():
        logits = session.prefill(io["expected_ids"][:, :1])
        for i in range(20):
            torch.testing.assert_close(logits, io["gen_logits"][:, i], **close(lm))
            if i < 19:
                logits = session.step(io["expected_ids"][:, i + 1])
    assert session.cache.length == 20


def test_a_session_keeps_what_the_parts_declare(case: Any) -> None:
    lm, io = case
    ids = io["gen_input_ids"]
    session = Session(lm, 2, 20, source=Source(ids))
    attention = lm.card.attention if lm.card.decoder is None else lm.card.decoder.attention or lm.card.attention
    per_position = 2 * 4 * len(lm.parts.decoder.blocks) * attention.n_heads * attention.d_head
    assert session.cache.nbytes == 2 * per_position * (20 + ids.shape[1])


def test_every_parameter_has_the_gradient_of_the_original(case: Any) -> None:
    """Law 6 with values, weight by weight under their own names."""
    transformers = pytest.importorskip("transformers")
    lm, io = case
    folder = GOLDEN / "tiny" / lm.card.name
    original = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder, attn_implementation="eager")
    named = {"input_ids": io["input_ids"], "attention_mask": io["attention_mask"], "labels": io["labels"]}
    original(**named).loss.backward()
    theirs = {n: p.grad for n, p in original.named_parameters() if p.grad is not None}

    lm = sc.load(folder)
    lm.net.requires_grad_(True)
    target = lm.shifted(io["labels"])
    assert torch.equal(target[io["labels"] != -100], io["decoder_input_ids"][io["labels"] != -100])
    ctx = Context.of(target, source_padding=io["attention_mask"].bool())
    logits = lm.net(target, ctx, io["input_ids"])
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), io["labels"].flatten()).backward()
    ours = {n: p.grad for n, p in lm.net.named_parameters() if ".position.table" not in n or p.grad is not None}
    assert all(grad is not None for grad in ours.values())
    model_type = json.loads((folder / "config.json").read_text())["model_type"]
    compared = set()
    for link in links(family(model_type, lm.card.name).rows(lm.card), lm.parts.named_stored):
        if link.ours == ("head.bias",):
            assert "final_logits_bias" not in theirs
            continue
        for their_name, grad in zip(link.theirs, link.transform.save([ours[n] for n in link.ours]), strict=True):
            wanted = theirs[their_name]
            if link.ours == ("embed.weight",) and original.config.pad_token_id == lm.start_id:
                # By design: the original never trains the row of its padding id by what it looks up, and targets begin
                # with that id here.
                grad, wanted = (x[: lm.start_id] for x in (grad, wanted))
            torch.testing.assert_close(grad, wanted, atol=close(lm)["atol"] / 5, rtol=2e-3)
            compared.add(their_name)
    # Loaded from a file, the original's fixed waves have gradients that its optimizer would follow; ours have none.
    waves = {f"model.{stack}.embed_positions.weight" for stack in ("encoder", "decoder") if model_type == "marian"}
    assert compared == set(theirs) - waves


def test_the_decoder_reads_labels_shifted_once() -> None:
    """Labels [7, 8, 9, 1] and start id 0: the decoder reads [0, 7, 8, 9], and all four labels are judged."""
    lm = sc.load(GOLDEN / "tiny" / "t5")
    labels = torch.tensor([[7, 8, 9, 1]])
    assert lm.start_id == 0
    assert lm.shifted(labels).tolist() == [[0, 7, 8, 9]]
    source = [[5, 6, 1]]
    logits = lm.logits(source, decoder_ids=[[0, 7, 8, 9]])
    wanted = -logits.log_softmax(-1)[0, range(4), labels[0]].mean()
    assert float(lm.loss(source, labels)) == pytest.approx(float(wanted), abs=1e-6)
    cut = torch.tensor([[7, 8, 9, -100]])
    wanted = -logits.log_softmax(-1)[0, range(3), labels[0, :3]].mean()
    assert float(lm.loss(source, cut)) == pytest.approx(float(wanted), abs=1e-6)


def test_a_target_begins_with_what_the_checkpoint_says_and_ends_with_eos() -> None:
    lm = sc.load(GOLDEN / "tiny" / "bart")
    rows = lm.generate([[5, 6, 7]], 8, ignore_eos=True)
    assert rows.shape == (1, 9)
    assert rows[0, 0] == lm.start_id == 2
    assert lm.generate([[5, 6, 7], [8, 9, 10]], 0).tolist() == [[2], [2]]
    first = int(rows[0, 1])
    ends = sc.Model(lm.card, lm.parts, lm.net, eos_ids=frozenset({first}), start_id=2)
    assert ends.generate([[5, 6, 7]], 8).tolist() == [[2, first]]
    silent = sc.Model(lm.card, lm.parts, lm.net)
    with pytest.raises(sc.ScantlingInputError, match="decoder_start_token_id"):
        silent.generate([[5, 6, 7]], 8)


def test_targets_end_where_the_table_of_positions_ends() -> None:
    for name, text in (("bart", "64 learned positions"), ("marian", "64 positions in a table")):
        lm = sc.load(GOLDEN / "tiny" / name)
        rows = lm.generate([[5, 6, 7]], 100, ignore_eos=True)
        assert rows.shape == (1, 65)
        assert lm.generate([[5] * 64], 1, ignore_eos=True).shape == (1, 2)
        with pytest.raises(sc.ScantlingInputError, match=f"65 tokens and the model has {text}"):
            lm.generate([[5] * 65], 1)
        with pytest.raises(sc.ScantlingInputError, match=f"65 tokens and the model has {text}"):
            lm.logits([[5, 6]], decoder_ids=[[2] * 65])


def test_relative_positions_have_no_end() -> None:
    lm = sc.load(GOLDEN / "tiny" / "t5")
    card = json.loads((GOLDEN / "tiny" / "t5" / "config.json").read_text())
    assert "n_positions" not in card
    assert lm.generate([[5] * 600], 2, ignore_eos=True).shape == (1, 3)


def test_draws_of_a_row_are_its_own() -> None:
    lm = sc.load(GOLDEN / "tiny" / "t5-v1_1")
    rows = [[5, 9, 11], [1, 2, 3]]
    together = lm.generate(rows, 12, temperature=1.0, seed=4, ignore_eos=True)
    assert not torch.equal(together, lm.generate(rows, 12, ignore_eos=True))
    for row, drawn in zip(rows, together, strict=True):
        assert torch.equal(lm.generate([row], 12, temperature=1.0, seed=4, ignore_eos=True)[0], drawn)


def test_a_source_of_padding_is_refused() -> None:
    lm = sc.load(GOLDEN / "tiny" / "t5")
    with pytest.raises(sc.ScantlingInputError, match="padding only"):
        lm.generate([[1, 2], [3, 4]], 2, attention_mask=[[1, 1], [0, 0]])
