"""Checks of GEMM arguments, and operands in the form that the kernels take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from megamoe.compat.deep_gemm.utils.layout import transform_sf_into_required_layout
from megamoe.errors import check_tensor, fail_type, fail_value
from megamoe.types import Fp8Tensor

BF16, FP32, E4M3, INT32 = torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int32
WEIGHT_BLOCK = (128, 128)
ROW_BLOCK = (1, 128)

Scaled = tuple[torch.Tensor, torch.Tensor]
"""Codes and their scales."""

Recipe = tuple[int, int, int] | None
SideRecipe = tuple[int, int] | None


def check_pair(argument: str, value: Any) -> Scaled:
    """``value`` is a pair of tensors: codes, scales."""
    if not isinstance(value, Sequence) or len(value) != 2 or not all(isinstance(x, torch.Tensor) for x in value):
        kind = type(value).__name__
        fail_type(argument, kind, "must be a pair (codes, scales) of tensors", "Cast with per_token_cast_to_fp8.")
    return value[0], value[1]


def check_matrices(argument: str, x: torch.Tensor, dims: int, dtypes: Sequence[torch.dtype], device=None) -> None:
    """``x`` has ``dims`` dimensions, one of ``dtypes``, and its matrices are dense along a row or a column."""
    check_tensor(argument, x, (None,) * dims, dtypes, device)
    if x.numel() and 1 not in x.stride()[-2:]:
        fail_value(f"{argument}.stride()", x.stride(), "must be 1 along rows or columns", "Call .contiguous().")
    if dims == 3 and x.numel() and x.shape[0] > 1 and x.stride(0) != x.shape[1] * x.shape[2]:
        fail_value(f"{argument}.stride()", x.stride(), "must be dense from group to group", "Call .contiguous().")


def is_k_major(x: torch.Tensor) -> bool:
    """Whether the last dimension is dense."""
    return x.stride(-1) == 1 or not x.numel()


def check_k_major(argument: str, x: torch.Tensor) -> None:
    """Hopper's FP8 instructions take no other layout."""
    if not is_k_major(x):
        fail_value(f"{argument}.stride()", x.stride(), "must be K-major: 1 along K", "Make K the dense dimension.")


def check_output(d: torch.Tensor, shape: Sequence[int], device: torch.device, dtypes=(BF16, FP32)) -> None:
    """``d`` has ``shape`` and dense rows."""
    check_tensor("d", d, shape, dtypes, device)
    if d.numel() and d.stride(-1) != 1:
        fail_value("d.stride()", d.stride(), "must be 1 along N", "Pass a row-major tensor.")


def check_addend(c: torch.Tensor | None, d: torch.Tensor) -> None:
    """``c`` is like ``d``; where it shares its memory, with the same strides."""
    if c is None:
        return
    check_tensor("c", c, d.shape, (d.dtype,), d.device)
    if c.numel() and c.stride(-1) != 1:
        fail_value("c.stride()", c.stride(), "must be 1 along N", "Pass a row-major tensor.")
    if c.data_ptr() == d.data_ptr() and c.stride() != d.stride():
        fail_value("c.stride()", c.stride(), f"must be d's {d.stride()} in the same memory", "Pass d itself.")


@contextmanager
def dense_result(d: torch.Tensor) -> Iterator[torch.Tensor]:
    """``d`` where it is dense, as kernels write; else dense memory with ``d``'s elements, copied back at the end."""
    if d.is_contiguous():
        yield d
    else:
        dense = d.contiguous()
        yield dense
        d.copy_(dense)


def nothing_to_multiply(d: torch.Tensor, k: int, c: torch.Tensor | None) -> bool:
    """Whether the result is empty, or a sum over no element, which is then written."""
    if d.numel() and not k:
        d.zero_() if c is None else d.copy_(c)
    return not d.numel() or not k


def side_recipes(recipe: Recipe, recipe_a: SideRecipe, recipe_b: SideRecipe) -> tuple[tuple, tuple]:
    """Blocks that share a scale, of a and of b: (rows, columns) each.

    Args:
        recipe: (rows of a, rows of b, columns); default (1, 128, 128).
        recipe_a, recipe_b: both or none, instead of ``recipe``.
    """
    if (recipe_a is None) != (recipe_b is None):
        given = ("recipe_a", recipe_a) if recipe_b is None else ("recipe_b", recipe_b)
        fail_value(*given, "needs the recipe of the other side too", "Pass recipe_a and recipe_b.")
    if recipe_a is not None:
        if recipe is not None:
            fail_value("recipe", tuple(recipe), "excludes recipe_a and recipe_b", "Pass one or the other.")
        sides = tuple(recipe_a), tuple(recipe_b)
    else:
        recipe = (1, *WEIGHT_BLOCK) if recipe is None else tuple(recipe)
        if len(recipe) != 3:
            fail_value("recipe", recipe, "must be 3 numbers: rows of a, rows of b, columns", "Pass (1, 128, 128).")
        sides = (recipe[0], recipe[2]), (recipe[1], recipe[2])
    if sides[0] != ROW_BLOCK:
        fail_value("recipe of a", sides[0], f"must be {ROW_BLOCK} on Hopper", "Cast with per_token_cast_to_fp8.")
    if sides[1] not in (ROW_BLOCK, WEIGHT_BLOCK):
        rule = f"must be {WEIGHT_BLOCK} or {ROW_BLOCK} on Hopper"
        fail_value("recipe of b", sides[1], rule, "Cast with per_block_cast_to_fp8.")
    return sides


def scaled_operand(argument: str, codes: torch.Tensor, sf: torch.Tensor, block: tuple[int, int]) -> Fp8Tensor:
    """Codes ``[(groups,) mn, k]`` with their fp32 scales as the kernels read them: MN-major, or 128x128 as they are."""
    mn, k = codes.shape[-2:]
    groups = codes.shape[0] if codes.dim() == 3 else None
    shape = (-(-mn // block[0]), -(-k // block[1]))
    check_tensor(f"{argument}[1]", sf, shape if groups is None else (groups, *shape), (FP32,), codes.device)
    # Without the cast to UE8M0, which no kernel of ours takes.
    sf = transform_sf_into_required_layout(sf, mn, k, block, groups, disable_ue8m0_cast=True)
    # The kernels read dense matrices; only row-wise scales have strides of their own.
    return Fp8Tensor(codes.contiguous(), sf.contiguous() if block == WEIGHT_BLOCK else sf, block)


def check_same_k(a: torch.Tensor, b: torch.Tensor) -> None:
    if a.shape[-1] != b.shape[-1]:
        fail_value("b.shape", list(b.shape), f"must have K = {a.shape[-1]} as a", "Check the order of the dimensions.")
