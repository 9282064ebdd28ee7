"""A loaded model: card, parts, net and tokenizer together."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from scantling.assembly import assemble
from scantling.cards import Card
from scantling.cards import card as read_card
from scantling.cards.rules import position_limit
from scantling.checkpoint.find import Found, card_of, default_model, find
from scantling.checkpoint.gguf import read_gguf
from scantling.checkpoint.load import Loaded, load_gguf, load_safetensors
from scantling.checkpoint.origin import Origin
from scantling.errors import ScantlingInputError, need
from scantling.parts.transformer import Transformer
from scantling.text.tokenizer import Tokenizer
from scantling.units import weights_dtype

if TYPE_CHECKING:
    from torch import Tensor, nn

Ids = Any
"""Token ids: a list of ints (one row), a list of equal lists, or an integer tensor (T) or (B, T)."""


@dataclass
class Model:
    """A Transformer with weights.

    Attributes:
        card: what it is.
        parts: its part tree.
        net: the built module, in evaluation mode.
        tokenizer: None where the checkpoint has none.
        notes: what loading noticed.
        eos_ids: ids that end a text: the tokenizer's and those of the checkpoint's config.
        origin: the folder it was loaded from, whose config and tokenizer files `save` writes again.
    """

    card: Card
    parts: Transformer
    net: nn.Module
    tokenizer: Tokenizer | None = None
    notes: tuple[str, ...] = field(default_factory=tuple)
    eos_ids: frozenset[int] = frozenset()
    origin: Origin | None = None

    def ids(self, ids: Ids) -> Tensor:
        """Ids as a (B, T) int64 tensor on the net's device.

        Raises:
            ScantlingInputError: empty, ragged, not integers, or out of the vocabulary.
        """
        torch = need("torch", "run the model")
        tensor = _tensor(ids, "token ids")
        tensor = tensor[None] if tensor.dim() == 1 else tensor
        if tensor.dim() != 2 or tensor.numel() == 0:
            raise ScantlingInputError(
                f"token ids have shape {list(tensor.shape)}; at least one row of one token is needed"
            )
        if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
            raise ScantlingInputError(f"token ids are {tensor.dtype}; integers are needed")
        low, high, rows = int(tensor.min()), int(tensor.max()), self.card.vocab_size
        if low < 0 or high >= rows:
            raise ScantlingInputError(f"token id {low if low < 0 else high} is outside the vocabulary of {rows}")
        return tensor.to(self.device, torch.int64)

    @property
    def device(self) -> Any:
        """Where the weights are."""
        return next(self.net.parameters()).device

    @property
    def dtype(self) -> Any:
        """Of the weights."""
        return next(self.net.parameters()).dtype

    def logits(self, ids: Ids, attention_mask: Any = None, position_ids: Any = None, kernel: str = "fused") -> Tensor:
        """Logits of every position.

        Args:
            ids: (B, T).
            attention_mask: (B, T), 1 at real tokens and 0 at padding; None where all are real.
            position_ids: (1 or B, T); default 0 .. T - 1, whatever the mask, unless the card counts from it.
            kernel: ``fused`` or ``reference``.

        Returns:
            (B, T, V) in float32.

        Raises:
            ScantlingInputError: ids out of range, or longer than a learned position table.
        """
        torch = need("torch", "run the model")
        ids = self.ids(ids)
        with torch.no_grad():
            return self.net(ids, self._context(ids, attention_mask, position_ids, kernel)).float()  # type: ignore[no-any-return]

    def hidden(self, ids: Ids, attention_mask: Any = None, position_ids: Any = None) -> list[Tensor]:
        """The residual stream (B, T, d): embeddings first, then after each block, the last one after the final norm."""
        torch = need("torch", "run the model")
        ids = self.ids(ids)
        seen: list[Tensor] = []
        decoder: Any = self.net.decoder
        hooks = [block.register_forward_pre_hook(lambda _, args: seen.append(args[0])) for block in decoder.blocks]
        hooks.append(decoder.register_forward_hook(lambda _, __, out: seen.append(out)))
        try:
            with torch.no_grad():
                self.net(ids, self._context(ids, attention_mask, position_ids, "fused"))
        finally:
            for hook in hooks:
                hook.remove()
        return seen

    def loss(self, ids: Ids, labels: Ids, attention_mask: Any = None) -> Tensor:
        """Mean negative log-probability of the labels, in nats.

        Args:
            labels: (B, T) like ids, not shifted: position t is judged on label t + 1; -100 is not judged.

        Raises:
            ScantlingInputError: labels of another shape, out of the vocabulary, or none left after the shift.
        """
        torch = need("torch", "run the model")
        logits = self.logits(ids, attention_mask)[:, :-1]
        wanted = _tensor(labels, "labels").to(self.device, torch.int64)
        wanted = wanted[None] if wanted.dim() == 1 else wanted
        if wanted.shape != (logits.shape[0], logits.shape[1] + 1):
            raise ScantlingInputError(f"labels have shape {list(wanted.shape)}; the shape of the ids is needed")
        wanted = wanted[:, 1:]
        if bool(((wanted < 0) & (wanted != -100) | (wanted >= self.card.vocab_size)).any()):
            raise ScantlingInputError(f"a label is outside the vocabulary of {self.card.vocab_size} and is not -100")
        if not bool((wanted != -100).any()):
            raise ScantlingInputError("no label is left after the shift: at least two tokens with labels are needed")
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())  # type: ignore[no-any-return]

    def generate(
        self,
        prompt: str | Ids,
        max_new_tokens: int = 20,
        *,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int | None = None,
        stop: Sequence[str] = (),
        attention_mask: Any = None,
        ignore_eos: bool = False,
    ) -> Any:
        """Continue a prompt.

        Args:
            prompt: text, or ids (B, T); padded rows are padded on the left and come with `attention_mask`.
            temperature: 0 is greedy.
            top_k, top_p, min_p: keep only the likeliest tokens; 0, 1.0 and 0.0 keep all.
            seed: of the draws; None is a new one each time.
            stop: strings (or one string) that end a text.
            ignore_eos: go on past end-of-text.

        Returns:
            The new text for a text; for ids the whole rows (B, T + new), ended rows filled with their last id.

        Raises:
            ScantlingInputError: an empty prompt, one longer than the context, or a setting out of range.
        """
        from scantling.generate.engine import complete, continue_ids
        from scantling.generate.sample import Sampling

        sampling = Sampling(temperature, top_k, top_p, min_p, seed)
        stop = (stop,) if isinstance(stop, str) else stop
        if isinstance(prompt, str):
            if attention_mask is not None:
                raise ScantlingInputError("attention_mask goes with ids; a text has no padding")
            return complete(self, prompt, max_new_tokens, sampling, stop=stop, ignore_eos=ignore_eos).text
        if stop:
            raise ScantlingInputError("stop strings go with a text prompt; ids are not decoded")
        return continue_ids(self, self.ids(prompt), max_new_tokens, sampling, attention_mask, ignore_eos)

    def _context(self, ids: Tensor, attention_mask: Any, position_ids: Any, kernel: str) -> Any:
        need("torch", "run the model")
        from scantling.tensor.context import Context

        padding = None if attention_mask is None else padding_of(attention_mask, ids)
        positions = None if position_ids is None else self._positions(position_ids, ids)
        limit = position_limit(self.card)
        if limit is not None and positions is None and ids.shape[1] > limit:
            raise ScantlingInputError(f"{ids.shape[1]} tokens and the model has {limit} learned positions")
        real = None if padding is None or bool(padding.all()) else padding
        return Context.of(ids, positions=positions, padding=real, kernel_name=kernel)

    def _positions(self, position_ids: Any, ids: Tensor) -> Tensor:
        positions = _tensor(position_ids, "position_ids").to(ids.device)
        positions = positions[None] if positions.dim() == 1 else positions
        if positions.is_floating_point() or tuple(positions.shape) not in {tuple(ids.shape), (1, ids.shape[1])}:
            right = f"integers of shape {list(ids.shape)} or {[1, ids.shape[1]]} are needed"
            raise ScantlingInputError(f"position_ids are {positions.dtype} of shape {list(positions.shape)}; {right}")
        limit, low, high = position_limit(self.card), int(positions.min()), int(positions.max())
        if low < 0 or (limit is not None and high >= limit):
            end = "" if limit is None else f" and below the {limit} learned positions"
            raise ScantlingInputError(f"position id {low if low < 0 else high}: ids are at least 0{end}")
        return positions


def padding_of(attention_mask: Any, ids: Tensor) -> Tensor:
    """The mask as (B, T) bool beside ids (B, T).

    Raises:
        ScantlingInputError: another shape, or values other than 0 and 1.
    """
    mask = _tensor(attention_mask, "attention_mask").to(ids.device)
    mask = mask[None] if mask.dim() == 1 else mask
    if mask.shape != ids.shape:
        raise ScantlingInputError(f"attention_mask has shape {list(mask.shape)} and ids {list(ids.shape)}")
    if bool(((mask != 0) & (mask != 1)).any()):
        raise ScantlingInputError("attention_mask has values other than 0 (padding) and 1 (a real token)")
    return mask.bool()


def _tensor(values: Any, what: str) -> Tensor:
    """A tensor of numbers; unsigned and foreign integers become int64."""
    torch = need("torch", "run the model")
    if getattr(getattr(values, "dtype", None), "kind", "") == "u":
        values = values.astype("int64")
    try:
        return torch.as_tensor(values)  # type: ignore[no-any-return]
    except (ValueError, TypeError, RuntimeError, OverflowError):
        raise ScantlingInputError(f"{what} are a list of integers, or equally long lists of them") from None


def load(
    model: str | os.PathLike[str] | None = None,
    *,
    dtype: str | None = None,
    device: str = "cpu",
    revision: str | None = None,
) -> Model:
    """Load a model with its weights.

    Args:
        model: a folder with config.json and safetensors, a .safetensors file beside its config.json, a .gguf file,
            or a hub id; None is the default model, SmolLM2-135M-Instruct.
        dtype: of the weights; None keeps the file's (float32 for GGUF).
        device: any torch device.

    Raises:
        ScantlingInputError: no such model, a card without weights, or a checkpoint that contradicts itself.
        MissingExtra: torch or a file format's library is not installed.
    """
    found = _find(model, revision)
    if found.kind in ("preset", "card"):
        example = read_card(found.path).name
        raise ScantlingInputError(
            f"{example!r} is a card without weights; name a folder, a hub id, a .safetensors or a .gguf file, "
            f"or give it initial weights: scantling.new({str(found.path)!r})"
        )
    name = weights_dtype(dtype) if dtype else None
    need("torch", "load weights")
    from scantling.tensor.memory import device_of

    place = device_of(device)
    if place.type == "meta":
        raise ScantlingInputError("device 'meta' holds no values: weights are loaded on cpu, cuda or mps")
    loader = load_gguf if found.kind == "gguf" else load_safetensors
    loaded = loader(found, _weights_of, name)
    return _built(loaded, _tokenizer(found), place)


def from_card(
    card: Card | str | os.PathLike[str], *, seed: int = 0, dtype: str = "float32", device: str = "cpu"
) -> Model:
    """A model with initial weights, which can be trained and saved; its parameters take gradients.

    Args:
        card: a card, or any MODEL, of which only the card is used.
        seed: of the weights.
        dtype: of the weights.
        device: any torch device but meta.

    Raises:
        ScantlingInputError: no such model, a card that contradicts itself, or one too large for the free memory.
        MissingExtra: torch is not installed.
    """
    card = card if isinstance(card, Card) else card_of(card)
    parts, name = assemble(card), weights_dtype(dtype)
    net = parts.build(device=device, dtype=name, seed=seed)
    stored: Any = name if name != "float64" else card.dtype
    return Model(replace(card, dtype=stored), parts, net)


def tokenizer_of(model: str | os.PathLike[str] | None = None, *, revision: str | None = None) -> Tokenizer:
    """The tokenizer of a model, without its weights; None is the default model.

    Raises:
        ScantlingInputError: no such model, or it has no tokenizer.
    """
    found = _find(model, revision)
    tokenizer = _tokenizer(found)
    if tokenizer is None:
        raise ScantlingInputError(f"{found.path}: no tokenizer; a folder with tokenizer.json, or a .gguf file, has one")
    return tokenizer


def _find(model: str | os.PathLike[str] | None, revision: str | None) -> Found:
    return Found("gguf", default_model()) if model is None else find(model, revision=revision)


def _tokenizer(found: Found) -> Tokenizer | None:
    if found.kind in ("preset", "card"):
        return None
    if found.kind == "gguf":
        metadata = read_gguf(found.path).metadata
        return Tokenizer.from_gguf(metadata) if any(key.startswith("tokenizer.") for key in metadata) else None
    folder = found.path if found.path.is_dir() else found.path.parent
    has_one = any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model"))
    return Tokenizer.from_folder(folder) if has_one else None


def _weights_of(card: Card) -> dict[str, tuple[int, ...]]:
    return assemble(card).named_weights


def _built(loaded: Loaded, tokenizer: Tokenizer | None, device: Any) -> Model:
    parts = assemble(loaded.card)
    net = parts.build(device="meta")
    net.load_state_dict(loaded.tensors, strict=True, assign=True)
    net = net.to(device).eval().requires_grad_(False)
    dtype: Any = str(next(net.parameters()).dtype).removeprefix("torch.")
    card = replace(loaded.card, dtype=dtype) if dtype in ("float32", "float16", "bfloat16") else loaded.card
    ends = loaded.eos_ids | (tokenizer.eos_ids if tokenizer else frozenset())
    return Model(card, parts, net, tokenizer, loaded.notes, ends, loaded.origin)
