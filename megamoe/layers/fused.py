"""``mega_moe``: routed experts by the mega-kernel, from tokens to their outputs, over all ranks of a buffer.

Calls on a buffer are ordered, so that all of them share one piece of scratch memory: it is allocated when first needed,
hangs on the buffer and goes with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from megamoe.comm import exchange_ops
from megamoe.comm.symm import SymmetricBuffer
from megamoe.errors import FLOATING, check_choice, check_int, check_number, check_tensor, fail_type, fail_value
from megamoe.kernels.gemm_checks import check_contiguous, check_fp8
from megamoe.kernels.gemm_swiglu import ACTIVATIONS
from megamoe.kernels.mega_plan import MegaPlan, MegaSettings, Weight, choose_settings, plan_mega
from megamoe.kernels.mlp_joined import SharedWeights
from megamoe.kernels.reference import FP8_BLOCK
from megamoe.kernels.weight_cache import K_MULTIPLE, Padding, fp8_copy, joined_copies, padded_bias
from megamoe.plan import MemoryPlan
from megamoe.types import ExpertLayout, Fp8Tensor, Routing

if TYPE_CHECKING:
    from megamoe.kernels.peer_rows import PeerMemory

BLOCK = (FP8_BLOCK, FP8_BLOCK)
UP_PADDING, DOWN_PADDING = Padding(2, FP8_BLOCK, K_MULTIPLE), Padding(1, K_MULTIPLE, FP8_BLOCK)
"""As ``mlp_fp8`` pads weights: a layer's copies serve both."""

OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def mega_moe(
    x: torch.Tensor,
    routing: Routing,
    gate_up_proj: Weight,
    down_proj: Weight,
    buffer: SymmetricBuffer,
    *,
    plan: MemoryPlan | None = None,
    activation: str = "swiglu",
    clamp: float | None = None,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    expert_counts: torch.Tensor | None = None,
    tokens_bound: int | None = None,
    num_rows: int | None = None,
    pool_bytes: int | None = None,
    settings: MegaSettings | None = None,
) -> torch.Tensor:
    """The weighted sum of each token's experts, by one persistent kernel. For inference, on Hopper GPUs.

    Every rank of the buffer's group calls it equally often, in the order of its other calls on the buffer; T may differ
    and may be 0. e experts of this rank, E = e * R of all. CUDA graphs can hold a call that was made once before.

    Args:
        x: bf16 ``[T, H]``.
        routing: of these tokens: ``topk_index`` int64 or int32 ``[T, K]``, ``topk_weights`` floating ``[T, K]``.
        gate_up_proj: ``[e, 2I, H]``, gate rows, then up rows, contiguous; down_proj: ``[e, H, I]`` likewise: both e4m3
            in blocks of 128 x 128, or bf16, as the plan's precision says. H and I are multiples of 128.
        buffer: of the group.
        plan: of this layer, from ``plan_memory``; the buffer must cover it. Default: the buffer's own.
        activation: ``swiglu``, ``swiglu_oai``, ``geglu`` or ``geglu_tanh``; clamp: as ``MoEConfig.activation_clamp``.
        gate_up_bias, down_bias: floating ``[e, 2I]`` and ``[e, H]``, added in fp32; both or neither. With them the
            routing weight multiplies an expert's result, without them its activation, as in ``MoE``.
        out: where to write: bf16, fp16 or fp32 ``[T, H]`` with contiguous columns. Default: a new bf16 tensor.
        expert_counts: int32 or int64 ``[e]``: the rows that each local expert received are added.
        tokens_bound: tokens at most of any rank in this call, for the choice of settings; default: the plan's.
        num_rows: rows that this rank's experts can receive, a multiple of 128; default: as many as any routing needs.
            Rows beyond are lost, and ``buffer.check`` says so.
        pool_bytes: of the memory that these rows and activations pass through, at most; default: the plan's.
        settings: of the kernel; default: chosen by size, to fit the pool. Spare SMs for other streams with
            ``MegaSettings(sms=...)``.

    Returns:
        ``out``: ``[T, H]``, zeros for tokens without experts.

    Raises:
        MegaMoEError: before anything is launched: a shape, dtype, device or stride does not fit, more tokens than
            planned, a buffer of another config or closed, sizes beyond the kernel's limits, gradients are wanted, or
            the first call of its kind inside a graph capture.
        ExchangeError: an earlier call on the buffer failed.
    """
    if not isinstance(buffer, SymmetricBuffer):
        fail_type("buffer", type(buffer).__name__, "must be a SymmetricBuffer", "Make one from plan_memory(...).")
    plan = buffer.plan if plan is None else plan
    if not isinstance(plan, MemoryPlan):
        fail_type("plan", type(plan).__name__, "must be a MemoryPlan", "Pass plan_memory(config, ep_size, tokens).")
    check_weights(gate_up_proj, down_proj, plan, buffer.device)
    if tokens_bound is not None:
        check_int("tokens_bound", tokens_bound, 0)
    experts = fused_experts(
        buffer,
        plan,
        _parts(down_proj)[0].shape[2],
        settings=settings,
        tokens_bound=tokens_bound,
        num_rows=num_rows,
        pool_bytes=pool_bytes,
    )
    experts.check_tokens(x)
    experts.check_routing(routing, x.shape[0])
    if tokens_bound is not None and tokens_bound < x.shape[0]:
        fail_value("tokens_bound", tokens_bound, f"must not be below this rank's {x.shape[0]} tokens", "Raise it.")
    _check_activation(activation, clamp)
    biases = _check_biases(gate_up_bias, down_bias, gate_up_proj, experts)
    if torch.is_grad_enabled():
        operands = dict(x=x, topk_weights=routing.topk_weights)
        operands |= dict(gate_up_proj=_parts(gate_up_proj)[0], down_proj=_parts(down_proj)[0])
        if biases is not None:
            operands |= dict(gate_up_bias=gate_up_bias, down_bias=down_bias)
        wanted = [name for name, operand in operands.items() if operand.requires_grad]
        if wanted:
            fail_value(
                ", ".join(wanted),
                "requires_grad",
                "gets no gradient: the mega-kernel has no backward pass",
                'Call it under torch.no_grad(), or train with MoE(path="staged").',
            )
    if out is not None:
        check_tensor("out", out, tuple(x.shape), OUT_DTYPES, x.device)
        if out.numel() and out.stride(1) != 1:
            fail_value("out.stride()", out.stride(), "must be 1 along H", "Pass a row-major tensor.")
    if expert_counts is not None:
        shape = (plan.num_local_experts,)
        check_tensor("expert_counts", expert_counts, shape, (torch.int32, torch.int64), x.device)
    options = dict(activation=activation, clamp=clamp, biases=biases, out=out)
    result, layout = experts(x, routing, gate_up_proj, down_proj, **options)
    if expert_counts is not None:
        expert_counts.add_(layout.counts)
    return result


# ---------------------------------------------------------------- checks


def check_weights(
    up: Weight,
    down: Weight,
    plan: MemoryPlan,
    device: torch.device,
    names: tuple[str, str] = ("gate_up_proj", "down_proj"),
) -> None:
    """The weights are those that ``mega_moe`` takes, for a layer of ``plan``. ``names``: of them, for errors."""
    if plan.fp8:
        for name, weight in zip(names, (up, down), strict=True):
            check_fp8(name, weight, 3, BLOCK)
            check_contiguous(f"{name}.scales", weight.scales)
            check_tensor(f"{name}.scales", weight.scales, tuple(weight.scales.shape), None, device)
        names, up, down = tuple(f"{name}.codes" for name in names), up.codes, down.codes
    dtype = torch.float8_e4m3fn if plan.fp8 else torch.bfloat16
    for name, weight in zip(names, (up, down), strict=True):
        check_tensor(name, weight, (None, None, None), (dtype,), device)
        check_contiguous(name, weight)
        # Traced tensors have no address.
        if not torch.compiler.is_compiling() and weight.data_ptr() % 16:
            address = weight.data_ptr() % 16
            fail_value(f"{name}.data_ptr() % 16", address, "must be 0 for TMA", "Copy it to a new tensor.")
    experts, hidden, intermediate = down.shape
    check_tensor(names[0], up, (experts, 2 * intermediate, hidden))
    if (experts, hidden) != (plan.num_local_experts, plan.hidden_size):
        fail_value(
            f"{names[1]}.shape",
            list(down.shape),
            f"must be [{plan.num_local_experts}, {plan.hidden_size}, I] for the memory of this config",
            "Pass this layer's plan, and a buffer that covers it.",
        )


def _check_activation(activation: str, clamp: float | None) -> None:
    check_choice("activation", activation, ACTIVATIONS)
    if clamp is not None:
        check_number("clamp", clamp, 0.0, exclusive=True)


def _check_biases(
    up: torch.Tensor | None, down: torch.Tensor | None, weight: Weight, experts: FusedExperts
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Both biases, or None."""
    if up is None and down is None:
        return None
    for name, bias, other in (("gate_up_bias", up, "down_bias"), ("down_bias", down, "gate_up_bias")):
        if bias is None:
            fail_value(name, None, f"must not be None where {other} is not", "Pass zeros.")
    local, columns, hidden = _parts(weight)[0].shape
    device = experts.buffer.device
    check_tensor("gate_up_bias", up, (local, columns), FLOATING, device)
    check_tensor("down_bias", down, (local, hidden), FLOATING, device)
    return up, down


# ---------------------------------------------------------------- calls


class FusedExperts:
    """Calls of the mega-kernel for one layer's sizes on one buffer; get it by ``fused_experts``.

    Attributes:
        plan, settings: of the kernel.
        name: by which compiled code finds it (``exchange_ops.register``).
    """

    def __init__(self, buffer: SymmetricBuffer, plan: MegaPlan, settings: MegaSettings, all_sms: int):
        self.buffer, self.plan, self.settings = buffer, plan, settings
        self._all_sms = all_sms
        self._memory: PeerMemory = buffer.lend(plan.memory)
        self._scratch: dict[str, torch.Tensor] | None = None
        self.name = exchange_ops.register(self)

    @property
    def num_experts(self) -> int:
        """E, over all ranks."""
        return self.plan.memory.num_local_experts * self.plan.memory.ep_size

    def check_tokens(self, x: Any) -> None:
        """``x`` may be passed to a call."""
        check_tensor("x", x, (None, self.plan.memory.hidden_size), (torch.bfloat16,), self.buffer.device)

    def check_routing(self, routing: Any, num_tokens: int) -> None:
        """``routing`` is one of ``num_tokens``, of which there are not too many."""
        plan = self.plan.memory
        if not isinstance(routing, Routing):
            fail_type("routing", type(routing).__name__, "must be a Routing", "Pass megamoe.Routing(index, weights).")
        shape, device = (num_tokens, plan.top_k), self.buffer.device
        check_tensor("routing.topk_index", routing.topk_index, shape, (torch.int64, torch.int32), device)
        check_tensor("routing.topk_weights", routing.topk_weights, shape, FLOATING, device)
        if num_tokens > plan.max_tokens:
            fail_value(
                "tokens",
                num_tokens,
                f"must not exceed the {plan.max_tokens} that the exchange's memory is planned for",
                "Raise max_tokens_per_rank, or split the call.",
            )

    def __call__(
        self,
        x: torch.Tensor,
        routing: Routing,
        gate_up_proj: Weight,
        down_proj: Weight,
        *,
        activation: str,
        clamp: float | None,
        biases: tuple[torch.Tensor, torch.Tensor] | None = None,
        shared: SharedWeights | None = None,
        out: torch.Tensor | None = None,
        out_dtype: torch.dtype = torch.bfloat16,
    ) -> tuple[torch.Tensor, ExpertLayout]:
        """``out [T, H]``, or where it is None a new tensor in ``out_dtype``, and this rank's rows: void after the next
        call.

        Arguments as in ``mega_moe``, checked. Weights may have any floating dtype, and any I in FP8: FP8 GEMMs take
        their FP8 copies, and biases as wide as these, see ``weight_cache``, BF16 ones BF16 copies, which live for this
        call. With ``shared``, for a plan with shared experts, weights are floating, and the routing has their slots.
        """
        index, weights = routing.topk_index.long().contiguous(), routing.topk_weights.detach().float().contiguous()
        up, up_scales = _parts(gate_up_proj)
        down, down_scales = _parts(down_proj)
        out_dtype = out_dtype if out is None else out.dtype
        if torch.compiler.is_compiling():
            result, counts, starts = _operator(
                x,
                index,
                weights,
                up,
                up_scales,
                down,
                down_scales,
                *(biases or (None, None)),
                *(shared or (None, None)),
                self.name,
                activation,
                clamp,
                out_dtype,
            )
            if out is not None:
                result = out.copy_(result)
            return result, ExpertLayout(counts, starts, self.plan.num_rows)
        if out is None:
            out = torch.empty(index.shape[0], self.plan.memory.hidden_size, dtype=out_dtype, device=index.device)
        operands = (up, up_scales), (down, down_scales), out
        return out, self.run(x, index, weights, *operands, activation, clamp, biases, shared)

    def run(
        self,
        x: torch.Tensor | None,
        index: torch.Tensor,
        weights: torch.Tensor,
        up: tuple[torch.Tensor, torch.Tensor | None],
        down: tuple[torch.Tensor, torch.Tensor | None],
        out: torch.Tensor,
        activation: str,
        clamp: float | None,
        biases: tuple[torch.Tensor, torch.Tensor] | None = None,
        shared: SharedWeights | None = None,
    ) -> ExpertLayout:
        """An eager call of checked arguments; returns this rank's rows: void after the next call.

        Args:
            x: ``[T, H]``. None: the tokens lie in the buffer, see ``kernels.mega.call``.
            index, weights: int64 and fp32 ``[T, K]``, contiguous.
            up, down: codes and scales, or a floating weight and None.
            biases: of both GEMMs, floating, as wide as the weights' rows.
            shared: weights of the plan's shared experts, in FP8.
        """
        from megamoe.kernels import mega

        if x is not None and x.stride(1) != 1:
            x = x.contiguous()
        scratch = self.scratch()
        launches = mega.call(
            self.plan,
            self.settings,
            self._memory,
            scratch,
            x,
            (index, weights),
            *self._weights(up, down, shared),
            out,
            num_experts=self.num_experts,
            activation=activation,
            clamp=clamp,
            all_sms=self._all_sms,
            biases=None if biases is None else self._biases(*biases),
        )
        self.buffer.run(launches)
        return ExpertLayout(scratch["counts"], scratch["starts"], self.plan.num_rows)

    def _weights(
        self,
        up: tuple[torch.Tensor, torch.Tensor | None],
        down: tuple[torch.Tensor, torch.Tensor | None],
        shared: SharedWeights | None,
    ) -> tuple[Weight, Weight]:
        if shared is None:
            return self._operand(*up, UP_PADDING), self._operand(*down, DOWN_PADDING)
        more_up, more_down = shared.experts(down[0].shape[2])
        return joined_copies(up[0], more_up, UP_PADDING), joined_copies(down[0], more_down, DOWN_PADDING)

    def _operand(self, weight: torch.Tensor, scales: torch.Tensor | None, padding: Padding) -> Weight:
        """The weight itself, or its copy."""
        if not self.plan.memory.fp8:
            return weight.detach().bfloat16().contiguous()
        return fp8_copy(weight, padding, "inference").plain if scales is None else Fp8Tensor(weight, scales, BLOCK)

    def _biases(self, up: torch.Tensor, down: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As the kernel takes them: where nothing has to be padded, the very parameters if they are BF16 or fp32."""
        if up.shape[1] != 2 * self.plan.intermediate_size:
            up = padded_bias(up.detach(), UP_PADDING)
        wide = (bias if bias.dtype == torch.bfloat16 else bias.float() for bias in (up, down))
        up, down = (bias.detach().contiguous() for bias in wide)
        return up, down

    def scratch(self) -> dict[str, torch.Tensor]:
        """The memory of the buffer's calls, laid out for these; allocated when first asked for, outside captures."""
        if self._scratch is None:
            pieces = self.buffer.attached.setdefault("scratch", [])
            piece = next((piece for piece in pieces if piece.numel() >= self.plan.total), None)
            if piece is None:
                _not_in_capture(self.buffer.device)
                with torch.inference_mode(False):
                    piece = torch.empty(self.plan.total, dtype=torch.uint8, device=self.buffer.device)
                pieces.append(piece)
            self._scratch = self.plan.views(piece)
        return self._scratch


def fused_experts(
    buffer: SymmetricBuffer,
    plan: MemoryPlan,
    intermediate_size: int,
    *,
    settings: MegaSettings | None = None,
    tokens_bound: int | None = None,
    num_rows: int | None = None,
    pool_bytes: int | None = None,
) -> FusedExperts:
    """The calls of a layer of ``plan`` and ``intermediate_size`` on ``buffer``: the same object for the same arguments.

    Raises:
        MegaMoEError: as ``mega_moe`` does.
    """
    if settings is not None and not isinstance(settings, MegaSettings):
        fail_type("settings", type(settings).__name__, "must be a MegaSettings", "Change those of choose_settings.")
    all_sms = _all_sms(buffer.device, settings, plan.fp8)
    chosen = settings is None
    if settings is None:
        settings = choose_settings(
            tokens=plan.max_tokens if tokens_bound is None else tokens_bound,
            ranks=plan.ep_size,
            top_k=plan.top_k,
            num_experts=plan.num_local_experts * plan.ep_size,
            intermediate_size=intermediate_size,
            sms=all_sms,
            fp8=plan.fp8,
        )
    _check_settings(settings, all_sms)
    pool_bytes = plan.pool_bytes if pool_bytes is None else pool_bytes
    key = (plan, intermediate_size, settings, num_rows, pool_bytes)
    made = buffer.attached.setdefault("fused experts", {})
    if key not in made:
        mega_plan = plan_mega(plan, intermediate_size, settings.sms, num_rows, pool_bytes)
        if chosen:
            settings = mega_plan.fit(settings)
        mega_plan.check_pool(settings)
        made[key] = FusedExperts(buffer, mega_plan, settings, all_sms)
    return made[key]


def device_obstacle(device: torch.device, fp8: bool) -> str:
    """Why the mega-kernel, in FP8 or BF16, does not run on ``device``, or nothing."""
    if device.type != "cuda":
        return f"the mega-kernel runs on Hopper GPUs, not on {device.type}"
    major, minor = torch.cuda.get_device_capability(device)
    if major != 9:
        return f"the mega-kernel runs on Hopper GPUs, not on compute capability {major}.{minor}"
    try:
        from megamoe.kernels import mega
    except ImportError as error:
        return f"the mega-kernel needs triton ({error})"
    return "" if mega.FP8_SUPPORTED or not fp8 else "the mega-kernel needs triton 3.6 or 3.7 for FP8"


def _all_sms(device: torch.device, settings: MegaSettings | None, fp8: bool) -> int:
    obstacle = device_obstacle(device, fp8)
    if obstacle:
        fail_value("buffer.device", str(device), obstacle, "Use MoE, which runs anywhere.")
    if device.type == "cuda" or settings is None:
        return torch.cuda.get_device_properties(device).multi_processor_count
    return settings.sms


def _check_settings(settings: MegaSettings, all_sms: int) -> None:
    check_int("settings.sms", settings.sms, 1)
    if settings.sms > all_sms:
        rule = f"must not exceed the device's {all_sms}: all programs run at once"
        fail_value("settings.sms", settings.sms, rule, "Lower it.")
    for name in ("group", "lag", "skew", "chunk"):
        check_int(f"settings.{name}", getattr(settings, name), 1)
    check_int("settings.early", settings.early, 0)
    if settings.skew >= settings.stages:
        fail_value("settings.skew", settings.skew, f"must be below stages = {settings.stages}", "Lower it.")


def _not_in_capture(device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        fail_value(
            "mega_moe",
            "a CUDA graph is being captured",
            "needs its scratch memory before: it must outlive the graph's own",
            "Make the same call once before the capture.",
        )


def _parts(weight: Weight) -> tuple[torch.Tensor, torch.Tensor | None]:
    return (weight.codes, weight.scales) if isinstance(weight, Fp8Tensor) else (weight, None)


# Eager calls skip it, as they skip those of the exchange.
@torch.library.custom_op("megamoe::mega_moe", mutates_args=())
def _operator(
    x: torch.Tensor,
    topk_index: torch.Tensor,
    topk_weights: torch.Tensor,
    up: torch.Tensor,
    up_scales: torch.Tensor | None,
    down: torch.Tensor,
    down_scales: torch.Tensor | None,
    up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    shared_up: torch.Tensor | None,
    shared_down: torch.Tensor | None,
    experts: str,
    activation: str,
    clamp: float | None,
    out_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Outputs ``[T, H]``; counts and starts ``[e]`` of this rank's rows. Not differentiable."""
    calls = exchange_ops.find(experts)
    out = torch.empty(x.shape, dtype=out_dtype, device=x.device)
    biases = None if up_bias is None else (up_bias, down_bias)
    operands = x, topk_index, topk_weights, (up, up_scales), (down, down_scales), out
    shared = None if shared_up is None else SharedWeights(shared_up, shared_down)
    layout = calls.run(*operands, activation, clamp, biases, shared)
    return out, layout.counts.clone(), layout.starts.clone()


@_operator.register_fake
def _(x, topk_index, topk_weights, up, up_scales, down, down_scales, *others):
    shared_down, *options = others[3:]
    shared = 0 if shared_down is None else shared_down.shape[1] // down.shape[2]
    counts = topk_index.new_empty(up.shape[0] + shared)
    return x.new_empty(x.shape, dtype=options[-1]), counts, torch.empty_like(counts)
