"""``gpucluster healthcheck``: its exit code, the reason it drains by, and the nodes it leaves alone."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest

from pytest_gpucluster.commands import healthcheck
from pytest_gpucluster.commands.main import main
from pytest_gpucluster.inventory import machine
from pytest_gpucluster.inventory.detect import as_written
from tests.support import fake_slurm
from tests.support.nvml_simulator import environment
from tests.support.sysfs import GPU_CLASS, MadeSys

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.nvml_simulator import Readers

GRES = "gpu:h200:8"
OURS = " Reason=gpucluster: 2 uncorrected memory errors [root@2026-11-26T12:00:00]"
FOREIGN = " Reason=bad cable, ticket 4711 [me@2026-11-26T12:00:00]"


@pytest.fixture(autouse=True)
def sysfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MadeSys:
    """A machine without adapters, in place of this one's /sys."""
    made = MadeSys(tmp_path / "sys")
    read = machine.read_machine
    monkeypatch.setattr(healthcheck, "read_machine", lambda: read(root=made.root))
    return made


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a ``scontrol`` that writes every update into a file. It may be slow: the machine may be busy."""
    monkeypatch.setattr(healthcheck, "LEAST_S", 60.0)
    monkeypatch.setattr(healthcheck, "NVML_S", 60.0)
    folder = tmp_path / "bin"
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    return folder


@pytest.fixture
def plant(simulated: Readers, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Simulates GPUs: what the child would read of them."""

    def planted(scenario: str) -> None:
        written = json.dumps(simulated.survey(scenario))
        monkeypatch.setattr(machine, "survey_gpus", lambda _within_s: json.loads(written, object_hook=as_written))

    return planted


@pytest.fixture
def plant_for_child(library: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Simulates GPUs for the child that reads NVML, as on a real node: it costs a start of Python for each reading."""

    def planted(scenario: str) -> None:
        for name, value in environment(library, scenario).items():
            monkeypatch.setenv(name, value)

    return planted


def says(folder: Path, *, state: str = "IDLE", reason: str = "", gres: str = GRES) -> None:
    """What Slurm has of this node."""
    node = fake_slurm.node(state=state, gres=gres, reason=reason)
    before = 'case "$1" in update) printf "%s\\n" "$@" >> updates.txt; exit 0;; esac'
    fake_slurm.install(folder, node=node, job=fake_slurm.job(), before=before)


def updates(folder: Path) -> list[str]:
    """The words of all updates."""
    file = folder / "updates.txt"
    return file.read_text(encoding="utf-8").splitlines() if file.exists() else []


@pytest.mark.parametrize(
    ("scenario", "options", "words"),
    [
        ("", [], ""),
        ("", ["--gpus", "8"], ""),
        ("", ["--gpus", "9"], "NVML shows 8 of 9 GPUs"),
        ("2.ecc.unc.vol 4", [], "4 uncorrected memory errors since the driver was loaded, GPU 2 serial "),
        ("2.remap.failed 1", [], "a row of its memory could not be remapped, GPU 2 serial "),
        ("3.err 15", [], "GPU 3: GPU is lost"),
        ("init 9", [], "Driver Not Loaded"),
    ],
)
def test_exit_code(
    scenario: str, options: list[str], words: str, plant: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """Without ``--drain`` nothing but the exit code and the words; no ``scontrol`` is called."""
    plant(scenario)
    assert main(["healthcheck", *options]) == int(bool(words))
    shown = capsys.readouterr().out
    assert words in shown
    assert bool(shown) is bool(words)
    assert all(line.startswith("gpucluster: ") for line in shown.splitlines())


def test_a_node_without_gpus_is_not_healthy(capsys: pytest.CaptureFixture[str]) -> None:
    """No NVML and nobody who promised a GPU: nothing was judged."""
    assert main(["healthcheck"]) == 3
    assert "no GPU was judged" in capsys.readouterr().out


@pytest.mark.parametrize("field", healthcheck.READ)
def test_what_was_not_read_is_not_healthy(
    field: str, plant: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A timeout of NVML at any value is 3; a value that the GPU does not have is healthy."""
    plant("")
    read = healthcheck.read_machine()
    *way, last = field.split(".")
    for why, code in (("Timeout (nvmlDeviceGetEccMode)", 3), ("Not Supported (nvmlDeviceGetEccMode)", 0)):
        item = read["gpus"]["gpus"][5]
        for name in way:
            item = item[name]
        item[last] = {"not_available": why}
        monkeypatch.setattr(healthcheck, "read_machine", lambda: read)
        assert main(["healthcheck"]) == code
        assert (f"{field} of GPU 5 was not read" in capsys.readouterr().out) is (code == 3)


BAD = "2.ecc.unc.vol 4"
DRAINED = ["State=DRAIN", "Reason=gpucluster: 4 uncorrected memory errors since the driver was loaded"]


@pytest.mark.parametrize(
    ("node", "scenario", "expected"),
    [
        ({"state": "IDLE"}, "", []),
        ({"state": "IDLE"}, BAD, DRAINED),
        ({"state": "ALLOCATED"}, BAD, DRAINED),
        ({"state": "IDLE+DRAIN", "reason": OURS}, BAD, DRAINED),
        ({"state": "IDLE+DRAIN", "reason": OURS}, "", ["State=UNDRAIN"]),
        ({"state": "IDLE+DRAIN", "reason": FOREIGN}, BAD, []),
        ({"state": "IDLE+DRAIN", "reason": FOREIGN}, "", []),
        ({"state": "DOWN*", "reason": " Reason=Not responding [slurm@2026-11-26T12:00:00]"}, "", []),
        ({"state": "IDLE+DRAIN", "reason": " Reason=not gpucluster: mine [me@x]"}, "", []),
    ],
)
def test_drain(node: dict[str, str], scenario: str, expected: list[str], plant: Callable[[str], None], slurm: Path) -> None:
    """A bad node is drained by our reason; a healthy one is freed from a reason of ours, and from no other."""
    says(slurm, **node)
    plant(scenario)
    assert main(["healthcheck", "--drain"]) == int(scenario == BAD)
    said = updates(slurm)
    assert said[:2] == (["update", f"NodeName={fake_slurm.HOST}"] if expected else [])
    assert [word.partition(", GPU 2 serial ")[0] for word in said[2:]] == expected


def test_asked_for_by_the_environment(plant: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, slurm: Path) -> None:
    """As a HealthCheckProgram is configured; off by default."""
    plant(BAD)
    for value, words in ((None, 0), ("0", 0), ("1", 4)):
        says(slurm)
        if value is not None:
            monkeypatch.setenv("GPUCLUSTER_DRAIN", value)
        assert main(["healthcheck"]) == 1
        assert len(updates(slurm)) == words


def test_the_same_reason_is_written_once(plant_for_child: Callable[[str], None], slurm: Path) -> None:
    """Slurm adds who and when to it; that is no other reason."""
    plant_for_child("2.ecc.unc.vol 4")
    says(slurm)
    assert main(["healthcheck", "--drain"]) == 1
    reason = updates(slurm)[-1]
    says(slurm, state="IDLE+DRAIN", reason=f" {reason} [root@2026-11-26T12:00:00]")
    assert main(["healthcheck", "--drain"]) == 1
    assert len(updates(slurm)) == 4


def test_a_missing_driver_drains(slurm: Path) -> None:
    """Slurm promises GPUs and there is no NVML."""
    says(slurm)
    assert main(["healthcheck", "--drain"]) == 1
    reason = updates(slurm)[-1]
    assert reason.startswith("Reason=gpucluster: NVML shows 0 of 8 GPUs (NVML Shared Library Not Found")
    assert reason.count("Not Found") == 1


@pytest.mark.parametrize("state", ["IDLE", "IDLE+DRAIN"])
def test_a_driver_that_hangs_drains(
    state: str, slurm: Path, plant_for_child: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, sysfs: MadeSys
) -> None:
    """``nvidia-smi`` would hang too: the node is drained in time, also where a drain of ours is there."""
    says(slurm, state=state, reason=" Reason=gpucluster: other [root@x]" if "DRAIN" in state else "")
    plant_for_child("delay_ms 60000")
    monkeypatch.setattr(healthcheck, "read_machine", lambda: machine.read_machine(root=sysfs.root, nvml_s=0.5))
    assert main(["healthcheck", "--drain"]) == 1
    reason = updates(slurm)[-1]
    assert reason.startswith("Reason=gpucluster: NVML did not answer within 0.5 s: the driver hangs")
    assert reason.count("did not answer") == 1, "one cause is said once"
    assert reason.endswith("then reboot the node")


def test_the_driver_has_ten_seconds(monkeypatch: pytest.MonkeyPatch, plant_for_child: Callable[[str], None]) -> None:
    """And Slurm's commands what is left of 12, so that all of it ends within 15 s."""
    plant_for_child("delay_ms 60000")
    monkeypatch.undo()
    assert healthcheck.NVML_S + healthcheck.LEAST_S <= healthcheck.WITHIN_S < 15
    monkeypatch.setattr(healthcheck, "NVML_S", 0.3)
    plant_for_child("delay_ms 60000")
    assert "within 0.3 s" in healthcheck.read_machine()["gpus"]["error"]


def test_a_slurm_that_hangs(
    plant: Callable[[str], None], slurm: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``scontrol`` without an end is ended in time, and the finding is printed all the same."""
    monkeypatch.setattr(healthcheck, "WITHIN_S", 0.1)
    monkeypatch.setattr(healthcheck, "LEAST_S", 0.5)
    plant(BAD)
    fake_slurm.install(slurm, node="", job=fake_slurm.job(), before="sleep 60")
    assert main(["healthcheck", "--drain"]) == 1
    shown = capsys.readouterr()
    assert "4 uncorrected memory errors" in shown.out
    assert "not drained: scontrol -o show node" in shown.err
    assert "no answer within 0.5 s" in shown.err


@pytest.mark.parametrize(
    ("gres", "gpus_on_bus", "words"),
    [("(null)", 0, 0), ("nic:2", 0, 0), ("(null)", 8, 4), (GRES, 0, 4), ("gpu:h200:(x)", 0, 4)],
    ids=["CPU node", "no GPU in its GRES", "GPUs that Slurm does not know", "GPUs that the bus does not show", "unreadable"],
)
def test_a_node_without_gpus_is_drained_if_it_should_have_some(
    gres: str, gpus_on_bus: int, words: int, slurm: Path, sysfs: MadeSys
) -> None:
    """HealthCheckProgram runs on every node: one that neither Slurm nor the bus gives a GPU stays as it is."""
    sysfs.add_pci("0000:00:1f.0", bus=0x00, files={"vendor": "0x8086", "class": "0x060100"})
    for number in range(gpus_on_bus):
        sysfs.add_pci(f"0000:0{number}:00.0", bus=0x80, slot=number, files=GPU_CLASS)
    says(slurm, gres=gres)
    assert main(["healthcheck", "--drain"]) == (1 if gpus_on_bus or gres == GRES else 3)
    assert len(updates(slurm)) == words


def test_a_slurm_that_does_not_answer(plant: Callable[[str], None], slurm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A healthy node is not said healthy where it could not be freed; nothing is hidden."""
    plant("")
    fake_slurm.install(slurm, node="", job=fake_slurm.job(), before="echo no controller >&2; exit 1")
    assert main(["healthcheck", "--drain"]) == 3
    assert "no controller" in capsys.readouterr().err


def test_an_update_that_slurm_refuses(plant: Callable[[str], None], slurm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The finding keeps its exit code, and the refusal is said."""
    plant("2.ecc.unc.vol 4")
    node = fake_slurm.node(gres=GRES)
    fake_slurm.install(slurm, node=node, job=fake_slurm.job(), before='case "$1" in update) echo denied >&2; exit 1;; esac')
    assert main(["healthcheck", "--drain"]) == 1
    assert "stays as it is" in (told := capsys.readouterr().err)
    assert "denied" in told


@pytest.mark.parametrize(
    ("scenario", "options", "expected"),
    [
        ("", [], (0, "8 GPUs are healthy")),
        ("", ["--gpus", "8"], (0, "8 GPUs are healthy")),
        ("", ["--gpus", "9"], (1, "NVML shows 8 of 9 GPUs")),
        ("2.ecc.unc.vol 4", [], (1, "4 uncorrected memory errors since the driver was loaded, GPU 2 serial ")),
        ("2.remap.failed 1\n3.remap.failed 1", [], (1, "a row of its memory could not be remapped, GPU 2 serial ")),
        ("3.err 15", [], (1, "GPU 3: GPU is lost")),
        ("init 9", [], (1, "Driver Not Loaded")),
    ],
)
def test_node_problem_detector(
    scenario: str,
    options: list[str],
    expected: tuple[int, str],
    plant: Callable[[str], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its exit codes, and one line that it does not cut."""
    plant(scenario)
    code, words = expected
    assert main(["kubernetes-condition", *options]) == code
    line = capsys.readouterr().out
    assert words[:60] in line
    assert line.count("\n") == 1
    assert len(line.rstrip("\n").encode()) <= 80


@pytest.mark.parametrize("command", ["healthcheck", "kubernetes-condition"])
@pytest.mark.parametrize("number", ["-3", "x", "8.0", "\u0663", ""])
def test_a_number_of_gpus_that_is_none(command: str, number: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Is refused: a negative one was as good as none, so that a GPU that is lost was not missed."""
    with pytest.raises(SystemExit) as left:
        main([command, f"--gpus={number}"])
    assert left.value.code == 2
    assert "is no number of GPUs" in capsys.readouterr().err


def test_wrong_usage_of_node_problem_detector() -> None:
    """Is unknown, never a problem of the node."""
    with pytest.raises(SystemExit) as left:
        main(["kubernetes-condition", "--gpus", "many"])
    assert left.value.code == 2


def test_more_than_one_problem_is_counted(plant_for_child: Callable[[str], None], capsys: pytest.CaptureFixture[str]) -> None:
    """And the count is not cut off."""
    plant_for_child("".join(f"{index}.remap.failed 1\n" for index in range(8)))
    assert main(["kubernetes-condition"]) == 1
    assert capsys.readouterr().out.endswith(" and 7 more\n")


def test_what_is_not_known_is_unknown(
    plant: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No GPU at all, a value that was not read, and any fault of our own: never OK, and never a problem of the node."""
    assert main(["kubernetes-condition"]) == 2
    assert capsys.readouterr().out.startswith("no GPU was judged: ")
    plant("")
    read = healthcheck.read_machine()
    read["gpus"]["gpus"][5]["ecc_enabled"] = {"not_available": "Timeout (nvmlDeviceGetEccMode)"}
    monkeypatch.setattr(healthcheck, "read_machine", lambda: read)
    assert main(["kubernetes-condition"]) == 2
    assert capsys.readouterr().out == "ecc_enabled of GPU 5 was not read: Timeout (nvmlDeviceGetEccMode)\n"
    for fault in (RuntimeError("ü" * 200), OSError(5, "Input/output error"), KeyError("gpus"), MemoryError(), "none"):

        def fail(fault: object = fault) -> object:
            if isinstance(fault, Exception):
                raise fault
            return {}

        monkeypatch.setattr(healthcheck, "read_machine", fail)
        assert main(["kubernetes-condition"]) == 2
        line = capsys.readouterr().out
        assert line.startswith("the health check failed: ")
        assert len(line.encode()) <= 81
