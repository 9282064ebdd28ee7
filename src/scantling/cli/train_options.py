"""Options of `scantling train` that stand for a key of the card's training section."""

from __future__ import annotations

import click

from scantling.cli import drawing

SHORT = {
    "steps": "steps",
    "batch": "batch",
    "tokens": "tokens",
    "accumulation": "accumulation",
    "lr": "optimizer.lr",
    "optimizer": "optimizer.kind",
    "schedule": "schedule.kind",
    "precision": "precision",
    "objective": "objective",
    "boundary": "boundary",
    "recompute": "recompute",
    "seed": "seed",
    "eval_every": "evaluation.every",
    "save_every": "save_every",
}
"""The keys, by option."""

short_options = drawing.grouped(
    "short",
    {
        "steps": click.option("--steps", type=int, help="Updates."),
        "batch": click.option("--batch", type=int, help="Rows of a micro-batch."),
        "tokens": click.option("--tokens", type=int, help="Of a row."),
        "accumulation": click.option("--accumulation", type=int, help="Micro-batches of an update."),
        "lr": click.option("--lr", type=float, help="The peak rate."),
        "optimizer": click.option("--optimizer", help="adamw, adamw-8bit, muon or sgd."),
        "schedule": click.option("--schedule", help="constant, cosine, linear, wsd or inverse_sqrt."),
        "precision": click.option("--precision", help="fp32, bf16-mixed, bf16-master or bf16."),
        "objective": click.option("--objective", help="causal, masked, seq2seq, spans or prefix."),
        "boundary": click.option("--boundary", help="packed, padded or concatenated."),
        "recompute": click.option("--recompute", help="none, selective or block."),
        "seed": click.option("--seed", type=int),
        "eval_every": click.option("--eval-every", type=int, metavar="N"),
        "save_every": click.option("--save-every", type=int, metavar="N"),
    },
)
