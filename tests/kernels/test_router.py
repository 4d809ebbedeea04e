"""The router's kernels, executed on the CPU; on GPUs: test_router_gpu.py."""

from __future__ import annotations

import contextlib
import types

import pytest

pytest.importorskip("triton")
pytest.importorskip("greenlet")

import torch  # noqa: E402

from megamoe import Router, RouterConfig  # noqa: E402
from megamoe.kernels import routing, triton_router  # noqa: E402
from megamoe.kernels.reference import expert_scores  # noqa: E402
from tests.support.configs import router_layer  # noqa: E402
from tests.support.gluon_sim import simulated_launches  # noqa: E402
from tests.support.gluon_sim.mutation import Bug, assert_caught  # noqa: E402
from tests.support.router_cases import RouterCase, check_any_batch, check_case  # noqa: E402

GROUPS = dict(num_groups=4, topk_groups=2)
TOP2 = RouterConfig("sigmoid", group_score="sum_top2", expert_bias=True, **GROUPS)


@contextlib.contextmanager
def simulated(module: types.ModuleType = triton_router, **options):
    """``module.route`` on the CPU."""
    with pytest.MonkeyPatch.context() as patch, simulated_launches(module, **options) as done:
        patch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        yield done


CASES = [
    RouterCase(19, 300, 12, 4),
    RouterCase(1, 300, 40, 8, RouterConfig("sigmoid"), torch.float32),
    RouterCase(9, 130, 12, 12, RouterConfig("sqrtsoftplus", linear_bias=True), torch.float16, ties=True),
    RouterCase(8, 64, 33, 5, RouterConfig("sigmoid", expert_bias=True, scaling_factor=2.5), ties=True, masked=True),
    RouterCase(7, 20, 12, 3, RouterConfig(renormalize=False, **GROUPS), ties=True),
    RouterCase(17, 96, 12, 5, TOP2, masked=True),
    RouterCase(5, 96, 20, 10, TOP2, ties=True),
    RouterCase(5, 33, 15, 4, RouterConfig("sqrtsoftplus", num_groups=3, topk_groups=3), torch.float32, masked=True),
    RouterCase(3, 7, 1, 1, RouterConfig(linear_bias=True)),
    RouterCase(2, 40, 600, 10),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_the_reference(case, seed, monkeypatch):
    # Few values at once: several rounds of sums.
    monkeypatch.setattr(triton_router, "VALUES_PER_THREAD", 1)
    with simulated(seed=seed):
        check_case(triton_router.route, case)


@pytest.mark.parametrize("enough", [1, 512])
def test_the_same_bits_in_any_batch(enough, seed, monkeypatch):
    monkeypatch.setattr(triton_router, "ENOUGH_PROGRAMS", enough)
    with simulated(seed=seed):
        check_any_batch(triton_router.route, RouterCase(40, 300, 20, 4, TOP2, masked=True), [1, 2, 7, 16, 33, 90])


def test_no_tokens():
    with simulated() as done:
        index, weights = triton_router.route(*RouterCase(0, 32, 8, 2).inputs(), 2, RouterConfig())
    assert index.shape == weights.shape == (0, 2) and index.dtype == torch.int64 and not done


@pytest.mark.parametrize("router", [RouterConfig(), TOP2], ids=["plain", "groups"])
def test_nan_is_the_highest_score(router, seed):
    """A token that is NaN gets the first experts, an expert that is NaN comes first, and others do not notice."""
    case = RouterCase(6, 48, 12, 4, router)
    x, weight, _, expert_bias, _ = case.inputs()
    with simulated():
        before = triton_router.route(x, weight, None, expert_bias, None, 4, router)
        x[2] = float("nan")
        index, weights = triton_router.route(x, weight, None, expert_bias, None, 4, router)
        assert index[2].tolist() == [0, 1, 2, 3] and weights[2].isnan().all()
        others = [0, 1, 3, 4, 5]
        assert torch.equal(index[others], before[0][others]) and torch.equal(weights[others], before[1][others])
        spoilt = torch.zeros(12)
        spoilt[7] = float("nan")
        index, weights = triton_router.route(x[others], weight, None, spoilt, None, 4, router)
        assert (index[:, 0] == 7).all() and weights.isfinite().all()


def test_scores_at_extreme_logits():
    """Sigmoids of 0 and 1, softplus that underflows, softmax of infinity, as the reference has them."""
    logits = torch.tensor([[200.0, 90, 21, 20, 19, 1e-3, -1e-3, -16, -17, -60, -104, -200]])
    for score in ("softmax", "sigmoid", "sqrtsoftplus"):
        x, weight, router = torch.ones(1, 1), logits.t().contiguous(), RouterConfig(score, renormalize=False)
        with simulated():
            index, weights = triton_router.route(x, weight, None, None, None, 12, router)
        wanted = expert_scores(logits, score)
        torch.testing.assert_close(torch.zeros(1, 12).scatter_(1, index, weights), wanted, rtol=2e-6, atol=1e-37)


# ---------------------------------------------------------------- planted bugs


def shown_by(tokens: int, hidden: int, experts: int, top_k: int, router: RouterConfig | None = None, **options):
    """A case of the suite of bugs: its results, and those of its tokens in other batches."""
    made = RouterCase(tokens, hidden, experts, top_k, router or RouterConfig(), **options)

    def run(module: types.ModuleType, policy: str, seed: int) -> None:
        torch.manual_seed(seed)
        # Several rounds of sums, and several tiles of a program.
        module.VALUES_PER_THREAD = module.ENOUGH_PROGRAMS = 1
        with simulated(module, policy=policy, seed=seed):
            check_case(module.route, made)
            check_any_batch(module.route, made, [1, 12])

    return run


PLAIN = shown_by(11, 300, 20, 4)
BIASED = shown_by(9, 40, 12, 4, RouterConfig("sigmoid", expert_bias=True, linear_bias=True), ties=True, masked=True)
GROUPED = shown_by(9, 40, 20, 4, TOP2)
ALL = shown_by(9, 40, 12, 12, RouterConfig("sigmoid", expert_bias=True))
EQUAL = shown_by(9, 40, 20, 4, RouterConfig(group_score="sum_top2", **GROUPS), ties=True)
BY_MAX = shown_by(12, 40, 12, 3, RouterConfig(**GROUPS), ties=True)

BUGS = [
    Bug(
        "columns beyond the last",
        PLAIN,
        "(token < num_tokens)[:, None] & (column + step * STEP < hidden)[None, :]",
        "(token < num_tokens)[:, None]",
    ),
    Bug("weights of the first step", PLAIN, "weights[step][None", "weights[0][None"),
    Bug("sums of the first split", PLAIN, "split = gl.program_id(2)", "split = gl.program_id(2) * 0"),
    Bug("splits left out", PLAIN, "range(0, num_splits, SPLITS)", "range(0, SPLITS, SPLITS)"),
    Bug("tokens beyond the last", PLAIN, "mask=(row < num_tokens)[:, None] & ", "mask=(row > -1)[:, None] & "),
    Bug("masked tokens are routed", BIASED, "tl.where(live, expert, -1)", "expert"),
    Bug(
        "masked tokens keep their weights",
        BIASED,
        "tl.where(live, weight * scaling_factor, 0.0)",
        "weight * scaling_factor",
    ),
    Bug(
        "ties go to the highest id",
        BIASED,
        "tl.min(tl.where(key == tl.max(key, 0), place, SIZE), 0)",
        "tl.max(tl.where(key == tl.max(key, 0), place, -1), 0)",
    ),
    Bug("no bias on the selection", BIASED, "_key(scores + on_scores)", "_key(scores)"),
    Bug(
        "the bias reaches the weights",
        BIASED,
        "tl.where(chosen, scores, 0.0)",
        "tl.where(chosen, scores + on_scores, 0.0)",
    ),
    Bug("no bias on the logits", BIASED, "tl.sum(total, 0) + on_logits", "tl.sum(total, 0)"),
    Bug(
        "negative scores in the wrong order",
        ALL,
        "    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)\n",
        "    key = bits\n",
    ),
    Bug("places for experts", GROUPED, "expert = place // SIZE * group_size + place % SIZE", "expert = place"),
    Bug("all groups", GROUPED, "    if GROUPS > 1:\n", "    if False:\n"),
    Bug("one group fewer", GROUPED, "range(KEPT)", "range(KEPT - 1)"),
    Bug("groups by their best expert", GROUPED, "    if TOP2:\n", "    if False:\n"),
    Bug("the best expert counts twice", GROUPED, "column == first[:, None], LOWEST", "column < 0, LOWEST"),
    Bug(
        "equal experts count once",
        EQUAL,
        "column == first[:, None], LOWEST",
        "grouped == best[:, None], LOWEST",
    ),
    Bug("groups by two experts", BY_MAX, "    if TOP2:\n", "    if True:\n"),
    Bug(
        "sums are not scaled",
        shown_by(3, 40, 8, 2, RouterConfig(scaling_factor=2.5)),
        "weight * scaling_factor",
        "weight",
    ),
    Bug("weights are never renormalised", PLAIN, "    if RENORMALIZE:\n", "    if False:\n"),
    Bug("weights are renormalised over all", PLAIN, "tl.sum(weight, 0) + 1e-20", "tl.sum(scores, 0) + 1e-20"),
    Bug("tiles are left out", PLAIN, "        first += TOKENS\n", "        first += 2 * TOKENS\n"),
]


@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_planted_bug(bug):
    assert_caught(triton_router, bug)


# ---------------------------------------------------------------- the module


def test_the_router_takes_the_kernels(seed, monkeypatch):
    """Where they serve: without gradients, in evaluation mode."""
    calls = []

    def route(*arguments):
        calls.append(arguments)
        return triton_router.route(*arguments)

    monkeypatch.setattr(routing, "has_kernel", lambda hidden_states, weight: True)
    monkeypatch.setattr(routing, "route", route)
    router = Router(router_layer(40, 12, 4, score="sigmoid", expert_bias=True, linear_bias=True, **GROUPS)).eval()
    with torch.no_grad():
        router.bias.normal_()
        router.expert_bias.normal_()
    x, mask = torch.randn(9, 40), torch.arange(9) != 4
    with simulated():
        expected = router(x, mask)
        assert not calls and expected.topk_weights.requires_grad
        with torch.no_grad():
            got = router(x, mask)
            assert len(calls) == 1
            router.train()(x, mask)
            assert len(calls) == 1 and router.tokens_per_expert.sum() == 32
        frozen = router.eval().requires_grad_(False)
        frozen(x)
        assert len(calls) == 2
        frozen(x.clone().requires_grad_())
        assert len(calls) == 2
    assert torch.equal(got.topk_index, expected.topk_index)
    torch.testing.assert_close(got.topk_weights, expected.topk_weights.detach(), rtol=1e-5, atol=0)


def test_cpus_have_no_kernel():
    assert not routing.has_kernel(torch.zeros(1, 8), torch.zeros(4, 8))
