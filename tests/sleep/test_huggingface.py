"""Sleeper over Hugging Face causal LMs of other architectures, tiny and random."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from tests.sleep.conftest import SleeperMaker
from tests.sleep.samples import bits

from torpor.errors import AsleepError, WeightsIncompleteError
from torpor.sleep.sleeper import Sleeper
from torpor.sleep.source import FileExtent

COMMON = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED = COMMON | {"intermediate_size": 48, "num_key_value_heads": 2}
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def config_for(family: str) -> Any:
    if family == "gpt2":
        return transformers.GPT2Config(
            vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=64, **SPECIAL
        )
    if family == "qwen2":
        return transformers.Qwen2Config(**GROUPED, **SPECIAL, tie_word_embeddings=True)
    return transformers.MixtralConfig(
        **GROUPED, **SPECIAL, num_local_experts=4, num_experts_per_tok=2
    )


FAMILIES = ["gpt2", "qwen2", "mixtral"]


def build(family: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(
        config_for(family), attn_implementation="eager"
    )
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases too: nothing may be trivial
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.eval()


def ids(seed: int = 1) -> torch.Tensor:
    return torch.randint(3, 96, (2, 12), generator=torch.Generator().manual_seed(seed))


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(ids()).logits


class Checkpoint:
    """Weights as they were, each name once, as a checkpoint holds them."""

    def __init__(self, model: Any) -> None:
        self.held = {name: value.detach().clone() for name, value in model.named_parameters()}

    def names(self) -> list[str]:
        return list(self.held)

    def pairs(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.held.items()

    def extent(self, name: str) -> FileExtent | None:
        return None


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("level", [1, 2])
def test_logits_are_bit_equal_after_three_cycles(
    family: str, level: int, pattern: int, sleeper_for: SleeperMaker
) -> None:
    model = build(family)
    sleeper = sleeper_for(model, reload=Checkpoint(model), poison=pattern)
    sleeper.reload_weights()
    expected = logits(model)
    assert not expected.isnan().any()
    for _ in range(3):
        slept = sleeper.sleep(level)
        assert slept.arena_rss_after_bytes == 0
        assert slept.verified == slept.total_verifiable == len(sleeper.table())
        with pytest.raises(AsleepError):
            model(ids())
        woken = sleeper.wake_up()
        assert woken.verified == woken.total_verifiable == len(sleeper.table())
        assert woken.reloaded == (level == 2)
        assert torch.equal(logits(model), expected)
    assert sleeper._context.ledger.residents.nbytes == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_of_the_model_is_left_behind(family: str, sleeper_for: SleeperMaker) -> None:
    """Every parameter and buffer is owned, and no tensor hides in an attribute."""
    model = build(family)
    sleeper = sleeper_for(model, strict=True)
    owned = {name for row in sleeper.table() for name in (row.name, *row.aliases)}
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    assert owned == {name for name, _ in tensors}
    total = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for _, p in tensors}
    assert sum(row.nbytes for row in sleeper.table()) == sum(total.values())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("asleep", [False, True], ids=["awake", "after level 2"])
def test_a_full_update_pair_by_pair_equals_a_fresh_model(
    family: str, asleep: bool, pattern: int, sleeper_for: SleeperMaker
) -> None:
    model, fresh = build(family), build(family, seed=5)
    sleeper_for(fresh)  # aligned as ours is: alignment alone can change the last bits
    sleeper = sleeper_for(model, poison=pattern)
    before = logits(model)
    if asleep:
        sleeper.sleep(2)
        sleeper.wake_up()
    sleeper.begin_update(version="step 1")
    pairs = list(fresh.named_parameters())
    for name, value in reversed(pairs):
        assert sleeper.load_weights([(name, value)]) == {name}
    report = sleeper.finish_update()
    assert (report.version, report.updated) == ("step 1", len(pairs))
    assert not torch.equal(logits(model), before)
    assert torch.equal(logits(model), logits(fresh))
    again = sleeper_for(build(family, seed=5))
    assert sleeper.digests(portable=True) == again.digests(portable=True)
    sleeper.sleep()
    sleeper.wake_up()
    assert torch.equal(logits(model), logits(fresh))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_part_of_an_update_after_level_2_is_not_enough(
    family: str, sleeper_for: SleeperMaker
) -> None:
    model = build(family)
    weights = Checkpoint(model).held
    sleeper = sleeper_for(model)
    expected = logits(model)
    sleeper.sleep(2)
    sleeper.wake_up()
    *most, (last, value) = weights.items()
    with pytest.raises(WeightsIncompleteError, match=last):
        sleeper.update_weights(most)
    with pytest.raises(WeightsIncompleteError) as caught:
        model(ids())
    assert caught.value.names == (last,)
    sleeper.update_weights([(last, value)])
    assert torch.equal(logits(model), expected)


def losses(model: Any, optimizer: Any, steps: int, nap: Callable[[], None]) -> list[float]:
    model.train()
    found = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(ids(step), labels=ids(step)).loss
        loss.backward()
        nap()
        optimizer.step()
        nap()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_training_goes_on_with_the_same_losses(
    family: str, pattern: int, sleeper_for: SleeperMaker
) -> None:
    plain, model = build(family), build(family)
    for each in (plain, model):
        for part in each.modules():
            if isinstance(part, torch.nn.Dropout):
                part.p = 0.0
    sleeper_for(plain)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sleeper = sleeper_for(model, optimizer=optimizer, poison=pattern)

    def nap() -> None:
        sleeper.sleep()
        report = sleeper.wake_up()
        assert report.verified == report.total_verifiable

    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    expected = losses(plain, plain_optimizer, 4, lambda: None)
    assert losses(model, optimizer, 4, nap) == expected
    assert {name: bits(value) for name, value in model.named_parameters()} == {
        name: bits(value) for name, value in plain.named_parameters()
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_generating_while_asleep_raises_and_works_afterwards(
    family: str, sleeper_for: SleeperMaker
) -> None:
    model = build(family)
    sleeper: Sleeper = sleeper_for(model)
    prompt = {"input_ids": ids(), "attention_mask": torch.ones(2, 12, dtype=torch.long)}
    expected = model.generate(**prompt, max_new_tokens=5, do_sample=False)
    sleeper.sleep()
    assert "attention_mask" in inspect.signature(model.forward).parameters
    with pytest.raises(AsleepError):
        model.generate(**prompt, max_new_tokens=5, do_sample=False)
    sleeper.wake_up()
    assert torch.equal(model.generate(**prompt, max_new_tokens=5, do_sample=False), expected)
