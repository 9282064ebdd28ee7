"""`scantling lens`: its views, its files, and what it says of bad input."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.conftest import GOLDEN

import scantling as sc
from scantling.cli.main import _run
from scantling.lens import attention_maps

TINY = GOLDEN / "tiny"
LLAMA = ["-m", str(TINY / "llama-gqa"), "--ids"]
IDS = "5 17 9 40 22 8"


def said(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> str:
    assert _run(["lens", *words]) == status
    captured = capsys.readouterr()
    return captured.err if status else captured.out


def found(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    return json.loads(said(capsys, *words, "--json"))


@pytest.fixture(scope="module")
def llama() -> sc.Model:
    return sc.load(TINY / "llama-gqa")


def test_the_summary_says_what_the_model_says(capsys: pytest.CaptureFixture[str], llama: sc.Model) -> None:
    data = found(capsys, IDS, *LLAMA, "--temperature", "1", "--temperature", "0.5")
    logits = llama.logits([[int(i) for i in IDS.split()]])[0, -1]
    assert [token["id"] for token in data["tokens"]] == [int(i) for i in IDS.split()]
    assert data["position"] == 5
    first = data["next"][0]["tokens"][0]
    assert first["id"] == int(logits.argmax())
    assert first["probability"] == pytest.approx(float(logits.softmax(-1).max()), abs=1e-6)
    assert data["next"][1]["tokens"][0]["probability"] == pytest.approx(float((2 * logits).softmax(-1).max()), abs=1e-6)
    assert [row["point"] for row in data["logit-lens"]] == [
        "decoder.blocks.0:in",
        "decoder.blocks.0",
        "decoder.blocks.1",
    ]
    assert data["logit-lens"][-1]["rank"] == 1
    terms = data["attribution"]["terms"]
    a, b = data["attribution"]["token"], data["attribution"]["against"]
    assert sum(t["logit"] for t in terms) == pytest.approx(float(logits[a]), abs=1e-5)
    assert sum(t["difference"] for t in terms) == pytest.approx(float(logits[a] - logits[b]), abs=1e-5)
    maps = attention_maps(llama, [[int(i) for i in IDS.split()]])
    for path, weights in maps.items():
        torch.testing.assert_close(torch.tensor(data["attention"][f"{path}:weights"]), weights[0], atol=1e-6, rtol=0)


def test_the_lens_of_every_token_ends_in_the_models_choices(
    capsys: pytest.CaptureFixture[str], llama: sc.Model, tmp_path: Path
) -> None:
    html = tmp_path / "grid.html"
    data = found(capsys, IDS, *LLAMA, "--every-token", f"--html={html}")["logit-lens"]
    logits = llama.logits([[int(i) for i in IDS.split()]])[0]
    assert [token["id"] for token in data[-1]["top"]] == logits.argmax(-1).tolist()
    best = logits.softmax(-1).max(-1).values.tolist()
    assert [token["probability"] for token in data[-1]["top"]] == pytest.approx(best, abs=1e-6)
    assert f">#{int(logits[-1].argmax())}</td>" in html.read_text()


def test_the_table_of_one_head_is_its_map(capsys: pytest.CaptureFixture[str], llama: sc.Model) -> None:
    out = said(capsys, IDS, *LLAMA, "--layer", "-1", "--head", "2")
    weights = attention_maps(llama, [[int(i) for i in IDS.split()]], [1])["decoder.blocks.1.attn"][0, 2]
    rows = [line.split() for line in out.splitlines() if line.startswith((" '#", "'#"))]
    assert [row[0] for row in rows if len(row) == 7] == [f"'#{i}'" for i in IDS.split()]
    printed = torch.tensor([[float(x) for x in row[1:]] for row in rows if len(row) == 7])
    torch.testing.assert_close(printed, weights, atol=1e-4, rtol=1e-3)


def test_every_family_has_a_summary(capsys: pytest.CaptureFixture[str]) -> None:
    bert = found(capsys, IDS, "-m", str(TINY / "bert"), "--ids", "--position", "2")
    assert set(bert) == {"model", "tokens", "position", "next", "logit-lens", "attention"}
    vectors = found(capsys, IDS, "-m", str(TINY / "electra-discriminator"), "--ids")
    assert set(vectors) == {"model", "tokens", "position", "attention", "residual"}
    t5 = found(capsys, IDS, "-m", str(TINY / "t5"), "--ids", "--target", "7 9", "--show", "cross-attention")
    assert len(t5["tokens"]) == 3
    source = found(capsys, IDS, "-m", str(TINY / "t5"), "--ids", "--stack", "encoder")
    assert [token["id"] for token in source["tokens"]] == [int(i) for i in IDS.split()]
    assert set(source["attention"]) == {f"encoder.blocks.{i}.attn:weights" for i in range(2)}
    assert sum(t["share"] for t in source["residual"]["terms"]) == pytest.approx(1.0, abs=1e-5)
    (first, *_) = t5["cross-attention"].values()
    assert torch.tensor(first).shape[1:] == (3, 6)
    torch.testing.assert_close(torch.tensor(first).sum(-1), torch.ones(len(first), 3), atol=1e-5, rtol=0)


def test_patching_and_what_it_restores(capsys: pytest.CaptureFixture[str], llama: sc.Model) -> None:
    other = "5 17 9 41 22 8"
    data = found(capsys, IDS, *LLAMA, "--corrupted", other, "--token", "#3", "--against", "#4")["patch"]
    logits = [llama.logits([[int(i) for i in ids.split()]])[0, -1] for ids in (IDS, other)]
    assert data["clean"] == pytest.approx(float(logits[0][3] - logits[0][4]), abs=1e-5)
    assert data["corrupted"] == pytest.approx(float(logits[1][3] - logits[1][4]), abs=1e-5)
    assert data["restored"][-1][:3] == pytest.approx([0.0] * 3, abs=1e-4)
    assert data["restored"][-1][-1] == pytest.approx(1.0, abs=1e-4)
    noisy = found(capsys, IDS, *LLAMA, "--noise", "1-2", "--metric", "probability", "--patch", "mlp")["patch"]
    assert noisy["metric"] == "probability"
    assert noisy["restored"][0][0] == pytest.approx(0.0, abs=1e-4)


def test_patching_a_source(capsys: pytest.CaptureFixture[str]) -> None:
    """One place by hand: the clean stream of source token 3 after encoder block 1, in the pass of the other source."""
    words = ["-m", str(TINY / "t5"), "--ids", "--stack", "encoder", "--corrupted", "5 17 9 41 22 8"]
    grid = found(capsys, IDS, *words, "--token", "#3", "--against", "#4")["patch"]
    lm = sc.load(TINY / "t5")
    net: Any = lm.net
    clean, other, start = [5, 17, 9, 40, 22, 8], [5, 17, 9, 41, 22, 8], [[lm.start_id]]
    kept: list[torch.Tensor] = []
    hook = net.encoder.blocks[1].register_forward_hook(lambda _, __, out: kept.append(out))
    lm.logits([clean], decoder_ids=start)
    hook.remove()
    hook = net.encoder.blocks[1].register_forward_hook(
        lambda _, __, out: torch.cat((out[:, :3], kept[0][:, 3:4], out[:, 4:]), 1)
    )
    logits = lm.logits([other], decoder_ids=start)[0, -1]
    hook.remove()
    assert grid["values"][1][3] == pytest.approx(float(logits[3] - logits[4]), abs=1e-4)


def test_neurons_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--ablate", "1.mlp:hidden[5,7]", "--ablate", "0.attn:mixed[2]", "--token", "#3", "--against", "#4"]
    data = found(capsys, IDS, *LLAMA, *words)
    cut = sc.load(TINY / "llama-gqa")
    net: Any = cut.net
    width = cut.card.attention.d_head
    net.decoder.blocks[0].attn.o.weight[:, 2 * width : 3 * width] = 0
    net.decoder.blocks[1].mlp.down.weight[:, [5, 7]] = 0
    logits = cut.logits([[int(i) for i in IDS.split()]])[0, -1]
    assert data["ablate"]["after"] == pytest.approx(float(logits[3] - logits[4]), abs=1e-4)


def test_ablation_by_name(capsys: pytest.CaptureFixture[str], llama: sc.Model) -> None:
    data = found(capsys, IDS, *LLAMA, "--ablate", "0.1", "--ablate", "1.mlp", "--token", "#3", "--against", "#4")
    cut = sc.load(TINY / "llama-gqa")
    net: Any = cut.net
    width = cut.card.attention.d_head
    net.decoder.blocks[0].attn.o.weight[:, width : 2 * width] = 0
    net.decoder.blocks[1].mlp.down.weight[:] = 0
    logits = cut.logits([[int(i) for i in IDS.split()]])[0, -1]
    assert data["ablate"]["after"] == pytest.approx(float(logits[3] - logits[4]), abs=1e-4)


def test_a_direction_from_a_file_steers(capsys: pytest.CaptureFixture[str], tmp_path: Path, llama: sc.Model) -> None:
    vector = torch.randn(llama.card.d_model, generator=torch.Generator().manual_seed(0))
    save_file({"decoder.blocks.1": vector}, tmp_path / "d.safetensors")
    words = ["--direction", str(tmp_path / "d.safetensors"), "--strength", "4", "--token", "#3", "--against", "#4"]
    data = found(capsys, IDS, *LLAMA, *words, "--max-new-tokens", "3")["steer"]
    net: Any = llama.net
    hook = net.decoder.blocks[1].register_forward_hook(lambda _, __, out: out + 4 * vector)
    logits = llama.logits([[int(i) for i in IDS.split()]])[0, -1]
    new = llama.generate([[int(i) for i in IDS.split()]], 3)[0, 6:]
    hook.remove()
    assert data["after"] == pytest.approx(float(logits[3] - logits[4]), abs=1e-4)
    assert data["texts"][1] == "".join(f"#{int(i)}" for i in new)


def test_induction_needs_no_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    data = found(capsys, "-m", str(TINY / "llama-gqa"), "--show", "induction", "--length", "6", "--rows", "2")
    assert {(s["layer"], s["head"]) for s in data["induction"]} == {(i, j) for i in range(2) for j in range(6)}
    assert all(0 <= s["induction"] <= 1 for s in data["induction"])


def test_files_hold_what_was_shown(capsys: pytest.CaptureFixture[str], tmp_path: Path, llama: sc.Model) -> None:
    files = [f"--{kind}={tmp_path / f'out.{kind}'}" for kind in ("html", "png", "svg")]
    arrays = tmp_path / "out.safetensors"
    words = [*files, f"--arrays={arrays}", "--capture", "*.mlp:hidden", "--token", "#3"]
    said(capsys, IDS, *LLAMA, *words)
    assert (tmp_path / "out.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert "<svg" in (tmp_path / "out.svg").read_text()
    page = (tmp_path / "out.html").read_text()
    assert "http" not in page.replace("http-equiv", "")
    assert "what adds to the logit of &#x27;#3&#x27;" in page
    held = load_file(arrays)
    assert {"decoder.blocks.0.mlp:hidden", "decoder.blocks.1.attn:weights", "attribution.values"} <= set(held)
    maps = attention_maps(llama, [[int(i) for i in IDS.split()]])
    torch.testing.assert_close(held["decoder.blocks.1.attn:weights"], maps["decoder.blocks.1.attn"][0])


def test_points_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    listed = said(capsys, "-m", str(TINY / "t5"), "--show", "points").split()
    assert {"decoder.blocks.0.cross:weights", "encoder.blocks.1:in", "decoder.final_norm"} <= set(listed)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "give a PROMPT"),
        (["  ", *LLAMA], "the prompt is empty"),
        (["5 x", *LLAMA], "ids are whole numbers"),
        (["hello", "-m", str(TINY / "llama-gqa")], "give the prompt as ids"),
        ([IDS, *LLAMA, "--show", "atention"], "did you mean 'attention'"),
        ([IDS, *LLAMA, "--layer", "2"], "layers 0 to 1"),
        ([IDS, *LLAMA, "--layer", "1", "--head", "9"], "heads 0 to 5"),
        ([IDS, *LLAMA, "--position", "6"], "there are 6 tokens"),
        ([IDS, *LLAMA, "--token", "#999"], "outside the vocabulary of 131"),
        ([IDS, *LLAMA, "--token", "#3", "--against", "#3"], "compared with itself"),
        ([IDS, *LLAMA, "--show", "patch"], "patch needs a --corrupted TEXT or --noise"),
        ([IDS, *LLAMA, "--corrupted", "5 17"], "6 tokens and the corrupted one 2"),
        ([IDS, *LLAMA, "--noise", "1-x"], "positions are needed, as in 0-2,5"),
        ([IDS, *LLAMA, "--noise", "9"], "position 9: there are 6 tokens"),
        ([IDS, *LLAMA, "--noise", "1", "--patch", "stream2"], "use one of stream, attn, cross, mlp, heads"),
        ([IDS, *LLAMA, "--ablate", "7.1"], "layers 0 to 1"),
        ([IDS, *LLAMA, "--ablate", "1.mpl"], "did you mean 'decoder.blocks.1.mlp'"),
        ([IDS, *LLAMA, "--ablate", "1.9"], "9 is none of 0 to 5"),
        ([IDS, *LLAMA, "--toward", "a"], "1 --toward and 0 --away"),
        ([IDS, *LLAMA, "--toward", "a", "--away", "b"], "no tokenizer"),
        ([IDS, *LLAMA, "--show", "steer"], "steer needs a --direction FILE"),
        ([IDS, *LLAMA, "--direction", "/nowhere.safetensors"], "nowhere.safetensors"),
        ([IDS, *LLAMA, "--tuned", "/nowhere.safetensors"], "nowhere.safetensors"),
        ([IDS, *LLAMA, "--temperature", "nan"], "temperature is nan"),
        ([IDS, *LLAMA, "--capture", "decoder.blocks.0"], "--capture goes with --arrays FILE"),
        ([IDS, *LLAMA, "--at", "0"], "--at goes with --show steer, which is not asked for"),
        ([IDS, *LLAMA, "--ablate", "1.mlp", "--noise-size", "2"], "--noise-size goes with --show patch"),
        ([IDS, *LLAMA, "--metric", "probability"], "--metric goes with --show patch or ablate or steer"),
        ([IDS, *LLAMA, "--show", "attention", "--temperature", "2"], "--temperature goes with --show next"),
        ([IDS, *LLAMA, "--direction", "x.safetensors", "--at", "0"], "a --direction has its point"),
        ([IDS, *LLAMA, "--html", "/nowhere/x.html"], "the folder /nowhere does not exist"),
        ([IDS, *LLAMA, "--png", "x.jpg"], "must end in .png"),
        ([IDS, *LLAMA, "--show", "points", "--show", "next"], "goes with no other view"),
        ([IDS, *LLAMA, "--show", "cross-attention"], "no cross-attention to show"),
        ([IDS, *LLAMA, "--target", "5"], "has no target"),
        ([IDS, *LLAMA, "--stack", "encoder"], "no stack 'encoder'"),
        ([IDS, "-m", str(TINY / "t5"), "--ids", "--stack", "encoder", "--show", "next"], "next is of the decoder"),
        ([IDS, "-m", str(TINY / "bert"), "--ids", "--show", "attribution"], "no sum over the stream"),
        ([IDS, "-m", str(TINY / "electra-discriminator"), "--ids", "--show", "next"], "logits of a vocabulary"),
        (["-m", str(TINY / "t5"), "--show", "induction"], "is an encoder-decoder"),
        ([IDS, "-m", "llama-3-8b", "--ids"], "without weights"),
    ],
)
def test_bad_input_is_one_sentence(capsys: pytest.CaptureFixture[str], words: list[str], sentence: str) -> None:
    error = said(capsys, *words, status=2)
    lines = [line for line in error.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert sentence in lines[0]


def test_charts_name_the_library_that_draws_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    error = said(capsys, IDS, *LLAMA, "--png", str(tmp_path / "x.png"), status=2)
    assert "pip install 'scantling[plot]'" in error
    assert list(tmp_path.iterdir()) == []
