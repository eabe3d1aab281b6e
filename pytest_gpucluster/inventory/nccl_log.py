"""NCCL's own log of a process, and the algorithm that it names there where that is switched on.

NCCL writes into the file that ``NCCL_DEBUG_FILE`` names, and begins it anew each time it reads its settings. What was there
before is kept in a file beside it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

PATH = "GPUCLUSTER_NCCL_LOG"
"""The variable with the path of the log; as in NCCL, ``%h`` is the hostname and ``%p`` the pid."""
FILE, SUBSYSTEMS = "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS"
TUNING = "INIT,NET,ENV,TUNING"
LIBRARY = "libnccl.so.2"
_CHOSEN = re.compile(r"NCCL INFO (?P<operation>\w+): \d+ Bytes -> Algo (?P<algorithm>\w+) proto (?P<protocol>\w+)")


Choice: TypeAlias = "tuple[str, str]"
"""Algorithm and protocol of an operation in NCCL's words: ``NVLS`` and ``SIMPLE``, ``RING`` and ``LL128``."""


def own_log() -> Path | None:
    """Where this process's log is; None where nobody said."""
    pattern = os.environ.get(PATH, "")
    hostname = socket.gethostname().partition(".")[0]  # as NCCL has it: without the domain
    return Path(pattern.replace("%h", hostname).replace("%p", str(os.getpid()))) if pattern else None


def log_text(log: Path | None) -> str:
    """All that NCCL wrote so far, with what is in :func:`earlier`; empty if there is none."""
    files = () if log is None else (earlier(log), log)
    return "".join(file.read_text(encoding="utf-8", errors="replace") for file in files if file.is_file())


def remove(log: Path) -> None:
    """Both files, as far as they are there."""
    for file in (earlier(log), log):
        file.unlink(missing_ok=True)


def earlier(log: Path) -> Path:
    """What was in the log before NCCL began it anew."""
    return log.with_name(f"{log.name}.earlier")


def parse_choice(text: str) -> Choice | None:
    """The last choice that stands there; None if none does.

    The form is that of NCCL's ``enqueue.cc`` at ``NCCL_DEBUG_SUBSYS=TUNING``: since 2.24 with the names, before with numbers,
    which are not taken. Only rank 0 of a group writes it, and nobody for operations made of sends and receives.
    """
    found = [one for one in _CHOSEN.finditer(text) if not one["algorithm"].isdigit()]
    return (found[-1]["algorithm"], found[-1]["protocol"]) if found else None


def choice_of(call: Callable[[], object]) -> Choice | None:
    """Call, and read which algorithm NCCL chose for it. For rank 0 of a group; the other ranks just call.

    NCCL reads its settings again for that, by ``ncclResetDebugInit`` (2.24 and later). None where it has no such function,
    is not loaded, or has no log. ``call`` has to return after NCCL has queued its work.
    """
    read_settings, log = _reader_of_settings(), own_log()
    if read_settings is None or log is None or not log.is_file():
        call()
        return None
    before = {name: os.environ.get(name) for name in (FILE, SUBSYSTEMS)}
    tuning_log = log.with_name(f"{log.name}.tuning")
    try:
        os.environ.update({FILE: str(tuning_log), SUBSYSTEMS: TUNING})
        read_settings()
        call()
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            os.environ.update({} if value is None else {name: value})
        read_settings()
    text = tuning_log.read_text(encoding="utf-8", errors="replace") if tuning_log.is_file() else ""
    _keep(log, also=text)
    tuning_log.unlink(missing_ok=True)
    return parse_choice(text)


def _keep(log: Path, *, also: str) -> None:
    """Move the log's text to the earlier one, since NCCL begins the file anew with its next line."""
    with earlier(log).open("a", encoding="utf-8") as kept:
        kept.write(log.read_text(encoding="utf-8", errors="replace") + also)
    log.unlink()


def _reader_of_settings() -> Callable[[], None] | None:
    """The function of the NCCL that this process has loaded."""
    with contextlib.suppress(OSError, AttributeError):
        function: Callable[[], None] = ctypes.CDLL(LIBRARY, mode=os.RTLD_NOLOAD | os.RTLD_LAZY).ncclResetDebugInit
        return function
    return None
