"""Experts give what the formula says, whatever the other tokens of a step are."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from torpor.model.config.features import MoEConfig
from torpor.model.layers.moe import SparseMoE
from torpor.model.layers.ops import TorchOps, use_ops

WIDTH, INNER, EXPERTS = 16, 12, 7


def block(top_k: int = 3, *, norm: bool = True, dtype: torch.dtype = torch.float32) -> SparseMoE:
    """A block with random weights."""
    config = MoEConfig(
        num_experts=EXPERTS,
        num_experts_per_tok=top_k,
        intermediate_size=INNER,
        norm_topk_prob=norm,
        layers=frozenset({0}),
    )
    made = SparseMoE(WIDTH, config, dtype)
    generator = torch.Generator().manual_seed(0)
    for owner, name in [
        (made.gate, "weight"),
        (made.experts, "gate_up_proj"),
        (made.experts, "down_proj"),
    ]:
        shape = getattr(owner, name).shape
        real = (torch.randn(shape, generator=generator) * 0.5).to(dtype)
        setattr(owner, name, nn.Parameter(real, requires_grad=False))
    return made


def tokens(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)


def formula(moe: SparseMoE, x_TD: torch.Tensor, *, norm: bool) -> torch.Tensor:
    """One token and one expert at a time, in float64."""
    gate_up = moe.experts.gate_up_proj.double().view(EXPERTS, 2, INNER, WIDTH)
    down = moe.experts.down_proj.double().view(EXPERTS, WIDTH, INNER)
    out = torch.zeros(x_TD.shape, dtype=torch.float64)
    for at, x in enumerate(x_TD.double()):
        probs = (moe.gate.weight.double() @ x).softmax(0)
        chosen = probs.argsort(descending=True)[: moe.config.num_experts_per_tok].tolist()
        total = probs[chosen].sum() if norm else 1.0
        for expert in chosen:
            gate, up = gate_up[expert] @ x
            out[at] += probs[expert] / total * (down[expert] @ (functional.silu(gate) * up))
    return out


def row_by_row(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """A kernel in which no row can depend on another."""
    return torch.stack([functional.linear(row, weight, bias) for row in x])


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("top_k", [1, 3, EXPERTS])
@pytest.mark.parametrize("count", [1, 2, 65])
@torch.inference_mode()
def test_the_block_equals_the_formula(count: int, top_k: int, norm: bool) -> None:
    moe, x = block(top_k, norm=norm), tokens(count)
    want = formula(moe, x, norm=norm)
    torch.testing.assert_close(moe(x).double(), want, atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_normed_weights_sum_to_one_and_plain_ones_are_probabilities() -> None:
    x = tokens(20)
    _, normed = block(norm=True).route(x)
    _, plain = block(norm=False).route(x)
    torch.testing.assert_close(normed.sum(-1), torch.ones(20))
    assert (plain.sum(-1) < 1).all()
    torch.testing.assert_close(plain / plain.sum(-1, keepdim=True), normed)


@torch.inference_mode()
def test_the_router_works_in_float32_and_weighs_in_the_models_dtype() -> None:
    moe, x = block(dtype=torch.bfloat16), tokens(9, torch.bfloat16)
    experts, weights = moe.route(x)
    assert weights.dtype == torch.bfloat16
    probs = functional.linear(x, moe.gate.weight).float().softmax(-1)
    values, indices = probs.topk(3, dim=-1)
    assert torch.equal(experts, indices)
    assert torch.equal(weights, (values / values.sum(-1, keepdim=True)).to(torch.bfloat16))


@torch.inference_mode()
def test_equal_scores_pick_what_topk_picks() -> None:
    moe = block()
    moe.gate.weight.zero_()
    experts, weights = moe.route(tokens(4))
    assert torch.equal(experts, torch.full((4, EXPERTS), 1 / EXPERTS).topk(3, dim=-1).indices)
    torch.testing.assert_close(weights, torch.full((4, 3), 1 / 3))


@torch.inference_mode()
def test_an_expert_that_no_token_uses_is_not_read() -> None:
    moe, x = block(), tokens(1)
    used = set(moe.route(x)[0].flatten().tolist())
    want = moe(x)
    for expert in set(range(EXPERTS)) - used:
        moe.experts.gate_up_proj.view(EXPERTS, -1)[expert] = float("nan")
        moe.experts.down_proj.view(EXPERTS, -1)[expert] = float("nan")
    assert torch.equal(moe(x), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_a_token_has_the_same_bits_alone_and_among_others(dtype: torch.dtype) -> None:
    moe, x = block(dtype=dtype), tokens(40, dtype)
    use_ops(moe, TorchOps(row_by_row))
    together = moe(x)
    for at in range(0, 40, 7):
        assert torch.equal(moe(x[at : at + 1])[0], together[at])
    assert torch.equal(moe(x.flip(0)).flip(0), together)
