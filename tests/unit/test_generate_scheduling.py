"""The scheduler's order of generations: reading, mixing, endings."""

from collections import Counter

import pytest

from serve.engine.job import ClassifyCall, DecodeCall, DecodePart, Job, LaneKey, PrefillCall, State
from tests.generation_jobs import (
    CLASSIFY,
    EIGHT,
    FOUR,
    ONE,
    TWO,
    decoded,
    generate,
    parts,
    run,
    scheduler,
    started,
)


def test_a_generation_is_read_in_pieces_and_then_decoded() -> None:
    s = scheduler()
    job = generate("a")
    s.add(job, 0.0)
    for _ in range(3):
        assert s.next(0.5) == PrefillCall(FOUR, (), job)
    assert (job.state, job.queued_s, job.started_s) == (State.RUNNING, 0.0, 0.5)
    s.prefilled(job, full=False)
    assert s.next(1.0) == DecodeCall((DecodePart(FOUR, (), (job,), (job,)),))
    for _ in range(3):
        assert s.next(1.0) == DecodeCall((DecodePart(FOUR, (), (), (job,)),))
    assert s.end(job)
    assert s.evict(FOUR) == (0,)
    assert s.next(1.0) is None
    assert (s.queued, s.running, s.charged_bytes) == (0, 0, 0)


def test_reading_and_decoding_take_turns_piece_by_piece() -> None:
    s = scheduler()
    started(s, generate("a"))
    s.add(generate("b"), 0.0)
    kinds = [type(run(s, pieces=9)).__name__ for _ in range(8)]
    assert sorted(kinds[:2]) == ["DecodeCall", "PrefillCall"] and kinds == kinds[:2] * 4


def test_prompts_of_all_rungs_are_read_by_turns_so_that_none_waits_for_a_longer_one() -> None:
    s = scheduler(most_lanes=8)
    long, behind = generate("l", lane=EIGHT), generate("b", lane=EIGHT)
    short = generate("s", lane=ONE)
    for job in (long, behind, short):
        s.add(job, 0.0)
    read = [call.job for _ in range(6) if isinstance(call := run(s, pieces=9), PrefillCall)]
    assert Counter(job.work for job in read if job) == {"l": 3, "s": 3}
    assert behind.state is State.QUEUED, "one of a rung at a time"


def test_models_and_kinds_take_turns() -> None:
    s = scheduler(batch_rows=1)
    other = LaneKey("h", "generate", 1)
    started(s, generate("g"), generate("h", lane=other))
    s.add(Job(CLASSIFY, "c", (10,) * 50), 0.0)
    seen: Counter[str] = Counter()
    for _ in range(15):
        call = run(s)
        if isinstance(call, ClassifyCall):
            seen["c"] += 1
        elif isinstance(call, DecodeCall):
            seen[call.parts[0].lane.model] += 1
    assert seen == {"c": 5, "g": 5, "h": 5}


def test_rungs_share_calls_and_each_gets_its_tokens() -> None:
    s = scheduler(most_lanes=8)
    started(s, *(generate(str(key.steps), lane=key) for key in (ONE, TWO, FOUR, EIGHT)))
    tokens: Counter[int] = Counter()
    rows = 0
    for _ in range(80):
        call = decoded(s)
        rows += len(call.parts)
        tokens.update(part.lane.steps for part in call.parts if part.ends)
    assert [tokens[steps] for steps in (8, 4, 2, 1)] == [10, 20, 40, 80]
    assert rows == 4 * 80, "all fit into one call"


def test_rungs_that_do_not_fit_into_one_call_have_shares_of_them() -> None:
    s = scheduler(most_lanes=2)
    started(s, *(generate(str(key.steps), lane=key) for key in (ONE, TWO, FOUR, EIGHT)))
    tokens: Counter[int] = Counter()
    for _ in range(230):  # 23 calls of one lane each: 8 of 8 and of 4 steps, 4 of 2, 3 of 1
        call = decoded(s)
        assert len(call.parts) == 2
        tokens.update(part.lane.steps for part in call.parts if part.ends)
    evaluations = [tokens[steps] * steps for steps in (8, 4, 2, 1)]
    assert evaluations == pytest.approx([160, 160, 80, 60], rel=0.15)


def test_the_calls_of_a_token_come_one_after_the_other_with_the_same_rows() -> None:
    s = scheduler(most_lanes=8)
    a, b = generate("a", lane=TWO), generate("b", lane=FOUR)
    started(s, a, b)
    while not decoded(s).parts[0].ends:
        pass
    s.add(generate("c", lane=FOUR), 0.0)
    under_way: dict[LaneKey, tuple[int, tuple[Job[str], ...]]] = {}
    for _ in range(40):
        call = run(s)
        if not isinstance(call, DecodeCall):
            continue
        for part in call.parts:
            calls, rows = under_way.pop(part.lane, (0, part.jobs))
            if calls or not part.begins:
                assert not part.begins and not part.evict and not part.join and rows == part.jobs
            if not part.ends:
                under_way[part.lane] = calls + 1, part.jobs


def test_a_new_row_of_one_step_starts_at_once_among_longer_ones() -> None:
    s = scheduler(most_lanes=8)
    started(s, generate("a", lane=EIGHT), generate("b", lane=FOUR))
    for _ in range(21):
        run(s)
    new = generate("n", lane=ONE)
    s.add(new, 0.0)
    calls = 0
    while new not in s.rows(ONE):
        run(s)
        calls += 1
    assert calls <= 3


def test_a_rung_alone_gets_whole_tokens() -> None:
    s = scheduler(most_lanes=8)
    started(s, generate("a", lane=EIGHT))
    (part,) = parts(run(s))
    assert part.whole
    short = generate("b", lane=ONE)
    started(s, short)
    assert not all(part.whole for _ in range(8) for part in decoded(s).parts)
    s.end(short)
    last = next(
        part for _ in range(9) for part in decoded(s).parts if part.lane == EIGHT and part.ends
    )
    assert not last.whole and parts(run(s))[0].whole


def test_a_call_holds_as_many_rows_as_it_may_and_no_rung_is_left_out() -> None:
    s = scheduler(most_lanes=8, decode_rows=4)
    jobs = [generate(f"{key.steps}{i}", lane=key) for key in (ONE, TWO, FOUR) for i in range(3)]
    started(s, *jobs)
    tokens: Counter[int] = Counter()
    for _ in range(120):
        call = decoded(s)
        assert sum(len(part.jobs) for part in call.parts) <= 4
        tokens.update(part.lane.steps for part in call.parts if part.ends)
    assert all(tokens[steps] * steps >= 20 for steps in (1, 2, 4))


def test_rungs_that_do_not_mix_take_turns_with_whole_tokens() -> None:
    s = scheduler(most_lanes=1)
    started(s, *(generate(str(key.steps), lane=key) for key in (ONE, TWO, FOUR)))
    calls = [decoded(s) for _ in range(9)]
    assert all(len(call.parts) == 1 and call.parts[0].whole for call in calls)
    assert Counter(call.parts[0].lane for call in calls) == {ONE: 3, TWO: 3, FOUR: 3}


def test_rungs_that_could_mix_take_turns_where_that_is_quicker() -> None:
    s = scheduler(most_lanes=8)
    started(s, *(generate(str(key.steps), lane=key) for key in (ONE, TWO, FOUR)))
    for _ in range(5):
        assert decoded(s).contended
    s.share("g", "alternating")
    calls = [decoded(s) for _ in range(30)]
    under_way = [call for call in calls if not call.parts[0].whole]
    assert all(len(call.parts) == 1 for call in calls) and len(under_way) <= 5
    assert calls[: len(under_way)] == under_way, "tokens that are under way come first"
    tokens = Counter(call.parts[0].lane for call in calls if call.parts[0].whole)
    assert max(tokens.values()) - min(tokens.values()) <= 2
    s.share("g", "shared")
    assert any(len(decoded(s).parts) > 1 for _ in range(4))


def test_what_a_rung_was_ahead_is_over_when_the_cores_are_shared_otherwise() -> None:
    s = scheduler(most_lanes=8, sides=2)
    started(s, *(generate(str(key.steps), lane=key) for key in (ONE, EIGHT)))
    s.share("g", "parallel")
    for _ in range(40):
        decoded(s)
    s.share("g", "alternating")
    under_way_too = [decoded(s) for _ in range(20)]
    lanes = Counter(call.parts[0].lane for call in under_way_too if call.parts[0].whole)
    assert abs(lanes[ONE] - lanes[EIGHT]) <= 1


def test_rows_keep_the_numbers_of_the_batch() -> None:
    s = scheduler()
    a, b, c, d = jobs = [generate(name) for name in "abcd"]
    started(s, *jobs)
    assert s.rows(FOUR) == (a, b, c, d)
    s.end(a)
    s.end(c)
    # d takes the place of a; then c, where it was, is the last.
    assert s.evict(FOUR) == (0, 2)
    assert s.rows(FOUR) == (d, b)


def test_a_row_that_left_shows_in_the_next_token() -> None:
    s = scheduler()
    a, b = generate("a"), generate("b")
    started(s, a, b)
    s.end(a)
    assert parts(decoded(s)) == (DecodePart(FOUR, (0,), (), (b,)),)


def test_the_last_row_that_left_still_gets_its_memory_freed() -> None:
    s = scheduler()
    job = generate("a")
    started(s, job)
    s.end(job)
    assert s.charged_bytes > 0
    assert s.next(0.0) == DecodeCall((DecodePart(FOUR, (0,), (), ()),))
    assert s.charged_bytes == 0 and s.next(0.0) is None


def test_what_nobody_waits_for_is_dropped_in_the_middle_of_a_token() -> None:
    s = scheduler(most_lanes=8)
    a, b = generate("a", lane=EIGHT), generate("b", lane=ONE)
    started(s, a, b)
    while any(part.lane == EIGHT and part.ends for part in decoded(s).parts):
        pass
    s.end(a)
    assert parts(decoded(s)) == (DecodePart(EIGHT, (), (), (), lost=True),)
    assert parts(decoded(s)) == (DecodePart(ONE, (), (), (b,)),)


def test_what_is_being_read_for_a_job_that_left_is_forgotten() -> None:
    s = scheduler()
    job = generate("a")
    s.add(job, 0.0)
    s.next(0.0)
    s.end(job)
    assert s.next(0.0) == PrefillCall(FOUR, (job.number,), None)
    assert s.next(0.0) is None and s.charged_bytes == 0


def test_a_full_row_is_read_again_before_new_ones() -> None:
    s = scheduler(decode_rows=2)
    a, b = generate("a"), generate("b")
    started(s, a)
    s.add(b, 0.0)
    s.prefill_again(a)
    assert s.evict(FOUR) == (0,)
    again = run(s)
    assert isinstance(again, PrefillCall) and again.job is a and a.state is State.RUNNING
    fresh = next(call for _ in range(3) if isinstance(call := run(s), PrefillCall))
    assert fresh.job is b


def test_a_prompt_that_fills_the_window_is_read_again_at_once() -> None:
    s = scheduler()
    a = generate("a")
    s.add(a, 0.0)
    s.next(0.0)
    s.prefilled(a, full=True)
    assert s.prefills_over(FOUR) == (a.number,)
    assert s.next(0.0) == PrefillCall(FOUR, (), a)
