"""What raises while asleep, before a kernel can touch memory that is not there.

Falling asleep installs pre-hooks for ``state_dict`` and ``load_state_dict`` on every submodule and
for ``step`` on every optimizer, and shadows ``forward`` (not by a hook: compiled code skips hooks,
but looks again at a module whose ``forward`` is replaced), ``_apply`` (``.to()``, ``.float()``) and
deep copying. Waking removes them all, so they cost nothing while awake. They ask the sleeper each
time, so one that an interrupt left behind is harmless.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NoReturn

from torch import nn

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.utils.hooks import RemovableHandle

_SHADOWED = ("forward", "_apply", "__deepcopy__")


class Check:
    """Calls back before use; being part of a pickled or deep-copied module counts as use."""

    def __init__(self, require: Callable[[], None]) -> None:
        self._require = require

    def __call__(self, *_args: Any, **_kwargs: Any) -> None:
        self._require()

    def __reduce_ex__(self, _protocol: Any) -> NoReturn:
        self._require()
        # Reached only when the memory is there again and a leftover hook is pickled with its
        # module.
        raise TypeError("a module cannot be pickled between sleep and wake; wake it up first")


class Shadow:
    """Stands before one method of one module."""

    def __init__(self, require: Callable[[], None], module: nn.Module, name: str) -> None:
        self._require = require
        self._module = module
        self._name = name
        self._replaced = module.__dict__.get(name)
        # Traced code would take the check apart; run it as it is. Nothing is compiled while the
        # compiler has not been imported, and importing it takes a second.
        compiler = sys.modules.get("torch._dynamo")
        self._installed = compiler.disable(self._call) if compiler is not None else self._call
        module.__dict__[name] = self._installed

    def remove(self) -> None:
        """Put back what was there, unless somebody has put something else there since."""
        attributes = self._module.__dict__
        if attributes.get(self._name) is not self._installed:
            return
        if self._replaced is None:
            del attributes[self._name]
        else:
            attributes[self._name] = self._replaced

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        self._require()
        if self._replaced is not None:
            return self._replaced(*args, **kwargs)
        method = getattr(type(self._module), self._name, None)
        if method is not None:
            return method(self._module, *args, **kwargs)
        self.remove()  # Left behind: copy as if it had never been there.
        return copy.deepcopy(self._module, *args)


class Guard:
    """The hooks of one sleeper."""

    def __init__(
        self,
        modules: Iterable[nn.Module],
        optimizers: Iterable[Optimizer],
        require_module: Callable[[], None],
        require_optimizer: Callable[[], None],
    ) -> None:
        """Remember whom to guard.

        Args:
            require_module: raises unless the modules' tensors are mapped and valid.
            require_optimizer: the same for a step of the optimizers.
        """
        self._roots = tuple(modules)
        self._optimizers = tuple(optimizers)
        self._require_module = require_module
        self._check = Check(require_module)
        self._check_step = Check(require_optimizer)
        self._handles: list[RemovableHandle] = []
        self._shadows: list[Shadow] = []

    @property
    def is_installed(self) -> bool:
        """Whether any hook is in place."""
        return bool(self._handles or self._shadows)

    def install(self) -> None:
        """Put every hook in place. Repeating it changes nothing."""
        if self.is_installed:
            return
        for module in self._submodules():
            self._handles.append(module.register_state_dict_pre_hook(self._check))
            self._handles.append(module.register_load_state_dict_pre_hook(self._check))
            for name in _SHADOWED:
                self._shadows.append(Shadow(self._require_module, module, name))
        for optimizer in self._optimizers:
            self._handles.append(optimizer.register_step_pre_hook(self._check_step))

    def remove(self) -> None:
        """Take every hook away. Repeating it changes nothing."""
        while self._shadows:
            self._shadows[-1].remove()
            self._shadows.pop()
        while self._handles:
            self._handles[-1].remove()
            self._handles.pop()

    def _submodules(self) -> list[nn.Module]:
        return list(
            {id(module): module for root in self._roots for module in root.modules()}.values()
        )
