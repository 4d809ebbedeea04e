"""Which compiled kernel a launch takes: found again for other sizes and addresses, not for other types."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from megamoe.kernels.gluon import launch  # noqa: E402
from megamoe.kernels.tiles import Tile  # noqa: E402
from tests.support.gemm_cases import Case, Instance  # noqa: E402
from tests.support.k_gemm_cases import KCase, KInstance  # noqa: E402


@pytest.fixture
def compilations(monkeypatch):
    """Notes what is compiled, instead of compiling it."""
    seen = []
    monkeypatch.setattr(launch, "_kernels", {})
    kernels = (
        (launch.fp8, "fp8_gemm_kernel"),
        (launch.bf16, "bf16_gemm_kernel"),
        (launch.k_fp8, "k_grouped_fp8_gemm_kernel"),
        (launch.k_bf16, "k_grouped_bf16_gemm_kernel"),
    )
    for module, name in kernels:
        kernel = getattr(module, name)
        monkeypatch.setattr(kernel, "warmup", lambda *args, kernel=kernel, **_: seen.append((kernel, args)) or object())
    return seen


def operands(case: Case, out: torch.Tensor | None = None, **changes) -> launch.Operands:
    x = Instance(case)
    fields = dict(
        a=x.a.codes if case.fp8 else x.a,
        a_scales=x.a.scales.t() if case.fp8 else None,
        b=x.b.codes if case.fp8 else x.b,
        b_scales=x.b.scales if case.fp8 else None,
        out=x.poisoned() if out is None else out,
        out_scales=None,
        index=x.rows.index,
        c=x.c,
        bias=x.bias,
        row_weights=None,
        num_rows=x.num_rows,
    )
    return launch.Operands(**{**fields, **changes})


WIDE = Tile(128, 256, 4)


def compiled(x: launch.Operands, tile: Tile = WIDE, device: int = 0, **options):
    kernel, arguments = launch.arguments_of("psum", x, tile, **options)
    return launch._compiled(kernel, arguments, device)


def test_sizes_and_addresses_do_not_matter(compilations):
    first = compiled(operands(Case((100, 3), 256, 256)))
    for case in (Case((100, 3), 256, 256), Case((1,), 512, 128), Case((5, 0, 700), 264, 1024)):
        assert compiled(operands(case)) is first
    assert len(compilations) == 1


def test_types_tiles_and_options_do(compilations):
    case = Case((100, 3), 256, 256)
    variants = [
        compiled(operands(case)),
        compiled(operands(case), device=1),
        compiled(operands(case), Tile(128, 192, 4)),
        compiled(operands(case), Tile(128, 256, 3)),
        compiled(operands(case), Tile(128, 256, 4, group_m=4)),
        compiled(operands(case, torch.empty(256, 256))),
        compiled(operands(case, torch.empty(256, 128, dtype=torch.bfloat16)), activation="swiglu"),
        compiled(operands(case, torch.empty(256, 128, dtype=torch.bfloat16)), activation="swiglu", clamp=1.0),
        compiled(
            operands(
                case,
                torch.empty(256, 128, dtype=torch.bfloat16),
                pre=torch.empty(256, 256, dtype=torch.bfloat16),
            ),
            activation="swiglu",
        ),
        compiled(operands(case, bias=torch.zeros(2, 256))),
        compiled(operands(case, bias=torch.zeros(2, 256, dtype=torch.bfloat16))),
        compiled(operands(Case((100, 3), 256, 256, fp8=False)), Tile(128, 256, 4, skew=2)),
    ]
    assert len({id(variant) for variant in variants}) == len(variants) == len(compilations)
    # A number of another value is the same kernel.
    again = compiled(operands(case, torch.empty(256, 128, dtype=torch.bfloat16)), activation="swiglu", clamp=7.0)
    assert again is variants[7]


# ---------------------------------------------------------------- K-grouped

THREE = Tile(128, 256, 3)


def k_compiled(case: KCase, tile: Tile = THREE):
    x = KInstance(case)
    a, b = ((z.codes, z.scales) if case.fp8 else (z, None) for z in (x.a, x.b))
    kernel, arguments = launch.k_arguments_of(launch.KOperands(*a, *b, x.poisoned(), case.add, x.rows.index), tile)
    return launch._compiled(kernel, arguments, 0)


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_k_grouped_sizes_and_addresses_do_not_matter(fp8, compilations):
    first = k_compiled(KCase((100, 3), fp8=fp8))
    for counts, m, n in (((100, 3), 256, 256), ((1,), 512, 128), ((5, 0, 700), 264, 1024)):
        assert k_compiled(KCase(counts, m, n, fp8=fp8)) is first
    assert len(compilations) == 1


def test_k_grouped_types_tiles_and_options_do(compilations):
    variants = [
        k_compiled(KCase((100, 3))),
        k_compiled(KCase((100, 3), add=True)),
        k_compiled(KCase((100, 3), out_dtype=torch.bfloat16)),
        k_compiled(KCase((100, 3)), Tile(128, 256, 4)),
        k_compiled(KCase((100, 3)), Tile(128, 256, 3, skew=1)),
        k_compiled(KCase((100, 3)), Tile(128, 256, 3, group_m=4)),
        k_compiled(KCase((100, 3), fp8=True)),
        k_compiled(KCase((100, 3), fp8=True, add=True)),
    ]
    assert len({id(variant) for variant in variants}) == len(variants) == len(compilations)
