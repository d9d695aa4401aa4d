"""The ranks of openPangu hold all of it between them, their sinks with the KV heads they are of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.model.ranks import Loaded, loaded, loaded_both
from tests.openpangu.models import MODELS, tensors, write_model

from torpor.errors import ConfigError
from torpor.model.checkpoints.load import new_model
from torpor.model.checkpoints.resolve import resolve_model
from torpor.model.config.config import parse_config
from torpor.sleep.shards import TensorParallel

UNEVEN: Mapping[str, Any] = {"vocab_size": 93}
KINDS: Mapping[str, dict[str, Any]] = {
    **MODELS,
    "embedded, uneven": {**MODELS["embedded"], **UNEVEN},
    "pro moe v2, one KV head": {**MODELS["pro moe v2"], **UNEVEN, "num_key_value_heads": 1},
    "pro moe v2, four KV heads": {**MODELS["pro moe v2"], "num_key_value_heads": 4},
    "ultra, uneven": {**MODELS["ultra, sinks"], **UNEVEN},
}
IDS = torch.randint(0, 93, (14,), generator=torch.Generator().manual_seed(3)).tolist()

PLACED = [(kind, size) for kind in KINDS for size in (2, 4)]


@pytest.fixture(scope="module", params=PLACED, ids="{0[0]}, {0[1]} ranks".format)
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Loaded]:
    kind, size = request.param
    folder = write_model(tmp_path_factory.mktemp("ranks"), KINDS[kind])
    with loaded_both(resolve_model(folder), folder, size) as made:
        yield made


def test_the_parts_of_all_ranks_are_the_whole(model: Loaded) -> None:
    model.check_parts()


def test_ranks_compute_together_what_the_whole_computes(model: Loaded) -> None:
    model.check_results(IDS)


def derived_part(name: str, whole: torch.Tensor, tp: TensorParallel, latent: bool) -> torch.Tensor:
    """What a rank must have derived, from what the whole model has."""
    if name.endswith((".w_uk", ".w_uv")):
        return whole.chunk(tp.size)[tp.rank]
    if latent:
        return whole  # Sinks of the latent that all heads share.
    kv_heads = whole.shape[1]
    if kv_heads >= tp.size:
        return whole.chunk(tp.size, dim=1)[tp.rank]
    first = tp.rank // (tp.size // kv_heads)
    return whole[:, first : first + 1]


def test_what_a_rank_derives_is_its_part_of_what_the_whole_derives(model: Loaded) -> None:
    want, features = model.whole.derived(), model.files.config.features
    latent = features.mla is not None
    assert bool(want) == (latent or features.sinks is not None)
    for rank in model.ranks:
        found = rank.derived()
        assert found.keys() == want.keys()
        for name, tensor in found.items():
            assert torch.equal(tensor, derived_part(name, want[name], rank.tp, latent)), name


@pytest.mark.parametrize("kind", ["pro moe v2", "ultra, sinks"])
@pytest.mark.parametrize("level", [1, 2])
def test_a_rank_wakes_with_its_part_and_follows_an_update(
    tmp_path: Path, kind: str, level: int
) -> None:
    files = resolve_model(write_model(tmp_path / "a", KINDS[kind]))
    others = resolve_model(write_model(tmp_path / "b", KINDS[kind], seed=1))
    tp = TensorParallel(3, 4)
    with loaded(files, tmp_path, tp) as rank, loaded(others, tmp_path, tp) as other:

        def held() -> dict[str, torch.Tensor]:
            own = {name: tensor.detach() for name, tensor in rank.model.named_parameters()}
            return {name: tensor.clone() for name, tensor in (own | rank.derived()).items()}

        before = held()
        for _ in range(2):
            rank.sleeper.sleep(level=level)
            rank.sleeper.wake_up()
            if level == 2:
                rank.sleeper.reload_weights()
            assert all(torch.equal(tensor, before[name]) for name, tensor in held().items())
        assert not rank.sleeper.verify().differing
        rank.sleeper.update_weights(tensors(KINDS[kind], seed=1))
        assert rank.sleeper.digests() == other.sleeper.digests()
        assert not all(torch.equal(tensor, before[name]) for name, tensor in held().items())


def test_a_shared_experts_width_that_ranks_do_not_divide_is_refused_by_name() -> None:
    values = {**MODELS["pro moe"], "shared_expert_intermediate_size": 25}
    config = parse_config(values, {}, where="test")
    with pytest.raises(ConfigError, match="shared_expert_intermediate_size is 25, which tensor"):
        new_model(config, torch.float32, TensorParallel(0, 2))


def test_latent_attention_asks_for_heads_alone() -> None:
    values = {**MODELS["ultra, sinks"], "num_attention_heads": 6, "num_key_value_heads": 3}
    config = parse_config(values, {}, where="test")
    (spec, *_) = new_model(config, torch.float32, TensorParallel(0, 2)).attention_specs()
    assert (spec.num_heads, spec.num_kv_heads) == (3, 1)
    with pytest.raises(ConfigError, match="num_attention_heads is 6, which tensor_parallel_size 4"):
        new_model(config, torch.float32, TensorParallel(0, 4))
