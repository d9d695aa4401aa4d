"""Attention over the paged cache: the interface, its layout in memory, the torch backend."""
