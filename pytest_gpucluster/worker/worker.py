"""The worker: joins the group, calls the function, returns plain data. Disposable; its agent kills it when it hangs."""

from __future__ import annotations

import os
import socket
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

from pytest_gpucluster.protocol import functions, plain_data
from pytest_gpucluster.protocol.wire import Wire
from pytest_gpucluster.worker import flight_recorder, python_stacks
from pytest_gpucluster.worker.last_collective import Beacon

NEVER_S = 7 * 86400.0
PROGRESS_INTERVAL_S = 0.2


def main(request: dict[str, Any], link_fd: int) -> None:
    """Serve calls until the agent closes the line. Runs in a process that the spawner forked."""
    wire = Wire(socket.socket(fileno=link_fd))
    os.environ.update(request["environment"])
    os.chdir(request["cwd"])
    python_stacks.answer_requests(Path(request["stacks"]))
    flight_recorder.answer_requests(Path(request["flight"]))
    beacon = Beacon(Path(request["beacon"]))
    _Worker(wire, beacon).serve()


class _Worker:
    """One rank's hands."""

    def __init__(self, wire: Wire, beacon: Beacon) -> None:
        import torch.distributed as dist

        self._wire = wire
        self._beacon = beacon
        self._group: str | None = None
        self._device_set = False
        self._last_progress_s = 0.0
        beacon.watch(dist)
        _listen_to_progress(self._progress)

    def serve(self) -> None:
        while (messages := self._wire.receive()) is not None:
            for message in messages:
                self._wire.send({"t": "result", **self._reply(message)})

    def _reply(self, call: dict[str, Any]) -> dict[str, Any]:
        started_s = time.perf_counter()
        self._beacon.restart()
        try:
            function = self._prepare(call)
            setup_s = time.perf_counter() - started_s
            self._wire.send({"t": "entered"})
            value = function(**plain_data.from_plain(call["kwargs"]))
            self._synchronize(call)
            data = plain_data.to_plain(value) if not call["test"] else None
        except BaseException as error:  # noqa: BLE001 -- whatever the function raised is its result
            return _failure(error, test=call["test"])
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
        return {"ok": True, "value": data, "setup_s": setup_s, "run_s": time.perf_counter() - started_s - setup_s}

    def _prepare(self, call: dict[str, Any]) -> Any:
        roots = None if call["trusted"] else [Path(root) for root in call["roots"]]
        known = [path for path in call["sys_path"] if roots is None or functions.is_below(Path(path), roots)]
        sys.path += [path for path in known if path not in sys.path]  # own paths first: they are what is checked
        function = functions.find_function(call["function"], trusted=call["trusted"], roots=roots, rewrite=call["test"])
        reads_only = call["any_device"] or hasattr(function, functions.NO_DEVICE_MARK)
        device = self._device(call, required=not reads_only)
        if call["group"] is not None:
            self._join(call["group"], device)
        return bind_test(function, call["test_arguments"], device) if call["test"] else function

    def _device(self, call: dict[str, Any], *, required: bool) -> Any:
        import torch

        if call["device"] == "cpu" or call["any_device"]:
            return torch.device("cpu")
        index = int(os.environ["LOCAL_RANK"])
        seen = torch.cuda.device_count()
        if index >= seen and not required:
            return torch.device("cpu")
        if index >= seen:
            raise RuntimeError(f"torch sees {seen} GPUs on {socket.gethostname()}, so local rank {index} has none")
        device = torch.device("cuda", index)
        if not self._device_set:
            torch.cuda.set_device(device)
            self._device_set = True
        return device

    def _join(self, group: dict[str, Any], device: Any) -> None:
        import torch.distributed as dist

        if self._group == group["id"]:
            return
        host, port = group["host"], group["port"]
        tcp_store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=group["setup_s"]))
        bound = {"device_id": device} if device.type == "cuda" else {}
        store = dist.PrefixStore(f"gpucluster/{group['id']}", tcp_store)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=group["rank"],
            world_size=group["size"],
            timeout=timedelta(seconds=NEVER_S),  # the agent's deadline decides, not the library's
            **bound,
        )
        # Together from here: a rank that raises at once would take a peer with it that is not through yet.
        if store.add("gpucluster/joined", 1) == group["size"]:
            store.set("gpucluster/all joined", "1")
        store.wait(["gpucluster/all joined"], timedelta(seconds=group["setup_s"]))
        self._group = group["id"]

    def _synchronize(self, call: dict[str, Any]) -> None:
        import torch

        if call["device"] == "cuda" and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()

    def _progress(self, step: str, fraction: float | None) -> None:
        now_s = time.monotonic()
        if now_s - self._last_progress_s >= PROGRESS_INTERVAL_S or fraction in (0.0, 1.0):
            self._last_progress_s = now_s
            self._wire.send({"t": "progress", "step": str(step)[:80], "fraction": fraction})


def leave_group() -> None:
    """Destroy the process group; the controller sends this to all members of a group, never to a part of it."""
    import gc

    import torch.distributed as dist

    if dist.is_initialized():
        gc.collect()  # a DDP module that outlives its group can deadlock gloo (seen 2 times in 12)
        dist.destroy_process_group()


def _listen_to_progress(listener: Any) -> None:
    from pytest_gpucluster.measurements import progress

    progress.listen(listener)


def bind_test(function: Any, arguments: list[str], device: Any) -> Any:
    """Return the body of a ``@pytest.mark.distributed`` test with its allowed arguments filled in."""
    import torch.distributed as dist

    given = {"process_group": dist.group.WORLD, "rank": dist.get_rank(), "world_size": dist.get_world_size(), "device": device}
    wanted = {name: given[name] for name in arguments}
    return lambda **parameters: function(**wanted, **parameters)


def _failure(error: BaseException, *, test: bool) -> dict[str, Any]:
    kind = "refused" if isinstance(error, functions.RefusedError) else "raised"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename != __file__]
    return {
        "ok": False,
        "kind": kind,
        "type": type(error).__name__,
        "error": str(error)[:4000],
        "assertion": test and isinstance(error, AssertionError),
        "where": f"{own[-1].filename}:{own[-1].lineno} in {own[-1].name}" if own else "",
        "traceback": "".join(traceback.format_exception(type(error), error, error.__traceback__))[-8000:],
    }
