"""What a card may say about its training. No part of the model depends on it."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, field

from scantling.cards.section import Amount, Chance, Count, Positive, Section, Share, Size


class Optimizer(Section):
    """The optimiser.

    Attributes:
        kind: adamw; adamw-8bit, whose moments are held in 8 bits; muon for the matrices of the blocks with adamw for
            the rest; sgd with Nesterov momentum.
        lr: the peak rate.
        momentum: of muon and sgd.
        decay_embeddings: whether tables decay like matrices; gains and shifts never do.
    """

    kind: Literal["adamw", "adamw-8bit", "muon", "sgd"] = "adamw"
    lr: Positive = 1e-3
    betas: tuple[Chance, Chance] = (0.9, 0.95)
    eps: Positive = 1e-8
    weight_decay: Amount = 0.1
    momentum: Chance = 0.95
    decay_embeddings: bool = True


class Schedule(Section):
    """The learning rate by update.

    Attributes:
        kind: constant; cosine or linear to `final`; wsd (flat, then linear over `decay`); inverse_sqrt (Noam).
        warmup: updates with a rising rate; below 1 a share of all updates.
        final: factor on the peak rate at the end of cosine, linear and wsd.
        decay: updates of the last stage of wsd; below 1 a share.
    """

    kind: Literal["constant", "cosine", "linear", "wsd", "inverse_sqrt"] = "cosine"
    warmup: Amount = 0.05
    final: Share = 0.1
    decay: Amount = 0.2


class Stage(Section):
    """Shorter rows at the beginning.

    Attributes:
        tokens: of a row.
        until: share of all updates after which the next stage begins.
    """

    tokens: Size
    until: Annotated[float, Meta(gt=0, lt=1)]


class Bad(Section):
    """What happens to an update whose gradient is not finite, or is a spike; it is judged before it is made.

    Attributes:
        policy: stop the run, or skip the update and go on.
        spike: a norm of the gradient above this factor times its mean over the last 50 updates is one; default none.
        most: skipped updates in a row after which the run stops all the same.
    """

    policy: Literal["stop", "skip"] = "stop"
    spike: Annotated[float, Meta(gt=1, le=1e12)] | None = None
    most: Size = 5


class Evaluation(Section):
    """Looks at text that is held out.

    Attributes:
        every: updates between two of them; 0 is only at the end.
        tokens: at most so many of the held-out text, from its beginning.
        stride: new tokens of each window, the rest of which is context that is not judged again; default half a row.
        patience: evaluations without a better loss after which the run stops; default never.
        samples: texts that are written then, of `sample_tokens` tokens.
        prompt: they begin with; default the beginning of a held-out document.
    """

    every: Count = 0
    tokens: Size = 32768
    stride: Size | None = None
    patience: Size | None = None
    samples: Count = 1
    sample_tokens: Size = 64
    prompt: str | None = None


class Lora(Section):
    """Adapters of low rank instead of all weights (arXiv:2106.09685).

    Attributes:
        alpha: their sum is multiplied by alpha / rank; default the rank.
        targets: names of linear maps in the blocks.
        dropout: on what an adapter reads.
    """

    rank: Size = 16
    alpha: Positive | None = None
    targets: list[str] = field(default_factory=lambda: ["q", "k", "v", "o", "gate", "up", "down"])
    dropout: Chance = 0.0


class Parallel(Section):
    """How the processes of a run share it; one alone shares nothing.

    Attributes:
        sharded: ranks with rows of their own that share weights, gradients and optimizer state (FSDP); default all.
        tensor: ranks that share every matrix of a block and read the same rows.
        replicated: ranks with rows of their own that hold all weights each.
    """

    sharded: Size | None = None
    tensor: Size = 1
    replicated: Size = 1


class Training(Section):
    """One training run.

    Attributes:
        objective: what is predicted; default by the family: causal for a decoder, masked for an encoder, seq2seq for
            an encoder-decoder.
        boundary: packed rows, whose documents do not see each other; padded rows of one document; or concatenated rows,
            whose documents do see each other. Default packed where the objective can be, else padded.
        precision: fp32; bf16-mixed (autocast, weights in float32); bf16-master (weights in bfloat16 with float32
            copies); bf16 (nothing in float32).
        steps: updates.
        batch: rows of a micro-batch; of an update there are batch x accumulation, of all processes together.
        tokens: of a row; default the context.
        curriculum: stages of shorter rows before.
        accumulation: micro-batches of an update; their tokens count alike.
        clip: the gradient's largest norm; null for none.
        recompute: which activations are computed again in the backward pass.
        kernel: of attention: fused (torch's scaled_dot_product_attention) or flex (FlexAttention, which skips the
            blocks that packed documents and windows hide; for GPUs).
        label_smoothing: share of each target that is spread over the vocabulary.
        z_loss: factor on the square of the log of the softmax's sum.
        router_balance, router_z: factors on the losses of routers (Switch Transformer, ST-MoE); experts only.
        router_shift: how far the stored shift of an expert's score moves after an update, up where it was chosen too
            seldom and down where too often (DeepSeek V3); of cards with mlp.selection_bias only, and not with adapters.
        whole_words: all pieces of a word are masked together; of the objective masked only.
        lora: adapters are trained instead of the weights, and saved merged and by themselves; default not.
        ema: decay of a mean of the weights, which is evaluated, and saved as a model in the folder `ema` of each
            checkpoint; default none.
        seed: of the initial weights, the order of the data and dropout, each by its own stream.
        save_every: updates between two checkpoints; 0 is only at the end.
        keep: newest checkpoints that stay; the best one stays, too.
        compile: by torch.compile, which costs a minute at the start.
        parallel: how the processes that torchrun starts share the run; no loss depends on it.
    """

    objective: Literal["causal", "masked", "seq2seq", "spans", "prefix"] | None = None
    boundary: Literal["packed", "padded", "concatenated"] | None = None
    precision: Literal["fp32", "bf16-mixed", "bf16-master", "bf16"] = "fp32"
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    steps: Size = 1000
    batch: Size = 16
    tokens: Size | None = None
    curriculum: list[Stage] = field(default_factory=list)
    accumulation: Size = 1
    clip: Positive | None = 1.0
    recompute: Literal["none", "selective", "block"] = "none"
    kernel: Literal["fused", "flex"] = "fused"
    label_smoothing: Share = 0.0
    z_loss: Amount = 0.0
    router_balance: Amount = 0.01
    router_z: Amount = 0.0
    router_shift: Amount = 0.001
    whole_words: bool = False
    lora: Lora | None = None
    ema: Chance | None = None
    seed: Count = 0
    bad: Bad = Bad()
    evaluation: Evaluation = Evaluation()
    save_every: Count = 0
    keep: Size = 2
    compile: bool = False
    parallel: Parallel = Parallel()


def updates(amount: float, steps: int) -> int:
    """Updates that a number stands for: below 1 a share of all `steps`, else itself."""
    return round(amount * steps) if amount < 1 else round(amount)
