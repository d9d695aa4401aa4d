"""The scheduler over a real cache manager: fairness, chunks, hits, preemption, and every slot."""

from __future__ import annotations

import random

import pytest
from tests.engine.fakes import World, alone

from torpor.cache.manager import Epochs


def counts(world: World) -> list[dict[str, int]]:
    """New tokens by sequence, for each step."""
    return [{row.sequence.seq_id: row.num_new_tokens for row in step.rows} for step in world.steps]


def test_a_prompt_is_computed_at_once_and_then_token_by_token() -> None:
    world = World()
    world.add(range(10), max_tokens=3)
    world.run()
    assert counts(world) == [{"0/0": 10}, {"0/0": 1}, {"0/0": 1}]


def test_a_long_prompt_is_computed_in_chunks() -> None:
    world = World(num_blocks=30)
    world.add(range(40), max_tokens=1)
    world.run()
    assert counts(world) == [{"0/0": 16}, {"0/0": 16}, {"0/0": 8}]


def test_a_long_prompt_does_not_hold_up_those_that_answer() -> None:
    world = World(num_blocks=60, max_num_batched_tokens=8)
    world.add([1, 2], max_tokens=9)
    world.step()
    world.add(range(60), max_tokens=1)
    world.add([3, 4], max_tokens=1)
    world.run()
    answering = [step for step in counts(world)[1:] if "0/0" in step]
    assert len(answering) == 8
    assert all(step["0/0"] == 1 for step in answering)
    # The short prompt behind the long one starts in the same step, in what the long one leaves.
    assert counts(world)[1]["1/0"] == 4
    assert counts(world)[1]["2/0"] == 2


def test_a_long_prompt_gets_its_share_whatever_comes_after_it() -> None:
    world = World(num_blocks=100, max_num_batched_tokens=8)
    long = world.add(range(50), max_tokens=1)
    while not long.finished:
        world.add([9, world.number], max_tokens=2)
        world.step()
    assert len(world.steps) <= 14
    world.run()


def test_requests_with_one_prefix_compute_it_once_even_in_one_step() -> None:
    world = World(num_blocks=60, max_num_batched_tokens=200)
    prefix = list(range(40))
    for last in range(8):
        world.add([*prefix, 60 + last], max_tokens=2)
    world.run()
    first = counts(world)[0]
    assert first.pop("0/0") == 41
    assert set(first.values()) == {1}
    assert world.scheduler.stats.num_prefix_hit_tokens == 7 * 40


def test_completions_of_one_prompt_share_it() -> None:
    world = World(num_blocks=60, max_num_batched_tokens=200)
    request = world.add(range(20), max_tokens=3, n=4)
    world.run()
    assert counts(world)[0] == {"0/0": 20, "0/1": 4, "0/2": 4, "0/3": 4}
    assert {tuple(seq.completion.token_ids) for seq in request.sequences} == {
        tuple(alone(range(20), 3))
    }


def test_the_last_to_come_is_preempted_and_ends_the_same() -> None:
    world = World(num_blocks=7, max_num_batched_tokens=64)
    first = world.add(range(8), max_tokens=12)
    second = world.add(range(20, 28), max_tokens=12)
    world.run()
    assert world.scheduler.stats.num_preemptions > 0
    assert [seq.num_preemptions for seq in first.sequences] == [0]
    for request in (first, second):
        tokens = request.sequences[0].completion.token_ids
        assert tokens == alone(request.prompt.token_ids, 12)


def test_priority_decides_who_starts_and_who_is_preempted() -> None:
    world = World(num_blocks=7, max_num_seqs=2)
    low = world.add(range(8), max_tokens=12, priority=5)
    world.step()
    high = world.add(range(20, 28), max_tokens=12, priority=1)
    also_low = world.add(range(30, 34), max_tokens=1, priority=5)
    world.run()
    assert high.sequences[0].num_preemptions == 0
    assert low.sequences[0].num_preemptions > 0
    assert also_low.finished


def test_a_waiting_sequence_never_takes_blocks_from_a_running_one() -> None:
    world = World(num_blocks=7)
    world.add(range(16), max_tokens=4)
    world.step()
    world.add(range(30, 46), max_tokens=2)
    world.run()
    assert world.scheduler.stats.num_preemptions == 0


def test_an_aborted_sequence_gives_its_blocks_back_at_once() -> None:
    world = World()
    request = world.add(range(10), max_tokens=5)
    world.add(range(20, 24), max_tokens=2)
    world.step()
    world.scheduler.finish(request.sequences[0])
    world.scheduler.finish(request.sequences[0])
    world.run()
    assert world.cache.num_free == world.num_blocks - 1


def test_requests_that_come_during_a_drain_wait() -> None:
    world = World()
    old = world.add(range(4), max_tokens=3)
    with world.scheduler.holding_back_new():
        new = world.add(range(4, 8), max_tokens=1, priority=-1)
        world.run()
        assert (old.finished, new.finished) == (True, False)
    world.run()
    assert new.finished


def test_drains_that_overlap_end_in_any_order() -> None:
    world = World()
    first = world.scheduler.holding_back_new()
    world.add(range(4), max_tokens=2)
    first.__enter__()
    world.add(range(4, 8), max_tokens=2)
    second = world.scheduler.holding_back_new()
    second.__enter__()
    late = world.add(range(8, 12), max_tokens=1)
    first.__exit__(None, None, None)
    world.run()
    assert not late.finished
    second.__exit__(None, None, None)
    world.run()
    assert late.finished


def test_a_step_undone_starts_its_rows_over_and_leaves_nothing_to_hit() -> None:
    world = World(num_blocks=30, max_num_batched_tokens=64)
    request = world.add(range(12), max_tokens=2)
    step = world.scheduler.schedule()
    world.scheduler.undo(step)
    world.cache.check()
    other = world.add(range(12), max_tokens=2)
    world.run()
    assert counts(world)[0]["0/0"] == 12
    for done in (request, other):
        assert done.sequences[0].completion.token_ids == alone(range(12), 2)


def test_dropping_the_cache_starts_everyone_over() -> None:
    world = World(num_blocks=40)
    requests = [world.add(range(9 + i), max_tokens=6) for i in range(3)]
    world.step()
    world.step()
    world.scheduler.drop_cache()
    world.epochs = Epochs(weights=1, kv=2)
    world.slots.clear()
    world.cache.check()
    world.run()
    for request in requests:
        tokens = request.sequences[0].completion.token_ids
        assert tokens == alone(request.prompt.token_ids, 6)


@pytest.mark.parametrize("moved", [Epochs(weights=2, kv=1), Epochs(weights=1, kv=2)])
def test_an_epoch_that_moved_makes_a_forgotten_reset_harmless(moved: Epochs) -> None:
    world = World(num_blocks=30, max_num_batched_tokens=64)
    world.add(range(12), max_tokens=1)
    world.run()
    world.epochs = moved
    world.add(range(12), max_tokens=1)
    world.run()
    assert counts(world)[-1] == {"1/0": 12}


@pytest.mark.parametrize("window", [None, 3, 6])
@pytest.mark.parametrize("seed", range(25))
def test_whatever_happens_every_sequence_ends_with_its_own_tokens(
    seed: int, window: int | None
) -> None:
    random_ = random.Random(seed)
    world = World(
        num_blocks=random_.randint(7, 24),
        max_num_batched_tokens=random_.choice([3, 8, 64]),
        window=window,
    )
    alive, done = [], []
    for _ in range(60):
        action = random_.random()
        if action < 0.3:
            prompt = [random_.randrange(3) for _ in range(random_.randint(1, 14))]
            alive.append(world.add(prompt, random_.randint(1, 8), priority=random_.randrange(2)))
        elif action < 0.36 and alive:
            victim = random_.choice(alive)
            alive.remove(victim)
            for sequence in victim.sequences:
                world.scheduler.finish(sequence)
        elif action < 0.40:
            world.scheduler.preempt_all()
        elif action < 0.44:
            world.scheduler.drop_cache()
            world.epochs = Epochs(weights=world.epochs.weights, kv=world.epochs.kv + 1)
        elif action < 0.47:
            world.scheduler.undo(world.scheduler.schedule())
        elif world.scheduler.has_work:
            world.step()
        world.cache.check()
        done += [request for request in alive if request.finished]
        alive = [request for request in alive if not request.finished]
    world.run()
    for request in (*done, *alive):
        completion = request.sequences[0].completion
        tokens = alone(request.prompt.token_ids, completion.max_tokens)  # type: ignore[attr-defined]
        assert completion.token_ids == tokens
    assert world.cache.num_free == world.num_blocks - 1
