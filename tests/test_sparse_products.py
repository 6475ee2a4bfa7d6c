"""Sparse matrices times dense ones, as in graph networks: counted by the elements that they hold."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import flopmeter
from flopmeter import FlopMeter

ROWS, COLUMNS, WIDTH, ELEMENTS = 4, 5, 16, 4
INDICES = torch.tensor([[0, 0, 1, 3], [1, 2, 0, 3]])


def adjacency():
    return torch.sparse_coo_tensor(INDICES, torch.rand(ELEMENTS), (ROWS, COLUMNS)).coalesce()


WAYS = {
    "torch.sparse.mm": torch.sparse.mm,
    "torch.mm": torch.mm,
    "@": torch.matmul,
    "torch.spmm": torch.spmm,
    "addmm": lambda a, w: torch.addmm(torch.zeros(ROWS, WIDTH, device="meta"), a, w, beta=0),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_product_multiplies_and_adds_a_row_for_each_element_forward_and_backward(way):
    with FlopMeter("h100-sxm5-80gb") as meter:
        weight = torch.empty(COLUMNS, WIDTH, device="meta", requires_grad=True)
        out = WAYS[way](adjacency().to("meta"), weight)
        out.sum().backward()
    report = meter.report()
    assert (out.shape, out.is_meta) == ((ROWS, WIDTH), True)
    assert weight.grad.shape == weight.shape
    products = [kernel.cost for kernel in report.kernels if kernel.cost.op_class == "tensor contraction"]
    assert [cost.flops for cost in products] == [2 * ELEMENTS * WIDTH] * 2
    # Two indices of 8 bytes and a value of 4 for each element; a row of the weight for each, one of the result.
    assert products[0].bytes_read == ELEMENTS * (2 * 8 + 4) + ELEMENTS * WIDTH * 4
    assert products[0].bytes_written == ROWS * WIDTH * 4
    assert not report.uncounted


@pytest.mark.parametrize("layout", ["to_sparse", "to_sparse_csr", "to_sparse_csc"])
def test_a_product_is_counted_in_each_layout_and_order(layout):
    sparse, left, right = getattr(adjacency().to_dense(), layout)(), torch.ones(WIDTH, ROWS), torch.ones(COLUMNS, WIDTH)
    with FlopMeter("h100-sxm5-80gb") as meter:
        left @ sparse
        sparse @ right
    products = [kernel.cost.flops for kernel in meter.report().kernels if kernel.cost.op_class == "tensor contraction"]
    assert products == [2 * ELEMENTS * WIDTH] * 2


def test_the_device_named_cuda_keeps_the_elements_of_a_sparse_tensor():
    with flopmeter.cuda("h100-sxm5-80gb"):
        for sparse in (adjacency().cuda(), torch.sparse_coo_tensor(INDICES, torch.rand(ELEMENTS), device="cuda")):
            assert sparse._nnz() == ELEMENTS
            assert (sparse @ torch.rand(sparse.shape[1], 3, device="cuda")).shape == (ROWS, 3)


def test_a_cast_on_the_way_keeps_the_elements():
    with FlopMeter("h100-sxm5-80gb"):
        sparse = adjacency().to("meta", torch.float16)
    assert (sparse.dtype, sparse._nnz(), sparse.is_coalesced()) == (torch.float16, ELEMENTS, True)


def test_a_dense_copy_is_filled_with_zeros_and_then_with_the_elements():
    with FlopMeter("h100-sxm5-80gb") as meter:
        dense = adjacency().to("meta").to_dense()
    assert (dense.shape, dense.layout, dense.is_meta) == ((ROWS, COLUMNS), torch.strided, True)
    zeros, elements = (kernel.cost for kernel in meter.report().kernels[-2:])
    assert (zeros.bytes_written, elements.bytes_written) == (ROWS * COLUMNS * 4, ELEMENTS * 4)
    assert elements.access == "scatter"


def test_a_sparse_tensor_that_lost_its_elements_before_the_meter_is_told_of():
    lost = adjacency().to("meta")
    with FlopMeter("h100-sxm5-80gb") as meter:
        torch.mm(lost, torch.empty(COLUMNS, WIDTH, device="meta"))
    assert "copy it inside of the meter" in str(meter.report())


def test_a_sparse_tensor_on_the_right_is_one_clear_error():
    with FlopMeter("h100-sxm5-80gb"):
        sparse = adjacency().to("meta")
        with pytest.raises(NotImplementedError, match=r"make that tensor dense \(to_dense\(\)\)"):
            torch.mm(sparse, sparse.t())


@pytest.mark.parametrize("layout", ["to_sparse_csr", "to_sparse_csc"])
def test_a_compressed_tensor_keeps_its_values_on_meta_and_is_multiplied_by_them(layout):
    with FlopMeter("h100-sxm5-80gb") as meter:
        sparse = getattr(adjacency().to_dense(), layout)().to("meta")
        assert (sparse @ torch.empty(COLUMNS, WIDTH, device="meta")).shape == (ROWS, WIDTH)
        assert (torch.empty(WIDTH, ROWS, device="meta") @ sparse).shape == (WIDTH, COLUMNS)
        assert (sparse @ torch.empty(COLUMNS, device="meta")).shape == (ROWS,)
    products = [kernel.cost for kernel in meter.report().kernels if kernel.cost.op_class == "tensor contraction"]
    assert [cost.flops for cost in products] == [2 * ELEMENTS * WIDTH] * 2 + [2 * ELEMENTS]
    # A value and an index for each element, a pointer for each row or column and one more; a row of the dense matrix.
    pointers = (ROWS if layout == "to_sparse_csr" else COLUMNS) + 1
    assert products[0].bytes_read == ELEMENTS * (4 + 8) + pointers * 8 + ELEMENTS * WIDTH * 4
    assert not meter.report().uncounted


def test_coordinates_become_rows_without_losing_elements():
    with FlopMeter("h100-sxm5-80gb"):
        rows = adjacency().to("meta").to_sparse_csr()
    assert (rows.layout, rows.values().numel(), rows.crow_indices().numel()) == (torch.sparse_csr, ELEMENTS, ROWS + 1)
    assert rows.is_meta


def test_one_sparse_tensor_is_copied_into_another_as_indices_and_values():
    with FlopMeter("h100-sxm5-80gb") as meter:
        left, right = (adjacency().to("meta") for _ in range(2))
        left.copy_(right)
    copy = meter.report().kernels[-1].cost
    assert (copy.op_class, copy.bytes_read, copy.bytes_written) == ("data movement", ELEMENTS * 20, ELEMENTS * 20)
    assert not meter.report().uncounted


@pytest.mark.parametrize(("beta", "added"), [(0, 0), (1, 1), (0.5, 1)])
def test_what_is_added_to_a_sparse_product_is_read_and_added_unless_beta_is_zero(beta, added):
    with FlopMeter("h100-sxm5-80gb") as meter:
        sums, weight = (torch.empty(rows, WIDTH, device="meta") for rows in (ROWS, COLUMNS))
        torch.addmm(sums, adjacency().to("meta"), weight, beta=beta)
    (product,) = [kernel.cost for kernel in meter.report().kernels if kernel.cost.op_class == "tensor contraction"]
    assert product.flops == 2 * ELEMENTS * WIDTH + added * ROWS * WIDTH
    assert product.bytes_read == ELEMENTS * (2 * 8 + 4) + ELEMENTS * WIDTH * 4 + added * ROWS * WIDTH * 4


def test_more_elements_than_columns_read_each_row_of_the_dense_matrix_once():
    """Ten elements of a matrix of two columns."""
    indices = torch.stack([torch.arange(10), torch.arange(10) % 2])
    with FlopMeter("h100-sxm5-80gb") as meter:
        matrix = torch.sparse_coo_tensor(indices, torch.rand(10), (10, 2)).coalesce().to("meta")
        torch.sparse.mm(matrix, torch.empty(2, WIDTH, device="meta"))
    (product,) = [kernel.cost for kernel in meter.report().kernels if kernel.cost.op_class == "tensor contraction"]
    assert product.bytes_read == 10 * (2 * 8 + 4) + 2 * WIDTH * 4


def test_a_sum_of_two_sparse_matrices_puts_both_together_and_scales_the_second():
    with FlopMeter("h100-sxm5-80gb") as meter:
        one, other = (adjacency().to("meta") for _ in range(2))
        torch.add(one, other), torch.add(one, other, alpha=2)
    plain, scaled = [kernel.cost for kernel in meter.report().kernels if kernel.op.call.name == "add"]
    assert (plain.flops, scaled.flops) == (0, ELEMENTS)
    assert plain.bytes_read == scaled.bytes_read == 2 * ELEMENTS * (2 * 8 + 4)


def test_a_dense_tensor_whose_values_are_known_is_made_sparse_of_what_is_not_zero():
    """Six elements of a lower triangle of 3 x 3."""
    with FlopMeter("h100-sxm5-80gb") as meter:
        for grads in (torch.enable_grad, torch.inference_mode):
            with grads():
                sparse = torch.ones(3, 3, device="meta").tril().to_sparse()
                assert (sparse.shape, sparse._nnz(), sparse.is_coalesced()) == ((3, 3), 6, True)
                assert sparse.indices().tolist() == torch.ones(3, 3).tril().to_sparse().indices().tolist()
                assert (sparse @ torch.empty(3, WIDTH, device="meta")).shape == (3, WIDTH)
    report = meter.report()
    products = [kernel.cost.flops for kernel in report.kernels if kernel.cost.op_class == "tensor contraction"]
    assert products == [2 * 6 * WIDTH] * 2
    assert not report.uncounted


def test_of_unknown_numbers_a_stated_share_is_not_zero():
    with FlopMeter(mask_fraction=0.25) as meter:
        dense = torch.empty(8, 8, device="meta", requires_grad=True)
        sparse = dense.to_sparse()
        assert sparse._nnz() == len(torch.empty(64, device="meta").nonzero()) == 64 // 4
        sparse.to_dense().sum().backward()
    assert dense.grad.shape == (8, 8)
    assert any("of the numbers is not zero" in line for line in meter.report().assumptions)


def test_without_a_stated_share_unknown_numbers_are_not_made_sparse():
    with FlopMeter(), pytest.raises(flopmeter.DataDependentError, match="mask_fraction"):
        torch.empty(8, 8, device="meta").to_sparse()


@pytest.mark.parametrize("asked", [{"layout": torch.sparse_csr}, {"dense_dim": 1}])
def test_another_layout_of_a_dense_tensor_says_what_to_do(asked):
    with FlopMeter(), pytest.raises(NotImplementedError, match="on the CPU"):
        torch.ones(8, 8, device="meta").to_sparse(**asked)


@pytest.mark.parametrize("way", WAYS)
def test_under_inference_mode_a_product_is_counted_as_without_gradients(way):
    with FlopMeter("h100-sxm5-80gb") as meter:
        sparse, weight = adjacency().to("meta"), torch.empty(COLUMNS, WIDTH, device="meta")
        with torch.inference_mode():
            WAYS[way](sparse, weight)
    report = meter.report()
    assert report.flops == 2 * ELEMENTS * WIDTH
    assert not report.uncounted


def test_a_sparse_tensor_of_unknown_numbers_comes_to_the_host_with_its_known_places():
    with flopmeter.cuda("h100-sxm5-80gb"):
        sparse = torch.sparse_coo_tensor(INDICES.cuda(), torch.rand(ELEMENTS, device="cuda"), (ROWS, COLUMNS))
        host = sparse.cpu()
        assert (host.device.type, host._nnz(), str(sparse).count("nnz=4")) == ("cpu", ELEMENTS, 1)
        assert torch.equal(host._indices(), INDICES)


class Ops(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_values_of_a_sparse_matrix_that_learn_get_a_gradient_by_the_ops_of_the_host():
    """As attention over the edges of a graph has them. The gradient of the matrix is sparse, and is masked again."""

    def learn(device: str) -> torch.Tensor:
        values = torch.ones(ELEMENTS, device=device, requires_grad=True)
        matrix = torch.sparse_coo_tensor(INDICES.to(device), values, (ROWS, COLUMNS))
        torch.sparse.mm(matrix, torch.ones(COLUMNS, WIDTH, device=device)).sum().backward()
        return values.grad

    with Ops() as host:
        learn("cpu")
    with FlopMeter("h100-sxm5-80gb") as meter:
        gradient = learn("meta")
    assert (gradient.shape, gradient.layout) == ((ELEMENTS,), torch.strided)
    masks = [op for op in meter.trace.ops if op.call.name == "sparse_mask"]
    assert len(masks) == host.names.count("aten.sparse_mask.default") == 2
