"""Every private name of torch.compile (Dynamo, AOTAutograd, inductor) that flopmeter uses, and what for. Nothing is
imported before a program compiles. Read from torch 2.11 to 2.15."""

from __future__ import annotations

from functools import partial

from flopmeter.torch_names.private import NAMES, listed

COMPILER = "what torch.compile launches, asked of the compiler itself"
_name = partial(listed, COMPILER)
_COMPILE_FX = "torch._inductor.compile_fx"

COMPILE_FX = _name(_COMPILE_FX, "compile_fx", "where Dynamo hands a graph to inductor")
JOINT_PASSES = _name(_COMPILE_FX, "_recursive_joint_graph_passes", "the first passes that ask for the device")
NO_HOOKS = tuple(
    _name(module, attribute, "hides the hooks of the meter from Dynamo")
    for module, attribute in (
        ("torch.nn.modules.module", "_global_forward_pre_hooks"),
        ("torch.nn.modules.module", "_global_forward_hooks"),
        ("torch.optim.optimizer", "_global_optimizer_pre_hooks"),
        ("torch.optim.optimizer", "_global_optimizer_post_hooks"),
    )
)
PARTITION = _name(_COMPILE_FX, "partition_fn", "what is recomputed in the backward graph")
SAVES_GENERATORS = _name(
    "torch._functorch.partitioners", "functionalize_rng_ops", "random ops that are computed again in the backward graph"
)
FIRST_RESULTS = _name(
    "torch._functorch._aot_autograd.runtime_wrappers",
    "FakifiedOutWrapper._compute_output_meta_with_inductor_strides",
    "compiled functions in DistributedDataParallel, which torch splits at the buckets of gradients",
)
DEDUCE_VALUE = _name(
    "torch._inductor.fx_passes.joint_graph",
    "UniformValueConstantFolder._deduce_value",
    "constants, computed on the device",
)
POST_PASSES = _name(_COMPILE_FX, "_recursive_post_grad_passes", "passes before lowering")
NOTE_STRIDES = _name(_COMPILE_FX, "_recursive_record_original_output_strides", "strides that the caller expects")
VIEW_TO_RESHAPE = _name(_COMPILE_FX, "view_to_reshape", "passes before lowering")
FAKE_TENSOR_PROP = _name(_COMPILE_FX, "fake_tensor_prop", "shapes after the passes")
PADDING_OFF = _name(_COMPILE_FX, "maybe_disable_comprehensive_padding", "which buffers get padded strides")
SHAPE_ENV_OF = _name(_COMPILE_FX, "shape_env_from_inputs", "symbolic sizes")
GRAPH_LOWERING = _name("torch._inductor.graph", "GraphLowering", "lowers a graph to loops and library calls")
_name("torch._inductor.graph", "GraphLowering._update_scheduler", "fuses them")
DECOMPOSES_FOR_GPU = _name("torch._inductor.decomposition", "is_gpu", "what becomes of a convolution's bias")
SCHEDULER_HAS_TRITON = _name("torch._inductor.scheduler", "has_triton", "refuses without Triton")
TRITON_HASH = _name("torch.utils._triton", "triton_hash_with_backend", "what it asks of Triton for a template")
LOADS_CODE = _name("torch._inductor.codecache", "PyCodeCache.load", "where it loads what it wrote for a template")
EXTERN_NODE = _name("torch._inductor.scheduler", "ExternKernelSchedulerNode", "which kernels are libraries'")
LOOPS_NODE = _name("torch._inductor.scheduler", "SchedulerNode", "which kernels inductor writes")
_name("torch._inductor.scheduler", "SchedulerNode._body", "the ops of a loop", on_instances=True)
_name(
    "torch._inductor.scheduler", "SchedulerNode.decide_inplace_update", "which results take the memory of what is read"
)
WRAPPER_CODE = _name("torch._inductor.codegen.wrapper", "PythonWrapperCodegen", "what asks which buffers are free")
_name("torch._inductor.codegen.wrapper", "PythonWrapperCodegen.can_reuse", "whether a buffer is free")
NOP_NODE = _name("torch._inductor.scheduler", "NopKernelSchedulerNode", "which nodes launch nothing")
FUSED_NODE = _name("torch._inductor.scheduler", "FusedSchedulerNode", "which kernels are fused")
MIXED_ORDERS = _name("torch._inductor.scheduler", "FusedMixOrderReductions", "which kernels sum rows and columns")
_name("torch._inductor.ir", "ComputedBuffer._split_size", "which sums are split")
IR = _name("torch._inductor.ir", "IRNode", "what a graph is lowered to")
MEMORY_DEP = _name("torch._inductor.dependencies", "MemoryDep", "which elements a kernel reads")
UPDATE_VALUES = _name(
    "torch._inductor.fx_utils", "FakeTensorUpdater.incremental_update", "which looks for nodes that were changed"
)
MORE_MEMORY = _name(
    "torch._inductor.scheduler", "Scheduler.can_fusion_increase_peak_memory", "which goes through all that kernels read"
)
STAR_DEP = _name("torch._inductor.dependencies", "StarDep", "which buffers are listed whole")
WEAK_DEP = _name("torch._inductor.dependencies", "WeakDep", "which dependencies are of order alone")
VIRTUALIZED = _name("torch._inductor.virtualized", "V", "the compiler's own globals")
DEBUG_CONTEXT = _name("torch._inductor.debug", "DebugContext", "the compiler's own globals")
INDUCTOR_CONFIG = _name("torch._inductor.config", "patch", "switches off what needs a device, and caches on disk")
FUNCTORCH_CONFIG = _name("torch._functorch.config", "patch", "switches off caches on disk")
DEVICE_PROPERTIES = _name("torch._inductor.runtime.hints", "DeviceProperties.create", "the device's SMs")
CUDA_WORKER = _name("torch._dynamo.device_interface", "CudaInterface.Worker.current_device", "the device's index")
EXCHANGE_DEVICE = tuple(
    _name("torch.cuda", attribute, "makes a device the current one")
    for attribute in ("_exchange_device", "_maybe_exchange_device")
)
AVOID_DEVICE_INIT = _name(
    "torch._subclasses.fake_tensor", "FakeTensorMode.avoid_device_init", "constants are not made on the missing device"
)
START_OF_DEVICE = _name("torch._subclasses.fake_tensor", "init_gpu_context", "starts a device, which is not there")
DEVICE_CACHES = _name("torch._inductor", "utils", "what it remembers of a device")
_name("torch._subclasses.fake_tensor", "FakeTensor", "tensors that pose as those of the device")
_name("torch", "Tensor._make_subclass", "what C++ takes a fake tensor for")
BOXED = "_boxed_call"  # on a compiled graph: it takes a list of arguments, which it may empty
_name("torch._inductor.output_code", f"CompiledFxGraph.{BOXED}", "lets a graph free its arguments", on_instances=True)
SET_CAPTURABLE = _name(
    "torch._dynamo.variables.optimizer", "OptimizerVariable._set_capturable", "puts step counters on the device"
)
INPUT_CODES = _name("torch._dynamo.convert_frame", "input_codes", "which functions were compiled")
OUTPUT_CODES = _name("torch._dynamo.convert_frame", "output_codes", "which functions were compiled")
TRACKER = _name("torch._dynamo.convert_frame", "Tracker", "which functions were compiled")
RESET_CODE = _name("torch._dynamo.eval_frame", "reset_code", "forgets what was compiled of a function")
CONVERT_FRAME = _name("torch._dynamo.convert_frame", "CatchErrorsWrapper.__call__", "which functions Dynamo compiles")
END_OF_GRAPH = _name("torch._dynamo.output_graph", "OutputGraph.compile_subgraph", "where and why Dynamo ends a graph")
NOT_COMPILED = _name("torch._dynamo.convert_frame", "format_error_msg", "which functions Dynamo gives up, and why")
RESTART_ANALYSIS = _name("torch._dynamo.exc", "RestartAnalysis", "when Dynamo traces a function once more")
LEFT_TO_DYNAMO = _name(
    "torch._dynamo.exc", "exceptions_allowed_to_be_fallback", "errors of a compiler at which Dynamo ends the graph"
)
FRAME_STRATEGY = _name("torch._dynamo.types", "FrameExecStrategy", "which functions Dynamo leaves alone")
FRAME_ACTION = _name("torch._dynamo.types", "FrameAction", "which functions Dynamo leaves alone")
COUNTERS = _name("torch._dynamo.utils", "counters", "what the compiler counts, to be put back")
DYNAMIC_STATE = _name("torch._dynamo.pgo", "_CODE_STATE", "which sizes changed, to be put back")
RECOMPILE_REASONS = _name(
    "torch._dynamo.convert_frame", "get_and_maybe_log_recompilation_reasons", "which guard made it compile again"
)
CONVOLUTION_LAYOUT = _name(
    "torch._C", "_conv_determine_backend_memory_format", "the layout of what a convolution writes"
)
DECOMPOSITIONS = _name("torch._decomp", "global_decomposition_table", "which ops have Python kernels on meta")
_name("torch._ops", "OpOverload.py_kernels", "Python kernels of composites on meta", on_instances=True)
_name("torch._ops", "OpOverload._dispatch_cache", "which kernel of these runs", on_instances=True)
GUARD_IDENTITY = _name(
    "torch._dynamo.guards", "GuardBuilder.id_match_unchecked", "functions of torch may be replaced by ours"
)
TRACING_CONTEXT = _name("torch._guards", "TracingContext.try_get", "which function a graph is of")
RULES = _name(
    "torch._dynamo.trace_rules", "get_torch_obj_rule_map", "its rules by function, made when they are first asked for"
)
HANDLERS = _name(
    "torch._dynamo.variables.torch",
    "TorchInGraphFunctionVariable._get_handlers",
    "its other table of torch's functions, made where it first compiles",
)
TENSOR_FACTS = _name(
    "torch._dynamo.variables.tensor", "TensorVariable.specialize", "what a traced tensor tells a program"
)
TRACED_CONSTANT = _name("torch._dynamo.variables", "ConstantVariable.create", "what a traced tensor tells a program")
CREATE_PROXY = _name("torch._dynamo.output_graph", "SubgraphTracer.create_proxy", "what enters a graph that is traced")
HAS_TRITON = _name("torch.utils._triton", "has_triton", "whether Dynamo takes Triton kernels for what they are")
TRITON_KERNELS = _name(
    "torch._higher_order_ops.triton_kernel_wrap", "kernel_side_table", "the program's Triton kernels, by number"
)
NOTE_USE = _name(
    "torch._C", "_log_api_usage_once", "told of each use of torch.compile, by whatever name the program knows it"
)
AROUND_CALL = _name("torch._dynamo.eval_frame", "set_skip_guard_eval_unsafe", "called before and after compiled calls")


def missing() -> tuple[str, ...]:
    """What this torch lacks of them. Imports the compiler."""
    absent = []
    for name in NAMES[COMPILER]:
        try:
            _ = name.on_instances or name.value
        except (AttributeError, ImportError):
            absent.append(name.path)
    return tuple(absent)
