"""``permute`` and ``combine_slots``: copies and sums, so their results are compared bit for bit."""

from __future__ import annotations

import pytest
import torch

from megamoe.kernels.layout import invert_rows, layout_pairs
from megamoe.kernels.reference import combine_slots, permute
from tests.support.generators import ROUTING_KINDS, random_routing
from tests.support.metrics import assert_close


def rows_of(kind: str, num_tokens: int, num_experts: int, top_k: int):
    """``slot_to_row`` and ``row_to_token`` of a random routing."""
    index = random_routing(kind, num_tokens, num_experts, top_k).topk_index
    layout, pair_to_row = layout_pairs(index.flatten(), num_experts)
    row_to_pair = invert_rows(pair_to_row, layout.num_rows)
    return pair_to_row.view(index.shape), torch.where(row_to_pair >= 0, row_to_pair // top_k, -1)


def permute_by_loop(values: torch.Tensor, row_to_source: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(row_to_source.numel(), *values.shape[1:], dtype=values.dtype)
    for row, source in enumerate(row_to_source.tolist()):
        if source >= 0:
            out[row] = values[source]
    return out


@pytest.mark.parametrize(
    "make_values",
    [
        pytest.param(lambda: torch.randn(9, 5), id="matrix"),
        pytest.param(lambda: torch.randn(9), id="vector"),
        pytest.param(lambda: torch.arange(9) + 2**40, id="int64"),
        pytest.param(lambda: torch.randn(9, 5).bfloat16(), id="bf16"),
        pytest.param(lambda: torch.randn(9, 2, 3), id="three dimensions"),
        pytest.param(lambda: torch.randn(5, 18).t()[::2], id="strided"),
        pytest.param(lambda: torch.randn(1, 5).expand(9, 5), id="zero stride"),
    ],
)
def test_permute(seed, make_values):
    values, rows = make_values(), torch.tensor([8, -1, 0, 3, 3, -1, -1, 7])
    out = permute(values, rows)
    assert out.dtype == values.dtype
    assert torch.equal(out, permute_by_loop(values, rows))


@pytest.mark.parametrize(
    ("num_values", "rows"),
    [
        pytest.param(0, [-1, -1], id="no values: all is padding"),
        pytest.param(3, [], id="no rows"),
        pytest.param(0, [], id="nothing at all"),
        pytest.param(3, [-1, -1], id="only padding"),
    ],
)
def test_permute_of_nothing(num_values, rows):
    out = permute(torch.randn(num_values, 4), torch.tensor(rows, dtype=torch.int64))
    assert torch.equal(out, torch.zeros(len(rows), 4))


@pytest.mark.parametrize("kind", ROUTING_KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_combine_is_a_sum_in_slot_order(seed, kind, dtype):
    """The very bits of an fp32 sum in ascending slot order, whatever unused rows hold."""
    slot_to_row, row_to_token = rows_of(kind, 60, 6, 4)
    rows = torch.randn(row_to_token.numel(), 16).to(dtype)
    rows[row_to_token < 0] = float("nan")
    total = torch.zeros(60, 16, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    for token in range(60):
        for slot in range(4):
            row = int(slot_to_row[token, slot])
            if row >= 0:
                total[token] += rows[row].to(total.dtype)
    for out_dtype in (torch.float32, torch.bfloat16, torch.float64):
        out = combine_slots(rows, slot_to_row, out_dtype)
        assert out.dtype == out_dtype
        assert torch.equal(out, total.to(out_dtype))


@pytest.mark.parametrize(("num_rows", "shape"), [(0, (3, 2)), (0, (0, 2)), (128, (0, 2))], ids=str)
def test_combine_of_nothing(num_rows, shape):
    out = combine_slots(torch.full((num_rows, 8), float("nan")), torch.full(shape, -1), torch.float32)
    assert torch.equal(out, torch.zeros(shape[0], 8))


@pytest.mark.parametrize("kind", ROUTING_KINDS)
@pytest.mark.parametrize(("num_experts", "top_k"), [(5, 1), (6, 3), (4, 4)], ids=["K = 1", "K < E", "K = E"])
def test_permute_and_combine_are_adjoint(seed, kind, num_experts, top_k):
    """<permute(x), r> = <x, combine(r)>: each is the gradient of the other."""
    slot_to_row, row_to_token = rows_of(kind, 90, num_experts, top_k)
    x = torch.randn(90, 16, dtype=torch.float64)
    rows = torch.randn(row_to_token.numel(), 16, dtype=torch.float64)
    # Against the norm of the factors: the inner product itself may be close to zero.
    left, right = (permute(x, row_to_token) * rows).sum(), (x * combine_slots(rows, slot_to_row, x.dtype)).sum()
    assert abs(left - right) <= 1e-13 * x.norm() * rows.norm()
    if kind != "none":
        assert left.abs() > 0


def test_nan_row_spoils_only_its_token(seed):
    slot_to_row, row_to_token = rows_of("uniform", 40, 6, 2)
    rows = torch.randn(row_to_token.numel(), 8)
    clean = combine_slots(rows, slot_to_row, torch.float32)
    rows[slot_to_row[11, 1]] = float("inf")
    rows[slot_to_row[29, 0]] = float("nan")
    out = combine_slots(rows, slot_to_row, torch.float32)
    assert (~out.isfinite()).all(dim=1).nonzero().flatten().tolist() == [11, 29]
    others = torch.ones(40, dtype=torch.bool)
    others[[11, 29]] = False
    assert torch.equal(out[others], clean[others])


def test_combine_of_strided_rows(seed):
    slot_to_row, row_to_token = rows_of("dropped", 40, 6, 2)
    rows = torch.randn(16, row_to_token.numel()).t()[:, ::2]
    expected = combine_slots(rows.contiguous(), slot_to_row.clone(), torch.float32)
    assert torch.equal(combine_slots(rows, slot_to_row, torch.float32), expected)
    assert_close(combine_slots(rows.double(), slot_to_row, torch.float64), expected, 1e-6)
