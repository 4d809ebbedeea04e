"""Runs the commands as a user does, and reads what they leave."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def run_command(*arguments: str | Path, processes: int = 1, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Run a Python script of the repository, by torchrun if `processes` > 1, one thread each; returns when it ends."""
    launcher = [sys.executable]
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    return subprocess.run(
        [*launcher, *map(str, arguments)],
        cwd=REPOSITORY,
        env=environment,
        timeout=timeout,
        capture_output=True,
        text=True,
    )


def check_command(*arguments: str | Path, processes: int = 1, timeout: float = 120) -> str:
    """As `run_command`, but fails the test with the command's output if it fails. Returns its standard output."""
    done = run_command(*arguments, processes=processes, timeout=timeout)
    assert done.returncode == 0, f"{arguments} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout
