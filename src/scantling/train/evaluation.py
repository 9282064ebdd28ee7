"""What a run does when it looks at held-out text: a score, and samples."""

from __future__ import annotations

from scantling.cards.training import Training
from scantling.data import Corpus
from scantling.model import Model
from scantling.train.evaluate import Rows, Score, score_documents, score_objective, start_of, windows_for
from scantling.train.forward import How
from scantling.train.ranks import ALONE, Ranks
from scantling.train.settings import boundary_of, objective, objective_of

PROMPT_TOKENS = 16
"""Of a held-out document that a sample begins with, where no prompt is given."""


def evaluate(lm: Model, corpus: Corpus, training: Training, how: How, ranks: Ranks = ALONE) -> Score:
    """The score of the held-out half: of text that is read from left to right every token, else the objective's.

    Ranks share the rows, and all get the same score.
    """
    name, asked = objective_of(lm.card, training), training.evaluation
    if name == "causal" and corpus.manifest.kind == "text":
        size = min(training.tokens or lm.card.context, lm.card.context)
        windows = windows_for(lm, asked.stride, size, start_of(corpus))
        return score_documents(lm, corpus.held_out, windows, asked.tokens, how, ranks)
    rows = Rows(training.tokens or lm.card.context, boundary_of(lm.card, training))
    return score_objective(lm, corpus.held_out, objective(lm, training), rows, asked.tokens, how, ranks)


def wants_samples(lm: Model, training: Training) -> bool:
    """Whether a look at held-out text writes any."""
    asked = training.evaluation
    return bool(asked.samples) and lm.card.family == "decoder" and asked.sample_tokens < lm.card.context


def samples(lm: Model, corpus: Corpus, training: Training) -> list[str]:
    """Greedy texts of a decoder: the prompt, or the first tokens of held-out documents, and what follows."""
    asked = training.evaluation
    if not wants_samples(lm, training):
        return []
    tokenizer, before = corpus.tokenizer, list(corpus.marks.before)
    room = lm.card.context - asked.sample_tokens
    if asked.prompt is not None:
        prompts = [tokenizer.encode(asked.prompt, add_special=False)]
    else:
        prompts = [
            corpus.held_out.ids(i, 0, PROMPT_TOKENS).tolist() for i in range(min(asked.samples, len(corpus.held_out)))
        ]
    texts = []
    for prompt in prompts:
        ids = [*before, *prompt][:room]
        if ids:
            made = lm.generate([ids], asked.sample_tokens)
            texts.append(tokenizer.decode(made[0].tolist()))
    return texts
