"""One thread for the small products of these tests: sharing them only loses, most of all on a busy machine."""

from __future__ import annotations

import pytest

pytest.importorskip("torch").set_num_threads(1)
