"""``gpucluster info``: what it shows, what it finds, and its exit code."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from rich.table import Table

from pytest_gpucluster.commands import info, info_views
from pytest_gpucluster.commands.main import main
from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.health.defects import find, unseen
from pytest_gpucluster.inventory import machine
from pytest_gpucluster.inventory.detect import as_written
from pytest_gpucluster.inventory.reading import NotAvailable
from tests.support.nvml_simulator import environment
from tests.support.sysfs import GPU_CLASS, MadeSys, efa, infiniband, roce

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.nvml_simulator import Readers

WITH_GPUS = ("summary", "gpu", "links", "all")


@pytest.fixture(autouse=True)
def sysfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MadeSys:
    """A machine without adapters, in place of this one's /sys."""
    made = MadeSys(tmp_path / "sys")
    read = machine.read_machine
    monkeypatch.setattr(info, "read_machine", lambda: read(root=made.root))
    return made


def plant(monkeypatch: pytest.MonkeyPatch, simulated: Readers, scenario: str = "") -> None:
    """Simulated GPUs: what the child would read of them, as this process reads it from the child."""
    written = json.dumps(simulated.survey(scenario))
    monkeypatch.setattr(machine, "survey_gpus", lambda _within_s: json.loads(written, object_hook=as_written))


@pytest.mark.parametrize(
    ("view", "code"),
    [
        ("summary", 3),
        ("gpu", 3),
        ("links", 3),
        ("ib", 3),
        ("all", 3),
        ("host", 0),
        ("software", 0),
        ("offered", 0),
        ("kubernetes", 0),
    ],
)
def test_a_machine_without_gpus(view: str, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Where a view could not see what it is about, the exit code says so, and the reason stands there."""
    assert main(["info", view]) == code
    shown = capsys.readouterr().out
    assert ("not seen: gpus: NVML Shared Library Not Found" in shown) is (view in WITH_GPUS)
    assert ("not seen: nics: the kernel lists no adapter" in shown) is (view in ("summary", "all", "ib"))
    assert not re.search(r"(?m)^\S+ +-\s*$", shown), "a name without a value"


@pytest.mark.parametrize(
    ("why", "words"),
    [
        ("No such file or directory (/sys/class/infiniband)", "the kernel lists no adapter: No such file"),
        ("Permission denied (/sys/class/infiniband)", "Permission denied"),
    ],
)
def test_no_driver_of_adapters(why: str, words: str, simulated: Readers, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that is not there is no adapter; one that cannot be read may hide some."""
    plant(monkeypatch, simulated)
    assert unseen({**info.read_machine(), "nics": {"not_available": why}})["nics"].startswith(words)


def test_gpus_of_one_kind(library: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Have their name once, above the table; every column of a quantity has its unit; a bad GPU's rows are red."""
    for name, value in environment(library, "3.ecc.unc.vol 2").items():  # read by a child, as on a real machine
        monkeypatch.setenv(name, value)
    assert main(["info", "gpu"]) == 1
    first, headings, *_ = capsys.readouterr().out.splitlines()
    assert first.strip() == "8 x H200"
    assert re.split(r"\s{2,}", headings.strip()) == [
        "GPU", "used GiB", "°C", "memory °C", "W", "SM MHz", "ECC errors", "recovery", "held by",
    ]  # fmt: skip
    machine_seen = info.read_machine()
    drawn = [part for part in info_views.show(machine_seen, "gpu") if isinstance(part, Table) and part.columns]
    assert [[row.style for row in part.rows].count("red") for part in drawn] == [1, 1, 1]
    machine_seen["gpus"]["gpus"][5]["name"] = "NVIDIA H100 80GB HBM3"
    mixed = next(part for part in info_views.show(machine_seen, "gpu") if isinstance(part, Table))
    assert [str(column.header) for column in mixed.columns][:2] == ["GPU", "name"]


@pytest.mark.parametrize("view", ["summary", "gpu", "links", "ib", "host", "software", "offered", "kubernetes", "all"])
def test_nothing_to_show_leaves_no_gap(view: str, capsys: pytest.CaptureFixture[str]) -> None:
    """On a machine without adapters, `ib` began with three empty lines."""
    main(["info", view])
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert lines[0]
    assert lines[-1]
    assert ("", "") not in itertools.pairwise(lines)


def test_a_view_with_nothing_to_show_has_no_heading(capsys: pytest.CaptureFixture[str]) -> None:
    """On a machine without GPUs and adapters, `all` had the words gpu, links and ib with nothing below them."""
    main(["info", "all"])
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert [line for line in lines if line in info_views.VIEWS] == ["summary", "host", "software", "offered", "kubernetes"]


@pytest.mark.parametrize("width", [60, 80, 200])
def test_eight_gpus_fit_the_screen(
    width: int, simulated: Readers, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No line is longer than the screen, none is cut, and nothing is coloured outside a terminal."""
    plant(monkeypatch, simulated)
    monkeypatch.setenv("COLUMNS", str(width))
    read = info.read_machine()
    monkeypatch.setattr(info, "read_machine", lambda: read)
    for view in ("summary", "gpu", "links"):
        assert main(["info", view]) == 0
    shown = capsys.readouterr().out
    assert "8 x NVIDIA H200" in shown
    assert shown.count("18 of 18 up") == 9
    assert shown.count("GPU-0000000") == 8
    assert max(map(len, shown.splitlines())) <= width
    assert not set(shown) & {"\N{HORIZONTAL ELLIPSIS}", "\x1b"}


@pytest.mark.parametrize(
    ("scenario", "part", "what"),
    [
        ("3.err 15", "NVML", "GPU 3: GPU is lost"),
        ("init 9", "NVML", "Driver Not Loaded"),
        ("2.recovery 1", "GPU 2", "asks for gpu_reset"),
        ("2.recovery 99", "GPU 2", "asks for unknown_99"),
        ("2.unrepairable 1", "GPU 2", "its memory cannot be repaired"),
        ("2.sram.threshold 1", "GPU 2", "its SRAM has had too many"),
        ("2.repair.channel 1", "GPU 2", "a channel of its memory waits"),
        ("2.remap.failed 1", "GPU 2", "could not be remapped"),
        ("2.remap.pending 1", "GPU 2", "waits for a reset"),
        ("2.ecc.unc.vol 4", "GPU 2", "4 uncorrected memory errors"),
        ("2.ecc 0", "GPU 2", "ECC is off"),
        ("2.nvlink.7 0", "GPU 2", "NVLink 7 down"),
        ("2.fabric.state 2", "GPU 2", "NVLink fabric: state in_progress"),
        ("2.fabric.health 1", "GPU 2", "NVLink fabric: degraded bandwidth"),
        ("2.pcie.width 8", "GPU 2", "PCIe x8 of x16"),
        ("2.throttle 64", "GPU 2", "held back by hw_thermal_slowdown"),
    ],
)
def test_what_is_wrong_is_named(
    scenario: str, part: str, what: str, simulated: Readers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One fault is one finding, at its part, with what to do; the exit code is 1."""
    plant(monkeypatch, simulated, f"count 4\n{scenario}")
    read = machine.read_machine()
    (found,) = find(read)
    assert found.part == part
    assert what in found.what
    assert found.advice
    monkeypatch.setattr(info, "read_machine", lambda: read)
    assert main(["info", "software"]) == 1


def test_healthy_gpus_have_no_finding(simulated: Readers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor has a GPU alone, whose NVLinks are all down, nor one that refuses what older GPUs do not tell."""
    plant(monkeypatch, simulated)
    assert find(machine.read_machine()) == []
    plant(monkeypatch, simulated, "count 1\n" + "\n".join(f"0.nvlink.{link} 0" for link in range(18)))
    assert find(machine.read_machine()) == []
    plant(monkeypatch, simulated, "count 1\n0.err.nvmlDeviceGetRepairStatus 3\n0.err.nvmlDeviceGetNvLinkState 3")
    assert find(machine.read_machine()) == []


def test_a_driver_that_hangs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """What NVML did not say in time is wrong, and the rest is shown."""

    def hang(_within_s: float | None) -> Any:
        raise ConfigurationError("NVML did not answer within 20 s")

    monkeypatch.setattr(machine, "survey_gpus", hang)
    assert main(["info"]) == 1
    shown = capsys.readouterr().out
    assert "NVML: NVML did not answer within 20 s" in shown
    assert "kernel" in shown


def test_gpus_that_only_the_bus_shows(sysfs: MadeSys, capsys: pytest.CaptureFixture[str]) -> None:
    """A machine with GPUs and without a driver is not one without GPUs; nor is it at fault: a container may have a part."""
    sysfs.add_pci("0000:aa:00.0", bus=0x80, files=GPU_CLASS)
    assert main(["info"]) == 3
    shown = " ".join(capsys.readouterr().out.split())
    assert "NVML shows 0 of the 1 NVIDIA GPUs on the PCI bus, not 0000:aa:00.0 (a container" in shown


def test_ports_of_every_fabric(sysfs: MadeSys, capsys: pytest.CaptureFixture[str]) -> None:
    """A port that is down is shown, and is no finding: it may be meant so. One unreadable counter hides nothing else."""
    for nic in (infiniband(0), roce(1), efa(2)):
        sysfs.add(nic)
    sysfs.pull_down("mlx5_1")
    sysfs.refuse("mlx5_0", "counters/link_downed")
    assert main(["info", "ib"]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    rows = {line.split()[0]: line.split() for line in shown.splitlines() if line.strip()}
    assert rows["mlx5_0:1"][1:8] == ["infiniband", "ACTIVE", "LinkUp", "400", "ib0", "-", "0"]
    assert rows["mlx5_1:1"][1:5] == ["roce", "DOWN", "Polling", "10"]
    assert rows["rdmap2s27:1"][1:5] == ["efa", "ACTIVE", "LinkUp", "100"]


def test_hidden_proc_and_sys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Each value that is hidden is shown as such, with the reason."""
    read = machine.read_machine
    monkeypatch.setattr(info, "read_machine", lambda: read(root=tmp_path / "nothing"))
    assert main(["info", "host"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "sockets - (No such file or directory" in shown
    assert main(["info", "all"]) == 3


def test_numa_nodes_that_cannot_be_listed(sysfs: MadeSys, capsys: pytest.CaptureFixture[str]) -> None:
    """They are not 0."""
    folder = sysfs.root / "devices" / "system"
    folder.mkdir(parents=True)
    (folder / "node").symlink_to("node")
    assert main(["info"]) == 3
    assert "GiB, - NUMA nodes" in capsys.readouterr().out


def test_the_json_has_reasons_in_place_of_values(capsys: pytest.CaptureFixture[str]) -> None:
    """Plain data, with the views' sources and what they do not show."""
    assert main(["info", "--json"]) == 3
    found = json.loads(capsys.readouterr().out)
    assert found["software"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found["unseen"].keys() == {"gpus", "nics"}
    assert found["host"]["memory_gib"] > 0
    assert found["host"]["mlx5_driver"].keys() == {"not_available"}


def test_foreign_text_stays_in_its_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The name of a part moves no cursor."""
    monkeypatch.setattr(machine, "read_nics", lambda **_: NotAvailable("no\x1b[2Jthing\nverdict ACCEPTED"))
    main(["info", "ib"])
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert not any(line.startswith("verdict") for line in shown.splitlines())


def test_torch_is_not_loaded() -> None:
    """Seconds are not lost, and a broken torch is no hindrance."""
    code = "import sys; from pytest_gpucluster.cli import main; main(['info', 'software']); print('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert ran.stdout.splitlines()[-1] == "False"
    assert "torch " in ran.stdout


def test_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    """An unknown view names those that there are."""
    with pytest.raises(SystemExit) as ended:
        main(["info", "gpus"])
    assert ended.value.code == 2
    assert "summary" in capsys.readouterr().err


def test_the_command_line_imports_no_more_than_it_needs() -> None:
    """``--help`` and a wrong option answer at once: whoever types them waits for each import."""
    heavy = "{'torch', 'pydantic', 'rich', 'jinja2', 'yaml'}"
    program = f"import sys; import pytest_gpucluster.cli; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"


def test_the_json_needs_nothing_that_draws() -> None:
    """A third of the time of ``info --json`` was a library for tables that it does not print."""
    program = "import sys; from pytest_gpucluster.commands import info; sys.exit('rich' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
