"""What the README shows is what happens: its commands, its card, its Python."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from tests.conftest import GOLDEN

import scantling as sc
from scantling.cards.read import read_text
from scantling.checkpoint.find import default_encoder
from scantling.cli.main import VERBS, _run

TEXT = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


def of_kind(kind: str) -> list[str]:
    return [block for name, block in BLOCKS if name == kind]


def commands() -> list[tuple[str, list[str]]]:
    """Each `$ scantling ...` of the console blocks, with the lines that are shown under it."""
    found: list[tuple[str, list[str]]] = []
    (block,) = (block for block in of_kind("console") if "$ scantling" in block)
    for line in block.splitlines():
        if line.startswith("$ scantling "):
            found.append((line.removeprefix("$ scantling ").partition(" #")[0].strip(), []))
        elif found and line and line != "...":
            found[-1][1].append(line)
    return found


def test_there_are_commands_to_run() -> None:
    assert [command.split()[0] for command, _ in commands()] == ["count", "verify"]


# Verifying takes a model of 70 B parameters through a pass on the meta device.
RUNS = [pytest.param(*run, marks=[pytest.mark.slow] if run[0].startswith("verify") else []) for run in commands()]


@pytest.mark.parametrize(("command", "shown"), RUNS)
def test_commands_print_what_the_readme_shows(
    command: str, shown: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(command.split()) == 0
    out = capsys.readouterr().out.splitlines()
    assert set(shown) <= set(out)


def test_the_table_of_commands_names_all_of_them() -> None:
    named = set(re.findall(r"^\| `scantling (\w+)", TEXT, re.MULTILINE))
    assert named == set(VERBS)


def test_the_card_is_the_preset() -> None:
    (text,) = of_kind("yaml")
    assert sc.assemble(read_text(text, "README.md")) == sc.assemble(sc.card("walk-5.9b"))


def test_the_python_runs(tmp_path: Path) -> None:
    """The whole block, with real folders in place of the ones that it speaks of."""
    (code,) = of_kind("python")
    code = code.replace('"folder of an encoder"', repr(str(default_encoder())))
    code = code.replace('sc.save(new, "folder")', f"sc.save(new, {str(tmp_path / 'folder')!r})")
    code = code.replace('sc.inspect("folder")', f"sc.inspect({str(tmp_path / 'folder')!r})")
    names: dict[str, object] = {}
    exec(compile(code, "README.md", "exec"), names)
    assert names["model"].params == 8030261248  # type: ignore[attr-defined]
    assert (tmp_path / "folder" / "card.yaml").exists()


@pytest.mark.parametrize("name", ["llama-gqa", "bert", "t5"])
def test_the_public_calls_of_python(name: str, tmp_path: Path) -> None:
    lm = sc.load(GOLDEN / "tiny" / name)
    ids = [[5, 6, 7], [8, 9, 10]]
    target = {"decoder_ids": [[1, 2], [3, 4]]} if name == "t5" else {}
    tokens = 2 if target else 3
    assert lm.logits(ids, attention_mask=[[1, 1, 1]] * 2, **target).shape == (2, tokens, lm.card.vocab_size)
    assert lm.logits(ids, position_ids=[list(range(tokens))], **target).dtype == torch.float32
    assert [x.shape for x in lm.hidden(ids)] == [(2, 3, lm.card.d_model)] * (lm.card.n_layers + 1)
    assert lm.loss(ids, ids, attention_mask=None).shape == ()
    sc.save(lm, tmp_path / "folder")
    assert sc.load(tmp_path / "folder").parts == lm.parts
    if lm.card.family == "encoder":
        with pytest.raises(sc.ScantlingInputError, match="text is written by a decoder"):
            lm.generate(ids)
    else:
        assert len(lm.generate(ids, max_new_tokens=4, temperature=0.0)) == 2
