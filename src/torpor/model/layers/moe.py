"""A mixture of experts: each token goes through the few MLPs that a router picks for it.

Shape suffixes: T tokens of all rows, D model width, E experts, K experts of one token, I inner
width of an expert.
"""

from __future__ import annotations

import torch
from torch import nn

from torpor.model.config.features import MoEConfig
from torpor.model.layers.layers import Linear, empty_parameter
from torpor.model.layers.mlp import MLP
from torpor.model.layers.ops import OpsModule
from torpor.model.layers.routers import Routed, route_by_groups, route_by_sigmoid, route_by_softmax


class Experts(OpsModule):
    """The MLPs of one layer. Their weights lie one expert after the other in two parameters.

    Two dimensions, not three, so that each tensor of a checkpoint is a run of whole rows.
    """

    def __init__(self, width: int, config: MoEConfig, dtype: torch.dtype) -> None:
        super().__init__()
        experts, inner = config.num_experts, config.intermediate_size
        self.num_experts = experts
        self.gate_up_proj = empty_parameter(experts * 2 * inner, width, dtype=dtype)
        self.down_proj = empty_parameter(experts * width, inner, dtype=dtype)

    def forward(
        self, x_TD: torch.Tensor, experts_TK: torch.Tensor, weights_TK: torch.Tensor
    ) -> torch.Tensor:
        """Sum each token's experts, weighted; only the experts that some token uses are computed.

        Args:
            x_TD: tokens [T, D].
            experts_TK: int64 experts of each token [T, K], no expert twice for one token.
            weights_TK: their weights [T, K], in x's dtype.

        Returns:
            [T, D].
        """
        gate_up_E = self.gate_up_proj.view(self.num_experts, -1, x_TD.shape[1])
        down_E = self.down_proj.view(self.num_experts, x_TD.shape[1], -1)
        # Neighbours share an expert, so that its weights are read once for all its tokens.
        sorted_N, order_N = experts_TK.flatten().sort(stable=True)
        tokens_N = order_N // experts_TK.shape[1]
        x_ND = x_TD.index_select(0, tokens_N)
        weights_N1 = weights_TK.flatten().index_select(0, order_N)[:, None]
        used, counts = sorted_N.unique_consecutive(return_counts=True)
        out_TD = torch.zeros_like(x_TD)
        start = 0
        for expert, count in zip(used.tolist(), counts.tolist(), strict=True):
            rows = slice(start, start + count)
            inner = self.ops.linear_gated(x_ND[rows], gate_up_E[expert], None)
            y = self.ops.linear(inner, down_E[expert], None)
            # A token is at most once among an expert's rows and meets its experts in ascending
            # order: the sum depends neither on the other tokens nor on threads.
            out_TD.index_add_(0, tokens_N[rows], y * weights_N1[rows])
            start += count
        return out_TD


class SparseMoE(nn.Module):
    """Router and experts, and maybe an MLP for every token, in the place of a layer's MLP."""

    def __init__(self, width: int, config: MoEConfig, dtype: torch.dtype) -> None:
        super().__init__()
        experts = config.num_experts
        self.config = config
        self.gate = Linear(width, experts, bias=False, dtype=dtype)
        self.experts = Experts(width, config, dtype)
        self.router_scale = (
            empty_parameter(1, experts, dtype=dtype) if config.router_scale else None
        )
        # Small differences decide which expert is chosen: never rounded to the model's dtype.
        self.e_score_correction_bias = (
            empty_parameter(experts, dtype=torch.float32) if config.correction_bias else None
        )
        self.shared_experts: MLP | None = None
        if config.shared_intermediate_size:
            self.shared_experts = MLP(
                width, config.shared_intermediate_size, bias=False, dtype=dtype
            )

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        """[T, D] to [T, D]."""
        experts_TK, weights_TK = self.route(x_TD)
        out: torch.Tensor = self.experts(x_TD, experts_TK, weights_TK)
        if self.shared_experts is not None:
            out = out + self.shared_experts(x_TD)
        return out

    def route(self, x_TD: torch.Tensor) -> Routed:
        """The experts of each token, int64, and their weights in x's dtype: [T, K]."""
        config = self.config
        if config.routing == "sigmoid":
            logits_TE = self._float32_logits(x_TD)
            bias_E, norm = self.e_score_correction_bias, config.norm_topk_prob
            experts_TK, weights_TK = route_by_sigmoid(
                logits_TE, config.num_experts_per_tok, bias_E, norm=norm
            )
        elif config.routing == "grouped":
            assert self.router_scale is not None, "grouped experts without a scale"
            experts_TK, weights_TK = route_by_groups(
                self.gate(x_TD), config.num_experts_per_tok, self.router_scale[0]
            )
        else:
            experts_TK, weights_TK = route_by_softmax(
                self.gate(x_TD), config.num_experts_per_tok, norm=config.norm_topk_prob
            )
        weights_TK = weights_TK * config.routed_scaling_factor
        return experts_TK, weights_TK.to(x_TD.dtype)

    def _float32_logits(self, x_TD: torch.Tensor) -> torch.Tensor:
        """As the released models compute them: in float32, from weights as they are stored."""
        weight = self.gate.weight
        if weight.dtype == torch.float32:
            logits_TE: torch.Tensor = self.gate(x_TD)
            return logits_TE
        # Sums in float64, whose last digit does not reach float32: no token's bits depend on how
        # many there are.
        return nn.functional.linear(x_TD.double(), weight.double()).float()
