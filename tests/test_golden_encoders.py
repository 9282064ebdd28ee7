"""Tiny encoders of every family, recorded from the original implementation: logits, hidden states, maps, gradients."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.conftest import DATA, GOLDEN, stacks_of

import scantling as sc
from scantling.checkpoint.families import family
from scantling.checkpoint.hf_config import read_config
from scantling.checkpoint.names import links
from scantling.passes import Given, prepare
from scantling.tensor.context import Context

MODELS = [name for name in sorted(p.name for p in (GOLDEN / "tiny").iterdir()) if stacks_of(name) == "encoder"]
CLOSE = {"atol": 5e-5, "rtol": 1e-4}


@pytest.fixture(scope="module", params=MODELS)
def case(request: pytest.FixtureRequest) -> tuple[sc.Model, dict[str, Any], dict[str, Any]]:
    folder = GOLDEN / "tiny" / request.param
    io = load_file(folder / "io.safetensors")
    return sc.load(folder), io, json.loads((folder / "meta.json").read_text())


def real(io: dict[str, Any]) -> torch.Tensor:
    return io["attention_mask"].bool()


def of(lm: sc.Model, io: dict[str, Any], **more: Any) -> torch.Tensor:
    return lm.logits(io["input_ids"], io["attention_mask"], token_type_ids=io.get("token_type_ids"), **more)


def test_all_families_are_there() -> None:
    assert {"bert", "roberta", "distilbert", "electra-generator", "electra-discriminator", "modernbert"} <= set(MODELS)


@pytest.mark.parametrize("kernel", ["fused", "reference"])
def test_logits(case: Any, kernel: str) -> None:
    lm, io, _ = case
    torch.testing.assert_close(of(lm, io, kernel=kernel)[real(io)], io["logits"][real(io)], **CLOSE)


def test_hidden_states(case: Any) -> None:
    lm, io, _ = case
    hidden = lm.hidden(io["input_ids"], io["attention_mask"], token_type_ids=io.get("token_type_ids"))
    assert len(hidden) == lm.card.n_layers + 1
    for i, state in enumerate(hidden):
        torch.testing.assert_close(state[real(io)], io[f"hidden.{i}"][real(io)], **CLOSE)


def test_attention_maps(case: Any) -> None:
    lm, io, _ = case
    seen = {}
    given = Given(io["attention_mask"], token_type_ids=io.get("token_type_ids"))
    _, ctx, _ = prepare(lm, io["input_ids"], given, "reference")
    ctx.recorder = lambda path, value: seen.setdefault(path, value)
    lm.net(io["input_ids"], ctx)
    maps = [name for name in io if name.startswith("attn.")]
    assert len(maps) == 2
    for name in maps:
        weights = seen[f"encoder.blocks.{name.removeprefix('attn.')}.attn:weights"][:1]
        torch.testing.assert_close(weights, io[name], **CLOSE)


def test_windows_differ_from_no_windows() -> None:
    """The recorded row is longer than a window, so a model without them gives other logits."""
    folder = GOLDEN / "tiny" / "modernbert"
    lm, io = sc.load(folder), load_file(folder / "io.safetensors")
    assert [block.attn.part.visibility.window for block in lm.net.encoder.blocks] == [None, 4, 4, None]
    weights = {}
    _, ctx, _ = prepare(lm, io["input_ids"][:1], Given(), "reference")
    ctx.recorder = lambda path, value: weights.setdefault(path, value)
    lm.net(io["input_ids"][:1], ctx)
    near = weights["encoder.blocks.1.attn:weights"][0, 0]
    far = (torch.arange(22)[:, None] - torch.arange(22)[None]).abs() > 3
    assert float(near[far].abs().max()) == 0
    assert float(near[~far].min()) > 0


def test_loss_is_the_recorded_one(case: Any) -> None:
    lm, io, meta = case
    if lm.card.head.kind == "lm":
        ids, mask, labels = io["input_ids"], io["attention_mask"], io["labels"]
        wanted = torch.nn.functional.cross_entropy(io["logits"].flatten(0, 1), labels.flatten(), ignore_index=-100)
        if "token_type_ids" in io:
            ours = torch.nn.functional.cross_entropy(of(lm, io).flatten(0, 1), labels.flatten())
        else:
            ours = lm.loss(ids, labels, mask)
        assert float(ours) == pytest.approx(float(wanted), abs=1e-5)
        assert float(ours) == pytest.approx(meta["loss"], abs=1e-5)
    else:
        judged = real(io)
        ours = torch.nn.functional.binary_cross_entropy_with_logits(of(lm, io)[judged], io["labels"][judged].float())
        assert float(ours) == pytest.approx(meta["loss"], abs=1e-5)


def test_each_row_alone_gives_what_the_batch_gives(case: Any) -> None:
    lm, io, _ = case
    whole, places = of(lm, io), torch.arange(io["input_ids"].shape[1])[None]
    counts_pads = getattr(lm.card.position, "pad_id", None) is not None
    for i, mask in enumerate(real(io)):
        types = io["token_type_ids"][i : i + 1, mask] if "token_type_ids" in io else None
        # Learned positions follow the columns; those counted from padding ids start anew in each row.
        given = None if counts_pads else places[:, mask]
        alone = lm.logits(io["input_ids"][i : i + 1, mask], None, given, token_type_ids=types)
        torch.testing.assert_close(alone[0], whole[i, mask], **CLOSE)


@pytest.mark.parametrize("name", [n for n in MODELS if (GOLDEN / "tiny" / n / "config_hub.json").exists()])
def test_both_spellings_of_the_config_give_one_card(name: str) -> None:
    folder = GOLDEN / "tiny" / name
    new, old = (read_config(Path(folder / file))[0] for file in ("config.json", "config_hub.json"))
    assert sc.assemble(new) == sc.assemble(old)


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_has_the_gradient_of_the_original(name: str) -> None:
    """Law 6 with values, against the original implementation run here, weight by weight under its own names."""
    transformers = pytest.importorskip("transformers")
    folder = GOLDEN / "tiny" / name
    io, config = load_file(folder / "io.safetensors"), json.loads((folder / "config.json").read_text())
    inputs = {key: io[key] for key in ("input_ids", "attention_mask", "token_type_ids") if key in io}
    original = getattr(transformers, config["architectures"][0]).from_pretrained(folder, attn_implementation="eager")
    original(**inputs, labels=io["labels"]).loss.backward()
    theirs = {n: p.grad for n, p in original.named_parameters()}

    lm = sc.load(folder)
    lm.net.requires_grad_(True)
    logits = lm.net(io["input_ids"], Context.of(io["input_ids"], padding=real(io), types=io.get("token_type_ids")))
    if lm.card.head.kind == "lm":
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), io["labels"].flatten())
    else:
        judged = real(io)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits[judged], io["labels"][judged].float())
    loss.backward()
    ours = {n: p.grad for n, p in lm.net.named_parameters()}
    assert all(grad is not None for grad in ours.values())
    compared = 0
    for link in links(family(config["model_type"], name).rows(lm.card), lm.parts.named_stored):
        for their_name, grad in zip(link.theirs, link.transform.save([ours[n] for n in link.ours]), strict=True):
            if their_name in theirs:
                torch.testing.assert_close(grad, theirs[their_name], atol=2e-6, rtol=2e-3)
                compared += 1
    assert compared == len(theirs)


def test_old_names_of_bert() -> None:
    """gamma and beta, a position buffer, a pooler and a next-sentence head, recorded with transformers."""
    folder = DATA / "checkpoints" / "bert-gamma-beta"
    wanted = json.loads((folder / "expected.json").read_text())
    lm = sc.load(folder)
    logits = lm.logits(wanted["input_ids"])[0]
    torch.testing.assert_close(logits[-1], torch.tensor(wanted["last_row"]), atol=2e-6, rtol=0)
    assert logits.argmax(-1).tolist() == wanted["argmax"]
    assert lm.parts.params == wanted["parameters_mlm"]
    (note,) = lm.notes
    for name in ("bert.embeddings.position_ids", "bert.pooler.dense.weight", "cls.seq_relationship.weight"):
        assert name in note


def test_the_same_file_as_an_encoder_without_that_head(tmp_path: Path) -> None:
    """A bare model takes the pooler and leaves the heads; its stream is that of the masked language model."""
    folder = DATA / "checkpoints" / "bert-gamma-beta"
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["BertModel"]}))
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    bare, masked = sc.load(tmp_path), sc.load(folder)
    ids = [[5, 9, 2, 41]]
    assert torch.equal(bare.hidden(ids)[-1], masked.hidden(ids)[-1])
    pooled = load_file(folder / "model.safetensors")
    wanted = torch.tanh(
        bare.hidden(ids)[-1][:, 0] @ pooled["bert.pooler.dense.weight"].T + pooled["bert.pooler.dense.bias"]
    )
    torch.testing.assert_close(bare.logits(ids), wanted, atol=1e-6, rtol=0)
    assert "cls.predictions.transform.dense.weight" in bare.notes[0]
