"""The suite's assertions explain themselves, although it is not a test module."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("tests.conformance.suite", "tests.conformance.recorder")
