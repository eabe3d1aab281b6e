"""The worker: joins the process group, calls the function, returns plain data. Its agent kills it when it hangs."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from pytest_gpucluster.protocol import functions, messages, plain_data
from pytest_gpucluster.protocol.codec import Wire
from pytest_gpucluster.text import counted
from pytest_gpucluster.worker import flight_recorder, python_stacks
from pytest_gpucluster.worker.last_collective import CollectiveRecorder
from pytest_gpucluster.worker.raised import NoGpuError, failure_of

if TYPE_CHECKING:
    from pytest_gpucluster.worker.gpu_watch import GpuWatch

NEVER_S = 7 * 86400.0
PROGRESS_INTERVAL_S = 0.2


def main(request: messages.StartWorker, link_fd: int) -> None:
    """Serve calls until the agent closes the line. Runs in a process that the spawner forked."""
    wire = Wire(socket.socket(fileno=link_fd))
    os.environ.update(request.environment)
    os.chdir(request.cwd)
    python_stacks.answer_requests(Path(request.stacks_file))
    flight_recorder.answer_requests(Path(request.flight_file))
    _Worker(wire, CollectiveRecorder(Path(request.collective_file)), request.environment).serve()


class _Worker:
    """Runs the calls of one rank, one after the other."""

    def __init__(self, wire: Wire, recorder: CollectiveRecorder, environment: Mapping[str, str]) -> None:
        import torch.distributed as dist

        from pytest_gpucluster.measurements import progress

        self._wire = wire
        self._recorder = recorder
        self._pid = os.getpid()
        self._environment = environment
        self._group_id: str | None = None
        self._group: Any = None
        self._watch: GpuWatch | None = None
        self._sending = threading.Lock()
        self._last_progress_s = 0.0
        recorder.watch(dist)
        progress.listen(self._progress)

    def serve(self) -> None:
        import torch.distributed as dist

        while (received := self._wire.receive()) is not None:
            for message in received:
                task = messages.Task.read(message)
                # The function may have destroyed the default process group, or made one of its own.
                reply = replace(self._reply(task), call=task.call.id, group_changed=dist.group.WORLD is not self._group)
                if os.getpid() != self._pid:
                    os._exit(0)  # a copy that the function forked came back from it: the worker itself answers
                try:
                    self._send(reply)
                except (ValueError, RecursionError) as error:  # a whole number of more digits than JSON takes
                    self._send(replace(failure_of(error), call=task.call.id))

    def _send(self, message: messages.FromWorker) -> None:
        """Send from any thread."""
        with self._sending:
            self._wire.send(message)

    def _reply(self, task: messages.Task) -> messages.Reply:
        self._recorder.restart()
        try:
            function, watching = self._prepare(task)
            with watching:
                self._send(messages.Entered(call=task.call.id))
                value = function(**plain_data.from_plain(task.call.kwargs))
                _synchronize(task.call)
            return messages.Success(value=plain_data.to_plain(value))
        except BaseException as error:  # noqa: BLE001 -- whatever the function raised is its result
            return failure_of(error)
        finally:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(AttributeError, OSError, ValueError):  # the function may have closed or replaced it
                    stream.flush()

    def _prepare(self, task: messages.Task) -> tuple[Callable[..., Any], contextlib.AbstractContextManager[None]]:
        """Join the group and find the function; also the watch around it, where another user of the GPU would falsify it.

        torchrun's variables are what they were, whatever ran before.
        """
        os.environ.update(self._environment)
        roots = None if task.trusted else [Path(root) for root in task.roots]
        allowed = [path for path in task.call.sys_path if roots is None or functions.may_import_from(Path(path), roots)]
        sys.path += [path for path in allowed if path not in sys.path]  # this node's own paths stay first: they are checked
        call, arguments = task.call, task.call.test_arguments
        function = functions.find_function(call.function, trusted=task.trusted, roots=roots, rewrite=arguments is not None)
        reads_only = call.any_device or hasattr(function, functions.NO_DEVICE_MARK)
        device = self._device(call, required=not reads_only)
        if task.group is not None:
            self._join(task.group, device)
        elif function is leave_group:
            self._group_id = self._group = None
        needs_idle = device.type == "cuda" and functions.needs_idle_gpu(function)
        watching = self._watch.measuring(call.id) if self._watch is not None and needs_idle else contextlib.nullcontext()
        return (function if arguments is None else bind_test(function, arguments, device)), watching

    def _device(self, call: messages.StartCall, *, required: bool) -> Any:
        import torch

        if call.device == "cpu" or call.any_device:
            return torch.device("cpu")
        index = int(os.environ["LOCAL_RANK"])
        num_gpus = torch.cuda.device_count()
        if index >= num_gpus and not required:
            return torch.device("cpu")
        if index >= num_gpus:
            raise NoGpuError(f"torch sees {counted(num_gpus, 'GPU')} on {socket.gethostname()}, so local rank {index} has none")
        device = torch.device("cuda", index)
        if self._watch is None:
            self._watch = _take_gpu(index, self._send)
        return device

    def _join(self, group: messages.GroupMember, device: Any) -> None:
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
        self._group = dist.group.WORLD

    def _progress(self, step: str, fraction: float | None) -> None:
        now_s = time.monotonic()
        if now_s - self._last_progress_s >= PROGRESS_INTERVAL_S or fraction in (0.0, 1.0):
            self._last_progress_s = now_s
            self._send(messages.StepReport(step=str(step)[:80], fraction=None if fraction is None else float(fraction)))


def _take_gpu(index: int, report: Callable[[messages.ForeignProcess], None]) -> GpuWatch:
    """Make this GPU the process's own, and begin to watch who else is on it."""
    import torch

    from pytest_gpucluster.worker.gpu_watch import GpuWatch

    properties: Any = torch.cuda.get_device_properties(index)
    watch = GpuWatch(report)
    with watch.creating_context(f"GPU-{properties.uuid}"):
        torch.cuda.set_device(index)
    return watch


def _synchronize(call: messages.StartCall) -> None:
    import torch

    if call.device == "cuda" and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()


def look_at_gpu() -> None:
    """Do nothing: the readings around this call say whether somebody else is on the GPU."""


def leave_group() -> None:
    """Destroy the process group. The controller calls this on all members of a group, never on a part of it."""
    import gc

    import torch.distributed as dist

    if dist.is_initialized():
        gc.collect()  # a DDP module that is destroyed after its group can deadlock gloo (seen 2 times in 12)
        dist.destroy_process_group()


def bind_test(function: Callable[..., Any], arguments: Sequence[str], device: Any) -> Callable[..., Any]:
    """The body of a ``@pytest.mark.distributed`` test, with the fixtures named in ``arguments`` filled in.

    It returns None, or the type of what ``function`` returned, in words. It raises a ``TypeError`` where ``function`` is
    asynchronous or a generator: a call runs nothing of it.
    """
    import torch.distributed as dist

    values = {"process_group": dist.group.WORLD, "rank": dist.get_rank(), "world_size": dist.get_world_size(), "device": device}
    fixtures = {name: values[name] for name in arguments}

    def body(**parameters: Any) -> str | None:
        made = function(**fixtures, **parameters)
        if isinstance(made, (Awaitable, AsyncIterator, Iterator)):
            raise TypeError(f"its call gave a {type(made).__name__}, and its body has not run: write a plain function")
        return None if made is None else repr(type(made))

    return body
