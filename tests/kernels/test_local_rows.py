"""Layouts and movements of rows by device: on CPUs, and the GPU's kernels in Triton's interpreter, bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

IN_INTERPRETER = """
import contextlib, itertools, sys
import torch
from megamoe.kernels import local_rows, triton_local
from megamoe.kernels.layout import invert_rows, layout_pairs, max_pool_rows
from megamoe.kernels.reference import combine_slots, permute
from megamoe.types import ExpertLayout, Fp8Tensor
from tests.support.generators import ROUTING_KINDS, random_routing

torch.manual_seed(int(sys.argv[1]))
torch.cuda.device = lambda device: contextlib.nullcontext()
# Memory that is not written holds NaN or the largest integer.
torch.use_deterministic_algorithms(True)
# Small sizes take every loop more than once.
triton_local.SUB = triton_local.COUNT_BLOCK = 16
triton_local.MOST_CHUNKS, triton_local.COUNTS_AT_ONCE = 5, 64
triton_local.SENT_BYTES, triton_local.SUMMED_BYTES = 128, 64
triton_local.UNROLL, triton_local.PADDING_ROWS, triton_local.VALUES = 3, 64, 128

def same(actual, expected, what):
    assert actual.dtype == expected.dtype and actual.shape == expected.shape, what
    assert torch.equal(actual.view(torch.uint8), expected.view(torch.uint8)), what

def values(*shape, dtype):
    x = torch.randn(shape).to(dtype)
    # Sums keep the signs of zeros.
    return x.masked_fill_(torch.rand(shape) < 0.1, -0.0)

def check(index, num_experts, hidden, dtype, out_dtype, what):
    ids, (num_tokens, top_k) = index.flatten(), index.shape
    layout, pair_to_row = layout_pairs(ids, num_experts)
    for num_rows in {layout.num_rows, max_pool_rows(ids.numel(), num_experts)}:
        row_to_pair = invert_rows(pair_to_row, num_rows)
        wanted = layout.counts, layout.starts, pair_to_row, row_to_pair
        counts, starts = wanted[:2]
        for padded in (False, True):
            ends = local_rows.group_ends(ExpertLayout(counts, starts, num_rows), padded)
            same(triton_local.group_ends(counts, starts, padded), ends, (what, "ends"))
        for given in (ids, ids.to(torch.int32)):
            got = triton_local.layout_pairs(given, num_experts, num_rows)
            for name, mine, theirs in zip(("counts", "starts", "rows", "pairs"), got, wanted, strict=True):
                same(mine, theirs, (what, name))

        slot_to_row = pair_to_row.view(index.shape)
        tokens = values(num_tokens, hidden + 3, dtype=dtype)[:, 1 : hidden + 1]
        sent = local_rows.send_rows(tokens, slot_to_row, row_to_pair)
        same(triton_local.send_rows(tokens, slot_to_row, row_to_pair), sent, (what, "send"))
        some = torch.cat([pair_to_row[pair_to_row >= 0][:20], torch.arange(0, num_rows, 97)])
        row_to_token = row_to_pair[some].div(top_k, rounding_mode="floor")
        same(triton_local.gather_rows(tokens, row_to_token), sent[some], (what, "gather rows"))
        codes = torch.randint(256, (num_tokens, hidden), dtype=torch.uint8)
        codes = Fp8Tensor(codes.view(torch.float8_e4m3fn), torch.randn(num_tokens, 1 + hidden // 9), (1, 128))
        sent_codes = local_rows.send_codes(codes, slot_to_row, row_to_pair)
        got = triton_local.send_rows(codes.codes.view(torch.uint8), slot_to_row, row_to_pair)
        same(got, sent_codes.codes.view(torch.uint8), (what, "codes"))
        got = triton_local.send_scales(codes.scales, row_to_pair, top_k)
        assert got.stride(0) == 1
        assert torch.equal(got, sent_codes.scales), (what, "scales")
        weights = values(ids.numel(), dtype=dtype)
        row_weights = permute(weights, row_to_pair)
        same(triton_local.gather_values(weights, row_to_pair), row_weights, (what, "gather values"))
        same(triton_local.gather_values(row_weights, pair_to_row), permute(row_weights, pair_to_row), (what, "back"))

        # Padding of results is not read.
        results = values(num_rows, hidden + 5, dtype=dtype)[:, 2 : hidden + 2]
        results[row_to_pair < 0] = float("nan")
        wanted = combine_slots(results, slot_to_row, torch.float32 if out_dtype == torch.bfloat16 else out_dtype)
        if out_dtype == torch.bfloat16:
            # The interpreter cuts where GPUs round.
            wanted = wanted.view(torch.int32).bitwise_and(-65536).view(torch.float32).bfloat16()
        same(triton_local.sum_slots(results, slot_to_row, out_dtype), wanted, (what, "sum"))

DTYPES = itertools.cycle(
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float16),
        (torch.float32, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.float64, torch.float64),
        (torch.float64, torch.float32),
    ]
)
cases = [(kind, 20, 6, 3, 40) for kind in ROUTING_KINDS]
cases += [
    ("uniform", 0, 6, 3, 24),
    ("uniform", 1, 3, 2, 1),
    ("dropped", 130, 2, 2, 24),
    ("zipf", 90, 5, 2, 33),
    ("uniform", 9, 40, 8, 17),
    ("duplicates", 5, 1, 5, 7),
]
for case in cases:
    kind, num_tokens, num_experts, top_k, hidden = case
    index = random_routing(kind, num_tokens, num_experts, top_k).topk_index
    check(index, num_experts, hidden, *next(DTYPES), case)
check(torch.tensor([[2**40, 1], [-(2**40), 0]]) % 2**31, 2, 8, torch.float32, torch.float32, "far outside")
far = torch.tensor([2**40, 1, -(2**40), 2**32, 0, 2**31])
got = triton_local.layout_pairs(far, 2, 256)
# As outputs of an operator may not.
assert len({tensor.untyped_storage().data_ptr() for tensor in got}) == len(got)
same(got[2], torch.tensor([-1, 128, -1, -1, 0, -1]), "ids of 64 bits")
print("done")
"""


def test_kernels_in_the_interpreter(seed):
    """A process of its own, as triton decides at its import."""
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-c", IN_INTERPRETER, str(seed)],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout.strip() == "done", done.stderr[-3000:]
