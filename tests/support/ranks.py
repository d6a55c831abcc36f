"""Run a function on several ranks, in real processes with a gloo process group."""

from __future__ import annotations

import pickle
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from support.forks import forks

dist: Any = torch.distributed
TIMEOUT = 240.0  # seconds for all of them together


def run_on_ranks(count: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call ``function(rank, *arguments)`` on ranks 0 to ``count`` - 1 of a process group. Returns the results, which must be picklable.

    ``function`` must be importable: defined in a module, not inside a test. Raises AssertionError with the traceback of the first rank
    that failed, or if the ranks exceed TIMEOUT.
    """
    context = forks()
    work = pickle.dumps((function, arguments))  # by value, like the results: shared tensors would vanish with their process
    with tempfile.TemporaryDirectory(prefix="strop-ranks-") as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(count)]
        ranks = [
            context.Process(target=_run_rank, args=(rank, count, folder, pipes[rank][1], work), daemon=True)
            for rank in range(count)
        ]
        for rank in ranks:
            rank.start()
        for _, sender in pipes:
            sender.close()
        try:
            return [_receive_result(rank, receiver) for rank, (receiver, _) in enumerate(pipes)]
        finally:
            for rank in ranks:
                rank.join(5)
                if rank.is_alive():
                    rank.kill()
                    rank.join()


def _receive_result(rank: int, receiver: Any) -> Any:
    assert receiver.poll(TIMEOUT), f"rank {rank} did not answer within {TIMEOUT:g} s"
    try:
        failed, result = pickle.loads(receiver.recv_bytes())
    except EOFError:
        raise AssertionError(f"rank {rank} died") from None
    assert not failed, f"rank {rank} failed:\n{result}"
    return result


def _run_rank(rank: int, count: int, folder: str, sender: Any, work: bytes) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), count)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count)
    try:
        function, arguments = pickle.loads(work)
        answer = (False, function(rank, *arguments))
    except BaseException:
        answer = (True, traceback.format_exc())
    try:
        sender.send_bytes(pickle.dumps(answer))
    finally:
        sender.close()
        dist.destroy_process_group()
