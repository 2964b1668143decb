"""How many examples a property test looks at."""

from hypothesis import settings


def examples(count: int) -> int:
    """So many in a run of all tests, and 20 times as many with HYPOTHESIS_PROFILE=long."""
    usual = settings.get_profile("stepdial").max_examples
    return count * settings().max_examples // usual
