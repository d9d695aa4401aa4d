"""Modules: the decoder, its layers, its products, and which checkpoint rows fill them."""
