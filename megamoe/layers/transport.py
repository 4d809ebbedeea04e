"""Which exchange a layer's rows take, whether the mega-kernel serves it, and the memory that it shares with others."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist

from megamoe.comm.collective import CollectiveExchange
from megamoe.comm.exchange import Exchange, LocalExchange
from megamoe.comm.peer import PeerExchange
from megamoe.comm.symm import SymmetricBuffer, acquire_buffer, release_buffer
from megamoe.config import MoEConfig
from megamoe.errors import MegaMoEValueError, check_choice, fail_value
from megamoe.layers import paths
from megamoe.layers.fused import FusedExperts, device_obstacle, fused_experts
from megamoe.layers.paths import PathChoice
from megamoe.plan import plan_memory

PATHS = ("collective", "staged", "fused", "auto")

_logger = logging.getLogger(__name__)


class Transport:
    """Makes the exchanges of a layer.

    Args:
        config: the layer.
        group: the expert-parallel group, or None for one rank, where rows do not travel.
        path: ``collective`` (torch.distributed), ``staged`` (NVLink), ``fused`` (the mega-kernel where it can serve,
            else as ``staged``), or ``auto`` (what ``choose_path`` says).
        device, dtype: of the parameters.

    Attributes:
        choices: how ``inference`` and ``training`` go, and ``shared`` experts that are to be fused, once ``make`` was
            called.
        shared_experts: S, as how many experts the shared one is computed with the routed ones in inference; 0: it is
            not.
        exchange_with_shared: between the routed and, after those of each rank, the S shared ones; None where S is 0.
        obstacle: why the mega-kernel does not run on the device, where the path asks for it.

    Raises:
        MegaMoEError: an argument breaks a rule, or ``staged`` or ``fused`` cannot work here: they need GPUs and a
            config with ``max_tokens_per_rank``.
    """

    def __init__(
        self,
        config: MoEConfig,
        group: dist.ProcessGroup | None,
        path: str,
        device: torch.device,
        dtype: torch.dtype = torch.bfloat16,
    ):
        check_choice("path", path, PATHS)
        self._config, self._group, self._path, self._dtype = config, group, path, dtype
        self._buffer: SymmetricBuffer | None = None
        self._fused: FusedExperts | None = None
        self.shared_experts = 0
        self.exchange_with_shared: Exchange | None = None
        self.choices: dict[str, PathChoice] = {}
        self.obstacle = ""
        if path == "collective":
            return
        if path != "auto" and group is not None:
            if device.type not in ("cuda", "meta"):
                rule = f'must be a GPU for path="{path}"'
                fail_value("device", str(device), rule, 'Pass device="cuda", or another path.')
            if config.max_tokens_per_rank is None:
                fail_value(
                    "max_tokens_per_rank",
                    None,
                    f'must be set for path="{path}": the memory that ranks share depends on it',
                    "Set it in the config.",
                )
        if device.type == "meta" and (path != "auto" or torch.cuda.is_available()):
            device = torch.device("cuda")
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self._device = device
        if path != "staged":
            self.obstacle = device_obstacle(device, config.precision == "fp8")

    def make(self, num_experts: int) -> Exchange:
        """An exchange between ``num_experts`` physical experts, a multiple of the ranks. A collective.

        Raises:
            MegaMoEError: on all ranks, if they cannot share memory and no other path is allowed: see
                ``SymmetricBuffer``.
        """
        ranks = 1 if self._group is None else dist.get_world_size(self._group)
        shared, apart = paths.fused_shared_experts(self._config, ranks, num_experts=num_experts)
        sizes = dict(num_experts=num_experts, shared_experts=shared)
        choices, plan, buffer = self._choose(ranks, sizes), None, None
        wanted = {choice.path for choice in choices.values()} & ({"fused"} if ranks == 1 else {"staged", "fused"})
        if wanted:
            plan = plan_memory(self._config, ranks, **sizes)
            try:
                buffer = acquire_buffer(plan, self._group, device=self._device)
            except MegaMoEValueError as error:
                if self._path != "auto":
                    raise
                # All ranks raise together, and none has got memory.
                choices = self._choose(ranks, sizes, f"ranks cannot share memory ({error})")
        # The one before only now, so that it is found again.
        self.close()
        self._buffer, self.shared_experts = buffer, shared
        if buffer is not None and choices["inference"].path == "fused":
            self._fused = fused_experts(buffer, plan, paths.kernel_width(self._config))
        if self._config.fuse_shared_experts:
            choices["shared"] = paths.choose_shared(apart)
        self._log(choices)
        if shared:
            self.exchange_with_shared = self._exchange(ranks, num_experts, shared)
        return self._exchange(ranks, num_experts, 0)

    def _exchange(self, ranks: int, num_experts: int, shared: int) -> Exchange:
        """With ``shared`` more experts on each rank."""
        total = num_experts + ranks * shared
        if self._group is None:
            return LocalExchange(total)
        if self._buffer is None:
            return CollectiveExchange(total, self._group)
        plan = plan_memory(self._config, ranks, num_experts=num_experts, shared_experts=shared)
        return PeerExchange(total, self._buffer, plan)

    def fused_for(
        self, hidden_states: torch.Tensor, dtype: torch.dtype, needs_grad: bool, with_shared: bool = False
    ) -> FusedExperts | None:
        """The mega-kernel, where it serves a call; its GEMMs would be in ``dtype``.

        If shared experts are to be fused, it serves calls with them alone.
        """
        fused = self._fused
        if with_shared != (self.shared_experts > 0):
            return None
        if fused is None or needs_grad or dtype != torch.bfloat16 or hidden_states.device != fused.buffer.device:
            return None
        return fused

    def close(self) -> None:
        """Gives shared memory back; the exchange cannot be used any more. On all ranks."""
        buffer, self._buffer, self._fused = self._buffer, None, None
        self.exchange_with_shared, self.shared_experts = None, 0
        if buffer is not None:
            release_buffer(buffer)

    def explain(self) -> str:
        """How inference and training go, and why."""
        return paths.explain(self.choices)

    def _choose(self, ranks: int, sizes: dict[str, int], unreachable: str = "") -> dict[str, PathChoice]:
        if self._path in ("collective", "staged"):
            return dict.fromkeys(("inference", "training"), PathChoice(self._path, "as asked for"))
        options = dict(device_obstacle=self.obstacle, **sizes)
        choices = {}
        for kind, needs_grad in (("inference", False), ("training", True)):
            if self._path == "fused":
                # Autocast may make fp32 rows BF16.
                dtype = torch.bfloat16 if self._dtype == torch.float32 else self._dtype
                obstacle = paths.without_fusion(self._config, ranks, dtype, needs_grad, **options)
                choices[kind] = PathChoice("staged", obstacle) if obstacle else PathChoice("fused", "as asked for")
            else:
                choices[kind] = paths.choose_path(
                    self._config,
                    ranks=ranks,
                    device=self._device.type,
                    dtype=self._dtype,
                    needs_grad=needs_grad,
                    unreachable=unreachable,
                    **options,
                )
        return choices

    def _log(self, choices: dict[str, PathChoice]) -> None:
        """Once, and again if they change."""
        if choices != self.choices and (self._path in ("fused", "auto") or "shared" in choices):
            missed = self._path == "fused" and choices["inference"].path != "fused"
            missed |= "shared" in choices and choices["shared"].path != "fused"
            level = logging.WARNING if missed else logging.INFO
            _logger.log(level, 'MoE(path="%s"): %s', self._path, "; ".join(paths.explain(choices).splitlines()))
        self.choices = choices
