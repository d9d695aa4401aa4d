"""Ownership, arenas, host copies, digests and the sleep/wake state machine.

Usable alone: nothing here knows of engines, models or servers.
"""
