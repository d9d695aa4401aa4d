from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from torpor.engine.sampling.grammar import Grammar, GrammarCompiler
from torpor.engine.text.tokenizer import Tokenizer
from torpor.errors import RequestError
from torpor.model.checkpoints.resolve import resolve_model
from torpor.params import StructuredOutputsParams

TINY_VOCABULARY = 320
"""Twenty ids more than the tiny tokenizer has."""

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b/c", "é"]}, "maxItems": 2},
        "alive": {"type": "boolean"},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def is_person(text: str) -> bool:
    """The rules of ``PERSON`` once more, in Python."""
    value = json.loads(text)
    return (
        isinstance(value, dict)
        and {"name", "age", "tags"} <= set(value) <= set(PERSON["properties"])
        and isinstance(value["name"], str)
        and len(value["name"]) <= 6
        and type(value["age"]) is int
        and 0 <= value["age"] <= 120
        and isinstance(value["tags"], list)
        and len(value["tags"]) <= 2
        and all(tag in ("a", "b/c", "é") for tag in value["tags"])
        and isinstance(value.get("alive", True), bool)
    )


CASES: dict[str, tuple[StructuredOutputsParams, Callable[[str], bool]]] = {
    "schema": (StructuredOutputsParams(json=PERSON, disable_any_whitespace=True), is_person),
    "schema with spaces": (
        StructuredOutputsParams(json=json.dumps(PERSON), whitespace_pattern=" ?"),
        is_person,
    ),
    "list": (
        StructuredOutputsParams(
            json={"type": "array", "items": {"type": ["integer", "null"]}, "minItems": 1},
            disable_any_whitespace=True,
        ),
        lambda text: {type(item) for item in json.loads(text)} <= {int, type(None)},
    ),
    "regex": (
        StructuredOutputsParams(regex=r"[0-9]{1,3}-[a-f]+\.(é|日本|x y){1,2}"),
        lambda text: bool(re.fullmatch(r"[0-9]{1,3}-[a-f]+\.(é|日本|x y){1,2}", text)),
    ),
    "anchored regex": (
        StructuredOutputsParams(regex=r"^(yes|no)$"),
        lambda text: text in ("yes", "no"),
    ),
    "choice": (
        StructuredOutputsParams(choice=["yes", "yesterday", 'a "b"\\c', "日本🙂", "/x/\n\x7f"]),
        lambda text: text in ("yes", "yesterday", 'a "b"\\c', "日本🙂", "/x/\n\x7f"),
    ),
    "lark": (
        StructuredOutputsParams(grammar='start: sum\nsum: NUM ("+" NUM)*\nNUM: /[0-9]{1,2}/'),
        lambda text: bool(re.fullmatch(r"[0-9]{1,2}(\+[0-9]{1,2})*", text)),
    ),
    "gbnf": (
        StructuredOutputsParams(grammar='root ::= "(" root ")" | "x"'),
        lambda text: bool(re.fullmatch(r"\(*x\)*", text)) and text.count("(") == text.count(")"),
    ),
}


def walk(grammar: Grammar, eos: set[int], chosen: random.Random, max_tokens: int) -> list[int]:
    """Random allowed tokens up to an end token; an end that is allowed is taken half the time."""
    token_ids: list[int] = []
    while True:
        allowed = set(grammar.mask().nonzero().flatten().tolist())
        ends = allowed & eos
        if ends and (allowed == ends or chosen.random() < 0.5 or len(token_ids) >= max_tokens):
            grammar.accept(min(ends))
            return token_ids
        token_ids.append(chosen.choice(sorted(allowed - eos)))
        grammar.accept(token_ids[-1])
        assert len(token_ids) < 500, "a grammar of short texts does not end"


@pytest.fixture(scope="module")
def embedded() -> tuple[Tokenizer, GrammarCompiler]:
    files = resolve_model("smollm2")
    tokenizer = Tokenizer(files.tokenizer_json, files.tokenizer_config_json)
    eos = files.config.eos_token_ids
    return tokenizer, GrammarCompiler(tokenizer, files.config.vocab_size, eos)


@pytest.fixture(scope="module")
def tiny(tokenizer: Tokenizer) -> tuple[Tokenizer, GrammarCompiler]:
    return tokenizer, GrammarCompiler(tokenizer, TINY_VOCABULARY)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("model", ["tiny", pytest.param("embedded", marks=pytest.mark.embedded)])
def test_random_texts_under_the_mask_meet_the_constraint(
    model: str, case: str, request: pytest.FixtureRequest
) -> None:
    tokenizer, compiler = request.getfixturevalue(model)
    params, holds = CASES[case]
    eos = tokenizer.eos_token_id
    texts = set()
    for seed in range(12):
        grammar = compiler.compile(params)
        token_ids = walk(grammar, {eos}, random.Random(seed), max_tokens=40)
        text = tokenizer.decode(token_ids, skip_special_tokens=False)
        assert holds(text), text
        assert grammar.finished
        texts.add(text)
    assert len(texts) > 1


def test_a_json_object_is_an_object(tiny: tuple[Tokenizer, GrammarCompiler]) -> None:
    tokenizer, compiler = tiny
    grammar = compiler.compile(StructuredOutputsParams(json_object=True))
    for token_id in tokenizer.encode('{"a": [1, {"b": null}]}', add_special_tokens=False):
        assert grammar.mask()[token_id]
        grammar.accept(token_id)
    assert grammar.mask().nonzero().flatten().tolist() == [tokenizer.eos_token_id]
    start = compiler.compile(StructuredOutputsParams(json_object=True)).mask()
    assert not start[tokenizer.encode("[", add_special_tokens=False)[0]]


def test_white_space_in_json_can_be_refused(tiny: tuple[Tokenizer, GrammarCompiler]) -> None:
    tokenizer, compiler = tiny
    [brace] = tokenizer.encode("{", add_special_tokens=False)
    [space] = tokenizer.encode(" ", add_special_tokens=False)
    allowed = []
    for disable in (False, True):
        params = StructuredOutputsParams(json_object=True, disable_any_whitespace=disable)
        grammar = compiler.compile(params)
        grammar.accept(brace)
        allowed.append(bool(grammar.mask()[space]))
    assert allowed == [True, False]


def test_the_mask_covers_the_models_vocabulary(tiny: tuple[Tokenizer, GrammarCompiler]) -> None:
    tokenizer, compiler = tiny
    mask = compiler.compile(StructuredOutputsParams(regex="(.|\n)*")).mask()
    assert (mask.dtype, mask.shape) == (torch.bool, (TINY_VOCABULARY,))
    assert not mask[tokenizer.vocab_size :].any()
    special = [tokenizer.bos_token_id, tokenizer.eos_token_id]
    assert mask[special].tolist() == [False, True]


def test_only_an_end_token_may_follow_a_finished_text(tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(tokenizer, TINY_VOCABULARY, [1, 2])
    grammar = compiler.compile(StructuredOutputsParams(choice=["a"]))
    assert not grammar.finished
    [letter] = tokenizer.encode("a", add_special_tokens=False)
    grammar.accept(letter)
    assert grammar.finished
    for end in (1, 2, 1):
        assert grammar.mask().nonzero().flatten().tolist() == [1, 2]
        grammar.accept(end)
        assert grammar.finished
    with pytest.raises(RequestError, match=f"token {letter} does not fit"):
        grammar.accept(letter)


def test_a_model_without_an_end_token_is_refused(tokenizer: Tokenizer, tiny_folder: Path) -> None:
    without = Tokenizer(tiny_folder / "tokenizer.json")
    assert without.eos_token_id is None
    with pytest.raises(RequestError, match=r"of \[\] the tokenizer knows none"):
        GrammarCompiler(without, TINY_VOCABULARY)
    with pytest.raises(RequestError, match=r"of \[310\] the tokenizer knows none"):
        GrammarCompiler(tokenizer, TINY_VOCABULARY, [310])


def test_an_end_token_that_the_tokenizer_does_not_know_is_never_allowed(
    tokenizer: Tokenizer,
) -> None:
    compiler = GrammarCompiler(tokenizer, TINY_VOCABULARY, [1, 310])
    grammar = compiler.compile(StructuredOutputsParams(choice=[""]))
    assert grammar.mask().nonzero().flatten().tolist() == [1]


def test_a_token_that_does_not_fit_is_an_error(tiny: tuple[Tokenizer, GrammarCompiler]) -> None:
    tokenizer, compiler = tiny
    other = compiler.compile(StructuredOutputsParams(choice=["ab"]))
    grammar = compiler.compile(StructuredOutputsParams(choice=["ab"]))
    [letter] = tokenizer.encode("z", add_special_tokens=False)
    with pytest.raises(RequestError, match=rf"token {letter} does not fit .*; draw from"):
        grammar.accept(letter)
    other.accept(tokenizer.encode("a", add_special_tokens=False)[0])
    assert other.mask().any()


def test_completions_of_one_grammar_go_their_own_ways(
    tiny: tuple[Tokenizer, GrammarCompiler],
) -> None:
    tokenizer, compiler = tiny
    params = StructuredOutputsParams(choice=["ab", "ba"])
    first, second = compiler.compile(params), compiler.compile(params)
    before = second.mask().clone()
    first.accept(tokenizer.encode("a", add_special_tokens=False)[0])
    assert torch.equal(second.mask(), before)
    assert not torch.equal(first.mask(), before)
    assert torch.equal(first.copy().mask(), first.mask())


def test_masks_are_the_same_every_time(tokenizer: Tokenizer) -> None:
    def masks() -> list[torch.Tensor]:
        params = CASES["schema"][0]
        grammar = GrammarCompiler(tokenizer, TINY_VOCABULARY).compile(params)
        found, chosen = [grammar.mask()], random.Random(3)
        for _ in range(10):
            grammar.accept(chosen.choice(found[-1].nonzero().flatten().tolist()))
            found.append(grammar.mask())
        return found

    for first, second in zip(masks(), masks(), strict=True):
        assert torch.equal(first, second)


def test_more_grammars_than_are_kept_still_compile(
    tiny: tuple[Tokenizer, GrammarCompiler],
) -> None:
    _, compiler = tiny
    for number in [*range(40), 0]:
        grammar = compiler.compile(StructuredOutputsParams(regex=f"a{{{number + 1}}}"))
        assert grammar.mask().any()


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({"json": {"type": "objct"}}, "objct"),
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json": {"$ref": "#/nowhere"}}, "nowhere"),
        ({"json": {"type": "string", "minLength": 3, "maxLength": 1}}, "minLength"),
        ({"json": "{"}, "property name"),
        ({"json": "[]"}, "object or boolean"),
        ({"json": "[" * 100_000}, "recursion"),
        ({"json": "false"}, "schema is false"),
        ({"regex": "[a-"}, "unclosed character class"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"regex": r"(a)\1"}, "backreferences"),
        ({"regex": "\ud800"}, "surrogates"),
        ({"grammar": 'start: "a" missing'}, "missing"),
        ({"grammar": ""}, "root"),
        ({"json_object": True, "whitespace_pattern": "("}, "unclosed group"),
    ],
)
def test_a_constraint_that_cannot_be_followed_is_refused_with_its_reason(
    tiny: tuple[Tokenizer, GrammarCompiler], params: dict[str, Any], reason: str
) -> None:
    _, compiler = tiny
    with pytest.raises(RequestError) as caught:
        compiler.compile(StructuredOutputsParams(**params))
    message = str(caught.value)
    assert reason in message
    assert f"structured_outputs.{next(iter(params))}" in message
    assert message.endswith("correct it or leave that part out")
    assert len(message) < 600


def test_a_pattern_that_no_text_meets_is_refused(tiny: tuple[Tokenizer, GrammarCompiler]) -> None:
    _, compiler = tiny
    with pytest.raises(RequestError, match=r"allows no token here.*some text can meet"):
        compiler.compile(StructuredOutputsParams(regex=r"[^\s\S]"))


@pytest.mark.parametrize("name", ["regex", "whitespace_pattern"])
def test_a_pattern_of_endless_length_is_refused_in_few_words(name: str) -> None:
    pattern = "ab" * 500_000
    given: dict[str, Any] = {name: pattern} if name == "regex" else {"json": "{}", name: pattern}
    with pytest.raises(RequestError, match=rf"{name} is 'abab.*1000000 characters; give at most"):
        StructuredOutputsParams(**given)
    given[name] = pattern[:100_000]
    StructuredOutputsParams(**given)


def test_a_grammar_that_outgrows_the_library_says_so_in_plain_words(
    tiny: tuple[Tokenizer, GrammarCompiler],
) -> None:
    tokenizer, compiler = tiny
    params = StructuredOutputsParams(grammar=f'root ::= "{"a" * 700_000}"')
    with pytest.raises(RequestError, match=r"too large or too branched.*give a shorter") as caught:
        compiler.compile(params).accept(tokenizer.encode("a", add_special_tokens=False)[0])
    assert len(str(caught.value)) < 200
    assert params not in compiler._kept, "its tables are full, and no request can use them"


def test_too_many_alternatives_are_refused_in_plain_words(
    tiny: tuple[Tokenizer, GrammarCompiler],
) -> None:
    tokenizer, compiler = tiny
    wide = " | ".join(f'"a{number}"' for number in range(20_000))
    params = StructuredOutputsParams(grammar=f"root ::= {wide}")
    with pytest.raises(RequestError, match=r"too large or too branched.*give a shorter"):
        compiler.compile(params).accept(tokenizer.encode("a", add_special_tokens=False)[0])


def test_what_is_kept_can_be_given_back(tiny: tuple[Tokenizer, GrammarCompiler]) -> None:
    tokenizer, compiler = tiny
    params = StructuredOutputsParams(choice=["ab", "cd"])
    grammar = compiler.compile(params)
    compiler.forget_all()
    assert not compiler._kept
    grammar.accept(tokenizer.encode("a", add_special_tokens=False)[0])
    assert torch.equal(compiler.compile(params).mask(), compiler.compile(params).mask())


def test_without_the_package_the_error_says_how_to_install_it(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RequestError, match=r'pip install "torpor\[structured\]"'):
        GrammarCompiler(tokenizer, TINY_VOCABULARY)
