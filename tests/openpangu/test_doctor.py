"""``torpor doctor`` on openPangu: everything has an owner, what is derived its sources."""

from __future__ import annotations

import pytest
import torch
from tests.openpangu.conftest import Folders
from tests.openpangu.models import MODELS
from tests.openpangu.test_sleep import PLACED
from tests.serve.conftest import Torpor, torpor

from torpor.check.doctor import Diagnosis, doctor
from torpor.engine.llm import LLM
from torpor.errors import OwnershipError
from torpor.model.layers.sinks import StaticSinkAttention

__all__ = ["torpor"]

PROMPTS = ("w5 w9 w44 w7", "w80")
LAYERS = 3
ABSORBED = {"w_uk": ("kv_b_proj.weight",), "w_uv": ("kv_b_proj.weight",)}
SINKS = {
    "sink_attn.sink_key": ("param_sink_key", "k_layernorm.weight"),
    "sink_attn.sink_value": ("param_sink_value",),
}
LATENT = ("param_sink_compressed_kv", "kv_a_layernorm.weight")
LATENT_SINKS = {
    "sink_attn.sink_key": (*LATENT, "param_sink_k_pe"),
    "sink_attn.sink_value": LATENT,
}


def expected_sources(kind: str) -> dict[str, tuple[str, ...]]:
    """What one layer's attention derives, and what from."""
    latent, sinks = kind.startswith("ultra"), MODELS[kind].get("param_sink_number")
    sources = dict(ABSORBED if latent else {})
    return sources | (LATENT_SINKS if latent else SINKS) if sinks else sources


@pytest.fixture(scope="module", params=[*PLACED], ids=" ".join)
def examined(request: pytest.FixtureRequest, folders: Folders) -> tuple[str, str, Diagnosis]:
    kind, placement = request.param
    found = doctor(folders(kind), prompts=PROMPTS, max_tokens=3, sink_placement=placement)
    return kind, placement, found


def test_nothing_is_without_an_owner_and_all_of_it_comes_back(
    examined: tuple[str, str, Diagnosis],
) -> None:
    _, _, found = examined
    assert found.verdict == "healthy"
    assert not found.audit.unowned
    assert not found.residents
    assert len(found.examinations) == 2
    assert all(len(entry.trips) == 2 for entry in found.examinations)


def test_the_table_of_owners_names_every_source(examined: tuple[str, str, Diagnosis]) -> None:
    kind, placement, found = examined
    prefixes = [f"model.layers.{layer}.self_attn." for layer in range(LAYERS)]
    want = {
        prefix + name: tuple(prefix + source for source in sources)
        for prefix in prefixes
        for name, sources in expected_sources(kind).items()
    }
    derived = {row.name: row.sources for row in found.owners if row.cls == "derived"}
    assert derived == want
    rows = {row.name: row for row in found.owners}
    assert {source for sources in want.values() for source in sources} <= set(rows)
    sinks = tuple(f"{p}sink_attn.sink_{part}" for p in prefixes for part in ("key", "value"))
    assert rows["kv_cache"].sources == (sinks if placement == "reserved" else ())
    zeros = [row.cls for row in found.owners if row.name.endswith(("sink_value", "compressed_kv"))]
    assert ("buffer" in zeros) == ("zero" in kind)


def test_the_command_line_examines_either_placement(torpor: Torpor, folders: Folders) -> None:
    folder = folders("pro moe v2")
    options = ("--max-tokens", 2, "--strict")
    outcome = torpor("doctor", folder, *options, "--sink-placement", "reserved", "--json")
    assert outcome.code == 0
    assert outcome.json["verdict"] == "healthy"
    (kv_cache,) = [row for row in outcome.json["owners"] if row["name"] == "kv_cache"]
    assert "model.layers.2.self_attn.sink_attn.sink_key" in kv_cache["sources"]
    outcome = torpor("doctor", folder, *options)
    assert outcome.code == 0
    attention = "model.layers.*.self_attn."
    sources = f"{attention}param_sink_key, {attention}k_layernorm.weight"
    text = " ".join(outcome.out.split())
    assert f"{attention}sink_attn.sink_key computed from {sources}" in text
    assert "kv_cache computed from" not in text
    outcome = torpor("doctor", folder, "--sink-placement", "elsewhere", "--json")
    assert outcome.code == 2
    assert "sink_placement is 'elsewhere'" in outcome.json["error"]["message"]


@pytest.mark.parametrize("command", ["generate", "bench"])
def test_other_commands_take_the_placement(torpor: Torpor, folders: Folders, command: str) -> None:
    words = ["generate", "w5 w6", "--max-tokens", 3]
    if command == "bench":
        words = ["bench", "latency", "--num-iters", 1, "--input-len", 3, "--output-len", 3]
    model = ("--model", folders("pro moe v2"), "--json")
    assert torpor(*words, *model, "--sink-placement", "reserved").code == 0
    outcome = torpor(*words, *model, "--sink-placement", "elsewhere")
    assert "sink_placement is 'elsewhere'" in outcome.json["error"]["message"]


def test_a_tensor_that_nobody_owns_is_found(
    folders: Folders, torpor: Torpor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where sinks are computed into an attribute, and content is lost that nobody declared."""
    build = StaticSinkAttention.__init__

    def with_attribute(self: StaticSinkAttention, *args: object, **options: object) -> None:
        build(self, *args, **options)  # type: ignore[arg-type]
        self.stray = torch.ones(7, 5)

    monkeypatch.setattr(StaticSinkAttention, "__init__", with_attribute)
    found = doctor(folders("pro moe v2"), prompts=PROMPTS, max_tokens=2)
    assert found.verdict == "findings"
    strays = [row for row in found.residents if row.name.endswith("sink_attn.stray")]
    assert [row.resident_bytes for row in strays] == [140] * LAYERS
    assert all("test_doctor.py" in row.reason and row.remedy for row in strays)
    assert torpor("doctor", folders("pro moe v2"), "--max-tokens", 2, "--strict").code == 1
    with pytest.raises(OwnershipError, match="stray"):
        LLM(folders("pro moe v2"), max_model_len=64)
