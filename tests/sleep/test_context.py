"""What the books say of a tag: its state, what is missing, and what comes by itself."""

from __future__ import annotations

from collections.abc import Callable

from tests.sleep.kit import Rig, weights_of

from torpor.sleep.states import TagState

RigMaker = Callable[..., Rig]
OLD = weights_of(1)


def test_the_state_of_a_tag_follows_release_and_validity(rig_for: RigMaker) -> None:
    context = rig_for(weights=OLD).sleeper._context
    assert context.tag_state("weights") is TagState.RESIDENT
    context.ledger["embed"].valid = False
    assert context.tag_state("weights") is TagState.MAPPED_INVALID
    assert context.tag_state("kv_cache") is TagState.RESIDENT
    context.released = {"weights": 1}
    assert context.tag_state("weights") is TagState.RELEASED
    context.released = {}
    context.ledger["embed"].valid = True


def test_missing_names_what_must_be_sent_and_waiting_what_follows(rig_for: RigMaker) -> None:
    context = rig_for(weights=OLD).sleeper._context
    tags = context.ledger.tags()
    for name in ("qk", "embed", "normed", "doubled", "sinks", "rope"):
        context.ledger[name].valid = False
    context.ledger["qk"].covered = {"q"}
    assert context.missing(tags) == ["embed", "k", "rope"]
    assert context.waiting(tags) == ["normed", "doubled", "sinks"]
    assert context.missing(["kv_cache"]) == []
    for name in ("qk", "embed", "rope"):
        context.ledger[name].valid = True
    # With its sources there, a failed rebuild is what is missing.
    assert context.missing(tags) == ["normed"]
    assert context.waiting(tags) == ["doubled", "sinks"]


def test_slices_of_a_tensor_are_found_under_any_of_its_names(rig_for: RigMaker) -> None:
    context = rig_for(weights=OLD).sleeper._context
    names = {
        entry.name: [part.name for part in context.slices_of(entry)] for entry in context.ledger
    }
    assert names["qk"] == ["q", "k"]
    assert names["embed"] == ["embed"]
    assert names["rope"] == names["kv"] == []
