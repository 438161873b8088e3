"""`sglang_c2t.cpu.linear`: packed products equal torch's, for any rows, and follow new weights."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from sglang_c2t.cpu import linear

pytestmark = pytest.mark.skipif(
    not linear.available(torch.float32), reason="torch was built without oneDNN"
)


@pytest.fixture(autouse=True)
def every_size(monkeypatch):
    """Small weights are packed too, so that the tests are fast."""
    monkeypatch.setattr(linear, "SMALLEST", 1)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(0, 40),
    wide=st.integers(1, 70),
    tall=st.integers(1, 70),
    bias=st.booleans(),
    strided=st.booleans(),
)
def test_a_packed_product_is_torchs_own_product(rows, wide, tall, bias, strided):
    x = torch.randn(rows, 2 * wide)[:, ::2] if strided else torch.randn(rows, wide)
    weight, added = torch.randn(tall, wide), torch.randn(tall) if bias else None
    torch.testing.assert_close(
        linear.linear(x, weight, added), functional.linear(x, weight, added), rtol=1e-4, atol=1e-4
    )


def test_three_dimensions_keep_their_shape():
    assert linear.linear(torch.randn(3, 5, 16), torch.randn(8, 16)).shape == (3, 5, 8)


def test_a_rows_result_does_not_depend_on_the_number_of_rows():
    """From 4 rows on, so that tokens of batches of different sizes agree to the last bit."""
    x, weight = torch.randn(64, 1536), torch.randn(576, 1536)
    all_rows = linear.linear(x, weight)
    for rows in (4, 7, 16, 33):
        assert torch.equal(linear.linear(x[:rows].contiguous(), weight), all_rows[:rows])


@pytest.mark.parametrize("again", [lambda _: linear.forget(), linear.pack], ids=["update", "load"])
def test_changed_values_are_multiplied_after_an_update_and_after_a_load(again):
    """Both write through `.data`, unseen by torch. Old weights that come back after a failed update
    are loaded when some layers are packed.
    """
    x, weight = torch.randn(8, 16), torch.nn.Parameter(torch.randn(8, 16), requires_grad=False)
    linear.linear(x, weight)
    weight.data.copy_(torch.ones(8, 16))
    again(weight)
    torch.testing.assert_close(linear.linear(x, weight), functional.linear(x, weight))


def test_the_copy_is_made_once():
    x, weight = torch.randn(8, 16), torch.randn(8, 16)
    linear.linear(x, weight)
    kept = weight.c2t_packed
    linear.linear(x, weight)
    assert weight.c2t_packed is kept


def test_other_dtypes_and_small_weights_stay_as_they_are(monkeypatch):
    monkeypatch.setattr(linear, "SMALLEST", 10_000)
    small, double = torch.randn(8, 16), torch.randn(200, 100, dtype=torch.float64)
    linear.linear(torch.randn(8, 16), small)
    linear.linear(torch.randn(8, 100, dtype=torch.float64), double)
    assert not hasattr(small, "c2t_packed")
    assert not hasattr(double, "c2t_packed")
