"""The exchange over ``torch.distributed`` collectives: gloo on CPUs, NCCL on GPUs, within and across nodes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megamoe.comm import exchange_ops
from megamoe.comm.exchange import Exchange
from megamoe.comm.failures import named_collective
from megamoe.errors import fail_value
from megamoe.kernels import local_rows
from megamoe.kernels.layout import invert_rows
from megamoe.types import DispatchHandle, ExpertLayout, Routing


@dataclass(frozen=True)
class CollectiveHandle(DispatchHandle):
    """Handle of ``CollectiveExchange``. A token travels once to each rank that needs it, its results once per slot.

    S tokens sent, S' received; N (token, slot) pairs sent, Q received. Splits have one entry per rank.

    Attributes:
        counts, starts: of the layout.
        sent_tokens: int64 ``[S]``, token of each row sent, by (destination, token).
        row_to_received: int64 ``[P]``, received token of each pool row, -1 = padding.
        sent_pairs: int64 ``[N]``, t * K + k of each pair sent, by (destination, token, slot).
        pair_to_row: int64 ``[Q]``, pool row of each received pair, by (source, token, slot).
        slot_to_pair: int64 ``[T, K]``, position in ``sent_pairs``, -1 = no expert.
        splits: int64 ``[4, R]`` on the CPU: tokens and pairs sent to each rank, tokens and pairs received from each.
    """

    counts: torch.Tensor
    starts: torch.Tensor
    sent_tokens: torch.Tensor
    row_to_received: torch.Tensor
    sent_pairs: torch.Tensor
    pair_to_row: torch.Tensor
    slot_to_pair: torch.Tensor
    splits: torch.Tensor

    @property
    def layout(self) -> ExpertLayout:
        return ExpertLayout(self.counts, self.starts, self.row_to_received.numel())

    @property
    def token_splits(self) -> tuple[list[int], list[int]]:
        """Tokens sent to and received from each rank."""
        return self.splits[0].tolist(), self.splits[2].tolist()

    @property
    def pair_splits(self) -> tuple[list[int], list[int]]:
        """(token, slot) pairs sent to and received from each rank."""
        return self.splits[1].tolist(), self.splits[3].tolist()


class CollectiveExchange(Exchange):
    """Expert parallelism over a process group with ``all_to_all_single`` and uneven splits.

    Rank r holds experts ``r * e`` to ``(r + 1) * e - 1``. One host synchronisation per dispatch (the split sizes); none
    in combine and in the backward pass. Waits are bounded by the timeout of the process group.

    Args:
        num_experts: E, a multiple of the group's size.
        group: the expert-parallel group.
    """

    handle_type = CollectiveHandle

    def __init__(self, num_experts: int, group: dist.ProcessGroup):
        self.group = group
        self.world_size = dist.get_world_size(group)
        if num_experts % self.world_size:
            fail_value(
                "num_experts",
                num_experts,
                f"must be a multiple of the expert-parallel group's {self.world_size} ranks",
                "Use a group whose size divides the number of experts.",
            )
        self.num_experts = num_experts
        self.num_local_experts = num_experts // self.world_size
        self.name = exchange_ops.register(self, f"collective/{num_experts}/{group.group_name}")

    def plan(self, routing: Routing) -> CollectiveHandle:
        index = routing.topk_index
        num_tokens, top_k = index.shape
        ranks, local = self.world_size, self.num_local_experts

        valid = (index >= 0) & (index < self.num_experts)
        destination = torch.where(valid, index // local, ranks)
        needed = index.new_zeros(num_tokens, ranks + 1, dtype=torch.bool).scatter_(1, destination, True)[:, :ranks]
        pair_counts = torch.zeros(ranks + 1, dtype=torch.int64, device=index.device)
        pair_counts.scatter_add_(0, destination.flatten(), torch.ones_like(index).flatten())
        sends = torch.stack([needed.sum(dim=0), pair_counts[:ranks]], dim=1)
        receives = torch.empty_like(sends)
        self._all_to_all(receives, sends, None, None, "sizes")
        splits = torch.cat([sends, receives], dim=1).t().contiguous().cpu()
        token_sends, pair_sends, _, pair_receives = splits.tolist()

        # A stable sort with the known count in place of nonzero(), which would wait for the device again.
        unneeded = (~needed.t()).flatten().to(torch.uint8)
        sent_tokens = torch.argsort(unneeded, stable=True)[: sum(token_sends)] % max(num_tokens, 1)
        by_destination = torch.argsort(destination.flatten(), stable=True)
        sent_pairs = by_destination[: sum(pair_sends)]
        slot_to_pair = invert_rows(sent_pairs, num_tokens * top_k).view(num_tokens, top_k)

        # Of each pair: its token's position among those sent to the same rank, and the expert there.
        position = (needed.cumsum(dim=0) - 1).flatten()
        pair_destination = destination.flatten()[sent_pairs]
        pair_position = position[sent_pairs // top_k * ranks + pair_destination]
        message = pair_position * local + index.flatten()[sent_pairs] % local
        received = self._exchange(message, pair_sends, pair_receives, "routing")

        source_starts = receives[:, 0].cumsum(0) - receives[:, 0]
        source = torch.repeat_interleave(receives[:, 1], output_size=sum(pair_receives))
        received_token = received // local + source_starts[source]
        layout, pair_to_row, row_to_pair = local_rows.layout_both_ways(received % local, local)
        row_to_received = torch.where(row_to_pair >= 0, local_rows.permute(received_token, row_to_pair), -1)
        return CollectiveHandle(
            counts=layout.counts,
            starts=layout.starts,
            sent_tokens=sent_tokens,
            row_to_received=row_to_received,
            sent_pairs=sent_pairs,
            pair_to_row=pair_to_row,
            slot_to_pair=slot_to_pair,
            splits=splits,
        )

    def send_rows(self, tokens: torch.Tensor, handle: CollectiveHandle) -> torch.Tensor:
        sends, receives = handle.token_splits
        received = self._exchange(tokens[handle.sent_tokens], sends, receives, "dispatch")
        return local_rows.permute(received, handle.row_to_received)

    def return_rows(self, rows: torch.Tensor, handle: CollectiveHandle, out_dtype: torch.dtype) -> torch.Tensor:
        sends, receives = handle.pair_splits
        pairs = self._exchange(rows[handle.pair_to_row], receives, sends, "combine")
        return local_rows.combine_slots(pairs, handle.slot_to_pair, out_dtype)

    def send_weights(self, topk_weights: torch.Tensor, handle: CollectiveHandle) -> torch.Tensor:
        sends, receives = handle.pair_splits
        received = self._exchange(topk_weights.flatten()[handle.sent_pairs], sends, receives, "dispatch weights")
        out = received.new_zeros(handle.layout.num_rows)
        out[handle.pair_to_row] = received
        return out

    def return_weights(self, row_weights: torch.Tensor, handle: CollectiveHandle) -> torch.Tensor:
        sends, receives = handle.pair_splits
        pairs = self._exchange(row_weights[handle.pair_to_row], receives, sends, "combine weights")
        return local_rows.permute(pairs, handle.slot_to_pair.flatten()).view(handle.slot_to_pair.shape)

    def plan_like(self, routing: Routing, new_size: Callable[[], int]) -> CollectiveHandle:
        index = routing.topk_index
        return CollectiveHandle(
            counts=index.new_empty(self.num_local_experts),
            starts=index.new_empty(self.num_local_experts),
            sent_tokens=index.new_empty(new_size()),
            row_to_received=index.new_empty(new_size()),
            sent_pairs=index.new_empty(new_size()),
            pair_to_row=index.new_empty(new_size()),
            slot_to_pair=index.new_empty(index.shape),
            splits=torch.empty(4, self.world_size, dtype=torch.int64, device="cpu"),
        )

    def num_tokens(self, handle: CollectiveHandle) -> int:
        return handle.slot_to_pair.shape[0]

    def _exchange(self, rows: torch.Tensor, sends: list[int], receives: list[int], phase: str) -> torch.Tensor:
        out = rows.new_empty(sum(receives), *rows.shape[1:])
        self._all_to_all(out, rows.contiguous(), receives, sends, phase)
        return out

    def _all_to_all(self, out, rows, receives, sends, phase: str) -> None:
        with named_collective(f"expert exchange, phase {phase!r}", self.group):
            dist.all_to_all_single(out, rows, receives, sends, group=self.group)
