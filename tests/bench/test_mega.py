"""The mega-kernel's benchmark without GPUs: figures, how it checks results, and its command."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megamoe.bench import gemm, mega, mega_cases, ranks
from megamoe.bench.mega_cases import MegaCase, MegaProblem, MegaWeights, cases, random_weights
from megamoe.bench.mega_peer import PeerLayer, PeerWeights, find_peer
from megamoe.kernels import mega as mega_launches
from megamoe.kernels.mega_plan import choose_settings
from megamoe.types import Fp8Tensor
from tests.support.command_line import invoke, read_csv
from tests.support.mega_peer import FakePeer, plain_layer, spoil
from tests.support.processes import run_ranks

SMALL = MegaCase(5, 256, 1024, 4, 2)
"""Of a smaller I, one code that rounds the other way would be a large part."""
BF16_SMALL = replace(SMALL, precision="bf16")
SHAPE = "256,1024,4,2"
ALONE = mega.Ranks(None, None, 0)

# ---------------------------------------------------------------- a layer on a CPU


class CpuProblem(MegaProblem):
    """Its calls give the plain layer's results, but for a planted fault."""

    fault = ""

    def __init__(self, case, group, num_rows=None, seed=0, weights=None):
        self.case, self.group, self.ranks, self.rank, self.sms = case, group, 1, 0, 132
        self.device, self.generator = torch.device("cpu"), torch.Generator().manual_seed(seed)
        self.weights = random_weights(case, 1, self.generator) if weights is None else weights
        self.buffer = SimpleNamespace(check=lambda: None, close=lambda: None)
        self.collective = None

    def finish(self):
        self.buffer.check()

    def _result(self, x, routing, name):
        out = plain_layer(self.weights, x, routing).bfloat16()
        if self.fault.startswith(f"{name} "):
            spoil(out, self.fault)
        return out

    def staged(self, x, routing):
        return self._result(x, routing, "staged")

    def over_nccl(self, x, routing):
        return self._result(x, routing, "nccl")

    def gemms(self, x, routing):
        return lambda: None

    def fused(self, x, routing, out, settings):
        return lambda: out.copy_(self._result(x, routing, "mega"))


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.setattr(mega, "MegaProblem", CpuProblem)
    monkeypatch.setattr(CpuProblem, "fault", "")
    monkeypatch.setattr(FakePeer, "fault", "")
    timed = []

    def once(candidates, rounds, repeats, start):
        timed.append((list(candidates), rounds, repeats))
        for calls in candidates.values():
            for call in calls:
                call()
        return {name: 10.0 * (index + 1) for index, name in enumerate(candidates)}

    monkeypatch.setattr(mega, "interleaved", once)
    return timed


def weights_of(case: MegaCase, seed: int) -> MegaWeights:
    return random_weights(case, 1, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("precision", ["fp8", "bf16"])
@pytest.mark.parametrize("routing", mega_cases.ROUTINGS)
def test_the_sample_is_the_reference(routing, precision, seed, monkeypatch):
    monkeypatch.setattr(mega, "SAMPLE", 3)
    case = replace(SMALL, routing=routing, precision=precision)
    problem = CpuProblem(case, None, seed=seed)
    x, chosen_by = problem.tokens()
    assert ((chosen_by.topk_weights >= 0.25) & (chosen_by.topk_weights <= 0.75)).all()
    chosen, sample = mega.expected_sample(problem.weights, x, chosen_by, None)
    assert chosen.tolist() == [0, 2, 4]
    plain = plain_layer(problem.weights, x, chosen_by)[chosen]
    # BF16's rounding of each expert's rows; a code that rounds the other way.
    assert float(mega.worst_row(sample, plain)) < mega.ERROR_LIMIT
    # Each rank adds its experts.
    halves = [part_of(problem.weights, part) for part in (slice(0, 2), slice(2, 4))]
    sums = sum(mega.contributions(half, 2 * rank, x, chosen_by) for rank, half in enumerate(halves))
    assert float(mega.worst_row(sums[chosen], sample)) < mega.ERROR_LIMIT


def part_of(weights: MegaWeights, experts: slice) -> MegaWeights:
    if not weights.fp8:
        return MegaWeights(weights.up[experts], weights.down[experts])
    pair = (weights.up, weights.down)
    return MegaWeights(*(Fp8Tensor(w.codes[experts], w.scales[experts], w.block) for w in pair))


def _check_on_a_rank(rank: int, world_size: int, seed: int, spoiled: int) -> tuple[float, bool] | str:
    """Each rank has its experts and tokens; one rank's results are wrong, or none's."""
    group = dist.group.WORLD
    whole = weights_of(SMALL, seed)
    problem = CpuProblem(SMALL, None, seed=seed + rank, weights=whole)
    x, routing = problem.tokens()
    out = plain_layer(whole, x, routing).bfloat16()
    half = slice(2 * rank, 2 * rank + 2)
    problem.weights = part_of(whole, half)
    problem.group, problem.staged = group, lambda x, routing: out
    check = mega.Checker(problem, x, routing)
    assert ranks.largest({"a": float(rank), "b": 1.0}, group, out.device) == {"a": 1.0, "b": 1.0}
    mine = out.clone()
    if rank == spoiled:
        spoil(mine, "nan")
    try:
        return check("mega", mine, mega.ERROR_LIMIT)
    except RuntimeError as error:
        return str(error)


def test_all_ranks_see_a_wrong_one(seed):
    for error, same_bits in run_ranks(_check_on_a_rank, 2, seed, -1):
        assert error < mega.ERROR_LIMIT and same_bits
    first, second = run_ranks(_check_on_a_rank, 2, seed, 1)
    assert first == second == f"{SMALL.label}: mega has relative error inf"


@pytest.mark.parametrize("peer", [True, False])
def test_measure(peer, on_cpu, seed):
    weights, module = weights_of(SMALL, seed), FakePeer()
    row = mega.measure(SMALL, weights, PeerWeights(module, weights.up, weights.down) if peer else None, ALONE, 3)
    names = ["mega", "staged", "deep_gemm", "gemms"] if peer else ["mega", "staged", "gemms"]
    assert on_cpu == [(names, 3, SMALL.calls(1))]
    assert (row["shape"], row["tokens"], row["routing"]) == (SHAPE, 5, "uniform")
    assert row["same_bits"] is True and float(row["error"]) < mega.ERROR_LIMIT
    assert (row["mega_us"], row["staged_us"], row["x_staged"]) == (10.0, 20.0, 2.0)
    assert row["x_gemms"] == len(names)
    assert row["tflops"] == pytest.approx(SMALL.flops / 10e-6 / 1e12, abs=0.05)
    if peer:
        assert (row["deep_gemm_us"], row["x_deep_gemm"]) == (30.0, 3.0)
        # It differs, by its other scales.
        assert 1e-3 < float(row["deep_gemm_error"]) < mega.PEER_ERROR_LIMIT
        assert module.made == [(4, 5, 2, 256, 1024)] and module.destroyed == 1
    else:
        assert not any("deep_gemm" in name for name in row)


@pytest.mark.parametrize("group", [None, "others"])
def test_measure_in_bf16(group, on_cpu, seed, monkeypatch):
    """Beside NCCL's exchange where there is one."""
    timed = []

    class Problem(CpuProblem):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            self.collective, self.group = self.group, None

    def eager(call, rounds):
        call()
        timed.append(rounds)
        return 40.0

    monkeypatch.setattr(mega, "MegaProblem", Problem)
    monkeypatch.setattr(mega, "eager_microseconds", eager)
    monkeypatch.setattr(mega, "size_of", lambda group: 1)
    monkeypatch.setattr(mega, "largest", lambda values, group, device: ranks.largest(values, None, device))
    row = mega.measure(BF16_SMALL, weights_of(BF16_SMALL, seed), None, mega.Ranks(None, group, 0), 3)
    assert on_cpu == [(["mega", "staged", *["gemms"] * (group is None)], 3, BF16_SMALL.calls(1))]
    assert row["precision"] == "bf16" and row["same_bits"] is True and float(row["error"]) < 1e-2
    if group is None:
        assert not timed and "nccl_us" not in row
    else:
        assert timed == [3] and (row["nccl_us"], row["x_nccl"], row["x_staged"]) == (40.0, 4.0, 2.0)
        monkeypatch.setattr(CpuProblem, "fault", "nccl scaled")
        with pytest.raises(RuntimeError, match="bf16: nccl has relative error"):
            mega.measure(BF16_SMALL, weights_of(BF16_SMALL, seed), None, mega.Ranks(None, group, 0), 3)


FAULTS = ("nan", "missing", "scaled", "unsampled nan", "unsampled missing", "unsampled scaled")


# The peer's tokens are judged together.
@pytest.mark.parametrize(
    ("name", "fault"),
    [("mega", fault) for fault in FAULTS] + [("deep_gemm", fault) for fault in FAULTS if "scaled" not in fault],
)
def test_wrong_results_are_not_timed(name, fault, on_cpu, seed, monkeypatch):
    monkeypatch.setattr(mega, "SAMPLE", 2)
    monkeypatch.setattr(CpuProblem if name == "mega" else FakePeer, "fault", f"{name} {fault}")
    weights, module = weights_of(SMALL, seed), FakePeer()
    with pytest.raises(RuntimeError, match=rf"T=5 H=256 .*: {name} has relative error"):
        mega.measure(SMALL, weights, PeerWeights(module, weights.up, weights.down), ALONE, 3)
    assert not on_cpu and len(module.made) == module.destroyed == (name == "deep_gemm")


def test_a_wrong_staged_path_is_not_the_yardstick(on_cpu, seed, monkeypatch):
    monkeypatch.setattr(CpuProblem, "fault", "staged scaled")
    with pytest.raises(RuntimeError, match="staged has relative error"):
        mega.measure(SMALL, weights_of(SMALL, seed), None, ALONE, 3)


def test_a_wrong_weight_layout_is_seen(on_cpu, seed):
    """Gate and up rows as they are, not interleaved."""
    weights, module = weights_of(SMALL, seed), FakePeer()
    module.transform_weights_for_mega_moe_sm90 = lambda up, down: (up, down)
    with pytest.raises(RuntimeError, match="deep_gemm has relative error"):
        mega.measure(SMALL, weights, PeerWeights(module, weights.up, weights.down), ALONE, 3)


def test_other_bits_are_noted(on_cpu, seed, monkeypatch):
    problem = CpuProblem(SMALL, None, seed=seed)
    x, routing = problem.tokens()
    check = mega.Checker(problem, x, routing)
    assert check("mega", check.expected.clone(), mega.ERROR_LIMIT)[1]
    other = check.expected.clone()
    row = other[1].abs()
    other[1, row.argmin()] += 1e-3 * row.max()
    assert not check("mega", other, mega.ERROR_LIMIT)[1]


def test_sweep(on_cpu, seed, monkeypatch):
    times = mega.sweep(SMALL, weights_of(SMALL, seed), ALONE, 3)
    assert len(times) == len({name for name in times}) == len(on_cpu[0][0]) >= 6 and list(times)[0] == "mega"
    monkeypatch.setattr(CpuProblem, "fault", "mega scaled")
    with pytest.raises(RuntimeError, match="mega has relative error"):
        mega.sweep(SMALL, weights_of(SMALL, seed), ALONE, 3)


def test_variants_differ_from_the_chosen_settings():
    for tokens in (1, 8192):
        sizes = dict(ranks=2, top_k=8, num_experts=64, intermediate_size=2048)
        chosen = choose_settings(tokens=tokens, **sizes, sms=132)
        found = dict(mega.variants(chosen, sweep=True))
        assert found.pop("mega") == chosen
        assert chosen not in found.values() and len(set(map(str, found.values()))) == len(found)
        assert found[f"mega 16,{chosen.lag}"].group == 16
        # FP8 has none.
        assert {settings.skew for settings in found.values()} == {chosen.skew}
        chosen = replace(chosen, skew=2)
        found = dict(mega.variants(chosen, sweep=True, fp8=False))
        assert found.pop("mega") == chosen and chosen not in found.values()
        assert {settings.skew for settings in found.values()} == {1, 2, 3}
        assert list(mega.variants(chosen, sweep=False)) == [("mega", chosen)]


def test_regret():
    row = mega.regret_of(SMALL, {"mega": 12.0, "mega 8,1": 10.0, "mega 2,2": 15.0})
    assert (row["chosen_us"], row["best"], row["best_us"]) == (12.0, "mega 8,1", 10.0)
    assert row["regret_percent"] == 20.0 and row["ranking"] == "mega_8,1=10.0 mega=12.0 mega_2,2=15.0"
    assert mega.regret_of(SMALL, {"mega": 9.0, "mega 2,2": 15.0})["regret_percent"] == 0.0


def test_largest_of_one_rank():
    values = ranks.largest({"a": 2.0, "b": float("nan")}, None, torch.device("cpu"))
    assert values == {"a": 2.0, "b": float("inf")}


# ---------------------------------------------------------------- the peer


def test_peer_is_absent_or_of_another_kind(monkeypatch):
    monkeypatch.setattr(gemm, "deep_gemm", lambda: None)
    assert find_peer() == (None, "DeepGEMM is not installed: no column for it")
    monkeypatch.setattr(gemm, "deep_gemm", lambda: SimpleNamespace(fp8_mega_moe=1))
    module, why = find_peer()
    assert module is None and "has no get_symm_buffer_for_sm90_mega_moe: no column for it" in why
    peer = FakePeer()
    monkeypatch.setattr(gemm, "deep_gemm", lambda: peer)
    assert find_peer() == (peer, "")


def test_peer_sees_new_tokens_in_the_same_tensor(seed):
    weights, module = weights_of(SMALL, seed), FakePeer()
    problem = CpuProblem(SMALL, None, seed=seed, weights=weights)
    x, routing = problem.tokens()
    layer = PeerLayer(
        PeerWeights(module, weights.up, weights.down),
        None,
        tokens=5,
        hidden=256,
        intermediate=1024,
        experts=4,
        top_k=2,
    )
    out = torch.empty_like(x)
    call = layer.call(x, routing, out)
    for _ in range(2):
        x.copy_(torch.randn(5, 256, generator=problem.generator))
        call()
        assert float(mega.worst_row(out, plain_layer(weights, x, routing))) < mega.PEER_ERROR_LIMIT
    layer.close()
    assert module.destroyed == 1


# ---------------------------------------------------------------- the command


@pytest.fixture
def command(on_cpu, monkeypatch):
    """The whole command on one rank, on a CPU; what ``monkeypatch`` leaves out is real."""
    from contextlib import contextmanager

    @contextmanager
    def started():
        yield None

    monkeypatch.setattr(mega, "started", started)
    monkeypatch.setattr(mega, "check_gpu", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    built = []

    def weights_on_cpu(case, ranks, generator):
        built.append(case.shape)
        return weights_of(case, 0)

    monkeypatch.setattr(mega, "random_weights", weights_on_cpu)
    monkeypatch.setattr(torch, "Generator", lambda device=None: torch._C.Generator("cpu"))
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    return built


def test_command(command, tmp_path, monkeypatch):
    monkeypatch.setattr(gemm, "deep_gemm", FakePeer)
    folder = tmp_path / "new"
    options = ["--shape", SHAPE, "--shape", "128,1024,2,1", "--routing", "uniform, one-hot"]
    result, text = invoke("bench", "mega", *options, "--tokens", "1,3", "--rounds", "2", "--out", str(folder))
    assert result.exit_code == 0, text
    written = read_csv(folder / "mega.csv")
    assert [(row["shape"], row["routing"], row["tokens"]) for row in written] == [
        (shape, routing, tokens)
        for shape in (SHAPE, "128,1024,2,1")
        for routing in ("uniform", "one-hot")
        for tokens in ("1", "3")
    ]
    assert all((row["x_deep_gemm"], row["x_staged"], row["same_bits"]) == ("3.0", "2.0", "True") for row in written)
    # Weights are made once for each layer.
    assert command == [SMALL.shape, (128, 1024, 2, 1)]
    # The table comes last.
    assert text.rindex("x_deep_gemm") > text.rindex("GPUs,") and "1 GPUs" in text


def test_command_without_a_peer(command, tmp_path, monkeypatch):
    monkeypatch.setattr(gemm, "deep_gemm", lambda: None)
    for options, said in (([], True), (["--no-peer"], False)):
        result, text = invoke("bench", "mega", "--shape", SHAPE, "--tokens", "2", "--out", str(tmp_path), *options)
        assert result.exit_code == 0 and "x_staged" in text and "x_deep_gemm" not in text
        assert ("DeepGEMM is not installed: no column for it" in text) == said
        assert "x_deep_gemm" not in read_csv(tmp_path / "mega.csv")[0]


def test_command_keeps_what_it_has_measured(command, tmp_path, monkeypatch):
    monkeypatch.setattr(gemm, "deep_gemm", FakePeer)
    measure = mega.measure

    def fails_later(case, *arguments):
        if case.tokens == 3:
            raise RuntimeError("lost")
        return measure(case, *arguments)

    monkeypatch.setattr(mega, "measure", fails_later)
    result, _ = invoke("bench", "mega", "--shape", SHAPE, "--tokens", "1,3", "--out", str(tmp_path))
    assert isinstance(result.exception, RuntimeError)
    assert [row["tokens"] for row in read_csv(tmp_path / "mega.csv")] == ["1"]


def test_command_in_both_precisions(command, tmp_path, monkeypatch):
    """The peer has no BF16."""
    monkeypatch.setattr(gemm, "deep_gemm", FakePeer)
    options = ("--shape", SHAPE, "--tokens", "1,2", "--precision", "fp8,bf16", "--out", str(tmp_path))
    result, text = invoke("bench", "mega", *options)
    assert result.exit_code == 0, text
    written = read_csv(tmp_path / "mega.csv")
    assert [(row["precision"], row["tokens"]) for row in written] == [
        ("fp8", "1"), ("fp8", "2"), ("bf16", "1"), ("bf16", "2"),
    ]  # fmt: skip
    assert [row["x_deep_gemm"] for row in written] == ["3.0", "3.0", "", ""]
    assert command == [SMALL.shape] * 2


def test_command_sweeps(command, tmp_path, monkeypatch):
    monkeypatch.setattr(gemm, "deep_gemm", FakePeer)
    result, text = invoke("bench", "mega", "--shape", SHAPE, "--tokens", "2", "--sweep", "--out", str(tmp_path))
    assert result.exit_code == 0 and "regret_percent" in text and "deep_gemm" not in text
    assert read_csv(tmp_path / "mega_sweep.csv")[0]["best"] == "mega"


def test_defaults(monkeypatch):
    calls = []
    monkeypatch.setattr(mega, "run", lambda *arguments, **options: calls.append((arguments, options)))
    assert (
        invoke(
            "bench",
            "mega",
        )[0].exit_code
        == 0
    )
    assert (
        invoke("bench", "mega", "--shape", "all", "--sweep", "--no-peer", "--precision", "fp8, bf16", "--pause", "0.1")[
            0
        ].exit_code
        == 0
    )
    (shapes, tokens, routings, *_), options = calls[0]
    assert (shapes, tokens, routings) == ([[7168, 2048, 64, 8]], [1, 8, 32, 128, 512, 2048, 8192], ["uniform"])
    assert options == {"sweeps": False, "peer": True, "precisions": ["fp8"], "pause": 0.0}
    assert calls[1][0][0] == mega_cases.SHAPES
    assert calls[1][1] == {"sweeps": True, "peer": False, "precisions": ["fp8", "bf16"], "pause": 0.1}
    for world_size in (1, 2):
        assert len(cases(mega_cases.SHAPES, tokens, mega_cases.ROUTINGS, world_size)) == 63


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--tokens", "1,x"], "tokens = '1,x': must be numbers with commas between them"),
        (["--tokens", ""], "tokens = '': must be numbers"),
        (["--tokens", "0"], "tokens = 0: must be at least 1"),
        (["--shape", "7168,2048,64"], "shape = [7168, 2048, 64]: must be H, I, E and K"),
        (["--shape", "7168,2048,64,-8"], "must be numbers with commas"),
        (["--routing", "hot"], "routing = 'hot': must be one of 'uniform'"),
        (["--rounds", "0"], "rounds"),
        ([], "must be True. Run this on a machine with an NVIDIA GPU."),
    ],
)
def test_command_refuses(options, words, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result, text = invoke("bench", "mega", *options, "--out", str(tmp_path))
    assert result.exit_code == 2 and words in text and "Traceback" not in text, text
    assert not list(tmp_path.iterdir())


def test_a_compiler_that_spoils_the_kernel_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(mega_launches, "FP8_SUPPORTED", False)
    result, text = invoke("bench", "mega", "--out", str(tmp_path))
    assert result.exit_code == 2 and "must be 3.6 or 3.7 for the mega-kernel" in text
