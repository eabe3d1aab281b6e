"""Wrong starts: said once, in words that help, before any work, and nothing stays behind."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.support.launching import ACCEPTANCE, Launch, Starter
from tests.support.nvml_simulator import LIBRARY, build, environment

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

pytestmark = pytest.mark.e2e

BAD = "schema: 1\nprofiles:\n  rehearsal: {gpu: null, rehearsal: true}\ncriteria:\n  x: {abve: 3}\n"
RANK_0 = {
    "RANK": "0",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "9",  # discard: a usage error comes before anybody connects
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "0",
}
SLOW_TO_CONFIGURE = """
import time
import pytest

@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    time.sleep(6)  # by then the other rank has become an agent and serves
"""


def refused(launch: Launch) -> str:
    """The text of a usage error of a plain start; nothing may be written or left running."""
    assert launch.end() == 4, launch.output
    launch.gone()
    assert not (launch.cwd / "gpucluster-results").exists()
    assert "Traceback" not in launch.output
    return launch.output


@pytest.fixture(scope="module")
def simulator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the simulated NVML."""
    return build(tmp_path_factory.mktemp("nvml"))


def with_gpus(simulator: Path, scenario: str) -> Mapping[str, str]:
    """The variables that show a child the GPUs of ``scenario``."""
    made = environment(simulator, scenario)
    return {name: made[name] for name in ("LD_LIBRARY_PATH", "FAKE_NVML")}


def test_usage_error_after_the_agents_have_joined(starter: Starter) -> None:
    """As soon when the other rank serves already: it must not wait for a word that cannot come."""
    starter.write(conftest=SLOW_TO_CONFIGURE, test_x="def test_x(criterion): pass\n")
    (starter.folder / "bad.yaml").write_text(BAD, encoding="utf-8")
    launch = starter.torchrun("--gpucluster-thresholds", "bad.yaml", ranks=2)
    launch.wait_for("bad.yaml:5")
    launch.gone()  # torchrun by itself would take thirty seconds
    assert launch.end() != 0


def test_plain_starts_that_cannot_work(starter: Starter) -> None:
    """A GPU profile without a GPU, half of torchrun's variables, half-understood options."""
    cases = {
        "No GPU but a GPU profile asked for: 'h100-sxm'": starter.pytest(ACCEPTANCE, "--gpucluster-profile", "h100-sxm"),
        "WORLD_SIZE set without RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT": starter.pytest(ACCEPTANCE, WORLD_SIZE="2"),
        "RANK='zero' is not a whole number": starter.pytest(ACCEPTANCE, **{**RANK_0, "RANK": "zero"}),
        "nodes must be a whole number above zero": starter.pytest(ACCEPTANCE, "--gpucluster-expect", "nodes=0"),
        "'often' is not one of quick, standard, soak": starter.pytest(ACCEPTANCE, "--gpucluster-level", "often"),
        "no profile 'h100'. Profiles": starter.pytest(ACCEPTANCE, "--gpucluster-profile", "h100"),
    }
    for said, launch in cases.items():
        assert refused(launch).count(said) == 1, (said, launch.output)


def test_gpus_that_do_not_fit_the_start(starter: Starter, simulator: Path) -> None:
    """Too many ranks, a driver that is not loaded or half mounted, a GPU nobody knows, mixed GPUs: refused, never rehearsed."""
    (starter.folder / LIBRARY).touch()
    two, broken = with_gpus(simulator, "count 2"), with_gpus(simulator, "init 9")
    unknown, mixed = with_gpus(simulator, "name NVIDIA Z9000"), with_gpus(simulator, "1.name NVIDIA H100 80GB HBM3")
    cases = {
        "torchrun started 4 ranks on this node, which has 2 visible GPUs; say --nproc-per-node=2": {**RANK_0, **two},
        "NVML is installed but does not work: Driver Not Loaded": broken,
        f"does not work: {starter.folder / LIBRARY}: file too short": {"LD_LIBRARY_PATH": str(starter.folder)},
        "'NVIDIA Z9000'": unknown,
        "GPUs of several models": mixed,
    }
    launches = {said: starter.pytest(ACCEPTANCE, **variables) for said, variables in cases.items()}
    told = {said: refused(launch) for said, launch in launches.items()}
    for said, output in told.items():
        assert said in output
        assert "rehearsal" not in output.lower() or "--gpucluster-profile rehearsal" in output
    assert "specs" in told["'NVIDIA Z9000'"]  # where a GPU is added


LOOKING = {
    "--collect-only": "tests collected",
    "--help": "--gpucluster-gate",
    "--markers": "pytest.mark.fabric",
    "--version": "pytest [89]",
}


def test_looking_around_under_torchrun(starter: Starter) -> None:
    """Help, marks, version and collection end with 0, start no worker and leave nothing, results directory included."""
    launches = {option: starter.torchrun(ACCEPTANCE, option, ranks=2) for option in LOOKING}
    for option, shown in LOOKING.items():
        assert launches[option].end() == 0, launches[option].output
        launches[option].gone()
        assert re.search(shown, launches[option].output), option
    assert not (starter.folder / "gpucluster-results").exists()
    assert not [path.name for path in starter.temporary_files() if path.name.startswith("gpucluster")]


UNASKED = "under torchrun or pytest-xdist, fixtures of gpucluster need --gpucluster or the ini option gpucluster=true"
USES = {
    "cluster": "def test_x(cluster): pass\n",
    "place": "def test_x(place): pass\n",
    "node": "def test_x(node): pass\n",
    "criterion": "def test_x(place, criterion): pass\n",
    "recipe": "def test_x(recipe): pass\n",
    "soak": "def test_x(soak): pass\n",
    "rank": "import pytest\n\n@pytest.mark.distributed\ndef test_x(rank): pass\n",
    "indirect": "import pytest\n\n@pytest.fixture\ndef mine(node): pass\n\ndef test_x(mine): pass\n",
    "at_run_time": "def test_x(request): request.getfixturevalue('cluster')\n",
}


@pytest.mark.parametrize("name", USES)
def test_fixtures_nobody_asked_for(name: str, starter: Starter) -> None:
    """A rank of another project's run: whichever fixture of ours is used, one sentence."""
    starter.write(test_x=USES[name])
    ini = "--override-ini=empty_parameter_set_mark=fail_at_collect"
    assert refused(starter.pytest("test_x.py", ini, **RANK_0)).count(UNASKED) == 1


def test_fixtures_nobody_asked_for_on_each_rank(starter: Starter) -> None:
    """Every rank under torchrun is a pytest and says it; a project without our fixtures is left alone."""
    starter.write(test_x=USES["place"], test_y="def test_y(): pass\n")
    launch = starter.torchrun("test_x.py", ranks=2, options=("--max-restarts=0", "--master-port=0"))
    assert launch.end() != 0
    launch.gone()
    assert 1 <= launch.output.count(UNASKED) <= 2, launch.output  # torchrun may end the other rank before
    assert "exitcode  : 4" in launch.output, launch.output
    assert "generate_tests" not in launch.output
    assert starter.pytest("test_y.py", **RANK_0).end() == 0
