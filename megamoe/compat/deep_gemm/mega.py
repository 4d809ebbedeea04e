"""DeepGEMM's mega-MoE for Hopper on megamoe's kernel, and the weight transform of its kernels for Blackwell.

Tokens, scales and routing are written into a ``SymmBuffer`` before every call. Calls are for inference, and every rank
of the buffer's group makes them equally often, also without tokens.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megamoe.comm.symm import SymmetricBuffer
from megamoe.compat.deep_gemm.missing import MEGA, missing
from megamoe.compat.deep_gemm.operands import Scaled, check_pair
from megamoe.config import MoEConfig
from megamoe.errors import check_choice, check_int, check_number, check_tensor, fail_type, fail_value
from megamoe.kernels import quant, weights
from megamoe.kernels.layout import align_up
from megamoe.kernels.mega_plan import Weight
from megamoe.layers.fused import BLOCK, FusedExperts, check_weights, fused_experts
from megamoe.plan import plan_memory
from megamoe.types import Fp8Tensor

BF16, FP32, E4M3 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
GROUP = 128
RECIPE = (128, 128, 128)
NAMES = ("l1_weights", "l2_weights")


def transform_weights_for_mega_moe(
    l1_weights: weights.Weight, l2_weights: weights.Weight, activation: str = "swiglu"
) -> tuple[weights.Weight, weights.Weight]:
    """See ``megamoe.kernels.weights.transform_weights_for_mega_moe``; the activation is always SwiGLU."""
    check_choice("activation", activation, ("swiglu",))
    return weights.transform_weights_for_mega_moe(l1_weights, l2_weights)


def transform_weights_for_mega_moe_sm90(l1_weights: Scaled, l2_weights: Scaled) -> tuple[Scaled, Scaled]:
    """The weights as ``fp8_mega_moe`` takes them here: unchanged, and no copies.

    DeepGEMM's kernel needs gate and up interleaved; this one does not. It takes weights that its function has made too:
    see ``interleaved`` of ``fp8_mega_moe``.

    Args:
        l1_weights: e4m3 ``[e, 2I, H]`` and fp32 scales ``[e, 2I / 128, H / 128]``; l2_weights: ``[e, H, I]`` likewise.
    """
    return check_pair(NAMES[0], l1_weights), check_pair(NAMES[1], l2_weights)


# ---------------------------------------------------------------- the buffer


class SymmBuffer:
    """Memory that the ranks of a group share for calls, and the inputs of this rank's next call as views of it.

    Construction is a collective, outside any graph capture. Layers that run one after another share a buffer. Views may
    be written once the call before has been launched, on the same stream.

    Args:
        group: the expert-parallel group, or None for one rank.
        num_experts: E, of all ranks.
        num_max_tokens_per_rank: rounded up to a multiple of 128, T.
        num_topk: K, up to 16.
        hidden, intermediate_hidden: H and I, multiples of 128.
        precision: ``fp8`` or ``bf16``.

    Attributes:
        x: e4m3 ``[T, H]``; x_sf: fp32 ``[T, H / 128]``, the scales of 128 columns each. Or bf16 ``[T, H]`` and None.
        topk_idx: int64 ``[T, K]``, -1 = no expert; topk_weights: fp32 ``[T, K]``.
        num_max_tokens_per_rank: T.

    Raises:
        MegaMoEError: an argument breaks a rule, or the ranks cannot share memory.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        num_experts: int,
        num_max_tokens_per_rank: int,
        num_topk: int,
        hidden: int,
        intermediate_hidden: int,
        precision: str = "fp8",
    ):
        check_int("num_max_tokens_per_rank", num_max_tokens_per_rank, 1)
        ranks = 1 if group is None else dist.get_world_size(group)
        tokens = self.num_max_tokens_per_rank = align_up(num_max_tokens_per_rank)
        config = MoEConfig(hidden, intermediate_hidden, num_experts, num_topk, precision=precision)
        plan = plan_memory(config, ranks, tokens)
        self.group, self.intermediate_hidden = group, intermediate_hidden
        self.shared = SymmetricBuffer(plan, group if ranks > 1 else None)
        self.calls().scratch()
        self.x = self.shared.region("rows", tokens * hidden * (1 if plan.fp8 else 2))
        self.x = self.x.view(E4M3 if plan.fp8 else BF16).view(tokens, hidden)
        self.x_sf = self.shared.region("scales").view(FP32).view(tokens, hidden // GROUP) if plan.fp8 else None
        shape, device = (tokens, num_topk), self.shared.device
        self.topk_idx = torch.full(shape, -1, dtype=torch.int64, device=device)
        self.topk_weights = torch.zeros(shape, device=device)

    def calls(self, tokens_bound: int | None = None) -> FusedExperts:
        """The kernel's calls on this memory."""
        return fused_experts(self.shared, self.shared.plan, self.intermediate_hidden, tokens_bound=tokens_bound)

    def destroy(self) -> None:
        """Gives the memory back, on all ranks."""
        self.shared.close()


SM90SymmBuffer = SymmBuffer


def get_symm_buffer_for_sm90_mega_moe(
    group: dist.ProcessGroup | None,
    num_experts: int,
    num_max_tokens_per_rank: int,
    num_topk: int,
    hidden: int,
    intermediate_hidden: int,
    use_fp8_dispatch: bool = True,
    activation: str = "swiglu",
) -> SymmBuffer:
    """A ``SymmBuffer``; tokens always travel in FP8."""
    check_choice("activation", activation, ("swiglu",))
    if not use_fp8_dispatch:
        fail_value("use_fp8_dispatch", use_fp8_dispatch, "must be True", "Tokens travel in FP8.")
    return SymmBuffer(group, num_experts, num_max_tokens_per_rank, num_topk, hidden, intermediate_hidden)


def get_symm_buffer_for_mega_moe(
    group: dist.ProcessGroup | None,
    num_experts: int,
    num_max_tokens_per_rank: int,
    num_topk: int,
    hidden: int,
    intermediate_hidden: int,
    use_fp8_dispatch: bool | None = None,
    mma_type: str = "fp8xfp4",
    activation: str = "swiglu",
) -> SymmBuffer:
    """As ``get_symm_buffer_for_sm90_mega_moe``. ``mma_type``: FP8 activations, on Hopper with FP8 weights, or BF16."""
    check_choice("mma_type", mma_type, ("fp8xfp4", "fp8xfp8", "bf16xbf16"))
    if mma_type == "bf16xbf16":
        check_choice("activation", activation, ("swiglu",))
        if use_fp8_dispatch:
            fail_value("use_fp8_dispatch", True, f"must not be True for {mma_type}", "Tokens travel in BF16.")
        sizes = num_experts, num_max_tokens_per_rank, num_topk, hidden, intermediate_hidden
        return SymmBuffer(group, *sizes, precision="bf16")
    return get_symm_buffer_for_sm90_mega_moe(
        group,
        num_experts,
        num_max_tokens_per_rank,
        num_topk,
        hidden,
        intermediate_hidden,
        use_fp8_dispatch is None or use_fp8_dispatch,
        activation,
    )


def mega_moe_pre_dispatch_sm90(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    buf_x: torch.Tensor,
    buf_x_sf: torch.Tensor,
    buf_topk_idx: torch.Tensor,
    buf_topk_weights: torch.Tensor,
    num_tokens: int,
    group_size: int = 128,
    routed_scaling_factor: float = 1.0,
) -> None:
    """Fills a buffer's views: tokens cast to FP8, routing, and no experts for the tokens beyond.

    Args:
        x: bf16 ``[n, H]``; topk_idx: int32 or int64 ``[n, K]``; topk_weights: fp32 ``[n, K]``.
        buf_x, buf_x_sf, buf_topk_idx, buf_topk_weights: views of a ``SymmBuffer``, ``[T, ...]``.
        num_tokens: the first rows of ``x`` that are tokens.
        group_size: columns that share a scale: 128.
        routed_scaling_factor: multiplies the weights.

    Raises:
        MegaMoEError: a shape, dtype or device does not fit, or there are too many tokens.
    """
    check_tensor("x", x, (None, None), (BF16,))
    (rows, hidden), device = x.shape, x.device
    check_tensor("topk_idx", topk_idx, (rows, None), (torch.int32, torch.int64), device)
    top_k = topk_idx.shape[1]
    check_tensor("topk_weights", topk_weights, (rows, top_k), (FP32,), device)
    check_tensor("buf_x", buf_x, (None, hidden), (E4M3,), device)
    tokens = buf_x.shape[0]
    check_tensor("buf_x_sf", buf_x_sf, (tokens, -(-hidden // GROUP)), (FP32,), device)
    check_tensor("buf_topk_idx", buf_topk_idx, (tokens, top_k), (torch.int64,), device)
    check_tensor("buf_topk_weights", buf_topk_weights, (tokens, top_k), (FP32,), device)
    check_int("num_tokens", num_tokens, 0)
    if num_tokens > min(rows, tokens):
        fail_value("num_tokens", num_tokens, f"must not exceed x's {rows} rows and the buffer's {tokens}", "Lower it.")
    if group_size != GROUP:
        fail_value("group_size", group_size, f"must be {GROUP}", "Hopper's kernel reads such scales.")
    n = num_tokens
    if n:
        quant.quantize_rowwise(x[:n], out=Fp8Tensor(buf_x[:n], buf_x_sf[:n], (1, GROUP)))
    buf_topk_idx[:n].copy_(topk_idx[:n])
    buf_topk_idx[n:].fill_(-1)
    torch.mul(topk_weights[:n], routed_scaling_factor, out=buf_topk_weights[:n])
    buf_topk_weights[n:].zero_()


# ---------------------------------------------------------------- the call


@torch.compiler.disable
@torch.no_grad()
def fp8_mega_moe(
    y: torch.Tensor,
    l1_weights: Scaled,
    l2_weights: Scaled,
    sym_buffer: SymmBuffer,
    cumulative_local_expert_recv_stats: torch.Tensor | None = None,
    recipe: tuple[int, int, int] = RECIPE,
    activation: str = "swiglu",
    activation_clamp: float | None = None,
    fast_math: bool = True,
    num_tokens_bound: int | None = None,
    interleaved: bool = False,
) -> None:
    """Writes the experts' weighted sums of the buffer's first n tokens into ``y``.

    Args:
        y: bf16 ``[n, H]`` with contiguous columns, n up to the buffer's tokens; zeros for tokens without experts.
        l1_weights: e4m3 ``[e, 2I, H]``, gate rows, then up rows, and fp32 scales ``[e, 2I / 128, H / 128]``, likewise;
            l2_weights: ``[e, H, I]`` and ``[e, H / 128, I / 128]``. All contiguous.
        sym_buffer: with this call's inputs; they stay.
        cumulative_local_expert_recv_stats: int32 ``[e]``: the rows that each local expert received are added.
        recipe, activation: as they are by default.
        activation_clamp: gate to at most this, up to within plus and minus it.
        fast_math: changes nothing.
        num_tokens_bound: tokens at most of any rank in this call, for the choice of settings; default: the buffer's.
        interleaved: the rows of ``l1_weights`` are gate and up in turn, 8 at a time, as DeepGEMM's own
            ``transform_weights_for_mega_moe_sm90`` makes them. A plain copy is made by the first call, outside graph
            captures, and kept with them: as many bytes again.

    Raises:
        MegaMoEError: before anything is launched: a shape, dtype, device or stride does not fit, or too many tokens.
        ExchangeError: an earlier call failed.
    """
    if tuple(recipe) != RECIPE:
        fail_value("recipe", tuple(recipe), f"must be {RECIPE} on Hopper", "Cast with per_block_cast_to_fp8.")
    up, down = (
        Fp8Tensor(*check_pair(name, pair), BLOCK) for name, pair in zip(NAMES, (l1_weights, l2_weights), strict=True)
    )
    stats = cumulative_local_expert_recv_stats
    _call(E4M3, y, up, down, sym_buffer, stats, activation, activation_clamp, num_tokens_bound, interleaved)


@torch.compiler.disable
@torch.no_grad()
def bf16_mega_moe(
    y: torch.Tensor,
    l1_weights: torch.Tensor,
    l2_weights: torch.Tensor,
    sym_buffer: SymmBuffer,
    cumulative_local_expert_recv_stats: torch.Tensor | None = None,
    activation: str = "swiglu",
    activation_clamp: float | None = None,
    fast_math: bool = True,
    num_tokens_bound: int | None = None,
    interleaved: bool = True,
) -> None:
    """``fp8_mega_moe`` in BF16, on a buffer for ``bf16xbf16``; other arguments and errors are as there.

    Args:
        l1_weights: bf16 ``[e, 2I, H]``; l2_weights: bf16 ``[e, H, I]``. Both contiguous.
        interleaved: ``l1_weights`` is one that ``transform_weights_for_mega_moe`` has made, of which a plain copy is
            kept. False: gate rows, then up rows, and no copy.
    """
    stats = cumulative_local_expert_recv_stats
    _call(
        BF16, y, l1_weights, l2_weights, sym_buffer, stats, activation, activation_clamp, num_tokens_bound, interleaved
    )


def _call(
    dtype: torch.dtype,
    y: torch.Tensor,
    up: Weight,
    down: Weight,
    sym_buffer: SymmBuffer,
    stats: torch.Tensor | None,
    activation: str,
    activation_clamp: float | None,
    num_tokens_bound: int | None,
    interleaved: bool,
) -> None:
    """A call with tokens and weights in ``dtype``, checked."""
    if not isinstance(sym_buffer, SymmBuffer):
        kind = type(sym_buffer).__name__
        fail_type("sym_buffer", kind, "must be a SymmBuffer", "Call get_symm_buffer_for_mega_moe first.")
    if sym_buffer.x.dtype != dtype:
        remedy = "Get a buffer with that mma_type, or call the other function."
        fail_type("sym_buffer.x.dtype", sym_buffer.x.dtype, f"must be {dtype}", remedy)
    shared, tokens = sym_buffer.shared, sym_buffer.num_max_tokens_per_rank
    plan, device = shared.plan, shared.device
    check_tensor("y", y, (None, plan.hidden_size), (BF16,), device)
    n = y.shape[0]
    if n and y.stride(1) != 1:
        fail_value("y.stride()", y.stride(), "must be 1 along H", "Pass a row-major tensor.")
    bound = tokens if num_tokens_bound is None else num_tokens_bound
    check_int("num_tokens_bound", bound, 0)
    if n > tokens:
        fail_value("y.shape[0]", n, f"must not exceed the buffer's {tokens} tokens", "Make a larger buffer.")
    if not n <= bound <= tokens:
        fail_value("num_tokens_bound", bound, f"must be within y's {n} rows and the buffer's {tokens}", "Pass None.")
    check_choice("activation", activation, ("swiglu",))
    if activation_clamp is not None:
        check_number("activation_clamp", activation_clamp, 0.0)
    check_weights(up, down, plan, device, NAMES)
    (codes, up_scales), (down_codes, down_scales) = (
        (weight.codes, weight.scales) if isinstance(weight, Fp8Tensor) else (weight, None) for weight in (up, down)
    )
    name = NAMES[1] if down_scales is None else f"{NAMES[1]}.codes"
    check_tensor(name, down_codes, (plan.num_local_experts, plan.hidden_size, sym_buffer.intermediate_hidden))
    if stats is not None:
        check_tensor("cumulative_local_expert_recv_stats", stats, (plan.num_local_experts,), (torch.int32,), device)
    if interleaved:
        codes = _plain_codes(codes)
    index, routing_weights = sym_buffer.topk_idx[:n], sym_buffer.topk_weights[:n]
    layout = sym_buffer.calls(num_tokens_bound).run(
        None, index, routing_weights, (codes, up_scales), (down_codes, down_scales), y, activation, activation_clamp
    )
    if stats is not None:
        stats.add_(layout.counts)


@dataclass
class _Plain:
    storage: weakref.ref
    version: int | None
    codes: torch.Tensor


_plain: dict[tuple, _Plain] = {}


def _plain_codes(codes: torch.Tensor) -> torch.Tensor:
    """The copy of interleaved ``codes``, or BF16 weights, gate rows, then up rows.

    It is written anew, in place, when they have changed.
    """
    storage = codes.untyped_storage()
    key = (id(storage), codes.storage_offset(), codes.shape)
    version = None if codes.is_inference() else codes._version
    found = _plain.get(key)
    if found is not None and found.storage() is storage and found.version == version:
        return found.codes
    if codes.is_cuda and torch.cuda.is_current_stream_capturing():
        fail_value("interleaved", True, "needs its copy of the weights before a capture", "Make the call once before.")
    # As bytes: not every operator that moves rows knows FP8.
    rows = codes.view(torch.uint8) if codes.dtype == E4M3 else codes
    plain = weights.deinterleave_gate_up(rows).view(codes.dtype)
    if found is not None and found.storage() is storage:
        found.codes.copy_(plain)
        found.version = version
        return found.codes

    def forget(dead: weakref.ref) -> None:
        # By now the id may be that of another storage.
        if key in _plain and _plain[key].storage is dead:
            del _plain[key]

    _plain[key] = _Plain(weakref.ref(storage, forget), version, plain)
    return plain


def __getattr__(name: str) -> Callable:
    return missing(name, MEGA, __name__)
