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

from pytest_gpucluster.protocol import plain_data
from pytest_gpucluster.protocol.secret import SECRET_VARIABLE, Secret

if TYPE_CHECKING:
    from collections.abc import Callable

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
        "import sys; from pytest_gpucluster.protocol.secret import Secret; "
        "print(Secret.from_pipe(int(sys.argv[1])).sign('a', b'b'))"
    )
    environment = {name: value for name, value in os.environ.items() if name != SECRET_VARIABLE}
    command = [sys.executable, "-c", program, str(pipe)]
    child = subprocess.run(command, env=environment, pass_fds=[pipe], capture_output=True, text=True, check=True, timeout=60)
    os.close(pipe)
    assert child.stdout.strip() == secret.sign("a", b"b")
