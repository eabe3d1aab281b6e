"""The worker: joins the process group, calls the function, returns plain data. Its agent kills it when it hangs."""

from __future__ import annotations

import os
import socket
import sys
import time
import traceback
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_gpucluster.protocol import functions, plain_data
from pytest_gpucluster.protocol.messages import (
    Entered,
    Failure,
    GroupMember,
    Progress,
    Reply,
    StartWorker,
    Success,
    Task,
)
from pytest_gpucluster.protocol.wire import Wire
from pytest_gpucluster.worker import flight_recorder, python_stacks
from pytest_gpucluster.worker.last_collective import CollectiveRecorder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

NEVER_S = 7 * 86400.0
PROGRESS_INTERVAL_S = 0.2


def main(request: StartWorker, link_fd: int) -> None:
    """Serve calls until the agent closes the line. Runs in a process that the spawner forked."""
    wire = Wire(socket.socket(fileno=link_fd))
    os.environ.update(request.environment)
    os.chdir(request.cwd)
    python_stacks.answer_requests(Path(request.stacks_file))
    flight_recorder.answer_requests(Path(request.flight_file))
    _Worker(wire, CollectiveRecorder(Path(request.collective_file))).serve()


class _Worker:
    """Runs the calls of one rank, one after the other."""

    def __init__(self, wire: Wire, recorder: CollectiveRecorder) -> None:
        import torch.distributed as dist

        self._wire = wire
        self._recorder = recorder
        self._pid = os.getpid()
        self._group_id: str | None = None
        self._device_set = False
        self._last_progress_s = 0.0
        recorder.watch(dist)
        _listen_to_progress(self._progress)

    def serve(self) -> None:
        while (messages := self._wire.receive()) is not None:
            for message in messages:
                task = Task.read(message)
                reply = replace(self._reply(task), call=task.call)
                if os.getpid() != self._pid:
                    os._exit(0)  # a copy that the function forked came back from it: the worker itself answers
                self._wire.send(reply)

    def _reply(self, task: Task) -> Reply:
        self._recorder.restart()
        try:
            function = self._prepare(task)
            self._wire.send(Entered(call=task.call))
            value = function(**plain_data.from_plain(task.kwargs))
            _synchronize(task)
            return Success(value=None if task.test else plain_data.to_plain(value))
        except BaseException as error:  # noqa: BLE001 -- whatever the function raised is its result
            return _failure(error)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()

    def _prepare(self, task: Task) -> Callable[..., Any]:
        """Join the group and find the function."""
        roots = None if task.trusted else [Path(root) for root in task.roots]
        allowed = [path for path in task.sys_path if roots is None or functions.is_below(Path(path), roots)]
        sys.path += [path for path in allowed if path not in sys.path]  # this node's own paths stay first: they are checked
        function = functions.find_function(task.function, trusted=task.trusted, roots=roots, rewrite=task.test)
        reads_only = task.any_device or hasattr(function, functions.NO_DEVICE_MARK)
        device = self._device(task, required=not reads_only)
        if task.group is not None:
            self._join(task.group, device)
        return bind_test(function, task.test_arguments, device) if task.test else function

    def _device(self, task: Task, *, required: bool) -> Any:
        import torch

        if task.device == "cpu" or task.any_device:
            return torch.device("cpu")
        index = int(os.environ["LOCAL_RANK"])
        num_gpus = torch.cuda.device_count()
        if index >= num_gpus and not required:
            return torch.device("cpu")
        if index >= num_gpus:
            raise RuntimeError(f"torch sees {num_gpus} GPUs on {socket.gethostname()}, so local rank {index} has none")
        device = torch.device("cuda", index)
        if not self._device_set:
            torch.cuda.set_device(device)
            self._device_set = True
        return device

    def _join(self, group: GroupMember, device: Any) -> None:
        import torch.distributed as dist

        if self._group_id == group.id:
            return
        timeout = timedelta(seconds=group.setup_s)
        tcp_store = dist.TCPStore(group.host, group.port, is_master=False, timeout=timeout)
        bound = {"device_id": device} if device.type == "cuda" else {}
        store = dist.PrefixStore(f"gpucluster/{group.id}", tcp_store)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=group.rank,
            world_size=group.size,
            timeout=timedelta(seconds=NEVER_S),  # the agent's deadline decides, not the library's
            **bound,
        )
        # Wait for all members: a member that raises at once would break the connections of one that still joins.
        if store.add("gpucluster/joined", 1) == group.size:
            store.set("gpucluster/all joined", "1")
        store.wait(["gpucluster/all joined"], timeout)
        self._group_id = group.id

    def _progress(self, step: str, fraction: float | None) -> None:
        now_s = time.monotonic()
        if now_s - self._last_progress_s >= PROGRESS_INTERVAL_S or fraction in (0.0, 1.0):
            self._last_progress_s = now_s
            self._wire.send(Progress(step=str(step)[:80], fraction=fraction))


def _synchronize(task: Task) -> None:
    import torch

    if task.device == "cuda" and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()


def leave_group() -> None:
    """Destroy the process group. The controller calls this on all members of a group, never on a part of it."""
    import gc

    import torch.distributed as dist

    if dist.is_initialized():
        gc.collect()  # a DDP module that is destroyed after its group can deadlock gloo (seen 2 times in 12)
        dist.destroy_process_group()


def _listen_to_progress(listener: Any) -> None:
    from pytest_gpucluster.measurements import progress

    progress.listen(listener)


def bind_test(function: Callable[..., Any], arguments: Sequence[str], device: Any) -> Callable[..., Any]:
    """The body of a ``@pytest.mark.distributed`` test, with the fixtures named in ``arguments`` filled in."""
    import torch.distributed as dist

    values = {"process_group": dist.group.WORLD, "rank": dist.get_rank(), "world_size": dist.get_world_size(), "device": device}
    fixtures = {name: values[name] for name in arguments}
    return lambda **parameters: function(**fixtures, **parameters)


def _failure(error: BaseException) -> Failure:
    return Failure(
        kind="refused" if isinstance(error, functions.RefusedError) else "raised",
        type=type(error).__name__,
        error=str(error)[:4000],
        traceback="".join(traceback.format_exception(type(error), error, error.__traceback__))[-8000:],
    )
