"""Parameters with ``main_grad``: what ``grouped_mlp``'s backward pass adds there, when, and what it gives autograd."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megamoe.kernels import gemm_k, pool_gemm
from megamoe.kernels.mlp_options import MlpOptions
from megamoe.types import Routing
from tests.kernels.test_mlp import moe
from tests.support.errors import fails
from tests.support.generators import ExpertWeights, random_expert_weights, random_routing
from tests.support.metrics import assert_close

BF16, FP32 = torch.bfloat16, torch.float32
EXPERTS, TOKENS = 4, 150
WHOLE_BLOCKS, ODD = (256, 128), (48, 24)


class Training:
    """Two sets of equal weights, one of which has ``main_grad``, and micro-batches for both."""

    def __init__(self, precision="bf16", bias=True, dtype=FP32, sizes=ODD, scale=1.0, row_dtype=None, batches=1):
        self.hidden = sizes[0]
        self.plain = random_expert_weights(EXPERTS, *sizes, bias=bias, dtype=dtype).requires_grad_()
        self.adding = self.plain.to(dtype).requires_grad_()
        for tensor in self.adding.tensors():
            tensor.main_grad = torch.zeros(tensor.shape)
        self.options = MlpOptions("swiglu", precision=precision, weight_grad_scale=scale)
        self.row_dtype = row_dtype
        self.batches = [self._batch() for _ in range(batches)]

    def _batch(self) -> tuple[torch.Tensor, Routing, torch.Tensor]:
        # Not every expert has rows in every micro-batch.
        kind = ("dropped", "empty_experts")[int(torch.randint(2, ()))]
        x = torch.randn(TOKENS, self.hidden)
        return x, random_routing(kind, TOKENS, EXPERTS, 2), torch.randn(TOKENS, self.hidden)

    def forward(self, weights: ExpertWeights, batch=0) -> torch.Tensor:
        x, routing, _ = self.batches[batch]
        return moe(x, routing.topk_index, routing.topk_weights, weights, self.options, self.row_dtype)

    def backward(self, weights: ExpertWeights, batch=0, **options) -> None:
        self.forward(weights, batch).backward(self.batches[batch][2], **options)

    def check(self, times: int = 1) -> None:
        """``main_grad`` has ``times`` the gradients of one backward pass each, and nothing else has any."""
        for plain, adding in zip(self.plain.tensors(), self.adding.tensors(), strict=True):
            plain.grad = None
            for _ in range(times):
                for number in range(len(self.batches)):
                    # Each expert's sums, in the order of the micro-batches.
                    torch.autograd.backward(self.forward(self.plain, number), self.batches[number][2], inputs=[plain])
            assert plain.grad.abs().sum() > 0 and adding.grad is None
            assert torch.equal(adding.main_grad, plain.grad.float())


PRECISIONS = pytest.mark.parametrize("precision", ["bf16", "fp8"])


@pytest.mark.parametrize("scale", [1.0, 0.25, 1 / 3])
@pytest.mark.parametrize("sizes", [WHOLE_BLOCKS, ODD], ids=["whole blocks", "padded in FP8"])
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@PRECISIONS
def test_one_backward_pass(precision, bias, sizes, scale, seed):
    """The bits of autograd's gradients, which are fp32 too."""
    training = Training(precision, bias, sizes=sizes, scale=scale)
    training.backward(training.adding)
    training.check()


@pytest.mark.parametrize("row_dtype", [None, BF16], ids=["fp32 rows", "bf16 rows"])
@pytest.mark.parametrize("sizes", [WHOLE_BLOCKS, ODD], ids=["whole blocks", "padded in FP8"])
@PRECISIONS
def test_three_micro_batches(precision, sizes, row_dtype, seed):
    training = Training(precision, sizes=sizes, row_dtype=row_dtype, batches=3)
    for number in range(3):
        training.backward(training.adding, number)
    training.check()


@PRECISIONS
def test_sums_are_not_rounded_to_the_parameters_dtype(precision, seed):
    training = Training(precision, dtype=BF16, sizes=WHOLE_BLOCKS, row_dtype=BF16)
    training.backward(training.adding)
    training.backward(training.plain)
    for plain, adding in zip(training.plain.tensors(), training.adding.tensors(), strict=True):
        assert torch.equal(adding.main_grad.bfloat16(), plain.grad)
        assert not torch.equal(adding.main_grad.bfloat16().float(), adding.main_grad)


@PRECISIONS
def test_what_is_there_is_added_to(precision, seed):
    training = Training(precision, sizes=WHOLE_BLOCKS)
    old = [torch.randn(tensor.shape) for tensor in training.adding.tensors()]
    for tensor, before in zip(training.adding.tensors(), old, strict=True):
        tensor.main_grad = before.clone()
    training.backward(training.adding)
    training.backward(training.plain)
    for plain, adding, before in zip(training.plain.tensors(), training.adding.tensors(), old, strict=True):
        assert_close(adding.main_grad - before, plain.grad, 1e-5)


@PRECISIONS
def test_memory_that_no_kernel_can_write(precision, seed):
    """``main_grad`` with gaps, and at an odd address: slices of a framework's buffer."""
    for number in range(2):
        training = Training(precision, sizes=WHOLE_BLOCKS)
        for tensor in training.adding.tensors():
            if number:
                tensor.main_grad = torch.zeros(tensor.numel() + 1)[1:].view(tensor.shape)
            else:
                tensor.main_grad = torch.zeros(*tensor.shape[:-1], 2 * tensor.shape[-1])[..., ::2]
        training.backward(training.adding)
        training.check()


def test_bf16_kernels_add_in_place(monkeypatch, seed):
    """The branch for Hopper: ``main_grad`` itself is the kernel's result, for factors that cost no bit."""
    calls, real = [], gemm_k.k_grouped_bf16_gemm_tn

    def recorded(*args, **options):
        calls.append(options.get("out"))
        return real(*args, **options)

    monkeypatch.setattr(gemm_k, "k_grouped_bf16_gemm_tn", recorded)
    monkeypatch.setattr(pool_gemm, "_k_kernels_have_it", lambda a, b: a.dtype == b.dtype == BF16)
    for scale in (1.0, 0.25, 1 / 3):
        training = Training(row_dtype=BF16, scale=scale)
        training.backward(training.adding)
        weights = training.adding.down_proj, training.adding.up_proj
        in_place = [out is weight.main_grad for out, weight in zip(calls, weights, strict=True)]
        assert in_place == [scale != 1 / 3] * 2
        training.check()
        calls.clear()


def test_fp8_products_add_in_place(monkeypatch, seed):
    calls, real = [], gemm_k.k_grouped_fp8_gemm_tn

    def recorded(*args, **options):
        calls.append(options)
        return real(*args, **options)

    monkeypatch.setattr(gemm_k, "k_grouped_fp8_gemm_tn", recorded)
    training = Training("fp8", sizes=WHOLE_BLOCKS)
    training.backward(training.adding)
    weights = training.adding.down_proj, training.adding.up_proj
    for options, weight in zip(calls, weights, strict=True):
        assert options["out"] is options["c"] is weight.main_grad


# ---------------------------------------------------------------- when


@PRECISIONS
def test_retained_graph_adds_again(precision, seed):
    training = Training(precision)
    out = training.forward(training.adding)
    out.backward(training.batches[0][2], retain_graph=True)
    training.check()
    out.backward(training.batches[0][2])
    training.check(times=2)
    with pytest.raises(RuntimeError, match="second time"):
        out.backward(training.batches[0][2])
    training.check(times=2)


@PRECISIONS
def test_two_uses_in_one_graph(precision, seed):
    training = Training(precision, batches=2)
    outs = [training.forward(training.adding, number) for number in range(2)]
    torch.autograd.backward(outs, [batch[2] for batch in training.batches])
    for plain, adding in zip(training.plain.tensors(), training.adding.tensors(), strict=True):
        expected = sum(
            torch.autograd.grad(training.forward(training.plain, number), plain, batch[2])[0]
            for number, batch in enumerate(training.batches)
        )
        assert_close(adding.main_grad, expected, 1e-6)


@pytest.mark.parametrize("use_reentrant", [False, True])
@PRECISIONS
def test_activation_checkpointing_adds_once(precision, use_reentrant, seed):
    training = Training(precision)
    x, routing, grad = training.batches[0]

    def block(x):
        return moe(x, routing.topk_index, routing.topk_weights, training.adding, training.options)

    checkpoint(block, x.clone().requires_grad_(), use_reentrant=use_reentrant).backward(grad)
    training.check()


def test_saved_tensors_may_be_moved(seed):
    """What autograd saved comes back as copies, without the parameters' attributes."""
    training = Training()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t):
        out = training.forward(training.adding)
    out.backward(training.batches[0][2])
    training.check()


@PRECISIONS
def test_autograd_grad_adds_nothing(precision, seed):
    """It returns the gradients it is asked for, also those of parameters with ``main_grad``."""
    training = Training(precision)
    x = training.batches[0][0].requires_grad_()
    parameters, grad = training.adding.tensors(), training.batches[0][2]
    expected = torch.autograd.grad(training.forward(training.plain), [x, *training.plain.tensors()], grad)
    got = torch.autograd.grad(training.forward(training.adding), [x, *parameters], grad)
    for mine, theirs in zip(got, expected, strict=True):
        assert torch.equal(mine, theirs)
    torch.autograd.grad(training.forward(training.adding), x, grad)
    torch.autograd.backward(training.forward(training.adding), grad, inputs=[x])
    assert not any(parameter.main_grad.any() for parameter in parameters)
    # One parameter at a time.
    torch.autograd.backward(training.forward(training.adding), grad, inputs=[parameters[1]])
    assert [bool(parameter.main_grad.any()) for parameter in parameters] == [False, True, False, False]


def test_some_parameters_only(seed):
    """Those without ``main_grad``, or with None, get ``.grad``; frozen ones neither."""
    training = Training()
    up, down, up_bias, down_bias = training.adding.tensors()
    down.main_grad = None
    del up_bias.main_grad
    down_bias.requires_grad_(False)
    training.backward(training.adding)
    training.backward(training.plain)
    assert torch.equal(up.main_grad, training.plain.up_proj.grad) and up.grad is None
    assert torch.equal(down.grad, training.plain.down_proj.grad) and torch.equal(
        up_bias.grad, training.plain.up_bias.grad
    )
    assert down_bias.grad is None and not down_bias.main_grad.any()


def test_marks_parameters_that_ask_for_it(seed):
    training = Training()
    up, down, *biases = training.adding.tensors()
    up.grad_added_to_main_grad = biases[0].grad_added_to_main_grad = False
    del biases[0].main_grad
    training.forward(training.adding)
    assert up.grad_added_to_main_grad is False
    training.backward(training.adding)
    assert up.grad_added_to_main_grad is True and biases[0].grad_added_to_main_grad is False
    assert not hasattr(down, "grad_added_to_main_grad")


def test_hooks_of_the_parameters_node_run(seed):
    """By them frameworks learn that a parameter is done, whoever added its gradient."""
    training, seen = Training(), []
    nodes = [torch.autograd.graph.get_gradient_edge(tensor).node for tensor in training.adding.tensors()]
    for number, node in enumerate(nodes):
        node.register_hook(lambda *_, number=number: seen.append(number))
    training.backward(training.adding)
    assert sorted(seen) == [0, 1, 2, 3]


# ---------------------------------------------------------------- errors


@PRECISIONS
def test_what_it_refuses(precision, seed):
    training = Training(precision)
    down = training.adding.down_proj
    shape = list(down.shape)
    wrong = [
        (ValueError, torch.zeros(shape[0], shape[2], shape[1]), "shape", [shape[0], shape[2], shape[1]], str(shape)),
        (TypeError, torch.zeros(shape, dtype=BF16), "dtype", BF16, "torch.float32"),
        (ValueError, torch.zeros(shape, device="meta"), "device", "meta", "must be cpu"),
        (TypeError, "none", "", "str", "must be a torch.Tensor"),
    ]
    out = training.forward(training.adding)
    for kind, value, field, shown, rule in wrong:
        down.main_grad = value
        name = f"down_proj.main_grad.{field}".rstrip(".")
        with fails(kind, name, shown, rule):
            training.forward(training.adding)
        with fails(kind, name, shown, rule):
            out.backward(training.batches[0][2], retain_graph=True)
        # Inference has no use for it.
        with torch.no_grad():
            training.forward(training.adding)
    assert not any(tensor.main_grad.any() for tensor in training.adding.tensors() if tensor is not down)
