"""What makes two calls the same: addresses, shapes, strides, dtypes, devices and options."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from megamoe.kernels import recent_calls
from megamoe.kernels.recent_calls import Call
from megamoe.kernels.scales import is_mn_major
from megamoe.types import Fp8Tensor


@dataclass(frozen=True)
class OnGpu:
    """Stands for a tensor on a GPU."""

    address: int = 0x1000
    shape: torch.Size = torch.Size((4, 8))
    strides: tuple[int, ...] = (8, 1)
    dtype: torch.dtype = torch.bfloat16
    index: int = 0
    is_cuda: bool = True
    device: str = "cpu"  # where new results of these calls are made

    def data_ptr(self) -> int:
        return self.address

    def stride(self) -> tuple[int, ...]:
        return self.strides

    def get_device(self) -> int:
        return self.index


@pytest.fixture(autouse=True)
def empty(monkeypatch):
    monkeypatch.setattr(recent_calls, "PLAIN_TENSORS", (OnGpu, torch.Tensor))
    monkeypatch.setattr(recent_calls, "_launches", {})
    monkeypatch.setattr(recent_calls, "_results", {})


def known(arguments, options=("gemm",), out=None) -> bool:
    return Call(arguments, options, out).launch()


A, B, OUT = OnGpu(), OnGpu(0x2000), OnGpu(0x3000)


def test_the_same_call_is_launched_again():
    runs = []
    call = Call((A, B, None), ("gemm",), OUT)
    assert not call.launch()
    call.remember(lambda: runs.append(1), OUT)
    assert not runs
    again = Call((A, B, None), ("gemm",), OUT)
    assert again.launch() and again.out is OUT and runs == [1]


@pytest.mark.parametrize(
    "change",
    [
        dict(address=0x1010),
        dict(shape=torch.Size((8, 4))),
        dict(strides=(16, 1)),
        dict(dtype=torch.float16),
        dict(index=1),
    ],
    ids=str,
)
def test_any_difference_makes_another_call(change):
    Call((A, B), ("gemm",), OUT).remember(lambda: None, OUT)
    assert known((A, B), out=OUT)
    assert not known((replace(A, **change), B), out=OUT)
    assert not known((A, replace(B, **change)), out=OUT)
    assert not known((A, B), out=replace(OUT, **change))


def test_options_and_kinds_of_arguments_count():
    def fp8(scales):
        return Fp8Tensor(A, scales, (1, 128))

    Call((fp8(B), B), ("gemm", 1), OUT).remember(lambda: None, OUT)
    assert known((fp8(B), B), ("gemm", 1), OUT)
    assert not known((fp8(B), B), ("gemm", 2), OUT)
    assert not known((fp8(OnGpu(0x2008)), B), ("gemm", 1), OUT)
    assert not known((A, B), ("gemm", 1), OUT)
    assert not known((fp8(B), None), ("gemm", 1), OUT)


def test_new_results_have_the_known_shape():
    runs = []
    first = Call((A, B), ("gemm",), None)
    assert not first.launch() and first.out is None
    first.remember(lambda: runs.append("first"), OUT)
    second = Call((A, B), ("gemm",), None)
    assert not second.launch()
    assert second.out.shape == OUT.shape and second.out.dtype == OUT.dtype
    # The same shapes elsewhere have a result of the same shape.
    assert Call((OnGpu(0x5000), B), ("gemm",), None).out is not None
    # But not at another alignment, which may be refused.
    assert Call((OnGpu(0x5008), B), ("gemm",), None).out is None


def test_results_without_a_short_way_are_not_kept():
    Call((A, B), ("gemm",), OUT).remember(None, OUT)
    assert not known((A, B), out=OUT)


def test_other_objects_are_never_kept():
    class Subclass(OnGpu):
        pass

    for arguments in ((Subclass(), B), (A, "text"), ([A], B)):
        call = Call(arguments, ("gemm",), OUT)
        call.remember(lambda: None, OUT)
        assert not known(arguments, out=OUT)
    on_cpu = torch.zeros(4)
    Call((on_cpu, on_cpu), ("gemm",), on_cpu).remember(lambda: None, on_cpu)
    assert not known((on_cpu, on_cpu), out=on_cpu)


def test_the_number_of_kept_calls_is_bounded(monkeypatch):
    monkeypatch.setattr(recent_calls, "MAX_CALLS", 3)
    for index in range(10):
        Call((OnGpu(16 * index), B), ("gemm",), OUT).remember(lambda: None, OUT)
        assert len(recent_calls._launches) <= 3
        assert known((OnGpu(16 * index), B), out=OUT)


def test_new_fp8_results_have_mn_major_scales():
    """A call seen before makes its result in the form that the first one returned, codes and scales."""
    made = Fp8Tensor(torch.empty(256, 384, dtype=torch.float8_e4m3fn), torch.empty(3, 256).t(), (1, 128))
    Call((A, B), ("gemm",), None).remember(lambda: None, made)
    out = Call((A, B), ("gemm",), None).out
    assert type(out) is Fp8Tensor and out.block == made.block
    assert out.codes.shape == made.codes.shape and out.codes.dtype == made.codes.dtype
    assert out.scales.shape == made.scales.shape and is_mn_major(out.scales)
    assert out.codes.data_ptr() != made.codes.data_ptr()
