from __future__ import annotations

from torpor.engine.requests.prompt_logprobs import PromptLogprobs
from torpor.engine.sampling.logprobs import RankedToken
from torpor.engine.text.tokenizer import Tokenizer
from torpor.outputs import Logprob


def test_entries_lie_by_position_and_the_first_is_unknown(tokenizer: Tokenizer) -> None:
    (a,) = tokenizer.encode("a")
    kept = PromptLogprobs(3, 1, tokenizer)
    kept.put(2, [RankedToken(1, -2.0, 7), RankedToken(a, -0.5, 1)])
    first, missing, last = kept.output()
    assert (first, missing) == (None, None)
    assert last == {
        1: Logprob(logprob=-2.0, rank=7, decoded_token="<|end|>"),
        a: Logprob(logprob=-0.5, rank=1, decoded_token="a"),
    }
    assert list(last) == [1, a], "the prompt's own token comes first"


def test_a_recomputed_position_is_written_again(tokenizer: Tokenizer) -> None:
    kept = PromptLogprobs(2, 0, tokenizer)
    kept.put(1, [RankedToken(70, -2.0, 2)])
    before = kept.output()
    kept.put(1, [RankedToken(70, -1.0, 1)])
    assert before[1] == {70: Logprob(logprob=-2.0, rank=2, decoded_token=tokenizer.decode([70]))}
    (_, entry) = kept.output()
    assert entry is not None
    assert entry[70].logprob == -1.0


def test_part_of_a_character_reads_as_a_replacement(tokenizer: Tokenizer) -> None:
    part = tokenizer.encode("🙂")[0]
    kept = PromptLogprobs(2, 0, tokenizer)
    kept.put(1, [RankedToken(part, -1.0, 1)])
    entry = kept.output()[1]
    assert entry is not None
    assert entry[part].decoded_token == "\ufffd"


def test_a_prompt_of_one_token_has_nothing_to_tell(tokenizer: Tokenizer) -> None:
    assert PromptLogprobs(1, -1, tokenizer).output() == (None,)
