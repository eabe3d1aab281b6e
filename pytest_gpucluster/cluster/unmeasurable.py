"""Places that cannot be measured, and what that means for the others. Pure: places and errors in, errors out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_gpucluster.errors import MeasurementError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_gpucluster.inventory.occupancy import Occupancy
    from pytest_gpucluster.places import Place

Errors = dict[Any, MeasurementError]


def not_idle(place: Place, found: Occupancy) -> MeasurementError:
    """The error of everything that would measure this GPU: it has other work, which is no fault of it."""
    limit = f"an idle GPU: up to {found.memory_limit_gib:g}"
    used = "" if found.memory_used_gib is None else f"{found.memory_used_gib:.1f} GiB in use ({limit})"
    busy = "" if found.utilization_percent is None else f"{found.utilization_percent} % busy"
    told = ", ".join(part for part in (used, busy) if part)
    return MeasurementError(
        f"GPU not idle: {found.text} on {place.label}\n"
        f"  before anything of this run was on it: {told or 'NVML tells no more'}\n"
        "  next: end that process, or wait for its job, and start again; what is measured beside it would be wrong",
        culprits=(place,),
        kind="not_idle",
    )


def spread(unfit: Mapping[Place, MeasurementError], chosen: Sequence[Place], *, pairs: bool) -> Errors:
    """The errors of these places, or of every ordered pair that one of them belongs to."""
    if not pairs:
        return dict(unfit)
    together = [(first, second) for first in chosen for second in chosen if first != second]
    return {pair: unfit.get(pair[0]) or unfit[pair[1]] for pair in together if pair[0] in unfit or pair[1] in unfit}


def whole_groups(
    chosen: Sequence[Place], unfit: Mapping[Place, MeasurementError], *, per: str
) -> tuple[list[list[Place]], Errors]:
    """Groups (nodes, or the cluster) of which every member can be measured, and the errors of all members of the others.

    What a part of a group measures is another thing than what was asked.
    """
    groups: dict[int, list[Place]] = {}
    for place in chosen:
        groups.setdefault(place.node if per == "node" else 0, []).append(place)
    errors: Errors = {}
    for group in groups.values():
        why = [unfit[place] for place in group if place in unfit]
        errors.update(dict.fromkeys(group, _of_all(why)) if why else {})
    return [group for group in groups.values() if not any(place in unfit for place in group)], errors


def _of_all(errors: Sequence[MeasurementError]) -> MeasurementError:
    """The first; where several GPUs are not idle, and nothing else is wrong, one error that names them all."""
    if len(errors) < 2 or any(error.kind != "not_idle" for error in errors):
        return errors[0]
    culprits = tuple(place for error in errors for place in error.culprits)
    also = ", ".join(place.label for place in culprits[1:])
    return MeasurementError(f"{errors[0]}\n  not idle either: {also}", culprits=culprits, kind="not_idle")
