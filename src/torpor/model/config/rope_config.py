"""Rotary position embedding as a config states it, in either of the two styles in use."""

from __future__ import annotations

from dataclasses import dataclass

from torpor.model.config.fields import MAX_SIZE, Fields

ROPE_KINDS = ("default", "linear", "llama3")
"""The rope scalings torpor computes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding: base wavelength and scaling."""

    theta: float = 10000.0
    kind: str = "default"
    """One of `ROPE_KINDS`."""
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0
    """Context length before scaling, in tokens; read by llama3 only."""


_DEFAULT_THETA = 10000.0


def read_rope(fields: Fields, *, share: float = 1.0, needs_theta: bool = False) -> RopeConfig:
    """Rope in either style: ``rope_theta`` + ``rope_scaling``, or ``rope_parameters``.

    Args:
        fields: the config.
        share: of a head that is rotated; a config that states it must agree.
        needs_theta: whether ``rope_theta`` has no default.

    Raises:
        ConfigError: a scaling is unknown, incomplete, or said twice in different ways; theta is
            missing and has no default.
    """
    new, old = fields.raw("rope_parameters"), fields.raw("rope_scaling")
    if new and old and new != old:
        raise fields.error("rope_scaling", old, "absent when rope_parameters says something else")
    fields.exactly("partial_rotary_factor", share)
    theta = fields.number("rope_theta", _DEFAULT_THETA)
    values = new or old or {}
    if not isinstance(values, dict):
        raise fields.error("rope_parameters" if new else "rope_scaling", values, "an object")
    rope = Fields(values, f"{fields.where}: {'rope_parameters' if new else 'rope_scaling'}")
    explicit = fields.raw("rope_theta") is not None
    if needs_theta and not explicit and rope.raw("rope_theta") is None:
        raise fields.error("rope_theta", None, "stated: torpor does not guess it for this model")
    return _parameters(rope, theta, share, explicit=explicit)


def _parameters(rope: Fields, theta: float, share: float, *, explicit: bool) -> RopeConfig:
    own_theta = rope.number("rope_theta", theta)
    if explicit and own_theta != theta:
        raise rope.error("rope_theta", own_theta, f"the same as the config's rope_theta, {theta}")
    rope.exactly("partial_rotary_factor", share)
    kind = _kind(rope)
    config = RopeConfig(theta=own_theta, kind=kind)
    if kind == "linear":
        config = RopeConfig(theta=own_theta, kind=kind, factor=rope.number("factor"))
    elif kind == "llama3":
        config = RopeConfig(
            theta=own_theta,
            kind=kind,
            factor=rope.number("factor"),
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
            original_max_position_embeddings=rope.integer(
                "original_max_position_embeddings", low=1, high=MAX_SIZE
            ),
        )
        if config.high_freq_factor <= config.low_freq_factor:
            high = config.high_freq_factor
            raise rope.error("high_freq_factor", high, f"above {config.low_freq_factor}")
    rope.refuse_unread(())
    return config


def _kind(rope: Fields) -> str:
    """The scaling's name, under its present key or under the one older files use."""
    old = rope.choice("type", ROPE_KINDS, default="default")
    kind = rope.choice("rope_type", ROPE_KINDS, default=old)
    if rope.raw("type") is not None and kind != old:
        raise rope.error("rope_type", kind, f"the same as type, {old!r}")
    return kind
