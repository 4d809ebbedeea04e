"""The router in inference as two launches: logits, scores, selection and weights of few tokens.

The first one, in Gluon, splits H, so that few tokens too use all SMs: it writes the fp32 sums of ``columns_of`` columns
each. Its tile is the same for any number of tokens, its weights stay in registers, and nothing goes through shared
memory but the last step of a sum. The second one adds up the sums of a token and selects, a token a program. How H is
split, and in which order sums are added, depends on E and H alone: a token's result has the same bits whatever tokens
are beside it. The selection is that of ``reference``. For GPUs only.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from megamoe.config import RouterConfig

TOKENS, EXPERTS, STEP = 8, 16, 64
"""Tokens, experts and columns of a tile of the first launch."""

GEMM_WARPS = 4

TILE = gl.BlockedLayout([8, 2, 4], [1, 8, 4], [1, 1, 4], [2, 1, 0])
"""Every thread has all tokens and 4 columns, which are 16 bytes of a weight's row; warps stand side by side along H."""

FEW_COLUMNS, MANY_COLUMNS, FEW_EXPERTS = 128, 256, 32
"""Columns of a sum, the first for up to FEW_EXPERTS: so that there are programs for all SMs, and not too many sums."""

ENOUGH_PROGRAMS, MOST_TILES = 512, 8
"""Where there are more programs than enough, each takes several tiles of tokens, and reads its weights once."""

PLACES_PER_WARP, MOST_WARPS = 64, 8
VALUES_PER_THREAD = 64
"""Sums that a thread of the second launch reads at once."""

LOWEST = tl.constexpr(-(2**31))
"""Below the key of any score."""

NAN_KEY = tl.constexpr(2**31 - 1)
TINY = tl.constexpr(torch.finfo(torch.float32).tiny)


# ---------------------------------------------------------------- sums


@gluon.jit
def _load_weights(
    weight, hidden, num_experts, stride, COLUMNS: gl.constexpr, EXPERTS: gl.constexpr, STEP: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """The program's weights, a tile of EXPERTS x STEP after the other."""
    expert = gl.program_id(1) * EXPERTS + gl.arange(0, EXPERTS, gl.SliceLayout(1, LAYOUT))
    column = gl.program_id(2) * COLUMNS + gl.arange(0, STEP, gl.SliceLayout(0, LAYOUT))
    start = weight + expert.to(gl.int64)[:, None] * stride + column[None, :]
    tiles = ()
    for step in gl.static_range(COLUMNS // STEP):
        mask = (expert < num_experts)[:, None] & (column + step * STEP < hidden)[None, :]
        tiles = tiles + (gl.load(start + step * STEP, mask=mask, other=0.0),)
    return tiles


@gluon.jit(do_not_specialize=["num_tokens", "tiles"])
def router_gemm_kernel(
    x, weight, sums, num_tokens, hidden, num_experts, x_stride, weight_stride, tiles,
    COLUMNS: gl.constexpr, TOKENS: gl.constexpr, EXPERTS: gl.constexpr, STEP: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """``sums`` [splits of H, T, E] of ``tiles`` tiles of tokens, some experts and COLUMNS columns.

    Masked tokens too: what they hold reaches no others, and to look at a mask first takes longer.
    """
    ROWS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    SUMS: gl.constexpr = gl.SliceLayout(2, LAYOUT)
    weights = _load_weights(
        weight, hidden, num_experts, weight_stride, COLUMNS, EXPERTS, STEP, gl.SliceLayout(0, LAYOUT)
    )
    split = gl.program_id(2)
    column = split * COLUMNS + gl.arange(0, STEP, gl.SliceLayout(0, ROWS))
    expert = gl.program_id(1) * EXPERTS + gl.arange(0, EXPERTS, gl.SliceLayout(0, SUMS))
    first = gl.program_id(0) * tiles * TOKENS
    last = gl.minimum(first + tiles * TOKENS, num_tokens)
    while first < last:
        token = first + gl.arange(0, TOKENS, gl.SliceLayout(1, ROWS))
        start = x + token.to(gl.int64)[:, None] * x_stride + column[None, :]
        # All are on their way before the first is needed.
        rows = ()
        for step in gl.static_range(COLUMNS // STEP):
            mask = (token < num_tokens)[:, None] & (column + step * STEP < hidden)[None, :]
            rows = rows + (gl.load(start + step * STEP, mask=mask, other=0.0),)
        total = gl.zeros([TOKENS, EXPERTS, STEP], gl.float32, LAYOUT)
        for step in gl.static_range(COLUMNS // STEP):
            total += rows[step].to(gl.float32)[:, None, :] * weights[step][None, :, :]
        row = first + gl.arange(0, TOKENS, gl.SliceLayout(1, SUMS))
        place = (split.to(gl.int64) * num_tokens + row)[:, None] * num_experts + expert[None, :]
        gl.store(sums + place, gl.sum(total, 2), mask=(row < num_tokens)[:, None] & (expert < num_experts)[None, :])
        first += TOKENS


# ---------------------------------------------------------------- selection


@triton.jit
def _key(value):
    """int32 in the order of fp32 values, NaN above all. There is no -0: scores are not negative, and x - x is +0."""
    bits = value.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(value != value, NAN_KEY, key)


@triton.jit
def _value(key):
    """The inverse of ``_key``."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def _is_best(key, place, SIZE: tl.constexpr):
    """A mask: the highest key, of equals the one at the lowest place."""
    return place == tl.min(tl.where(key == tl.max(key, 0), place, SIZE), 0)


@triton.jit
def _scores(logits, SCORE: tl.constexpr):
    """``reference.expert_scores``. Where there is no expert, the logit is -inf."""
    if SCORE == "softmax":
        powers = tl.exp(logits - tl.max(logits, 0))
        scores = tl.div_rn(powers, tl.sum(powers, 0))
    elif SCORE == "sigmoid":
        scores = tl.div_rn(1.0, 1.0 + tl.exp(-logits))
    else:
        tl.static_assert(SCORE == "sqrtsoftplus")
        power = tl.exp(tl.where(logits > 20.0, 0.0, logits))
        # log(1 + power): what was lost when 1 was added is made good by a factor.
        above = 1.0 + power
        added = tl.where(above == 1.0, 1.0, above - 1.0)
        softplus = tl.where(above == 1.0, power, tl.log(above) * tl.div_rn(power, added))
        softplus = tl.where(logits > 20.0, logits, softplus)
        # A comparison, not a maximum: NaN must pass.
        scores = tl.sqrt_rn(tl.where(softplus < TINY, TINY, softplus))
    return scores


@triton.jit
def _in_best_groups(key, num_groups, GROUPS: tl.constexpr, SIZE: tl.constexpr, KEPT: tl.constexpr, TOP2: tl.constexpr):
    """``key`` [GROUPS * SIZE], but LOWEST outside of the KEPT best groups."""
    grouped = tl.reshape(key, [GROUPS, SIZE])
    best = tl.max(grouped, 1)
    score = _value(best)
    if TOP2:
        column = tl.arange(0, SIZE)[None, :]
        first = tl.min(tl.where(grouped == best[:, None], column, SIZE), 1)
        score += _value(tl.max(tl.where(column == first[:, None], LOWEST, grouped), 1))
    group = tl.arange(0, GROUPS)
    left = tl.where(group < num_groups, _key(score), LOWEST)
    kept = group < 0
    for _ in range(KEPT):
        hit = _is_best(left, group, GROUPS)
        kept = kept | hit
        left = tl.where(hit, LOWEST, left)
    return tl.reshape(tl.where(kept[:, None], grouped, LOWEST), [GROUPS * SIZE])


@triton.jit(do_not_specialize=["num_tokens", "scaling_factor"])
def _select_kernel(
    sums, bias, expert_bias, token_mask, index, weights, num_tokens, num_splits, num_experts, num_groups, group_size,
    scaling_factor, GROUPS: tl.constexpr, SIZE: tl.constexpr, SPLITS: tl.constexpr, K: tl.constexpr,
    KEPT_GROUPS: tl.constexpr, TOP2: tl.constexpr, SCORE: tl.constexpr, RENORMALIZE: tl.constexpr,
):  # fmt: skip
    """``index`` int64 and ``weights`` fp32 [T, K] of a token, from its sums [splits, T, E]."""
    token = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, GROUPS * SIZE)
    # Groups begin SIZE places apart; places are in the order of experts.
    expert = place // SIZE * group_size + place % SIZE
    exists = (place % SIZE < group_size) & (place // SIZE < num_groups)
    # Reads come first, so that all are on their way together.
    nothing = tl.zeros([GROUPS * SIZE], tl.float32)
    on_logits = nothing if bias is None else tl.load(bias + expert, mask=exists, other=0.0)
    on_scores = nothing if expert_bias is None else tl.load(expert_bias + expert, mask=exists, other=0.0)
    live = True if token_mask is None else tl.load(token_mask + token)
    total = tl.zeros([SPLITS, GROUPS * SIZE], tl.float32)
    for first in range(0, num_splits, SPLITS):
        split = first + tl.arange(0, SPLITS)
        start = sums + ((split.to(tl.int64) * num_tokens + token) * num_experts)[:, None]
        total += tl.load(start + expert[None, :], mask=(split < num_splits)[:, None] & exists[None, :], other=0.0)
    scores = _scores(tl.where(exists, tl.sum(total, 0) + on_logits, float("-inf")), SCORE)
    key = tl.where(exists, _key(scores + on_scores), LOWEST)
    if GROUPS > 1:
        key = _in_best_groups(key, num_groups, GROUPS, SIZE, KEPT_GROUPS, TOP2)
    slot = tl.full([GROUPS * SIZE], K, tl.int32)
    for k in range(K):
        hit = _is_best(key, place, GROUPS * SIZE)
        slot = tl.where(hit, k, slot)
        key = tl.where(hit, LOWEST, key)
    chosen = slot < K
    weight = tl.where(chosen, scores, 0.0)
    if RENORMALIZE:
        weight = tl.div_rn(weight, tl.sum(weight, 0) + 1e-20)
    weight = tl.where(live, weight * scaling_factor, 0.0)
    result = tl.where(live, expert, -1).to(tl.int64)
    tl.store(index + token * K + slot, result, mask=chosen)
    tl.store(weights + token * K + slot, weight, mask=chosen)


# ---------------------------------------------------------------- launches


@dataclass(frozen=True)
class Launch:
    """A launch: a kernel, its programs and its arguments."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    options: dict[str, Any]

    def run(self) -> None:
        """On the current device and stream."""
        self.kernel[self.grid](**self.arguments, **self.options)


def columns_of(num_experts: int) -> int:
    """Columns of a sum."""
    return FEW_COLUMNS if num_experts <= FEW_EXPERTS else MANY_COLUMNS


def _tiles(token_tiles: int, others: int) -> int:
    """Tiles of tokens that a program takes, where there are ``others`` programs for each of them."""
    return min(MOST_TILES, max(1, token_tiles * others // ENOUGH_PROGRAMS))


def launches(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    expert_bias: torch.Tensor | None,
    token_mask: torch.Tensor | None,
    index: torch.Tensor,
    weights: torch.Tensor,
    router: RouterConfig,
) -> tuple[Launch, Launch]:
    """Those that write ``index`` and ``weights``; arguments as in ``route``, of at least one token."""
    (num_tokens, hidden), num_experts = x.shape, weight.shape[0]
    columns = columns_of(num_experts)
    splits, expert_tiles = triton.cdiv(hidden, columns), triton.cdiv(num_experts, EXPERTS)
    tiles = _tiles(triton.cdiv(num_tokens, TOKENS), splits * expert_tiles)
    sums = torch.empty(splits, num_tokens, num_experts, device=x.device)
    gemm = Launch(
        router_gemm_kernel,
        (triton.cdiv(num_tokens, TOKENS * tiles), expert_tiles, splits),
        dict(
            x=x,
            weight=weight,
            sums=sums,
            num_tokens=num_tokens,
            hidden=hidden,
            num_experts=num_experts,
            x_stride=x.stride(0),
            weight_stride=weight.stride(0),
            tiles=tiles,
            COLUMNS=columns,
            TOKENS=TOKENS,
            EXPERTS=EXPERTS,
            STEP=STEP,
            LAYOUT=TILE,
        ),
        dict(num_warps=GEMM_WARPS, enable_fp_fusion=True),
    )
    group_size = num_experts // router.num_groups
    groups, size = triton.next_power_of_2(router.num_groups), triton.next_power_of_2(group_size)
    num_warps = min(MOST_WARPS, max(1, groups * size // PLACES_PER_WARP))
    at_once = max(1, VALUES_PER_THREAD * 32 * num_warps // (groups * size))
    select = Launch(
        _select_kernel,
        (num_tokens,),
        dict(
            sums=sums,
            bias=bias,
            expert_bias=expert_bias,
            token_mask=token_mask,
            index=index,
            weights=weights,
            num_tokens=num_tokens,
            num_splits=splits,
            num_experts=num_experts,
            num_groups=router.num_groups,
            group_size=group_size,
            scaling_factor=float(router.scaling_factor),
            GROUPS=groups,
            SIZE=size,
            SPLITS=min(at_once, triton.next_power_of_2(splits)),
            K=index.shape[1],
            KEPT_GROUPS=router.topk_groups,
            TOP2=router.group_score == "sum_top2",
            SCORE=router.score,
            RENORMALIZE=router.renormalize,
        ),
        dict(num_warps=num_warps),
    )
    return gemm, select


def route(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    expert_bias: torch.Tensor | None,
    token_mask: torch.Tensor | None,
    top_k: int,
    router: RouterConfig,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts, int64 ``[T, K]``, and weights, fp32 ``[T, K]``; -1 and 0 for tokens that ``token_mask`` switches off.

    Args:
        x: bf16, fp16 or fp32 ``[T, H]`` with stride 1 along H.
        weight: fp32 ``[E, H]`` likewise.
        bias, expert_bias: fp32 ``[E]``, contiguous: on the logits and, for the selection, on the scores.
        token_mask: bool ``[T]``, contiguous.
        top_k, router: a layer's.
    """
    index = torch.empty(x.shape[0], top_k, dtype=torch.int64, device=x.device)
    weights = torch.empty(x.shape[0], top_k, device=x.device)
    if index.numel():
        with torch.cuda.device(x.device):
            for launch in launches(x, weight, bias, expert_bias, token_mask, index, weights, router):
                launch.run()
    return index, weights
