"""Random training scripts: a steady step has the products that they have by hand, whatever the loop around them is."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from textwrap import indent
from typing import NamedTuple

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flopmeter.run.script import Script, run
from flopmeter.run.session import ScriptSession, Wishes

WIDTH, CLASSES = 64, 16


class Program(NamedTuple):
    """What a script does in its loop."""

    layers: int
    batch: int
    batches: int  # that an epoch has, and after them a smaller one
    micro_batches: int  # between two updates
    optimizers: str  # one, by a closure, or one for the layers and one for the head
    precision: str
    evaluates_every: int  # so many updates; 0: never
    begins_by_evaluating: bool
    freezes: bool  # the first layer
    checkpoints: bool
    reads_loss: bool
    averages: bool  # its weights, in a copy
    in_function: bool

    @property
    def step_macs(self) -> int:
        """Forward once, backward twice: for the weights, and for the input, which the first layer's has no need of."""
        layer, head = self.batch * WIDTH * WIDTH, self.batch * WIDTH * CLASSES
        macs = 3 * (self.layers * layer + head) - layer
        if self.freezes:  # no gradient of its weight, and none for its output
            macs -= 2 * layer
        if self.checkpoints:  # again, but for what has no gradients
            macs += (self.layers - self.freezes) * layer
        return self.micro_batches * macs

    @property
    def text(self) -> str:
        body = "\n".join((self._setup, self._loop))
        if self.in_function:
            body = f"def main():\n{indent(body, '    ')}\nmain()"
        return f"{self._imports}\n{body}\n"

    @property
    def _imports(self) -> str:
        layer = (
            "checkpoint(self.active, layer, x, use_reentrant=False)" if self.checkpoints else "self.active(layer, x)"
        )
        return f"""
import copy
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear({WIDTH}, {WIDTH}) for _ in range({self.layers}))
        self.head = nn.Linear({WIDTH}, {CLASSES})

    def forward(self, x):
        for layer in self.layers:
            x = {layer}
        return self.head(x)

    @staticmethod
    def active(layer, x):
        return F.relu(layer(x))
"""

    @property
    def _setup(self) -> str:
        samples = self.batches * self.batch + self.batch // 2
        optimizers = "torch.optim.AdamW(learned, lr=1e-3)"
        if self.optimizers == "two":
            optimizers = (
                "torch.optim.AdamW(model.layers.parameters()), torch.optim.SGD(model.head.parameters(), lr=0.1)"
            )
        return f"""
model = Net().to("cuda")
for parameter in model.layers[0].parameters():
    parameter.requires_grad_({not self.freezes})
learned = [each for each in model.parameters() if each.requires_grad]
optimizers = [{optimizers}]
scaler = torch.amp.GradScaler(enabled={self.precision == "float16"})
average = copy.deepcopy(model)
data = TensorDataset(torch.randn({samples}, {WIDTH}), torch.randint(0, {CLASSES}, ({samples},)))
loader = DataLoader(data, {self.batch}, shuffle=True)

def evaluate():
    model.eval()
    with torch.no_grad():
        model(torch.randn(3, {WIDTH}, device="cuda"))
    model.train()

def loss_of(x, y):
    with torch.autocast("cuda", torch.{self.precision}, enabled={self.precision != "float32"}):
        return F.cross_entropy(model(x.cuda()), y.cuda()) / {self.micro_batches}
"""

    @property
    def _loop(self) -> str:
        lines = ["evaluate()"] if self.begins_by_evaluating else []
        lines += ["updates = batches = 0", "for epoch in range(9):", "    for x, y in loader:"]
        return "\n".join((*lines, indent("\n".join((*self._backward, *self._update)), " " * 8)))

    @property
    def _backward(self) -> list[str]:
        if self.optimizers == "closure":
            return [
                "def closure():",
                "    optimizers[0].zero_grad()",
                "    loss = loss_of(x, y)",
                "    loss.backward()",
                "    return loss",
                "loss = optimizers[0].step(closure)",
            ]
        return [
            "loss = loss_of(x, y)",
            "scaler.scale(loss).backward()",
            "batches += 1",
            f"if batches % {self.micro_batches}: continue",
            "for optimizer in optimizers: scaler.step(optimizer)",
            "scaler.update()",
            "for optimizer in optimizers: optimizer.zero_grad()",
        ]

    @property
    def _update(self) -> list[str]:
        lines = ["updates += 1"]
        if self.averages:
            lines += ["for mean, own in zip(average.parameters(), model.parameters()): mean.data.lerp_(own.data, 0.1)"]
        if self.reads_loss:
            lines += ["print(updates, loss.item())"]
        if self.evaluates_every:
            lines += [f"if updates % {self.evaluates_every} == 0: evaluate()"]
        return lines


def is_possible(program: Program) -> bool:
    """A closure is evaluated once an update, without a scaler. Where the smaller batch comes within the four steps, it
    is a step of its own."""
    if program.optimizers == "closure" and (program.micro_batches > 1 or program.precision == "float16"):
        return False
    return program.batches > 3 or program.micro_batches == 1


programs = st.builds(
    Program,
    layers=st.integers(2, 4),
    batch=st.sampled_from([8, 32]),
    batches=st.sampled_from([3, 24]),
    micro_batches=st.sampled_from([1, 1, 2, 3]),
    optimizers=st.sampled_from(["one", "closure", "two"]),
    precision=st.sampled_from(["float32", "bfloat16", "float16"]),
    evaluates_every=st.sampled_from([0, 2, 3, 5]),
    begins_by_evaluating=st.booleans(),
    freezes=st.booleans(),
    checkpoints=st.booleans(),
    reads_loss=st.booleans(),
    averages=st.booleans(),
    in_function=st.booleans(),
).filter(is_possible)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(programs)
def test_a_steady_step_has_the_products_by_hand_in_their_order(tmp_path: Path, program: Program):
    script = tmp_path / "train.py"
    script.write_text(program.text)
    session = ScriptSession("a100-sxm4-80gb", Wishes(steps=4))
    with session.open(), contextlib.redirect_stdout(io.StringIO()):
        ending = run(Script(str(script)), session)
        assert ending.error is None, ending
        report = session.report("train.py")
    assert report.step.macs == program.step_macs
    phases = dict.fromkeys(op.phase for kernel in report.step.kernels for op in kernel.ops)
    assert [phase for phase in phases if phase != "recompute"] == ["forward", "backward", "optimizer"]
