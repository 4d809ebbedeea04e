"""DeepGEMM's test helpers: differences, sizes, times, decorators."""

from __future__ import annotations

import json
import os
import sys
import time

import pytest
import torch

import megamoe.compat.deep_gemm.testing as testing
from megamoe.compat.deep_gemm.testing.bench import kernel_seconds
from tests.support.errors import fails

# ---------------------------------------------------------------- numbers


def test_calc_diff():
    x, y = torch.tensor([3.0, 4.0]), torch.tensor([3.0, 2.0]).bfloat16()
    assert float(testing.calc_diff(x, y)) == pytest.approx(4 / 38)
    # The same as 1 minus the normalised scalar product.
    assert float(testing.calc_diff(x, y)) == pytest.approx(1 - 2 * (9 + 8) / 38)
    assert testing.calc_diff(x, x) == 0
    assert testing.calc_diff(torch.zeros(2), torch.zeros(2)) == 0
    assert testing.calc_diff(torch.zeros(2), x) == 1
    assert f"{testing.calc_diff(x, y):.3f}" == "0.105"


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_calc_diff_of_no_number_passes_no_bound(bad):
    assert not testing.calc_diff(torch.tensor([1.0, bad]), torch.tensor([1.0, bad])) < 1


def test_count_bytes():
    a, b = torch.zeros(3, 5), torch.zeros(7, dtype=torch.bfloat16)
    assert testing.count_bytes(a, (b, [b, None]), None) == 60 + 14 + 14
    assert testing.count_bytes() == 0


def test_assert_bitwise_equal():
    x = torch.tensor([[1.0, float("nan")], [0.0, 2.0]])
    testing.assert_bitwise_equal(x, x.clone())
    testing.assert_bitwise_equal(x.T, x.T.contiguous())
    testing.assert_bitwise_equal(torch.zeros(0, 3), torch.zeros(0, 3))
    y = x.clone()
    y[1, 0] = -0.0
    with pytest.raises(AssertionError, match=r"1 of 16 bytes of logits differ, first in \[1, 0\]: 0.0, -0.0"):
        testing.assert_bitwise_equal(x, y, "logits")
    with pytest.raises(AssertionError, match="tensors differ: torch.float32"):
        testing.assert_bitwise_equal(x, x.double())
    with pytest.raises(AssertionError, match=r"\[2, 2\], torch.float32 \[4\]"):
        testing.assert_bitwise_equal(x, x.flatten())


# ---------------------------------------------------------------- times

KERNELS = {"fp8_gemm_wide": 3.0, "fp8_gemm_narrow": 1.0, "transpose": 0.5, "Memset (Device)": 100.0}


def test_kernels_of_one_name_count_together():
    assert kernel_seconds(("gemm_",), KERNELS, 2) == (2.0,)
    assert kernel_seconds(("narrow", "nvjet", "transpose"), KERNELS, 2) == (0.5, 0.0, 0.25)


def test_without_a_known_name_the_first_gets_all_kernels():
    assert kernel_seconds(("nvjet", "reduce"), KERNELS, 2) == (2.25, 0.0)
    flushed = {**KERNELS, "void vectorized_elementwise_kernel<4, FillFunctor<double>>": 7.0, "spin_kernel": 9.0}
    assert kernel_seconds(("nvjet",), flushed, 2) == (2.25,)


def test_external_tools_take_the_measurement_over(monkeypatch):
    monkeypatch.setenv("DG_USE_NVIDIA_TOOLS", "1")
    calls = []
    assert testing.bench_kineto(lambda: calls.append(1), "gemm") == 1
    assert testing.bench_kineto(lambda: calls.append(1), ("nvjet", "reduce")) == (1, 1)
    assert not calls


@pytest.fixture
def without_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_wall_clock_times_without_a_gpu(without_gpu):
    def nap() -> None:
        time.sleep(0.002)

    assert 0.002 <= testing.bench(nap, num_warmups=1, num_tests=3) < 1
    assert 0.002 <= testing.bench_kineto(nap, "gemm_", num_tests=3) < 1
    first, second = testing.bench_kineto(nap, ("nvjet", "reduce"), num_tests=3)
    assert 0.002 <= first < 1 and second == 0


@pytest.mark.parametrize("names", [["gemm"], ()])
def test_kernel_names_are_a_string_or_a_tuple(names):
    with fails(TypeError, "kernel_names", names, "must be a string or a tuple"):
        testing.bench_kineto(lambda: None, names)


@pytest.mark.gpu
def test_times_of_kernels(tmp_path):
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    trace = tmp_path / "trace.json"
    both = testing.bench_kineto(lambda: (x @ x).sin_(), "a name of no kernel", num_tests=5)
    gemm = testing.bench_kineto(
        lambda: x @ x, "a name of no kernel", num_tests=5, suppress_kineto_output=True, trace_path=str(trace)
    )
    sine, nothing = testing.bench_kineto(lambda: (x @ x).sin_(), ("sin_kernel", "conv"), num_tests=5)
    # 137 GFLOP at up to 1 PFLOP/s, 67 MB at up to 8 TB/s; the fill of the L2 flush would take milliseconds.
    assert 1e-4 < gemm < 1e-3 and 5e-6 < sine < 1e-4 and nothing == 0
    assert both == pytest.approx(gemm + sine, rel=0.3)
    assert json.loads(trace.read_text())["traceEvents"]
    assert testing.bench(lambda: x @ x, high_precision=True) == pytest.approx(gemm, rel=0.5)


def test_suppressed_output(capfd):
    with testing.suppress_stdout_stderr():
        print("hidden")
        print("hidden", file=sys.stderr)
        os.write(1, b"hidden")
    with testing.empty_suppress():
        print("shown")
    os.write(2, b"shown")
    assert capfd.readouterr() == ("shown\n", "shown")


# ---------------------------------------------------------------- decorators


def test_arch_major(without_gpu):
    assert testing.get_arch_major() == 9


def test_filter(capsys):
    calls = []

    def record(value: int) -> None:
        calls.append(value)

    testing.test_filter(lambda: True)(record)(1)
    assert not capsys.readouterr().out
    testing.test_filter(lambda: False)(record)(2)
    assert calls == [1]
    assert "record" in capsys.readouterr().out
    assert testing.test_filter(lambda: True)(record).__name__ == "record"


def test_ignored_environment_variable(monkeypatch):
    monkeypatch.setenv("MEGAMOE_TEST_VARIABLE", "7")
    seen = []

    def record(fail: bool = False) -> None:
        seen.append(os.environ.get("MEGAMOE_TEST_VARIABLE"))
        if fail:
            raise KeyError

    testing.ignore_env("MEGAMOE_TEST_VARIABLE", lambda: True)(record)()
    testing.ignore_env("MEGAMOE_TEST_VARIABLE", lambda: False)(record)()
    with pytest.raises(KeyError):
        testing.ignore_env("MEGAMOE_TEST_VARIABLE", lambda: True)(record)(fail=True)
    assert seen == [None, "7", None]
    assert os.environ["MEGAMOE_TEST_VARIABLE"] == "7"
