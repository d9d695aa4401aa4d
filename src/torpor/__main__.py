"""``python -m torpor`` is the command line."""

from __future__ import annotations

from torpor.serve.cli import main

if __name__ == "__main__":
    main()
