"""How much memory the exchange between ranks needs: pure arithmetic, exact to the byte, nothing allocated."""

from __future__ import annotations

from dataclasses import dataclass

from megamoe.config import MoEConfig, check_config
from megamoe.errors import check_int, fail_value
from megamoe.kernels import flag_words
from megamoe.kernels.layout import ALIGN, align_up, max_pool_rows

REGION_ALIGN = 1024
"""Bytes: every region starts at a multiple."""

SMALLEST_ALLOCATION = 4 << 20
"""Bytes. Flags in a small symmetric allocation of their own are 7 times as slow as in a large one (H200)."""

ROW_ELEMENT_BYTES = 2
"""Rows travel as 16-bit numbers at most: gradients do so where activations travel in FP8."""

POOL_BYTES = 384 << 20
"""Of a mega-kernel's pool at most, unless the config says otherwise: rows that its experts receive, and activations."""

COLUMN_ALIGN = 16
"""``hidden_size`` is a multiple: rows of FP8 codes are then aligned to 16 bytes."""


@dataclass(frozen=True)
class Region:
    """A part of the allocation.

    Attributes:
        name: what it holds, as in ``kernels.peer_rows.PeerMemory``.
        offset, nbytes: bytes from the start of the allocation, and size.
        shape: in words, for ``explain``.
    """

    name: str
    offset: int
    nbytes: int
    shape: str


@dataclass(frozen=True)
class MemoryPlan:
    """What a ``SymmetricBuffer`` allocates on each rank.

    Attributes:
        ep_size: R, ranks.
        max_tokens: T, tokens at most of any rank in a call.
        top_k, hidden_size: K and H.
        num_local_experts: e, experts of a rank.
        fp8: rows can travel in FP8.
        shared_experts: S, how many of the K and of the e are for a rank's own tokens alone.
        pool_bytes: of a mega-kernel's pool at most; not part of the allocation.
        regions: in ascending order of offsets.
        total: bytes of the allocation.
    """

    ep_size: int
    max_tokens: int
    top_k: int
    hidden_size: int
    num_local_experts: int
    fp8: bool
    shared_experts: int
    pool_bytes: int
    regions: tuple[Region, ...]
    total: int

    @property
    def most_rows(self) -> int:
        """Rows that one rank's experts can receive at most, each expert padded to a multiple of 128."""
        shared = self.shared_experts
        routed = self.ep_size * self.max_tokens * (self.top_k - shared)
        return max_pool_rows(routed, self.num_local_experts - shared) + shared * align_up(self.max_tokens)

    def __getitem__(self, name: str) -> Region:
        return next(region for region in self.regions if region.name == name)

    def covers(self, other: MemoryPlan) -> bool:
        """Whether a buffer of this plan can lend its memory to ``other``: as many ranks, and no region smaller."""
        return self.ep_size == other.ep_size and all(
            mine.nbytes >= theirs.nbytes for mine, theirs in zip(self.regions, other.regions, strict=True)
        )

    def explain(self) -> str:
        """A table of the regions."""
        width = max(len(region.shape) for region in self.regions)
        lines = [
            f"{self.ep_size} ranks, up to {self.max_tokens} tokens each, "
            f"top-{self.top_k}, hidden size {self.hidden_size}"
        ]
        lines += [f"{region.name:12}  {region.shape:{width}}  {region.nbytes:>14,} bytes" for region in self.regions]
        lines.append(f"{'total':12}  {'':{width}}  {self.total:>14,} bytes = {self.total / 2**20:.1f} MiB on each rank")
        element = 1 if self.fp8 else ROW_ELEMENT_BYTES
        pool = self.most_rows * self.hidden_size * element
        lines.append(
            f"Not in it: the rows that a rank's experts receive, at most {self.most_rows:,} = {pool / 2**20:.1f} MiB; "
            f"a mega-kernel holds {self.pool_bytes / 2**20:.0f} MiB of them at most."
        )
        return "\n".join(lines)


def plan_memory(
    config: MoEConfig,
    ep_size: int,
    tokens: int | None = None,
    *,
    num_experts: int | None = None,
    shared_experts: int = 0,
) -> MemoryPlan:
    """The memory of one rank for the exchange of one layer; layers that run one after another share it.

    Grows with every argument.

    Args:
        config: the layer.
        ep_size: R, expert-parallel ranks, 1 to 32, a divisor of the number of experts.
        tokens: T, tokens at most of any rank in a call; default: the config's ``max_tokens_per_rank``.
        num_experts: physical experts of all ranks, where some are there more than once; default: the config's.
        shared_experts: S, experts that each rank has besides for its own tokens, all of which have a slot for each.

    Raises:
        MegaMoEError: an argument is out of range, or ``hidden_size`` is no multiple of 16.
    """
    check_config(config)
    check_int("ep_size", ep_size, 1)
    if tokens is None:
        tokens = config.max_tokens_per_rank
    if tokens is None:
        fail_value(
            "tokens",
            None,
            "must be known: the memory for the exchange depends on it",
            "Pass tokens, or set max_tokens_per_rank in the config.",
        )
    check_int("tokens", tokens, 1)
    if num_experts is None:
        num_experts = config.num_experts
    check_int("num_experts", num_experts, config.num_experts)
    check_int("shared_experts", shared_experts, 0)
    if ep_size > flag_words.MAX_RANKS or num_experts % ep_size:
        fail_value(
            "ep_size",
            ep_size,
            f"must be at most {flag_words.MAX_RANKS} and divide num_experts = {num_experts}",
            "Use a group of such a size.",
        )
    num_local_experts = num_experts // ep_size + shared_experts
    hidden, top_k = config.hidden_size, config.top_k + shared_experts
    if hidden % COLUMN_ALIGN:
        fail_value("hidden_size", hidden, f"must be a multiple of {COLUMN_ALIGN}", "Pad the model's width.")
    if ep_size * (tokens * top_k + num_local_experts * ALIGN) >= 2**31:
        fail_value(
            "tokens", tokens, f"times {ep_size} ranks times {top_k} slots must stay below 2^31 rows", "Lower it."
        )
    fp8 = config.precision == "fp8"
    groups = -(-hidden // 128) if fp8 else 0
    sizes = [
        ("flags", flag_words.FLAG_WORDS * flag_words.WORD_BYTES, "kind of flag x rank"),
        ("state", flag_words.STATE_WORDS * flag_words.WORD_BYTES, "epochs, tickets"),
        ("error", flag_words.ERROR_WORDS * flag_words.WORD_BYTES, "phase and what it explains"),
        ("list_index", ep_size * tokens * top_k * 4, f"{ep_size} x {tokens} x {top_k} int32"),
        ("list_weights", ep_size * tokens * top_k * 4, f"{ep_size} x {tokens} x {top_k} float32"),
        ("rows", tokens * hidden * ROW_ELEMENT_BYTES, f"{tokens} x {hidden} x {ROW_ELEMENT_BYTES} bytes"),
        ("scales", tokens * groups * 4, f"{tokens} x {groups} float32"),
        (
            "slots",
            top_k * tokens * hidden * ROW_ELEMENT_BYTES,
            f"{top_k} x {tokens} x {hidden} x {ROW_ELEMENT_BYTES} bytes",
        ),
        ("slot_weights", tokens * top_k * 4, f"{tokens} x {top_k} float32"),
    ]
    regions, offset = [], 0
    for name, nbytes, shape in sizes:
        regions.append(Region(name, offset, nbytes, shape))
        offset += align_up(nbytes, REGION_ALIGN)
    return MemoryPlan(
        ep_size=ep_size,
        max_tokens=tokens,
        top_k=top_k,
        hidden_size=hidden,
        num_local_experts=num_local_experts,
        fp8=fp8,
        shared_experts=shared_experts,
        pool_bytes=POOL_BYTES if config.pool_bytes is None else config.pool_bytes,
        regions=tuple(regions),
        total=max(offset, SMALLEST_ALLOCATION),
    )
