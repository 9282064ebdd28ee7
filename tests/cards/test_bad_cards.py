"""Bad cards: each gets one short sentence that names the key or line, and quickly."""

from __future__ import annotations

import os
import time
import tracemalloc
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from scantling.assembly import assemble
from scantling.cards import card, preset, read_file, read_text
from scantling.cards.read import MAX_BYTES, from_dict
from scantling.errors import ScantlingInputError

GOOD: dict[str, Any] = {
    "name": "good",
    "family": "decoder",
    "n_layers": "2",
    "d_model": "64",
    "vocab_size": "100",
    "context": "32",
    "attention": {"kind": "multi_head", "n_heads": "4", "n_kv_heads": "2"},
    "position": {"kind": "rope", "theta": "10000.0"},
    "norm": {"kind": "rmsnorm", "eps": "1.0e-5", "at": "[in]"},
    "mlp": {"kind": "gated", "act": "silu", "d_ff": "128"},
    "tied": "true",
}
MOE = "{kind: moe, n_experts: 4, top_k: 2, expert: {kind: plain, act: relu}}"
SHORT_TURN = "{kind: rope, theta: 1.0e+4, d_rotary: 2, scaling: {kind: dynamic, factor: 2.0, trained_length: 8}}"
GAINS = "{norm: {kind: rmsnorm, eps: 1.0e-6, plus_one: true, rounded: true}}"
QK = "{kind: rmsnorm, eps: 1.0e-6, "
LOW_BASE = "{kind: rope, theta: 1.0, scaling: {kind: yarn, factor: 2.0, trained_length: 8}}"
LLAMA3 = "factor: 8.0, trained_length: 32, low_freq_factor: 4.0, high_freq_factor: 4.0}"
LONGROPE = "{kind: longrope, trained_length: 8, short_factor: [1.0, 1.0], long_factor: [1.0, 1.0]}"
ONE_POSITION = LONGROPE.replace("h: 8", "h: 1")
PLACES = "allowed: in, res, out"
ACTS = "allowed: relu, gelu, gelu_tanh, quick_gelu, relu2, silu, tanh"
POSITIONS = "allowed: none, sinusoidal, learned, rope, alibi"


def rendered(section: dict[str, Any]) -> str:
    """The card as YAML: leaves are YAML text already."""
    lines = []
    for key, value in section.items():
        if isinstance(value, dict):
            value = "{" + ", ".join(f"{k}: {v}" for k, v in value.items()) + "}"
        lines.append(f"{key}: {value}\n")
    return "".join(lines)


def mutated(*changes: tuple[str, str | None]) -> str:
    """The good card with the YAML text at some key paths replaced, added, or (None) taken away."""
    section = deepcopy(GOOD)
    for path, text in changes:
        *way, last = path.split(".")
        at = section
        for name in way:
            at = at.setdefault(name, {})
        if text is None:
            del at[last]
        else:
            at[last] = text
    return rendered(section)


TEXT = mutated()


def assert_refused(text: str, *words: str) -> str:
    began = time.process_time()
    with pytest.raises(ScantlingInputError) as caught:
        read_text(text, "bad.yaml")
    took, message = time.process_time() - began, str(caught.value)
    checked(message, *words)
    assert took < 2
    return message


def checked(message: str, *words: str) -> None:
    assert len(message.splitlines()) == 1
    assert len(message) < 600
    for word in words:
        assert word in message


def test_the_card_that_is_mutated_is_good() -> None:
    good = read_text(TEXT, "good.yaml")
    assert (good.name, good.n_layers, good.norm.eps, good.tied) == ("good", 2, 1e-5, True)
    assert assemble(good).params == 64 * 100 + 2 * (64 * 16 * (4 + 4 + 2 + 2) + 3 * 64 * 128 + 2 * 64) + 64


# The key path, what stands there (None: nothing), and words of the message beside the path.
VALUES: list[tuple[str, str | None, *tuple[str, ...]]] = [
    # Misspelt and unknown keys, on every level.
    ("n_layer", "2", "unknown key", "did you mean 'n_layers'?", "known here: name, family, n_layers"),
    ("Name", "x", "unknown key", "did you mean 'name'?"),
    ("vocab", "100", "unknown key", "known here", "vocab_size"),
    ("n-layers", "2", "unknown key", "did you mean 'n_layers'?"),
    ("serving", "{}", "unknown key"),
    ("inference.kernel", "fast", "unknown key", "quantisation, cache, batch"),
    ("inference.batch", "0", "inference.batch is 0"),
    ("inference.batch", "many", "allowed: unknown"),
    ("_", "1", "unknown key"),
    ("attention.heads", "4", "unknown key", "did you mean 'n_heads'?", "known here: n_heads, n_kv_heads, d_head"),
    ("attention.n_kv_groups", "8", "unknown key", "n_kv_heads"),
    ("attention.group_size", "8", "unknown key", "known here: n_heads, n_kv_heads"),
    ("attention.sliding_window", "8", "unknown key", "window"),
    ("attention.n_head", "4", "unknown key", "did you mean 'n_heads'?"),
    ("position.base", "1.0", "unknown key", "known here: theta, d_rotary, interleaved, scaling, kind"),
    ("position.rope_theta", "1.0", "unknown key", "theta"),
    ("position.d_rotory", "8", "unknown key", "did you mean 'd_rotary'?"),
    (
        "norm.epsilon",
        "1.0",
        "unknown key",
        "known here: eps, at, plus_one, rounded, final, skip_first, kind",
        "did you mean 'eps'?",
    ),
    ("norm.bias", "true", "unknown key", "known here: eps, at, plus_one, rounded, final, skip_first, kind"),
    ("mlp.dff", "64", "unknown key", "did you mean 'd_ff'?"),
    ("mlp.top_k", "2", "unknown key", "known here: act, d_ff, bias, clamp, kind"),
    ("embedding.scales", "2.0", "unknown key", "did you mean 'scale'?"),
    (
        "head.cap",
        "30.0",
        "unknown key",
        "known here: kind, bias, bias_fixed, scale, softcap",
        "did you mean 'softcap'?",
    ),
    ("dropout.resid", "0.1", "unknown key", "did you mean 'residual'?"),
    ("source.url", "x", "unknown key", "known here: config, note"),
    ("published.param", "5", "unknown key", "did you mean 'params'?"),
    ("embedding.kind", "plain", "unknown key"),
    ("embedding.token_types", "2", "unknown key", "known here: scale, scale_rounded, vocab_multiple, width, widen"),
    ("residual.paralell", "true", "unknown key", "did you mean 'parallel'?"),
    ("position.scaling", "{kind: linear, factr: 2.0}", "position.scaling.factr", "did you mean 'factor'?"),
    ("pattern", "[{}, {atention: {}}]", "pattern[1].atention", "did you mean 'attention'?"),
    ("pattern", "[{attention: {windows: 3}}]", "pattern[0].attention.windows", "did you mean 'window'?"),
    # Missing keys.
    ("name", None, "is missing"),
    ("family", None, "is missing"),
    ("n_layers", None, "is missing"),
    ("d_model", None, "is missing"),
    ("vocab_size", None, "is missing"),
    ("context", None, "is missing"),
    ("attention", None, "is missing"),
    ("position", None, "is missing"),
    ("norm", None, "is missing"),
    ("mlp", None, "is missing"),
    ("tied", None, "is missing"),
    ("attention.n_heads", None, "is missing"),
    ("attention.kind", None, "is missing; one of multi_head, latent"),
    ("position.kind", None, "is missing; one of none, sinusoidal, learned, rope, alibi"),
    ("position.theta", None, "is missing"),
    ("norm.eps", None, "is missing"),
    ("norm.kind", None, "is missing; one of rmsnorm, layernorm"),
    ("mlp.act", None, "is missing"),
    ("mlp.kind", None, "is missing; one of plain, gated, moe"),
    ("position.scaling", "{factor: 2.0}", "scaling.kind is missing; one of linear, dynamic, yarn, llama3, longrope"),
    ("position.scaling", "{kind: linear}", "position.scaling.factor is missing"),
    ("attention.qk_norm", "{kind: rmsnorm}", "attention.qk_norm.eps is missing"),
    ("source", "{note: x}", "source.config is missing"),
    ("published", "{params: 5}", "published.where is missing"),
    # Kinds.
    ("family", "decodr", "is 'decodr'", "allowed: decoder, encoder, encoder-decoder; did you mean 'decoder'?"),
    ("family", "seq2seq", "allowed: decoder, encoder, encoder-decoder"),
    ("attention.kind", "mha", "is 'mha'; allowed: multi_head, latent"),
    ("position.kind", "rotary", "is 'rotary'", POSITIONS),
    ("position.kind", "Rope", POSITIONS, "did you mean 'rope'?"),
    ("position.kind", "3", "is 3", POSITIONS),
    ("position.kind", "null", "is None", POSITIONS),
    ("position.kind", "[rope]", POSITIONS),
    ("norm.kind", "rms_norm", "allowed: rmsnorm, layernorm; did you mean 'rmsnorm'?"),
    ("mlp.kind", "glu", "allowed: plain, gated, moe"),
    ("mlp.kind", "swiglu", "allowed: plain, gated, moe"),
    ("dtype", "bf16", "is 'bf16'; allowed: float32, float16, bfloat16"),
    ("dtype", "int8", "allowed: float32, float16, bfloat16"),
    ("dtype", "null", "is None; allowed: float32"),
    ("mlp.act", "swish", "is 'swish'", ACTS),
    ("mlp.act", "gelu_tan", ACTS, "did you mean 'gelu_tanh'?"),
    ("mlp.act", "true", "is True", ACTS),
    ("norm.at", "[pre]", "norm.at[0] is 'pre'", PLACES),
    ("norm.at", "[in, post]", "norm.at[1] is 'post'", PLACES),
    ("norm.at", "[in, 3]", "norm.at[1] is 3", PLACES),
    ("attention.bias", "[q, w]", "attention.bias[1] is 'w'; allowed: q, k, v, o"),
    ("position.scaling", "{kind: lama3}", "kind is 'lama3'; allowed: linear, dynamic, yarn", "did you mean 'llama3'?"),
    ("attention.qk_norm", "{kind: rmsnorm, eps: 1.0e-6, over: heads}", "is 'heads'", "did you mean 'head'?"),
    ("pattern", "[{position: {kind: alibi}}]", "pattern[0].position.kind is 'alibi'; allowed: none, rope"),
    # Types.
    ("name", "null", "is None; expected str"),
    ("name", "17", "is 17; expected str"),
    ("name", "[a]", "is ['a']; expected str"),
    ("name", "2024-01-01", "expected str"),
    ("n_layers", "true", "is True; expected int"),
    ("n_layers", "'2'", "is '2'; expected int"),
    ("n_layers", "2.0", "is 2.0; expected int"),
    ("n_layers", "2.5", "is 2.5; expected int"),
    ("n_layers", "1:30", "is '1:30'; expected int"),
    ("n_layers", "two", "expected int"),
    ("n_layers", "null", "is None; expected int"),
    ("n_layers", "[2]", "is [2]; expected int"),
    ("n_layers", "{a: 1}", "is {'a': 1}; expected int"),
    ("d_model", "6.4e1", "is 64.0; expected int"),
    ("vocab_size", "false", "is False; expected int"),
    ("context", "32k", "is '32k'; expected int"),
    ("attention", "null", "is None; expected mapping"),
    ("attention", "[multi_head]", "a mapping of keys to values is needed"),
    ("attention", "multi_head", "is 'multi_head'; a mapping of keys to values is needed"),
    ("attention", "true", "is True; a mapping"),
    ("attention.n_heads", "true", "is True; expected int"),
    ("attention.n_heads", "null", "is None; expected int"),
    ("attention.n_kv_heads", "2.0", "is 2.0; expected int"),
    ("attention.window", "yes", "is 'yes'; expected int"),
    ("attention.bias", "true", "is True; expected list"),
    ("attention.bias", "q", "is 'q'; expected list"),
    ("attention.bias", "{q: 1}", "expected list"),
    ("attention.scale_by_layer", "1", "is 1; expected bool"),
    ("attention.scale", "'0.5'", "is '0.5'; expected float"),
    ("position", "none", "is 'none'; a mapping of keys to values is needed"),
    ("position", "5", "is 5; a mapping"),
    ("position.theta", "true", "is True; expected float"),
    ("position.theta", "ten thousand", "expected float"),
    ("position.interleaved", "'true'", "is 'true'; expected bool"),
    ("norm.eps", "'1e-5'", "is '1e-5'; expected float"),
    ("norm.eps", "null", "is None; expected float"),
    ("norm.at", "in", "is 'in'; expected list"),
    ("norm.at", "null", "is None; expected list"),
    ("mlp.d_ff", "1e3", "is 1000.0; expected int"),
    ("mlp.bias", "[up]", "is ['up']; expected bool"),
    ("embedding", "null", "is None; expected mapping"),
    ("dropout", "0.1", "is 0.1; a mapping"),
    ("dropout.residual", "true", "is True; expected float"),
    ("head", "[]", "is []; a mapping"),
    ("source", "a paper", "is 'a paper'; a mapping"),
    # YAML 1.1 words are words.
    ("tied", "no", "is 'no'; expected bool"),
    ("tied", "yes", "is 'yes'; expected bool"),
    ("tied", "on", "is 'on'; expected bool"),
    ("tied", "off", "is 'off'; expected bool"),
    ("tied", "n", "is 'n'; expected bool"),
    ("tied", "0", "is 0; expected bool"),
    ("tied", "", "is None; expected bool"),
    # Ranges.
    ("n_layers", "-1", "is -1; expected int >= 0"),
    ("n_layers", "1025", "is 1025; expected int <= 1024"),
    ("n_layers", str(2**63), "expected int <= 1024"),
    ("n_layers", str(2**64), "expected int <= 1024"),
    ("n_layers", "1" + "0" * 400, "1000", "..."),
    ("n_layers", ".inf", "is inf; expected int"),
    ("d_model", "0", "is 0; expected int >= 1"),
    ("d_model", str(2**20 + 1), "expected int <= 1048576"),
    ("vocab_size", "0", "is 0; expected int >= 1"),
    ("vocab_size", str(2**24 + 1), "expected int <= 16777216"),
    ("context", "0", "is 0; expected int >= 1"),
    ("context", str(2**32 + 1), "expected int <= 4294967296"),
    ("attention.n_heads", "0", "is 0; expected int >= 1"),
    ("attention.n_heads", "-4", "is -4; expected int >= 1"),
    ("attention.n_kv_heads", "0", "is 0; expected int >= 1"),
    ("attention.d_head", "-1", "is -1; expected int >= 1"),
    ("attention.window", "0", "is 0; expected int >= 1"),
    ("attention.window", "-1", "is -1; expected int >= 1"),
    ("attention.scale", "0", "is 0; expected float > 0.0"),
    ("attention.scale", ".nan", "is nan; expected float > 0.0"),
    ("position.theta", "0.0", "is 0.0; expected float > 0.0"),
    ("position.theta", "-.inf", "is -inf; expected float > 0.0"),
    ("position.theta", ".NaN", "is nan; expected float > 0.0"),
    ("position.theta", "NaN", "is 'NaN'; expected float"),
    ("position.theta", "1e400", "is inf; expected float <= 1000000000000.0"),
    ("position.d_rotary", "0", "is 0; expected int >= 1"),
    ("norm.eps", "-1e-5", "is -1e-05; expected float > 0.0"),
    ("norm.eps", ".inf", "is inf; expected float <= 1000000000000.0"),
    ("norm.eps", "0", "is 0; expected float > 0.0"),
    ("norm.eps", "1" + "0" * 400, "number out of range"),
    ("mlp.d_ff", "0", "is 0; expected int >= 1"),
    ("mlp.d_ff", str(2**20 + 1), "expected int <= 1048576"),
    ("dropout.residual", "1", "is 1; expected float < 1.0"),
    ("dropout.attention", "-0.1", "is -0.1; expected float >= 0.0"),
    ("dropout.embedding", ".nan", "is nan; expected float >= 0.0"),
    ("embedding.scale", "-2.0", "is -2.0; expected float > 0.0"),
    ("embedding.vocab_multiple", "0", "is 0; expected int >= 1"),
    ("head.softcap", "0", "is 0; expected float > 0.0"),
    ("published", "{params: 0, where: x}", "published.params is 0; expected int >= 1"),
    ("published", f"{{params: {10**15 + 1}, where: x}}", "published.params", "expected int <= 1000000000000000"),
    # Keys that contradict each other.
    ("attention.n_heads", "6", "is 6: n_heads must divide d_model 64, or d_head must be given"),
    ("attention.n_kv_heads", "3", "is 3: it must divide n_heads 4"),
    ("attention.n_kv_heads", "8", "is 8: it must divide n_heads 4"),
    ("d_model", "66", "n_heads must divide d_model 66, or d_head must be given"),
    ("attention.d_head", "7", "is 7: RoPE turns pairs of channels, so it must be even"),
    ("position.d_rotary", "5", "is 5", "must be even"),
    ("position.d_rotary", "18", "is 18: it cannot exceed the head's 16 channels"),
    ("attention.bias", "[q, k, q]", "is ['q', 'k', 'q']: name each projection once"),
    ("norm.at", "[]", "is []: name one or more of in, res, out, each once"),
    ("norm.at", "[in, out, in]", "each once"),
    (
        "norm",
        "{kind: rmsnorm, eps: 1.0e-6, plus_one: true, rounded: true}",
        "norm.rounded is True: with plus_one the gain",
    ),
    ("embedding", GAINS, "embedding.norm.rounded is True: with plus_one the gain"),
    ("attention.qk_norm", QK + "plus_one: true, rounded: true}", "qk_norm.rounded is True: with plus_one the gain"),
    (
        "attention.qk_norm",
        QK + "over: each_head, rounded: false}",
        "qk_norm.rounded is False: only a rmsnorm over head",
    ),
    ("residual", "{shared_norm: true}", "residual.shared_norm is True: only parallel sublayers can share a norm"),
    ("residual", "{parallel: true, from_norm: true}", "residual.from_norm is True: it needs sequential sublayers"),
    ("mlp.clamp", "{limit: 7.0, alpha: 0}", "mlp.clamp.alpha is 0; expected float > 0.0"),
    ("position.scaling", "{kind: dynamic, factor: 2.0, trained_length: 0}", "trained_length is 0; expected int >= 1"),
    ("position", SHORT_TURN, "position.d_rotary is 2: dynamic scaling needs at least 4 channels"),
    ("position", LOW_BASE, "position.theta is 1.0: yarn scaling needs a base above 1"),
    ("position.scaling", "{kind: llama3, " + LLAMA3, "low_freq_factor is 4.0: it must be below high_freq_factor 4.0"),
    ("position.scaling", LONGROPE, "short_factor is '2 numbers': one for each of the 8 pairs is needed"),
    ("position.scaling", ONE_POSITION, "position.scaling.trained_length is 1: at least 2 positions are needed"),
    ("pattern", "[{attention: {d_head: 8}}]", "pattern[0].position.d_rotary is 16: it cannot exceed the head's 8"),
    ("pattern", "[{times: 0}]", "pattern[0].times is 0: at least 1 layer is needed"),
    ("pattern", "[{attention: {d_head: 8}, position: {d_rotary: 10}}]", "pattern[0].position.d_rotary is 10"),
    ("pattern", "[{}, {attention: {n_kv_heads: 3}}]", "pattern[1].attention.n_kv_heads is 3: it must divide n_heads 4"),
    # Mixtures of experts.
    ("embedding.scale_rounded", "true", "is True: there is no embedding.scale"),
    ("mlp", MOE.replace("top_k: 2", "top_k: 5"), "mlp.top_k is 5: it cannot exceed n_experts 4"),
    ("mlp", MOE.replace("top_k: 2", "top_k: 0"), "mlp.top_k is 0; expected int >= 1"),
    ("mlp", MOE.replace("n_experts: 4", "n_experts: 0"), "mlp.n_experts is 0; expected int >= 1"),
    ("mlp", MOE.replace("top_k: 2, ", ""), "mlp.top_k is missing"),
    ("mlp", MOE.replace("top_k", "topk"), "mlp.topk", "did you mean 'top_k'?"),
    ("mlp", MOE.replace("kind: plain, ", ""), "mlp.expert.kind is missing; one of plain, gated"),
    ("mlp", MOE.replace("kind: plain", "kind: moe"), "mlp.expert.kind is 'moe'; allowed: plain, gated"),
    ("mlp", MOE.replace("relu", "tan"), "mlp.expert.act is 'tan'", ACTS),
    ("mlp", MOE.replace("act: relu", "act: relu, d_ff: -1"), "mlp.expert.d_ff is -1; expected int >= 1"),
    ("mlp", MOE.replace("act: relu", "act: relu, width: 3"), "unknown key 'mlp.expert.width'"),
    ("mlp", MOE.replace("}}", "}, normalize: 2}"), "mlp.normalize is 2; expected bool"),
    ("mlp", MOE.replace("}}", "}, groups: 3}"), "mlp.groups is 3: it must divide n_experts 4"),
    ("mlp", MOE.replace("}}", "}, top_groups: 2}"), "mlp.top_groups is 2: it cannot exceed groups 1"),
    ("mlp", MOE.replace("}}", "}, groups: 4}"), "mlp.top_k is 2: 1 of 4 groups hold 1 experts"),
    ("mlp", MOE.replace("}}", "}, groups: 4, top_groups: 4, group_score: top2}"), "mlp.group_score is 'top2'"),
    ("mlp", MOE.replace("}}", "}, scores: sigmoids}"), "mlp.scores is 'sigmoids'", "did you mean 'sigmoid'?"),
    ("mlp", MOE.replace("kind: plain", "kind: gated, clamp: {limit: 7.0, alpha: 1.0}"), "mlp.act is 'relu': a clamped"),
    (
        "mlp",
        MOE.replace("}}", "}, scores: top_softmax, selection_bias: true}"),
        "mlp.selection_bias is True: with scores",
    ),
    ("mlp", MOE.replace("}}", "}, scores: top_softmax, groups: 2, top_groups: 2}"), "mlp.groups is 2: with scores"),
    ("mlp", "{kind: moe, n_experts: 4, top_k: 2}", "mlp.expert is missing"),
    ("mlp", "{kind: moe, n_experts: 4, top_k: 2, expert: 3}", "mlp.expert is 3; a mapping"),
]


@pytest.mark.parametrize(("path", "text", "words"), [(p, t, w) for p, t, *w in VALUES])
def test_value(path: str, text: str | None, words: list[str]) -> None:
    message = assert_refused(mutated((path, text)), *words)
    assert message.startswith(("bad.yaml: ", "card 'good': "))
    assert path in message


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{b}: &{b} [{', '.join(['*' + a] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)
# One level more than allowed: the card itself is the first.
DEEP_LIST, DEEP_MAP = "[" * 32 + "]" * 32, "{a: " * 32 + "1" + "}" * 32

TEXTS: dict[str, tuple[str, *tuple[str, ...]]] = {
    "empty": ("", "the card is None", "a mapping of keys to values is needed"),
    "blank lines": ("\n\n \n", "the card is None"),
    "only a comment": ("# nothing\n", "the card is None"),
    "null": ("null\n", "the card is None"),
    "a list": ("- name\n- family\n", "the card is ['name', 'family']; a mapping of keys to values is needed"),
    "a word": ("gpt2\n", "the card is 'gpt2'"),
    "a number": ("3\n", "the card is 3"),
    "json list": ("[1, 2]", "the card is [1, 2]"),
    "an empty mapping": ("{}", "name is missing"),
    "two documents": (TEXT + "---\n" + TEXT, "at line 12", "another document"),
    "text after the end": (TEXT + "...\nmore", "not valid YAML at line 13"),
    "duplicate key": (TEXT + "tied: false\n", "line 12", 'duplicate key "tied"'),
    "duplicate key, same value": (TEXT + "tied: true\n", "line 12", 'duplicate key "tied"'),
    "duplicate in a section": (TEXT.replace("n_heads: 4", "n_heads: 4, n_heads: 4"), "line 7", '"n_heads"'),
    "number as key": (TEXT + "7: 1\n", "unknown key '7'"),
    "null as key": (TEXT + "? \n: 1\n", "unknown key 'None'"),
    "true as key": (TEXT + "true: 1\n", "unknown key 'True'"),
    "list as key": (TEXT + "[a]: 1\n", "unknown key"),
    "mapping as key": (TEXT + "{a: 1}: 1\n", "line 12", "unhashable key"),
    "newline in a key": (TEXT + '"a\\nb": 1\n', r"unknown key 'a\nb'"),
    "anchor": (TEXT.replace("good", "&x good"), "line 1 uses an anchor or alias; write the value out"),
    "anchor on a section": (TEXT.replace("{kind: rope", "&p {kind: rope"), "line 8 uses an anchor"),
    "alias without anchor": (TEXT.replace("n_layers: 2", "n_layers: *x"), "line 3 uses an anchor or alias"),
    "alias bomb": (BOMB, "line 1 uses an anchor or alias"),
    "alias bomb behind a card": (TEXT + BOMB, "line 12 uses an anchor or alias"),
    "cyclic alias": ("a: &a [*a]\n", "line 1 uses an anchor"),
    "merge key": (TEXT + "<<: {dtype: float32}\n", "line 12 uses the merge key <<"),
    "merge key in a section": (TEXT.replace("{kind: rope", "{<<: {kind: rope}"), "line 8 uses the merge key <<"),
    "merge list": (TEXT + "<<: [{tied: true}]\n", "line 12 uses the merge key <<"),
    "python object": (
        TEXT.replace("good", "!!python/object/apply:os.system ['id']"),
        "line 1 uses the tag",
        "os.system",
    ),
    "python name": (TEXT.replace("good", "!!python/name:os.system"), "line 1 uses the tag"),
    "python tuple": (TEXT.replace("[in]", "!!python/tuple [in]"), "line 9 uses the tag"),
    "str tag": (TEXT.replace("good", "!!str 3"), "line 1 uses the tag", "plain values only"),
    "int tag": (TEXT.replace("n_layers: 2", "n_layers: !!int '2'"), "line 3 uses the tag"),
    "own tag": (TEXT.replace("{kind: rope", "!rope {kind: rope"), "line 8 uses the tag '!rope'"),
    "bare tag": (TEXT.replace("good", "! good"), "line 1 uses the tag '!'"),
    "binary": (TEXT.replace("good", "!!binary AAAA"), "line 1 uses the tag"),
    "long tag": (TEXT.replace("good", "!" + "t" * 1000 + " good"), "line 1 uses the tag", "..."),
    "YAML 1.1": ("%YAML 1.1\n---\n" + mutated(("tied", "no")), "line 2 follows a directive", "YAML 1.2"),
    "YAML 2.0": ("%YAML 2.0\n---\n" + TEXT, "not valid YAML at line 1"),
    "tag directive": ("%TAG ! tag:example.com,2000:\n---\n" + TEXT, "line 2 follows a directive"),
    "deep list": (TEXT.replace("good", DEEP_LIST), "line 1 is nested deeper than 32 levels"),
    "deep mapping": (TEXT.replace("good", DEEP_MAP), "line 1 is nested deeper than 32 levels"),
    "endless list": ("[" * 100_000, "line 1 is nested deeper than 32 levels"),
    "endless mapping": ("{a: " * 50_000, "line 1 is nested deeper than 32 levels"),
    "endless dashes": ("- " * 100_000, "line 1 is nested deeper than 32 levels"),
    "too long": (TEXT + "#" * MAX_BYTES, f"longer than {MAX_BYTES} bytes"),
    "too long in UTF-8": (TEXT + "#" + "é" * (MAX_BYTES // 2), f"longer than {MAX_BYTES} bytes"),
    "too many values": (TEXT.replace("[in]", "[" + "in," * 40_000 + "in]"), "line 9", "10000 keys and values"),
    "too many keys": (TEXT + "".join(f"k{i}: 1\n" for i in range(20_000)), "10000 keys and values"),
    "many unknown keys": (TEXT + "".join(f"k{i}: 1\n" for i in range(2_000)), "unknown key 'k0'"),
    "odd width by default": (mutated(("d_model", "4")), "attention.d_head is 1", "must be even"),
    "no KV heads by default": (mutated(("attention.n_heads", "5")), "attention.n_kv_heads is 2", "divide n_heads 5"),
    "long name": (mutated(("name", "a" * 100_000)), "line 1 has a value of more than 2048 characters"),
    "long key": (TEXT + "? " + "k" * 200_000 + "\n: 1\n", "line 12 has a value of more than 2048 characters"),
    "long unknown key": (TEXT + "k" * 1000 + ": 1\n", "unknown key 'kkkk", "..."),
    "long duplicate": (TEXT + f"zz: {'a' * 2000}\nzz: {'b' * 2000}\n", "line 13", 'duplicate key "zz"'),
    "long wrong value": (mutated(("mlp.act", "s" * 2000)), "mlp.act is 'sss", ACTS),
    "long contradiction": (mutated(("name", "a" * 2000), ("attention.n_heads", "5")), "attention.n_kv_heads is 2"),
    "long list": (mutated(("attention.bias", "[" + "q, " * 4000 + "q]")), "attention.bias is ['q', 'q'", "once"),
    "too many digits": (mutated(("n_layers", "9" * 5000)), "line 3 has a value of more than 2048 characters"),
    "too many hexadecimal digits": (mutated(("n_layers", "0x" + "f" * 5000)), "line 3 has a value of more than"),
    "many hexadecimal digits": (mutated(("n_layers", "0x" + "f" * 2000)), "n_layers is", "..."),
    "tab before a value": (TEXT.replace("n_layers: 2", "n_layers:\t2"), "line 3, column 10", r"'\t'"),
    "tab as indentation": (TEXT + "embedding:\n\tscale: 1.0\n", "line 13, column 1", r"'\t'"),
    "null character": (TEXT.replace("64", "6\x004"), "line 4", "#x0000"),
    "escape character": (TEXT.replace("good", "go\x1b[31mod"), "line 1", "#x001b"),
    "lone surrogate": (TEXT.replace("100", "\ud800"), "line 5", "#xd800"),
    "not a date": (mutated(("name", "2024-99-99")), "line 1, column 7", "month must be in 1..12"),
    "not a time": (mutated(("name", "2001-12-14t21:59:43.1-99:99")), "line 1, column 7"),
    "not a number": (mutated(("n_layers", "0b_")), "line 3, column 11"),
    "open bracket": (TEXT.replace("4, n_kv_heads: 2}", "4"), "not valid YAML at line 8"),
    "open quote": (TEXT.replace("good", "'good"), "not valid YAML at line"),
    "colon in a value": (TEXT.replace("good", "a: b"), "not valid YAML at line 1, column 8"),
    "no space after a colon": (TEXT.replace("n_layers: 2", "n_layers:2"), "not valid YAML at line 4"),
    "wrong indentation": (TEXT.replace("family", "  family"), "not valid YAML at line 2"),
    "percent": ("%\n", "not valid YAML at line 1"),
    "reserved at": (mutated(("name", "@good")), "not valid YAML at line 1, column 7"),
    "json with NaN": ('{"name": "x", "n_layers": NaN}', "n_layers is 'NaN'; expected int"),
    "an html page": ("<!DOCTYPE html>\n<html></html>\n", "the card is '<!DOCTYPE html> <html></html>'"),
}


@pytest.mark.parametrize("text", TEXTS)
def test_text(text: str) -> None:
    assert_refused(*TEXTS[text])


def test_refusing_builds_nothing_large() -> None:
    for label in ("alias bomb", "long key", "many hexadecimal digits"):
        tracemalloc.start()
        with pytest.raises(ScantlingInputError):
            read_text(TEXTS[label][0], "bad.yaml")
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 64 * 2**20, label


FILES: dict[str, tuple[bytes, *tuple[str, ...]]] = {
    "latin-1": (TEXT.replace("good", "bön").encode("latin-1"), "not UTF-8 at byte 7"),
    "utf-16": (TEXT.encode("utf-16"), "not UTF-8 at byte 0"),
    "utf-32": (TEXT.encode("utf-32"), "not UTF-8 at byte 0"),
    "cut character": (TEXT.encode() + b"#\xc3", "not UTF-8"),
    "over-long UTF-8": (b"name: \xc0\xaf\n", "not UTF-8 at byte 6"),
    "encoded surrogate": (b"name: \xed\xa0\x80\n", "not UTF-8 at byte 6"),
    "gzip": (b"\x1f\x8b\x08\x00" + bytes(20), "not UTF-8 at byte 1"),
    "zeros": (bytes(100), "not valid YAML at line 1", "#x0000"),
    "empty": (b"", "the card is None"),
    "one byte too long": (TEXT.encode().ljust(MAX_BYTES + 1, b"\n"), f"{MAX_BYTES + 1} bytes; a card has at most"),
    "BOM inside": (TEXT.replace("n_layers", "\ufeffn_layers").encode(), r"unknown key '\ufeffn_layers'"),
}


@pytest.mark.parametrize("name", FILES)
def test_file(name: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    content, *words = FILES[name]
    path.write_bytes(content)
    with pytest.raises(ScantlingInputError) as caught:
        card(path)
    checked(str(caught.value), "bad.yaml: ", *words)


def test_what_is_no_regular_file(tmp_path: Path) -> None:
    (tmp_path / "folder.yaml").mkdir()
    (tmp_path / "loop.yaml").symlink_to("loop.yaml")
    os.mkfifo(tmp_path / "pipe.yaml")
    reasons = {
        "missing.yaml": "No such file or directory",
        "missing.yml": "No such file or directory",
        "folder.yaml": "not a regular file; a card is a YAML text file",
        "pipe.yaml": "not a regular file",
        "loop.yaml": "cannot be read",
        "nul\0.yaml": "null byte",
    }
    for name, reason in reasons.items():
        with pytest.raises(ScantlingInputError) as caught:
            card(tmp_path / name)
        checked(str(caught.value), name, reason)
    with pytest.raises(ScantlingInputError, match=r"^/dev/zero: not a regular file"):
        read_file(Path("/dev/zero"))


def test_exactly_as_long_as_allowed(tmp_path: Path) -> None:
    path = tmp_path / "good.yaml"
    path.write_bytes((TEXT + "#").encode().ljust(MAX_BYTES, b"#"))
    assert read_file(path) == read_text(TEXT, "good")


def test_as_deep_as_allowed() -> None:
    # The card itself is one level; name then has the wrong type, which only a parsed card can have.
    assert_refused(mutated(("name", "[" * 31 + "]" * 31)), "name is [[[", "expected str")


@pytest.mark.parametrize(
    ("name", "near"),
    [("gpt-2", "gpt2"), ("llama3-8b", "llama-3-8b"), ("mixtral", "mixtral-8x7b"), ("", None), ("../gpt2", "gpt2")],
)
def test_unknown_preset(name: str, near: str | None) -> None:
    with pytest.raises(ScantlingInputError) as caught:
        preset(name)
    checked(str(caught.value), f"no preset {name!r}", "`scantling cards` lists them")
    assert ("did you mean" in str(caught.value)) == (near is not None)
    assert near is None or f"did you mean '{near}" in str(caught.value)


M = str(2**20)
HUGE: dict[str, list[tuple[str, str | None]]] = {
    "heads": [
        ("d_model", "1024"),
        ("attention.n_heads", M),
        ("attention.n_kv_heads", "1"),
        ("attention.d_head", M),
    ],
    "layers": [("d_model", M), ("n_layers", "1024"), ("mlp.d_ff", M)],
    "experts": [
        ("d_model", "1024"),
        ("mlp", MOE.replace("4", M).replace("act: relu", f"act: relu, d_ff: {M}")),
    ],
    "positions": [("d_model", M), ("context", str(2**32)), ("position", "{kind: learned}")],
}


@pytest.mark.parametrize("name", HUGE)
def test_more_than_1e15_parameters(name: str) -> None:
    big = read_text(mutated(*HUGE[name]), "bad.yaml")
    tracemalloc.start()
    began = time.process_time()
    with pytest.raises(ScantlingInputError) as caught:
        assemble(big)
    took, peak = time.process_time() - began, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    checked(str(caught.value), "card 'good': ", "parameters; the limit is 1e+15")
    assert took < 2
    assert peak < 16 * 2**20


# Values that look odd and are right: the text of the value, and what the card then says.
RIGHT: list[tuple[str, str, Any]] = [
    ("norm.eps", "1e-3", 0.001),
    ("norm.eps", "1E-3", 0.001),
    ("norm.eps", "1.e-3", 0.001),
    ("norm.eps", "+1e-3", 0.001),
    ("norm.eps", ".5e-3", 0.0005),
    ("norm.eps", "1", 1.0),
    ("position.theta", "5e5", 500000.0),
    ("position.theta", "10000", 10000.0),
    ("tied", "True", True),
    ("tied", "FALSE", False),
    ("n_layers", "0", 0),
    ("n_layers", "1024", 1024),
    ("n_layers", "010", 10),
    ("n_layers", "0o10", 8),
    ("n_layers", "0x10", 16),
    ("vocab_size", "32_000", 32000),
    ("attention.window", "1", 1),
    ("attention.window", "null", None),
    ("attention.scale", "~", None),
    ("name", "no", "no"),
    ("name", "'1e3'", "1e3"),
    ("name", "1e", "1e"),
    ("name", "ПриВет 你好", "ПриВет 你好"),
    ("norm.at", "[out, in]", ["out", "in"]),
]


@pytest.mark.parametrize(("path", "text", "value"), RIGHT)
def test_odd_and_right(path: str, text: str, value: Any) -> None:
    found: Any = read_text(mutated((path, text)), "good.yaml")
    for name in path.split("."):
        found = getattr(found, name)
    assert found == value
    assert type(found) is type(value)


def test_other_line_ends_and_a_bom_and_json_are_read(tmp_path: Path) -> None:
    right = read_text(TEXT, "good.yaml")
    assert read_text(TEXT.replace("\n", "\r\n"), "good.yaml") == right
    assert read_text("%YAML 1.2\n---\n" + TEXT + "...\n", "good.yaml") == right
    path = tmp_path / "bom.yml"
    path.write_bytes(b"\xef\xbb\xbf" + TEXT.encode())
    assert card(path) == right


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (object(), "the card is <object object"),
        ({b"name": "x"}, "unknown key \"b'name'\"; known here: name"),
        ({"name": "x", "attention": {(): 1, "kind": "multi_head"}}, "unknown key 'attention.()'"),
        ({"name": "x", "attention": {"kind": ("rope",)}}, "attention.kind is ('rope',); allowed: multi_head, latent"),
    ],
)
def test_dict(data: Any, words: str) -> None:
    with pytest.raises(ScantlingInputError) as caught:
        from_dict(data, "here")
    checked(str(caught.value), f"here: {words}")
