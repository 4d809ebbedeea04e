"""``python -m megamoe.compat.deep_gemm``: scripts that import ``deep_gemm`` run on megamoe."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import megamoe
from megamoe.compat.deep_gemm.__main__ import main

ROOT = Path(megamoe.__file__).parents[1]


def start(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    """Python, started in another folder than that of the script or the package."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, **environment},
    )


def run(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    """The runner."""
    return start(folder, "-m", "megamoe.compat.deep_gemm", *arguments, **environment)


def output(done: subprocess.CompletedProcess) -> list[str]:
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def write(folder: Path, name: str, text: str) -> str:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    return str(folder / name)


SCRIPT = """
import sys

import torch

import deep_gemm
import deep_gemm.utils.math
from deep_gemm.testing import bench_kineto, calc_diff
from deep_gemm.testing.numeric import count_bytes
from deep_gemm.utils import *
from deep_gemm.utils.layout import get_tma_aligned_size
from neighbour import DOUBLED

if __name__ == "__main__":
    a, b = torch.randn(4, 64).bfloat16(), torch.randn(64, 64).bfloat16()
    d = torch.empty(4, 64, dtype=torch.bfloat16)
    deep_gemm.bf16_gemm_nt(a, b, d)
    assert calc_diff(d, a.float() @ b.float().T) < 1e-5
    print(sys.argv)
    print(deep_gemm.__path__[0].endswith("megamoe/compat/deep_gemm"), DOUBLED, ceil_div(7, 2))
    print(deep_gemm.utils.math.align is align)
"""


def test_script_with_a_neighbour_and_arguments(tmp_path):
    write(tmp_path / "scripts", "test_script.py", SCRIPT)
    write(tmp_path / "scripts", "neighbour.py", "from deep_gemm.utils import align\nDOUBLED = align(5, 4)\n")
    assert output(run(tmp_path, "scripts/test_script.py", "--fast", "3")) == [
        "['scripts/test_script.py', '--fast', '3']",
        "True 8 4",
        "True",
    ]


def test_a_failing_script_fails(tmp_path):
    failing = run(tmp_path, write(tmp_path, "fails.py", "import deep_gemm\nassert deep_gemm.align(1, 2) == 3\n"))
    assert failing.returncode == 1
    assert "AssertionError" in failing.stderr and "fails.py" in failing.stderr


@pytest.mark.parametrize(
    ("arguments", "problem"), [([], "SCRIPT is missing"), (["nowhere.py"], "'nowhere.py' is not a file")]
)
def test_usage(arguments, problem, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    message = capsys.readouterr().err
    assert "usage: python -m megamoe.compat.deep_gemm [--checks" in message and problem in message


CHILDREN = """
import subprocess
import sys

import torch
import torch.multiprocessing as mp

import deep_gemm
from deep_gemm.utils.dist import dist_print, init_dist, uneven_all_gather


def rank_main(local_rank: int, num_ranks: int) -> None:
    rank, size, group = init_dist(local_rank, num_ranks)
    part = torch.full((2, rank + 1), float(rank), device="cpu")
    whole = uneven_all_gather(part, dim=1, group=group)
    assert whole.tolist() == [[0.0, 1.0, 1.0]] * 2, whole
    assert uneven_all_gather(part.T, group=group).shape == (3, 2)
    assert deep_gemm.__path__[0].endswith("megamoe/compat/deep_gemm")
    dist_print(f"{rank} of {size}", once_in_node=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(rank_main, args=(2,), nprocs=2)
    code = "import deep_gemm, deep_gemm.testing.bench; print(deep_gemm.align(5, 4))"
    print(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip())
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_child_processes_find_it_too(tmp_path):
    script = write(tmp_path, "children.py", CHILDREN)
    # Ranks without GPUs: NCCL wants one each.
    done = run(tmp_path, script, MASTER_PORT=str(free_port()), CUDA_VISIBLE_DEVICES="")
    assert output(done) == ["0 of 2", "8"]


CHECKED = """
import torch
from deep_gemm.testing import bench_kineto, calc_diff

def test_good():
    for _ in range(3):
        assert calc_diff(torch.ones(4), torch.ones(4)) < 1e-3
    assert bench_kineto(lambda: 1 / 0, "kernel") == 1

def test_bad():
    assert calc_diff(torch.ones(4), torch.ones(4)) < 1e-3
    assert calc_diff(torch.ones(4), -torch.ones(4)) < 1e-3
    assert calc_diff(torch.ones(4), torch.ones(4)) < 1e-3

def test_nan():
    calc_diff(torch.full((4,), torch.nan), torch.ones(4))
    calc_diff(torch.ones(4), torch.ones(4))

def test_error():
    calc_diff(torch.ones(4), torch.ones(4))
    raise RuntimeError("lost")

def test_nothing():
    pass

if __name__ == "__main__":
    raise SystemExit("must not run")
"""


# Each run of the command is a fork of a process that has imported what it needs.
EACH_BY_ITSELF = """
import os
import sys

import megamoe.compat.deep_gemm.checks
from megamoe.compat.deep_gemm.__main__ import main

script, *functions = sys.argv[1:]
for function in functions:
    child = os.fork()
    if child == 0:
        main(["--checks", function, script])
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def test_checks_are_counted(tmp_path):
    expected = {
        "test_good": (0, "3 of 3 comparisons passed, largest difference 0.000e+00"),
        "test_bad": (1, "1 of 2 comparisons passed, largest difference 2.000e+00; ended by AssertionError"),
        "test_nan": (0, "2 of 2 comparisons passed, largest difference nan"),
        "test_error": (1, "1 of 1 comparisons passed, largest difference 0.000e+00; ended by RuntimeError: lost"),
        "test_nothing": (1, "0 of 0 comparisons passed"),
        "test_missing": (1, "ended by KeyError: 'test_missing'"),
    }
    script = write(tmp_path, "script.py", CHECKED)
    done = start(tmp_path, "-c", EACH_BY_ITSELF, script, *expected)
    lines = output(done)
    assert len(lines) == 2 * len(expected), done.stdout
    for (function, (status, words)), line, shown in zip(expected.items(), lines[::2], lines[1::2], strict=True):
        assert line.startswith(f"{function}: ") and words in line
        assert int(shown) == status, function


def test_every_function_is_called(tmp_path):
    done = run(tmp_path, "--checks", "test_bad,test_good", write(tmp_path, "script.py", CHECKED))
    assert done.returncode == 1
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == ["test_bad", "test_good"]
