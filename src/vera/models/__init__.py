"""Models: loading, the capability gate, and the attention hook that hands their queries, keys and values to the cache."""

from vera.models.catalogue import local_models, supported_families
from vera.models.hook import LayerHook
from vera.models.load import AUTO, EMBEDDED, adopt_model, load_model
from vera.models.loaded import LoadedModel
from vera.models.spec import ModelSpec

__all__ = [
    "AUTO",
    "EMBEDDED",
    "LayerHook",
    "LoadedModel",
    "ModelSpec",
    "adopt_model",
    "load_model",
    "local_models",
    "supported_families",
]
