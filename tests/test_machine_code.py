"""The instructions of costs/instructions.py, beside the machine code that Triton and ptxas make without a GPU.

Each op is written as inductor writes it, between a load, a multiplication and a store, eight elements a thread.
"""

import functools
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from flopmeter.costs.instructions import OF_OPS

triton = pytest.importorskip("triton")

from torch._inductor.codegen.triton import TritonOverrides  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
ELEMENTS, WARPS = 1024, 4
OF_THREAD = ELEMENTS // (32 * WARPS)
WRITTEN = {
    "atan": "libdevice.atan(x)",
    "pow": "libdevice.pow(x, y)",
    "reciprocal": "1.0 / x",
    "tanh": "libdevice.tanh(x)",
    "truediv": "x / y",
}
# Triton 3.6 and 3.7 (torch 2.11 and 2.12) bring libdevice and ptxas of CUDA 12.8, which make other code of these.
OF_CUDA_12_8 = {"acos": 16, "asin": 16, "atan": 36, "lgamma": 82, "pow": 119, "sigmoid": 12, "sinh": 26, "tanh": 15}
SOURCE = """
import triton, triton.language as tl
from torch._inductor.runtime.triton_helpers import libdevice, math as tl_math

@triton.jit
def kernel(first, second, result, ELEMENTS: tl.constexpr):
    index = tl.program_id(0) * ELEMENTS + tl.arange(0, ELEMENTS)[:]
    x = tl.load(first + index, None).to(tl.float32)
    y = tl.load(second + index, None)
    tl.store(result + index, ({expression}) * y, None)
"""
WITHOUT_EFFECT = "NOP"


def written(op: str) -> str:
    """The op as inductor writes it by default; some only within a kernel."""
    return WRITTEN[op] if op in WRITTEN else str(getattr(TritonOverrides, op)("x"))


def machine_code(expression: str, folder: Path, capability: int) -> str:
    folder.joinpath("written.py").write_text(SOURCE.format(expression=expression))
    names: dict = {"__name__": "written"}
    exec(compile(folder.joinpath("written.py").read_text(), str(folder / "written.py"), "exec"), names)
    signature = {"first": "*bf16", "second": "*fp32", "result": "*bf16", "ELEMENTS": "constexpr"}
    aligned = {(place,): [["tt.divisibility", 16]] for place in range(3)}
    source = ASTSource(fn=names["kernel"], signature=signature, constexprs={(3,): ELEMENTS}, attrs=aligned)
    options = {"num_warps": WARPS, "num_stages": 1}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    folder.joinpath("code").write_bytes(compiled.asm["cubin"])
    return subprocess.check_output([TOOLS / "nvdisasm", "-c", folder / "code"], text=True)


def run(code: str) -> Iterator[str]:
    """The instructions that a thread runs of which no value is special: slow paths, which call or loop, are skipped."""
    lines = [line.strip() for line in code.splitlines()]
    place = {line.rstrip(":"): number for number, line in enumerate(lines) if line.endswith(":")}
    number = 0
    while not lines[number].startswith(".text.kernel:"):
        number += 1
    while True:
        found = re.match(r"/\*[0-9a-f]+\*/\s+(.*?)\s*;", lines[number])
        number += 1
        if not found:
            continue
        instruction = found[1]
        if not instruction.startswith(WITHOUT_EFFECT):
            yield instruction
        if instruction.startswith("EXIT"):
            return
        jump = re.search(r"BRA.*`\((.*?)\)", instruction)
        if jump and place[jump[1]] > number:
            skipped = " ".join(lines[number : place[jump[1]]])
            if not instruction.startswith("@") or re.search("CALL|DMUL", skipped):
                number = place[jump[1]]


@functools.cache
def ptxas_release() -> str:
    return re.search(r"release ([\d.]+)", subprocess.check_output([TOOLS / "ptxas", "--version"], text=True))[1]


def instructions(expression: str, folder: Path, capability: int = 90) -> float:
    """For an element."""
    return sum(1 for _ in run(machine_code(expression, folder, capability))) / OF_THREAD


@pytest.mark.skipif(not TOOLS.joinpath("nvdisasm").exists(), reason="this Triton has no disassembler")
@pytest.mark.parametrize("op", OF_OPS)
def test_an_op_takes_as_many_instructions_as_its_machine_code_has(op, tmp_path):
    counted = instructions(written(op), tmp_path) - instructions("x", tmp_path)
    beyond_the_slow_path = 20 if op in ("sin", "cos", "tan") else 0
    expected = OF_OPS | (OF_CUDA_12_8 if ptxas_release() == "12.8" else {})
    assert expected[op] - beyond_the_slow_path == pytest.approx(counted, abs=1)


@pytest.mark.skipif(not TOOLS.joinpath("nvdisasm").exists(), reason="this Triton has no disassembler")
@pytest.mark.parametrize("capability", [80, 100, 120])
def test_other_generations_take_as_many(capability, tmp_path):
    ops = ("erf", "exp", "log", "sqrt", "tanh", "truediv")
    counted = sum(instructions(written(op), tmp_path, capability) for op in ops)
    assert counted == pytest.approx(sum(instructions(written(op), tmp_path) for op in ops), rel=0.05)
