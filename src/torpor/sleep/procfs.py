"""What Linux says about this process's memory: room left, resident pages, what an address maps.

All figures are bytes. Formats: man 5 proc (maps, smaps, statm, meminfo); the kernel's documents
cgroup-v1/memory and cgroup-v2. Each function takes the folder it reads, so that tests can write
their own.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torpor.errors import ArenaError, ArgumentError

PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")

_SMAPS_ENTRY = re.compile(
    rb"^([0-9a-f]+)-([0-9a-f]+) [^\n]*\n(?:[A-Z][^\n]*\n)*?Rss: +(\d+) kB", re.MULTILINE
)
_NOT_FILES = ("[", "/dev/shm/", "/dev/zero", "/memfd:", "/SYSV", "anon_inode:")


# --- room left -----------------------------------------------------------------------------------


def available_memory_bytes(proc: Path = PROC, cgroup: Path = CGROUP) -> int:
    """How many bytes this process can still touch before the machine or its cgroup runs short.

    The least of MemAvailable and, for the process's cgroup and each of its ancestors (v1 and v2),
    limit - usage + inactive file pages, which the kernel reclaims before it refuses memory.

    Raises:
        ArenaError: /proc/meminfo cannot be read; the check needs Linux 3.14 or newer.
    """
    try:
        text = (proc / "meminfo").read_text()
        available = int(_field(text, "MemAvailable:")) * 1024
    except (OSError, ValueError) as error:
        raise ArenaError(
            f"{proc / 'meminfo'} gives no MemAvailable; mount /proc (Linux 3.14 or newer)"
        ) from error
    return max(0, min([available, *_cgroup_rooms(proc, cgroup)]))


def _field(text: str, name: str) -> str:
    """The first word after ``name`` at the start of a line. Raises ValueError without one."""
    for line in text.splitlines():
        words = line.split()
        if len(words) > 1 and words[0] == name:
            return words[1]
    raise ValueError(f"no {name} among {len(text)} characters")


def _cgroup_rooms(proc: Path, cgroup: Path) -> Iterator[int]:
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if number == "0" and not controllers:
            yield from _rooms(cgroup, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            yield from _rooms(
                cgroup / "memory",
                path,
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive_file",
            )


def _rooms(mount: Path, path: str, limit: str, usage: str, inactive: str) -> Iterator[int]:
    """Room in the group at ``path`` and in each group above it that sets a limit."""
    folder = mount / path.lstrip("/")
    # Inside a container the path may name a group that only the host sees; the mount is ours then.
    if ".." in folder.parts or not folder.is_dir():
        folder = mount
    for group in [folder, *folder.parents]:
        if group != mount and mount not in group.parents:
            return
        try:
            limit_bytes = int((group / limit).read_text())
            used_bytes = int((group / usage).read_text())
            reclaimable = int(_field((group / "memory.stat").read_text(), inactive))
        except (OSError, ValueError):
            continue  # no limit at this level ("max"), or a root group without the files
        yield limit_bytes - used_bytes + reclaimable


# --- resident bytes ------------------------------------------------------------------------------


def process_rss_bytes(proc: Path = PROC) -> int:
    """Resident bytes of the whole process, file pages included."""
    pages = int((proc / "self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def rss_of_ranges(ranges: Sequence[tuple[int, int]], proc: Path = PROC) -> int:
    """Resident bytes inside the (address, nbytes) ranges, exactly, summed.

    The kernel counts by mapping, so each range must be kept from merging with resident neighbours,
    by a guard page on either side.

    Raises:
        ArgumentError: a resident mapping lies across the edge of a range.
    """
    spans = sorted((start, start + nbytes) for start, nbytes in ranges if nbytes > 0)
    starts = [start for start, _ in spans]
    total = 0
    for match in _SMAPS_ENTRY.finditer((proc / "self/smaps").read_bytes()):
        rss = int(match[3]) * 1024
        if rss == 0:
            continue
        start, end = int(match[1], 16), int(match[2], 16)
        index = bisect_right(starts, start) - 1
        if index >= 0 and end <= spans[index][1]:
            total += rss
        elif _overlaps(spans, index, start, end):
            raise ArgumentError(
                f"mapping {start:#x}-{end:#x} lies across the edge of a counted range; "
                "put a guard page on either side of the range"
            )
    return total


def _overlaps(spans: Sequence[tuple[int, int]], index: int, start: int, end: int) -> bool:
    before = index >= 0 and start < spans[index][1]
    after = index + 1 < len(spans) and spans[index + 1][0] < end
    return before or after


# --- what an address maps ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Mapping:
    """One line of /proc/self/maps."""

    start: int
    end: int
    """First address past the mapping."""
    permissions: str
    """Such as ``r--p``: read, write, execute, then ``p`` private or ``s`` shared."""
    inode: int
    path: str

    @property
    def is_file(self) -> bool:
        """Whether a file on disk backs it; shared memory and anonymous mappings do not count."""
        return self.inode != 0 and not self.path.startswith(_NOT_FILES)


class MemoryMap:
    """The mappings of this process at one moment, for looking up many addresses."""

    def __init__(self, proc: Path = PROC) -> None:
        self._mappings = [_mapping(line) for line in _lines(proc / "self/maps")]
        self._starts = [mapping.start for mapping in self._mappings]

    def find(self, address: int) -> Mapping | None:
        """The mapping that holds the address, or None."""
        index = bisect_right(self._starts, address) - 1
        if index >= 0 and address < self._mappings[index].end:
            return self._mappings[index]
        return None

    def is_file(self, address: int) -> bool:
        """Whether the address lies in a mapping of a file on disk."""
        mapping = self.find(address)
        return mapping is not None and mapping.is_file


def file_mapped(address: int, proc: Path = PROC) -> bool:
    """Whether the address lies in a mapping of a file on disk. For many, keep a ``MemoryMap``."""
    return MemoryMap(proc).is_file(address)


def _lines(path: Path) -> Iterable[str]:
    # surrogateescape: a path may hold any bytes.
    return path.read_text(encoding="utf-8", errors="surrogateescape").splitlines()


def _mapping(line: str) -> Mapping:
    words = line.split(maxsplit=5)
    start, end = words[0].split("-")
    path = words[5] if len(words) > 5 else ""
    return Mapping(int(start, 16), int(end, 16), words[1], int(words[4]), path)
