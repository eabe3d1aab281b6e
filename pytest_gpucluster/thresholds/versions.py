"""Versions of what runs on a host, as each component writes them, and faults that are known of them. Pure.

Each component has a scheme of its own, a pattern of some lines: PEP 440 (the package ``packaging``) reads neither a kernel's
flavour nor OFED's two numbers, and would sort firmware of different models. A text that the scheme does not know is no version,
and nothing follows from it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from pytest_gpucluster.config.schema_errors import listed
from pytest_gpucluster.config.yaml_lines import Document, KeyPath, Problem
from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.thresholds.schema import NOT_DATED, File, KnownFault, Versions, part_of, read_model

PACKAGED = Path(__file__).with_name("known_versions.yaml")
_MOST_NUMBERS = 12
MOST_CHARACTERS = 200
"""Of a version."""
MACHINES = ("x86_64", "aarch64")
"""As the kernel names the machines that have NVIDIA's data centre GPUs."""
_SEMANTIC = r"v?(?P<numbers>\d+\.\d+\.\d+)(?:[-~](?P<stage>alpha|beta|rc)\.?(?P<trial>\d+))?(?P<build>[-+~].*)?"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """How a component writes its versions.

    Attributes:
        title: the component in words.
        pattern: of a version, with the groups ``numbers``, and where there are such, stage, trial, build and flavour.
        branch: so many of the first numbers are the branch.
        base: of the numbers.
        backports: whether branches that are not listed may have the mend as well.
    """

    title: str
    pattern: str
    branch: int = 1
    base: int = 10
    backports: bool = False


SCHEMES: Mapping[str, Scheme] = {
    "driver": Scheme(title="NVIDIA driver", pattern=r"(?P<numbers>\d{3,4}\.\d+(\.\d+)?)"),
    "cuda": Scheme(title="CUDA", pattern=r"(?P<numbers>\d+\.\d+(\.\d+)*)"),
    "cuda_toolkit": Scheme(title="CUDA toolkit", pattern=r"(?P<numbers>\d+\.\d+(\.\d+)*)"),
    "nccl": Scheme(title="NCCL", pattern=r"(?P<numbers>\d+\.\d+\.\d+)(-\d+)?(\+cuda[\d.]+)?", branch=2),
    "nic_firmware": Scheme(title="firmware", pattern=r"(\d+\.)?(?P<numbers>\d+\.\d{3,5})"),
    "nvswitch": Scheme(title="NVSwitch BIOS", pattern=r"(?P<numbers>[\da-fA-F]{2}(\.[\da-fA-F]{2}){4})", base=16),
    "kernel": Scheme(
        title="kernel",
        pattern=r"(?P<numbers>\d+\.\d+(\.\d+)?([-.]\d+)*)\+?([-._](?P<flavour>[a-z]+\d*)([-._+].*)?)?",
        branch=3,
        backports=True,
    ),
    "runc": Scheme(title="runc", pattern=_SEMANTIC, branch=2),
    "docker": Scheme(title="Docker", pattern=_SEMANTIC, branch=2),
    "container_toolkit": Scheme(title="container toolkit", pattern=_SEMANTIC, branch=2),
    "ofed": Scheme(
        title="OFED", pattern=r"(MLNX_OFED_LINUX-|OFED-internal-)?(?P<numbers>\d+\.\d+-\d+(\.\d+)*)(-LTS)?:?", branch=2
    ),
}


OF_CONTAINERS = ("runc", "docker", "container_toolkit")
JUDGES = {name: "container_versions" if name in OF_CONTAINERS else "known_versions" for name in SCHEMES}
"""The criterion of each component."""


@dataclass(frozen=True, slots=True, order=True)
class Version:
    """A version that can be compared. ``stage`` is 1 for a release; ``build``: a distribution has built it."""

    numbers: tuple[int, ...]
    stage: tuple[int | str, ...]
    flavour: str = ""
    build: str = ""

    def branch(self, of: int) -> tuple[int, ...]:
        """Its branch."""
        return self.numbers[:of]

    def is_before(self, other: Version) -> bool:
        """Whether it is older, whoever built it."""
        return (self.numbers, self.stage) < (other.numbers, other.stage)


def parse(component: str, text: str) -> Version | None:
    """A version of a component; None for a text that is none by its scheme. NCCL's may be an integer, as NCCL_VERSION_CODE."""
    scheme, text = SCHEMES[component], text.strip()
    if len(text) > MOST_CHARACTERS:
        return None
    if component == "nccl" and text.isascii() and text.isdecimal():
        code, size = int(text), 10_000 if int(text) >= 10_000 else 1_000
        return _version((code // size, code % size // 100, code % 100)) if code >= 2_000 else None
    found = re.fullmatch(scheme.pattern, text, re.ASCII)
    if found is None:
        return None
    groups = found.groupdict(default="")
    stage = (0, groups["stage"], int(groups["trial"])) if groups.get("stage") else (1,)
    numbers = tuple(int(one, scheme.base) for one in re.split(r"[.-]", groups["numbers"]))
    return _version(numbers, stage=stage, flavour=groups.get("flavour", ""), build=groups.get("build", ""))


def _version(numbers: tuple[int, ...], *, stage: tuple[int | str, ...] = (1,), flavour: str = "", build: str = "") -> Version:
    return Version((*numbers, *[0] * (_MOST_NUMBERS - len(numbers))), stage, flavour, build)


def needed(component: str, version: Version, fault: KnownFault) -> str | None:
    """The version to update to, where this one is one of those that have the fault; None where it is not, or nobody says.

    Of a branch that has the mend it is that one, otherwise the next higher.
    """
    scheme = SCHEMES[component]
    fixed = {text: one for text in fault.fixed if (one := parse(component, text)) is not None}
    if fault.since is not None and (first := parse(component, fault.since)) is not None and version.is_before(first):
        return None
    own = [text for text, one in fixed.items() if one.branch(scheme.branch) == version.branch(scheme.branch)]
    if own or scheme.backports:
        return next((text for text in own if version.is_before(fixed[text])), None)
    higher = [text for text, one in fixed.items() if version.is_before(one)]
    return min(higher, key=lambda text: fixed[text].numbers, default=None)


def packaged_versions() -> Versions:
    """The packaged table, checked.

    Raises:
        ConfigurationError: the file is malformed.
    """
    found, document = read_model(PACKAGED, Versions, file=PACKAGED.name, part_of=lambda keys: part_of(("versions", *keys)))
    if problems := list(problems_of(found, document)):
        raise ConfigurationError(listed(problems))
    return found


def problems_of(versions: Versions, document: Document, path: KeyPath = ()) -> Iterator[Problem]:
    """The versions of a table that their own scheme does not know, dates that are none, and faults twice or of no host."""
    for component, faults in versions.written().items():
        for number, fault in enumerate(faults):
            twice = ["the same fault stands above, in all its words"] if fault in faults[:number] else []
            for why in (*_wrong(component, fault), *twice):
                yield document.problem((*path, component, number), f"{why} (in 'versions').")


def remarks_of(versions: Versions, document: Document) -> Iterator[Problem]:
    """Faults whose date lies ahead of this machine's clock. A date changes no outcome, so it stops no run."""
    for component, faults in versions.written().items():
        for number, fault in enumerate(faults):
            if _day(fault.date) > date.today():  # noqa: DTZ011 -- a day of the local calendar, as people write it
                text = f"the date {fault.date} of a fault of {SCHEMES[component].title} lies in the future (in 'versions')."
                yield document.problem(("versions", component, number), text)


def _day(text: str) -> date:
    """The day of a fault; the first of all where it is not dated.

    Raises:
        ValueError: the text is no day.
    """
    return date.min if text == NOT_DATED else date.fromisoformat(text)


def _wrong(component: str, fault: KnownFault) -> Iterator[str]:
    texts = [*fault.fixed, *([fault.since] if fault.since is not None else [])]
    known = {text: one for text in texts if (one := parse(component, text)) is not None}
    yield from (f"{text!r} is no version of {SCHEMES[component].title}" for text in texts if text not in known)
    if fault.since in known and not any(known[fault.since].is_before(one) for one in known.values()):
        yield f"no version is between 'since' {fault.since} and 'fixed', so the fault never counts"
    if fault.flavour is not None and component != "kernel":
        yield f"only a kernel has a 'flavour', and {SCHEMES[component].title} has none"
    elif fault.flavour is not None and not re.fullmatch(r"[a-z]+\d*", fault.flavour):
        yield f"{fault.flavour!r} is no flavour such as 'nvidia' or 'el9'"
    try:
        _day(fault.date)
    except ValueError:
        yield f"{fault.date!r} is no date such as '2026-01-31'"
    if fault.machine not in (None, *MACHINES):
        yield f"'machine' is {fault.machine!r}, and must be one of {', '.join(MACHINES)}"


def of_file(content: File) -> dict[str, tuple[KnownFault, ...]]:
    """The faults by component that count for a thresholds file: its own, or the packaged ones of what it does not name."""
    table = {**dict(packaged_versions()), **content.versions.written()}
    return {component: tuple(faults) for component, faults in table.items()}


def judged(faults: tuple[KnownFault, ...]) -> list[dict[str, object]]:
    """What of some faults changes an outcome; their words do not."""
    return [fault.model_dump(exclude={"fault", "source", "date"}) for fault in faults]
