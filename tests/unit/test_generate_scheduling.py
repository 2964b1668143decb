"""The scheduler's order of generations: reading, mixing, endings."""

from collections import Counter

import pytest

from serve.engine.job import Deadline, Job, LaneKey, State
from tests.generation_jobs import (
    CLASSIFY,
    EIGHT,
    FOUR,
    NAMES,
    ONE,
    TWO,
    decoded,
    decoded_parts,
    engine,
    generate,
    started,
)
from tests.stepped import classification, generation, parts


def test_a_generation_is_read_in_pieces_and_then_decoded() -> None:
    s = engine(pieces=3)
    job = generate("a", tokens=4)
    s.submit(job)
    s.now_s = 0.5
    for _ in range(3):
        call = s.step()
        assert call is not None
        assert (call.kind, call.lane, list(call.jobs)) == ("prefill", FOUR, [job])
    assert (job.state, job.queued_s, job.started_s) == (State.RUNNING, 0.0, 0.5)
    for _ in range(3):
        (part,) = decoded_parts(s)
        assert part.whole and part.jobs == (job,)
    assert job.state is State.ENDED and s.step() is None
    assert (s.queued, s.running, s.charged_bytes, s.cache_bytes) == (0, 0, 0, 0)


def test_reading_and_decoding_take_turns_piece_by_piece() -> None:
    s = engine(pieces=9)
    started(s, generate("a"))
    s.submit(generate("b"))
    kinds = [call.kind if (call := s.step()) else None for _ in range(8)]
    assert sorted(map(str, kinds[:2])) == ["decode", "prefill"] and kinds == kinds[:2] * 4


def test_prompts_of_all_rungs_are_read_by_turns_so_that_none_waits_for_a_longer_one() -> None:
    s = engine(most_lanes=8, pieces=9)
    long, behind = generate("l", lane=EIGHT), generate("b", lane=EIGHT)
    short = generate("s", lane=ONE)
    s.submit(long, behind, short)
    read = [job for _ in range(6) if (call := s.step()) for job in call.jobs]
    assert Counter(NAMES[job] for job in read) == {"l": 3, "s": 3}
    assert behind.state is State.QUEUED, "one of a rung at a time"


def test_models_and_kinds_take_turns() -> None:
    s = engine(batch_rows=1)
    other = LaneKey("h", "generate", 1)
    started(s, generate("g"))
    started(s, generate("h", lane=other))
    s.submit(classification(CLASSIFY, (10,) * 50, lambda event: None))
    seen: Counter[str] = Counter()
    for _ in range(15):
        call = s.step()
        assert call is not None
        seen[call.lane.model] += 1
    assert seen == {"c": 5, "g": 5, "h": 5}


def test_rungs_share_calls_and_each_gets_its_tokens() -> None:
    s = engine(most_lanes=8)
    started(s, *(generate(str(key.steps), lane=key) for key in (ONE, TWO, FOUR, EIGHT)))
    tokens: Counter[int] = Counter()
    rows = 0
    for _ in range(80):
        call = decoded_parts(s)
        rows += len(call)
        tokens.update(part.lane.key.steps for part in call if part.ends)
    assert [tokens[steps] for steps in (8, 4, 2, 1)] == [10, 20, 40, 80]
    assert rows == 4 * 80, "all fit into one call"


def test_rungs_that_do_not_fit_into_one_call_have_shares_of_them() -> None:
    s = engine(most_lanes=2)
    started(s, *(generate(str(key.steps), lane=key) for key in (ONE, TWO, FOUR, EIGHT)))
    tokens: Counter[int] = Counter()
    for _ in range(230):  # 23 calls of one lane each: 8 of 8 and of 4 steps, 4 of 2, 3 of 1
        call = decoded_parts(s)
        assert len(call) == 2
        tokens.update(part.lane.key.steps for part in call if part.ends)
    evaluations = [tokens[steps] * steps for steps in (8, 4, 2, 1)]
    assert evaluations == pytest.approx([160, 160, 80, 60], rel=0.15)


def test_the_calls_of_a_token_come_one_after_the_other_with_the_same_rows() -> None:
    s = engine(most_lanes=8)
    a, b = generate("a", lane=TWO), generate("b", lane=FOUR)
    started(s, a, b)
    while not decoded_parts(s)[0].ends:
        pass
    s.submit(generate("c", lane=FOUR))
    under_way: dict[LaneKey, tuple[int, tuple[Job, ...]]] = {}
    for _ in range(40):
        call = s.step()
        if call is None or call.kind != "decode":
            continue
        for part in parts(call):
            calls, rows = under_way.pop(part.lane.key, (0, part.jobs))
            if calls or not part.begins:
                assert not part.begins and rows == part.jobs
            if not part.ends:
                under_way[part.lane.key] = calls + 1, part.jobs


def test_a_new_row_of_one_step_starts_at_once_among_longer_ones() -> None:
    s = engine(most_lanes=8)
    started(s, generate("a", lane=EIGHT), generate("b", lane=FOUR))
    for _ in range(21):
        s.step()
    new = generate("n", lane=ONE)
    s.submit(new)
    calls = 0
    while new not in s.rows(ONE):
        s.step()
        calls += 1
    assert calls <= 3


def test_a_rung_alone_gets_whole_tokens() -> None:
    s = engine(most_lanes=8)
    started(s, generate("a", lane=EIGHT))
    (part,) = decoded_parts(s)
    assert part.whole
    short = generate("b", lane=ONE)
    started(s, short)
    assert not all(part.whole for _ in range(8) for part in decoded_parts(s))
    s.cancel(short)
    last = next(
        part for _ in range(9) for part in decoded_parts(s) if part.lane.key == EIGHT and part.ends
    )
    assert not last.whole and decoded_parts(s)[0].whole


def test_a_call_holds_as_many_rows_as_it_may_and_no_rung_is_left_out() -> None:
    s = engine(most_lanes=8, decode_rows=4)
    jobs = [generate(f"{key.steps}{i}", lane=key) for key in (ONE, TWO, FOUR) for i in range(3)]
    started(s, *jobs)
    tokens: Counter[int] = Counter()
    for _ in range(120):
        call = decoded_parts(s)
        assert sum(len(part.jobs) for part in call) <= 4
        tokens.update(part.lane.key.steps for part in call if part.ends)
    assert all(tokens[steps] * steps >= 20 for steps in (1, 2, 4))


def test_rungs_that_do_not_mix_take_turns_with_whole_tokens() -> None:
    s = engine(most_lanes=1)
    started(s, *(generate(str(key.steps), lane=key) for key in (ONE, TWO, FOUR)))
    calls = [decoded_parts(s) for _ in range(9)]
    assert all(len(call) == 1 and call[0].whole for call in calls)
    assert Counter(call[0].lane.key for call in calls) == {ONE: 3, TWO: 3, FOUR: 3}


def test_a_rung_that_comes_back_does_not_hold_up_those_that_do_not_mix_with_it() -> None:
    s = engine(most_lanes=1)
    started(s, generate("a", lane=ONE))
    started(s, generate("b", lane=FOUR, tokens=100))
    while s.rows(FOUR):
        s.step()
    for _ in range(3):
        assert decoded_parts(s)[0].lane.key == ONE, "alone for a while"
    started(s, generate("c", lane=FOUR))
    assert Counter(decoded_parts(s)[0].lane.key for _ in range(10)) == {ONE: 5, FOUR: 5}


def test_the_last_row_takes_the_place_of_one_that_leaves() -> None:
    s = engine()
    a, b, c, d = jobs = [generate(name) for name in "abcd"]
    started(s, *jobs)
    assert s.rows(FOUR) == (a, b, c, d)
    s.cancel(a)
    s.cancel(c)
    assert decoded_parts(s)[0].jobs == (b, d)
    # d takes the place of a; then c, where it was, is the last.
    assert s.rows(FOUR) == (d, b)
    assert decoded_parts(s)[0].jobs == (d, b)


def test_a_row_that_left_shows_in_the_next_token() -> None:
    s = engine()
    a, b = generate("a"), generate("b")
    started(s, a, b)
    s.cancel(a)
    assert decoded_parts(s)[0].jobs == (b,)


def test_what_nobody_waits_for_is_dropped_in_the_middle_of_a_token() -> None:
    s = engine(most_lanes=8)
    a, b = generate("a", lane=EIGHT), generate("b", lane=ONE)
    started(s, a, b)
    while any(part.lane.key == EIGHT and part.ends for part in decoded_parts(s)):
        pass
    s.cancel(a)
    (part,) = decoded_parts(s)
    assert part.lane.key == ONE and part.whole and part.jobs == (b,)
    assert s.rows(EIGHT) == () and s.lane(EIGHT).batch is None


def test_what_is_being_read_for_a_job_that_left_is_forgotten() -> None:
    s = engine(pieces=2)
    job = generate("a")
    s.submit(job)
    s.step()
    assert s.cache_bytes > 0
    s.cancel(job)
    assert s.step() is None and s.charged_bytes == s.cache_bytes == 0


def test_a_full_row_is_read_again_before_new_ones() -> None:
    s = engine(decode_rows=2)
    a = generation(FOUR, 5, 100, lambda event: None, window=7, positions=7)
    b = generate("b")
    started(s, a)
    decoded(s)
    s.submit(b)
    while s.rows(FOUR) != ():
        s.step()
    read = [call.jobs[0] for _ in range(4) if (call := s.step()) and call.kind == "prefill"]
    assert read[:2] == [a, b] and a.state is State.RUNNING


def test_new_ones_do_not_starve_behind_rows_that_are_read_again_all_the_time() -> None:
    s = engine(decode_rows=8)
    long = [generation(FOUR, 5, 900, lambda event: None, window=4, positions=4) for _ in range(6)]
    for job in long:
        s.submit(job)
    while any(job.tokens_left > 880 for job in long):
        s.step()
    new = generate("new")
    s.submit(new)
    for _ in range(12):
        s.step()
    assert new.state is not State.QUEUED
    assert not any(job.state is State.ENDED for job in long)


def test_a_prompt_that_fills_the_window_is_read_again_at_once() -> None:
    s = engine()
    a = generation(FOUR, 8, 100, lambda event: None, window=8, positions=8)
    s.submit(a)
    calls = [s.step(), s.step()]
    assert [call.kind for call in calls if call] == ["prefill", "prefill"]
    assert a.state is State.RUNNING


def test_rows_whose_deadline_passes_as_a_call_is_planned_are_not_in_it() -> None:
    s = engine()
    job = generation(
        FOUR, 5, 10_000, lambda event: None, deadline=Deadline(0.0, 1.0), admitted=True
    )
    started(s, job)
    s.now_s = 2.0
    assert s.step() is None, "a call without rows"
    assert job.state is State.ENDED and s.cache_bytes == 0
