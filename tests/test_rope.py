"""Rotation: an inverse pair, for whole and partial rotary dimensions and scaled tables."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost_rag.rope import rotate, rotate_into, unrotate


def tables(positions: torch.Tensor, width: int, scale: float = 1.0):
    frequencies = 1.0 / 10000 ** (torch.arange(0, width, 2) / width)
    angles = positions[:, None].double() * frequencies
    return (angles.cos() * scale).float(), (angles.sin() * scale).float()


@settings(max_examples=50, deadline=None)
@given(
    start=st.integers(0, 30_000),
    tokens=st.integers(1, 9),
    width=st.sampled_from([2, 8, 16]),
    scale=st.sampled_from([1.0, 1.3689]),
)
def test_unrotating_takes_the_rotation_off(start, tokens, width, scale):
    keys = torch.randn(2, 3, tokens, 16)
    cos, sin = tables(torch.arange(start, start + tokens), width, scale)
    back = unrotate(rotate(keys, cos, sin), cos, sin)
    assert torch.allclose(back, keys, atol=1e-5)


def test_rotation_equals_complex_multiplication():
    keys = torch.randn(5, 16, dtype=torch.float64).float()
    positions = torch.tensor([0, 1, 7, 100, 4000])
    frequencies = 1.0 / 10000 ** (torch.arange(0, 16, 2).double() / 16)
    turned = torch.complex(keys[:, :8].double(), keys[:, 8:].double()) * torch.polar(
        torch.ones(5, 8, dtype=torch.float64), positions[:, None] * frequencies
    )
    expected = torch.cat([turned.real, turned.imag], dim=-1).float()
    assert torch.allclose(rotate(keys, *tables(positions, 16)), expected, atol=1e-4)


def test_interleaved_pairs_turn_as_the_halves_do_in_another_order():
    keys, order = torch.randn(3, 4, 16), torch.arange(16).view(2, 8).T.flatten()
    cos, sin = tables(torch.arange(5, 9), 16)
    turned = rotate(keys[..., order], cos, sin, interleaved=True)
    assert torch.allclose(turned, rotate(keys, cos, sin)[..., order])
    assert torch.allclose(unrotate(turned, cos, sin, interleaved=True), keys[..., order], atol=1e-5)


def test_dimensions_beyond_the_rotary_ones_pass_through():
    keys = torch.randn(1, 2, 4, 16)
    out = rotate(keys, *tables(torch.arange(5, 9), 8))
    assert torch.equal(out[..., 8:], keys[..., 8:])
    assert not torch.allclose(out[..., :8], keys[..., :8])


def test_scores_depend_on_the_distance_alone():
    query, key = torch.randn(1, 16), torch.randn(1, 16)
    scores = [
        rotate(query, *tables(torch.tensor([p + 11]), 16)) @ rotate(key, *tables(torch.tensor([p]), 16)).T
        for p in (0, 5, 999)
    ]
    assert torch.allclose(torch.cat(scores), scores[0].expand(3, 1), atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(dtype):
    keys = torch.randn(3, 16).to(dtype)
    cos, sin = tables(torch.arange(3), 16)
    assert torch.equal(rotate(keys, cos, sin), rotate(keys.float(), cos, sin).to(dtype))


def test_rotating_into_a_view_leaves_the_rest_alone():
    buffer = torch.zeros(2, 10, 16)
    keys = torch.randn(2, 3, 16)
    cos, sin = tables(torch.arange(4, 7), 16)
    rotate_into(buffer[:, 4:7], keys, cos, sin)
    assert torch.equal(buffer[:, 4:7], rotate(keys, cos, sin))
    assert not buffer[:, :4].any()
    assert not buffer[:, 7:].any()
