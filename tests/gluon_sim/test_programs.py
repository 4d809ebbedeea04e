"""Launches: streams, memory between kernels, host functions, reproducible schedules, bugs in helper modules."""

import importlib
import sys

import pytest
import torch
import triton
import triton.language as tl

from tests.gluon_sim.schedules import always, always_reports
from tests.support.gluon_sim import POLICIES, Race, SimError, launch, run_streams, simulated_launches
from tests.support.gluon_sim.mutation import Bug, assert_caught


@triton.jit
def count(ids, counts, n, BINS: tl.constexpr, BLOCK: tl.constexpr):
    for c in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        o = c + tl.arange(0, BLOCK)
        h = tl.histogram(tl.load(ids + o, mask=o < n, other=0), BINS, mask=o < n)
        tl.atomic_add(counts + tl.arange(0, BINS), h, mask=h > 0, sem="relaxed")


@triton.jit
def accumulate(counts, out, BINS: tl.constexpr):
    b = tl.arange(0, BINS)
    tl.store(out + b, tl.cumsum(tl.load(counts + b), 0))


def offsets(ids, out, programs=3):
    """A host function as the project's are: it launches kernels."""
    counts = torch.zeros_like(out)
    count[(programs,)](ids, counts, ids.numel(), BINS=16, BLOCK=128)
    accumulate[lambda options: (options["BINS"] // 16,)](counts, out, BINS=16)


def run_two_kernels(policy, seed, streams=1, strict=None):
    ids = torch.randint(0, 16, (1000,), dtype=torch.int32)
    counts, out = (torch.zeros(16, dtype=torch.int32) for _ in range(2))
    first, second = (
        (count, 3, (ids, counts, 1000), dict(BINS=16, BLOCK=128)),
        (accumulate, 1, (counts, out), dict(BINS=16)),
    )
    items = [first, second]
    if strict is not None:
        items = [lambda simulation: simulation.memory.undefine(counts, strict), second]
    run_streams([items] if streams == 1 else [[first], [second]], policy=policy, seed=seed)
    assert out.tolist() == torch.bincount(ids, minlength=16).cumsum(0).tolist()


def test_kernels_in_one_stream_are_ordered(seed):
    always(run_two_kernels)


def test_kernels_in_two_streams_are_not():
    always_reports(Race, r"of global r[01]\.counts\[\d+\]", lambda p, s: run_two_kernels(p, s, streams=2))


def test_memory_that_no_kernel_has_written():
    text = r"r0\.accumulate#0 p0 .*counts\[0\], which nothing has written in this call"
    # The host function runs before the first launch registers its tensors.
    with pytest.raises(SimError, match="illegal global memory access .* by undefine"):
        run_two_kernels("rr", 0, strict=True)
    counts, out = (torch.zeros(16, dtype=torch.int32) for _ in range(2))
    with pytest.raises(SimError, match=text):
        run_streams(
            [
                [
                    lambda simulation: simulation.memory.undefine(counts, True),
                    (accumulate, 1, (counts, out), dict(BINS=16)),
                ]
            ],
            extra={"counts": counts},
        )


def test_host_functions_launch_under_the_simulator(seed):
    ids, out = torch.randint(0, 16, (1000,), dtype=torch.int32), torch.zeros(16, dtype=torch.int32)
    with simulated_launches(sys.modules[__name__], policy="pct", seed=3) as simulations:
        offsets(ids, out)
    assert out.tolist() == torch.bincount(ids, minlength=16).cumsum(0).tolist()
    assert len(simulations) == 2 and all(simulation.steps > 0 for simulation in simulations)
    assert isinstance(count, triton.runtime.JITFunction)


@triton.jit
def collide(out, n):
    for i in range(n):
        tl.atomic_xchg(out + tl.program_id(0) * 0, tl.program_id(0) * 100 + i)


@pytest.mark.parametrize("policy", POLICIES)
def test_same_policy_and_seed_give_the_same_run(policy):
    def outcome(seed):
        out = torch.zeros(1, dtype=torch.int32)
        simulation = launch(collide, 4, (out, 5), policy=policy, seed=seed)
        return int(out), simulation.steps

    assert all(outcome(seed) == outcome(seed) for seed in range(5))


def test_seeds_give_different_runs():
    def last(seed):
        out = torch.zeros(1, dtype=torch.int32)
        launch(collide, 4, (out, 5), policy="random", seed=seed)
        return int(out)

    assert len({last(seed) for seed in range(20)}) > 1


def test_unknown_policy():
    with pytest.raises(ValueError, match="policy = 'fifo': expected one of"):
        launch(collide, 1, (torch.zeros(1, dtype=torch.int32), 1), policy="fifo")


@triton.jit
def never_ends(x):
    i = 0
    while i >= 0:
        tl.store(x, i)
        i = 1 - i


def test_endless_kernel():
    with pytest.raises(SimError, match="more than 1000 steps"):
        launch(never_ends, 1, (torch.zeros(1),), max_steps=1000)


# ---------------------------------------------------------------- planted bugs

HELPER = """
import triton
import triton.language as tl

@triton.jit
def offset(i, BLOCK: tl.constexpr):
    return i * BLOCK + tl.arange(0, BLOCK)
"""
MIDDLE = """
import triton
from {package}.helper import offset

@triton.jit
def twice(x, i, BLOCK):
    return 2 * tl.load(x + offset(i, BLOCK))

import triton.language as tl
"""
MAIN = """
import triton
import triton.language as tl
from {package} import middle
from {package}.helper import offset
from {package}.middle import twice

@triton.jit
def double(x, out, BLOCK: tl.constexpr):
    tl.store(out + offset(tl.program_id(0), BLOCK), twice(x, tl.program_id(0), BLOCK))
"""


@pytest.fixture
def family(tmp_path, monkeypatch):
    """Modules of which each uses the ones before: (helper, middle, main)."""
    package = f"family_{tmp_path.name}"
    folder = tmp_path / package
    folder.mkdir()
    (folder / "__init__.py").touch()
    for name, source in (("helper", HELPER), ("middle", MIDDLE), ("main", MAIN)):
        (folder / f"{name}.py").write_text(source.replace("{package}", package), encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield [importlib.import_module(f"{package}.{name}") for name in ("helper", "middle", "main")]
    for name in [name for name in sys.modules if name.startswith(package)]:
        del sys.modules[name]


def run_double(module, policy, seed):
    x, out = torch.arange(64.0), torch.zeros(64)
    launch(module.double, 2, (x, out), dict(BLOCK=32), policy=policy, seed=seed)
    assert torch.equal(out, 2 * x), "wrong result"


@pytest.mark.parametrize(
    "old, new, text",
    [
        ("i * BLOCK + ", "", "is not ordered"),
        ("i * BLOCK + ", "i * BLOCK + 1 + ", "illegal global memory access"),
        ("return 2 *", "return 3 *", "wrong result"),
        ("twice(x, tl.program_id(0), BLOCK)", "twice(x, 0, BLOCK)", "wrong result"),
    ],
)
def test_bugs_in_helper_modules(family, old, new, text):
    helper, middle, main = family
    run_double(main, "rr", 0)
    findings = assert_caught(main, Bug("bug", run_double, old, new), helpers=(helper, middle))
    assert text in str(findings[0]) and "(random, seed 0)" in str(findings[0])
    # Nothing of the edit stays.
    assert sys.modules[helper.__name__] is helper and main.middle is middle
    run_double(main, "rr", 0)


def test_what_is_not_a_finding(family):
    helper, middle, main = family
    with pytest.raises(NameError):
        assert_caught(main, Bug("misspelt", run_double, "2 * tl", "2 * tll"), helpers=(helper, middle))
    both = Bug(
        "cancel each other", run_double, "return 2 *", "return 4 *", also=(("out + offset", "out + 0 * 1 + offset"),)
    )
    assert len(assert_caught(main, both, helpers=(helper, middle), needed=3)) == 3
