"""Options of `scantling memory`: how weights and cache are kept, and how a training step is made."""

from __future__ import annotations

import click

from scantling.cli import drawing
from scantling.numbers.cache import KINDS, NUMBERS
from scantling.numbers.optimizers import OPTIMIZERS
from scantling.numbers.training import PRECISIONS
from scantling.parts.saved import POLICIES

kept_options = drawing.grouped(
    "kept",
    {
        "dtype": click.option(
            "--dtype", default="bfloat16", help="Of the weights; also q8_0, q4_0, q4_k, ...", show_default=True
        ),
        "cache_dtype": click.option(
            "--cache-dtype", default="bfloat16", help="Of keys and values; also q8_0, ...", show_default=True
        ),
        "page": click.option(
            "--page",
            type=click.IntRange(1, 2**30),
            default=1,
            help="Positions that a row's cache is allotted at a time.",
        ),
        "kind": click.option(
            "--cache",
            "kind",
            type=click.Choice(KINDS),
            default="full",
            show_default=True,
            help="ring: layers with a window or chunks keep only what they can still read.",
        ),
        "numbers": click.option(
            "--cache-numbers",
            "numbers",
            type=click.Choice(NUMBERS),
            default="plain",
            show_default=True,
            help="int8: a byte per value and a float32 scale per vector.",
        ),
    },
)
step_options = drawing.grouped(
    "step",
    {
        "precision": click.option(
            "--precision", type=click.Choice(list(PRECISIONS)), default="bf16-mixed", show_default=True
        ),
        "optimizer": click.option("--optimizer", type=click.Choice(OPTIMIZERS), default="adamw", show_default=True),
        "recompute": click.option(
            "--recompute",
            type=click.Choice(POLICIES),
            default="none",
            show_default=True,
            help="In the backward, not kept.",
        ),
        "kernel": click.option(
            "--kernel",
            type=click.Choice(["fused", "reference"]),
            default="fused",
            show_default=True,
            help="Of attention.",
        ),
        "loss": click.option("--loss", type=click.Choice(["plain", "chunked"]), default="plain", show_default=True),
        "loss_rows": click.option(
            "--loss-rows", type=click.IntRange(1, 2**40), help="Of a piece of the chunked loss. [default: 2^24 logits]"
        ),
        "micro_batches": click.option(
            "--micro-batches", type=click.IntRange(1, 2**40), default=1, help="Per update.", show_default=True
        ),
        "main_gradients": click.option(
            "--main-gradients/--no-main-gradients",
            default=None,
            help="With a master copy: gradients are summed in float32, as `train` does, or stay narrow.",
        ),
        "packed": click.option("--packed", is_flag=True, help="Documents share the rows, each row has its own mask."),
    },
)
