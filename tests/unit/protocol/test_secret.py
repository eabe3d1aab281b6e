"""The shared secret: it signs, it is handed to a child process, and nothing shows it."""

from __future__ import annotations

import copy
import json
import os
import pickle
import pprint
import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpucluster.config.torchrun import Launch
from pytest_gpucluster.protocol import plain_data
from pytest_gpucluster.protocol.codec import SECRET_VARIABLE, Secret

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TEXT = "hunter2-of-this-test"


@dataclass(frozen=True)
class Holder:
    """Has a secret among its fields."""

    name: str
    secret: Secret


@pytest.fixture
def secret(monkeypatch: pytest.MonkeyPatch) -> Secret:
    """A secret from the environment."""
    monkeypatch.setenv(SECRET_VARIABLE, TEXT)
    found = Secret.read()
    assert found is not None
    return found


SHOWN: dict[str, Callable[[Any], str]] = {
    "repr": repr,
    "str": str,
    "format": "{0} {0!r} {0!s} {0!a}".format,
    "percent": lambda secret: "%s %r" % (secret, secret),  # noqa: UP031 -- one of the ways
    "pprint": pprint.pformat,
    "dataclass": lambda secret: repr(Holder("a", secret)),
    "containers": lambda secret: repr(({"a": secret}, [secret], {secret})),
    "dir": lambda secret: repr([getattr(type(secret), name, None) for name in dir(secret)]),
}


@pytest.mark.parametrize("show", SHOWN.values(), ids=SHOWN)
def test_it_shows_only_that_it_is_a_secret(secret: Secret, show: Callable[[Any], str]) -> None:
    """In text, in a dataclass, in a container: neither the secret nor the key that is made of it."""
    shown = show(secret)
    assert TEXT not in shown
    assert secret._key.hex() not in shown
    assert repr(secret._key) not in shown


@pytest.mark.parametrize(
    "take_out",
    [pickle.dumps, copy.copy, copy.deepcopy, json.dumps, plain_data.to_plain, vars, lambda one: asdict(Holder("a", one))],
)
def test_it_cannot_be_taken_out(secret: Secret, take_out: Callable[[Any], Any]) -> None:
    """Neither pickled nor copied, and it is no plain data; the refusal does not show it either."""
    with pytest.raises(TypeError) as refused:
        take_out(secret)
    assert TEXT not in str(refused.value)


def test_taking_it_removes_it_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child process does not inherit it; an empty one is none, and is removed too."""
    monkeypatch.setenv(SECRET_VARIABLE, TEXT)
    assert Secret.take() is not None
    assert SECRET_VARIABLE not in os.environ
    assert Secret.take() is None
    monkeypatch.setenv(SECRET_VARIABLE, "")
    assert Secret.take() is None
    assert SECRET_VARIABLE not in os.environ


def test_bytes_that_are_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any value that an environment can hold signs."""
    monkeypatch.setitem(os.environb, SECRET_VARIABLE.encode(), b"caf\xe9\xff")
    one, same = Secret.read(), Secret.read()
    assert one is not None
    assert same is not None
    assert one.sign("a", b"b") == same.sign("a", b"b")


def test_name_and_body_are_signed_each() -> None:
    """The same body under another name is another message; two random secrets sign differently."""
    one = Secret.random()
    assert one.sign("a", b"b") != one.sign("b", b"b") != one.sign("b", b"a")
    assert one.sign("a", b"b") != Secret.random().sign("a", b"b")


def test_a_child_process_signs_alike(secret: Secret) -> None:
    """It reads the secret from a pipe, which then is empty; its command line and environment do not have it."""
    pipe = secret.to_pipe()
    program = (
        "import sys; from pytest_gpucluster.protocol.codec import Secret; "
        "print(Secret.from_pipe(int(sys.argv[1])).sign('a', b'b'))"
    )
    environment = {name: value for name, value in os.environ.items() if name != SECRET_VARIABLE}
    command = [sys.executable, "-c", program, str(pipe)]
    child = subprocess.run(command, env=environment, pass_fds=[pipe], capture_output=True, text=True, check=True, timeout=60)
    os.close(pipe)
    assert child.stdout.strip() == secret.sign("a", b"b")


# The secret that the ranks of one node share.


def launch_of(*, nodes: int) -> Launch:
    """Rank 1 of two ranks a node."""
    return Launch(
        rank=1,
        world_size=2 * nodes,
        local_rank=1,
        local_world_size=2,
        group_rank=0,
        master_addr="127.0.0.1",
        master_port=29500,
        run_id="none",
        agent_hosts_store=True,
        restart_count=0,
    )


@pytest.fixture
def attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an attempt, as torchrun makes it."""
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    run = tmp_path / "none_abc"
    run.mkdir(mode=0o700)
    made = run / "attempt_0"
    (made / "1").mkdir(parents=True)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(made / "1" / "error.json"))
    return made


def signature(secret: Secret | None) -> str:
    """By which two secrets are the same."""
    assert secret is not None
    return secret.sign("name", b"body")


def test_the_ranks_of_one_node_share_a_secret(attempt: Path) -> None:
    """Whoever comes first makes it; it is in one file, which its user alone can read."""
    assert signature(Secret.of_run(launch_of(nodes=1))) == signature(Secret.of_run(launch_of(nodes=1)))
    (file,) = (one for one in attempt.iterdir() if one.is_file())
    assert file.stat().st_mode & 0o777 == 0o600
    assert len(file.read_bytes()) == 32


def test_ranks_that_ask_at_the_same_time(attempt: Path) -> None:
    """Eight processes, one secret, and no file of theirs is left."""
    code = "import sys; from pathlib import Path; from pytest_gpucluster.protocol.codec import Secret\n"
    code += "sys.stdin.readline(); print(Secret.shared_in(Path(sys.argv[1])).sign('name', b'body'))"
    ranks = [
        subprocess.Popen([sys.executable, "-c", code, str(attempt)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(8)
    ]
    for rank in ranks:
        assert rank.stdin is not None
        rank.stdin.write("\n")
        rank.stdin.flush()
    assert len({rank.communicate()[0] for rank in ranks}) == 1
    assert len([one for one in attempt.iterdir() if one.is_file()]) == 1


def test_the_environment_comes_first(attempt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A secret of the user is the secret, and is taken out of the environment."""
    monkeypatch.setenv(SECRET_VARIABLE, TEXT)
    own = Secret.read()
    assert signature(Secret.of_run(launch_of(nodes=1))) == signature(own)
    assert SECRET_VARIABLE not in os.environ
    assert not [one for one in attempt.iterdir() if one.is_file()]


@pytest.mark.parametrize("case", ["two nodes", "no torchrun", "no folder", "others may enter", "a link", "gone"])
def test_no_secret_is_shared(attempt: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """Over more than one node, and where another user could read or replace it."""
    if case == "no folder":
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "")
    if case == "others may enter":
        attempt.parent.chmod(0o750)
    if case in ("a link", "gone"):
        attempt.parent.rename(attempt.parent.with_name("moved"))
    if case == "a link":
        attempt.parent.symlink_to("moved")
    launch = None if case == "no torchrun" else launch_of(nodes=2 if case == "two nodes" else 1)
    assert Secret.of_run(launch) is None
