"""The module `torch.meta`, which exists while a world is open: what torch.distributed expects of `torch.cuda`.

FSDP2 gets its streams and events from it; DTensor gets the number of devices in a node, to weigh links.
"""

from __future__ import annotations

from types import SimpleNamespace

from flopmeter.trace import streams

USUAL_GPUS_PER_NODE = 8


def meta_device(gpus_per_node: int | None, rank: int) -> SimpleNamespace:
    """The module. Recorders hear what a program does with its streams."""
    count = gpus_per_node or USUAL_GPUS_PER_NODE
    return SimpleNamespace(
        gpus_per_node=gpus_per_node,  # no module of torch has this one; recorders ask for it (trace/process_groups.py)
        Event=streams.MetaEvent,
        Stream=streams.MetaStream,
        current_stream=streams.current_stream,
        default_stream=streams.default_stream,
        stream=streams.stream,
        current_device=lambda: rank % count,
        device_count=lambda: count,
        is_available=lambda: True,
        is_initialized=lambda: True,
        set_device=lambda device: None,
        synchronize=lambda device=None: None,
    )
