"""The decode benchmark on a CPU, where runners call the layer without graphs: its checks, figures and command."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from megamoe import MoEConfig
from megamoe.bench import decode, gemm
from megamoe.bench.decode import DecodeProblem
from megamoe.bench.mega import PEER_ERROR_LIMIT
from megamoe.bench.mega_peer import PeerWeights
from tests.support.command_line import invoke, read_csv
from tests.support.mega_peer import FakePeer

CONFIG = MoEConfig(256, 1024, 4, 2, precision="fp8", max_tokens_per_rank=4)
SHAPE = "256,1024,4,2"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def problem() -> DecodeProblem:
    """Its weights are the same in every run."""
    return DecodeProblem(CONFIG, (1, 4), None, CPU, "collective")


@pytest.fixture
def on_cpu(monkeypatch):
    """Made-up times, whose callers are called once; what was timed."""
    timed = []

    def once(candidates, rounds):
        timed.append((list(candidates), rounds))
        for call in candidates.values():
            call()
        return {name: 10.0 * (index + 1) for index, name in enumerate(candidates)}

    def host(call):
        call()
        return 12.34

    monkeypatch.setattr(decode, "back_to_back", once)
    monkeypatch.setattr(decode, "host_us", host)
    monkeypatch.setattr(decode, "captured", lambda call: call)
    monkeypatch.setattr(FakePeer, "fault", "")
    return timed


def peer_of(problem: DecodeProblem, module: FakePeer) -> PeerWeights:
    return PeerWeights(module, problem.weights.up, problem.weights.down)


# ---------------------------------------------------------------- rows


@pytest.mark.parametrize("count", [1, 4])
def test_measure(count, problem, on_cpu, seed):
    problem.generator.manual_seed(seed)
    module = FakePeer()
    row = decode.measure(problem, peer_of(problem, module), None, count, 3, 5)
    assert on_cpu == [(["replay", "eager", "deep_gemm"], 3)]
    assert (row["tokens"], row["replays_checked"]) == (count, 5)
    assert [row[f"{name}_us"] for name in ("replay", "eager", "deep_gemm")] == [10.0, 20.0, 30.0]
    assert (row["x_eager"], row["x_deep_gemm"]) == (2.0, 3.0)
    assert row["replay_host_us"] == row["in_place_host_us"] == row["eager_host_us"] == 12.3
    assert "deep_gemm_host_us" not in row
    assert 0 < float(row["error"]) < decode.ERROR_LIMIT and 0 < float(row["deep_gemm_error"]) < PEER_ERROR_LIMIT
    assert module.made == [(4, count, 2, 256, 1024)] and module.destroyed == 1
    row = decode.measure(problem, None, None, count, 3, 5)
    assert on_cpu[1:] == [(["replay", "eager"], 3)] and not any("deep_gemm" in name for name in row)


def test_each_replay_is_compared(problem, on_cpu, seed, monkeypatch):
    """One number of the seventh result is another."""
    calls, runner = [], problem.runner

    def wrong_once(x):
        calls.append(x)
        out = runner(x).clone()
        if len(calls) == 7:
            out[-1, 3] = -out[-1, 3] - 1
        return out

    monkeypatch.setattr(problem, "runner", wrong_once)
    with pytest.raises(RuntimeError, match="T=4: replays differ from eager calls"):
        decode.measure(problem, None, None, 4, 3, 8)
    assert len(calls) == 8 and not on_cpu
    # Other tokens, and so other routing, each time.
    assert len({tuple(x[0, :4].tolist()) for x in calls}) == 8
    assert len({tuple(problem.layer.router(x).topk_index.flatten().tolist()) for x in calls}) > 1
    problem.check_replays(4, 2)


def test_a_nan_is_seen(problem, seed, monkeypatch):
    monkeypatch.setattr(problem, "runner", lambda x: problem.layer(x).fill_(float("nan")))
    monkeypatch.setattr(problem, "layer", lambda x: torch.full_like(x, float("nan")))
    with pytest.raises(RuntimeError, match="replays differ"):
        problem.check_replays(4, 1)


def test_a_wrong_layer_is_seen(problem, on_cpu, seed, monkeypatch):
    """Replays and eager calls may agree on it."""
    down = problem.weights.down
    monkeypatch.setattr(
        problem,
        "weights",
        decode.MegaWeights(problem.weights.up, type(down)(down.codes, 1.1 * down.scales, down.block)),
    )
    with pytest.raises(RuntimeError, match="T=4: the layer has relative error 0.09"):
        decode.measure(problem, None, None, 4, 3, 1)
    assert not on_cpu


@pytest.mark.parametrize("fault", ["nan", "missing", "scaled"])
def test_a_wrong_peer_is_seen(fault, problem, on_cpu, seed, monkeypatch):
    monkeypatch.setattr(FakePeer, "fault", fault)
    module = FakePeer()
    with pytest.raises(RuntimeError, match="T=4: deep_gemm has relative error"):
        decode.measure(problem, peer_of(problem, module), None, 4, 3, 1)
    assert not on_cpu and module.destroyed == 1


# ---------------------------------------------------------------- clocks


def test_host_time_is_that_of_a_few_calls_in_a_row(monkeypatch):
    """100 us for most calls; what comes before them and after them is not counted."""
    now, order = [0.0], []

    def synchronize():
        order.append("wait")
        now[0] += 5.0

    def call():
        order.append("call")
        now[0] += 1.0 if order.count("call") == 5 else 100e-6

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(decode.time, "perf_counter", lambda: now[0])
    assert decode.host_us(call, samples=5, calls=3) == pytest.approx(100.0, rel=1e-6)
    assert order == ["wait", "call", "call", "call"] * 5 + ["wait"]


def test_calls_back_to_back(monkeypatch):
    now, order = [0.0], []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = now[0]
            order.append("|")

        def synchronize(self):
            pass

        def elapsed_time(self, other):
            return other.at - self.at

    def candidate(name, milliseconds):
        def call():
            order.append(name)
            now[0] += milliseconds

        return call

    monkeypatch.setattr(torch.cuda, "Event", Event)
    times = decode.back_to_back({"a": candidate("a", 0.5), "b": candidate("b", 2.0)}, rounds=9, calls=3)
    assert times == pytest.approx({"a": 500.0, "b": 2000.0})
    text = "".join(order)
    # Everybody once before anything is timed; then each once a round, in either order.
    rounds = [text[2 + 10 * index : 12 + 10 * index] for index in range(9)]
    assert text[:2] == "ab" and set(rounds) == {"|aaa||bbb|", "|bbb||aaa|"}


# ---------------------------------------------------------------- the command


@pytest.fixture
def command(problem, on_cpu, monkeypatch):
    """The whole command on one rank, on a CPU."""
    made = []

    @contextmanager
    def started():
        yield None

    def make(config, counts, group, device, path):
        made.append((config, counts, group, path))
        return problem

    monkeypatch.setattr(decode, "started", started)
    monkeypatch.setattr(decode, "check_gpu", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(decode, "DecodeProblem", make)
    return made


def test_command(command, tmp_path, monkeypatch):
    monkeypatch.setattr(gemm, "deep_gemm", FakePeer)
    folder = tmp_path / "new"
    options = ["--shape", SHAPE, "--tokens", "4,1,4", "--replays", "5", "--path", "collective", "--out", str(folder)]
    result, text = invoke("bench", "decode", *options)
    assert result.exit_code == 0, text
    assert command == [(CONFIG, [1, 4], None, "collective")]
    written = read_csv(folder / "decode.csv")
    assert [(row["tokens"], row["x_deep_gemm"], row["replays_checked"]) for row in written] == [
        ("1", "3.0", "3"),
        ("4", "3.0", "3"),
    ]
    assert "collective: as asked for" in text and text.rindex("replay_host_us") > text.rindex("tokens=4")


def test_command_without_a_peer(command, tmp_path, monkeypatch):
    monkeypatch.setattr(gemm, "deep_gemm", lambda: SimpleNamespace())
    for options, said in (([], True), (["--no-peer"], False)):
        result, text = invoke(
            "bench", "decode", "--shape", SHAPE, "--tokens", "1", "--replays", "1", "--out", str(tmp_path), *options
        )
        assert result.exit_code == 0 and "x_eager" in text and "x_deep_gemm" not in text
        assert ("no column for it" in text) == said
        assert "x_deep_gemm" not in read_csv(tmp_path / "decode.csv")[0]


def test_defaults(monkeypatch):
    calls = []
    monkeypatch.setattr(decode, "run", lambda *arguments, **options: calls.append((arguments, options)))
    assert (
        invoke(
            "bench",
            "decode",
        )[0].exit_code
        == 0
    )
    (shape, tokens, _, _, replays, path), options = calls[0]
    assert (shape, tokens, replays, path) == ([7168, 2048, 64, 8], [1, 8, 32, 128], 1000, "auto")
    assert options == {"peer": True}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--tokens", "1;8"], "tokens = '1;8': must be numbers with commas between them"),
        (["--tokens", "0"], "tokens = 0: must be at least 1"),
        (["--shape", "7168,2048,64"], "shape = [7168, 2048, 64]: must be H, I, E and K"),
        (["--shape", "7168,2048,8,9"], "top_k = 9: must not exceed num_experts = 8"),
        (["--replays", "0"], "replays"),
        ([], "must be True. Run this on a machine with an NVIDIA GPU."),
    ],
)
def test_command_refuses(options, words, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result, text = invoke("bench", "decode", *options, "--out", str(tmp_path))
    assert result.exit_code == 2 and words in text and "Traceback" not in text, text
    assert not list(tmp_path.iterdir())
