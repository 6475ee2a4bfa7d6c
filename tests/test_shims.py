"""Stand-ins for packages of CUDA kernels: each of the folder is run, and its work is that of a computation by hand."""

from __future__ import annotations

import importlib
import inspect
import json
import subprocess
import sys
import timeit
from importlib import metadata
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.benchmark.utils.timer import timer

import flopmeter
from flopmeter.run.session import Wishes
from flopmeter.run.shims import SHIMS, shim_of

A100 = "a100-sxm4-80gb"


def stepped(shim: str, program):
    """The report of `program`'s last step, with the shim in place."""
    with flopmeter.cuda(A100, steps=2, wishes=Wishes(shims=(shim,))) as device:
        program()
    assert shim not in sys.modules
    return device.report().step


def train(model: nn.Module, x: torch.Tensor, optimizer=None):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def kernels(report) -> dict[str, object]:
    return {row.name.rpartition("::")[2]: row for row in report.rows("op")}


@pytest.mark.parametrize("shim", SHIMS)
def test_every_name_of_a_shim_can_be_imported_and_is_told(shim):
    with flopmeter.cuda(A100, wishes=Wishes(shims=(shim,))) as device:
        for module, names in shim_of(shim).MODULES.items():
            assert all(getattr(importlib.import_module(module), name) is not None for name in names)
            with pytest.raises(ImportError, match=f"shim of {module} has no 'nothing'"):
                importlib.import_module(module).nothing  # noqa: B018
        torch.ones(1, device="cuda")
    told = {note.split(" is flopmeter's")[0] for note in device.report().step.notes if "shim" in note}
    assert told == {
        f"{module}.{name}"
        for module, names in shim_of(shim).MODULES.items()
        for name, has in names.items()
        if callable(has)
    }


def test_a_shim_stands_in_for_a_package_that_is_installed_and_leaves_it_as_it_was(tmp_path, monkeypatch):
    """bitsandbytes installs without a GPU, and its import fails there."""
    (tmp_path / "bitsandbytes").mkdir()
    (tmp_path / "bitsandbytes" / "__init__.py").write_text("kernels = 'its own'")
    monkeypatch.syspath_prepend(tmp_path)
    installed = importlib.import_module("bitsandbytes")

    def program():
        from bitsandbytes.optim import AdamW8bit

        model = nn.Linear(256, 256).cuda()
        train(model, torch.zeros(8, 256, device="cuda"), AdamW8bit(model.parameters()))

    with flopmeter.cuda(A100, steps=2, wishes=Wishes(shims=("bitsandbytes",))) as device:
        program()
    assert "bitsandbytes_adam" in kernels(device.report().step)
    assert sys.modules["bitsandbytes"] is installed
    del sys.modules["bitsandbytes"]


def test_libraries_that_ask_for_the_distribution_of_a_shim_find_name_and_version(tmp_path, monkeypatch):
    """As transformers does before it takes flash_attention_2: the distribution is named flash-attn, and is new enough.
    FlashAttention-4 has a module of that name, too, so that the module alone is not enough for it."""
    (tmp_path / "flash_attn-1.0.dist-info").mkdir()
    (tmp_path / "flash_attn-1.0.dist-info" / "METADATA").write_text("Name: flash-attn\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with flopmeter.cuda(A100, wishes=Wishes(shims=("flash_attn", "flash_attn_interface", "apex"))):
        assert metadata.version("flash_attn") == metadata.version("Flash-Attn") == "2.8.3"
        found = metadata.packages_distributions()
        assert "flash-attn" in found["flash_attn"]
        assert "flash_attn_3" in found["flash_attn_interface"]
        assert "apex" not in found  # its distribution has no number that we could name
    assert metadata.version("flash_attn") == "1.0"


SPAWNS = """
import multiprocessing, sys, torch
from flash_attn import flash_attn_func

def work(numbers):
    numbers.put(flash_attn_func.__name__)

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    numbers = context.Queue()
    child = context.Process(target=work, args=(numbers,))
    child.start()
    print("the child has", numbers.get(timeout=100))
    child.join()
    torch.ones(1, device="cuda")
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_processes_that_a_script_starts_anew_import_the_shims_that_it_names_at_its_top(method, tmp_path):
    """As lingua and blt start a manager, and as DataLoader starts workers from Python 3.14 on."""
    (tmp_path / "program.py").write_text(SPAWNS)
    command = ["-m", "flopmeter", "run", "--hardware", A100, "--shim", "flash_attn", tmp_path / "program.py", method]
    ran = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=100)
    assert ran.stdout == "the child has flash_attn_func\n", ran.stderr


TRANSFORMERS = """
import sys, torch, transformers
config = transformers.LlamaConfig(
    vocab_size=64, hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2
)
attention = {"attn_implementation": sys.argv[2], "dtype": torch.bfloat16}
model = transformers.LlamaForCausalLM._from_config(config, **attention).cuda()
mask = torch.ones(2, 256, dtype=torch.long)
mask[:, int(sys.argv[1]) :] = 0
for _ in range(40):
    with torch.no_grad():
        model(torch.zeros(2, 256, dtype=torch.long).cuda(), attention_mask=mask.cuda())
"""


@pytest.mark.parametrize(
    ("shim", "hardware", "implementation", "kept"),
    [
        ("flash_attn", A100, "flash_attention_2", 256),
        ("flash_attn", A100, "flash_attention_2", 200),
        ("flash_attn_4", "b200-sxm-180gb", "flash_attention_4", 200),
    ],
)
def test_flash_attention_of_transformers_runs_by_the_shim_and_leaves_padding_out(
    shim, hardware, implementation, kept, tmp_path
):
    """Two layers, two texts. In a process of its own, as transformers keeps what it found installed."""
    pytest.importorskip("transformers")
    (tmp_path / "program.py").write_text(TRANSFORMERS)
    command = ["-m", "flopmeter", "run", "--hardware", hardware, "--shim", shim, "--format", "json"]
    arguments = [tmp_path / "program.py", str(kept), implementation]
    ran = subprocess.run([sys.executable, *command, *arguments], capture_output=True, text=True, check=True)
    (attention,) = [row for row in json.loads(ran.stderr)["rows"]["class"] if row["name"] == "attention (fused)"]
    assert attention["flops"] == 2 * 2 * (2 * 2 * kept**2 * 128)


def test_xformers_attention_has_the_products_of_two_matmuls_and_a_causal_mask_may_be_named():
    def program():
        from xformers.ops import LowerTriangularMask, memory_efficient_attention
        from xformers.ops.fmha.attn_bias import AttentionBias

        q = torch.randn(2, 256, 8, 64, device="cuda", dtype=torch.bfloat16)
        assert memory_efficient_attention(q, q, q, attn_bias=LowerTriangularMask()).shape == q.shape
        assert memory_efficient_attention(q[:, :, 0], q[:, :, 0], q[:, :, 0]).shape == (2, 256, 64)
        with pytest.raises(NotImplementedError, match="give a tensor"):
            memory_efficient_attention(q, q, q, attn_bias=AttentionBias())

    report = stepped("xformers", program)
    assert report.macs == 2 * 2 * (8 + 1) * 256 * 256 * 64
    assert "_scaled_dot_product_flash_attention" in kernels(report)


def test_sequences_end_to_end_under_a_block_diagonal_mask_of_xformers_see_each_themselves():
    """As many products as of each sequence alone: three images of 64 places and two of 16."""

    def program():
        from xformers.ops import fmha, memory_efficient_attention

        lists = [torch.randn(3, 64, 8, 64, device="cuda"), torch.randn(2, 16, 8, 64, device="cuda")]
        mask, x = fmha.BlockDiagonalMask.from_tensor_list([each.bfloat16() for each in lists])
        assert x.shape == (1, 3 * 64 + 2 * 16, 8, 64)
        for each in (mask, mask.make_causal()):
            parts = each.split(memory_efficient_attention(x, x, x, attn_bias=each))
            assert [part.shape for part in parts] == [one.shape for one in lists]
        assert [part.shape[1] for part in fmha.BlockDiagonalMask.from_seqlens([200, 24]).split(x)] == [200, 24]

    report = stepped("xformers", program)
    assert report.macs == 2 * (2 * 8 * 64 * (3 * 64 * 64 + 2 * 16 * 16))
    assert {name for name in kernels(report) if "attention" in name} == {"_flash_attention_forward"}


@pytest.mark.parametrize("mask", ["end to end", "from the last key"])
def test_under_a_local_mask_of_xformers_time_grows_with_the_length_and_not_with_its_square(mask):
    """Of 16 times the length a window of 128 keys makes 16 times the pairs, and a causal mask 256 times."""

    def seconds(length, window):
        def program():
            from xformers.ops import fmha

            biases, q = fmha.attn_bias, torch.randn(1, length, 8, 64, device="cuda", dtype=torch.bfloat16)
            bias = biases.LowerTriangularFromBottomRightMask()
            if mask == "end to end":
                bias = biases.BlockDiagonalMask.from_seqlens([length]).make_causal()
            if window:
                bias = bias.make_local_attention(window)
            fmha.memory_efficient_attention(q, q, q, attn_bias=bias)

        (row,) = [row for name, row in kernels(stepped("xformers", program)).items() if "attention" in name]
        return row.seconds

    assert seconds(65536, 128) / seconds(4096, 128) < 20
    assert seconds(65536, None) / seconds(4096, None) > 100


def test_swiglu_of_xformers_has_three_products():
    def program():
        from xformers.ops import SwiGLU

        train(SwiGLU(64, 128, 32, bias=False).cuda(), torch.zeros(8, 64, device="cuda"))

    # The gradient of the input is not needed.
    assert stepped("xformers", program).macs == 2 * (8 * 64 * 256) + 3 * (8 * 128 * 32)


def test_xformers_layers_and_profiler_run_as_what_they_do():
    """SwiGLU: a product of 64 x 2 * 128 and one of 128 x 64, over 2 x 16 rows; nothing is profiled."""

    def program():
        import xformers.profiler
        from xformers.ops import RMSNorm, SwiGLU, masked_matmul

        model = nn.Sequential(RMSNorm(64), SwiGLU(64, 128)).cuda()
        x = torch.randn(2, 16, 64, device="cuda")
        seen = torch.ones(16, 16, dtype=torch.bool, device="cuda").tril()
        assert masked_matmul(x, x.transpose(1, 2), seen).shape == (2, 16, 16)
        with xformers.profiler.profile(output_dir="nowhere", module=model, schedule=[]):
            assert model(x).shape == x.shape
            xformers.profiler.step()

    assert stepped("xformers", program).macs == 2 * 16 * (64 * 256 + 128 * 64)


# As `__init__.py` and the modules below it name them at 0251105 (flash-attention) and in 0.0.35 (xformers).
PUBLIC = {
    "flash_attn": {
        "flash_attn": "flash_attn_func flash_attn_kvpacked_func flash_attn_qkvpacked_func flash_attn_varlen_func "
        "flash_attn_varlen_kvpacked_func flash_attn_varlen_qkvpacked_func flash_attn_with_kvcache",
        "flash_attn.layers.rotary": "apply_rotary_emb apply_rotary_emb_func apply_rotary_emb_qkv_ apply_rotary_emb_kv_ "
        "RotaryEmbedding",
        "flash_attn.bert_padding": "index_first_axis index_put_first_axis unpad_input pad_input",
        "flash_attn.losses.cross_entropy": "CrossEntropyLoss",
        "flash_attn.modules.mha": "FlashSelfAttention FlashCrossAttention",
        "flash_attn.ops.rms_norm": "rms_norm dropout_add_rms_norm RMSNorm",
        "flash_attn.ops.layer_norm": "layer_norm dropout_add_layer_norm",
        "flash_attn.ops.fused_dense": "fused_dense_func FusedDense",
        "flash_attn.ops.activations": "swiglu bias_gelu_impl fast_gelu_impl",
        "flash_attn.ops.triton.layer_norm": "layer_norm_fn rms_norm_fn RMSNorm",
        "flash_attn.ops.triton.rotary": "apply_rotary",
        "flash_attn.ops.triton.cross_entropy": "cross_entropy_loss",
        "flash_attn.utils.distributed": "all_gather all_gather_raw reduce_scatter reduce_scatter_raw all_reduce "
        "all_reduce_raw",
    },
    "xformers": {
        "xformers.ops": "AttentionBias AttentionMask AttentionOp AttentionOpBase LowerTriangularMask SwiGLU swiglu "
        "MemoryEfficientAttentionCutlassFwdFlashBwOp MemoryEfficientAttentionCutlassOp RMSNorm unbind masked_matmul "
        "MemoryEfficientAttentionFlashAttentionOp memory_efficient_attention memory_efficient_attention_forward "
        "index_select_cat scaled_index_add",
        "xformers.profiler": "profile step MemSnapshotsProfiler PyTorchProfiler NsightProfiler",
    },
}


@pytest.mark.parametrize(
    ("shim", "module"), [(shim, module) for shim, modules in PUBLIC.items() for module in modules], ids=str
)
def test_a_shim_has_the_public_names_of_its_package(shim, module):
    assert set(PUBLIC[shim][module].split()) <= shim_of(shim).MODULES[module].keys()


def test_flash_attns_rotary_of_packed_heads_turns_q_and_k_in_one_kernel_each_way():
    """By hand: q and k of [2, 64, 3, 4, 32]; then 4 heads of q and 2 of k among 8; k alone of [2, 64, 2, 4, 32]. Three
    operations for each element that is turned."""

    def program():
        from flash_attn.layers.rotary import apply_rotary_emb_kv_, apply_rotary_emb_qkv_

        cos = sin = torch.ones(64, 16, device="cuda", dtype=torch.bfloat16)
        qkv, heads, kv = (
            torch.zeros(2, 64, *sizes, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for sizes in ((3, 4), (8,), (2, 4))
        )
        out = [
            apply_rotary_emb_qkv_(qkv * 1.0, cos, sin),
            apply_rotary_emb_qkv_(heads * 1.0, cos, sin, num_heads_q=4, seqlen_offsets=3),
            apply_rotary_emb_kv_(kv * 1.0, cos, sin),
        ]
        sum(each.sum() for each in out).backward()
        assert [each.grad.shape for each in (qkv, heads, kv)] == [each.shape for each in (qkv, heads, kv)]

    found = kernels(stepped("flash_attn", program))["rotary"]
    assert (found.calls, found.flops) == (6, 2 * 3 * 2 * 64 * 32 * (8 + 6 + 4))


def test_flash_attns_first_module_has_the_products_of_attention_and_returns_no_weights():
    """Versions before 2 had it in a file of its own."""

    def program():
        from flash_attn.flash_attention import FlashAttention

        qkv = torch.randn(2, 64, 3, 4, 32, device="cuda", dtype=torch.float16)
        out, weights = FlashAttention(attention_dropout=0.0)(qkv, causal=False)
        assert out.shape == (2, 64, 4, 32)
        assert weights is None
        with pytest.raises(NotImplementedError, match="key_padding_mask"):
            FlashAttention()(qkv, key_padding_mask=torch.ones(2, 64, device="cuda"))

    assert stepped("flash_attn", program).macs == 2 * 2 * 4 * 64 * 64 * 32  # q k and p v


def test_flash_attns_losses_and_layers_have_the_products_and_results_of_torchs():
    def program():
        from flash_attn.losses.cross_entropy import CrossEntropyLoss
        from flash_attn.modules.mha import FlashSelfAttention
        from flash_attn.ops.fused_dense import FusedDense
        from flash_attn.ops.rms_norm import RMSNorm

        dense, norm = (each.cuda().bfloat16() for each in (FusedDense(64, 96), RMSNorm(64)))
        x = torch.randn(2, 16, 64, device="cuda", dtype=torch.bfloat16)
        qkv = dense(norm(x)).view(2, 16, 3, 2, 16)
        out = FlashSelfAttention(causal=True)(qkv)
        labels = torch.zeros(32, dtype=torch.long, device="cuda")
        CrossEntropyLoss()(out.flatten(2).flatten(0, 1), labels).backward()
        assert dense.weight.grad.shape == (96, 64)

    macs, attention = stepped("flash_attn", program).macs, 2 * 2 * 2 * 16 * 16 * 16
    dense = 2 * 16 * 64 * 96
    assert macs == 3 * dense + attention + 5 * attention // 2  # five products of the backward pass, not two


def test_flash_attns_collectives_have_those_of_nccl_forward_and_the_opposite_ones_backward():
    """Of 6 rows a rank, two ranks gather 12; of 12, each keeps 6. An all_reduce gives its gradient on as it is."""
    import torch.distributed as dist

    with flopmeter.cuda(A100, gpus=2, wishes=Wishes(shims=("flash_attn",))) as device:
        from flash_attn.utils.distributed import all_gather, all_gather_raw, all_reduce, reduce_scatter

        dist.init_process_group("nccl")
        x = torch.zeros(6, 3, device="cuda", requires_grad=True)
        whole = all_gather(x, dist.group.WORLD)
        parts = reduce_scatter(whole * 2, dist.group.WORLD)
        all_reduce(parts, dist.group.WORLD).sum().backward()
        filled, handle = all_gather_raw(x.detach(), dist.group.WORLD, async_op=True)
        handle.wait()
        assert [each.shape for each in (whole, parts, x.grad, filled)] == [(12, 3), (6, 3), (6, 3), (12, 3)]
    found = [kernel.cost.collective.kind for kernel in device.report().step.kernels if kernel.cost.collective]
    forward, backward = ["all_gather", "reduce_scatter", "all_reduce"], ["all_gather", "reduce_scatter"]
    assert found == [*forward, *backward, "all_gather"]


def test_apex_updates_and_norms_are_one_kernel():
    def program():
        from apex.normalization import FusedLayerNorm
        from apex.optimizers import FusedAdam

        model = nn.Sequential(FusedLayerNorm(64), nn.Linear(64, 64)).cuda()
        train(model, torch.zeros(8, 64, device="cuda"), FusedAdam(model.parameters(), adam_w_mode=False))

    found = kernels(stepped("apex", program))
    assert {
        name: found[name].calls for name in ("_fused_adam_", "native_layer_norm", "native_layer_norm_backward")
    } == {
        "_fused_adam_": 1,
        "native_layer_norm": 1,
        "native_layer_norm_backward": 1,
    }


def test_a_program_may_name_xformers_operator_among_those_that_a_checkpoint_keeps():
    with flopmeter.cuda(A100, wishes=Wishes(shims=("xformers",))):
        import xformers.ops  # noqa: F401 - as lingua does

        for operator in (torch.ops.xformers_flash.flash_fwd, torch.ops.xformers.efficient_attention_forward_cutlass):
            assert isinstance(operator.default, torch._ops.OpOverload)
        torch.ones(1, device="cuda")


def test_apexs_lists_of_tensors_are_scaled_and_normed_without_a_wait():
    """What Megatron-LM does to its gradients: 4 bytes of each number are read for the norm; 4 more are read to be
    scaled, and written. Nothing of the shim is left."""
    sizes = (3_000, 5_000)

    def program():
        import amp_C
        from apex.multi_tensor_apply import multi_tensor_applier

        gradients = [torch.zeros(size, device="cuda") for size in sizes]
        skipped = torch.zeros(1, dtype=torch.int, device="cuda")
        for _ in range(2):
            norm, each = multi_tensor_applier(amp_C.multi_tensor_l2norm, skipped, [gradients], True)
            assert (norm.shape, each.shape) == ((1,), (2,))
            multi_tensor_applier(amp_C.multi_tensor_scale, skipped, [gradients, gradients], 0.5)
            copies = [torch.empty_like(each) for each in gradients]
            multi_tensor_applier(amp_C.multi_tensor_scale, skipped, [gradients, copies], 1.0)

    with flopmeter.cuda(A100, steps=2, wishes=Wishes(shims=("apex",))) as device:
        program()
    assert "amp_C" not in sys.modules
    found = kernels(device.report().step)
    assert not any(kernel.cost.blocks_host for kernel in device.report().step.kernels)
    numbers = 4 * sum(sizes) * 2  # twice in this program, which is no loop of steps
    assert found["_foreach_norm"].bytes_read == numbers
    for name in ("_foreach_mul_", "_foreach_copy_"):
        assert (found[name].bytes_read, found[name].bytes_written) == (numbers, numbers)


def test_apexs_weight_gradient_is_one_product_that_adds_to_fp32():
    """Megatron-LM's output layer calls it: bf16 factors are read, and 4 bytes a weight are read and written."""
    tokens, features, outputs = 64, 32, 48

    def program():
        import fused_weight_gradient_mlp_cuda as apexs

        x, gradient = (torch.zeros(2, tokens // 2, n, device="cuda", dtype=torch.bfloat16) for n in (features, outputs))
        apexs.wgrad_gemm_accum_fp32(x, gradient, torch.zeros(outputs, features, device="cuda"))

    with flopmeter.cuda(A100, wishes=Wishes(shims=("apex",))) as device:
        program()
    row = kernels(device.report().step)["te_gemm_into"]
    assert row.flops == 2 * tokens * features * outputs + features * outputs
    assert row.bytes_read == 2 * tokens * (features + outputs) + 4 * features * outputs
    assert row.bytes_written == 4 * features * outputs


def test_apexs_function_of_a_norm_has_the_kernels_of_torchs_and_names_its_arguments():
    def program(is_apexs):
        from apex.normalization.fused_layer_norm import FusedLayerNormAffineFunction as Norm

        assert "memory_efficient" in inspect.getfullargspec(Norm.forward).args
        model = nn.LayerNorm(64).cuda()
        if is_apexs:
            model.forward = lambda x: Norm.apply(x, model.weight, model.bias, torch.Size([64]), 1e-5)
        train(model, torch.zeros(8, 64, device="cuda"))

    own, torchs = (stepped("apex", lambda each=each: program(each)) for each in (True, False))
    work = [
        [(kernel.cost.name, kernel.cost.bytes, kernel.cost.flops) for kernel in each.kernels] for each in (own, torchs)
    ]
    assert work[0] == work[1]


@pytest.mark.parametrize(("capturable", "waits"), [(False, 1), (True, 0)])
def test_a_scaler_of_gradients_waits_before_it_steps_apexs_adam_unless_that_is_capturable(capturable, waits):
    """apex/optimizers/fused_adam.py: only then the kernel itself skips steps of infinite gradients; else torch's
    GradScaler asks, and the host waits."""

    def program():
        from apex.optimizers import FusedAdam

        model, scaler = nn.Linear(64, 64).cuda(), torch.amp.GradScaler()
        optimizer = FusedAdam(model.parameters(), capturable=capturable)
        for _ in range(4):
            scaler.scale(model(torch.zeros(8, 64, device="cuda")).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    assert sum(kernel.cost.blocks_host for kernel in stepped("apex", program).kernels) == waits


def test_larc_scales_each_gradient_by_two_norms_and_waits_for_each():
    """By hand: two parameters; the host asks of two norms each whether they are 0."""

    def program():
        from apex.parallel.LARC import LARC

        model = nn.Linear(64, 64).cuda()
        optimizer = LARC(torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.01), clip=False)
        train(model, torch.zeros(8, 64, device="cuda"), optimizer)
        assert optimizer.param_groups[0]["weight_decay"] == 0.01
        import apex

        with pytest.raises(NotImplementedError, match=r"torch\.autocast"):
            apex.amp.initialize(model, optimizer, opt_level="O1")

    found = kernels(stepped("apex", program))
    waits = found["_local_scalar_dense"].calls
    assert (found["linalg_vector_norm"].calls, waits, found["mul_"].calls) == (4, 4, 2)


def test_bitsandbytes_moves_a_byte_a_state_and_half_a_byte_a_weight():
    n, blocks = 256 * 256, 256

    def program():
        import bitsandbytes as bnb

        model = nn.Sequential(
            bnb.nn.Linear4bit(256, 256, bias=False, compute_dtype=torch.float32),
            nn.Linear(256, 256, bias=False),
            bnb.nn.Linear8bitLt(256, 256, bias=False, has_fp16_weights=False),
        ).cuda()
        assert (model[0].weight.dtype, model[0].weight.numel()) == (torch.uint8, n // 2)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        assert len(trained) == 1
        train(model, torch.zeros(32, 256, device="cuda", requires_grad=True), bnb.optim.AdamW8bit(trained))
        with pytest.raises(NotImplementedError, match="threshold=0"):
            bnb.nn.Linear8bitLt(4, 4, has_fp16_weights=False, threshold=6.0)

    report = stepped("bitsandbytes", program)
    found = kernels(report)
    update = found["bitsandbytes_adam"]
    assert update.bytes_read == 4 * n + 4 * n + 2 * n + 2 * 4 * blocks  # gradient, weight, two states, their scales
    assert update.bytes_written == update.bytes_read - 4 * n  # all but the gradient
    # Three layers forward, three gradients of the input (the first's, too), one of a weight.
    assert report.macs == 7 * 32 * n
    assert found["_int_mm"].calls == 1
    dequantize = found["bitsandbytes_dequantize"]  # the weight twice, and its scales, which are bytes, before each
    assert dequantize.bytes_written == 2 * (4 * n + 4 * n // 64)
    assert dequantize.bytes_read == 2 * ((n // 2 + 4 * n // 64) + (n // 64 + 4 * n // 64 // 256))


def test_a_4_bit_layer_takes_weights_that_a_library_quantised_itself():
    """lightning's and litgpt's plugins give a layer Params4bit of `functional.quantize_4bit`."""

    def program():
        import bitsandbytes as bnb

        layer = bnb.nn.Linear4bit(256, 128, bias=False, device="meta", quant_type="nf4")
        asked = layer.weight
        assert isinstance(asked, bnb.nn.Params4bit)
        assert (asked.blocksize, asked.quant_type, asked.compress_statistics) == (64, "nf4", True)
        whole = torch.zeros(128, 256, dtype=torch.half, device="cuda")
        packed, state = bnb.functional.quantize_4bit(whole, compress_statistics=True)
        assert (packed.dtype, packed.numel()) == (torch.uint8, 128 * 256 // 2)
        assert state.shape == whole.shape
        layer.weight = bnb.nn.Params4bit(packed, quant_state=state, quant_type="nf4")
        layer.cuda()
        assert isinstance(layer.weight, bnb.nn.Params4bit)
        assert layer.weight.quant_state is state
        assert bnb.functional.dequantize_4bit(layer.weight, state).shape == whole.shape
        eighth = bnb.nn.Linear8bitLt(128, 128, bias=False, has_fp16_weights=False).cuda()
        assert isinstance(eighth.weight, bnb.nn.Int8Params)
        assert (eighth.weight.dtype, eighth.weight.SCB.shape) == (torch.int8, (128,))
        assert not eighth.weight.requires_grad
        nn.Sequential(layer, eighth)(torch.zeros(32, 256, dtype=torch.half, device="cuda"))

    report = stepped("bitsandbytes", program)
    assert report.macs == 32 * (256 * 128 + 128 * 128)


@pytest.mark.parametrize(("bits", "state_bytes"), [(32, 4), (8, 1)])
def test_bitsandbytes_adam_has_states_of_the_bits_that_it_is_told_and_waits_for_each_parameter(bits, state_bytes):
    """As `adamw_8bit` of transformers asks for them, with those of embeddings in fp32, and all paged."""

    def program():
        import bitsandbytes as bnb

        stable = bnb.nn.StableEmbedding(64, 256)
        model = nn.Sequential(nn.Embedding(128, 256), stable, nn.Linear(256, 256, bias=False)).cuda()
        stable.norm.requires_grad_(False)
        bnb.optim.GlobalOptimManager.get_instance().register_module_override(model[0], "weight", {"optim_bits": 32})
        optimizer = bnb.optim.AdamW(model.parameters(), lr=1e-3, optim_bits=bits, is_paged=True)
        tokens = torch.zeros(4, dtype=torch.long, device="cuda")
        for _ in range(2):
            (model[2](model[0](tokens)).sum() + stable(tokens).sum()).backward()
            with mock.patch.object(torch.cuda, "synchronize") as waits:
                optimizer.step()
            assert waits.call_count == 3
            optimizer.zero_grad()

    report = stepped("bitsandbytes", program)
    scales = 2 * 4 * 256 if bits == 8 else 0
    states = 2 * 4 * (128 * 256 + 64 * 256) + 2 * state_bytes * 256 * 256 + scales
    update = kernels(report)["bitsandbytes_adam"]
    assert update.bytes_read == 2 * 4 * (128 * 256 + 64 * 256 + 256 * 256) + states  # gradients, weights


QLORA = """
import sys, torch, transformers
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM
sizes = dict(vocab_size=64, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2)
LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(sys.argv[1])
four = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
load = dict(quantization_config=four, dtype=torch.bfloat16, device_map={"": 0})
model = LlamaForCausalLM.from_pretrained(sys.argv[1], **load)
assert model.model.layers[0].mlp.up_proj.weight.dtype == torch.uint8
for _ in range(40):
    with torch.no_grad():
        model(torch.zeros(2, 16, dtype=torch.long).cuda())
"""


def test_transformers_loads_weights_in_4_bits_and_multiplies_them_whole(tmp_path):
    """Each of 14 layers is made whole again, half a byte an element and a scale for 64; the head is not in 4 bits."""
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    (tmp_path / "program.py").write_text(QLORA)
    command = ["-m", "flopmeter", "run", "--hardware", A100, "--shim", "bitsandbytes", "--format", "json"]
    ran = subprocess.run(
        [sys.executable, *command, tmp_path / "program.py", tmp_path / "model"], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    rows = {row["name"]: row for row in json.loads(ran.stderr[ran.stderr.index("{") :])["rows"]["op"]}
    weights = 2 * (4 * 128 * 128 + 3 * 128 * 256)
    (whole,) = [row for name, row in rows.items() if "bitsandbytes_dequantize" in name]
    assert (whole["calls"], whole["bytes_written"]) == (14, 2 * weights)
    assert whole["bytes_read"] == weights / 2 + 4 * weights / 64
    products = sum(row["flops"] for name, row in rows.items() if name.split("::")[-1].split()[0] in ("mm", "addmm"))
    assert products == 2 * 32 * (weights + 64 * 128)


def test_scripts_read_the_driver_of_the_profile():
    def program():
        import pynvml
        from pynvml import smi

        pynvml.nvmlInit()
        assert pynvml.nvmlDeviceGetCount() == 1
        gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
        assert pynvml.nvmlDeviceGetName(gpu) == torch.cuda.get_device_name()
        before = pynvml.nvmlDeviceGetMemoryInfo(gpu)
        held = torch.zeros(64, 2**20, device="cuda")
        after = pynvml.nvmlDeviceGetMemoryInfo(gpu)
        assert after.used - before.used == held.nbytes
        assert after.used + after.free == after.total == torch.cuda.mem_get_info()[1]
        assert pynvml.nvmlDeviceGetPowerUsage(gpu) == torch.cuda.power_draw() > 0
        assert pynvml.nvmlDeviceGetUtilizationRates(gpu) == (0, 0)
        with pytest.raises(pynvml.NVMLError):
            pynvml.nvmlDeviceGetHandleByIndex(1)
        (told,) = smi.nvidia_smi.getInstance().DeviceQuery("memory.used, memory.total")["gpu"]
        assert told["fb_memory_usage"] == {
            "total": after.total / 2**20, "free": after.free / 2**20, "used": after.used / 2**20, "unit": "MiB",
        }  # fmt: skip
        assert told["utilization"] == {"gpu_util": 0, "memory_util": 0, "unit": "%"}
        pynvml.nvmlShutdown()

    stepped("pynvml", program)


def test_a_selective_scan_counts_seven_operations_a_state_and_keeps_a_state_of_each_chunk():
    batch, channels, length, states = 2, 32, 4096, 16

    def program():
        from mamba_ssm.ops.selective_scan_interface import selective_scan_fn

        u = torch.zeros(batch, channels, length, device="cuda", requires_grad=True)
        a = torch.zeros(channels, states, device="cuda")
        b = torch.zeros(batch, states, length, device="cuda")
        selective_scan_fn(u, u, a, b, b).sum().backward()
        assert u.grad.shape == u.shape

    found = kernels(stepped("mamba_ssm", program))
    n = batch * channels * length
    scan = found["selective_scan"]
    assert scan.flops == 7 * n * states + n  # and delta u
    assert scan.bytes_written == 4 * n + 4 * batch * channels * 2 * 2 * states  # y, and two chunks
    assert scan.bytes_read == 4 * (n + channels * states + batch * states * length)  # u is delta, B is C
    assert found["selective_scan_backward"].flops > 2 * scan.flops


def test_the_compiled_part_of_mamba_writes_the_gradient_of_the_gate_where_it_is_wanted_and_gates_again():
    """mamba_ssm keeps the gradient of its gate beside others, and y after the gate not at all. By hand: backward reads
    u, delta, z, y and its gradient, B and C of one group, A, and the states."""
    batch, channels, length, states = 2, 32, 4096, 16

    def program():
        import selective_scan_cuda

        u = torch.zeros(batch, channels, length, device="cuda")
        delta, gate = torch.zeros_like(u), torch.zeros_like(u)
        a = torch.zeros(channels, states, device="cuda")
        b, c = (torch.zeros(batch, 1, states, length, device="cuda") for _ in range(2))
        out, kept, gated = selective_scan_cuda.fwd(u, delta, a, b, c, None, gate, None, True)
        assert gated.shape == out.shape == u.shape
        beside = torch.zeros(batch, 2 * channels, length, device="cuda").chunk(2, dim=1)[1]
        *gradients, of_gate, again = selective_scan_cuda.bwd(
            u, delta, a, b, c, None, gate, None, gated, kept, out, beside, True, True
        )
        assert of_gate is beside
        assert again.shape == u.shape
        assert [each.shape for each in gradients[:5]] == [each.shape for each in (u, delta, a, b, c)]

    row = kernels(stepped("selective_scan_cuda", program))["selective_scan_backward"]
    whole, small = 4 * batch * channels * length, 4 * channels * states
    of_states, of_chunks = 4 * batch * states * length, 4 * batch * channels * 2 * 2 * states
    assert row.bytes_read == 5 * whole + small + 2 * of_states + of_chunks
    assert row.bytes_written == 4 * whole + small + 2 * of_states  # of u, delta and z, and y after the gate


def test_a_mamba_block_has_the_products_of_its_four_projections():
    width, batch, length = 64, 2, 128
    inner, rank, states = 2 * width, width // 16, 16

    def program():
        from mamba_ssm import Mamba

        train(Mamba(width).cuda(), torch.zeros(batch, length, width, device="cuda", requires_grad=True))

    weights = width * 2 * inner + inner * (rank + 2 * states) + rank * inner + inner * width
    assert stepped("mamba_ssm", program).macs == 3 * weights * batch * length


def test_a_causal_convolution_multiplies_each_element_by_its_width():
    """It reads the element itself, its weights, and which sequence each position is of; it writes the element."""

    def program():
        from causal_conv1d import causal_conv1d_fn

        x, sequences = torch.zeros(2, 64, 512, device="cuda"), torch.zeros(2, 512, dtype=torch.int32, device="cuda")
        causal_conv1d_fn(x, torch.zeros(64, 4, device="cuda"), seq_idx=sequences, activation="silu")

    (row,) = (row for name, row in kernels(stepped("causal_conv1d", program)).items() if name == "causal_conv1d")
    assert row.flops == 2 * 64 * 512 * (4 + 3 + 4)  # products, sums, and x / (1 + exp(-x))
    assert (row.bytes_read, row.bytes_written) == (4 * (2 * 64 * 512 + 64 * 4 + 2 * 512), 4 * 2 * 64 * 512)


def test_a_causal_convolution_starts_from_states_gives_the_last_ones_and_goes_on_step_by_step():
    def program():
        from causal_conv1d import causal_conv1d_fn, causal_conv1d_update

        weight = torch.zeros(64, 4, device="cuda", requires_grad=True)
        bias = torch.zeros(64, device="cuda", requires_grad=True)
        x = torch.zeros(2, 512, 64, device="cuda").transpose(1, 2)
        before = torch.zeros(2, 3, 64, device="cuda").transpose(1, 2).requires_grad_()
        out, states = causal_conv1d_fn(x, weight, bias, initial_states=before, return_final_states=True)
        (out.sum() + states.sum()).backward()
        assert weight.grad.shape == weight.shape
        assert bias.grad.shape == bias.shape
        assert before.grad.shape == before.shape == states.shape
        assert causal_conv1d_update(x[..., 0].detach(), states.detach(), weight, bias, "silu").shape == (2, 64)

    found = kernels(stepped("causal_conv1d", program))
    assert found["causal_conv1d_update"].flops == 2 * 64 * (4 + 3 + 1 + 4)  # products, sums, the bias, SiLU


def test_mambas_own_backward_pass_writes_the_gradient_of_a_causal_convolution_where_it_wants_it():
    """mamba_ssm calls the kernels from autograd functions of its own, with memory for the gradient of x, which lies
    beside others. By hand: x and its gradient read, the other written, and sums in fp32 read and written."""

    def program():
        from causal_conv1d.cpp_functions import causal_conv1d_bwd_function, causal_conv1d_fwd_function

        weight, bias = torch.zeros(64, 4, device="cuda"), torch.zeros(64, device="cuda")
        x = torch.zeros(2, 512, 64, device="cuda").transpose(1, 2)
        out = causal_conv1d_fwd_function(x, weight, bias, None, None, None, True)
        beside = torch.zeros(2, 512, 100, device="cuda")[..., :64].transpose(1, 2)
        of_x, *of_weights, of_states = causal_conv1d_bwd_function(
            x, weight, bias, out, None, None, None, beside, False, True
        )
        assert of_x is beside
        assert of_states is None
        assert [each.shape for each in of_weights] == [weight.shape, bias.shape]

    row = kernels(stepped("causal_conv1d", program))["causal_conv1d_backward"]
    sums, whole = 4 * (64 * 4 + 64), 4 * 2 * 64 * 512
    assert (row.bytes_read, row.bytes_written) == (2 * whole + sums + sums, whole + sums)


def test_flash_attns_rotary_embedding_is_one_kernel_each_way_and_its_norm_one_forward():
    """By hand: of [2, 64, 4, 32] the first half of each head is turned, at three operations an element."""

    def program():
        from flash_attn.layers.rotary import apply_rotary_emb
        from flash_attn.ops.triton.layer_norm import layer_norm_fn

        angles = torch.zeros(64, 8, device="cuda", dtype=torch.bfloat16)
        x = torch.zeros(2, 64, 4, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        turned = apply_rotary_emb(x, angles, angles, interleaved=False)
        weight = torch.ones(32, device="cuda", dtype=torch.bfloat16)
        layer_norm_fn(turned, weight, None, is_rms_norm=True).sum().backward()
        assert x.grad.shape == x.shape
        with pytest.raises(NotImplementedError, match="cu_seqlens"):
            apply_rotary_emb(x, angles, angles, cu_seqlens=angles)

    found = kernels(stepped("flash_attn", program))
    assert (found["rotary"].calls, found["rotary"].flops) == (2, 2 * 3 * 2 * 64 * 4 * 16)
    assert found["_fused_rms_norm"].calls == 1


@pytest.mark.skipif(timer is timeit.default_timer, reason="torch 2.11 looks for a device when its timer is imported")
def test_flash_attns_own_benchmarks_tell_the_time_that_events_tell(capsys):
    def program():
        from flash_attn import flash_attn_func
        from flash_attn.utils.benchmark import benchmark_all, benchmark_forward

        q = torch.zeros(4, 2048, 8, 64, device="cuda", dtype=torch.float16, requires_grad=True)
        found = benchmark_all(flash_attn_func, q, q, q, causal=True, repeats=20, verbose=False)
        forward, backward, both = (measured.mean for _, measured in found)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(20):
            flash_attn_func(q, q, q, causal=True)
        end.record()
        torch.cuda.synchronize()
        assert forward == pytest.approx(start.elapsed_time(end) / 1000 / 20, rel=0.05)
        assert both == pytest.approx(forward + backward, rel=0.05)
        benchmark_forward(torch.matmul, q.float(), q.float().mT, amp=True, repeats=2, desc="in half")

    stepped("flash_attn", program)
    assert capsys.readouterr().out.startswith("in half\n- Forward pass\n")


def test_flash_attns_module_of_rotary_embeddings_turns_q_and_k_alone_and_in_place():
    """By hand: of [2, 64, 3 or 2, 4, 32] q and k are turned whole, at three operations an element; v is left alone."""
    elements = 2 * 64 * 4 * 32

    def program():
        from flash_attn.layers.rotary import RotaryEmbedding

        rotary = RotaryEmbedding(32, device="cuda")
        q = torch.zeros(2, 64, 4, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        kv = torch.zeros(2, 64, 2, 4, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        turned, packed = rotary(q, kv=kv * 1.0)  # two kernels each way
        qkv = torch.cat((turned[:, :, None], packed), 2)
        out = rotary(qkv)  # one each way
        assert out is qkv
        out.sum().backward()
        assert q.grad.shape == q.shape
        assert kv.grad.shape == kv.shape

    found = kernels(stepped("flash_attn", program))
    assert (found["rotary"].calls, found["rotary"].flops) == (6, 2 * 3 * (elements + elements + 2 * elements))


def test_what_flash_attn_takes_from_einops_is_there_too(monkeypatch):
    """OpenRLHF and verl import it from there, with the rest."""

    def merge_first_two(tensor, pattern, **sizes):
        assert pattern == "b s ... -> (b s) ..."
        return tensor.flatten(0, 1)

    monkeypatch.setitem(sys.modules, "einops", SimpleNamespace(rearrange=merge_first_two))

    def program():
        from flash_attn.bert_padding import index_first_axis, pad_input, rearrange, unpad_input  # noqa: F401

        x = torch.zeros(2, 3, 8, device="cuda")
        assert rearrange(x, "b s ... -> (b s) ...").shape == (6, 8)

    stepped("flash_attn", program)


def test_rows_that_a_mask_names_are_padded_again_by_flash_attns_functions():
    def program():
        from flash_attn.bert_padding import pad_input, unpad_input

        mask = torch.tensor([[True, True, False], [True, False, False]], device="cuda")
        x = torch.zeros(2, 3, 8, device="cuda", requires_grad=True)
        rows, indices, ends, longest, used = unpad_input(hidden_states=x, attention_mask=mask)
        assert (rows.shape, indices.tolist(), ends.tolist(), longest) == ((3, 8), [0, 1, 3], [0, 2, 3], 2)
        assert used.tolist() == [2, 1]
        padded = pad_input(hidden_states=rows, indices=indices, batch=2, seqlen=3)  # verl names them
        assert padded.shape == x.shape
        padded.sum().backward()

    stepped("flash_attn", program)


def test_attention_that_is_asked_for_its_sums_returns_them_and_no_weights():
    def program():
        from flash_attn import flash_attn_func

        q = torch.zeros(2, 64, 4, 32, device="cuda", dtype=torch.bfloat16)
        out, sums, weights = flash_attn_func(q, q, q, return_attn_probs=True)
        assert (out.shape, sums.shape, weights) == (q.shape, (2, 4, 64), None)
        with pytest.raises(NotImplementedError, match="return_attn_probs"):
            flash_attn_func(q, q, q, dropout_p=0.1, return_attn_probs=True)

    assert stepped("flash_attn", program).macs == 2 * 2 * 4 * 64 * 64 * 32


def test_internals_that_a_shim_leaves_out_can_be_imported_and_derived_from_but_not_used():
    def program():
        from flash_attn.flash_attn_interface import _get_block_size_n as internal

        class Derived(internal):
            pass

        with pytest.raises(NotImplementedError, match="flash_attn_interface has no _get_block_size_n"):
            Derived(1)
        torch.zeros(1, device="cuda").add(1)
        nn.Linear(1, 1, device="cuda")(torch.zeros(1, 1, device="cuda"))

    stepped("flash_attn", program)


def test_flash_attn_over_sequences_end_to_end_and_windows_are_the_products_of_what_is_seen():
    """By hand: two sequences of 64 tokens, two products forward and five backward; a causal window of 16 and one."""
    heads, size = 4, 32

    def program():
        from flash_attn import flash_attn_func, flash_attn_varlen_func

        q = torch.zeros(128, heads, size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        starts = torch.tensor([0, 64, 128], dtype=torch.int32, device="cuda")
        flash_attn_varlen_func(q, q, q, starts, starts, 64, 64).sum().backward()
        batch = q.detach().view(2, 64, heads, size)
        out = flash_attn_func(batch[:, -8:], batch, batch, causal=True, window_size=(15, 0), softcap=0.0)
        assert out.shape == (2, 8, heads, size)
        with pytest.raises(NotImplementedError, match="softcap"):
            flash_attn_func(batch, batch, batch, softcap=30.0)
        with pytest.raises(RuntimeError, match="fp16 and bf16"):
            flash_attn_func(batch.float(), batch.float(), batch.float())

    report = stepped("flash_attn", program)
    assert report.macs == heads * size * (7 * 2 * 64 * 64 + 2 * 2 * 8 * 64)
    seen = 2 * 8 * 16  # each of the last 8 queries sees 16 keys, the query's own the last
    pairs = {kernel.cost.masked_flops for kernel in report.kernels if kernel.cost.masked_flops}
    assert pairs == {2 * 2 * heads * size * (2 * 8 * 64 - seen)}


@pytest.mark.parametrize("paged", [False, True])
def test_flash_attn_over_a_cache_reads_what_it_holds_and_writes_what_is_new(paged):
    """By hand: three sequences that hold 100, 20 and 9 tokens, and one more each: 132 in all, in a cache of 3 x 256."""
    heads, groups, size = 8, 2, 64

    def program():
        from flash_attn import flash_attn_with_kvcache

        shape = (50, 16, groups, size) if paged else (3, 256, groups, size)
        cache = [torch.zeros(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
        q = torch.zeros(3, 1, heads, size, device="cuda", dtype=torch.bfloat16)
        new = torch.zeros(3, 1, groups, size, device="cuda", dtype=torch.bfloat16)
        lengths = torch.tensor([100, 20, 9], dtype=torch.int32, device="cuda")
        table = torch.zeros(3, 16, dtype=torch.int32, device="cuda") if paged else None
        out = flash_attn_with_kvcache(q, *cache, new, new, cache_seqlens=lengths, block_table=table, causal=True)
        assert out.shape == q.shape
        with pytest.raises(NotImplementedError, match="rotary_cos"):
            flash_attn_with_kvcache(q, *cache, rotary_cos=q, cache_seqlens=lengths)

    report = stepped("flash_attn", program)
    assert report.macs == 2 * heads * size * 132
    (row,) = (row for name, row in kernels(report).items() if name == "flash_attn_over_cache")
    token = 2 * groups * size * 2  # keys and values in bf16
    given = 3 * heads * size * 2
    appended = 3 * groups * size * 2  # one tensor stands for the new keys and the new values
    assert row.bytes_read == 132 * token + given + appended + 3 * 4 + (3 * 16 * 4 if paged else 0)
    assert row.bytes_written == given + 3 * token


def test_a_prompt_over_pages_meets_the_keys_that_are_there_already():
    """By hand: two prompts of 32 new tokens, of 96 in all, in pages of 16 of a pool of 100."""
    heads, size = 4, 64

    def program():
        from flash_attn import flash_attn_varlen_func

        pool = torch.zeros(100, 16, heads, size, device="cuda", dtype=torch.bfloat16)
        q = torch.zeros(64, heads, size, device="cuda", dtype=torch.bfloat16)
        starts = torch.tensor([0, 32, 64], dtype=torch.int32, device="cuda")
        table = torch.zeros(2, 6, dtype=torch.int32, device="cuda")
        flash_attn_varlen_func(q, pool, pool, starts, 3 * starts, 32, 96, causal=True, block_table=table)

    report = stepped("flash_attn", program)
    assert report.macs == 2 * heads * size * 2 * 32 * 96
    (hidden,) = {kernel.cost.masked_flops for kernel in report.kernels if kernel.cost.masked_flops}
    assert hidden == 2 * 2 * heads * size * 2 * (31 * 32 // 2)
    assert any("as long as the longest" in each for each in report.assumptions)


def test_a_cache_of_unknown_lengths_counts_as_full_and_the_report_says_so():
    def program():
        from flash_attn import flash_attn_with_kvcache

        cache = torch.zeros(2, 256, 4, 64, device="cuda", dtype=torch.bfloat16)
        lengths = torch.randint(1, 256, (2,), device="cuda").int() + (torch.randn(2, device="cuda") > 0)
        flash_attn_with_kvcache(cache[:, :1], cache, cache, cache_seqlens=lengths.int())

    report = stepped("flash_attn", program)
    assert report.macs == 2 * 2 * 256 * 4 * 64
    assert any("a cache that is full" in each for each in report.assumptions)


def test_flash_attention_3_has_the_work_of_flash_attention_2_and_on_hopper_its_own_time():
    """Two products forward and five backward, of causal squares, with one kernel each way; FlashAttention-3's paper
    (arXiv 2407.08608) has it 1.5 to 2 times as fast as -2 on an H100, and the same on devices that run -2's kernels."""
    batch, length, heads, depth = 2, 4096, 16, 128

    def program(name: str):
        attend = importlib.import_module(name).flash_attn_func
        x = torch.zeros(batch, length, heads, depth, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(2):
            out = attend(x, x, x, causal=True)
            out.backward(torch.zeros_like(out))  # dense, so that no library copies it

    def step(name: str, hardware: str):
        with flopmeter.cuda(hardware, steps=2, wishes=Wishes(shims=(name,))) as device:
            program(name)
        return device.report().step

    for hardware, least, most in (("h100-sxm5-80gb", 1.4, 2.1), (A100, 0.99, 1.01)):
        old, new = (step(name, hardware) for name in ("flash_attn", "flash_attn_interface"))
        attends = [[row for row in report.rows("op") if "flash" in row.name] for report in (old, new)]
        assert [sum(row.calls for row in rows) for rows in attends] == [2, 2]
        assert new.macs == old.macs == 7 * batch * heads * length * length * depth
        seconds = [sum(row.seconds for row in rows) for rows in attends]
        assert least < seconds[0] / seconds[1] < most


def test_packed_sequences_of_flash_attention_3_cost_their_own_squares():
    lengths = (100, 300, 600)

    def program():
        attend = importlib.import_module("kernels").get_kernel("kernels-community/flash-attn3", version=1)
        x = torch.zeros(sum(lengths), 8, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        starts = torch.tensor([0, 100, 400, 1000], dtype=torch.int32, device="cuda")
        for _ in range(2):
            out = attend.flash_attn_interface.flash_attn_varlen_func(x, x, x, starts, starts, 600, 600, causal=True)
            out.sum().backward()

    assert stepped("kernels", program).macs == 7 * 8 * 64 * sum(length**2 for length in lengths)


def test_the_shim_of_kernels_tells_what_it_does_not_have():
    def program():
        kernels = importlib.import_module("kernels")
        assert kernels.has_kernel("varunneal/flash-attention-3")
        assert kernels.has_kernel("kernels-community/flash-attn2")
        with pytest.raises(NotImplementedError, match="no kernels-community/activation"):
            kernels.get_kernel("kernels-community/activation")
        torch.ones(1, device="cuda")

    stepped("kernels", program)
