"""The trace against what torch does: each product of a real backward, each gradient; then the command and its files."""

from __future__ import annotations

import json
import re
from collections import Counter
from html.parser import HTMLParser
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from tests.test_laws import CARDS, SAMPLED, ids_of, sampled_cards, source_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

import scantling as sc
from scantling.cards import Card, presets
from scantling.cli.main import _run
from scantling.numbers.flops import BACKWARD, recomputed
from scantling.numbers.trace import trace
from scantling.parts.part import Workload
from scantling.tensor.context import Context


class Products(TorchDispatchMode):
    """FLOPs of each matrix product that torch executes, by the formulas of its own counter."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func._overloadpacket in flop_registry:
            self.found.append(flop_registry[func._overloadpacket](*args, **(kwargs or {}), out_val=out))
        return out


def check_backward(card: Card) -> None:
    """Each product of the backward pass of a real training step, and a gradient for every weight that gets one."""
    model = sc.assemble(card)
    net, ids = model.build().train(), ids_of(card, 2, 6)
    source = source_of(net, ids)
    ctx = Context.of(ids, training=True, kernel_name="reference")
    logits = net(ids, ctx, source)
    _, loss = model.outcome(net, ids, logits, ctx)
    with Products() as products:
        (logits.sum() if loss is None else loss).backward()
    w = Workload(2, 6, source=7, training=True, kernel="reference", unrolled=True)
    rows = [row for row in trace(model, w).rows if row.stage == "backward"]
    assert sorted(products.found) == sorted(row.cost.full for row in rows if row.cost.full)
    made = Counter(row.shape for row in rows if "of a weight" in row.note.lower())
    given_by_torch = Counter(tuple(p.grad.shape) for p in net.parameters() if p.grad is not None)
    table = tuple(model.table.named_weights["weight"])
    # A table that is used more than once gets that many gradients, which torch adds up.
    made[table] -= made[table] - given_by_torch[table]
    assert +made == given_by_torch


@pytest.mark.parametrize("name", CARDS)
def test_the_backward_is_what_torch_does(name: str) -> None:
    check_backward(CARDS[name])


@SAMPLED
@given(sampled_cards())
def test_the_backward_of_sampled_cards_is_what_torch_does(card: Card) -> None:
    check_backward(card)


@pytest.mark.parametrize("name", presets())
def test_rows_add_up_to_the_totals(name: str) -> None:
    model = sc.assemble(sc.card(name))
    for kernel in ("fused", "reference"):
        for policy in ("none", "selective", "block"):
            w = Workload(2, 24, training=True, kernel=kernel, recompute=policy)
            found = trace(model, w)
            forward = found.cost("forward")
            assert found.cost("backward") == forward.scaled(BACKWARD)
            assert found.cost("forward again").full == recomputed(model, w)
    found = trace(model, Workload(2, 24))
    assert sum(row.params * row.repeat for row in found.rows) == model.params == found.params
    assert {row.stage for row in found.rows} == {"forward"}


def answer(capsys: pytest.CaptureFixture[str], *args: str) -> Any:
    assert _run([*args, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


class TestTheCommand:
    def test_training_goes_forward_and_back(self, capsys: pytest.CaptureFixture[str]) -> None:
        found = answer(capsys, "trace", "gpt2", "--train", "--tokens", "1024")
        steps = found["steps"]
        assert [stage for stage, _ in groupby(s["stage"] for s in steps)] == ["forward", "backward"]
        # What torch counted of the original: forward 291,648,307,200 and twice that.
        assert (found["forward_flops"], found["training_flops"]) == (291648307200, 3 * 291648307200)
        assert found["total_flops"] == found["training_flops"] == sum(s["flops"] * s["repeat"] for s in steps)
        assert found["backward_flops"] == sum(s["flops"] * s["repeat"] for s in steps if s["stage"] == "backward")
        assert found["saved_bytes"] == sum(s["saved_bytes"] * s["repeat"] for s in steps) > 0
        assert found["total_params"] == sum(s["params"] * s["repeat"] for s in steps) == 124439808
        head = [s for s in steps if s["path"] == "head:product" and s["stage"] == "backward"]
        assert [(s["op"], s["shape"], s["symbols"]) for s in head] == [
            ("gradient of E", [50257, 768], ["V", "d_model"]),
            ("gradient of x", [1, 1024, 768], ["B", "T", "d_model"]),
        ][::-1]
        assert [s["flops"] for s in head] == [2 * 1024 * 768 * 50257] * 2

    def test_what_is_done_again_stands_before_the_gradients_that_need_it(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        found = answer(capsys, "trace", "tiny", "--train", "--tokens", "8", "--recompute", "block", "--unroll")
        stages = {
            (s["stage"], s["path"].split(".")[2][0]): i for i, s in enumerate(found["steps"]) if ".blocks." in s["path"]
        }
        layers = {layer for _, layer in stages}
        assert len(layers) > 1
        assert all(stages["forward again", layer] < stages["backward", layer] for layer in layers)
        assert found["recomputed_flops"] == found["total_flops"] - found["training_flops"] > 0

    def test_largest_is_what_the_loss_keeps(self, capsys: pytest.CaptureFixture[str]) -> None:
        """Logits in 16 bits are half of the log-probabilities in 32, which have a row less."""
        data = answer(capsys, "trace", "llama-3-8b", "--tokens", "8192")
        assert data["largest"] == {
            "path": "head.matrix",
            "stage": "forward",
            "tensor": "LM head",
            "bytes": 8192 * 128256 * 2,
        }
        assert [s["path"] for s in data["steps"] if s["largest"]] == ["head.matrix"]
        data = answer(capsys, "trace", "llama-3-8b", "--tokens", "8192", "--train")
        assert data["largest"]["bytes"] == 8191 * 128256 * 4
        assert [s["path"] for s in data["steps"] if s["largest"]] == [":loss"]

    def test_sizes_of_layers_that_differ(self, capsys: pytest.CaptureFixture[str]) -> None:
        sizes = answer(capsys, "trace", "deepseek-v3", "--tokens", "4")["sizes"]
        assert sizes["d_ff"] == [2048, 18432]
        assert (sizes["kv_rank"], sizes["E"], sizes["k"], sizes["d_head"]) == (512, 256, 8, 192)

    def test_a_view_takes_no_bytes(self, capsys: pytest.CaptureFixture[str]) -> None:
        steps = answer(capsys, "trace", "llama-3-8b", "--tokens", "4")["steps"]
        bytes_of = {s["path"].rpartition(":")[2]: s["bytes"] for s in steps}
        assert bytes_of["q_heads"] == bytes_of["k_shared"] == 0
        assert bytes_of["q_rotated"] == bytes_of["merged"] == 4 * 4096 * 2

    def test_one_decode_step(self, capsys: pytest.CaptureFixture[str]) -> None:
        found = answer(capsys, "trace", "gpt2", "--decode")
        assert (found["tokens"], found["past"]) == (1, 1023)
        assert answer(capsys, "trace", "gpt2", "--decode", "--past", "7")["past"] == 7
        keys = next(s for s in found["steps"] if s["op"] == "keys in the cache")
        assert (keys["shape"], keys["symbols"]) == ([1, 12, 1024, 64], ["B", "H_kv", "S", "d_head"])

    def test_both_stacks(self, capsys: pytest.CaptureFixture[str]) -> None:
        found = answer(capsys, "trace", "t5-small", "--train", "--tokens", "7", "--source-tokens", "9")
        assert (found["sizes"]["T"], found["sizes"]["T_src"]) == (7, 9)
        paths = [s["path"] for s in found["steps"]]
        assert paths.index("encoder.final_norm") < paths.index("decoder.blocks.0.cross.q")
        backward = [s["path"] for s in found["steps"] if s["stage"] == "backward"]
        assert backward.index("decoder.blocks.0.cross.q") < backward.index("encoder.final_norm")

    def test_text_names_symbols_and_the_largest(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert _run(["trace", "llama-3-8b", "--tokens", "16"]) == 0
        out = capsys.readouterr().out
        assert "(B, H, T, d_head)" in out
        assert "H 32, d_head 128, H_kv 8, S 16 = P + T" in out
        assert (
            "largest allocation: LM head of head.matrix (forward), (B, T, V) = (1, 16, 128256): 4,104,192 bytes" in out
        )

    def test_markdown(self, capsys: pytest.CaptureFixture[str]) -> None:
        steps = answer(capsys, "trace", "tiny", "--train", "--tokens", "8")["steps"]
        assert _run(["trace", "tiny", "--train", "--tokens", "8", "--markdown"]) == 0
        lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
        assert len(lines) == len(steps) + 2
        cells = [len(re.split(r"(?<!\\)\|", line)) for line in lines]
        assert set(cells) == {14}
        assert sum("**largest**" in line for line in lines) == 1


class Page(HTMLParser):
    """The table of a page, cell by cell, and the addresses that it would fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.kinds: list[str] = []
        self.fetched: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        held = dict(attrs)
        self.fetched += [value or "" for key, value in attrs if key in ("src", "href", "action")]
        if tag == "tr" and "data-stage" in held:
            self.rows.append([])
            self.kinds.append(held.get("class") or "")
        if tag == "td":
            self.rows[-1].append(held.get("data-value") or "")
        if tag not in ("meta", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "td" in self.open and not self.rows[-1][-1].isdigit():
            self.rows[-1][-1] += data


class TestThePage:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        return tmp_path / "trace.html"

    def written(self, path: Path, capsys: pytest.CaptureFixture[str], *args: str) -> str:
        assert _run(["trace", "tiny", "--train", "--tokens", "8", "--html", str(path), *args]) == 0
        assert str(path) in capsys.readouterr().err
        return path.read_text()

    def test_it_holds_every_row_and_fetches_nothing(self, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        steps = answer(capsys, "trace", "tiny", "--train", "--tokens", "8")["steps"]
        text = self.written(path, capsys)
        page = Page(text)
        assert page.open == []
        assert page.fetched == []
        assert not re.search(r"https?:|url\(|@import|fetch\(|import\(", text)
        assert "default-src 'none'" in text
        assert [(row[0], row[1], int(row[4]), int(row[5])) for row in page.rows] == [
            (s["stage"], s["path"], s["params"], s["flops"]) for s in steps
        ]
        assert [int(row[6]) for row in page.rows] == [s["bytes"] for s in steps]
        assert page.rows[1][3] == "(B, T, d_model)(1, 8, 128)"
        assert sum("largest" in kinds for kinds in page.kinds) == 1

    def test_it_is_not_written_over_unless_asked(self, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path.write_text("mine")
        assert _run(["trace", "tiny", "--html", str(path)]) == 2
        assert "exists already; name another file, or --overwrite" in capsys.readouterr().err
        assert path.read_text() == "mine"
        assert self.written(path, capsys, "--overwrite").startswith("<!doctype html>")
        assert [*path.parent.iterdir()] == [path]

    def test_a_name_is_no_markup(self, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        card = path.with_name("odd.yaml")
        _run(["card", "tiny"])
        card.write_text(capsys.readouterr().out.replace("name: tiny", "name: '<script>$name</script>'"))
        assert _run(["trace", str(card), "--html", str(path)]) == 0
        assert "&lt;script&gt;$name&lt;/script&gt;" in path.read_text()
        assert path.read_text().count("<script") == 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--train", "--past", "3"], "--past is for decoding"),
        (["--train", "--decode"], "--decode is for decoding"),
        (["--recompute", "block"], "it needs --train"),
        (["--decode", "--tokens", "2"], "leave --tokens out"),
        (["--markdown", "--json"], "choose one"),
        (["--html", "/nowhere/at/all.html"], "No such file or directory"),
    ],
)
def test_wrong_usage_is_one_sentence(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(["trace", "tiny", *args]) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err.count("\n")) == ("", 1)
    assert message in captured.err
