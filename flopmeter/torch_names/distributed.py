"""Every private name of torch's distributed package that flopmeter uses, and what for. Read from torch 2.11 to 2.15."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch.library import Library

from flopmeter.torch_names.dispatcher import no_warning_of_override
from flopmeter.torch_names.private import WORLDS, listed, needed

_needed = partial(needed, feature=WORLDS)
FakeStore = _needed(
    "torch.testing._internal.distributed.fake_pg", "FakeStore", "how to open a world of which one rank runs"
)
FakeWork = _needed("torch._C._distributed_c10d", "FakeWork", "what a program waits for")
Work = _needed("torch._C._distributed_c10d", "Work", "what a program waits for")
work_of_future = _needed("torch._C._distributed_c10d", "_create_work_from_future", "how DDP runs on meta")
Reducer = _needed("torch._C._distributed_c10d", "Reducer", "how DDP makes its buckets on meta")
FSDPParamGroup = _needed(
    "torch.distributed.fsdp._fully_shard._fsdp_param_group", "FSDPParamGroup", "how FSDP2 runs on meta"
)
functional_collectives = _needed(
    "torch.distributed", "_functional_collectives", "when tensor parallel programs wait for a collective"
)
_needed("torch.distributed", "_symmetric_memory", "how asynchronous tensor parallelism is counted")  # defines its ops
VERIFY_PARAMETERS = "_verify_param_shape_across_processes"
_needed("torch.nn.parallel.distributed", VERIFY_PARAMETERS, "how DDP runs on meta")
index_of_device = _needed("torch._utils", "_get_device_index", "where DDP brings a batch from the host")
CHECK_HOOK = "_check_comm_hook"
_needed("torch.nn.parallel", f"DistributedDataParallel.{CHECK_HOOK}", "how DDP's bf16 hook runs on meta")
FLATTEN = "_flatten"
_needed("torch.distributed.device_mesh", f"DeviceMesh.{FLATTEN}", "how plan shards over two dimensions of a mesh")
CONCATENATE = "_concatenate"
_needed("torch.distributed.device_mesh", f"DeviceMesh.{CONCATENATE}", "how FSDP2 joins its mesh with that of TP")
CHECK_BATCH = "_check_p2p_op_list"
_needed("torch.distributed.distributed_c10d", CHECK_BATCH, "which sends and receives run as one kernel")
STORE_BARRIER = "_store_based_barrier"
_needed("torch.distributed.distributed_c10d", STORE_BARRIER, "how groups are made after TORCH_DIST_INIT_BARRIER=1")
_needed("torch._C._distributed_c10d", "Reducer._rebuild_buckets", "when DDP makes its buckets anew")
_needed(
    "torch.distributed.fsdp._fully_shard._fsdp_param_group",
    "FSDPParamGroup._validate_no_meta_params",
    "where FSDP2 refuses meta",
)
_FSDP1 = "how FullyShardedDataParallel runs on meta"
fsdp1_init = _needed("torch.distributed.fsdp", "_init_utils", _FSDP1)
fsdp1_flat = _needed("torch.distributed.fsdp", "_flat_param", _FSDP1)
FSDPDeviceHandle = _needed("torch.distributed.fsdp._common_utils", "_FSDPDeviceHandle", _FSDP1)
FSDP1_DEVICE = "_init_device_handle"
_needed("torch.distributed.fsdp.fully_sharded_data_parallel", FSDP1_DEVICE, _FSDP1)
FSDP1_COMPUTES_ON, FSDP1_MATERIALIZES = "_get_compute_device", "_need_to_materialize_module"
FSDP1_DEVICE_ID, FSDP_MOVES = "_get_device_from_device_id", "_move_states_to_device"
for _name in (FSDP1_COMPUTES_ON, FSDP1_MATERIALIZES, FSDP1_DEVICE_ID, FSDP_MOVES):
    _needed("torch.distributed.fsdp._init_utils", _name, _FSDP1)
FSDP2_MODULES = tuple(
    _needed("torch.distributed.fsdp._fully_shard", name, "how FSDP2 takes a model on the CPU")
    for name in ("_fsdp_init", "_fully_shard")
)
FSDP1_IS_ALLOCATED = "_data_ptr_allocated"
_needed("torch.distributed.fsdp._flat_param", FSDP1_IS_ALLOCATED, _FSDP1)
bindings = _needed("torch", "_C", "how SyncBatchNorm runs, and FSDP2 without a mesh, on meta")
PRIVATEUSE1 = "_get_privateuse1_backend_name"
_needed("torch._C", PRIVATEUSE1, "how SyncBatchNorm runs on meta")
ACCELERATOR = "_get_accelerator"
_needed("torch._C", ACCELERATOR, "which device FSDP2 shards over without a mesh")
_RANDOM = "how DTensor makes random tensors on meta"
tensor_random = _needed("torch.distributed.tensor", "_random", _RANDOM)
RNG_TRACKER, RNG_SUPPORTED = "_rng_tracker", "is_rng_supported_mesh"
for _name in (RNG_TRACKER, RNG_SUPPORTED):
    _needed("torch.distributed.tensor._random", _name, _RANDOM)
_SHARDINGS = "how worlds in a row use DTensor"
_op_dispatcher = _needed("torch.distributed.tensor", "DTensor._op_dispatcher", _SHARDINGS)
_forget_in_cpp = _needed("torch._C", "_clear_DTensor_sharding_propagator_cache", _SHARDINGS)
for _name in ("_target", "_args", "_kwargs"):
    listed(WORLDS, "multiprocessing.process", f"BaseProcess.{_name}", "which rank a process is", on_instances=True)


def forget_shardings() -> None:
    """What DTensor remembers of its ops. (torch's own function for that stands in a file that imports NumPy.)"""
    _op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
    _forget_in_cpp()


def registered(kernels: dict[str, Callable[..., Any]], backend: str) -> list[Library]:
    """Replace the kernels that these ops ("namespace::name") have for Meta or CPU, until `unregister`."""
    libraries = []
    for name, kernel in kernels.items():
        namespace, op = name.split("::")
        libraries.append(Library(namespace, "IMPL"))
        with no_warning_of_override():
            libraries[-1].m.impl(op, backend, kernel)  # type: ignore[union-attr]
    return libraries


def unregister(libraries: Iterable[Library]) -> None:
    """Remove their kernels now; Python's garbage collector would do it later."""
    for library in libraries:
        library._destroy()
