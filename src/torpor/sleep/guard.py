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
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.utils.hooks import RemovableHandle

_COPYING = ("__deepcopy__", "__reduce_ex__")
_MODULE_METHODS = (
    *("forward", "_call_impl", "_apply"),
    *("state_dict", "_load_from_state_dict"),
    *_COPYING,
)
_COMPILED_CALL = "_compiled_call_impl"

Require = Callable[[], None]
"""Raises unless the memory is there."""

Check = Callable[..., None]
"""Sees the arguments of a call before it is made, and raises unless the memory is there."""


class Shadow:
    """Stands before one method of one object. One small object each: a model has thousands."""

    __slots__ = ("_check", "_name", "_owner", "_replaced", "active")

    def __init__(self, owner: Any, name: str, check: Check) -> None:
        """Put it in place: ``check`` sees the arguments of every call first."""
        self.active = True
        self._owner = owner
        self._name = name
        self._check = check
        attributes = vars(owner)
        self._replaced = attributes.get(name)
        attributes[name] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._check(*args, **kwargs)
        return self.__wrapped__(*args, **kwargs)

    @property
    def __wrapped__(self) -> Any:
        """The method behind it; also for those who ask for its signature."""
        if self._replaced is not None:
            return self._replaced
        method = getattr(type(self._owner), self._name, None)
        return self._copy_without if method is None else types.MethodType(method, self._owner)

    def remove(self) -> None:
        """Put back what was there, unless somebody has put something else there since."""
        self.active = False
        attributes = vars(self._owner)
        if attributes.get(self._name) is not self:
            return
        below = self._replaced
        while isinstance(below, Shadow) and not below.active:
            below = below._replaced  # Another sleeper's, which has gone since.
        if below is None:
            del attributes[self._name]
        else:
            attributes[self._name] = below

    def _copy_without(self, *args: Any) -> Any:
        """Deep-copy the owner as if this had never been put in place."""
        self.remove()
        return copy.deepcopy(self._owner, *args)


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
        self._complete = False

    @property
    def is_installed(self) -> bool:
        """Whether anything is in place."""
        return bool(self._handles or self._shadows)

    def install(self) -> None:
        """Put every check in place. Repeating it changes nothing."""
        if self._complete:
            return
        self.remove()  # What an interrupt has left of an earlier attempt.
        check = _untraced(_always(self._require_module))
        for module in self._submodules():
            for name in _MODULE_METHODS:
                self._shadows.append(Shadow(module, name, check))
            if vars(module).get(_COMPILED_CALL) is not None:
                self._shadows.append(Shadow(module, _COMPILED_CALL, check))
            if self._optimizers:
                self._shadows.append(Shadow(module, *self._before_zeroing()))
        for optimizer in self._optimizers:
            self._guard_optimizer(optimizer)
        self._complete = True

    def remove(self) -> None:
        """Take every check away. Repeating it changes nothing."""
        self._complete = False
        while self._shadows:
            self._shadows[-1].remove()
            self._shadows.pop()
        while self._handles:
            self._handles[-1].remove()
            self._handles.pop()

    def _guard_optimizer(self, optimizer: Optimizer) -> None:
        check = _always(self._require_optimizer)
        self._handles += [
            optimizer.register_step_pre_hook(check),
            optimizer.register_state_dict_pre_hook(check),
            optimizer.register_load_state_dict_pre_hook(check),
        ]
        for name in _COPYING:
            self._shadows.append(Shadow(optimizer, name, check))
        self._shadows.append(Shadow(optimizer, *self._before_zeroing()))
        for parameter in _with_gradient(optimizer):
            before_adding = _before_adding(parameter, self._require_optimizer)
            self._handles.append(parameter.register_hook(before_adding))

    def _before_zeroing(self) -> tuple[str, Check]:
        def check(set_to_none: bool = True) -> None:
            if not set_to_none:  # Letting gradients go touches no memory.
                self._require_optimizer()

        return "zero_grad", check

    def _submodules(self) -> list[nn.Module]:
        return list(
            {id(module): module for root in self._roots for module in root.modules()}.values()
        )


def _always(require: Require) -> Check:
    return lambda *_args, **_kwargs: require()


def _untraced(check: Check) -> Check:
    """Keep the compiler from taking the check apart.

    Nothing is compiled while the compiler has not been imported, and importing it takes a second.
    """
    compiler = sys.modules.get("torch._dynamo")
    reason = "the module is asleep, or its weights are not complete; see wake_up()"
    return check if compiler is None else compiler.disable(check, reason=reason)


def _before_adding(parameter: torch.Tensor, require: Require) -> Callable[[torch.Tensor], None]:
    to_parameter = weakref.ref(parameter)

    def check(_gradient: torch.Tensor) -> None:
        target = to_parameter()
        if target is not None and target.grad is not None:
            require()

    return check


def _with_gradient(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """Parameters whose gradient a backward would add to."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None and parameter.requires_grad:
                yield parameter
