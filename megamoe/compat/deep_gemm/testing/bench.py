"""Times of calls and of the kernels in them. Without a GPU all are wall-clock times."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping

import torch

from megamoe.errors import fail_type

FLUSH_BYTES = 8_000_000_000
"""Written between calls: it empties the L2 cache, and its milliseconds let the GPU cool down."""

# In a trace: the harness's fill of the flushed memory (the only one of fp64) and its pauses, and what is no kernel.
HARNESS = ("FillFunctor<double>", "spin_kernel", "ProfilerStep", "Memset", "Memcpy")

empty_suppress = contextlib.nullcontext


@contextlib.contextmanager
def suppress_stdout_stderr() -> Iterator[None]:
    """Output goes nowhere, that of native code included."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        with open(os.devnull, "w") as sink, contextlib.redirect_stdout(sink), contextlib.redirect_stderr(sink):
            yield
    finally:
        os.dup2(saved[0], 1)
        os.dup2(saved[1], 2)
        for descriptor in (*saved, nowhere):
            os.close(descriptor)


def _wall_clock(fn: Callable, num_tests: int) -> float:
    start = time.perf_counter()
    for _ in range(num_tests):
        fn()
    return (time.perf_counter() - start) / num_tests


def bench(fn: Callable, num_warmups: int = 5, num_tests: int = 10, high_precision: bool = False) -> float:
    """Seconds of one ``fn()`` on the GPU, the mean of ``num_tests`` in a row after ``num_warmups``.

    Args:
        high_precision: a long kernel goes first, so that launches by the host do not show.
    """
    if not torch.cuda.is_available():
        _wall_clock(fn, num_warmups or 1)
        return _wall_clock(fn, num_tests)
    torch.cuda.synchronize()
    torch.empty(256_000_000, dtype=torch.int8, device="cuda").zero_()
    for _ in range(num_warmups):
        fn()
    if high_precision:
        x = torch.ones(8192, 8192, device="cuda")
        torch.mm(x, x)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(num_tests):
        fn()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / num_tests / 1e3


def kernel_seconds(names: tuple[str, ...], kernels: Mapping[str, float], num_tests: int) -> tuple[float, ...]:
    """Seconds per call in the kernels whose names contain each of ``names``; 0 where there is none.

    Kernels of other libraries have other names: where no kernel has any of ``names``, the first gets the time of all.

    Args:
        kernels: seconds by kernel name, of ``num_tests`` calls.
    """
    kernels = {kernel: seconds for kernel, seconds in kernels.items() if not any(own in kernel for own in HARNESS)}
    found = [sum(seconds for kernel, seconds in kernels.items() if name in kernel) for name in names]
    if not any(found):
        found[0] = sum(kernels.values())
    return tuple(seconds / num_tests for seconds in found)


def bench_kineto(
    fn: Callable,
    kernel_names: str | tuple[str, ...],
    num_tests: int = 30,
    suppress_kineto_output: bool = False,
    trace_path: str | None = None,
    flush_l2: bool = True,
    with_multiple_kernels: bool = False,
    barrier: Callable | None = None,
) -> float | tuple[float, ...]:
    """Seconds per ``fn()`` in kernels of the given name, or of each of a tuple of names, from torch's profiler.

    A name fits every kernel that contains it. Where none fits, see ``kernel_seconds``. The environment variable
    ``DG_USE_NVIDIA_TOOLS=1`` leaves the profiler and ``fn`` to other tools: all times are 1 then.

    Args:
        num_tests: calls, after as many to warm up.
        suppress_kineto_output: nothing is printed meanwhile.
        trace_path: where a Chrome trace goes.
        flush_l2: each call finds the L2 cache empty.
        with_multiple_kernels: without effect: several kernels of a name always count together.
        barrier: runs before each call, after 10 ms in which launches catch up.
    """
    single = isinstance(kernel_names, str)
    if not single and not (isinstance(kernel_names, tuple) and kernel_names):
        fail_type("kernel_names", kernel_names, "must be a string or a tuple of strings", "Name a kernel.")
    names = (kernel_names,) if single else kernel_names
    if int(os.environ.get("DG_USE_NVIDIA_TOOLS", 0)):
        times = (1,) * len(names)
    elif torch.cuda.is_available():
        fn()
        with suppress_stdout_stderr() if suppress_kineto_output else empty_suppress():
            kernels = _profile(fn, num_tests, trace_path, flush_l2, barrier)
        times = kernel_seconds(names, kernels, num_tests)
    else:
        fn()
        times = kernel_seconds(names, {"call": _wall_clock(fn, num_tests) * num_tests}, num_tests)
    return times[0] if single else times


def _profile(
    fn: Callable, num_tests: int, trace_path: str | None, flush_l2: bool, barrier: Callable | None
) -> dict[str, float]:
    """Seconds by kernel name, of the second half of ``2 * num_tests`` calls."""
    profiler = torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CUDA],
        schedule=torch.profiler.schedule(wait=0, warmup=1, active=1, repeat=1),
        acc_events=True,
    )
    with profiler:
        for _ in range(2):
            for _ in range(num_tests):
                if flush_l2:
                    torch.full((FLUSH_BYTES // 8,), 0.0, dtype=torch.float64, device="cuda")
                if barrier is not None:
                    torch.cuda._sleep(20_000_000)
                    barrier()
                fn()
            torch.cuda.synchronize()
            profiler.step()
    if trace_path is not None:
        profiler.export_chrome_trace(trace_path)
    on_gpu = [event for event in profiler.key_averages() if event.device_type == torch.autograd.DeviceType.CUDA]
    # In microseconds there.
    return {event.key: event.self_device_time_total * 1e-6 for event in on_gpu}
