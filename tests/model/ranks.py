"""The ranks of one model in one process: loaded as an engine loads, joined, and run together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from tests.model.helpers import OneSequence, logits_of
from torch import nn
from torch.nn import functional

from torpor.model.checkpoints.files import ModelFiles
from torpor.model.checkpoints.load import build_model
from torpor.model.layers.decoder import DecoderForCausalLM
from torpor.model.layers.derived import own_derived
from torpor.sleep.shards import ALONE, ShardRule, TensorParallel
from torpor.sleep.sleeper import Sleeper
from torpor.sleep.source import SliceTable


@dataclass
class Rank:
    """One rank's part of a model, loaded and owned."""

    tp: TensorParallel
    model: DecoderForCausalLM
    sleeper: Sleeper
    table: SliceTable

    def part_of(self, name: str) -> torch.Tensor | None:
        """What fills the place of a checkpoint's tensor here; None where nothing does."""
        if name not in self.table:
            assert self.table.ignores(name)
            return None
        entry = self.table[name]
        return entry.rows_of(self.model.get_parameter(entry.parameter))

    def derived(self) -> dict[str, torch.Tensor]:
        """What is computed from weights, by name."""
        return {entry.name: entry.tensor for entry in self.model.derived()}


@contextmanager
def loaded(files: ModelFiles, spill_dir: Path, tp: TensorParallel = ALONE) -> Iterator[Rank]:
    """A rank in float32, poisoned before it was filled."""
    model = build_model(files, torch.float32, tp)
    table = model.slice_table()
    sleeper = Sleeper(model, reload=files.source, slices=table, spill_dir=spill_dir, poison=True)
    try:
        own_derived(sleeper, model.derived())
        sleeper.reload_weights()
        yield Rank(tp, model, sleeper, table)
    finally:
        sleeper.close(discard=True)


def joined(rule: ShardRule, parts: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """The whole tensor, from what its ranks hold; copies must be equal.

    Works from the rule and from what is there alone.
    """
    if rule.first_rank_only:
        assert all(part is None for part in parts[1:])
    held = [part for part in parts if part is not None]
    if not rule.blocks:
        assert all(torch.equal(part, held[0]) for part in held)
        return held[0]
    size = len(held)
    lengths = [max(-(-block.count // size), 1) * block.width for block in rule.blocks]
    by_block = zip(*(part.split(lengths, rule.dim) for part in held), strict=True)
    whole = []
    for block, own in zip(rule.blocks, by_block, strict=True):
        copies = max(size // block.count, 1) if block.unit == "kv_head" else 1
        for rank, part in enumerate(own):
            assert torch.equal(part, own[rank // copies * copies])
        elements = torch.cat(own[::copies], rule.dim)
        count = block.count * block.width
        padding = elements.narrow(rule.dim, count, elements.shape[rule.dim] - count)
        assert not padding.any(), "padding that is not zero"
        assert not padding.numel() or block.unit == "token"
        whole.append(elements.narrow(rule.dim, 0, count))
    return torch.cat(whole, rule.dim)


def reads(name: str, ranks: Sequence[Rank], whole: torch.Tensor) -> torch.Tensor:
    """How many ranks take each element of a checkpoint's tensor."""
    counts = torch.zeros(whole.shape)
    for rank in ranks:
        own = rank.part_of(name)
        if own is None:
            continue
        for target, piece in rank.table[name].copies(own, counts):
            assert target.shape == piece.shape
            if piece.untyped_storage().data_ptr() == counts.untyped_storage().data_ptr():
                piece += 1
    return counts


class _Summed(nn.Module):
    """The parts of a module whose results ranks sum. Attention gets a context for each rank."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(
        self,
        x_TD: torch.Tensor,
        rope: object = None,
        attn: Sequence[OneSequence] | None = None,
        rows_R: torch.Tensor | None = None,
    ) -> torch.Tensor:
        results = []
        for rank, part in enumerate(self.parts):
            arguments = () if attn is None else (rope, attn[rank], rows_R)
            results.append(part(x_TD.clone(), *arguments))
        return torch.stack(results).sum(0)


class _Tokens(nn.Module):
    """Each rank looks up the tokens whose rows it has, and gives zeros for the others."""

    def __init__(self, weights: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.weights = weights

    def forward(self, ids_T: torch.Tensor) -> torch.Tensor:
        found = []
        for rank, weight in enumerate(self.weights):
            own_T = ids_T - rank * len(weight)
            here_T1 = ((own_T >= 0) & (own_T < len(weight)))[:, None]
            found.append(functional.embedding(own_T.clamp(0, len(weight) - 1), weight) * here_T1)
        return torch.stack(found).sum(0)


def run_together(whole: DecoderForCausalLM, ranks: Sequence[Rank], ids: list[int]) -> torch.Tensor:
    """Logits [T, vocab_size], where every part that is divided is computed by the ranks.

    What all of them have is `whole`'s.
    """
    models, decoder = [rank.model for rank in ranks], whole.model
    embed_tokens, parts = decoder.embed_tokens, [(at.self_attn, at.mlp) for at in decoder.layers]
    decoder.embed_tokens = _Tokens([model.model.embed_tokens.weight for model in models])
    for at, layer in enumerate(decoder.layers):
        of_ranks = [model.model.layers[at] for model in models]
        layer.self_attn = _Summed([part.self_attn for part in of_ranks])
        layer.mlp = _Summed([part.mlp for part in of_ranks])
    try:
        contexts = [OneSequence() for _ in ranks]
        hidden_TD = decoder(torch.tensor(ids), torch.arange(len(ids)), contexts)
    finally:
        decoder.embed_tokens = embed_tokens
        for layer, (self_attn, mlp) in zip(decoder.layers, parts, strict=True):
            layer.self_attn, layer.mlp = self_attn, mlp
    logits = torch.cat([model.compute_logits(hidden_TD) for model in models], dim=-1)
    # The rows after the vocabulary are nobody's tokens.
    return logits[:, : whole.config.vocab_size]


@dataclass
class Loaded:
    """A model as a whole and in parts."""

    files: ModelFiles
    whole: Rank
    ranks: list[Rank]

    def check_parts(self) -> None:
        """Joined by rule, the parts are the whole, of which every element is somewhere: on one
        rank, or on as many as the rule says."""
        table, size = self.whole.table, len(self.ranks)
        used = [name for name in self.files.source.names() if not table.ignores(name)]
        assert set(used) == {entry.name for entry in table}
        for name in used:
            want, rule = self.whole.part_of(name), table[name].rule
            assert want is not None
            got = joined(rule, [rank.part_of(name) for rank in self.ranks])
            assert torch.equal(got, want), name
            times = 1 if rule.blocks or rule.first_rank_only else size
            want_reads = torch.full(want.shape, float(times))
            first = 0
            for block in rule.blocks:
                elements = block.count * block.width
                if block.unit == "kv_head":
                    want_reads.narrow(rule.dim, first, elements).fill_(max(size // block.count, 1))
                first += elements
            assert torch.equal(reads(name, self.ranks, want), want_reads), name

    def check_results(self, ids: list[int]) -> None:
        """What the ranks compute together is what the whole model computes."""
        with torch.inference_mode():
            want = logits_of(self.whole.model, ids)
            got = run_together(self.whole.model, self.ranks, ids)
            assert got.shape == want.shape
            assert (got - want).abs().max() <= 1e-5 * max(1.0, float(want.abs().max()))


@contextmanager
def loaded_both(files: ModelFiles, spill_dir: Path, size: int) -> Iterator[Loaded]:
    """A model as a whole and in `size` parts."""
    with ExitStack() as stack:
        whole = stack.enter_context(loaded(files, spill_dir))
        tps = [TensorParallel(rank, size) for rank in range(size)]
        yield Loaded(
            files, whole, [stack.enter_context(loaded(files, spill_dir, tp)) for tp in tps]
        )
