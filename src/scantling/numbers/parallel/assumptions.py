"""What the simulator on paper takes for granted: every constant of its clock, each with its reason, in one place.

None is fitted. Two are read off timings of arXiv:2205.05198: IN_SITU off those of one layer, NETWORK off the difference
of two steps; predictions of that paper's runs are therefore no independent test, all others are.
"""

from __future__ import annotations

IN_SITU = 0.86
"""What a layer keeps of the speed of its kernels run one by one (gaps between launches, clocks, caches): the sum of the
kernels of the 22 B model's layer, as counted here, over the 7.7 and 11.9 ms (with sequence parallelism 7.2 and 11.8 ms)
that it takes forward and backward on A100 without the exchange that is waited for (arXiv:2205.05198, table 4)."""

UNMEASURED = 0.80
"""Of the dense peak, for a device whose products were not measured: between an H100 (0.71, held) and an A100 (0.87)."""

ATTENTION = 0.53
"""Of a large product's speed, for a fused attention kernel: FlashAttention-2 forward on H100, heads of 128, 8 k tokens,
370 TFLOP/s (arXiv:2407.08608, figure 5) beside 699 of a product."""

ATTENTION_BACKWARD = 2.5
"""Products of a fused attention's backward per product of its forward: five instead of two, the scores once more."""

PASSES = 2
"""How often a step that is no product moves its output through memory: read and written once each, kernels fused."""

BACKWARD_PASSES = 3
"""The same in the backward: a gradient and what was kept are read, a gradient is written."""

LINK = 0.82
"""Of the link within a node that a collective reaches: all-reduce of 8 H200 without in-switch sums 367.6 of 450 GB/s
(stas00/ml-engineering, network/benchmarks)."""

LINK_LATENCY = 20e-6
"""Seconds of a small collective within a node (the same source: 32 KiB over 8 H200)."""

NETWORK = 0.43
"""Of the line rate between nodes that gradients reach: the 530 B model of arXiv:2205.05198, section 6.3, takes 1.32 s
longer for eight replicas; 14.2 GB of float32 gradients a device over 25 GB/s would take 0.57 s."""

NETWORK_LATENCY = 100e-6
"""Seconds of a small collective between nodes (stas00/ml-engineering, network/benchmarks: 32 KiB over 4 nodes)."""

RESERVED = 2 * 2**30
"""Bytes of a device that nothing above can use: 0.9 GiB of loaded kernels (PyTorch 2.1 on A100, stas00/ml-engineering,
training/performance), and as much again for buffers of the communication library and fragments of the allocator."""

TEXT: tuple[str, ...] = (
    "products run at the speed that a large one was measured to reach, plus the time that their bytes take",
    f"a layer keeps {IN_SITU:.0%} of the speed of its kernels; what is no product moves its output through memory "
    f"{PASSES} times forward and {BACKWARD_PASSES} times backward",
    "ranks within a node use its links, others the network; a group with r ranks in a node has r adapters",
    f"collectives reach {LINK:.0%} of the links and {NETWORK:.0%} of the network's line rate, after "
    f"{LINK_LATENCY * 1e6:.0f} and {NETWORK_LATENCY * 1e6:.0f} us",
    "tensor-parallel exchange waits in the forward and hides behind half of the products in the backward",
    "keys, values (context) and tokens (experts) are waited for; experts get equal shares of the tokens",
    "pipelines are 1F1B, with virtual stages interleaved; ranks stand in the order tensor, context, data, pipeline",
    "norms, gates and attention keep what one kernel each needs for its backward; logits are there twice in float32; "
    f"{RESERVED / 2**30:.0f} GiB of a device are out of reach",
    "data loading, checkpoints, stragglers and failures cost nothing",
)
"""The assumptions as they are printed."""
