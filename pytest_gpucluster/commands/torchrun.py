"""torchrun as ``gpucluster launch`` and ``resume`` start it: without a traceback below the verdict."""

from __future__ import annotations

import sys


def main(arguments: list[str] | None = None) -> int:
    """Be torchrun, with its arguments; the exit code is that of the first rank that failed, 128 and more for a signal.

    ``torchrun`` itself ends with 1 and a traceback through its own frames, below the verdict that was shown last. Here that
    is left out. Its banner stays where a rank left nothing to show, as one that was killed does.
    """
    from torch.distributed import run  # noqa: PLC0415 -- torch takes seconds; the command line is torchrun's own
    from torch.distributed.elastic.multiprocessing import SignalException  # noqa: PLC0415
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError  # noqa: PLC0415

    try:
        run.run(run.parse_args(arguments))  # type: ignore[no-untyped-call, unused-ignore]
    except ChildFailedError as failed:
        _, first = failed.get_first_failure()
        if not isinstance(first.message, dict):
            sys.stderr.write(f"{failed}\n")
        return int(first.exitcode) if first.exitcode > 0 else 128 - int(first.exitcode)
    except SignalException as ended:
        sys.stderr.write(f"torchrun: ended by {ended.sigval.name}\n")
        return 128 + int(ended.sigval)
    return 0


if __name__ == "__main__":
    sys.exit(main())
