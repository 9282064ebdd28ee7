"""A model of the library `transformers` as the subject of an audit."""

from __future__ import annotations

import copy
import inspect
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from scantling.audits import Abilities, Facts, Feed, Subject
from scantling.audits.callables import trained
from scantling.audits.protocol import Cached, Change, Loss, Run
from scantling.errors import ScantlingInputError, need
from scantling.subjects.their_config import declared, facts

KERNELS = ("sdpa", "eager")


def load_theirs(place: str, revision: str | None = None, dtype: str | None = None, device: str = "cpu") -> Any:
    """A model by folder or hub id, through the class that its config names; code of others is never run.

    Raises:
        ScantlingInputError: no such model, or its config names no class of the library.
        MissingExtra: the library is not installed.
    """
    library = quiet()
    try:
        config = library.AutoConfig.from_pretrained(place, revision=revision)
    except (OSError, ValueError) as error:
        raise ScantlingInputError(f"transformers cannot read {place!r}: {str(error).splitlines()[0]}") from None
    named = list(getattr(config, "architectures", None) or [])
    kind = getattr(library, named[0], None) if named else None
    if kind is None:
        raise ScantlingInputError(
            f"{place!r}: its config names {named[0] if named else 'no class'}; a class of transformers is needed"
        )
    with quietly():
        model = kind.from_pretrained(place, revision=revision, **({"dtype": dtype} if dtype else {}))
    return model.eval().to(device)


def quiet() -> ModuleType:
    """The library, without its progress bars and warnings."""
    library = need("transformers", "audit its models")
    library.utils.logging.disable_progress_bar()
    library.utils.logging.set_verbosity_error()
    return library


@contextmanager
def quietly() -> Iterator[None]:
    """Warnings of the library are not ours to print."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def theirs(model: Any, name: str | None = None, sample: Tensor | None = None, folder: str | None = None) -> Subject:
    """A loaded model of the library, with everything that it can do.

    Args:
        sample: (1, T) ids of real text, where the weights are trained.
        folder: where its config.json lies, if it came from one: what the config says there is what it declares.
    """
    quiet()
    with quietly(), torch.no_grad():
        return _subject(model.eval(), name, facts(model.eval(), _tied(model, folder)), sample)


def _subject(model: Any, name: str | None, said: Facts, sample: Tensor | None) -> Subject:
    arguments = _arguments(model)
    decoder = said.family == "decoder"
    takes = {"mask"} if "attention_mask" in arguments else set()
    takes |= {"positions"} if "position_ids" in arguments else set()
    caches = said.family != "encoder" and "use_cache" in arguments and _cache_name(model) is not None
    scores = said.per_token and _scores(model, said)
    can = Abilities(
        takes=frozenset(takes),
        module=model,
        blocks=_blocks(model, said),
        kernels={kernel: _run(model, kernel=kernel) for kernel in _kernels(model)},
        modes={"in training": trained(model, _run(model)), "with maps asked for": _run(model, maps=True)},
        packed=_packed(model) if decoder and "positions" in takes else {},
        cached={"its cache": _cached(model)} if caches else {},
        stepped={"generate": _generated(model)} if caches and model.can_generate() else {},
        cast=cache(lambda dtype: _subject(_cast(model, dtype), name, replace(said, dtype=dtype), sample)),
        loss=_loss(model) if scores else None,
        counts_items=scores and _counts(model),
        taught=_taught(model) if said.family == "encoder-decoder" else None,
        reload=_reload(model, name, said, sample),
        rebuild=lambda: _subject(type(model)(copy.deepcopy(model.config)).eval(), name, said, None),
        tables=_tables(model),
        sample=sample,
        collate=collate if decoder else None,
    )
    return Subject(name or type(model).__name__, _run(model), said, can)


def _arguments(model: Any) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(model.forward).parameters)


def _cache_name(model: Any) -> str | None:
    """What its forward calls the cache."""
    return next((name for name in ("cache", "past_key_values") if name in _arguments(model)), None)


def _tied(model: Any, folder: str | None) -> bool | None:
    """What the config says of the head, in its file where there is one."""
    if model.get_output_embeddings() is None:
        return None
    said = None if folder is None else declared(folder, "tie_word_embeddings")
    return bool(model.config.tie_word_embeddings if said is None else said)


def _kernels(model: Any) -> list[str]:
    """The implementations of attention that it has on this machine; the one that it chose comes first."""
    chosen = str(model.config._attn_implementation)
    known = [k for k in KERNELS if k == "eager" or bool(getattr(model, "_supports_sdpa", False))]
    return [chosen, *(k for k in known if k != chosen)]


@contextmanager
def _kernel(model: Any, name: str | None) -> Iterator[Any]:
    """The model with another implementation of attention: itself, or where that cannot be changed a twin."""
    before = str(model.config._attn_implementation)
    if name is None or name == before:
        yield model
        return
    model.set_attn_implementation(name)
    try:
        yield model if str(model.config._attn_implementation) == name else _twin(model, name)
    finally:
        model.set_attn_implementation(before)


def _twin(model: Any, kernel: str) -> Any:
    """A second model of the same weights; it is kept beside the first."""
    kept: dict[str, Any] = model.__dict__.setdefault("_twins_of_the_audit", {})
    if kernel not in kept:
        twin = type(model)._from_config(copy.deepcopy(model.config), attn_implementation=kernel)
        twin = twin.to(model.dtype).to(model.device)
        twin.load_state_dict(model.state_dict())
        kept[kernel] = twin.eval()
    return kept[kernel]


def _given(model: Any, feed: Feed) -> dict[str, Any]:
    """The feed under the library's names."""
    if feed.source is None:
        named = {"input_ids": feed.ids, "attention_mask": feed.mask, "position_ids": feed.positions}
    else:
        named = {
            "input_ids": feed.source,
            "attention_mask": feed.source_mask,
            "decoder_input_ids": feed.ids,
            "decoder_attention_mask": feed.mask,
        }
    known = _arguments(model)
    return {key: value for key, value in named.items() if value is not None and key in known}


def _run(model: Any, kernel: str | None = None, maps: bool = False, **more: Any) -> Run:
    known = _arguments(model)
    fixed: dict[str, Any] = {"use_cache": False} if "use_cache" in known else {}
    fixed |= more
    if maps:
        fixed["output_attentions"] = True

    def run(feed: Feed) -> Tensor:
        with quietly(), _kernel(model, kernel) as chosen:
            return _logits(chosen(**_given(model, feed), **fixed), feed.tokens)

    return run


def _logits(out: Any, tokens: int) -> Tensor:
    """(B, T, n); (B, 1, n) of a head that gives one answer per row."""
    found: Any = getattr(out, "logits", None)
    found = out.last_hidden_state if found is None else found
    if found.dim() == 2:
        found = found[..., None] if found.shape[1] == tokens else found[:, None]
    return found  # type: ignore[no-any-return]


def _scores(model: Any, said: Facts) -> bool:
    """Whether its output is over the vocabulary and it has a loss."""
    head = model.get_output_embeddings()
    return "labels" in _arguments(model) and head is not None and head.weight.shape[0] >= said.vocab_size


def _packed(model: Any) -> dict[str, Run]:
    """The ways to hand over a packed row: positions that start anew tell the documents apart."""
    ways = {"position_ids": _run(model)}
    ways["position_ids and a mask of ones"] = _masked(_run(model))
    if "use_cache" in _arguments(model):
        ways["position_ids, use_cache as by default"] = _run(model, use_cache=True)
        ways["position_ids and a mask of ones, use_cache as by default"] = _masked(_run(model, use_cache=True))
    return ways


def _masked(run: Run) -> Run:
    return lambda feed: run(replace(feed, mask=torch.ones_like(feed.ids)))


def _cached(model: Any) -> Cached:
    """Every logit of pieces over one cache."""
    name = _cache_name(model)
    assert name is not None

    def run(feed: Feed, pieces: Sequence[int]) -> Tensor:
        store, encoded, outs, start = None, None, [], 0
        for tokens in pieces:
            end = start + tokens
            part = replace(
                feed,
                ids=feed.ids[:, start:end],
                mask=None if feed.mask is None else feed.mask[:, :end],
                positions=None if feed.positions is None else feed.positions[:, start:end],
            )
            named = _given(model, part)
            if encoded is not None:
                named["encoder_outputs"] = encoded
                del named["input_ids"]
            with quietly():
                out = model(**named, use_cache=True, **{name: store})
            store = getattr(out, name, None)
            if feed.source is not None and encoded is None:
                encoded = (out.encoder_last_hidden_state,)
            outs.append(out.logits)
            start = end
        return torch.cat(outs, 1)

    return run


def _generated(model: Any) -> Cached:
    """What `generate` computes while it is made to write the given ids: the logits before each."""

    def run(feed: Feed, pieces: Sequence[int]) -> Tensor:
        first, ids = pieces[0], feed.ids
        rest = ids.shape[1] - first

        def forced(row: int, written: Tensor) -> list[int]:
            at = min(len(written), ids.shape[1] - 1)
            return [int(ids[row, at])]

        named: dict[str, Any] = {"input_ids": ids[:, :first], "attention_mask": feed.mask}
        if feed.mask is not None:
            named["attention_mask"] = feed.mask[:, :first]
        if feed.source is not None:
            named = {"input_ids": feed.source, "attention_mask": feed.source_mask, "decoder_input_ids": ids[:, :first]}
        with quietly(), _endless(model):
            out = model.generate(
                **{key: value for key, value in named.items() if value is not None},
                max_new_tokens=rest + 1,
                do_sample=False,
                num_beams=1,
                prefix_allowed_tokens_fn=forced,
                output_logits=True,
                return_dict_in_generate=True,
            )
        return torch.stack(out.logits, 1)

    return run


@contextmanager
def _endless(model: Any) -> Iterator[None]:
    """No token ends a text, and none is forced."""
    keys = ("eos_token_id", "forced_eos_token_id", "forced_bos_token_id", "bad_words_ids", "max_length")
    before = {key: getattr(model.generation_config, key, None) for key in keys}
    for key in keys:
        setattr(model.generation_config, key, None)
    try:
        yield
    finally:
        for key, value in before.items():
            setattr(model.generation_config, key, value)


def _loss(model: Any) -> Loss:
    def loss(feed: Feed, labels: Tensor, items: int | None = None) -> Tensor:
        named = _given(model, feed)
        named.pop("decoder_input_ids", None)
        count = {} if items is None else {"num_items_in_batch": items}
        with quietly():
            out = model(**named, labels=labels, **count)
        found: Tensor = out.loss
        return found

    return loss


def _counts(model: Any) -> bool:
    """Whether the library's own trainer hands it the number of tokens: it has open arguments."""
    stated = getattr(model, "accepts_loss_kwargs", None)
    kinds = [p.kind for p in _arguments(model).values()]
    return inspect.Parameter.VAR_KEYWORD in kinds if stated is None else bool(stated)


def _taught(model: Any) -> Callable[[Tensor], Tensor]:
    def read(labels: Tensor) -> Tensor:
        found: Tensor = model.prepare_decoder_input_ids_from_labels(labels=labels)
        return found

    return read


def _cast(model: Any, dtype: str) -> Any:
    twin = copy.deepcopy(model).to(getattr(torch, dtype))
    if hasattr(twin, "set_experts_implementation") and getattr(twin, "_can_set_experts_implementation", bool)():
        # Grouped products run in few dtypes and widths.
        twin.set_experts_implementation("eager")
    return twin


def _reload(model: Any, name: str | None, said: Facts, sample: Tensor | None) -> Callable[[Change], Subject]:
    def again(change: Change) -> Subject:
        with tempfile.TemporaryDirectory() as folder, quietly():
            model.save_pretrained(folder)
            change(Path(folder))
            new = type(model).from_pretrained(folder, attn_implementation=model.config._attn_implementation)
            return _subject(new.eval(), name, said, sample)

    return again


def _tables(model: Any) -> Callable[[], tuple[Tensor, Tensor]] | None:
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    if table is None or head is None or table.weight.shape != head.weight.shape:
        return None
    return lambda: (model.get_input_embeddings().weight, model.get_output_embeddings().weight)


def _blocks(model: Any, said: Facts) -> tuple[Any, ...]:
    """The layers of the stack that is asked: a list of modules as long as there are layers."""
    count = len(said.windows or ())
    lists = [
        m
        for name, m in model.named_modules()
        if isinstance(m, torch.nn.ModuleList) and len(m) == count and "encoder.block" not in name
    ]
    return tuple(lists[-1 if said.family == "encoder-decoder" else 0]) if lists and count else ()


def collate(rows: Sequence[Sequence[int]], end: int) -> tuple[Tensor, Tensor]:
    """Rows padded with the token that ends them, and their labels, as the library's collator makes them."""
    library = quiet()
    tokenizers = need("tokenizers", "pad rows as transformers does")
    words = {str(i): i for i in range(end + 1)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="0"))
    tokenizer = library.PreTrainedTokenizerFast(tokenizer_object=inner, pad_token=str(end), eos_token=str(end))
    made = library.DataCollatorForLanguageModeling(tokenizer, mlm=False)([{"input_ids": list(row)} for row in rows])
    return made["input_ids"], made["labels"]
