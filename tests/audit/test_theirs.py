"""The recorded models as transformers runs them: the known faults are found and named, and nothing else is."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers
from tests.conftest import GOLDEN, golden_json, stacks_of

import scantling as sc
from scantling.audits import Finding, Report, Verdict, examine
from scantling.subjects.named import Loading, named
from scantling.subjects.theirs import load_theirs, theirs

pytestmark = pytest.mark.skipif(
    not transformers.__version__.startswith("5.24."), reason="the faults recorded here are those of transformers 5.24"
)

SOON = ("llama-gqa", "falcon-alibi-sequential", "falcon-gqa-newarch", "t5", "t5-v1_1", "bert")
NAMES = [
    pytest.param(path.name, marks=[] if path.name in SOON else [pytest.mark.slow])
    for path in sorted((GOLDEN / "tiny").iterdir())
]
NO_POSITIONS = ("bloom", "bloom-postln-residual", "mpt", "mpt-clip-scale")
"""Decoders that take no position_ids, so that no packed row can be handed over."""
MEAN_OF_BATCHES = ("bert", "distilbert", "electra-generator", "roberta")
"""Of the encoders, those whose loss takes the count of a step's tokens and does not heed it."""
BESIDES = {
    "falcon-alibi-sequential": {"kernels"},
    "falcon-gqa-newarch": {"future", "maps"},
    "falcon-mqa-parallel": {"future", "maps"},
    "llama-rope-dynamic": {"repeat"},
    "t5": {"cache"},
    "t5-v1_1": {"tied"},
}
"""What single families show besides what all decoders do."""


@cache
def report(name: str) -> Report:
    folder = str(GOLDEN / "tiny" / name)
    return examine(theirs(load_theirs(folder), name, folder=folder))


def expected(name: str) -> set[str]:
    """The probes that find a defect: damaged checkpoints are loaded by all of the library."""
    stacks = stacks_of(name)
    found = {"checkpoint"} | BESIDES.get(name, set())
    if stacks == "decoder":
        found |= {"ends"} if name in NO_POSITIONS else {"ends", "packing"}
    if stacks == "encoder-decoder" or name in MEAN_OF_BATCHES:
        found |= {"accumulation"}
    return found


@pytest.mark.parametrize("name", NAMES)
def test_the_known_faults_are_found_and_nothing_else(name: str) -> None:
    assert {f.probe for f in report(name).defects} == expected(name)
    crashes = {f.probe for f in report(name).findings if f.data.get("crash")}
    assert crashes == ({"cache"} if name == "t5" else set())


def defect(name: str, probe: str, where: str) -> Finding:
    (found,) = [f for f in report(name).defects if f.probe == probe and f.where.startswith(where)]
    return found


def test_packed_rows_read_each_other_in_three_of_four_ways() -> None:
    """Isolated only with attention_mask None and use_cache False."""
    ways = {f.where: f.verdict for f in report("llama-gqa").of("packing")}
    assert ways.pop("position_ids") in (Verdict.CLEAN, Verdict.ROUNDING)
    assert set(ways.values()) == {Verdict.DEFECT}
    assert len(ways) == 3
    assert "they read each other" in defect("llama-gqa", "packing", "position_ids, use_cache").message


def test_alibi_of_falcon_is_added_twice_on_one_kernel() -> None:
    found = defect("falcon-alibi-sequential", "kernels", "sdpa and eager")
    assert "compute different functions" in found.message
    recorded = golden_json("tiny/falcon-alibi-sequential/meta.json")["attn_implementation"]
    assert recorded == "sdpa"


def test_asking_falcon_for_its_attention_maps_opens_the_future() -> None:
    found = defect("falcon-gqa-newarch", "future", "with maps asked for")
    model = load_theirs(str(GOLDEN / "tiny" / "falcon-gqa-newarch"))
    ids, other = torch.tensor([found.smallest["ids"]]), torch.tensor([found.smallest["instead"]])  # type: ignore[index]
    at = found.smallest["moves"]  # type: ignore[index]
    assert torch.equal(ids[:, : at + 1], other[:, : at + 1])
    with torch.no_grad():
        a, b = (model(x, output_attentions=True, use_cache=False).logits[:, at] for x in (ids, other))
        assert not torch.equal(a, b)
        a, b = (model(x, use_cache=False).logits[:, at] for x in (ids, other))
        assert torch.equal(a, b)


def test_the_fused_kernel_gives_no_maps_and_the_plain_one_those_of_the_pass() -> None:
    """An empty list, although it was asked for them."""
    by_kernel = {f.where: f for f in report("llama-gqa").of("maps")}
    assert by_kernel["sdpa"].verdict is Verdict.COULD_NOT_RUN
    assert by_kernel["sdpa"].message == "asked for maps it gives none, and no error"
    assert by_kernel["eager"].verdict is Verdict.CLEAN


def test_maps_of_falcon_show_the_future_that_they_open() -> None:
    found = defect("falcon-gqa-newarch", "maps", "sdpa")
    assert "tokens read what is hidden from them" in found.message
    assert [len(row) for row in found.smallest["ids"]] == [2, 2]  # type: ignore[index]
    model = load_theirs(str(GOLDEN / "tiny" / "falcon-gqa-newarch"))
    with torch.no_grad():
        maps = model(torch.tensor([[5, 17, 9, 40]]), output_attentions=True, use_cache=False).attentions
    assert float(maps[0].triu(1).amax()) > 0.1


def test_t5_with_a_deeper_decoder_crashes_in_generate() -> None:
    found = defect("t5", "cache", "generate, a prompt")
    assert "it crashes: IndexError" in found.message


def test_t5_v1_1_is_tied_by_its_config_and_untied_by_its_weights(tmp_path: Path) -> None:
    found = defect("t5-v1_1", "tied", "as it stands")
    assert found.size == 6288
    assert "it says tied, and the head has a matrix of its own" in found.message
    folder = tmp_path / "untied"
    shutil.copytree(GOLDEN / "tiny" / "t5-v1_1", folder)
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    told = examine(theirs(load_theirs(str(folder)), folder=str(folder)), ["tied"])
    (rebuilt,) = told.defects
    assert rebuilt.where == "built from its config alone"
    assert "6,288 parameters are missing" in rebuilt.message


@pytest.mark.slow
def test_dynamic_angles_remember_the_longest_row() -> None:
    assert "it remembers an earlier row" in defect("llama-rope-dynamic", "repeat", "after a row of").message


def test_damaged_folders_are_loaded() -> None:
    wheres = {f.where for f in report("llama-gqa").defects if f.probe == "checkpoint"}
    assert wheres == {
        "a tensor is missing",
        "names begin with _orig_mod.module.",
        "a tensor stands in two files",
    }


def test_the_collator_hides_ends_that_are_also_padding() -> None:
    found = defect("llama-gqa", "ends", "")
    assert found.size == 3
    assert all(row[-1] == -100 or -100 not in row for row in found.smallest["labels"])  # type: ignore[index]


def test_left_padding_without_positions_is_by_design_of_gpt2() -> None:
    told = examine(theirs(load_theirs(str(GOLDEN / "tiny" / "gpt2"))), ["padding"])
    assert told.defects == []
    (bare,) = [f for f in told.findings if f.verdict is Verdict.BY_DESIGN]
    assert bare.where == "padding on the left"
    assert bare.size is not None
    assert bare.size > 1


@pytest.mark.parametrize("kind", ["BertModel", "BertForSequenceClassification", "BertForTokenClassification"])
def test_encoders_without_a_vocabulary_are_asked_what_they_can_answer(kind: str) -> None:
    """The stream, one answer per row, and an answer per token: padding and neighbours are asked of all."""
    folder = GOLDEN / "tiny" / "bert"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, kind)(transformers.AutoConfig.from_pretrained(folder)).eval()
    subject = theirs(model, sample=torch.arange(30)[None])
    assert subject.facts.per_token is (kind != "BertForSequenceClassification")
    told = examine(subject, ["repeat", "future", "shift", "padding", "neighbours", "reload", "length", "place"])
    assert told.defects == []
    for probe in ("padding", "neighbours", "reload"):
        assert {f.verdict for f in told.of(probe)} & {Verdict.CLEAN, Verdict.ROUNDING}


def test_an_object_and_a_folder_are_the_same_subject() -> None:
    folder = str(GOLDEN / "tiny" / "llama-gqa")
    by_object = sc.audit(load_theirs(folder), probes=["future", "kernels"])
    by_name = examine(named(folder, "transformers", None, Loading()), ["future", "kernels"])
    keys = ("probe", "verdict", "where", "size")
    rows = [[tuple(getattr(f, key) for key in keys) for f in told.findings] for told in (by_object, by_name)]
    assert rows[0] == rows[1]


@pytest.mark.parametrize("name", ["llama-gqa", "gpt2", "bert", "t5", "modernbert"])
def test_ours_and_theirs_agree(name: str) -> None:
    folder = str(GOLDEN / "tiny" / name)
    told = examine(named(folder, "scantling", "transformers", Loading()), ["reference"])
    assert {f.verdict for f in told.findings} <= {Verdict.CLEAN, Verdict.ROUNDING}


def test_another_epsilon_is_found_beside_the_other_library(tmp_path: Path) -> None:
    """The quietest wrong choice of the recorded mutations: epsilon 1e-6 in place of 1e-5 moves GPT-2 by 5.6e-4."""
    folder = tmp_path / "gpt2"
    shutil.copytree(GOLDEN / "tiny" / "gpt2", folder)
    right = named(str(folder), "scantling", None, Loading())
    config = json.loads((folder / "config.json").read_text()) | {"layer_norm_epsilon": 1e-6}
    (folder / "config.json").write_text(json.dumps(config))
    from scantling.subjects.named import beside

    told = examine(beside(right, named(str(folder), "transformers", None, Loading())), ["reference"])
    assert {f.verdict for f in told.findings} == {Verdict.DEFECT}
    assert all(f.size is not None and f.size < 0.01 for f in told.findings)


@pytest.mark.parametrize(
    ("place", "says"),
    [("nothing-there", "cannot be read|nothing of that name|no preset"), ("gpt2", "transformers reads a folder")],
)
def test_names_that_transformers_cannot_read(place: str, says: str) -> None:
    with pytest.raises(sc.ScantlingInputError) as caught:
        named(place, "transformers", None, Loading())
    assert "\n" not in str(caught.value)


def test_a_config_without_a_class_is_refused(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "tiny" / "gpt2", tmp_path / "gpt2")
    path = tmp_path / "gpt2" / "config.json"
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "architectures"}))
    with pytest.raises(sc.ScantlingInputError, match="its config names no class"):
        load_theirs(str(tmp_path / "gpt2"))
