"""Attention over the paged cache with what PyTorch ships, on any device; made for the CPU.

Blocks are gathered into a bounded workspace and attended there. Nothing beyond a row's length is
read unless it is cleared first, so unused slots may hold anything.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torpor.errors import ArgumentError
from torpor.model.attention.interface import (
    AttentionBatch,
    AttentionSpec,
    Capabilities,
    LseAttention,
)
from torpor.model.attention.invariant_attention import InvariantSteps, tile_positions
from torpor.model.attention.kv_fp8 import as_bytes, from_cache, to_cache
from torpor.model.attention.kv_gather import (
    LayerRows,
    Workspace,
    token_rows,
    write_tokens,
)
from torpor.model.attention.kv_layout import KVLayout
from torpor.model.attention.partial import attend_pairs, attend_pairs_fused, attend_tokens, merge
from torpor.model.attention.plan import DecodeGroup, PrefillTile, StepPlan, StepPlanner
from torpor.model.machine.cpu_features import cpu_has_bfloat16_products
from torpor.model.machine.scratch import Allocate

WORKSPACE_BYTES = 32 << 20
GROUP_BYTES = 4 << 20
"""What one decode group gathers: more rows would leave the processor's cache in between."""

_Geometry = tuple[int, int, int, int | None]
_Where = torch.Tensor | Sequence[torch.Tensor]


class TorchAttention(LseAttention):
    """The backend that runs everywhere and that others are compared with.

    Args:
        kv: the arena [num_blocks, layout.elements_per_block].
        layout: where layers lie in a block.
        allocate: gives scratch memory, see `Allocate`; called only here.
        workspace_bytes: how much to gather at once. A row that needs more is attended in pieces.
        group_bytes: how much a group of decode rows gathers at once.
        batch_invariant: make a token's bits independent of the other rows, of padding, and of how
            its row is chunked; slower. CPU only.

    Raises:
        ArgumentError: the arena does not fit the layout, or `batch_invariant` off the CPU.
    """

    def __init__(
        self,
        kv: torch.Tensor,
        layout: KVLayout,
        *,
        allocate: Allocate,
        workspace_bytes: int = WORKSPACE_BYTES,
        group_bytes: int = GROUP_BYTES,
        batch_invariant: bool = False,
    ) -> None:
        layout.check_arena(kv)
        if batch_invariant and kv.device.type != "cpu":
            raise ArgumentError(
                f"batch-invariant attention runs on the CPU, not on {kv.device}; "
                "turn batch_invariant off"
            )
        widen = batch_invariant or bool(layout.scales) or not _fast_products(kv)
        self._dtype = torch.float32 if widen else kv.dtype
        self._cache_dtype = kv.dtype
        self._block_size = layout.block_size
        positions = tile_positions(layout.block_size) if batch_invariant else 1
        self._workspace = Workspace(
            layout, workspace_bytes, widen=widen, allocate=allocate, positions=positions
        )
        self._group_bytes = group_bytes
        self._layers = {
            layer: LayerRows.of(layout, kv, spec) for layer, spec in layout.specs.items()
        }
        self._invariant = InvariantSteps(self._workspace) if batch_invariant else None
        self._batch: AttentionBatch | None = None
        self._plans: dict[_Geometry, StepPlan] = {}
        self._where: dict[tuple[int, int, int], _Where] = {}
        self._slots: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def capabilities(self) -> Capabilities:
        """See `AttentionBackend`."""
        return Capabilities(
            name="torch",
            block_sizes=None,
            reads_past_length=False,
            returns_lse=True,
            k_v_dims_differ=True,
            windows=True,
            batch_invariant=self._invariant is not None,
        )

    def begin(self, batch: AttentionBatch) -> None:
        """See `AttentionBackend`."""
        self._batch = batch
        self._plans.clear()
        self._where.clear()
        blocks_T = torch.div(batch.slots_T, self._block_size, rounding_mode="floor")
        self._slots = blocks_T, batch.slots_T - blocks_T * self._block_size
        if self._invariant is not None:
            self._invariant.begin(batch)

    def _attend(
        self,
        spec: AttentionSpec,
        q_THD: torch.Tensor,
        k_THD: torch.Tensor,
        v_THD: torch.Tensor,
        *,
        with_lse: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        layer = self._layers[spec.layer]
        # Rounded as the cache rounds, so that a token looks the same fetched or fresh.
        k_scale, v_scale = layer.k_scale, layer.v_scale
        k_THD = to_cache(k_THD, self._cache_dtype, k_scale)
        v_THD = to_cache(v_THD, self._cache_dtype, v_scale)
        self._write(layer, k_THD, v_THD)
        dtype = q_THD.dtype
        q_THD = q_THD.to(self._dtype)
        if self._invariant is not None:
            out, lse = self._invariant.attend(layer, q_THD)
            return out.to(dtype), lse
        plan = self._plan(layer)
        if len(plan.decode) == 1 and not plan.prefill and isinstance(plan.decode[0].tokens, slice):
            # The usual step: results are already in the order of the tokens.
            first, first_lse = self._decode(layer, plan.decode[0], q_THD, with_lse=with_lse)
            return first.to(dtype), first_lse
        out_THD = q_THD.new_empty((*q_THD.shape[:2], spec.v_dim))
        lse_TH = q_THD.new_empty(q_THD.shape[:2], dtype=torch.float32) if with_lse else None
        for group in plan.decode:
            part, part_lse = self._decode(layer, group, q_THD, with_lse=with_lse)
            _put(out_THD, group.tokens, part)
            _put(lse_TH, group.tokens, part_lse)
        fresh: tuple[torch.Tensor, torch.Tensor] | None = None
        if plan.prefill:
            fresh = (
                from_cache(k_THD, self._dtype, k_scale),
                from_cache(v_THD, self._dtype, v_scale),
            )
        for tile in plan.prefill:
            assert fresh is not None
            part, part_lse = self._prefill(layer, tile, q_THD, *fresh)
            _put(out_THD, tile.queries, part)
            _put(lse_TH, tile.queries, part_lse)
        return out_THD.to(dtype), lse_TH

    def _decode(
        self, layer: LayerRows, group: DecodeGroup, q_THD: torch.Tensor, *, with_lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        spec = layer.spec
        group.gather.load(layer)
        heads = spec.num_heads // spec.num_kv_heads
        q_PGD = q_THD[group.tokens].reshape(-1, heads, spec.k_dim)
        attend = attend_pairs if self._dtype == torch.float32 else attend_pairs_fused
        out_PGD, lse_PG = attend(
            q_PGD, group.keys_PSD, group.values_PSD, spec.scale, group.mask_P1S, with_lse=with_lse
        )
        out_RHD = out_PGD.reshape(-1, spec.num_heads, spec.v_dim)
        return out_RHD, None if lse_PG is None else lse_PG.reshape(-1, spec.num_heads)

    def _prefill(
        self,
        layer: LayerRows,
        tile: PrefillTile,
        q_THD: torch.Tensor,
        k_THD: torch.Tensor,
        v_THD: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        q_THD = q_THD[tile.queries]
        result: tuple[torch.Tensor, torch.Tensor] | None = None
        for piece in tile.pieces:
            if piece.gather is None:
                k_SKD, v_SKD = k_THD[piece.keys], v_THD[piece.keys]
            else:
                piece.gather.load(layer)
                k_SKD = piece.gather.keys_PSD[:, piece.keys].transpose(0, 1)
                v_SKD = piece.gather.values_PSD[:, piece.keys].transpose(0, 1)
            part = attend_tokens(
                q_THD, k_SKD, v_SKD, layer.spec.scale, mask_TS=piece.mask_TS, causal=piece.causal
            )
            result = part if result is None else merge(*result, *part)
        assert result is not None
        return result

    def _plan(self, layer: LayerRows) -> StepPlan:
        spec = layer.spec
        key = (spec.num_kv_heads, spec.k_dim, spec.v_dim, spec.window)
        plan = self._plans.get(key)
        if plan is None:
            assert self._batch is not None, "attend() before begin()"
            width = spec.num_kv_heads * (spec.k_dim + spec.v_dim) * self._dtype.itemsize
            plan = StepPlanner(
                self._batch,
                layer,
                self._workspace,
                group=self._group_bytes // width,
            ).plan()
            self._plans[key] = plan
        return plan

    def _write(self, layer: LayerRows, k_THD: torch.Tensor, v_THD: torch.Tensor) -> None:
        keys = self._token_rows(layer, layer.spec.k_dim, keys=True)
        values = self._token_rows(layer, layer.spec.v_dim, keys=False)
        write_tokens(layer.key_tokens, layer.keys_NBHD, keys, as_bytes(k_THD))
        write_tokens(layer.value_tokens, layer.values_NBHD, values, as_bytes(v_THD))

    def _token_rows(self, layer: LayerRows, dim: int, *, keys: bool) -> _Where:
        rows = layer.key_tokens if keys else layer.value_tokens
        key = (layer.spec.num_kv_heads, dim, rows.per_block)
        where = self._where.get(key)
        if where is None:
            assert self._slots is not None, "attend() before begin()"
            where = token_rows(rows, layer.spec.num_kv_heads, *self._slots)
            self._where[key] = where
        return where


def _put(
    target: torch.Tensor | None, where: slice | torch.Tensor, source: torch.Tensor | None
) -> None:
    if target is None or source is None:
        return
    if isinstance(where, slice):
        target[where] = source
    else:
        target.index_copy_(0, where, source.to(target.dtype))


def _fast_products(kv: torch.Tensor) -> bool:
    """Whether products in the cache's own dtype are fast here; else float32 is."""
    if kv.dtype == torch.float32 or kv.device.type != "cpu":
        return True
    return kv.dtype == torch.bfloat16 and cpu_has_bfloat16_products()
