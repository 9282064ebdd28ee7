"""Every preset against counts, tensor lists and FLOPs that independent software recorded."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from typing import Any

import pytest
from msgspec.structs import replace
from tests.conftest import GOLDEN, golden_json

import scantling as sc
from scantling.cards import ALIASES, presets
from scantling.cards.schema import Latent
from scantling.checkpoint.families import FAMILIES
from scantling.checkpoint.hf_config import card_of_config
from scantling.checkpoint.names import foreign_shapes, links
from scantling.cli.main import _run
from scantling.numbers.count import count
from scantling.numbers.flops import decode, flops, half_at
from scantling.numbers.memory import memory

PARAMS = golden_json("params.json")
FLOPS = golden_json("flops.json")
PUBLISHED = [name for name in presets() if name in PARAMS]
ENCODERS = [name for name in PUBLISHED if sc.card(name).family == "encoder"]
CONFIGS = [
    p for p in sorted((GOLDEN / "configs").glob("*.json")) if json.loads(p.read_text())["model_type"] in FAMILIES
]


OWN = {"tiny", "walk-5.9b", "transformer-base", "transformer-big", "naive", "naive-with-positions"}
"""Presets that no published config stands behind."""


def parts(name: str) -> Any:
    return sc.assemble(sc.card(name))


def test_the_presets_of_the_first_list_are_there() -> None:
    assert len(PUBLISHED) >= 13
    assert set(presets()) - set(PUBLISHED) == OWN
    assert {sc.card(alias).name for alias in ALIASES} == set(ALIASES.values())
    assert set(ALIASES.values()) <= set(presets())


@pytest.mark.parametrize("name", PUBLISHED)
def test_total_equals_the_recorded_count(name: str) -> None:
    model, wanted = parts(name), PARAMS[name]
    # Where the config is the bare model's, another class was counted besides; the preset is the bare one.
    total = wanted["automodel_total"] if "class_name" in wanted else wanted["total_unique"]
    counted = count(model)
    assert model.params == counted.total == total
    if "class_name" not in wanted:
        assert model.params + counted.buffers - untrained(name) == wanted["checkpoint_elements"]
    ours = Counter[str]()
    for run in counted.per_layer:
        ours.update({role: n * run.times for role, n in run.by_part.items()})
    split = Counter(wanted["split_over_layers"])
    for theirs, role in (("qk_norm", "norm"), ("shared_experts", "mlp")):
        split[role] += split.pop(theirs, 0)
    if isinstance(sc.card(name).attention, Latent):
        # The recorded split counts the norms of latents as attention.
        for sums in (ours, split):
            sums["attention"] += sums.pop("norm")
    # The recorded split has T5's tables among the first layers, and ours has them as positions.
    shifts = split.pop("relative_bias", 0)
    assert shifts in (0, counted.by_part.get("position", 0))
    assert ours == split
    widen = 0 if model.encoder is None or model.encoder.widen is None else model.encoder.widen.params
    assert counted.by_part["embedding"] == wanted["embedding_params"] + widen
    if "base_model_total" in wanted:
        # The norm of a head counts among the norms.
        norm = model.head.transform.norm
        assert counted.by_part["head"] + (norm.params if norm else 0) == total - wanted["base_model_total"]
    else:
        matrix = 0 if wanted["lm_head_tied"] else wanted["lm_head_params"]
        own_shift = model.head.rows if model.head.bias and not model.head.fixed else 0
        assert counted.by_part.get("head", 0) == matrix + own_shift
    assert sum(counted.by_part.values()) == counted.total
    assert counted.total - counted.shortcut == sum(counted.reasons.values())
    assert model.active_params == wanted.get("moe", {}).get("active_per_token", model.params)


def test_every_recorded_model_is_counted_by_one_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(["count", "--all", "--json"]) == 0
    counted = {model["name"]: model["total_params"] for model in json.loads(capsys.readouterr().out)}
    recorded = {n: w["automodel_total"] if "class_name" in w else w["total_unique"] for n, w in PARAMS.items()}
    assert len(recorded) == 64
    assert {name: counted[name] for name in recorded} == recorded


def untrained(name: str) -> int:
    """Parameters that are counted and that no file holds: a table of waves."""
    return sum(part.params for _, part, _ in parts(name).walk() if part.computed)


@pytest.mark.parametrize("name", [name for name in PUBLISHED if "kv_cache_measured" in PARAMS[name]])
def test_cache_elements_equal_the_measured_ones(name: str) -> None:
    measured = PARAMS[name]["kv_cache_measured"]
    assert memory(parts(name), sc.Workload(), "float16", "float16").kv_per_token == measured["bytes_per_token_16bit"]


@pytest.mark.parametrize("name", ENCODERS)
def test_an_encoder_keeps_no_cache(name: str) -> None:
    assert memory(parts(name), sc.Workload(batch=2, tokens=64), "float16", "float16").kv == 0


BARE = {"bert": "BertModel", "roberta": "RobertaModel", "distilbert": "DistilBertModel"}
BARE |= {"electra": "ElectraModel", "modernbert": "ModernBertModel"}


@pytest.mark.parametrize("name", ENCODERS)
def test_the_model_without_its_head_is_what_automodel_builds(name: str) -> None:
    config = json.loads((GOLDEN / "configs" / f"{name}.json").read_text())
    card = card_of_config(config | {"architectures": [BARE[config["model_type"]]]}, name, name)
    assert sc.assemble(card).params == PARAMS[name]["automodel_total"]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_published_configs_give_the_recorded_tensor_list(path: Any) -> None:
    config, wanted = json.loads(path.read_text()), PARAMS[path.stem]
    if "class_name" in wanted:
        config["architectures"] = [wanted["class_name"]]
    card = card_of_config(config, path.stem, path.name)
    weights = sc.assemble(card).named_stored
    shapes = foreign_shapes(links(FAMILIES[config["model_type"]].rows(card), weights), weights)
    lines = "\n".join(f"{name}\t{','.join(map(str, shape))}" for name, shape in sorted(shapes.items()))
    assert len(shapes) == wanted["checkpoint_tensors"]
    assert hashlib.sha256(lines.encode()).hexdigest() == wanted["checkpoint_names_sha256"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_preset_is_what_its_config_says(name: str) -> None:
    config = json.loads((GOLDEN / "configs" / f"{name}.json").read_text())
    from_config = card_of_config(config, name, name)
    stored = sc.card(name)
    if name == "all-minilm-l6-v2":
        # Its head is that of the files beside the config, which test_minilm.py compares; the rest is the config's.
        assert stored.head != from_config.head
        stored = replace(stored, head=from_config.head)
    assert sc.assemble(stored) == sc.assemble(from_config)
    assert stored.context == from_config.context


RECORDED = [key for key in FLOPS if key.partition("@")[0] in PUBLISHED]


@pytest.mark.parametrize("key", RECORDED)
def test_flops_equal_the_counter(key: str) -> None:
    wanted = FLOPS[key]
    name, _, sizes = key.partition("@")
    model = parts(name)
    # In the key of an encoder-decoder, T is the source and S the target.
    target = sizes.partition("S")[2]
    pair = {"tokens": int(target), "source": wanted["T"]} if target else {"tokens": wanted["T"]}
    f = flops(model, sc.Workload(batch=wanted["B"], **pair))
    assert f.forward == wanted["total"]
    transform = model.head.transform
    # Recorded among the other matrices.
    before = 0 if transform is None else 2 * wanted["B"] * wanted["T"] * transform.d_in * transform.d_out
    assert f.by_part["head"] - before == wanted["lm_head"]
    assert f.by_part["scores and mix"] == wanted["attention_scores_and_values"]
    assert f.by_part.get("experts", 0) == wanted["experts"]
    if wanted["forward_backward"]:
        assert f.training == wanted["forward_backward"]
    assert f.forward_visible < f.forward if model.decoder else f.forward_visible == f.forward


TINY = golden_json("flops_tiny.json")
OTHER_HEADS = {"gpt-oss": 10, "llama-rope-yarn-mscale": 10}
"""Counted when their heads had another width than in the recorded folder."""


@pytest.mark.parametrize("name", TINY)
def test_flops_of_small_models_equal_the_counter(name: str) -> None:
    """Of every architecture: forward, its kinds of products, and forward with backward."""
    wanted = TINY[name]
    config = golden_json(f"tiny/{name}/config.json")
    if name in OTHER_HEADS:
        config["head_dim"] = OTHER_HEADS[name]
    card = card_of_config(config, name, name)
    lengths = {"tokens": wanted["S"], "source": wanted["T"]} if "S" in wanted else {"tokens": wanted["T"]}
    f = flops(sc.assemble(card), sc.Workload(batch=wanted["B"], **lengths))
    assert (f.forward, f.training) == (wanted["total"], wanted["forward_backward"])
    assert f.by_part.get("scores and mix", 0) == wanted["attention_scores_and_values"]
    assert f.by_part.get("experts", 0) == wanted["experts"]


def test_known_figures() -> None:
    gpt2, llama, mixtral = parts("gpt2-small"), parts("llama-3-8b"), parts("mixtral-8x7b")
    assert (gpt2.params, parts("gpt2-xl").params, parts("gpt3").params) == (124439808, 1557611200, 174604259328)
    assert (llama.params, mixtral.params, mixtral.active_params) == (8030261248, 46702792704, 12879925248)
    bytes_of = lambda model, **w: memory(model, sc.Workload(**w), "float16", "float16")  # noqa: E731
    assert bytes_of(gpt2).kv_per_token == 36864
    assert bytes_of(llama).kv_per_token == 131072
    assert bytes_of(llama, tokens=8192).kv == 1073741824
    assert bytes_of(parts("llama-2-7b")).kv_per_token == 524288
    assert bytes_of(parts("walk-5.9b"), batch=2, tokens=1024).logits == 262144000


def test_mixture_flops_are_those_of_the_chosen_experts() -> None:
    f = flops(parts("mixtral-8x7b"), sc.Workload(tokens=4096))
    assert f.forward // 4096 - f.by_part["scores and mix"] // 4096 == 25497174016


def test_lookup_costs_nothing_and_the_head_costs_2vd_tied_or_not() -> None:
    for name in ("gpt2", "llama-3-8b"):
        model = parts(name)
        f = flops(model, sc.Workload(tokens=1))
        assert f.by_part["head"] == 2 * model.head.vocab_size * model.embed.d_model
        assert "embedding" not in f.by_part
    without_scores = flops(parts("llama-3-8b"), sc.Workload()).by_part
    assert sum(n for part, n in without_scores.items() if part != "scores and mix") == 15009316864


@pytest.mark.parametrize(("tokens", "share"), [(2048, 7.7), (8192, 25.0), (16384, 40.0), (32768, 57.1), (131072, 84.2)])
def test_attention_share_of_the_textbook_block(tokens: int, share: float) -> None:
    """d = 4096, 24 d^2 + 4 T d per token and layer: an MLP of two 4d matrices."""
    text = """
name: textbook
family: decoder
n_layers: 2
d_model: 4096
vocab_size: 32000
context: 131072
attention: {kind: multi_head, n_heads: 32}
position: {kind: none}
norm: {kind: rmsnorm, eps: 1.0e-5}
mlp: {kind: plain, act: gelu}
tied: true
"""
    from scantling.cards import read_text

    model = sc.assemble(read_text(text, "textbook"))
    assert round(100 * flops(model, sc.Workload(tokens=tokens)).attention_share, 1) == share
    assert half_at(model)["full"] == 24576


def test_sliding_window_counts_exact_pairs() -> None:
    mistral = parts("mistral-7b")
    full = flops(mistral, sc.Workload(tokens=8192))
    mix = full.by_part["scores and mix"]
    assert mix // 8192 // 32 == 134217728
    visible = mix - (full.forward - full.forward_visible)
    assert visible * 8192 / mix / 8192 * 8192 == 3072.25


def test_grouped_heads_change_projections_and_cache_but_not_the_scores() -> None:
    a, b = (flops(parts(name), sc.Workload(tokens=512)).by_part for name in ("llama-2-7b", "walk-5.9b"))
    assert a["scores and mix"] == b["scores and mix"]
    assert a["attention projections"] > b["attention projections"]


def test_one_decoded_token_reads_past_and_itself() -> None:
    llama = parts("llama-3-8b")
    one = lambda past: decode(llama, past, 1)  # noqa: E731
    assert one(4095) - one(0) == 4 * 4095 * 4096 * 32
    assert decode(llama, 10, 5) == sum(one(past) for past in range(10, 15))


def test_a_prefill_needs_the_head_once() -> None:
    model = parts("smollm2-135m")
    whole, last = (flops(model, sc.Workload(tokens=9, last_only=only)).forward for only in (False, True))
    assert whole - last == 8 * 2 * 49152 * 576


def test_doubling_the_length_more_than_doubles_the_cost() -> None:
    model = parts("llama-2-7b")
    once, twice = (flops(model, sc.Workload(tokens=t)).forward for t in (8192, 16384))
    assert twice > 2 * once


def test_measuring_three_times_gives_three_equal_numbers() -> None:
    model = parts("gpt2")
    assert len({flops(model, sc.Workload(tokens=64)).forward for _ in range(3)}) == 1


WALK = [
    (":ids", (2, 1024), 0),
    ("embed", (2, 1024, 4096), 131072000),
    ("attn_norm", (2, 1024, 4096), 4096),
    ("attn.q", (2, 1024, 4096), 16777216),
    ("attn.k", (2, 1024, 1024), 4194304),
    ("attn.v", (2, 1024, 1024), 4194304),
    ("attn:q_heads", (2, 32, 1024, 128), 0),
    ("attn:k_heads", (2, 8, 1024, 128), 0),
    ("attn:v_heads", (2, 8, 1024, 128), 0),
    ("attn:q_rotated", (2, 32, 1024, 128), 0),
    ("attn:k_rotated", (2, 8, 1024, 128), 0),
    ("attn:k_shared", (2, 32, 1024, 128), 0),
    ("attn:v_shared", (2, 32, 1024, 128), 0),
    ("attn:mixed", (2, 32, 1024, 128), 0),
    ("attn:merged", (2, 1024, 4096), 0),
    ("attn.o", (2, 1024, 4096), 16777216),
    ("after_attn", (2, 1024, 4096), 0),
    ("mlp_norm", (2, 1024, 4096), 4096),
    ("mlp.gate", (2, 1024, 11008), 45088768),
    ("mlp.up", (2, 1024, 11008), 45088768),
    ("mlp:hidden", (2, 1024, 11008), 0),
    ("mlp.down", (2, 1024, 4096), 45088768),
    ("after_mlp", (2, 1024, 4096), 0),
    ("final_norm", (2, 1024, 4096), 4096),
    ("head.matrix", (2, 1024, 32000), 131072000),
]


def test_the_walk_has_the_known_shapes_in_order() -> None:
    model = parts("walk-5.9b")
    rows = [(s.path, s.shape, s.params, s.repeat) for s in model.steps(sc.Workload(batch=2, tokens=1024))]
    found = iter(rows)
    for end, shape, params in WALK:
        path, _, _, repeat = next(row for row in found if row[0].endswith(end) and row[1:3] == (shape, params))
        assert repeat == (32 if "blocks" in path else 1)
    assert sum(params * repeat for _, _, params, repeat in rows) == model.params == 5933109248
