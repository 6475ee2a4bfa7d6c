"""Which module an op belongs to, as a dotted path, in the forward pass and in the backward pass.

Forward: global module hooks keep a stack of the modules that run. Backward: each autograd node has a sequence number,
which grows with time. A log of the numbers at which modules were entered and left gives the module that made the node.
So nothing is attached to the user's tensors or modules, and custom autograd functions work as well.
"""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_right
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from flopmeter.torch_names.private import COMPILED_MODULE, graph_task, is_compiled_backward, next_node_number


class ModulePaths:
    """A context that knows the path of the running module, such as `Bert.encoder.layers.0`.

    The hooks see modules of all threads. A module call in another thread where `is_on()` is false is counted in
    `missed`; in this one it is a function of the program that flopmeter looks into.
    """

    def __init__(self, on_leave_outermost: Callable[[nn.Module], None], is_on: Callable[[], bool]) -> None:
        self.path = ""  # of the innermost module whose forward runs; '' outside of modules
        self.calls = 0  # module calls so far
        self.missed = 0
        self.first_missed = ""  # the class of the outermost of them
        self._thread = threading.get_ident()
        self._stack: list[tuple[str, nn.Module]] = []
        self._entered: list[int] = []  # the backward pass in which each of them was called; -1: in none
        self._names: dict[int, tuple[weakref.ref[nn.Module], str]] = {}  # id -> last path
        self._below: dict[int, tuple[weakref.ref[nn.Module], dict[int, str]]] = {}  # id -> names of those below, by id
        self._roots: dict[str, int] = {}  # class name -> how many outermost modules have it
        self._numbers: list[int] = []  # sequence numbers at which the path changed ...
        self._paths: list[str] = []  # ... and what it changed to
        self._on_leave_outermost = on_leave_outermost
        self._is_on = is_on
        self._undo = ExitStack()

    def __enter__(self) -> ModulePaths:
        self._thread = threading.get_ident()
        self._log()
        pre = register_module_forward_pre_hook(self._enter_module)
        post = register_module_forward_hook(self._leave_module, always_call=True)
        self._undo.callback(pre.remove)
        self._undo.callback(post.remove)
        return self

    def __exit__(self, *exception: object) -> None:
        self._undo.close()
        self._stack.clear()
        self._entered.clear()
        self.path = ""

    @property
    def outermost(self) -> nn.Module | None:
        """The outermost module whose forward runs."""
        return self._stack[0][1] if self._stack else None

    @property
    def depth(self) -> int:
        """How many modules run, one in the other."""
        return len(self._stack)

    def was_entered_in(self, backward_pass: int) -> bool:
        """Whether the innermost module that runs was called in that backward pass, rather than around it."""
        return bool(self._entered) and self._entered[-1] == backward_pass

    def path_of_node(self, node: Any) -> str | None:
        """The path of the module whose forward made the autograd node. None for a gradient accumulation, which
        belongs to no forward op, and for a node that is older than this context."""
        index = bisect_right(self._numbers, node._sequence_nr()) - 1
        # Accumulation nodes carry the largest number of all, so that they run as early as possible.
        is_accumulation = node._sequence_nr() > next_node_number()
        return None if index < 0 or is_accumulation else self._paths[index]

    def _enter_module(self, module: nn.Module, _inputs: Any) -> None:
        if is_compiled_backward():
            return  # the backward pass itself, which torch makes a module
        if not self._is_on():
            if threading.get_ident() != self._thread:
                self.first_missed = self.first_missed or type(module).__name__
                self.missed += 1
            return
        self.calls += 1
        self.path = self.path_of(module)
        self._stack.append((self.path, module))
        self._entered.append(graph_task())
        self._log()

    def _leave_module(self, module: nn.Module, _inputs: Any, _output: Any) -> None:
        # A module whose own pre-hook raised never got onto the stack.
        if self._stack and self._stack[-1][1] is module and self._is_on():
            self._stack.pop()
            self._entered.pop()
            self.path = self._stack[-1][0] if self._stack else ""
            self._log()
            if not self._stack:
                self._on_leave_outermost(module)

    def _log(self) -> None:
        number = next_node_number()
        if self._numbers and self._numbers[-1] == number:
            self._paths[-1] = self.path
        else:
            self._numbers.append(number)
            self._paths.append(self.path)

    def path_of(self, module: nn.Module) -> str:
        """The path that the module has, called from where the program is."""
        parent_path, parent = self._stack[-1] if self._stack else ("", None)
        if parent is not None and compiled_module(parent) is module:
            return parent_path
        known = self._last_path(module)
        if known is not None and _is_child(known, parent_path):
            return known
        path = self._child_path(module, parent_path, parent)
        for each in _with_compiled(module):
            self._names[id(each)] = (weakref.ref(each), path)
        return path

    def _last_path(self, module: nn.Module) -> str | None:
        """The path of an earlier call. One that torch.compile has wrapped is the same module as its wrapper."""
        found = ((each, self._names.get(id(each))) for each in _with_compiled(module))
        return next((known[1] for each, known in found if known is not None and known[0]() is each), None)

    def _child_path(self, module: nn.Module, parent_path: str, parent: nn.Module | None) -> str:
        name = None if parent is None else self._name_below(compiled_module(parent) or parent, module)
        if name is not None:
            return f"{parent_path}.{name}"
        known = self._last_path(module)
        if known is not None:  # called from outside, as a recomputation does
            return known
        return self._root_path(class_of(module), parent_path)

    def _name_below(self, parent: nn.Module, module: nn.Module) -> str | None:
        """The first name of the module below the parent. One walk over all submodules finds the names of all of them;
        it is repeated for a module that was moved or added since."""
        walked = self._below.get(id(parent))
        if walked is not None and walked[0]() is parent:
            name = walked[1].get(id(module))
            if name is not None and _submodule(parent, name) is module:
                return name
        names: dict[int, str] = {}
        for name, child in parent.named_modules(remove_duplicate=False):
            if name:
                names.setdefault(id(child), name)
        self._below[id(parent)] = (weakref.ref(parent), names)
        return names.get(id(module))

    def _root_path(self, name: str, parent_path: str) -> str:
        path = f"{parent_path}.{name}" if parent_path else name
        self._roots[path] = self._roots.get(path, 0) + 1
        return path if self._roots[path] == 1 else f"{path} ({self._roots[path]})"


class CompiledRegions:
    """Which compiled region of the forward pass made an autograd node. The region of each op is noted as it runs."""

    def __init__(self) -> None:
        self._numbers = [0]  # sequence numbers at which the region changed ...
        self._regions: list[int | None] = [None]  # ... and what it changed to
        self._next = next_node_number()  # the number that the first node of the next op will get

    def note(self, region: int | None) -> None:
        """An op of this region ran. If it made an autograd node, that node exists by now."""
        if region != self._regions[-1]:
            self._numbers.append(self._next)
            self._regions.append(region)
        self._next = next_node_number()

    def of_node(self, node: Any) -> int | None:
        """The region of a node's forward op; None for gradient accumulation."""
        if node is None or (number := node._sequence_nr()) > next_node_number():
            return None
        return self._regions[bisect_right(self._numbers, number) - 1]


def compiled_module(module: nn.Module) -> nn.Module | None:
    """The module that torch.compile wrapped in this one; None for others. (To import the wrapper's class is to import
    the compiler.)"""
    is_wrapper = type(module).__name__ == "OptimizedModule"
    return getattr(module, COMPILED_MODULE, None) if is_wrapper else None


def class_of(module: nn.Module) -> str:
    """The name of the class that the program's author gave it."""
    return type(compiled_module(module) or module).__name__


def _with_compiled(module: nn.Module) -> tuple[nn.Module, ...]:
    """The module, and the one that it wraps."""
    inner = compiled_module(module)
    return (module,) if inner is None else (module, inner)


def _is_child(path: str, parent_path: str) -> bool:
    """Whether the known path still fits this call: the path lies below the running module, or no module runs."""
    return not parent_path or path.startswith(parent_path + ".")


def _submodule(parent: nn.Module, name: str) -> nn.Module | None:
    try:
        return parent.get_submodule(name)
    except AttributeError:
        return None
