"""``--gpucluster-gate``: exit code 0 is for the verdict ACCEPTED and for nothing else, whatever hooks and options ran."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.launching import starter

if TYPE_CHECKING:
    from tests.support.launching import Starter


__all__ = ["starter"]

pytestmark = [pytest.mark.e2e, pytest.mark.long]

PLAIN = "def test_plain():\n    pass\n"
HOOKS = {
    "session finish": "def pytest_sessionfinish(session):\n    session.exitstatus = 0\n",
    "session finish, last": (
        "import pytest\n@pytest.hookimpl(trylast=True)\ndef pytest_sessionfinish(session):\n    session.exitstatus = 0\n"
    ),
    "session finish, around all": (
        "import pytest\n@pytest.hookimpl(wrapper=True, tryfirst=True)\ndef pytest_sessionfinish(session):\n"
        "    yield\n    session.exitstatus = 0\n"
    ),
    "unconfigure": (
        "def pytest_sessionstart(session):\n    session.config.kept = session\n"
        "def pytest_unconfigure(config):\n    config.kept.exitstatus = 0\n"
    ),
    "unconfigure leaves": "import sys\ndef pytest_unconfigure():\n    sys.exit(0)\n",
    "command line": (
        "import pytest\n@pytest.hookimpl(wrapper=True, tryfirst=True)\ndef pytest_cmdline_main():\n    yield\n    return 0\n"
    ),
    "another main": "import pytest\n@pytest.hookimpl(tryfirst=True)\ndef pytest_cmdline_main():\n    return 0\n",
    "os._exit in the last hook": "import os\ndef pytest_unconfigure():\n    os._exit(0)\n",
    "os._exit in a test": "import os\ndef pytest_runtest_call():\n    os._exit(0)\n",
    "os._exit at exit": "import atexit, os\natexit.register(os._exit, 0)\n",
    "os._exit at import": "import os\nos._exit(0)\n",
    "last teardown": "import pytest\ndef pytest_runtest_teardown():\n    pytest.exit('enough', returncode=0)\n",
}
BY_DAY = ("session finish, around all", "unconfigure", "another main", "os._exit at exit")
"""Without a test, one hook of each kind: of the session, after it, before it, and one that leaves the process."""
LOOKING = (
    "--collect-only",
    "--co",
    "--setup-plan",
    "--setup-only",
    "--fixtures",
    "--fixtures-per-test",
    "--markers",
    "--cache-show",
)


def assert_shut(starter: Starter, hook: str, tests: str) -> None:
    """A hook that turns the exit status into 0 does not turn the verdict."""
    starter.write(conftest=HOOKS[hook], test_plain=tests)
    launch = starter.pytest("--gpucluster-gate", "test_plain.py")
    assert launch.end() in (1, 5), launch.output
    launch.gone()


@pytest.mark.parametrize("hook", HOOKS)
def test_no_hook_opens_the_gate(starter: Starter, hook: str) -> None:
    """With a test that passes."""
    assert_shut(starter, hook, PLAIN)


@pytest.mark.parametrize("hook", [hook if hook in BY_DAY else pytest.param(hook, marks=pytest.mark.slow) for hook in HOOKS])
def test_no_hook_opens_the_gate_without_a_test(starter: Starter, hook: str) -> None:
    """With a file in which there is none."""
    assert_shut(starter, hook, "")


BAD = "def test_bad():\n    assert 1 == 2\n"
LATE = ("session finish, last", "session finish, around all", "unconfigure", "unconfigure leaves", "command line")


@pytest.mark.parametrize("hook", [*LATE, "none"])
def test_no_hook_makes_a_failure_good(starter: Starter, hook: str) -> None:
    """Also without the gate: a verdict REJECTED with exit code 0 is green for whoever runs it."""
    starter.write(conftest=HOOKS.get(hook, ""), test_bad=BAD, test_plain=PLAIN)
    launch = starter.pytest("--gpucluster", "test_bad.py", "test_plain.py")
    assert launch.end() == 1, launch.output
    launch.gone()


LEFT = {
    "at exit": ("import atexit, os\natexit.register(os._exit, 0)\n", BAD),
    "before its end": ("", "import os\ndef test_leaves():\n    os._exit(0)\ndef test_never_run():\n    pass\n"),
}


@pytest.mark.parametrize("how", LEFT)
def test_no_run_is_left_as_if_all_were_good(starter: Starter, how: str) -> None:
    """Without the gate, by os._exit(0): what failed, or never ran, leaves with 1. Where nothing is bad, the code stays."""
    starter.write(conftest=LEFT[how][0], test_own=LEFT[how][1])
    launch = starter.pytest("--gpucluster", "test_own.py")
    assert launch.end() == 1, launch.output
    launch.gone()
    if how == "at exit":
        starter.write(test_own=PLAIN)
        assert starter.pytest("--gpucluster", "test_own.py").end() == 0


@pytest.mark.parametrize("hook", LATE)
def test_a_hook_may_choose_the_code_of_what_is_not_bad(starter: Starter, hook: str) -> None:
    """Nothing failed, and no gate was asked for."""
    starter.write(conftest=HOOKS[hook].replace("= 0", "= 7").replace("(0)", "(7)").replace("n 0", "n 7"), test_plain=PLAIN)
    launch = starter.pytest("--gpucluster", "test_plain.py")
    assert launch.end() == 7, launch.output
    launch.gone()


@pytest.mark.parametrize("option", LOOKING)
def test_looking_is_refused(starter: Starter, option: str) -> None:
    """One sentence and exit code 4; also where the option comes from PYTEST_ADDOPTS."""
    starter.write(test_plain=PLAIN)
    launch = starter.pytest("--gpucluster-gate", "-p", "cacheprovider", PYTEST_ADDOPTS=option)
    assert launch.end() == 4, launch.output
    assert launch.output.count("judges no test; leave one of them out") == 1
    assert not (starter.folder / "gpucluster-results").exists()


def test_all_ranks_leave_with_the_same_code(starter: Starter) -> None:
    """Under torchrun a hook cannot send one rank home with 0: torchrun's own status is 1."""
    starter.write(conftest=HOOKS["unconfigure"], test_plain=PLAIN)
    launch = starter.torchrun("--gpucluster-gate", "test_plain.py", ranks=2)
    assert launch.end() == 1, launch.output
    launch.gone()
