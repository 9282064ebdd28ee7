"""The context of one pass: positions, padding, cache, kernel, and the operations that parts ask for by name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from scantling.errors import ScantlingInputError
from scantling.tensor import mask, rotate
from scantling.tensor.attend import BiasRows, Terms, in_torch, kernel, reference, share
from scantling.tensor.cache import KeyCache
from scantling.tensor.recompute import again, policy
from scantling.tensor.router_losses import Routing
from scantling.visibility import Visibility

Recorder = Callable[[str, Tensor], Tensor]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu2": lambda x: F.relu(x).square(),
    "silu": F.silu,
    "tanh": torch.tanh,
}


class Context:
    """Everything of a pass that is not a weight.

    Attributes:
        past: positions already in the cache; where rows differ, in the longest.
        pasts: (B,) positions already in each row, where they differ; then `positions` are given.
        positions: (1 or B, T) position ids.
        padding: (B, past + T) bool, True at real tokens, or None.
        cache: filled by this pass, or None.
        training: dropout acts, and no cache rows are recorded.
        recorder: called with (path, value) at every capture point; what it returns goes on in its place.
        last_only: the head sees only the last position.
        types: (B, T) kinds of the tokens; 0 where none are given.
        last_at: (B,) which position of each row counts as its last, where rows are padded on the right; or None.
        ids: (B, T) of the pass, where positions are counted from them.
        memory: the encoder's output (B, S, d), or None where the cache holds what was made of it.
        source_padding: (B, S) bool, True at real tokens of the source, or None where all are, or the cache says it.
        labels: targets from outside, where the ids are not their own.
        prefix_lengths: (B,) how many of a row's first real tokens read each other both ways, in layers with a prefix;
            or None. A cache takes the whole prefix in its first pass.
        documents: (B, T) numbers of the documents that share a row, each run of one number being one; or None.
            Positions restart in each and none reads another. A negative number is padding; there is no cache.
        source_documents: (B, S) the same of the source; a document reads the source that has its number.
        keep_routing: routers leave their logits and choices in `routing`; by default in training only.
        routing: by the router's path, in the order of execution.
        before_scores: the head over the vocabulary stops before its matrix, for a loss that takes it in pieces.
        recompute: what autograd computes again in the backward instead of keeping it: ``none``; ``selective``, the
            inside of attention, of which queries, keys and values are kept; ``block``, all but the blocks' inputs.
    """

    def __init__(
        self,
        batch: int,
        tokens: int,
        device: torch.device,
        *,
        positions: Tensor | None = None,
        padding: Tensor | None = None,
        cache: KeyCache | None = None,
        kernel_name: str = "fused",
        training: bool = False,
        recorder: Recorder | None = None,
        last_only: bool = False,
        types: Tensor | None = None,
        source_padding: Tensor | None = None,
        labels: Tensor | None = None,
        prefix_lengths: Tensor | None = None,
        documents: Tensor | None = None,
        source_documents: Tensor | None = None,
        keep_routing: bool | None = None,
        before_scores: bool = False,
        recompute: str = "none",
    ) -> None:
        self.batch, self.tokens, self.device = batch, tokens, device
        self.past = 0 if cache is None else cache.length
        self.pasts = None if cache is None else cache.pasts
        self.packed = None if documents is None else mask.Packed.of(documents)
        if self.packed is not None:
            if padding is not None or prefix_lengths is not None or cache is not None:
                raise ScantlingInputError("packed rows go through whole: without padding, prefix or cache")
            positions = self.packed.positions if positions is None else positions
        self.positions = (
            torch.arange(self.past, self.past + tokens, device=device)[None] if positions is None else positions
        )
        self._given = positions is not None
        self.padding, self.cache, self.training, self.recorder = padding, cache, training, recorder
        self.last_only, self._types, self._labels = last_only, types, labels
        self.last_at: Tensor | None = None
        self.ids: Tensor | None = None
        self.memory: Tensor | None = None
        told = None if cache is None else cache.source_padding
        self.source_padding = told if source_padding is None else source_padding
        self.source_documents = source_documents
        self._source: Context | None = None
        self._kernel_name = kernel_name
        self.prefix_lengths = prefix_lengths
        self._check_prefix()
        self.keep_routing = training if keep_routing is None else keep_routing
        self.routing: dict[str, Routing] = {}
        self.before_scores = before_scores
        self.recompute = policy(recompute)
        self._kernel = kernel(kernel_name)
        self._fused = kernel_name == "fused"
        self._shown: Collection[str] = ()
        self._changed: Collection[str] = ()
        self._memo: dict[Any, Any] = {}

    @classmethod
    def of(cls, ids: Tensor, **options: Any) -> Context:
        """The context of a pass over ids (B, T); `options` are those of the constructor."""
        context = cls(ids.shape[0], ids.shape[1], ids.device, **options)
        context.ids = ids
        return context

    def _check_prefix(self) -> None:
        """Keys before the cut of a prefix would not have seen those behind it."""
        if self.prefix_lengths is None or self.cache is None:
            return
        real = self.prefix_lengths.new_tensor([self.past, self.past + self.tokens])[:, None]
        if self.pasts is not None:
            real = torch.stack([self.pasts, self.pasts + self.tokens])
        if self.padding is not None:
            real = torch.stack([self.padding[:, : self.past].sum(-1), self.padding.sum(-1)])
        # A prefix of one token has nothing ahead to read.
        cut = (self.prefix_lengths > 1) & (self.prefix_lengths > torch.where(real[0] > 0, real[0], real[1]))
        if bool(cut.any()):
            raise ScantlingInputError(
                f"a prefix of {int(self.prefix_lengths[cut].max())} tokens goes into a cache in one pass, the first; "
                f"this pass brings positions {self.past} to {self.past + self.tokens - 1}"
            )

    @property
    def longest(self) -> int:
        """Positions of the longest text of this pass: of the row with its past, or of the longest document in it."""
        return self.past + self.tokens if self.packed is None else self.packed.longest

    @property
    def counted_positions(self) -> Tensor:
        """The positions that were given; where none were, those that count real tokens only: (1 or B, T)."""
        if self._given or self.padding is None:
            return self.positions
        return (self.padding.long().cumsum(-1) - 1).clamp(min=0)[:, self.past :]

    def of_source(self, source: Tensor) -> Context:
        """The encoder's context for a source (B, S) of this pass."""
        if self._source is None:
            self._source = Context.of(
                source,
                padding=self.source_padding,
                documents=self.source_documents,
                kernel_name=self._kernel_name,
                training=self.training,
                recorder=self.recorder,
                recompute=self.recompute,
            )
            self._source._shown, self._source._changed = self._shown, self._changed
        return self._source

    def read(self, memory: Tensor) -> None:
        """Take the encoder's output (B, S, d) for this pass."""
        self.memory = memory

    def counted(self, pad_id: int) -> Tensor:
        """The positions that were given; where none were, those that count tokens other than `pad_id`, which is at -1.

        (1 or B, T).
        """
        if self._given or self.ids is None:
            return self.positions
        real = (self.ids != pad_id).long()
        return real.cumsum(-1) * real - 1

    @property
    def types(self) -> Tensor:
        """Kinds of the tokens, (B, T)."""
        if self._types is None:
            return torch.zeros(self.batch, self.tokens, dtype=torch.int64, device=self.device)
        return self._types

    def hold(self, key: Any, value: Tensor) -> None:
        """Keep a value for the rest of this pass."""
        self._memo["held", key] = value

    def held(self, key: Any) -> Tensor:
        """What was kept under `key`."""
        value: Tensor = self._memo["held", key]
        return value

    def observe(self, recorder: Recorder, shown: Collection[str] = (), changed: Collection[str] = ()) -> None:
        """Let `recorder` see what passes every capture point of this pass, after one that is there already.

        Args:
            shown: paths of attention whose scores and weights it sees although the fused kernel forms none: they are
                computed again from the same queries, keys and mask, and the pass goes on with the kernel's own output.
            changed: paths of attention that go through the plain kernel, so that changed scores or weights count.
        """
        inner = self.recorder
        self.recorder = recorder if inner is None else lambda path, value: recorder(path, inner(path, value))
        self._shown, self._changed = {*self._shown, *shown}, {*self._changed, *changed}

    def mark(self, net: Any, point: str, value: Tensor) -> Tensor:
        """A capture point: ``net.path:point``."""
        return value if self.recorder is None else self.recorder(f"{net.path}:{point}", value)

    def rotate(self, x: Tensor, position: Any) -> Tensor:
        """Turn x (B, H, T, D) by the scheme `position`; its angles are made once per pass."""
        if position not in self._memo:
            self._memo[position] = position.rotation(self)
        key = (position, x.dtype)
        if key not in self._memo:
            cosines, sines, pairs = self._memo[position]
            self._memo[key] = cosines.to(x.dtype), sines.to(x.dtype), pairs
        cos, sin, interleaved = self._memo[key]
        return rotate.rotate(x, cos, sin, interleaved)

    def join(self, *pieces: Tensor) -> Tensor:
        """Channels side by side: (..., D_1), (..., D_2) -> (..., D_1 + D_2)."""
        return torch.cat(pieces, -1)

    def apart(self, x: Tensor) -> Tensor:
        """x in a storage of its own."""
        return x.clone(memory_format=torch.contiguous_format)

    def block(self, net: Any, x: Tensor) -> Tensor:
        """A block's output for the stream x (B, T, d)."""
        if self.recompute != "block":
            return net(x, self)  # type: ignore[no-any-return]
        # The encoder's output is an argument so that autograd knows it is kept.
        return again(lambda read, _: net(read, self), x, self.memory)

    def turns(
        self, frequencies: Sequence[float], interleaved: bool, factor: float = 1.0
    ) -> tuple[Tensor, Tensor, bool]:
        """Cosines and sines of this pass's positions, times `factor`."""
        return *rotate.turns(self.positions, frequencies, interleaved, factor), interleaved

    def penalties(self, slopes: Sequence[float], scale: float, rounded: bool) -> BiasRows:
        """ALiBi's rows: slope times (key - query), which softmax cannot tell from slope times key.

        Rounded penalties are slope times the key's own position in bfloat16, as Falcon computes them.
        """
        tilt = torch.tensor(slopes, dtype=torch.float32, device=self.device)[:, None, None]
        key = torch.arange(self.past + self.tokens, device=self.device)[None]
        if rounded:
            place = key if self.padding is None else (self.padding.long().cumsum(-1) - 1) * self.padding
            place = place if self.packed is None else self.packed.positions
            tilt, place = tilt.bfloat16(), place.bfloat16()
            return lambda start, end: (tilt * place[:, None, None, :]).float() * scale
        query = self._queries()[..., None, :, None]
        return lambda start, end: tilt * -(key - query[..., start:end, :]).abs() * scale

    def _queries(self) -> Tensor:
        """The columns of this pass's queries among the keys, (1 or B, T)."""
        new = torch.arange(self.tokens, device=self.device)[None]
        return new + (self.past if self.pasts is None else self.pasts[:, None])

    def buckets(self, n: int, max_distance: int, both_ways: bool) -> Tensor:
        """T5's bucket of every distance key - query of this pass, from -(S - 1) to T - 1: (S + T - 1)."""
        distances = torch.arange(1 - self.past - self.tokens, self.tokens, device=self.device)
        return rotate.buckets(distances, n, max_distance, both_ways)

    def shifts(self, by_distance: Tensor) -> BiasRows:
        """Rows of a shift that depends on the distance alone; by_distance (S + T - 1, H) as `buckets` orders it."""
        key = torch.arange(self.past + self.tokens, device=self.device)
        query, nearest, most = self._queries(), self.past + self.tokens - 1, by_distance.shape[0] - 1

        def rows(start: int, end: int) -> Tensor:
            # Keys beyond a shorter row's own are farther ahead than any distance of this pass, and never seen.
            away = (key - query[:, start:end, None] + nearest).clamp(max=most)
            return by_distance[away].permute(0, 3, 1, 2)

        return rows

    def waves(self, frequencies: Sequence[float], width: int, halves: bool = False) -> Tensor:
        """Sinusoidal vectors of this pass's positions: (1 or B, T, width)."""
        return rotate.waves(self.positions, frequencies, width, halves)

    def remember(self, net: Any, name: str, new: Tensor) -> Tensor:
        """new (B, H_kv, T, D) behind what the cache holds: (B, H_kv, past + T, D), or the end of it within reach."""
        if self.cache is not None:
            new = self.cache.append(f"{net.path}:{name}", new)
        return new if self.training else self.mark(net, name, new)

    def memory_of(self, net: Any, make: Callable[[Tensor], dict[str, Tensor]]) -> tuple[Tensor, Tensor]:
        """Keys and values of the source: made of the encoder's output where it is there, else from the cache.

        Args:
            make: the encoder's output (B, S, d) -> ``keys`` and ``values``, each (B, H_kv, S, D).
        """
        if self.memory is not None:
            made = make(self.memory)
            if self.cache is not None:
                for name, value in made.items():
                    self.cache.write(f"{net.path}:{name}", value)
        else:
            assert self.cache is not None, "a pass without a source needs a cache that was filled with one"
            made = {name: self.cache.read(f"{net.path}:{name}") for name in ("keys", "values")}
        if not self.training:
            made = {name: self.mark(net, name, value) for name, value in made.items()}
        return made["keys"], made["values"]

    def attend_source(self, net: Any, q: Tensor, k: Tensor, v: Tensor, part: Any) -> Tensor:
        """Attention of q (B, H, T, D) to the source's k and v (B, H_kv, S, D); padding of the source is not seen."""
        key = ("mask", "source")
        if key not in self._memo:
            self._memo[key] = self._source_seen()
        dropout = part.dropout if self.training else 0.0
        return self._mixed(net, q, k, v, Terms(self._memo[key], False, part.scale, None, part.softcap, None, dropout))

    def _source_seen(self) -> mask.Real | mask.Paired | None:
        if self.packed is not None and self.source_documents is not None:
            return mask.Paired(self.packed.documents, self.source_documents)
        return None if self.source_padding is None else mask.Real(self.source_padding)

    def attend(self, net: Any, q: Tensor, k: Tensor, v: Tensor, part: Any, sinks: Tensor | None = None) -> Tensor:
        """Attention as `part` describes it (visibility, position, scale, softcap, dropout).

        Args:
            q: (B, H, T, D).
            k, v: (B, H_kv, S, D) and (B, H_kv, S, D_v).
            sinks: (H,) or None.

        Returns:
            (B, H, T, D_v).
        """
        bias = self._bias(net, part)
        # A cache gives the last keys, up to the newest; what is missing stands before them.
        first = 0 if self.pasts is not None else self.past + self.tokens - k.shape[2]
        if bias is not None and first:
            whole = bias
            bias = lambda start, end: whole(start, end)[..., first:]  # noqa: E731
        dropout = part.dropout if self.training else 0.0
        plain = bias is None and part.softcap is None and sinks is None and in_torch(q, v, dropout)
        seen, causal = self._mask(part.visibility, not plain, first)
        return self._mixed(net, q, k, v, Terms(seen, causal, part.scale, bias, part.softcap, sinks, dropout))

    def _mixed(self, net: Any, q: Tensor, k: Tensor, v: Tensor, terms: Terms) -> Tensor:
        if self._fused and self.recorder is not None and k.shape[1] != q.shape[1]:
            # The fused kernel indexes KV heads; a recorder is shown what that index selects.
            self.mark(net, "k_shared", share(k, q.shape[1]))
            self.mark(net, "v_shared", share(v, q.shape[1]))

        if self._fused and net.path in self._shown and net.path not in self._changed:
            self._show(net, q, k, v, terms)
        attend = reference if net.path in self._changed else self._kernel

        def mix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(q, k, v, terms, lambda point, value: self.mark(net, point, value))

        return self.mark(net, "mixed", again(mix, q, k, v) if self.recompute == "selective" else mix(q, k, v))

    def _show(self, net: Any, q: Tensor, k: Tensor, v: Tensor, terms: Terms) -> None:
        """Scores and weights for the recorder; what they mix to is dropped."""

        def look(point: str, value: Tensor) -> Tensor:
            return self.mark(net, point, value) if point in ("scores", "weights") else value

        reference(q, k, v, replace(terms, dropout=0.0), look)

    def _bias(self, net: Any, part: Any) -> BiasRows | None:
        key = ("bias", part.position)
        if key not in self._memo:
            self._memo[key] = part.position.bias(net, self)
        rows: BiasRows | None = self._memo[key]
        return rows

    def _mask(self, visibility: Visibility, explicit: bool, first: int) -> tuple[mask.Seen | None, bool]:
        key = ("mask", visibility, explicit, first)
        if key not in self._memo:
            size = (self.tokens, self.past, self.padding, self.device)
            rows = (self.prefix_lengths, self.packed, first, self.pasts)
            self._memo[key] = mask.build(visibility, *size, explicit, *rows)
        built: tuple[mask.Seen | None, bool] = self._memo[key]
        return built

    def activate(self, name: str, x: Tensor) -> Tensor:
        """The activation of that name."""
        return ACTIVATIONS[name](x)

    def gated(self, name: str, gate: Tensor, up: Tensor) -> Tensor:
        """The activation of gate, times up, both (..., d_ff)."""
        acted = self.activate(name, gate)
        if torch.is_grad_enabled() or gate.dtype != up.dtype:
            return acted * up
        # One more tensor of this width would come from pages that the system has to clear: half as much again in time.
        return acted.mul_(up)

    def drop(self, net: Any, x: Tensor, probability: float) -> Tensor:
        """Dropout in training, nothing in evaluation."""
        return F.dropout(x, probability) if probability and self.training else x

    def wanted(self, x: Tensor) -> Tensor:
        """The positions (B, T or 1, d) that the head reads."""
        if self.last_only and self.last_at is not None:
            return x[torch.arange(x.shape[0], device=x.device), self.last_at][:, None]
        # A copy: with the strides of a view torch would copy the head's whole matrix for a batched product.
        return x[:, -1:].clone(memory_format=torch.contiguous_format) if self.last_only else x

    def pool(self, x: Tensor, kind: str) -> Tensor:
        """One vector per row of x (B, T, d): the first or the last real token's, or the mean of all real ones.

        The mean of a row without any real token is 0.
        """
        if self.packed is not None:
            raise ScantlingInputError("this head gives one vector per row: give each text a row of its own")
        rows, end = torch.arange(x.shape[0], device=x.device), x.shape[1] - 1
        if kind == "first":
            return x[:, 0] if self.padding is None else x[rows, self.padding.int().argmax(-1)]
        if kind == "last":
            return x[:, -1] if self.padding is None else x[rows, end - self.padding.flip(-1).int().argmax(-1)]
        # In float64, where sums of float32 numbers of like size are exact: their order cannot show.
        wide = x.double() if x.device.type != "mps" else x.float()
        if self.padding is None:
            return wide.mean(1).to(x.dtype)
        real = self.padding[..., None].to(wide.dtype)
        return ((wide * real).sum(1) / real.sum(1).clamp(min=1)).to(x.dtype)

    def unit(self, x: Tensor) -> Tensor:
        """x (..., d) divided by its Euclidean length."""
        return F.normalize(x, dim=-1)

    def judge(self, logits: Tensor, scores: str) -> Tensor:
        """Mean loss, in nats, of logits under the labels of this pass (where none are given, label 0); in float32."""
        wide = logits.float()
        if scores == "sigmoid":
            wanted = torch.zeros_like(wide) if self._labels is None else self._labels.float()
            return F.binary_cross_entropy_with_logits(wide, wanted)
        wanted = wide.new_zeros(wide.shape[:-1], dtype=torch.int64) if self._labels is None else self._labels
        return F.cross_entropy(wide.flatten(0, -2), wanted.flatten())

    def routed(self, net: Any, logits: Tensor, experts: Tensor, scores: str) -> None:
        """Keep what a router did: logits (B, T, E), chosen ids (B, T, top_k), and the name of its scores."""
        if self.keep_routing:
            self.routing[net.path] = Routing(logits, experts, scores)

    def group(self, experts: Tensor, n_experts: int) -> Any:
        """Rows sorted by expert; experts (..., top_k)."""
        from scantling.tensor.experts import Groups

        return Groups(experts, n_experts)

    def cross_entropy(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Mean negative log-probability, in nats, of shifted targets (B, T) under logits (B, T, V); in float32."""
        return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())
