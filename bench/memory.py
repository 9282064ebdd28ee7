"""Predicted and measured high-water marks of real training steps and real generations, one process each.

usage: python bench/memory.py [NAME ...] [--write]

A process reads its high-water mark (VmHWM of /proc/self/status) after it has been set back to the present size (5 into
/proc/self/clear_refs), so it needs Linux. The mark is compared above the process's size with torch and its libraries
loaded and one small step done, before the model is built. glibc is told to give what is freed back to the system at
once (MALLOC_ARENA_MAX=1, MALLOC_MMAP_THRESHOLD_ and MALLOC_TRIM_THRESHOLD_=65536), so that the mark is what is held and
not what an allocator hoards. `--write` writes docs/memory.md.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from race import machine

import scantling as sc
from scantling.numbers.memory import memory
from scantling.numbers.peak import training_peak
from scantling.numbers.training import PRECISIONS, Recipe, training_memory
from scantling.parts.part import Workload

MIB = 2**20
WITHIN = 0.05, 64 * MIB
"""What a residual should be within: a share of the measurement, or bytes."""
QUIET = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
PAGE = Path(__file__).parent.parent / "docs" / "memory.md"


@dataclass(frozen=True)
class Shape:
    """One measurement: a training step, or with `new` a generation of so many tokens after a prompt of `tokens`."""

    model: str
    batch: int
    tokens: int
    precision: str = "fp32"
    optimizer: str = "adamw"
    recompute: str = "none"
    kernel: str = "fused"
    new: int = 0

    @property
    def name(self) -> str:
        """A short name."""
        if self.new:
            return f"{self.model}: {self.new} tokens after {self.batch} x {self.tokens:,}, {self.precision}"
        how = [self.precision, self.optimizer, self.kernel]
        how += [] if self.recompute == "none" else [f"recompute {self.recompute}"]
        return f"{self.model}: step of {self.batch} x {self.tokens:,}, {', '.join(how)}"


SHAPES = [
    Shape("gpt2", 2, 512),
    Shape("smollm2-135m", 1, 1024, "bf16-mixed"),
    Shape("smollm2-135m", 2, 1024, "bf16-mixed", recompute="block"),
    Shape("smollm2-135m", 1, 512, optimizer="muon", kernel="reference", recompute="selective"),
    Shape("pythia-160m", 1, 32, "bf16-master"),
    Shape("bert-base-uncased", 4, 256),
    Shape("t5-base", 1, 128, optimizer="sgd"),
    Shape("qwen3-0.6b", 2, 1024, new=4),
    Shape("llama-3.2-1b", 1, 1024, "bf16", new=4),
]


def predicted(shape: Shape) -> dict[str, int]:
    """Bytes at each moment that can be the highest."""
    model = sc.assemble(sc.card(shape.model))
    if shape.new:
        dtype = PRECISIONS[shape.precision].weights
        prompt = memory(model, Workload(shape.batch, shape.tokens), dtype, dtype)
        whole = memory(model, Workload(shape.batch, shape.tokens + shape.new), dtype, dtype)
        return {"the prompt": whole.weights + whole.kv + prompt.working}
    w = Workload(shape.batch, shape.tokens, training=True, kernel=shape.kernel, recompute=shape.recompute)
    recipe = Recipe(shape.precision, shape.optimizer, main_gradients=shape.precision == "bf16-master")
    return training_peak(model, w, recipe, training_memory(model, w, recipe))


def measured(shape: Shape) -> int:
    """Bytes above the baseline, in a process of its own."""
    asked = json.dumps(asdict(shape))
    done = subprocess.run(
        [sys.executable, __file__, "--child", asked],
        env=os.environ | QUIET,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{shape.name}: {done.stderr}")
    return int(done.stdout)


def child(shape: Shape) -> None:
    """Measure in this process."""
    run = generate if shape.new else train
    small = Shape(**asdict(shape) | {"model": "tiny", "batch": 1, "tokens": 16})
    run(small)
    gc.collect()
    base = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    run(shape)
    print(_status("VmHWM") - base)


def train(shape: Shape) -> None:
    """Two steps: in the second the optimiser's states are there from the beginning."""
    import torch

    from scantling.numbers.optimizers import trained
    from scantling.tensor.context import Context

    model, formats = sc.assemble(sc.card(shape.model)), PRECISIONS[shape.precision]
    net: Any = model.build(dtype=formats.weights).train()
    weights = dict(net.named_parameters())
    masters: dict[str, Any] = {}
    if formats.master:
        masters = {name: torch.nn.Parameter(weights[name].detach().float()) for name in weights}
    updated = masters or weights
    matrices = {weight.name for weight in trained(model) if weight.matrix} if shape.optimizer == "muon" else set()
    rest = [updated[weight.name] for weight in trained(model) if weight.name not in matrices]
    optimizers: list[Any] = [torch.optim.Muon([updated[name] for name in sorted(matrices)])] if matrices else []
    if shape.optimizer == "sgd":
        optimizers.append(torch.optim.SGD(rest, lr=1e-3, momentum=0.9, nesterov=True))
    else:
        optimizers.append(torch.optim.AdamW(rest, fused=True))
    ids = torch.randint(0, model.embed.rows, (shape.batch, shape.tokens))
    source = (ids,) if model.two_stacks else ()
    for _ in range(2):
        ctx = Context.of(ids, training=True, kernel_name=shape.kernel, recompute=shape.recompute)
        with torch.autocast("cpu", torch.bfloat16) if formats.autocast else nullcontext():
            _, loss = model.outcome(net, ids, net(ids, ctx, *source), ctx)
        del ctx
        loss.backward()
        for name, master in masters.items():
            master.grad, weights[name].grad = weights[name].grad.float(), None
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            for name, master in masters.items():
                weights[name].copy_(master)


def generate(shape: Shape) -> None:
    """A prompt, then one token at a time."""
    import torch

    from scantling.tensor.cache import Cache
    from scantling.tensor.context import Context

    model, dtype = sc.assemble(sc.card(shape.model)), PRECISIONS[shape.precision].weights
    net: Any = model.build(dtype=dtype, seed=None)
    with torch.no_grad():
        for weight in net.parameters():
            weight.fill_(0.01)
        cache = Cache(model.named_state(Workload(shape.batch, shape.tokens + shape.new)), getattr(torch, dtype), "cpu")
        ids = torch.randint(0, model.embed.rows, (shape.batch, shape.tokens))
        for _ in range(shape.new):
            logits = net(ids, Context.of(ids, cache=cache, last_only=True))
            cache.advance(ids.shape[1])
            ids = logits[:, -1].argmax(-1)[:, None]


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(key)).split()[1])


def row(shape: Shape) -> str:
    """One line of the table."""
    moments = predicted(shape)
    moment, high = max(moments.items(), key=lambda item: item[1])
    real = measured(shape)
    residual = real - high
    share, least = WITHIN
    verdict = "yes" if abs(residual) <= max(share * real, least) else "no"
    sizes = f"{high / MIB:,.0f} | {real / MIB:,.0f} | {residual / MIB:+,.0f} | {100 * residual / real:+.1f} %"
    return f"| {shape.name} | {moment} | {sizes} | {verdict} |"


HEAD = """| what | predicted to be highest | predicted MiB | measured MiB | residual | share | within |
|---|---|---|---|---|---|---|"""


def page(rows: list[str]) -> str:
    """docs/memory.md."""
    text = (__doc__ or "").split("\n\n", 2)[2].replace("`--write` writes docs/memory.md.", "").strip()
    share, least = WITHIN
    return f"""# Predicted and measured memory

What autograd keeps is counted exactly and compared with torch's hooks by `tests/test_saved.py`. The highest that a
whole process stands is a model on top of that count: gradients that come while activations go, the loss's own tensors,
and of each row the gradients that are made at once. This page compares it with real steps and real generations;
*within* means {100 * share:.0f} % of the measurement or {least // MIB} MiB. It is made by `make bench-memory`.

{text}

Machine: {machine("torch")}, Linux {platform.release().split("-")[0]}, one thread.

{HEAD}
{chr(10).join(rows)}
"""


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("names", nargs="*", metavar="NAME", help="only shapes whose name contains one of these")
    options.add_argument("--write", action="store_true", help="write docs/memory.md")
    options.add_argument("--child", help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.child:
        child(Shape(**json.loads(chosen.child)))
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    print(machine("torch"), "\n")
    print(HEAD)
    rows = []
    for shape in SHAPES:
        if not chosen.names or any(name in shape.name for name in chosen.names):
            rows.append(row(shape))
            print(rows[-1], flush=True)
    if chosen.write:
        with tempfile.NamedTemporaryFile("w", dir=PAGE.parent, delete=False, encoding="utf-8") as new:
            new.write(page(rows))
        Path(new.name).replace(PAGE)


if __name__ == "__main__":
    main()
