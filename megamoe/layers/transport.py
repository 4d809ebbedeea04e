"""Which exchange a layer's rows take, and the memory that it shares with other ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megamoe.comm.collective import CollectiveExchange
from megamoe.comm.exchange import Exchange, LocalExchange
from megamoe.comm.peer import PeerExchange
from megamoe.comm.symm import SymmetricBuffer, acquire_buffer, release_buffer
from megamoe.config import MoEConfig
from megamoe.errors import check_choice, fail_value
from megamoe.plan import plan_memory

PATHS = ("collective", "staged")


class Transport:
    """Makes the exchanges of a layer.

    Args:
        config: the layer.
        group: the expert-parallel group, or None for one rank, where rows do not travel.
        path: ``collective`` (torch.distributed) or ``staged`` (NVLink).
        device: of the parameters.

    Raises:
        MegaMoEError: an argument breaks a rule, or ``staged`` cannot work here: it needs GPUs and a config with
            ``max_tokens_per_rank``.
    """

    def __init__(self, config: MoEConfig, group: dist.ProcessGroup | None, path: str, device: torch.device):
        check_choice("path", path, PATHS)
        self._config, self._group = config, group
        self._peer = path == "staged" and group is not None
        self._buffer: SymmetricBuffer | None = None
        if not self._peer:
            return
        if device.type not in ("cuda", "meta"):
            fail_value("device", str(device), 'must be a GPU for path="staged"', 'Pass device="cuda", or another path.')
        self._device = device if device.index is not None else torch.device("cuda", torch.cuda.current_device())
        if config.max_tokens_per_rank is None:
            fail_value(
                "max_tokens_per_rank",
                None,
                'must be set for path="staged": the memory that ranks share depends on it',
                "Set it in the config.",
            )

    def make(self, num_experts: int) -> Exchange:
        """An exchange between ``num_experts`` physical experts, a multiple of the ranks. A collective.

        Raises:
            MegaMoEError: on all ranks, if they cannot share memory: see ``SymmetricBuffer``.
        """
        if self._group is None:
            return LocalExchange(num_experts)
        if not self._peer:
            return CollectiveExchange(num_experts, self._group)
        plan = plan_memory(self._config, dist.get_world_size(self._group), num_experts=num_experts)
        buffer = acquire_buffer(plan, self._group, device=self._device)
        # The one before only now, so that it is found again.
        self.close()
        self._buffer = buffer
        return PeerExchange(num_experts, buffer, plan)

    def close(self) -> None:
        """Gives shared memory back; the exchange cannot be used any more. On all ranks."""
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            release_buffer(buffer)
