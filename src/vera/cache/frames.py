"""What each part of the arena holds: integers only.

The arena is one piece of memory, cut into equal *frames*. A frame is free or serves one role, and then it is divided into the
*units* of that role; the same memory can be exact blocks today and sketches tomorrow, under one ceiling. Unit `i` of frame `f`
has the id `f * units_per_frame[role] + i`. A frame takes its role with its first unit and is free again with its last.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

import numpy as np
from numpy.typing import NDArray


class Role(Enum):
    """What the units of a frame are."""

    EXACT = "exact"
    """All pages of a block."""
    SKETCH = "sketch"
    """The sketches of all pages of a block."""
    PAGE = "page"
    """One exact page."""


class Frames:
    """Which units of `num_frames` frames are used. Hands out the lowest frames first: what was never needed is never touched."""

    def __init__(self, num_frames: int, units_per_frame: Mapping[Role, int]) -> None:
        """`units_per_frame`: how many units of each role fit into a frame; a role that is missing cannot be used."""
        assert num_frames >= 0 and all(units >= 1 for units in units_per_frame.values())
        self.num_frames = num_frames
        self.units_per_frame = dict(units_per_frame)
        self._used = {role: np.zeros((num_frames, units), dtype=np.bool_) for role, units in units_per_frame.items()}
        self._counts = {role: np.zeros(num_frames, dtype=np.int64) for role in units_per_frame}
        self._free = np.ones(num_frames, dtype=np.bool_)
        self.num_touched = 0
        """Frames from this one up were never used."""

    # -- what there is -------------------------------------------------------------------------------------------------

    @property
    def num_free_frames(self) -> int:
        return int(np.count_nonzero(self._free))

    @property
    def num_used_frames(self) -> int:
        return self.num_frames - self.num_free_frames

    def num_used(self, role: Role) -> int:
        """Units of this role that are handed out."""
        return int(self._counts[role].sum())

    def num_available(self, role: Role) -> int:
        """Units that `take` could hand out: the room in frames of this role, and all free frames."""
        frames_it_could_fill = np.count_nonzero(self._counts[role]) + self.num_free_frames
        return int(frames_it_could_fill) * self.units_per_frame[role] - self.num_used(role)

    # -- units come and go ---------------------------------------------------------------------------------------------

    def take(self, role: Role, count: int) -> NDArray[np.int64] | None:
        """The ids of `count` units; frames of this role that have room are filled first. None: no room, nothing changed."""
        assert count >= 0
        counts, units = self._counts[role], self.units_per_frame[role]
        frames = np.concatenate((np.flatnonzero((counts > 0) & (counts < units)), np.flatnonzero(self._free)))
        room_up_to = np.cumsum(units - counts[frames])
        if count > (room_up_to[-1] if room_up_to.size else 0):
            return None
        frames = frames[: np.searchsorted(room_up_to, count) + 1]
        taken = self._units_where(role, frames, used=False)[:count]
        self._set_used(role, taken, used=True)
        if count:
            self.num_touched = max(self.num_touched, int(taken.max()) // units + 1)
        return taken

    def give(self, role: Role, units: NDArray[np.int64]) -> None:
        """Takes units back, each once. A frame with no unit left becomes free."""
        if not units.size:
            return
        ordered = np.sort(units)
        assert (ordered[1:] != ordered[:-1]).all(), "a unit is given back twice"
        assert ordered[0] >= 0 and self._used[role].reshape(-1)[units].all(), "a unit is given back unused"
        self._set_used(role, units, used=False)

    # -- making frames free --------------------------------------------------------------------------------------------

    def compaction(self, role: Role) -> list[tuple[int, int]]:
        """Moves (source unit, target unit) that empty as many frames of this role as possible with the fewest moves.

        The emptiest frames go first, into the fullest, so the first moves free the most. A plan only: nothing changes until
        `complete_move`, and the plan is void after the next `take` or `give`.
        """
        counts, units = self._counts[role], self.units_per_frame[role]
        frames = np.flatnonzero(counts)
        fullest_first = frames[np.argsort(-counts[frames], kind="stable")]
        num_kept = -(-self.num_used(role) // units)
        kept, emptied = fullest_first[:num_kept], fullest_first[num_kept:][::-1]
        sources = self._units_where(role, emptied, used=True)
        targets = self._units_where(role, kept, used=False)[: sources.size]
        return list(zip(sources.tolist(), targets.tolist(), strict=True))

    def complete_move(self, role: Role, source: int, target: int) -> None:
        """To be called once the bytes of `source` are in `target`: from now on the target is used and the source is not."""
        used, counts, units = self._used[role].reshape(-1), self._counts[role], self.units_per_frame[role]
        left, entered = source // units, target // units
        assert used[source] and not used[target], "a move from an unused unit or to a used one"
        assert counts[entered] or self._free[entered], "a move into a frame of another role"
        used[source], used[target] = False, True
        counts[entered] += 1
        counts[left] -= 1
        self._free[entered] = False
        self._free[left] = counts[left] == 0

    def check_invariants(self) -> None:
        """Raises AssertionError if the books do not balance or a frame serves two roles."""
        num_roles = np.zeros(self.num_frames, dtype=np.int64)
        for role, used in self._used.items():
            assert (self._counts[role] == used.sum(axis=1)).all(), f"the count of {role.value} units is wrong"
            num_roles += self._counts[role] > 0
        assert (num_roles <= 1).all(), "a frame serves two roles"
        assert (self._free == (num_roles == 0)).all(), "a frame is lost, or free and used"

    # -- details -------------------------------------------------------------------------------------------------------

    def _units_where(self, role: Role, frames: NDArray[np.int64], *, used: bool) -> NDArray[np.int64]:
        """The used (or unused) units of these frames, frame by frame in the order given."""
        rows, indexes = np.nonzero(self._used[role][frames] == used)
        return frames[rows] * self.units_per_frame[role] + indexes

    def _set_used(self, role: Role, units: NDArray[np.int64], *, used: bool) -> None:
        self._used[role].reshape(-1)[units] = used
        changes = np.bincount(units // self.units_per_frame[role], minlength=self.num_frames)
        changed = np.flatnonzero(changes)
        self._counts[role][changed] += changes[changed] if used else -changes[changed]
        self._free[changed] = self._counts[role][changed] == 0
