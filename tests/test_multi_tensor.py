"""Kernels over lists of tensors: beside profiles of H100 and H200 (torch 2.11, validation/traces), and their laws."""

import pytest
import torch

from flopmeter import FlopMeter
from flopmeter.costs.multi_tensor import _mean_launch, launches_of
from flopmeter.records import VectorWork
from flopmeter.torch_names import dispatcher

CHUNK = 65536
H100, H200 = "h100-sxm5-80gb", "h200-sxm-141gb"
fp32, bf16 = torch.float32, torch.bfloat16


@pytest.fixture
def torch_2_11(monkeypatch):
    """The torch of the profiles."""
    monkeypatch.setattr(dispatcher, "running_version", lambda: (2, 11))
    _mean_launch.cache_clear()
    yield
    _mean_launch.cache_clear()


def of_chunks(count, dtype):
    return [torch.empty(count * CHUNK, dtype=dtype, device="meta")]


def metered(call, hardware=H100):
    with FlopMeter(hardware) as meter:
        call()
    return meter.report()


def adamw(lists, hardware=H100):
    options = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1, "eps": 1e-8}
    steps = [torch.empty((), device="meta") for _ in lists[0]]
    return metered(lambda: torch._fused_adamw_(*lists, [], steps, amsgrad=False, maximize=False, **options), hardware)


# Chunks, type, device; microseconds.
ADAMW = [
    (3, fp32, H100, 35.6), (76, fp32, H100, 57.2), (248, fp32, H100, 152), (256, fp32, H100, 158.5),
    (282, fp32, H100, 180), (310, fp32, H100, 194), (320, fp32, H100, 219), (43, bf16, H100, 39.5),
    (97, bf16, H100, 47.8), (177, bf16, H100, 66), (295, bf16, H100, 126.7), (320, bf16, H100, 137),
    (76, fp32, H200, 47), (320, fp32, H200, 167),
]  # fmt: skip


@pytest.mark.parametrize(("chunks", "dtype", "hardware", "microseconds"), ADAMW)
def test_a_launch_of_fused_adamw_takes_about_as_long_as_in_profiles(chunks, dtype, hardware, microseconds, torch_2_11):
    report = adamw([of_chunks(chunks, dtype) for _ in range(4)], hardware)
    assert report.kernel_seconds * 1e6 == pytest.approx(microseconds, rel=0.12)


ADDITIONS = [
    (9, bf16, H100, 16.7), (320, bf16, H100, 46.5), (9, bf16, H200, 16.4), (320, bf16, H200, 34.9),
    (320, fp32, H100, 91), (282, fp32, H100, 72.7),
]  # fmt: skip


@pytest.mark.parametrize(("chunks", "dtype", "hardware", "microseconds"), ADDITIONS)
def test_a_launch_that_adds_lists_takes_about_as_long_as_in_profiles(chunks, dtype, hardware, microseconds, torch_2_11):
    lists = [of_chunks(chunks, dtype) for _ in range(2)]
    report = metered(lambda: torch._foreach_add_(*lists), hardware)
    assert report.kernel_seconds * 1e6 == pytest.approx(microseconds, rel=0.12)


def test_adamw_of_bert_large_takes_about_as_long_as_in_its_profile(torch_2_11):
    """335 million parameters in fp32: 9.81 ms in 136 launches, .81 of the bandwidth."""
    lists = [of_chunks(5114, fp32) for _ in range(4)]
    weights, gradients, means, squares = lists

    def step():
        torch._foreach_mul_(weights, 0.999)
        torch._foreach_lerp_(means, gradients, 0.1)
        torch._foreach_mul_(squares, 0.999)
        torch._foreach_addcmul_(squares, gradients, gradients, 1e-3)
        roots = torch._foreach_sqrt(squares)
        torch._foreach_div_(roots, [0.9])
        torch._foreach_add_(roots, 1e-8)
        torch._foreach_addcdiv_(weights, means, roots, [-1e-4])

    assert metered(step).kernel_seconds * 1e3 == pytest.approx(9.81, rel=0.04)


def gpt2_sizes():
    """Elements of each parameter of GPT-2 124M in turn, the vocabulary padded to 50,304."""
    width = 768
    attention = [width, width, 3 * width * width, 3 * width, width * width, width]
    mlp = [width, width, 4 * width * width, 4 * width, 4 * width * width, width]
    return [50304 * width, 1024 * width, *(attention + mlp) * 12, width, width]


def test_gpt2_is_updated_in_the_launches_of_its_profile(torch_2_11):
    assert [blocks for blocks, _ in launches_of(gpt2_sizes(), 4)] == [320] * 6 + [76]


def test_newer_builds_update_gpt2_in_one_launch(monkeypatch):
    monkeypatch.setattr(dispatcher, "running_version", lambda: (2, 13))
    assert list(launches_of(gpt2_sizes(), 4)) == [(1996, CHUNK)]


def test_many_small_tensors_fill_a_launch_before_its_blocks(torch_2_11):
    """36 addresses of each of four lists have room in 4 KB, 110 of one."""
    assert list(launches_of([100] * 80, 4)) == [(36, 100), (36, 100), (8, 100)]
    assert list(launches_of([0, 100] * 80, 1)) == [(80, 100)]
    assert list(launches_of([], 1)) == []


def test_a_tensor_that_is_cut_by_a_launch_goes_on_in_the_next(torch_2_11):
    assert list(launches_of([321 * CHUNK, 5], 2)) == [(320, CHUNK), (2, CHUNK)]


def test_all_chunks_of_all_tensors_are_in_some_launch():
    sizes = [7, CHUNK, CHUNK + 1, 5000 * CHUNK, 3 * CHUNK - 1] * 40
    assert sum(blocks for blocks, _ in launches_of(sizes, 3)) == 40 * (1 + 1 + 2 + 5000 + 3)


def test_one_large_tensor_takes_as_long_as_its_parts_in_one_list():
    whole, parts = [torch.empty(64 * CHUNK, device="meta")], [torch.empty(CHUNK, device="meta") for _ in range(64)]
    together, apart = metered(lambda: torch._foreach_mul_(whole, 2.0)), metered(lambda: torch._foreach_mul_(parts, 2.0))
    assert together.kernel_seconds == pytest.approx(apart.kernel_seconds)


def test_results_in_new_tensors_are_a_list_of_their_own(torch_2_11):
    """80 tensors: 64 addresses of two lists have room in a launch, 110 of one."""
    tensors = [torch.empty(100, device="meta") for _ in range(80)]
    new, in_place = (
        metered(lambda: torch._foreach_mul(tensors, 2.0)), metered(lambda: torch._foreach_mul_(tensors, 2.0))
    )  # fmt: skip
    works = [kernel.cost.work for report in (new, in_place) for kernel in report.kernels]
    assert [work.kernels for work in works if isinstance(work, VectorWork)] == [2, 1]


def test_fused_adamw_gains_less_from_bandwidth_than_its_bytes_would():
    """An H200 reads 1.43 times as fast as an H100 and has as many SMs at the same clock."""
    lists = [of_chunks(2240, bf16) for _ in range(4)]
    slow, fast = (adamw(lists, hardware).kernel_seconds for hardware in (H100, H200))
    assert 1.05 < slow / fast < 1.35
