"""The exceptions that Vera raises for things a user can mend.

    VeraError
    ├── ConfigError         a setting is unknown, of the wrong type or out of its range
    ├── ModelError          a model cannot be loaded or cannot be served correctly
    │   ├── ModelNotFound       nothing is there under that name
    │   ├── BrokenModel         files are damaged, tensors are missing or superfluous
    │   └── UnsupportedModel    it loads, but its attention is not one that Vera can serve
    ├── RequestError        one request cannot be honoured; the engine goes on with the others
    │   └── RequestTooLong      it can never fit the context or the cache
    ├── CapacityError       the cache ceiling is too small, or memory ran out
    ├── ParamsError         parameter versions and rollouts: what was asked for cannot be done as things stand
    │   ├── UnknownVersion      there is no such profile or version
    │   └── StoreError          the store's file cannot be read, written or trusted
    └── EngineStopped       the engine was closed, or its loop died

Every message names the value, the limit and the way out. A broken invariant of our own is an `assert`, never one of these.
"""


class VeraError(Exception):
    """Base of everything Vera raises on purpose."""


class ConfigError(VeraError, ValueError):
    """A setting is unknown, of the wrong type or out of its range."""


class ModelError(VeraError):
    """A model cannot be loaded or cannot be served correctly."""


class ModelNotFound(ModelError):
    """Nothing is there under that name."""


class BrokenModel(ModelError):
    """Files are damaged, or the tensors in them are not the ones the architecture needs."""


class UnsupportedModel(ModelError):
    """The model loads, but its attention is not one that Vera can serve without changing its answers."""


class RequestError(VeraError, ValueError):
    """One request cannot be honoured; the engine goes on with the others."""


class RequestTooLong(RequestError):
    """The request can never fit the model's context or the cache."""


class CapacityError(VeraError):
    """The cache ceiling is too small for one sequence, or the memory for it cannot be had."""


class ParamsError(VeraError):
    """What was asked of parameter versions or a rollout cannot be done as things stand; nothing was changed."""


class UnknownVersion(ParamsError):
    """There is no such profile, or no such version of it."""


class StoreError(ParamsError):
    """The store of parameter versions cannot be read, written or trusted."""


class EngineStopped(VeraError):
    """The engine was closed, or its loop died; the message says which."""
