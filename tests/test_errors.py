"""The error types and the checks: four-part messages, and the built-in type that a caller expects."""

from __future__ import annotations

import pickle

import pytest
import torch

from megamoe import ExchangeError, MegaMoEError, MegaMoETypeError, MegaMoEValueError
from megamoe.errors import check_choice, check_int, check_number, check_tensor, fail_type, fail_value
from tests.support.errors import fails

INFINITY, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("error", "builtin"),
    [(MegaMoEValueError, ValueError), (MegaMoETypeError, TypeError), (ExchangeError, RuntimeError)],
)
def test_errors_can_be_caught_as_megamoe_error_or_as_builtin(error, builtin):
    assert issubclass(error, MegaMoEError) and issubclass(error, builtin)
    # Process pools pickle what a worker raised.
    copy = pickle.loads(pickle.dumps(error("text")))
    assert type(copy) is error and str(copy) == "text"


def test_messages_have_argument_value_rule_and_remedy():
    with pytest.raises(MegaMoEValueError) as caught:
        fail_value("top_k", 9, "must not exceed num_experts = 8", "Lower top_k.")
    assert str(caught.value) == "top_k = 9: must not exceed num_experts = 8. Lower top_k."
    with pytest.raises(MegaMoETypeError) as caught:
        fail_type("name", "4", "must be an integer", "Pass an int.")
    assert str(caught.value) == "name = '4': must be an integer. Pass an int."


@pytest.mark.parametrize("value", [1, 2, 10**12])
def test_check_int_accepts(value):
    check_int("size", value, 1)


@pytest.mark.parametrize(
    ("value", "kind", "rule"),
    [
        pytest.param(0, ValueError, "at least 1", id="below"),
        pytest.param(-5, ValueError, "at least 1", id="negative"),
        pytest.param(2.0, TypeError, "must be an integer", id="float"),
        pytest.param("2", TypeError, "must be an integer", id="text"),
        pytest.param(None, TypeError, "must be an integer", id="none"),
        # True == 1 would pass every range check.
        pytest.param(True, TypeError, "must be an integer", id="bool"),
    ],
)
def test_check_int_rejects(value, kind, rule):
    with fails(kind, "size", value, rule):
        check_int("size", value, 1)


def test_check_number_bounds():
    check_number("x", 0, 0.0)
    check_number("x", 1e-30, 0.0, exclusive=True)
    check_number("x", 3, 0.0)
    with fails(ValueError, "x", 0.0, "> 0"):
        check_number("x", 0.0, 0.0, exclusive=True)
    with fails(ValueError, "x", -1e-9, ">= 0"):
        check_number("x", -1e-9, 0.0)


@pytest.mark.parametrize(
    ("value", "kind", "rule"),
    [
        # NaN compares False with everything: a check written the other way round lets it through.
        pytest.param(NAN, ValueError, "finite", id="nan"),
        pytest.param(INFINITY, ValueError, "finite", id="infinity"),
        pytest.param(-INFINITY, ValueError, "finite", id="minus_infinity"),
        pytest.param(True, TypeError, "must be a number", id="bool"),
        pytest.param("1", TypeError, "must be a number", id="text"),
        pytest.param(None, TypeError, "must be a number", id="none"),
        pytest.param(1j, TypeError, "must be a number", id="complex"),
    ],
)
@pytest.mark.parametrize("exclusive", [False, True])
def test_check_number_rejects(value, kind, rule, exclusive):
    with fails(kind, "x", value, rule):
        check_number("x", value, 0.0, exclusive=exclusive)


def test_check_choice_lists_the_choices():
    check_choice("mode", "a", ("a", "b"))
    for value in ("c", "A", "", None, 1):
        with fails(ValueError, "mode", value, "must be one of 'a', 'b'"):
            check_choice("mode", value, ("a", "b"))


class TestCheckTensor:
    def test_accepts(self):
        check_tensor("x", torch.ones(3, 4), (3, 4))
        check_tensor("x", torch.ones(3, 4), (None, 4), (torch.float32, torch.bfloat16), torch.device("cpu"))
        check_tensor("x", torch.ones(()), ())
        check_tensor("x", torch.ones(0, 4), (None, 4))

    @pytest.mark.parametrize("value", [[1.0], None, 1.0])
    def test_rejects_other_types(self, value):
        # Only the name of the type: the value may be long.
        with fails(TypeError, "x", type(value).__name__, "must be a torch.Tensor"):
            check_tensor("x", value, (None,))

    @pytest.mark.parametrize(
        ("have", "want", "rule"),
        [
            pytest.param((3, 5), (3, 4), "must be [3, 4]", id="size"),
            pytest.param((3, 5), (None, 4), "must be [any, 4]", id="size_beside_any"),
            pytest.param((3,), (3, 4), "must be [3, 4]", id="too_few_dimensions"),
            pytest.param((3, 4, 1), (3, 4), "must be [3, 4]", id="too_many_dimensions"),
            pytest.param((1,), (), "must be []", id="one_dimension_for_none"),
        ],
    )
    def test_rejects_other_shapes(self, have, want, rule):
        with fails(ValueError, "x.shape", list(have), rule):
            check_tensor("x", torch.ones(have), want)

    def test_rejects_other_dtypes(self):
        with fails(TypeError, "x.dtype", torch.int64, "torch.float32, torch.bfloat16"):
            check_tensor("x", torch.ones(2, dtype=torch.int64), (2,), (torch.float32, torch.bfloat16))

    def test_rejects_other_devices(self):
        with fails(ValueError, "x.device", "meta", "must be cpu"):
            check_tensor("x", torch.ones(2, device="meta"), (2,), device=torch.device("cpu"))
