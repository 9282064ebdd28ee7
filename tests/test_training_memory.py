"""The lines of training memory against what real optimisers and real loops hold; what fits; formats of blocks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.test_laws import CARDS
from tests.test_saved import forward

import scantling as sc
from scantling.cards.read import from_dict
from scantling.cli.main import _run
from scantling.errors import ScantlingInputError
from scantling.numbers.cache import cache_bytes
from scantling.numbers.fit import largest
from scantling.numbers.memory import held, memory, weight_bytes
from scantling.numbers.optimizers import states, trained
from scantling.numbers.peak import training_peak
from scantling.numbers.training import PRECISIONS, Recipe, asked, state_lines, training_memory
from scantling.parts.part import Workload, total
from scantling.parts.saved import POLICIES
from scantling.tensor.kept import Kept
from scantling.train.forward import How, Inputs
from scantling.train.forward import forward as trained_forward
from scantling.units import BLOCKS, DTYPE_BYTES

NAMES = ("llama", "gpt2", "mixtral", "groups of experts", "sinks", "bert", "sentences", "t5", "marian", "bart")
W = Workload(batch=2, tokens=6, source=7, training=True)


def told(capsys: pytest.CaptureFixture[str], *args: str) -> Any:
    assert _run([*args, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def nbytes(tensors: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def optimizers(kind: str, weights: dict[str, torch.Tensor], matrices: set[str]) -> list[torch.optim.Optimizer]:
    rest = [weight for name, weight in weights.items() if name not in matrices]
    match kind:
        case "sgd":
            return [torch.optim.SGD(rest, lr=0.1, momentum=0.9, nesterov=True)]
        case "muon":
            return [torch.optim.Muon([weights[name] for name in sorted(matrices)]), torch.optim.AdamW(rest)]
    return [torch.optim.AdamW(rest, fused=True)]


@pytest.mark.parametrize("kind", ["adamw", "sgd", "muon"])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", NAMES)
def test_a_real_step_holds_the_lines(name: str, precision: str, kind: str) -> None:
    """Weights, gradients, master copy and states of torch's own optimisers, tensor by tensor, and what is kept."""
    model, recipe = sc.assemble(CARDS[name]), Recipe(precision, kind, main_gradients=precision == "bf16-master")
    said = training_memory(model, W, recipe)
    formats, w = recipe.formats, asked(W, recipe)
    net = model.build(dtype=formats.weights).train()
    with Kept(net.parameters()) as kept:
        loss, out = forward(net, w)
    (out.sum() if loss is None else loss).backward()
    weights = {name: p for name, p in net.named_parameters() if p.grad is not None}
    assert {name: tuple(p.shape) for name, p in weights.items()} == {t.name: t.shape for t in trained(model)}
    held = weights
    if formats.master:
        held = {name: torch.nn.Parameter(p.detach().float()) for name, p in weights.items()}
        for name, master in held.items():
            master.grad, weights[name].grad = weights[name].grad.float(), None
    matrices = {t.name for t in trained(model) if t.matrix} if kind == "muon" else set()
    made = optimizers(kind, held, matrices)
    for optimizer in made:
        optimizer.step()
    assert said.weights == nbytes(net.state_dict().values())
    assert sum(said.gradients.values()) == nbytes(p.grad for p in held.values())
    assert said.master == (nbytes(held.values()) if formats.master else 0)
    kept_states = [v for o in made for s in o.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    assert sum(said.optimizer.values()) == nbytes(kept_states)
    assert said.activations == kept.nbytes


def scored(name: str, recipe: Recipe, w: Workload) -> int:
    """Bytes that autograd keeps when `scantling train` does the forward, whose loss goes in pieces."""
    model = sc.assemble(CARDS[name])
    said = training_memory(model, w, recipe)
    net = model.build(dtype=w.dtype).train()
    ids = torch.randint(0, 31, (w.batch, w.tokens), generator=torch.Generator().manual_seed(0))
    documents = (torch.arange(w.tokens) // 3).expand(w.batch, -1) if w.packed else None
    source = ids[:, :1].repeat(1, w.sources) if model.two_stacks else None
    batch = Inputs(ids, ids.clone(), ids.numel(), documents=documents, source=source)
    how = How(recompute=w.recompute, autocast=torch.bfloat16 if w.autocast else None)
    with Kept(net.parameters()) as kept:
        result = trained_forward(net, model, batch, float(ids.numel()), how)
    result.objective.backward()
    size = 4 if recipe.precision == "fp32" else 2
    assert said.loss_gradients == size * model.head.width * (ids.numel() + model.head.rows)
    return kept.nbytes


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed", "bf16"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma", "mixtral", "latent", "narrow table", "bert", "t5"])
def test_the_trainer_keeps_what_a_chunked_loss_leaves(name: str, packed: bool, precision: str) -> None:
    """What autograd keeps, and what the loss has made."""
    model, recipe = sc.assemble(CARDS[name]), Recipe(precision, loss="chunked")
    w = asked(replace(W, packed=packed and not model.two_stacks), recipe)
    assert training_memory(model, w, recipe).activations == scored(name, recipe, w)


@pytest.mark.parametrize("name", [name for name, card in CARDS.items() if card.head.kind == "lm"])
def test_a_chunked_loss_beside_every_policy(name: str) -> None:
    model = sc.assemble(CARDS[name])
    for recompute in POLICIES:
        for precision in ("fp32", "bf16-mixed"):
            recipe = Recipe(precision, loss="chunked")
            w = asked(replace(W, recompute=recompute), recipe)
            assert training_memory(model, w, recipe).activations == scored(name, recipe, w), (recompute, precision)


def test_eight_bit_moments_as_bitsandbytes_lays_them_out() -> None:
    """Per tensor from 4096 values on: 2 codes of a byte a value, 2 float32 scales per begun block of 256 values.

    Below that two float32 moments; two tables of 256 float32 codes for all. Checked against the states that
    bitsandbytes 0.50.2 makes for these cards.
    """
    found = {name: states(trained(sc.assemble(sc.card(name))), "adamw-8bit", "float32") for name in ("tiny", "gpt2")}
    assert sum(found["tiny"].values()) == 2141184
    model = sc.assemble(sc.card("gpt2"))
    large = [t.numel for t in trained(model) if t.numel >= 4096]
    small = model.params - sum(large)
    # Every large matrix of GPT-2 is a multiple of 256: 768 divides its rows or its columns.
    assert sum(found["gpt2"].values()) == 2 * sum(large) + 8 * sum(large) // 256 + 8 * small + 2 * 256 * 4


def test_muon_takes_the_matrices_of_the_blocks_alone() -> None:
    weights = trained(sc.assemble(CARDS["mixtral"]))
    matrices = {t.name for t in weights if t.matrix}
    assert {name.split(".")[-2] for name in matrices} == {"q", "k", "v", "o"}
    assert all(len(t.shape) == 2 for t in weights if t.matrix)


class TestActivations:
    @pytest.mark.parametrize("kernel", ["fused", "reference"])
    def test_the_trace_and_the_table_say_the_same(self, capsys: pytest.CaptureFixture[str], kernel: str) -> None:
        run = ["--batch", "2", "--tokens", "64", "--train", "--kernel", kernel]
        rows = told(capsys, "trace", "smollm2-135m", *run, "--dtype", "bf16")["steps"]
        found = told(capsys, "memory", "smollm2-135m", *run, "--precision", "bf16")
        assert sum(row["saved_bytes"] * row["repeat"] for row in rows) == found["activations_bytes"]
        assert found["total_bytes"] == found["activations_bytes"] + sum(found["states"].values())
        assert found["peak_bytes"] == max(found["moments"].values()) == found["moments"][found["peak_at"]]

    def test_policies_keep_less_and_less(self) -> None:
        model = sc.assemble(sc.card("llama-3-8b"))
        asks = [Workload(1, 2048, training=True, kernel="reference", recompute=policy) for policy in POLICIES]
        kept = [training_memory(model, w) for w in asks]
        sizes = [m.activations - m.copies for m in kept]
        assert sizes == sorted(sizes, reverse=True)
        # Of each of 32 blocks the input, float32; then the final norm, the head and the loss.
        last = [step for step in model.steps(asked(asks[-1], Recipe())) if ".blocks." not in step.path]
        block = kept[-1].activations - total(last, "saved_bytes")
        assert block == 32 * 2048 * 4096 * 4

    def test_a_chunked_loss_holds_no_logits(self, capsys: pytest.CaptureFixture[str]) -> None:
        """2 x 1024 x 32000 in float32 are 262 MB, which a plain loss keeps once and needs three times."""
        run = ["memory", "walk-5.9b", "--train", "--batch", "2", "--tokens", "1024", "--precision", "bf16"]
        plain, chunked = told(capsys, *run), told(capsys, *run, "--loss", "chunked")
        assert plain["logits_bytes"] == 262144000
        log_probabilities = 2 * 1023 * 32000 * 4
        assert log_probabilities < plain["loss_bytes"] < log_probabilities + 2**15
        assert chunked["loss_bytes"] == 0
        gone = plain["loss_bytes"] + 2 * 1024 * 4096 * 2
        assert plain["activations_bytes"] - chunked["activations_bytes"] == gone
        assert plain["moments"]["backward of the loss"] - plain["total_bytes"] == pytest.approx(
            2 * plain["loss_bytes"] - plain["gradients_bytes"], rel=1e-9
        )
        assert chunked["loss_gradients_bytes"] == 2 * 4096 * (2 * 1024 + 32000)

    def test_gradients_stay_between_micro_batches(self) -> None:
        model = sc.assemble(CARDS["llama"])
        one, two = (Recipe("fp32", micro_batches=n) for n in (1, 2))
        peaks = [training_peak(model, W, r, training_memory(model, W, r)) for r in (one, two)]
        gradients = sum(training_memory(model, W, one).gradients.values())
        assert peaks[1]["backward of the loss"] - peaks[0]["backward of the loss"] == gradients
        assert peaks[1]["update"] == peaks[0]["update"]


class TestWhatFits:
    @given(st.integers(0, 5000), st.integers(1, 4000))
    def test_the_search_is_exact(self, true: int, most: int) -> None:
        assert largest(lambda n: n <= true, most) == min(true, most)

    @pytest.mark.parametrize("train", [False, True])
    def test_one_more_would_not_fit(self, capsys: pytest.CaptureFixture[str], train: bool) -> None:
        more = ["--train", "--precision", "bf16"] if train else []
        room = 6 * 2**30
        run = ["memory", "qwen3-0.6b", *more]
        found = told(capsys, *run, "--tokens", "512", "--batch", "3", "--fit", "6GiB")["fit"]
        assert found["bytes"] == room

        def peak(batch: int, tokens: int) -> int:
            answer = told(capsys, *run, "--batch", str(batch), "--tokens", str(tokens))
            return int(answer["peak_bytes"])

        assert peak(found["batch"], 512) <= room < peak(found["batch"] + 1, 512)
        assert peak(3, found["tokens"]) <= room < peak(3, found["tokens"] + 1)

    def test_the_positions_can_be_the_limit(self, capsys: pytest.CaptureFixture[str]) -> None:
        found = told(capsys, "memory", "gpt2", "--fit", "80GiB")["fit"]
        assert (found["tokens"], found["limited_by_positions"]) == (1024, True)
        found = told(capsys, "memory", "gpt2", "--fit", "80GiB", "--past", "1000", "--tokens", "1")["fit"]
        assert found["tokens"] == 24

    def test_not_even_the_weights(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert _run(["memory", "llama-3-8b", "--fit", "8GiB"]) == 1
        out = capsys.readouterr().out
        assert "nothing fits into 8.6 GB (8.0 GiB): one row of one token needs" in out
        assert "the weights take 16.1 GB (15.0 GiB)" in out
        assert _run(["memory", "llama-3-8b", "--train", "--fit", "24GiB", "--json"]) == 1
        found = json.loads(capsys.readouterr().out)["fit"]
        assert (found["batch"], found["tokens"]) == (0, 0)
        assert found["least_bytes"] > 4 * 4 * 8030261248


class TestFormats:
    @pytest.mark.parametrize("kind", ["q8_0", "q4_0", "f16"])
    def test_weights_are_as_many_bytes_as_a_gguf_file_has(self, tmp_path: Any, kind: str) -> None:
        from scantling.checkpoint.gguf import read_gguf
        from scantling.checkpoint.gguf_write import write_gguf

        card = from_dict({**BLOCKY, "name": "blocks"}, "blocks")
        lm = sc.new(card)
        write_gguf(lm, tmp_path / "m.gguf", kind)
        tensors = read_gguf(tmp_path / "m.gguf").tensors.values()
        wanted = weight_bytes(lm.parts, kind) if kind in BLOCKS else weight_bytes(lm.parts, "float16")
        vectors = sum(n for name, n in _vectors(lm.parts).items()) if kind == "f16" else 0
        assert sum(t.nbytes for t in tensors) == wanted + 2 * vectors

    def test_llama_3_8b_in_eight_and_four_bits(self) -> None:
        """7 matrices a layer and two tables in blocks of 32: 34 or 18 bytes; 65 norms in float32."""
        model, norms = sc.assemble(sc.card("llama-3-8b")), 65 * 4096
        blocks = (8030261248 - norms) // 32
        assert weight_bytes(model, "q8_0") == 34 * blocks + 4 * norms
        assert weight_bytes(model, "q4_0") == 18 * blocks + 4 * norms
        assert weight_bytes(model, "bfloat16") == 2 * held(model)

    def test_a_row_that_is_no_whole_number_of_blocks(self) -> None:
        model = sc.assemble(CARDS["llama"])
        matrices = sum(p.params for _, p, role in model.walk() if not list(p.parts()) and role != "norm")
        assert weight_bytes(model, "q8_0") == 2 * matrices + 4 * (model.params - matrices)
        with pytest.raises(
            ScantlingInputError, match="rows of 6 elements are no multiple of the 32 of a block of q8_0"
        ):
            cache_bytes(model, Workload(1, 8), "q8_0")

    def test_a_cache_in_blocks_and_in_pages(self, capsys: pytest.CaptureFixture[str]) -> None:
        """Llama 3 8B: 8 heads of 128 in 32 layers are 65,536 numbers a position: 34/32 bytes each in q8_0."""
        run = ["memory", "llama-3-8b", "--tokens", "1000"]
        eight = told(capsys, *run, "--cache-dtype", "q8_0")
        assert eight["kv_cache_bytes_per_token"] == 65536 * 34 // 32
        paged = told(capsys, *run, "--page", "16")
        assert paged["kv_cache_bytes"] == 1008 * 131072
        assert told(capsys, *run, "--past", "7", "--page", "16")["kv_cache_bytes"] == 1008 * 131072

    def test_working_space_of_a_gated_mlp(self) -> None:
        """While the gate multiplies, gate, up, act(gate) and their product stand, and the stream beside them."""
        model = sc.assemble(sc.card("llama-3-8b"))
        found = memory(model, Workload(1, 4096), "bfloat16", "bfloat16").working
        four = 4096 * 2 * 4 * 14336
        assert four + 4096 * 2 * 2 * 4096 <= found <= four + 4096 * 2 * 5 * 4096


BLOCKY: dict[str, Any] = {
    "family": "decoder",
    "n_layers": 2,
    "d_model": 64,
    "vocab_size": 96,
    "context": 64,
    "attention": {"kind": "multi_head", "n_heads": 2, "n_kv_heads": 1, "d_head": 32},
    "position": {"kind": "rope", "theta": 10000.0},
    "norm": {"kind": "rmsnorm", "eps": 1e-5},
    "mlp": {"kind": "gated", "act": "silu", "d_ff": 96},
    "tied": False,
}


def _vectors(model: Any) -> dict[str, int]:
    return {name: shape[0] for name, shape in model.named_weights.items() if len(shape) == 1}


WRONG = [
    (["--train", "--page", "16"], "--page is of inference"),
    (["--train", "--dtype", "q4_0"], "--dtype is of inference"),
    (["--precision", "fp32"], "--precision is of training: add --train"),
    (["--train", "--main-gradients"], "bf16-mixed has no master copy"),
    (["--train", "--precision", "fp8"], "'fp8' is not one of"),
    (["--fit", "much"], "'much' is no size"),
    (["--dtype", "q4_9"], "unknown dtype 'q4_9'"),
    (["--cache-dtype", "int64"], "weights are not stored as int64"),
]


@pytest.mark.parametrize(("args", "words"), WRONG, ids=[" ".join(args) for args, _ in WRONG])
def test_wrong_options_get_one_sentence(capsys: pytest.CaptureFixture[str], args: list[str], words: str) -> None:
    assert _run(["memory", "gpt2", *args]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert words in captured.err
    assert len(captured.err.splitlines()) == 1


def test_a_recipe_that_cannot_be() -> None:
    with pytest.raises(ScantlingInputError, match="no precision 'bf61'"):
        Recipe("bf61")
    with pytest.raises(ScantlingInputError, match="micro_batches is 0"):
        Recipe(micro_batches=0)
    with pytest.raises(ScantlingInputError, match="no optimizer 'adam'; did you mean 'adamw'"):
        training_memory(sc.assemble(CARDS["llama"]), W, Recipe(optimizer="adam"))
    with pytest.raises(ScantlingInputError, match="a chunked loss is that of a vocabulary"):
        training_memory(sc.assemble(CARDS["sentences"]), W, Recipe(loss="chunked"))


def test_the_lines_add_up() -> None:
    for name in NAMES:
        for precision in PRECISIONS:
            recipe = Recipe(precision)
            m = training_memory(sc.assemble(CARDS[name]), W, recipe)
            assert sum(state_lines(m, recipe).values()) == m.states
            assert m.total == m.states + m.activations
            assert DTYPE_BYTES[recipe.formats.weights] * held(sc.assemble(CARDS[name])) == m.weights


@pytest.mark.slow
def test_a_real_process_stands_as_high_as_predicted() -> None:
    """A step of 2 GiB in a process of its own, its high-water mark above its baseline: within 5 %."""
    shape = {"model": "smollm2-135m", "batch": 1, "tokens": 96, "precision": "fp32", "optimizer": "adamw"}
    driver = Path(__file__).parent.parent / "bench" / "memory.py"
    quiet = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    run = [sys.executable, str(driver), "--child", json.dumps(shape)]
    real = int(subprocess.run(run, env=os.environ | quiet, capture_output=True, text=True, check=True).stdout)
    model, recipe, w = sc.assemble(sc.card("smollm2-135m")), Recipe("fp32"), Workload(1, 96, training=True)
    peak = max(training_peak(model, w, recipe, training_memory(model, w, recipe)).values())
    assert peak > 2 * 2**30
    assert real == pytest.approx(peak, rel=0.05)
