"""How a worker talks: one JSON object per line in, one per line out.

Imported by every worker, whatever its environment: standard library only. What libraries print goes
to stderr, so that stdout carries answers alone.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

Handler = Callable[..., dict[str, Any]]


def serve(start: Callable[[], tuple[dict[str, Any], Mapping[str, Handler]]]) -> None:
    """Load with ``start``, say hello with its facts, then answer requests until stdin ends.

    A request is ``{"op": name, **arguments}``. An answer holds what the handler returned, with the
    seconds of processor time that the call took; an error is ``{"error": text}``.
    """
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(value: dict[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    try:
        begin_s = time.perf_counter()
        facts, handlers = start()
        answer({"ready": True, "load_s": time.perf_counter() - begin_s, **facts})
    except Exception:
        answer({"error": traceback.format_exc()})
        return
    for line in sys.stdin:
        request = json.loads(line)
        handler = handlers[request.pop("op")]
        try:
            cpu_s = time.process_time()
            result = handler(**request)
            answer({**result, "cpu_s": time.process_time() - cpu_s})
        except Exception:
            answer({"error": traceback.format_exc()})
