"""Launches of the kernels that move rows between ranks: which kernels a movement needs, with what parameters.

Needs triton: import it on GPUs only. Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton

from megamoe.kernels import triton_combine, triton_dispatch, triton_flags
from megamoe.kernels.formats import FP8_MAX, MIN_AMAX
from megamoe.plan import MemoryPlan

FUSED_ENTRIES = 16384
"""(token, slot) pairs of all ranks up to which one launch does a whole dispatch: every program counts all of them."""

FEW_BYTES = 1 << 24
"""Bytes of slots up to which a combine writes all, then sums all; more are summed while others are written."""

SOME = 4
"""So many times as much is still a matter of latency rather than of the links' rate."""

STEPS, FEWER_STEPS = 8, 4
"""Steps in which the results of many tokens are announced, and of some."""

DEFAULT_SMS = 32
"""SMs for many tokens: enough for the links' full rate, and most are left to others."""

WARPS, FEW_WARPS = 16, 8
"""Of a program that has an SM to itself, and where few tokens are shared out among as many programs as there can be."""

EARLY_TOKENS = 64
"""Tokens of a rank up to which a dispatch reads them beside the count of rows; more are read faster after it."""

WIDE_TOKENS = 64
"""Tokens of a rank from which on a combine's sums are a matter of the memory's rate rather than of latency."""

FEW_SUM_COLS, SUM_COLS = 256, 512
"""Columns that a warp sums at once, below ``WIDE_TOKENS`` and from there on."""

FEW_SUMS_AHEAD, SUMS_AHEAD = 2, 1
"""Sums whose rows a program reads together before it writes the first, likewise."""

_TILE_ROWS, _TILE_WORDS = 32, 8192
"""Tokens that a program of ``WARPS`` moves at once, and words of them. Scales of one token take as long as of many."""

_LEAST_CHUNK = 8
"""Tokens that are counted together, at least."""


@dataclass(frozen=True)
class PeerMemory:
    """A rank's memory for the exchange. The regions are symmetric: every rank has them at the same distance from the
    base of its allocation.

    R ranks, T tokens at most of any rank, K slots, H columns.

    Attributes:
        rank, max_tokens, top_k, hidden_size: my rank, T, K, H.
        deltas: int64 ``[R]``, distance of each rank's allocation from mine, in units of 16 bytes.
        flags: int64 ``[flag_words.FLAG_WORDS]``.
        list_index, list_weights: int32 and float32 ``[R, T, K]``, every rank's routing; written by that rank.
        rows: bytes, at least T * H elements of the dtype in which rows travel; my tokens.
        scales: float32, at least T * ceil(H / 128); of my tokens, if they travel in FP8.
        slots: bytes, at least K * T * H elements; results for my tokens, written by the ranks of their experts.
        slot_weights: float32 ``[T, K]``, likewise.
        state: int64 ``[flag_words.STATE_WORDS]``, not symmetric.
        error: int64 ``[flag_words.ERROR_WORDS]``, not symmetric.
        budget_ns: longest wait for another rank.
    """

    rank: int
    max_tokens: int
    top_k: int
    hidden_size: int
    deltas: torch.Tensor
    flags: torch.Tensor
    list_index: torch.Tensor
    list_weights: torch.Tensor
    rows: torch.Tensor
    scales: torch.Tensor
    slots: torch.Tensor
    slot_weights: torch.Tensor
    state: torch.Tensor
    error: torch.Tensor
    budget_ns: int

    @property
    def num_ranks(self) -> int:
        return self.deltas.numel()


def peer_memory(
    plan: MemoryPlan, views: Mapping[str, torch.Tensor], rank: int, deltas: torch.Tensor, budget_ns: int
) -> PeerMemory:
    """The memory of a buffer of ``plan``. ``views``: bytes of each region."""
    dtypes = dict(
        flags=torch.int64,
        state=torch.int64,
        error=torch.int64,
        list_index=torch.int32,
        list_weights=torch.float32,
        rows=torch.uint8,
        scales=torch.float32,
        slots=torch.uint8,
        slot_weights=torch.float32,
    )
    return PeerMemory(
        rank=rank,
        max_tokens=plan.max_tokens,
        top_k=plan.top_k,
        hidden_size=plan.hidden_size,
        deltas=deltas,
        budget_ns=budget_ns,
        **{name: views[name].view(dtype) for name, dtype in dtypes.items()},
    )


@dataclass(frozen=True)
class RowTable:
    """Where the pairs of all ranks' tokens with this rank's experts go; e local experts.

    Attributes:
        counts, starts: int64 ``[e]``, as in ``ExpertLayout``.
        sizes: int32 ``[1 + R]``: rows of the pool that are in use (with padding), then the tokens of each rank.
        pair_to_row: int32 ``[R, T, K]``; ``flag_words.ELSEWHERE``: another rank's expert, ``NOWHERE``: none. Undefined
            beyond a rank's tokens.
        row_weights: float32 ``[rows]``, the routing weights.
    """

    counts: torch.Tensor
    starts: torch.Tensor
    sizes: torch.Tensor
    pair_to_row: torch.Tensor
    row_weights: torch.Tensor


@dataclass(frozen=True)
class Launch:
    """One kernel launch: ``kernel[grid](*arguments, **constants)``."""

    kernel: Any
    grid: int
    arguments: dict[str, Any]
    num_warps: int

    def __call__(self) -> None:
        self.kernel[(self.grid,)](**self.arguments, **self.options)

    @property
    def options(self) -> dict[str, int]:
        # All registers of 16 warps: left to itself the assembler spills, to fit programs that are not there. Kernels of
        # the exchange wait for the launch before themselves, and may be made ready while it ends.
        return dict(num_warps=self.num_warps, maxnreg=128, launch_pdl=True)


def empty_table(memory: PeerMemory, num_local_experts: int, num_rows: int, device: torch.device) -> RowTable:
    """A table for up to ``num_rows`` rows, to be filled by ``dispatch``."""
    ranks, tokens, top_k = memory.num_ranks, memory.max_tokens, memory.top_k
    return RowTable(
        counts=torch.empty(num_local_experts, dtype=torch.int64, device=device),
        starts=torch.empty(num_local_experts, dtype=torch.int64, device=device),
        sizes=torch.empty(1 + ranks, dtype=torch.int32, device=device),
        pair_to_row=torch.empty(ranks, tokens, top_k, dtype=torch.int32, device=device),
        row_weights=torch.empty(num_rows, dtype=torch.float32, device=device),
    )


def flag_arguments(memory: PeerMemory) -> dict[str, Any]:
    return dict(
        flags=memory.flags,
        deltas=memory.deltas,
        state=memory.state,
        error=memory.error,
        budget_ns=memory.budget_ns,
        my_rank=memory.rank,
        R=memory.num_ranks,
        LANES=triton.next_power_of_2(memory.num_ranks),
    )


def _as_words(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int32)


def _programs(units: int, limit: int) -> int:
    """As few programs as end together with ``limit`` ones; each does a unit of the work at a time."""
    turns = triton.cdiv(max(units, 1), limit)
    return triton.cdiv(max(units, 1), turns)


def _limit(num_sms: int | None, all_sms: int, few: bool) -> int:
    """Programs that run at once. Few tokens are a matter of latency: more programs have less to wait for each."""
    if num_sms is None:
        num_sms = max(1, all_sms * 3 // 4) if few else min(DEFAULT_SMS, all_sms)
    return num_sms * (WARPS // FEW_WARPS) if few else num_sms


def barrier(memory: PeerMemory) -> list[Launch]:
    """All ranks meet; what each wrote before is visible to all after."""
    return [Launch(triton_flags.barrier_kernel, 1, flag_arguments(memory), 1)]


def dispatch(
    memory: PeerMemory,
    tokens: torch.Tensor | None,
    routing: tuple[torch.Tensor, torch.Tensor] | None,
    table: RowTable,
    rows: torch.Tensor | None,
    scales: torch.Tensor | None,
    *,
    num_experts: int,
    num_tokens: int,
    zero_padding: bool,
    num_sms: int | None,
    all_sms: int,
) -> list[Launch]:
    """Makes the table of rows, reads the rows, or both.

    Args:
        tokens: ``[T, H]`` with contiguous columns, or None: no rows move.
        routing: ``(index [T, K] int64, weights [T, K])``, both contiguous; None: ``table`` is one made before.
        table: written with a routing, else read.
        rows: ``[P, H]`` contiguous, in the dtype in which they travel; None exactly if ``tokens`` is.
        scales: float32 ``[P, ceil(H / 128)]`` with rows of stride 1 (MN-major), for FP8 rows; else None.
        num_experts: of all ranks.
        num_tokens: T.
        zero_padding: rows that pad an expert's are zeroed, and their weights and scales.
        num_sms: SMs to use while waiting and reading, by one program each or, where tokens are few, two. None:
            ``DEFAULT_SMS``, and for few tokens up to three quarters of all.
        all_sms: SMs of the device, for what is done before others wait for it.
    """
    ranks, top_k, hidden = memory.num_ranks, memory.top_k, memory.hidden_size
    move, fp8 = tokens is not None, rows is not None and rows.dtype == torch.float8_e4m3fn
    local = table.counts.numel()
    padded_k, bins = triton.next_power_of_2(top_k), max(16, triton.next_power_of_2(local))
    pairs = ranks * memory.max_tokens * padded_k
    fused = pairs <= FUSED_ENTRIES
    limit = _limit(num_sms, all_sms, fused)
    # Enough chunks for all programs; but one chunk costs a look at all counts.
    if fused:
        chunk = 1
        while chunk < 128 and ranks * triton.cdiv(memory.max_tokens, chunk) > limit:
            chunk *= 2
        programs = _programs(ranks * triton.cdiv(memory.max_tokens, chunk), limit)
    else:
        chunk, programs = 128, limit
        while chunk > _LEAST_CHUNK and ranks * memory.max_tokens < 2 * chunk * limit:
            chunk //= 2
    warps = FEW_WARPS if fused else WARPS
    common = flag_arguments(memory)
    region = memory.rows if not move else memory.rows.view(rows.dtype)
    nothing = memory.error
    index, weights = routing if routing is not None else (nothing, nothing)
    staged = dict(
        x=tokens if move else nothing,
        x_stride=tokens.stride(0) if move else 0,
        index=index,
        weights=weights,
        n=num_tokens,
        list_index=memory.list_index,
        list_weights=memory.list_weights,
        rows=region,
        scales=memory.scales,
        num_experts=num_experts,
        max_tokens=memory.max_tokens,
        min_amax=MIN_AMAX,
        K=top_k,
        H=hidden,
        FP8=fp8,
        LARGEST=FP8_MAX,
    )
    block = max(128, min(2048 if fused else 1024, triton.next_power_of_2(pairs)))
    counted = dict(KP=padded_k, LOCAL=local, BINS=bins, CHUNK=chunk, BLOCK=block)
    launches = []
    if not fused:
        grid = max(1, min(num_tokens, 8 * all_sms))
        extra = dict(ROWS=move, LISTS=routing is not None, GROUPS=8)
        launches.append(Launch(triton_dispatch.stage_kernel, grid, {**common, **staged, **extra}, 4))
    histograms = nothing
    if routing is None:
        source = triton_dispatch.REUSED.value
    elif fused:
        source = triton_dispatch.COUNTED_HERE.value
    else:
        source = triton_dispatch.COUNTED_BEFORE.value
        chunks = ranks * triton.cdiv(memory.max_tokens, chunk)
        histograms = torch.empty(chunks, bins, dtype=torch.int32, device=table.counts.device)
        arguments = dict(
            n=num_tokens,
            list_index=memory.list_index,
            max_tokens=memory.max_tokens,
            histograms=histograms,
            K=top_k,
            **counted,
        )
        launches.append(Launch(triton_dispatch.count_kernel, min(chunks, all_sms), {**common, **arguments}, 4))
    words = hidden * (rows.element_size() if move else 2) // 4
    padded_words = triton.next_power_of_2(words)
    # Chunks that fit into few registers are read before their rows are known.
    fits = memory.max_tokens <= EARLY_TOKENS and chunk * padded_words <= 1024 * warps
    ahead = fused and move and routing is not None and fits
    tile_rows = chunk if ahead else min(chunk, _TILE_ROWS)
    arguments = dict(
        words=_as_words(memory.rows),
        histograms=histograms,
        pair_to_row=table.pair_to_row,
        counts=table.counts,
        starts=table.starts,
        sizes=table.sizes,
        row_weights=table.row_weights,
        out_words=_as_words(rows) if move else nothing,
        out_scales=scales if fp8 else nothing,
        scale_stride=scales.stride(1) if fp8 else 0,
        capacity=table.row_weights.numel() if not move else rows.shape[0],
        WORDS=words,
        SCALES=(hidden + 127) // 128 if fp8 else 0,
        STAGE=fused,
        TABLE=source,
        MOVE=move,
        PADDING=zero_padding,
        SUB=min(max(padded_k, 512 * warps // bins), chunk * padded_k),
        GROUPS=min(4 * warps, triton.next_power_of_2(triton.cdiv(hidden, 128))),
        ROWS=tile_rows,
        COLS=padded_words if ahead else min(_TILE_WORDS * warps // WARPS // tile_rows, padded_words),
        SCALE_COLS=triton.next_power_of_2((hidden + 127) // 128),
        AHEAD=ahead,
        KEEP=tile_rows <= 2 or tile_rows == _TILE_ROWS,
        **counted,
    )
    launches.append(Launch(triton_dispatch.dispatch_kernel, programs, {**common, **staged, **arguments}, warps))
    return launches


def combine(
    memory: PeerMemory,
    rows: torch.Tensor | None,
    row_weights: torch.Tensor | None,
    index: torch.Tensor,
    table: RowTable,
    out: torch.Tensor | None,
    out_weights: torch.Tensor | None,
    *,
    num_experts: int,
    num_sms: int | None,
    all_sms: int,
) -> list[Launch]:
    """Returns rows, one number of each, or both, to their tokens.

    Args:
        rows: ``[P, H]`` contiguous, BF16 or FP16; None: only weights move.
        row_weights: float32 ``[P]`` or None.
        index: int64 ``[T, K]``, the routing of my tokens that the table was made with.
        out: ``[T, H]``, the sums over slots. None exactly if ``rows`` is.
        out_weights: float32 ``[T, K]``, 0 where nothing was sent. None exactly if ``row_weights`` is.
        num_sms, all_sms: as for ``dispatch``.
    """
    hidden, top_k, tokens = memory.hidden_size, memory.top_k, memory.max_tokens
    move, nothing = rows is not None, memory.error
    words = hidden * (rows.element_size() if move else 2) // 4
    written = tokens * top_k * hidden * 2
    some = written <= SOME * FEW_BYTES
    limit, warps = _limit(num_sms, all_sms, some), FEW_WARPS if some else WARPS
    at_once = written <= FEW_BYTES or not move or memory.num_ranks == 1
    cols_of_warp, ahead = (FEW_SUM_COLS, FEW_SUMS_AHEAD) if tokens < WIDE_TOKENS else (SUM_COLS, SUMS_AHEAD)
    sum_cols = min(cols_of_warp * warps, triton.next_power_of_2(hidden))
    if at_once:
        steps, programs = 1, _programs(tokens * triton.cdiv(hidden, sum_cols), limit)
        pushers = programs
    else:
        # Links need fewer SMs than the sums, which read twice as much.
        steps, programs = FEWER_STEPS if some else STEPS, limit
        pushers = max(1, limit * 5 // 8)
    arguments = dict(
        rows=rows if move else nothing,
        words=_as_words(rows) if move else nothing,
        row_weights=row_weights if row_weights is not None else nothing,
        index=index,
        n=index.shape[0],
        slots=memory.slots.view(rows.dtype) if move else nothing,
        slot_words=_as_words(memory.slots),
        slot_weights=memory.slot_weights,
        num_experts=num_experts,
        max_tokens=tokens,
        pair_to_row=table.pair_to_row,
        sizes=table.sizes,
        out=out if move else nothing,
        out_stride=out.stride(0) if move else 0,
        out_weights=out_weights if out_weights is not None else nothing,
        pushers=pushers,
        K=top_k,
        H=hidden,
        WORDS=words,
        MOVE=move,
        WEIGHTS=row_weights is not None,
        FROM_SLOTS=False,
        STEPS=steps,
        BLOCK=1024,
        COLS=min(triton.next_power_of_2(words), 128 * warps),
        SUM_TOKENS=4 if steps == STEPS else 1,
        SUM_COLS=sum_cols,
        AHEAD=ahead,
        **flag_arguments(memory),
    )
    return [Launch(triton_combine.combine_kernel, programs, arguments, warps)]


def sum_slots(
    memory: PeerMemory, index: torch.Tensor, out: torch.Tensor, *, num_experts: int, all_sms: int
) -> list[Launch]:
    """The end of a mega-kernel's call: tells that my rows are in their slots, waits for everyone's, and sums my slots.

    Args:
        index: int64 ``[T, K]``, the routing of my tokens.
        out: ``[T, H]``, the sums over slots.
        all_sms: SMs of the device.
    """
    hidden, nothing = memory.hidden_size, memory.error
    arguments = dict(
        rows=nothing,
        words=nothing,
        row_weights=nothing,
        index=index,
        n=index.shape[0],
        # Rows that mega-kernels write are BF16.
        slots=memory.slots.view(torch.bfloat16),
        slot_words=nothing,
        slot_weights=nothing,
        num_experts=num_experts,
        max_tokens=memory.max_tokens,
        pair_to_row=nothing,
        sizes=nothing,
        out=out,
        out_stride=out.stride(0),
        out_weights=nothing,
        pushers=0,
        K=memory.top_k,
        H=hidden,
        WORDS=1024,
        MOVE=True,
        WEIGHTS=False,
        FROM_SLOTS=True,
        STEPS=1,
        BLOCK=1024,
        COLS=1024,
        SUM_TOKENS=1,
        SUM_COLS=min(1024, triton.next_power_of_2(hidden)),
        AHEAD=1,
        **flag_arguments(memory),
    )
    programs = max(1, min(index.shape[0] * triton.cdiv(hidden, 1024), 16 * all_sms))
    return [Launch(triton_combine.combine_kernel, programs, arguments, 4)]
