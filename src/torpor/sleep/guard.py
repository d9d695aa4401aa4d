"""What raises while asleep, before a kernel can touch memory that is not there.

Falling asleep puts a check before every way in that Python can intercept: on each submodule
``forward``, calls (whose pre-hooks run before ``forward``), ``state_dict``, ``load_state_dict``,
``.to()`` and its kin, copying and pickling; on each optimizer ``step``, ``zero_grad``, its state
dicts, copying and pickling; on each parameter whose gradient sleeps, backward. Waking removes them
all, so they cost nothing while awake. They ask the sleeper each time, so one that an interrupt left
behind is harmless.

Methods are replaced on the instance and not hooked where compiled code has to see it: it skips
hooks, but looks again at a module whose ``forward`` is replaced.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.utils.hooks import RemovableHandle

_COPYING = ("__deepcopy__", "__reduce_ex__")
_MODULE_METHODS = ("forward", "_call_impl", "_apply", *_COPYING)
_COMPILED_CALL = "_compiled_call_impl"

Require = Callable[[], None]
"""Raises unless the memory is there."""


class Shadow:
    """Stands before one method of one object."""

    def __init__(self, owner: Any, name: str, require: Require) -> None:
        """Put it in place: ``require`` runs before the method from now on."""
        self.active = True
        self._owner = owner
        self._name = name
        self._replaced = vars(owner).get(name)
        self._installed = _checked(self, getattr(owner, name, None), require)
        vars(owner)[name] = self._installed

    def remove(self) -> None:
        """Put back what was there, unless somebody has put something else there since."""
        self.active = False
        attributes = vars(self._owner)
        if attributes.get(self._name) is not self._installed:
            return
        below = self._below()
        if below is None:
            del attributes[self._name]
        else:
            attributes[self._name] = below

    def _below(self) -> Any:
        """What was replaced, less shadows of other sleepers that have gone since."""
        below = self._replaced
        while (shadow := getattr(below, "_torpor_shadow", None)) is not None and not shadow.active:
            below = shadow._replaced
        return below

    def copy_without(self, *args: Any) -> Any:
        """Deep-copy the owner as if this had never been put in place."""
        self.remove()
        return copy.deepcopy(self._owner, *args)


def _checked(shadow: Shadow, method: Callable[..., Any] | None, require: Require) -> Any:
    original = shadow.copy_without if method is None else method

    def checked(*args: Any, **kwargs: Any) -> Any:
        require()
        return original(*args, **kwargs)

    # Signature and name stay for those who look; attributes do not, since the compiler would follow
    # its own marks to the original and leave the check out.
    functools.update_wrapper(checked, original, updated=())
    vars(checked)["_torpor_shadow"] = shadow
    return checked


class Guard:
    """Everything that one sleeper has put in place."""

    def __init__(
        self,
        modules: Iterable[nn.Module],
        optimizers: Iterable[Optimizer],
        require_module: Require,
        require_optimizer: Require,
    ) -> None:
        """Remember whom to guard.

        Args:
            require_module: raises unless the modules' tensors are mapped and valid.
            require_optimizer: the same for a step of the optimizers.
        """
        self._roots = tuple(modules)
        self._optimizers = tuple(optimizers)
        self._require_module = require_module
        self._require_optimizer = require_optimizer
        self._handles: list[RemovableHandle] = []
        self._shadows: list[Shadow] = []

    @property
    def is_installed(self) -> bool:
        """Whether anything is in place."""
        return bool(self._handles or self._shadows)

    def install(self) -> None:
        """Put every check in place. Repeating it changes nothing."""
        if self.is_installed:
            return
        require = _untraced(self._require_module)

        def check(*_args: Any, **_kwargs: Any) -> None:
            require()

        for module in self._submodules():
            self._handles.append(module.register_state_dict_pre_hook(check))
            self._handles.append(module.register_load_state_dict_pre_hook(check))
            for name in _MODULE_METHODS:
                self._shadows.append(Shadow(module, name, require))
            if vars(module).get(_COMPILED_CALL) is not None:
                self._shadows.append(Shadow(module, _COMPILED_CALL, require))
        for optimizer in self._optimizers:
            self._guard_optimizer(optimizer)

    def remove(self) -> None:
        """Take every check away. Repeating it changes nothing."""
        while self._shadows:
            self._shadows[-1].remove()
            self._shadows.pop()
        while self._handles:
            self._handles[-1].remove()
            self._handles.pop()

    def _guard_optimizer(self, optimizer: Optimizer) -> None:
        require = self._require_optimizer

        def check(*_args: Any, **_kwargs: Any) -> None:
            require()

        self._handles += [
            optimizer.register_step_pre_hook(check),
            optimizer.register_state_dict_pre_hook(check),
            optimizer.register_load_state_dict_pre_hook(check),
        ]
        for name in ("zero_grad", *_COPYING):
            self._shadows.append(Shadow(optimizer, name, require))
        for parameter in _with_gradient(optimizer):
            self._handles.append(parameter.register_hook(check))

    def _submodules(self) -> list[nn.Module]:
        return list(
            {id(module): module for root in self._roots for module in root.modules()}.values()
        )


def _untraced(require: Require) -> Require:
    """Keep the compiler from taking the check apart.

    Nothing is compiled while the compiler has not been imported, and importing it takes a second.
    """
    compiler = sys.modules.get("torch._dynamo")
    return require if compiler is None else compiler.disable(require)


def _with_gradient(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """Parameters whose gradient a backward would add to."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None and parameter.requires_grad:
                yield parameter
