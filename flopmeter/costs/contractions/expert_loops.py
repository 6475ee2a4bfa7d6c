"""Experts of transformers where torch has no grouped matmul for them: one matmul an expert, in a loop.

transformers (integrations/moe.py, 5.x) makes an op of that loop. It runs before compute capability 8.0, and under
torch.compile for all types but bf16. The op exists once a program has imported transformers, so its rules are found by
name.
"""

from __future__ import annotations

from flopmeter.costs.contractions.quantized import equal_groups, share_of
from flopmeter.costs.rules import Rule, make_contraction, make_cost, zeros
from flopmeter.records import MOVEMENT, Call, Cost, HostCopy, Matmul, Region, TensorSpec


def experts(call: Call) -> tuple[Cost, ...]:
    """[rows, k] sorted by expert, times each expert's [k, n]."""
    x, weight, out = call.argument("input"), call.argument("weight"), call.outputs[0]
    _, k, n = weight.shape
    return (
        *_prepared(call),
        *(
            make_contraction(
                call, [Matmul(1, rows, n, k)], read=(_of(x, rows), _one(weight)), written=(_of(out, rows),)
            )
            for rows in _rows(call)
        ),
    )


def experts_backward(call: Call) -> tuple[Cost, ...]:
    """The gradients of the rows and of each expert's weights."""
    x, weight, grad = (call.argument(name) for name in ("input", "weight", "grad_output"))
    to_x, to_weight = call.outputs
    _, k, n = weight.shape
    costs = list(_prepared(call))
    for rows in _rows(call):
        grads = _of(grad, rows)
        of_x, of_weight = Matmul(1, rows, k, n), Matmul(1, k, n, rows)
        costs.append(make_contraction(call, [of_x], read=(grads, _one(weight)), written=(_of(to_x, rows),)))
        costs.append(make_contraction(call, [of_weight], read=(_of(x, rows), grads), written=(_one(to_weight),)))
    return tuple(costs)


def _prepared(call: Call) -> tuple[Cost, ...]:
    """The results are filled with zeros, and the host waits for the offsets."""
    ends = call.argument("offs")
    filled = (zeros(call, out) for out in call.outputs)
    return *filled, make_cost(call, MOVEMENT, read=(ends,), written=(), work=HostCopy(ends.nbytes), blocks_host=True)


def _rows(call: Call) -> list[int]:
    """The number of rows of each expert that has any."""
    sizes = call.groups or equal_groups(call.argument("input").shape[0], call.argument("offs").numel)
    return [size for size in sizes if size]


def _of(spec: TensorSpec, rows: int) -> Region:
    return share_of(spec, rows, spec.shape[0])


def _one(weight: TensorSpec) -> Region:
    return share_of(weight, 1, weight.shape[0])


EXPERT_LOOPS: dict[str, Rule] = {
    "transformers::grouped_mm_fallback": experts,
    "transformers::grouped_mm_fallback_backward": experts_backward,
}
