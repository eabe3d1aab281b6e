"""A user's tests whose first measurement is undecided, disturbed or bad, and what the second one shows."""

# ruff: noqa: ANN001, ANN201, D103 -- written as users write

from __future__ import annotations

import statistics

import pytest

from pytest_gpucluster import MeasurementError

looks = {}
order = []
made = []
FIRST_ROUNDS = 13
"""So many rounds a doubtful value is measured in: the first, and twelve more."""
CASES = {
    "quiet_later": (100.5, 120.0),
    "noisy_twice": (100.5, 100.4),
    "slow_later": (100.5, 80.0),
    "failed": (80.0, 120.0),
    "good": (120.0, 120.0),
}


def rate(*, case):
    """Ten rates around the first centre of the case while it is measured for the first time, then around the second."""
    looks[case] = looks.get(case, 0) + 1
    first, second = CASES[case]
    centre = first if looks[case] <= FIRST_ROUNDS else second
    samples = [centre + 4.0 * (step / 9 - 0.5) for step in range(10)]
    return {"rate": statistics.median(samples), "samples": samples}


def twice(name):
    """Whether this is called for the second time with this name."""
    order.append(name)
    return order.count(name) > 1


@pytest.fixture(scope="session")
def rates(cluster):
    return {name: cluster.run(rate, per="gpu", case=name) for name in CASES}


@pytest.fixture(scope="session")
def server():
    """A fixture that nobody may make twice."""
    made.append("server")
    assert made == ["server"]
    yield "up"
    made.append("down")


@pytest.fixture
def folder(server, tmp_path):
    assert server == "up"
    (tmp_path / "once").mkdir()
    return tmp_path


@pytest.mark.parametrize("name", CASES)
def test_rate(rates, place, criterion, name):
    order.append(f"rate {name}")
    criterion.require(rates[name].repeated(place, "rate", "samples"))


def test_leaves(cluster, place, criterion, folder, record_property):
    record_property("look", order.count("leaves"))
    if not twice("leaves"):
        raise MeasurementError("GPU not idle: a job", kind="not_idle", culprits=(place,))
    criterion.require(1)


def test_stays(criterion):
    order.append("stays")
    raise MeasurementError("GPU not idle: a job that stays", kind="not_idle")


def test_crashes_later(criterion):
    if twice("crashes later"):
        raise RuntimeError("a bug")
    raise MeasurementError("host not idle: a job", kind="not_idle")


def test_hung(criterion):
    order.append("hung")
    raise MeasurementError("a rank hung", kind="hung")


def test_own(cluster, folder):
    """A plain test of the user's that needs an idle GPU."""
    if not twice("own"):
        raise MeasurementError("GPU not idle: a job", kind="not_idle")


def test_plain_last():
    order.append("plain last")


@pytest.mark.over_run(rate, case="good")
def test_over_run(over_run, criterion):
    """Runs after all that is measured again."""
    order.append("over the run")
    criterion.require(over_run.last.value["rate"])


@pytest.fixture(scope="session", autouse=True)
def written(tmp_path_factory, pytestconfig):
    yield
    (pytestconfig.rootpath / "order.txt").write_text("\n".join([*order, *made]), encoding="utf-8")
