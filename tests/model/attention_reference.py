"""Attention from its equation, in float64 and token by token, and rows that grow in a paged arena.

softmax(scale * q . k) over the visible keys, times their values; nothing is shared with the
backends under test.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from tests.model.native_kernels import native_library

from torpor.model.attention.interface import AttentionBatch, AttentionSpec
from torpor.model.attention.kv_fp8 import FP8_NAN_BYTE, KVScales, as_bytes
from torpor.model.attention.kv_layout import KVLayout
from torpor.model.attention.torch_attention import TorchAttention
from torpor.model.native.attention import NativeAttention

KINDS = ("torch", "native")
DTYPES = {
    "torch": (torch.float32, torch.bfloat16, torch.float16),
    "native": (torch.float32, torch.bfloat16),
}
"""What each backend takes."""


def reference(
    spec: AttentionSpec, q_HD: torch.Tensor, k_SHD: torch.Tensor, v_SHD: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The last token of a row: float64 [H, v_dim] and log-sum-exp [H]."""
    if spec.window is not None:
        k_SHD, v_SHD = k_SHD[-spec.window :], v_SHD[-spec.window :]
    group = spec.num_heads // spec.num_kv_heads
    keys_SHD = k_SHD.double().repeat_interleave(group, dim=1)
    values_SHD = v_SHD.double().repeat_interleave(group, dim=1)
    weights_SH = torch.exp(spec.scale * (keys_SHD * q_HD.double()).sum(-1))
    total_H = weights_SH.sum(0)
    return (weights_SH[..., None] * values_SHD).sum(0) / total_H[:, None], torch.log(total_H)


@dataclass
class Row:
    """One request: its tokens' queries, keys and values per layer, and its blocks."""

    q: list[torch.Tensor]
    k: list[torch.Tensor]
    v: list[torch.Tensor]
    blocks: list[int]
    done: int = 0


def attention_spec(
    layer: int = 0,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    k_dim: int = 16,
    v_dim: int = 16,
    window: int | None = None,
) -> AttentionSpec:
    """A layer with the usual scale."""
    return AttentionSpec(
        layer=layer,
        num_heads=heads,
        num_kv_heads=kv_heads,
        k_dim=k_dim,
        v_dim=v_dim,
        scale=1 / math.sqrt(k_dim),
        window=window,
    )


@dataclass
class World:
    """Rows of random content over an arena full of NaN, attended by a backend of either kind."""

    specs: Sequence[AttentionSpec]
    lengths: Sequence[int]
    kind: str = "torch"
    block_size: int = 8
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    """That of the arena; None for `dtype`."""
    seed: int = 0
    batch_invariant: bool = False
    workspace_bytes: int = 32 << 20
    group_bytes: int = 4 << 20
    """The two sizes are for torch's backend alone."""
    scratch: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        random = torch.Generator().manual_seed(self.seed)
        needed = [-(-length // self.block_size) for length in self.lengths]
        num_blocks = sum(needed) + 3
        shuffled = (torch.randperm(num_blocks - 1, generator=random) + 1).tolist()
        self.arena_dtype = self.cache_dtype or self.dtype
        self.scales = {}
        if self.arena_dtype == torch.float8_e4m3fn:
            self.scales = {
                spec.layer: KVScales(
                    torch.tensor([0.003 + 0.002 * spec.layer]), torch.tensor([0.01])
                )
                for spec in self.specs
            }
        self.layout = KVLayout(self.specs, self.block_size, self.arena_dtype, self.scales)
        self.kv = torch.full(
            (num_blocks, self.layout.elements_per_block), torch.nan, dtype=self.arena_dtype
        )
        self.rows = []
        for index, (length, count) in enumerate(zip(self.lengths, needed, strict=True)):
            blocks, shuffled = shuffled[:count], shuffled[count:]
            # A row's content depends on its number alone, whoever else there is.
            random = torch.Generator().manual_seed(1000 * self.seed + index)

            def draw(
                heads: int,
                dim: int,
                length: int = length,
                random: torch.Generator = random,
            ) -> torch.Tensor:
                return torch.randn(length, heads, dim, generator=random).to(self.dtype)

            self.rows.append(
                Row(
                    [draw(spec.num_heads, spec.k_dim) for spec in self.specs],
                    [draw(spec.num_kv_heads, spec.k_dim) for spec in self.specs],
                    [draw(spec.num_kv_heads, spec.v_dim) for spec in self.specs],
                    blocks,
                )
            )
        self.backend = self.new_backend()

    def new_backend(self) -> TorchAttention | NativeAttention:
        """A backend over the arena, whose scratch memory the test can spoil."""
        if self.kind == "native":
            return NativeAttention(
                self.kv,
                self.layout,
                library=native_library(),
                allocate=self._allocate,
            )
        return TorchAttention(
            self.kv,
            self.layout,
            allocate=self._allocate,
            workspace_bytes=self.workspace_bytes,
            group_bytes=self.group_bytes,
            batch_invariant=self.batch_invariant,
        )

    def _allocate(self, shape: tuple[int, ...], dtype: torch.dtype, name: str) -> torch.Tensor:
        self.scratch.append(torch.full(shape, torch.nan).to(dtype))
        return self.scratch[-1]

    def begin(self, chosen: Sequence[tuple[int, int]]) -> None:
        """Start a step of (row, new tokens) over spoiled scratch memory and unused slots."""
        for tensor in self.scratch:
            tensor.fill_(torch.nan)
        self.spoil()
        width = max(len(row.blocks) for row in self.rows) + 1
        tables, slots = [], []
        for index, new in chosen:
            row = self.rows[index]
            for position in range(row.done, row.done + new):
                block = row.blocks[position // self.block_size]
                slots.append(block * self.block_size + position % self.block_size)
            used = row.blocks[: -(-(row.done + new) // self.block_size)]
            tables.append(used + [0] * (width - len(used)))
        self.backend.begin(
            AttentionBatch(
                query_lens=tuple(new for _, new in chosen),
                context_lens=tuple(self.rows[index].done for index, _ in chosen),
                block_tables_RB=torch.tensor(tables),
                slots_T=torch.tensor(slots),
            )
        )

    def spoil(self) -> None:
        """NaN in every slot that no token of any row occupies."""
        used = torch.zeros(self.kv.shape[0], self.block_size, dtype=torch.bool)
        for row in self.rows:
            for position in range(row.done):
                block = row.blocks[position // self.block_size]
                used[block, position % self.block_size] = True
        for spec in self.specs:
            for view in (self.layout.keys, self.layout.values):
                nan = FP8_NAN_BYTE if self.scales else torch.nan
                view(as_bytes(self.kv), spec.layer)[~used] = nan

    def tokens(self, layer: int, chosen: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
        """Queries, keys and values of the next tokens of (row, new tokens), each [T, H, D]."""
        rows = [(self.rows[index], new) for index, new in chosen]
        return [
            torch.cat([column(row)[layer][row.done : row.done + new] for row, new in rows])
            for column in (lambda row: row.q, lambda row: row.k, lambda row: row.v)
        ]

    def step(self, chosen: Sequence[tuple[int, int]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Run (row, new tokens) through all layers: per layer [T, H, v_dim] and [T, H]."""
        self.begin(chosen)
        results = [
            self.backend.attend_with_lse(spec, *self.tokens(number, chosen))
            for number, spec in enumerate(self.specs)
        ]
        for index, new in chosen:
            self.rows[index].done += new
        return results

    def expected(
        self, chosen: Sequence[tuple[int, int]]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """What `step` should give, in float64; call before it.

        Keys and values are rounded as the cache rounds: a token looks the same fetched or fresh.
        """
        results = []
        for number, spec in enumerate(self.specs):
            tokens = [
                reference(
                    spec,
                    row.q[number][position],
                    *self._stored(spec, row.k[number], row.v[number], position + 1),
                )
                for row, new in ((self.rows[index], new) for index, new in chosen)
                for position in range(row.done, row.done + new)
            ]
            outs, logs = zip(*tokens, strict=True)
            results.append((torch.stack(outs), torch.stack(logs)))
        return results

    def _stored(
        self, spec: AttentionSpec, k_SHD: torch.Tensor, v_SHD: torch.Tensor, length: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        k_SHD, v_SHD = k_SHD[:length], v_SHD[:length]
        scales = self.scales.get(spec.layer)
        if scales is None:
            return k_SHD.to(self.arena_dtype), v_SHD.to(self.arena_dtype)
        return (
            eight_bits(k_SHD.double() / scales.k_scale) * scales.k_scale,
            eight_bits(v_SHD.double() / scales.v_scale) * scales.v_scale,
        )


def eight_bits(x: torch.Tensor) -> torch.Tensor:
    """float64 rounded as float8_e4m3fn rounds, saturating: three bits after the first, exponents
    from -6 to 8, ties to even."""
    x = x.clamp(-448, 448)
    _, exponent = torch.frexp(x)
    step = torch.ldexp(torch.ones_like(x), exponent.clamp(min=-5) - 4)
    return torch.round(x / step) * step


def tolerances(world: World) -> tuple[float, float]:
    """Of results and of log-sum-exps, for values of about 1."""
    if world.kind == "native":
        # Everything is float32 but the result, which is rounded once.
        return 2e-6 + (2**-8 if world.dtype == torch.bfloat16 else 0), 5e-6
    dtypes = {world.dtype, world.arena_dtype}
    if torch.bfloat16 in dtypes:
        return 2e-2, 1e-2 if len(dtypes) > 1 else 1e-3
    return (3e-3, 5e-3) if torch.float16 in dtypes else (2e-6, 5e-6)


def check(world: World, chosen: Sequence[tuple[int, int]]) -> None:
    """Run one step and compare it with the equation."""
    expected = world.expected(chosen)
    out_limit, lse_limit = tolerances(world)
    for (out, lse), (true_out, true_lse) in zip(world.step(chosen), expected, strict=True):
        assert out.dtype == world.dtype
        assert lse.dtype == torch.float32
        limit = out_limit * max(1.0, float(true_out.abs().max()))
        torch.testing.assert_close(out.double(), true_out, rtol=0, atol=limit)
        limit = lse_limit * max(1.0, float(true_lse.abs().max()))
        torch.testing.assert_close(lse.double(), true_lse, rtol=0, atol=limit)
