"""What the store calls live is what the engine lets change."""

from vera.config import LIVE_SETTINGS
from vera.params import change_of, setting_names
from vera.params.settings import Change


def test_live_settings_are_those_of_the_engine():
    assert {name for name in setting_names() if change_of(name) is not Change.RESTART} == LIVE_SETTINGS
