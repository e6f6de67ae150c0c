"""Parts of a model: some decoder layers for some tokens, and what flows into a layer. What local recompute is made of.

Nothing here knows a model's code: layers are left out by taking them from the model's own list for the time of a call, and what
flows into a layer is seen, or replaced, by a hook in front of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

KeepHidden = Callable[[int, Tensor], None]
"""Called with a layer's number and what flows into it, `[tokens, hidden]`, which is the caller's to read until it returns."""


def decoder_layers(base_model: nn.Module, num_layers: int) -> tuple[nn.Module, str] | None:
    """The module that holds the list of decoder layers, and the list's name in it. None: there is no such list."""
    for owner in base_model.modules():
        for name, child in owner.named_children():
            if isinstance(child, nn.ModuleList) and len(child) == num_layers:
                return owner, name
    return None


class _PassThrough(nn.Module):
    """Stands in a layer's place and gives back what flows in: models look up masks and rope tables by a layer's number."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, "_layer", layer)  # not as a submodule: it is not run

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_layer"), name)

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states


@contextmanager
def only_layers(base_model: nn.Module, num_layers: int, first: int, stop: int) -> Iterator[None]:
    """For the time of the context the model runs its layers `first` to `stop` alone."""
    found = decoder_layers(base_model, num_layers)
    assert found is not None
    owner, name = found
    layers: Any = getattr(owner, name)
    setattr(owner, name, nn.ModuleList([*map(_PassThrough, layers[:first]), *layers[first:stop]]))
    try:
        yield
    finally:
        setattr(owner, name, layers)


@contextmanager
def flowing_in(base_model: nn.Module, num_layers: int, layer: int, hidden: Tensor) -> Iterator[None]:
    """For the time of the context `layer` gets `hidden`, `[1, tokens, hidden]`, in place of what flows into it."""

    def replace(_: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if arguments:
            return (hidden, *arguments[1:]), options
        return arguments, options | {"hidden_states": hidden}

    handle = _layers(base_model, num_layers)[layer].register_forward_pre_hook(replace, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


@dataclass(frozen=True, slots=True)
class Watcher:
    """A hook in front of a layer that only looks."""

    layer: int
    keep: KeepHidden

    def __call__(self, _: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        hidden: Tensor = arguments[0] if arguments else options["hidden_states"]
        self.keep(self.layer, hidden.squeeze(0))


@contextmanager
def watching(base_model: nn.Module, num_layers: int, layers: Sequence[int], keep: KeepHidden) -> Iterator[None]:
    """For the time of the context `keep` sees what flows into each of `layers`."""
    modules = _layers(base_model, num_layers)
    handles = [modules[layer].register_forward_pre_hook(Watcher(layer, keep), with_kwargs=True) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def watchers_of(layer: nn.Module) -> list[Watcher] | None:
    """Those who see what flows into the layer. None: it has other hooks, too, or a forward of its own."""
    hooks = list(layer._forward_pre_hooks.values())
    watchers = [hook for hook in hooks if isinstance(hook, Watcher)]
    is_only_watched = len(watchers) == len(hooks) and not layer._forward_hooks and "forward" not in layer.__dict__
    return watchers if is_only_watched else None


def _layers(base_model: nn.Module, num_layers: int) -> nn.ModuleList:
    found = decoder_layers(base_model, num_layers)
    assert found is not None
    owner, name = found
    layers: nn.ModuleList = getattr(owner, name)
    return layers
