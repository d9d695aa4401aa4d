"""Why an engine that is alive runs no step until somebody acts, and since when."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from torpor.errors import WeightsIncompleteError
from torpor.sleep.states import TagState

if TYPE_CHECKING:
    from torpor.engine.engine import Engine


class Standstill:
    """Noted with the turn, asked for by those who wait. Asking never waits."""

    def __init__(self, engine: Engine) -> None:
        """Nothing is noted yet."""
        self._engine = engine
        self._since_s: float | None = None

    @property
    def since_s(self) -> float | None:
        """When it began, on the monotonic clock; None while steps may run, or will by themselves,
        as after an update that is open."""
        if not (self._engine.is_sleeping() or self.lacks_content):
            return None
        if self._since_s is None:
            # Not noted: the sleeper was called behind the engine's back, or a moment ago.
            self._since_s = time.monotonic()
        return self._since_s

    @property
    def lacks_content(self) -> bool:
        """Whether the model is awake and something of it has no content, as after a wake by tags
        that left filling the weights to the caller."""
        if self._engine.is_sleeping():
            return False
        return TagState.MAPPED_INVALID.value in self._engine.sleeper.tag_states.values()

    def note(self, *, may_step: bool) -> None:
        """Note what holds now; from whoever has the turn."""
        # Asking notes the beginning, and keeps the one that is noted.
        if may_step or self.since_s is None:
            self._since_s = None

    def require_content(self, when: str = "") -> None:
        """Raise if the model is awake and cannot step before its weights are filled.

        Args:
            when: words for the message, such as " after 3 s".

        Raises:
            WeightsIncompleteError: with the names of what has no content.
        """
        if not self.lacks_content:
            return
        missing = self._engine.sleeper.missing
        raise WeightsIncompleteError(
            f"the model is awake, but {len(missing)} tensors have no valid content{when}: "
            f"{', '.join(missing[:8])}{', ...' if len(missing) > 8 else ''}; call "
            "reload_weights(), or update_weights() with all of them",
            missing,
        )
