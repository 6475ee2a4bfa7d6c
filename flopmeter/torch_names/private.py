"""Every private name that flopmeter uses, of torch and of transformers: what for, and what is lost without it.

One table, `NAMES`, by feature. The emulation (`as_cuda`) leaves a feature out where a name is missing, and says so.
Without a name that metering itself needs, importing flopmeter fails and says what the name is for. A test looks for
private names that are not here. Read from torch 2.11 to 2.15.
"""

from __future__ import annotations

import importlib
import operator
import sys
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch

METERING = "metering"
WORLDS = "worlds of ranks (flopmeter.distributed)"
PROPAGATION = "metering DTensors without what they run on the host to learn shapes"
BUFFERS = "the values of buffers that Hugging Face models compute when they are made"
DOUBLE_BACKWARD = "backward passes with create_graph=True, told from recomputation by a checkpoint"
CUSTOM_OPS = "register_cost of what torch.library.custom_op returns"
PYTHON_OPS = "the kernels of custom ops in Python"
FLASH_KERNELS = "FlashAttention-3 and -4 by torch.nn.attention.activate_flash_attention_impl"
MODEL_HUBS = "targets such as hf:llama"
STATIC_CACHES = "compiled decoding of Hugging Face models with a static cache"
BEAMS = "beam search of Hugging Face models to its last token"
DISPATCHER = "everything"  # of the emulation
ATTENTION = "the attention backend (scaled_dot_product_attention)"
JAGGED = "the attention backend of jagged tensors (torch.nested)"
COMPOSITES = "dropout, RMSNorm, batch norm, softmax and mish as CUDA kernels"
RNN = "cuDNN RNNs and fused RNN cells"
FUNCTORCH = "dropout, RMSNorm and mish under torch.func transforms"
AUTOCAST = "torch.autocast('cuda')"
CHECKPOINT = "recomputation under autocast in activation checkpointing"
FOREACH = "foreach, fused and capturable optimizers and gradient clipping"
MHA_FAST_PATH = "the fused inference path of nn.MultiheadAttention and nn.TransformerEncoderLayer"
FLEX_ATTENTION = "flex_attention"
TRITON = "Triton kernels of the program"
GROUPED = "grouped products (grouped_mm)"
COMPILE = "the marks of torch.compile regions"
SCALED = "scaled products into a given tensor (_scaled_mm.out)"
INT8 = "int8 products of out_dtype"
INT4 = "the shape of int4 weight-only matrix products"
CTC_LOSS = "the backward of ctc_loss"
COMPILED_AUTOGRAD = "compiled autograd"
TRACES = "torch.jit.trace of what is on the GPU"
AOT_INDUCTOR = "packages of AOTInductor"
TEXT_KERNELS = "stand-ins for kernels that are given to torch as text, or a refusal by name"
SPARSE = "sparse gradients of embeddings"
GRADIENTS = "gradients of margin losses, of fractional pooling in three dimensions and of nn.Unfold"
SAMPLES = "samples of Dirichlet, beta and binomial distributions, and their gradients"
FAKE_QUANTIZE = "fake quantization"
SAME_MEMORY = "whether two tensors are the same memory"


@dataclass(frozen=True)
class PrivateName:
    """A private attribute, `module.attribute`, and what it is used for."""

    module: str
    attribute: str  # may be dotted: a class and its method
    used: str
    on_instances: bool = False  # no class tells of it

    @property
    def path(self) -> str:
        return f"{self.module}.{self.attribute}"

    @property
    def loaded(self) -> bool:
        """Whether the program has imported its module."""
        return self.module in sys.modules

    @property
    def owner(self) -> Any:
        """The module, imported now if need be."""
        return importlib.import_module(self.module)

    @property
    def parent(self) -> Any:
        """What has the attribute: the module, or a class in it."""
        path, _, _ = self.attribute.rpartition(".")
        return operator.attrgetter(path)(self.owner) if path else self.owner

    @property
    def own_name(self) -> str:
        """Its name in the parent."""
        return self.attribute.rpartition(".")[2]

    def replaced(self, value: Any) -> AbstractContextManager[Any]:
        """In this context the value is in its place."""
        return mock.patch.object(self.parent, self.own_name, value)

    @property
    def value(self) -> Any:
        """Raises AttributeError where this torch lacks it."""
        try:
            return operator.attrgetter(self.attribute)(self.owner)
        except AttributeError as missing:  # or a module that its package leaves to the program to import
            try:
                return importlib.import_module(self.path)
            except ModuleNotFoundError:
                raise missing from None

    def present(self) -> bool:
        """Whether this torch has it. A module that the program has not imported yet counts as having it."""
        if self.on_instances:
            return True
        try:
            _ = self.value if self.loaded else None
        except AttributeError:
            return False
        return True


NAMES: dict[str, tuple[PrivateName, ...]] = {}
"""What is lost without them: the names."""


def listed(feature: str, module: str, attribute: str, used: str, *, on_instances: bool = False) -> PrivateName:
    """The name, entered in the table."""
    name = PrivateName(module, attribute, used, on_instances)
    NAMES[feature] = (*NAMES.get(feature, ()), name)
    return name


def needed(module: str, attribute: str, used: str, feature: str = METERING) -> Any:
    """The attribute, which enters the table. Raises ImportError, saying what is lost, where this torch lacks it."""
    name = listed(feature, module, attribute, used)
    try:
        return name.value
    except (AttributeError, ModuleNotFoundError):
        raise ImportError(
            f"torch {torch.__version__} has no {name.path}, which tells flopmeter {used}; "
            "flopmeter is known to run on torch 2.11 to 2.15"
        ) from None


def lost(*features: str) -> tuple[str, ...]:
    """A note for each of the features for which a name is missing, in this torch or in another library that the program
    has imported."""
    absent = {feature: [name.path for name in NAMES[feature] if not name.present()] for feature in features}
    return tuple(f"without {feature}: there is no {', no '.join(paths)}" for feature, paths in absent.items() if paths)


listed(METERING, "torch._ops", "OpOverload._overloadname", "names of ops", on_instances=True)
PROPAGATE = listed(
    PROPAGATION,
    "torch.distributed.tensor._sharding_prop",
    "ShardingPropagator._propagate_tensor_meta_non_cached",
    "where DTensor runs an op on fake tensors",
)
listed(BUFFERS, "transformers.modeling_utils", "PreTrainedModel._init_weights", "what fills buffers")
listed(BUFFERS, "torch.nn", "Module._buffers", "buffers by name", on_instances=True)
listed(BUFFERS, "torch.nn", "Module._parameters", "weights by name", on_instances=True)
listed(BUFFERS, "torch.nn", "Module._non_persistent_buffers_set", "which no file holds", on_instances=True)
listed(DOUBLE_BACKWARD, "torch.autograd.graph", "_engine_run_backward", "with what it was called")
listed(CUSTOM_OPS, "torch._library.custom_ops", "CustomOpDef._opoverload", "its op", on_instances=True)
PYTHON_KERNELS = listed(PYTHON_OPS, "torch.library", "_impls", "which ops have a Python function as a kernel")
CUSTOM_DEFINITIONS = listed(PYTHON_OPS, "torch._library.custom_ops", "OPDEFS", "what torch.library.custom_op made")
listed(PYTHON_OPS, "torch._library.custom_ops", "CustomOpDef._abstract_fn", "its fake kernel", on_instances=True)
FLASH_REGISTRY = listed(FLASH_KERNELS, "torch.nn.attention", "_registry", "which are active in the place of torch's")
FLASH_IMPLEMENTATIONS = (
    listed(FLASH_KERNELS, "torch.nn.attention", "_fa3", "what torch keeps of the library"),
    listed(FLASH_KERNELS, "torch.nn.attention", "_fa4", "what torch keeps of the library"),
)
listed(MODEL_HUBS, "transformers.modeling_utils", "PreTrainedModel._from_config", "makes a model")
listed(MODEL_HUBS, "transformers.modeling_utils", "PreTrainedModel._supports_sdpa", "whether its attention calls SDPA")
listed(MODEL_HUBS, "transformers.modeling_utils", "PreTrainedModel._is_stateful", "whether a model keeps states")
_GENERATION = "transformers.generation.utils"
_beams = partial(listed, BEAMS)
EARLY_STOP = _beams(_GENERATION, "GenerationMixin._check_early_stop_heuristic", "asks whether beams still improve")
MAY_COMPILE = listed(
    STATIC_CACHES,
    _GENERATION,
    "GenerationMixin._valid_auto_compile_criteria",
    "whether the device is one for which it compiles",
)
FINISHED_BEAMS = _beams(_GENERATION, "GenerationMixin._update_finished_beams", "which beams have ended")
listed(DISPATCHER, "torch", "ops.aten.mm.default._op_dk", "runs the composite kernel of an op")
listed(DISPATCHER, "torch", "ops.aten.mm.default._schema", "the arguments of an op")
listed(DISPATCHER, "torch.library", "Library._destroy", "takes registrations back")
SDP_PRIORITY_ORDER = listed(
    ATTENTION, "torch._C", "_get_sdp_priority_order", "what sdpa_kernel(set_priority=True) sets"
)
_JAGGED = "torch.nested._internal.sdpa"
_jagged = partial(listed, JAGGED)
JAGGED_FLASH = _jagged(_JAGGED, "can_use_flash_attention", "the first backend that jagged attention asks for")
JAGGED_EFFICIENT = _jagged(_JAGGED, "can_use_efficient_attention", "the second one")
JAGGED_CUDNN = _jagged(_JAGGED, "can_use_cudnn_attention", "the last one")
JAGGED_ON_META = _jagged(_JAGGED, "_is_computing_meta_flops", "whether torch's own counter is on, for tensors on meta")
JAGGED_DUMMY = _jagged(
    "torch.nested._internal.nested_tensor", "_nt_view_dummy", "the tensor that all jagged ones are views of"
)
_jagged("torch.nested._internal.nested_tensor", "NestedTensor._values", "its tokens", on_instances=True)
TRACING_STATE = listed(TRACES, "torch._C", "_get_tracing_state", "the trace that is being written")
listed(
    TRACES, "torch.nn.modules.rnn", "RNNBase._flat_weights", "what a script's recurrent layer holds", on_instances=True
)
listed(TRACES, "torch.nn.modules.rnn", "RNNBase._flat_weights_names", "in which order", on_instances=True)
PROFILING_SWITCHES = tuple(
    listed(TRACES, "torch._C", name, "TorchScript's executors, of which the older one refuses meta tensors")
    for name in ("_jit_set_profiling_executor", "_jit_set_profiling_mode")
)
listed(TRACES, "torch.jit", "ScriptModule._c", "where a script keeps its weights", on_instances=True)
SET_TRACING_STATE = listed(TRACES, "torch._C", "_set_tracing_state", "pauses it")
listed(FUNCTORCH, "torch.library", "get_kernel", "the kernel that ours stands before (public, but new)")
_autocast = partial(listed, AUTOCAST)
SPARE_AUTOCAST_KEY = _autocast("torch._C", "DispatchKey.AutocastIPU", "an autocast key with no kernels in core")
_autocast("torch._C", "_ExcludeDispatchKeyGuard", "an autocast kernel runs its op without autocast")
INCLUDE_IN_TLS = _autocast("torch._C", "_dispatch_tls_set_dispatch_key_included", "switches the spare key on")
_flex = partial(listed, FLEX_ATTENTION)
EXCLUDED_FROM_TLS = _flex("torch._C", "_dispatch_tls_is_dispatch_key_excluded", "the gradient of a score function")
EXCLUDE_FROM_TLS = _autocast("torch._C", "_dispatch_tls_set_dispatch_key_excluded", "switches the spare key off")
HIGHER_ORDER_OPERATORS = _autocast("torch._ops", "_higher_order_ops", "which pass the autocast key")
HIGHER_ORDER_FALLTHROUGH = _autocast(
    "torch._ops", "_HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS", "which keys later ones pass"
)
CUSTOM_FWD_CAST = _autocast("torch.amp.autocast_mode", "_cast", "custom_fwd(cast_inputs=...) asks device types")
NO_AMP = _autocast("torch.cuda.amp.common", "amp_definitely_not_available", "autocast and GradScaler ask it")
_autocast("torch", "autocast._enabled", "whether it is on", on_instances=True)
INFER_DEVICE_TYPE = listed(CHECKPOINT, "torch.utils.checkpoint", "_infer_device_type", "whose autocast state is saved")
FOREACH_DEVICES = listed(FOREACH, "torch.utils._foreach_utils", "_get_foreach_kernels_supported_devices", "the default")
listed(FOREACH, "torch.utils._foreach_utils", "_get_fused_kernels_supported_devices", "fused=True")
listed(FOREACH, "torch.optim.optimizer", "_get_capturable_supported_devices", "capturable=True")
THIRD_DEVICE = listed(
    MHA_FAST_PATH,
    "torch.utils.backend_registration",
    "_privateuse1_backend_name",
    "a device that the fast path takes besides cuda",
)
_FLEX, _FLEX_API = "torch._higher_order_ops.flex_attention", "torch.nn.attention.flex_attention"
FLEX_VALIDATE = _flex(_FLEX_API, "_validate_device", "where it refuses a device")
FLEX_UNCOMPILED = _flex(_FLEX_API, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", "its eager way without Dynamo")
FLEX_OPERATOR = _flex(_FLEX, "flex_attention", "its operator")
_flex(_FLEX, "flex_attention._dispatch_cache", "where its autograd kernel is kept")
FLEX_FUNCTION = _flex(_FLEX, "FlexAttentionAutogradOp", "its autograd function")
FLEX_GRAPHS = _flex(_FLEX, "create_fw_bw_graph", "the gradient of a score function")
FLEX_GETITEM = _flex(
    "torch._dynamo._trace_wrapped_higher_order_op", "TransformGetItemToIndex", "indices that are tensors"
)
_TRITON = "torch._higher_order_ops.triton_kernel_wrap"
TRITON_TTIR = listed(TRITON, _TRITON, "generate_ttir", "what a kernel does")
HOST_DESCRIPTORS = listed(
    TRITON,
    "torch.utils._triton",
    "has_triton_tensor_descriptor_host_tma",
    "whether kernels take descriptors of the host's",
)
TRITON_OPERATORS = listed(TRITON, "torch._library.triton", "triton_ops_to_kernels", "which operators launch kernels")
IS_INT_MM = listed(INT8, "torch._higher_order_ops.out_dtype", "is_int_mm", "whether CUDA multiplies int8 matrices")
COMPILED_MODULE = "_orig_mod"
COMPILED_CALL = "_compiled_call_impl"
AROUND_COMPILED_CALL = listed(
    COMPILE, "torch._dynamo.eval_frame", "set_skip_guard_eval_unsafe", "called before and after each compiled call"
)
_COMPILED_AUTOGRAD = "torch._dynamo.compiled_autograd"
IN_COMPILED_BACKWARD = listed(
    COMPILED_AUTOGRAD, _COMPILED_AUTOGRAD, "in_compiled_autograd_region", "whether a compiled backward pass runs"
)
BACKWARD_GRAPH = listed(
    COMPILED_AUTOGRAD, _COMPILED_AUTOGRAD, "extract_bw_module", "the backward graph that it takes as a part of its own"
)
DYNAMO = listed(COMPILE, "torch._dynamo", "eval_frame", "its table of torch's functions, which is made at import")
listed(COMPILE, "torch._dynamo.eval_frame", f"OptimizedModule.{COMPILED_MODULE}", "what it wraps", on_instances=True)
listed(COMPILE, "torch.nn", f"Module.{COMPILED_CALL}", "whether a layer compiles itself", on_instances=True)
TEXT_KERNEL = listed(TEXT_KERNELS, "torch.cuda.jiterator", "_JittedFunction", "called to compile it")
COMPILE_TEXT = listed(TEXT_KERNELS, "torch.cuda", "_compile_kernel", "compiles a kernel in CUDA C++")
_aot = partial(listed, AOT_INDUCTOR)
AOTI_COMPILE = _aot("torch._inductor", "aoti_compile_and_package", "where a package is made (documented)")
AOTI_LOAD = _aot("torch._inductor", "aoti_load_package", "where one is loaded (documented)")
AOT_COMPILE = _aot("torch._inductor", "aot_compile", "makes code that no package holds (documented)")
listed(SPARSE, "torch", "Tensor._indices", "places of the elements, repeated ones too")
listed(SPARSE, "torch", "Tensor._values", "the elements")

node_count = needed("torch.autograd", "_get_sequence_nr", "how many ops autograd has recorded in this thread")
graph_task = needed("torch._C", "_current_graph_task_id", "which backward pass runs; -1 outside of one")
autograd_node = needed("torch._C", "_current_autograd_node", "which node of the backward pass runs")
next_node_number = needed("torch._C", "_autograd._get_sequence_nr", "where in the forward pass a node was made")
AccumulateGrad = needed("torch._C", "_functions.AccumulateGrad", "which ops make gradients")
has_kernel = needed("torch._C", "_dispatch_has_kernel_for_dispatch_key", "which ops are composites")
all_operators = needed("torch._C", "_dispatch_get_all_op_names", "which operators packages bring")
is_dispatched = needed("torch._C", "_dispatch_has_kernel", "which overloads only TorchScript can call")
dispatch_modes = needed("torch._C", "_len_torch_dispatch_stack", "whether another mode sees an op")
function_mode_count = needed("torch._C", "_len_torch_function_stack", "whether another mode sees a question")
function_modes = needed("torch.overrides", "_get_current_function_mode_stack", "the default device")
all_schemas = needed("torch._C", "_jit_get_all_schemas", "which functions take a device")
needed("torch.utils._device", "DeviceContext", "the default device")
lazy_type = needed("torch.nn.parameter", "UninitializedTensorMixin", "which parameters have no shape yet")
needed("torch.nn.parameter", "UninitializedTensorMixin._allowed_methods", "what those may be asked")
BATCHES = "_get_iterator"
at_ends = needed("torch._tensor_str", "get_summarized_data", "which numbers of a large tensor are printed")
PRINT_OPTIONS = needed("torch._tensor_str", "PRINT_OPTS", "which tensors are large to print")
needed("torch.utils.data", f"DataLoader.{BATCHES}", "which processes make batches")
BATCHES_OF_LOADER = needed("torch.utils.data.dataloader", "_BaseDataLoaderIter", "when a program takes a batch")
_DATA = "torch.utils.data.dataloader"
listed(
    METERING, _DATA, "_BaseDataLoaderIter._sampler_iter", "which samples a program would take next", on_instances=True
)
listed(METERING, _DATA, "_BaseDataLoaderIter._dataset_fetcher", "the stream that it reads on", on_instances=True)
KIND_OF_DATA = needed(_DATA, "_DatasetKind", "how a loader reads its data set")
needed(_DATA, "_DatasetKind.create_fetcher", "how a loader makes a batch")
PIN_BATCHES = "torch.utils.data._utils.pin_memory"
pin_batch = needed(PIN_BATCHES, "pin_memory", "what the threads of data loaders do with batches")
torch_device = importlib.import_module("torch.utils._device")
INDUCTOR = "torch._inductor"
BELOW_DISPATCHER = (
    "torch._meta_registrations",
    "torch._refs",
    "torch._prims",
    "torch._decomp",
    "torch._subclasses",
    "torch._dynamo",
    "torch._functorch",
    INDUCTOR,
    "torch._tensor_str",
    "torch.distributed",
)
# Among them, but they compare devices: DDP a batch's with its rank's, ShardedTensor a shard's with its plan's.
ABOVE_DISPATCHER = ("torch.distributed.utils", "torch.distributed._shard.")
"""Prefixes of torch's modules that learn shapes, and of torch.distributed, which flopmeter.distributed runs on meta:
what they ask of a tensor is answered as it is, also where the program is told another device (flopmeter.run)."""
no_dispatch = needed("torch._C", "_disabled_torch_dispatch_impl", "which tensors run their kernels themselves")
DispatchKey = needed("torch._C", "DispatchKey", "the kernel of a composite")
run_backward = needed("torch.autograd.graph", "_engine_run_backward", "which ops a formula of autograd runs itself")
peek_interpreter_stack = needed("torch._C._functorch", "peek_interpreter_stack", "whether a transform sees an op")
get_unwrapped = needed("torch._C._functorch", "get_unwrapped", "whose storage a tensor under a transform has")
is_wrapped = needed("torch._C._functorch", "is_functorch_wrapped_tensor", "which tensors are under a transform")
no_function_modes = needed("torch._C", "DisableTorchFunction", "how to look at values unseen")
no_transforms = needed("torch._C", "_DisableFuncTorch", "how to look at values unseen by transforms")
no_dispatch_modes = needed("torch.utils._python_dispatch", "_disable_current_modes", "how to look at values unmetered")
device_constructors = needed("torch.utils._device", "_device_constructors", "which functions make tensors")
needed("torch", "UntypedStorage._cdata", "which tensors share memory")
needed("torch", "Tensor._version", "whether a value was written to")
needed("torch", "Tensor._is_zerotensor", "which tensors have no memory")
needed("torch", "_efficientzerotensor", "gradients of forward mode that are zero")
needed("torch", "Tensor._is_view", "which tensors are views")
needed("torch", "_int_mm", "products of int8")
needed("torch", "_scaled_mm", "products of fp8")
needed("torch", "Tensor._make_wrapper_subclass", "where a subclass that wraps tensors is given its device")
needed("torch.autograd.graph", "Node._sequence_nr", "the forward op of a node of the backward pass")
dispatch_mode_stack = needed(
    "torch.utils._python_dispatch", "_get_current_dispatch_mode_stack", "which modes see an op"
)
IN_MODE, IN_PLAIN_MODE, IN_VISIBLE_MODE = (
    listed(COMPILE, "torch.utils._python_dispatch", flag, "what torch says of modes, one flag for all threads")
    for flag in (
        "_is_in_torch_dispatch_mode",
        "_is_in_non_infra_torch_dispatch_mode",
        "_is_in_any_mode_without_ignore_compile_internals",
    )
)
GUARDS_SEE_MODES = listed(
    COMPILE,
    "torch._C._dynamo.guards",
    "set_is_in_mode_without_ignore_compile_internals",
    "the last of these, for guards",
)
for _module, _attributes, _used in (
    ("torch._ops", ("OpOverload", "OpOverloadPacket", "HigherOrderOperator"), "what kind of op it sees"),
    ("torch._subclasses.fake_tensor", ("FakeTensor",), "which tensors are another program's stand-ins"),
    ("torch._subclasses.functional_tensor", ("FunctionalTensor",), "which tensors a transform wraps"),
    ("torch.utils._python_dispatch", ("TorchDispatchMode",), "each op that runs"),
    (
        "torch.utils._pytree",
        ("tree_flatten", "tree_leaves", "tree_map", "tree_map_only", "tree_unflatten"),
        "the tensors in nested arguments",
    ),
):
    for _attribute in _attributes:
        needed(_module, _attribute, _used)
if torch.distributed.is_available():
    resolve_group = needed("torch.distributed.distributed_c10d", "_resolve_process_group", "which ranks a group has")


def is_compiled_backward() -> bool:
    """Whether a backward pass runs as a compiled graph (compiled autograd): autograd itself runs none then."""
    module = sys.modules.get(IN_COMPILED_BACKWARD.module)  # asked for each op
    return module is not None and getattr(module, IN_COMPILED_BACKWARD.attribute, False)
