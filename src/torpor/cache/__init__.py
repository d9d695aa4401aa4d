"""The paged KV cache's books: block pool, prefix index, KV manager.

Usable alone: nothing here knows of tensors, devices, models or engines. One thread at a time.
"""
