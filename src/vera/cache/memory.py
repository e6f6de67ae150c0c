"""How much memory this process may still take: the machine's, or less where a container has a limit."""

from __future__ import annotations

from pathlib import Path

import psutil

_CGROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")


def available_bytes(*, cgroups: Path = _CGROUPS, membership: Path = _MEMBERSHIP) -> int:
    """The least of what the machine has available and what is left below the limit of every control group around us."""
    limits = [_left_below_limit(group) for group in _our_groups(cgroups, membership)]
    return min([psutil.virtual_memory().available, *(left for left in limits if left is not None)])


def _our_groups(cgroups: Path, membership: Path) -> list[Path]:
    """The groups that hold us, from the innermost out (cgroup v2); none where that cannot be told."""
    try:
        paths = [line[3:] for line in membership.read_text().splitlines() if line.startswith("0::/")]
    except OSError:
        return []
    groups = [cgroups / path.lstrip("/") for path in paths]
    return [outer for group in groups for outer in (group, *group.parents) if outer.is_relative_to(cgroups)]


def _left_below_limit(group: Path) -> int | None:
    """Bytes that may still be taken in this group; file pages that can be dropped count as free. None: it has no limit."""
    try:
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no such file, or "max"
        return None
    return max(0, limit - used + int(statistics.get("inactive_file", 0)))
