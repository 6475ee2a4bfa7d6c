"""torch.compile inside a meter: inductor is asked for its kernels, and each call of a compiled graph records them.

A session stands between Dynamo and inductor while the meter is open. All that it changes in torch is put back when it
closes, and what was compiled in it is forgotten, since it belongs to the meter.

Works around: inductor goes on to compile its kernels for a device that has to be there, and says of no call which ran.
Until: torch can be asked for the kernels of a graph, and tells a listener of each call.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import CodeType
from typing import Any

import torch
from torch.fx import GraphModule
from torch.optim.optimizer import Optimizer

from flopmeter.as_cuda.autocast import traced_tensors_cast
from flopmeter.compiler import constants, pace
from flopmeter.compiler.breaks import Breaks
from flopmeter.compiler.composites import composites_differentiate
from flopmeter.compiler.frames import AroundTracing, Frames, nothing_around, text_of
from flopmeter.compiler.gpu_answers import GpuAnswers, Wrapper
from flopmeter.compiler.hidden import hooks_hidden, ignore_warning
from flopmeter.compiler.lowering import copied, inline_regions, lower
from flopmeter.compiler.outermost import OutermostCalls
from flopmeter.compiler.pace import undisturbed
from flopmeter.compiler.posing import PosedDevice, posing, unpose
from flopmeter.compiler.replay import Owner, Replay, name_of
from flopmeter.records import CompiledGraph, GraphBreak
from flopmeter.records.compiled import GraphPass
from flopmeter.torch_names import compiler as names
from flopmeter.torch_names.around import around
from flopmeter.torch_names.private import PrivateName, no_dispatch_modes
from flopmeter.trace import triton_kernels
from flopmeter.trace.recorder import Recorder

# Settings that need a device to measure on, or that keep compiled code on disk.
WITHOUT_DEVICE = {"shape_padding": False, "fx_graph_cache": False, "fx_graph_remote_cache": False, "compile_threads": 1}
AOT_SETTINGS = {"enable_autograd_cache": False, "graphsafe_rng_functionalization": False}
MICRO_PIPELINE = "_micro_pipeline_tp"  # asynchronous tensor parallelism
OVERLAP_SCHEDULING = "aten_distributed_optimizations.enable_overlap_scheduling"
MEASURES = ("max_autotune", "max_autotune_gemm", "max_autotune_pointwise")
_OF_COLLECTIVES = {
    MICRO_PIPELINE: (
        "collectives and products of a compiled graph are counted one after another; in parts that overlap they would"
        " take less"
    ),
    OVERLAP_SCHEDULING: (
        "inductor would time products on the GPU, order collectives by them and put some together; without one, they"
        " stay as the graph has them"
    ),
}
"""Settings that are turned off, and what that means."""

# torch warns of hooks on all modules. They are the meter's, which a compiled call does not see (hooks_hidden).
_WARNING_OF_HOOKS = r"(?s).*Using `torch.compile\(module\)` when there are global hooks"
_COMPILES = "torch.compile"  # as torch itself calls it
_WARNING_OF_TF32 = r"TensorFloat32 tensor cores .* available but not enabled"  # the report says so

OnCompiledCall = Callable[[Owner], Callable[[], None]]
"""Told of a module, an optimizer or a function when the first of its compiled kernels runs; what it returns is called
when the compiled call has ended. Dynamo hides the hooks that would tell."""


class _Innermost(threading.local):
    session: Session | None = None


_innermost = _Innermost()  # the innermost session of this thread


class Session:
    """A context: functions that the program compiles in this thread are compiled by inductor for `device`.

    `recorder` gets the kernels; `forget` is told of each tensor that a kernel writes to; `run_eagerly` makes compiled
    functions run eagerly, if this torch lacks a private name. `compiles_all`: modules and optimizer steps that the
    program does not compile are compiled too (outermost.py). The compiler runs inside of `around_tracing`.
    """

    def __init__(
        self,
        recorder: Recorder,
        device: PosedDevice,
        forget: Callable[[torch.Tensor], None],
        run_eagerly: Callable[[], None],
        *,
        compiles_all: bool = False,
        around_tracing: AroundTracing = nothing_around,
        on_compiled_call: OnCompiledCall | None = None,
    ) -> None:
        self._recorder, self._device, self._forget, self._run_eagerly = recorder, device, forget, run_eagerly
        self._around_tracing, self._on_compiled_call = around_tracing, on_compiled_call
        # By the identity of what the compiled call that runs has met: code has no hash if a constant of it has none.
        self._met: dict[int, Callable[[], None]] = {}
        self._compilation = recorder.trace.compilation
        self._left_eager: dict[str, None] = {}  # functions that run eagerly as a whole, and why
        self._outermost = OutermostCalls(recorder.trace, self._left_eager) if compiles_all else None
        self._frames = Frames(around_tracing, self._outermost, self._left_eager)
        self._breaks = Breaks(lambda: self._is_here)
        self._answers = GpuAnswers(device, lambda: self._is_here)
        self._reason: str | None = None  # of the compilation that runs
        self._asked: dict[str, None] = {}  # settings that need a device, which the program wants
        self._has_regions = False
        self._regions = 0
        self._region: int | None = None  # of a graph that runs eagerly now, for the rules to fuse
        self._depth = 0  # compiled calls inside compiled calls
        self._records_gradients = True  # whether autograd was on around the outermost of these calls
        self._hidden = ExitStack()
        self._undo = ExitStack()
        self._until_installed = ExitStack()
        self._is_installed = self._is_called = False
        self._around: Session | None = None

    def __enter__(self) -> Session:
        """Nothing of inductor is imported, which takes a second, until the program needs it."""
        self._around = _innermost.session
        self._undo.callback(setattr, _innermost, "session", self._around)
        _innermost.session = self
        self._undo.callback(ignore_warning(_WARNING_OF_HOOKS))
        if self._outermost:
            self._install()
        else:
            self._until_installed.enter_context(names.NOTE_USE.replaced(self._around_use(names.NOTE_USE.value)))
            self._undo.callback(self._until_installed.close)
            if names.AROUND_CALL.loaded:  # functions may be compiled already
                self._undo.enter_context(names.AROUND_CALL.replaced(self._when_first_called(names.AROUND_CALL.value)))
        if self._outermost:
            self._undo.enter_context(self._outermost)
        return self

    def __exit__(self, *exception: object) -> None:
        self._undo.close()

    @property
    def notes(self) -> Iterator[str]:
        if self._outermost:
            yield from self._outermost.notes
        yield from (f"not compiled, so run eagerly: {what}" for what in self._left_eager)
        if self._is_called and not (self._frames.has_compiled or self._left_eager or self._compilation.failures):
            yield (
                "torch.compile compiled nothing of what was called: it passes over torch's own code, as in torch 2.13"
                " where an nn.Sequential compiles itself (torch.compile(model) does compile it)"
            )
        for failure in self._compilation.failures:
            yield f"not compiled, so fused by the rules: {failure}"
        if measures := [name for name in self._asked if name in MEASURES]:
            yield (
                f"{', '.join(measures)}: inductor would time kernels on the GPU and take the fastest; without one,"
                " matmuls are the library's"
            )
        yield from (f"{name}: {what}" for name, what in _OF_COLLECTIVES.items() if name in self._asked)
        if self._has_regions:
            yield "nested_compile_region: compiled as a part of the graph around it, into which its kernels may fuse"
        uncounted = {name for graph in self._compilation.graphs for name in graph.uncounted}
        if uncounted:
            yield f"uncounted inside of compiled kernels: {', '.join(sorted(uncounted))}"

    @around
    def _around_use(self, plain: Callable[[str], None], api: str) -> None:
        if api == _COMPILES:
            self._install()
        plain(api)

    @around
    def _when_first_called(self, plain: Callable[..., Any], *args: Any) -> Any:
        if self._is_installed:
            return plain(*args)
        self._install()
        return names.AROUND_CALL.value(*args)  # by now another one

    def _install(self) -> None:
        """Asks to be told of what is compiled, before the sessions around this one are: what runs in it is its own."""
        if self._is_installed:
            return
        self._until_installed.close()
        if self._around is not None:
            self._around._install()
        self._is_installed = True
        # Modules of the compiler make tables of torch's functions when they are imported.
        with self._frames.as_torch_is():
            missing = names.missing()
        if missing:
            self._compilation.failures[f"this torch has no {', no '.join(missing)}"] = None
            self._run_eagerly()
            return
        for name, wrapper in (*self._wrappers(), *self._answers.wrappers(), *self._frames.wrappers(), *pace.wrappers()):
            self._undo.enter_context(name.replaced(wrapper(name.value)))
        self._keep_compiler_state()
        self._undo.enter_context(composites_differentiate())
        self._undo.callback(self._hidden.close)
        self._undo.callback(ignore_warning(_WARNING_OF_TF32))

    def _wrappers(self) -> Iterator[tuple[PrivateName, Wrapper]]:
        yield names.COMPILE_FX, self._in_place_of_compile_fx
        yield names.RECOMPILE_REASONS, self._around_reasons
        yield names.AROUND_CALL, self._around_call
        yield names.END_OF_GRAPH, self._breaks.noting
        yield names.CREATE_PROXY, constants.around_create_proxy

    def _keep_compiler_state(self) -> None:
        """Functions that are compiled from now on are forgotten when the session ends, and the counters of the compiler
        are put back. Functions that an outer meter has compiled are forgotten now: their kernels would go to that meter
        alone."""
        codes = {}
        for name in (names.INPUT_CODES, names.OUTPUT_CODES):
            _forget_codes(name.value)
            codes[name] = names.TRACKER.value()
            self._undo.enter_context(name.replaced(codes[name]))
        counters = names.COUNTERS.value
        before = {key: Counter(count) for key, count in counters.items()}
        self._undo.enter_context(names.DYNAMIC_STATE.replaced(None))

        def restore() -> None:
            for tracker in codes.values():
                _forget_codes(tracker)
            counters.clear()
            counters.update(before)

        self._undo.callback(restore)

    @property
    def _is_here(self) -> bool:
        return self._frames.is_here

    @around
    def _in_place_of_compile_fx(
        self, plain: Callable[..., Any], model: Any, inputs: Any, *args: Any, config_patches: Any = None, **options: Any
    ) -> Any:
        is_own = "inner_compile" in options or args  # a call of inductor's own
        if is_own or not self._is_here:
            return plain(model, inputs, *args, config_patches=config_patches, **options)
        if isinstance(model, GraphModule):
            self._has_regions |= inline_regions(model)
        as_it_was = copied(model) if isinstance(model, GraphModule) else None
        settings = self._settings(config_patches or {})
        function, reason, self._reason = _function(), self._reason, None
        start = functools.partial(CompiledGraph, function=function, recompiled_because=reason)
        inner = functools.partial(self._compile, start=start, breaks=self._breaks.before(model))
        graphs = len(self._compilation.graphs)
        try:
            # Nearly always Dynamo calls; DDP's optimizer does when its parts run, with the recorder on.
            with (
                self._frames.as_torch_is(),
                traced_tensors_cast(False),
                no_dispatch_modes(),
                names.FUNCTORCH_CONFIG.value(**AOT_SETTINGS),
            ):
                return plain(model, inputs, inner_compile=inner, config_patches=settings, **options)
        except names.RESTART_ANALYSIS.value:
            self._reason = reason
            raise
        except Exception as error:
            if as_it_was is None or isinstance(error, names.LEFT_TO_DYNAMO.value):
                raise
            del self._compilation.graphs[graphs:]
            self._note_failure(function, error)
            return self._eagerly(as_it_was)

    def _settings(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Inductor's settings without what needs a device. Notes for the report what the program has asked for."""
        set_now = functools.partial(_setting, names.INDUCTOR_CONFIG.owner, asked)
        self._asked |= dict.fromkeys(filter(set_now, (*MEASURES, *_OF_COLLECTIVES)))
        # The ops of micro-pipelining need symmetric memory to be lowered into kernels.
        off = (*MEASURES, MICRO_PIPELINE, *filter(set_now, (OVERLAP_SCHEDULING,)))  # not every torch has the last
        return {**asked, **WITHOUT_DEVICE, **dict.fromkeys(off, False)}

    @undisturbed  # a backward graph is compiled when it is first called
    def _compile(
        self,
        module: GraphModule,
        inputs: Any,
        *,
        start: functools.partial[CompiledGraph],
        breaks: tuple[GraphBreak, ...],
        **options: Any,
    ) -> Any:
        """Runs in place of inductor's compilation of one graph."""
        is_backward = options.get("is_backward", False)
        as_it_was = copied(module) if is_backward else None
        part: GraphPass = "backward" if is_backward else "inference" if options.get("is_inference") else "forward"
        graphs, cudagraphs = self._compilation.graphs, options.get("cudagraphs")
        try:
            with self._around_tracing(), posing(self._device), triton_kernels.without_device():
                lowered = lower(module, inputs, options)
            graph = start(
                number=len(graphs),
                part=part,
                breaks=() if is_backward else breaks,
                replays=bool(getattr(cudagraphs, "value", cudagraphs)),
            )
            replay = Replay(lowered, graph, self._recorder, self._forget, self._meet)
            replay.plan_for(inputs)
        except Exception as error:
            if as_it_was is None:  # the whole function runs eagerly
                raise
            self._note_failure(start.keywords["function"], error)
            unpose(as_it_was)
            return self._eagerly(as_it_was)
        graphs.append(graph)
        setattr(replay, names.BOXED, True)
        return replay

    @around
    def _around_reasons(self, plain: Callable[..., Any], *args: Any, **options: Any) -> Any:
        found = plain(*args, **options)
        self._reason = "; ".join(" ".join(str(each).split()) for each in found) or None
        return found

    def _around_call(self, plain: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """torch calls this with a setting before each compiled call, and after it with what it returned before."""

        def around(setting: Any) -> Any:
            if isinstance(setting, _Entered):
                self._depth -= 1
                before = plain(setting.setting)
                if self._depth == 0:
                    self._hidden.close()
                    self._end_call()
                return before
            if not self._is_here:
                return plain(setting)
            self._is_called = True
            if self._depth == 0:
                self._reason, self._records_gradients = None, torch.is_grad_enabled()
                self._hidden.enter_context(hooks_hidden())
                if self._outermost:
                    self._hidden.enter_context(self._outermost.hidden())
                owner = getattr(sys._getframe(1).f_locals.get("fn"), "__self__", None)
                if isinstance(owner, Optimizer):  # its step() is compiled: of a fused one no graph may come
                    self._hidden.enter_context(self._recorder.in_step(owner))
                    self._meet(owner)
            self._depth += 1
            return _Entered(plain(setting))

        return around

    def _meet(self, owner: Owner) -> None:
        is_part = isinstance(owner, CodeType) and self._met  # what Dynamo makes of a function after a graph break
        if self._on_compiled_call is not None and id(owner) not in self._met and not is_part:
            with torch.set_grad_enabled(self._records_gradients):  # of the caller: autograd turns it off in here
                self._met[id(owner)] = self._on_compiled_call(owner)

    def _end_call(self) -> None:
        self._breaks.end_call(self._compilation.graphs)
        ends, self._met = list(self._met.values()), {}
        if sys.exc_info()[0] is None:
            for end in ends:
                end()

    def _eagerly(self, graph: GraphModule) -> Callable[..., Any]:
        """Runs a graph that did not compile, op by op, as a region that the rules fuse."""

        def run(*args: Any) -> Any:
            before = self._region
            if not self._regions:
                self._recorder.watch_regions(lambda: self._region)
            self._regions += 1
            self._region = self._regions if before is None else before
            try:
                return graph(*args)
            finally:
                self._region = before

        return run

    def _note_failure(self, function: str, error: Exception) -> None:
        self._compilation.failures[f"{function}: {text_of(error)}"] = None


def _setting(config: Any, asked: dict[str, Any], name: str) -> Any:
    """A setting of inductor's, which may be part of a group; None if this torch has it not."""
    set_for_all = functools.reduce(lambda held, part: getattr(held, part, None), name.split("."), config)
    return asked.get(name, set_for_all)


class _Entered:
    """What a compiled call is given on entering and gives back on leaving."""

    def __init__(self, setting: Any) -> None:
        self.setting = setting


def _forget_codes(tracker: Any) -> None:
    """Makes Dynamo compile these functions again when they are next called."""
    for reference in tracker.seen:
        code = reference()
        if isinstance(code, CodeType):
            names.RESET_CODE.value(code)


def _function() -> str:
    """'name (file:line)' of the function that Dynamo is tracing."""
    context = names.TRACING_CONTEXT.value()
    code = context.traced_code[0] if context is not None and context.traced_code else None
    return name_of(code) if code else "a graph"
