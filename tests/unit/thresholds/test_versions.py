"""Versions by the scheme of each component, what is known of them, and a site's own table."""

from __future__ import annotations

import dataclasses
from datetime import date
from typing import TYPE_CHECKING

import pytest

from pytest_gpucluster.commands.main import main
from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.thresholds import versions
from pytest_gpucluster.thresholds.lint import load
from pytest_gpucluster.thresholds.schema import KnownFault
from pytest_gpucluster.thresholds.versions import SCHEMES, needed, packaged_versions, parse

if TYPE_CHECKING:
    from pathlib import Path

    from pytest_gpucluster.thresholds.versions import Version

OVERLAY = "schema: 1\nextends: packaged\n"


def known(component: str, text: str) -> Version:
    """A version that its scheme knows."""
    found = parse(component, text)
    assert found is not None, (component, text)
    return found


def fault(*fixed: str, **more: str) -> KnownFault:
    """A fault with a mend in these versions."""
    return KnownFault(**{"fixed": [*fixed], "fault": "it breaks", "source": "a contract", **more})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("component", "older", "newer"),
    [
        ("driver", "535.183.01", "535.183.06"),
        ("driver", "535.183.01", "570.86.10"),
        ("driver", "580.95.05", "580.159.03"),
        ("cuda", "12.4", "12.10"),
        ("cuda_toolkit", "12.4.1", "13.1"),
        ("nccl", "2.19.3", "2.19.4"),
        ("nccl", "22703", "2.27.5"),
        ("nccl", "2708", "21003"),
        ("nccl", "2.27.5+cuda12.9", "2.28.3-1"),
        ("nic_firmware", "28.39.1002", "28.39.5050"),
        ("nic_firmware", "20.43.9999", "28.46.1006"),
        ("nvswitch", "96.10.57.00.01", "96.10.6B.00.01"),
        ("kernel", "5.15.0-1053-nvidia", "5.15.0-1064-nvidia-64k"),
        ("kernel", "5.14.0-427.el9.x86_64", "5.14.0-427.13.1.el9_4.x86_64"),
        ("kernel", "6.8.0-45-generic", "6.8.0-101-generic"),
        ("kernel", "6.1.94", "6.1.94-99.176.amzn2023.x86_64"),
        ("kernel", "5.14.21-150500.55.52-default", "6.18.5-fc-v18"),
        ("runc", "1.1.11", "1.1.12"),
        ("runc", "1.2.0-rc.3", "1.2.0"),
        ("runc", "1.4.0-rc.2", "1.4.0-rc.3"),
        ("runc", "1.2.0-rc.9", "1.2.0-rc.10"),
        ("runc", "1.1.9", "1.1.12-0ubuntu1~22.04.1"),
        ("runc", "1.1.5+ds1-1+deb12u1", "v1.1.12+dev"),
        ("container_toolkit", "1.14.3", "1.16.2-1"),
        ("container_toolkit", "1.17.0~rc.1", "1.17.0"),
        ("ofed", "MLNX_OFED_LINUX-23.10-1.1.9.0:", "OFED-internal-24.04-0.7.0"),
        ("ofed", "23.10-1.1.9", "MLNX_OFED_LINUX-23.10-5.1.4.0"),
        ("ofed", "MLNX_OFED_LINUX-5.8-4.1.5.0-LTS", "MLNX_OFED_LINUX-23.10-1.1.9.0"),
    ],
)
def test_which_is_older(component: str, older: str, newer: str) -> None:
    """By number, not by letter; a distribution's suffix and a firmware's model count for nothing."""
    assert known(component, older).is_before(known(component, newer))
    assert not known(component, newer).is_before(known(component, older))


LONG = f"1.2.{'9' * 5000}"


@pytest.mark.parametrize("component", SCHEMES)
@pytest.mark.parametrize(
    "text",
    ["", "simulated", "latest", "N/A", "1", "r535", "12,4", "1.2 (dirty)", "\u0661.\u0662.\u0663", LONG, "9" * 5000],
    ids=lambda text: text[:20],
)
def test_what_no_scheme_knows(component: str, text: str) -> None:
    """It is no version."""
    assert parse(component, text) is None


def test_a_version_is_the_same_with_and_without_zeros() -> None:
    """So 13.1 and 13.1.0 are one version."""
    assert known("cuda_toolkit", "13.1") == known("cuda_toolkit", "13.1.0")


@pytest.mark.parametrize(
    ("text", "flavour"),
    [
        ("5.15.0-1053-nvidia", "nvidia"),
        ("6.5.0-1014-nvidia-64k", "nvidia"),
        ("5.14.0-427.13.1.el9_4.x86_64", "el9"),
        ("6.8.0-45-generic", "generic"),
        ("6.1.94-99.176.amzn2023.x86_64", "amzn2023"),
        ("6.1.0-28-cloud-amd64", "cloud"),
        ("6.12.3", ""),
    ],
)
def test_the_flavour_of_a_kernel(text: str, flavour: str) -> None:
    """As its distribution names it."""
    assert known("kernel", text).flavour == flavour


RUNC = fault("1.2.8", "1.3.3", "1.4.0-rc.3")
DRIVER = fault("535.309.01", "580.159.03")
KERNEL = fault("5.15.0-1047", "6.8.0-1008", flavour="nvidia")


@pytest.mark.parametrize(
    ("component", "text", "one", "update"),
    [
        ("runc", "1.2.7", RUNC, "1.2.8"),
        ("runc", "1.2.8", RUNC, None),
        ("runc", "1.1.15", RUNC, "1.2.8"),
        ("runc", "1.3.2", RUNC, "1.3.3"),
        ("runc", "1.4.0-rc.2", RUNC, "1.4.0-rc.3"),
        ("runc", "1.5.0", RUNC, None),
        ("driver", "535.183.01", DRIVER, "535.309.01"),
        ("driver", "550.90.07", DRIVER, "580.159.03"),
        ("driver", "595.10.01", DRIVER, None),
        ("kernel", "5.15.0-1046-nvidia", KERNEL, "5.15.0-1047"),
        ("kernel", "5.15.0-1053-nvidia", KERNEL, None),
        ("kernel", "6.2.0-1011-nvidia", KERNEL, None),
        ("nccl", "2.26.5", fault("2.28.7", since="2.27.3"), None),
        ("nccl", "22703", fault("2.28.7", since="2.27.3"), "2.28.7"),
    ],
)
def test_what_to_update_to(component: str, text: str, one: KnownFault, update: str | None) -> None:
    """The mend of the own branch, or the next higher; a kernel's branch that is not listed may have its own."""
    assert needed(component, known(component, text), one) == update


TWICE = "{fixed: ['1.2.8'], fault: x, source: y}"


def test_the_packaged_table() -> None:
    """It is read, covers every component, and each fault has a date, a source and versions that its scheme knows."""
    table = packaged_versions()
    assert set(SCHEMES) == set(type(table).model_fields)
    every = [one for component in SCHEMES for one in getattr(table, component)]
    assert len(every) >= 15
    assert all(date.fromisoformat(one.date) for one in every)
    assert {one.older for one in table.container_toolkit} == {"failure"}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("versions: {runk: []}", "'runk' is not a key of the section of versions"),
        ("versions: {runc: [{fixt: ['1.2.8'], fault: x, source: y}]}", "Did you mean 'fixed'?"),
        ("versions: {runc: [{fixed: ['1.2.8'], fault: x}]}", "source"),
        ("versions: {runc: [{fixed: [], fault: x, source: y}]}", "fixed"),
        ("versions: {runc: [{fixed: [1.2], fault: x, source: y}]}", "a list of texts, such as ['1.17.8']"),
        ("versions: {runc: [{fixed: ['1.2'], fault: x, source: y}]}", "'1.2' is no version of runc"),
        ("versions: {driver: [{fixed: ['580.1.2'], since: old, fault: x, source: y}]}", "'old' is no version of NVIDIA driver"),
        ("versions: {runc: [{fixed: ['1.2.8'], older: error, fault: x, source: y}]}", "older"),
        ("versions: {runc: {fixed: ['1.2.8']}}", "a list"),
        ("versions: {driver: [{fixed: ['570.86.10'], flavour: generic, fault: x, source: y}]}", "only a kernel has"),
        ("versions: {kernel: [{fixed: ['6.8.0-8'], flavour: Nvidia-64k, fault: x, source: y}]}", "'Nvidia-64k' is no flavour"),
        ("versions: {nccl: [{fixed: ['2.28.9'], machine: arm64, fault: x, source: y}]}", "'machine' is 'arm64'"),
        ("versions: {runc: [{fixed: ['1.2.8'], fault: x, source: y, date: soon}]}", "'soon' is no date such as '2026-01-31'"),
        ("versions: {runc: [{fixed: ['1.2.8'], fault: x, source: y, date: '2026-02-30'}]}", "'2026-02-30' is no date"),
        (f"versions: {{runc: [{TWICE}, {TWICE}]}}", "the same fault stands above"),
        ("versions: {runc: [], runc: []}", "twice"),
        ("versions: {driver: [{fixed: ['535.1.1'], since: '570.1.1', fault: x, source: y}]}", "no version is between"),
    ],
)
def test_a_table_of_a_site_that_is_wrong(tmp_path: Path, text: str, says: str) -> None:
    """It is refused with its line."""
    path = tmp_path / "site.yaml"
    path.write_text(f"{OVERLAY}{text}\n", encoding="utf-8")
    with pytest.raises(ConfigurationError) as caught:
        load(path)
    assert "site.yaml:3: " in str(caught.value)
    assert says in str(caught.value)


def test_a_date_in_the_future(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A remark of lint: the clock of a host may be wrong, so no run is refused for it. A past one is none."""
    path = tmp_path / "site.yaml"
    for day, remarks in (("2999-01-31", 1), ("2026-01-31", 0)):
        fault = f"{{fixed: ['1.2.8'], fault: x, source: y, date: '{day}'}}"
        path.write_text(f"{OVERLAY}versions: {{runc: [{fault}]}}\n", encoding="utf-8")
        assert main(["lint", str(path)]) == 0
        assert load(path).versions["runc"]
        shown = capsys.readouterr().out
        assert shown.count(f"site.yaml:3: the date {day} of a fault of runc lies in the future") == remarks


def test_a_table_of_a_site(tmp_path: Path) -> None:
    """It replaces the packaged faults of the components that it names, and the verdict names them."""
    path = tmp_path / "site.yaml"
    table = "versions:\n  runc: []\n  nccl: [{fixed: ['2.28.9'], fault: contract, source: contract 4.2}]\n"
    path.write_text(OVERLAY + table, encoding="utf-8")
    file, packaged = load(path), load(None)
    assert file.versions["runc"] == ()
    assert [one.source for one in file.versions["nccl"]] == ["contract 4.2"]
    assert file.versions["container_toolkit"] == packaged.versions["container_toolkit"] != ()
    changed = file.changed_entries(file.profiles["h200-sxm"])
    assert changed == {"container_versions": ["versions of runc"], "known_versions": ["versions of NCCL"]}
    assert packaged.changed_entries(packaged.profiles["h200-sxm"]) == {}


def test_the_words_of_a_fault_change_no_outcome() -> None:
    """So a better text is no changed limit."""
    one = fault("1.2.8")
    other = KnownFault(**{**one.model_dump(), "fault": "other", "source": "other", "date": "2026-01-01"})
    assert versions.judged((one,)) == versions.judged((other,))
    assert versions.judged((one,)) != versions.judged((fault("1.2.9"),))


def test_a_malformed_packaged_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused with its line."""
    path = tmp_path / "known_versions.yaml"
    path.write_text("runc:\n  - {fixed: ['1.2']}\n", encoding="utf-8")
    monkeypatch.setattr(versions, "PACKAGED", path)
    with pytest.raises(ConfigurationError, match=r"known_versions\.yaml:2"):
        packaged_versions()


def test_schemes_are_whole() -> None:
    """Each has its own title."""
    titles = [dataclasses.asdict(one)["title"] for one in SCHEMES.values()]
    assert len({*titles}) == len(titles)
