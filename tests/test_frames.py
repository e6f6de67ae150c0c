"""One arena for exact blocks, sketches and pages, under any order of events."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from vera.cache.frames import Frames, Role

NUM_FRAMES = 6
UNITS = {Role.EXACT: 1, Role.SKETCH: 3, Role.PAGE: 8}
ROLES = st.sampled_from(list(Role))


class FrameLife(RuleBasedStateMachine):
    """Units of all roles come, go and move; `content` is what a real arena would hold in each byte range."""

    def __init__(self):
        super().__init__()
        self.frames = Frames(NUM_FRAMES, UNITS)
        self.content: dict[tuple[Role, int], int] = {}
        self.written = 0

    def units(self, role):
        return [unit for held_role, unit in self.content if held_role is role]

    @rule(role=ROLES, count=st.integers(0, 20))
    def take(self, role, count):
        available = self.frames.num_available(role)
        taken = self.frames.take(role, count)
        if taken is None:
            assert count > available
            return
        assert count <= available and len(taken) == count
        for unit in taken.tolist():
            assert (role, unit) not in self.content
            self.written += 1
            self.content[role, unit] = self.written

    @precondition(lambda self: self.content)
    @rule(data=st.data(), role=ROLES)
    def give(self, data, role):
        given = data.draw(st.sets(st.sampled_from(self.units(role))) if self.units(role) else st.just(set()))
        self.frames.give(role, np.array(sorted(given), dtype=np.int64))
        for unit in given:
            del self.content[role, unit]

    @rule(role=ROLES, share=st.floats(0, 1))
    def compact(self, role, share):
        before = sorted(self.content.values())
        moves = self.frames.compaction(role)
        for source, target in moves[: round(share * len(moves))]:
            assert (role, target) not in self.content
            self.content[role, target] = self.content.pop((role, source))
            self.frames.complete_move(role, source, target)
        assert sorted(self.content.values()) == before

    @rule(role=ROLES)
    def compact_fully(self, role):
        self.compact(role, 1.0)
        used_frames = {unit // UNITS[role] for unit in self.units(role)}
        assert len(used_frames) == -(-len(self.units(role)) // UNITS[role])

    @invariant()
    def books_balance(self):
        self.frames.check_invariants()
        role_of = {}
        for role, unit in self.content:
            assert role_of.setdefault(unit // UNITS[role], role) is role, "two roles share a frame"
        assert self.frames.num_used_frames == len(role_of) <= NUM_FRAMES
        assert self.frames.num_free_frames == NUM_FRAMES - len(role_of)
        for role in Role:
            assert self.frames.num_used(role) == len(self.units(role))


TestFrameLife = FrameLife.TestCase
TestFrameLife.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def test_no_room_changes_nothing():
    frames = Frames(2, UNITS)
    frames.take(Role.PAGE, 9)
    assert frames.take(Role.SKETCH, 1) is None
    assert frames.take(Role.PAGE, 8) is None
    assert frames.num_available(Role.PAGE) == 7
    assert frames.num_used(Role.PAGE) == 9
    frames.check_invariants()


def test_all_roles_together_stay_below_the_ceiling():
    frames = Frames(3, UNITS)
    assert frames.take(Role.EXACT, 1) is not None
    assert frames.take(Role.SKETCH, 3) is not None
    assert frames.take(Role.PAGE, 8) is not None
    assert frames.num_free_frames == 0
    assert all(frames.take(role, 1) is None for role in Role)
    assert all(frames.num_available(role) == 0 for role in Role)


def test_memory_of_one_role_serves_another_once_it_is_given_back():
    frames = Frames(1, UNITS)
    exact = frames.take(Role.EXACT, 1)
    frames.give(Role.EXACT, exact)
    assert frames.take(Role.SKETCH, 3).tolist() == [0, 1, 2]


def test_frame_stays_with_its_role_until_its_last_unit_is_given_back():
    frames = Frames(1, UNITS)
    sketches = frames.take(Role.SKETCH, 2)
    frames.give(Role.SKETCH, sketches[:1])
    assert frames.take(Role.EXACT, 1) is None
    frames.give(Role.SKETCH, sketches[1:])
    assert frames.take(Role.EXACT, 1).tolist() == [0]


def test_lowest_frames_are_handed_out_first():
    frames = Frames(4, UNITS)
    blocks = frames.take(Role.EXACT, 3)
    assert blocks.tolist() == [0, 1, 2]
    frames.give(Role.EXACT, blocks[[1]])
    assert frames.take(Role.EXACT, 2).tolist() == [1, 3]


def test_open_frames_are_filled_before_a_free_one_is_begun():
    frames = Frames(4, UNITS)
    pages = frames.take(Role.PAGE, 24)
    frames.give(Role.PAGE, pages[[3, 20, 22]])
    assert frames.take(Role.PAGE, 5).tolist() == [3, 20, 22, 24, 25]


def test_units_of_a_fresh_frame_are_consecutive():
    frames = Frames(4, UNITS)
    assert frames.take(Role.SKETCH, 7).tolist() == list(range(7))


def test_taking_nothing_gives_nothing_even_when_full():
    frames = Frames(1, UNITS)
    frames.take(Role.EXACT, 1)
    assert frames.take(Role.PAGE, 0).tolist() == []
    assert Frames(0, UNITS).take(Role.PAGE, 0).tolist() == []


def test_no_frames_at_all_have_no_room():
    frames = Frames(0, UNITS)
    assert frames.take(Role.PAGE, 1) is None
    assert frames.num_available(Role.PAGE) == 0


def test_compaction_moves_the_emptiest_frame_into_the_fullest():
    frames = Frames(3, UNITS)
    pages = frames.take(Role.PAGE, 24)
    frames.give(Role.PAGE, pages[2:8])  # frame 0 keeps two pages
    frames.give(Role.PAGE, pages[10:11])  # frame 1 keeps seven
    frames.give(Role.PAGE, pages[20:24])  # frame 2 keeps four
    assert frames.compaction(Role.PAGE) == [(0, 10), (1, 20)]


def test_compaction_frees_frames_for_another_role():
    frames = Frames(3, UNITS)
    pages = frames.take(Role.PAGE, 24)
    frames.give(Role.PAGE, pages[np.arange(24) % 8 >= 2])  # two pages stay in each frame
    assert frames.take(Role.EXACT, 2) is None
    for source, target in frames.compaction(Role.PAGE):
        frames.complete_move(Role.PAGE, source, target)
    assert frames.num_used(Role.PAGE) == 6
    assert len(frames.take(Role.EXACT, 2)) == 2


def test_first_moves_of_a_plan_free_a_frame_already():
    frames = Frames(4, UNITS)
    pages = frames.take(Role.PAGE, 32)
    kept = {0: 5, 1: 1, 2: 5, 3: 5}
    for frame, count in kept.items():
        frames.give(Role.PAGE, pages[frame * 8 + count : (frame + 1) * 8])
    [first, *_] = frames.compaction(Role.PAGE)
    frames.complete_move(Role.PAGE, *first)
    assert frames.num_free_frames == 1


def test_planning_a_compaction_changes_nothing():
    frames = Frames(3, UNITS)
    pages = frames.take(Role.PAGE, 24)
    frames.give(Role.PAGE, pages[np.arange(24) % 8 >= 2])
    assert frames.compaction(Role.PAGE) == frames.compaction(Role.PAGE)
    assert frames.num_used_frames == 3
    frames.check_invariants()


def test_nothing_is_moved_where_no_frame_could_be_emptied():
    frames = Frames(3, UNITS)
    pages = frames.take(Role.PAGE, 24)
    frames.give(Role.PAGE, pages[[0, 8, 16]])
    assert frames.compaction(Role.PAGE) == []
    assert frames.compaction(Role.SKETCH) == []


@pytest.mark.parametrize("units", [[1, 1], [2], [-7]], ids=["twice", "never taken", "no page"])
def test_giving_back_what_is_not_held_is_refused(units):
    frames = Frames(1, UNITS)
    frames.take(Role.PAGE, 2)
    with pytest.raises(AssertionError, match="given back"):
        frames.give(Role.PAGE, np.array(units))
    frames.check_invariants()


def test_stale_plan_is_refused():
    frames = Frames(3, UNITS)
    pages = frames.take(Role.PAGE, 24)
    frames.give(Role.PAGE, pages[np.arange(24) % 8 >= 2])
    [(source, target), *_] = frames.compaction(Role.PAGE)
    frames.take(Role.PAGE, 6)
    with pytest.raises(AssertionError, match="to a used one"):
        frames.complete_move(Role.PAGE, source, target)
