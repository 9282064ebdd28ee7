"""A model of the library `transformers` as the subject of an audit."""

from __future__ import annotations

import copy
import inspect
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from scantling.audits import Abilities, Facts, Feed, Subject
from scantling.audits.callables import trained
from scantling.audits.protocol import Change, Loss
from scantling.errors import ScantlingInputError, need
from scantling.subjects.their_config import declared, facts
from scantling.subjects.their_runs import (
    arguments,
    cache_name,
    cached,
    generated,
    given,
    kernels,
    maps,
    packed,
    plain,
    quietly,
)


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
    known = arguments(model)
    decoder = said.family == "decoder"
    takes = {"mask"} if "attention_mask" in known else set()
    takes |= {"positions"} if "position_ids" in known else set()
    caches = said.family != "encoder" and "use_cache" in known and cache_name(model) is not None
    scores = said.per_token and _scores(model, said)
    can = Abilities(
        takes=frozenset(takes),
        module=model,
        blocks=_blocks(model, said),
        kernels={kernel: plain(model, kernel=kernel) for kernel in kernels(model)},
        maps={kernel: maps(model, kernel) for kernel in kernels(model)},
        modes={"in training": trained(model, plain(model)), "with maps asked for": plain(model, maps=True)},
        packed=packed(model) if decoder and "positions" in takes else {},
        cached={"its cache": cached(model)} if caches else {},
        stepped={"generate": generated(model)} if caches and model.can_generate() else {},
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
    return Subject(name or type(model).__name__, plain(model), said, can)


def _tied(model: Any, folder: str | None) -> bool | None:
    """What the config says of the head, in its file where there is one."""
    if model.get_output_embeddings() is None:
        return None
    said = None if folder is None else declared(folder, "tie_word_embeddings")
    return bool(model.config.tie_word_embeddings if said is None else said)


def _scores(model: Any, said: Facts) -> bool:
    """Whether its output is over the vocabulary and it has a loss."""
    head = model.get_output_embeddings()
    return "labels" in arguments(model) and head is not None and head.weight.shape[0] >= said.vocab_size


def _loss(model: Any) -> Loss:
    def loss(feed: Feed, labels: Tensor, items: int | None = None) -> Tensor:
        named = given(model, feed)
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
    kinds = [p.kind for p in arguments(model).values()]
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
