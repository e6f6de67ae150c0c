"""Which settings are live, what differs, and what makes two sets one."""

from dataclasses import fields

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vera.config import CacheConfig
from vera.errors import ConfigError
from vera.params import Change, change_of, differences, needs_restart, setting_names
from vera.params.settings import canonical, checked, content_hash, full_settings, reason_of

configs = st.builds(
    CacheConfig,
    mode=st.just("adaptive"),
    attention_tolerance=st.floats(0, 1) | st.sampled_from([0, 1]),
    hot_score_threshold=st.floats(0, 1),
    page_size=st.sampled_from([16, 32, 64, 128]),
    recompute_budget=st.integers(0, 100),
    recompute_target=st.sampled_from([(0.08, 0.15), (0, 1), (0.1, 0.2)]),
    warm_bytes=st.none() | st.integers(0, 10**15),
)


def test_every_cache_setting_is_live_or_needs_a_restart_and_says_why():
    for setting in fields(CacheConfig):
        assert change_of(setting.name) in Change and reason_of(setting.name)


def test_nothing_is_classified_that_is_no_setting():
    assert setting_names() == tuple(setting.name for setting in fields(CacheConfig))
    from vera.params.settings import _CHANGES

    assert set(_CHANGES) == set(setting_names())


def test_a_difference_says_whether_a_running_service_can_take_it():
    changes = differences({"mode": "adaptive"}, {"mode": "adaptive", "attention_tolerance": 0.02, "page_size": 32})
    assert [(change.name, change.before, change.after, change.live) for change in changes] == [
        ("page_size", 64, 32, False),
        ("attention_tolerance", 0.015, 0.02, True),
    ]


@pytest.mark.parametrize(("after", "live"), [(1, True), (0, True), (3, False)])
def test_the_recompute_budget_is_live_up_to_its_value_at_start(after, live):
    stuck = needs_restart({"mode": "adaptive"}, {"mode": "adaptive", "recompute_budget": after})
    assert [change.name for change in stuck] == ([] if live else ["recompute_budget"])


@given(configs)
@settings(deadline=None)
def test_equal_configs_have_one_hash_whatever_types_their_numbers_came_in(config):
    full = full_settings(config)
    again = full_settings(checked({name: full[name] for name in reversed(full)}))
    assert content_hash(full) == content_hash(again)
    ints = {name: int(value) if isinstance(value, float) and value.is_integer() else value for name, value in full.items()}
    assert content_hash(full_settings(checked(ints))) == content_hash(full)


@given(configs, configs)
@settings(deadline=None)
def test_sets_have_one_hash_exactly_if_nothing_differs(one, other):
    assert (content_hash(full_settings(one)) == content_hash(full_settings(other))) == (
        differences(one.to_dict(), other.to_dict()) == []
    )


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"attention_tolerence": 0.1}, "did you mean attention_tolerance"),
        ({"zzz": 1}, "known are mode"),
        ({"mode": "adaptive", "attention_tolerance": 2}, "outside 0.0 to 1.0"),
        ({"mode": "adaptive", "attention_tolerance": float("nan")}, "outside 0.0 to 1.0"),
        ({"mode": "adaptive", "recompute_target": 5}, "wrong type"),
        ({"prefix_reuse": 1}, "prefix_reuse=1 is not one of true, false"),
        ({"page_size": 10**400}, "page_size"),
        ({"cache_max_size_ratio": 10**400}, "wrong type"),
        ({"attention_tolerance": 0.1}, "no use for attention_tolerance"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(values, says):
    with pytest.raises(ConfigError, match=says):
        checked(values)


def test_canonical_json_does_not_depend_on_order_and_refuses_what_json_cannot_say():
    assert canonical({"b": 1, "a": [1.0, None]}) == '{"a":[1.0,null],"b":1}'
    with pytest.raises(ValueError, match="JSON"):
        canonical(float("inf"))
