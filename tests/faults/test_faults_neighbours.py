"""Rows 24, 25 and 26: other people's tests, nodes with other software, and other plugins of pytest."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import jsonschema  # type: ignore[import-untyped]  # its stubs would be one more thing to install
import pytest

from tests.support import REPOSITORY
from tests.support.launching import PYTEST, python_path
from tests.support.processes import free_port
from tests.support.programs import why_not_working
from tests.support.reports import SCHEMA
from tests.support.thresholds_files import entry, write_limits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.support.launching import Launch, Starter

pytestmark = [pytest.mark.e2e, pytest.mark.fault]

# Row 24: another project's tests

FOREIGN = """
import os
import pytest

@pytest.fixture
def rank():
    return int(os.environ["RANK"])

@pytest.fixture
def device():
    return "cpu"

@pytest.fixture
def place():
    return "here"

@pytest.fixture
def cluster():
    return 7

@pytest.mark.distributed
def test_own_mark_and_fixtures(rank, device):
    assert device == "cpu"
    open(f"ran-{rank}", "w").close()

def test_names_that_we_use_too(place, cluster):
    assert (place, cluster) == ("here", 7)

@pytest.mark.parametrize("node", ["a", "b"])
def test_own_parameter(node, rank):
    open(f"{node}-{rank}", "w").close()
"""


def test_foreign_suite_is_not_touched(starter: Starter) -> None:
    """Installed and not asked for: every rank runs its own tests, also where their fixtures and marks share our names."""
    starter.write(
        test_foreign=FOREIGN, conftest="def pytest_configure(config): config.addinivalue_line('markers', 'distributed')"
    )
    launch = starter.torchrun(ranks=2)
    assert launch.end() == 0, launch.output
    launch.gone()
    assert launch.output.count("4 passed") == 2
    for name in ("ran-0", "ran-1", "a-0", "a-1", "b-0", "b-1"):
        assert (starter.folder / name).exists(), name
    assert not (starter.folder / "gpucluster-results").exists()
    assert "gpucluster:" not in launch.output


# Row 25: nodes with other software

DIFFERENT = """
import pytest

def one():
    return 1

@pytest.fixture(scope="session")
def ones(cluster):
    return cluster.run(one, per="gpu", deadline_s=30)

def test_rate(ones, place, criterion):
    criterion.require(ones[place])
"""
OTHER_PYTHON = "import platform\n\nplatform.python_version = lambda: '3.9.99'\n"
METADATA = "Metadata-Version: 2.1\nName: pytest-gpucluster\nVersion: 99.0\n"
HOSTS = ("host0", "host1", "host2", "host3", "host4")
"""The first is as it should be, and its rank is the controller."""
DIFFERENCES = {
    "test file": (1, "test_different.py differs from the controller's copy"),
    "Python": (2, "python 3.9.99"),
    "version of the plugin": (2, "pytest-gpucluster 99.0"),
    "file of the plugin that no call names": (3, "pytest-gpucluster"),
    "file of the plugin that says hello": (4, "identity.py differs from the controller's copy"),
}


def behind(host: str, *, before: str = "true", path: Sequence[object] = ()) -> list[str]:
    """A command that makes a node of this hostname, after ``before`` (shell), with this PYTHONPATH instead of ours."""
    variables = ["env", f"PYTHONPATH={os.pathsep.join(map(str, path))}"] if path else []
    return ["unshare", "-r", "--uts", "--mount", "sh", "-c", f'hostname {host} && {before} && exec "$@"', "sh", *variables]


def other_versions(folder: Path, known: str) -> list[object]:
    """A PYTHONPATH with another Python and another version of the plugin, by what they say of themselves."""
    facts = folder / "pytest_gpucluster-99.0.dist-info"
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text(METADATA, encoding="utf-8")
    (facts / "entry_points.txt").write_text("[pytest11]\ngpucluster = pytest_gpucluster.plugin\n", encoding="utf-8")
    (folder / "sitecustomize.py").write_text(OTHER_PYTHON, encoding="utf-8")
    return [folder, *(path for path in known.split(os.pathsep) if not list(Path(path).glob("pytest_gpucluster-*.dist-info")))]


def other_copy(folder: Path, changed: str) -> str:
    """The mount that puts a copy of the plugin in its place, in which one file was changed and the version was not."""
    shutil.copytree(REPOSITORY / "pytest_gpucluster", folder, ignore=shutil.ignore_patterns("__pycache__"))
    with (folder / changed).open("a", encoding="utf-8") as file:
        file.write("# changed on this node and nowhere else\n")
    return f"mount --bind {shlex.quote(str(folder))} {shlex.quote(str(REPOSITORY / 'pytest_gpucluster'))}"


def as_torchrun_does(rank: int, port: str) -> dict[str, str]:
    """The variables of one rank, alone on its node; without torchrun's own processes, which are many and slow to start."""
    numbers = {"RANK": rank, "WORLD_SIZE": len(HOSTS), "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "GROUP_RANK": rank}
    return {**{name: str(number) for name, number in numbers.items()}, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


@pytest.fixture(scope="module")
def different(shared_starter: Starter) -> Launch:
    """Five nodes: one as it should be, one with another test file, one with other versions, two with a changed plugin."""
    if why_not_working(*behind("h"), "true"):
        pytest.skip("no hostnames and mounts of one's own here (unshare -r --uts --mount)")
    folder, known = shared_starter.folder, shared_starter.environment["PYTHONPATH"]
    shared_starter.write(test_different=DIFFERENT, altered=DIFFERENT.replace("return 1", "return 2"))
    prefixes = [
        behind(HOSTS[0]),
        behind(HOSTS[1], before="mount --bind altered.py test_different.py"),
        behind(HOSTS[2], path=other_versions(folder / "versions", known)),
        behind(HOSTS[3], before=other_copy(folder / "timing", "measurements/timing.py")),
        behind(HOSTS[4], before=other_copy(folder / "hello", "inventory/identity.py")),
    ]
    limits = write_limits(folder / "limits.yaml", {"rate": entry(per="gpu")}, extends=False)
    run = (*PYTEST, "--gpucluster", limits, "--junitxml=junit.xml")
    port = str(free_port())
    launches = [
        shared_starter.start((*prefix, *run), name=HOSTS[rank], **as_torchrun_does(rank, port))
        for rank, prefix in enumerate(prefixes)
    ]
    for launch in launches:
        assert launch.end(within_s=100) != 0, launches[0].output
        launch.gone()
    return launches[0]


@pytest.mark.parametrize("what", DIFFERENCES)
def test_node_with_other_software(what: str, different: Launch) -> None:
    """What was not measured there names host and difference, and the node's software is the culprit, not its GPU."""
    node, told = DIFFERENCES[what]
    row = next(row for row in different.results()["criteria"] if row["place"]["id"] == f"node{node}-cpu0")
    assert (row["outcome"], row["value"]) == ("error", None)
    assert told in row["reason"]
    assert HOSTS[node] in row["reason"]
    assert different.junit()[f"test_rate[node{node}-cpu0]"] == "error"
    (culprit,) = (one for one in different.results()["culprits"] if one["place"]["id"] == f"node{node}-cpu0")
    assert (culprit["kind"], culprit["place"]["hostname"]) == ("software", HOSTS[node])


def test_the_other_nodes_are_measured(different: Launch) -> None:
    """The node as it should be passes; the run as a whole is INCOMPLETE, and every place is in both reports."""
    found = different.results()
    jsonschema.validate(found, SCHEMA)
    outcomes = {row["place"]["id"]: row["outcome"] for row in found["criteria"]}
    assert outcomes == {"node0-cpu0": "passed", **{f"node{node}-cpu0": "error" for node in range(1, 5)}}
    assert found["verdict"] == "INCOMPLETE"
    assert "node0-cpu0" not in {culprit["place"]["id"] for culprit in found["culprits"]}
    assert list(different.junit()) == [*(f"test_rate[node{node}-cpu0]" for node in range(5)), "gpucluster.verdict"]


# Row 26: other plugins. xdist is always there.


def test_xdist_under_torchrun(starter: Starter) -> None:
    """Each rank has its GPU already; the message says what to leave out."""
    starter.write(test_foreign=FOREIGN)
    launch = starter.torchrun("--gpucluster", "-n", "2", ranks=2)
    launch.wait_for("leave -n out")
    launch.gone()  # torchrun by itself would take thirty seconds
    assert launch.end() != 0
    assert launch.output.count("leave -n out") == 1
    assert not (starter.folder / "gpucluster-results").exists()


NEIGHBOURS = (
    "pytest-randomly==5.1.0",
    "pytest-rerunfailures==16.7",
    "pytest-timeout==2.4.0",
    "pytest-html==4.2.0",
    "pytest-metadata==3.1.1",  # this and the next two are what pytest-html imports
    "jinja2==3.1.6",
    "markupsafe==3.0.4",
    "pytest-xdist==3.8.0",
    "execnet==2.1.2",  # what xdist imports
    "pytest-reportlog==1.0.0",
)
NAMES = ("randomly", "rerunfailures", "timeout", "html", "xdist", "reportlog")
HOUSE = """
import os
import pathlib
import time

import pytest

def measured():
    with open(f"measured-{os.environ['RANK']}", "a") as file:
        file.write("x")
    return 10 + int(os.environ["RANK"])

def at_second():
    if pathlib.Path("at-second").exists():
        return 10
    pathlib.Path("at-second").touch()
    raise OSError("not at the first time")

def asleep():
    time.sleep(30)

@pytest.fixture(scope="session")
def values(cluster):
    return cluster.run(measured, per="gpu", deadline_s=30)

def test_rate(values, place, criterion):
    criterion.require(values[place])

def test_low(values, place, criterion):
    criterion.require(values[place])

def test_worst(values, criterion):
    criterion.require(values)

def test_plain(cluster):
    assert cluster.world_size == 2

@pytest.mark.distributed
def test_body(world_size):
    assert world_size == 2
"""
HOUSE_LIMITS = {"rate": entry(per="gpu"), "low": entry(per="gpu", min=11), "worst": entry(min=10)}
EXPECTED = {
    **{f"rate@node0-cpu{gpu}": "passed" for gpu in (0, 1)},
    "low@node0-cpu0": "failed",
    "low@node0-cpu1": "passed",
    "worst": "passed",
    "plain": "passed",
    "body": "passed",
}


def outcomes(launch: Launch) -> dict[str, str]:
    """Outcome by criterion and place; the shape of results.json is looked at."""
    found = launch.results()
    jsonschema.validate(found, SCHEMA)
    return {row["criterion"] + (f"@{row['place']['id']}" if row["place"] else ""): row["outcome"] for row in found["criteria"]}


def cases(launch: Launch) -> list[tuple[str, str]]:
    """(name, outcome) of the testcases, in the file's order."""
    return [(case.name, case.outcome) for case in launch.cases()]


@pytest.mark.slow
def test_xdist_plainly(starter: Starter) -> None:
    """Refused in one sentence, or each GPU is measured once and judged as without it, and the verdict stays below its best."""
    starter.write(test_house=HOUSE)
    limits = write_limits(starter.folder / "limits.yaml", HOUSE_LIMITS, extends=False)
    launch = starter.pytest("--gpucluster", limits, "--junitxml=junit.xml", "-n", "2")
    status = launch.end()
    launch.gone()
    if status == 4:
        assert launch.output.count("let several processes measure the same GPU") == 1
        assert "Traceback" not in launch.output
        assert not (starter.folder / "gpucluster-results").exists()
        return
    assert (status, launch.results()["verdict"]) == (1, "REJECTED"), launch.output
    found = outcomes(launch)
    assert set(found) == set(EXPECTED)
    assert {name: found[name] for name in EXPECTED if "@" in name} == {name: EXPECTED[name] for name in EXPECTED if "@" in name}
    assert {found[name] for name in ("worst", "body")} <= {"passed", "not_selected"}
    assert {(starter.folder / f"measured-{rank}").read_text(encoding="utf-8") for rank in (0, 1)} == {"x"}  # once
    named = dict(cases(launch))
    assert len(named) == len(cases(launch)), "a testcase is there twice"
    assert (named["test_low[node0-cpu0]"], named["gpucluster.verdict"]) == ("failure", "failure")


@pytest.fixture(scope="session")
def beside(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables under which all those plugins are installed too, from the index that pip is set to, and loaded."""
    folder = tmp_path_factory.mktemp("neighbours")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), *NEIGHBOURS]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip("pip did not fetch the other plugins within 120 s")
    if done.returncode != 0:
        pytest.skip(f"pip cannot fetch the other plugins: {done.stderr.strip().splitlines()[-1:]}")
    return {"PYTHONPATH": os.pathsep.join((python_path(), str(folder))), "PYTEST_ADDOPTS": ""}


@pytest.mark.slow
@pytest.mark.parametrize("started", ["torchrun", "pytest"])
def test_run_with_the_others_installed(starter: Starter, beside: dict[str, str], started: str) -> None:
    """Reordered, with a time limit a test, with their reports: every outcome and the verdict as without them."""
    starter.write(test_house=HOUSE)
    limits = write_limits(starter.folder / "limits.yaml", HOUSE_LIMITS, extends=False)
    theirs = ("--randomly-seed=5", "--timeout=60", "--html=report.html", "--report-log=log.jsonl")
    launch = getattr(starter, started)("--gpucluster", limits, "--junitxml=junit.xml", *theirs, **beside)
    assert launch.end() == 1, launch.output
    launch.gone()
    for name in NAMES:
        assert f"{name}-" in launch.output.partition("plugins: ")[2].partition("\n")[0], name
    assert outcomes(launch) == EXPECTED
    assert launch.results()["verdict"] == "REJECTED"
    assert {(starter.folder / f"measured-{rank}").read_text(encoding="utf-8") for rank in (0, 1)} == {"x"}  # once
    found = cases(launch)
    assert found[-1] == ("gpucluster.verdict", "failure")
    in_order = ["test_rate[node0-cpu0]", "test_rate[node0-cpu1]", "test_low[node0-cpu0]", "test_low[node0-cpu1]"]
    in_order += ["test_worst", "test_plain", "test_body"]
    names = [name for name, _ in found[:-1]]
    assert (sorted(names), names == in_order) == (sorted(in_order), False)
    report = (starter.folder / "report.html").read_text(encoding="utf-8")
    assert all(name in report for name in ("test_low[node0-cpu0]", "test_body"))
    log = (starter.folder / "log.jsonl").read_text(encoding="utf-8")
    failed = [line for line in log.splitlines() if '"outcome": "failed"' in line]
    assert ["test_low" in failed[0], "gpucluster.verdict" in failed[1], len(failed)] == [True, True, 2], failed


FLAKY = (
    HOUSE
    + """
def test_at_second(cluster, criterion):
    criterion.require(cluster.run(at_second, per="gpu", places=cluster.places[:1], deadline_s=30))

def test_plain_at_second():
    path = pathlib.Path("plain-at-second")
    known = path.exists()
    path.touch()
    assert known
"""
)


@pytest.mark.slow
@pytest.mark.parametrize("asked", ["option", "mark"])
def test_repeating_until_it_is_green(starter: Starter, beside: dict[str, str], asked: str) -> None:
    """``--reruns`` and ``@pytest.mark.flaky``: refused, or what failed once stays failed, in every report."""
    text = FLAKY if asked == "option" else FLAKY.replace("\ndef test_", "\n@pytest.mark.flaky(reruns=2)\ndef test_")
    starter.write(test_house=text)
    limits = write_limits(starter.folder / "limits.yaml", {**HOUSE_LIMITS, "at_second": entry()}, extends=False)
    options = ("--reruns", "2") if asked == "option" else ()
    launch = starter.pytest("--gpucluster", limits, "--junitxml=junit.xml", "-p", "no:randomly", *options, **beside)
    status = launch.end()
    launch.gone()
    if status == 4:
        assert "rerun" in launch.output.partition("ERROR: ")[2], launch.output
        assert "verdict REHEARSED" not in launch.output
        assert not list(starter.folder.glob("measured-*"))
        return
    assert status == 1, launch.output
    assert outcomes(launch) == {**EXPECTED, "at_second": "error", "plain_at_second": "failed"}
    assert launch.results()["verdict"] == "REJECTED"
    found = cases(launch)
    assert len(found) == len(dict(found)), "a testcase is there twice"
    assert dict(found)["test_low[node0-cpu0]"] == dict(found)["test_plain_at_second"] == "failure"
    assert dict(found)["test_at_second"] == "error"


TIMED_OUT = (
    HOUSE
    + """
@pytest.mark.timeout(2)
def test_slow(cluster, criterion):
    criterion.require(cluster.run(asleep, per="gpu", deadline_s=60))

def test_zz_after(values, criterion):
    criterion.require(values)
"""
)


@pytest.mark.slow
def test_a_time_limit_that_strikes(starter: Starter, beside: dict[str, str]) -> None:
    """pytest-timeout ends one test: not measured, and the worker is free for the next, which is right."""
    starter.write(test_house=TIMED_OUT)
    limits = write_limits(
        starter.folder / "limits.yaml", {**HOUSE_LIMITS, "slow": entry(), "zz_after": entry(min=10)}, extends=False
    )
    launch = starter.pytest("--gpucluster", limits, "--junitxml=junit.xml", "-p", "no:randomly", **beside)
    assert launch.end() == 1, launch.output
    launch.gone()
    assert outcomes(launch) == {**EXPECTED, "slow": "error", "zz_after": "passed"}
    reason = next(row["reason"] for row in launch.results()["criteria"] if row["criterion"] == "slow")
    assert "Timeout" in reason
