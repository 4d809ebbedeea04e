"""The exchange over NVLink: ranks read each other's tokens and write each other's results, in symmetric memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from megamoe.comm.exchange import Exchange
from megamoe.comm.symm import SymmetricBuffer
from megamoe.errors import check_int, fail_type, fail_value
from megamoe.kernels.layout import ALIGN, align_up
from megamoe.plan import MemoryPlan
from megamoe.types import DispatchHandle, ExpertLayout, Fp8Tensor, Routing

if TYPE_CHECKING:
    from megamoe.kernels.peer_rows import RowTable

ROW_DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class PeerHandle(DispatchHandle):
    """Handle of ``PeerExchange``; R ranks, T tokens at most of any, e local experts.

    Attributes:
        counts, starts: of the layout.
        sizes: int32 ``[1 + R]``: rows in use, then the tokens of each rank.
        pair_to_row: int32 ``[R, T, K]``, pool row of each rank's (token, slot) here; negative: none.
        row_weights: float32 ``[P]``, the routing weights.
        topk_index: int64 ``[tokens, K]``, the routing of this rank's tokens.
    """

    counts: torch.Tensor
    starts: torch.Tensor
    sizes: torch.Tensor
    pair_to_row: torch.Tensor
    row_weights: torch.Tensor
    topk_index: torch.Tensor

    @property
    def layout(self) -> ExpertLayout:
        return ExpertLayout(self.counts, self.starts, self.row_weights.numel())


class PeerExchange(Exchange):
    """Expert parallelism over NVLink. Rank r holds experts ``r * e`` to ``(r + 1) * e - 1``.

    Two ways to size the pool of received rows:

    - ``exact``: the sizes are read back, one host synchronisation per dispatch. For training.
    - with a ``capacity``: none, and CUDA graphs can hold the calls. Rows beyond the capacity are lost, and an error
      says so; the default capacity suffices for any routing.

    Rows are BF16 or FP16, or FP8 with ``dispatch_fp8``. All ranks make the same calls in the same order.

    Args:
        num_experts: E, over all ranks.
        buffer: of the group; other layers may use it between calls.
        plan: of this layer; the buffer must cover it. Default: the buffer's own.
        capacity: rows of the pool, a multiple of 128; None: the most that any routing needs.
        num_sms: SMs that movements use while they wait and move, half of one for each program where tokens are few.
            None: 32; for few tokens, which is a matter of microseconds, up to three quarters of the device's.

    Attributes:
        exact: whether ``plan`` reads the sizes back. None: where gradients are recorded and no graph is captured.

    Raises:
        MegaMoEError: an argument breaks a rule.
    """

    handle_type = PeerHandle

    def __init__(
        self,
        num_experts: int,
        buffer: SymmetricBuffer,
        plan: MemoryPlan | None = None,
        *,
        capacity: int | None = None,
        num_sms: int | None = None,
    ):
        self.buffer, self.memory_plan = buffer, buffer.plan if plan is None else plan
        ranks = self.memory_plan.ep_size
        if num_experts != self.memory_plan.num_local_experts * ranks:
            fail_value(
                "num_experts",
                num_experts,
                f"must be the plan's {self.memory_plan.num_local_experts} experts on each of {ranks} ranks",
                "Plan the memory with this layer's config.",
            )
        self.num_experts, self.num_local_experts = num_experts, num_experts // ranks
        most = self.memory_plan.most_rows
        if capacity is not None:
            check_int("capacity", capacity, ALIGN)
            if capacity % ALIGN:
                fail_value("capacity", capacity, f"must be a multiple of {ALIGN}", f"Pass {align_up(capacity)}.")
        self.capacity = most if capacity is None else min(capacity, most)
        self.exact: bool | None = None
        if num_sms is not None:
            check_int("num_sms", num_sms, 1)
        properties = torch.cuda.get_device_properties(buffer.device) if buffer.device.type == "cuda" else None
        self._all_sms = properties.multi_processor_count if properties else num_sms or 1
        if num_sms is not None and num_sms > self._all_sms:
            fail_value("num_sms", num_sms, f"must not exceed the device's {self._all_sms}", "Lower it.")
        self.num_sms = num_sms
        self._memory = buffer.lend(self.memory_plan)

    # ------------------------------------------------------------ the protocol

    def plan(self, routing: Routing) -> PeerHandle:
        index, weights = self._checked(routing)
        exact = self._reads_back()
        table = self._empty_table(self.memory_plan.most_rows if exact else self.capacity)
        self._dispatch(None, (index, weights), table, None, None, index.shape[0], zero_padding=True)
        rows = self._read_back(table) if exact else self.capacity
        # A copy: results of operators share no memory with their arguments.
        return self._handle(table, index.clone(), rows)

    def send_rows(self, tokens: torch.Tensor, handle: PeerHandle) -> torch.Tensor:
        self._check_handle(handle)
        self._check_rows("hidden_states", tokens)
        rows = tokens.new_empty(handle.layout.num_rows, self.memory_plan.hidden_size)
        self._dispatch(tokens, None, handle, rows, None, tokens.shape[0], zero_padding=True)
        return rows

    def return_rows(self, rows: torch.Tensor, handle: PeerHandle, out_dtype: torch.dtype) -> torch.Tensor:
        self._check_handle(handle)
        self._check_rows("rows", rows)
        out = rows.new_empty(handle.topk_index.shape[0], self.memory_plan.hidden_size, dtype=out_dtype)
        self._combine(rows.contiguous(), None, handle, out, None)
        return out

    def send_weights(self, topk_weights: torch.Tensor, handle: PeerHandle) -> torch.Tensor:
        # They have come with the routing lists of ``plan``.
        return handle.row_weights.to(topk_weights.dtype, copy=True)

    def return_weights(self, row_weights: torch.Tensor, handle: PeerHandle) -> torch.Tensor:
        self._check_handle(handle)
        out = torch.empty(handle.topk_index.shape, dtype=torch.float32, device=row_weights.device)
        self._combine(None, row_weights.float().contiguous(), handle, None, out)
        return out.to(row_weights.dtype)

    def return_rows_and_weights(
        self, rows: torch.Tensor, row_weights: torch.Tensor, handle: PeerHandle, out_dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._check_handle(handle)
        self._check_rows("rows", rows)
        tokens = handle.topk_index.shape[0]
        out = rows.new_empty(tokens, self.memory_plan.hidden_size, dtype=out_dtype)
        out_weights = torch.empty(handle.topk_index.shape, dtype=torch.float32, device=rows.device)
        self._combine(rows.contiguous(), row_weights.float().contiguous(), handle, out, out_weights)
        return out, out_weights.to(row_weights.dtype)

    # ------------------------------------------------------------ for torch.compile

    def plan_like(self, routing: Routing, new_size: Callable[[], int]) -> PeerHandle:
        index, plan = routing.topk_index, self.memory_plan
        return PeerHandle(
            counts=index.new_empty(self.num_local_experts),
            starts=index.new_empty(self.num_local_experts),
            sizes=index.new_empty(1 + plan.ep_size, dtype=torch.int32),
            pair_to_row=index.new_empty(plan.ep_size, plan.max_tokens, plan.top_k, dtype=torch.int32),
            row_weights=index.new_empty(new_size() if self._reads_back() else self.capacity, dtype=torch.float32),
            topk_index=index.new_empty(index.shape),
        )

    def num_tokens(self, handle: PeerHandle) -> int:
        return handle.topk_index.shape[0]

    # ------------------------------------------------------------ without gradients, in one go

    def dispatch_once(
        self, tokens: torch.Tensor, routing: Routing, dtype: torch.dtype
    ) -> tuple[torch.Tensor | Fp8Tensor, PeerHandle]:
        """Routing and rows in one movement, for inference: no host synchronisation, no gradients.

        Args:
            tokens: ``[T, H]`` floating.
            routing: of these tokens.
            dtype: bfloat16 or float16, or float8_e4m3fn: rows are then cast once, at their source.

        Returns:
            rows ``[P, H]``, an ``Fp8Tensor`` with MN-major scales for FP8, and the handle. P is the capacity. Padding
            rows, and their weights in the handle, are undefined: GEMMs by ``ExpertLayout`` do not look at them.
        """
        index, weights = self._checked(routing)
        hidden, rows = self.memory_plan.hidden_size, self.capacity
        fp8 = dtype == torch.float8_e4m3fn
        if fp8 and not self.memory_plan.fp8:
            fail_value("dtype", dtype, "needs a plan with room for scales", 'Plan with precision="fp8".')
        if not fp8 and dtype not in ROW_DTYPES:
            fail_type("dtype", dtype, f"must be FP8 or one of {ROW_DTYPES}", "Use CollectiveExchange for others.")
        table = self._empty_table(rows)
        out = torch.empty(rows, hidden, dtype=dtype, device=tokens.device)
        scales = torch.empty(-(-hidden // 128), rows, device=tokens.device).t() if fp8 else None
        if not fp8:
            tokens = tokens.to(dtype)
        self._dispatch(tokens, (index, weights), table, out, scales, tokens.shape[0], zero_padding=False)
        handle = self._handle(table, index, rows)
        return (Fp8Tensor(out, scales, (1, 128)) if fp8 else out), handle

    def barrier(self) -> None:
        """All ranks meet on the device; the host does not wait."""
        from megamoe.kernels import peer_rows

        self.buffer.run(peer_rows.barrier(self._memory))

    # ------------------------------------------------------------ launches

    def _reads_back(self) -> bool:
        if self.exact is not None:
            return self.exact
        capturing = self.buffer.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        return torch.is_grad_enabled() and not capturing

    def _empty_table(self, rows: int) -> RowTable:
        from megamoe.kernels import peer_rows

        return peer_rows.empty_table(self._memory, self.num_local_experts, rows, self.buffer.device)

    def _handle(self, table: RowTable, index: torch.Tensor, rows: int) -> PeerHandle:
        return PeerHandle(table.counts, table.starts, table.sizes, table.pair_to_row, table.row_weights[:rows], index)

    def _dispatch(self, tokens, routing, table, rows, scales, num_tokens: int, zero_padding: bool) -> None:
        from megamoe.kernels import peer_rows

        if tokens is not None and tokens.stride(-1) != 1:
            tokens = tokens.contiguous()
        launches = peer_rows.dispatch(
            self._memory,
            tokens,
            routing,
            table,
            rows,
            scales,
            num_experts=self.num_experts,
            num_tokens=num_tokens,
            zero_padding=zero_padding,
            num_sms=self.num_sms,
            all_sms=self._all_sms,
        )
        self.buffer.run(launches)

    def _combine(self, rows, row_weights, handle: PeerHandle, out, out_weights) -> None:
        from megamoe.kernels import peer_rows

        launches = peer_rows.combine(
            self._memory,
            rows,
            row_weights,
            handle.topk_index,
            handle,
            out,
            out_weights,
            num_experts=self.num_experts,
            num_sms=self.num_sms,
            all_sms=self._all_sms,
        )
        self.buffer.run(launches)

    def _read_back(self, table: RowTable) -> int:
        """Rows in use: waits for the device. Raises if a wait has failed."""
        both = torch.cat([table.sizes[:1].long(), self._memory.error[:1]]).tolist()
        if both[1]:
            self.buffer.check()
        return both[0]

    # ------------------------------------------------------------ checks

    def _checked(self, routing: Routing) -> tuple[torch.Tensor, torch.Tensor]:
        index, plan = routing.topk_index, self.memory_plan
        if index.shape[1] != plan.top_k:
            fail_value("routing.topk_index.shape", list(index.shape), f"must be [T, {plan.top_k}]", "Plan for this K.")
        if index.shape[0] > plan.max_tokens:
            fail_value(
                "tokens",
                index.shape[0],
                f"must not exceed the {plan.max_tokens} that the exchange's memory is planned for",
                "Raise max_tokens_per_rank, or split the call.",
            )
        return index.contiguous(), routing.topk_weights.detach().float().contiguous()

    def _check_handle(self, handle: PeerHandle) -> None:
        plan = self.memory_plan
        expected = (plan.ep_size, plan.max_tokens, plan.top_k)
        if not isinstance(handle, PeerHandle) or tuple(handle.pair_to_row.shape) != expected:
            fail_value(
                "handle",
                type(handle).__name__ if not isinstance(handle, PeerHandle) else list(handle.pair_to_row.shape),
                f"must be a PeerHandle of ranks, tokens and slots {list(expected)}",
                "Pass the handle that this exchange's dispatch returned.",
            )

    def _check_rows(self, argument: str, rows: torch.Tensor) -> None:
        if rows.dtype not in ROW_DTYPES:
            fail_type(
                f"{argument}.dtype",
                rows.dtype,
                f"must be one of {', '.join(map(str, ROW_DTYPES))} over NVLink",
                "Cast it, or use CollectiveExchange.",
            )
        if rows.shape[1] != self.memory_plan.hidden_size:
            fail_value(
                f"{argument}.shape",
                list(rows.shape),
                f"must be [any, {self.memory_plan.hidden_size}]",
                "Check the plan.",
            )
