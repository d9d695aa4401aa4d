"""Memory for the results of a pass."""

import torch

from torpor.model.native.room import Room


def _empty(room: Room, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    found = room.empty(shape, dtype)
    assert found is not None
    return found


def test_memory_is_used_again_when_its_last_view_is_gone() -> None:
    room = Room(torch.zeros(1 << 10, dtype=torch.uint8))
    first = _empty(room, 4, 16)
    view = first.view(16, 4)[2:]
    start = first.data_ptr()
    del first
    other = _empty(room, 16)
    assert other.data_ptr() >= start + 256
    del view
    assert _empty(room, 4, 16).data_ptr() == start


def test_what_finds_no_room_gets_none_and_takes_none() -> None:
    room = Room(torch.zeros(1 << 10, dtype=torch.uint8))
    assert room.empty((1 << 10,), torch.bfloat16) is None
    assert _empty(room, 256).numel() == 256
    assert room.empty((1,), torch.uint8) is not None  # the first is gone again
    assert _empty(room, 0, 7).shape == (0, 7)


def test_pieces_lie_apart_and_at_the_same_places_in_the_next_room() -> None:
    memory = torch.zeros(1 << 12, dtype=torch.uint8)
    runs = []
    for _ in range(2):
        room = Room(memory)
        pieces = [_empty(room, n, dtype=torch.uint8) for n in (1, 63, 65, 1)]
        starts = [piece.data_ptr() - memory.data_ptr() for piece in pieces]
        assert starts == [0, 64, 128, 256]
        runs.append(starts)
        same = room.at_the_place_of(pieces[2])
        pieces[2].fill_(9)
        assert torch.equal(same, pieces[2])
    assert runs[0] == runs[1]
