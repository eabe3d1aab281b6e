"""A ``dcgmi`` that a test makes, and reports in the forms of DCGM 2, 3 and 4.

No file of others is copied; the forms are:

* DCGM 2: ``HelperJsonAddBasicTests`` and ``HelperJsonAddResult`` in dcgmi/Diag.cpp of github.com/NVIDIA/DCGM at v2.4.5; a
  recorded ``-r 2`` of a Tesla T4 has it too (github.com/microsoft/VirtualClient, DCGMIDiag_r2_results.json, b06efdc).
* DCGM 3: the same functions at v3.3.9.
* DCGM 4: ``HelperJsonBuildOutput`` at v4.6.0, and testing/python3/dcgm_diag_schema.json there; recorded on 8 GPUs in issue 215
  of that repository, and on a GB10 with DCGM 4.2.3 (github.com/baldwinSPC/glimmer-burnin, fefeec8,
  runners/dcgm-diag/diagjson_test.go).
* ``dcgmi discovery -l``: ``DisplayDiscoveredDevices`` in dcgmi/Query.cpp; recorded on a Tesla T4 (VirtualClient,
  DCGMIDiscoveryResults.txt, acb2f2a).
"""

from __future__ import annotations

import json
import textwrap
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

Json = dict[str, Any]
OF_HOST = ("Denylist", "NVML Library", "Persistence Mode", "Page Retirement/Row Remap", "Inforom")
"""Some of the tests that DCGM 2 and 3 list in the category Deployment."""


def category(name: str, *tests: Json | None) -> Json:
    """A category with its tests."""
    return {"category": name, "tests": list(tests)}


def one_test(name: str, *results: Json | None, **more: Any) -> Json:
    """A test with its results."""
    return {"name": name, "results": list(results), **more}


def report_2(gpus: Sequence[int], *, host: Mapping[str, Json] | None = None, pcie: Mapping[int, Json] | None = None) -> Json:
    """``-r 2`` of DCGM 2: texts for errors, no version. ``host`` and ``pcie`` change results, by test and by GPU."""
    deployment = category("Deployment", *(one_test(name, (host or {}).get(name, {"status": "Pass"})) for name in OF_HOST))
    links = [{"gpu_ids": str(gpu), "info": f"GPU {gpu} GPU to Host bandwidth:\t\t13.15 GB/s", "status": "Pass"} for gpu in gpus]
    links = [{**link, **(pcie or {}).get(gpu, {})} for gpu, link in zip(gpus, links, strict=True)]
    memory = [{"gpu_ids": str(gpu), "info": f"GPU {gpu} Allocated 15206918958 bytes (97.3%)", "status": "Pass"} for gpu in gpus]
    categories = [
        deployment,
        category("Integration", one_test("PCIe", *links)),
        category("Hardware", one_test("GPU Memory", *memory)),
    ]
    return {"DCGM GPU Diagnostic": {"test_categories": categories}}


def report_3(gpus: Sequence[int], *, host: Mapping[str, Json] | None = None, memory: Mapping[int, Json] | None = None) -> Json:
    """``-r 2`` of DCGM 3: ``gpu_id``, errors with numbers, the version at the top."""
    deployment = category("Deployment", *(one_test(name, (host or {}).get(name, {"status": "Pass"})) for name in OF_HOST))
    tested = [{"gpu_id": str(gpu), "status": "Pass", **(memory or {}).get(gpu, {})} for gpu in gpus]
    links = [{"gpu_id": str(gpu), "info": f"GPU {gpu} Host to GPU bandwidth:\t\t25.93 GB/s", "status": "Pass"} for gpu in gpus]
    categories = [
        deployment,
        category("Integration", one_test("PCIe", *links)),
        category("Hardware", one_test("GPU Memory", *tested)),
    ]
    return {
        "DCGM GPU Diagnostic": {"test_categories": categories},
        "Driver Version Detected": "535.161.08",
        "GPU Device IDs": ["2330"] * len(gpus),
        "version": "3.3.9",
    }


def entity(gpu: int, word: str = "Pass", *warnings: Json, **more: Any) -> Json:
    """A result of DCGM 4."""
    about = {"entity_group": "GPU", "entity_group_id": 1, "entity_id": gpu}
    return {**about, "status": word, **({"warnings": list(warnings)} if warnings else {}), **more}


def warning(text: str, *, severity: int = 2) -> Json:
    """An error of DCGM 4, or of one GPU's test of DCGM 3."""
    return {"error_category": 8, "error_id": 29, "error_severity": severity, "warning": text}


PERSISTENCE = warning("Persistence Mode: Persistence mode for GPU 0 is disabled.", severity=5)
"""As recorded on the GB10."""


def report_4(**tests: Iterable[Json]) -> Json:
    """DCGM 4: results by test; the summary is the worst of them, as ``dcgmi`` writes it."""
    made = []
    for name, given in tests.items():
        results = list(given)
        words = [one["status"] for one in results]
        worst = next((word for word in ("Fail", "Pass", "Skip") if word in words), "Pass")
        made.append(one_test(name, *results, test_summary={"status": worst}))
    return {
        "DCGM Diagnostic": {
            "test_categories": [category("Deployment" if one["name"] == "software" else "Hardware", one) for one in made]
        },
        "entity_groups": [{"entities": [], "entity_group": "GPU", "entity_group_id": 1}],
        "metadata": {"Driver Version Detected": "580.82.09", "version": "4.2.3"},
    }


def discovery(uuids: Mapping[int, str]) -> str:
    """The table of ``dcgmi discovery -l``: DCGM's number and UUID of each GPU."""
    line = f"+{'-' * 8}+{'-' * 70}+"
    rows = [
        f"| {number:<6} | {'Name: NVIDIA H200':<68} |\n"
        f"| {'':<6} | {f'PCI Bus ID: 00000000:{number + 16:02X}:00.0':<68} |\n"
        f"| {'':<6} | {f'Device UUID: {uuid}':<68} |\n{line}"
        for number, uuid in uuids.items()
    ]
    head = f"{len(uuids)} GPUs found.\n{line}\n| GPU ID | {'Device Information':<68} |\n{line}\n"
    return head + "\n".join(rows) + "\n0 NvSwitches found.\n+-----------+\n| Switch ID |\n+-----------+\n+-----------+\n"


NO_ENGINE = 'echo "Error: unable to establish a connection to the specified host: localhost"; exit 235'
"""What ``dcgmi discovery`` does without a host engine (dcgmi/Command.cpp; DCGM_ST_CONNECTION_NOT_VALID is -21)."""


def install(folder: Path, *, uuids: Mapping[int, str], report: Json | str, exit_code: int = 0, before: str = ":") -> Path:
    """Make ``folder/dcgmi``; returns the folder, for PATH.

    ``before`` is a line of shell that ``discovery`` and ``diag`` run first. The arguments of each call are in ``calls``.
    """
    folder.mkdir(exist_ok=True)
    printed = report if isinstance(report, str) else json.dumps(report, indent=1)
    (folder / "report").write_text(printed, encoding="utf-8")
    (folder / "discovery").write_text(discovery(uuids), encoding="utf-8")
    script = textwrap.dedent(f"""\
        #!/bin/sh
        here={folder}
        echo "$*" >> $here/calls
        case "$1" in
        --version) printf '\\ndcgmi  version: 3.3.9\\n\\n'; exit 0;;
        discovery) {before}
            cat $here/discovery; exit 0;;
        diag) {before}
            cat $here/report; exit {exit_code};;
        esac
        exit 2
        """)
    program = folder / "dcgmi"
    program.write_text(script, encoding="utf-8")
    program.chmod(0o755)
    return folder
