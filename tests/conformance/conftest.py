"""Assertions explain themselves also in these modules, which are no test modules."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("tests.conformance.suite", "tests.conformance.ground")
