"""The file system below a path, from a planted table of mounts and from the kernel's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_gpucluster.inventory.host import Mount, read_mount
from pytest_gpucluster.inventory.reading import NotAvailable

if TYPE_CHECKING:
    from pathlib import Path

TABLE = r"""22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 0:40 / {root}/mnt rw shared:2 master:1 - nfs4 server:/export rw,vers=4.2
31 30 0:41 / {root}/mnt/a\040b rw - lustre 10.0.0.1@o2ib:/fs rw
32 22 0:42 / {root}/mnt rw - tmpfs none rw
no line of a table
33 22 0:43 / /broken rw -
"""


@pytest.mark.parametrize(
    ("path", "kind", "source"),
    [
        ("mnt", "tmpfs", "none"),  # mounted over the other one
        ("mnt/deep/er", "tmpfs", "none"),
        ("mnt/a b/c", "lustre", "10.0.0.1@o2ib:/fs"),
        ("mntx", "ext4", "/dev/sda1"),
    ],
)
def test_the_deepest_mount_counts(tmp_path: Path, path: str, kind: str, source: str) -> None:
    """By whole names of folders, the last of equals."""
    table = tmp_path / "mountinfo"
    table.write_text(TABLE.replace("{root}", str(tmp_path)))
    found = read_mount(tmp_path / path, table=table)
    assert isinstance(found, Mount)
    assert (found.kind, found.source, found.is_in_memory) == (kind, source, kind == "tmpfs")


def test_links_are_resolved(tmp_path: Path) -> None:
    """The file system is that of the target."""
    table = tmp_path / "mountinfo"
    table.write_text(TABLE.replace("{root}", str(tmp_path)))
    (tmp_path / "mnt").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "mnt")
    assert str(read_mount(tmp_path / "link" / "x", table=table)) == f"tmpfs none at {tmp_path}/mnt"


def test_no_table(tmp_path: Path) -> None:
    """Where /proc is hidden: said, never guessed."""
    found = read_mount(tmp_path, table=tmp_path / "none")
    assert isinstance(found, NotAvailable)
    (tmp_path / "empty").touch()
    assert "has no mount for" in str(read_mount(tmp_path, table=tmp_path / "empty"))


def test_this_machine(tmp_path: Path) -> None:
    """The kernel's own table."""
    assert isinstance(read_mount(tmp_path), Mount)
