"""The context of one pass: positions, padding, cache, kernel, and the operations that parts ask for by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from scantling.errors import ScantlingInputError
from scantling.tensor import mask, rotate
from scantling.tensor.attend import BiasRows, Terms, kernel, share
from scantling.tensor.cache import Cache
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
}


class Context:
    """Everything of a pass that is not a weight.

    Attributes:
        past: positions already in the cache.
        positions: (1 or B, T) position ids.
        padding: (B, past + T) bool, True at real tokens, or None.
        cache: filled by this pass, or None.
        training: dropout acts, and no cache rows are recorded.
        recorder: called with (path, value) at every capture point; what it returns goes on in its place.
        last_only: the head sees only the last position.
        prefix_lengths: (B,) how many of a row's first real tokens read each other both ways, in layers with a prefix;
            or None. A cache takes the whole prefix in its first pass.
        keep_routing: routers leave their logits and choices in `routing`; by default in training only.
        routing: by the router's path, in the order of execution.
    """

    def __init__(
        self,
        batch: int,
        tokens: int,
        device: torch.device,
        *,
        positions: Tensor | None = None,
        padding: Tensor | None = None,
        cache: Cache | None = None,
        kernel_name: str = "fused",
        training: bool = False,
        recorder: Recorder | None = None,
        last_only: bool = False,
        prefix_lengths: Tensor | None = None,
        keep_routing: bool | None = None,
    ) -> None:
        self.batch, self.tokens, self.device = batch, tokens, device
        self.past = 0 if cache is None else cache.length
        self.positions = (
            torch.arange(self.past, self.past + tokens, device=device)[None] if positions is None else positions
        )
        self._given = positions is not None
        self.padding, self.cache, self.training, self.recorder = padding, cache, training, recorder
        self.last_only = last_only
        self.prefix_lengths = prefix_lengths
        self._check_prefix()
        self.keep_routing = training if keep_routing is None else keep_routing
        self.routing: dict[str, Routing] = {}
        self._kernel = kernel(kernel_name)
        self._fused = kernel_name == "fused"
        self._memo: dict[Any, Any] = {}

    @classmethod
    def of(cls, ids: Tensor, **options: Any) -> Context:
        """The context of a pass over ids (B, T); `options` are those of the constructor."""
        return cls(ids.shape[0], ids.shape[1], ids.device, **options)

    def _check_prefix(self) -> None:
        """Keys before the cut of a prefix would not have seen those behind it."""
        if self.prefix_lengths is None or self.cache is None:
            return
        real = self.prefix_lengths.new_tensor([self.past, self.past + self.tokens])[:, None]
        if self.padding is not None:
            real = torch.stack([self.padding[:, : self.past].sum(-1), self.padding.sum(-1)])
        # A prefix of one token has nothing ahead to read.
        cut = (self.prefix_lengths > 1) & (self.prefix_lengths > (real[0] if self.past else real[1]))
        if bool(cut.any()):
            raise ScantlingInputError(
                f"a prefix of {int(self.prefix_lengths[cut].max())} tokens goes into a cache in one pass, the first; "
                f"this pass brings positions {self.past} to {self.past + self.tokens - 1}"
            )

    @property
    def counted_positions(self) -> Tensor:
        """The positions that were given; where none were, those that count real tokens only: (1 or B, T)."""
        if self._given or self.padding is None:
            return self.positions
        return (self.padding.long().cumsum(-1) - 1).clamp(min=0)[:, self.past :]

    def mark(self, net: Any, point: str, value: Tensor) -> Tensor:
        """A capture point: ``net.path:point``."""
        return value if self.recorder is None else self.recorder(f"{net.path}:{point}", value)

    def rotate(self, x: Tensor, position: Any) -> Tensor:
        """Turn x (B, H, T, D) by the scheme `position`; its angles are made once per pass."""
        if position not in self._memo:
            self._memo[position] = position.rotation(self)
        cos, sin, interleaved = self._memo[position]
        return rotate.rotate(x, cos.to(x.dtype), sin.to(x.dtype), interleaved)

    def join(self, *pieces: Tensor) -> Tensor:
        """Channels side by side: (..., D_1), (..., D_2) -> (..., D_1 + D_2)."""
        return torch.cat(pieces, -1)

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
            tilt, place = tilt.bfloat16(), place.bfloat16()
            return lambda start, end: (tilt * place[:, None, None, :]).float() * scale
        query = key[0, self.past :]
        return lambda start, end: (tilt * (key - query[start:end, None]) * scale)[None]

    def waves(self, frequencies: Sequence[float], width: int) -> Tensor:
        """Sinusoidal vectors of this pass's positions: (1 or B, T, width)."""
        return rotate.waves(self.positions, frequencies, width)

    def remember(self, net: Any, name: str, new: Tensor) -> Tensor:
        """new (B, H_kv, T, D) behind what the cache holds: (B, H_kv, past + T, D)."""
        if self.cache is not None:
            new = self.cache.append(f"{net.path}:{name}", new)
        return new if self.training else self.mark(net, name, new)

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
        plain = bias is None and part.softcap is None and sinks is None
        # Torch's fused CPU kernel wants values as wide as keys; a written mask makes blocks of queries of it there.
        plain = plain and (q.device.type != "cpu" or q.shape[-1] == v.shape[-1])
        seen, causal = self._mask(part.visibility, explicit=not plain)
        if self._fused and self.recorder is not None and k.shape[1] != q.shape[1]:
            # The fused kernel indexes KV heads; a recorder is shown what that index selects.
            self.mark(net, "k_shared", share(k, q.shape[1]))
            self.mark(net, "v_shared", share(v, q.shape[1]))
        dropout = part.dropout if self.training else 0.0
        terms = Terms(seen, causal, part.scale, bias, part.softcap, sinks, dropout)
        return self.mark(net, "mixed", self._kernel(q, k, v, terms, lambda point, value: self.mark(net, point, value)))

    def _bias(self, net: Any, part: Any) -> BiasRows | None:
        key = ("bias", part.position)
        if key not in self._memo:
            self._memo[key] = part.position.bias(net, self)
        rows: BiasRows | None = self._memo[key]
        return rows

    def _mask(self, visibility: Visibility, explicit: bool) -> tuple[mask.Seen | None, bool]:
        key = ("mask", visibility, explicit)
        if key not in self._memo:
            size = (self.tokens, self.past, self.padding, self.device)
            self._memo[key] = mask.build(visibility, *size, explicit=explicit, prefix=self.prefix_lengths)
        built: tuple[mask.Seen | None, bool] = self._memo[key]
        return built

    def activate(self, name: str, x: Tensor) -> Tensor:
        """The activation of that name."""
        return ACTIVATIONS[name](x)

    def drop(self, net: Any, x: Tensor, probability: float) -> Tensor:
        """Dropout in training, nothing in evaluation."""
        return F.dropout(x, probability) if probability and self.training else x

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
