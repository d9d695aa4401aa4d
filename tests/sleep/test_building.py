from __future__ import annotations

import copy
import functools
import gc
import inspect
import os
import subprocess
import sys
import sysconfig
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode
from transformers import GPT2Config, GPT2LMHeadModel

import torpor
from torpor.errors import DoubleInitError
from torpor.sleep.building import building
from torpor.sleep.storage import swap_available


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(3), persistent=False)
        self.weight = nn.Parameter(torch.ones(3))
        self.inner = nn.Identity()
        self.register_forward_hook(lambda *_: None)


class Cached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(2))


class Explicit(Scaled, Cached):
    """Calls both bases by name, each of which initialises nn.Module: the second call wipes."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        Scaled.__init__(self)
        Cached.__init__(self)


class Mixin:
    def __init__(self) -> None:
        super().__init__()
        self.mixed = True


class Cooperative(Mixin, Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.late = nn.Parameter(torch.zeros(1))


class Wiper(nn.Linear):
    """Registers, then lets its base in torch initialise the instance once more."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.register_buffer("scale", torch.ones(3))
        super().__init__(2, 2)


@pytest.fixture(autouse=True)
def untouched() -> Iterator[None]:
    """Whatever a test does, torch is as before at its end."""
    before = nn.Module.__init__
    yield
    after, nn.Module.__init__ = nn.Module.__init__, before
    assert after is before
    assert _get_current_dispatch_mode() is None


def line_of(function: Callable[..., None], text: str) -> int:
    lines, first = inspect.getsourcelines(function)
    return first + next(number for number, line in enumerate(lines) if text in line)


# --- double init ---------------------------------------------------------------------------------


def test_explicit_bases_are_refused_with_what_would_be_lost() -> None:
    with building(), pytest.raises(DoubleInitError) as caught:
        Explicit()
    message = str(caught.value)
    assert "Explicit" in message
    assert "parameters weight; buffers cache, scale; modules inner; forward hooks (1)" in message
    assert "call super().__init__() once" in message


def test_the_error_names_every_call_that_led_to_it() -> None:
    with building(), pytest.raises(DoubleInitError) as caught:
        Explicit()
    inner = line_of(Cached.__init__, "super().__init__()")
    outer = line_of(Explicit.__init__, "Cached.__init__")
    expected = f"{__file__}:{inner} (Cached.__init__) from {__file__}:{outer} (Explicit.__init__)"
    assert f"at {expected};" in str(caught.value)


def test_a_class_of_torch_as_second_base_is_refused() -> None:
    with building(), pytest.raises(DoubleInitError, match="buffers scale") as caught:
        Wiper()
    assert f":{line_of(Wiper.__init__, 'super().__init__')} (Wiper.__init__)" in str(caught.value)


def test_the_instance_keeps_what_it_holds() -> None:
    module = Scaled()
    with building(), pytest.raises(DoubleInitError):
        nn.Module.__init__(module)
    assert list(module.state_dict()) == ["weight"]
    assert torch.equal(module.scale, torch.ones(3))


def test_cooperative_bases_are_fine() -> None:
    with building():
        module = Cooperative()
    assert sorted(name for name, _ in module.named_parameters()) == ["late", "weight"]
    assert module.mixed


def test_a_second_init_of_an_empty_instance_is_fine() -> None:
    module = nn.Module()
    with building():
        nn.Module.__init__(module)


@pytest.mark.parametrize(
    "register",
    [
        lambda module: module.register_parameter("bias", None),
        lambda module: module.register_forward_pre_hook(lambda *_: None),
        lambda module: module.register_state_dict_pre_hook(lambda *_: None),
        lambda module: module.register_load_state_dict_post_hook(lambda *_: None),
        lambda module: module.add_module("child", nn.Identity()),
    ],
    ids=["empty parameter", "forward pre hook", "state dict hook", "load hook", "module"],
)
def test_every_kind_of_registration_counts(register: Callable[[nn.Module], object]) -> None:
    module = nn.Module()
    register(module)
    with building(), pytest.raises(DoubleInitError):
        nn.Module.__init__(module)


def test_many_names_are_cut_short() -> None:
    module = nn.ModuleList(nn.Identity() for _ in range(20))
    with building(), pytest.raises(DoubleInitError, match=r"modules 0, 1, .*7 and 12 more"):
        nn.Module.__init__(module)


def test_outside_the_context_torch_behaves_as_ever() -> None:
    assert not hasattr(Explicit(), "scale")


def test_other_threads_are_not_watched() -> None:
    made: list[nn.Module] = []
    with building() as records:
        thread = threading.Thread(target=lambda: made.append(Explicit()))
        thread.start()
        thread.join()
    assert len(made) == 1
    assert records.alive() == []


def test_an_exception_inside_restores_torch() -> None:
    before = nn.Module.__init__
    with pytest.raises(KeyboardInterrupt), building():
        raise KeyboardInterrupt
    assert nn.Module.__init__ is before


def test_nested_contexts_unwind_to_the_original() -> None:
    before = nn.Module.__init__
    with building():
        middle = nn.Module.__init__
        with building(), pytest.raises(DoubleInitError):
            Explicit()
        assert nn.Module.__init__ is middle
        with pytest.raises(DoubleInitError):
            Explicit()
    assert nn.Module.__init__ is before


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1)])
def test_contexts_left_in_any_order_unwind_to_the_original(order: tuple[int, ...]) -> None:
    before = nn.Module.__init__
    stacks = [ExitStack() for _ in range(3)]
    for stack in stacks:
        stack.enter_context(building())
    for number, index in enumerate(order):
        with pytest.raises(DoubleInitError):
            Explicit()
        stacks[index].close()
        assert (nn.Module.__init__ is before) == (number == 2)
    Explicit()


def test_two_threads_may_overlap() -> None:
    before = nn.Module.__init__
    entered, leave = threading.Event(), threading.Event()
    refused: list[bool] = []

    def other() -> None:
        with building():
            entered.set()
            leave.wait(10)
            try:
                Explicit()
            except DoubleInitError:
                refused.append(True)

    thread = threading.Thread(target=other)
    with building():
        thread.start()
        entered.wait(10)
    Explicit()
    leave.set()
    thread.join()
    assert refused == [True]
    assert nn.Module.__init__ is before


def counting_init(calls: list[nn.Module], wrapped: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(wrapped)
    def init(module: nn.Module, *args: object, **kwargs: object) -> None:
        calls.append(module)
        wrapped(module, *args, **kwargs)

    return init


def test_a_patch_of_somebody_else_underneath_is_restored() -> None:
    calls: list[nn.Module] = []
    original = nn.Module.__init__
    foreign = nn.Module.__init__ = counting_init(calls, original)
    with building():
        nn.Identity()
    assert nn.Module.__init__ is foreign
    assert len(calls) == 1
    nn.Module.__init__ = original


def test_a_patch_of_somebody_else_on_top_stays_in_force() -> None:
    calls: list[nn.Module] = []
    original = nn.Module.__init__
    with building():
        watched = nn.Module.__init__
        foreign = nn.Module.__init__ = counting_init(calls, watched)
        with building(), pytest.raises(DoubleInitError):
            Explicit()
        assert nn.Module.__init__ is foreign
    assert nn.Module.__init__ is foreign
    calls.clear()
    Explicit()
    assert len(calls) == 4
    # Its owner puts back what it found; the next context clears that away.
    nn.Module.__init__ = watched
    Explicit()
    with building():
        pass
    assert nn.Module.__init__ is original


# --- who made which tensor -----------------------------------------------------------------------


def test_the_creating_line_is_recorded() -> None:
    with building() as records:
        made = torch.zeros(2, 3, dtype=torch.bfloat16)
    line = line_of(test_the_creating_line_is_recorded, "torch.zeros")
    assert records.creator_of(made) == f"{__file__}:{line}"
    (record,) = records.alive()
    assert record.shape == (2, 3)
    assert record.dtype == torch.bfloat16
    assert record.device == "cpu"
    assert record.nbytes == 12


def test_calls_through_torch_and_the_standard_library_name_the_caller() -> None:
    with building() as records:
        linear = nn.Linear(4, 4)
        twin = copy.deepcopy(linear)
    first = line_of(test_calls_through_torch_and_the_standard_library_name_the_caller, "nn.Linear")
    assert records.creator_of(linear.weight) == f"{__file__}:{first}"
    assert records.creator_of(twin.bias) == f"{__file__}:{first + 1}"


@pytest.mark.parametrize(
    ("place", "counts"),
    [("copy.py", False), ("site-packages/other/model.py", True), ("dist-packages/m.py", True)],
)
def test_installed_packages_count_and_the_standard_library_does_not(
    place: str, counts: bool
) -> None:
    filename = os.path.join(sysconfig.get_paths()["stdlib"], place)
    scope: dict[str, torch.Tensor] = {}
    with building() as records:
        exec(compile("import torch\nmade = torch.zeros(1)", filename, "exec"), scope)
    assert (records.creator_of(scope["made"]) == f"{filename}:2") == counts


def test_views_and_parameters_share_the_record_of_their_storage() -> None:
    with building() as records:
        base = torch.arange(12.0)
        parameter = nn.Parameter(base)
    assert records.creator_of(parameter) == records.creator_of(base) is not None
    assert records.creator_of(base.view(3, 4).t()[1:]) == records.creator_of(base)
    assert len(records.alive()) == 1


def test_results_of_arithmetic_are_recorded_where_they_were_made() -> None:
    outside = torch.ones(4)
    with building() as records:
        first, second = torch.split(outside * 2, 2)
        outside += 1
    line = line_of(test_results_of_arithmetic_are_recorded_where_they_were_made, "* 2")
    assert records.creator_of(first) == records.creator_of(second) == f"{__file__}:{line}"


def test_tensors_made_elsewhere_have_no_creator() -> None:
    before = torch.ones(2)
    with building() as records:
        pass
    after = torch.ones(2)
    assert records.creator_of(before) is None
    assert records.creator_of(after) is None
    assert records.creator_of(torch.eye(2).to_sparse()) is None


def test_dead_tensors_vanish_and_are_not_kept_alive() -> None:
    with building() as records:
        kept = torch.zeros(8)
        dropped = torch.zeros(8)
        storage = dropped.untyped_storage()
        del dropped
        assert len(records.alive()) == 2
        del storage
        gc.collect()
        assert [made.creator for made in records.alive()] == [records.creator_of(kept)]


def test_an_address_used_again_does_not_inherit_a_creator() -> None:
    with building() as records:
        for _ in range(100):
            torch.zeros(8)
    later = [torch.zeros(8) for _ in range(100)]
    assert {records.creator_of(tensor) for tensor in later} == {None}


def test_many_passing_tensors_leave_no_records() -> None:
    with building() as records:
        for _ in range(5000):
            torch.empty(1)
        assert len(records._made) < 2048
    assert len(records._made) == 0


@pytest.mark.skipif(not swap_available(), reason="this torch cannot swap a storage's memory")
def test_a_record_survives_the_move_of_its_bytes() -> None:
    with building() as records:
        tensor = torch.ones(4)
    creator = records.creator_of(tensor)
    tensor.untyped_storage()._swap_data_ptr_(torch.zeros(4).untyped_storage())
    assert records.creator_of(tensor) == creator is not None


def test_meta_tensors_are_recorded_too() -> None:
    with building() as records, torch.device("meta"):
        linear = nn.Linear(3, 3)
    assert linear.weight.is_meta
    assert records.creator_of(linear.weight) is not None
    assert {made.device for made in records.alive()} == {"meta"}


def test_nested_contexts_both_record() -> None:
    with building() as outer:
        with building() as inner:
            both = torch.ones(2)
        alone = torch.ones(2)
    assert outer.creator_of(both) == inner.creator_of(both) is not None
    assert outer.creator_of(alone) is not None
    assert inner.creator_of(alone) is None


def test_recording_stops_at_exit_in_any_order() -> None:
    first, second = ExitStack(), ExitStack()
    early = first.enter_context(building())
    late = second.enter_context(building())
    first.close()
    tensor = torch.ones(2)
    assert early.creator_of(tensor) is None
    assert late.creator_of(tensor) is not None
    second.close()
    assert late.creator_of(torch.ones(2)) is None


# --- models are built as ever --------------------------------------------------------------------


def same_weights(first: nn.Module, second: nn.Module) -> bool:
    return all(
        torch.equal(a, b)
        for a, b in zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    )


def build(make: Callable[[], nn.Module], *, watched: bool) -> nn.Module:
    torch.manual_seed(3)
    if not watched:
        return make()
    with building():
        return make()


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.LSTM(4, 8, num_layers=2, bidirectional=True),
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2),
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Embedding(5, 6, 0)),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)),
        lambda: copy.deepcopy(nn.MultiheadAttention(8, 2)),
        lambda: GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=8, n_layer=2, n_head=2)),
    ],
    ids=["lstm", "transformer", "convolution", "weight norm", "deepcopy", "gpt2"],
)
def test_building_changes_nothing_about_a_model(make: Callable[[], nn.Module]) -> None:
    plain, watched = build(make, watched=False), build(make, watched=True)
    assert list(plain.state_dict()) == list(watched.state_dict())
    assert same_weights(plain, watched)


def test_lazy_modules_and_training_work_inside() -> None:
    with building():
        model = nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.Linear(4, 1))
        model(torch.ones(2, 3)).sum().backward()
        torch.optim.Adam(model.parameters()).step()
    assert model[0].weight.shape == (4, 3)


def test_every_parameter_of_a_model_has_a_creator() -> None:
    with building() as records:
        model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=8, n_layer=1, n_head=2))
    creators = {records.creator_of(parameter) for parameter in model.parameters()}
    assert None not in creators
    assert not any(str(creator).startswith(os.path.dirname(torch.__file__)) for creator in creators)


def run_fresh(code: str) -> None:
    """Run code in a new interpreter: importing the compiler patches torch for good."""
    options = ["-W", "error::UserWarning", "-c", textwrap.dedent(code)]
    subprocess.run([sys.executable, *options], check=True)


def test_recording_does_not_import_the_compiler() -> None:
    run_fresh("""
        import sys, torch
        from torpor import building
        with building() as records:
            made = torch.ones(2)
        assert records.creator_of(made)
        assert "torch._dynamo" not in sys.modules
    """)


def test_a_compiled_function_works_inside_and_afterwards() -> None:
    run_fresh("""
        import torch
        from torpor import building
        graphs = []
        def backend(graph, inputs):
            graphs.append(graph)
            return graph.forward
        @torch.compile(backend=backend)
        def double(x):
            return x * 2
        with building() as records:
            made = double(torch.ones(3))
            after = torch.ones(1)
        assert made.tolist() == [2.0] * 3
        assert records.creator_of(after)
        assert double(torch.ones(4)).tolist() == [2.0] * 4
        assert len(graphs) == 1
    """)


def test_the_public_name_is_this_context() -> None:
    assert torpor.building is building
