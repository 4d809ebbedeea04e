"""``SymmetricBuffer``: regions, lending, errors in words, sharing, and ranks that disagree. Without a GPU."""

from __future__ import annotations

import contextlib
import gc
import sys

import pytest
import torch
import torch.distributed as dist

from megamoe import ExchangeError, MegaMoEError, MoEConfig
from megamoe.comm import allocators, symm
from megamoe.comm.allocators import Allocation
from megamoe.comm.symm import SymmetricBuffer, acquire_buffer, release_buffer
from megamoe.kernels import flag_words
from megamoe.plan import plan_memory
from tests.support.errors import fails
from tests.support.processes import run_ranks

CPU = torch.device("cpu")


def plan(tokens: int = 8, ranks: int = 1, **config):
    return plan_memory(MoEConfig(32, 16, 4, 2, **config), ranks, tokens)


def test_allocates_exactly_the_plan():
    with SymmetricBuffer(plan(), device=CPU) as buffer:
        assert buffer.nbytes == plan().total
        for region in buffer.plan.regions:
            view = buffer.region(region.name)
            assert view.numel() == region.nbytes and not view.any()


def test_lends_its_regions_to_a_smaller_plan():
    pytest.importorskip("triton")
    buffer = SymmetricBuffer(plan(16, precision="fp8"), device=CPU)
    small = plan(5)
    memory = buffer.lend(small)
    assert memory.max_tokens == 5 and memory.list_index.numel() == 5 * 2 and memory.rows.numel() == 5 * 32 * 2
    # Where the larger plan has them.
    for name in ("flags", "list_index", "rows", "slots", "error"):
        assert getattr(memory, name).data_ptr() == buffer.region(name).data_ptr()
    assert memory.budget_ns == 60_000_000_000 and memory.deltas.tolist() == [0]
    with pytest.raises(MegaMoEError, match="must not need more in any region"):
        buffer.lend(plan(17))


def test_closed_buffers_refuse():
    buffer = SymmetricBuffer(plan(), device=CPU)
    buffer.close()
    buffer.close()
    assert buffer.closed
    for use in (
        lambda: buffer.nbytes,
        lambda: buffer.region("rows"),
        buffer.check,
        buffer.reset,
        lambda: buffer.run([]),
    ):
        with fails(ValueError, "SymmetricBuffer", "closed", "must be open"):
            use()


@pytest.mark.parametrize(
    ("words", "texts"),
    [
        ((flag_words.READY + 1, 3, 7, 5), ["waited 60.0 s for rank 3", "dispatch 7", "has come to dispatch 5"]),
        ((flag_words.SCATTERED + 1, 1, 2, 1), ["for rank 1", "results to combine 2", "come to combine 1"]),
        ((flag_words.PULLED + 1, 1, 2, 1), ["next call after dispatch 2", "left dispatch 1 behind"]),
        ((flag_words.REDUCED + 1, 1, 2, 1), ["next call after combine 2", "left combine 1 behind"]),
        ((flag_words.BARRIER + 1, 1, 4, 3), ["to barrier 4", "to barrier 3"]),
        ((flag_words.CAPACITY, 512, 256, 512), ["512 rows were routed", "the pool has 256", "lost"]),
        ((flag_words.PULLED_ROWS, 7, 128, 3), ["60.0 s for 128 rows to be read of block 7; 3 were", "held SMs"]),
        ((flag_words.FINISHED_TILES, 7, 32, 5), ["for 32 half tiles of GEMM 1 of block 7; 5 were", "fewer SMs"]),
        ((flag_words.CONSUMED_TILES, 7, 28, 0), ["for 28 tiles of GEMM 2 of block 7; 0 were", "fewer SMs"]),
    ],
)
def test_check_says_what_the_error_words_mean(words, texts):
    buffer = SymmetricBuffer(plan(), device=CPU)
    buffer.check()
    buffer.region("error").view(torch.int64).copy_(torch.tensor(words))
    for _ in range(2):
        with pytest.raises(ExchangeError) as caught:
            buffer.check()
        assert all(text in str(caught.value) for text in texts), str(caught.value)
    buffer.region("flags").view(torch.int64).fill_(7)
    buffer.region("state").view(torch.int64).fill_(7)
    buffer.region("rows").fill_(1)
    buffer.reset()
    buffer.check()
    assert not buffer.region("flags").any() and not buffer.region("state").any()
    assert buffer.region("rows").all()


def test_bad_arguments():
    with fails(TypeError, "plan", "dict", "must be a MemoryPlan"):
        SymmetricBuffer({}, device=CPU)
    with fails(ValueError, "allocator", "cuda", "must be one of"):
        SymmetricBuffer(plan(), device=CPU, allocator="cuda")
    with fails(ValueError, "timeout", 0, "must be finite and > 0"):
        SymmetricBuffer(plan(), device=CPU, timeout=0)
    with fails(ValueError, "group", {0: "the plan is for 2 ranks, the group has 1"}, "cannot take part"):
        SymmetricBuffer(plan(ranks=2), device=CPU)


def test_capturing_a_graph(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with fails(ValueError, "SymmetricBuffer", "a CUDA graph is being captured", "must exist before"):
        SymmetricBuffer(plan(), device="cuda:0")


# ---------------------------------------------------------------- sharing


def test_buffers_are_shared_and_closed_by_the_last_user():
    first = acquire_buffer(plan(16), None, device=CPU)
    second = acquire_buffer(plan(8), None, device=CPU)
    assert second is first
    larger = acquire_buffer(plan(32), None, device=CPU)
    assert larger is not first
    release_buffer(first)
    assert not first.closed
    release_buffer(second)
    assert first.closed and not larger.closed
    again = acquire_buffer(plan(8), None, device=CPU)
    assert again is larger
    other = acquire_buffer(plan(8), None, device=CPU, timeout=5)
    assert other is not larger
    for buffer in (larger, again, other):
        release_buffer(buffer)
    assert not symm._shared
    with pytest.raises(MegaMoEError, match="must come from acquire_buffer"):
        release_buffer(larger)


def test_no_destructor_gives_memory_back(monkeypatch):
    """It might be a collective there."""
    released = []

    def allocate(allocator, nbytes, device, group):
        memory = torch.zeros(nbytes, dtype=torch.uint8)
        return Allocation(memory, [memory.data_ptr()], lambda: released.append(1))

    monkeypatch.setattr(allocators, "allocate", allocate)
    buffer = SymmetricBuffer(plan(), device=CPU)
    del buffer
    gc.collect()
    assert not released
    SymmetricBuffer(plan(), device=CPU).close()
    assert released == [1]


# ---------------------------------------------------------------- several ranks


def _plain(allocator, nbytes, device, group) -> Allocation:
    memory = torch.zeros(nbytes, dtype=torch.uint8)
    base = memory.data_ptr()
    return Allocation(
        memory, [base + 1600 * (r - dist.get_rank(group)) for r in range(dist.get_world_size(group))], int
    )


def _outcome(make) -> str:
    try:
        buffer = make()
    except MegaMoEError as error:
        return str(error)
    return f"{buffer.plan.max_tokens} {buffer._deltas.tolist()}"


def _construct(rank: int, world_size: int) -> list[str]:
    allocators.allocate = _plain
    # Each rank stands for a GPU of its own.
    symm.describe_device = lambda device: (f"gpu{rank}", ())
    group = dist.group.WORLD
    outcomes = [
        _outcome(lambda: SymmetricBuffer(plan(8, 2), group, device=CPU)),
        _outcome(lambda: SymmetricBuffer(plan(8 + rank, 2), group, device=CPU)),
        _outcome(lambda: SymmetricBuffer(plan(8, 2 - rank), group, device=CPU)),
        _outcome(lambda: SymmetricBuffer(plan(8, 2), group, device=CPU, timeout=60 + rank)),
    ]
    shared = acquire_buffer(plan(8, 2), group, device=CPU)
    outcomes.append(_outcome(lambda: acquire_buffer(plan(4, 2), group, device=CPU)))
    if rank == 1:
        shared.close()
        symm._shared.clear()
    outcomes.append(_outcome(lambda: acquire_buffer(plan(4, 2), group, device=CPU)))
    symm.describe_device = lambda device: ("gpu0", ())
    outcomes.append(_outcome(lambda: SymmetricBuffer(plan(8, 2), group, device=CPU)))
    symm.describe_device = lambda device: (f"gpu{rank}", ("gpu0",) if rank == 1 else ())
    outcomes.append(_outcome(lambda: SymmetricBuffer(plan(8, 2), group, device=CPU)))
    return outcomes


def test_ranks_that_disagree_all_raise():
    first, second = run_ranks(_construct, 2)
    assert first[0] == "8 [0, 100]" and second[0] == "8 [-100, 0]"
    assert first[4] == "8 [0, 100]"
    for ours, theirs, text in [
        (first[1], second[1], "'max_tokens': {'most ranks': '8', 1: 9}"),
        (first[2], second[2], "{1: 'the plan is for 1 ranks, the group has 2'}"),
        (first[3], second[3], "'timeout': {'most ranks': '60', 1: 61}"),
        (first[5], second[5], "'buffer that is shared': {'most ranks': '0', 1: None}"),
        (first[6], second[6], "must not be shared by ranks"),
        (first[7], second[7], "cannot read each other's memory"),
    ]:
        assert ours == theirs and text in ours, (ours, theirs)


# ---------------------------------------------------------------- allocators


def test_one_rank_needs_no_allocator():
    assert allocators.missing_allocator("nvshmem", None) == ""
    allocation = allocators.allocate("nvshmem", 64, CPU, None)
    assert allocation.memory.numel() == 64 and allocation.addresses == [allocation.memory.data_ptr()]


def test_missing_nvshmem_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "nvshmem", None)
    text = allocators.missing_allocator("nvshmem", object())
    assert "pip install 'megamoe[nvshmem]'" in text and 'allocator="torch"' in text
    assert allocators.missing_allocator("torch", object()) == ""


def test_nvshmem_of_another_group(monkeypatch):
    class Fake:
        init_status = staticmethod(lambda: 2)
        my_pe = staticmethod(lambda: 3)
        n_pes = staticmethod(lambda: 4)

    package = type(sys)("nvshmem")
    package.core = Fake
    monkeypatch.setitem(sys.modules, "nvshmem", package)
    monkeypatch.setitem(sys.modules, "nvshmem.core", Fake)
    monkeypatch.setattr(dist, "get_rank", lambda group: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    assert "initialised as rank 3 of 4, which is not this group" in allocators.missing_allocator("nvshmem", object())
    Fake.init_status = staticmethod(lambda: 0)
    assert allocators.missing_allocator("nvshmem", object()) == ""


def test_memory_of_nvshmem(monkeypatch):
    """The calls, with stand-ins for the library and for the group of two ranks."""
    monkeypatch.setenv("NVSHMEM_DISABLE_NVLS", "1")
    calls, memories = [], [torch.ones(64, dtype=torch.uint8) for _ in range(2)]

    class Fake:
        init_status = staticmethod(lambda: 0)

        class interop:
            class torch:
                bytetensor = staticmethod(lambda shape, dtype: memories[1])
                get_peer_tensor = staticmethod(lambda memory, peer: memories[peer])
                free_tensor = staticmethod(lambda memory: calls.append("free"))

        @staticmethod
        def get_unique_id(empty):
            return "empty" if empty else "id"

        @staticmethod
        def init(device, uid, rank, nranks, initializer_method):
            calls.append((uid, rank, nranks, initializer_method))

    class Device:
        def __init__(self, index):
            self.index = index

        def set_current(self):
            calls.append(f"device {self.index}")

    def broadcast(objects, src, group):
        assert objects == ["empty"] and src == 4
        objects[0] = "id"

    for name, module in (("nvshmem", Fake), ("nvshmem.core", Fake), ("cuda", Fake), ("cuda.core", Device)):
        monkeypatch.setitem(sys.modules, name, module)
    Fake.core, Device.Device = Fake, Device
    for name, function in (
        ("get_rank", lambda group: 1),
        ("get_world_size", lambda group: 2),
        ("get_global_rank", lambda group, rank: 4 + rank),
        ("broadcast_object_list", broadcast),
        ("barrier", lambda group: calls.append("barrier")),
    ):
        monkeypatch.setattr(dist, name, function)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append("synchronize"))
    allocation = allocators.allocate("nvshmem", 64, torch.device("cuda", 3), object())
    assert allocation.memory is memories[1] and not memories[1].any() and memories[0].all()
    assert allocation.addresses == [memory.data_ptr() for memory in memories]
    assert calls == ["device 3", ("id", 1, 2, "uid"), "synchronize", "barrier"]
    allocation.release()
    assert calls[-1] == "free"
