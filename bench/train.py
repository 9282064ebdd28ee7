"""Training steps beside other libraries: the same shape, rows, dtype and AdamW; races R4, R5 and R6.

Each contender runs in a process of its own, which waits while another one runs. A step is: gradients cleared, forward,
cross-entropy, backward, AdamW. Ours is the update that `scantling train` makes, with what it always does besides: norms
of every block, clipping, and the judgement of the gradient.

usage: python bench/train.py [--race gpt2|llama|vocab] [--dtype bf16|fp32] [--modes eager,compiled] [--rounds 5]
                             [--only scantling,transformers] [--nanogpt DIR]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from race import machine, race, report

NAMES = ("transformers", "litgpt", "x-transformers", "nanogpt", "scantling")
MiB = 2**20


@dataclass(frozen=True)
class Shape:
    """What is trained.

    Attributes:
        gpt2: LayerNorm, learned positions, GELU and biases; else RMSNorm, rotary positions, a gated MLP and none.
        tokens, batch: of a step.
    """

    gpt2: bool
    n_layers: int
    d_model: int
    n_heads: int
    d_ff: int
    vocab_size: int
    tokens: int
    batch: int


RACES = {
    "gpt2": Shape(True, 12, 768, 12, 3072, 50304, 256, 4),
    "llama": Shape(False, 8, 256, 8, 704, 4096, 256, 16),
    "vocab": Shape(False, 8, 256, 8, 704, 131072, 256, 16),
}
Step = Callable[[], float]


def ours(shape: Shape, dtype: str, compiled: bool) -> Step:
    """The update of `scantling train`."""
    import torch
    from msgspec.structs import replace as changed

    import scantling as sc
    from scantling.cards.read import from_dict
    from scantling.cards.training import Training
    from scantling.train import settings
    from scantling.train.forward import Inputs
    from scantling.train.optim import Optimizers, groups
    from scantling.train.step import Stepper

    position: dict[str, Any] = {"kind": "learned"} if shape.gpt2 else {"kind": "rope", "theta": 10000.0}
    biased = ["q", "k", "v", "o"] if shape.gpt2 else []
    norm = {"kind": "layernorm" if shape.gpt2 else "rmsnorm", "eps": 1e-5, "at": ["in"]}
    mlp: dict[str, Any] = {"kind": "plain", "act": "gelu_tanh"} if shape.gpt2 else {"kind": "gated", "act": "silu"}
    card = from_dict(
        {
            "name": "raced",
            "family": "decoder",
            "n_layers": shape.n_layers,
            "d_model": shape.d_model,
            "vocab_size": shape.vocab_size,
            "context": shape.tokens,
            "attention": {"kind": "multi_head", "n_heads": shape.n_heads, "bias": biased},
            "position": position,
            "norm": norm,
            "mlp": {**mlp, "d_ff": shape.d_ff, "bias": shape.gpt2},
            "tied": True,
        },
        "raced",
    )
    lm = sc.new(card)
    lm.net.requires_grad_(True)
    training = changed(Training(), precision="bf16-mixed" if dtype == "bf16" else "fp32")
    recipe = settings.recipe_of(training)
    optimizers = Optimizers(groups(lm.parts, dict(lm.net.named_parameters()), recipe), recipe, False)
    stepper = Stepper(lm, optimizers, settings.how_of(training), training.clip, 0)
    if compiled:
        stepper.compiled = torch.compile(lm.net)
    ids = torch.randint(0, shape.vocab_size, (shape.batch, shape.tokens))
    labels = torch.randint(0, shape.vocab_size, (shape.batch, shape.tokens))
    batch = Inputs(ids, labels, ids.numel())
    return lambda: stepper.update(0, [batch], 1.0).loss


def theirs(name: str, shape: Shape, dtype: str, compiled: bool, nanogpt: str) -> Step:
    """A plain loop around another library's net."""
    import torch

    ids = torch.randint(0, shape.vocab_size, (shape.batch, shape.tokens))
    labels = torch.randint(0, shape.vocab_size, (shape.batch, shape.tokens))
    net, loss = _net(name, shape, nanogpt)
    if compiled:
        net.forward = torch.compile(net.forward, dynamic=False)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"):
            found = loss(net, ids, labels)
        found.backward()
        optimizer.step()
        return float(found.detach())

    return step


def _net(name: str, shape: Shape, nanogpt: str) -> tuple[Any, Callable[..., Any]]:
    """A net of that library, and its loss of (net, ids, labels)."""
    import torch

    def scored(net: Any, ids: Any, labels: Any) -> Any:
        return torch.nn.functional.cross_entropy(net(ids).flatten(0, 1).float(), labels.flatten())

    d, n, h, v, t = shape.d_model, shape.n_layers, shape.n_heads, shape.vocab_size, shape.tokens
    if name == "nanogpt":
        sys.path.insert(0, nanogpt)
        from model import GPT, GPTConfig

        net = GPT(GPTConfig(block_size=t, vocab_size=v, n_layer=n, n_head=h, n_embd=d, dropout=0.0, bias=shape.gpt2))
        return net, lambda net, ids, labels: net(ids, labels)[1]
    if name == "litgpt":
        from litgpt import GPT, Config

        plain = {"padded_vocab_size": v, "vocab_size": v, "n_layer": n, "n_head": h, "n_embd": d, "block_size": t}
        llama = {} if shape.gpt2 else {"norm_class_name": "RMSNorm", "mlp_class_name": "LLaMAMLP"}
        config = Config(
            **plain,
            **llama,
            rotary_percentage=1.0,
            parallel_residual=False,
            bias=shape.gpt2,
            intermediate_size=shape.d_ff,
        )
        return GPT(config), scored
    if name == "x-transformers":
        from x_transformers import Decoder, TransformerWrapper

        layers = Decoder(dim=d, depth=n, heads=h, attn_flash=True, rotary_pos_emb=not shape.gpt2)
        return TransformerWrapper(num_tokens=v, max_seq_len=t, attn_layers=layers), scored
    import transformers

    if shape.gpt2:
        off = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
        gpt2 = transformers.GPT2Config(
            vocab_size=v, n_positions=t, n_embd=d, n_layer=n, n_head=h, use_cache=False, **off
        )
        net = transformers.GPT2LMHeadModel(gpt2)
    else:
        llama_config = transformers.LlamaConfig(
            vocab_size=v,
            hidden_size=d,
            intermediate_size=shape.d_ff,
            num_hidden_layers=n,
            num_attention_heads=h,
            num_key_value_heads=h,
            max_position_embeddings=t,
            tie_word_embeddings=True,
            use_cache=False,
        )
        net = transformers.LlamaForCausalLM(llama_config)
    return net, lambda net, ids, labels: net(input_ids=ids, labels=labels).loss


def child(name: str, shape: Shape, dtype: str, compiled: bool, nanogpt: str) -> None:
    """Make a step for every line that is read; seconds and the most memory of it are written."""
    import torch

    torch.manual_seed(0)
    if name == "scantling":
        from scantling.train.pages import kept_pages

        with kept_pages(4 * 2**30):
            _steps(ours(shape, dtype, compiled))
    else:
        _steps(theirs(name, shape, dtype, compiled, nanogpt))


def _steps(step: Step) -> None:
    step()
    print("ready", flush=True)
    for _ in sys.stdin:
        Path("/proc/self/clear_refs").write_text("5")
        began = time.perf_counter()
        loss = step()
        seconds = time.perf_counter() - began
        peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
        print(json.dumps({"seconds": seconds, "peak": int(peak.split()[1]) * 1024, "loss": loss}), flush=True)


class Contender:
    """A child that makes a step when it is asked."""

    def __init__(self, name: str, chosen: argparse.Namespace, mode: str) -> None:
        shape = RACES[chosen.race]
        said = [chosen.dtype, str(int(mode == "compiled")), chosen.nanogpt or ""]
        command = [sys.executable, __file__, "--child", name, json.dumps(asdict(shape)), *said]
        self.tokens = shape.batch * shape.tokens
        self.peaks: list[int] = []
        self.child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ready(self) -> bool:
        """Whether it could be built and made its first step."""
        assert self.child.stdout is not None
        return any(line.strip() == "ready" for line in self.child.stdout)

    def __call__(self) -> float:
        """Tokens per second of one step."""
        assert self.child.stdin is not None
        assert self.child.stdout is not None
        self.child.stdin.write("step\n")
        self.child.stdin.flush()
        said = json.loads(self.child.stdout.readline())
        self.peaks.append(said["peak"])
        return float(self.tokens / said["seconds"])


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        name, shape, dtype, compiled, nanogpt = sys.argv[2:]
        child(name, Shape(**json.loads(shape)), dtype, compiled == "1", nanogpt)
        return
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--race", choices=tuple(RACES), default="gpt2")
    options.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    options.add_argument("--modes", default="eager")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--only", default=",".join(NAMES))
    options.add_argument("--nanogpt", help="a checkout of nanoGPT")
    chosen = options.parse_args()
    print(machine("scantling", "torch", "transformers", "litgpt", "x-transformers"))
    contenders: dict[str, Contender] = {}
    for mode in chosen.modes.split(","):
        for name in chosen.only.split(","):
            if name == "nanogpt" and not chosen.nanogpt:
                continue
            one = Contender(name, chosen, mode)
            if one.ready():
                contenders[f"{name} {mode}"] = one
            else:
                print(f"  {name} {mode}: could not run, see above")
    figures = race(contenders, chosen.rounds)
    others = {name: statistics.median(each) for name, each in figures.items() if not name.startswith("scantling")}
    best = max(others, key=lambda name: others[name]) if others else next(iter(figures))
    shape = RACES[chosen.race]
    report(f"training, {chosen.race} {chosen.dtype}, B {shape.batch}, T {shape.tokens}", "tokens/s", figures, best)
    print("most memory of a step (MiB)")
    for name, one in contenders.items():
        print(f"  {name:34} {statistics.median(one.peaks) / MiB:9.0f}")
        one.child.kill()


if __name__ == "__main__":
    main()
