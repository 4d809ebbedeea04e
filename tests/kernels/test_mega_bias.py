"""Biases in the mega-kernels: the bits of the same layer in separate kernels, and planted bugs."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("triton.experimental.gluon")
pytest.importorskip("greenlet")

import torch  # noqa: E402

from megamoe.kernels import mega, reference  # noqa: E402
from megamoe.kernels.gemm import grouped_bf16_gemm_nt, grouped_fp8_gemm_nt  # noqa: E402
from megamoe.kernels.gemm_swiglu import grouped_bf16_gemm_swiglu_nt, grouped_fp8_gemm_swiglu_nt  # noqa: E402
from megamoe.kernels.gluon import mega_bf16, mega_moe, mega_pieces, spelling  # noqa: E402
from megamoe.kernels.row_groups import RowGroups  # noqa: E402
from megamoe.types import Fp8Tensor  # noqa: E402
from tests.support.exchange_sim import Tokens, add_combine, add_dispatch, expected_rows, make_tokens  # noqa: E402
from tests.support.gemm_sim import simulated_gemm  # noqa: E402
from tests.support.gluon_sim.mutation import Bug, assert_caught  # noqa: E402
from tests.support.mega_sim import MegaSizes, MegaWorld, add_mega_call  # noqa: E402

# The last tile of GEMM 2 has half of its columns.
SIZES = MegaSizes(tokens=40, hidden=384, intermediate=256)
PRECISIONS = pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "bf16"])
Biases = list[tuple[torch.Tensor, torch.Tensor]]


def make_biases(sizes: MegaSizes) -> Biases:
    """As large as the results of the GEMMs."""
    columns = 2 * sizes.intermediate, sizes.hidden
    return [tuple(torch.randn(sizes.local, n) for n in columns) for _ in range(sizes.ranks)]


def fused(sizes: MegaSizes, tokens: list[Tokens], biases: Biases, policy: str, seed: int, **options) -> list:
    world, mine = MegaWorld(sizes, fused=False), [replace(each) for each in tokens]
    add_mega_call(world, mine, biases=biases, **options)
    world.run(policy, seed)
    assert not any(any(error) for error in world.errors)
    return [each.out for each in mine]


def separate(sizes: MegaSizes, tokens: list[Tokens], biases: Biases, seed: int, **options) -> list:
    world, tokens = MegaWorld(sizes), [replace(mine) for mine in tokens]
    add_dispatch(world, tokens)
    world.run("random", seed)
    first, second = grouped_fp8_gemm_swiglu_nt, grouped_fp8_gemm_nt
    if not sizes.fp8:
        first, second = grouped_bf16_gemm_swiglu_nt, grouped_bf16_gemm_nt
    results = []
    with simulated_gemm("random", seed):
        for mine, (up, down), (up_bias, down_bias) in zip(tokens, world.weights, biases, strict=True):
            groups = RowGroups.psum((mine.table.starts + mine.table.counts).int())
            rows = Fp8Tensor(mine.rows, mine.scales, (1, 128)) if sizes.fp8 else mine.rows
            act = first(rows, up, groups, bias=up_bias, **options)
            out = second(act, down, groups, bias=down_bias, out_dtype=torch.float32)
            results.append((out * mine.table.row_weights[:, None]).bfloat16())
    add_combine(world, tokens, results)
    world.run("random", seed)
    return [mine.out for mine in tokens]


def expected(sizes: MegaSizes, tokens: list[Tokens], biases: Biases) -> list[torch.Tensor]:
    """fp32 outputs without any cast but those of weights, token by token."""
    world = MegaWorld(sizes)
    out = [torch.zeros(mine.x.shape) for mine in tokens]
    for rank in range(sizes.ranks):
        weights = [reference.dequantize(w) if sizes.fp8 else w.float() for w in world.weights[rank]]
        rows = expected_rows(sizes, tokens, rank)
        for row in (rows.source >= 0).nonzero().flatten().tolist():
            source, pair = int(rows.source[row]), int(rows.pair[row])
            expert = next(e for e in range(sizes.local) if rows.starts[e] <= row < rows.starts[e] + rows.counts[e])
            x, weight = tokens[source].x[pair // sizes.top_k].float(), tokens[source].weights.flatten()[pair]
            gate, up = (weights[0][expert] @ x + biases[rank][0][expert]).chunk(2)
            act = torch.nn.functional.silu(gate) * up
            out[source][pair // sizes.top_k] += weight * (weights[1][expert] @ act + biases[rank][1][expert])
    return out


@PRECISIONS
@pytest.mark.parametrize(("activation", "clamp"), [("swiglu", None), ("swiglu_oai", 1.0)])
def test_bits_of_separate_kernels(fp8, activation, clamp, seed):
    sizes, options = replace(SIZES, fp8=fp8), dict(activation=activation, clamp=clamp)
    tokens, biases = make_tokens(sizes, [40, 9], "holes"), make_biases(sizes)
    outs = fused(sizes, tokens, biases, "random", seed, **options)
    others = separate(sizes, tokens, biases, seed, **options)
    assert all(out.any() and torch.equal(out, other) for out, other in zip(outs, others, strict=True))
    if clamp is None:
        for out, wanted in zip(outs, expected(sizes, tokens, biases), strict=True):
            error = torch.linalg.vector_norm(out.float() - wanted) / torch.linalg.vector_norm(wanted)
            assert error < 0.08, error


# ---------------------------------------------------------------- planted bugs


def case(fp8: bool):
    sizes = replace(SIZES, fp8=fp8)

    def run(module, policy: str, seed: int) -> None:
        torch.manual_seed(seed)
        tokens, biases = make_tokens(sizes, [40, 30], "one"), make_biases(sizes)
        wanted = separate(sizes, tokens, biases, seed)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(mega, module.__name__.rpartition(".")[2], module)
            outs = fused(sizes, tokens, biases, policy, seed)
        assert all(torch.equal(out, other) for out, other in zip(outs, wanted, strict=True))

    return run


FP8, BF16 = case(True), case(False)
UP, DOWN = "bias0 = up_bias + expert * (2 * INTER)", "bias0 = down_bias + expert * H"
RIGHT = "gl.where((2 * n + 1) * BLOCK < H, BLOCK, 0)"
WEIGHTED = "if not BIAS:\n"

FP8_BUGS = [
    Bug("gate and up biases of another expert", FP8, UP, UP.replace("expert", "0")),
    Bug("biases of GEMM 2 of another expert", FP8, DOWN, DOWN.replace("expert", "0")),
    Bug("gate biases for up", FP8, "bias1 = bias0 + INTER", "bias1 = bias0"),
    Bug("biases of the other half of the columns", FP8, RIGHT, "0"),
    Bug("biases beyond the last are read", FP8, RIGHT, "BLOCK"),
    Bug(
        "biases of another expert", FP8, "tile_biases(tile[0], biases", "tile_biases(tile[0] - (tile[0] & 255), biases"
    ),
    Bug("activations are weighted too", FP8, WEIGHTED, "if True:\n"),
    Bug("half of a result is not weighted", FP8, "            f1 = f1 * weights[:, None]\n", ""),
    Bug("the first wave starts from zero", FP8, "        f0 += bias_rows(starts[0], L)\n", "        pass\n"),
]
BF16_BUGS = [
    Bug("gate biases for up", BF16, "gl.where(cols < BLOCK, left, right)", "gl.where(cols < BLOCK, left, left)"),
    Bug("the first product overwrites the biases", BF16, "use_acc=BIAS or k > 0", "use_acc=k > 0"),
    Bug("activations are weighted too", BF16, WEIGHTED, "if True:\n"),
    Bug("half of a result is not weighted", BF16, "            left = left * weights[:, None]\n", ""),
]


@pytest.mark.parametrize("bug", FP8_BUGS, ids=str)
def test_bug_is_caught(bug):
    assert_caught(mega_moe, bug, helpers=(spelling, mega_pieces))


@pytest.mark.parametrize("bug", BF16_BUGS, ids=str)
def test_bug_in_bf16_is_caught(bug):
    assert_caught(mega_bf16, bug, helpers=(spelling, mega_pieces))
