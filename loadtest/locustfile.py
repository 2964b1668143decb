"""A load test from start to end. Also by itself: `locust -f loadtest/locustfile.py --host URL`.

Locust finds its users here; loadtest/loops.py has their code. Only Locust's own process imports
this file, since importing Locust patches sockets and threads.
"""

import html
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gevent
from gevent.event import Event
from gevent.hub import get_hub
from locust import events
from locust.env import Environment
from locust.exception import StopTest
from locust.rpc import Message
from locust.runners import MasterRunner, WorkerRunner

from loadtest.loops import END, ENDED, OVER, SENT, SHARE, Caller, Share, Workers, plans, shares
from loadtest.options import add_shared, complaint, terms_of
from loadtest.outcomes import Gauge, Outcome
from loadtest.output import room, say, unwritable
from loadtest.plan import REFUSALS, Plan
from loadtest.report import Report
from loadtest.tables import UNLIMITED, render_text
from loadtest.target import read_key, read_offers

# Once a second: read the gauge and show the progress.


def keep_gauge(gauge: Gauge, is_current: Callable[[], bool]) -> None:
    """As long as the test is the one that runs."""
    while is_current():
        gevent.sleep(1)
        gauge.mark()


def show_progress(plan: Plan, is_current: Callable[[], bool]) -> None:
    """How many answers have come, in one line that is written again and again."""
    begin_s = time.monotonic()
    while is_current() and plan.ended_s is None:
        errors = sum(outcome.error is not None for outcome in plan.outcomes)
        line = f"{time.monotonic() - begin_s:4.0f} s: {len(plan.outcomes)} answers, {errors} errors"
        print(f"\r{line}", end="", file=sys.stderr, flush=True)
        gevent.sleep(1)


# The end of a test: its report is printed and kept, and becomes the exit status.


def publish(report: Report, outcomes: Sequence[Outcome] | None, path: Path | None) -> int:
    """Tell it, and keep it where it is wanted, with each request if given; the exit status."""
    say("\n" + render_text(report, room(UNLIMITED)))
    if path is not None:
        # Draws pictures, which takes a second to load: only who wants them waits for it.
        from loadtest.page import keep

        try:
            keep(report, outcomes, path)
        except OSError as error:
            say(f"The report could not be written to {path}: {error}.", sys.stderr)
            return 2
        say(f"Report written to {path}.")
    return 0 if report.passed else 1


__all__ = ["Caller"]  # what Locust looks for

_LEAD_S, _LEAD_OF_WORKERS_S = 0.5, 2.0  # before the first request is due
_PATIENCE_S = 10.0  # with workers, beyond what they wait for their answers

_gauges: dict[Environment, Gauge] = {}
_workers: dict[Environment, Workers] = {}
_refusals: dict[Environment, str] = {}


def _prepare(environment: Environment, **_: Any) -> None:
    # Timers count from when the loop last looked at the clock: before all the imports.
    get_hub().loop.update_now()
    # Last, so that it is asked before the runner, which would end without its workers' answers.
    environment.events.quitting.add_listener(_quit)
    runner = environment.runner
    if isinstance(runner, WorkerRunner):
        runner.register_message(SHARE, _take_share)
        runner.register_message(END, _end_worker, concurrent=True)
    elif runner is not None:
        runner.register_message(SENT, _take_sent)
        runner.register_message(ENDED, _take_ended)
    if environment.web_ui is not None and environment.web_ui.app is not None:
        pages = environment.web_ui.app
        pages.add_url_rule("/steps", "steps", lambda: _report_page(environment))


def _report_page(environment: Environment) -> str:
    plan = plans.get(environment)
    if plan is None:
        return html.escape(_refusals.get(environment, "No test has been started yet."))
    # Draws pictures, which takes a second to load: only who looks at them waits for it.
    from loadtest.page import render_html

    return render_html(_report(environment, plan))


def _start(environment: Environment, **_: Any) -> None:
    for kept in (plans, _gauges, _workers, _refusals):
        kept.pop(environment, None)
    options, runner = environment.parsed_options, environment.runner
    assert options is not None, "Locust always parses its command line"
    try:
        if wrong := complaint(options):
            raise StopTest(wrong)
        begun_s = time.monotonic()
        terms = terms_of(options, environment.host)
        sender = max(runner.worker_index, 0) if isinstance(runner, WorkerRunner) else 0
        plan = Plan(terms, read_offers(terms.url, read_key(terms.api_key_file)), sender)
        if not isinstance(runner, WorkerRunner):
            if options.out and (wrong := unwritable(Path(options.out))):
                raise StopTest(wrong)
            _prepare_senders(environment, plan, time.monotonic() - begun_s)
    except (StopTest, *REFUSALS) as error:
        environment.process_exit_code = 2
        _refusals[environment] = str(error)
        raise StopTest(str(error)) from None
    plans[environment] = plan
    if not isinstance(runner, MasterRunner):
        _gauges[environment] = gauge = Gauge()
        gevent.spawn(keep_gauge, gauge, lambda: plans.get(environment) is plan)
    if sys.stderr.isatty() and not isinstance(runner, WorkerRunner):
        gevent.spawn(show_progress, plan, lambda: plans.get(environment) is plan)


def _prepare_senders(environment: Environment, plan: Plan, took_s: float) -> None:
    runner = environment.runner
    assert runner is not None, "a test that starts has a runner"
    workers = Workers(runner) if isinstance(runner, MasterRunner) else None
    if workers is not None:
        _workers[environment] = workers
    senders = len(workers.names) if workers else 1
    if not plan.terms.open:
        if workers is not None and plan.terms.requests is not None:
            if runner.target_user_count < senders:
                raise StopTest(f"--requests needs a user in each process that sends: -u {senders}.")
            workers.share_out(time.time())
            gevent.spawn(_finish_when_sent, environment, plan, workers)
        return
    if senders > (plan.terms.max_in_flight or senders):
        raise StopTest(f"--max-in-flight is shared by {senders} processes: it must be as many.")
    if runner.target_user_count != senders:
        raise StopTest(
            f"An open loop has one user in each process that sends: -u {senders}, "
            f"not -u {runner.target_user_count}."
        )
    lead_s = _LEAD_S
    if isinstance(runner, MasterRunner):
        # Each worker first makes the same plan, which may take it longer than it took here. Locust
        # starts its user, who sends, one after another: by itself one a second.
        lead_s = _LEAD_OF_WORKERS_S + 2 * took_s + (senders - 1) / runner.spawn_rate
    plan.begin_s = time.time() + lead_s
    if workers is None:
        shares[environment] = Share(0, 1, plan.begin_s)
    else:
        workers.share_out(plan.begin_s)
        gevent.spawn(_finish_when_sent, environment, plan, workers)


def _take_share(environment: Environment, msg: Message, **_: Any) -> None:
    shares[environment] = Share.from_wire(msg.data)


def _take_sent(environment: Environment, msg: Message, **_: Any) -> None:
    if workers := _workers.get(environment):
        workers.has_sent(msg.node_id)
    else:
        gevent.spawn(_finish, environment)


def _finish_when_sent(environment: Environment, plan: Plan, workers: Workers) -> None:
    workers.await_sent(lambda: plan.ended_s is not None)
    if plan.ended_s is None:
        _finish(environment)


def _finish(environment: Environment) -> None:
    runner = environment.runner
    if runner is not None and runner.state not in OVER:
        (runner.quit if environment.web_ui is None else runner.stop)()


def _count_users(user_count: int, **_: Any) -> None:
    for plan in plans.values():
        plan.users = max(plan.users, user_count)


def _stopping(environment: Environment, **_: Any) -> None:
    plan, workers = plans.get(environment), _workers.get(environment)
    if plan is None or plan.ended_s is not None:
        return
    plan.ended_s = time.time()
    if workers is not None:
        plan.lost = workers.dismiss((environment.stop_timeout or 0.0) + _PATIENCE_S)


def _end_worker(environment: Environment, msg: Message, **_: Any) -> None:
    runner = environment.runner
    assert isinstance(runner, WorkerRunner), "only workers are told to end"
    if msg.data["at_once"]:
        runner.user_greenlets.kill(block=False)
        return
    runner.stop()
    # Locust would have this worker rest for so long before it can take part in another test.
    environment.stop_timeout = 0.0
    data: dict[str, Any] = {}
    _hand_over(data)
    runner.send_message(ENDED, data)


def _take_ended(environment: Environment, msg: Message, **_: Any) -> None:
    _take_over(msg.data, msg.node_id)
    _workers[environment].has_ended(msg.node_id)


def _stop(environment: Environment, **_: Any) -> None:
    plan = plans.get(environment)
    if plan is not None and not isinstance(environment.runner, WorkerRunner):
        try:
            _publish(environment, plan)
        except BaseException:
            environment.process_exit_code = 2
            raise
        finally:
            plan.published = True  # what ends the test waits for it
        workers, runner = _workers.get(environment), environment.runner
        gone = workers is not None and workers.is_gone
        if gone and runner is not None and not environment.web_ui:
            # Locust would wait for workers that may come back.
            gevent.spawn(runner.quit)


def _quit(environment: Environment, **_: Any) -> None:
    plan, runner = plans.get(environment), environment.runner
    if runner is None or isinstance(runner, WorkerRunner):
        return
    if plan is None:
        if environment.web_ui is None and environment.process_exit_code is None:
            say("Ended before the test began.", sys.stderr)
            environment.process_exit_code = 2
    elif plan.ended_s is None:
        plan.interrupted = True
        say("Interrupted: waiting for answers that are due; once more, without.", sys.stderr)
        runner.stop()
    elif not plan.published:
        if workers := _workers.get(environment):
            workers.tell_to_end(at_once=True)
        else:
            runner.user_greenlets.kill(block=False)
        while not plan.published:
            gevent.sleep(0.02)
    if gevent.getcurrent() is not get_hub().parent:
        # Asked by a signal: Locust would now exit here and, since nothing runs any more, there.
        runner.quit()
        if environment.web_ui is not None:
            environment.web_ui.stop()
        Event().wait()


def _publish(environment: Environment, plan: Plan) -> None:
    report, options = _report(environment, plan), environment.parsed_options
    out = Path(options.out) if options is not None and options.out else None
    outcomes = plan.outcomes if options is not None and options.keep_requests else None
    environment.process_exit_code = publish(report, outcomes, out)


def _hand_over(data: dict[str, Any], **_: Any) -> None:
    for environment, plan in plans.items():
        data |= plan.hand_over(_gauges[environment].read())


def _take_over(data: dict[str, Any], client_id: str, **_: Any) -> None:
    for plan in plans.values():
        plan.take_over(data, client_id)


def _report(environment: Environment, plan: Plan) -> Report:
    if environment.runner is not None:
        plan.users = max(plan.users, environment.runner.target_user_count)
    if environment in _gauges:
        plan.note("local", plan.due, _gauges[environment].read())
    return plan.report(time.time())


events.init_command_line_parser.add_listener(lambda parser: add_shared(parser, "--answer-timeout"))
events.init.add_listener(_prepare)
events.test_start.add_listener(_start)
events.test_stopping.add_listener(_stopping)
events.test_stop.add_listener(_stop)
events.spawning_complete.add_listener(_count_users)
events.report_to_master.add_listener(_hand_over)
events.worker_report.add_listener(_take_over)
