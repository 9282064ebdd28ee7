"""Looking inside a model: one mechanism that captures and edits by path, and what is read with it."""

from scantling.lens.arrays import read_arrays, write_arrays
from scantling.lens.attention import attention_maps
from scantling.lens.attribution import Attribution, attribute
from scantling.lens.distribution import NextTokens, next_tokens
from scantling.lens.edits import ablate, add, means, put
from scantling.lens.hooks import Captured, Edit, capture, edited
from scantling.lens.induction import HeadScore, head_scores, repeated_tokens, second_half_loss
from scantling.lens.logit_lens import Reading, lens_logits, logit_lens, read_tuned
from scantling.lens.metric import Metric
from scantling.lens.patching import Grid, Noise, patch_grid
from scantling.lens.points import known
from scantling.lens.residual import Decomposition, Term, decompose
from scantling.lens.steer import Direction, direction_of, read_direction, steering

__all__ = [
    "Attribution",
    "Captured",
    "Decomposition",
    "Direction",
    "Edit",
    "Grid",
    "HeadScore",
    "Metric",
    "NextTokens",
    "Noise",
    "Reading",
    "Term",
    "ablate",
    "add",
    "attention_maps",
    "attribute",
    "capture",
    "decompose",
    "direction_of",
    "edited",
    "head_scores",
    "known",
    "lens_logits",
    "logit_lens",
    "means",
    "next_tokens",
    "patch_grid",
    "put",
    "read_arrays",
    "read_direction",
    "read_tuned",
    "repeated_tokens",
    "second_half_loss",
    "steering",
    "write_arrays",
]
