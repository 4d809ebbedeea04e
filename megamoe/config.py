"""``MoEConfig`` and ``RouterConfig``: what an MoE layer is, validated once, independent of how it is run.

``MoEConfig.from_hf`` reads the configurations of published models (``hf_configs.py`` holds the recipes).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from megamoe.errors import check_choice, check_int, check_number, fail_type, fail_value
from megamoe.hf_configs import read_hf_config

Score = Literal["softmax", "sigmoid", "sqrtsoftplus"]
GroupScore = Literal["max", "sum_top2"]
Activation = Literal["swiglu", "swiglu_oai", "geglu", "geglu_tanh", "relu2"]
Precision = Literal["bf16", "fp8"]
Recompute = Literal["none", "activation"]

SCORES = ("softmax", "sigmoid", "sqrtsoftplus")
GROUP_SCORES = ("max", "sum_top2")
ACTIVATIONS = ("swiglu", "swiglu_oai", "geglu", "geglu_tanh", "relu2")
PRECISIONS = ("bf16", "fp8")
RECOMPUTES = ("none", "activation")

SWIGLU_OAI_ALPHA = 1.702
SWIGLU_OAI_CLAMP = 7.0


def _check_bool(argument: str, value: Any) -> None:
    if not isinstance(value, bool):
        fail_type(argument, value, "must be a bool", "Pass True or False.")


@dataclass(frozen=True)
class RouterConfig:
    """How tokens choose experts.

    Attributes:
        score: function from router logits to expert scores, in fp32: ``softmax`` over all experts, ``sigmoid``, or
            ``sqrtsoftplus`` (``sqrt(softplus(logit))``).
        renormalize: divide the ``top_k`` selected scores by their sum.
        scaling_factor: multiplies the weights last (``routed_scaling_factor`` of DeepSeek-V2/V3).
        num_groups: experts form this many groups of equal size (node- or group-limited routing); 1 = no limit.
        topk_groups: a token may use experts of this many groups only.
        group_score: score of a group: its ``max`` (DeepSeek-V2) or the sum of its two best experts, ``sum_top2``
            (DeepSeek-V3).
        expert_bias: add a per-expert bias to the scores for the *selection* only (not to the weights); moved by
            ``update_expert_biases`` towards equal load (auxiliary-loss-free balancing, arXiv 2408.15664).
        bias_update_rate: step of that update, in score units.
        linear_bias: a trainable bias on the router logits (gpt-oss).
        aux_loss_coef: coefficient of the Switch load-balancing loss (arXiv 2101.03961, eq. 4-6); 0 = off.
        z_loss_coef: coefficient of the router z-loss (arXiv 2202.08906, eq. 5); 0 = off.

    Raises:
        MegaMoEError: a field is out of range, or the fields contradict each other.
    """

    score: Score = "softmax"
    renormalize: bool = True
    scaling_factor: float = 1.0
    num_groups: int = 1
    topk_groups: int = 1
    group_score: GroupScore = "max"
    expert_bias: bool = False
    bias_update_rate: float = 1e-3
    linear_bias: bool = False
    aux_loss_coef: float = 0.0
    z_loss_coef: float = 0.0

    def __post_init__(self) -> None:
        check_choice("router.score", self.score, SCORES)
        check_choice("router.group_score", self.group_score, GROUP_SCORES)
        for name in ("renormalize", "expert_bias", "linear_bias"):
            _check_bool(f"router.{name}", getattr(self, name))
        check_number("router.scaling_factor", self.scaling_factor, 0.0, exclusive=True)
        check_int("router.num_groups", self.num_groups, 1)
        check_int("router.topk_groups", self.topk_groups, 1)
        if self.topk_groups > self.num_groups:
            fail_value(
                "router.topk_groups",
                self.topk_groups,
                f"must not exceed router.num_groups = {self.num_groups}",
                "Lower topk_groups or raise num_groups.",
            )
        for name in ("bias_update_rate", "aux_loss_coef", "z_loss_coef"):
            check_number(f"router.{name}", getattr(self, name), 0.0)


@dataclass(frozen=True)
class MoEConfig:
    """One mixture-of-experts layer.

    Symbols used everywhere: H ``hidden_size``, I ``intermediate_size``, E ``num_experts``, K ``top_k``.

    Attributes:
        hidden_size: H, width of the residual stream.
        intermediate_size: I, width of one routed expert.
        num_experts: E, routed experts over all ranks.
        top_k: K, experts per token.
        router: how tokens choose experts.
        activation: ``swiglu`` silu(g) * u; ``swiglu_oai`` g * sigmoid(1.702 g) * (u + 1) (gpt-oss, clamped to 7 unless
            ``activation_clamp`` says otherwise); ``geglu`` gelu(g) * u with the exact (erf) GELU; ``geglu_tanh`` with
            its tanh approximation; ``relu2`` relu(h)^2, which has no gate: experts then hold ``up_proj [E, I, H]``.
        activation_clamp: clamp before the activation, in fp32: gate to at most c, up to [-c, c].
        bias: experts have ``gate_up_proj_bias [E, 2I]`` and ``down_proj_bias [E, H]``.
        shared_intermediate_size: width of the shared expert that every token passes; 0 = none.
        shared_gate: multiply the shared expert's output by sigmoid(x . w) (Qwen2-MoE).
        fuse_shared_experts: in inference with ``precision="fp8"`` the shared expert is computed together with the
            routed ones, in FP8, as experts that each rank has for its own tokens; see ``docs/mega_kernel.md``. Where
            that cannot be, and in training, it stays a dense MLP: ``MoE.explain`` says so.
        precision: of the experts' GEMMs. ``fp8``: e4m3 activations (1x128 scales) and weights (128x128 scales).
            ``bf16``: unquantised, in the dtype of the parameters or of autocast, whichever that is.
        recompute: what the experts' backward pass computes again. ``none``: per row it keeps the row and its
            pre-activations, 2 H + 4 I bytes (``fp8``: H + 4 I, and scales). ``activation``: only the row, 2 H bytes
            (H, and scales), for one more GEMM.
        max_tokens_per_rank: upper bound of tokens per rank and call; ``None`` = unbounded. Passing it is an error.
        pool_bytes: memory at most, on each rank, of the mega-kernel's pool, through which its experts' rows and
            activations pass; ``None`` = 384 MiB. With less, rows of many tokens wait longer for room.
        init_std: standard deviation of the initial weights; ``None`` = 1 / sqrt(fan_in).

    Raises:
        MegaMoEError: a field is out of range, or the fields contradict each other.
    """

    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    router: RouterConfig = field(default_factory=RouterConfig)
    activation: Activation = "swiglu"
    activation_clamp: float | None = None
    bias: bool = False
    shared_intermediate_size: int = 0
    shared_gate: bool = False
    fuse_shared_experts: bool = False
    precision: Precision = "bf16"
    recompute: Recompute = "none"
    max_tokens_per_rank: int | None = None
    pool_bytes: int | None = None
    init_std: float | None = None

    def __post_init__(self) -> None:
        for name in ("hidden_size", "intermediate_size", "num_experts", "top_k"):
            check_int(name, getattr(self, name), 1)
        if not isinstance(self.router, RouterConfig):
            fail_type("router", self.router, "must be a RouterConfig", "Pass RouterConfig(...).")
        check_choice("activation", self.activation, ACTIVATIONS)
        check_choice("precision", self.precision, PRECISIONS)
        check_choice("recompute", self.recompute, RECOMPUTES)
        check_int("shared_intermediate_size", self.shared_intermediate_size, 0)
        for name in ("bias", "shared_gate", "fuse_shared_experts"):
            _check_bool(name, getattr(self, name))
        if self.activation_clamp is not None:
            check_number("activation_clamp", self.activation_clamp, 0.0, exclusive=True)
            if self.activation == "relu2":
                fail_value("activation_clamp", self.activation_clamp, "has no meaning for relu2", "Pass None.")
        for name in ("max_tokens_per_rank", "pool_bytes"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), 1)
        if self.init_std is not None:
            check_number("init_std", self.init_std, 0.0)
        for name in ("shared_gate", "fuse_shared_experts"):
            if getattr(self, name) and not self.shared_intermediate_size:
                fail_value(name, True, "needs a shared expert", "Set shared_intermediate_size > 0.")
        self._check_routing()

    def _check_routing(self) -> None:
        if self.top_k > self.num_experts:
            fail_value("top_k", self.top_k, f"must not exceed num_experts = {self.num_experts}", "Lower top_k.")
        groups = self.router.num_groups
        if self.num_experts % groups:
            fail_value(
                "router.num_groups",
                groups,
                f"must divide num_experts = {self.num_experts}",
                "Choose a number of groups that divides the experts evenly.",
            )
        reachable = self.num_experts // groups * self.router.topk_groups
        if self.top_k > reachable:
            fail_value(
                "top_k",
                self.top_k,
                f"must not exceed the {reachable} experts of {self.router.topk_groups} of {groups} groups",
                "Raise router.topk_groups or lower top_k.",
            )
        if groups > 1 and self.router.group_score == "sum_top2" and self.num_experts // groups < 2:
            fail_value(
                "router.group_score",
                "sum_top2",
                f"needs at least 2 experts per group, has {self.num_experts // groups}",
                'Use group_score="max" or fewer groups.',
            )

    @property
    def gated(self) -> bool:
        """Whether experts have a gate: ``gate_up_proj [E, 2I, H]`` (True) or ``up_proj [E, I, H]`` (False)."""
        return self.activation != "relu2"

    @property
    def clamp(self) -> float | None:
        """The clamp in force: ``activation_clamp``, or gpt-oss's 7.0 for ``swiglu_oai``."""
        if self.activation == "swiglu_oai" and self.activation_clamp is None:
            return SWIGLU_OAI_CLAMP
        return self.activation_clamp

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dict; ``from_dict`` reads it back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> MoEConfig:
        """The inverse of ``to_dict``.

        Raises:
            MegaMoEError: an unknown key, or an invalid value.
        """
        _check_keys(cls, values)
        values = dict(values)
        if "router" in values:
            _check_keys(RouterConfig, values["router"])
            values["router"] = RouterConfig(**values["router"])
        for name in ("hidden_size", "intermediate_size", "num_experts", "top_k"):
            if name not in values:
                fail_value("MoEConfig keys", sorted(values), f"must contain {name!r}", "Add it.")
        return cls(**values)

    @classmethod
    def from_hf(cls, hf_config: Any, **overrides: Any) -> MoEConfig:
        """The MoE layer of a published model.

        Args:
            hf_config: a ``transformers`` configuration or its dict, of model type mixtral, qwen2_moe, qwen3_moe, olmoe,
                deepseek_v2, deepseek_v3, glm4_moe or gpt_oss.
            overrides: fields to replace, such as ``precision="fp8"`` or ``max_tokens_per_rank=4096``.

        Raises:
            MegaMoEError: an unknown model type, a missing field, or an activation that megamoe does not have.
        """
        _check_keys(cls, overrides)
        return dataclasses.replace(cls.from_dict(read_hf_config(hf_config)), **overrides)


def _check_keys(kind: type, values: Any) -> None:
    """``values`` is a dict whose keys are fields of the dataclass ``kind``."""
    if not isinstance(values, dict):
        fail_type(kind.__name__, values, "must be a dict", "Pass what to_dict() returned.")
    known = [f.name for f in dataclasses.fields(kind)]
    for key in values:
        if key not in known:
            fail_value(f"{kind.__name__} key", key, f"is not one of {', '.join(known)}", "Remove or rename it.")


def check_config(config: Any) -> None:
    """``config`` is a ``MoEConfig``."""
    if not isinstance(config, MoEConfig):
        fail_type("config", type(config).__name__, "must be a MoEConfig", "Pass MoEConfig(...).")
