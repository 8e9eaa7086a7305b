"""What a token takes on cards of a class, for a first idea of speed before anybody has measured. Pure.

A decoded token reads the weights that are always used and its selected experts from video memory, and every block adds
a time of its own for launches and waits. Each miss adds its copy over the link and what finding a slot takes. Reading
is told by a card's data sheet. The time of a block is not: it is what two measured runs leave over once their reading
is taken away, and between those two lies the range for every card that nobody has measured. What is known of a machine
that ran ``spark-agent bench`` is far better; this is for before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from spark_runtime.simulator.cost import Machine
from spark_schemas.model import ModelShape

__all__ = ["GPU_CLASSES", "LINK_SHARE", "SOURCES", "GpuClass", "Speed", "read_bytes", "speed"]

GIB = 2**30
H200_BLOCK_S = 64.6e-6
"""Of a block of big_model.py on one H200: gpu_classes.py takes it from bench-h200.json."""
RTX_3090_BLOCK_S = 170.7e-6
"""Of a block of Laguna-XS.2 in another runtime, from its published 111 tokens a second (gpu_classes.py)."""
MISS_S = 25.0e-6
"""Of each miss beside its bytes: gpu_classes.py takes it from bench-h200.json and link-h200.json."""
H200_LINK = 55.63e9
"""Bytes a second from locked memory, measured: link-h200.json."""
PCIE_5_X16 = 63.0e9
"""Bytes a second of 16 lanes of PCI Express 5.0 in one direction; each generation before it half as many."""
LINK_SHARE = H200_LINK / PCIE_5_X16
"""What of a link's nominal rate was measured."""

SOURCES = (
    "Memory sizes and rates: NVIDIA's data sheets and product pages of the cards named, GB/s decimal.",
    "Links: PCI Express's nominal rates, times the 88% of it that one H200 was measured to copy from locked memory.",
    "H200: spark-agent bench of a model of 48 layers x 128 experts, and its link (infra/benchmarks/results).",
    "RTX 3090: 111 tokens a second with everything resident that others published of Laguna-XS.2 in their own runtime.",
    "Every other card: between those two for what a block takes beside reading; nobody has measured one.",
)


@dataclass(frozen=True, slots=True)
class GpuClass:
    """Cards of about one memory size and speed, named after one of them."""

    key: str
    name: str
    memory_bytes: int
    memory_bytes_per_s: float
    link: str
    link_bytes_per_s: float
    fast_block_s: float
    slow_block_s: float
    basis: Literal["measured", "published", "estimated"]


@dataclass(frozen=True, slots=True)
class Speed:
    """Decoded tokens a second, from ``low`` to ``high``; and with every expert resident, from the same figures."""

    low: float
    high: float
    resident_low: float
    resident_high: float

    @property
    def kept(self) -> float:
        """Share of the all-resident speed, at the end of the range where it is smaller."""
        return min(self.low / self.resident_low, self.high / self.resident_high)


def _card(key: str, name: str, gib: int, gb_per_s: float, generation: int, lanes: int) -> GpuClass:
    nominal = PCIE_5_X16 * 2.0 ** (generation - 5) * lanes / 16
    block = {"rtx-3090": (RTX_3090_BLOCK_S, RTX_3090_BLOCK_S), "h200": (H200_BLOCK_S, H200_BLOCK_S)}
    fast, slow = block.get(key, (H200_BLOCK_S, RTX_3090_BLOCK_S))
    basis: Literal["measured", "published", "estimated"] = (
        "measured" if key == "h200" else "published" if key == "rtx-3090" else "estimated"
    )
    return GpuClass(
        key=key,
        name=name,
        memory_bytes=gib * GIB,
        memory_bytes_per_s=gb_per_s * 1e9,
        link=f"PCIe {generation}.0 x{lanes}",
        link_bytes_per_s=nominal * LINK_SHARE,
        fast_block_s=fast,
        slow_block_s=slow,
        basis=basis,
    )


GPU_CLASSES: dict[str, GpuClass] = {
    card.key: card
    for card in (
        _card("rtx-4060", "8 GB, as the GeForce RTX 4060", 8, 272, 4, 8),
        _card("rtx-3060", "12 GB, as the GeForce RTX 3060", 12, 360, 4, 16),
        _card("rtx-4080", "16 GB, as the GeForce RTX 4080", 16, 717, 4, 16),
        _card("rtx-3090", "24 GB, the GeForce RTX 3090", 24, 936, 4, 16),
        _card("rtx-4090", "24 GB, as the GeForce RTX 4090", 24, 1008, 4, 16),
        _card("rtx-5090", "32 GB, as the GeForce RTX 5090", 32, 1792, 5, 16),
        _card("l40s", "48 GB, as the L40S", 48, 864, 4, 16),
        _card("h100", "80 GB, as the H100 SXM", 80, 3350, 5, 16),
        _card("h200", "141 GB, the H200", 131, 4800, 5, 16),
    )
}
"""By key, smallest memory first. The H200's 141 GB are decimal."""


def read_bytes(shape: ModelShape) -> float:
    """Bytes of weights that one decoded token reads: at most, as of an embedding table it is a single row."""
    return shape.core_bytes + sum(layer.top_k * layer.expert_bytes for layer in shape.layers)


def speed(shape: ModelShape, card: GpuClass, cold_hit_rate: float) -> Speed:
    """Tokens a second of single-stream decoding with a short context when such a share of selections miss."""
    misses = cold_hit_rate * sum(layer.top_k for layer in shape.layers)
    per_token = sum(layer.top_k for layer in shape.layers)
    expert_bytes = sum(layer.top_k * layer.expert_bytes for layer in shape.layers) / per_token
    found = []
    for block_s in (card.slow_block_s, card.fast_block_s):
        token_s = read_bytes(shape) / card.memory_bytes_per_s + shape.n_blocks * block_s
        machine = Machine(token_s, MISS_S, card.link_bytes_per_s)
        found.append((machine.decode_tok_s(misses, expert_bytes), machine.decode_tok_s(0.0)))
    (low, resident_low), (high, resident_high) = found
    return Speed(low, high, resident_low, resident_high)
