"""Stop strings end an answer, and no part of them gets out."""

from serve.inputs.text import StopFilter


def run(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    stop_filter, out = StopFilter(stops), ""
    for piece in pieces:
        text, stopped = stop_filter.push(piece)
        out += text
        if stopped:
            return out, True
    return out + stop_filter.flush(), False


def test_without_stops_all_text_passes_at_once() -> None:
    assert StopFilter([]).push("abc") == ("abc", False)


def test_the_answer_ends_before_the_stop() -> None:
    assert run(["END"], ["one END two"]) == ("one ", True)


def test_a_stop_in_pieces_is_held_back() -> None:
    stop_filter = StopFilter(["END"])
    assert stop_filter.push("xE") == ("x", False)
    assert stop_filter.push("N") == ("", False)
    assert stop_filter.push("D") == ("", True)


def test_what_was_held_back_comes_when_it_was_no_stop() -> None:
    stop_filter = StopFilter(["END"])
    assert [stop_filter.push(piece)[0] for piece in ("E", "N", "x")] == ["", "", "ENx"]
    assert run(["END"], ["xEN"]) == ("xEN", False)


def test_a_stop_may_begin_within_a_false_start() -> None:
    assert run(["aab"], ["a", "a", "a", "b"]) == ("a", True)


def test_the_stop_that_is_complete_first_wins_however_the_text_comes() -> None:
    assert run(["abc", "b"], ["abc"]) == ("a", True)
    assert run(["abc", "b"], ["a", "b", "c"]) == ("a", True)


def test_after_a_stop_nothing_is_left() -> None:
    stop_filter = StopFilter(["b"])
    stop_filter.push("abc")
    assert stop_filter.flush() == ""
