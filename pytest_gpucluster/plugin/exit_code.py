"""The exit code of the process, decided after every hook of every plugin. The agents end with the same code."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Generator, Mapping
from typing import Any, NoReturn

import pytest

from pytest_gpucluster.config.run_files import RESULTS
from pytest_gpucluster.config.settings import results_dir
from pytest_gpucluster.config.torchrun import read_launch, show_last, write_error_file
from pytest_gpucluster.inventory.sysfs import is_there
from pytest_gpucluster.plugin.activation import ACTIVE, RUN
from pytest_gpucluster.reporting.files import is_in_use
from pytest_gpucluster.text import one_line

JUDGES_NO_TEST = {
    "collectonly": "--collect-only",
    "setupplan": "--setup-plan",
    "setuponly": "--setup-only",
    "showfixtures": "--fixtures",
    "show_fixtures_per_test": "--fixtures-per-test",
    "cacheshow": "--cache-show",
    "markers": "--markers",
    "help": "--help",
    "version": "--version",
}
"""Options of pytest under which no test is judged, by their names in ``config.option``."""
USAGE_ERROR = "usage error: the ERROR line above says what is wrong"
NO_ACCEPTANCE = "gpucluster: the gate is closed: this run has no verdict ACCEPTED\n"


class ExitCodeGuard:
    """A pytest plugin whose only hook wraps the whole run. It is registered last, so that no other hook comes after it."""

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_cmdline_main(self, config: pytest.Config) -> Generator[None, Any, Any]:
        """Decide the exit code, and end the agents.

        Raises:
            pytest.UsageError: the gate is given together with an option under which no test is judged, or ``-f`` is.
        """
        if hasattr(config, "workerinput"):
            return (yield)
        code: int = int(pytest.ExitCode.INTERNAL_ERROR)
        try:
            _refuse_other_ways(config)
            code = final_code(config, (yield))
        except SystemExit as ended:  # a hook left by itself
            if ended.code not in (None, 0) or not (code := final_code(config, 0)):
                raise
        except pytest.UsageError as error:
            code = int(pytest.ExitCode.USAGE_ERROR)
            sys.stdout.flush()  # pytest prints the error to stderr: it comes last, in a pipe too
            lines = _with_earlier_results(config, error.args)
            write_error_file(USAGE_ERROR, code)
            raise pytest.UsageError(*lines) from None
        finally:
            _end_agents(config, code)
        return code


def guard_immediate_exit(config: pytest.Config) -> None:
    """In a run of ours, let ``os._exit(0)`` in a hook, a test or at exit leave with :func:`final_code` instead.

    Such a call ends the process before any hook of ours. Forked children of this process keep their own status.
    """
    leave, pid = os._exit, os.getpid()

    def leave_guarded(status: int) -> NoReturn:
        leave(final_code(config, status) if os.getpid() == pid else status)

    if config.stash[ACTIVE]:
        os._exit = leave_guarded


def final_code(config: pytest.Config, code: Any) -> int:
    """The exit code of this process, where pytest and its hooks chose ``code``.

    It is 0 for no run in which something is bad or that was left before its end, and with the gate for ACCEPTED alone.
    """
    chosen = int(code or 0)
    run = config.stash.get(RUN, None)
    is_bad, is_accepted = (run is not None and getattr(run.end, name) for name in ("is_bad", "is_accepted"))
    is_cut = run is not None and run.session.recorder.is_open and run.end.verdict is None
    if chosen != 0 or not (is_bad or is_cut or (_is_gated(config) and not is_accepted)):
        return chosen
    if _is_gated(config) and (run is None or run.end.verdict is None):
        sys.stdout.flush()
        sys.stderr.write(NO_ACCEPTANCE)
    return int(pytest.ExitCode.TESTS_FAILED)


def _is_gated(config: pytest.Config) -> bool:
    return bool(config.known_args_namespace.gpucluster_gate)


def _refuse_other_ways(config: pytest.Config) -> None:
    given: Mapping[str, Any] = vars(config.option)
    named = next((shown for name, shown in JUDGES_NO_TEST.items() if given.get(name)), None)
    if named is not None and _is_gated(config):
        raise pytest.UsageError(f"--gpucluster-gate asks for a verdict, and {named} judges no test; leave one of them out")
    if getattr(config.option, "looponfail", False) and config.stash.get(ACTIVE, False):
        raise pytest.UsageError("-f (--looponfail) runs tests again until they pass; a criterion is judged once: leave it out")


def _with_earlier_results(config: pytest.Config, lines: tuple[Any, ...]) -> tuple[Any, ...]:
    """The text of a usage error, which says of results that are there already that they are not this run's."""
    if not config.stash.get(ACTIVE, False) and RUN not in config.stash:
        return lines
    start, junit = config.invocation_params.dir, getattr(config.option, "xmlpath", None)
    folder = results_dir(config.option, start=start)
    older = [str(folder)] if is_there(folder / RESULTS) and not is_in_use(folder) else []
    if junit and is_there(start / junit) and not any(str(start / junit) in str(line) for line in lines):  # an input is none
        older.append(str(junit))
    if not older:
        return lines
    said = str(lines[-1]).rstrip() if lines else "this command cannot run"
    return (*lines[:-1], with_remark(said, f"the results in {' and '.join(older)} are of an earlier run"))


def with_remark(said: str, remark: str) -> str:
    """A message and what is to be added to it: behind a semicolon, or as a sentence of its own behind one, or as a line."""
    if "\n" in said:
        return f"{said}\n{remark}"
    return f"{said} {remark[0].upper()}{remark[1:]}" if said.endswith((".", "?", "!")) else f"{said}; {remark}"


def _end_agents(config: pytest.Config, code: int) -> None:
    """End the agents with this process's exit code.

    Help, markers, fixtures and collection start no measurement and end with 0, so torchrun waits for the other ranks: their
    agents end here. After a usage error torchrun ends the other ranks of this node, and its end closes the store. Not at
    exit: a connection made while the interpreter shuts down aborts the process.
    """
    run = config.stash.get(RUN, None)
    if run is not None and run.session.recorder.is_open:
        setup, verdict, last_lines = run.session.setup, run.end.verdict, ""
        if verdict is not None:  # for the screens of all nodes
            where = f"{setup.settings.results_dir.absolute()} on {socket.gethostname()}"
            last_lines = f"verdict {verdict.line}\nreport: {one_line(where)}"
        if verdict is not None and setup.launch is not None:
            show_last(last_lines)
            write_error_file(last_lines, code)
        run.session.close(code, last_lines=last_lines)
    elif run is not None and run.session.has_started:  # a usage error that only the parts themselves could show
        run.session.close(code)
    elif code == 0 and run is not None and run.session.setup.launch is not None:
        run.session.controller.quit(0)
    elif code == 0 and run is None and config.stash.get(ACTIVE, False):
        launch = read_launch()
        if launch is not None:  # pytest 8 answers --version here, before anything is configured
            from pytest_gpucluster.controller.controller import Controller  # noqa: PLC0415 -- loads much
            from pytest_gpucluster.protocol.codec import Secret  # noqa: PLC0415 -- its ranks may sign

            secret = Secret.of_run(launch)
            Controller(launch, num_local=1, device="cpu", rootdir=config.rootpath, secret=secret).quit(0)
