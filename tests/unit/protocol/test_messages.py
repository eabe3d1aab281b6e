"""Every type of message survives the wire, and is refused with any field missing or of another type."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import fields

from pytest_gpucluster.agent.main import AgentSettings
from pytest_gpucluster.controller.relay import Collected, RelayAnswer, RelayedCall
from pytest_gpucluster.protocol import messages
from pytest_gpucluster.protocol.channel import Address
from pytest_gpucluster.protocol.codec import MalformedMessageError, TypedMessage, Wire, read_one_of
from pytest_gpucluster.protocol.messages import Failure, read_from_worker
from pytest_gpucluster.protocol.rank import Rank

HERE = [value for value in vars(messages).values() if isinstance(value, type) and issubclass(value, TypedMessage)]
TYPES = [*HERE, Address, AgentSettings, Collected, Rank, RelayAnswer, RelayedCall]
TYPES.remove(TypedMessage)
UNIONS = {
    messages.read_command: messages.COMMANDS,
    messages.read_reply: (messages.Success, messages.Failure),
    messages.read_from_worker: (
        messages.Entered,
        messages.StepReport,
        messages.ForeignProcess,
        messages.Success,
        messages.Failure,
    ),
    messages.read_from_spawner: (messages.WorkerStarted, messages.WorkerNotStarted, messages.WorkerExited),
}
WRONG = ["text", True, 7, 2.5, None, [3], {"a": 1}, [[1, "x"]], [["a", 2]]]


def example(kind: Any) -> Any:
    """A value of an annotation, as Python has it."""
    origin, arguments = get_origin(kind), get_args(kind)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        hints = get_type_hints(kind)
        return kind(**{name: example(hints[name]) for name in kind.__struct_fields__})
    if origin is Literal:
        return arguments[0]
    if origin in (tuple, Sequence):
        return (list if origin is Sequence else tuple)(example(one) for one in arguments if one is not Ellipsis)
    if origin is dict:
        return {"key": example(arguments[1])}
    if origin is not None:  # X | None
        return example(arguments[0])
    return {int: 3, float: 0.5, str: "text", bool: True}.get(kind)


def as_json(data: Any) -> bytes:
    """What crosses."""
    return json.dumps(data).encode()


def fits(value: Any, kind: Any) -> bool:
    """Whether one of :data:`WRONG` is a value of an annotation, found by other means than in the code under test."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return any(type(value) is type(one) and value == one for one in arguments)
    if origin is tuple:
        items = arguments[:1] * len(value) if isinstance(value, list) and arguments[-1] is Ellipsis else arguments
        return isinstance(value, list) and len(value) == len(items) and all(map(fits, value, items))
    if origin is dict:
        return isinstance(value, dict) and all(fits(item, arguments[1]) for item in value.values())
    if origin is Sequence:
        return isinstance(value, list) and all(fits(item, arguments[0]) for item in value)
    if origin is not None:  # X | None
        return value is None or fits(value, arguments[0])
    known = {Any: (object,), int: (int,), float: (int, float), str: (str,), bool: (bool,)}.get(kind, ())
    return object in known or type(value) in known


@pytest.mark.parametrize("kind", TYPES)
def test_round_trip(kind: Any) -> None:
    """What was sent is what is read; keys of another version are left out."""
    message = example(kind)
    data = json.loads(message.to_json())
    assert kind.read(message.to_json()) == message
    assert kind.read(as_json({**data, "of another version": 1})) == message
    assert {**data, "t": None}.keys() == {*kind.__struct_fields__, "t"}
    assert data.get("t") == kind.__struct_config__.tag


@pytest.mark.parametrize("kind", TYPES)
def test_each_field_is_checked(kind: Any) -> None:
    """A value of another type is refused, and the error names type, field and value; a fitting one is not."""
    good, hints = json.loads(example(kind).to_json()), get_type_hints(kind)
    for name in kind.__struct_fields__:
        for wrong in WRONG:
            if fits(wrong, hints[name]):
                kind.read(as_json({**good, name: wrong}))
                continue
            with pytest.raises(MalformedMessageError, match=rf"^{kind.__name__}: .*`\$\.{name}\b"):
                kind.read(as_json({**good, name: wrong}))


@pytest.mark.parametrize("kind", TYPES)
def test_each_field_is_needed(kind: Any) -> None:
    """A field without a default cannot be left out."""
    good = json.loads(example(kind).to_json())
    for field in fields(kind):
        less = {name: value for name, value in good.items() if name != field.name}
        if not field.required:
            kind.read(as_json(less))
            continue
        with pytest.raises(MalformedMessageError, match=rf"^{kind.__name__}: .*missing required field `{field.name}`"):
            kind.read(as_json(less))


@pytest.mark.parametrize("kind", [kind for kind in TYPES if kind.__struct_config__.tag])
def test_a_tag_is_checked(kind: Any) -> None:
    """Another tag than the one of the type is refused, and so is none."""
    good = json.loads(example(kind).to_json())
    without = {name: value for name, value in good.items() if name != "t"}
    for wrong in (without, *({**good, "t": tag} for tag in WRONG)):
        with pytest.raises(MalformedMessageError, match=f"is none of {kind.__name__}"):
            kind.read(as_json(wrong))


@pytest.mark.parametrize("data", [None, 3, "text", [], [{}], True])
@pytest.mark.parametrize("kind", TYPES)
def test_what_is_no_object(kind: Any, data: Any) -> None:
    """Refused by the same error."""
    with pytest.raises(MalformedMessageError):
        kind.read(as_json(data))


@pytest.mark.parametrize("read", UNIONS)
def test_tags_choose_the_type(read: Any) -> None:
    """Each message of a union is read as itself; an unknown tag, or none, is refused."""
    for kind in UNIONS[read]:
        message = example(kind)
        data = json.loads(message.to_json())
        assert type(read(message.to_json())) is kind
        assert read(message.to_json()) == message
        for wrong in ({**data, "t": "nonsense"}, {**data, "t": None}, {**data, "t": 1}, {**data, "t": []}):
            with pytest.raises(MalformedMessageError, match="is none of "):
                read(as_json(wrong))
    for wrong in ({}, None, 3, [], "text", {"ok": True}):
        with pytest.raises(MalformedMessageError, match="is none of "):
            read(as_json(wrong))


@pytest.mark.parametrize("tag", [1, True, None, "Success", "progress", ["success"]], ids=repr)
def test_a_result_has_one_of_two_tags(tag: object) -> None:
    """Whatever else stands there: the result of another version, or no result."""
    with pytest.raises(MalformedMessageError, match="is none of Success, Failure"):
        read_one_of((messages.Success, messages.Failure), as_json({"t": tag, "ok": True, "value": 3}))


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("collectives", "true"),
        ("collectives", "1.0"),
        ("collectives", '"1"'),
        ("collectives", "9" * 10_000),
        ("entered", "1"),
        ("value", "NaN"),
        ("value", "-Infinity"),
        ("value", "1e999"),
        ("value", "[" * 100_000),
        ("value", "[" * 100_000 + "]" * 100_000),
        ("value", '{"a":' * 100_000),
        ("of another version", "[" * 100_000 + "]" * 100_000),
        ("value", "'text'"),
        ("value", "__import__('os')"),
        ("value", '"\xff"'),
    ],
    ids=str,
)
def test_what_a_library_might_take(field: str, text: str) -> None:
    """A truth value is no number, a number without an end is none, and depth ends in the one error."""
    data = f'{{"t": "success", "{field}": {text}}}'.encode("latin-1")
    with pytest.raises(MalformedMessageError):
        messages.read_reply(data)


THREADS = """
import sys, threading
from pytest_gpucluster.protocol.codec import TypedMessage

def new_class():
    class Inner(TypedMessage, frozen=True, kw_only=True):
        a: int
        b: str
        c: tuple[int, ...] = ()

    class Outer(TypedMessage, frozen=True, kw_only=True):
        x: int
        inner: Inner
        more: tuple[Inner, ...] = ()

    Outer.__annotations__.update(inner=Inner, more=tuple[Inner, ...])
    return Outer

def read(kind, barrier):
    barrier.wait()
    done.append(kind.read(b'{"x": 1, "inner": {"a": 1, "b": "c"}}').inner.a)

sys.setswitchinterval(1e-6)
done = []
for _ in range(100):
    kind, barrier = new_class(), threading.Barrier(8)
    threads = [threading.Thread(target=read, args=(kind, barrier)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
print(sum(done))
"""


def test_the_first_message_of_a_type_in_many_threads() -> None:
    """Agents and relays read in threads. msgspec crashes the process if two of them make its decoder at the same time."""
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "800\n"), done.stderr


@pytest.mark.parametrize(
    "value",
    [
        "[" * 900 + "]" * 900,
        "[" * 34 + "]" * 34,
        '{"$dataclass": "a:B", "fields": [1]}',
        '[{"$dataclass": 1, "fields": {}}]',
        '{"$dataclass": "a:B"}',
        '{"$float": "1e5"}',
        '{"$float": "nan", "and": 1}',
    ],
)
def test_a_value_that_cannot_be_rebuilt(value: str) -> None:
    """The agent passes it on unread. Where it is rebuilt, it is refused by the error that every wrong message gets."""
    with pytest.raises(MalformedMessageError, match="Success"):
        messages.read_reply(f'{{"t": "success", "value": {value}}}'.encode())


@pytest.mark.parametrize("text", ["caf\udce9", "\ud83d", "a\udcffb \U0001f600 \x00\n"], ids=ascii)
def test_text_that_is_not_utf_8_crosses(text: str) -> None:
    """File names and errors of the system have any bytes. Both ends of the escape are plain ASCII."""
    failure = Failure(kind="raised", error=text, output="\u00e4")
    assert failure.to_json().isascii()
    assert messages.read_reply(failure.to_json()) == failure
    success = messages.Success(value={text: [text]})
    assert messages.read_reply(success.to_json()) == success


KEYS = ["t", "ok", "value", "$dataclass", "$float"]
GARBAGE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.text() | st.sampled_from(["t", "ok", "value", "$dataclass", "$float"]), inner)
    ),
)


@given(
    st.binary()
    | GARBAGE.map(lambda data: json.dumps(data).encode())
    | st.fixed_dictionaries(
        {"t": st.sampled_from(["success", "failure", "entered", "progress"])},
        optional=dict.fromkeys(("value", "kind", "error", "call", "step", "fraction"), GARBAGE),
    ).map(lambda data: json.dumps(data).encode())
)
def test_whatever_a_worker_writes_is_read_or_refused(line: bytes) -> None:
    """Bytes and JSON of every shape: messages, or the one error that an agent expects; never anything else."""
    left, right = socket.socketpair()
    with contextlib.closing(left), contextlib.closing(right):
        left.sendall(line + b"\n")
        with contextlib.suppress(MalformedMessageError):
            for data in Wire(right).receive() or ():
                message = read_from_worker(data)
                assert not isinstance(message, Failure) or message.kind in ("raised", "refused")
                messages.read_reply(message.to_json())  # what the agent passes on
