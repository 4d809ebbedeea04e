"""Runs one function on several ranks, each a process of its own, within a time limit."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

# The server has imported torch and megamoe once; each rank is a fork of it and starts in milliseconds.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "torch.distributed.tensor", "megamoe"])

COLLECTIVE_TIMEOUT = 30.0


class RankFailed(AssertionError):
    """A rank raised or did not end; the message holds every rank's traceback."""


def _rank_main(function, rank, world_size, store_path, backend, collective_timeout, connection, args) -> None:
    torch.set_num_threads(1)
    try:
        if backend == "nccl":
            torch.cuda.set_device(rank)
        store = dist.FileStore(store_path, world_size)
        timeout = timedelta(seconds=collective_timeout)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
        result = function(rank, world_size, *args)
        connection.send((True, result))
        dist.destroy_process_group()
    except BaseException:
        connection.send((False, traceback.format_exc()))
    finally:
        connection.close()


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    backend: str = "gloo",
    timeout: float = 90.0,
    collective_timeout: float = COLLECTIVE_TIMEOUT,
) -> list[Any]:
    """``[function(rank, world_size, *args) for rank in ...]``, each rank in a process with an initialised group.

    Args:
        function: importable by name; its arguments and result are pickled.
        backend: ``gloo``, or ``nccl`` with one GPU per rank.
        timeout: seconds for the whole run; ranks still alive then are killed.
        collective_timeout: seconds of the process group.

    Raises:
        RankFailed: a rank raised, died, or did not end in time.
    """
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank in range(world_size):
            receiver, sender = _CONTEXT.Pipe(duplex=False)
            process_args = (function, rank, world_size, f"{folder}/store", backend, collective_timeout, sender, args)
            process = _CONTEXT.Process(target=_rank_main, args=process_args, daemon=True)
            process.start()
            sender.close()
            ranks.append((process, receiver))
        deadline = time.monotonic() + timeout
        results, failures = [], []
        for rank, (process, receiver) in enumerate(ranks):
            try:
                if not receiver.poll(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError(f"no result within {timeout} s")
                passed, value = receiver.recv()
            except (EOFError, TimeoutError) as error:
                passed, value = False, f"{type(error).__name__}: {error} (exit code {process.exitcode})"
            results.append(value)
            if not passed:
                failures.append(f"rank {rank}:\n{value}")
        for process, _ in ranks:
            process.join(5.0)
            if process.is_alive():
                process.kill()
        if failures:
            raise RankFailed("\n".join(failures))
        return results
