"""Versions of the cache's settings, with an audit trail. Start with `ParameterStore`."""

from vera.params.exchange import Imported, export_yaml, import_yaml
from vera.params.records import Event, Problem, Verification, Version
from vera.params.settings import Change, Difference, change_of, differences, needs_restart, setting_names
from vera.params.store import ParameterStore, default_store_path, signature

__all__ = [
    "Change",
    "Difference",
    "Event",
    "Imported",
    "ParameterStore",
    "Problem",
    "Verification",
    "Version",
    "change_of",
    "default_store_path",
    "differences",
    "export_yaml",
    "import_yaml",
    "needs_restart",
    "setting_names",
    "signature",
]
