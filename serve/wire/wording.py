"""What is wrong with a field, in words that say what to send instead.

Knows the kinds of problems that pydantic finds; deliberately neither fields nor schemas.
"""

from pydantic_core import ErrorDetails

_WORDS = {
    "bool_type": "must be true or false",
    "finite_number": "must be a finite number",
    "float_type": "must be a number",
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "int_from_float": "must be an integer",
    "int_type": "must be an integer",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "dict_type": "must be an object",
    "list_type": "must be a list",
    "literal_error": "must be {expected}",
    "model_type": "must be an object",
    "string_too_long": "is too long: send at most {max_length} characters",
    "string_too_short": "is empty: send some text",
    "string_type": "must be a string",
    "too_long": "has {actual_length} items: send at most {max_length}",
    "too_short": "is an empty list: send at least {min_length} item",
}
_HALF = (
    "a \\u escape is cut short, or is one half of a character (\\ud800 to \\udfff): send both "
    "halves, or the character itself in UTF-8"
)


def problem_in_words(problem: ErrorDetails) -> str:
    """What to say behind the name of the field."""
    words = _WORDS.get(problem["type"])
    if words is None:
        return problem["msg"][0].lower() + problem["msg"][1:]
    return words.format_map(problem.get("ctx", {}))


def json_problem_in_words(reason: str) -> str:
    """Why a body is not JSON."""
    return f"{_HALF} ({reason})" if "hex escape" in reason or "surrogate" in reason else reason
